"""Records of a log as server-sent events, of some tables, and of rows that a predicate matches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import pyarrow as pa

from millstream.errors import InvalidValue, RoutingError, UsageError
from millstream.export.follow_log import FollowedTables, Stretch, next_stretch
from millstream.model.ids import TableId
from millstream.model.positions import Seq, StreamToken
from millstream.model.predicate import Predicate
from millstream.model.record_filter import passing, row_schema
from millstream.model.record_json import to_json
from millstream.model.schema import TableKind, TableSchema
from millstream.wal.reader import StreamReader, TableRecords
from millstream.wal.records_json import Line, by_offset, merge_shards, table_lines

_ROWS_MAX: Final = 10_000
_BYTES_MAX: Final = 1 << 20


class TailFilter:
    """The records that a tail delivers.

    Raises:
        UsageError: a text is no table's name.
        InvalidValue: the predicate can't be read.
    """

    def __init__(self, tables: Sequence[str] | None, where: str | None) -> None:
        self.tables: Final = FollowedTables(tables)
        try:
            self._where = None if where is None else Predicate.parse(where)
        except UsageError as error:
            raise InvalidValue(error.message, hint=error.hint, parameter="where") from error

    def check(self, schemas: Callable[[], Iterable[TableSchema]]) -> None:
        """Check the predicate against the present tables.

        Args:
            schemas: returns the schemas of all tables; it is called only if there is a predicate.

        Raises:
            InvalidValue: a literal isn't of the type of its column in one of the tables; or tables are named, and none
                of those that exist has a column.
        """
        if self._where is None:
            return
        known = [schema for schema in schemas() if self.tables.has(schema)]
        if not self.tables.are_all and known and all(schema.kind is not TableKind.RAW for schema in known):
            own = {column.name for schema in known for column in schema.columns}
            missing = [name for name in self._where.columns if name not in own]
            if missing:
                names = ", ".join(sorted(schema.full_name for schema in known))
                raise InvalidValue(
                    f"{names} {'have' if len(known) > 1 else 'has'} no column {missing[0]!r}",
                    hint=f"Use columns of it: {', '.join(sorted(own)[:20])}.",
                    parameter="where",
                    column=missing[0],
                )
        for schema in known:
            if schema.kind is not TableKind.RAW:
                columns = [column for column in schema.columns if column.name in self._where.columns]
                empty = [pa.array([], column.arrow) for column in columns]
                rows = pa.RecordBatch.from_arrays(empty, schema=row_schema(columns))
                try:
                    self._where.matches(rows)
                except RoutingError as error:
                    raise InvalidValue(
                        f"{error.message} (table {schema.full_name})",
                        hint="Write a literal of the column's type, or name the tables that have it.",
                        parameter="where",
                        table=schema.full_name,
                        column=error.details.get("column"),
                    ) from error

    def kept(self, part: TableRecords) -> TableRecords | None:
        """Return the records of one table that are delivered; None if there are none.

        A record on which the predicate can't be evaluated is delivered.
        """
        if not self.tables.has(part.schema):
            return None
        if self._where is None:
            return part
        if part.schema.kind is TableKind.RAW:
            return part
        keep = passing(self._where, part.schema, part.batch)
        if keep.all():
            return part
        if not keep.any():
            return None
        mask = pa.array(keep)
        return replace(
            part,
            batch=part.batch.filter(mask),
            operation_seq=part.operation_seq.filter(mask),
            hybrid_ns=part.hybrid_ns.filter(mask),
        )


def tail_events(reader: StreamReader, stream: str, wanted: TailFilter, after: Seq, upto: Seq) -> Iterator[bytes]:
    """Yield the events of `(after, upto]` one by one, and an empty text after each stretch of the log.

    An event's id is the token of the end of the operation before; that of the last record that is delivered of an
    operation is the operation's own.

    Raises:
        OffsetExpired, TokenFromFuture, LogTruncated, CorruptWal: as `StreamReader.read`.
    """
    at = after
    while at != upto:
        stretch = next_stretch(reader, at, upto, rows_max=_ROWS_MAX, bytes_max=_BYTES_MAX)
        ids = wanted.tables.ids(stretch)
        if ids:
            yield from _events(reader, stream, wanted, stretch, ids)
        at = stretch.upto
        yield b""


def _events(
    reader: StreamReader, stream: str, wanted: TailFilter, stretch: Stretch, ids: frozenset[TableId]
) -> Iterator[bytes]:
    def lines_of(part: TableRecords) -> Iterator[Line]:
        kept = wanted.kept(part)
        return iter(()) if kept is None else table_lines(kept, stream=stream)

    numbers = (stretch.after, stretch.upto)
    shards = [
        by_offset(reader.read(shard, start, tables=ids, upto=end, numbers=numbers), lines_of)
        for shard, (start, end) in sorted(stretch.offsets.items())
    ]
    held: Line | None = None
    for line in merge_shards(shards):
        if held is not None:
            yield _event(reader, stretch, held, line)
        held = line
    if held is not None:
        yield _event(reader, stretch, held, None)


def _event(reader: StreamReader, stretch: Stretch, line: Line, following: Line | None) -> bytes:
    own = stretch.position_after(line.facts["seq"])
    is_last = following is None or following.facts["seq"] > own
    position = own if is_last else stretch.position_before(line.facts["seq"])
    token = StreamToken.scalar(reader.stream_id, position)
    return f"id: {token}\ndata: {to_json(line.facts)}\n\n".encode()
