"""Settings of the C library's malloc, so that a process holds only as much memory as it uses."""

from __future__ import annotations

import ctypes
from typing import Final

MAPPED_FROM_BYTES: Final = 1 << 20
"""Size in bytes from which buffers are mapped one by one and go back to the system when they are freed. Text
of a copy and frames of a log have such sizes; a map costs microseconds, processing a megabyte
milliseconds."""
_M_MMAP_THRESHOLD: Final = -3


def return_large_buffers() -> None:
    """Have every large buffer go back to the system as soon as it is freed; does nothing without glibc.

    glibc raises its threshold for maps to the size of each map that is freed, up to 32 MiB. From then on
    such buffers come out of arenas, one for each thread. There a small live block keeps many freed
    megabytes after it, and how much that is depends on which thread was served first. A threshold that is
    set explicitly stays.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES)
