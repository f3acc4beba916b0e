"""`layout=frames`: a stream's records as one row a table and stretch of the log, the records in it as Arrow IPC bytes.

One Spark job can so carry all tables of a stream, each with its own columns and schema versions, and a new table or
column changes nothing in Spark's plan. The table's schema travels in the IPC's own metadata.

Every partition of a batch begins with a *marker*: a row of table 0 without records. It says where the batch begins and ends
even where no table has a record in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import pyarrow as pa

from millstream.model.ids import SchemaVersion, TableId
from millstream.model.positions import Seq
from millstream.model.schema import TableKind, TableSchema
from millstream.wal.reader import TableRecords

MARKER: Final = TableId(0)
"""The catalog numbers tables from 1."""

FRAMES_SCHEMA: Final = pa.schema(
    [
        pa.field("table_id", pa.int64(), nullable=False),
        pa.field("schema_version", pa.int32(), nullable=False),
        pa.field("first_seq", pa.int64(), nullable=False),
        pa.field("last_seq", pa.int64(), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),
        pa.field("batch_after", pa.int64(), nullable=False),
        pa.field("batch_upto", pa.int64(), nullable=False),
        pa.field("ipc", pa.binary(), nullable=False),
    ]
)
"""The batch holds the stream's records with `batch_after < seq <= batch_upto`; both are cuts."""

PACKED_BYTES: Final = 16 << 20
"""Of Arrow data in one row, about: large enough that a busy table's small frames become few batches, small enough that a
row of them passes through Spark's memory with ease."""


def pack(records: Iterable[TableRecords], after: Seq, upto: Seq) -> Iterator[pa.RecordBatch]:
    """Rows of `FRAMES_SCHEMA` for one partition, its marker first. Memory: about `PACKED_BYTES` for the tables together, twice."""
    yield _row(MARKER, SchemaVersion(0), Seq(0), Seq(0), 0, after, upto, b"")
    held: dict[TableId, list[TableRecords]] = {}
    held_bytes = 0
    for piece in records:
        table_id = piece.schema.table_id
        before = held.setdefault(table_id, [])
        if before and before[-1].schema.version != piece.schema.version:
            yield _pack_one(before, after, upto)
            held[table_id] = before = []
        before.append(piece)
        held_bytes += piece.batch.nbytes
        if held_bytes >= PACKED_BYTES:
            for pieces in held.values():
                yield _pack_one(pieces, after, upto)
            held, held_bytes = {}, 0
    for pieces in held.values():
        yield _pack_one(pieces, after, upto)


def unpack(ipc: bytes) -> tuple[TableSchema, list[pa.RecordBatch]]:
    """The table's schema and the records, in `record_schema`, of one row's bytes."""
    with pa.ipc.open_stream(ipc) as stream:
        return TableSchema.from_arrow(stream.schema), list(stream)


def is_raw(piece: TableRecords) -> bool:
    """Whether the records are of a table that was set aside: bytes of the protocol, which no table of the lake takes."""
    return piece.schema.kind is TableKind.RAW


def _pack_one(pieces: list[TableRecords], after: Seq, upto: Seq) -> pa.RecordBatch:
    schema = pieces[0].schema
    table = pa.Table.from_batches([piece.batch for piece in pieces]).combine_chunks()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pieces[0].batch.schema) as writer:
        writer.write_table(table)
    return _row(
        schema.table_id,
        schema.version,
        pieces[0].first_seq,
        pieces[-1].last_seq,
        table.num_rows,
        after,
        upto,
        sink.getvalue().to_pybytes(),
    )


def _row(
    table_id: TableId,
    version: SchemaVersion,
    first: Seq,
    last: Seq,
    rows: int,
    after: Seq,
    upto: Seq,
    ipc: bytes,
) -> pa.RecordBatch:
    values = [table_id, version, first, last, rows, after, upto, ipc]
    arrays = [pa.array([value], field.type) for value, field in zip(values, FRAMES_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=FRAMES_SCHEMA)
