"""The machines of a log on several nodes, step by step.

`tests/replication/simulation.py` plays them against each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.backoff import Backoff
from millstream.errors import (
    Diverged,
    Fenced,
    FollowerBehindRetention,
    LinkLost,
    NodeNameTaken,
    ReplicaGap,
    ReplicationError,
    RoleUnreadable,
    ShipmentUnreadable,
)
from millstream.model.ids import Epoch, GroupNumber, RegionId, ShardId, StreamId, WriterId
from millstream.model.marks import DurableMark
from millstream.model.positions import Offset, Seq
from millstream.model.replication import (
    OBJECT_STORE,
    AckLevel,
    Acknowledgement,
    ByteEnd,
    Document,
    Hello,
    NodeName,
    ReplicaPosition,
    SegmentPart,
    Shipment,
)
from millstream.protocol.replication import follower_machine as following
from millstream.protocol.replication import leader_events
from millstream.protocol.replication.ack_levels import Holding as HeldBy
from millstream.protocol.replication.ack_levels import Holdings
from millstream.protocol.replication.follower_machine import Follower, OwnHolding
from millstream.protocol.replication.leader_events import LinkId, ShipOptions
from millstream.protocol.replication.leader_machine import Leader
from millstream.protocol.replication.node_promises import (
    LINEAGE,
    UNPROMISED,
    Greeting,
    Lineage,
    Promise,
    Rank,
    Role,
    RoleFact,
    Term,
)
from millstream.protocol.replication.promotion_quorum import level_kept, promises_wanted
from millstream.testing.errors import code_of

STREAM, OTHER = StreamId(UUID(int=1)), StreamId(UUID(int=2))
A, B, C = NodeName("a"), NodeName("b"), NodeName("c")
SHARD = ShardId(0)
GREET_FROM: ReplicaPosition = {}
_T = TypeVar("_T")


def at(position: int, base: int = 0) -> ReplicaPosition:
    return {SHARD: ByteEnd(Offset(base), position)}


def mark(group: int, position: int) -> Mapping[ShardId, DurableMark]:
    number = GroupNumber(group)
    return {
        SHARD: DurableMark(
            STREAM, WriterId(1), Epoch(1), Offset(0), position, Offset(group), number, Seq(group), Seq(99)
        )
    }


def hello(node: NodeName, position: ReplicaPosition = GREET_FROM, promise: Promise = UNPROMISED) -> Hello:
    return Hello(STREAM, node, promise.epoch, position, {}, promise.node)


def ack(node: NodeName, group: int, position: int, epoch: int = 0) -> Acknowledgement:
    return Acknowledgement(node, Epoch(epoch), at(position), GroupNumber(group), Seq(group), 0)


def of(kind: type[_T], effects: list[leader_events.Effect] | list[following.Effect]) -> list[_T]:
    return [effect for effect in effects if isinstance(effect, kind)]


class Led:
    """A leader machine, with the events that many tests send it."""

    def __init__(self, *, options: ShipOptions | None = None, fact: RoleFact | None = None) -> None:
        self.leader = Leader(STREAM, fact or RoleFact(), frozenset({B, C}), options)
        self.now = 0.0

    def counted(self) -> dict[str, int]:
        """Return the group of each follower that counts for levels."""
        return {place.name: place.group for place in self.leader.holdings.places if not place.is_store}

    def step(self, event: leader_events.Event) -> list[leader_events.Effect]:
        return self.leader.step(event, self.now)

    def joined(self, link: int, node: NodeName, position: int = 0) -> list[leader_events.Effect]:
        """Add a follower that has been greeted and has sent its position."""
        epoch = self.leader.fact.promise.epoch
        self.step(leader_events.Joined(LinkId(link), hello(node, at(position))))
        self.step(leader_events.Sent(LinkId(link), at(position), 0, is_all=False))
        return self.step(leader_events.Acked(LinkId(link), ack(node, 0, position, epoch)))

    def acked(self, link: int, node: NodeName, group: int, position: int) -> list[leader_events.Effect]:
        return self.step(leader_events.Acked(LinkId(link), ack(node, group, position, self.leader.fact.promise.epoch)))

    def sent(self, link: int, position: int, size: int, *, is_all: bool = True) -> list[leader_events.Effect]:
        return self.step(leader_events.Sent(LinkId(link), at(position), size, is_all=is_all))


# --- the leader --------------------------------------------------------------------------------------------------------


def test_whatever_becomes_durable_is_read_and_sent_from_where_the_follower_stands():
    led = Led()
    led.joined(1, B)
    led.sent(1, 0, 0)
    (read,) = of(leader_events.ReadAndSend, led.step(leader_events.Durable(mark(1, 10))))
    assert (read.link, read.after) == (1, at(0))
    assert not of(leader_events.ReadAndSend, led.step(leader_events.Durable(mark(2, 20)))), "one at a time"
    (read,) = of(leader_events.ReadAndSend, led.sent(1, 10, 10))
    assert read.after == at(10), "the tail that came meanwhile"
    assert not of(leader_events.ReadAndSend, led.sent(1, 20, 10))


def test_marks_alone_and_documents_alone_are_sent_too():
    led = Led()
    led.step(leader_events.Durable(mark(1, 10)))
    led.joined(1, B)
    led.sent(1, 10, 10)
    assert of(leader_events.ReadAndSend, led.step(leader_events.Durable(mark(2, 10))))
    led.sent(1, 10, 0)
    (read,) = of(leader_events.ReadAndSend, led.step(leader_events.Durable(mark(2, 10), {"catalog": 3})))
    assert read.documents == {}
    led.sent(1, 10, 0)
    assert of(leader_events.ReadAndSend, led.step(leader_events.Durable(mark(2, 10), {"catalog": 3}, mark(1, 5)))), (
        "what is shown"
    )
    led.sent(1, 10, 0)
    led.now = 5.0
    (read,) = of(leader_events.ReadAndSend, led.step(leader_events.Tick()))
    assert read.documents == {"catalog": 3}, "and a word that there is nothing new"


def test_a_cursor_moves_by_its_own_followers_acknowledgement_only():
    led = Led(options=ShipOptions(cursor_every_s=0))
    led.step(leader_events.Durable(mark(5, 50)))
    led.joined(1, B)
    led.joined(2, C)
    assert not of(leader_events.PersistCursor, led.sent(1, 50, 50))
    effects = led.acked(1, B, 5, 50)
    assert of(leader_events.PersistCursor, effects) == [leader_events.PersistCursor(B, Seq(5), at(50))]
    assert led.counted() == {B: 5}
    led.acked(2, C, 0, 0)
    assert led.counted() == {B: 5, C: 0}
    assert led.leader.holdings.group_reached(AckLevel.parse("durable(1)")) == 5
    assert led.leader.holdings.group_reached(AckLevel.parse("durable(2)")) == 0
    assert not led.step(leader_events.Acked(LinkId(9), ack(C, 5, 50))), "no such link"


def test_a_follower_counts_once_it_has_compared_the_end_of_its_log():
    """A home that leads was copied, and the original counted the groups that a follower had from the copy."""
    led = Led()
    led.step(leader_events.Durable(mark(5, 50)))
    led.step(leader_events.Joined(LinkId(1), hello(B, at(50))))
    led.sent(1, 50, 0, is_all=False)
    (read,) = of(leader_events.ReadAndSend, led.acked(1, B, 5, 50))
    assert (read.after, led.counted()) == (at(50), {})
    led.sent(1, 50, 0)
    led.acked(1, B, 5, 50)
    assert led.counted() == {B: 5}
    led.step(leader_events.LinkGone(LinkId(1), None))
    led.step(leader_events.Durable(mark(6, 60)))
    led.step(leader_events.Joined(LinkId(2), hello(B, at(60))))
    led.sent(2, 60, 0, is_all=False)
    led.acked(2, B, 6, 60)
    assert led.counted() == {B: 5}
    led.sent(2, 60, 0)
    led.acked(2, B, 6, 60)
    assert led.counted() == {B: 6}


def test_a_follower_that_has_lost_what_it_had_counts_for_nothing_until_it_has_it_anew():
    led = Led(options=ShipOptions(cursor_every_s=0))
    led.step(leader_events.Durable(mark(5, 50)))
    led.joined(1, B)
    led.sent(1, 50, 50)
    led.acked(1, B, 5, 50)
    effects = led.step(leader_events.Joined(LinkId(2), hello(B, at(10))))
    (dropped,) = of(leader_events.DropLink, effects)
    assert dropped.link == LinkId(1)
    assert isinstance(dropped.why, NodeNameTaken), "should it hear it still"
    assert of(leader_events.PersistCursor, effects) == [leader_events.PersistCursor(B, Seq(0), {}, anew=True)]
    assert of(leader_events.PersistAcks, effects) == [leader_events.PersistAcks(Holdings())]
    led.sent(2, 10, 0)
    effects = led.acked(2, B, 1, 10)
    assert of(leader_events.PersistCursor, effects) == [leader_events.PersistCursor(B, Seq(1), at(10))]
    led.acked(2, B, 1, 10)
    assert led.counted() == {B: 1}


def test_a_second_home_of_a_name_is_refused_while_the_first_one_is_there():
    led = Led()
    led.step(leader_events.Durable(mark(5, 50)))
    one, other = (replace(hello(B), home=home) for home in ("1", "2"))
    led.step(leader_events.Joined(LinkId(1), one))
    led.acked(1, B, 5, 50)
    led.sent(1, 50, 50)
    led.acked(1, B, 5, 50)
    (dropped,) = of(leader_events.DropLink, led.step(leader_events.Joined(LinkId(2), other)))
    assert (dropped.link, type(dropped.why)) == (LinkId(2), NodeNameTaken)
    assert led.counted() == {B: 5}
    (dropped,) = of(leader_events.DropLink, led.step(leader_events.Joined(LinkId(3), one)))
    assert dropped.link == LinkId(1), "who comes anew has lost its link before"
    led.step(leader_events.LinkGone(LinkId(3), ShipmentUnreadable("gone")))
    effects = led.step(leader_events.Joined(LinkId(4), other))
    assert of(leader_events.Greet, effects)
    assert led.counted() == {}, "the other one hasn't what the first one had"


def test_no_more_is_under_way_than_the_window_has():
    led = Led(options=ShipOptions(shipment_bytes=30, window_bytes=50))
    led.step(leader_events.Durable(mark(9, 900)))
    (first,) = of(leader_events.ReadAndSend, led.joined(1, B))
    (second,) = of(leader_events.ReadAndSend, led.sent(1, 30, 30, is_all=False))
    assert (first.bytes_max, second.bytes_max) == (30, 20)
    assert not led.sent(1, 50, 20, is_all=False)
    (third,) = of(leader_events.ReadAndSend, led.acked(1, B, 0, 30))
    assert (third.after, third.bytes_max) == (at(50), 30)


def test_one_that_cant_be_read_for_waits_longer_each_time_and_nobody_else_does():
    led = Led()
    led.step(leader_events.Durable(mark(1, 10)))
    led.joined(1, B)
    (read,) = of(leader_events.ReadAndSend, led.joined(2, C))
    error = ShipmentUnreadable("a disk")
    effects = led.step(leader_events.ReadFailed(LinkId(1), error, 0.0))
    assert of(leader_events.Tell, effects)[0].error is error
    assert not of(leader_events.ReadAndSend, effects)
    assert read.link == 2
    assert of(leader_events.ReadAndSend, led.sent(2, 5, 5, is_all=False))
    led.now = 0.06
    assert [read.link for read in of(leader_events.ReadAndSend, led.step(leader_events.Tick()))] == [1]
    led.step(leader_events.ReadFailed(LinkId(1), error, 0.0))
    led.now = 0.12
    assert not of(leader_events.ReadAndSend, led.step(leader_events.Tick())), "twice as long"
    led.now = 0.17
    assert of(leader_events.ReadAndSend, led.step(leader_events.Tick()))


def test_a_silent_link_is_given_up():
    led = Led()
    led.joined(1, B)
    led.sent(1, 0, 0)
    led.now = 29.0
    assert not of(leader_events.DropLink, led.step(leader_events.Tick()))
    led.now = 31.0 + 29.0
    assert of(leader_events.DropLink, led.step(leader_events.Tick())) == [leader_events.DropLink(LinkId(1), None)]


def test_stopping_ships_what_is_pending_and_names_who_lacks_something():
    led = Led()
    led.step(leader_events.Durable(mark(1, 10)))
    led.joined(1, B)
    effects = led.step(leader_events.Stopping(5.0))
    assert effects == []
    led.sent(1, 10, 10)
    effects = led.acked(1, B, 1, 10)
    assert of(leader_events.DropLink, effects) == [leader_events.DropLink(LinkId(1), None)]
    assert effects[-1] == leader_events.Stopped((C,))
    led = Led()
    led.step(leader_events.Durable(mark(1, 10)))
    led.joined(1, B)
    led.step(leader_events.Stopping(5.0))
    led.now = 5.0
    assert led.step(leader_events.Tick())[-1] == leader_events.Stopped((B, C))


def test_a_word_of_a_higher_promise_is_noted_before_any_link_is_dropped():
    led = Led()
    led.joined(1, B)
    effects = led.step(leader_events.Joined(LinkId(2), hello(C, promise=Promise(Epoch(1), C))))
    assert isinstance(effects[0], leader_events.PersistRole)
    assert effects[0].fact.role is Role.FENCED
    assert [type(drop.why) for drop in of(leader_events.DropLink, effects)] == [Fenced, Fenced]
    (again,) = led.step(leader_events.Joined(LinkId(3), hello(B)))
    assert isinstance(again, leader_events.DropLink)
    assert led.leader.fact.leader == C


def test_who_isnt_to_follow_is_refused():
    led = Led()
    (drop, _) = led.step(leader_events.Joined(LinkId(1), hello(NodeName("z"))))
    assert isinstance(drop, leader_events.DropLink)
    assert isinstance(drop.why, ReplicationError)
    assert drop.why.code == "unknown_node"
    (drop, _) = led.step(leader_events.Joined(LinkId(1), Hello(OTHER, B, Epoch(0), {})))
    assert isinstance(drop, leader_events.DropLink)
    assert code_of(drop.why) == "other_stream"


def test_a_follower_of_another_stream_fences_no_leader():
    """Its promise was about its own stream: a leader that heeded it stopped for good, by a mistaken address elsewhere."""
    led = Led()
    led.joined(1, B)
    theirs = Hello(OTHER, B, Epoch(7), {}, {}, C, "")
    for event in (
        leader_events.Joined(LinkId(2), replace(theirs, node=NodeName("z"))),
        leader_events.Joined(LinkId(2), theirs),
        leader_events.Rejoined(LinkId(1), theirs),
    ):
        effects = led.step(event)
        assert [code_of(drop.why) for drop in of(leader_events.DropLink, effects)] == ["other_stream"]
        assert not of(leader_events.PersistRole, effects)
    assert not led.leader.is_fenced
    # A node that isn't configured fences the leader all the same: its stream has another one.
    led.step(leader_events.Joined(LinkId(3), replace(theirs, stream=STREAM, node=NodeName("z"))))
    assert led.leader.is_fenced


def test_who_comes_with_nothing_begins_anew_also_where_this_leader_has_never_heard_of_it():
    led = Led()
    effects = led.step(leader_events.Joined(LinkId(1), hello(B)))
    assert of(leader_events.PersistCursor, effects) == [leader_events.PersistCursor(B, Seq(0), {}, anew=True)]
    assert not of(leader_events.PersistCursor, led.step(leader_events.Joined(LinkId(2), hello(C, at(10)))))


@pytest.mark.parametrize("position", [{}, at(20)])
def test_who_was_cut_off_comes_again_with_nothing_or_with_what_it_lacked(position: ReplicaPosition):
    led = Led()
    led.joined(1, B, 10)
    error = FollowerBehindRetention("gone")
    effects = led.step(leader_events.ReadFailed(LinkId(1), error, 0.5))
    assert of(leader_events.DropLink, effects) == [leader_events.DropLink(LinkId(1), error)]
    assert led.leader.followers[B].cut_off is error
    effects = led.step(leader_events.Joined(LinkId(2), hello(B, position)))
    assert of(leader_events.PersistCursor, effects) == [leader_events.PersistCursor(B, Seq(0), {}, anew=True)]
    assert of(leader_events.Greet, effects)
    assert led.leader.followers[B].cut_off is None


def test_segments_are_kept_for_the_object_store_as_for_a_follower():
    led = Led()
    led.step(leader_events.Durable(mark(9, 90)))
    effects = led.step(leader_events.StoredUpto(GroupNumber(3), Seq(30)))
    assert of(leader_events.PersistCursor, effects) == [leader_events.PersistCursor(OBJECT_STORE, Seq(30), {})]
    assert not of(leader_events.PersistCursor, led.step(leader_events.StoredUpto(GroupNumber(4), Seq(40))))
    led.now += 60
    effects = led.step(leader_events.Tick())
    assert of(leader_events.PersistCursor, effects) == [leader_events.PersistCursor(OBJECT_STORE, Seq(40), {})]
    led.now += 60
    effects = led.step(leader_events.StoredUpto(GroupNumber(4), Seq(40), at(90)))
    assert of(leader_events.PersistCursor, effects) == [leader_events.PersistCursor(OBJECT_STORE, Seq(40), at(90))], (
        "a footer alone"
    )


def test_what_a_promoted_leader_is_told_counts_once_the_follower_has_all_that_it_began_with():
    fact = RoleFact().asked(Promise(Epoch(1), A)).promoted(GroupNumber(7))
    led = Led(fact=fact)
    led.step(leader_events.Durable(mark(9, 90)))
    led.joined(1, B)
    led.sent(1, 90, 90)
    led.acked(1, B, 6, 60)
    assert led.counted() == {}
    led.acked(1, B, 7, 70)
    assert led.counted() == {B: 7}
    led.step(leader_events.Acked(LinkId(1), ack(B, 9, 90, epoch=0)))
    assert led.counted() == {B: 7}, "said under another promise"


# --- the follower ------------------------------------------------------------------------------------------------------


class Following:
    """A follower machine, with a leader's messages."""

    def __init__(self, fact: RoleFact | None = None, holding: OwnHolding | None = None) -> None:
        self.fact = fact or RoleFact(Role.FOLLOWS, leader=A)
        self.follower = Follower(B, self.fact, STREAM, holding, backoff=Backoff(1.0, 8.0))
        self.now = 100.0
        self.lineage, self.promise, self.claimant = Lineage(), UNPROMISED, ""

    def step(self, event: following.Event) -> list[following.Effect]:
        return self.follower.step(event, self.now)

    def shipment(
        self, *parts: SegmentPart, stream: StreamId = STREAM, end: int = 0, sent: float = 0, left: int = 0
    ) -> Shipment:
        return Shipment(
            stream,
            RegionId(0),
            self.promise.epoch,
            parts,
            leader_end=Seq(end),
            sent_ns=int(sent * 1e9),
            leader=self.promise.node,
            bytes_left=left,
        )

    def receive(self, shipment: Shipment, wall: float = 0.0) -> list[following.Effect]:
        return self.step(following.Received(shipment, int(wall * 1e9)))

    def greet(self, group: int = 0) -> list[following.Effect]:
        data = Greeting(self.lineage, GroupNumber(group), self.claimant).to_json()
        shipment = self.shipment()
        greeting = Shipment(
            STREAM, RegionId(0), shipment.epoch, documents=(Document(LINEAGE, 0, data),), leader=shipment.leader
        )
        return self.receive(greeting)

    def come(self, group: int = 0) -> list[following.Effect]:
        self.step(following.Tick())
        self.step(following.Connected())
        return self.greet(group)


