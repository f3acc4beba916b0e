"""The tightest retention, and a pipeline that is killed between the lake's commit and Spark's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from tests.spark.hand_made import Home
from tests.spark.lake_run import DriverProcess, RunningPipeline, config_of, drain
from tests.spark.test_pipeline import two_tables, write

from millstream.config.model import LogConfig
from millstream.home.retention import sweep
from millstream.lake.commit_cuts import last_cut
from millstream.lake.layout import LakeLayout
from millstream.model.ids import StreamId
from millstream.model.positions import Seq, StreamToken
from millstream.spark.checkpoint import goes_on_from, prepare_checkpoint
from millstream.spark.driver import take_up
from millstream.spark.pipeline import PipelineProgress
from millstream.spark.pipeline_tables import PipelineTables
from millstream.spark.session import SparkOptions
from millstream.wal.lag import log_size
from millstream.wal.segment_deletion import Sweep
from millstream.wal.writing.writer import LogOptions

BATCH_SEGMENTS_MAX = 7
"""Each write is a segment of its own, and a batch takes four or five: those, and the one being written."""
TIGHTEST = LogConfig(retention_age="0s", retention_bytes="0B")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path / "shop", LogOptions(segment_bytes=6_000))
    yield home
    home.close()


def retain(home: Home) -> Sweep:
    return sweep(home.catalog, "shop", home.stream, home.wal, TIGHTEST)


def test_notes_say_where_the_log_is_asked_again_and_go_when_it_no_longer_reaches(tmp_path: Path) -> None:
    stream = StreamId(uuid4())
    notes = tmp_path / "notes"
    assert goes_on_from(notes, stream) is None
    for kind in ("offsets", "commits"):
        (notes / kind).mkdir(parents=True)

    def plan(number: int, upto: int) -> None:
        offset = {"stream": str(stream), "token": str(StreamToken.scalar(stream, Seq(upto)))}
        (notes / "offsets" / str(number)).write_text(f"v1\n{{}}\n{json.dumps(offset)}")

    plan(0, 50)
    assert goes_on_from(notes, stream) == 0, "the first batch may be asked for from the start"
    (notes / "commits" / "0").write_text("v1\n{}")
    plan(1, 100)
    assert goes_on_from(notes, stream) == 50
    assert not prepare_checkpoint(notes, stream, Seq(100), Seq(51))
    assert prepare_checkpoint(notes, stream, Seq(100), Seq(52)), "51 is gone, and the lake has it"
    assert goes_on_from(notes, stream) is None


@pytest.mark.timeout(1800)
@pytest.mark.siege
def test_a_batch_that_the_lake_has_and_spark_has_not_noted_stays_in_the_log_for_its_replay(
    home: Home, spark_options: SparkOptions, tmp_path: Path
) -> None:
    """Kill it after a batch's commit in the lake, before that batch's replay, then after a later batch's commit."""
    models = two_tables(home)
    for _ in range(24):
        write(home, models, 1)
    noted = killed_ahead_of_the_notes(home, tmp_path / "first", "pipeline.after_lake_commit")
    # It comes back, registers what it needs, and is killed again before it has replayed the batch.
    killed(home, tmp_path / "second", "pipeline.before_batch")
    replay_is_kept(home, noted)

    again = killed_ahead_of_the_notes(home, tmp_path / "third", "pipeline.before_spark_commit:3")
    assert again > noted, "it went on behind its replay"
    # It comes back, registers what it needs, and gets no further.
    config = config_of(home.path, home.stream, spark_options, batch_bytes_max=20_000)
    take_up(config, home.log, PipelineTables(config, home.catalog))
    replay_is_kept(home, again)

    drain(config, home.catalog)
    for model in models:
        model.check(home.path)
    before, _ = log_size(str(home.wal))
    assert retain(home).dropped
    # Everything except the last batch, which Spark may ask for again.
    after, _ = log_size(str(home.wal))
    assert home.log.first_seq() > again + 1
    assert after <= BATCH_SEGMENTS_MAX < before


def killed(home: Home, work: Path, point: str) -> None:
    with DriverProcess(home.path, work, "drain", MILLSTREAM_FAILPOINTS=point) as driver:
        driver.is_killed()


def killed_ahead_of_the_notes(home: Home, work: Path, point: str) -> Seq:
    """Kill a driver at a point after the lake's commit, run retention; return the end of Spark's notes."""
    killed(home, work, point)
    cut = last_cut(LakeLayout(str(home.path / "lake"), "shop", home.stream))
    noted = goes_on_from(home.path / "data" / "spark" / "lake", home.stream)
    assert cut is not None
    assert noted is not None
    assert noted < cut.n, "the lake is ahead of Spark's notes"
    retain(home)
    return noted


def replay_is_kept(home: Home, noted: Seq) -> None:
    swept = retain(home)
    assert swept.kept.needed_by == ("lake",)
    assert home.log.first_seq() <= noted + 1


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
