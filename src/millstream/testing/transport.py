"""The requirements for every transport between a leader and its followers: one suite for all of them.

Subclass one of the two in a test module, and provide both ends:

    class TestOurs(LinkConformance):
        @pytest.fixture
        def stage(self):
            return OurStage()  # a TransportStage

`LinkConformance` is for transports that join two processes. `TransportConformance`, which it contains, is
also for those that store shipments and answer on their own. The suite uses only a transport's port
(`millstream.ports.Transport`) and this stage.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Protocol
from uuid import UUID

import pytest

from millstream.errors import Diverged, Fenced, LinkLost, MillstreamError, ReplicationError, ShipmentUnreadable
from millstream.model.ids import Epoch, GroupNumber, RegionId, ShardId, StreamId, WriterId
from millstream.model.marks import DroppedMark, DurableMark
from millstream.model.positions import Offset, Seq
from millstream.model.replication import (
    Acknowledgement,
    ByteEnd,
    Document,
    Hello,
    NodeName,
    ReplicaPosition,
    SegmentPart,
    Shipment,
)
from millstream.ports import FollowerLink, LeaderLink, Transport

__all__ = ["Arrived", "LinkConformance", "TransportConformance", "TransportStage", "shipments_of", "whole_position"]

STREAM: Final = StreamId(UUID("5f0c21aa-0000-4000-8000-000000000001"))
EPOCH: Final = Epoch(3)
NODE: Final = NodeName("north-2")
_PATIENCE_S: Final = 60.0
_HEAD_BYTES: Final = 4096
_RECORDS_OFFSETS: Final = 1000
"""Distance of the base offsets of two made-up segments."""


class TransportStage(Protocol):
    """The place of a test's leader and followers. Each stage begins empty; everything from it is closed with it."""

    window_bytes: int
    """Limit in bytes on the way to a follower; less than 16 MiB, so that tests reach it soon."""

    def leader(self) -> Transport:
        """Return the leader's end; the same one at each call, until it was closed."""

    def follower(self) -> Transport:
        """Return the end of a new follower."""

    def spoil(self, link: FollowerLink) -> None:
        """Send the follower something that is no shipment, after the earlier shipments."""


@dataclass(slots=True)
class Arrived:
    """The data that a follower received, put together as in its files."""

    segments: dict[tuple[ShardId, Offset], bytearray] = field(default_factory=dict)
    ended: set[tuple[ShardId, Offset]] = field(default_factory=set)
    marks: Mapping[ShardId, DurableMark] = field(default_factory=dict)
    documents: dict[str, Document] = field(default_factory=dict)
    first_kept: Mapping[ShardId, DroppedMark] = field(default_factory=dict)
    leader_end: Seq = Seq(0)
    sizes: list[int] = field(default_factory=list)
    """Sizes of the shipments, in bytes."""

    def add(self, shipment: Shipment, begun: ReplicaPosition | None = None) -> None:
        """Add a shipment. Each part must begin at the end of the previous one on its shard."""
        for part in shipment.parts:
            key = (part.shard, part.base_offset)
            start = 0
            if begun is not None and begun.get(part.shard) is not None:
                end = begun[part.shard]
                start = end.position if end.base_offset == part.base_offset else 0
            if key not in self.segments:
                earlier = [base for shard, base in self.segments if shard == part.shard]
                assert all(base < part.base_offset and (part.shard, base) in self.ended for base in earlier), key
                assert part.position == start, f"{key} begins at {part.position}, not at {start}"
                self.segments[key] = bytearray()
            else:
                assert part.position == start + len(self.segments[key]), f"{key} goes on at {part.position}"
            assert key not in self.ended, f"{key} goes on behind its end"
            self.segments[key] += part.data
            if part.is_end:
                self.ended.add(key)
        self.marks = shipment.marks or self.marks
        self.first_kept = shipment.first_kept or self.first_kept
        self.documents |= {document.name: document for document in shipment.documents}
        self.leader_end = max(self.leader_end, shipment.leader_end)
        self.sizes.append(shipment.size_bytes)

    def same_as(self, other: Arrived) -> bool:
        """Return whether the same data arrived, however it was cut into shipments."""
        return (self.segments, self.ended, dict(self.marks), self.documents, dict(self.first_kept), self.leader_end) == (
            other.segments, other.ended, dict(other.marks), other.documents, dict(other.first_kept), other.leader_end,
        )  # fmt: skip


