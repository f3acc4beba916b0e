"""The machines over real logs, with disks and links that fail.

A world has a leader's writer, followers' `ReplicaLog`s, disks in memory that fail at any operation, and
links that break.

`tests.wal.replica_search` plays the logs alone, and `simulation` plays the machines over a small model
of a log. This module plays both together, for fewer seeds. In the end the leader is lost with its disk.
The follower that the promises choose continues, with everything that was acknowledged at `durable(1)`.

`python -m tests.replication.files_simulation FIRST COUNT` plays that many seeds and prints what it
found; a seed repeats its run exactly.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field, replace

from tests.seeds import main
from tests.wal.replica_search import Follower as Replica
from tests.wal.replica_search import ReplicaLife
from tests.wal.truth import FOLDER, STREAM

from millstream.backoff import Backoff
from millstream.errors import Diverged, FollowerBehindRetention, LinkLost, MillstreamError, ReplicationError
from millstream.model.ids import Epoch, GroupNumber, RegionId
from millstream.model.positions import Seq
from millstream.model.replication import LOCAL, AckLevel, Acknowledgement, Document, Hello, NodeName, Shipment
from millstream.protocol.replication import follower_machine as following
from millstream.protocol.replication import leader_events
from millstream.protocol.replication import promotion_machine as promoting
from millstream.protocol.replication.follower_machine import Follower, OwnHolding
from millstream.protocol.replication.leader_events import LinkId, ShipOptions
from millstream.protocol.replication.leader_machine import Leader
from millstream.protocol.replication.node_promises import LINEAGE, Greeting, Promise, Role, RoleFact
from millstream.protocol.replication.promotion_machine import NodeReport, Promotion
from millstream.testing.files import Crash
from millstream.wal.reader import StreamReader
from millstream.wal.replica.prepare_promotion import prepare_promotion
from millstream.wal.replica.replica_log import ReplicaLog
from millstream.wal.replica.ship_source import ShipSource, durable_marks, log_marks
from millstream.wal.writing.options import LogOptions

LEADER, NODES = NodeName("a"), (NodeName("b"), NodeName("c"))
OPTIONS = ShipOptions(shipment_bytes=20_000, window_bytes=60_000, heartbeat_s=0.5, silence_s=30.0, cursor_every_s=0.0)


@dataclass
class Side:
    """One follower: its disk and log, its machine, and its link."""

    node: NodeName
    replica: Replica
    fact: RoleFact = field(default_factory=lambda: RoleFact(Role.FOLLOWS, leader=LEADER))
    machine: Follower | None = None
    link: LinkId | None = None
    down: deque[Shipment | MillstreamError | None] = field(default_factory=deque)
    up: deque[Hello | Acknowledgement | MillstreamError] = field(default_factory=deque)
    has_joined: bool = False


class MachinesLife(ReplicaLife):
    """See the module."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.now = 0.0
        self.links = 0
        self.machine: Leader | None = None
        self.sides = [Side(node, replica) for node, replica in zip(NODES, self.followers, strict=True)]
        self.sure_upto = Seq(0)
        """Highest number that any follower has acknowledged."""
        self.level = (AckLevel.parse("durable(2)"), AckLevel.parse("durable(1)"), LOCAL)[self.seed % 3]
        self.hides = self.level != LOCAL

    def play(self) -> None:
        for _ in range(self.chance.randint(30, 120)):
            self.now += 0.05
            if self.chance.random() < 0.2:
                self._lead()
            else:
                self._play(self.chance.choice(self.sides), trouble=True)
        self._open()
        assert self.leader is not None
        self.truth.commit(self.leader, self.truth.ops([(1, 1), (2, 2)], [(3, 1)]))
        self._tell_durable()
        for side in self.sides:
            self._mend(side.replica.files)
        for _ in range(5_000):
            self.now += 0.05
            for side in self.sides:
                self._play(side, trouble=False)
            if all(self._has_all(side) for side in self.sides):
                break
        for side in self.sides:
            assert self._has_all(side), f"{side.node} doesn't get what the leader has"
            self._same_bytes(side.replica)
            self._shows_a_beginning(side.replica)
        self._append()
        self._tell_durable()
        for _ in range(self.chance.randint(0, 12)):
            self.now += 0.05
            self._play(self.chance.choice(self.sides), trouble=False)
        self._lose_the_leader()

    def _has_all(self, side: Side) -> bool:
        log = side.replica.log
        if log is None or dict(log.marks()) != dict(durable_marks(self.files, FOLDER)):
            return False
        here, there = (StreamReader(FOLDER, files=files) for files in (side.replica.files, self.files))
        return (
            here.persisted_upto()
            == there.persisted_upto()
            == StreamReader(FOLDER, files=self.files, durable=True).persisted_upto()
        )

    def _held_upto(self, follower: Replica) -> Seq:
        # One follower's copy is enough.
        here = (
            StreamReader(FOLDER, files=follower.files, durable=True).persisted_upto() if self.level.by_one else Seq(0)
        )
        return max(self.held_seq, here)

    # --- the leader's side -----------------------------------------------------------------------------------------

    def _open(self) -> None:
        if self.leader is None:
            super()._open()
            for side in self.sides:
                self._cut_link(side)
            self.machine = Leader(STREAM, RoleFact(), frozenset(NODES), OPTIONS)
            self._tell_durable()

    def _stop(self) -> None:
        super()._stop()
        self.machine = None
        for side in self.sides:
            self._cut_link(side)

    def _lead(self) -> None:
        super()._lead()
        self._tell_durable()

    def _tell_durable(self) -> None:
        if self.machine is not None:
            now = log_marks(self.files, FOLDER)
            self._lead_step(leader_events.Durable(now.durable, {}, now.shown))

    def _options(self) -> LogOptions:
        return replace(super()._options(), acks=self.level)

    def _hold(self, group: GroupNumber) -> None:
        """Count as held what other nodes have acknowledged."""
        del group
        if self.machine is not None and self.hides:
            super()._hold(min(self.machine.holdings.group_reached(self.level), self.machine.group))

    def _lead_step(self, event: leader_events.Event) -> None:
        if self.machine is None:
            return
        for effect in self.machine.step(event, self.now):
            match effect:
                case leader_events.Greet(link):
                    side = self._side(link)
                    group = GroupNumber(self.machine.group)
                    greeting = Document(LINEAGE, 0, Greeting(self.machine.lineage, group).to_json())
                    side.down.append(Shipment(STREAM, RegionId(0), Epoch(0), documents=(greeting,), bytes_left=1))
                    side.replica.source = ShipSource(FOLDER, files=self.files, clock=self.clock)
                    self._lead_step(leader_events.Sent(link, self.machine.followers[side.node].sent, 0, is_all=False))
                case leader_events.ReadAndSend():
                    self._read_and_send(effect)
                case leader_events.DropLink(link, why):
                    for side in self.sides:
                        if side.link == link:
                            side.down.append(why or LinkLost("over"))
                case leader_events.PersistAcks():
                    self._hold(GroupNumber(0))
                    self._tell_durable()
                case _:
                    pass

    def _side(self, link: LinkId) -> Side:
        return next(side for side in self.sides if side.link == link)

    def _read_and_send(self, effect: leader_events.ReadAndSend) -> None:
        side = self._side(effect.link)
        source = side.replica.source
        assert source is not None
        try:
            found = source.read(effect.after, effect.bytes_max)
        except FollowerBehindRetention as error:
            self._lead_step(leader_events.ReadFailed(effect.link, error, 0.5))
            return
        if found is None:
            now = log_marks(self.files, FOLDER)
            found = Shipment(STREAM, RegionId(0), Epoch(0), marks=now.durable, shown=now.shown, by_one=now.by_one)
        shipment = replace(found, epoch=Epoch(0), bytes_left=0 if found.marks else 1)
        side.down.append(shipment)
        end = {**effect.after, **source._expected}
        self._lead_step(leader_events.Sent(effect.link, end, shipment.size_bytes, is_all=bool(shipment.marks)))

    def _shows_a_beginning(self, follower: Replica) -> None:
        if self.leader is not None:  # without a leader, marks may have gone back in a power cut, until it recovers
            super()._shows_a_beginning(follower)

    # --- the followers' --------------------------------------------------------------------------------------------

    def _play(self, side: Side, *, trouble: bool) -> None:
        """Let one thing happen at a follower, or on its link."""
        chance = self.chance.random() if trouble else 0.5
        if trouble and chance < 0.05:
            self._cut_link(side)
            self._count("links cut")
            return
        if side.replica.log is None and not self._begin_side(side, trouble=trouble):
            return
        if trouble and chance < 0.12:
            self._break_within(side.replica.files, 30, crashes=0.7)
        try:
            self._lead_step(leader_events.Tick())
            self._follow_step(side, following.Tick())
            for _ in range(self.chance.randint(0, 4)):
                if side.up and side.link is not None:
                    self._hear(side, side.up.popleft())
                if side.down and side.link is not None:
                    self._receive(side, side.down.popleft())
        except Crash:
            self._count("follower crashed")
            self._end_side(side)
        finally:
            if side.replica.log is not None and side.replica.log.failure is not None:
                self._end_side(side)
            self._mend(side.replica.files)

    def _begin_side(self, side: Side, *, trouble: bool) -> bool:
        replica = side.replica
        if trouble and self.chance.random() < 0.2:
            self._break_within(replica.files, 20, crashes=0.7)
        try:
            replica.log = ReplicaLog.open(FOLDER, files=replica.files, side_by_side=False)
        except (Crash, ReplicationError):
            self._count("follower crashed in recovery")
            self._end_side(side)
            return False
        finally:
            self._mend(replica.files)
        self._kept_its_promise(replica)
        side.machine = Follower(
            side.node, side.fact, replica.log.stream, self._holding(replica), backoff=Backoff(0.05, 0.2)
        )
        return True

    def _holding(self, replica: Replica) -> OwnHolding:
        assert replica.log is not None
        end = replica.log.end()
        return OwnHolding(replica.log.position(), end.group, end.persisted_upto)

    def _end_side(self, side: Side) -> None:
        self._cut_link(side)
        side.machine = None
        self._end(side.replica)

    def _cut_link(self, side: Side) -> None:
        link, side.link = side.link, None
        side.up.clear()
        side.down.clear()
        if link is not None:
            self._lead_step(leader_events.LinkGone(link, LinkLost("cut")))
            self._follow_step(side, following.LinkGone(LinkLost("cut"), self.chance.random()))

    def _hear(self, side: Side, word: Hello | Acknowledgement | MillstreamError) -> None:
        """Handle a message from a follower."""
        assert side.link is not None
        match word:
            case Hello():
                event = (
                    leader_events.Rejoined(side.link, word)
                    if side.has_joined
                    else leader_events.Joined(side.link, word)
                )
                side.has_joined = True
                self._lead_step(event)
            case Acknowledgement():
                self._lead_step(leader_events.Acked(side.link, word))
            case _:
                self._cut_link(side)

    def _receive(self, side: Side, shipment: Shipment | MillstreamError | None) -> None:
        """Handle a message from the leader."""
        if isinstance(shipment, Shipment):
            self._follow_step(side, following.Received(shipment, int(self.now * 1e9)))
            return
        self._follow_step(side, following.LinkGone(shipment or LinkLost("over"), self.chance.random()))
        side.link = None
        side.up.clear()
        side.down.clear()

    def _follow_step(self, side: Side, event: following.Event) -> None:
        machine, replica = side.machine, side.replica
        if machine is None:
            return
        for effect in machine.step(event, self.now):
            match effect:
                case following.Connect():
                    self._connect(side)
                case leader_events.PersistRole(fact):
                    side.fact = fact
                case following.Say(word):
                    self._say(side, word)
                case following.Apply(shipment):
                    self._take(side, shipment)
                case following.ShowAll():
                    assert replica.log is not None
                    try:
                        replica.log.show_all()
                    except ReplicationError as failed:
                        if failed.code != "replica_failed":
                            raise
                        return
                    self._count("shown when acknowledged")
                case following.BreakLink():
                    if side.machine is machine:
                        self._cut_link(side)
                case following.Stop(error):
                    assert isinstance(error, FollowerBehindRetention), error
                    self._rebuild(replica)
                    side.machine = None
                    self._cut_link(side)
                case leader_events.Tell(error=Diverged() as error):
                    raise error
                case _:
                    pass

    def _connect(self, side: Side) -> None:
        if self.machine is None:
            self._follow_step(side, following.LinkGone(LinkLost("nobody is there"), self.chance.random()))
            return
        self.links += 1
        side.link, side.has_joined = LinkId(self.links), False
        self._follow_step(side, following.Connected())

    def _say(self, side: Side, word: Hello | Acknowledgement | MillstreamError) -> None:
        assert side.replica.log is not None
        if isinstance(word, Acknowledgement):
            end = side.replica.log.end()
            assert (word.group, word.persisted_upto) == (end.group, end.persisted_upto)
            side.replica.promised = dict(side.replica.log.marks())
            self.sure_upto = max(self.sure_upto, word.persisted_upto)
            self._count("acknowledgements")
        if side.link is not None:
            side.up.append(word)

    def _take(self, side: Side, shipment: Shipment) -> None:
        assert side.replica.log is not None
        try:
            side.replica.log.apply(shipment)
        except MillstreamError as error:
            self._count(f"refused: {error.code}")
            self._follow_step(side, following.ApplyFailed(error, self.chance.random()))
            return
        self._count("shipments")
        if self.chance.random() < 0.05:
            self._shows_a_beginning(side.replica)
        self._follow_step(side, following.Applied(self._holding(side.replica), int(self.now * 1e9)))

    # --- the end ---------------------------------------------------------------------------------------------------

    def _lose_the_leader(self) -> None:
        """Lose the leader with its disk.

        The follower that the promises choose has everything that was acknowledged by any follower.
        """
        self._read(self.files)  # notes the number of each row
        numbers = {seq: row for seq, row in self.truth.seqs_seen.items() if seq <= self.sure_upto}
        reports = {}
        for side in self.sides:
            self._cut_link(side)
            while side.replica.log is None:
                self._begin_side(side, trouble=False)
            group = side.replica.log.end().group
            reports[side.node] = NodeReport(side.fact.promise, side.fact.role, side.fact.rank(group), Seq(group))
        side = max(self.sides, key=lambda one: reports[one.node].rank)
        assert side.replica.log is not None
        promotion = Promotion(side.node, frozenset({LEADER, *NODES}), side.fact, AckLevel.parse("durable(1)"))
        promotion.step(promoting.BeginPromotion(), self.now)
        promotion.step(promoting.Unanswered(LEADER), self.now)
        other = next(node for node in NODES if node != side.node)
        (stand,) = promotion.step(promoting.Answered(other, reports[other]), self.now)
        assert isinstance(stand, promoting.BecomeCandidate)
        group = side.replica.log.end().group
        promotion.step(promoting.BecameCandidate(side.fact.candidate_for(stand.promise), group), self.now)
        promotion.step(promoting.Unanswered(LEADER), self.now)
        report = replace(reports[other], promise=stand.promise)
        (take_over,) = promotion.step(promoting.Answered(other, report), self.now)
        assert isinstance(take_over, promoting.TakeOverLog)
        side.replica.log.close()
        self.files = side.replica.files
        prepare_promotion(FOLDER, files=self.files)
        leader = self.truth.open(self.files, options=self._options(), clock=self.clock)
        here = self._read(self.files)
        missing = [row for row in numbers.values() if row not in here]
        first = min((seq for seq, row in self.truth.seqs_seen.items() if row in here), default=0)
        assert not [row for row in missing if row in {r for s, r in numbers.items() if s >= first}], (
            "acknowledged, and lost"
        )
        *_, lead = promotion.step(promoting.LogTakenOver(group), self.now)
        assert isinstance(lead, promoting.Lead)
        assert lead.fact.lineage.last.promise == Promise(Epoch(1), side.node)
        self.truth.commit(leader, self.truth.ops([(1, 1)]))
        leader.close()
        self._count("promotions")


if __name__ == "__main__":
    sys.exit(main(MachinesLife, sys.argv[1:]))
