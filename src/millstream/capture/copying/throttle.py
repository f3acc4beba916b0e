"""How much a copy reads at once, and how soon again: chunks of about a second, of few bytes, under the rate that is allowed.

A chunk is a transaction at the source: while it lasts, nothing that it may see can be vacuumed away. So chunks aim at a time,
and what they hold is bounded by bytes, for nobody knows how wide the next rows are. Pure: moments come in from outside.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

AIM_S: Final = 1.0
"""A chunk's time at the source: long beside a round trip, short beside anybody's vacuum."""
AIM_BYTES: Final = 8 << 20
"""A chunk's text; its columns and its text take some three times as much."""
_FIRST_ROWS: Final = 10_000
"""How fast a table reads is known after its first chunk."""
_LEAST_ROWS: Final = 100
"""Fewer a chunk would cost a round trip more than they spare."""
_GROWS_BY: Final = 2
_SHRINKS_BY: Final = 4
_LEAST_AIM_BYTES: Final = 64 << 10
CUT_AT: Final = 2
"""A chunk's text is cut off at so many times its aim: rows that are wider than those before."""
OPEN_BYTES_MAX: Final = 32 << 20
"""Text of all chunks from the start of their reading until they are durable; it takes three times as much memory."""


@dataclass(slots=True)
class ChunkSizes:
    """How many rows a table's next chunk asks for."""

    rows_max: int
    """As configured."""
    width: float = 0.0
    """Bytes of a row's text, as far as is known."""
    _rows: int = field(init=False)

    def __post_init__(self) -> None:
        """Begin small."""
        self._rows = max(1, min(self.rows_max, _FIRST_ROWS))

    def rows(self, aim_bytes: int = AIM_BYTES) -> int:
        """Rows of the next chunk, one at least."""
        return max(1, min(self._rows, int(aim_bytes / max(1.0, self.width))))

    def size_bytes(self, rows: int | None) -> int:
        """Bytes of so many rows' text; 0 if that isn't known yet."""
        return int((rows or 0) * self.width)

    def note(self, rows: int, size_bytes: int, seconds: float) -> None:
        """A chunk of so many rows was read in so much time."""
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
    """Bytes a second that all workers together may read. What was read is owed, and nobody reads while anything is."""

    bytes_per_s: int | None = None
    """None: as fast as it goes."""
    _owed: float = 0.0
    _at_s: float = 0.0

    def allow(self, bytes_per_s: int | None, now_s: float) -> None:
        """Another rate from here on; what is owed is paid at it."""
        self._pay(now_s)
        self.bytes_per_s = bytes_per_s

    def note(self, size_bytes: int, now_s: float) -> None:
        """So much was read."""
        self._pay(now_s)
        self._owed += size_bytes

    def wait_s(self, now_s: float) -> float:
        """How long nothing may be read."""
        self._pay(now_s)
        return self._owed / self.bytes_per_s if self.bytes_per_s else 0.0

    def aim_bytes(self, workers: int) -> int:
        """A chunk's aim: small if many workers share the memory, or if the rate is low, so that reads come evenly."""
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
    """Text that copies hold in memory, counted from before a chunk is read: workers that read side by side know of each other."""

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
        """The chunk was read, or wasn't."""
        self._reading -= size_bytes
