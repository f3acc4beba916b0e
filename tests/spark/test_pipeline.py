"""A pipeline lands the log in Delta exactly once: across restarts, other bounds, lost notes, failures and kills."""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from tests.spark.hand_made import Change, Home, delete, insert, update
from tests.spark.lake_run import DriverProcess, RunningPipeline, config_of, drain, follow_until_killed, rows_in

from millstream import process_metrics
from millstream.catalog import TableState
from millstream.errors import LakeConflict
from millstream.lake.commit_cuts import last_cut
from millstream.lake.folded.current_table import FoldSizes
from millstream.model.records import Op
from millstream.model.schema import TableSchema
from millstream.spark.driver import run_pipeline
from millstream.spark.pipeline import PipelineProgress
from millstream.spark.session import SparkOptions, without_stack

pytestmark = pytest.mark.usefixtures("spark")

ITEMS = {"id": pa.int64(), "size": pa.int64(), "note": pa.string()}


class Model:
    """A table's expected rows, and the changes that lead to them."""

    def __init__(self, schema: TableSchema, seed: int) -> None:
        self.schema = schema
        self.rows: dict[int, dict[str, Any]] = {}
        self.records = 0
        self._random = random.Random(seed)

    def some(self, count: int) -> list[Change]:
        """Return so many random changes."""
        changes = []
        for _ in range(count):
            key = self._random.randrange(200)
            draw = self._random.random()
            row = {"id": key, "size": self._random.randrange(1000), "note": f"n{self._random.randrange(10)}"}
            if draw < 0.01:
                self.rows.clear()
                changes.append(Change(self.schema, Op.TRUNCATE))
            elif key not in self.rows:
                self.rows[key] = row
                changes.append(insert(self.schema, **row))
            elif draw < 0.2:
                del self.rows[key]
                changes.append(delete(self.schema, id=key))
            elif draw < 0.5:
                self.rows[key] = row | {"note": self.rows[key]["note"]}
                changes.append(Change(self.schema, Op.UPDATE, {"id": key, "size": row["size"]}, unchanged=["note"]))
            else:
                self.rows[key] = row
                changes.append(update(self.schema, **row))
        self.records += count
        return changes

    def check(self, home: Path) -> None:
        """Check that `current` equals the model, and that history holds every record once."""
        name = f"{self.schema.namespace}.{self.schema.name}"
        expected = [self.rows[key] for key in sorted(self.rows)]
        assert sorted(rows_in(home, "current", name), key=lambda row: row["id"]) == expected, home
        numbers = [row["__seq"] for row in rows_in(home, "history", name)]
        assert len(numbers) == len(set(numbers)) == self.records, home


def two_tables(home: Home) -> list[Model]:
    return [Model(home.table(f"public.{name}", **ITEMS), seed) for seed, name in enumerate(["items", "parts"])]


def write(home: Home, models: list[Model], groups: int = 5) -> None:
    for number in range(groups):
        home.commits([[change for model in models for change in model.some(number * 3 + 1)] for _ in range(4)])


def test_every_table_lands_and_ends_folded_at_one_cut(home: Home, spark_options: SparkOptions) -> None:
    models = two_tables(home)
    write(home, models)
    config = config_of(home.path, home.stream, spark_options)
    seen: list[PipelineProgress] = []
    outcome = drain(config, home.catalog, seen)

    assert outcome.caught_up
    assert outcome.quarantined == {}
    assert outcome.n == home.log.persisted_upto()
    assert outcome.rows == sum(model.records for model in models) == seen[-1].rows
    for model in models:
        model.check(home.path)
    cut = last_cut(config.layout)
    assert cut is not None
    assert {name: table.current_n for name, table in cut.tables.items()} == {
        "public.items": outcome.n,
        "public.parts": outcome.n,
    }
    assert home.catalog.landed(home.stream, "lake") == outcome.n
    assert 0 < home.catalog.needed_from(home.stream)["lake"] <= outcome.n
    label = str(home.stream)
    assert process_metrics.LANDED_ROWS.of(label, "public.items").value == models[0].records
    assert sum(process_metrics.LAKE_BATCH_SECONDS.of(label).counts) >= 1
    before = process_metrics.LANDED_ROWS.of(label, "public.items").value
    drain(config, home.catalog)
    assert process_metrics.LANDED_ROWS.of(label, "public.items").value == before, "nothing new landed"


