"""An operation as bytes: it is decoded to the bit, and damaged bytes never give another operation."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wal.plain_operations import plain_ops, plain_table

from millstream.codec.buffered_op import VERSION, decode_op, encode_op
from millstream.codec.checksums import crc32c
from millstream.errors import CodecError, CorruptFrame, InvalidValue, UnsupportedFormat
from millstream.model.ids import ShardId, SourceId
from millstream.model.operations import WriteOps
from millstream.model.positions import Lsn
from millstream.testing.errors import coded
from millstream.testing.write_buffer import application_op, every_kind_op, same_op

GOLDEN = Path(__file__).parent.parent / "golden" / "buffered-op-v1.bin"
SHARD = ShardId(5)


def with_crc(data: bytes) -> bytes:
    return data[:4] + crc32c(data[8:]).to_bytes(4, "little") + data[8:]


@given(
    texts=st.lists(st.text(), min_size=1, max_size=20),
    partition=st.none() | st.text(max_size=20),
    reached=st.dictionaries(st.integers(1, 2**32 - 1), st.integers(0, 2**63), max_size=3),
)
def test_what_goes_in_comes_out(texts: list[str], partition: str | None, reached: dict[int, int]) -> None:
    op = application_op(texts=texts, partition=partition)
    op = replace(op, reached={SourceId(source): Lsn(lsn) for source, lsn in reached.items()})
    found = decode_op(encode_op(op), SHARD)
    assert same_op(found, op)
    assert {table.shard for table in found.tables} == {SHARD}


def test_every_type_null_and_field_comes_out() -> None:
    op = every_kind_op()
    found = decode_op(encode_op(op), SHARD)
    assert same_op(found, op)
    assert [str(table.rows.schema) for table in found.tables] == [str(table.rows.schema) for table in op.tables]


def test_the_first_version_is_read_for_ever() -> None:
    assert VERSION == 1
    assert same_op(decode_op(GOLDEN.read_bytes(), SHARD), every_kind_op())


def test_damage_anywhere_is_said() -> None:
    data = encode_op(every_kind_op())
    chance = random.Random(7)
    for _ in range(500):
        place = chance.randrange(len(data))
        changed = bytearray(data)
        changed[place] ^= 1 << chance.randrange(8)
        with pytest.raises(CorruptFrame):
            decode_op(bytes(changed), SHARD)
    for length in range(0, len(data), 97):
        with pytest.raises(CorruptFrame):
            decode_op(data[:length], SHARD)
    with pytest.raises(CorruptFrame, check=coded("truncated_frame")):
        decode_op(b"", SHARD)


@given(st.data())
def test_bytes_of_a_sender_that_lies_are_an_error_or_an_operation(data: st.DataObject) -> None:
    """With a valid checksum, the bytes give an operation or one of our errors."""
    changed = bytearray(encode_op(application_op()))
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(8, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode_op(with_crc(bytes(changed)), SHARD)
    except (CodecError, UnsupportedFormat):
        return
    assert found.operations.num_rows == 1


def test_a_newer_version_is_named() -> None:
    data = bytearray(encode_op(application_op()))
    data[8] = 9
    with pytest.raises(UnsupportedFormat) as caught:
        decode_op(with_crc(bytes(data)), SHARD)
    assert caught.value.details["version"] == 9


def test_rows_of_another_operation_or_out_of_order_are_refused() -> None:
    op = application_op(texts=["one", "two"])
    (table,) = op.tables
    for column, values in ((0, [0, 1]), (1, [1, 0]), (1, [0, 0])):
        field = table.rows.schema.field(column)
        rows = table.rows.set_column(column, field, pa.array(values, field.type))
        with pytest.raises(CorruptFrame):
            decode_op(encode_op(replace(op, tables=(replace(table, rows=rows),))), SHARD)


def test_what_is_no_single_operation_is_refused() -> None:
    table = plain_table(1)
    with pytest.raises(InvalidValue):
        encode_op(plain_ops({1: [(table, 1, "a")], 2: [(table, 1, "b")]}))


def test_operations_that_travel_together_are_told_apart() -> None:
    """Split on each of its shards, every operation has all its rows, in their order, and none twice."""
    tables = [plain_table(1), plain_table(2), plain_table(3)]
    together = plain_ops(
        {
            1: [(tables[0], 2, "a"), (tables[1], 1, "b")],
            2: [(tables[2], 3, "c")],
            3: [(tables[0], 1, "d"), (tables[2], 1, "e")],
        },
        shard_of={2: 1},
    )
    singles = together.split()
    assert [op.operations.column("xid").to_pylist() for op in singles] == [[1], [2], [3]]

    def texts(op: WriteOps) -> list[list[str]]:
        return [table.rows.column("text").to_pylist() for table in op.tables]

    assert [texts(op) for op in singles] == [[["a", "a"], ["b"]], [["c"] * 3], [["d"], ["e"]]]
    assert all(same_op(decode_op(encode_op(op), SHARD), replace(op, behind={})) for op in singles)
    parts = singles[0].by_shard()
    assert {shard: texts(part) for shard, part in parts.items()} == {ShardId(0): [["a", "a"]], ShardId(1): [["b"]]}
