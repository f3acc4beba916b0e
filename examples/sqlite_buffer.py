"""A write buffer of one's own over a SQLite file: the whole example of docs/how-to/write-a-buffer.md.

An operation is a row, its offset the row's number. A row committed with `synchronous=FULL` is stored.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import millstream
from millstream import BufferedOp, BufferMeta, BufferOffset, PlacedReader, ShardId, WriteOps, errors

_SCHEMA = """
CREATE TABLE IF NOT EXISTS buffer (one INTEGER PRIMARY KEY CHECK (one = 1), identity TEXT NOT NULL, shards INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS ends (shard INTEGER PRIMARY KEY, next INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS operations (
    shard INTEGER NOT NULL, offset INTEGER NOT NULL, stored_us INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (shard, offset)
);
"""
_LOOK_S = 0.01


def open_sqlite(
    *,
    name: str,  # noqa: ARG001 - a file has one buffer
    location: str,
    create_shards: int | None,
    timeout_s: float,
) -> SqliteBuffer:
    """Open the buffer: Millstream calls the entry point `sqlite` of the group `millstream.buffers`."""
    return SqliteBuffer(Path(location), create_shards=create_shards, timeout_s=timeout_s)


class SqliteBuffer:
    """Both halves of `WriteBuffer`, over one file. One connection a thread would be faster; this is short."""

    def __init__(self, file: Path, *, create_shards: int | None, timeout_s: float = 30.0) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._closed = False
        if create_shards is None and not file.exists():
            raise errors.BufferMissing(f"there is no file {file}", buffer=str(file))
        self._db = sqlite3.connect(file, timeout=timeout_s, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        if create_shards is not None:
            self._db.executescript(_SCHEMA)
            self._db.execute("INSERT OR IGNORE INTO buffer VALUES (1, ?, ?)", (uuid4().hex, create_shards))
        self.identity()

    # --- writing ---------------------------------------------------------------------------------------------------

    def shards(self) -> tuple[ShardId, ...]:
        return tuple(ShardId(shard) for shard in range(int(self._one("SELECT shards FROM buffer"))))

    def submit(self, shard: ShardId, op: WriteOps, *, deadline_s: float | None = None) -> Future[BufferMeta]:  # noqa: ARG002 - SQLite's own timeout bounds it
        data = millstream.encode_op(op)
        self.check(shard)
        future: Future[BufferMeta] = Future()
        with self._lock:
            if self._closed:
                raise errors.WriterClosed(f"{self._file} was closed; nothing was stored")
            try:
                future.set_result(self._store(shard, data))
            except sqlite3.OperationalError as error:
                # Rolled back, so the caller may rely on it: nothing was stored.
                future.set_exception(errors.BufferUnavailable(f"{self._file}: {error}", buffer=str(self._file)))
        return future

    def append(self, shard: ShardId, op: WriteOps, *, deadline_s: float | None = None) -> BufferMeta:
        return self.submit(shard, op, deadline_s=deadline_s).result()

    def flush(self, *, deadline_s: float | None = None) -> None:
        """Return at once: `submit` waits, so nothing is in flight."""

    def _store(self, shard: ShardId, data: bytes) -> BufferMeta:
        stored_us = time.time_ns() // 1000
        self._db.execute("BEGIN IMMEDIATE")  # the offset and the row are one step
        try:
            found = self._db.execute("SELECT next FROM ends WHERE shard = ?", (shard,)).fetchone()
            offset = 0 if found is None else found[0]
            self._db.execute("INSERT INTO operations VALUES (?, ?, ?, ?)", (shard, offset, stored_us, data))
            self._db.execute("INSERT OR REPLACE INTO ends VALUES (?, ?)", (shard, offset + 1))
            self._db.execute("COMMIT")
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        return BufferMeta(shard, BufferOffset(offset), stored_us, len(data))

    # --- reading ---------------------------------------------------------------------------------------------------

    def identity(self) -> str:
        return str(self._one("SELECT identity FROM buffer"))

    def reader(self, shard: ShardId) -> SqliteReader:
        self.check(shard)
        return SqliteReader(self, str(self._file), shard)

    def extent(self, shard: ShardId) -> tuple[BufferOffset, BufferOffset]:
        """Return the first existing offset, and the end, of one moment."""
        first, end = self.query(
            "SELECT (SELECT min(offset) FROM operations WHERE shard = :s), (SELECT next FROM ends WHERE shard = :s)",
            {"s": shard},
        )[0]
        end = end or 0
        return BufferOffset(end if first is None else first), BufferOffset(end)

    def query(self, sql: str, values: dict[str, int]) -> list[Any]:
        with self._lock:
            try:
                return self._db.execute(sql, values).fetchall()
            except sqlite3.OperationalError as error:
                raise errors.BufferMissing(f"{self._file} is no buffer: {error}", buffer=str(self._file)) from error

    def check(self, shard: ShardId) -> None:
        shards = self.shards()
        if shard not in shards:
            raise errors.WriteBufferError(
                f"{self._file} has {len(shards)} shards",
                code="unknown_buffer_shard",
                shard=int(shard),
                shards=[int(one) for one in shards],
            )

    def close(self) -> None:
        with self._lock:
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _one(self, sql: str) -> Any:
        found = self.query(sql, {})
        if not found:
            raise errors.BufferMissing(f"{self._file} is no buffer", buffer=str(self._file))
        return found[0][0]


class SqliteReader(PlacedReader):
    """A position in one shard."""

    def __init__(self, buffer: SqliteBuffer, name: str, shard: ShardId) -> None:
        super().__init__(name, shard)
        self._rows = buffer
        self._identity = buffer.identity()
        self.seek_earliest()

    def next_op(self, wait_s: float) -> BufferedOp | None:
        deadline = time.monotonic() + wait_s
        while True:
            found = self._rows.query(
                "SELECT stored_us, data FROM operations WHERE shard = :s AND offset = :o",
                {"s": self.shard, "o": self.place},
            )
            if found:
                stored_us, data = found[0]
                return self.op_of(self.place, data, stored_us)
            # Nothing lies at the place: check whether that is the end.
            if self._rows.identity() != self._identity:
                raise errors.WriteBufferError(
                    "the buffer was created again", code="buffer_replaced", known=self._identity
                )
            self.check_place(*self.extent())
            if time.monotonic() >= deadline:
                return None
            time.sleep(_LOOK_S)

    def extent(self) -> tuple[BufferOffset, BufferOffset]:
        return self._rows.extent(self.shard)
