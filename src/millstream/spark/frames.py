"""`layout=frames`: a stream's records as one row for each table and stretch of the log.

So one Spark job can carry all tables of a stream, each with its own columns and schema versions,
and a new table or column changes nothing in Spark's plan. If a table has few bytes in a stretch,
its row holds the records themselves, as Arrow IPC bytes with the schema in their metadata: the
reader opens no file. If it has many, the row names their place in the log. An executor that can
read the stretch in one task can read it in another, and megabytes needn't pass through the JVM
twice.

Every partition of a batch begins with a *marker*: a row of table 0 without records. It gives the
batch's bounds even if no table has a record in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Final
from uuid import UUID

import pyarrow as pa

from millstream.model.ids import SchemaVersion, StreamId, TableId
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema
from millstream.wal.frame_index import SchemaPlace
from millstream.wal.reader import LogSpan, StreamReader, TablePart, TableRecords
from millstream.wal.table_batches import one_batch, table_batches

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
        pa.field("span", pa.string(), nullable=False),
    ]
)
"""One of `ipc` and `span` is empty; in a marker both are. The batch holds the stream's records with
`batch_after < seq <= batch_upto`; both are cuts."""

INLINE_BYTES_MAX: Final = 1 << 20
"""Maximum log bytes of a table and stretch that are stored in the row. Up to it, opening the segment
again costs more than carrying the bytes."""

PACKED_BYTES: Final = 16 << 20
"""Approximate size of the Arrow data in one row. Large enough that a busy table's small frames become
few batches, small enough that a row of them passes easily through Spark's memory."""


def marker(after: Seq, upto: Seq) -> pa.RecordBatch:
    """Return the row that a partition begins with."""
    return _row(MARKER, SchemaVersion(0), Seq(0), Seq(0), 0, after, upto)


def refer(folder: str, span: LogSpan, parts: Sequence[TablePart], after: Seq, upto: Seq) -> pa.RecordBatch:
    """Return the row that names the place of a table's records.

    It covers all of the table's `parts` of a span, of one schema version or several.

    Args:
        folder: the log's.
        span: the stretch.
        parts: the table's parts of it, at least one.
        after: exclusive start of the batch.
        upto: inclusive end of the batch.
    """
    newest = max(parts, key=lambda part: part.schema.version).schema
    places = [place for place in span.schema_frames if place.table_id == newest.table_id]
    facts = {"folder": folder} | asdict(replace(span, schema_frames=tuple(places))) | {"stream": str(span.stream)}
    first, last = min(part.first_seq for part in parts), max(part.last_seq for part in parts)
    rows = sum(part.rows for part in parts)
    return _row(newest.table_id, newest.version, first, last, rows, after, upto, span=json.dumps(facts))


def pack(records: Iterable[TableRecords], after: Seq, upto: Seq) -> Iterator[pa.RecordBatch]:
    """Yield rows that hold their records themselves. Memory: about `PACKED_BYTES` for the tables together, twice."""
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


def records_in(table_id: TableId, ipc: pa.Buffer, span: str) -> Iterator[tuple[TableSchema, pa.RecordBatch]]:
    """Yield the records of one row in `record_schema`, each batch with its schema, in order.

    Raises:
        OffsetExpired, CorruptWal: from a row that names a stretch of the log.
    """
    if not span:
        with pa.ipc.open_stream(ipc) as stream:
            schema = TableSchema.from_arrow(stream.schema)
            for batch in stream:
                yield schema, batch
        return
    facts = json.loads(span)
    folder = facts.pop("folder")
    places = tuple(SchemaPlace(*place) for place in facts.pop("schema_frames"))
    stream = StreamId(UUID(facts.pop("stream")))
    stretch = LogSpan(**facts, schema_frames=places, stream=stream)
    yield from table_batches(StreamReader(folder), stretch, table_id)


def _pack_one(pieces: list[TableRecords], after: Seq, upto: Seq) -> pa.RecordBatch:
    schema = pieces[0].schema
    batch = one_batch(pieces)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return _row(
        schema.table_id,
        schema.version,
        pieces[0].first_seq,
        pieces[-1].last_seq,
        batch.num_rows,
        after,
        upto,
        ipc=sink.getvalue().to_pybytes(),
    )


def _row(
    table_id: TableId,
    version: SchemaVersion,
    first: Seq,
    last: Seq,
    rows: int,
    after: Seq,
    upto: Seq,
    *,
    ipc: bytes = b"",
    span: str = "",
) -> pa.RecordBatch:
    values = [table_id, version, first, last, rows, after, upto, ipc, span]
    arrays = [pa.array([value], field.type) for value, field in zip(values, FRAMES_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=FRAMES_SCHEMA)