def shipments_of(
    *,
    segments: int = 2,
    shards: int = 2,
    segment_bytes: int = 20_000,
    part_bytes: int = 3_000,
    is_sealed: bool = True,
    seed: int = 1,
) -> list[Shipment]:
    """Return a made-up log in transit.

    It has the segments of each shard in parts, marks after each round, and documents with the first and
    the last.

    Args:
        segments: per shard.
        shards: their number.
        segment_bytes: of each segment.
        part_bytes: of each part.
        is_sealed: whether the last segments have their ends.
        seed: of the bytes.
    """
    chance = random.Random(seed)
    made: list[Shipment] = []
    for number in range(segments):
        base = Offset(number * _RECORDS_OFFSETS)
        bodies = [chance.randbytes(segment_bytes) for _ in range(shards)]
        for start in range(0, segment_bytes, part_bytes):
            end = min(start + part_bytes, segment_bytes)
            is_end = end == segment_bytes and (is_sealed or number < segments - 1)
            parts = tuple(
                SegmentPart(ShardId(shard), base, start, body[start:end], is_end) for shard, body in enumerate(bodies)
            )
            group = GroupNumber(len(made) + 1)
            marks = {ShardId(shard): _mark(base, end, group) for shard in range(shards)}
            documents = (Document("catalog", int(group), b"catalog %d" % group),) if not made or is_end else ()
            made.append(
                Shipment(
                    STREAM,
                    RegionId(0),
                    EPOCH,
                    parts,
                    marks,
                    {ShardId(0): DroppedMark(Seq(0), Offset(0))},
                    documents,
                    Seq(group),
                    17,
                )
            )
    return made


def whole_position(shipments: Sequence[Shipment]) -> ReplicaPosition:
    """Return the position of a follower that has them all."""
    found: dict[ShardId, ByteEnd] = {}
    for part in (part for shipment in shipments for part in shipment.parts):
        found[part.shard] = max(part.end, found.get(part.shard, part.end))
    return found


def arrived(shipments: Sequence[Shipment]) -> Arrived:
    """Return the result if nothing is lost."""
    found = Arrived()
    for shipment in shipments:
        found.add(shipment)
    return found


def take_until(link: LeaderLink, done: Callable[[Arrived], bool], begun: ReplicaPosition | None = None) -> Arrived:
    """Take what comes until it is enough."""
    found = Arrived()
    deadline = time.monotonic() + _PATIENCE_S
    while not done(found):
        assert time.monotonic() < deadline, f"within {_PATIENCE_S} s came no more than {len(found.sizes)} shipments"
        shipment = link.recv(0.5)
        if shipment is not None:
            found.add(shipment, begun)
    return found


def take_all(link: LeaderLink, sent: Sequence[Shipment]) -> None:
    """Take what comes until all of it has arrived, as it was sent."""
    wanted = arrived(sent)
    take_until(link, lambda found: found.same_as(wanted))


def next_word(link: FollowerLink) -> Acknowledgement | Hello:
    """Return a follower's next message, which must come soon."""
    deadline = time.monotonic() + _PATIENCE_S
    while (message := link.recv(0.5)) is None:
        assert time.monotonic() < deadline, f"the follower has said nothing within {_PATIENCE_S} s"
    return message


def next_error(receive: Callable[[float], object]) -> MillstreamError:
    """Return the error that a link's `recv` raises, soon."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        try:
            receive(0.2)
        except MillstreamError as error:
            return error
    raise AssertionError(f"the link has told of no error within {_PATIENCE_S} s")


def hello_of(
    node: NodeName = NODE, position: ReplicaPosition | None = None, documents: Mapping[str, int] | None = None
) -> Hello:
    """Return a follower's hello; with nothing, if no position is given."""
    return Hello(STREAM if position else None, node, Epoch(2), position or {}, documents or {})


