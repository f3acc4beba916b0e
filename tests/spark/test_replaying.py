"""Progress of a replay: counted from a real log, by a clock under control."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from tests.wal.plain_operations import MemoryReservations, plain_ops, plain_table

from millstream.model.positions import Seq
from millstream.protocol.retention import HolderKind, Retention, RetentionBounds
from millstream.spark.initial_replay import ReplayWatch
from millstream.wal.backlog import Backlogs
from millstream.wal.segment_deletion import drop_segments
from millstream.wal.writing.writer import LogOptions, LogWriter

TABLE = plain_table(1)


class Log:
    """A log of small segments; each append has three records."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.writer = LogWriter.open(
            self.folder,
            stream=uuid4(),
            shards=(0,),
            epoch=1,
            reservations=MemoryReservations(),
            options=LogOptions(segment_bytes=12_000, disk_used_max=1.0),
        )
        self._xid = 0

    def append(self) -> Seq:
        self._xid += 1
        return self.writer.append(plain_ops({self._xid: [(TABLE, 3, "x")]})).seqs.last


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    log = Log(tmp_path)
    yield log
    log.writer.close()


def test_what_is_done_only_grows_up_to_the_whole_whatever_comes_and_goes_meanwhile(log: Log) -> None:
    before = [log.append() for _ in range(5)]
    ends = [log.append() for _ in range(40)]
    start, target = before[-1], ends[-1]
    whole = Backlogs(log.folder).between(start, target)
    watch = ReplayWatch(log.folder, start, target, bytes_max=1)
    tracker = Retention(["lake"])
    done = [0, 0, 0]
    for n in (start, *ends[:-1]):
        log.append()
        tracker.needs("lake", HolderKind.PIPELINE, Seq(n + 1))
        tracker.landed("lake", Seq(1), n)
        drop_segments(log.folder, tracker, RetentionBounds(0, 0, 0))
        told = watch.look(n)
        assert told is not None
        amounts = (told.segments, told.records, told.size_bytes)
        assert [amount.total for amount in amounts] == [whole.segments, whole.records, whole.size_bytes]
        assert all(now >= then for now, then in zip([amount.done for amount in amounts], done, strict=True))
        done = [amount.done for amount in amounts]
        assert told.records.done == n - start, "numbers without gaps"
        assert watch.finished is None
    assert Backlogs(log.folder).between(Seq(0), ends[-2]).records < 10, "retention was at work"
    assert watch.look(target) is None
    assert watch.finished is not None
    assert watch.finished.segments.left == watch.finished.records.left == watch.finished.size_bytes.left == 0
    assert watch.finished.records.total == whole.records
    log.append()
    assert watch.look(target) is None, "what comes behind a replay is none"


def test_a_start_that_finds_no_more_than_a_batch_is_no_replay(log: Log) -> None:
    target = [log.append() for _ in range(10)][-1]
    size = Backlogs(log.folder).between(Seq(0), target).size_bytes
    of_a_batch = ReplayWatch(log.folder, Seq(0), target, bytes_max=size)
    assert of_a_batch.look(Seq(0)) is None
    assert of_a_batch.look(target) is None
    assert of_a_batch.finished is None
    assert ReplayWatch(log.folder, target, target, bytes_max=size).look(target) is None
    assert ReplayWatch(log.folder, Seq(0), target, bytes_max=size - 1).look(Seq(0)) is not None
    assert ReplayWatch(log.folder, Seq(0), target, bytes_max=size, records_min=30).look(Seq(0)) is not None, (
        "small records, and many"
    )


def test_the_rest_is_estimated_by_the_rate_so_far(log: Log) -> None:
    ends = [log.append() for _ in range(8)]
    now = 100.0
    watch = ReplayWatch(log.folder, Seq(0), ends[-1], bytes_max=1, clock=lambda: now)

    def eta_s(n: Seq) -> float | None:
        told = watch.look(n)
        assert told is not None
        assert told.seconds == now - 100.0
        return told.eta_s

    assert eta_s(Seq(0)) is None
    now = 130.0
    assert eta_s(Seq(0)) is None, "nothing has landed"
    assert eta_s(ends[1]) is None, "the first batch, with Spark's start, tells nothing"
    now = 135.0
    assert eta_s(ends[1]) is None
    now = 138.0
    assert eta_s(ends[3]) == pytest.approx(16.0)
    now = 140.0
    assert eta_s(ends[3]) == pytest.approx(16.0), "a batch in flight takes its time"
    now = 142.0
    assert eta_s(ends[5]) == pytest.approx(6.0)
    now = 182.0
    assert eta_s(ends[5]) == pytest.approx(20.0), "this one hangs"


def test_a_log_that_cannot_be_counted_stops_nobody(log: Log, tmp_path: Path) -> None:
    target = [log.append() for _ in range(30)][-1]
    watch = ReplayWatch(log.folder, Seq(0), target, bytes_max=1)
    segment = sorted((tmp_path / "00000").glob("*.wal"))[1]
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-20] + bytes(20))
    assert watch.look(Seq(0)) is None
    segment.write_bytes(whole)
    told = watch.look(Seq(0))
    assert told is not None
    assert told.records.total == target
