"""The loop of batches under kills at each of its steps, and next to drivers that were thought dead."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from tests.spark.hand_made import Home
from tests.spark.lake_run import DriverProcess, config_of, drain, eventually, follow_until_killed
from tests.spark.test_versions import VIEWS, Story, story

from millstream.lake.commit_cuts import last_cut
from millstream.lake.layout import LakeLayout
from millstream.model.positions import Seq
from millstream.spark.session import SparkOptions

pytestmark = [pytest.mark.timeout(3600), pytest.mark.siege]
__all__ = ["story"]

DRIVER_POINTS = {
    "pipeline.before_batch": "its stretches are known, no job runs",
    "pipeline.files_written": "all files written, no commit",
    "lake.before_history_commit": "a table's columns are ready",
    "lake.after_history_commit": "a table committed, not the cut",
    "pipeline.before_lake_commit": "all tables committed, not the cut",
    "pipeline.after_lake_commit": "the cut committed, the catalog not told",
    "pipeline.after_catalog": "the batch is over",
}
WORKER_POINTS = {
    "pipeline.part_taken": "a task has its stretches",
    "lake.records_written": "a table's files written",
    "fold.start": "a fold's task begins",
    "lake.before_fold_commit": "in a fold",
    "lake.after_fold_commit": "behind a fold",
    "lake.before_scd2_commit": "in a fold of versions",
    "lake.before_compaction_commit": "in maintenance",
}
TIMES = 3


@pytest.mark.parametrize("point", DRIVER_POINTS)
def test_every_view_is_exact_whatever_is_killed_in_the_loop(
    home: Home, story: Story, spark_options: SparkOptions, tmp_path: Path, point: str
) -> None:
    """Each of these kills meets workers that die at each of their points."""
    for round_ in range(TIMES):
        folder = tmp_path / f"round-{round_}"
        folder.mkdir()
        story.go_on(10)
        follow_until_killed(home.path, folder, *VIEWS, workers=[*WORKER_POINTS], at=point, more=lambda: story.go_on(4))
    story.go_on(10)
    drain(config_of(home.path, home.stream, spark_options, views=VIEWS, batch_bytes_max=20_000), home.catalog)
    story.check_all()


@pytest.mark.parametrize("point", [point for point in DRIVER_POINTS if point != "pipeline.after_catalog"])
def test_a_driver_that_wakes_up_behind_another_one_lands_nothing_twice(
    home: Home, story: Story, spark_options: SparkOptions, tmp_path: Path, point: str
) -> None:
    for _ in range(40):
        story.go_on(6)
    config = config_of(home.path, home.stream, spark_options, views=VIEWS)
    halt = {"MILLSTREAM_FAILPOINTS": f"{point}:2:stop"}
    with DriverProcess(home.path, tmp_path / "zombie", "drain", *VIEWS, **halt) as zombie:
        process = psutil.Process(zombie.process.pid)
        eventually(lambda: process.status() == psutil.STATUS_STOPPED, f"it halts at {point}")
        story.go_on(20)
        drain(config, home.catalog)
        story.check_all()
        before = reached(home)
        os.kill(zombie.process.pid, signal.SIGCONT)
        # It may end by an error, because it lost a race: its supervisor would start another.
        assert zombie.process.wait(800) in {0, 1}, zombie.errors[-4000:]
    assert reached(home) >= before, "the cut doesn't go back"
    story.go_on(5)
    drain(config, home.catalog)
    story.check_all()


def reached(home: Home) -> Seq:
    cut = last_cut(LakeLayout(str(home.path / "lake"), "shop", home.stream))
    assert cut is not None
    return cut.n
