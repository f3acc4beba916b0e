"""The key ranges that a table copy is cut into, and the bounds of each range's next chunk.

A range is read from its lowest key to its highest, one chunk after the other; its row in the catalog has the key to
continue from. A list of keys to be read again is a range of its own, with one chunk. How many ranges a table gets, and
at which keys of a sample it is cut, are `part_count` and `cuts_among`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from millstream.capture.copying.chunk_reader import ChunkBounds, FetchedRows, decode_key, encode_key
from millstream.capture.copying.copied_file import CopiedFile
from millstream.capture.copying.copy_text import CopiedRows
from millstream.catalog import ChunkState, CopyChunk
from millstream.model.ids import TableId
from millstream.protocol.copy_conflicts import Key

OPEN_CHUNKS_MAX: Final = 4
"""Chunks of a range in memory: some wait to be decoded, for the stream or for the disk while the next is read."""
FIRST_KEYS_RANGE: Final = 1_000_000
"""Numbers from here on are ranges of keys asked for by name."""
KEYS_MAX: Final = 1000
"""Keys in such a range: they are in one query, and in one row of the catalog."""
_SPLIT_CHUNKS: Final = 4
"""Chunks above which a table is split between the workers."""
_ROW_BYTES: Final = 200
"""Assumed size of a row: a table that was never analyzed has no estimate of its rows."""


def part_count(row_estimate: int, size_bytes: int, *, chunk_rows: int, workers: int) -> int:
    """Return into how many ranges to cut a table: one for each worker if it is large, else one."""
    rows = max(row_estimate, size_bytes // _ROW_BYTES)
    return workers if rows > _SPLIT_CHUNKS * chunk_rows else 1


def cuts_among(sample: Sequence[Key], part_count: int) -> list[Key]:
    """Return keys of a sample in key order that cut the table into at most so many ranges of similar size."""
    places = [len(sample) * part // part_count for part in range(1, part_count)]
    return list(dict.fromkeys(sample[place] for place in places if place > 0))


@dataclass(slots=True)
class OpenChunk:
    """A chunk from its reading until it is durable."""

    range: Range
    ticket: int
    bounds: ChunkBounds
    """The keys that it covers; when read again, it covers the same."""
    read: FetchedRows | CopiedFile
    rows: CopiedRows | None = None
    """None: not decoded so far. Rows of a file never are."""
    durable: bool = False
    rows_entered: int = 0

    @property
    def memory_bytes(self) -> int:
        """Size of the messages that it holds."""
        return len(self.read.copied.messages) if isinstance(self.read, FetchedRows) else 0


@dataclass(slots=True)
class Range:
    """A part of the table by its key."""

    number: int
    after: Key | None = None
    """Key up to which everything is durable."""
    upto: Key | None = None
    keys: tuple[Key, ...] = ()
    partition: int | None = None
    """OID of the partition whose rows it has; None: the whole table's."""
    read_after: Key | None = None
    """Key up to which everything is read."""
    all_read: bool = False
    reading: bool = False
    row_count: int = 0
    size_bytes: int = 0
    open: deque[OpenChunk] = field(default_factory=deque)
    finished: bool = False

    @classmethod
    def cut_at(cls, cuts: Sequence[Key]) -> list[Range]:
        """Return the ranges of a table that is cut at some keys."""
        bounds = [None, *cuts, None]
        return [cls(n, bounds[n], bounds[n + 1], read_after=bounds[n]) for n in range(len(bounds) - 1)]

    @property
    def untouched(self) -> bool:
        """Whether no worker reads it, has read of it or is about to."""
        return not (self.reading or self.all_read or self.open or self.finished)

    @property
    def takes_next(self) -> bool:
        """Whether its next chunk may be read now."""
        return not (self.reading or self.all_read) and len(self.open) < OPEN_CHUNKS_MAX

    def bounds(self) -> ChunkBounds:
        """Return the bounds of the next chunk."""
        if self.keys:
            return ChunkBounds(keys=self.keys)
        return ChunkBounds(after=self.read_after, upto=self.upto, partition=self.partition)

    def note_read(self, chunk: OpenChunk) -> None:
        """Note a chunk that was read after those before it."""
        self.open.append(chunk)
        self.read_after = chunk.bounds.upto
        is_last = isinstance(chunk.read, CopiedFile) or chunk.read.last
        self.all_read = self.all_read or is_last or bool(self.keys)

    def advance(self) -> bool:
        """Remove durable chunks from the front; return whether there were any."""
        moved = False
        while self.open and self.open[0].durable:
            chunk = self.open.popleft()
            self.after = chunk.bounds.upto if chunk.bounds.upto is not None else self.after
            self.row_count += chunk.rows_entered
            self.size_bytes += chunk.read.size_bytes
            moved = True
        if self.all_read and not self.open:
            self.finished = moved = True
        return moved

    def saved(self, table: TableId, copy_id: str) -> CopyChunk:
        """Return the catalog's row."""
        facts: dict[str, Any] = {"keys": [list(key) for key in self.keys]} if self.keys else {}
        if self.partition is not None:
            facts["partition"] = self.partition
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
        """Return the range of a catalog's row."""
        after = decode_key(row.lower)
        return cls(
            number=row.number,
            after=after,
            upto=decode_key(row.upper),
            keys=tuple(tuple(key) for key in row.facts.get("keys", ())),
            partition=row.facts.get("partition"),
            read_after=after,
            row_count=row.row_count,
            size_bytes=row.size_bytes,
            finished=row.state is ChunkState.DURABLE,
        )