def part(start: int, size: int, base: int = 0) -> SegmentPart:
    return SegmentPart(SHARD, Offset(base), start, b"x" * size)


def holding(group: int, position: int) -> OwnHolding:
    return OwnHolding(at(position), GroupNumber(group), Seq(group))


def test_a_follower_says_hello_is_greeted_applies_and_acknowledges():
    one = Following()
    assert one.step(following.Tick()) == [following.Connect(A)]
    assert one.step(following.Connected()) == [following.Say(Hello(STREAM, B, Epoch(0), {}, {}))]
    assert one.receive(one.shipment(part(0, 10))) == [], "before the greeting nothing is taken"
    (said,) = one.greet()
    assert isinstance(said, following.Say)
    shipment = one.shipment(part(0, 10))
    assert one.receive(shipment) == [following.Apply(shipment)]
    (said,) = one.step(following.Applied(holding(1, 10), 5))
    assert isinstance(said, following.Say)
    assert isinstance(said.word, Acknowledgement)
    assert (said.word.group, said.word.position) == (1, at(10))


def test_sessions_are_kept_once_the_log_has_come_as_far_as_they_know_it():
    """A follower promoted before that would have to forget them.

    With them it would lose the answers of segments that retention has dropped.
    """
    one = Following()
    one.step(following.Tick())
    one.step(following.Connected())
    lineage = Document(LINEAGE, 0, Greeting(one.lineage, GroupNumber(20)).to_json())
    catalog, first, second, third = (
        Document(name, version, b"")
        for name, version in (("catalog", 3), ("sessions", 5), ("sessions", 6), ("sessions", 7))
    )
    effects = one.receive(replace(one.shipment(end=20), documents=(lineage, catalog, first)))
    assert of(following.PersistDocuments, effects) == [following.PersistDocuments((catalog,))]
    for documents, end, has, kept in (
        ((second,), 30, 10, []),
        ((third,), 40, 20, [first]),
        ((), 50, 30, []),
        ((), 50, 40, [third]),
    ):
        one.receive(replace(one.shipment(part(has - 10, 10), end=end), documents=documents))
        effects = one.step(following.Applied(holding(has, has), 0))
        assert of(following.PersistDocuments, effects) == [following.PersistDocuments((its,)) for its in kept]
    one.receive(replace(one.shipment(part(40, 10), end=60), documents=(replace(third, version=8),)))
    one.step(following.Applied(holding(50, 50), 0))
    one.step(following.LinkGone(LinkLost("gone"), 0.0))
    one.now += 60
    one.step(following.Tick())
    (said,) = of(following.Say, one.step(following.Connected()))
    assert isinstance(said.word, Hello)
    assert said.word.documents == {"catalog": 3, "sessions": 7}, "what wasn't kept comes again"


