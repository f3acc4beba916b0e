"""A log's records between two tokens, and the changes of a table's rows there: the base of every way to read a home."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from millstream.client.call_results import FILLED, LATEST_ROWS_MAX, LEFT, Latest
from millstream.errors import LakeError, OffsetExpired, UnknownTable
from millstream.model.ids import StreamId, TableId
from millstream.model.positions import Seq, StreamToken
from millstream.model.schema import names_table
from millstream.wal.table_batches import is_raw, undecoded_error

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.export.net_changes import LatestRows
    from millstream.wal.reader import StreamReader
    from millstream.wal.reading.table_records import TableRecords

_COMPRESSED: Final = 4
"""Assumed ratio of a record's columns to its compressed frame, until it is known."""


def read_records(
    reader: StreamReader,
    *,
    table: str | None = None,
    after: StreamToken | str | None = None,
    upto: StreamToken | str | None = None,
    known: Callable[[], list[TableId]] = list,
) -> Iterator[pa.RecordBatch]:
    """Read a log's records between two tokens; see `OpenHome.read`, and `table_ids` for `known`.

    Raises:
        MillstreamError (`table_quarantined`): the next records of the table that is named weren't decoded.
    """
    start, end = _parse(reader.stream_id, after), _parse(reader.stream_id, upto)
    first = reader.first_seq()
    wanted = None if table is None else table_ids(reader, table, known=known, from_first=start is None)
    one = wanted[0] if wanted and len(wanted) == 1 else None
    if (start is not None and start.ahead) or (end is not None and end.ahead):
        begin = StreamToken.scalar(reader.stream_id, Seq(first - 1)) if start is None else reader.whole_token(start)
        reach = reader.vector_token() if end is None else reader.whole_token(end)
        if start is None:
            reader.extent.check_end(max([reach.minimum, *reach.ahead.values()]))
        pieces = reader.read_tokens(begin, reach, table=one)
    else:
        low = Seq(first - 1) if start is None else reader.whole_upto(start.minimum)
        high = reader.persisted_upto() if end is None else reader.whole_upto(end.minimum)
        if start is None:
            reader.extent.check_end(high)
        begin, reach = (StreamToken.scalar(reader.stream_id, at) for at in (low, high))
        pieces = reader.read_between(low, high, table=one)
    own = (found for found in pieces if wanted is None or found.schema.table_id in wanted)
    for found in own:
        if wanted is not None and is_raw(found.schema):
            raise undecoded_error(reader, found, own, begin, reach)
        yield found.batch


