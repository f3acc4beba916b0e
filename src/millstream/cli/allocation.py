"""How the C library's malloc serves a process of Millstream's, so that what it holds depends on what is in use."""

from __future__ import annotations

import ctypes
from typing import Final

MAPPED_FROM_BYTES: Final = 1 << 20
"""Buffers from here on are mapped one by one and go back to the system when they are freed. Text of a copy and frames of a log
come in such sizes; a map costs microseconds, what is done with a megabyte costs milliseconds."""
_M_MMAP_THRESHOLD: Final = -3


def return_large_buffers() -> None:
    """Have every large buffer go back to the system as soon as it is freed; does nothing without glibc.

    glibc raises its threshold for maps to the size of each map that is freed, up to 32 MiB. From then on such buffers come out of
    arenas, one for each thread. There a small block that still lives keeps many freed megabytes behind it, and how much that is depends on
    which thread was served first. A threshold that is set stays where it is.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES)
