"""The requirements for every write buffer: one suite for all of them.

Subclass it in a test module and provide a buffer, and its possible faults:

    class TestOurs(WriteBufferConformance):
        @pytest.fixture
        def stage(self):
            return OurStage()  # a BufferStage

The suite uses only a buffer's port (`millstream.ports.WriteBuffer`) and this stage.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import partial
from typing import Any, Final, Protocol

import pyarrow as pa
import pytest

from millstream.errors import (
    BufferedOpUndecodable,
    BufferMissing,
    BufferOffsetGone,
    InvalidValue,
    WriteBufferError,
    WriterClosed,
)
from millstream.model.buffered_operations import BufferedOp, BufferMeta, BufferOffset, ReadPause
from millstream.model.ids import SchemaVersion, ShardId, SourceId, TableId
from millstream.model.operations import OPERATION_SCHEMA, OperationKind, TableRows, WriteOps
from millstream.model.records import Op, append_row_schema
from millstream.model.schema import Column, TableSchema
from millstream.ports import ShardReader, WriteBuffer
from millstream.testing.errors import coded
from millstream.workers import Worker

__all__ = ["BufferStage", "WriteBufferConformance", "application_op", "next_op", "same_op"]

NORTH: Final = ShardId(0)
SOUTH: Final = ShardId(1)
_PATIENCE_S: Final = 60.0
_MOMENT_US: Final = 1_790_000_000_000_000
_COLUMNS: Final = (
    ("id", pa.int64(), [1, 2, None, -(2**63)]),
    ("small", pa.int16(), [-32768, 32767, None, 0]),
    ("real", pa.float64(), [1.5, float("inf"), -0.0, None]),
    ("single", pa.float32(), [0.5, None, 3.0, -0.0]),
    ("said", pa.bool_(), [True, False, None, True]),
    ("text", pa.string(), ["", "naïve ✓", None, "a\x00b"]),
    ("bytes", pa.binary(), [b"", b"\x00\xff", None, b"x"]),
    ("price", pa.decimal128(20, 4), [Decimal("1.5000"), Decimal(-1), None, Decimal(0)]),
    ("day", pa.date32(), [dt.date(1, 1, 1), dt.date(9999, 12, 31), None, dt.date(2026, 1, 1)]),
    ("moment", pa.timestamp("us", tz="UTC"), [0, -1, None, 1_790_000_000_123_456]),
    ("local", pa.timestamp("us"), [0, None, 5, 1_790_000_000_123_456]),
    ("tags", pa.list_(pa.string()), [[], ["a", None], None, ["b"]]),
)
"""Every kind of column that the log has, with what is easily lost."""


class BufferStage(Protocol):
    """The place of a test's buffer, and the faults that can happen there. Each stage begins without a buffer."""

    def open(self, *, create: bool = True, shards: int = 2) -> WriteBuffer:
        """Return a client of the stage's one buffer; closed with the stage. With `create` a missing buffer is made."""

    def put_garbage(self, shard: ShardId, data: bytes) -> None:
        """Store bytes that no client of ours has written, as an item after the others."""

    def drop_before(self, shard: ShardId, offset: BufferOffset) -> None:
        """Apply retention: items before an offset go, at which there is an item or the end; the last item may stay."""

    def remake(self) -> None:
        """Delete the buffer and make another one, of two shards, under its name."""


def application_op(
    name: str = "clicks",
    texts: Sequence[str] = ("one",),
    *,
    moment_us: int = _MOMENT_US,
    partition: str | None = None,
    said: dict[str, Any] | None = None,
) -> WriteOps:
    """Return one request of an application: a row per text, in a table `(id bigint, text text)` with a key.

    Args:
        name: the table's, in schema public.
        texts: of the rows; `id` counts them from 0.
        moment_us: the request's time, in microseconds since 1970.
        partition: of the table.
        said: more of `OPERATION_SCHEMA`'s columns: session, trace_id …
    """
    columns = (Column("id", pa.int64()), Column("text", pa.string()))
    values: dict[str, Sequence[Any]] = {"id": list(range(len(texts))), "text": list(texts)}
    schema = TableSchema(TableId(7), SchemaVersion(1), SourceId(0), "public", name, columns, ("id",), ("id",))
    return WriteOps(_operation(moment_us, said or {}), (_rows(schema, values, len(texts), 0, partition),))


