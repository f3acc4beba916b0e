"""Seeds of `files_simulation`: a few in `make test`, more and new ones in `make test-all`, thousands of new ones in the soak."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
from tests.replication.files_simulation import MachinesLife
from tests.seeds import Seeds, search

SOAK_SEEDS = int(os.environ.get("MILLSTREAM_SOAK_SEEDS", "10000"))
WANTED = {
    "acknowledgements", "behind retention", "follower crashed", "leader crashed", "links cut", "promotions", "refused: replica_failed",
    "shipments", "shown when acknowledged",
}  # fmt: skip


@pytest.mark.long
def test_machines_over_real_logs_whose_disks_fail(seeds: Seeds):
    happened = Counter[str]()
    for first in seeds.kept_and_new(11):
        broken, counts = search(MachinesLife, first, seeds.count(10, quick=3))
        assert not broken, f"python -m tests.replication.files_simulation {next(iter(broken))} 1"
        happened += counts
    assert happened.keys() >= WANTED or seeds.is_quick, "the search leaves out what it is for"


@pytest.mark.soak
def test_soak_machines_over_real_logs_whose_disks_fail():
    first = random.SystemRandom().randrange(1 << 40)
    print(f"\npython -m tests.replication.files_simulation {first} {SOAK_SEEDS}")  # noqa: T201 - repeats what is found
    broken, happened = search(MachinesLife, first, SOAK_SEEDS)
    assert not broken, f"python -m tests.replication.files_simulation {next(iter(broken))} 1"
    assert happened["seeds"] == SOAK_SEEDS
