"""Regions whose clocks are wrong by minutes or days, forward and back, over restarts.

They come to the same rows, those of the plain kinds, once they have the same logs. A region whose clock is too far
ahead is named, and moves no other clock.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.crdt.region_logs import COLUMNS, Said, plainly_merged
from tests.regions.two_homes import follow, made

import millstream
from millstream.administration.doctor import examine
from millstream.crdt.hlc import DRIFT_MAX_NS
from millstream.home.home import Home
from millstream.model.ids import RegionId, region_log_name
from millstream.model.positions import Seq
from millstream.regions.region_clocks import clocks_ahead
from millstream.wal.reader import StreamReader

CONFIG = """
[streams.shop]
region = {region}
[streams.shop.log]
disk_used_max = 1.0
[streams.shop.keys]
"public.posts" = ["id", "part"]
[streams.shop.merge."posts"]
views = "g_counter"
likes = "pn_counter"
paid = "pn_counter"
weight = "pn_counter"
tags = "union_set"
seen = "or_set"
heat = "signal(4s, at=happened)"
hidden = "hide"
"""
MINUTE_S, DAY_S = 60, 86_400
OFF_S = (0, 0, -59, 59, -90, 90, -3 * DAY_S, 3 * DAY_S, 400 * DAY_S)
HAPPENED = (None, 0, 2_500_000, 4_102_444_800 * 10**6)
"""Times of events, in microseconds: the commit's, 1970, and 2100."""


