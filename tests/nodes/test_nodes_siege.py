"""Plays of `nodes_siege`: one for each level in `make test-all`, new ones for as long as the soak runs."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from tests.nodes.nodes_siege import Intensity, Siege
from tests.seeds import Seeds

pytestmark = pytest.mark.siege

LEVELS = "local", "durable(1)", "object"
SOAK_MINUTES = float(os.environ.get("MILLSTREAM_SOAK_MINUTES", "60"))


@pytest.mark.parametrize("level", LEVELS)
def test_what_was_acknowledged_is_with_the_new_leader_once_whatever_dies_or_is_cut_off(
    tmp_path: Path, level: str, seeds: Seeds
) -> None:
    siege = Siege(seeds.kept_or_new(7), level, tmp_path, intensity=Intensity(promotions=1, faults=3, long_s=1.0))
    siege.play()
    assert siege.counts["promotions"] == 1
    assert siege.counts["acknowledged"] > 20


@pytest.mark.soak
def test_soak_of_nodes_under_siege(tmp_path: Path) -> None:
    """Play one seed after the other; MILLSTREAM_SOAK_SEED and MILLSTREAM_SOAK_LEVEL repeat one."""
    wanted, wanted_level = os.environ.get("MILLSTREAM_SOAK_SEED"), os.environ.get("MILLSTREAM_SOAK_LEVEL")
    until_s = time.monotonic() + 60 * SOAK_MINUTES
    plays = 0
    while not plays or (wanted is None and time.monotonic() < until_s):
        seed = int(wanted) if wanted else random.SystemRandom().randrange(10**9)
        level = wanted_level or LEVELS[plays % len(LEVELS)]
        print(f"MILLSTREAM_SOAK_SEED={seed} MILLSTREAM_SOAK_LEVEL='{level}' repeats it", flush=True)  # noqa: T201 - seeds are told
        folder = tmp_path / str(plays)
        folder.mkdir()
        siege = Siege(
            seed, level, folder, intensity=Intensity(promotions=4, faults=6, long_s=4.0, kills_promotions=0.3)
        )
        siege.play()
        print(dict(siege.counts), flush=True)  # noqa: T201 - counts are told
        plays += 1