def test_a_gap_is_asked_for_and_a_duplicate_is_the_logs_to_compare():
    one = Following(holding=holding(1, 10))
    one.come(1)
    (said,) = one.receive(one.shipment(part(20, 5)))
    assert isinstance(said, following.Say)
    assert isinstance(said.word, Hello)
    one.greet(1)
    shipment = one.shipment(part(0, 15))
    assert one.receive(shipment) == [following.Apply(shipment)]
    (said,) = one.step(following.ApplyFailed(ReplicaGap("the segment before isn't whole"), 0.5))
    assert isinstance(said, following.Say)
    assert isinstance(said.word, Hello)


def test_other_bytes_stop_it_and_so_does_another_stream():
    one = Following()
    one.come()
    one.receive(one.shipment(part(0, 10)))
    error = Diverged("bytes")
    assert one.step(following.ApplyFailed(error, 0.5)) == [
        following.Say(error), following.BreakLink(), following.Stop(error),
    ]  # fmt: skip
    assert one.step(following.Tick()) == []
    one = Following()
    one.step(following.Tick())
    one.step(following.Connected())
    effects = one.receive(one.shipment(stream=OTHER))
    assert isinstance(effects[-1], following.Stop)
    assert effects[-1].error.code == "other_stream"


def test_nothing_is_taken_from_a_leader_that_has_less_than_its_follower_until_it_has_found_the_rest():
    """After a power cut the leader's marks may be older than its log, until its writer has opened the log."""
    one = Following(holding=holding(5, 50))
    effects = one.come(4)
    assert not of(following.Say, effects)
    assert of(following.BreakLink, effects)
    assert isinstance(one.follower.trouble, Diverged)
    assert one.follower.stopped_by is None
    one.now += 60
    assert of(following.Say, one.come(5)), "it follows"