@pytest.mark.long
def test_large_tables_are_built_and_folded_in_parts_with_one_commit_each(
    home: Home, spark_options: SparkOptions
) -> None:
    models = two_tables(home)
    write(home, models, groups=8)
    tiny = FoldSizes(leaf_bytes=300, small_bytes=0, part_bytes=500, build_rows_min=0, build_bytes=40_000)
    config = config_of(home.path, home.stream, spark_options, fold_sizes=tiny)
    for _ in range(3):
        drain(config, home.catalog)
        for model in models:
            model.check(home.path)
        write(home, models, groups=3)
    table = DeltaTable(str(home.path / "lake" / "shop" / "current" / "public.items"))
    assert len([commit for commit in table.history() if commit["operation"] == "WRITE"]) == 3, "one commit a fold"
    assert len(table.file_uris()) > 1, "of several parts"


@pytest.mark.long
def test_a_restart_goes_on_exactly(home: Home, spark_options: SparkOptions) -> None:
    models = two_tables(home)
    config = config_of(home.path, home.stream, spark_options, batch_bytes_max=20_000)
    write(home, models, 3)
    drain(config, home.catalog)
    write(home, models, 3)
    drain(config, home.catalog)
    write(home, models, 3)
    drain(replace(config, batch_bytes_max=7_000), home.catalog)

    for model in models:
        model.check(home.path)


@pytest.mark.long
def test_a_lake_that_was_moved_away_is_built_again(home: Home, spark_options: SparkOptions) -> None:
    models = two_tables(home)
    config = config_of(home.path, home.stream, spark_options)
    write(home, models)
    drain(config, home.catalog)
    shutil.rmtree(home.path / "lake")
    drain(config, home.catalog)

    for model in models:
        model.check(home.path)


@pytest.mark.long
def test_new_tables_and_columns_land_while_the_pipeline_runs(home: Home, spark_options: SparkOptions) -> None:
    [first, _] = two_tables(home)
    home.commit(*first.some(10))
    landed: list[int] = []
    cut = threading.Condition()

    def note(progress: PipelineProgress) -> None:
        with cut:
            landed.append(progress.n)
            cut.notify_all()

    def until(upto: int) -> None:
        with cut:
            assert cut.wait_for(lambda: bool(landed) and landed[-1] >= upto, 240)

    with RunningPipeline(config_of(home.path, home.stream, spark_options), home.catalog, note) as running:
        until(home.log.persisted_upto())
        new = home.table("public.late", id=pa.int64(), name=pa.string())
        until(home.commit(insert(new, id=1, name="a")))
        wider = home.add_column(new, "extra", pa.float64())
        until(home.commit(insert(wider, id=2, name="b", extra=0.5), update(wider, id=1, name="c", extra=1.5)))
        running.finish(running.drain)

    assert sorted(rows_in(home.path, "current", "public.late"), key=lambda row: row["id"]) == [
        {"id": 1, "name": "c", "extra": 1.5},
        {"id": 2, "name": "b", "extra": 0.5},
    ]
    assert len(rows_in(home.path, "history", "public.late")) == 3
    first.check(home.path)


def test_a_table_whose_copy_runs_is_appended_and_not_folded(home: Home, spark_options: SparkOptions) -> None:
    [whole, _] = two_tables(home)
    copying = Model(home.table("public.copying", state=TableState.COPYING, **ITEMS), 9)
    write(home, [whole, copying])
    config = config_of(home.path, home.stream, spark_options)
    drain(config, home.catalog)

    whole.check(home.path)
    assert not (home.path / "lake" / "shop" / "current" / "public.copying").exists()
    assert len(rows_in(home.path, "history", "public.copying")) == copying.records

    home.catalog.set_state(copying.schema.table_id, TableState.STREAMING)
    drain(config, home.catalog)
    copying.check(home.path)
    assert DeltaTable(str(home.path / "lake" / "shop" / "current" / "public.copying")).version() <= 1


