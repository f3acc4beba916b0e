"""Segments that retention drops, segments that it never drops, and the answers of readers and recovery afterwards."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.wal.truth import SMALL, Truth

from millstream.errors import OffsetBeyondEnd, OffsetExpired
from millstream.model.positions import Seq
from millstream.protocol.retention import CutOff, HolderKind, Retention, RetentionBounds, SealedSegment
from millstream.testing.clock import ManualClock
from millstream.testing.files import Crash, MemoryFiles, keep_any
from millstream.wal.reader import StreamReader
from millstream.wal.segment_deletion import drop_segments, oldest_sealed

FOLDER = "/wal/shop"


@pytest.fixture
def clock():
    return ManualClock()


def filled(truth: Truth, files: MemoryFiles, clock: ManualClock, groups: int = 8):
    log = truth.open(files, clock=clock)
    for _ in range(groups):
        truth.commit(log, truth.ops([(1, 12), (2, 6)], [(3, 12)]))
        clock.advance(10)
    return log


def drop(
    needed_from: int, *, age_s: float, bytes_max: int, files: MemoryFiles, clock: ManualClock
) -> list[SealedSegment]:
    """Run retention once, with a holder that reads from a number on."""
    tracker = Retention()
    tracker.needs("lake/1", HolderKind.BACKLOG, Seq(needed_from))
    bounds = RetentionBounds(age_s, bytes_max, bytes_max)
    return list(drop_segments(FOLDER, tracker, bounds, files=files, clock=clock).dropped)


def size_of(files: MemoryFiles) -> int:
    paths = [
        f"{FOLDER}/{shard}/{name}" for shard in files.listdir(FOLDER) for name in files.listdir(f"{FOLDER}/{shard}")
    ]
    return sum(files.size(path) for path in paths if path.endswith(".wal"))


def test_nothing_is_dropped_before_it_is_unneeded_however_old_or_large(truth: Truth, clock: ManualClock):
    files = MemoryFiles()
    filled(truth, files, clock)
    clock.advance(10_000)
    assert drop(1, age_s=1, bytes_max=0, files=files, clock=clock) == []
    needed_from = 100
    dropped = drop(needed_from, age_s=1, bytes_max=0, files=files, clock=clock)
    assert dropped
    assert all(segment.last_seq < needed_from for segment in dropped)
    reader = StreamReader(FOLDER, files=files)
    assert reader.first_seq() <= needed_from
    rows = [seq for r in reader.read_between(needed_from - 1, reader.persisted_upto()) for seq in r.batch["__seq"]]
    assert sorted(seq.as_py() for seq in rows) == list(range(needed_from, reader.persisted_upto() + 1))


def test_what_is_unneeded_stays_while_it_is_young_and_small(truth: Truth, clock: ManualClock):
    files = MemoryFiles()
    filled(truth, files, clock)
    assert drop(10**9, age_s=10_000, bytes_max=1 << 40, files=files, clock=clock) == []
    total = sum(files.size(f"{FOLDER}/00000/{n}") for n in files.listdir(f"{FOLDER}/00000") if n.endswith(".wal"))
    dropped = drop(10**9, age_s=10_000, bytes_max=total, files=files, clock=clock)
    assert dropped
    assert [s.last_seq for s in dropped] == sorted(s.last_seq for s in dropped)


def test_a_clock_that_was_ahead_for_a_while_holds_up_no_retention(truth: Truth, clock: ManualClock):
    """The segment that began then was sealed a year later, and the one before it counted as sealed in a year."""
    files, year_s = MemoryFiles(), 365 * 86_400
    log = truth.open(files, options=replace(SMALL, segment_bytes=1 << 20, segment_age_s=100), clock=clock)
    for step_s in (0, year_s, 0, -year_s, 100):
        clock.step_wall(step_s)
        truth.commit(log, truth.ops([(1, 2), (2, 2)]))
    clock.advance(1_000)
    dropped = drop(10**9, age_s=1_000, bytes_max=1 << 40, files=files, clock=clock)
    assert sorted(segment.shard for segment in dropped) == [0, 0, 1, 1]


def test_readers_tell_expired_from_not_yet_there(truth: Truth, clock: ManualClock):
    files = MemoryFiles()
    log = filled(truth, files, clock)
    drop(100, age_s=0, bytes_max=0, files=files, clock=clock)
    reader = StreamReader(FOLDER, files=files)
    first = reader.first_offset(0)
    with pytest.raises(OffsetExpired) as caught:
        list(reader.read(0, first - 1))
    assert caught.value.details["first"] == first
    with pytest.raises(OffsetBeyondEnd):
        list(reader.read(0, log.durable_offset(0) + 1))
    assert list(reader.read(0, log.durable_offset(0))) == []
    with pytest.raises(OffsetExpired):
        reader.cut(reader.first_seq() - 2)
    assert reader.cut(reader.first_seq() - 1) == log.persisted_upto


def test_a_span_whose_segment_was_dropped_has_expired(truth: Truth, clock: ManualClock):
    files = MemoryFiles()
    filled(truth, files, clock)
    reader = StreamReader(FOLDER, files=files)
    span = reader.spans(0, reader.persisted_upto(), bytes_target=1)[0]
    drop(100, age_s=0, bytes_max=0, files=files, clock=clock)
    with pytest.raises(OffsetExpired):
        list(reader.read_span(span))


class DroppedBeforeTheFirstLook(MemoryFiles):
    """Runs retention once, when a reader that has listed the segments looks into the first one."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.clock = clock
        self.needed_from = 0
        """The holder's number; 0: retention doesn't run."""
        self.dropped: list[SealedSegment] = []

    def size(self, path: str) -> int:
        if self.needed_from and path.endswith(".wal"):
            needed_from, self.needed_from = self.needed_from, 0
            self.dropped += drop(needed_from, age_s=0, bytes_max=0, files=self, clock=self.clock)
        return super().size(path)


