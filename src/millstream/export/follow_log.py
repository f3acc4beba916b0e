"""Stretches of a log: whole commit groups, with their tables and operations, from the heads of frames alone.

Readers that follow a log go from stretch to stretch. A stretch tells which tables have records in it, so that only
these are read, and where operations begin and end, so that each part gets a token to resume from.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from millstream.codec.log_records import first_seqs
from millstream.model.ids import SchemaVersion, ShardId, TableId
from millstream.model.names import parse_qualified_name, table_names
from millstream.model.positions import Offset, Seq, StreamToken
from millstream.model.schema import TableKind, TableSchema
from millstream.wal.table_batches import is_raw, undecoded_error

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.codec.log_frame import RecordsFrame
    from millstream.wal.reader import StreamReader
    from millstream.wal.reading.table_records import TableRecords

ROWS_MAX: Final = 100_000
BYTES_MAX: Final = 16 << 20
"""Bytes of frames in a stretch, compressed. One commit group may have more."""
_HELD_BYTES_MAX: Final = 64 << 20
"""Bytes of batches that are held until their tokens are known."""


class FollowedTables:
    """The tables that a reader follows, by the name that each has when a record is written.

    Args:
        named: names as `schema.table`, quoted where necessary; `_messages` for logical messages. None: all tables.

    Raises:
        UsageError: a text is no table's name, or there is none.
    """

    def __init__(self, named: str | Sequence[str] | None) -> None:
        names = table_names(named)
        self._texts = None if names is None else frozenset(names)
        self._names = frozenset(parse_qualified_name(name) for name in names or ())

    @property
    def are_all(self) -> bool:
        """Whether no table is named."""
        return self._texts is None

    def has(self, schema: TableSchema) -> bool:
        """Return whether a table is one of them."""
        if self._texts is None:
            return True
        if schema.kind is TableKind.MESSAGES:
            return schema.full_name in self._texts
        return (schema.namespace, schema.name) in self._names

    def ids(self, stretch: Stretch) -> frozenset[TableId]:
        """Return the ids of those that have records in a stretch."""
        return frozenset(table for (table, _), schema in stretch.schemas.items() if self.has(schema))


@dataclass(slots=True)
class Stretch:
    """Whole commit groups: the numbers in `(after, upto]`."""

    after: Seq
    upto: Seq
    schemas: dict[tuple[TableId, SchemaVersion], TableSchema] = field(default_factory=dict)
    """Schemas of the records in it."""
    offsets: dict[ShardId, tuple[Offset, Offset]] = field(default_factory=dict)
    """By shard, the half-open range of offsets that its groups have."""
    _firsts: list[int] = field(default_factory=list)
    _lasts: list[int] = field(default_factory=list)
    """First and last number of each operation, in order."""

    def add(self, group: Sequence[RecordsFrame]) -> None:
        """Add the next commit group."""
        for frame in group:
            head = frame.header
            begin, end = self.offsets.get(head.shard, (head.first_offset, head.first_offset))
            own_end = Offset(head.first_offset + head.count)
            self.offsets[head.shard] = min(begin, head.first_offset), max(end, own_end)
            for part in head.parts:
                key = (part.table_id, part.schema_version)
                if key not in self.schemas:
                    self.schemas[key] = frame.schemas.find(*key)
        for first, last in operations_of(group):
            self._firsts.append(first)
            self._lasts.append(last)

    def position_before(self, seq: int) -> Seq:
        """Return the end of the operation before the one that has a number."""
        place = bisect_right(self._firsts, seq) - 1
        return Seq(self._lasts[place - 1] if place > 0 and self._lasts[place - 1] > self.after else self.after)

    def position_after(self, seq: int) -> Seq:
        """Return the end of the operation that has a number."""
        return Seq(self._lasts[bisect_right(self._firsts, seq) - 1])


def operations_of(group: Sequence[RecordsFrame]) -> list[tuple[int, int]]:
    """Return the first and the last number of each operation of a commit group, in order.

    An operation's numbers are consecutive, over all tables, shards and frames. Each frame names an operation that
    goes on in it again, with the same facts.
    """
    entries: list[tuple[int, int, int, int]] = []
    for number, frame in enumerate(group):
        firsts = first_seqs(frame.operations, frame.batches)
        lasts = np.zeros(frame.operations.num_rows, dtype=np.int64)
        ends = frame.batches.column("first_seq").to_numpy() + frame.batches.column("count").to_numpy() - 1
        np.maximum.at(lasts, frame.batches.column("operation").to_numpy(), ends)
        entries += [
            (first, last, number, row)
            for row, (first, last) in enumerate(zip(firsts.tolist(), lasts.tolist(), strict=True))
            if last
        ]
    entries.sort()
    found: list[tuple[int, int]] = []
    before: tuple[int, int] | None = None
    for first, last, number, row in entries:
        is_same = bool(found) and (
            first <= found[-1][1]
            or (
                first == found[-1][1] + 1
                and before is not None
                and before[0] != number
                and _facts(group, *before) == _facts(group, number, row)
            )
        )
        if is_same:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
        before = number, row
    return found


def _facts(group: Sequence[RecordsFrame], number: int, row: int) -> object:
    return group[number].operations.slice(row, 1).to_pylist()


def next_stretch(
    reader: StreamReader, after: Seq, end: Seq, *, rows_max: int = ROWS_MAX, bytes_max: int = BYTES_MAX
) -> Stretch:
    """Return the stretch behind a position, up to a position that the log has shown.

    Args:
        after: a position between operations.
        end: likewise; greater than `after`.
        rows_max: records in it; one commit group may have more.
        bytes_max: bytes of its frames; likewise.

    Raises:
        OffsetExpired, TokenFromFuture, CorruptWal: as `StreamReader.read_groups`.
    """
    found = Stretch(after, after)
    rows = size = 0
    for group in reader.read_groups(after, end):
        rows += sum(frame.header.count for frame in group)
        size += sum(frame.header.payload_length for frame in group)
        is_over = rows > rows_max or size > bytes_max
        if is_over and found.upto > after:
            return found
        found.add(group)
        found.upto = group[0].header.group_last_seq
        if is_over:
            return found
    found.upto = end  # behind the last group there may be numbers that no record has
    return found


def position_of(reader: StreamReader, after: StreamToken | str | None) -> Seq:
    """Return the position from which to follow a log: behind a token, or its readable end.

    Raises:
        PositionError (`invalid_token`): the token is malformed, another stream's, or has a position for each writer.
        OffsetExpired: retention has dropped records behind it.
        TokenFromFuture: it lies beyond the readable end.
    """
    persisted = reader.persisted_upto()
    if after is None:
        return persisted
    asked = StreamToken.parse(str(after), stream=reader.stream_id).linear()
    reader.extent.check_range(asked, asked, persisted)
    return reader.whole_upto(asked)


def follow_steps(
    reader: StreamReader, tables: FollowedTables, after: Seq
) -> Generator[tuple[pa.RecordBatch | None, StreamToken], None, None]:
    """Yield the batches behind a position, each with the token to resume from after it, for ever.

    None in place of a batch: everything up to the token was yielded, and nothing more can be read now. The caller
    waits for a moment before it asks for the next.

    Raises:
        OffsetExpired, TokenFromFuture, LogTruncated, CorruptWal: as `StreamReader.read_between`.
        MillstreamError (`table_quarantined`): tables are named, and the next records of one weren't decoded.
    """
    at = after
    while True:
        end = reader.persisted_upto()
        if end != at:
            for batch, position in batches_between(reader, tables, at, end):
                yield batch, StreamToken.scalar(reader.stream_id, position)
            at = end
        yield None, StreamToken.scalar(reader.stream_id, at)


def batches_between(
    reader: StreamReader, tables: FollowedTables, after: Seq, upto: Seq
) -> Iterator[tuple[pa.RecordBatch, Seq]]:
    """Yield the batches of `(after, upto]`, each with the position to resume from after it.

    That position is the end of the last operation before the first record that is still to come. Raises as
    `follow_steps`.
    """
    at = after
    while at != upto:
        stretch = next_stretch(reader, at, upto)
        ids = tables.ids(stretch)
        if ids:
            one = next(iter(ids)) if len(ids) == 1 else None
            parts = (part for part in reader.read_between(at, stretch.upto, table=one) if tables.has(part.schema))
            for part, position in _with_positions(stretch, parts):
                if is_raw(part.schema) and not tables.are_all:
                    begin, reach = (StreamToken.scalar(reader.stream_id, end) for end in (at, upto))
                    rest = (
                        more for more in reader.read_between(Seq(part.first_seq - 1), upto) if tables.has(more.schema)
                    )
                    raise undecoded_error(reader, part, rest, begin, reach)
                yield part.batch, position
        at = stretch.upto


def _with_positions(stretch: Stretch, parts: Iterator[TableRecords]) -> Iterator[tuple[TableRecords, Seq]]:
    """Yield a stretch's parts, each with the position to resume from."""
    held: list[TableRecords] = []
    held_bytes = 0
    for part in parts:
        held.append(part)
        held_bytes += part.batch.nbytes
        if held_bytes > _HELD_BYTES_MAX:
            # One commit group of this size: its beginning stands for every position in it.
            yield from ((earlier, stretch.after) for earlier in held[:-1])
            held = held[-1:]
    positions = [stretch.upto]
    next_first: int | None = None
    for part in reversed(held[1:]):
        next_first = part.first_seq if next_first is None else min(next_first, part.first_seq)
        positions.append(stretch.position_before(next_first))
    yield from zip(held, reversed(positions), strict=False)