def test_a_higher_promise_is_durable_first_and_a_lower_one_refused():
    one = Following()
    one.promise = Promise(Epoch(2), A)
    one.lineage = Lineage().with_term(one.promise, GroupNumber(0))
    effects = one.come()
    assert isinstance(effects[0], following.PersistRole)
    assert effects[0].fact.promise == one.promise
    one.step(following.WasSetAside(OwnHolding()))
    one.promise = Promise(Epoch(1), C)
    said, broken = one.receive(one.shipment(part(0, 10)))
    assert isinstance(said, following.Say)
    assert isinstance(said.word, Fenced)
    assert broken == following.BreakLink()


def test_what_the_new_leader_hasnt_is_set_aside_and_its_term_noted_before_anything_is_taken():
    one = Following(holding=holding(7, 70))
    one.promise = Promise(Epoch(1), A)
    one.lineage = Lineage().with_term(one.promise, GroupNumber(5))
    effects = one.come(9)
    assert effects[-1] == following.SetAside(GroupNumber(5))
    assert of(following.PersistRole, effects)[0].fact.lineage == Lineage()
    noted, said = one.step(following.WasSetAside(holding(4, 40)))
    assert isinstance(noted, following.PersistRole)
    assert noted.fact.lineage == one.lineage
    assert noted.fact.rank(GroupNumber(4)) == Rank(Lineage().last.promise, GroupNumber(4)), "it ends before the term"
    assert isinstance(said, following.Say)
    assert isinstance(said.word, Hello)
    assert isinstance(one.greet(9)[-1], following.Say)
    one.receive(one.shipment(part(40, 20)))
    effects = one.step(following.Applied(holding(6, 60), 0))
    assert [type(effect) for effect in effects] == [following.Say]
    assert one.follower.fact.rank(GroupNumber(6)) == Rank(one.promise, GroupNumber(6))


