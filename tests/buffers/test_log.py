"""The write buffer of log files passes the common suite, and keeps what a killed writer had acknowledged."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.errors import BufferUnavailable
from millstream.model.buffered_operations import BufferOffset
from millstream.model.ids import ShardId
from millstream.model.positions import Offset, Seq
from millstream.protocol.retention import HolderKind, Retention, RetentionBounds
from millstream.testing.write_buffer import NORTH, WriteBufferConformance, application_op, next_op, texts_of
from millstream.wal.log_buffer import LogBuffer, LogBufferOptions
from millstream.wal.reader import StreamReader
from millstream.wal.segment_deletion import drop_segments
from millstream.wal.writing.writer import LogOptions


class LogStage:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened: list[LogBuffer] = []

    def open(self, *, create: bool = True, shards: int = 2) -> LogBuffer:
        # One segment for each group, so that retention is exact.
        options = LogBufferOptions(
            str(self.folder), create_shards=shards if create else None, log=LogOptions(segment_bytes=1)
        )
        self.opened.append(LogBuffer(options))
        return self.opened[-1]

    def put_garbage(self, shard: ShardId, data: bytes) -> None:
        self.opened[0].submit_bytes(shard, data).result(60)

    def drop_before(self, shard: ShardId, offset: BufferOffset) -> None:
        folder = str(self.folder / f"{shard:05d}")
        reader, tracker = StreamReader(folder), Retention()
        kept = next(reader.read(ShardId(0), Offset(offset)), None)
        needed = Seq(reader.persisted_upto() + 1) if kept is None else kept.first_seq
        tracker.needs("test", HolderKind.BACKLOG, needed)
        drop_segments(folder, tracker, RetentionBounds(0.0, 0, 0))
        assert reader.first_offset(ShardId(0)) == Offset(offset - (kept is None))  # a log keeps its last frame

    def remake(self) -> None:
        self.opened[0].close()  # first: an open log prepares its next segment in the folder
        shutil.rmtree(self.folder)
        self.open()

    def close(self) -> None:
        for buffer in self.opened:
            buffer.close()


class TestLog(WriteBufferConformance):
    @pytest.fixture
    def stage(self, tmp_path: Path) -> Iterator[LogStage]:
        stage = LogStage(tmp_path / "buffer")
        yield stage
        stage.close()


def test_a_second_writer_is_told_that_there_is_one(tmp_path: Path) -> None:
    options = LogBufferOptions(str(tmp_path), create_shards=1)
    with LogBuffer(options) as first, LogBuffer(options) as second:
        first.append(NORTH, application_op(texts=["first"]))
        with pytest.raises(BufferUnavailable):
            second.append(NORTH, application_op(texts=["second"]))
        assert texts_of(next_op(second.reader(NORTH))) == ["first"]
        first.close()
        second.append(NORTH, application_op(texts=["second"]))
        reader = second.reader(NORTH)
        assert [texts_of(next_op(reader)) for _ in range(2)] == [["first"], ["second"]]
