"""The thread that folds, over a runner of jobs in this process: its functions and its tables are the real ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, cast

import pyarrow as pa
import pytest
from pyspark import SparkContext
from tests.lake.landing import append_history
from tests.spark.hand_made import Home, insert
from tests.spark.lake_run import config_of

from millstream.catalog import TableState
from millstream.catalog.rebuilds import Rebuilds
from millstream.lake.commit_cuts import commit_cut
from millstream.lake.layout import TableCommit
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema
from millstream.spark import table_maintenance
from millstream.spark.complete_copies import CompleteCopies
from millstream.spark.executor_tasks import MaintenanceAnswer, MaintenanceTask, maintain_one
from millstream.spark.fold_thread import FoldThread
from millstream.spark.pipeline import PipelineConfig
from millstream.spark.pipeline_tables import PipelineTables
from millstream.spark.session import SparkOptions


@dataclass
class JobsHere:
    """The part of Spark that folds need: a function applied to tasks."""

    defaultParallelism: int = 2  # noqa: N815 - Spark's name
    tasks: Sequence[Any] = ()

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
        jobs = cast("SparkContext", JobsHere())
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


def test_a_restart_repeats_no_fold_that_the_cut_has(home: Home) -> None:
    """Each start folded every table again, to find that there was nothing to fold."""
    items, other = home.table("items", id=pa.int64()), home.table("other", id=pa.int64())
    n = home.commit(insert(items, id=1), insert(other, id=1))
    landed(home, items, n)
    landed(home, other, n)
    Folding.of(home).run()
    again = Folding.of(home)
    waiting = [entry.name for entry in again.tables.tables.values() if entry.waiting_since_s is not None]
    assert waiting == []
    n = home.commit(insert(other, id=2))
    landed(home, other, n)
    later = Folding.of(home)
    assert [e.name for e in later.tables.tables.values() if e.waiting_since_s is not None] == ["public.other"]


def test_tables_that_are_never_folded_keep_few_notes(home: Home) -> None:
    """A note a batch stayed for ever."""
    items = home.table("items", id=pa.int64())
    landed(home, items, home.commit(insert(items, id=1)))
    for views, most in ((("history",), 0), (("current", "history"), 1000)):
        tables = Folding.of(home, views=views).tables
        for n in range(2, 3000):
            commit = TableCommit(items.table_id, "public.items", "public.items", "history", n, 2, Seq(n))
            tables.appended([commit], {items.table_id: items.version})
        entry = tables.tables[items.table_id]
        assert len(entry.waiting) == most
        assert sum(rows for _, rows in entry.waiting) == (2 * 2998 if most else 0)


def test_maintenance_looks_at_what_was_written_since_and_leaves_idle_tables(home: Home) -> None:
    items, idle = home.table("items", id=pa.int64()), home.table("idle", id=pa.int64())
    n = home.commit(insert(items, id=1), insert(idle, id=1))
    landed(home, items, n)
    landed(home, idle, n)
    folding = Folding.of(home)
    looked: list[MaintenanceTask] = []

    def maintain(tasks: list[MaintenanceTask]) -> list[MaintenanceAnswer]:
        looked.extend(tasks)
        return [maintain_one(task) for task in tasks]

    maintaining = table_maintenance.TableMaintenance(
        folding.config, home.catalog, folding.tables, maintain, threading.Lock(), lambda: None
    )
    assert maintaining.maintain() == 2, "an earlier run may have left work"
    assert maintaining.maintain() == 0
    commit = TableCommit(items.table_id, "public.items", "public.items", "history", 1, 1, n)
    folding.tables.appended([commit], {items.table_id: items.version})
    looked.clear()
    assert maintaining.maintain() == 1
    assert [task.schema.name for task in looked] == ["items"]


def test_a_retention_of_history_has_idle_tables_looked_at_once_a_day(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle table kept its old records until the next write."""
    idle = home.table("idle", id=pa.int64())
    landed(home, idle, home.commit(insert(idle, id=1)))
    today = date(2026, 3, 1)
    monkeypatch.setattr(table_maintenance, "_today", lambda: today)
    for retention, looks in ((86_400.0, 1), (None, 0)):
        folding = Folding.of(home, history_retention_s=retention)
        maintaining = table_maintenance.TableMaintenance(
            folding.config, home.catalog, folding.tables, lambda _tasks: [], threading.Lock(), lambda: None
        )
        assert maintaining.maintain() == 1
        assert maintaining.maintain() == 0
        today += timedelta(days=1)
        assert maintaining.maintain() == looks
        assert maintaining.maintain() == 0


def test_a_retention_of_history_spares_tables_that_no_cut_names(home: Home) -> None:
    taken, new, gone = (home.table(name, id=pa.int64()) for name in ("taken", "new", "gone"))
    landed(home, new, home.commit(insert(taken, id=1), insert(gone, id=1), insert(new, id=1)))
    home.catalog.set_state(gone.table_id, TableState.GONE)
    folding = Folding.of(home, history_retention_s=86_400.0)
    looked: list[MaintenanceTask] = []

    def maintain(tasks: list[MaintenanceTask]) -> list[MaintenanceAnswer]:
        looked.extend(tasks)
        return []

    table_maintenance.TableMaintenance(
        folding.config, home.catalog, folding.tables, maintain, threading.Lock(), lambda: None
    ).maintain()
    assert [task.bound.waiting for task in looked if task.bound is not None] == [{taken.table_id}]
