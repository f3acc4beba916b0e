"""Pages that the disk can't read: damage of that place, for every reader and tool, and never a crash."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
from tests.wal.plain_operations import MemoryReservations, plain_ops, plain_table

from millstream.errors import CorruptWal, MillstreamError, UnreadableBytes
from millstream.model.ids import Epoch, ShardId, StreamId
from millstream.model.positions import Offset
from millstream.wal import files as real_files
from millstream.wal.files import RealFiles
from millstream.wal.layout import MARK_NAME, shard_folder
from millstream.wal.mending.inspect import inspect, ls, stats, verify
from millstream.wal.mending.repair import plan_repair, repair
from millstream.wal.reader import StreamReader
from millstream.wal.replica.ship_source import ShipSource
from millstream.wal.writing.options import LogOptions
from millstream.wal.writing.writer import LogWriter

STREAM = StreamId(UUID(int=7))
SHARD = ShardId(0)
PAGE = 4096


@pytest.fixture
def bad_pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[str, int]]]:
    """Yield the pages, as (path, number), that fail with EIO like bad sectors; the bytes before one are read."""
    pages: set[tuple[str, int]] = set()
    pread = os.pread

    def fails(descriptor: int, length: int, position: int) -> bytes:
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        hit = [
            page
            for of, page in pages
            if of == path and page * PAGE < position + length and position < (page + 1) * PAGE
        ]
        if not hit:
            return pread(descriptor, length, position)
        if min(hit) * PAGE <= position:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(descriptor, min(hit) * PAGE - position, position)

    monkeypatch.setattr(real_files.os, "pread", fails)
    yield pages
    pages.clear()


class Log:
    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.reservations = MemoryReservations()
        self.table, self.other = plain_table(1), plain_table(2)
        for epoch in (1, 2):
            with self.open(epoch) as log:
                for number in range(3):
                    rows = [(self.table, 30, f"{os.urandom(40).hex()}"), (self.other, 30, f"{os.urandom(40).hex()}")]
                    log.append(plain_ops({10 * epoch + number: rows}))
        writer = self.open(3)
        for number in range(6):
            writer.append(plain_ops({30 + number: [(self.table, 40, os.urandom(60).hex())]}))
        self.copy = f"{folder}.copy"
        shutil.copytree(folder, self.copy)  # with an open segment, as a crash leaves it
        writer.close()
        shutil.rmtree(folder)
        shutil.copytree(self.copy, folder)

    def open(self, epoch: int) -> LogWriter:
        return LogWriter.open(
            self.folder, stream=STREAM, shards=[SHARD], epoch=Epoch(epoch), reservations=self.reservations,
            options=LogOptions(disk_used_max=1.0),
        )  # fmt: skip

    def segments(self) -> list[Path]:
        return sorted(Path(shard_folder(self.folder, SHARD)).glob("*.wal"))

    def again(self) -> None:
        shutil.rmtree(self.folder)
        shutil.copytree(self.copy, self.folder)

    def pages(self) -> list[tuple[str, int]]:
        return [(str(path), page) for path in self.segments() for page in range(-(-path.stat().st_size // PAGE))]


def offsets(reader: StreamReader) -> set[int]:
    return {
        offset for records in reader.read(SHARD, Offset(0)) for offset in records.batch.column("__offset").to_pylist()
    }


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "shop")


def test_the_call_itself_names_path_and_byte(log: Log, bad_pages: set[tuple[str, int]]) -> None:
    path = str(log.segments()[0])
    bad_pages.add((path, 1))
    assert len(RealFiles().read(path, 0, PAGE)) == PAGE
    with pytest.raises(UnreadableBytes) as caught:
        RealFiles().read(path)
    assert caught.value.details == {"path": path, "byte": PAGE, "errno": "EIO"}


@pytest.mark.siege
def test_every_page_that_fails_is_damage_of_its_place(log: Log, bad_pages: set[tuple[str, int]]) -> None:
    whole = offsets(StreamReader(log.folder))
    for place in log.pages():
        bad_pages.clear()
        log.again()
        bad_pages.add(place)
        path, page = place
        told: list[CorruptWal] = []
        left = offsets(StreamReader(log.folder, on_damage=told.append))
        assert left <= whole
        strict = StreamReader(log.folder)
        if told:
            assert all(error.details["file"] == path and "can't be read" in error.message for error in told), place
            with pytest.raises(CorruptWal) as caught:
                offsets(strict)
            assert caught.value.details["file"] == path
        else:
            assert offsets(strict) == whole
        report = verify(log.folder)
        lost = {o for loss in report.losses for o in range(loss.offset_from or 0, loss.offset_to or 0)}
        assert {loss.file for loss in report.losses} <= {path}
        assert whole - left <= lost, place
        assert report.losses or page * PAGE >= Path(path).stat().st_size - PAGE, place
        for look in (lambda: list(inspect(log.folder)), lambda: ls(log.folder), lambda: stats(log.folder)):
            look()
        done = repair(log.folder, plan_repair(log.folder).ranges())
        # Bytes that are written again lie on other pages of the disk.
        bad_pages.clear()
        assert done.is_needed == bool(report.losses)
        assert whole - lost <= offsets(StreamReader(log.folder))
        assert not plan_repair(log.folder).is_needed
        log.open(4).close()


def test_a_writer_and_a_leader_stop_at_it_and_lose_nothing(log: Log, bad_pages: set[tuple[str, int]]) -> None:
    """At the end of the open segment an unreadable page would have passed for a torn tail."""
    whole = offsets(StreamReader(log.folder))
    path = log.segments()[-1]
    for page in range(-(-path.stat().st_size // PAGE)):
        bad_pages.clear()
        bad_pages.add((str(path), page))
        before = path.read_bytes()
        if page * PAGE < path.stat().st_size - PAGE:
            with pytest.raises(CorruptWal) as caught:
                log.open(4)
            assert caught.value.details["file"] == str(path)
            with pytest.raises(CorruptWal):
                ShipSource(log.folder).read({})
        assert path.read_bytes() == before
    bad_pages.clear()
    assert offsets(StreamReader(log.folder)) == whole


def test_a_mark_that_cant_be_read_is_damaged_and_the_tools_go_on(log: Log, bad_pages: set[tuple[str, int]]) -> None:
    mark = f"{shard_folder(log.folder, SHARD)}/{MARK_NAME}"
    whole = offsets(StreamReader(log.folder))
    bad_pages.add((mark, 0))
    with pytest.raises(CorruptWal) as caught:
        StreamReader(log.folder).persisted_upto()
    assert caught.value.details["file"] == mark
    assert offsets(StreamReader(log.folder, without_mark=True)) == whole
    assert [loss.file for loss in verify(log.folder).losses] == [mark]
    with pytest.raises(MillstreamError, match="can't be read"):
        log.open(4)
