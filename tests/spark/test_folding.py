"""The thread that folds, over a runner of jobs in this process: its functions and its tables are the real ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

import pyarrow as pa
from pyspark.sql import SparkSession
from tests.spark.hand_made import Home, insert
from tests.spark.lake_run import config_of

from millstream.catalog.rebuilds import Rebuilds
from millstream.lake.history import append_history
from millstream.lake.snapshots import commit_cut
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema
from millstream.spark.complete_copies import CompleteCopies
from millstream.spark.folding import FoldThread
from millstream.spark.pipeline import PipelineConfig
from millstream.spark.pipeline_tables import PipelineTables
from millstream.spark.session import SparkOptions


@dataclass
class JobsHere:
    """The part of Spark that folds need: a function applied to tasks."""

    defaultParallelism: int = 2  # noqa: N815 - Spark's name
    tasks: Sequence[Any] = ()

    @property
    def sparkContext(self) -> JobsHere:  # noqa: N802 - Spark's name
        return self

    def parallelize(self, tasks: Sequence[Any], _slices: int) -> JobsHere:
        return JobsHere(tasks=tasks)

    def map(self, function: Callable[[Any], Any]) -> JobsHere:
        return JobsHere(tasks=[function(task) for task in self.tasks])

    def collect(self) -> Sequence[Any]:
        return self.tasks


@dataclass
class Folding:
    """A home's tables, landed up to the log's end, and a thread that folds them once `run` is called."""

    home: Home
    config: PipelineConfig
    tables: PipelineTables

    @classmethod
    def of(cls, home: Home, **changes: Any) -> Folding:
        config = config_of(home.path, home.stream, SparkOptions(home.path), **changes)
        return cls(home, config, PipelineTables(config, home.catalog))

    def run(self) -> None:
        copies = CompleteCopies(self.home.catalog, self.home.stream)
        jobs = cast("SparkSession", JobsHere())
        thread = FoldThread(self.config, self.home.catalog, self.tables, jobs, lambda: None, threading.Lock(), copies)
        thread.fold_all()


def landed(home: Home, schema: TableSchema, n: Seq) -> None:
    """Land all of a table's records up to the log's end."""
    layout = config_of(home.path, home.stream, SparkOptions(home.path)).layout
    batches = [found.batch for found in home.log.read_between(Seq(0), n) if found.schema.table_id == schema.table_id]
    commit_cut(layout, n, [append_history(layout, schema, batches, n)], committed_at=datetime.now(UTC))


def test_with_manual_folds_a_table_is_folded_only_on_request(home: Home) -> None:
    items = home.table("items", id=pa.int64())
    landed(home, items, home.commit(insert(items, id=1)))
    folding = Folding.of(home, folds_scheduled=False)
    folding.run()
    assert folding.tables.cut is not None
    assert folding.tables.cut.tables["public.items"].current == -1
    requests = Rebuilds(home.catalog, home.stream, folding.config.pipeline, "fold")
    requests.ask(items.table_id, ["current"])
    folding.run()
    assert folding.tables.cut.tables["public.items"].current >= 0
    assert requests.outcome(items.table_id) == {"current": {"state": "done", "rows": 1, "aside": None}}
