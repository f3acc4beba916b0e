"""Writes that an application repeats in another region before logs are exchanged: stored twice, and merged rows count one."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.regions.two_homes import follow, made

import millstream
from millstream.crdt import row_merge
from millstream.home.home import Home
from millstream.model.ids import RegionId
from millstream.model.writes import WriteId
from millstream.regions import merged_table
from millstream.regions.reconcile import reconcile_stream
from millstream.regions.state_cache import MergedStates
from millstream.wal import cross_region_duplicates
from millstream.wal.cross_region_duplicates import Repeat, RepeatedWrites
from millstream.wal.writing.deduplicated_commits import writes_of

CONFIG = """
[streams.shop]
region = {region}
[streams.shop.log]
disk_used_max = 1.0
[streams.shop.keys]
"public.posts" = ["id"]
[streams.shop.merge."posts"]
likes = "pn_counter(increments)"
views = "g_counter(increments)"
price = "pn_counter(increments)"
total = "pn_counter"
tags = "or_set"
heat = "signal(1d, at=happened)"
"""
_BEGAN_US = 1_700_000_000 * 10**6


def _row(key: int, step: int, chance: random.Random) -> dict[str, Any]:
    return {
        "id": key,
        "likes": chance.randint(-9, 9),
        "views": chance.randint(0, 9),
        "price": Decimal(chance.randint(-99, 99)) / 100,
        "tags": [chance.choice("abc")],
        "heat": float(chance.randint(1, 5)),
        "happened": _BEGAN_US + chance.randint(0, 3 * 3600) * 10**6 + step,
    }


class World:
    """Three regions. Each write goes to some of them, with its own id, while they have only parts of each other's logs."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.past = folder / "past"
        self.chance = random.Random(seed)
        self.homes = {region: made(folder / str(region), region, CONFIG) for region in (1, 2, 3)}
        self.states = {region: MergedStates() for region in self.homes}
        self.written: list[dict[str, Any]] = []

    def play(self, steps: int) -> None:
        """Write, exchange logs, read and reconcile, in any order."""
        chance = self.chance
        with ExitStack() as stack:
            opened = {region: stack.enter_context(millstream.open(home)) for region, home in self.homes.items()}
            for step in range(steps):
                row = _row(chance.randint(1, 3), step, chance)
                self.written.append(row)
                some = chance.sample(sorted(opened), chance.choice((1, 2, 3)))
                for region in some:
                    # The write's own id: by key or in a session, which goes on in any region.
                    id_of = {"session": f"s{step}", "number": 1} if step % 2 else {"idempotency_key": f"k{step}"}
                    opened[region].append("shop", "posts", row, **id_of)  # type: ignore[arg-type]
                    if chance.random() < 0.3:
                        self._exchange(*chance.sample(sorted(opened), 2))
                if chance.random() < 0.4:
                    self.read(chance.choice(some))
                if step % 4 == 0 and (self.homes[1] / "data" / "wal" / "shop").exists():
                    shutil.copytree(self.homes[1] / "data" / "wal", self.past / f"{step:02d}")
                if chance.random() < 0.1:
                    reconcile_stream(Home(self.homes[some[0]]), "shop")
            for one in opened:
                for other in opened:
                    if one != other:
                        self._exchange(one, other)

    def _exchange(self, one: int, other: int) -> None:
        if (self.homes[other] / "data" / "wal" / "shop").exists():
            follow(self.homes[one], self.homes[other], other)

    def read(self, region: int) -> pa.Table:
        """Return the merged rows of one region, read on from its last read."""
        return self.states[region].read(Home(self.homes[region]), "shop", "posts")

    def check(self) -> None:
        """Fail unless all regions have the same rows, and these count each write once."""
        first = self.read(1)
        for region, home in self.homes.items():
            assert self.read(region).equals(first), "what a process has read on"
            assert MergedStates().read(Home(home), "shop", "posts").equals(first), "what is read from the beginning"
        self.check_rows(first)

    def check_rows(self, merged: pa.Table) -> None:
        """Fail unless merged rows count each write once."""
        newest = max(row["happened"] for row in self.written)
        for found in merged.to_pylist():
            rows = [row for row in self.written if row["id"] == found["id"]]
            for name in ("likes", "views", "price"):
                assert found[name] == sum(row[name] for row in rows), name
            heat = sum(row["heat"] * 0.5 ** ((newest - row["happened"]) / 86_400e6) for row in rows)
            assert found["heat"] == pytest.approx(heat, abs=1e-6)
            for window, width, count in (("1h", 60, 60), ("24h", 3600, 24), ("7d", 3600, 168)):
                begin = newest // (width * 10**6) - count
                assert found[f"heat__{window}"] == sum(row["happened"] // (width * 10**6) > begin for row in rows)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world at its end, with the logs that its first region had on the way."""
    made = World(tmp_path_factory.mktemp("world"), 0)
    made.play(16)
    return made


@pytest.mark.long
def test_regions_count_a_write_once_wherever_it_was_repeated(world: World) -> None:
    world.check()


def test_a_dry_run_counts_a_write_once_in_the_merged_value(tmp_path: Path) -> None:
    homes = {region: made(tmp_path / str(region), region, CONFIG) for region in (1, 2)}
    for region, home in homes.items():
        with millstream.open(home) as opened:
            opened.append("shop", "posts", {"id": 1, "likes": 5, "heat": 2.0}, idempotency_key="twice")
            opened.append("shop", "posts", {"id": 1, "likes": region})
    follow(homes[1], homes[2], 2)
    (table,) = reconcile_stream(Home(homes[1]), "shop", dry_run=True).tables
    lines = {line["column"]: line for line in table.differences[RegionId(2)].to_pylist()}
    assert [lines["likes"][side] for side in ("local", "remote", "merged")] == ["6", "7", "8"]
    with millstream.open(homes[1]) as opened:
        (row,) = opened.merged("shop", "posts").to_pylist()
    assert (row["likes"], row["heat__1h"]) == (8, 1)
    assert "heat__1h" not in lines, "each has one event, and so have both together"


@pytest.mark.siege
@pytest.mark.parametrize("seed", range(1, 9))
def test_regions_count_a_write_once_in_longer_worlds(tmp_path: Path, seed: int) -> None:
    world = World(tmp_path, seed)
    world.play(60)
    world.check()


def _without_ids(group: Any) -> Iterator[Any]:
    for _, _, ack, now_us in writes_of(group):
        yield WriteId("same", 1), 0, ack, now_us


MUTATIONS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "no write is a repeat": lambda patch: patch.setattr(RepeatedWrites, "between", lambda *_: {}),
    "a repeat is known before its writes were received": lambda patch: patch.setattr(
        Repeat, "is_within", lambda *_: True
    ),
    "repeats are added": lambda patch: patch.setattr(
        "millstream.crdt.columns.Grouped.subtracted", property(lambda rows: np.zeros(len(rows.codes), bool))
    ),
    "records of a key share a subtraction": lambda patch: patch.setattr(
        row_merge, "subtracting_region", lambda _, seqs: np.full(len(seqs), -1)
    ),
    "all that lies between two repeats is subtracted": lambda patch: patch.setattr(
        merged_table, "is_repeat", lambda _, seqs: np.ones(len(seqs), bool)
    ),
    "any two writes are one": lambda patch: patch.setattr(cross_region_duplicates, "writes_of", _without_ids),
}


def _is_right(world: World, folder: Path) -> bool:
    """Return whether a home that gets the first region's logs part by part, and reads each part, counts as it should."""
    home, states = made(folder / "one", 1, CONFIG), MergedStates()
    for logs in (*sorted(world.past.iterdir()), world.homes[1] / "data" / "wal"):
        shutil.rmtree(home / "data" / "wal", ignore_errors=True)
        shutil.copytree(logs, home / "data" / "wal")
        rows = states.read(Home(home), "shop", "posts")
    try:
        world.check_rows(rows)
    except AssertionError:
        return False
    return True


def test_a_home_without_mutations_counts_as_it_should(world: World, tmp_path: Path) -> None:
    assert _is_right(world, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutation_is_found(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    MUTATIONS[name](monkeypatch)
    assert not _is_right(world, tmp_path)
