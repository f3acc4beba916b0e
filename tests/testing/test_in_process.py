"""The transport inside one process passes the tests of all transports; its faults come from a seed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from millstream.errors import LinkLost, ShipmentUnreadable
from millstream.model.replication import Shipment
from millstream.ports import FollowerLink, LeaderLink
from millstream.testing.clock import ManualClock
from millstream.testing.in_process import InProcessTransport, LinkFaults
from millstream.testing.transport import NODE, LinkConformance, acknowledgement, hello_of, shipments_of


class InProcessStage:
    window_bytes = 4 << 20

    def __init__(self) -> None:
        self._transport = InProcessTransport(window_bytes=self.window_bytes)

    def leader(self) -> InProcessTransport:
        return self._transport

    def follower(self) -> InProcessTransport:
        return self._transport

    def spoil(self, link: FollowerLink) -> None:
        link._outward.put(b"Snonsense")  # type: ignore[attr-defined]

    def close(self) -> None:
        self._transport.close()


class TestInProcess(LinkConformance):
    @pytest.fixture
    def stage(self) -> Iterator[InProcessStage]:
        stage = InProcessStage()
        yield stage
        stage.close()


def pair(transport: InProcessTransport) -> tuple[FollowerLink, LeaderLink]:
    follower = transport.connect(hello_of(), 0.0)
    leader = transport.accept(0.0)
    assert leader is not None
    return leader, follower


def history(faults: LinkFaults, seed: int, count: int = 200) -> list[object]:
    """Return what a follower receives of so many shipments, one by one; after damage, on a new link."""
    clock = ManualClock(sleeping_advances=True)
    transport = InProcessTransport(clock=clock, faults=faults, seed=seed)
    leader, follower = pair(transport)
    heard: list[object] = []
    for shipment in shipments_of(segments=1, segment_bytes=count, part_bytes=1):
        try:
            leader.send(shipment)
            while (came := follower.recv(0.01)) is not None:
                heard.append(int(came.leader_end))
        except (ShipmentUnreadable, LinkLost) as error:
            heard.append(error.code)
            transport.mend(NODE)
            leader, follower = pair(transport)
    clock.advance(10)
    while (came := follower.recv(0.0)) is not None:
        heard.append(int(came.leader_end))
    return heard


def numbers(heard: list[object]) -> list[int]:
    return [number for number in heard if isinstance(number, int)]


WHOLE = list(range(1, 201))


def test_without_faults_all_arrives_once():
    assert history(LinkFaults(), 1) == WHOLE


def test_what_is_dropped_is_gone_and_later_things_arrive():
    found = numbers(history(LinkFaults(drop=0.2), 1))
    assert found == sorted(set(found))
    assert 100 < len(found) < 190
    assert set(found) < set(WHOLE)


def test_what_is_doubled_comes_twice_in_order():
    found = numbers(history(LinkFaults(duplicate=0.2), 1))
    assert found == sorted(found)
    assert set(found) == set(WHOLE)
    assert 210 < len(found) < 300


def test_what_is_late_holds_up_those_behind_it():
    found = numbers(history(LinkFaults(delay=0.3, delay_s=0.5), 1))
    assert found == WHOLE


def test_what_overtakes_comes_before_its_time():
    found = numbers(history(LinkFaults(delay=0.5, delay_s=0.5, reorder=0.3), 1))
    assert found != WHOLE
    assert sorted(found) == WHOLE


def test_damage_is_told_of_as_that():
    found = history(LinkFaults(corrupt=0.1), 1)
    assert 5 < found.count("shipment_unreadable") < 60
    assert len(numbers(found)) + found.count("shipment_unreadable") == 200


def test_a_partition_loses_what_is_said_meanwhile_and_ends_by_itself():
    found = numbers(history(LinkFaults(partition=0.02, partition_s=0.05), 1))
    gaps = [after - before for before, after in itertools.pairwise(found) if after - before > 1]
    assert gaps
    assert max(gaps) >= 4


def test_a_seed_gives_the_same_faults_again():
    faults = LinkFaults(0.1, 0.1, 0.1, 0.05, 0.2, 0.05, 0.02, 0.05)
    found = [history(faults, seed) for seed in (1, 1, 2)]
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_a_node_that_is_cut_off_hears_nothing_and_cant_connect():
    clock = ManualClock(sleeping_advances=True)
    transport = InProcessTransport(clock=clock)
    leader, follower = pair(transport)
    first, second, third = shipments_of(segments=1, segment_bytes=3, part_bytes=1)
    transport.cut(NODE, 5.0)
    leader.send(first)
    follower.send(acknowledgement(1))
    assert (leader.recv(1.0), follower.recv(1.0)) == (None, None)
    with pytest.raises(LinkLost):
        transport.connect(hello_of(), 1.0)
    assert transport.connect(hello_of(), 10.0) is not None
    leader.send(second)
    assert ends(follower.recv(0.0)) == 2
    transport.cut(NODE)
    leader.send(third)
    assert follower.recv(20.0) is None
    transport.mend(NODE)
    leader.send(third)
    assert ends(follower.recv(0.0)) == 3


def ends(shipment: Shipment | None) -> int:
    return 0 if shipment is None else int(shipment.leader_end)
