"""One table's records of a span, as the pipeline lands them: typed batches, of one schema version each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import pyarrow as pa

from millstream.model.ids import TableId
from millstream.model.schema import TableKind, TableSchema
from millstream.wal.files import RealFiles
from millstream.wal.reader import LogSpan, StreamReader, TableRecords
from millstream.wal.reading.segment_reader import span_source

_TOGETHER_ROWS: Final = 1 << 15
"""A batch of this many rows, plus one frame, is large enough."""


def table_batches(
    reader: StreamReader, span: LogSpan, table_id: TableId
) -> Iterator[tuple[TableSchema, pa.RecordBatch]]:
    """Yield a table's records in `record_schema`, each batch with its schema, in order.

    Copied rows have the moment of their copy as `__commit_ts`. Records of a quarantined table are left out.

    Raises:
        OffsetExpired, CorruptWal: as `StreamReader.read_span`.
    """
    held: list[TableRecords] = []
    rows = 0
    for piece in reader.read_span(span, tables=[table_id], moments=True):
        if is_raw(piece.schema):
            continue
        if held and (piece.schema.version != held[0].schema.version or rows >= _TOGETHER_ROWS):
            yield held[0].schema, one_batch(held)
            held, rows = [], 0
        held.append(piece)
        rows += piece.batch.num_rows
    if held:
        yield held[0].schema, one_batch(held)


def one_batch(pieces: list[TableRecords]) -> pa.RecordBatch:
    """Return many small frames as one batch: every later step has a cost per batch."""
    if len(pieces) == 1:
        return pieces[0].batch
    return pa.concat_batches([piece.batch for piece in pieces])


def schemas_in(span: LogSpan, tables: Iterable[TableId]) -> list[TableSchema]:
    """Return the schemas under which records of some tables may stand in a span, without definitions.

    Raises:
        CorruptWal: its segment is damaged.
    """
    source = span_source(RealFiles(), span, frozenset(tables))
    return [schema for schema in source.known_schemas() if schema.kind is not TableKind.DEFINITION]


def is_raw(schema: TableSchema) -> bool:
    """Whether the records are of a table that was quarantined: bytes of the protocol, which no lake table takes."""
    return schema.kind is TableKind.RAW