class TransportConformance:
    """The promises of every `ports.Transport`, including those that store shipments."""

    large_bytes: ClassVar = 100_000_000
    """Size in bytes of one large shipment; a subclass may lower it for its server."""

    @pytest.fixture
    def stage(self) -> TransportStage:
        """Return the stage of both ends. Subclasses override it."""
        raise NotImplementedError

    @pytest.fixture
    def links(self, stage: TransportStage) -> tuple[FollowerLink, LeaderLink]:
        """Return both ends of a link to a follower that has nothing."""
        return linked(stage, hello_of())

    @pytest.fixture
    def pool(self) -> Iterator[ThreadPoolExecutor]:
        """Yield threads for waiting calls."""
        with ThreadPoolExecutor(4) as pool:
            yield pool

    def test_what_is_sent_arrives_in_order_and_whole(self, links: tuple[FollowerLink, LeaderLink]) -> None:
        """Parts, marks, documents, the dropped number, and the leader's position."""
        leader, follower = links
        sent = shipments_of()
        for shipment in sent:
            leader.send(shipment)
        take_all(follower, sent)

    def test_ten_sealed_segments_all_arrive(self, links: tuple[FollowerLink, LeaderLink]) -> None:
        """From segment 0 to the last one's end."""
        leader, follower = links
        sent = shipments_of(segments=10, segment_bytes=6_000)
        for shipment in sent:
            leader.send(shipment)
        found = take_until(follower, lambda found: len(found.ended) == 20)
        assert found.segments == arrived(sent).segments
        assert sorted({int(base) for _, base in found.segments}) == list(range(0, 10_000, _RECORDS_OFFSETS))

    def test_a_tail_of_one_record_arrives(self, links: tuple[FollowerLink, LeaderLink]) -> None:
        """Alone: nothing has to follow it, and its segment needs no end."""
        leader, follower = links
        (sent,) = shipments_of(segments=1, shards=1, segment_bytes=200, is_sealed=False)
        leader.send(sent)
        take_all(follower, [sent])

    def test_a_shipment_may_be_large(self, links: tuple[FollowerLink, LeaderLink], pool: ThreadPoolExecutor) -> None:
        """In one piece, much larger than the limit in transit."""
        leader, follower = links
        (sent,) = shipments_of(segments=1, shards=1, segment_bytes=self.large_bytes, part_bytes=self.large_bytes)
        sending = pool.submit(leader.send, sent)
        take_all(follower, [sent])
        sending.result(_PATIENCE_S)

    def test_nothing_comes_in_time(self, stage: TransportStage, links: tuple[FollowerLink, LeaderLink]) -> None:
        """None is an answer, at both ends, and for a wait for followers."""
        leader, follower = links
        assert follower.recv(0.05) is None
        assert leader.recv(0.05) is None
        assert stage.leader().accept(0.05) is None
        assert follower.recv(0.0) is None

    def test_what_is_no_shipment_is_told_of_as_that(self, stage: TransportStage) -> None:
        """Earlier shipments are returned; then the link is unusable. A new one continues."""
        leader, follower = linked(stage, hello_of())
        sent = shipments_of(segments=1)
        leader.send(sent[0])
        take_all(follower, sent[:1])
        stage.spoil(leader)
        assert isinstance(next_error(follower.recv), ShipmentUnreadable)
        assert isinstance(next_error(follower.recv), ReplicationError)

    def test_closing_wakes_who_waits_at_the_same_end(
        self, links: tuple[FollowerLink, LeaderLink], pool: ThreadPoolExecutor
    ) -> None:
        """A thread in `recv` gets `LinkLost`, and so does every later call."""
        for link in links:
            waiting = pool.submit(link.recv, _PATIENCE_S)
            assert not waiting.done()
            link.close()
            assert isinstance(waiting.exception(_PATIENCE_S), LinkLost)
            with pytest.raises(LinkLost):
                link.recv(0.0)
            link.close()
        with pytest.raises(LinkLost):
            links[0].send(shipments_of(segments=1)[0])
        with pytest.raises(LinkLost):
            links[1].send(acknowledgement(1))

    def test_a_closed_transport_breaks_its_links(
        self, stage: TransportStage, links: tuple[FollowerLink, LeaderLink], pool: ThreadPoolExecutor
    ) -> None:
        """No new link is accepted; a wait for one returns none."""
        transport = stage.leader()
        waiting = pool.submit(transport.accept, _PATIENCE_S)
        transport.close()
        assert waiting.result(_PATIENCE_S) is None
        assert isinstance(next_error(links[0].recv), LinkLost)
        assert transport.accept(0.0) is None


