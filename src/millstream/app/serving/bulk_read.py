"""One bulk read: a table's records between two tokens, in order, in batches of a size that suits a network, and in one set of columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from millstream.app.opened import read_records
from millstream.errors import InvalidValue

if TYPE_CHECKING:
    from millstream.ingest.bulk import GetRequest
    from millstream.wal.reader import StreamReader

BATCH_ROWS: Final = 16_384
"""Small frames are put together to about this many rows: a message costs some tens of microseconds, whatever its size."""
BATCH_BYTES: Final = 4 << 20
"""Larger ones are cut: so much is in memory for each reader, however slow."""


def records(reader: StreamReader, asked: GetRequest) -> Iterator[pa.RecordBatch]:
    """The records, in their order; a batch is of one version of the table's columns.

    Raises:
        UnknownTable, InvalidToken, OffsetExpired, TokenFromFuture: as `OpenHome.read`.
    """
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in read_records(reader, table=asked.table, after=asked.after, upto=asked.upto):
        if held and (rows >= BATCH_ROWS or not held[0].schema.equals(batch.schema, check_metadata=True)):
            yield from _pieces(held)
            held, rows = [], 0
        held.append(batch)
        rows += batch.num_rows
    yield from _pieces(held)


def conformed(batch: pa.RecordBatch, target: pa.Schema) -> pa.RecordBatch:
    """The rows in the columns of `target`: one that they don't have is null, one that it doesn't name is left out.

    Raises:
        InvalidValue: a column had another type once, and a value of then is none of the newer one: nothing is rounded or cut.
    """
    has = batch.schema
    if has.equals(target):
        return pa.RecordBatch.from_arrays(batch.columns, schema=target)
    columns = []
    for field in target:
        place = has.get_field_index(field.name)
        if place < 0:
            columns.append(pa.nulls(batch.num_rows, field.type))
            continue
        column = batch.column(place)
        try:
            columns.append(column if column.type.equals(field.type) else column.cast(field.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise InvalidValue(
                f"column {field.name} was {column.type} once, and a value of then is no {field.type}: {error}",
                hint="Read up to a token before the change and from it on: two calls, each in the columns of its time (`version`).",
                column=field.name,
            ) from error
    return pa.RecordBatch.from_arrays(columns, schema=target)


def _pieces(held: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows, in one batch where they are small, and in several where they are large."""
    if not held:
        return
    together = held[0] if len(held) == 1 else pa.Table.from_batches(held).combine_chunks().to_batches()[0]
    count = together.num_rows
    step = max(1, min(count, count * BATCH_BYTES // max(1, together.nbytes)))
    for row in range(0, count, step):
        yield together.slice(row, step)
