"""Readers of a follower of a stream whose level isn't local.

They see what the leader's readers see, and never less than before.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.wal.replica_pairs import Pair, ship
from tests.wal.truth import FOLDER, SHARDS, SMALL

from millstream.errors import ShipmentUnreadable
from millstream.model.ids import GroupNumber, ShardId
from millstream.model.replication import AckLevel
from millstream.testing.files import MemoryFiles, lose_all
from millstream.wal.durable_mark import read_mark, read_shown
from millstream.wal.layout import shard_folder
from millstream.wal.reader import StreamReader
from millstream.wal.replica.prepare_promotion import prepare_promotion
from millstream.wal.replica.replica_log import ReplicaLog
from millstream.wal.replica.ship_source import ShipSource


class Hidden(Pair):
    """A leader whose readers see what other nodes are reported to hold."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reopen_leader()

    def reopen_leader(self, *, hides: bool = True) -> None:
        self.leader.close()
        self.leader = self.truth.open(self.leader_files, options=self.options, hides=hides)

    def held(self, group: int) -> None:
        """Let other nodes hold everything up to a group."""
        assert self.leader.shown is not None
        self.leader.shown.show(GroupNumber(group))


def seen(files: MemoryFiles) -> int:
    return StreamReader(FOLDER, files=files).persisted_upto()


@pytest.fixture
def pair() -> Hidden:
    return Hidden()


def test_a_follower_has_all_and_shows_what_the_leader_shows_also_where_that_alone_moves(pair: Hidden):
    assert seen(pair.files) == 0
    shown = []
    for step in range(6):
        pair.append(step % 2 + 1)
        pair.ship(5000)
        assert pair.log.end().persisted_upto == pair.leader.persisted_upto
        assert pair.read() == pair.read_leader()
        pair.held(pair.leader.group - step % 2)
        (told,) = pair.ship()
        assert (told.parts, bool(told.marks)) == ((), True)
        assert pair.read() == pair.read_leader()
        shown.append(seen(pair.files))
        assert not pair.ship()
    assert shown == sorted(shown)
    assert shown[0] > 0
    pair.held(pair.leader.group)
    pair.ship()
    assert seen(pair.files) == pair.leader.persisted_upto


def test_a_level_that_goes_shows_all_and_one_that_comes_takes_nothing_back(pair: Hidden):
    pair.append(3)
    pair.held(1)
    pair.ship()
    assert 0 < seen(pair.files) < pair.leader.persisted_upto
    pair.reopen_leader(hides=False)
    pair.ship()
    assert seen(pair.files) == (before := pair.leader.persisted_upto)
    pair.reopen_leader()
    pair.append()
    pair.ship()
    assert before == seen(pair.files) < pair.leader.persisted_upto


@pytest.mark.parametrize("how", [None, lose_all], ids=["kill", "power"])
def test_a_crash_shows_nothing_that_others_neednt_have(pair: Hidden, how: object):
    pair.append(2)
    pair.held(1)
    pair.ship()
    pair.append(2)
    pair.ship()
    held = seen(pair.leader_files)
    pair.reopen(pair.files.crash(how))
    assert pair.log.end().persisted_upto == pair.leader.persisted_upto, "what it has acknowledged it has"
    assert seen(pair.files) <= held
    pair.ship()
    assert seen(pair.files) == held


def test_what_one_follower_is_enough_for_it_may_show_before_the_leader_does():
    pair = Hidden(options=replace(SMALL, acks=AckLevel.parse("durable(1)")))
    pair.append(2)
    shipped = pair.ship()
    assert all(one.by_one for one in shipped)
    assert seen(pair.files) == seen(pair.leader_files) == 0
    pair.log.show_all()
    assert seen(pair.files) == pair.leader.persisted_upto
    pair.held(1)
    pair.ship()
    assert seen(pair.files) == pair.leader.persisted_upto
    assert not any(one.by_one for one in Hidden().ship())


