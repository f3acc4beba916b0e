"""A follower becomes the leader, and the old leader a follower.

Nothing acknowledged is lost, and what only the old one has is set aside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import pytest
from tests.wal.replica_pairs import Pair, rows, ship
from tests.wal.truth import FOLDER, SMALL

from millstream.errors import LogTruncated, OffsetExpired
from millstream.model.ids import GroupNumber, ShardId
from millstream.model.marks import ShownMark
from millstream.model.positions import Seq
from millstream.protocol.retention import HolderKind, Retention, RetentionBounds
from millstream.testing.clock import ManualClock
from millstream.testing.files import Crash, MemoryFiles, keep_any
from millstream.wal.durable_mark import MarkFile, read_dropped, read_mark, read_shown
from millstream.wal.layout import list_segments, list_shards, shard_folder
from millstream.wal.mending.inspect import verify
from millstream.wal.reader import StreamReader
from millstream.wal.replica.prepare_promotion import prepare_promotion
from millstream.wal.replica.replica_log import ReplicaLog
from millstream.wal.replica.set_aside import SetAsideTail, ends_behind, truncate_to
from millstream.wal.replica.ship_source import ShipSource, durable_marks
from millstream.wal.segment_deletion import drop_segments

ASIDE = f"{FOLDER}.aside-20260101"
PROMOTED_BEHIND = GroupNumber(5)
"""The last group that the follower of `torn_apart` has whole."""


def at_every_crash(files: MemoryFiles, step: Callable[[MemoryFiles], object], *, stride: int = 1) -> int:
    """Break a step off at each of its operations by a power cut; repeated, the step must finish.

    Return how many operations there were.
    """
    before = files.plan.operations
    probe = files.crash()
    step(probe)
    count = probe.plan.operations
    assert files.plan.operations == before
    for at in range(1, count + 1, stride):
        tried = files.crash()
        tried.plan.crash_at = at
        try:
            step(tried)
        except Crash:
            tried = tried.crash(keep_any(at))
        step(tried)
        files_equal(tried, probe)
    return count


def files_equal(one: MemoryFiles, other: MemoryFiles) -> None:
    """Check that both have the same segments with the same bytes, shown alike."""
    for folder in (FOLDER, ASIDE):
        assert list_shards(one, folder) == list_shards(other, folder)
        for shard in list_shards(one, folder):
            held = [
                {segment.base_offset: files.read(segment.path) for segment in list_segments(files, shard_folder(folder, shard))}
                for files in (one, other)
            ]  # fmt: skip
            assert held[0] == held[1]
        assert StreamReader(folder, files=one).persisted_upto() == StreamReader(folder, files=other).persisted_upto()


def torn_apart() -> Pair:
    """Return a follower that has some groups whole, and further ones on one shard only; its leader has still more."""
    pair = Pair()
    pair.append(5)
    pair.ship()
    pair.append(4)
    shipment = pair.source.read(pair.log.position(), 12_000)
    assert shipment is not None
    assert not shipment.marks
    assert {part.shard for part in shipment.parts} == {0}
    pair.log.apply(shipment)
    pair.log.close()
    pair.append(1)
    pair.leader.abandon()
    return pair


def test_a_follower_with_half_a_shipment_becomes_a_leader_with_all_that_it_acknowledged():
    pair = torn_apart()
    acknowledged = pair.read()
    at_every_crash(pair.files, lambda files: prepare_promotion(FOLDER, files=files))
    end = prepare_promotion(FOLDER, files=pair.files)
    assert end.group == PROMOTED_BEHIND
    assert pair.read() == acknowledged
    leader = pair.truth.open(pair.files)
    assert pair.read() == acknowledged
    for xid in list(pair.truth.acknowledged):
        if xid not in {row[0] for row in acknowledged}:
            del pair.truth.acknowledged[xid]  # only the old leader has it
    pair.truth.commit(leader, pair.truth.ops([(1, 3), (2, 2)], [(3, 1)]))
    assert pair.read().items() > acknowledged.items()
    leader.close()
    assert verify(FOLDER, files=pair.files).is_whole


def promoted() -> tuple[Pair, MemoryFiles]:
    """Return a pair whose follower leads and has written, and the old leader's files as it left them."""
    pair = torn_apart()
    prepare_promotion(FOLDER, files=pair.files)
    old = pair.leader_files.crash()
    pair.truth.seqs_seen.clear()  # numbers that only the old leader gave may be given again
    pair.leader = pair.truth.open(pair.files)
    pair.truth.commit(pair.leader, pair.truth.ops([(1, 2)], [(3, 1)]))
    return pair, old


