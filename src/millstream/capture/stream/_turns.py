"""Shorter turns on the CPU for a thread that others wait for.

The source's server process blocks as soon as its socket is full, half a millisecond after we stop reading. If the
CPUs are busy (with our own decoding, on two cores), Linux makes a thread that wakes wait for some 3 ms. That would
halt the source ten times a
second: a tenth of the throughput. A thread that asks for short turns runs sooner, with no larger share in total.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
import sys
import threading
from typing import Final

_TURN_NS: Final = 100_000  # the shortest that Linux grants
_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES: Final = struct.Struct("IIQiIQQQ")
"""`struct sched_attr`, version 0: size, policy, flags, nice, priority, runtime, deadline, period; see sched_setattr(2)."""


def ask_for_short_turns() -> bool:
    """Ask for short turns of this thread, of ordinary priority; return whether they were granted.

    Linux honours the request from 6.12 on, from any user. Elsewhere nothing happens.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return False
    with contextlib.suppress(OSError, AttributeError):
        nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, _TURN_NS, 0, 0)
        return bool(ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0)
    return False
