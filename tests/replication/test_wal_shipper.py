"""The shipper of a stream and a follower, as the processes run them: sealed segments arrive whole."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from uuid import UUID

import pytest
from tests.app.homes import wait_for
from tests.replication.flight_server import ExchangeServer
from tests.wal.plain_operations import MemoryReservations, plain_ops, plain_table

from millstream.codec.log_segment import SEGMENT_TRAILER_SIZE, SegmentFooter
from millstream.errors import LinkLost
from millstream.model.ids import Epoch, GroupNumber, ShardId, StreamId
from millstream.model.positions import Seq
from millstream.model.replication import Acknowledgement, ByteEnd, Document, Hello, NodeName
from millstream.ports import LeaderLink
from millstream.protocol.replication.ack_levels import Holdings
from millstream.protocol.replication.leader_events import Heard
from millstream.protocol.replication.node_promises import Promise, Role, RoleFact
from millstream.replication.flight.address import LeaderAddress
from millstream.replication.flight.transport import FlightTransport
from millstream.replication.follower import WalFollower
from millstream.replication.shipper import WalShipper
from millstream.testing.in_process import InProcessTransport
from millstream.testing.transport import next_error
from millstream.wal.files import RealFiles
from millstream.wal.replica.ship_source import durable_marks
from millstream.wal.writing.options import LogOptions
from millstream.wal.writing.writer import LogWriter
from millstream.workers import Worker

A, B = NodeName("a"), NodeName("b")
SEGMENTS = 10


class Notes:
    """Notes of a shipper and of a follower, kept in memory."""

    def __init__(self) -> None:
        self.needed_from: dict[NodeName, Seq] = {}
        self.facts: list[RoleFact] = []

    def role(self, fact: RoleFact) -> None:
        self.facts.append(fact)

    def cursor(self, node: NodeName, needed_from: Seq, position: object, *, anew: bool) -> None:
        del position, anew
        self.needed_from[node] = needed_from

    def acks(self, holdings: Holdings, now_ns: int) -> None: ...

    def check_promise(self, fact: RoleFact) -> None: ...

    def documents(self, documents: object) -> None: ...

    def set_aside(self, behind: object) -> None:
        raise AssertionError(f"nothing was to be set aside, but {behind}")

    def lag(self, lag: object) -> None: ...

    def let_go(self, leader_dropped: Seq) -> None: ...


@contextmanager
def refused(*names: str) -> Iterator[list[str]]:
    """Refuse the threads whose names begin so, each once; yield the names that are still to come."""
    start, left = Worker.start, list(names)

    def begun(worker: Worker) -> Worker:
        for name in left:
            if worker.name.startswith(name):
                left.remove(name)
                raise OSError(errno.EAGAIN, "no more threads can be started")
        return start(worker)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Worker, "start", begun)
        yield left


@pytest.fixture
def log(tmp_path: Path) -> str:
    """A log with one record."""
    reservations, shards = MemoryReservations(), [ShardId(0)]
    with closing(
        LogWriter.open(
            str(tmp_path), stream=StreamId(UUID(int=7)), shards=shards, epoch=Epoch(3), reservations=reservations
        )
    ) as writer:
        writer.append(plain_ops({1: [(plain_table(1), 1, "a")]}))
    return str(tmp_path)


@contextmanager
def shipping(log: str) -> Iterator[tuple[WalShipper, InProcessTransport]]:
    transport = InProcessTransport()
    shipper = WalShipper("web", log, RoleFact(), frozenset({B}), transport, Notes())
    shipper.start()
    try:
        yield shipper, transport
    finally:
        shipper.stop(0.0)
        transport.close()


def connected(transport: InProcessTransport) -> AbstractContextManager[LeaderLink]:
    return closing(transport.connect(Hello(None, B, Epoch(0), {}), 10.0))


def segments_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.wal"))}


def test_ten_sealed_segments_arrive_byte_by_byte(tmp_path: Path) -> None:
    leader, follower = tmp_path / "leader", tmp_path / "follower"
    reservations, table = MemoryReservations(), plain_table(1)
    with closing(
        LogWriter.open(
            str(leader),
            stream=StreamId(UUID(int=7)),
            shards=[ShardId(0)],
            epoch=Epoch(3),
            reservations=reservations,
            options=LogOptions(segment_bytes=40_000),
        )
    ) as writer:
        number = 0
        while len(segments_of(leader)) <= SEGMENTS:
            number += 1
            writer.append(plain_ops({number: [(table, 1, f"{number}" * 1_000)]}))
    sealed = dict(list(segments_of(leader).items())[:SEGMENTS])  # the last one is open, and still empty
    assert all(SegmentFooter.is_trailer(data[-SEGMENT_TRAILER_SIZE:]) for data in sealed.values())
    served, notes = FlightTransport("web"), Notes()
    server = ExchangeServer(served)
    reading = FlightTransport("web", LeaderAddress(server.place))

    def connect(node: NodeName, hello: Hello, timeout_s: float) -> tuple[NodeName, LeaderLink]:
        del node
        return A, reading.connect(hello, timeout_s)

    shipper = WalShipper("web", str(leader), RoleFact(), frozenset({B}), served, notes)
    follows = WalFollower("web", str(follower), B, RoleFact(Role.FOLLOWS, leader=A), connect, Notes())
    ends = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        shipper.start()
        following = pool.submit(follows.run, ends)
        try:
            wait_for(lambda: follows.group, what=follows.facts)
            assert shipper.stop(30.0) == (), "the follower has acknowledged all"
        finally:
            ends.set()
            shipper.stop(0.0)
            served.close()
            following.result()
            reading.close()
            wait_for(lambda: server.calls == 0, what=lambda: "calls that don't end")
            server.shutdown()
    assert shipper.failure is None
    assert len(sealed) == SEGMENTS
    assert segments_of(follower) == sealed
    assert notes.needed_from[B] == number, "the cursor of the follower stands at the last number"


def test_a_follower_that_hangs_falls_behind_in_the_facts(tmp_path: Path) -> None:
    """They had the figures of its last acknowledgement: nothing was lacking for as long as it hung."""
    reservations, table = MemoryReservations(), plain_table(1)
    shards = [ShardId(0)]
    with closing(
        LogWriter.open(
            str(tmp_path), stream=StreamId(UUID(int=7)), shards=shards, epoch=Epoch(3), reservations=reservations
        )
    ) as writer:
        writer.append(plain_ops({1: [(table, 1, "a")]}))
        (mark,) = durable_marks(RealFiles(), str(tmp_path)).values()
        transport = InProcessTransport()
        shipper = WalShipper("web", str(tmp_path), RoleFact(), frozenset({B}), transport, Notes())
        shipper.start()
        try:
            with closing(transport.connect(Hello(None, B, Epoch(0), {}), 10.0)) as link:
                position = {ShardId(0): ByteEnd(mark.base_offset, mark.byte_end)}
                link.send(Acknowledgement(B, Epoch(0), position, mark.group, mark.persisted_upto, 1))
                wait_for(lambda: [one["records_behind"] for one in shipper.facts()] == [0], what=shipper.facts)
                writer.append(plain_ops({2: [(table, 1, "b")], 3: [(table, 1, "c")]}))
                wait_for(lambda: shipper.facts()[0]["records_behind"] == 2, what=shipper.facts)
                (hangs,) = shipper.facts()
                assert (hangs["phase"], hangs["counts"]) == ("shipping", True)
                assert isinstance(hangs["bytes_behind"], int)
                assert hangs["bytes_behind"] > 0
                wait_for(lambda: float(str(shipper.facts()[0]["lag_s"])) > 0.05, what=shipper.facts)
            wait_for(lambda: shipper.facts()[0]["phase"] == "apart", what=shipper.facts)
            assert shipper.facts()[0]["records_behind"] == 2
        finally:
            shipper.stop(0.0)
            transport.close()


def test_a_fault_that_passes_stops_no_shipping(tmp_path: Path) -> None:
    """The thread that looks at the log ended with it; followers got nothing from then on, without any error."""
    faults = [OSError(errno.EMFILE, "Too many open files")]

    def documents() -> tuple[Document, ...]:
        if faults:
            raise faults.pop()
        return ()

    reservations, table = MemoryReservations(), plain_table(1)
    shards = [ShardId(0)]
    with closing(
        LogWriter.open(
            str(tmp_path), stream=StreamId(UUID(int=7)), shards=shards, epoch=Epoch(3), reservations=reservations
        )
    ) as writer:
        writer.append(plain_ops({1: [(table, 1, "a")]}))
    transport = InProcessTransport()
    shipper = WalShipper("web", str(tmp_path), RoleFact(), frozenset({B}), transport, Notes(), documents=documents)
    shipper.start()
    try:
        with closing(transport.connect(Hello(None, B, Epoch(0), {}), 10.0)) as link:
            link.send(Acknowledgement(B, Epoch(0), {}, GroupNumber(0), Seq(0), 1))
            wait_for(
                lambda: [one["records_behind"] for one in shipper.facts()] == [1], seconds=10.0, what=shipper.facts
            )
    finally:
        shipper.stop(0.0)
        transport.close()
    assert not faults


def phase_is(shipper: WalShipper, phase: str) -> None:
    wait_for(lambda: [one["phase"] for one in shipper.facts()] == [phase], seconds=10.0, what=shipper.facts)


@pytest.mark.parametrize("thread", ["ship-hear", "ship-send"])
def test_a_follower_may_come_again_after_a_thread_was_refused(log: str, thread: str) -> None:
    """The thread that accepts links ended with it: no follower came in from then on."""
    with shipping(log) as (shipper, transport), refused(thread) as left:
        with connected(transport) as link:
            assert isinstance(next_error(link.recv), LinkLost)
        assert not left
        phase_is(shipper, "apart")
        with connected(transport) as link:
            assert link.recv(10.0) is not None
            link.send(Acknowledgement(B, Epoch(0), {}, GroupNumber(0), Seq(0), 1))
            phase_is(shipper, "shipping")


def test_a_shipper_ends_though_no_thread_can_part_with_a_follower(log: str) -> None:
    """`ended` was not set, so whoever waits for it waited on."""
    with shipping(log) as (shipper, transport), refused("ship-part", "ship-part") as left, connected(transport) as link:
        assert link.recv(10.0) is not None
        phase_is(shipper, "greeting")
        shipper.hear(Heard(Promise(Epoch(9), NodeName("c"))))
        assert shipper.ended.wait(10.0)
        assert shipper.failure is None
        assert left == ["ship-part"]
        assert isinstance(next_error(link.recv), LinkLost)


def test_a_link_that_is_gone_leaves_no_thread(log: str) -> None:
    """The one that sends waited for work until the shipper's end, one per link."""
    with shipping(log) as (shipper, transport):
        for _ in range(3):
            with connected(transport) as link:
                assert link.recv(10.0) is not None
            phase_is(shipper, "apart")
        wait_for(
            lambda: not [one for one in threading.enumerate() if one.name == f"ship-send-{B}"],
            seconds=10.0,
            what=threading.enumerate,
        )


def test_a_shipper_that_could_not_begin_stops_at_once(log: str) -> None:
    """It waited for the end of a thread that had not begun."""
    shipper = WalShipper("web", log, RoleFact(), frozenset({B}), InProcessTransport(), Notes())
    with refused("ship-web"), pytest.raises(OSError, match="no more threads"):
        shipper.start()
    began_s = time.monotonic()
    assert shipper.stop(0.0) == ()
    assert time.monotonic() - began_s < 4.0
