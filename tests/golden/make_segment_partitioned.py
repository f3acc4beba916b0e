"""Write segment-partitioned.wal and segment-partitioned.json: run once, when records got their leaf partition."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pyarrow as pa
from tests.golden.make_segment_v2 import ORDERS
from tests.golden.sealed import MOMENT, write_golden

from millstream.codec.checksums import Bytes
from millstream.codec.log_directory import BATCH_SCHEMA
from millstream.codec.log_frame import FrameHeader, FrameKind, encode_records_frame, encode_schema_frame
from millstream.codec.log_segment import SegmentHeader
from millstream.model.ids import Epoch, GroupNumber, RegionId, ShardId, SourceId, StreamId, TableId, WriterId
from millstream.model.operations import OPERATION_SCHEMA, OperationKind
from millstream.model.positions import Lsn, Offset, Seq
from millstream.model.records import Op, log_row_schema

LEAFY = replace(ORDERS, table_id=TableId(4), name="leafy", relation_oid=16_390, partitioned=True)


def records_frame(header: FrameHeader) -> list[Bytes]:
    """A transaction with a row of a known leaf, one of an unknown leaf and a truncated leaf, and a leaf that a look missed."""
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
            {"operation": 0, "table_id": 4, "schema_version": 2, "first_seq": 5001, "count": 3},
            {"operation": 0, "table_id": 3, "schema_version": 2, "first_seq": 5004, "count": 1},
            {"operation": 1, "table_id": 4, "schema_version": 2, "first_seq": 5005, "count": 1},
        ],
        schema=BATCH_SCHEMA,
    )
    leafy = pa.RecordBatch.from_pylist(
        [
            {"__offset": 1000, "__index": 0, "__op": Op.CREATE, "__partition_oid": 16_391, "id": 1, "note": "first"},
            {"__offset": 1002, "__index": 2, "__op": Op.CREATE, "id": 2},
            {"__offset": 1003, "__index": 3, "__op": Op.PARTITION_LEFT, "__partition_oid": 16_391,
             "__before": [("partition", 'public."leafy 1"')]},
            {"__offset": 1004, "__index": 0, "__op": Op.PARTITION_LEFT, "__partition_oid": 4_294_967_295,
             "__before": [("partition", "other.leafy_2")]},
        ],
        schema=log_row_schema(LEAFY),
    )  # fmt: skip
    plain = pa.RecordBatch.from_pylist(
        [{"__offset": 1001, "__index": 1, "__op": Op.CREATE, "id": 7, "note": "of a table without partitions"}],
        schema=log_row_schema(ORDERS),
    )
    return encode_records_frame(header, operations, batches, [(LEAFY, leafy), (ORDERS, plain)])


def main() -> None:
    """Write both files."""
    stream = StreamId(UUID("5f0c21aa-0d5e-4b7e-9c1e-0123456789ab"))
    segment = SegmentHeader(
        stream, RegionId(0), ShardId(1), Epoch(7), Offset(1000), bytes(range(32)), 1_795_178_096_789_000_000
    )
    facts = {
        "group_last_seq": Seq(5005), "group": GroupNumber(42), "epoch": Epoch(7), "region": RegionId(0),
        "shard": ShardId(1), "writer": WriterId(1), "other_shards": (ShardId(0),), "reserved_to": Seq(1_000_000),
        "reached": {SourceId(1): Lsn(0x16B374D900)},
    }  # fmt: skip
    schema_header = FrameHeader(FrameKind.SCHEMA, Offset(1000), 0, Seq(0), Seq(0), more=True, **facts)
    records_header = FrameHeader(FrameKind.RECORDS, Offset(1000), 5, Seq(5001), Seq(5005), **facts)
    schemas = [encode_schema_frame(schema_header, schema) for schema in (LEAFY, ORDERS)]
    write_golden("segment-partitioned", segment, [*schemas, records_frame(records_header)])


if __name__ == "__main__":
    main()