def test_what_one_follower_is_enough_for_is_shown_with_an_acknowledgement_that_counts():
    one = Following()
    one.promise = Promise(Epoch(1), A)
    one.lineage = Lineage().with_term(one.promise, GroupNumber(5))
    one.come(9)
    one.step(following.WasSetAside(OwnHolding()))
    one.greet(9)
    for group, by_one, shown in ((4, True, False), (6, False, False), (7, True, True)):
        one.receive(replace(one.shipment(part(one.follower.holding.group * 10, 10)), by_one=by_one))
        effects = one.step(following.Applied(holding(group, group * 10), 0))
        kinds = [type(effect) for effect in effects]
        assert (kinds[-1], following.ShowAll in kinds) == (following.Say, shown)
    assert kinds == [following.ShowAll, following.Say], "just before"


def test_a_follower_is_led_by_one_home_of_a_name_under_a_promise():
    one = Following(RoleFact(Role.FOLLOWS, leader=A).asked(Promise(Epoch(1), A), "first"))
    one.promise = Promise(Epoch(1), A)
    one.lineage = Lineage().with_term(one.promise, GroupNumber(0))
    one.claimant = "second"
    _, said, broken = one.come()
    assert isinstance(said, following.Say)
    assert isinstance(said.word, NodeNameTaken)
    assert broken == following.BreakLink()
    assert isinstance(one.follower.trouble, NodeNameTaken)
    one.now += 10
    one.claimant = "first"
    assert of(following.SetAside, one.come())


