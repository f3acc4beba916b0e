"""One bulk read: a table's records between two tokens, in order, in batches sized for a network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from millstream.export.record_reading import read_records

if TYPE_CHECKING:
    from millstream.serving.flight.requests import GetRequest
    from millstream.wal.reader import StreamReader

BATCH_ROWS: Final = 16_384
"""Small frames are merged to about this many rows: a message costs some tens of microseconds, whatever its size."""
BATCH_BYTES: Final = 4 << 20
"""Larger frames are cut: each reader holds this much memory, however slow it is."""


def records(reader: StreamReader, asked: GetRequest) -> Iterator[pa.RecordBatch]:
    """Yield the records, in their order; a batch has one version of the table's columns.

    Raises:
        UnknownTable, PositionError (`invalid_token`), OffsetExpired, TokenFromFuture, MillstreamError
            (`table_quarantined`): as `OpenHome.read`.
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


def _pieces(held: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the same rows, as one batch if they are small, and as several if they are large."""
    if not held:
        return
    together = held[0] if len(held) == 1 else pa.Table.from_batches(held).combine_chunks().to_batches()[0]
    count = together.num_rows
    step = max(1, min(count, count * BATCH_BYTES // max(1, together.nbytes)))
    for row in range(0, count, step):
        yield together.slice(row, step)
