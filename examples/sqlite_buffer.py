"""A write buffer of one's own: a file of SQLite. What docs/how-to/write-a-buffer.md builds, whole.

An operation is a row, its offset the row's number. What is committed with `synchronous=FULL` is stored.
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
from millstream import BufferedOp, BufferMeta, BufferOffset, ReadPause, ShardId, WriteOps, errors

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
    """What Millstream calls: the entry point `sqlite` of the group `millstream.buffers`."""
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
                # Rolled back: whoever asked knows that nothing is there.
                future.set_exception(errors.BufferUnavailable(f"{self._file}: {error}", buffer=str(self._file)))
        return future

    def append(self, shard: ShardId, op: WriteOps, *, deadline_s: float | None = None) -> BufferMeta:
        return self.submit(shard, op, deadline_s=deadline_s).result()

    def flush(self, *, deadline_s: float | None = None) -> None:
        """Nothing is ever on its way: `submit` waits."""

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
        return SqliteReader(self, shard)

    def extent(self, shard: ShardId) -> tuple[BufferOffset, BufferOffset]:
        """The first offset that is there, and the end: of one moment."""
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
            raise errors.UnknownBufferShard(
                f"{self._file} has {len(shards)} shards", shard=int(shard), shards=[int(one) for one in shards]
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


class SqliteReader:
    """A place in one shard."""

    def __init__(self, buffer: SqliteBuffer, shard: ShardId) -> None:
        self._buffer, self._shard = buffer, shard
        self._identity = buffer.identity()
        self._ended = False
        self._place = buffer.extent(shard)[0]

    @property
    def shard(self) -> ShardId:
        return self._shard

    @property
    def place(self) -> BufferOffset:
        return self._place

    def read(self, *, wait_s: float = 0.0) -> BufferedOp | ReadPause:
        deadline = time.monotonic() + wait_s
        while not self._ended:
            found = self._buffer.query(
                "SELECT stored_us, data FROM operations WHERE shard = :s AND offset = :o",
                {"s": self._shard, "o": self._place},
            )
            if found:
                return self._returned(*found[0])
            self._say_why()
            if time.monotonic() >= deadline:
                return ReadPause.PENDING
            time.sleep(_LOOK_S)
        return ReadPause.ENDED

    def _returned(self, stored_us: int, data: bytes) -> BufferedOp:
        meta = BufferMeta(self._shard, self._place, stored_us, len(data))
        self._place = BufferOffset(self._place + 1)  # whatever becomes of it: no item is met twice
        try:
            return BufferedOp(meta, millstream.decode_op(data, self._shard))
        except (errors.CodecError, errors.UnsupportedFormat) as error:
            raise errors.BufferedOpUndecodable(
                error.message, shard=int(self._shard), offset=int(meta.offset)
            ) from error

    def _say_why(self) -> None:
        """Nothing lies at the place. Is that the end?"""
        if self._buffer.identity() != self._identity:
            raise errors.BufferReplaced("the buffer was made anew", known=self._identity)
        first, end = self._buffer.extent(self._shard)
        if self._place > end:
            raise errors.BufferWentBack("the buffer ends before the place", place=int(self._place), end=int(end))
        if self._place < first:
            self._ended = True
            raise errors.BufferOffsetGone("the place was dropped", place=int(self._place), first=int(first))

    def seek(self, offset: BufferOffset) -> None:
        end = self.end_offset()
        if offset > end:
            raise errors.BufferSeekBeyondEnd(f"the shard ends at {end}", place=int(offset), end=int(end))
        self._place, self._ended = offset, False

    def seek_earliest(self) -> None:
        self._place, self._ended = self._buffer.extent(self._shard)[0], False

    def end_offset(self) -> BufferOffset:
        return self._buffer.extent(self._shard)[1]

    def close(self) -> None:
        """It holds nothing of its own."""