def test_who_leads_is_noted_by_the_first_one_that_says_so():
    one = Following()
    one.promise = Promise(Epoch(1), A)
    one.claimant = "first"
    one.come()
    assert one.follower.fact.claimant == "first"
    with pytest.raises(NodeNameTaken):
        one.follower.fact.asked(one.promise, "second")
    assert one.follower.fact.asked(Promise(Epoch(2), A), "second").claimant == "second"


def test_an_old_leader_follows_once_something_higher_is_heard():
    one = Following(RoleFact(), holding(7, 70))
    one.step(following.Tick())
    one.step(following.Connected())
    assert isinstance(one.greet(7)[-1], following.Stop)
    one = Following(RoleFact(), holding(7, 70))
    one.promise = Promise(Epoch(1), A)
    one.lineage = Lineage().with_term(one.promise, GroupNumber(5))
    effects = one.come(9)
    assert effects[-1] == following.SetAside(GroupNumber(5))
    assert of(following.PersistRole, effects)[0].fact.role is Role.FOLLOWS


def test_it_comes_again_after_a_while_longer_each_time():
    one = Following()
    one.step(following.Tick())
    lost = following.LinkGone(ShipmentUnreadable("x"), 0.0)
    waits = []
    for _ in range(5):
        one.step(lost)
        before = one.now
        while not one.step(following.Tick()):
            one.now += 0.25
        waits.append(one.now - before)
    assert waits == [0.5, 1.0, 2.0, 4.0, 4.0]


