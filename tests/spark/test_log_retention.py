"""The tightest retention, and a pipeline that is killed before and after the lake's commit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.spark.hand_made import Home
from tests.spark.lake_run import DriverProcess, RunningPipeline, config_of, drain
from tests.spark.test_pipeline import two_tables, write

from millstream.config.model import LogConfig
from millstream.home.retention import sweep
from millstream.lake.commit_cuts import last_cut
from millstream.lake.layout import LakeLayout
from millstream.model.positions import Seq
from millstream.spark.driver import take_up
from millstream.spark.pipeline import PipelineProgress
from millstream.spark.pipeline_tables import PipelineTables
from millstream.spark.session import SparkOptions
from millstream.wal.backlog import log_size
from millstream.wal.segment_deletion import Sweep
from millstream.wal.writing.writer import LogOptions

BATCH_SEGMENTS_MAX = 10
"""Each write is a segment of its own, and a batch takes six or seven: those, and the one being written."""
TIGHTEST = LogConfig(retention_age="0s", retention_bytes="0B")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path / "shop", LogOptions(segment_bytes=6_000))
    yield home
    home.close()


def retain(home: Home) -> Sweep:
    return sweep(home.catalog, "shop", home.stream, home.wal, TIGHTEST)


@pytest.mark.timeout(1800)
@pytest.mark.siege
def test_the_log_keeps_what_the_lake_lacks_and_its_last_batch_wherever_the_pipeline_dies(
    home: Home, spark_options: SparkOptions, tmp_path: Path
) -> None:
    models = two_tables(home)
    for _ in range(40):
        write(home, models, 1)
    last = Seq(0)
    for place, point in enumerate(
        ("pipeline.after_lake_commit", "pipeline.before_batch:2", "pipeline.after_catalog:2")
    ):
        with DriverProcess(home.path, tmp_path / str(place), "drain", MILLSTREAM_FAILPOINTS=point) as driver:
            driver.is_killed()
        cut = last_cut(LakeLayout(str(home.path / "lake"), "shop", home.stream))
        assert cut is not None
        assert cut.n > last, "it went on"
        last = cut.n
        swept = retain(home)
        assert swept.kept.needed_by == ("lake",)
        assert home.log.first_seq() <= last + 1
    config = config_of(home.path, home.stream, spark_options, batch_bytes_max=20_000)
    # It comes back, registers what it needs, and gets no further.
    take_up(config, home.log, PipelineTables(config, home.catalog))
    retain(home)
    assert home.log.first_seq() <= last + 1

    drain(config, home.catalog)
    for model in models:
        model.check(home.path)
    before, _ = log_size(str(home.wal))
    assert retain(home).dropped
    # Everything except the last batch: a power loss may take back the lake's newest commits.
    after, _ = log_size(str(home.wal))
    assert home.log.first_seq() > last + 1
    assert after <= BATCH_SEGMENTS_MAX < before


@pytest.mark.timeout(1800)
@pytest.mark.siege
def test_a_lake_that_was_moved_away_finds_the_log_that_it_is_built_from_whatever_had_landed_before(
    home: Home, spark_options: SparkOptions
) -> None:
    """Records in the old lake didn't hold the log: retention dropped them while the new lake was being built."""
    models = two_tables(home)
    for _ in range(24):
        write(home, models, 1)
    config = config_of(home.path, home.stream, spark_options, batch_bytes_max=20_000)
    drain(config, home.catalog)
    (home.path / "lake").rename(home.path / "away")

    def retained(_progress: PipelineProgress) -> None:
        retain(home)

    with RunningPipeline(config, home.catalog, retained) as running:
        running.finish(running.drain)
    for model in models:
        model.check(home.path)
    assert home.log.first_seq() > 1, "retention was at work"
