"""Three regions as real processes: one is cut off while all take writes, and afterwards all have the same sums."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tests.cutting import Link
from tests.nodes.nodes import STREAM, Node, eventually

import millstream
from millstream import OpenHome
from millstream.errors import MillstreamError
from millstream.testing._servers.ports import free_port

REGIONS = (1, 2, 3)
CUT_S = 10.0
MERGE = (
    f'[streams.{STREAM}.keys]\n"public.items" = ["id"]\n[streams.{STREAM}.merge."public.items"]\nheat = "signal(1h)"\n'
    'likes = "pn_counter(increments)"\n'
)


class Watchers:
    """An application of one region: 100 signals an append, one append after the other."""

    def __init__(self, home: Path, region: int) -> None:
        self.events = 0
        self._home, self._chance = home, np.random.default_rng(region)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ending.set()
        self._thread.join(180)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with millstream.open(self._home) as home:
            while not self._ending.wait(0.02):
                ids, weights = self._chance.integers(0, 50, 100), self._chance.random(100)
                home.append(STREAM, "items", pa.table({"id": ids, "heat": weights}), deadline_s=60)
                self.events += 100


@contextmanager
def linked(regions: tuple[int, ...]) -> Iterator[dict[tuple[int, int], Link]]:
    """Make links from each region to each other one, by their numbers."""
    with ExitStack() as closing:
        ports = {region: free_port() for region in regions}
        made = {(of, to): Link(ports[to]) for of in regions for to in regions if of != to}
        for link in made.values():
            closing.callback(link.refuse)
        yield made


@contextmanager
def running(
    tmp_path: Path, links: dict[tuple[int, int], Link], parts: tuple[str, ...] = ("owner", "serve", "follow")
) -> Iterator[list[Node]]:
    """Run a node of each region."""
    made = []
    for own in sorted({of for of, _ in links}):
        others = ", ".join(f'{to} = "grpc://127.0.0.1:{link.port}"' for (of, to), link in links.items() if of == own)
        port = next(link.target for (_, to), link in links.items() if to == own)
        stream = f"region = {own}\n{MERGE}"
        made.append(Node(tmp_path / str(own), "a", {"a": port}, more=f"regions = {{ {others} }}\n", stream=stream))
    try:
        for node in made:
            for part in parts:
                node.start(part)
        yield made
    finally:
        for node in made:
            node.kill()


@pytest.fixture
def links() -> Iterator[dict[tuple[int, int], Link]]:
    with linked(REGIONS) as made:
        yield made


@pytest.fixture
def nodes(tmp_path: Path, links: dict[tuple[int, int], Link]) -> Iterator[list[Node]]:
    with running(tmp_path, links) as made:
        yield made


def start(node: Node) -> None:
    for part in ("owner", "serve", "follow"):
        node.start(part)


def merged(node: Node) -> pa.Table | None:
    """Return a node's merged rows; None if it can't give them yet."""
    try:
        with millstream.open(node.home) as home:
            return home.merged(STREAM, "items").replace_schema_metadata()
    except MillstreamError:
        return None


@pytest.mark.long
def test_two_regions_that_were_cut_apart_count_every_write_once(tmp_path: Path) -> None:
    """The quick form of what follows. This process writes, so the regions have no owner of their own."""
    with linked((1, 2)) as links, running(tmp_path, links, ("serve", "follow")) as nodes, ExitStack() as closing:
        one, two = (closing.enter_context(millstream.open(node.home)) for node in nodes)
        expected = {"likes": 0, "heat__7d": 0}

        def append(home: OpenHome, likes: int, key: str, *, is_new: bool = True) -> None:
            home.append(STREAM, "items", {"id": 1, "likes": likes, "heat": 1.0}, idempotency_key=key)
            if is_new:
                expected["likes"] += likes
                expected["heat__7d"] += 1

        def sums(home: OpenHome) -> dict[str, int]:
            (row,) = home.merged(STREAM, "items").to_pylist()
            return {name: row[name] for name in expected}

        def agree() -> None:
            eventually(lambda: sums(one) == sums(two) == expected, f"the sums {expected}", *nodes)

        append(one, 1, "first")
        append(two, 2, "second")
        agree()
        for link in links.values():
            link.cut()
        append(one, 4, "apart")
        before = sums(two)
        append(two, 8, "also apart")
        append(two, 4, "apart", is_new=False)
        assert sums(two)["likes"] == before["likes"] + 12, "it can't know yet that this is a repeat"
        for link in links.values():
            link.heal()
        agree()
        # The sums are right before the repeat has come; the rows are the same after it.
        eventually(lambda: one.merged(STREAM, "items").equals(two.merged(STREAM, "items")), "the same rows", *nodes)


@pytest.mark.siege
def test_a_region_that_was_cut_off_has_the_same_sums_as_the_others_and_counts_each_event_once(
    nodes: list[Node], links: dict[tuple[int, int], Link]
) -> None:
    watchers = [Watchers(node.home, own) for own, node in zip(REGIONS, nodes, strict=True)]
    eventually(lambda: all(one.events for one in watchers), "signals in all regions", *nodes)
    cut = [link for pair, link in links.items() if 3 in pair]
    for link in cut:
        link.cut()
    threading.Event().wait(CUT_S)
    for link in cut:
        link.heal()
    for one in watchers:
        one.end()
    events = sum(one.events for one in watchers)

    def counted(node: Node) -> int:
        found = merged(node)
        return 0 if found is None else int(np.sum(found.column("heat__7d").to_numpy()))

    for node in nodes:
        eventually(lambda node=node: counted(node) >= events, "the signals of all regions", *nodes)
        assert counted(node) == events
    tables = [merged(node) for node in nodes]
    assert tables[0] == tables[1] == tables[2]
    assert tables[0] is not None
    assert tables[0].num_rows == 50


@pytest.mark.siege
def test_a_session_that_is_repeated_in_a_region_that_was_cut_off_counts_once(
    nodes: list[Node], links: dict[tuple[int, int], Link]
) -> None:
    first, _, last = nodes

    def append(node: Node, session: str, numbers: range) -> int:
        """Append a session's writes; return how many were duplicates."""
        with millstream.open(node.home) as home:
            rows = [{"id": number % 3, "likes": number, "heat": 1.0} for number in numbers]
            acks = [
                home.append(STREAM, "items", row, session=session, number=number, deadline_s=60)
                for row, number in zip(rows, numbers, strict=True)
            ]
        return sum(ack.duplicate for ack in acks)

    def sums(node: Node) -> tuple[int, int]:
        found = merged(node)
        if found is None:
            return 0, 0
        return sum(found.column("likes").to_pylist()), sum(found.column("heat__7d").to_pylist())

    def have(count: int) -> None:
        expected = len(REGIONS) * sum(range(1, count + 1)), len(REGIONS) * count
        for node in nodes:
            eventually(lambda node=node: sums(node) == expected, f"the sums {expected}", *nodes)

    for own, node in zip(REGIONS, nodes, strict=True):
        assert append(node, f"of {own}", range(1, 11)) == 0
    have(10)
    cut = [link for pair, link in links.items() if 3 in pair]
    for link in cut:
        link.cut()
    for own, node in zip(REGIONS, nodes, strict=True):
        assert append(node, f"of {own}", range(11, 31)) == 0
    # Its first ten writes had arrived, and the last ten of its region are unknown there.
    assert append(last, "of 1", range(1, 21)) == 10
    last.kill()
    start(last)
    assert append(last, "of 1", range(11, 26)) == 10
    assert append(first, "of 3", range(5, 31)) == 6
    for link in cut:
        link.heal()
    have(30)
    assert append(last, "of 1", range(21, 31)) == 10
    # The sums are right before all logs have come: until then a repeat counts, at its later time.
    eventually(lambda: merged(first) == merged(nodes[1]) == merged(last), "the same rows", *nodes)
    have(30)