def test_a_read_goes_on_if_retention_drops_what_it_does_not_need(truth: Truth, clock: ManualClock):
    """It looks at the segment before that of its first record, too, which nothing holds any longer."""
    files = DroppedBeforeTheFirstLook(clock)
    filled(truth, files, clock, groups=5)
    end = StreamReader(FOLDER, files=files).persisted_upto()
    for first in range(1, end + 1):
        files.needed_from = first
        cut = StreamReader(FOLDER, files=files).cut(Seq(first - 1), bytes_max=1 << 30)
        numbers = [
            number.as_py()
            for found in StreamReader(FOLDER, files=files).read_between(Seq(first - 1), end)
            for number in found.batch["__seq"]
        ]
        assert (cut, sorted(numbers)) == (end, list(range(first, end + 1)))
    assert len(files.dropped) > 2


def test_a_read_has_expired_if_retention_drops_what_it_needs(truth: Truth, clock: ManualClock):
    files = DroppedBeforeTheFirstLook(clock)
    filled(truth, files, clock)
    reader = StreamReader(FOLDER, files=files)
    files.needed_from = int(reader.persisted_upto())
    with pytest.raises(OffsetExpired):
        reader.spans(Seq(0), reader.persisted_upto())
    assert files.dropped


def test_a_new_writer_goes_on_behind_a_log_whose_front_and_perhaps_all_but_the_end_is_gone(
    truth: Truth, clock: ManualClock
):
    files = MemoryFiles()
    log = filled(truth, files, clock)
    end, reached = log.durable_offset(0), dict(log.reached)
    log.close()
    truth.open(files, clock=clock).close()
    drop(10**9, age_s=0, bytes_max=0, files=files, clock=clock)
    truth.acknowledged.clear()
    log = truth.open(files, clock=clock)
    assert log.durable_offset(0) == end
    assert dict(log.reached) == reached
    drop(10**9, age_s=0, bytes_max=0, files=files, clock=clock)
    truth.commit(log, truth.ops([(1, 1), (2, 1)]))
    log.abandon()
    truth.open(files, clock=clock)
    assert truth.judge(files)[-1] == truth.attempted[-1]


def test_a_segment_waits_for_every_table_in_it_to_land_whatever_the_pipeline_reads_next(
    truth: Truth, clock: ManualClock
):
    files = MemoryFiles()
    filled(truth, files, clock)
    bounds = RetentionBounds(0, 0, 0)
    oldest = oldest_sealed(FOLDER, files=files)
    assert oldest is not None
    tracker = Retention(["lake"])
    tracker.needs("lake", HolderKind.PIPELINE, Seq(10**9))
    first, *others = sorted({batch.table for batch in oldest.batches})
    for table in others:
        tracker.landed("lake", Seq(1), Seq(10**9), table=table)
    swept = drop_segments(FOLDER, tracker, bounds, files=files, clock=clock)
    assert (swept.dropped, swept.kept.segment, swept.kept.needed_by) == ((), oldest, ("lake",))
    tracker.landed("lake", Seq(1), oldest.last_seq, table=first)
    swept = drop_segments(FOLDER, tracker, bounds, files=files, clock=clock)
    assert swept.dropped[0] == oldest
    assert swept.kept.needed_by == ("lake",)
    assert all(
        segment.last_seq <= oldest.last_seq or first not in {b.table for b in segment.batches}
        for segment in swept.dropped
    )


