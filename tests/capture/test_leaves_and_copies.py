"""Leaf partitions that come and go while their table is copied, in chunks or whole."""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random

import pytest
from tests.capture.capture_stage import Stage
from tests.capture.partition_steps import Partitions
from tests.seeds import Seeds


@pytest.mark.sampled
@pytest.mark.parametrize("keyed", [True, False], ids=["by key", "without a key"])
@pytest.mark.parametrize("seed", range(10, 14))
def test_leaves_come_and_go_during_copies(stage: Stage, seeds: Seeds, seed: int, *, keyed: bool) -> None:
    rng = Random(seeds.kept_or_new(seed))
    stage.config = replace(stage.config, tables=("public.parts",), chunk_rows=rng.choice([3, 20, 1000]))
    with stage.connect() as connection:
        parts = Partitions(connection, rng, keyed)
        parts.make(rows=60)
        running = stage.start()
        for _ in range(25):
            parts.step()
            time.sleep(rng.choice([0.0, 0.02, 0.1]))  # so that the steps meet all stages of copies
        running.stop()
        stage.catch_up()
    found, wanted = stage.log.replay().get("public.parts", {}), rows_of(stage, keyed=keyed)
    assert (found if keyed else sorted(map(str, found.get(None, ())))) == wanted, dict(parts.steps)


def rows_of(stage: Stage, *, keyed: bool) -> object:
    if keyed:
        return stage.source_rows("parts", ["zone", "id"])
    return sorted(map(str, stage.source_rows("parts", ["zone", "id", "v", "big"]).values()))