def truncated(files: MemoryFiles) -> SetAsideTail | None:
    return truncate_to(FOLDER, ends_behind(files, FOLDER, PROMOTED_BEHIND), aside=ASIDE, files=files)


def test_an_old_leaders_own_tail_is_set_aside_readable_and_it_follows_the_new_one():
    pair, old = promoted()
    had = rows(old.crash(), pair.truth)
    pair.truth.seqs_seen.clear()
    common = rows(pair.files, pair.truth)
    aside = truncated(old)
    assert aside is not None
    pair.truth.seqs_seen.clear()
    beyond = rows(old, pair.truth, ASIDE)
    assert {row for row in had if row not in common} == set(beyond)
    assert aside.first_seq == min(pair.truth.seqs_seen)
    pair.truth.seqs_seen.clear()
    kept = rows(old, pair.truth)
    assert kept.items() <= common.items()
    assert len(kept) == len(had) - len(beyond)
    log = ReplicaLog.open(FOLDER, files=old, side_by_side=False)
    ship(ShipSource(FOLDER, files=pair.files), log, 5000)
    assert rows(old, pair.truth) == rows(pair.files, pair.truth)
    assert verify(FOLDER, files=old).is_whole


def test_who_reads_on_in_a_log_that_was_cut_back_and_has_grown_since_is_told_so():
    pair, old = promoted()
    reader = StreamReader(FOLDER, files=old)
    reading = reader.read_between(Seq(0), reader.persisted_upto())
    next(reading)
    truncated(old)
    log = ReplicaLog.open(FOLDER, files=old, side_by_side=False)
    for _ in range(20):
        pair.truth.commit(pair.leader, pair.truth.ops([(1, 2)], [(3, 1)]))
    ship(ShipSource(FOLDER, files=pair.files), log, 5000)
    with pytest.raises(LogTruncated, match="another writer"):
        list(reading)


@pytest.mark.parametrize("read_first", [1, 3])
def test_who_reads_a_log_that_is_cut_back_meanwhile_is_told_so_and_how_much_is_left(read_first: int):
    _, old = promoted()
    reader = StreamReader(FOLDER, files=old)
    upto = reader.persisted_upto()
    whole = list(reader.read_between(Seq(0), upto))
    late = StreamReader(FOLDER, files=old)
    spans = late.spans(Seq(0), upto)
    reading = StreamReader(FOLDER, files=old).read_between(Seq(0), upto)
    taken = [next(reading).batch for _ in range(read_first)]
    assert truncated(old) is not None
    with pytest.raises(LogTruncated) as told:
        taken.extend(found.batch for found in reading)
    assert taken == [found.batch for found in whole[: len(taken)]]
    left = told.value.details["persisted_upto"]
    assert 0 < left < upto
    with pytest.raises(LogTruncated):
        list(chain.from_iterable(map(late.read_span, spans)))
    kept = list(reader.read_between(Seq(0), left))
    assert kept == whole[: len(kept)]


def test_a_reader_that_knew_the_log_before_reads_its_new_history():
    pair, old = promoted()
    readers = [StreamReader(FOLDER, files=old) for _ in range(2)]
    for reader in readers:
        list(reader.read_between(Seq(0), reader.persisted_upto()))
    truncated(old)
    readers[0].persisted_upto()  # this reader has looked in between
    log = ReplicaLog.open(FOLDER, files=old, side_by_side=False)
    ship(ShipSource(FOLDER, files=pair.files), log, 5000)
    fresh = StreamReader(FOLDER, files=old)
    expected = list(fresh.read_between(Seq(0), fresh.persisted_upto()))
    for reader in readers:
        assert list(reader.read_between(Seq(0), reader.persisted_upto())) == expected


