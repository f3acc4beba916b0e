"""A follower's log: the leader's bytes, shown as the leader shows them, and nothing else whatever arrives."""

from __future__ import annotations

import random
from dataclasses import replace
from uuid import UUID

import pytest
from tests.wal.replica_pairs import Pair, rows, ship
from tests.wal.test_many_writers import FOLDER as MANY
from tests.wal.test_many_writers import Writers
from tests.wal.truth import FOLDER, SMALL, Truth

from millstream.errors import (
    DiskFull,
    Diverged,
    FollowerBehindRetention,
    ReplicaGap,
    ReplicationError,
    ShardLocked,
    ShipmentUnreadable,
)
from millstream.model.ids import GroupNumber, RegionId, ShardId, StreamId
from millstream.model.positions import Offset, Seq
from millstream.model.replication import ByteEnd, Shipment
from millstream.protocol.retention import HolderKind, Retention, RetentionBounds
from millstream.testing.clock import ManualClock
from millstream.testing.errors import coded
from millstream.testing.files import FaultPlan, MemoryFiles, lose_all
from millstream.wal.durable_mark import read_mark
from millstream.wal.layout import list_segments, segment_path, shard_folder
from millstream.wal.mending.inspect import verify
from millstream.wal.mending.plan import AcceptedRange
from millstream.wal.mending.repair import plan_repair, repair
from millstream.wal.reader import StreamReader
from millstream.wal.replica.replica_log import ReplicaLog
from millstream.wal.replica.ship_source import ShipSource
from millstream.wal.segment_deletion import drop_segments


@pytest.fixture
def pair() -> Pair:
    return Pair()


def drop_below(files: MemoryFiles, seq: int) -> None:
    tracker = Retention()
    tracker.needs("reader", HolderKind.BACKLOG, Seq(seq))
    drop_segments(FOLDER, tracker, RetentionBounds(0.0, 0, 0), files=files, clock=ManualClock())


def test_a_follower_has_the_leaders_bytes_and_shows_what_it_shows(pair: Pair):
    for step in range(6):
        pair.append(step % 3 + 1)
        pair.ship(bytes_max=random.Random(step).choice([1, 5000, 30_000]))
        assert pair.read() == pair.read_leader()
    pair.reopen_leader()
    pair.append()
    pair.truth.commit(pair.leader, pair.truth.spilled(*[[(1, 40), (2, 30)]] * 4))
    pair.ship(5000)
    assert pair.read() == pair.read_leader()
    assert pair.log.end().group == 6 * 2 + 2
    assert verify(FOLDER, files=pair.files).is_whole
    for shard in (0, 1):
        folder = shard_folder(FOLDER, ShardId(shard))
        mark = read_mark(pair.leader_files, folder)
        assert mark == read_mark(pair.files, folder)
        assert mark is not None
        for segment in list_segments(pair.files, folder):
            theirs = pair.leader_files.read(segment.path)
            whole = segment.base_offset < mark.base_offset
            assert pair.files.read(segment.path) == (theirs if whole else theirs[: mark.byte_end])


def test_a_tail_of_one_record_arrives_and_segment_0_too(pair: Pair):
    pair.truth.commit(pair.leader, pair.truth.ops([(1, 1)]))
    assert not any(part.is_end for shipment in pair.ship() for part in shipment.parts)
    assert len(pair.read()) == 1
    assert pair.log.position().keys() == {0}


def test_nothing_new_is_nothing_to_send_and_a_waiter_hears_of_what_comes(pair: Pair):
    clock = ManualClock(sleeping_advances=True)
    source = ShipSource(FOLDER, files=pair.leader_files, clock=clock)
    pair.append()
    ship(source, pair.log)
    assert source.read(pair.log.position()) is None
    assert not source.wait_beyond(1.0)
    assert clock.monotonic_ns() >= 1_000_000_000
    pair.append()
    assert source.wait_beyond(1.0)
    assert source.leader_end() == 12