def test_a_table_that_fails_is_quarantined_alone_and_catches_up_once_mended(
    home: Home, spark_options: SparkOptions
) -> None:
    [good, bad] = two_tables(home)
    write(home, [good, bad])
    config = config_of(home.path, home.stream, spark_options)
    foreign = home.path / "lake" / "shop" / "history" / "public.parts"
    write_deltalake(str(foreign), pa.table({"a": [1]}))
    outcome = drain(config, home.catalog)

    assert list(outcome.quarantined) == ["public.parts"]
    assert outcome.n == home.log.persisted_upto()
    good.check(home.path)
    needed = home.catalog.needed_from(home.stream)
    assert min(needed.values()) <= 1

    shutil.rmtree(foreign)
    write(home, [good, bad])
    outcome = drain(config, home.catalog)
    assert outcome.quarantined == {}
    assert set(home.catalog.needed_from(home.stream)) == {"lake"}
    good.check(home.path)
    bad.check(home.path)


def test_a_lake_put_back_gets_what_a_table_lacked_that_was_quarantined_then(
    home: Home, spark_options: SparkOptions
) -> None:
    """Only the catalog had it, which had forgotten it by then: the rows were missing for ever, without a word."""
    [good, bad] = two_tables(home)
    write(home, [good, bad])
    config = config_of(home.path, home.stream, spark_options)
    lake = home.path / "lake"
    foreign = lake / "shop" / "history" / "public.parts"
    write_deltalake(str(foreign), pa.table({"a": [1]}))
    assert list(drain(config, home.catalog).quarantined) == ["public.parts"]
    shutil.rmtree(foreign)
    shutil.copytree(lake, home.path / "backup")
    assert drain(config, home.catalog).quarantined == {}
    bad.check(home.path)

    shutil.rmtree(lake)
    (home.path / "backup").rename(lake)
    write(home, [good, bad])
    assert drain(config, home.catalog).quarantined == {}
    good.check(home.path)
    bad.check(home.path)
    assert set(home.catalog.needed_from(home.stream)) == {"lake"}


def test_a_drain_ends_a_long_pause_between_batches(home: Home, spark_options: SparkOptions) -> None:
    landed = threading.Event()
    table = home.table("public.t", id=pa.int64())
    home.commit(insert(table, id=1))
    config = config_of(home.path, home.stream, spark_options, views=("history",), trigger_interval_ms=600_000)

    def note(progress: PipelineProgress) -> None:
        if progress.rows:
            landed.set()

    with RunningPipeline(config, home.catalog, note) as running:
        assert landed.wait(240)
        home.commit(insert(table, id=2))
        began = time.monotonic()
        assert running.finish(running.drain).caught_up
        assert time.monotonic() - began < 300
    adaptive = replace(config, trigger_interval_ms=None)
    home.commit(insert(table, id=3))
    assert drain(adaptive, home.catalog).caught_up
    assert sorted(row["id"] for row in rows_in(home.path, "history", "public.t")) == [1, 2, 3]


@pytest.mark.long
def test_a_driver_that_was_thought_dead_does_no_harm_beside_the_new_one(
    home: Home, spark_options: SparkOptions
) -> None:
    models = two_tables(home)
    old = config_of(home.path, home.stream, spark_options, batch_bytes_max=9_000)
    new = replace(old, batch_bytes_max=20_000)
    with RunningPipeline(old, home.catalog) as zombie, RunningPipeline(new, home.catalog) as running:
        write(home, models, 8)
        for pipeline in (zombie, running):
            # One of them may lose a race for a cut: it then ends, and its supervisor would start another.
            with contextlib.suppress(LakeConflict):
                pipeline.finish(pipeline.drain)
    drain(new, home.catalog)

    for model in models:
        model.check(home.path)


WORKER_POINTS = [
    "lake.records_written:2",
    "fold.start",
    "lake.before_fold_commit",
    "lake.after_fold_commit",
]


