"""Frames that were read one after the other, gathered until the records are worth the cost of a batch."""

from __future__ import annotations

from typing import Final

from millstream.model.ids import Epoch, SchemaVersion, TableId
from millstream.model.positions import Offset
from millstream.wal.reading.table_records import TableRecords, joined

PIECE_ROWS: Final = 256
PIECE_FRAMES: Final = 64
"""Received records, or frames, from which on a piece is whole: more would save little, and keep other calls waiting."""


class Frames:
    """The records of frames that were read one after the other."""

    def __init__(self) -> None:
        self.parts: list[TableRecords] = []
        self.count = 0
        self._rows = 0

    @property
    def are_enough(self) -> bool:
        """Whether they are worth the cost of a batch, which is that of a thousand rows."""
        return self._rows >= PIECE_ROWS or self.count >= PIECE_FRAMES

    def are_whole_before(self, part: TableRecords) -> bool:
        """Return whether a part that was read next is another frame's."""
        return bool(self.parts) and part.frame_offset != self.parts[-1].frame_offset

    def append(self, part: TableRecords) -> None:
        """Add a frame's part."""
        if not self.parts or self.are_whole_before(part):
            self.count += 1
        self.parts.append(part)
        self._rows += part.batch.num_rows

    def drop_from(self, offset: Offset) -> None:
        """Drop the parts that were read of a damaged frame, which begins at or behind an offset."""
        if self.parts and offset <= (damaged := self.parts[-1].frame_offset):
            self.parts = [part for part in self.parts if part.frame_offset != damaged]
            self.count -= 1

    def by_table(self) -> list[TableRecords]:
        """Return the parts, with those of one table and version as one."""
        tables: dict[tuple[TableId, SchemaVersion, Epoch], list[TableRecords]] = {}
        for part in self.parts:
            tables.setdefault((part.schema.table_id, part.schema.version, part.epoch), []).append(part)
        return [joined(some) for some in tables.values()]