def test_a_promise_that_is_asked_for_ends_the_link_to_the_leader_before():
    one = Following()
    one.come()
    effects = one.step(following.PromiseRequested(Promise(Epoch(1), C)))
    assert [type(effect) for effect in effects] == [following.PersistRole, following.Say, following.BreakLink]
    assert one.step(following.PromiseRequested(Promise(Epoch(1), C))) == []
    with pytest.raises(Fenced):
        one.step(following.PromiseRequested(Promise(Epoch(1), B)))


def test_age_grows_from_when_all_that_the_leader_had_was_shown():
    one = Following()
    one.come()
    assert one.follower.lag(one.now).age_s == 0.0
    one.now += 10
    one.receive(one.shipment(part(0, 10), end=5, left=100))
    one.step(following.Applied(holding(1, 10), 0))
    lag = one.follower.lag(one.now)
    assert (lag.records, lag.size_bytes, lag.age_s) == (4, 100, 10.0)
    one.receive(one.shipment(part(10, 10), end=5))
    one.step(following.Applied(holding(5, 20), 0))
    assert one.follower.lag(one.now).age_s == 0.0
    one.now += 3
    assert one.follower.lag(one.now).age_s == 3.0


@pytest.mark.parametrize("promised", [A, B])
def test_who_has_all_that_another_one_had_knows_it_also_where_it_is_to_lead_itself(promised: NodeName) -> None:
    """A candidate that took what it lacked from a node that doesn't lead waited fifteen seconds for nothing."""
    one = Following(RoleFact(Role.FOLLOWS, Promise(Epoch(1), promised), A))
    one.promise = one.fact.promise
    assert not one.follower.has_all
    one.come(group=2)
    assert not one.follower.has_all, "not shown as yet"
    one.receive(one.shipment(part(0, 10), end=1, left=10))
    one.step(following.Applied(holding(1, 10), 0))
    assert not one.follower.has_all
    one.receive(one.shipment(part(10, 10), end=2))
    assert not one.follower.has_all
    one.step(following.Applied(holding(2, 20), 0))
    assert one.follower.has_all
    assert math.isinf(one.follower.lag(one.now).age_s) == (promised == B), "others may have more than it has"


@given(offset=st.floats(-1e6, 1e6), late=st.floats(0, 30), jump=st.floats(-1e5, 1e5))
def test_no_clock_makes_what_is_shown_younger_than_it_is(offset: float, late: float, jump: float) -> None:
    one = Following()
    one.come()
    one.follower = Follower(B, one.fact, STREAM)
    one.come()
    for number in range(1, 5):
        one.receive(one.shipment(part(0, 10), end=number, sent=1000 + number + offset), wall=1000.0 + number)
        one.step(following.Applied(holding(number, 10), 0))
    assert one.follower.lag(one.now).age_s == pytest.approx(0, abs=1e-3)
    one.receive(one.shipment(part(0, 10), end=5, sent=1005 + offset), wall=1005.0 + late)
    one.step(following.Applied(holding(5, 10), 0))
    one.now += 7
    age = one.follower.lag(one.now).age_s
    assert 6.999 <= age <= 7.001 + late
    one.receive(one.shipment(part(0, 10), end=6, sent=1006 + offset + jump), wall=1006.0)
    one.step(following.Applied(holding(6, 10), 0))
    assert one.follower.lag(one.now).age_s >= 0
    assert not math.isnan(one.follower.clock_off_s)


def test_a_clock_that_is_far_off_is_said_once():
    one = Following()
    one.step(following.Tick())
    one.step(following.Connected())
    said = of(leader_events.Tell, one.receive(one.shipment(sent=7200), wall=0.0))
    assert "+7200 s" in said[0].what
    assert not of(leader_events.Tell, one.receive(one.shipment(sent=7201), wall=1.0))


# --- roles and levels --------------------------------------------------------------------------------------------------


@st.composite
def lineages(draw: st.DrawFn) -> Lineage:
    lineage = Lineage()
    for _ in range(draw(st.integers(0, 4))):
        epoch = Epoch(lineage.last.promise.epoch + draw(st.integers(1, 2)))
        node = draw(st.sampled_from([A, B, C]))
        lineage = lineage.with_term(Promise(epoch, node), GroupNumber(lineage.last.behind + draw(st.integers(0, 3))))
    return lineage


@given(lineages(), st.sampled_from(Role), st.integers(0, 20), st.text(max_size=64))
def test_what_is_noted_is_read_again(lineage: Lineage, role: Role, group: int, claimant: str) -> None:
    fact = RoleFact(role, lineage.last.promise, A, lineage, claimant)
    assert RoleFact.from_json(fact.to_json()) == fact
    greeting = Greeting(lineage, GroupNumber(group), claimant)
    assert Greeting.from_json(greeting.to_json()) == greeting


