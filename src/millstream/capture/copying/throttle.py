"""How much a copy reads at once, and how soon again: chunks of about a second, of few bytes, within the allowed rate.

A chunk is a transaction at the source: while it lasts, vacuum can't remove any row that it may see. So chunks aim at
a time. Their size is bounded in bytes, because the width of the next rows isn't known. Pure: the caller passes the
time in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

AIM_S: Final = 1.0
"""A chunk's time at the source: long next to a round trip, short next to any vacuum."""
AIM_BYTES: Final = 8 << 20
"""Size of a chunk's text; its columns and its text take some three times as much."""
_FIRST_ROWS: Final = 10_000
"""Rows of the first chunk, after which a table's speed is known."""
_LEAST_ROWS: Final = 100
"""Smaller chunks would cost a round trip more than they save."""
_GROWS_BY: Final = 2
_SHRINKS_BY: Final = 4
_LEAST_AIM_BYTES: Final = 64 << 10
CUT_AT: Final = 2
"""A chunk's text is cut off at so many times its aim, if rows are wider than those before."""
OPEN_BYTES_MAX: Final = 32 << 20
"""Text of all chunks from the start of their reading until they are durable; it takes three times as much memory."""


@dataclass(slots=True)
class ChunkSizes:
    """The number of rows of a table's next chunk."""

    rows_max: int
    """The configured limit."""
    width: float = 0.0
    """Bytes of a row's text, as far as is known."""
    _rows: int = field(init=False)

    def __post_init__(self) -> None:
        """Begin with a small chunk."""
        self._rows = max(1, min(self.rows_max, _FIRST_ROWS))

    def rows(self, aim_bytes: int = AIM_BYTES) -> int:
        """Return the rows of the next chunk, at least one."""
        return max(1, min(self._rows, int(aim_bytes / max(1.0, self.width))))

    def size_bytes(self, rows: int | None) -> int:
        """Return the size of so many rows' text; 0 if that isn't known so far."""
        return int((rows or 0) * self.width)

    def note(self, rows: int, size_bytes: int, seconds: float) -> None:
        """Note the rows, size and reading time of a chunk."""
        if not rows:
            return
        self.width = size_bytes / rows
        if seconds <= AIM_S:
            self._rows = min(self.rows_max, self._rows * _GROWS_BY)
        else:
            least = min(self.rows_max, _LEAST_ROWS)
            self._rows = max(least, self._rows // _SHRINKS_BY, int(rows * AIM_S / seconds))
            self._rows = min(self._rows, self.rows_max)


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
