"""Readers that share decoded frames read what each would read alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.wal.plain_operations import MemoryReservations
from tests.wal.test_records_json import ITEMS, ORDERS, operation, ops, row

from millstream.errors import CorruptWal
from millstream.model.ids import Epoch, ShardId, StreamId
from millstream.model.operations import OperationKind
from millstream.model.positions import Offset, Seq
from millstream.model.records import Op
from millstream.wal.reader import StreamReader
from millstream.wal.reading.frame_cache import DecodedFrames
from millstream.wal.reading.table_records import TableRecords
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
            found += [facts_of(part) for part in parts]
    return found


def facts_of(part: TableRecords) -> tuple[Any, ...]:
    """Return everything that a reader gets with some records, and the records."""
    places = part.shard, part.region, part.epoch, part.frame_offset, part.first_seq, part.last_seq
    return part.schema, *places, part.batch.to_pylist(), part.operation_seq.to_pylist(), part.hybrid_ns.to_pylist()


def test_readers_that_share_frames_read_what_each_reads_alone(tmp_path: Path) -> None:
    with log_of(tmp_path / "wal", "x") as folder:
        alone, shared = all_of(StreamReader(folder)), DecodedFrames()
        assert len(alone) > 60
        for _ in range(2):
            assert all_of(StreamReader(folder, decoded=shared)) == alone
        assert shared.size_bytes > 0


def test_a_damaged_frame_costs_no_frame_before_it(tmp_path: Path) -> None:
    with log_of(tmp_path / "wal", "x") as folder:
        reader = StreamReader(folder)
        whole = [facts_of(part) for part in reader.read(SHARD, Offset(0))]
        places = list(reader.frames_between(Seq(0), reader.persisted_upto()))
        assert len(places) == 10
        segment = Path(places[0][1].path)
        data = segment.read_bytes()
        for _, _, entry in places:
            damaged = bytearray(data)
            damaged[entry.position + entry.length - 16] ^= 1  # in its last rows
            segment.write_bytes(damaged)
            found: list[object] = []
            parts = StreamReader(folder, decoded=DecodedFrames()).read(SHARD, Offset(0))
            with pytest.raises(CorruptWal) as raised:
                found.extend(facts_of(part) for part in parts)
            assert raised.value.details["offset_from"] == entry.offset
            before = [part for part in whole if part[4] < entry.offset]
            assert found[: len(before)] == before
        segment.write_bytes(data)


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
