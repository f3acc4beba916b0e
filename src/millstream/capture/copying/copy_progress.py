"""The state of one table's running copy: its stage, its pauses and its progress over all ranges."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final

from millstream.capture.config import CHUNK_ROWS
from millstream.capture.copying.chunk_sizes import ChunkSizes
from millstream.capture.copying.copied_file import CopiedFile
from millstream.capture.copying.key_ranges import FIRST_KEYS_RANGE, KEYS_MAX, OpenChunk, Range
from millstream.capture.source_tables import SourceTable
from millstream.catalog import COPY_HELD, CopyChunk, TableRow
from millstream.model.ids import TableId
from millstream.model.names import qualified_name
from millstream.model.positions import Lsn
from millstream.model.rates import Rate
from millstream.protocol.copy_conflicts import CopyTracker, Key

_ROW_HEADER_BYTES: Final = 28


def fresh_copy_id() -> str:
    """Return an id that no copy had before: a thread of an earlier copy may still write under its own."""
    return f"{time.time_ns() // 1000:x}"


class Stage(Enum):
    """The stage of a copy."""

    WAITING = auto()
    """It begins with the applier's next step."""
    PREPARING = auto()
    """Its changes are tracked; transactions that ran before have to end first."""
    READING = auto()
    """Chunks are read and enter."""


