"""Write segment-header-v1.wal and segment-header-v1.json: a segment whose frames have headers of version 1.

Run once, when the format was fixed: golden files stay as they are, for ever.
"""

from __future__ import annotations

from uuid import UUID

import pyarrow as pa
from tests.golden.make_segment_v2 import ITEMS, ORDERS
from tests.golden.sealed import MOMENT, write_golden

from millstream.codec.checksums import Bytes
from millstream.codec.log_directory import BATCH_SCHEMA
from millstream.codec.log_frame import (
    FrameHeader,
    FrameKind,
    encode_records_frame,
    encode_schema_frame,
)
from millstream.codec.log_segment import SegmentHeader
from millstream.model.ids import (
    Epoch,
    GroupNumber,
    RegionId,
    ShardId,
    SourceId,
    StreamId,
    WriterId,
)
from millstream.model.operations import OPERATION_SCHEMA, OperationKind
from millstream.model.positions import Lsn, Offset, Seq
from millstream.model.records import Op, log_row_schema

BASE = 1000
OPERATIONS = [
    {"kind": OperationKind.TRANSACTION, "source": 1, "commit_lsn": 0x16B374D848, "commit_end_lsn": 0x16B374D900, "xid": 771,
     "commit_ts": MOMENT},
    {"kind": OperationKind.TRANSACTION, "source": 1, "commit_lsn": 0x16B374DA00, "commit_end_lsn": 0x16B374DA30, "xid": 772,
     "commit_ts": MOMENT},
]  # fmt: skip
BATCHES = [
    {"operation": 0, "table_id": 3, "schema_version": 2, "partition": "2026-11-20", "first_seq": 5001, "count": 1},
    {"operation": 0, "table_id": 3, "schema_version": 2, "partition": "2026-11-21", "first_seq": 5002, "count": 1},
    {"operation": 0, "table_id": 4, "schema_version": 1, "partition": None, "first_seq": 5003, "count": 2},
    {"operation": 1, "table_id": 3, "schema_version": 2, "partition": "2026-11-20", "first_seq": 5005, "count": 1},
]
ROWS = {
    ORDERS: [(0, 0, 1), (2, 2, 2), (4, 0, 3)],
    ITEMS: [(1, 1, 11), (3, 3, 12)],
}
"""(offset behind the base, index, id)"""


def frames() -> list[list[Bytes]]:
    """Two schema frames and one with two transactions: the first hits two tables, and two partitions of one of them."""
    facts = {
        "group_last_seq": Seq(5005), "group": GroupNumber(42), "epoch": Epoch(7), "region": RegionId(0), "shard": ShardId(0),
        "writer": WriterId(1), "reserved_to": Seq(1_000_000), "reached": {SourceId(1): Lsn(0x16B374DA30)}, "version": 1,
    }  # fmt: skip
    of_schema = FrameHeader(FrameKind.SCHEMA, Offset(BASE), 0, Seq(0), Seq(0), more=True, **facts)
    of_records = FrameHeader(FrameKind.RECORDS, Offset(BASE), 5, Seq(5001), Seq(5005), **facts)
    operations = pa.RecordBatch.from_pylist(OPERATIONS, schema=OPERATION_SCHEMA)
    batches = pa.RecordBatch.from_pylist(BATCHES, schema=BATCH_SCHEMA)
    payload = [
        (schema, pa.RecordBatch.from_pylist(
            [{"__offset": BASE + at, "__index": index, "__op": Op.CREATE, "id": key} for at, index, key in rows],
            schema=log_row_schema(schema),
        ))
        for schema, rows in ROWS.items()
    ]  # fmt: skip
    return [
        encode_schema_frame(of_schema, ORDERS),
        encode_schema_frame(of_schema, ITEMS),
        encode_records_frame(of_records, operations, batches, payload),
    ]


def main() -> None:
    """Write both files."""
    stream = StreamId(UUID("5f0c21aa-0d5e-4b7e-9c1e-0123456789ab"))
    created_ns = 1_795_178_096_789_000_000
    header = SegmentHeader(stream, RegionId(0), ShardId(0), Epoch(7), Offset(BASE), bytes(range(32)), created_ns)
    write_golden("segment-header-v1", header, frames())


if __name__ == "__main__":
    main()
