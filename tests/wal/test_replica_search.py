"""Seeds of `replica_search`: a few in `make test`, more and new ones in `make test-all`, thousands of new ones in the soak."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
from tests.seeds import Seeds, search
from tests.wal.replica_search import ReplicaLife

SOAK_SEEDS = int(os.environ.get("MILLSTREAM_SOAK_SEEDS", "10000"))
WANTED = {
    "shipments", "cut", "doubled", "lost", "gaps", "damaged: shipment_unreadable", "follower crashed", "follower failed",
    "follower crashed in recovery", "follower's disk full", "behind retention", "leader crashed in a group",
}  # fmt: skip


def test_lives_of_followers_whose_disks_fail_and_whose_shipments_are_lost_doubled_and_damaged(seeds: Seeds):
    happened = Counter[str]()
    for first in seeds.kept_and_new(1):
        broken, counts = search(ReplicaLife, first, seeds.count(12, quick=4))
        assert not broken, f"python -m tests.wal.replica_search {next(iter(broken))} 1"
        happened += counts
    assert happened.keys() >= WANTED or seeds.is_quick, "the search leaves out what it is for"


@pytest.mark.soak
def test_soak_lives_of_followers():
    first = random.SystemRandom().randrange(1 << 40)
    print(f"\npython -m tests.wal.replica_search {first} {SOAK_SEEDS}")  # noqa: T201 - repeats what is found
    broken, happened = search(ReplicaLife, first, SOAK_SEEDS)
    assert not broken, f"python -m tests.wal.replica_search {next(iter(broken))} 1"
    assert happened["seeds"] == SOAK_SEEDS
