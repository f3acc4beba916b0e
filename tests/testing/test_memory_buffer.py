"""The write buffer in memory passes the common suite, and fails on request."""

from __future__ import annotations

import pytest

from millstream.errors import BufferOutcomeUnknown, BufferUnavailable, IngestError, Overloaded, WriteBufferError
from millstream.model.buffered_operations import BufferOffset, ReadPause
from millstream.model.ids import ShardId
from millstream.testing.errors import coded
from millstream.testing.memory_buffer import BufferFailure, MemoryBuffer, MemoryServer, lost_answer
from millstream.testing.write_buffer import NORTH, WriteBufferConformance, application_op, next_op, texts_of

NAME = "orders"


class MemoryStage:
    def __init__(self) -> None:
        self.server = MemoryServer()

    def open(self, *, create: bool = True, shards: int = 2) -> MemoryBuffer:
        return MemoryBuffer(self.server, NAME, create_shards=shards if create else None)

    def put_garbage(self, shard: ShardId, data: bytes) -> None:
        self.server.put(NAME, shard, data)

    def drop_before(self, shard: ShardId, offset: BufferOffset) -> None:
        self.server.drop_before(NAME, shard, offset)

    def remake(self) -> None:
        self.server.drop(NAME)
        self.server.create(NAME, 2)


class TestMemory(WriteBufferConformance):
    @pytest.fixture
    def stage(self) -> MemoryStage:
        return MemoryStage()


def test_failures_come_as_asked_and_say_what_they_are() -> None:
    server = MemoryServer()
    buffer = MemoryBuffer(server, NAME, create_shards=1)
    server.fail_next(BufferFailure(Overloaded("full")), lost_answer(NAME, NORTH))
    with pytest.raises(Overloaded):
        buffer.append(NORTH, application_op(texts=["refused"]))
    with pytest.raises(BufferOutcomeUnknown):
        buffer.append(NORTH, application_op(texts=["stored"]))
    buffer.append(NORTH, application_op(texts=["fine"]))
    reader = buffer.reader(NORTH)
    assert [texts_of(next_op(reader)) for _ in range(2)] == [["stored"], ["fine"]]
    assert reader.read() is ReadPause.PENDING


def test_streams_of_one_server_know_nothing_of_each_other() -> None:
    server = MemoryServer()
    one, other = (MemoryBuffer(server, name, create_shards=1) for name in ("one", "other"))
    one.append(NORTH, application_op())
    assert other.reader(NORTH).end_offset() == 0
    assert one.identity() != other.identity()


def test_a_server_that_is_away_says_so_to_all_and_loses_nothing() -> None:
    server = MemoryServer()
    buffer = MemoryBuffer(server, NAME, create_shards=1)
    buffer.append(NORTH, application_op(texts=["before"]))
    reader = buffer.reader(NORTH)
    server.go_away()
    with pytest.raises(BufferUnavailable):
        buffer.append(NORTH, application_op())
    with pytest.raises(BufferUnavailable):
        reader.read()
    server.come_back()
    assert texts_of(next_op(reader)) == ["before"]


def test_a_reader_beyond_a_cut_is_told_at_every_call() -> None:
    server = MemoryServer()
    buffer = MemoryBuffer(server, NAME, create_shards=1)
    metas = [buffer.append(NORTH, application_op()) for _ in range(3)]
    reader = buffer.reader(NORTH)
    for _ in metas:
        next_op(reader)
    server.cut_from(NAME, NORTH, metas[1].offset)
    for _ in range(2):
        with pytest.raises(WriteBufferError, check=coded("buffer_truncated")):
            reader.read()


def test_what_is_too_large_is_refused_by_name() -> None:
    buffer = MemoryBuffer(MemoryServer(), NAME, create_shards=1, op_bytes_max=10_000)
    with pytest.raises(IngestError, check=coded("rows_too_large")):
        buffer.append(NORTH, application_op(texts=[str(number) for number in range(100_000)]))
    assert buffer.reader(NORTH).end_offset() == 0
