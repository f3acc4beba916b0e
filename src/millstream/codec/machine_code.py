"""Compilation of functions to machine code by numba, cached on disk if possible.

numba looks for a cache directory when a function is *decorated*, and fails if package and HOME are
both read-only. Then each process compiles the function again. Only modules that are imported lazily
may use this.

A cached file that a full disk or a power cut has damaged counts as none: numba would pass on what its reader raises.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Return the function in machine code, run without the GIL; compiled at its first call."""
    try:
        made: Any = numba.njit(cache=True, nogil=True)(function)
        if (
            cache := getattr(made, "_cache", None)
        ) is not None:  # numba has no public way; with NUMBA_DISABLE_JIT there is none
            cache.load_overload = partial(_load, cache)
    except RuntimeError:  # no locator available: no place to cache it
        made = numba.njit(cache=False, nogil=True)(function)
    return cast("Function", made)


def _load(cache: Any, signature: Any, context: Any) -> Any:
    """Return a function's machine code from its cache; None, and an empty cache, if that is damaged."""
    try:
        return type(cache).load_overload(cache, signature, context)
    except Exception:  # noqa: BLE001 - of pickle, LLVM or the file, whatever its bytes lead to
        with suppress(OSError):
            cache.flush()
        return None


def inlined(function: Function) -> Function:
    """Return a small function for use in compiled ones; it has no cache file of its own."""
    return cast("Function", numba.njit(cache=False, nogil=True, inline="never")(function))
