"""Records of the log as JSON lines: one record per line, in order, shards merged.

The order is that of offsets within a shard; shards are merged by an operation's first number, and records
of one transaction by their index. Memory is bounded by one frame per shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from millstream.errors import CorruptWal
from millstream.model.ids import ShardId, TableId
from millstream.model.positions import Offset, Seq
from millstream.model.record_json import record_facts
from millstream.model.row_values import Values
from millstream.model.schema import TableSchema
from millstream.wal.reader import StreamReader, TableRecords


@dataclass(slots=True)
class Line:
    """One record, with the keys by which shards are merged.

    It isn't frozen, which would take three times as long to make.
    """

    shard: ShardId
    offset: Offset
    operation_seq: Seq
    index: int
    operation: tuple[Any, ...]
    """Distinguishes operations: a transaction's parts on several shards have the same value."""
    facts: dict[str, Any]
    schema: TableSchema
    """The schema under which the record was written."""


@dataclass(slots=True)
class Cat:
    """Reads a log as lines; a repeated call continues where it stopped.

    Args:
        stream: the stream name in lines.
        values: the form of values.
        tables: only these.
        from_offset: for every shard; `OffsetExpired` if retention has dropped it on any.
        numbers: only records with numbers in `(first, second]`.
        moments: give copied rows the moment of their copy as commit time.
    """

    stream: str
    reader: StreamReader
    values: Values = "json"
    tables: frozenset[TableId] | None = None
    from_offset: Offset | None = None
    numbers: tuple[Seq | None, Seq | None] = (None, None)
    moments: bool = False
    _next: dict[ShardId, Offset] = field(default_factory=dict)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield everything that is durable now and wasn't yielded before; see `records`."""
        return (line.facts for line in self.records())

    def records(self) -> Iterator[Line]:
        """Yield as `lines`, each with its record.

        Raises:
            OffsetExpired, OffsetBeyondEnd: `from_offset` doesn't exist.
            CorruptWal: the log is damaged; earlier lines are right.
        """
        upto = self.reader.persisted_upto()
        shards = self.reader.shards
        if self.from_offset is not None and not self._next:
            for shard in shards:
                self.reader.extent.check_offset(shard, self.from_offset)
        if self.from_offset is not None and not self._next and len(shards) > 1:
            ends = {shard: self.reader.durable_offset(shard) for shard in shards}
            # Beyond the end of one shard, but not of all: that shard has nothing to yield yet.
            if any(end >= self.from_offset for end in ends.values()):
                self._next = {shard: end for shard, end in ends.items() if end < self.from_offset}
        return merge_shards([self._shard(shard, upto) for shard in shards])

    def is_behind(self) -> bool:
        """Return whether more is durable than was yielded."""
        return any(self.reader.durable_offset(shard) > self._next.get(shard, Offset(0)) for shard in self.reader.shards)

    def _shard(self, shard: ShardId, upto: Seq) -> Iterator[Line]:
        start = self._next.get(shard)
        if start is None:
            first = self.reader.first_offset(shard)
            start = first if self.from_offset is None else self.from_offset
        self._next[shard] = start
        for line in by_offset(self._read(shard, start), self._lines):
            if line.facts["seq"] > upto:
                return
            self._next[shard] = Offset(line.offset + 1)
            yield line

    def _lines(self, part: TableRecords) -> Iterator[Line]:
        return table_lines(part, stream=self.stream, values=self.values)

    def _read(self, shard: ShardId, start: Offset) -> Iterator[TableRecords]:
        return self.reader.read(shard, start, tables=self.tables, numbers=self.numbers, moments=self.moments)


def by_offset(found: Iterable[TableRecords], lines_of: Callable[[TableRecords], Iterable[Line]]) -> Iterator[Line]:
    """Yield one shard's records by offset.

    Args:
        found: the shard's records, frame by frame.
        lines_of: returns the lines of one table's records; it may leave some out.
    """
    frame: list[TableRecords] = []
    try:
        for part in found:
            if frame and part.frame_offset != frame[0].frame_offset:
                yield from _frame(frame, lines_of)
                frame = []
            frame.append(part)
    except CorruptWal as error:
        # Records before the damage are right, and are shown; of a damaged frame nothing is.
        if frame and int(error.details.get("offset_from", 0)) > frame[0].frame_offset:
            yield from _frame(frame, lines_of)
        raise
    yield from _frame(frame, lines_of)


def _frame(parts: list[TableRecords], lines_of: Callable[[TableRecords], Iterable[Line]]) -> Iterator[Line]:
    lines = [line for part in parts for line in lines_of(part)]
    lines.sort(key=lambda line: line.offset)  # also within one table: its partitions are stored one after the other
    return iter(lines)


def table_lines(found: TableRecords, *, stream: str, values: Values = "json") -> Iterator[Line]:
    """Yield the lines of one table's records (read with their offsets), in order; see `record_facts`."""
    schema, batch = found.schema, found.batch
    lines = record_facts(schema, batch, stream=stream, shard=found.shard, epoch=found.epoch, values=values)
    whole = zip(lines, found.operation_seq.to_pylist(), indexes_of(found), operations_of(found), strict=True)
    for line, first, index, operation in whole:
        yield Line(found.shard, Offset(line["offset"]), Seq(first), index, operation, line, schema)


def indexes_of(found: TableRecords) -> list[int]:
    """Return each record's index in its operation, or -1."""
    return [-1 if index is None else index for index in found.batch.column("__commit_index").to_pylist()]


def operations_of(found: TableRecords) -> list[tuple[Any, ...]]:
    """Return the identity of each record's operation: a transaction's parts on several shards have the same one."""
    sources, lsns, xids = (found.batch.column(name).to_pylist() for name in ("__source", "__commit_lsn", "__xid"))
    return [
        (source, lsn, xid) if xid is not None else (found.shard, first)
        for source, lsn, xid, first in zip(sources, lsns, xids, found.operation_seq.to_pylist(), strict=True)
    ]


class Merged(Protocol):
    """A record of a shard, as `merge_shards` needs it; see `Line`."""

    @property
    def operation_seq(self) -> Seq:
        """First number of its operation on its shard."""

    @property
    def index(self) -> int:
        """Its index in its operation, or -1."""

    @property
    def operation(self) -> tuple[Any, ...]:
        """Identity of its operation."""


_Merged = TypeVar("_Merged", bound=Merged)


def merge_shards(shards: list[Iterator[_Merged]]) -> Iterator[_Merged]:
    """Merge all shards' lines: operations by their first number, a transaction's records by their index."""
    heads = {number: line for number, lines in enumerate(shards) if (line := next(lines, None)) is not None}
    operation: tuple[Any, ...] | None = None
    while heads:
        same = [number for number, line in heads.items() if line.operation == operation]
        if same:
            chosen = min(same, key=lambda number: heads[number].index)
        else:
            chosen = min(heads, key=lambda number: (heads[number].operation_seq, heads[number].index))
            operation = heads[chosen].operation
            # Another shard may hold an earlier record of the same transaction.
            same = [number for number, line in heads.items() if line.operation == operation]
            chosen = min(same, key=lambda number: heads[number].index)
        yield heads[chosen]
        following = next(shards[chosen], None)
        if following is None:
            del heads[chosen]
        else:
            heads[chosen] = following
