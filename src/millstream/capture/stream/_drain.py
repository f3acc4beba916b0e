"""Machine code that reads a socket for as long as something comes, without Python and the GIL for each read.

The source sends each message alone and waits as soon as the socket is full, half a millisecond after we stop reading.
That is too short to queue for the interpreter while our own decoding has it. And a thread that sleeps until bytes
come is woken for each message, which costs the sender as much as sending it. So the reader naps after a small read,
and then takes what has come, over and over.

Only modules that are imported lazily may use this.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from millstream.codec.machine_code import compiled

# From the C library that every process has; by name, not by address, so that the machine code can be kept on disk.
_recv: Any = types.ExternalFunction("recv", types.intp(types.int32, types.uintp, types.uintp, types.int32))
_usleep: Any = types.ExternalFunction("usleep", types.int32(types.uint32))


@compiled
def drain(descriptor: int, memory: Any, filled: int, limit: int, small: int, nap_us: int, turns: int) -> Any:
    """Read into `memory[filled:limit]` until that is full, or nothing came in a nap, or `turns` reads are done.

    Args:
        descriptor: a socket that doesn't block.
        limit: end up to which to fill it.
        small: size below which a read is followed by a nap.
        nap_us: length of a nap, in microseconds.
        turns: most reads.

    Returns:
        Number of bytes that are there now. The reason why a read returned nothing isn't: the next read meets it again.
    """
    place = memory.ctypes.data
    naps = False
    for _ in range(turns):
        if filled >= limit:
            break
        if naps:
            _usleep(nap_us)
        count = _recv(descriptor, place + filled, limit - filled, 0)
        if count <= 0 and naps:
            break
        filled += max(count, 0)
        naps = count < small
    return filled


def compile_drain() -> None:
    """Compile the function now, or load it: milliseconds that the first read would take."""
    drain(-1, np.empty(0, np.uint8), 0, 0, 0, 0, 0)