def test_several_writers_of_a_folder_are_followed_as_one_log():
    for seed in range(2):
        chance = random.Random(seed)
        writers, files = Writers(), MemoryFiles()
        source = ShipSource(MANY, files=writers.files, clock=writers.clock)
        log = ReplicaLog.open(MANY, files=files, side_by_side=False)
        seen = 0
        for _ in range(14):
            who = chance.randrange(2)
            if who not in writers.open:
                writers.start(who)
            what = chance.random()
            if what < 0.6:
                writers.append(who, chance.randint(1, 3))
            elif what < 0.7:
                writers.open.pop(who).close()
            else:
                writers.open[who].follow()
            while (shipment := source.read(log.position(), chance.choice([1, 9000]))) is not None:
                log.apply(shipment)
                here = StreamReader(MANY, files=files)
                assert here.persisted_upto() >= seen, "what is shown went back"
                seen = here.persisted_upto()
            if chance.random() < 0.3:
                log.close()
                log = ReplicaLog.open(MANY, files=files, side_by_side=False)
                source.restart()
            there = StreamReader(MANY, files=writers.files)
            assert seen == there.persisted_upto()
            assert texts(StreamReader(MANY, files=files)) == texts(there)


def texts(reader: StreamReader) -> dict[int, str]:
    found: dict[int, str] = {}
    for records in reader.read_between(Seq(0), reader.persisted_upto()):
        found |= dict(
            zip(records.batch.column("__seq").to_pylist(), records.batch.column("text").to_pylist(), strict=True)
        )
    return found


def test_parts_of_several_shards_may_come_in_turns():
    pair = Pair(options=replace(SMALL, segment_bytes=1 << 20))
    pair.append(6)
    sent = everything(pair)
    turns = []
    for part in sent.parts:
        middle = 4096 + (len(part.data) - 4096) // 2
        turns.append((0, replace(part, data=part.data[:middle])))
        turns.append((1, replace(part, data=part.data[middle:], position=middle)))
    pair.log.apply(replace(sent, parts=tuple(part for _, part in sorted(turns, key=lambda turn: turn[0]))))
    assert pair.read() == pair.read_leader()


# --- refused shipments ----------------------------------------------------------------------------------------------


def test_what_came_already_is_compared_and_passed_over(pair: Pair):
    pair.append(9)
    sent = pair.ship(5000)
    before = pair.log.position(), pair.log.marks(), pair.files.plan.writes
    for shipment in sent:
        pair.log.apply(shipment)
    assert (pair.log.position(), pair.log.marks(), pair.files.plan.writes) == before


def test_other_bytes_at_the_same_place_stop_it_and_nothing_is_overwritten(pair: Pair):
    pair.append(1)
    sent = everything(pair)
    pair.log.apply(sent)
    part = sent.parts[0]
    other = bytearray(part.data)
    other[5000] ^= 1
    held = {path: pair.files.read(path) for path in (segment_path(shard_folder(FOLDER, part.shard), part.base_offset),)}
    with pytest.raises(Diverged, match="differs from the leader"):
        pair.log.apply(replace(sent, parts=(replace(part, data=bytes(other)),)))
    assert {path: pair.files.read(path) for path in held} == held


def test_a_leader_that_was_restored_from_an_old_copy_is_found_out_before_anything_is_put_behind(pair: Pair):
    pair.append(2)
    old = pair.leader_files.crash()
    pair.append(2)
    pair.ship()
    pair.leader_files, pair.source = old, ShipSource(FOLDER, files=old)
    truth = Truth(epoch=pair.truth.epoch)
    leader = truth.open(old)
    position = pair.log.position()
    with pytest.raises(Diverged):
        ship(pair.source, pair.log)
    for _ in range(8):
        truth.commit(leader, truth.ops([(1, 3), (2, 2)], [(3, 1)], size=3000))
    pair.source.restart()
    with pytest.raises(Diverged):
        ship(pair.source, pair.log)
    assert pair.log.position() == position


