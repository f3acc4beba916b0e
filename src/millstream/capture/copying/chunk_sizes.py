"""The rows of a copy's next chunk: as many as take about a second and few bytes.

A chunk is a transaction at the source: while it lasts, vacuum can't remove any row that it may see. So chunks aim at
a time. Their size is bounded in bytes, because the width of the next rows isn't known. Pure: the caller passes the
times in.
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
CUT_AT: Final = 2
"""A chunk's text is cut off at so many times its aim, if rows are wider than those before."""


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
