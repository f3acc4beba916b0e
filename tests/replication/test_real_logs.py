"""Logs shipped by each transport to a follower's log while they are written: the same bytes, the same records."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.app.homes import wait_for
from tests.replication.flight_server import ExchangeServer
from tests.wal.plain_operations import MemoryReservations, plain_ops, plain_table

from millstream.errors import LinkLost
from millstream.model.ids import Epoch, ShardId, StreamId
from millstream.model.replication import Acknowledgement, Hello, NodeName
from millstream.ports import LeaderLink, Transport
from millstream.replication.flight.address import LeaderAddress
from millstream.replication.flight.transport import FlightTransport
from millstream.replication.object_store.object_names import behind
from millstream.replication.object_store.transport import ObjectStoreTransport
from millstream.testing.in_process import InProcessTransport
from millstream.wal.reader import StreamReader
from millstream.wal.replica.replica_log import ReplicaLog
from millstream.wal.replica.ship_source import ShipSource
from millstream.wal.writing.options import LogOptions
from millstream.wal.writing.writer import LogWriter

STREAM = StreamId(UUID(int=7))
SHARDS = (ShardId(0), ShardId(1))
TABLES = (plain_table(1), plain_table(2))


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[LogWriter]:
    """A writer of two shards, with small segments."""
    options = LogOptions(segment_bytes=40_000)
    folder, reservations = str(tmp_path / "leader"), MemoryReservations()
    with closing(LogWriter.open(folder, stream=STREAM, shards=SHARDS, epoch=Epoch(3), reservations=reservations, options=options)) as writer:  # fmt: skip
        yield writer


def append(writer: LogWriter, count: int) -> None:
    for number in range(count):
        writer.append(plain_ops({number + 1: [(TABLES[number % 2], 1, "x" * 2_000)]}, shard_of={1: 0, 2: 1}))


class Shipping:
    """A shipper of a folder to any follower that connects, in threads, until it is stopped."""

    def __init__(self, folder: Path, transport: Transport) -> None:
        self._folder = folder
        self._transport = transport
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(4)
        self._pool.submit(self._accept)
        self.acknowledged: list[Acknowledgement] = []

    def _accept(self) -> None:
        while not self._stop.is_set():
            link = self._transport.accept(0.1)
            if link is not None:
                self._pool.submit(self._ship, link)

    def _ship(self, link: Any) -> None:
        source = ShipSource(str(self._folder))
        position = dict(link.hello.position)
        try:
            while not self._stop.is_set():
                shipment = source.read(position, 30_000)
                if shipment is None:
                    word = link.recv(0.02)
                    if isinstance(word, Acknowledgement):
                        self.acknowledged.append(word)
                    continue
                link.send(shipment)
                position |= {part.shard: behind(part) for part in shipment.parts}
        except LinkLost:
            pass

    def stop(self) -> None:
        self._stop.set()
        self._transport.close()
        self._pool.shutdown()


def follow(log: ReplicaLog, link: LeaderLink, until: StreamReader) -> None:
    """Apply shipments until everything is shown that the leader shows."""
    while log.end().persisted_upto < until.persisted_upto():
        shipment = link.recv(30.0)
        assert shipment is not None
        log.apply(shipment)
        link.send(Acknowledgement(NodeName("b"), Epoch(3), log.position(), *log.end()[:2], applied_ns=1))


def hello(log: ReplicaLog) -> Hello:
    return Hello(log.stream, NodeName("b"), Epoch(0), log.position())


def same_files(leader: Path, follower: Path) -> None:
    """Check that every segment of the follower has the leader's bytes."""
    found = sorted(path.relative_to(follower) for path in follower.rglob("*.wal"))
    assert len(found) > 4
    for name in found:
        theirs, ours = (leader / name).read_bytes(), (follower / name).read_bytes()
        assert theirs[: len(ours)] == ours


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["in_process", "flight", "object_store"])
def test_a_follower_has_the_leaders_bytes_and_goes_on_where_it_was(tmp_path: Path, writer: LogWriter, kind: str):
    leader, follower = tmp_path / "leader", tmp_path / "follower"
    server: ExchangeServer | None = None
    reading: Transport
    leading: Transport
    if kind == "in_process":
        leading = reading = InProcessTransport()
    elif kind == "flight":
        leading = served = FlightTransport("web")
        server = ExchangeServer(served)
        reading = FlightTransport("web", LeaderAddress(server.place))
    else:
        leading, reading = (
            ObjectStoreTransport((tmp_path / "store").as_uri(), "web", node=node, polls_s=0.02) for node in "ab"
        )
    append(writer, 100)
    shipping = Shipping(leader, leading)
    reader = StreamReader(str(leader))
    try:
        for _ in range(2):
            with closing(ReplicaLog.open(str(follower))) as log:
                link = reading.connect(hello(log), 30.0)
                follow(log, link, reader)
                append(writer, 60)
                follow(log, link, reader)
                link.close()
            append(writer, 50)
        if kind == "object_store":
            # Another process continues to lead: the store's end is a position in this log.
            shipping.stop()
            leading = ObjectStoreTransport((tmp_path / "store").as_uri(), "web", node="a")
            shipping = Shipping(leader, leading)
        with closing(ReplicaLog.open(str(tmp_path / "late"))) as log:
            follow(log, reading.connect(hello(log), 30.0), reader)
        with closing(ReplicaLog.open(str(follower))) as log:
            follow(log, reading.connect(hello(log), 30.0), reader)
        wait_for(lambda: shipping.acknowledged, what=lambda: "no acknowledgement")
    finally:
        shipping.stop()
        reading.close()
        if server is not None:
            running = server
            wait_for(lambda: running.calls == 0, what=lambda: "calls that don't end")
            running.shutdown()
    for folder in (follower, tmp_path / "late"):
        same_files(leader, folder)
        copy = StreamReader(str(folder))
        assert copy.persisted_upto() == reader.persisted_upto()
        assert copy.token() == reader.token()
