"""Requests of applications, many at a time: one operation for each one's rows, and the outcome for each."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa

from millstream.errors import IngestError, InvalidValue, MillstreamError
from millstream.ingest.python_rows import too_large
from millstream.model.names import parse_qualified_name, qualified_name
from millstream.model.operations import ROWS_DIGEST, Appended, append_operations
from millstream.model.records import INSTANT
from millstream.model.writes import AppendBatch, TableBatch, WriteId

REQUESTS_MAX: Final = 10_000
"""Limit of requests per batch."""
TABLES_MAX: Final = 1000
"""Limit of tables per operation."""
WRITE_ID_BYTES_MAX: Final = 255
"""Size in bytes of a session's name, or of an idempotency key."""
_NUMBER_MAX: Final = (1 << 63) - 1


def sole_outcome(outcomes: Sequence[Appended | MillstreamError]) -> Appended:
    """Return the outcome of a batch of one; raise it if it is an error."""
    (outcome,) = outcomes
    if isinstance(outcome, MillstreamError):
        raise outcome
    return outcome


def check_batch(batch: AppendBatch) -> None:
    """Raise `InvalidValue`, `IngestError` (`rows_too_large`) if the counts don't match the rows, a table is named twice, or an id is invalid.

    `UsageError` if a table has no name.
    """
    requests = len(batch.write_ids)
    if not requests:
        raise InvalidValue("a batch needs at least one request")
    for table in batch.tables:
        if not table.counts or min(table.counts) < 1 or sum(table.counts) != table.rows.num_rows:
            raise InvalidValue(
                "a batch's counts must add up to its rows, with at least one for each request",
                rows=table.rows.num_rows,
            )
        if len(table.counts) != requests:
            raise InvalidValue(f"{len(table.counts)} requests have {requests} write ids")
    check_tables([table.table for table in batch.tables])
    if requests > REQUESTS_MAX:
        raise IngestError(
            f"a batch has {requests} requests, of at most {REQUESTS_MAX}",
            code="rows_too_large",
            hint="Append it in several batches.",
            what="requests",
            size=requests,
            size_max=REQUESTS_MAX,
        )
    for write_id in batch.write_ids:
        if write_id is not None:
            check_write_id(write_id)


def check_tables(names: Sequence[str]) -> list[str]:
    """Return the full names of one operation's tables.

    Raises:
        UsageError: a text is no table's name.
        InvalidValue: two name the same table.
        IngestError (`rows_too_large`): there are more than `TABLES_MAX`.
    """
    if len(names) > TABLES_MAX:
        raise too_large("the tables of one operation", len(names), TABLES_MAX)
    full: dict[str, str] = {}
    for name in names:
        one = qualified_name(*parse_qualified_name(name))
        if one in full:
            raise InvalidValue(
                f"one operation names table {one} twice: as {full[one]} and as {name}",
                hint="Put all rows of the table into one list.",
                table=one,
            )
        full[one] = name
    return list(full)


def check_write_id(write_id: WriteId) -> None:
    """Raise `InvalidValue` for neither a session with a number from 1 nor a key; `IngestError` (`rows_too_large`) for a long text."""
    session, number, key = write_id.session, write_id.number, write_id.key
    if (
        key is None
        and type(number) is int
        and type(session) is str
        and 1 <= number <= _NUMBER_MAX
        and 0 < len(session) <= WRITE_ID_BYTES_MAX
        and session.isascii()
        and "\0" not in session
        and not session.isspace()
    ):
        return  # most requests have none, and each request of a batch is checked
    if (session is None) == (key is None) or (session is None) != (number is None):
        raise InvalidValue(
            "a write is identified by a session and its number, or by an idempotency key",
            hint="Pass both session and number, or idempotency_key alone.",
        )
    given: tuple[tuple[object, type], ...] = ((session, str), (key, str), (number, int))
    if isinstance(number, bool) or not all(one is None or isinstance(one, kind) for one, kind in given):
        raise InvalidValue("a session's name and an idempotency key are text, and a number in a session is a whole one")
    if number is not None and not 1 <= number <= _NUMBER_MAX:
        raise InvalidValue(f"{number} can't be a write's number: a session's writes are numbered from 1")
    text = session or key
    if not text or text.isspace() or "\0" in text:
        raise InvalidValue("a session's name and an idempotency key can't be empty, and have no zero byte")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidValue(f"{text!r} isn't text") from error
    if size > WRITE_ID_BYTES_MAX:
        what = "session's name" if session else "idempotency key"
        raise IngestError(
            f"the {what} has {size} bytes, of at most {WRITE_ID_BYTES_MAX}",
            code="rows_too_large",
            what=what,
            size=size,
            size_max=WRITE_ID_BYTES_MAX,
        )


