"""Worlds of `simulation`: three hundred in `make test`, five thousand new ones in `make test-all`, a hundred thousand in the soak."""

from __future__ import annotations

import os
import random

import pytest
from tests.mutations import Mutation, check_found
from tests.replication.mutations import MUTATIONS, SCRIPT_SEED, OldCursors, OldTail
from tests.replication.simulation import World
from tests.seeds import Seeds, search

PARTS = 5
SOAK_SEEDS = int(os.environ.get("MILLSTREAM_SOAK_SEEDS", "100000"))
WANTED = {
    "catching up", "clock jumps", "cut off", "damaged", "doubled", "kill", "left alone", "lost", "missing", "power cut",
    "promotion failed by not_caught_up", "promotion failed by promotion_lost", "promotions", "promotions with losses", "reordered",
    "set aside", "wiped",
}  # fmt: skip


@pytest.mark.parametrize("part", range(PARTS))
def test_worlds_in_which_everything_fails(part: int, seeds: Seeds):
    count = seeds.count(5_000, quick=300) // PARTS
    broken, happened = search(World, seeds.kept_or_new(1 + part * count), count)
    assert not broken, f"python -m tests.replication.simulation {next(iter(broken))} 1"
    assert happened.keys() >= WANTED or seeds.is_quick, "the search leaves out what it is for"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_defect_is_found(mutation: type[Mutation]):
    check_found(mutation)


def test_the_longest_log_isnt_the_best_one():
    OldTail(SCRIPT_SEED).play()


def test_a_follower_gets_again_what_it_set_aside_after_it_was_acknowledged():
    World(OldCursors.found_by).play()


@pytest.mark.soak
def test_soak_worlds_in_which_everything_fails():
    first = random.SystemRandom().randrange(1 << 40)
    print(f"\npython -m tests.replication.simulation {first} {SOAK_SEEDS}")  # noqa: T201 - repeats what is found
    broken, happened = search(World, first, SOAK_SEEDS)
    assert not broken, f"python -m tests.replication.simulation {next(iter(broken))} 1"
    assert happened["seeds"] == SOAK_SEEDS
