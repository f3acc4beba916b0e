"""Write segment-v2.wal and segment-v2.json: run once, when the format was fixed.

Its first records frame has a part with all columns, its second has parts that leave columns out.
Run again only to add files for a new format version: old golden files stay as they are, for ever.
"""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from uuid import UUID

import pyarrow as pa
from tests.golden.sealed import MOMENT, write_golden

from millstream.codec.checksums import Bytes
from millstream.codec.log_directory import BATCH_SCHEMA
from millstream.codec.log_frame import (
    FrameHeader,
    FrameKind,
    encode_records_frame,
    encode_schema_frame,
)
from millstream.codec.log_parts import BEFORE, NUMBERS, VALUES, part_schema
from millstream.codec.log_segment import SegmentHeader
from millstream.model.ids import (
    Epoch,
    GroupNumber,
    RegionId,
    SchemaVersion,
    ShardId,
    SourceId,
    StreamId,
    TableId,
    WriterId,
)
from millstream.model.operations import OPERATION_SCHEMA, OperationKind
from millstream.model.positions import Lsn, Offset, Seq
from millstream.model.records import Op, log_row_schema
from millstream.model.schema import Column, PgType, TableSchema

ORDERS = TableSchema(
    table_id=TableId(3),
    version=SchemaVersion(2),
    source=SourceId(1),
    namespace="public",
    name="orders",
    columns=(
        Column("id", pa.int64(), PgType(20, -1, "bigint")),
        Column("total", pa.decimal128(12, 2), PgType(1700, 786438, "numeric")),
        Column("note", pa.string(), PgType(25, -1, "text")),
        Column("tags", pa.list_(pa.string()), PgType(1009, -1, "text[]")),
    ),
    identity=("id",),
    key=("id",),
    relation_oid=16385,
)


ITEMS = TableSchema(
    table_id=TableId(4),
    version=SchemaVersion(1),
    source=SourceId(1),
    namespace="public",
    name="items",
    columns=(Column("id", pa.int64(), PgType(20, -1, "bigint")),),
    identity=("id",),
    key=("id",),
    relation_oid=16390,
)


def records_frame(header: FrameHeader) -> list[Bytes]:
    """A transaction with an insert and an update of a toasted row, and a copied row."""
    operations = pa.RecordBatch.from_pylist(
        [
            {"kind": OperationKind.TRANSACTION, "source": 1, "commit_lsn": 0x16B374D848, "commit_end_lsn": 0x16B374D900,
             "xid": 771, "commit_ts": MOMENT},
            {"kind": OperationKind.COPY_CHUNK, "source": 1, "commit_lsn": 0x16B374DA00, "commit_ts": MOMENT,
             "chunk_id": "3/1/0"},
        ],
        schema=OPERATION_SCHEMA,
    )  # fmt: skip
    batches = pa.RecordBatch.from_pylist(
        [
            {"operation": 0, "table_id": 3, "schema_version": 2, "first_seq": 5001, "count": 2},
            {"operation": 1, "table_id": 3, "schema_version": 2, "first_seq": 5003, "count": 1},
        ],
        schema=BATCH_SCHEMA,
    )
    rows = pa.RecordBatch.from_pylist(
        [
            {"__offset": 1000, "__index": 0, "__op": Op.CREATE, "id": 1, "total": Decimal("12.50"), "note": "first",
             "tags": ["a", None]},
            {"__offset": 1001, "__index": 1, "__op": Op.UPDATE, "id": 2, "__unchanged": ["note"],
             "__exact": [("total", "NaN")], "__before": [("id", "1")]},
            {"__offset": 1002, "__index": 0, "__op": Op.COPY, "id": 9, "total": Decimal("0.01"), "note": "", "tags": []},
        ],
        schema=log_row_schema(ORDERS),
    )  # fmt: skip
    return encode_records_frame(header, operations, batches, [(ORDERS, rows)])


def records_frame_without_numbers(header: FrameHeader) -> list[Bytes]:
    """A transaction that writes a row to another table first, and an append to that table."""
    operations = pa.RecordBatch.from_pylist(
        [
            {"kind": OperationKind.TRANSACTION, "source": 1, "commit_lsn": 0x16B374DB00, "commit_end_lsn": 0x16B374DB30,
             "xid": 772, "commit_ts": MOMENT},
            {"kind": OperationKind.APPEND, "source": 0, "commit_ts": MOMENT},
        ],
        schema=OPERATION_SCHEMA,
    )  # fmt: skip
    batches = pa.RecordBatch.from_pylist(
        [
            {"operation": 0, "table_id": 3, "schema_version": 2, "first_seq": 5004, "count": 2, "first_index": 1},
            {"operation": 0, "table_id": 4, "schema_version": 1, "first_seq": 5006, "count": 1, "first_index": 0},
            {"operation": 1, "table_id": 4, "schema_version": 1, "first_seq": 5007, "count": 2, "first_index": 0},
        ],
        schema=BATCH_SCHEMA,
    )
    orders = pa.RecordBatch.from_pylist(
        [
            {"__op": Op.DELETE, "id": 1},
            {"__op": Op.CREATE, "id": 3, "total": Decimal("7.00"), "note": "third", "tags": None},
        ],
        schema=part_schema(ORDERS, NUMBERS | VALUES | BEFORE),
    )
    items = pa.RecordBatch.from_pylist(
        [
            {"__op": Op.UPDATE, "__before": [("id", "20")], "id": 21},
            {"__op": Op.CREATE, "id": 22},
            {"__op": Op.CREATE, "id": 23},
        ],
        schema=part_schema(ITEMS, NUMBERS | VALUES),
    )
    return encode_records_frame(header, operations, batches, [(ORDERS, orders), (ITEMS, items)])


def main() -> None:
    """Write both files."""
    stream = StreamId(UUID("5f0c21aa-0d5e-4b7e-9c1e-0123456789ab"))
    segment = SegmentHeader(
        stream, RegionId(0), ShardId(1), Epoch(7), Offset(1000), bytes(range(32)), 1_795_178_096_789_000_000
    )
    facts = {
        "group_last_seq": Seq(5008), "group": GroupNumber(42), "epoch": Epoch(7), "region": RegionId(0),
        "shard": ShardId(1), "writer": WriterId(1), "other_shards": (ShardId(0),), "reserved_to": Seq(1_000_000),
        "reached": {SourceId(1): Lsn(0x16B374DB30)},
    }  # fmt: skip
    schema_header = FrameHeader(FrameKind.SCHEMA, Offset(1000), 0, Seq(0), Seq(0), more=True, **facts)
    records_header = FrameHeader(FrameKind.RECORDS, Offset(1000), 3, Seq(5001), Seq(5003), more=True, **facts)
    next_header = FrameHeader(FrameKind.RECORDS, Offset(1003), 5, Seq(5004), Seq(5008), **facts)
    frames = [
        encode_schema_frame(schema_header, ORDERS),
        records_frame(records_header),
        encode_schema_frame(replace(schema_header, first_offset=Offset(1003)), ITEMS),
        records_frame_without_numbers(next_header),
    ]
    write_golden("segment-v2", segment, frames)


if __name__ == "__main__":
    main()