def every_kind_op() -> WriteOps:
    """Return one operation with every type, nulls, two tables, two partitions, and every operation column filled."""
    columns = tuple(Column(name, kind) for name, kind, _ in _COLUMNS)
    values = {name: given for name, _, given in _COLUMNS}
    wide = TableSchema(TableId(3), SchemaVersion(4), SourceId(0), "odd schema", 'ta"ble', columns, ("id",))
    narrow = TableSchema(TableId(9), SchemaVersion(1), SourceId(0), "public", "no_key", (Column("x", pa.int32()),))
    facts = {
        "commit_lsn": 7,
        "commit_end_lsn": 9,
        "xid": 11,
        "chunk_id": "c",
        "session": "s",
        "session_number": 5,
        "idempotency_key": "k",
        "trace_id": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    }
    tables = (
        _rows(wide, values, 4, 0, "2026-01-01"),
        _rows(wide, values, 4, 4, "2026-01-02"),
        _rows(narrow, {"x": [1, None]}, 2, 8, None),
    )
    return WriteOps(_operation(_MOMENT_US, facts), tables)


def same_op(one: WriteOps, other: WriteOps) -> bool:
    """Return whether two operations are the same to the bit, except their shards."""
    if not one.operations.equals(other.operations, check_metadata=True) or one.reached != other.reached:
        return False
    mine, theirs = ([(t.schema, t.partition) for t in op.tables] for op in (one, other))
    return mine == theirs and all(_bits(a.rows) == _bits(b.rows) for a, b in zip(one.tables, other.tables, strict=True))


def next_op(reader: ShardReader, *, within_s: float = _PATIENCE_S) -> BufferedOp:
    """Return the next operation of a reader, which must come within that many seconds."""
    deadline = time.monotonic() + within_s
    while True:
        found = reader.read(wait_s=0.2)
        if isinstance(found, BufferedOp):
            return found
        assert found is ReadPause.PENDING, "the reader has ended"
        assert time.monotonic() < deadline, f"no operation came within {within_s} s"


def texts_of(found: BufferedOp) -> list[str]:
    """Return the texts of an `application_op`."""
    return [text for table in found.op.tables for text in table.rows.column("text").to_pylist()]


