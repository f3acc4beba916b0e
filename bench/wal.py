"""The log alone, without a source: one caller appends batches, each durable before the next."""

from __future__ import annotations

import os
import sqlite3
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final
from uuid import uuid4

import numpy as np
import pyarrow as pa
from rocksdict import Options, Rdict, WriteBatch, WriteOptions

from bench.figures import Figure, asked, compared, measures, say
from bench.places import folder
from millstream.model.ids import Epoch, SchemaVersion, SourceId, StreamId, TableId
from millstream.model.operations import FIRST_SHARD, OPERATION_SCHEMA, OperationKind, TableRows, WriteOps
from millstream.model.positions import Seq
from millstream.model.records import Op, append_row_schema
from millstream.model.schema import Column, ReplicaIdentity, TableSchema
from millstream.testing.postgres import EmbeddedPostgres
from millstream.wal.writing.options import LogOptions
from millstream.wal.writing.writer import LogWriter

BATCH_ROWS = 1000
ROW_BYTES = 100
BATCHES = 5_120
"""Commits: 512 MB of values, so that segments are sealed and the peers' checkpoints happen on the way."""
DISTINCT = 20
"""Lists of values; what lies between two commits of the same list is far more than a compressor looks back."""
EVENTS = TableSchema(
    table_id=TableId(1),
    version=SchemaVersion(1),
    source=SourceId(0),
    namespace="app",
    name="events",
    columns=(Column("data", pa.binary()),),
    replica_identity=ReplicaIdentity.NOTHING,
)
_SCHEMA = append_row_schema(EVENTS)
_KEY: Final = struct.Struct(">Q")
_COPY_HEAD: Final = b"PGCOPY\n\xff\r\n\x00" + struct.pack(">ii", 0, 0)
_COPY_ROW: Final = struct.pack(">hi", 1, ROW_BYTES)
"""Before each row of a binary COPY: the count of its values and the length of its only one."""
_COPY_END: Final = struct.pack(">h", -1)


class ReservationsInMemory:
    """Reservations of a million numbers at a time; their storage isn't measured here."""

    def __init__(self) -> None:
        self._reserved = Seq(0)

    def reserved(self) -> Seq:
        """As in the port."""
        return self._reserved

    def reserve_to(self, seq: Seq, *, epoch: Epoch) -> None:
        """As in the port."""
        del epoch
        self._reserved = max(self._reserved, seq)


_ONE_APPEND = pa.RecordBatch.from_pylist(
    [{field.name: None if field.nullable else 0 for field in OPERATION_SCHEMA} | {"kind": int(OperationKind.APPEND)}],
    schema=OPERATION_SCHEMA,
)
_SAID_BY_COUNT = [
    pa.repeat(pa.scalar(0, pa.int32()), BATCH_ROWS),
    pa.array(np.arange(BATCH_ROWS)),
    pa.repeat(pa.scalar(int(Op.CREATE), pa.uint8()), BATCH_ROWS),
    *(pa.nulls(BATCH_ROWS, _SCHEMA.field(name).type) for name in ("__unchanged", "__exact", "__before")),
]
"""The columns without data except a row count: the same in every batch."""


def operation(values: list[bytes], *, table: TableSchema = EVENTS) -> WriteOps:
    """Make one request's rows, at most `BATCH_ROWS`, in the log's form: building the column is part of the figure."""
    said = [column.slice(0, len(values)) for column in _SAID_BY_COUNT]
    rows = pa.RecordBatch.from_arrays([*said, pa.array(values, pa.binary())], schema=_SCHEMA)
    return WriteOps(_ONE_APPEND, (TableRows(table, rows, FIRST_SHARD),))


@contextmanager
def log_in(path: Path, *, options: LogOptions | None = None) -> Iterator[LogWriter]:
    """Open the writer of a new log."""
    writer = LogWriter.open(
        str(path / "wal"),
        stream=StreamId(uuid4()),
        shards=[FIRST_SHARD],
        epoch=Epoch(1),
        reservations=ReservationsInMemory(),
        options=LogOptions() if options is None else options,
    )
    with closing(writer):
        yield writer


