"""A pipeline with a backlog of many small segments reports its progress, and lands every record once, killed or not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from tests.spark.hand_made import Home, insert
from tests.spark.lake_run import DriverProcess, RunningPipeline, config_of, drain, eventually, rows_in
from tests.spark.test_log_retention import retain
from tests.spark.test_pipeline import Model, two_tables, write

from millstream.errors import DiskFull
from millstream.lake.commit_cuts import last_cut
from millstream.lake.layout import LakeLayout
from millstream.model.positions import Seq
from millstream.spark.pipeline import PipelineProgress
from millstream.spark.session import SparkOptions
from millstream.wal.backlog import Backlogs, log_size
from millstream.wal.writing.writer import LogOptions

pytestmark = pytest.mark.usefixtures("spark")
SMALL = LogOptions(segment_bytes=6_000)
"""Each group that `write` appends is a segment of its own; a batch of 20 kB takes four or five."""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path / "home", SMALL)
    yield home
    home.close()


def backlog_of(home: Home, segments: int) -> list[Model]:
    models = two_tables(home)
    for _ in range(segments):
        write(home, models, 1)
    return models


def reached(home: Home) -> Seq:
    cut = last_cut(LakeLayout(str(home.path / "lake"), "shop", home.stream))
    return Seq(0) if cut is None else cut.n


@pytest.mark.timeout(1800)
@pytest.mark.siege
def test_killed_in_its_midst_it_goes_on_from_the_last_cut_and_tells_how_far_it_is(
    home: Home, spark_options: SparkOptions, tmp_path: Path
) -> None:
    models = backlog_of(home, 44)
    end = home.log.persisted_upto()
    with DriverProcess(home.path, tmp_path / "work", "follow") as driver:
        driver.until(lambda cut: cut >= end // 4, "a quarter has landed", lambda: write(home, models, 1))
        driver.process.kill()
        driver.is_killed()
    start, target = reached(home), home.log.persisted_upto()
    assert end // 4 <= start < end, "in its midst"

    whole = Backlogs(str(home.wal)).between(start, target)
    seen: list[PipelineProgress] = []

    def note(progress: PipelineProgress) -> None:
        if len(seen) < 10 and progress.replayed is None:  # a drain ends where it began
            write(home, models, 1)
        seen.append(progress)

    config = config_of(home.path, home.stream, spark_options, batch_bytes_max=20_000)
    with RunningPipeline(config, home.catalog, note) as running:
        eventually(lambda: bool(seen) and seen[-1].replayed is not None, "the replay comes to its end", 240)
        outcome = running.finish(running.drain)

    told = [progress.replay for progress in seen if progress.replay is not None]
    assert told[0].records.done == 0, "it is told as it begins"
    assert told[0].eta_s is None
    for replay in told:
        totals = (replay.segments.total, replay.records.total, replay.size_bytes.total)
        assert totals == (whole.segments, whole.records, whole.size_bytes), "what came meanwhile isn't in it"
    for amount in ("segments", "records", "size_bytes"):
        done = [getattr(replay, amount).done for replay in told]
        assert done == sorted(done)
        assert done[-1] <= getattr(told[0], amount).total
    assert len({replay.records.done for replay in told}) > 3, "batch by batch"
    assert any(replay.eta_s for replay in told)
    assert seen[-1].replay is None
    finished = seen[-1].replayed
    assert finished is not None
    assert finished.records.done == finished.records.total == whole.records
    assert sum(progress.replayed is None for progress in seen) >= len(told)

    assert outcome.n == home.log.persisted_upto() > target
    for model in models:
        model.check(home.path)
    # Numbers go on, and a run without a backlog reports no replay.
    assert home.commit(*models[0].some(3)) == outcome.n + 3
    after: list[PipelineProgress] = []
    drain(config, home.catalog, after)
    assert all(progress.replay is progress.replayed is None for progress in after)
    models[0].check(home.path)


@pytest.mark.timeout(1800)
@pytest.mark.siege
def test_tables_that_are_ahead_of_the_cut_land_nothing_twice(
    home: Home, spark_options: SparkOptions, tmp_path: Path
) -> None:
    """Killed after every history's commit and before the cut; it returns with other bounds."""
    models = backlog_of(home, 24)
    with DriverProcess(
        home.path, tmp_path / "work", "drain", MILLSTREAM_FAILPOINTS="pipeline.before_lake_commit:3"
    ) as driver:
        driver.is_killed()
    cut = reached(home)
    assert 0 < cut < home.log.persisted_upto()
    for model in models:
        numbers = [row["__seq"] for row in rows_in(home.path, "history", f"public.{model.schema.name}")]
        assert max(numbers) > cut, "it is ahead"
    home.close()
    with contextlib.closing(Home(home.path, SMALL)) as back:
        config = config_of(back.path, back.stream, spark_options, batch_bytes_max=7_000)
        assert drain(config, back.catalog).n == back.log.persisted_upto()
        for model in models:
            model.check(back.path)


@pytest.mark.timeout(1800)
@pytest.mark.siege
def test_a_disk_that_takes_no_appends_stops_neither_replay_nor_retention(
    home: Home, spark_options: SparkOptions
) -> None:
    models = backlog_of(home, 40)
    refused_rows = insert(home.table("public.refused", id=pa.int64()), id=1)
    before, _ = log_size(str(home.wal))
    end = home.log.persisted_upto()
    home.close()
    refused = 0
    full = Home(home.path, LogOptions(segment_bytes=6_000, disk_used_max=0.000_001))
    try:

        def note(_progress: PipelineProgress) -> None:
            nonlocal refused
            try:
                full.commit(refused_rows)
            except DiskFull:
                refused += 1
            retain(full)

        config = config_of(full.path, full.stream, spark_options, batch_bytes_max=20_000)
        with RunningPipeline(config, full.catalog, note) as running:
            outcome = running.finish(running.drain)
        assert refused > 3, "all along"
        assert outcome.n >= end
        for model in models:
            model.check(full.path)
        assert log_size(str(full.wal))[0] < before / 2, "what has landed goes"
    finally:
        full.close()
    # With room again, appends go on after all existing numbers.
    roomy = Home(home.path, SMALL)
    try:
        assert roomy.commit(*models[0].some(3)) > end
        drain(config, roomy.catalog)
        for model in models:
            model.check(roomy.path)
    finally:
        roomy.close()