class LinkConformance(TransportConformance):
    """The promises of a transport between two processes."""

    # --- the follower's messages

    def test_the_first_word_arrives_as_it_was_said(self, stage: TransportStage) -> None:
        """The follower's position, and its documents."""
        position = {ShardId(0): ByteEnd(Offset(1000), 7), ShardId(300): ByteEnd(Offset(2**40), 2**35)}
        hello = hello_of(position=position, documents={"catalog": 7, "sessions": 2**40})
        leader, _ = linked(stage, hello)
        assert leader.hello == hello
        assert linked(stage, hello_of())[0].hello == hello_of()

    def test_words_arrive_in_order(self, links: tuple[FollowerLink, LeaderLink]) -> None:
        """Acknowledgements, and the hello of a follower that lacks something."""
        leader, follower = links
        said: list[Acknowledgement | Hello] = [
            acknowledgement(1),
            acknowledgement(2),
            hello_of(position=whole_position(shipments_of())),
            acknowledgement(3),
        ]
        for message in said:
            follower.send(message)
        assert [next_word(leader) for _ in said] == said

    def test_both_talk_at_once(self, links: tuple[FollowerLink, LeaderLink], pool: ThreadPoolExecutor) -> None:
        """Each end sends on one thread and receives on another, and neither waits for the other."""
        leader, follower = links
        sent = shipments_of(segments=4, segment_bytes=200_000, part_bytes=2_000)
        sending = pool.submit(_each, leader.send, sent)
        saying = pool.submit(_each, follower.send, [acknowledgement(number) for number in range(500)])
        hearing = pool.submit(lambda: [next_word(leader) for _ in range(500)])
        take_all(follower, sent)
        assert hearing.result(_PATIENCE_S) == [acknowledgement(number) for number in range(500)]
        sending.result(_PATIENCE_S)
        saying.result(_PATIENCE_S)

    def test_the_error_of_a_follower_that_stops_reaches_the_leader(self, stage: TransportStage) -> None:
        """By its type, with its details, after earlier messages, though the follower closes at once."""
        leader, follower = linked(stage, hello_of())
        follower.send(acknowledgement(1))
        follower.send(Diverged("other bytes", hint="look", shard=1, offset=7))
        follower.close()
        assert next_word(leader) == acknowledgement(1)
        error = next_error(leader.recv)
        assert isinstance(error, Diverged)
        assert (error.message, error.hint, error.details) == ("other bytes", "look", {"shard": 1, "offset": 7})
        assert isinstance(next_error(leader.recv), LinkLost)

    def test_a_refusal_reaches_the_follower_behind_what_was_sent(self, stage: TransportStage) -> None:
        """By its type, with its details."""
        leader, follower = linked(stage, hello_of())
        sent = shipments_of(segments=1)
        for shipment in sent:
            leader.send(shipment)
        leader.refuse(Fenced("north-3 leads", epoch=9))
        take_all(follower, sent)
        error = next_error(follower.recv)
        assert isinstance(error, Fenced)
        assert (error.message, error.details) == ("north-3 leads", {"epoch": 9})
        assert isinstance(next_error(leader.recv), LinkLost)
        leader.refuse(Fenced("said twice"))

    # --- the end ---------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("closes", [0, 1], ids=["leader", "follower"])
    def test_closing_wakes_who_waits_at_the_other_end(
        self, links: tuple[FollowerLink, LeaderLink], pool: ThreadPoolExecutor, closes: int
    ) -> None:
        """A thread in `recv` gets `LinkLost`."""
        waiting: Future[Any] = pool.submit(links[1 - closes].recv, _PATIENCE_S)
        links[closes].close()
        assert isinstance(waiting.exception(_PATIENCE_S), LinkLost)

    @pytest.mark.parametrize("closes", [0, 1], ids=["leader", "follower"])
    def test_closing_wakes_who_waits_for_room(
        self, stage: TransportStage, links: tuple[FollowerLink, LeaderLink], pool: ThreadPoolExecutor, closes: int
    ) -> None:
        """A thread in `send`, too."""
        counted, sending = flooding(stage, links[0], pool)
        still(counted)
        links[closes].close()
        assert isinstance(sending.exception(_PATIENCE_S), LinkLost)

    def test_a_follower_that_comes_back_says_where_it_is(self, stage: TransportStage) -> None:
        """The link breaks in the middle; the next one begins at the follower's position, and nothing is missing."""
        sent = shipments_of(segments=3)
        leader, follower = linked(stage, hello_of())
        for shipment in sent[:5]:
            leader.send(shipment)
        first = take_until(follower, lambda found: len(found.sizes) == 5)
        follower.close()
        assert isinstance(next_error(leader.recv), LinkLost)
        leader, follower = linked(stage, hello_of(position=whole_position(sent[:5])))
        assert leader.hello.position == whole_position(sent[:5])
        for shipment in sent[5:]:
            leader.send(shipment)
        second = take_until(follower, lambda found: found.leader_end == sent[-1].leader_end, leader.hello.position)
        for key, data in second.segments.items():
            first.segments[key] = first.segments.get(key, bytearray()) + data
        assert first.segments == arrived(sent).segments

    # --- room ------------------------------------------------------------------------------------------------------

    def test_bytes_on_their_way_are_bounded(
        self, stage: TransportStage, links: tuple[FollowerLink, LeaderLink], pool: ThreadPoolExecutor
    ) -> None:
        """A sender waits while the follower takes nothing, and continues when it takes; everything arrives."""
        leader, follower = links
        counted, sending = flooding(stage, leader, pool, times=4)
        on_way = still(counted)
        assert 0 < on_way <= stage.window_bytes + _FLOOD_BYTES
        assert not sending.done()
        took = 0
        while took < 4 * stage.window_bytes:
            shipment = follower.recv(_PATIENCE_S)
            assert shipment is not None
            took += shipment.size_bytes
        sending.result(_PATIENCE_S)

    def test_a_follower_that_takes_nothing_delays_no_other(
        self, stage: TransportStage, links: tuple[FollowerLink, LeaderLink], pool: ThreadPoolExecutor
    ) -> None:
        """Each link has room of its own."""
        counted, stuck = flooding(stage, links[0], pool)
        still(counted)
        leader, follower = linked(stage, hello_of(NodeName("north-3")))
        sent = shipments_of()
        for shipment in sent:
            leader.send(shipment)
        take_all(follower, sent)
        assert not stuck.done()
        links[0].close()
        assert isinstance(stuck.exception(_PATIENCE_S), LinkLost)


