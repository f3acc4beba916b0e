"""Leaf partitions that come, leave and return: each view of the lake has the source's rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from random import Random

import pytest
from tests.app.homes import wait_for
from tests.capture.partition_steps import TREE, Partitions
from tests.seeds import Seeds
from tests.writers.partition_life import Life

from millstream.testing.pytest_plugin import Database


def test_partitions_come_and_go_in_a_backlog_and_live(postgres: Database, tmp_path: Path, seeds: Seeds) -> None:
    with closing(Life.begun(postgres, tmp_path / "shop", Random(seeds.kept_or_new(1)))) as life:
        life.backlog(8)
        life.live(8)


@pytest.mark.long
@pytest.mark.parametrize("keyed", [True, False], ids=["by key", "without a key"])
@pytest.mark.parametrize("tables", ["public.parts", "public.*"])
@pytest.mark.parametrize("seed", range(2, 5))
def test_partitions_come_and_go_for_long(
    postgres: Database, tmp_path: Path, seeds: Seeds, seed: int, tables: str, *, keyed: bool
) -> None:
    rng = Random(seeds.kept_or_new(seed))
    with closing(Life.begun(postgres, tmp_path / "shop", rng, keyed=keyed, tables=tables)) as life:
        for _ in range(4):
            life.backlog(8)
            life.live(10)


Counts = tuple[int, int, int]


def attached(parts: Partitions) -> list[str]:
    name, made = parts.new_loose(4, count=5)
    return [*made, parts.attach(4, name)]


def filled(parts: Partitions) -> list[str]:
    truncate = f"TRUNCATE {parts.attached[1]}"
    return [parts.one_transaction(parts.rows_for(1, 2), truncate, parts.rows_for(1, 3))]


def created_again(parts: Partitions) -> list[str]:
    name = parts.attached[1]
    return [parts.one_transaction(f"DROP TABLE {name}", *parts.creation(1, name), parts.rows_for(1, 3))]


def moved(parts: Partitions) -> list[str]:
    moves = [
        f"UPDATE parts SET zone = {to}, v = v || '~' WHERE zone = {zone} AND id % 2 = 0"
        for zone, to in ((1, 2), (2, 0))
    ]
    back = "UPDATE parts SET zone = 1 WHERE zone = 0 AND id % 4 = 0"
    return [parts.one_transaction(*moves, back), parts.detach(1)]


KINDS: dict[str, tuple[Callable[[Partitions], list[str]], Counts]] = {
    "attached": (attached, (5, 0, 0)),
    "detached": (lambda parts: [parts.detach(1)], (0, 0, 1)),
    "detached concurrently": (lambda parts: [f"{parts.detach(1)} CONCURRENTLY"], (0, 0, 1)),
    "dropped": (lambda parts: [f"DROP TABLE {parts.attached.pop(1)}"], (0, 0, 1)),
    "truncated": (lambda parts: [f"TRUNCATE {parts.attached[1]}"], (0, 0, 1)),
    "truncated and filled": (filled, (0, 0, 1)),
    "two truncated": (lambda parts: [f"TRUNCATE {parts.attached[1]}, {parts.attached[2]}"], (0, 0, 2)),
    "a tree truncated": (lambda parts: [f"TRUNCATE {parts.attached[TREE]}"], (0, 0, 2)),
    "a tree detached": (lambda parts: [parts.detach(TREE)], (0, 0, 2)),
    "all truncated": (lambda _: ["TRUNCATE parts"], (0, 0, 0)),
    "dropped and created again": (created_again, (0, 0, 1)),
    "rows moved, then detached": (moved, (0, 0, 1)),
    "written anew": (lambda parts: [f"VACUUM FULL {parts.attached[1]}"], (0, 0, 0)),
}
"""Changes of partitions, and by each how many rows are copied, how many copies void all rows, and how many leaves leave."""


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("live", [False, True], ids=["in a backlog", "live"])
def test_a_leaf_that_leaves_is_one_record_and_no_copy(postgres: Database, tmp_path: Path, *, live: bool) -> None:
    with closing(Life.begun(postgres, tmp_path / "shop", Random(1))) as life:
        parts = life.parts
        for kind, (change, more) in KINDS.items():
            if 4 in parts.attached:
                parts.run(parts.detach(4))
            parts.run(*(s for zone in (1, TREE) if zone not in parts.attached for s in parts.creation(zone)))
            parts.run(*(parts.rows_for(zone, 4) for zone in (1, 2, TREE)))
            life.home.catch_up()
            expected = tuple(had + new for had, new in zip(life.counts(), more, strict=True))
            with life.home.running(lands=False) if live else nullcontext():
                parts.run(*change(parts), parts.rows_for(0, 1))
                if live:
                    wait_for(partial(has_counts, life, expected), what=life.counts)
            parts.steps[kind] += 1
            life.home.catch_up()
            assert life.counts() == expected, kind
            life.check()


def has_counts(life: Life, expected: Counts) -> bool:
    return life.counts() == expected