def test_a_leader_without_the_followers_segment_says_so(pair: Pair):
    pair.append(2)
    pair.ship()
    source = ShipSource(FOLDER, files=pair.leader_files)
    with pytest.raises(Diverged):
        source.read({ShardId(0): ByteEnd(Offset(7777), 0)})
    with pytest.raises(Diverged):
        source.read({ShardId(0): ByteEnd(Offset(0), 1 << 30)})
    pair.append(8)
    with pytest.raises(Diverged, match="no such segment"):
        source.read({ShardId(0): ByteEnd(Offset(1), 4096)})


def test_what_lies_beyond_the_end_is_a_gap(pair: Pair):
    pair.append(8)
    source = ShipSource(FOLDER, files=pair.leader_files)
    first = source.read({}, 5000)
    assert first is not None
    ahead = dict.fromkeys([ShardId(0)], first.parts[-1].end)
    second = source.read(ahead, 1 << 20)
    assert second is not None
    with pytest.raises(ReplicaGap):
        pair.log.apply(second)
    assert pair.log.position() == {}
    pair.log.apply(first)
    with pytest.raises(ReplicaGap, match="mark"):
        pair.log.apply(replace(second, parts=()))
    pair.log.apply(second)
    assert pair.read() == pair.read_leader()


def test_another_stream_or_region_is_refused(pair: Pair):
    pair.append()
    sent = everything(pair)
    pair.log.apply(sent)
    for other in (replace(sent, stream=StreamId(UUID(int=5))), replace(sent, region=RegionId(3))):
        with pytest.raises(ReplicationError, check=coded("other_stream")):
            pair.log.apply(other)
    with pytest.raises(ReplicationError, check=coded("other_stream")):
        ReplicaLog.open("/wal/new", files=pair.files, side_by_side=False).apply(
            replace(sent, stream=StreamId(UUID(int=5)))
        )
    pair.log.close()
    with pytest.raises(ReplicationError, check=coded("other_stream")):
        ReplicaLog.open(FOLDER, files=pair.files, stream=StreamId(UUID(int=5)))


@pytest.mark.parametrize("place", [0, 100, 4100, 4096 + 200, -1, -40, -300])
def test_a_flipped_byte_is_found_wherever_it_stands_and_what_is_right_comes_after_it(pair: Pair, place: int):
    pair.append(9)
    shipment = pair.source.read({}, 60_000)
    assert shipment is not None
    part = shipment.parts[0]
    assert part.is_end
    data = bytearray(part.data)
    data[place] ^= 4
    with pytest.raises(ReplicationError, check=coded("shipment_unreadable", "other_stream")):
        pair.log.apply(replace(shipment, parts=(replace(part, data=bytes(data)), *shipment.parts[1:])))
    assert pair.log.position() == {}
    pair.log.apply(shipment)
    pair.ship()
    assert pair.read() == pair.read_leader()


def test_a_damaged_piece_of_a_frame_is_forgotten_with_the_rest_of_the_frame(pair: Pair):
    pair.truth.commit(pair.leader, pair.truth.ops([(1, 4)], size=20_000))
    pair.append(1)
    first = pair.source.read({}, 6000)
    assert first is not None
    (part,) = first.parts
    data = bytearray(part.data)
    data[-1] ^= 1
    pair.log.apply(replace(first, parts=(replace(part, data=bytes(data)),)))
    with pytest.raises(ShipmentUnreadable):
        pair.ship()
    assert pair.log.position()[ShardId(0)].position < part.end.position
    pair.source.restart()
    pair.ship()
    assert pair.read() == pair.read_leader()


def test_marks_that_show_a_group_of_which_a_shard_lacks_its_part_are_not_believed(pair: Pair):
    pair.append(2)
    pair.ship()
    pair.append(1)
    shipment = pair.source.read(pair.log.position(), 60_000)
    assert shipment is not None
    lying = {
        shard: mark if shard == 0 else replace(pair.log.marks()[shard], group=mark.group)
        for shard, mark in shipment.marks.items()
    }
    before = pair.read()
    with pytest.raises(ShipmentUnreadable, match="shard 1 has received nothing of it"):
        pair.log.apply(replace(shipment, parts=tuple(p for p in shipment.parts if p.shard == 0), marks=lying))
    assert pair.read() == before
    pair.log.apply(shipment)
    assert pair.read() == pair.read_leader()