class WriteBufferConformance:
    """The promises of `ports.WriteBuffer`."""

    @pytest.fixture
    def stage(self) -> BufferStage:
        """Return the stage of the buffer. Subclasses override it."""
        raise NotImplementedError

    @pytest.fixture
    def buffer(self, stage: BufferStage) -> Iterator[WriteBuffer]:
        """Yield a buffer of two shards, empty."""
        with stage.open() as buffer:
            yield buffer

    # --- storage

    def test_an_operation_comes_back_to_the_bit(self, buffer: WriteBuffer) -> None:
        """Types, nulls, signs of zero, partitions, keys, session, trace and time are unchanged."""
        ops = [every_kind_op(), application_op(), application_op(said={"session": "other", "trace_id": "t"})]
        metas = [buffer.append(NORTH, op) for op in ops]
        reader = buffer.reader(NORTH)
        for op, meta in zip(ops, metas, strict=True):
            found = next_op(reader)
            assert same_op(op, found.op)
            assert (found.meta.shard, found.meta.offset) == (NORTH, meta.offset)
            assert {table.shard for table in found.op.tables} == {NORTH}

    def test_a_large_operation_is_one_item(self, buffer: WriteBuffer) -> None:
        """Four megabytes, compressed or not, come back whole."""
        op = application_op(texts=[f"{number:x}" * 40 for number in range(40_000)])
        buffer.append(NORTH, op)
        assert same_op(op, next_op(buffer.reader(NORTH)).op)

    def test_what_is_no_single_operation_is_refused(self, buffer: WriteBuffer) -> None:
        """Neither rows of two operations nor none: their time and trace would be ambiguous."""
        op = application_op()
        with pytest.raises(InvalidValue):
            buffer.append(
                NORTH, WriteOps(pa.Table.from_batches([op.operations] * 2).combine_chunks().to_batches()[0], op.tables)
            )
        with pytest.raises(InvalidValue):
            buffer.append(NORTH, WriteOps(op.operations, ()))
        assert buffer.reader(NORTH).end_offset() == 0

    def test_offsets_grow_by_the_order_of_calls_and_times_are_now(self, buffer: WriteBuffer) -> None:
        """Each answer names the shard, and an offset above the previous one."""
        before_us = time.time_ns() // 1000
        metas = [buffer.append(NORTH, application_op(texts=[str(number)])) for number in range(20)]
        offsets = [meta.offset for meta in metas]
        assert offsets == sorted(set(offsets))
        assert all(abs(meta.stored_at_us - before_us) < 600e6 for meta in metas)
        assert {meta.shard for meta in metas} == {NORTH}
        reader = buffer.reader(NORTH)
        assert [texts_of(next_op(reader)) for _ in range(20)] == [[str(number)] for number in range(20)]

    # --- shards ----------------------------------------------------------------------------------------------------

    def test_the_caller_names_the_shard(self, buffer: WriteBuffer) -> None:
        """An operation on one shard isn't on the other; a missing shard is refused by name, and nothing is stored."""
        assert buffer.shards() == (NORTH, SOUTH)
        buffer.append(SOUTH, application_op(texts=["south"]))
        buffer.append(NORTH, application_op(texts=["north"]))
        north, south = buffer.reader(NORTH), buffer.reader(SOUTH)
        assert (texts_of(next_op(north)), texts_of(next_op(south))) == (["north"], ["south"])
        assert (north.read(), south.read()) == (ReadPause.PENDING, ReadPause.PENDING)
        for wrong in (ShardId(2), ShardId(-1)):
            with pytest.raises(WriteBufferError, check=coded("unknown_buffer_shard")) as caught:
                buffer.append(wrong, application_op())
            assert caught.value.details["shards"] == [0, 1]
            with pytest.raises(WriteBufferError, check=coded("unknown_buffer_shard")):
                buffer.reader(wrong)
        assert (north.read(), south.read()) == (ReadPause.PENDING, ReadPause.PENDING)

    def test_batching_keeps_shards_partitions_times_and_traces_apart(self, buffer: WriteBuffer) -> None:
        """However they are batched: each operation is an item of its own, in the order of its shard."""
        wanted: dict[ShardId, list[WriteOps]] = {NORTH: [], SOUTH: []}
        futures = []
        for number in range(200):
            shard = ShardId(number % 2)
            op = application_op(
                texts=[str(number)],
                moment_us=_MOMENT_US + number,
                partition=f"p{number % 3}",
                said={"trace_id": f"t{number}"},
            )
            wanted[shard].append(op)
            futures.append((shard, buffer.submit(shard, op)))
        buffer.flush(deadline_s=_PATIENCE_S)
        assert all(future.done() for _, future in futures)
        for shard, ops in wanted.items():
            reader = buffer.reader(shard)
            found = [next_op(reader) for _ in ops]
            assert all(same_op(op, got.op) for op, got in zip(ops, found, strict=True))
            offsets = [future.result().offset for of, future in futures if of == shard]
            assert [got.meta.offset for got in found] == offsets

    def test_what_is_acknowledged_is_there_for_others(self, stage: BufferStage, buffer: WriteBuffer) -> None:
        """Another client reads an acknowledged operation at once."""
        other = stage.open(create=False)
        reader = other.reader(SOUTH)
        for number in range(5):
            buffer.append(SOUTH, application_op(texts=[str(number)]))
            assert texts_of(next_op(reader)) == [str(number)]

    # --- readers ---------------------------------------------------------------------------------------------------

    def test_readers_share_nothing(self, buffer: WriteBuffer) -> None:
        """Each begins at the smallest existing offset, and moves independently."""
        for number in range(4):
            buffer.append(NORTH, application_op(texts=[str(number)]))
        first, second = buffer.reader(NORTH), buffer.reader(NORTH)
        assert [texts_of(next_op(first)) for _ in range(3)] == [["0"], ["1"], ["2"]]
        assert texts_of(next_op(second)) == ["0"]
        second.close()
        assert texts_of(next_op(first)) == ["3"]
        assert texts_of(next_op(buffer.reader(NORTH))) == ["0"]

    def test_every_shard_is_read_from_its_own_smallest_offset(self, stage: BufferStage, buffer: WriteBuffer) -> None:
        """Retention may have dropped items of one shard and not of the other."""
        metas = [buffer.append(shard, application_op(texts=[str(n)])) for n in range(3) for shard in (NORTH, SOUTH)]
        south = [meta.offset for meta in metas if meta.shard == SOUTH]
        stage.drop_before(SOUTH, south[2])
        assert texts_of(next_op(buffer.reader(NORTH))) == ["0"]
        reader = buffer.reader(SOUTH)
        assert reader.place <= south[2]
        assert texts_of(next_op(reader)) == ["2"]

    def test_nothing_is_pending_not_the_end(self, buffer: WriteBuffer) -> None:
        """An empty shard, and one read to its end, wait for new items; a waiting reader gets them."""
        reader = buffer.reader(NORTH)
        for text in ("one", "two"):
            assert reader.read() is ReadPause.PENDING
            assert reader.read(wait_s=0.05) is ReadPause.PENDING
            append = partial(buffer.append, NORTH, application_op(texts=[text]))
            with Worker("appends-late", append, every_s=0.2):
                assert texts_of(next_op(reader)) == [text]

    def test_the_end_is_the_next_offset_and_0_where_there_is_nothing(self, buffer: WriteBuffer) -> None:
        """For each shard its own."""
        reader = buffer.reader(NORTH)
        assert (reader.place, reader.end_offset()) == (0, 0)
        meta = buffer.append(NORTH, application_op())
        assert reader.end_offset() == meta.offset + 1
        assert buffer.reader(SOUTH).end_offset() == 0
        assert reader.place == 0

    def test_the_place_moves_when_an_item_is_returned(self, buffer: WriteBuffer) -> None:
        """Not when it is fetched, and not by waiting."""
        metas = [buffer.append(NORTH, application_op(texts=[str(number)])) for number in range(3)]
        reader = buffer.reader(NORTH)
        for meta in metas:
            assert reader.place <= meta.offset
            assert next_op(reader).meta.offset == meta.offset
            assert reader.place == meta.offset + 1
        reader.read()
        assert reader.place == metas[-1].offset + 1

    def test_seeking_goes_anywhere_up_to_the_end(self, buffer: WriteBuffer) -> None:
        """Back, to the end, and to the earliest."""
        metas = [buffer.append(NORTH, application_op(texts=[str(number)])) for number in range(5)]
        reader = buffer.reader(NORTH)
        reader.seek(metas[3].offset)
        assert texts_of(next_op(reader)) == ["3"]
        reader.seek(metas[1].offset)
        assert [texts_of(next_op(reader)) for _ in range(2)] == [["1"], ["2"]]
        reader.seek(reader.end_offset())
        assert reader.read(wait_s=0.05) is ReadPause.PENDING
        buffer.append(NORTH, application_op(texts=["5"]))
        assert texts_of(next_op(reader)) == ["5"]
        reader.seek_earliest()
        assert texts_of(next_op(reader)) == ["0"]

    def test_seeking_past_the_end_fails_there_and_then(self, buffer: WriteBuffer) -> None:
        """The reader stays where it was."""
        buffer.append(NORTH, application_op(texts=["0"]))
        reader = buffer.reader(NORTH)
        end = reader.end_offset()
        with pytest.raises(WriteBufferError, check=coded("buffer_seek_beyond_end")) as caught:
            reader.seek(BufferOffset(end + 1))
        assert caught.value.details["end"] == end
        assert texts_of(next_op(reader)) == ["0"]

    # --- errors

    def test_what_cannot_be_decoded_is_said_and_passed(self, stage: BufferStage, buffer: WriteBuffer) -> None:
        """A typed error for each, and the next item after it: no reader loops."""
        buffer.append(NORTH, application_op(texts=["before"]))
        stage.put_garbage(NORTH, b"no operation")
        stage.put_garbage(NORTH, b"")
        buffer.append(NORTH, application_op(texts=["behind"]))
        reader = buffer.reader(NORTH)
        assert texts_of(next_op(reader)) == ["before"]
        places = []
        for _ in range(2):
            with pytest.raises(BufferedOpUndecodable) as caught:
                next_op(reader)
            places.append(caught.value.details["offset"])
            assert reader.place == places[-1] + 1
        assert places == sorted(set(places))
        assert texts_of(next_op(reader)) == ["behind"]

    def test_an_offset_that_is_gone_is_said_once_and_ends_the_reader_until_it_seeks(
        self, stage: BufferStage, buffer: WriteBuffer
    ) -> None:
        """It isn't taken for an end, nor for a wait; the remaining items can be read."""
        metas = [buffer.append(NORTH, application_op(texts=[str(number)])) for number in range(4)]
        reader = buffer.reader(NORTH)
        stage.drop_before(NORTH, metas[2].offset)
        reader.seek(metas[0].offset)
        with pytest.raises(BufferOffsetGone) as caught:
            _until_said(reader)
        assert caught.value.details["place"] == metas[0].offset
        assert metas[0].offset < caught.value.details["first"] <= metas[2].offset
        assert [reader.read(wait_s=0.05) for _ in range(3)] == [ReadPause.ENDED] * 3
        buffer.append(NORTH, application_op(texts=["4"]))
        assert reader.read() is ReadPause.ENDED
        with pytest.raises(WriteBufferError, check=coded("buffer_seek_beyond_end")):
            reader.seek(BufferOffset(reader.end_offset() + 1))
        assert reader.read() is ReadPause.ENDED
        reader.seek_earliest()
        assert [texts_of(next_op(reader)) for _ in range(3)] == [["2"], ["3"], ["4"]]

    def test_a_shard_that_was_emptied_keeps_its_end(self, stage: BufferStage, buffer: WriteBuffer) -> None:
        """Offsets continue where they were; a reader of dropped items gets an error."""
        metas = [buffer.append(NORTH, application_op(texts=[str(number)])) for number in range(3)]
        stage.drop_before(NORTH, BufferOffset(metas[-1].offset + 1))
        reader = buffer.reader(NORTH)
        assert reader.end_offset() == metas[-1].offset + 1
        if reader.place < reader.end_offset():
            assert texts_of(next_op(reader)) == ["2"]
        assert reader.read(wait_s=0.05) is ReadPause.PENDING
        reader.seek(metas[1].offset)
        with pytest.raises(BufferOffsetGone):
            _until_said(reader)
        reader.seek(reader.end_offset())
        meta = buffer.append(NORTH, application_op(texts=["3"]))
        assert meta.offset > metas[-1].offset
        assert texts_of(next_op(reader)) == ["3"]

    def test_a_buffer_made_anew_is_another_one(self, stage: BufferStage, buffer: WriteBuffer) -> None:
        """Its identity changes; a reader that was beyond the new one's end isn't left waiting."""
        identity = buffer.identity()
        other = stage.open(create=False)
        assert other.identity() == identity
        metas = [buffer.append(NORTH, application_op(texts=[str(number)])) for number in range(3)]
        buffer.close()
        stage.remake()
        fresh = stage.open(create=False)
        assert fresh.identity() != identity
        reader = fresh.reader(NORTH)
        with pytest.raises(WriteBufferError, check=coded("buffer_seek_beyond_end")):
            reader.seek(BufferOffset(metas[-1].offset + 1))

    def test_one_that_is_not_there_is_said(self, stage: BufferStage) -> None:
        """Nothing is created unless that was requested."""
        for _ in range(2):
            with pytest.raises(BufferMissing):
                stage.open(create=False).reader(NORTH)

    def test_creators_may_race(self, stage: BufferStage) -> None:
        """All of them get the one buffer, and it has each client's items."""
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: stage.open(create=True), range(4)))
        assert len({buffer.identity() for buffer in found}) == 1
        for number, buffer in enumerate(found):
            buffer.append(NORTH, application_op(texts=[str(number)]))
            buffer.close()
        reader = stage.open(create=False).reader(NORTH)
        assert sorted(texts_of(next_op(reader))[0] for _ in found) == ["0", "1", "2", "3"]

    def test_a_closed_buffer_takes_no_more(self, stage: BufferStage) -> None:
        """Operations in transit have their answers by then."""
        buffer = stage.open()
        futures = [buffer.submit(NORTH, application_op(texts=[str(number)])) for number in range(10)]
        buffer.close()
        assert all(future.done() for future in futures)
        with pytest.raises(WriterClosed):
            buffer.append(NORTH, application_op())
        reader = stage.open(create=False).reader(NORTH)
        assert [texts_of(next_op(reader))[0] for _ in futures] == [str(number) for number in range(10)]

    # --- together --------------------------------------------------------------------------------------------------

    def test_writers_and_readers_side_by_side(self, buffer: WriteBuffer) -> None:
        """Each reader gets everything once, in the order of the answers; each writer's operations stay in order."""
        answers: list[tuple[BufferMeta, str]] = []

        def write(writer: int) -> None:
            for number in range(25):
                text = f"{writer}.{number}"
                answers.append((buffer.append(NORTH, application_op(texts=[text])), text))

        def read(_: int) -> list[tuple[int, str]]:
            reader = buffer.reader(NORTH)
            found = [next_op(reader) for _ in range(100)]
            assert reader.read() is ReadPause.PENDING
            return [(int(got.meta.offset), texts_of(got)[0]) for got in found]

        with ThreadPoolExecutor(6) as pool:
            reads = [pool.submit(read, number) for number in range(2)]
            for done in [pool.submit(write, writer) for writer in range(4)]:
                done.result()
            wanted = sorted((int(meta.offset), text) for meta, text in answers)
            for done_reading in reads:
                assert done_reading.result() == wanted
        for writer in range(4):
            own = [int(text.split(".")[1]) for _, text in wanted if text.startswith(f"{writer}.")]
            assert own == list(range(25))

    def test_a_truncated_buffer_is_not_a_quiet_one(self, stage: BufferStage, buffer: WriteBuffer) -> None:
        """A reader beyond the current end gets an error, at each call."""
        for number in range(3):
            buffer.append(NORTH, application_op(texts=[str(number)]))
        reader = buffer.reader(NORTH)
        for _ in range(3):
            next_op(reader)
        stage.remake()
        for _ in range(2):
            with pytest.raises(WriteBufferError, check=coded("buffer_truncated", "buffer_replaced", "buffer_missing")):
                _until_said(reader)