def test_what_an_old_leader_holds_back_it_holds_back_as_a_follower_until_its_new_leader_says_more():
    pair, old = promoted()
    for shard in list_shards(old, FOLDER):
        folder = shard_folder(FOLDER, shard)
        mark = read_mark(old, folder)
        assert mark is not None
        file = MarkFile.open(old, folder)
        file.move_shown(ShownMark(mark, required=True), anchor=True)
        file.close()
    assert at_every_crash(old, truncated, stride=3) > 10
    truncated(old)
    for shard in list_shards(old, FOLDER):
        shown, mark = (read(old, shard_folder(FOLDER, shard)) for read in (read_shown, read_mark))
        assert isinstance(shown, ShownMark)
        assert (shown.required, shown.mark.byte_end) == (True, mark.byte_end)
    pair.truth.seqs_seen.clear()
    assert rows(old, pair.truth).items() <= rows(pair.files, pair.truth).items()
    log = ReplicaLog.open(FOLDER, files=old, side_by_side=False)
    ship(ShipSource(FOLDER, files=pair.files), log)
    assert rows(old, pair.truth) == rows(pair.files, pair.truth)


def test_setting_aside_may_be_broken_off_anywhere_and_repeated():
    _, old = promoted()
    assert at_every_crash(old, truncated) > 10


def own_shard(*, groups: int = 2, dropped: bool = False) -> tuple[Pair, MemoryFiles]:
    """Return a pair as `promoted` does. On two shards the old leader has only groups that no other node has.

    These are shard 1, and one that was just begun. With `dropped`, the common groups there are dropped.
    """
    pair = Pair(options=replace(SMALL, segment_bytes=1 << 20))
    if dropped:
        pair.append()
    common = pair.leader.persisted_upto
    for _ in range(groups):
        pair.truth.commit(pair.leader, pair.truth.ops([(1, 3)], [(3, 1)]))
    pair.ship()
    pair.log.close()
    if dropped:
        pair.reopen_leader()
        pair.append()
        needed = Retention()
        needed.needs("reader", HolderKind.BACKLOG, Seq(common + 1))
        drop_segments(FOLDER, needed, RetentionBounds(0.0, 0, 0), files=pair.leader_files, clock=ManualClock())
    pair.leader.add_shards([ShardId(2)])
    pair.append(3)
    pair.leader.abandon()
    prepare_promotion(FOLDER, files=pair.files)
    old = pair.leader_files.crash()
    pair.truth.seqs_seen.clear()
    pair.leader = pair.truth.open(pair.files)
    return pair, old


def test_a_shard_of_which_nothing_stays_says_so_to_whoever_reads_it():
    """Regression: the shard's mark was removed with it, and readers reported a damaged log.

    The error's hint was to start the writer.
    """
    pair, old = own_shard()
    had = rows(old.crash(), pair.truth)
    group = durable_marks(pair.files, FOLDER)[ShardId(0)].group

    def cut(files: MemoryFiles) -> None:
        found = rows(files, pair.truth)
        shown = {row[0] for row in found}
        assert found == {row: text for row, text in had.items() if row[0] in shown}, (
            "at any moment whole operations can be read"
        )
        truncate_to(FOLDER, ends_behind(files, FOLDER, group), aside=ASIDE, files=files)

    assert at_every_crash(old, cut, stride=3) > 10
    reader = StreamReader(FOLDER, files=old)
    reading = reader.read_between(Seq(0), reader.persisted_upto())
    spans = reader.spans(Seq(0), reader.persisted_upto())
    next(reading)
    cut(old)
    for late in (reading, chain.from_iterable(map(reader.read_span, spans))):
        with pytest.raises(LogTruncated) as told:
            list(late)
        assert told.value.details["persisted_upto"] == reader.persisted_upto() > 0
    pair.truth.seqs_seen.clear()
    assert rows(old, pair.truth) == rows(pair.files, pair.truth)
    pair.truth.commit(pair.leader, pair.truth.ops([(1, 2)]))
    log = ReplicaLog.open(FOLDER, files=old, side_by_side=False)
    ship(ShipSource(FOLDER, files=pair.files), log)
    # The new leader has nothing of the shard that was just begun, and no reader waits for it.
    assert rows(old, pair.truth) == rows(pair.files, pair.truth)
    pair.append()
    ship(ShipSource(FOLDER, files=pair.files), log)
    assert rows(old, pair.truth) == rows(pair.files, pair.truth)


