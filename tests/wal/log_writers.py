"""Writers over files whose fsyncs a test holds back, and operations for them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
from tests.wal.plain_operations import MemoryReservations, plain_ops, plain_table

from millstream.model.ids import Epoch, GroupNumber, ShardId, StreamId
from millstream.model.operations import TableRows, WriteOps, append_operations, append_rows
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema
from millstream.protocol.replication.ack_levels import Holding, Holdings
from millstream.testing.files import MemoryFiles
from millstream.wal.reader import StreamReader
from millstream.wal.writing.writer import LogOptions, LogWriter

TABLE, OTHER = plain_table(1), plain_table(2)


class HeldSyncs(MemoryFiles):
    """Memory files whose fsyncs wait until a test lets them go."""

    def __init__(self) -> None:
        super().__init__()
        self.may_sync = threading.Event()
        self.may_sync.set()
        self.waiting = threading.Event()

    def sync(self, node: Any, path: str):
        if not self.may_sync.is_set():
            self.waiting.set()
            assert self.may_sync.wait(60)
        super().sync(node, path)


class OutdatedLook:
    """A lock that always looks free, as it may to a thread whose look is out of date by the time that it acts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def locked(self) -> bool:
        return False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Others:
    """A stand-in for other machines; the test sets what they hold."""

    def __init__(self) -> None:
        self.places: dict[str, Holding] = {}
        self.promised = Epoch(1)
        self.looks = 0

    def begin(self, newest: GroupNumber) -> None:
        """Accept whatever the log has."""

    def look(self) -> Holdings:
        self.looks += 1
        return Holdings(self.promised, tuple(self.places.values()))

    def hold(self, group: int, *, name: str = "b", upto: int = 0, is_store: bool = False) -> None:
        self.places[name] = Holding(name, Epoch(1), GroupNumber(group), Seq(upto), 0, is_store)


def opened(
    folder: str | Path,
    *,
    files: MemoryFiles | None = None,
    epoch: int = 1,
    shards: tuple[int, ...] = (0,),
    reservations: MemoryReservations | None = None,
    stream: StreamId | None = None,
    **options: Any,
) -> LogWriter:
    return LogWriter.open(
        str(folder),
        stream=stream or StreamId(uuid4()),
        shards=shards,
        epoch=epoch,
        reservations=reservations or MemoryReservations(),
        files=files,
        options=LogOptions(**{"segment_bytes": 1 << 20, "disk_used_max": 1.0, **options}),
    )


def one(xid: int, text: str = "x", table: TableSchema = TABLE) -> WriteOps:
    """Return a transaction of one row."""
    return plain_ops({xid: [(table, 1, text)]}, shard_of={2: 1})


def small(number: int, rows: int = 1, *, text: str = "x", table: TableSchema = TABLE, shard: int = 0) -> WriteOps:
    """Return a small append whose rows have `number` as their `id`."""
    columns = [
        pa.array([value] * rows, column.arrow) for value, column in zip((number, text), table.columns, strict=True)
    ]
    return WriteOps(append_operations(1), (TableRows(table, append_rows(table, columns, [rows]), ShardId(shard)),))


def xids(reader: StreamReader) -> list[int | None]:
    """Return the xids of all records, by number; None for an append."""
    return column(reader, "__xid")


def column(reader: StreamReader, name: str) -> list[Any]:
    """Return a column of all records, by number."""
    found = list(reader.read_between(reader.first_seq() - 1, reader.persisted_upto()))
    by_seq = {
        seq: value
        for records in found
        for seq, value in zip(*(records.batch.column(c).to_pylist() for c in ("__seq", name)), strict=True)
    }
    return [by_seq[seq] for seq in sorted(by_seq)]
