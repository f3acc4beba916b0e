"""Each request of a batch gets its own part of the batch's outcome."""

from __future__ import annotations

from uuid import uuid4

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wal.plain_operations import MemoryReservations

from millstream.errors import IngestError, InvalidValue
from millstream.ingest.append_requests import TABLES_MAX, check_tables, check_write_id, operations_of
from millstream.model.ids import Epoch, SchemaVersion, ShardId, SourceId, StreamId, TableId
from millstream.model.operations import TableRows, WriteOps
from millstream.model.positions import Offset, SeqRange
from millstream.model.records import Op, append_row_schema
from millstream.model.schema import Column, TableSchema
from millstream.model.writes import WriteId
from millstream.testing.errors import coded
from millstream.testing.files import MemoryFiles
from millstream.wal.reader import StreamReader
from millstream.wal.writing.writer import LogOptions, LogWriter

SCHEMA = TableSchema(TableId(1), SchemaVersion(1), SourceId(0), "public", "t", (Column("v", pa.int64()),))
Place = tuple[int, str | None]


def placed(counts: list[int], places: list[Place]) -> WriteOps:
    """Requests of so many rows. All rows, numbered from 0, go round the given shards and partitions."""
    total = sum(counts)
    of_row = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    index = np.concatenate([np.arange(count) for count in counts])
    where = np.arange(total) % len(places)
    tables = []
    for i, (shard, partition) in enumerate(places):
        mine = np.flatnonzero(where == i)
        if len(mine):
            facts = {
                "__operation": pa.array(of_row[mine]),
                "__index": pa.array(index[mine]),
                "__op": pa.array(np.full(len(mine), int(Op.CREATE), dtype=np.uint8)),
                "v": pa.array(mine),
            }
            schema = append_row_schema(SCHEMA)
            columns = [facts.get(f.name, pa.nulls(len(mine), f.type)) for f in schema]
            batch = pa.RecordBatch.from_arrays(columns, schema=schema)
            tables.append(TableRows(SCHEMA, batch, ShardId(shard), partition))
    return WriteOps(operations_of([None] * len(counts)), tuple(tables))


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(1, 5), min_size=1, max_size=8),
            st.lists(
                st.tuples(st.integers(0, 2), st.sampled_from([None, "p", "q"])), min_size=1, max_size=5, unique=True
            ),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_each_request_finds_its_rows_where_it_is_told(batches: list[tuple[list[int], list[Place]]]) -> None:
    files = MemoryFiles()
    shards = [ShardId(shard) for shard in range(3)]
    stream = StreamId(uuid4())
    told: list[tuple[list[int], SeqRange, dict[ShardId, tuple[Offset, Offset]]]] = []
    options = LogOptions(segment_bytes=1 << 20, disk_used_max=1.0)
    with LogWriter.open(
        "/w",
        stream=stream,
        shards=shards,
        epoch=Epoch(1),
        reservations=MemoryReservations(),
        files=files,
        options=options,
    ) as log:
        for counts, places in batches:
            ops = placed(counts, places)
            parts = ops.split_ack(log.append(ops))
            values = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
            told += [
                (of_one.tolist(), part.seqs, dict(part.offsets)) for of_one, part in zip(values, parts, strict=True)
            ]
    reader = StreamReader("/w", files=files)
    by_offset, by_seq = {}, {}
    for shard in shards:
        for found in reader.read(shard, Offset(0)):
            for row in found.batch.to_pylist():
                by_offset[shard, row["__offset"]] = by_seq[row["__seq"]] = row["v"]
    for wanted, numbers, offsets in told:
        assert sorted(by_seq[number] for number in range(numbers.first, numbers.first + numbers.count)) == wanted
        there = [by_offset[shard, o] for shard, (start, end) in offsets.items() for o in range(start, end)]
        assert sorted(there) == wanted


def test_no_two_requests_are_of_one_moment() -> None:
    found = [
        moment for count in (1, 5, 1, 3) for moment in operations_of([None] * count).column("commit_ts").to_pylist()
    ]
    assert len(set(found)) == len(found)
    assert found == sorted(found)


@pytest.mark.parametrize(
    "wrong",
    [
        WriteId(key=""),
        WriteId(key=7),  # type: ignore[arg-type]
        WriteId(key=b"k"),  # type: ignore[arg-type]
        WriteId(session="s"),
        WriteId(number=1),
        WriteId(session="s", number=0),
        WriteId(session="s", number="1"),  # type: ignore[arg-type]
        WriteId(session="s", number=1, key="k"),
    ],
)
def test_what_tells_no_write_apart_is_refused_by_name(wrong: WriteId) -> None:
    with pytest.raises(InvalidValue):
        check_write_id(wrong)


def test_tables_are_counted_before_their_names_are_read() -> None:
    with pytest.raises(IngestError, check=coded("rows_too_large")):
        check_tables(['"no name', *(f"t{number}" for number in range(TABLES_MAX))])
    assert len(check_tables([f"t{number}" for number in range(TABLES_MAX)])) == TABLES_MAX
