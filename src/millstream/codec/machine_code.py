"""How functions become machine code: numba, kept on disk where that can be done.

numba looks for a place to keep machine code when a function is *decorated*, and fails there where package and HOME are
both read-only; then it is compiled anew in each process. Only modules that are imported lazily may use this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """The function in machine code, run without the GIL; compiled at its first call."""
    try:
        made = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no locator available: nowhere to keep it
        made = numba.njit(cache=False, nogil=True)(function)
    return cast("Function", made)


def inlined(function: Function) -> Function:
    """A small function for use in compiled ones; it has no entry of its own on disk."""
    return cast("Function", numba.njit(cache=False, nogil=True, inline="never")(function))