def latest_stretches(
    reader: StreamReader,
    table: str,
    *,
    after: StreamToken | str | None = None,
    upto: StreamToken | str | None = None,
    rows_max: int = LATEST_ROWS_MAX,
    bytes_max: int | None = None,
    kept: Callable[[], tuple[Seq, pa.Table] | None] = lambda: None,
    known: Callable[[], list[TableId]] = list,
) -> Iterator[Latest]:
    """Read the changes of a table's rows; see `OpenHome.read_latest`.

    Args:
        bytes_max: bytes of the table's records in one range; None for any number.
        kept: returns the rows as of a number that retention may have dropped, with the totals of columns that
            accumulate; None if there are none.

    Raises:
        LakeError (`query_memory_full`): the records of one commit group, which can't be split, have more.
    """
    from millstream.export.net_changes import latest_rows, with_latest

    start, end = _parse(reader.stream_id, after), _parse(reader.stream_id, upto)
    low = Seq(reader.first_seq() - 1) if start is None else reader.whole_upto(start.linear())
    high = reader.persisted_upto() if end is None else reader.whole_upto(end.linear())
    if start is None:
        reader.extent.check_end(high)
    reader.extent.check_range(low, high, reader.persisted_upto())
    wanted = table_ids(reader, table, known=known, from_first=start is None)
    one = wanted[0] if len(wanted) == 1 else None
    accumulates = any(reader.schemas()[of].accumulating for of in wanted if of in reader.schemas())
    before: pa.Table | None = None
    # Totals are sums over everything before, too.
    begins, low = low, Seq(reader.first_seq() - 1) if accumulates else low
    if low > 0 and accumulates:
        found_rows = kept()
        if found_rows is None or not low <= found_rows[0] <= high:
            raise OffsetExpired(
                f"the totals of {table} at number {high} aren't known: retention has dropped numbers up to {low}",
                hint="Run `millstream reconcile` before retention drops records, or query the lake's current.",
                first=int(low) + 1,
            )
        low, before = found_rows
        if begins < low:
            yield Latest(False, before, StreamToken.scalar(reader.stream_id, low))
            begins = low
    while low < high:
        # In frames they are compressed.
        frames_max = None if bytes_max is None else max(1, bytes_max // _COMPRESSED)
        target = begins if low < begins else high
        reach = min(target, reader.cut(low, rows_max=rows_max, bytes_max=frames_max))
        if reach <= low:
            return
        found = _records_within(reader, low, reach, wanted, one, bytes_max)
        if found is None:
            reach = min(target, reader.cut(low, rows_max=1))
            found = _records_within(reader, low, reach, wanted, one, bytes_max)
        if found is None:
            raise LakeError(
                f"what was written to {table} at once, behind {StreamToken.scalar(reader.stream_id, low)}, has more than {bytes_max} bytes",
                code="query_memory_full",
                hint="Read its records instead (`read`), or raise `[http] query_memory_bytes_max`.",
                size_max=bytes_max,
            )
        if found:
            rows = latest_rows(found[-1].schema, [part.batch for part in found], before)
            if accumulates:
                before = with_latest(before, rows)
                if bytes_max is not None and before.nbytes > bytes_max:
                    raise LakeError(
                        f"the rows of {table} have columns with totals, and together more than {bytes_max} bytes",
                        code="query_memory_full",
                        hint="Query the lake's current, or raise `[http] query_memory_bytes_max`.",
                        size_max=bytes_max,
                    )
            if low >= begins:
                yield Latest(rows.emptied, _described(rows), StreamToken.scalar(reader.stream_id, reach))
        low = reach


def _described(rows: LatestRows) -> pa.Table:
    """Return rows whose schema says the defaults of columns in rows from before them, and the partitions that left."""
    filled = {column.name: column.filled for column in rows.schema.columns if column.filled is not None}
    told = {FILLED: filled, LEFT: rows.left}
    said = {name: json.dumps(value).encode() for name, value in told.items() if value}
    return rows.rows.replace_schema_metadata({**(rows.rows.schema.metadata or {}), **said}) if said else rows.rows


def _records_within(
    reader: StreamReader, low: Seq, reach: Seq, wanted: list[TableId], one: TableId | None, bytes_max: int | None
) -> list[TableRecords] | None:
    """Return a table's records in a range; None if they have more bytes."""
    found: list[TableRecords] = []
    size = 0
    for part in reader.read_between(low, reach, table=one):
        if part.schema.table_id in wanted:
            size += part.batch.nbytes
            if bytes_max is not None and size > bytes_max:
                return None
            found.append(part)
    return found


def _parse(stream: StreamId, token: StreamToken | str | None) -> StreamToken | None:
    return None if token is None else StreamToken.parse(str(token), stream=stream)


def table_ids(
    reader: StreamReader, table: str, *, known: Callable[[], list[TableId]] = list, from_first: bool = False
) -> list[TableId]:
    """Return the ids of tables that have a name, or had it if none has it now; several if one was recreated.

    Args:
        table: `schema.table`, quoted where necessary; `_messages` for logical messages.
        known: returns the ids of tables of that name of which the log has no records.
        from_first: whether the caller reads from the first record that is still there, instead of from a token.

    Raises:
        UnknownTable: the log has records of none, and none is known.
        OffsetExpired: the log has records of none, one is known, and retention has deleted the log's beginning, where
            the first record was.
        UsageError: the text is no name.
    """
    is_meant = names_table(table)
    schemas = reader.schemas()
    found = [i for i, schema in schemas.items() if is_meant(schema)]
    if not found:
        found = sorted({i for (i, _), schema in reader.schema_versions().items() if is_meant(schema)})
    if not found:
        found, first = known(), reader.first_seq()
        if found and from_first and first > 1:
            raise OffsetExpired(
                f"the log begins at number {first}, and has no records of {table} after that",
                hint=f"Query the table's rows in the lake (`millstream query`), and read from {reader.token()} on after that.",
                first=int(first),
            )
    if not found:
        names = sorted({schema.full_name for schema in schemas.values()})
        raise UnknownTable(
            f"the log has no records of {table}",
            hint=f"Use a table with records: {', '.join(names[:20]) or 'there is none yet'}.",
            table=table,
        )
    return found
