"""How soon a copy reads again: within the allowed rate, and within the memory of all workers together.

Pure: the caller passes the time in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from millstream.capture.copying.chunk_sizes import AIM_BYTES, AIM_S, CUT_AT

_LEAST_AIM_BYTES: Final = 64 << 10
OPEN_BYTES_MAX: Final = 32 << 20
"""Text of all chunks from the start of their reading until they are durable; it takes three times as much memory."""
ROOM_WAIT_S: Final = 0.02
"""Time after which a worker asks again whether there is room: about a chunk's decoding."""


@dataclass(slots=True)
class CopyRate:
    """Bytes a second that all workers together may read. Bytes read are a debt; no worker reads while there is one."""

    bytes_per_s: int | None = None
    """None: as fast as possible."""
    _owed: float = 0.0
    _at_s: float = 0.0

    def allow(self, bytes_per_s: int | None, now_s: float) -> None:
        """Set another rate from here on; the debt is paid at it."""
        self._pay(now_s)
        self.bytes_per_s = bytes_per_s

    def note(self, size_bytes: int, now_s: float) -> None:
        """Note bytes that were read."""
        self._pay(now_s)
        self._owed += size_bytes

    def wait_s(self, now_s: float) -> float:
        """Return how long nothing may be read."""
        self._pay(now_s)
        return self._owed / self.bytes_per_s if self.bytes_per_s else 0.0

    def aim_bytes(self, workers: int) -> int:
        """Return a chunk's aim: small if many workers share the memory; at a low rate too, so that reads come evenly."""
        most = min(AIM_BYTES, OPEN_BYTES_MAX // (CUT_AT * workers))
        if self.bytes_per_s:
            most = min(most, int(self.bytes_per_s * AIM_S / workers))
        return max(_LEAST_AIM_BYTES, most)

    def _pay(self, now_s: float) -> None:
        passed_s = max(0.0, now_s - self._at_s)
        self._at_s = max(self._at_s, now_s)
        self._owed = max(0.0, self._owed - passed_s * self.bytes_per_s) if self.bytes_per_s else 0.0


@dataclass(slots=True)
class OpenBytes:
    """Text that copies hold in memory, counted from before a chunk is read: parallel workers see each other's."""

    _reading: int = 0

    def reserve(self, size_bytes: int, *, held: int) -> bool:
        """Count a chunk that is about to be read, next to `held` bytes of chunks that were; False if there is no room for it.

        A chunk may always be read if nothing else is open, whatever its size.
        """
        open_bytes = self._reading + held
        if open_bytes and open_bytes + size_bytes > OPEN_BYTES_MAX:
            return False
        self._reading += size_bytes
        return True

    def release(self, size_bytes: int) -> None:
        """Release the bytes of a chunk that was read, or couldn't be."""
        self._reading -= size_bytes
