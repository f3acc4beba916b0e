"""Worlds of `region_simulation`: sixty in `make test`, three hundred new ones in `make test-all`, ten thousand new ones in the soak."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
from tests.crdt.region_mutations import MUTATIONS
from tests.crdt.region_simulation import World
from tests.mutations import Mutation, check_found
from tests.seeds import Seeds, search

PARTS = 3
SOAK_SEEDS = int(os.environ.get("MILLSTREAM_SOAK_SEEDS", "100000")) // 10
KEPT = (6, 8, 25, 38)
WANTED = {
    "asked", "clock jumps", "clocks that weren't heard", "copies cut", "cut while it was read", "doubled", "dropped", "fenced", "killed before it was kept",
    "known already", "lines cut", "lost", "mirrors killed", "promotions without loss", "refused", "restarts", "tails lost",
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("part", range(PARTS))
def test_regions_come_to_the_same_rows_whatever_fails(part: int, seeds: Seeds) -> None:
    count = seeds.count(300, quick=60) // PARTS
    broken, _ = search(World, seeds.kept_or_new(1 + part * count), count)
    assert not broken, f"python -m tests.crdt.region_simulation {next(iter(broken))} 1"


def test_four_kept_worlds_meet_everything_that_the_search_is_for() -> None:
    """New worlds may leave one out: only every fortieth refuses a log."""
    happened = Counter[str]()
    for seed in KEPT:
        broken, counts = search(World, seed, 1)
        assert not broken
        happened += counts
    assert happened.keys() >= WANTED


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_defect_is_found(mutation: type[Mutation]) -> None:
    check_found(mutation)


@pytest.mark.soak
def test_soak_regions_come_to_the_same_rows_whatever_fails() -> None:
    first = random.SystemRandom().randrange(1 << 40)
    print(f"\npython -m tests.crdt.region_simulation {first} {SOAK_SEEDS}")  # noqa: T201 - repeats what is found
    broken, happened = search(World, first, SOAK_SEEDS)
    assert not broken, f"python -m tests.crdt.region_simulation {next(iter(broken))} 1"
    assert happened["seeds"] == SOAK_SEEDS