def test_what_was_noted_before_there_were_claimants_is_read():
    role = b'{"version": 1, "role": "follows", "epoch": 1, "promised_to": "a", "leader": "a", "lineage": [{"epoch": 0, "leader": "", "behind": 0}]}'
    fact = RoleFact(Role.FOLLOWS, Promise(Epoch(1), A), A)
    assert RoleFact.from_json(role) == fact
    assert fact.asked(Promise(Epoch(1), A)) == fact, "one of before asks again"
    assert fact.asked(Promise(Epoch(1), A), "first").claimant == "first", "what was heard of is asked for"
    greeting = b'{"version": 1, "group": 3, "lineage": [{"epoch": 0, "leader": "", "behind": 0}]}'
    assert Greeting.from_json(greeting) == Greeting(Lineage(), GroupNumber(3))


@given(lineages(), lineages())
def test_lineages_part_at_the_first_reign_that_differs(one: Lineage, other: Lineage) -> None:
    common, behind = one.common_with(other)
    assert other.common_with(one) == (common, behind)
    assert (behind is None) == (one == other)
    if behind is not None:
        assert all(term.behind <= behind for term in common.terms)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xff", b"[]", b"{}", b'{"version": 2}', b'{"version": 1}',
        RoleFact().to_json().replace(b'"leads"', b'"rules"'),
        RoleFact().to_json().replace(b'"epoch": 0', b'"epoch": -1'),
        RoleFact().to_json().replace(b'"epoch": 0', b'"epoch": true'),
        RoleFact().to_json().replace(b'"leader": ""', b'"leader": 5'),
        RoleFact().to_json().replace(b'"claimant": ""', b'"claimant": 5'),
        RoleFact().to_json().replace(b'"claimant": ""', b'"claimant": "' + 65 * b"x" + b'"'),
        RoleFact().to_json().replace(b'"lineage": [', b'"lineage": [7, '),
    ],
)  # fmt: skip
def test_a_role_that_cant_be_read_is_said(data: bytes) -> None:
    with pytest.raises(RoleUnreadable):
        RoleFact.from_json(data)
    with pytest.raises(RoleUnreadable):
        Greeting.from_json(data)


def test_two_nodes_that_begin_with_one_number_hold_different_promises():
    fact = RoleFact().asked(Promise(Epoch(1), A))
    assert fact.role is Role.FENCED
    assert fact.asked(Promise(Epoch(1), A)) == fact
    assert fact.asked(Promise(Epoch(1), B)).promise == Promise(Epoch(1), B)
    with pytest.raises(Fenced) as refused:
        fact.asked(Promise(Epoch(0), C))
    assert refused.value.details == {"epoch": 1, "leader": "a"}


def test_ranks_go_by_the_last_reign_whose_past_is_there():
    fact = RoleFact(lineage=Lineage((Term(UNPROMISED, GroupNumber(0)), Term(Promise(Epoch(1), A), GroupNumber(5)))))
    assert fact.rank(GroupNumber(4)) == Rank(UNPROMISED, GroupNumber(4))
    assert fact.rank(GroupNumber(5)) == Rank(Promise(Epoch(1), A), GroupNumber(5))
    assert fact.rank(GroupNumber(5)) > RoleFact().rank(GroupNumber(99))


def test_a_leader_reaches_levels_by_what_counts_there_and_no_further_than_its_own_log():
    led = Led()
    led.step(leader_events.Durable(mark(6, 60)))
    assert led.step(leader_events.StoredUpto(GroupNumber(3)))
    assert not of(leader_events.PersistAcks, led.step(leader_events.StoredUpto(GroupNumber(2)))), "it had more before"
    for link, node, group in ((1, B, 5), (2, C, 7)):
        led.joined(link, node)
        led.sent(link, 60, 60)
        (told,) = of(leader_events.PersistAcks, led.acked(link, node, group, 60))
    assert told.holdings == Holdings(
        Epoch(0),
        (
            HeldBy(B, Epoch(0), GroupNumber(5), Seq(5)),
            HeldBy(C, Epoch(0), GroupNumber(7), Seq(7)),
            HeldBy(OBJECT_STORE, Epoch(0), GroupNumber(3), is_store=True),
        ),
    )
    names = ("local", "durable(1)", "durable(2)", "durable(3)", "object")
    assert [min(told.holdings.group_reached(AckLevel.parse(name)), led.leader.group) for name in names] == [
        6,
        6,
        5,
        0,
        3,
    ]


def test_the_promises_that_keep_levels():
    wanted = {
        name: promises_wanted(AckLevel.parse(name), 4) for name in ("local", "durable(1)", "durable(3)", "object")
    }
    assert wanted == {"local": 4, "durable(1)": 3, "durable(3)": 1, "object": 1}
    assert [str(level_kept(promises, 3)) for promises in (3, 2, 1)] == ["local", "durable(1)", "durable(2)"]