def test_a_shard_that_seals_more_often_loses_its_parts_of_groups_that_another_still_holds(
    truth: Truth, clock: ManualClock
):
    """One shard's segments come and go while the other shard still writes its first one."""
    files = MemoryFiles()
    log = truth.open(files, options=replace(SMALL, segment_bytes=24_000), clock=clock)
    for _ in range(5):
        truth.commit(log, truth.ops([(1, 2), (2, 1)]))  # on both shards
        for _ in range(6):
            truth.commit(log, truth.ops([(1, 8)], size=100))  # on the first shard alone
    for _ in range(2):
        truth.commit(log, truth.ops([(1, 1), (2, 1)]))
    needed_from = int(log.persisted_upto)
    dropped = drop(needed_from, age_s=0, bytes_max=0, files=files, clock=clock)
    assert {segment.shard for segment in dropped} == {0}
    assert len(dropped) > 2
    left = [name for name in files.listdir(f"{FOLDER}/00000") if name.endswith(".wal")]
    assert len(left) == 1, "a sealed segment tells as well"
    gone = {xid for xid, ack in truth.acknowledged.items() if ack.seqs.last < needed_from - 1}
    truth.acknowledged = {xid: ack for xid, ack in truth.acknowledged.items() if xid not in gone}
    expected = truth.judge(files)
    assert expected
    assert truth.shown(files.crash(), without_mark=False) == expected
    bare = files.crash()
    for shard in (0, 1):
        bare.remove(f"{FOLDER}/{shard:05d}/durable.mark")
    assert truth.shown(bare, without_mark=True) == expected
    for keep in (None, keep_any(1)):
        survivor = files.crash(keep)
        again = truth.open(survivor, clock=clock)
        truth.commit(again, truth.ops([(1, 1), (2, 1)]))
        assert truth.judge(survivor)[:-1] == expected
        truth.acknowledged.popitem()


def test_what_a_crash_left_of_dropped_segments_is_no_hole(truth: Truth, clock: ManualClock):
    """Names go one by one, and after a power cut any of the removed ones may be there again."""
    files = MemoryFiles()
    log = filled(truth, files, clock)
    first = f"{FOLDER}/00000/{0:020d}.wal"
    content = files.read(first)
    assert len(drop(10**9, age_s=0, bytes_max=0, files=files, clock=clock)) > 2
    expected = truth.shown(files)
    back = files.create(first)
    back.pwrite(content, 0)
    assert truth.shown(files) == expected
    log.abandon()
    truth.open(files, clock=clock)
    assert truth.shown(files) == expected


def test_a_slow_consumer_is_cut_off_past_the_greatest_size_and_before_any_file_goes(truth: Truth, clock: ManualClock):
    files = MemoryFiles()
    filled(truth, files, clock)
    clock.advance(10_000)
    tracker = Retention()
    tracker.needs("mail", HolderKind.CONSUMER, Seq(1))
    tracker.needs("web", HolderKind.CONSUMER, Seq(10**9))
    size = size_of(files)
    kept = drop_segments(FOLDER, tracker, RetentionBounds(0, 0, size), files=files, clock=clock)
    assert (kept.dropped, kept.kept.needed_by) == ((), ("mail",))
    told: list[tuple[CutOff, int]] = []

    def note(gone: CutOff, *, answer: bool) -> bool:
        told.append((gone, size_of(files)))
        return answer

    bounds = RetentionBounds(0, 0, size - 1)
    came_on = drop_segments(FOLDER, tracker, bounds, cut_off=lambda g: note(g, answer=False), files=files, clock=clock)
    assert came_on.dropped == ()
    tracker.needs("mail", HolderKind.CONSUMER, Seq(2))
    gone = drop_segments(FOLDER, tracker, bounds, cut_off=lambda g: note(g, answer=True), files=files, clock=clock)
    assert gone.dropped
    assert [(cut.name, cut.needed_from, size_then) for cut, size_then in told] == [("mail", 1, size), ("mail", 2, size)]
    assert told[-1][0].first == gone.dropped[0].last_seq + 1


def test_a_crash_at_any_operation_of_retention_leaves_a_log_that_opens(clock: ManualClock):
    for at in range(1, 30):
        truth = Truth()
        files = MemoryFiles()
        log = filled(truth, files, clock)
        needed_from = 150
        files.plan.crash_at = files.plan.operations + at
        try:
            drop(needed_from, age_s=0, bytes_max=0, files=files, clock=clock)
            finished = True
        except Crash:
            finished = False
        survivor = files.crash(keep_any(at))
        kept = {xid for xid, ack in truth.acknowledged.items() if ack.seqs.first >= needed_from}
        truth.acknowledged = {xid: truth.acknowledged[xid] for xid in kept}
        truth.open(survivor, clock=clock)
        reader = StreamReader(FOLDER, files=survivor)
        rows = list(reader.read_between(needed_from - 1, reader.persisted_upto()))
        assert sum(r.batch.num_rows for r in rows) == log.persisted_upto - needed_from + 1
        drop(needed_from, age_s=0, bytes_max=0, files=survivor, clock=clock)
        if finished:
            return
    raise AssertionError("retention takes more operations than were tried")
