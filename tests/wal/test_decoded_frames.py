"""Readers that share decoded frames read what each would read alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

from tests.wal.test_records_json import ITEMS, ORDERS, operation, ops, row

from millstream.model.ids import Epoch, ShardId, StreamId
from millstream.model.operations import OperationKind
from millstream.model.positions import Offset, Seq
from millstream.model.records import Op
from millstream.testing.log import MemoryReservations
from millstream.wal.decoded_frames import DecodedFrames
from millstream.wal.reader import StreamReader
from millstream.wal.records_json import Cat
from millstream.wal.writing.writer import LogWriter

NOTHING: dict[str, Any] = {"total": None, "ratio": None, "paid": None}
SHARD = ShardId(0)


@contextmanager
def log_of(folder: Path, note: str) -> Iterator[str]:
    """Write a log of ten frames with two tables each; two logs differ in their notes alone."""
    with LogWriter.open(
        str(folder),
        stream=StreamId(UUID(int=7)),
        shards=[SHARD],
        epoch=Epoch(1),
        reservations=MemoryReservations(),
    ) as writer:
        for n in range(10):
            orders = [row(index, Op.CREATE, id=10 * n + index, note=note, **NOTHING) for index in range(3)]
            writer.append(
                ops(
                    [operation(None, 0x1000 + n, OperationKind.APPEND)],
                    (ORDERS, 0, orders),
                    (ITEMS, 0, [row(3, Op.CREATE, id=n)]),
                )
            )
        yield str(folder)


def all_of(reader: StreamReader) -> list[object]:
    """Return everything that a reader of `read` sees: whole, of one table, and of some numbers."""
    found: list[object] = []
    upto = reader.persisted_upto()
    for tables in (None, {ORDERS.table_id}, {ITEMS.table_id}):
        for numbers in ((None, None), (Seq(5), Seq(upto - 2))):
            parts = list(reader.read(SHARD, Offset(0), tables=tables, numbers=numbers))
            found += [(part.schema.name, part.batch.to_pylist(), part.operation_seq.to_pylist()) for part in parts]
    return found


def test_readers_that_share_frames_read_what_each_reads_alone(tmp_path: Path) -> None:
    with log_of(tmp_path / "wal", "x") as folder:
        alone, shared = all_of(StreamReader(folder)), DecodedFrames()
        assert len(alone) > 60
        for _ in range(2):
            assert all_of(StreamReader(folder, decoded=shared)) == alone
        assert shared.size_bytes > 0


def test_frames_are_kept_up_to_a_size(tmp_path: Path) -> None:
    with log_of(tmp_path / "wal", "x") as folder:
        whole = DecodedFrames()
        alone = all_of(StreamReader(folder, decoded=whole))
        some = DecodedFrames(whole.size_bytes // 3)
        assert all_of(StreamReader(folder, decoded=some)) == alone
        assert 0 < some.size_bytes <= whole.size_bytes // 3
        none = DecodedFrames(100)
        assert all_of(StreamReader(folder, decoded=none)) == alone
        assert none.size_bytes == 0


def test_other_rows_at_the_same_place_are_another_frame(tmp_path: Path) -> None:
    with log_of(tmp_path / "one", "one") as one, log_of(tmp_path / "two", "two") as two:
        shared, folder = DecodedFrames(), str(tmp_path / "wal")
        shutil.copytree(one, folder)
        notes = [line["row"].get("note") for line in Cat("shop", StreamReader(folder, decoded=shared)).lines()]
        assert set(notes) == {"one", None}
        shutil.rmtree(folder)
        shutil.copytree(two, folder)
        assert all_of(StreamReader(folder, decoded=shared)) == all_of(StreamReader(two))