@pytest.mark.parametrize(
    "what", [{"durable_offset": Offset(4)}, {"byte_end": 5000}, {"group": GroupNumber(0)}], ids=str
)
def test_a_mark_that_says_other_than_the_bytes_is_not_believed(what: dict[str, int]):
    pair = Pair(options=replace(SMALL, segment_bytes=1 << 20))
    pair.append(2)
    shipment = pair.source.read({}, 60_000)
    assert shipment is not None
    marks = {shard: replace(mark, **what) for shard, mark in shipment.marks.items()}  # type: ignore[arg-type]
    with pytest.raises(ShipmentUnreadable):
        pair.log.apply(replace(shipment, marks=marks))
    assert pair.read() == {}


# --- retention ------------------------------------------------------------------------------------------------------


def test_a_follower_that_fell_behind_retention_is_told_and_a_fresh_one_begins_where_the_leader_does(pair: Pair):
    pair.append(3)
    pair.ship()
    pair.append(30)
    drop_below(pair.leader_files, 100)
    with pytest.raises(FollowerBehindRetention):
        pair.ship()
    files = MemoryFiles()
    log = ReplicaLog.open(FOLDER, files=files, side_by_side=False)
    source = ShipSource(FOLDER, files=pair.leader_files)
    ship(source, log, 5000)
    assert rows(files, pair.truth) == pair.read_leader()
    assert StreamReader(FOLDER, files=files).first_seq() == StreamReader(FOLDER, files=pair.leader_files).first_seq()
    assert verify(FOLDER, files=files).is_whole
    log.close()
    assert ReplicaLog.open(FOLDER, files=files, side_by_side=False).position() == log.position()


def test_a_quiet_shard_that_is_sealed_while_a_follower_is_away_waits_for_it(pair: Pair):
    pair.append()
    for _ in range(9):
        pair.truth.commit(pair.leader, pair.truth.ops([(1, 9)]))
    pair.ship()
    tracker, quiet = (
        Retention(),
        segment_path(shard_folder(FOLDER, ShardId(1)), pair.log.position()[ShardId(1)].base_offset),
    )

    def retain() -> bool:
        """Drop what no holder needs; return whether the quiet shard's segment is still there."""
        tracker.needs("follower b", HolderKind.FOLLOWER, pair.log.end().persisted_upto, pair.log.position())
        drop_segments(FOLDER, tracker, RetentionBounds(0.0, 0, 1 << 40), files=pair.leader_files, clock=ManualClock())
        return pair.leader_files.exists(quiet)

    pair.reopen_leader()
    pair.append(2)
    assert retain()
    pair.ship()
    assert pair.log.end().persisted_upto == pair.leader.persisted_upto
    assert not retain()


def test_what_the_leader_drops_stays_at_a_follower_until_its_own_retention_drops_it(pair: Pair):
    pair.append(30)
    pair.ship()
    everything = pair.read()
    drop_below(pair.leader_files, 100)
    pair.append()
    pair.ship()
    assert pair.read().items() > everything.items()
    drop_below(pair.files, 100)
    assert pair.read().keys() == pair.read_leader().keys()
    sent = ship(ShipSource(FOLDER, files=pair.leader_files), pair.reopen())
    assert [shipment.marks != {} for shipment in sent] == [True]


