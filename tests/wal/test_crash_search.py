"""Seeds of `crash_search`: a few in `make test`, more and new ones in `make test-all`, ten thousand new ones in the soak."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
from tests.seeds import Seeds, search
from tests.wal.crash_search import Life

SOAK_SEEDS = int(os.environ.get("MILLSTREAM_SOAK_SEEDS", "10000"))
WANTED = {"crash", "crash of recovery", "failed disk", "failed recovery", "full disk", "groups", "kill", "retentions"}


def test_lives_of_a_log_on_a_disk_that_fails(seeds: Seeds):
    happened = Counter[str]()
    for first in seeds.kept_and_new(1):
        broken, counts = search(Life, first, seeds.count(60, quick=15))
        assert not broken, f"python -m tests.wal.crash_search {next(iter(broken))} 1"
        happened += counts
    assert happened.keys() >= WANTED or seeds.is_quick, "the search leaves out what it is for"


@pytest.mark.soak
def test_soak_lives_of_a_log_on_a_disk_that_fails():
    first = random.SystemRandom().randrange(1 << 40)
    print(f"\npython -m tests.wal.crash_search {first} {SOAK_SEEDS}")  # noqa: T201 - repeats what is found
    broken, happened = search(Life, first, SOAK_SEEDS)
    assert not broken, f"python -m tests.wal.crash_search {next(iter(broken))} 1"
    assert happened["seeds"] == SOAK_SEEDS
