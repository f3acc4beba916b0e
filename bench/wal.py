"""The log alone, without a source: one caller appends batches, each durable before the next."""

from __future__ import annotations

import os
import sqlite3
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
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
BATCHES = 400
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


@measures("wal_append_batch_vs_sqlite", "wal_append_batch_vs_rocksdb", "wal_append_batch_vs_postgres")
def append_batch() -> Iterator[Figure]:
    """Measure commits of 1000 rows of 100 random bytes, one caller, each commit fsynced; the peers are three stores."""
    commits = asked.rows // BATCH_ROWS if asked.rows else BATCHES
    rows = commits * BATCH_ROWS
    batches = [[os.urandom(ROW_BYTES) for _ in range(BATCH_ROWS)] for _ in range(commits)]

    def ours() -> float:
        with folder("log") as path, log_in(path) as writer:
            return _rows_s(batches, lambda values: writer.append(operation(values)))

    for peer, append, said in (
        (
            "sqlite",
            _sqlite,
            f"SQLite {sqlite3.sqlite_version}: journal_mode=WAL, synchronous=FULL, checkpoints as by default",
        ),
        (
            "rocksdb",
            _rocksdb,
            "RocksDB by rocksdict, as it comes: a write batch of 1000 puts under keys of 8 bytes, synced",
        ),
        (
            "postgres",
            _postgres,
            "PostgreSQL 18 over a Unix socket: COPY of 1000 rows, binary, a commit each, synchronous_commit=on",
        ),
    ):
        name = f"wal_append_batch_vs_{peer}"
        say(f"{name}: {commits} commits of {BATCH_ROWS} x {ROW_BYTES} B")
        yield compared(
            name,
            ours,
            partial(append, batches),
            unit="rows/s",
            goal=">= 1.5" if peer == "rocksdb" else ">= 2",
            rows=rows,
            size_bytes=rows * ROW_BYTES,
            note=(
                f"1 binary column of 100 random bytes; {commits} commits of 1000 rows by one caller; both sides begin with the same Python"
                f" lists; {said}"
            ),
        )


def _rows_s(batches: list[list[bytes]], append: Callable[[list[bytes]], object]) -> float:
    started = time.perf_counter()
    for values in batches:
        append(values)
    return len(batches) * BATCH_ROWS / (time.perf_counter() - started)


def _sqlite(batches: list[list[bytes]]) -> float:
    with folder("sqlite") as path, closing(sqlite3.connect(path / "log.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("CREATE TABLE events (seq INTEGER PRIMARY KEY, data BLOB)")

        def append(values: list[bytes]) -> None:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("INSERT INTO events (data) VALUES (?)", zip(values))
            connection.execute("COMMIT")

        return _rows_s(batches, append)


def _rocksdb(batches: list[list[bytes]]) -> float:
    with folder("rocksdb") as path:
        store = Rdict(str(path / "db"), Options(raw_mode=True))
        synced = WriteOptions()
        synced.sync = True
        store.set_write_options(synced)
        keys = map(_KEY.pack, count())

        def append(values: list[bytes]) -> None:
            batch = WriteBatch(raw_mode=True)
            for value in values:
                batch.put(next(keys), value)
            store.write(batch)

        try:
            return _rows_s(batches, append)
        finally:
            store.close()


def _postgres(batches: list[list[bytes]]) -> float:
    with (
        EmbeddedPostgres(settings={"wal_level": "replica"}) as server,
        server.connect() as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute("CREATE TABLE events (seq bigserial PRIMARY KEY, data bytea)")

        def append(values: list[bytes]) -> None:
            with connection.transaction(), cursor.copy("COPY events (data) FROM STDIN (FORMAT binary)") as copy:
                copy.set_types(["bytea"])
                for value in values:
                    copy.write_row((value,))

        return _rows_s(batches, append)
