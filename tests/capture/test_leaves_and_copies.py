"""Leaf partitions that come and go while their table is copied, in chunks or whole."""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random

import pytest
from tests.capture.beside import wait_until
from tests.capture.capture_stage import Stage
from tests.capture.partition_steps import Partitions
from tests.seeds import Seeds

from millstream.catalog import TableState


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
    found, wanted = stage.log.replay(brought=parts.brought).get("public.parts", {}), rows_of(stage, keyed=keyed)
    assert (found if keyed else sorted(map(str, found.get(None, ())))) == wanted, dict(parts.steps)


@pytest.mark.since_postgres(15)  # 14 sends no change of a leaf before the stream is started again
def test_changes_of_a_leaf_that_brings_rows_follow_the_beginning_of_its_copy(stage: Stage) -> None:
    """Its first update, which leaves a long value out, entered the log before: the lake's table was quarantined for seconds."""
    stage.config = replace(stage.config, tables=("public.parts",), look_s=600.0)
    stage.sql(
        "CREATE TABLE parts (id int PRIMARY KEY, v int, big text) PARTITION BY RANGE (id)",
        "CREATE TABLE low PARTITION OF parts FOR VALUES FROM (0) TO (10); INSERT INTO parts VALUES (1, 1, 'x')",
    )
    running = stage.start()
    wait_until(lambda: stage.state("public.parts") is TableState.STREAMING, "it is copied")
    stage.log.gate.clear()
    stage.sql(
        "BEGIN",
        "CREATE TABLE high (id int PRIMARY KEY, v int, big text); ALTER TABLE high ALTER big SET STORAGE EXTERNAL",
        "INSERT INTO high VALUES (11, 1, repeat('long', 5000))",
        "ALTER TABLE parts ATTACH PARTITION high FOR VALUES FROM (10) TO (20); UPDATE parts SET v = 2 WHERE id = 11",
        "COMMIT",
    )
    wait_until(lambda: stage.log.held() > 0, "the update is about to enter the log")
    assert stage.state("public.parts") is TableState.COPYING
    stage.log.gate.set()
    wait_until(lambda: stage.log.replay()["public.parts"] == stage.source_rows("parts", ["id"]), "all is there")
    running.stop()


def rows_of(stage: Stage, *, keyed: bool) -> object:
    if keyed:
        return stage.source_rows("parts", ["zone", "id"])
    return sorted(map(str, stage.source_rows("parts", ["zone", "id", "v", "big"]).values()))
