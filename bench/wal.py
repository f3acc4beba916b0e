"""The log alone, without a source: one caller appends batches, each durable before the next."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from uuid import uuid4

import numpy as np
import pyarrow as pa

from bench.figures import Figure, compared, measures, say
from bench.places import folder
from millstream.model.ids import Epoch, SchemaVersion, SourceId, StreamId, TableId
from millstream.model.operations import FIRST_SHARD, OPERATION_SCHEMA, OperationKind, TableRows, WriteOps
from millstream.model.positions import Seq
from millstream.model.records import Op, append_row_schema
from millstream.model.schema import Column, ReplicaIdentity, TableSchema
from millstream.wal.commit import LogOptions
from millstream.wal.writer import LogWriter

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


class ReservationsInMemory:
    """Numbers are reserved a million at a time; where that's kept isn't what is measured here."""

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
"""The columns that say nothing but how many rows there are: the same in every batch."""


def operation(values: list[bytes], *, table: TableSchema = EVENTS) -> WriteOps:
    """One request's rows, at most `BATCH_ROWS`, as the log takes them: the work of building the column belongs to the figure."""
    said = [column.slice(0, len(values)) for column in _SAID_BY_COUNT]
    rows = pa.RecordBatch.from_arrays([*said, pa.array(values, pa.binary())], schema=_SCHEMA)
    return WriteOps(_ONE_APPEND, (TableRows(table, rows, FIRST_SHARD),))


@contextmanager
def log_in(path: Path, *, options: LogOptions | None = None) -> Iterator[LogWriter]:
    """A new log's writer."""
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


@measures("wal_append_batch_vs_sqlite")
def append_batch_vs_sqlite() -> Iterator[Figure]:
    """1000 rows of 100 random bytes a commit, one caller, each commit fsynced; SQLite in WAL mode with synchronous=FULL."""
    rows = BATCHES * BATCH_ROWS
    say(f"wal_append_batch_vs_sqlite: {BATCHES} commits of {BATCH_ROWS} x {ROW_BYTES} B")
    batches = [[os.urandom(ROW_BYTES) for _ in range(BATCH_ROWS)] for _ in range(BATCHES)]

    def ours() -> float:
        with folder("log") as path, log_in(path) as writer:
            started = time.perf_counter()
            for values in batches:
                writer.append(operation(values))
            return rows / (time.perf_counter() - started)

    def sqlite() -> float:
        with folder("sqlite") as path, closing(sqlite3.connect(path / "log.db", isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("CREATE TABLE events (seq INTEGER PRIMARY KEY, data BLOB)")
            started = time.perf_counter()
            for values in batches:
                connection.execute("BEGIN IMMEDIATE")
                connection.executemany("INSERT INTO events (data) VALUES (?)", zip(values))
                connection.execute("COMMIT")
            return rows / (time.perf_counter() - started)

    yield compared(
        "wal_append_batch_vs_sqlite",
        ours,
        sqlite,
        unit="rows/s",
        goal=">= 2",
        rows=rows,
        size_bytes=rows * ROW_BYTES,
        note=(
            "1 binary column of 100 random bytes; 400 commits of 1000 rows by one caller; both sides begin with the same Python"
            f" lists; SQLite {sqlite3.sqlite_version}: journal_mode=WAL, synchronous=FULL, checkpoints as by default"
        ),
    )