def part_of(batch: AppendBatch, places: Sequence[int]) -> AppendBatch:
    """Return some of a batch's requests, with the columns in which they have values."""
    tables = []
    for table in batch.tables:
        rows, counts = rows_of(table, places), [table.counts[place] for place in places]
        tables.append(replace(table, rows=said(rows), counts=counts))
    return replace(batch, tables=tables, write_ids=[batch.write_ids[place] for place in places])


def without_tables(batch: AppendBatch, dropped: Collection[tuple[int, int]]) -> AppendBatch:
    """Return a batch without some tables of some requests: `dropped` has the places of a request and of a table."""
    if not dropped:
        return batch
    tables = []
    for at, table in enumerate(batch.tables):
        left = [0 if (place, at) in dropped else count for place, count in enumerate(table.counts)]
        keep = np.repeat([count > 0 for count in left], table.counts)
        tables.append(replace(table, rows=said(table.rows.filter(pa.array(keep, pa.bool_()))), counts=left))
    return replace(batch, tables=tables)


def rows_of(table: TableBatch, places: Sequence[int]) -> pa.Table:
    """Return a table's rows of some of the requests, in order."""
    ends = np.cumsum(table.counts)
    if isinstance(places, range):
        start = int(ends[places.start] - table.counts[places.start])
        return table.rows.slice(start, int(ends[places.stop - 1]) - start)
    chosen = np.zeros(len(table.counts), dtype=bool)
    chosen[list(places)] = True
    return table.rows.filter(pa.array(np.repeat(chosen, table.counts)))


def said(rows: pa.Table) -> pa.Table:
    """Return the rows with null types for columns without values: other requests' columns."""
    columns = [
        pa.chunked_array([pa.nulls(rows.num_rows)]) if column.null_count == rows.num_rows else column
        for column in rows.columns
    ]
    return pa.table(columns, names=rows.column_names)


def operations_of(write_ids: Sequence[WriteId | None], digests: Sequence[int] | None = None) -> pa.RecordBatch:
    """Return a row of `OPERATION_SCHEMA` for each request at this time, with the digests of those that have an id."""
    count = len(write_ids)
    moments = np.arange(count)
    moments += _MOMENTS.next(count)
    columns = {"commit_ts": pa.array(moments, INSTANT)}
    if digests is not None:
        told = [write_id or _NOTHING for write_id in write_ids]
        columns["session"] = pa.array([write_id.session for write_id in told], pa.string())
        columns["session_number"] = pa.array([write_id.number for write_id in told], pa.int64())
        if any(write_id.key for write_id in told):
            columns["idempotency_key"] = pa.array([write_id.key for write_id in told], pa.string())
        own = [None if write_id is None else digest for write_id, digest in zip(write_ids, digests, strict=True)]
        columns[ROWS_DIGEST] = pa.array(own, pa.int64())
    return append_operations(count, **columns)


class _Moments:
    """The time in microseconds, never the same twice.

    Readers of the log and of the lake distinguish applications' writes by it.

    Without that, a token between two requests of one commit group would stand for neither, and its holder
    wouldn't see its own rows.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_us = 0

    def next(self, count: int) -> int:
        """Return the first of that many consecutive times."""
        with self._lock:
            first = max(time.time_ns() // 1000, self._next_us)
            self._next_us = first + count
            return first


_MOMENTS: Final = _Moments()
_NOTHING: Final = WriteId()
