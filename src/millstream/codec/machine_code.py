"""Compilation of functions to machine code by numba, cached on disk if possible.

numba looks for a cache directory when a function is *decorated*, and fails if package and HOME are
both read-only. Then each process compiles the function again. Only modules that are imported lazily
may use this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Return the function in machine code, run without the GIL; compiled at its first call."""
    try:
        made = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no locator available: no place to cache it
        made = numba.njit(cache=False, nogil=True)(function)
    return cast("Function", made)


def inlined(function: Function) -> Function:
    """Return a small function for use in compiled ones; it has no cache file of its own."""
    return cast("Function", numba.njit(cache=False, nogil=True, inline="never")(function))
