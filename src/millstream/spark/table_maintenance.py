"""Maintenance of a pipeline's tables in a thread of its own, so that folds don't wait for it.

A table is looked at after it was written to, and then twice more: when the files that its last
commit replaced may go, and when its log's older commits may. Idle tables cost nothing, except one
look a day if history has a retention.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from typing import Final

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from millstream.catalog import Catalog
from millstream.errors import MillstreamError
from millstream.lake.history_retention import HistoryBound
from millstream.lake.layout import View
from millstream.lake.maintenance import maintain_cuts
from millstream.model.ids import TableId
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema
from millstream.spark.executor_tasks import MaintenanceAnswer, MaintenanceTask
from millstream.spark.pipeline import PipelineConfig
from millstream.spark.pipeline_tables import PipelineTables
from millstream.spark.table_views import CutByTable, TableViews
from millstream.workers import Worker

_FAILED_JOBS_MAX: Final = 5
"""Number of consecutive failed jobs that ends the thread."""


class TableMaintenance:
    """The maintenance of one pipeline.

    Args:
        maintain: runs the tasks as one job, and returns their answers.
        rebuilding: held while tables are rebuilt, which maintenance may not touch then.
        failed: called if the thread ends by a failure.
    """

    def __init__(
        self,
        config: PipelineConfig,
        catalog: Catalog,
        tables: PipelineTables,
        maintain: Callable[[list[MaintenanceTask]], list[MaintenanceAnswer]],
        rebuilding: threading.Lock,
        failed: Callable[[], None],
    ) -> None:
        self._config = config
        self._catalog = catalog
        self._tables = tables
        self._run = maintain
        self._rebuilding = rebuilding
        self._views = TableViews(config, catalog)
        self._failures = 0
        self._day = _today()
        self.stopped: Final = threading.Event()
        self.worker: Final = Worker(
            "millstream-maintenance",
            self._step,
            every_s=config.maintenance.interval_s,
            stop=self.stopped,
            on_failure=lambda _: failed(),
        )

    def _step(self) -> bool:
        if self.stopped.is_set():
            return False
        try:
            self.maintain()
            self._failures = 0
        except (Py4JError, PySparkException):
            # A worker was killed, or the JVM is gone (which the driver detects).
            self._failures += 1
            if self._failures >= _FAILED_JOBS_MAX:
                raise
        return True

    def maintain(self, *, at_once: bool = False) -> int:
        """Compact small files and delete those that no reader needs, in tables that are due; return how many were.

        Args:
            at_once: maintain whatever this run has appended to, before it ends: it may have been too short for an interval.
        """
        cut = self._tables.cut
        index = CutByTable.of(cut)
        rules = self._config.maintenance
        now = time.monotonic()
        is_next_day = self._config.history_retention_s is not None and _today() > self._day
        self._day = _today()
        waiting = self._waiting(index)
        tasks = []
        for entry in list(self._tables.tables.values()):
            if entry.table_id not in index.tables:
                continue  # another table has taken over its name, and maintains the files there
            due = rules.is_due(written_s=entry.written_s, tended_s=entry.tended_s, now_s=now)
            due = is_next_day or (entry.rows > 0 if at_once else due)
            schema = self._views.schema(entry) if due else None
            if schema is None:
                continue
            entry.tended_s = now
            views: tuple[View, ...] = ("history", *self._views.folded(schema))
            tasks.append(
                MaintenanceTask(
                    self._config.layout,
                    schema,
                    views,
                    index.spared(entry.table_id),
                    rules,
                    self._droppable(index, Seq(0) if cut is None else cut.n, entry.table_id, schema, waiting),
                )
            )
        if tasks:
            with self._rebuilding:
                answers = self._run(tasks)
            for answer in answers:
                self._tables.maintained(answer)
            with contextlib.suppress(MillstreamError, OSError):
                maintain_cuts(
                    self._config.layout,
                    now_ms=time.time_ns() // 1_000_000,
                    rules=rules,
                    kept_s=self._config.history_retention_s,
                )
        return len(tasks)

    def _waiting(self, index: CutByTable) -> frozenset[TableId]:
        """Return the tables whose records no view has, if old records are dropped: those that lost their names to others."""
        if self._config.history_retention_s is None:
            return frozenset()
        there = {row.id for row in self._catalog.tables(self._config.stream_id) if row.schema_version}
        return frozenset(there - index.tables.keys())

    def _droppable(
        self, index: CutByTable, n: Seq, table: TableId, schema: TableSchema, waiting: frozenset[TableId]
    ) -> HistoryBound | None:
        """Return what may be dropped from a table's history.

        It is what the configuration doesn't keep, and what the table's folds in the last cut, at `n`, cover.
        """
        kept_s = self._config.history_retention_s
        folded = self._views.folded(schema)
        unnamed = "history" not in self._config.views and bool(folded)
        if kept_s is None and not unnamed:
            return None
        upto = n
        for view in folded:
            reached = [found.current_n if view == "current" else found.scd2_n for found in index.tables[table]]
            upto = min([upto, *reached])
        if kept_s is None or unnamed:
            return HistoryBound(upto)
        return HistoryBound(upto, (datetime.now(UTC) - timedelta(seconds=kept_s)).date(), waiting)


def _today() -> date:
    return datetime.now(UTC).date()