def _until_said(reader: ShardReader) -> None:
    """Read until there is an error; nothing may be returned before."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        found = reader.read(wait_s=0.2)
        assert found is ReadPause.PENDING, f"the reader returned {found}"


def _operation(moment_us: int, said: dict[str, Any]) -> pa.RecordBatch:
    facts = {"kind": int(OperationKind.APPEND), "source": 0, "commit_ts": moment_us} | said
    columns = [pa.array([facts.get(field.name)], field.type) for field in OPERATION_SCHEMA]
    return pa.RecordBatch.from_arrays(columns, schema=OPERATION_SCHEMA)


def _rows(
    schema: TableSchema, values: Mapping[str, Sequence[Any]], count: int, first: int, partition: str | None
) -> TableRows:
    facts: dict[str, Sequence[Any]] = {
        "__operation": [0] * count,
        "__index": list(range(first, first + count)),
        "__op": [int(Op.CREATE)] * count,
    }
    arrow = append_row_schema(schema)
    arrays = [pa.array({**facts, **values}.get(field.name, [None] * count), field.type) for field in arrow]
    return TableRows(schema, pa.RecordBatch.from_arrays(arrays, schema=arrow), NORTH, partition)


def _bits(batch: pa.RecordBatch) -> tuple[object, ...]:
    """Return the values to the bit: by their printed form, which distinguishes -0.0 from 0.0, and types."""
    return (str(batch.schema), repr(batch.to_pylist()))