def test_what_retention_had_dropped_of_a_shard_stays_dropped_though_nothing_else_stays_there():
    """Regression: what was dropped was forgotten.

    Until the new leader's records came, a reader from the start got only the other shards' records.
    """
    pair, old = own_shard(dropped=True)
    first = StreamReader(FOLDER, files=old).first_seq()
    assert first > 1
    assert read_dropped(old, shard_folder(FOLDER, ShardId(0))) is None
    group = durable_marks(pair.files, FOLDER)[ShardId(0)].group
    ends = ends_behind(old, FOLDER, group)
    assert truncate_to(FOLDER, ends, aside=ASIDE, files=old) is not None
    assert not list_segments(old, shard_folder(FOLDER, ShardId(1)))
    reader = StreamReader(FOLDER, files=old)
    assert reader.first_seq() == first
    with pytest.raises(OffsetExpired):
        list(reader.read_between(Seq(0), reader.persisted_upto()))
    pair.truth.seqs_seen.clear()
    kept = rows(old, pair.truth)
    pair.append(2)
    log = ReplicaLog.open(FOLDER, files=old, side_by_side=False)
    ship(ShipSource(FOLDER, files=pair.files), log)
    there = StreamReader(FOLDER, files=pair.files)
    assert rows(old, pair.truth).keys() > kept.keys()
    assert list(reader.read_between(Seq(first - 1), reader.persisted_upto())) == list(
        there.read_between(Seq(first - 1), there.persisted_upto())
    )


def test_a_whole_log_that_goes_is_empty_and_is_begun_anew():
    pair, old = own_shard(groups=0)
    had = rows(old.crash(), pair.truth)

    def cut(files: MemoryFiles) -> None:
        assert rows(files, pair.truth) in (had, {}), "at any moment whole operations can be read"
        truncate_to(FOLDER, {}, aside=ASIDE, files=files)

    assert at_every_crash(old, cut, stride=3) > 10
    reader = StreamReader(FOLDER, files=old)
    reading = reader.read_between(Seq(0), reader.persisted_upto())
    next(reading)
    assert truncate_to(FOLDER, {}, aside=ASIDE, files=old) is not None
    with pytest.raises(LogTruncated):
        list(reading)
    assert rows(old, pair.truth) == {}
    pair.append(2)
    log = ReplicaLog.open(FOLDER, files=old, side_by_side=False)
    ship(ShipSource(FOLDER, files=pair.files), log)
    assert rows(old, pair.truth) == rows(pair.files, pair.truth)


def test_a_log_that_has_nothing_beyond_stays_as_it_is():
    pair = Pair()
    pair.append(7)
    pair.ship()
    pair.log.close()
    before = pair.read(), pair.files.plan.writes
    assert truncate_to(FOLDER, pair.log.position(), aside=ASIDE, files=pair.files) is None
    assert (pair.read(), pair.files.plan.writes) == before
    assert not pair.files.exists(ASIDE)


def test_up_to_the_group_behind_which_they_part_two_logs_are_the_same():
    pair, old = promoted()
    ends = ends_behind(old, FOLDER, PROMOTED_BEHIND)
    assert ends == ends_behind(pair.files, FOLDER, PROMOTED_BEHIND)
    for shard, end in ends.items():
        mine, theirs = (
            b"".join(files.read(segment.path)[: 1 << 30 if segment.base_offset < end.base_offset else end.position]
                     for segment in list_segments(files, shard_folder(FOLDER, shard)) if segment.base_offset <= end.base_offset)
            for files in (old, pair.files)
        )  # fmt: skip
        assert mine == theirs