class Clocks:
    """The machine's clock as each region sees it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.off_s = 0
        real_ns = time.time_ns
        monkeypatch.setattr("millstream.wal.files.SystemClock.now_ns", lambda _: real_ns() + self.off_s * 10**9)

    @contextmanager
    def at(self, off_s: int) -> Iterator[None]:
        self.off_s = off_s
        yield
        self.off_s = 0


def drawn(chance: random.Random, seen: list[int]) -> dict[str, Any]:
    seen[0] += chance.randrange(3)

    def maybe(value: Any) -> Any:
        return None if chance.random() < 0.3 else value

    return {
        "id": chance.choice((0, 0, 1)),
        "part": "",
        "title": maybe(chance.choice("abc")),
        "ratio": None,
        "views": maybe(seen[0]),
        "likes": maybe(chance.randrange(-9, 9)),
        "paid": None,
        "weight": None,
        "tags": maybe(chance.sample(("x", "y", "z"), chance.randrange(3))),
        "seen": maybe(chance.sample((1, 2, 3), chance.randrange(3))),
        "heat": maybe(chance.uniform(0, 8)),
        "happened": chance.choice(HAPPENED),
        "hidden": maybe(chance.random() < 0.5),
    }


def records_of(folder: Path, region: int) -> list[Said]:
    if not folder.exists():
        return []
    reader = StreamReader(str(folder))
    found = []
    for part in reader.read_between(Seq(0), reader.persisted_upto()):
        seqs, times = part.batch.column("__seq").to_pylist(), part.hybrid_ns.to_pylist()
        rows = part.batch.to_pylist()
        found += [Said(region, seq, at, row) for seq, at, row in zip(seqs, times, rows, strict=True)]
    return found


def play(folder: Path, clocks: Clocks, seed: int, *, steps: int) -> None:
    chance = random.Random(seed)
    homes = {number: made(folder / str(number), number, CONFIG) for number in (1, 2, 3)}
    off_s, seen = dict.fromkeys(homes, 0), {number: [0] for number in homes}

    def ship(number: int, other: int) -> None:
        if (homes[other] / "data" / "wal" / "shop").exists():
            follow(homes[number], homes[other], other)

    def logs(number: int) -> list[Said]:
        names = {other: region_log_name("shop", RegionId(other)) for other in homes} | {number: "shop"}
        return [
            one for other, name in names.items() for one in records_of(homes[number] / "data" / "wal" / name, other)
        ]

    for _ in range(steps):
        number = chance.choice((1, 2, 3))
        if chance.random() < 0.4:
            off_s[number] = chance.choice(OFF_S)
        if chance.random() < 0.5:
            ship(number, chance.choice([other for other in homes if other != number]))
        received = [one.wall_ns for one in logs(number)]
        with clocks.at(off_s[number]), millstream.open(homes[number]) as home:
            now_ns = time.time_ns() + off_s[number] * 10**9
            for _ in range(chance.randint(1, 2)):
                home.append("shop", "posts", pa.Table.from_pylist([drawn(chance, seen[number])], schema=COLUMNS))
            last = [one.wall_ns for one in logs(number) if one.region == number][-1]
            assert last > max((one for one in received if one <= now_ns + DRIFT_MAX_NS), default=0)
            assert home.merged("shop", "posts").to_pylist() == plainly_merged(logs(number)), f"seed {seed}"
    for number in homes:
        for other in homes:
            if other != number:
                ship(number, other)
        own = [one.wall_ns for one in logs(number) if one.region == number]
        assert own == sorted(own)
    at = datetime(2050, 1, 1, tzinfo=UTC)
    rows = []
    for number, path in homes.items():
        with clocks.at(off_s[number]), millstream.open(path) as home:
            rows.append((home.merged("shop", "posts").to_pylist(), home.merged("shop", "posts", at=at).to_pylist()))
    assert rows[0] == rows[1] == rows[2]
    expected = plainly_merged(logs(1)), plainly_merged(logs(1), int(at.timestamp()) * 10**9)
    assert rows[0] == expected, f"seed {seed}"


def test_regions_with_wrong_clocks_have_the_rows_of_their_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(tmp_path, Clocks(monkeypatch), 0, steps=7)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 9))
def test_regions_with_wrong_clocks_have_the_rows_of_their_logs_in_other_stories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    play(tmp_path, Clocks(monkeypatch), seed, steps=20)


def test_a_region_whose_clock_is_days_ahead_is_named_and_moves_no_clock_and_its_writes_are_still_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = Clocks(monkeypatch)
    one, two = made(tmp_path / "one", 1, CONFIG), made(tmp_path / "two", 2, CONFIG)
    row = {"id": 1, "part": "", "title": "of two", "likes": 3, "hidden": True}
    with clocks.at(3 * DAY_S), millstream.open(two) as home:
        home.append("shop", "posts", row, idempotency_key="a")
    follow(one, two, 2)

    with millstream.open(one) as home:
        assert home.append("shop", "posts", row, idempotency_key="a").duplicate
        home.append("shop", "posts", row | {"title": "of one", "hidden": False})
        (seen,) = home.merged("shop", "posts").to_pylist()
        assert (seen["title"], seen["hidden"], seen["likes"]) == ("of two", True, 6)
    (own,) = records_of(one / "data" / "wal" / "shop", 1)
    assert own.wall_ns < time.time_ns()
    found = next(each for each in examine(Home(one), lambda _: None) if each.check == "clocks of shop")
    assert (found.code, found.blocks) == ("clock_skew", "nothing")
    assert found.message.startswith("the clock of region 2 is 259,")
    # Three days later the other region's times are in the past.
    with clocks.at(3 * DAY_S), millstream.open(one) as home:
        home.append("shop", "posts", row | {"title": "of one", "hidden": False})
        (seen,) = home.merged("shop", "posts").to_pylist()
        assert (seen["title"], seen["hidden"]) == ("of one", False)
    with clocks.at(3 * DAY_S):
        assert list(clocks_ahead(Home(one), "shop", Home(one).config.streams["shop"])) == []


def test_times_before_one_that_is_too_far_ahead_are_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    one, two = made(tmp_path / "one", 1, CONFIG), made(tmp_path / "two", 2, CONFIG)
    row = {"part": "", "likes": 3}
    for off_s, key in ((40, 1), (40, 0), (3 * DAY_S, 2)):
        with clocks.at(off_s), millstream.open(two) as home:
            home.append("shop", "posts", row | {"id": key, "title": "of two"})
    follow(one, two, 2)
    with millstream.open(one) as home:
        home.append("shop", "posts", row | {"id": 1, "title": "of one"})
        titles = {row["id"]: row["title"] for row in home.merged("shop", "posts").to_pylist()}
    assert titles == {0: "of two", 1: "of one", 2: "of two"}
    near = [said.wall_ns for said in records_of(one / "data" / "wal" / "shop@2", 2)][1]
    (own,) = records_of(one / "data" / "wal" / "shop", 1)
    assert near < own.wall_ns < near + 60 * 10**9, "later than what is near, and not days ahead"