@dataclass(slots=True)
class Copy:
    """One table's copy."""

    row: TableRow
    table: SourceTable
    copy_id: str
    fresh: bool
    """None of it is durable so far."""
    marked: bool
    """It begins with a record that voids what the log had of the table before; `WholeTableReads.enter` decides, too …"""
    begins_at: Lsn = Lsn(0)
    """… once the stream has come this far: all records under another key or other columns come before that record."""
    paused: bool = False
    """No more of it is read. Chunks already read enter; then it waits like a copy that a session found begun."""
    stage: Stage = Stage.WAITING
    sizes: ChunkSizes = field(default_factory=lambda: ChunkSizes(CHUNK_ROWS))
    rows_rate: Rate = field(default_factory=Rate)
    bytes_rate: Rate = field(default_factory=Rate)
    tracker: CopyTracker = field(default_factory=CopyTracker)
    ranges: dict[int, Range] = field(default_factory=dict)
    tracked_from: Lsn = Lsn(0)
    """Commits below aren't remembered: a chunk's snapshot has to see them."""
    turn: int = 0
    """For a table without a key: how often it was read in vain, which decides how it is read next (`whole_table_reads`) …"""
    patience_s: float = 0.0
    """… how long the stream is held for its snapshot to come; 0: not tried so far …"""
    file: CopiedFile | None = None
    """… and the file of its rows, until they are durable."""
    bound: int = 0
    """Snapshots count from the moment at which every transaction below has ended."""

    @classmethod
    def resumed_or_new(cls, row: TableRow, table: SourceTable, saved: Iterable[CopyChunk], seen_at: Lsn) -> Copy:
        """Return the copy that a table's row asks for: behind the saved chunks, or from the beginning.

        It begins again if no chunk was saved, or if the log has no key by which to look rows up that change on the way.

        Args:
            saved: progress of the ranges of the row's copy; empty if it was not begun.
            seen_at: the position up to which the stream had come when the table was seen.
        """
        begun = cls(row, table, row.copy_id, fresh=False, marked=False)
        begun.ranges = {saved_range.number: Range.loaded(saved_range) for saved_range in saved}
        if begun.of_partitions:
            begun.begins_at = seen_at  # its snapshots show the partitions as attached
        if begun.keyed and any(number < FIRST_KEYS_RANGE for number in begun.ranges):
            return begun
        copy_id = fresh_copy_id()
        # Before its first copy the log may have only inserts of it: it was in history only.
        marked = bool(row.copy_id) or bool(row.schema_version)
        waits = marked or not begun.keyed
        return cls(row, table, copy_id, fresh=True, marked=marked, begins_at=seen_at if waits else Lsn(0))

    @property
    def name(self) -> str:
        """The table's name."""
        return qualified_name(self.row.namespace, self.row.name)

    def serves(self, row: TableRow, table: SourceTable | None) -> bool:
        """Return whether it is the copy that a row asks for; the row may have been read before it began."""
        if self.row.changed_us != row.changed_us:
            return False
        return self.stage is not Stage.WAITING or (table is not None and self.table.same_definition(table))

    def waits_for_operator(self, paused: Container[TableId]) -> bool:
        """Return whether it was paused or is held."""
        return self.row.is_copy_held or self.row.id in paused

    def look_at(self, facts: Mapping[int, SourceTable]) -> None:
        """Update the table as last seen: it may have another name. If it has another key, the bounds mean nothing."""
        seen = facts.get(self.row.relation_oid, self.table)
        self.table = seen if seen.key == self.table.key else self.table

    @property
    def keyed(self) -> bool:
        """Whether its rows can be looked up by the key that the log has."""
        return bool(self.table.key) and not self.table.key_is_hashed

    @property
    def of_partitions(self) -> bool:
        """Whether it has the rows of some partitions, and not the whole table's."""
        return any(part.partition is not None for part in self.ranges.values())

    @property
    def whole(self) -> bool:
        """Whether every range is finished."""
        return self.stage is Stage.READING and all(r.finished for r in self.ranges.values())

    def ask_keys(self, keys: Iterable[Key]) -> list[Range]:
        """Return ranges for keys to be read by name: an untouched one takes some in, new ones the rest."""
        asked = set(keys)
        found: list[Range] = []
        last = self.ranges[max(self.ranges)] if self.ranges else None
        if last is not None and last.keys and last.untouched and len(last.keys) < KEYS_MAX:
            asked |= set(last.keys)
            found.append(last)
        ordered = sorted(asked)
        for first in range(0, len(ordered), KEYS_MAX):
            some = tuple(ordered[first : first + KEYS_MAX])
            if found and first == 0:
                found[0].keys = some
            else:
                found.append(self._new_keys(some))
        return found

    def halve(self, part: Range) -> Range:
        """Move half of a range's keys to a new range, and return that: its rows were too much for one read."""
        half = len(part.keys) // 2
        rest = self._new_keys(part.keys[half:])
        part.keys = part.keys[:half]
        return rest

    def _new_keys(self, keys: tuple[Key, ...]) -> Range:
        number = max([FIRST_KEYS_RANGE - 1, *self.ranges]) + 1
        made = self.ranges[number] = Range(number, keys=keys)
        return made

    def open_chunks(self) -> list[OpenChunk]:
        """Return the chunks that wait to enter or to be durable."""
        return [chunk for r in self.ranges.values() for chunk in r.open]

    @property
    def drained(self) -> bool:
        """Whether nothing of it is being read, or waits to enter or to be durable."""
        return self.stage is Stage.READING and not any(r.open or r.reading for r in self.ranges.values())

    def note_rates(self, rows: int, size_bytes: int, now_s: float) -> None:
        """Note rows that became durable, or were written to its file."""
        self.rows_rate.add(rows, now_s)
        self.bytes_rate.add(size_bytes, now_s)

    def progress(self, now_s: float) -> dict[str, Any]:
        """Return the progress for people: the durable part (without a key: read), total, speed, and remaining time.

        Bytes are of the rows as text, as the network transfers and a rate counts them. Unknown values are None.
        """
        rows = sum(r.row_count for r in self.ranges.values())
        size = sum(r.size_bytes for r in self.ranges.values())
        if self.file is not None and not rows:
            rows, size = self.file.row_count, self.file.size_bytes
        estimate = self._row_estimate(rows, size)
        rate = 0.0 if self.paused else self.rows_rate.per_s(now_s)
        return {
            "state": self._state,
            "rows": rows,
            "rows_estimate": estimate,
            "bytes": size,
            "rows_per_s": round(rate, 1),
            "bytes_per_s": 0 if self.paused else round(self.bytes_rate.per_s(now_s)),
            "eta_s": None if estimate is None or not rate else round((estimate - rows) / rate, 1),
            "ranges": len(self.ranges),
            "ranges_done": sum(r.finished for r in self.ranges.values()),
        }

    @property
    def _state(self) -> str:
        if not self.paused:
            return self.stage.name.lower()
        return COPY_HELD if self.row.is_copy_held else "paused"

    def _row_estimate(self, rows: int, size_bytes: int) -> int | None:
        """Return the source's estimate; for a table never analysed, one by its size. None if it has more already.

        Also None for a copy of some partitions.
        """
        if self.of_partitions:
            return None
        estimate = self.table.row_estimate
        if not estimate and rows:
            estimate = int(self.table.size_bytes / (size_bytes / rows + _ROW_HEADER_BYTES))
        return estimate if estimate >= rows and estimate else None