@dataclass(frozen=True, slots=True)
class Commits:
    """The same commits for all stores: Python lists of values, the next one of `DISTINCT` lists each."""

    count: int
    lists: list[list[bytes]]

    @classmethod
    def made(cls) -> Commits:
        """Make as many as the figures have, or as asked."""
        lists = [[os.urandom(ROW_BYTES) for _ in range(BATCH_ROWS)] for _ in range(DISTINCT)]
        return cls(asked.rows // BATCH_ROWS if asked.rows else BATCHES, lists)

    @property
    def rows(self) -> int:
        """Rows of all commits."""
        return self.count * BATCH_ROWS

    def rows_s(self, store: AbstractContextManager[Callable[[list[bytes]], object]]) -> float:
        """Return the rows a second from the first commit until the store, opened before, is closed."""
        with store as append:
            began = time.perf_counter()
            for number in range(self.count):
                append(self.lists[number % DISTINCT])
        return self.rows / (time.perf_counter() - began)


@contextmanager
def appends_in(path: Path) -> Iterator[Callable[[list[bytes]], object]]:
    """Yield what appends a commit to a new log from a list; close the log, its last segment sealed, at the end."""
    with log_in(path) as writer:
        yield lambda values: writer.append(operation(values))


def log_rows_s(commits: Commits) -> float:
    """Return the rate of the log itself, in this process."""
    with folder("log") as path:
        return commits.rows_s(appends_in(path))


@measures("wal_append_batch_vs_sqlite", "wal_append_batch_vs_rocksdb", "wal_append_batch_vs_postgres")
def append_batch() -> Iterator[Figure]:
    """Measure commits of 1000 rows of 100 random bytes, one caller, each commit fsynced; the peers are three stores."""
    commits = Commits.made()
    for peer, rate, said in (
        (
            "sqlite",
            _sqlite_rows_s,
            f"SQLite {sqlite3.sqlite_version}: journal_mode=WAL, synchronous=FULL, checkpoints as by default",
        ),
        (
            "rocksdb",
            _rocksdb_rows_s,
            "RocksDB by rocksdict, as it comes: a write batch of 1000 puts under keys of 8 bytes, synced",
        ),
        (
            "postgres",
            _postgres_rows_s,
            "PostgreSQL 18 over a Unix socket: a binary COPY of 1000 rows a commit, sent by one copy.write, synchronous_commit=on",
        ),
    ):
        name = f"wal_append_batch_vs_{peer}"
        say(f"{name}: {commits.count} commits of {BATCH_ROWS} x {ROW_BYTES} B")
        yield compared(
            name,
            partial(log_rows_s, commits),
            partial(rate, commits),
            unit="rows/s",
            goal=">= 1.0" if peer == "rocksdb" else ">= 2",
            rows=commits.rows,
            size_bytes=commits.rows * ROW_BYTES,
            note=(
                f"1 binary column of 100 random bytes; {commits.count} commits of 1000 rows by one caller; both sides begin with the same Python"
                " lists; from the first commit until the store is closed, so that segments that are sealed, checkpoints and compactions"
                f" on the way are in it; {said}"
            ),
        )


def _sqlite_rows_s(commits: Commits) -> float:
    with folder("sqlite") as path:
        return commits.rows_s(_sqlite(path))


@contextmanager
def _sqlite(path: Path) -> Iterator[Callable[[list[bytes]], object]]:
    with closing(sqlite3.connect(path / "log.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("CREATE TABLE events (seq INTEGER PRIMARY KEY, data BLOB)")

        def append(values: list[bytes]) -> None:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("INSERT INTO events (data) VALUES (?)", zip(values))
            connection.execute("COMMIT")

        yield append


def _rocksdb_rows_s(commits: Commits) -> float:
    with folder("rocksdb") as path:
        return commits.rows_s(_rocksdb(path))


@contextmanager
def _rocksdb(path: Path) -> Iterator[Callable[[list[bytes]], object]]:
    with closing(Rdict(str(path / "db"), Options(raw_mode=True))) as store:
        synced = WriteOptions()
        synced.sync = True
        store.set_write_options(synced)
        keys = map(_KEY.pack, count())

        def append(values: list[bytes]) -> None:
            batch = WriteBatch(raw_mode=True)
            for value in values:
                batch.put(next(keys), value)
            store.write(batch)

        yield append


def _postgres_rows_s(commits: Commits) -> float:
    with EmbeddedPostgres(settings={"wal_level": "replica"}) as server:
        return commits.rows_s(_postgres(server))


@contextmanager
def _postgres(server: EmbeddedPostgres) -> Iterator[Callable[[list[bytes]], object]]:
    with server.connect() as connection, connection.cursor() as cursor:
        cursor.execute("CREATE TABLE events (seq bigserial PRIMARY KEY, data bytea)")

        def append(values: list[bytes]) -> None:
            # All values have the same length, so that what stands before each is the same, too.
            data = b"".join((_COPY_HEAD, _COPY_ROW, _COPY_ROW.join(values), _COPY_END))
            with connection.transaction(), cursor.copy("COPY events (data) FROM STDIN (FORMAT binary)") as copy:
                copy.write(data)

        yield append
