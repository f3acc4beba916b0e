"""Shipments that arrive while another is applied are applied together.

The follower's log ends the same, and is whole at every step.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.wal.replica_pairs import Pair
from tests.wal.truth import FOLDER

from millstream.errors import LinkLost, ReplicaGap, ShipmentUnreadable
from millstream.model.ids import Epoch
from millstream.model.replication import Document, NodeName, Shipment
from millstream.replication.joined_link import JoinedLink, joined
from millstream.testing.files import MemoryFiles
from millstream.testing.in_process import InProcessTransport
from millstream.testing.transport import hello_of
from millstream.wal.replica.replica_log import ReplicaLog
from millstream.wal.replica.ship_source import ShipSource


def sent_by(pair: Pair, bytes_max: int) -> list[Shipment]:
    """Return the shipments of a leader that goes on writing, in rounds of several shipments."""
    source = ShipSource(FOLDER, files=pair.leader_files)
    found: list[Shipment] = []
    position = pair.log.position()
    for groups in (5, 1, 3, 1):
        pair.append(groups)
        while (shipment := source.read(position, bytes_max)) is not None:
            found.append(shipment)
            position = source.position_after(position)
    return found


def contents(files: MemoryFiles) -> dict[str, bytes]:
    """Return the contents of the log's files."""
    return {
        f"{folder}/{name}": files.read(f"{FOLDER}/{folder}/{name}")
        for folder in files.listdir(FOLDER)
        if not folder.startswith(".")
        for name in files.listdir(f"{FOLDER}/{folder}")
    }


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_taken_together_the_log_is_the_same(seed: int) -> None:
    chance = random.Random(seed)
    pair = Pair()
    shipments = sent_by(pair, 5000)
    assert len(shipments) > 8
    taken, waiting = 0, list(shipments)
    while waiting:
        together = waiting.pop(0)
        for _ in range(chance.choice((0, 1, 4, 9))):
            both = joined(together, waiting[0]) if waiting else None
            if both is None:
                break
            together = both
            waiting.pop(0)
        pair.log.apply(together)
        taken += 1
    assert taken < len(shipments)
    files = MemoryFiles()
    alone = ReplicaLog.open(FOLDER, files=files, side_by_side=False)
    for shipment in shipments:
        alone.apply(shipment)
    assert contents(pair.files) == contents(files)
    assert pair.log.end() == alone.end()
    assert pair.read() == pair.read_leader()


def test_what_is_wrong_with_one_of_them_changes_nothing_and_all_of_them_come_again() -> None:
    pair = Pair()
    first, second, *rest = sent_by(pair, 5000)
    damaged = bytearray(second.parts[0].data)
    damaged[0] ^= 1
    both = joined(first, replace(second, parts=(replace(second.parts[0], data=bytes(damaged)), *second.parts[1:])))
    assert both is not None
    with pytest.raises(ShipmentUnreadable):
        pair.log.apply(both)
    with pytest.raises(ReplicaGap):
        pair.log.apply(second)
    for shipment in (first, second, *rest):
        pair.log.apply(shipment)
    assert pair.read() == pair.read_leader()


def test_only_what_says_the_same_as_both_is_joined() -> None:
    pair = Pair()
    shipments = sent_by(pair, 5000)
    first, second = shipments[:2]
    assert not first.marks
    assert joined(first, second) is not None
    assert joined(first, second, first.size_bytes) is None
    whole = next(shipment for shipment in shipments if shipment.marks)
    assert joined(whole, first) is None  # its marks would wait
    assert joined(whole, whole) is not None
    for other in (
        replace(second, epoch=Epoch(9)),
        replace(second, leader=NodeName("c")),
        replace(second, documents=(Document("catalog", 1, b"x"),)),
    ):
        assert joined(first, other) is None
        assert joined(other, first) is None


def test_a_link_gives_together_what_has_come_and_the_rest_before_it_says_that_it_broke() -> None:
    shipments = sent_by(Pair(), 5000)
    transport = InProcessTransport(window_bytes=4 << 20)
    link = JoinedLink(transport.connect(hello_of(), 0.0), 20_000)
    leader = transport.accept(0.0)
    assert leader is not None
    assert link.recv(0.0) is None
    greeting = Shipment(
        shipments[0].stream, shipments[0].region, shipments[0].epoch, documents=(Document("d", 1, b"x"),)
    )
    for shipment in (shipments[0], greeting, *shipments[1:]):
        leader.send(shipment)
    assert link.recv(1.0) == shipments[0]
    assert link.recv(1.0) == greeting
    came: list[Shipment] = []
    while (found := link.recv(0.0)) is not None:
        came.append(found)
    assert 1 < len(came) < len(shipments) - 1
    assert [part for shipment in came for part in shipment.parts] == [
        part for shipment in shipments[1:] for part in shipment.parts
    ]
    assert came[-1].marks == shipments[-1].marks
    leader.send(shipments[0])
    leader.send(shipments[1])
    leader.close()
    last = link.recv(1.0)
    assert last is not None
    assert last.parts == (*shipments[0].parts, *shipments[1].parts)
    for _ in range(2):
        with pytest.raises(LinkLost):
            link.recv(0.0)
    transport.close()