def test_a_place_where_no_frame_ends_isnt_shown(pair: Hidden):
    pair.append(3)
    pair.held(1)
    shipment = pair.source.read({}, 1 << 20)
    assert shipment is not None
    assert shipment.shown
    shown = {shard: replace(mark, byte_end=mark.byte_end - 8) for shard, mark in shipment.shown.items()}
    with pytest.raises(ShipmentUnreadable):
        pair.log.apply(replace(shipment, shown=shown))
    assert seen(pair.files) == 0
    pair.log.apply(shipment)
    assert pair.read() == pair.read_leader()


def test_who_takes_everything_for_good_isnt_told_what_is_shown(pair: Hidden):
    pair.append(2)
    log = ReplicaLog.open(FOLDER, files=(files := MemoryFiles()), side_by_side=False)
    sent = ship(ShipSource(FOLDER, files=pair.leader_files, tells_shown=False), log)
    assert [one.shown for one in sent] == [None] * len(sent)
    assert seen(files) == pair.leader.persisted_upto > seen(pair.leader_files)
    log = ReplicaLog.open(FOLDER, files=(files := MemoryFiles()), side_by_side=False, withholds=True)
    ship(ShipSource(FOLDER, files=pair.leader_files, tells_shown=False), log)
    assert (seen(files), log.end().persisted_upto) == (0, pair.leader.persisted_upto), "a follower waits for its leader"
    pair.held(1)
    ship(ShipSource(FOLDER, files=pair.leader_files), log)
    assert seen(files) == seen(pair.leader_files) > 0
    source = ShipSource(FOLDER, files=pair.leader_files, tells_shown=False)
    assert source.read(log.position()) is not None
    pair.held(2)
    assert source.read(log.position()) is None, "what readers see is no news"


def test_a_promoted_node_goes_on_where_its_readers_were_by_its_own_level(pair: Hidden):
    pair.append(3)
    pair.held(2)
    pair.ship()
    before = seen(pair.files)
    pair.log.close()
    prepare_promotion(FOLDER, files=pair.files)
    leader = pair.truth.open(pair.files, options=pair.options, hides=True)
    assert leader.shown is not None
    assert (seen(pair.files), leader.shown.hides) == (before, True)
    pair.truth.commit(leader, pair.truth.ops([(1, 1)]))
    leader.shown.show(GroupNumber(leader.group - 1))
    assert before < seen(pair.files) < leader.persisted_upto
    leader.close()
    leader = pair.truth.open(pair.files, options=pair.options)
    assert seen(pair.files) == leader.persisted_upto


def test_a_new_leader_that_has_shown_less_takes_nothing_back_from_a_followers_readers(pair: Hidden):
    other = ReplicaLog.open(FOLDER, files=(files := MemoryFiles()), side_by_side=False)
    pair.append(3)
    pair.held(1)
    pair.ship()
    pair.held(3)
    ship(ShipSource(FOLDER, files=pair.leader_files), other)
    assert seen(pair.files) < (before := seen(files))
    pair.log.close()
    prepare_promotion(FOLDER, files=pair.files)
    leader = pair.truth.open(pair.files, options=pair.options, hides=True)
    source = ShipSource(FOLDER, files=pair.files)
    ship(source, other)
    assert seen(files) == before
    pair.truth.commit(leader, pair.truth.ops([(1, 1), (2, 1)]))
    ship(source, other)
    assert seen(files) == before < leader.persisted_upto
    assert leader.shown is not None
    leader.shown.show(leader.group)
    ship(source, other)
    assert seen(files) == leader.persisted_upto


def test_readers_go_by_what_is_shown_before_anything_lies_there(pair: Hidden):
    pair.append(2)
    pair.ship()
    for shard in SHARDS:
        folder = shard_folder(FOLDER, ShardId(shard))
        shown, mark = read_shown(pair.files, folder), read_mark(pair.files, folder)
        assert mark is not None
        assert shown is not None
        assert shown.required
        assert mark.durable_offset > 0 == shown.mark.durable_offset
