"""The documentation's write buffer passes the suite that it names, and a home loads it by its entry point."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from examples.sqlite_buffer import SqliteBuffer

from millstream.model.buffered_operations import BufferOffset
from millstream.model.ids import ShardId
from millstream.testing import WriteBufferConformance


class SqliteStage:
    def __init__(self, file: Path) -> None:
        self.file = file
        self.opened: list[SqliteBuffer] = []

    def open(self, *, create: bool = True, shards: int = 2) -> SqliteBuffer:
        self.opened.append(SqliteBuffer(self.file, create_shards=shards if create else None))
        return self.opened[-1]

    def run(self, *steps: tuple[str, tuple[object, ...]]) -> None:
        with sqlite3.connect(self.file) as connection:
            for sql, values in steps:
                connection.execute(sql, values)
        connection.close()

    def put_garbage(self, shard: ShardId, data: bytes) -> None:
        end = self.opened[0].extent(shard)[1]
        self.run(
            ("INSERT INTO operations VALUES (?, ?, 0, ?)", (shard, end, data)),
            ("INSERT OR REPLACE INTO ends VALUES (?, ?)", (shard, end + 1)),
        )

    def drop_before(self, shard: ShardId, offset: BufferOffset) -> None:
        self.run(("DELETE FROM operations WHERE shard = ? AND offset < ?", (shard, offset)))

    def remake(self) -> None:
        self.run(*[(f"DROP TABLE {table}", ()) for table in ("buffer", "ends", "operations")])
        self.open()

    def close(self) -> None:
        for buffer in self.opened:
            buffer.close()
            buffer._db.close()


class TestSqlite(WriteBufferConformance):
    @pytest.fixture
    def stage(self, tmp_path: Path) -> Iterator[SqliteStage]:
        stage = SqliteStage(tmp_path / "buffer.db")
        yield stage
        stage.close()