_FLOOD_BYTES: Final = 1 << 20


def linked(stage: TransportStage, hello: Hello) -> tuple[FollowerLink, LeaderLink]:
    """Return both ends of a new link."""
    transport = stage.leader()
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(stage.follower().connect, hello, _PATIENCE_S)
        accepted = transport.accept(_PATIENCE_S)
        connected = connecting.result(_PATIENCE_S)
    assert accepted is not None
    return accepted, connected


def acknowledgement(number: int) -> Acknowledgement:
    """Return a follower's acknowledgement; each number's differs."""
    position = {ShardId(0): ByteEnd(Offset(0), _HEAD_BYTES + number)}
    return Acknowledgement(
        NODE, EPOCH, position, GroupNumber(number), Seq(number), 17 + number, number, 2 * number, 0.5
    )


def flooding(
    stage: TransportStage, link: FollowerLink, pool: ThreadPoolExecutor, times: int = 2
) -> tuple[list[int], Future[None]]:
    """Send more than there is room for, on a thread; the list gets each shipment's size once it was handed over."""
    counted: list[int] = []

    def flood() -> None:
        for number in range(times * stage.window_bytes // _FLOOD_BYTES + 1):
            part = SegmentPart(ShardId(0), Offset(0), number * _FLOOD_BYTES, bytes(_FLOOD_BYTES))
            link.send(Shipment(STREAM, RegionId(0), EPOCH, (part,)))
            counted.append(_FLOOD_BYTES)

    return counted, pool.submit(flood)


def still(counted: list[int]) -> int:
    """Wait until something has moved and then stopped; return how many bytes have been handed over."""
    deadline = time.monotonic() + _PATIENCE_S
    seen, since = -1, time.monotonic()
    waiting = threading.Event()
    while not counted or time.monotonic() - since < 0.3:
        assert time.monotonic() < deadline, "sending never stops, though nothing is taken"
        if len(counted) != seen:
            seen, since = len(counted), time.monotonic()
        waiting.wait(0.02)
    return sum(counted)


def _each(call: Callable[[Any], None], given: Sequence[object]) -> None:
    for one in given:
        call(one)


def _mark(base: Offset, byte_end: int, group: GroupNumber) -> DurableMark:
    return DurableMark(
        STREAM, WriterId(1), EPOCH, base, byte_end, Offset(base + int(group)), group, Seq(group), Seq(1000), shards=2
    )