def test_a_repaired_leader_ships_what_is_left_with_its_loss_frames():
    truth, leader = Truth(), MemoryFiles()
    writer = truth.open(leader, options=replace(SMALL, segment_bytes=1 << 20))
    for _ in range(6):
        truth.commit(writer, truth.ops([(1, 7), (2, 7)], [(3, 7)]))
    writer.abandon()
    path = f"{FOLDER}/00000/{0:020d}.wal"
    leader.damage(path, 7000, b"damage")
    plan = plan_repair(FOLDER, files=leader)
    ranges = [
        AcceptedRange(int(loss.offset_from or 0), int(loss.offset_to or 0), loss.shard)
        for loss in plan.losses
        if loss.offset_from is not None
    ]
    repair(FOLDER, ranges, files=leader, clock=ManualClock())
    writer = truth.open(leader)
    truth.commit(writer, truth.ops([(1, 7), (2, 7)], [(3, 7)]))
    files = MemoryFiles()
    log = ReplicaLog.open(FOLDER, files=files, side_by_side=False)
    ship(ShipSource(FOLDER, files=leader), log, 5000)
    there, here = (StreamReader(FOLDER, files=of) for of in (leader, files))
    assert texts(here) == texts(there)
    assert len(texts(here)) < 6 * 21 + 21


# --- disks ----------------------------------------------------------------------------------------------------------


def test_a_disk_that_fails_at_an_open_is_told_as_at_a_shipment(pair: Pair):
    """It was a bare OSError."""
    pair.append(4)
    pair.ship()
    pair.log.close()
    failures = 0
    for at in range(1, 1000):
        pair.files.plan = plan = FaultPlan(fail_at=frozenset({at}))
        try:
            ReplicaLog.open(FOLDER, files=pair.files, side_by_side=False).close()
        except ReplicationError as error:
            assert error.code == "replica_failed"  # noqa: PT017 - most of the operations are of another call
            failures += 1
        if plan.operations < at:
            break
    assert failures
    pair.files.plan = FaultPlan()


def test_a_full_disk_leaves_nothing_half_and_shipping_goes_on_once_there_is_room(pair: Pair):
    pair.append(4)
    pair.ship()
    before, used = pair.log.position(), pair.files.used_bytes()
    pair.append(8)
    for room in range(0, 20_000, 1700):
        pair.files.capacity_bytes = used + room
        with pytest.raises(DiskFull):
            pair.log.apply(everything(pair))
        assert pair.log.position() == before
        assert pair.files.used_bytes() == used
    pair.files.capacity_bytes = 1 << 40
    pair.source.restart()
    pair.ship()
    assert pair.read() == pair.read_leader()


def everything(pair: Pair) -> Shipment:
    pair.source.restart()
    shipment = pair.source.read(pair.log.position(), 1 << 20)
    assert shipment is not None
    return shipment


def test_a_failed_fsync_ends_it_and_what_was_only_cached_is_written_again(pair: Pair):
    pair.append(2)
    pair.ship()
    pair.append(2)
    pair.files.plan.fail_sync_at = frozenset({pair.files.plan.syncs + 1})
    with pytest.raises(ReplicationError, check=coded("replica_failed")):
        pair.ship()
    with pytest.raises(ReplicationError, check=coded("replica_failed")):
        pair.ship()
    pair.files.plan.fail_sync_at = frozenset()
    pair.reopen()
    # Now it is durable, whatever the cache holds.
    pair.files = pair.files.crash(lose_all)
    pair.reopen(pair.files)
    pair.ship()
    assert pair.read() == pair.read_leader()


def test_what_was_acknowledged_is_shown_after_a_power_cut_without_the_leader(pair: Pair):
    for _ in range(3):
        pair.append(2)
        pair.ship()
    group = pair.log.end().group
    shown = pair.read()
    pair.reopen(pair.files.crash(lose_all))
    assert pair.log.end().group == group
    assert pair.read() == shown


def test_a_writer_and_a_follower_are_never_in_one_folder(pair: Pair):
    pair.append()
    pair.ship()
    with pytest.raises(ShardLocked):
        pair.truth.open(pair.files)
    with pytest.raises(ShardLocked):
        ReplicaLog.open(FOLDER, files=pair.leader_files, side_by_side=False)
    with pytest.raises(ShardLocked):
        ReplicaLog.open(FOLDER, files=pair.files, side_by_side=False)
