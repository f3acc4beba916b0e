"""The shortcuts in planning a group give what the general way gives."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from tests.wal.plain_operations import plain_ops, plain_table

from millstream.codec.log_frame import FrameHeader, FrameKind, RecordsFrame, decode_frame, encode_records_frame
from millstream.codec.log_parts import PART_FLAGS, flags_of, part_schema
from millstream.codec.log_schemas import SchemaSet
from millstream.model.ids import (
    Epoch,
    GroupNumber,
    RegionId,
    SchemaVersion,
    ShardId,
    SourceId,
    TableId,
    WriterId,
)
from millstream.model.operations import (
    FIRST_SHARD,
    OPERATION_SCHEMA,
    OperationKind,
    TableRows,
    WriteOps,
    append_operations,
    append_rows,
)
from millstream.model.positions import Offset, Seq
from millstream.model.records import Op, append_row_schema
from millstream.model.schema import Column, TableSchema
from millstream.wal.writing.record_numbering import FramePlan, plan_chunk, plan_group

SHARD = ShardId(3)


def table(version: int) -> TableSchema:
    columns = (Column("id", pa.int64()), Column("note", pa.string()))
    return TableSchema(TableId(7), SchemaVersion(version), SourceId(1), "public", "t", columns, ("id",), ("id",))


def one_operation(schema: TableSchema, rows: int, first_index: int, commit_ts: int | None) -> WriteOps:
    operation = {field.name: None for field in OPERATION_SCHEMA}
    operation |= {"kind": int(OperationKind.TRANSACTION), "source": 1, "commit_lsn": 5, "commit_ts": commit_ts}
    arrow = append_row_schema(schema)
    columns = [
        pa.array(np.zeros(rows, dtype=np.int32)),
        pa.array(np.arange(first_index, first_index + rows)),
        pa.array(np.full(rows, int(Op.CREATE), dtype=np.uint8)),
        *(pa.nulls(rows, field.type) for field in list(arrow)[3:6]),
        pa.array(np.arange(rows)),
        pa.array([f"row {n}" for n in range(rows)]),
    ]
    return WriteOps(
        pa.RecordBatch.from_pylist([operation], schema=OPERATION_SCHEMA),
        (TableRows(schema, pa.RecordBatch.from_arrays(columns, schema=arrow), SHARD),),
    )


@given(
    version=st.integers(1, 4),
    rows=st.integers(1, 40),
    first_index=st.integers(0, 5),
    seq=st.integers(1, 10**12),
    base=st.integers(0, 10**12),
    commit_ts=st.none() | st.integers(0, 10**15),
)
def test_an_operation_alone_is_planned_as_one_among_others(
    version: int, rows: int, first_index: int, seq: int, base: int, commit_ts: int | None
):
    schema = table(version)
    ops = one_operation(schema, rows, first_index, commit_ts)
    empty = TableRows(schema, ops.tables[0].rows.slice(0, 0), SHARD)

    short = plan_group([ops], first_seq=Seq(seq), base={SHARD: Offset(base)}, frame_bytes_max=1 << 24)
    # An entry without rows changes nothing, but this is no longer the simplest case.
    whole = WriteOps(ops.operations, (*ops.tables, empty))
    long = plan_group([whole], first_seq=Seq(seq), base={SHARD: Offset(base)}, frame_bytes_max=1 << 24)

    assert list(short) == list(long) == [SHARD]
    (one,), (other,) = short[SHARD], long[SHARD]
    for name in FramePlan.__slots__:
        assert getattr(one, name) == getattr(other, name), name
    rows = one.payload[0][1]
    assert flags_of(rows) == PART_FLAGS  # consecutive, and nothing in the sparse columns
    assert rows.schema.equals(part_schema(schema, PART_FLAGS))


@given(
    counts=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=5), min_size=1, max_size=6),
    tables=st.lists(st.integers(1, 2), min_size=30, max_size=30),
    partitions=st.lists(st.sampled_from([None, "north"]), min_size=30, max_size=30),
    seq=st.integers(1, 10**12),
    base=st.integers(0, 10**12),
)
def test_small_appends_are_planned_together_as_each_by_itself(
    counts: list[list[int]], tables: list[int], partitions: list[str | None], seq: int, base: int
):
    schemas = {version: table(version) for version in (1, 2)}
    facts = list(zip((count for run in counts for count in run), tables, partitions, strict=False))

    def ops_of(places: range) -> WriteOps:
        """Return the operations at these places as one submission."""
        rows = []
        for version, partition in dict.fromkeys(facts[place][1:] for place in places):
            own = [facts[place][0] if facts[place][1:] == (version, partition) else 0 for place in places]
            said = [f"{place}" for place, count in zip(places, own, strict=True) for _ in range(count)]
            columns = [pa.array([n for count in own for n in range(count)], pa.int64()), pa.array(said)]
            rows.append(TableRows(schemas[version], append_rows(schemas[version], columns, own), SHARD, partition))
        traces = pa.array([f"{place}" for place in places])
        return WriteOps(append_operations(len(places), trace_id=traces), tuple(rows))

    whole = ops_of(range(len(facts)))
    together = plan_group([whole], first_seq=Seq(seq), base={SHARD: Offset(base)}, frame_bytes_max=1 << 24)
    apart = [ops_of(range(place, place + 1)) for place in range(len(facts))]
    one_by_one = plan_group(apart, first_seq=Seq(seq), base={SHARD: Offset(base)}, frame_bytes_max=1 << 24)
    (one,), (other,) = together[SHARD], one_by_one[SHARD]
    for name in FramePlan.__slots__:
        assert getattr(one, name) == getattr(other, name), name


@given(
    operations=st.lists(
        st.lists(st.tuples(st.sampled_from([1, 2, 3]), st.integers(1, 4)), min_size=1, max_size=5),
        min_size=1,
        max_size=5,
    ),
    chunked=st.booleans(),
    frame_bytes_max=st.sampled_from([200, 1 << 24]),
)
def test_parts_without_numbers_are_read_as_whole_rows(
    operations: list[list[tuple[int, int]]], *, chunked: bool, frame_bytes_max: int
):
    """A transaction that returns to a table has alternating indexes: its parts keep their own numbers."""
    tables = {number: plain_table(number) for number in (1, 2, 3)}
    ops = plain_ops(
        {1 + n: [(tables[which], count, f"{n}") for which, count in pieces] for n, pieces in enumerate(operations)}
    )
    plans = {}
    for whole_rows in (False, True):
        facts = {"base": {FIRST_SHARD: Offset(70)}, "frame_bytes_max": frame_bytes_max, "whole_rows": whole_rows}
        if chunked and len(operations) == 1:
            firsts = {(FIRST_SHARD, number): Seq(100 * number) for number in tables}
            (plans[whole_rows],) = plan_chunk(ops.operations, ops.tables, next_seq=firsts, **facts).values()
        else:
            (plans[whole_rows],) = plan_group([ops], first_seq=Seq(500), **facts).values()
    schemas = SchemaSet(tables={(table.table_id, table.version): table for table in tables.values()})
    for plan, whole in zip(plans[False], plans[True], strict=True):
        assert plan.batches.equals(whole.batches)
        frame, other = (decoded(each, schemas) for each in (plan, whole))
        for (schema, rows), (_, own) in zip(whole.payload, plan.payload, strict=True):
            assert flags_of(rows) == 0
            assert frame.log_rows(schema.table_id, schema.version).equals(rows)
            assert [r.equals(o) for (_, r), (_, o) in zip(
                frame.records(schema.table_id, offsets=True), other.records(schema.table_id, offsets=True), strict=True
            )] == [True]  # fmt: skip
            if all(len(dict(pieces)) == len(pieces) for pieces in operations):
                assert flags_of(own) == PART_FLAGS


def decoded(plan: FramePlan, schemas: SchemaSet) -> RecordsFrame:
    """Return a plan's frame as it is read."""
    header = FrameHeader(
        FrameKind.RECORDS, plan.first_offset, plan.count, plan.first_seq, plan.last_seq, plan.last_seq, GroupNumber(1),
        Epoch(1), RegionId(0), FIRST_SHARD, WriterId(1),
    )  # fmt: skip
    data = b"".join(map(bytes, encode_records_frame(header, plan.operations, plan.batches, plan.payload)))
    frame = decode_frame(data, schemas)
    assert isinstance(frame, RecordsFrame)
    return frame
