"""Seeds of `crash_search`: a few at every run, ten thousand new ones in the soak."""

from __future__ import annotations

import os
import random

import pytest
from tests.seeds import search
from tests.wal.crash_search import Life

SEEDS = 60
SOAK_SEEDS = int(os.environ.get("MILLSTREAM_SOAK_SEEDS", "10000"))
WANTED = {"crash", "crash of recovery", "failed disk", "failed recovery", "full disk", "groups", "kill", "retentions"}


def test_lives_of_a_log_on_a_disk_that_fails():
    broken, happened = search(Life, 1, SEEDS)
    assert not broken, f"python -m tests.wal.crash_search {next(iter(broken))} 1"
    assert happened.keys() >= WANTED, "the search leaves out what it is for"


@pytest.mark.soak
def test_soak_lives_of_a_log_on_a_disk_that_fails():
    first = random.SystemRandom().randrange(1 << 40)
    print(f"\npython -m tests.wal.crash_search {first} {SOAK_SEEDS}")  # noqa: T201 - repeats what is found
    broken, happened = search(Life, first, SOAK_SEEDS)
    assert not broken, f"python -m tests.wal.crash_search {next(iter(broken))} 1"
    assert happened["seeds"] == SOAK_SEEDS
