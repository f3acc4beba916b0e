"""What is known of one table's running copy: its key ranges, the chunks that are open in each, and how far it is.

A range is walked from its lowest key to its highest, one chunk after the other; its row in the catalog says from where to
go on. A list of keys that have to be read again is a range of its own, of one chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final

from millstream.capture.copy_reader import Bounds, Chunk, decode_key, encode_key
from millstream.capture.source import SourceTable
from millstream.catalog import ChunkState, CopyChunk, TableRow
from millstream.model.ids import TableId
from millstream.model.names import qualified_name
from millstream.model.positions import Lsn
from millstream.protocol.table_copy import CopyTracker, Key

OPEN_CHUNKS_MAX: Final = 2
"""Chunks of a range in memory: one waits for the stream or for the disk while the next is read."""
FIRST_KEYS_RANGE: Final = 1_000_000
"""Numbers from here on are ranges of keys asked for by name."""


class Stage(Enum):
    """How far a copy is."""

    WAITING = auto()
    """It begins with the applier's next step."""
    PREPARING = auto()
    """Its changes are tracked; transactions that ran before have to end first."""
    READING = auto()
    """Chunks are read and enter."""


@dataclass(slots=True)
class OpenChunk:
    """A chunk between its reading and its being durable."""

    range: Range
    ticket: int
    bounds: Bounds
    """What it covers; read again, it covers the same."""
    read: Chunk
    durable: bool = False
    rows_entered: int = 0


@dataclass(slots=True)
class Range:
    """A part of the table by its key."""

    number: int
    after: Key | None = None
    """Up to here all is durable."""
    upto: Key | None = None
    keys: tuple[Key, ...] = ()
    read_after: Key | None = None
    """Up to here all is read."""
    all_read: bool = False
    reading: bool = False
    row_count: int = 0
    size_bytes: int = 0
    open: deque[OpenChunk] = field(default_factory=deque)
    finished: bool = False

    def bounds(self) -> Bounds:
        """What the next chunk may take."""
        return Bounds(keys=self.keys) if self.keys else Bounds(after=self.read_after, upto=self.upto)

    def note_read(self, chunk: OpenChunk) -> None:
        """A chunk was read behind those before it."""
        self.open.append(chunk)
        self.read_after = chunk.bounds.upto
        self.all_read = self.all_read or chunk.read.last or bool(self.keys)

    def advance(self) -> bool:
        """Take durable chunks off the front; whether that moved anything."""
        moved = False
        while self.open and self.open[0].durable:
            chunk = self.open.popleft()
            self.after = chunk.bounds.upto if chunk.bounds.upto is not None else self.after
            self.row_count += chunk.rows_entered
            self.size_bytes += chunk.read.rows.size_bytes
            moved = True
        if self.all_read and not self.open:
            self.finished = moved = True
        return moved

    def forget_unfinished(self) -> None:
        """Go back to what is durable: another session begins."""
        self.open.clear()
        self.read_after = self.after
        self.all_read = self.reading = False

    def saved(self, table: TableId, copy_id: str) -> CopyChunk:
        """The catalog's row."""
        facts: dict[str, Any] = {"keys": [list(key) for key in self.keys]} if self.keys else {}
        return CopyChunk(
            table=table,
            copy_id=copy_id,
            number=self.number,
            lower=encode_key(self.after),
            upper=encode_key(self.upto),
            state=ChunkState.DURABLE if self.finished else ChunkState.PLANNED,
            snapshot=None,
            row_count=self.row_count,
            size_bytes=self.size_bytes,
            facts=facts,
        )

    @classmethod
    def loaded(cls, row: CopyChunk) -> Range:
        """The range of a catalog's row."""
        after = decode_key(row.lower)
        return cls(
            number=row.number,
            after=after,
            upto=decode_key(row.upper),
            keys=tuple(tuple(key) for key in row.facts.get("keys", ())),
            read_after=after,
            row_count=row.row_count,
            size_bytes=row.size_bytes,
            finished=row.state is ChunkState.DURABLE,
        )


@dataclass(slots=True)
class Copy:
    """One table's copy."""

    row: TableRow
    table: SourceTable
    copy_id: str
    fresh: bool
    """Nothing of it is durable yet."""
    marked: bool
    """It begins with a record that voids what the log had of the table before."""
    begins_at: Lsn = Lsn(0)
    """… once the stream has come this far: what is void under another key or other columns lies all before that record."""
    stage: Stage = Stage.WAITING
    tracker: CopyTracker = field(default_factory=CopyTracker)
    ranges: dict[int, Range] = field(default_factory=dict)
    bound: int = 0
    """Snapshots count from the moment at which every transaction below has ended."""

    @property
    def name(self) -> str:
        """The table's."""
        return qualified_name(self.row.namespace, self.row.name)

    @property
    def keyed(self) -> bool:
        """Whether its rows have a key."""
        return bool(self.table.key)

    @property
    def whole(self) -> bool:
        """Whether every range is finished."""
        return self.stage is Stage.READING and all(r.finished for r in self.ranges.values())

    def ask_keys(self, keys: Iterable[Key]) -> Range:
        """A new range of keys to be read by name."""
        number = max([FIRST_KEYS_RANGE - 1, *self.ranges]) + 1
        found = self.ranges[number] = Range(number, keys=tuple(sorted(keys)))
        return found

    def open_chunks(self) -> list[OpenChunk]:
        """Chunks that wait to enter or to be durable."""
        return [chunk for r in self.ranges.values() for chunk in r.open]

    def progress(self) -> dict[str, Any]:
        """For people: rows so far, and how many there may be."""
        return {
            "state": self.stage.name.lower(),
            "rows": sum(r.row_count for r in self.ranges.values()),
            "rows_estimate": self.table.row_estimate,
            "bytes": sum(r.size_bytes for r in self.ranges.values()),
            "ranges": len(self.ranges),
            "ranges_done": sum(r.finished for r in self.ranges.values()),
        }