@pytest.mark.timeout(1800)
@pytest.mark.siege
def test_killed_at_every_point_it_lands_everything_once(
    home: Home, spark_options: SparkOptions, tmp_path: Path
) -> None:
    models = two_tables(home)
    write(home, models, 4)
    # A killed worker costs a task, which Spark repeats; a killed driver costs a process.
    follow_until_killed(
        home.path,
        tmp_path,
        workers=WORKER_POINTS,
        at="pipeline.before_batch",
        more=lambda: write(home, models, 1),
    )
    write(home, models, 8)
    with DriverProcess(
        home.path, tmp_path / "again", "drain", MILLSTREAM_FAILPOINTS="pipeline.after_lake_commit:2"
    ) as driver:
        driver.is_killed()
    write(home, models, 4)
    drain(config_of(home.path, home.stream, spark_options, batch_bytes_max=20_000), home.catalog)
    for model in models:
        model.check(home.path)


@pytest.mark.timeout(1800)
@pytest.mark.siege
def test_a_jvm_that_dies_ends_the_driver_with_an_error_by_name(home: Home, tmp_path: Path) -> None:
    models = two_tables(home)
    write(home, models, 1)
    with DriverProcess(home.path, tmp_path / "work", "follow") as driver:
        driver.until(lambda cut: cut > 0, "its first batch")
        for java in driver.javas():
            java.kill()
        assert driver.process.wait(800) == 1

    assert "millstream.errors.EngineError" in driver.errors


@pytest.mark.long
def test_a_table_that_cannot_be_written_is_told_of_while_it_is_tried_again(
    home: Home, spark_options: SparkOptions
) -> None:
    models = two_tables(home)
    write(home, models, groups=1)
    config = config_of(home.path, home.stream, spark_options)
    in_the_way = home.path / "lake" / "shop" / "history" / "public.parts"
    in_the_way.parent.mkdir(parents=True)
    in_the_way.write_text("not a folder")
    told: list[PipelineProgress] = []

    def mend(progress: PipelineProgress) -> None:
        told.append(progress)
        if progress.trying:
            in_the_way.unlink(missing_ok=True)

    asked = threading.Event()
    asked.set()
    outcome = run_pipeline(config, home.catalog, stop=threading.Event(), drain=asked, on_progress=mend)
    assert [list(progress.trying) for progress in told if progress.trying][:1] == [["public.parts"]]
    assert outcome.quarantined == {}
    assert not told[-1].trying
    for model in models:
        model.check(home.path)


NO_START = """
import sys
from pathlib import Path
from millstream.errors import EngineError
from millstream.spark.session import SparkOptions, open_context
try:
    open_context(SparkOptions(Path(sys.argv[1]), master="local[x]"))
except EngineError as error:
    print(error.message)
"""


def test_a_spark_that_does_not_start_is_reported_without_its_stack(tmp_path: Path) -> None:
    """The message was 40 lines of Java's stack, on a terminal and in `status`."""
    ended = subprocess.run([sys.executable, "-c", NO_START, tmp_path], capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("Spark did not start on local[x]: ")
    assert "Could not parse Master URL" in ended.stdout
    assert len(ended.stdout.splitlines()) <= 2


JVM_ENDS = """
import sys
from pathlib import Path
from pyspark.sql import SparkSession
from millstream.spark.session import SparkOptions, open_context
open_context(SparkOptions(Path(sys.argv[1]), master="local[1]"))
spark = SparkSession.builder.getOrCreate()
context = spark.sparkContext
context.parallelize([1]).map(lambda n: n).collect()
process = context._gateway.proc
process.kill()
process.wait()
try:
    spark.range(5).count()
except Exception as error:
    print(type(error).__name__)
try:
    spark.stop()
except OSError:  # it asks the JVM, too
    pass
"""


@pytest.mark.siege
def test_a_jvm_that_is_killed_leaves_no_tracebacks_on_the_terminal(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", JVM_ENDS, str(tmp_path)], capture_output=True, text=True, timeout=600, check=True
    )
    assert ended.stdout.strip(), "whoever uses the session is told"
    assert "Traceback" not in ended.stderr
    assert "Exception" not in ended.stderr


def test_what_spark_says_is_told_without_its_plans_and_stacks() -> None:
    said = "Job aborted: a task failed 4 times\n\nDriver stacktrace:\n\tat org.apache.spark"
    assert without_stack(RuntimeError(said)) == "Job aborted: a task failed 4 times"
    assert without_stack(RuntimeError("no\n\nJVM stacktrace:\norg.apache")) == "no"
    assert without_stack(RuntimeError()) == "RuntimeError"
