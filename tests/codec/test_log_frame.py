"""Frames: every field comes back; any flipped or missing byte is a typed error, never wrong data."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.codec.log_samples import Sample, kept_samples

from millstream.codec.arrow_ipc import ColumnPicker, encode_batch
from millstream.codec.checksums import crc32c
from millstream.codec.log_directory import BATCH_SCHEMA
from millstream.codec.log_frame import (
    FRAME_HEADER_MIN,
    RecordsFrame,
    SchemaFrame,
    decode_frame,
    decode_frame_header,
    encode_records_frame,
    frame_extent,
)
from millstream.codec.log_parts import NUMBERS, PART_FLAGS, PART_SIZES, part_schema
from millstream.codec.log_schemas import SchemaSet
from millstream.errors import CodecError, CorruptFrame, LogError, UnsupportedFormat
from millstream.model.ids import RegionId, ShardId, TableId
from millstream.model.operations import OperationKind
from millstream.model.records import Op, record_schema
from millstream.testing.errors import coded

DAMAGE = (CodecError, LogError)


def joined(sample: Sample) -> bytes:
    return b"".join(bytes(b) for b in sample.buffers())


def schemas_of(sample: Sample) -> SchemaSet:
    known = SchemaSet()
    for buffers in sample.schema_frames():
        frame = decode_frame(b"".join(bytes(b) for b in buffers), known)
        assert isinstance(frame, SchemaFrame)
    return known


@given(kept_samples())
def test_a_schema_frame_gives_back_the_schema(sample: Sample) -> None:
    known = schemas_of(sample)
    assert list(known.tables.values()) == list(sample.tables)


@given(kept_samples())
def test_a_records_frame_gives_back_every_field(sample: Sample) -> None:
    data = joined(sample)
    frame = decode_frame(data, schemas_of(sample))
    assert isinstance(frame, RecordsFrame)
    header, length = decode_frame_header(data)
    assert length == len(data)
    assert frame.header == header
    for name in FIELDS:
        assert getattr(header, name) == getattr(sample.header, name), name
    assert frame.operations.equals(sample.operations)
    assert frame.batches.select(sample.batches.schema.names).equals(sample.batches)
    for table, rows in sample.payload:
        assert frame.log_rows(table.table_id, table.version).equals(rows)


FIELDS = (
    "kind", "first_offset", "count", "first_seq", "last_seq", "group_last_seq", "group", "epoch", "region", "shard",
    "writer", "other_shards", "reserved_to", "hybrid_time", "reached", "more", "version",
)  # fmt: skip


@given(kept_samples())
def test_records_spread_the_directory_over_the_rows(sample: Sample) -> None:
    frame = decode_frame(joined(sample), schemas_of(sample))
    assert isinstance(frame, RecordsFrame)
    operations = sample.operations.to_pylist()
    for table, rows in sample.payload:
        ((schema, records),) = list(frame.records(table.table_id, offsets=True))
        assert schema == table
        assert records.schema.equals(record_schema(table, offsets=True), check_metadata=True)
        records.validate(full=True)
        expected = []
        for entry in sample.batches.to_pylist():
            if entry["table_id"] == table.table_id:
                expected += [operations[entry["operation"]]] * entry["count"]
        ((_, timed),) = list(frame.records(table.table_id, moments=True))
        facts = zip(records.to_pylist(), timed.to_pylist(), rows.to_pylist(), expected, strict=True)
        assert records.column("__seq").to_pylist() == sample.seqs[table.table_id]
        for got, told, row, operation in facts:
            copied = operation["kind"] == OperationKind.COPY_CHUNK
            unindexed = copied or operation["kind"] == OperationKind.MESSAGE
            assert got["__offset"] == row["__offset"]
            assert got["__op"] == Op(row["__op"]).letter
            assert got["__commit_lsn"] == operation["commit_lsn"]
            assert got["__commit_index"] == (None if unindexed else row["__index"])
            assert got["__commit_ts"] == (None if copied else operation["commit_ts"])
            moment = operation["commit_ts"]
            assert told["__commit_ts"] == (moment if not copied or got["__op"] != "t" else None)
            assert got["__commit_date"] == (None if moment is None else moment.date())
            assert got["__xid"] == operation["xid"]
            for name in ("__unchanged", "__exact", "__before", *(c.name for c in table.columns)):
                assert got[name] == row[name]


@given(kept_samples())
def test_a_part_has_only_the_columns_that_its_flags_dont_leave_out(sample: Sample) -> None:
    frame = decode_frame(joined(sample), schemas_of(sample))
    assert isinstance(frame, RecordsFrame)
    flags = {part.table_id: part.flags for part in frame.header.parts}
    assert flags == {table.table_id: sample.flags_of(table) for table, _ in sample.payload}
    for (table, rows), message in zip(sample.payload, sample.buffers()[1:], strict=True):
        own = rows.select(part_schema(table, flags[table.table_id]).names)
        assert bytes(message) == bytes(encode_batch(own))


@given(kept_samples(), st.data())
def test_a_part_whose_count_flag_or_first_index_lies_is_refused_or_read_the_same(
    sample: Sample, data: st.DataObject
) -> None:
    """A lie has the right checksums. An index that could be true can't be told: then only indexes and offsets differ.

    The offsets are the same in another order, unless a table that has its own, from before the lie, is among them.
    """
    known = schemas_of(sample)
    true = records_in(joined(sample), known)
    kind = data.draw(st.sampled_from(["flags", "rows", "count", "first_index"]))
    if kind in {"flags", "rows"}:
        lie = lie_about_a_part(sample, kind, data.draw)
    else:
        lie = joined(lie_in_the_directory(sample, kind, data.draw))
    try:
        found = records_in(lie, known)
    except DAMAGE:
        return
    if kind != "first_index":
        assert found == true
        return
    assert list(found) == list(true)
    derived: list[int] = []
    own: list[int] = []
    for table, _ in sample.payload:
        offsets = [row["__offset"] for row in found[table.table_id]]
        if sample.flags_of(table) & NUMBERS:
            derived += offsets
        else:
            own += offsets
            assert offsets == [row["__offset"] for row in true[table.table_id]]
    everything = sorted(row["__offset"] for rows in true.values() for row in rows)
    assert len(set(derived)) == len(derived)
    assert set(derived) <= set(everything)
    assert own or sorted(derived) == everything
    for table, rows in found.items():
        for one, other in zip(rows, true[table], strict=True):
            assert one | {"__offset": 0, "__commit_index": 0} == other | {"__offset": 0, "__commit_index": 0}


@given(kept_samples())
def test_a_part_without_rows_yields_none(sample: Sample) -> None:
    table, rows = sample.payload[0]
    empty = replace(table, table_id=TableId(99))
    none = rows.slice(0, 0).select(part_schema(empty, PART_FLAGS).names)
    header = replace(sample.header, version=2)
    buffers = encode_records_frame(header, sample.operations, sample.batches, [(empty, none)])
    frame = decode_frame(b"".join(map(bytes, buffers)), SchemaSet(tables={(empty.table_id, empty.version): empty}))
    assert isinstance(frame, RecordsFrame)
    ((_, found),) = frame.records(empty.table_id, offsets=True)
    assert found.num_rows == frame.log_rows(empty.table_id, empty.version).num_rows == 0


def records_in(data: bytes, known: SchemaSet) -> dict[int, list[dict[str, Any]]]:
    frame = decode_frame(data, known)
    assert isinstance(frame, RecordsFrame)
    return {
        table: [row for _, records in frame.records(table, offsets=True) for row in records.to_pylist()]
        for table in frame.table_ids()
    }


def lie_about_a_part(sample: Sample, kind: str, draw: Callable[[st.SearchStrategy[int]], int]) -> bytes:
    """Return a frame whose head has other flags, or another count of rows, in one of its parts."""
    frame = bytearray(joined(sample))
    header, _ = decode_frame_header(bytes(frame))
    size = PART_SIZES[header.version]
    fixed = 116 if header.version > 1 else 108
    place = draw(st.integers(0, len(header.parts) - 1))
    at = fixed + 4 * len(header.other_shards) + 12 * len(header.reached) + place * size
    if kind == "rows":
        struct.pack_into("<I", frame, at + 12, draw(st.integers(0, 2 * header.parts[place].rows)))
    elif header.version > 1:
        struct.pack_into("<I", frame, at + 24, draw(st.integers(0, 2 * PART_FLAGS + 1)))
    head = bytes(frame[: frame_extent(frame).head_length])
    struct.pack_into("<I", frame, 4, crc32c(head[:4], head[8:]))
    return bytes(frame)


def lie_in_the_directory(sample: Sample, kind: str, draw: Callable[[st.SearchStrategy[int]], int]) -> Sample:
    """Return a frame whose directory has another count, or another first index, in one or two entries."""
    entries = sample.batches.to_pylist()
    one, other = (draw(st.integers(0, len(entries) - 1)) for _ in range(2))
    by = draw(st.integers(1, 3))
    if kind == "count":
        entries[one]["count"] += by
        entries[other]["count"] -= by
    else:
        entries[one]["first_index"] = draw(st.none() | st.integers(-2, 9) | st.just(2**63 - 1))
    return replace(sample, batches=pa.RecordBatch.from_pylist(entries, schema=BATCH_SCHEMA))


@given(kept_samples(), st.data())
def test_some_columns_are_those_of_all_records(sample: Sample, data: st.DataObject) -> None:
    frame = decode_frame(joined(sample), schemas_of(sample))
    assert isinstance(frame, RecordsFrame)
    for table, _ in sample.payload:
        names = [field.name for field in record_schema(table)]
        picked = frozenset(data.draw(st.sets(st.sampled_from([*names, "there is none of this name"]))))
        ((_, whole),) = list(frame.records(table.table_id))
        ((_, some),) = list(frame.records(table.table_id, columns=picked))
        assert some.equals(whole.select([name for name in names if name in picked | {"__seq"}]))


@pytest.mark.parametrize("rows", [3, 40_000])
@pytest.mark.parametrize("threads", [False, True])
def test_a_picker_decodes_what_it_names_and_nothing_else(rows: int, *, threads: bool) -> None:
    numbers = np.random.default_rng(7).integers(0, 2**60, rows)
    schema = pa.schema(
        [pa.field("a", pa.int64()), pa.field("texts", pa.list_(pa.string())), pa.field("b", pa.string())],
        {"made": "for a test"},
    )
    texts = [[str(n), "x"] if n % 3 else None for n in numbers.tolist()]
    batch = pa.record_batch([pa.array(numbers), texts, [str(n) for n in numbers.tolist()]], schema)
    message = bytes(encode_batch(batch))
    for names in (["b"], ["a", "texts"], [], ["a", "c"], ["a", "texts", "b"]):
        picker = ColumnPicker(schema, names, threads=threads)
        assert picker.decode(message).equals(batch.select([name for name in names if name != "c"]))
        for broken in (
            b"",
            message[:200],
            message[: len(message) // 2],
            bytes(len(message)),
            bytes(schema.serialize()),
        ):
            with pytest.raises(CorruptFrame):
                picker.decode(broken)


@given(kept_samples(), st.data())
def test_a_frame_cut_anywhere_is_truncated(sample: Sample, data: st.DataObject) -> None:
    whole = joined(sample)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(CorruptFrame, check=coded("truncated_frame")):
        decode_frame(cut, schemas_of(sample))


@given(kept_samples(), st.data())
def test_a_flipped_byte_anywhere_is_a_typed_error(sample: Sample, data: st.DataObject) -> None:
    whole = bytearray(joined(sample))
    known = schemas_of(sample)
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DAMAGE):  # noqa: PT012 - parts are verified when they're read
        frame = decode_frame(bytes(whole), known)
        assert isinstance(frame, RecordsFrame)
        for table in sample.tables:
            list(frame.records(table.table_id))


@given(kept_samples(), st.data())
def test_a_flipped_byte_in_a_schema_frame_is_a_typed_error(sample: Sample, data: st.DataObject) -> None:
    whole = bytearray(b"".join(bytes(b) for b in sample.schema_frames()[0]))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DAMAGE):
        decode_frame(bytes(whole), SchemaSet())


@given(st.binary(min_size=FRAME_HEADER_MIN, max_size=400))
def test_garbage_is_a_typed_error(garbage: bytes) -> None:
    with pytest.raises(DAMAGE):
        decode_frame(garbage, SchemaSet())


def test_zeros_are_no_frame() -> None:
    with pytest.raises(CorruptFrame):
        frame_extent(bytes(4096))


@given(kept_samples())
def test_a_table_is_read_without_the_bytes_of_the_others(sample: Sample) -> None:
    whole = joined(sample)
    head_length = frame_extent(whole).head_length
    wanted = sample.payload[-1][0]
    asked: list[int] = []

    def read(position: int, length: int) -> bytes:
        asked.append(length)
        return whole[head_length + position : head_length + position + length]

    frame = decode_frame(whole[:head_length], schemas_of(sample), read_payload=read)
    assert isinstance(frame, RecordsFrame)
    list(frame.records(wanted.table_id))
    assert sum(asked) == sum(part.length for part in frame.header.parts if part.table_id == wanted.table_id)


@given(kept_samples())
def test_a_head_of_version_1_lacks_region_and_shard_and_reads_as_0(sample: Sample) -> None:
    header = replace(sample.header, region=RegionId(0), shard=ShardId(0), version=2)
    newer, older = (replace(sample, header=replace(header, version=version)) for version in (2, 1))
    frames = [decode_frame(joined(each), schemas_of(sample)) for each in (newer, older)]
    assert isinstance(frames[0], RecordsFrame)
    assert isinstance(frames[1], RecordsFrame)
    parts = [(part.table_id, part.schema_version, part.rows) for part in frames[1].header.parts]
    assert parts == [(part.table_id, part.schema_version, part.rows) for part in frames[0].header.parts]
    assert replace(frames[1].header, version=2, parts=frames[0].header.parts) == frames[0].header
    flags = [newer.flags_of(table) for table, _ in newer.payload]
    if not any(flags):  # version 2 also has the flags
        assert 0 <= len(joined(newer)) - len(joined(older)) - 4 * len(flags) <= 12
    for table, _ in sample.payload:
        for one, other in zip(frames[0].records(table.table_id), frames[1].records(table.table_id), strict=True):
            assert one[1].equals(other[1])
    with pytest.raises(AssertionError, match="neither region nor shard"):
        replace(sample, header=replace(header, version=1, shard=ShardId(1))).buffers()


@given(kept_samples())
def test_a_flag_that_isnt_known_is_refused_as_a_newer_format(sample: Sample) -> None:
    head = bytearray(bytes(sample.buffers()[0]))
    for flags in (2, 4, 8, 1 << 15):
        head[14:16] = struct.pack("<H", flags)
        head[4:8] = struct.pack("<I", crc32c(bytes(head[:4]), bytes(head[8:])))
        with pytest.raises(UnsupportedFormat):
            decode_frame_header(bytes(head))
