"""Folding of `current` and `scd2` next to the batches: a thread of the driver starts its own Spark jobs.

It folds what the last cut covers, never more, so that `current` holds no half of a transaction.
After each round the cut names the new versions. A table waits until its copy is complete in the
lake; then its `current` is built, once. A failed fold stops nothing else: history goes on, the fold
is retried later, and `query` answers from the older fold and a longer tail.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar, cast

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import PySparkException

from millstream.backoff import Backoff
from millstream.catalog import Catalog
from millstream.catalog.pipeline_tables import QuarantineFacts
from millstream.catalog.rebuilds import Rebuilds
from millstream.errors import EngineError, MillstreamError, may_pass
from millstream.lake.damaged_tables import erase_view, make_way
from millstream.lake.data_files import NewFile
from millstream.lake.folded.current_table import FoldPlan
from millstream.lake.layout import View
from millstream.model.ids import TableId
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema
from millstream.spark import executor_tasks
from millstream.spark.complete_copies import CompleteCopies
from millstream.spark.fold_schedule import SMALL_BYTES, FoldHistory, fold_is_due
from millstream.spark.jobs import run_job
from millstream.spark.pipeline import PipelineConfig
from millstream.spark.pipeline_tables import PipelineTable, PipelineTables
from millstream.spark.session import without_stack
from millstream.spark.table_maintenance import TableMaintenance
from millstream.spark.table_views import CutByTable, TableViews
from millstream.workers import Worker

_ROUND_S: Final = 1.0
"""Maximum time that the thread waits for news; tables also become due with time."""
_FAILED_JOBS_MAX: Final = 5
"""Number of consecutive failed jobs that rules out killed workers: a new process may help."""
_Task = TypeVar("_Task")
_Answer = TypeVar("_Answer")


class FoldThread:
    """See the module."""

    def __init__(
        self,
        config: PipelineConfig,
        catalog: Catalog,
        pipeline_tables: PipelineTables,
        context: SparkContext,
        folded: Callable[[], None],
        batches: threading.Lock,
        copies: CompleteCopies,
    ) -> None:
        self._config = config
        self._catalog = catalog
        self._views = TableViews(config, catalog)
        self._pipeline_tables = pipeline_tables
        self._context = context
        self._folded = folded
        self._batches = batches
        """Held while a batch lands."""
        self._rebuilds = Rebuilds(catalog, config.stream_id, config.pipeline)
        self._wanted_folds = Rebuilds(catalog, config.stream_id, config.pipeline, "fold")
        self._copies = copies
        self._rebuilding = threading.Lock()
        """Held while a table is rebuilt or moved out of the way, and while tables are maintained."""
        self._maintenance = TableMaintenance(
            config, catalog, pipeline_tables, self._maintained, self._rebuilding, folded
        )
        self._news = threading.Event()
        self._stopped = threading.Event()
        self._worker = Worker("millstream-fold", self._loop, on_failure=lambda _: folded())

    def start(self) -> None:
        """Start folding and maintenance, next to the batches."""
        self._worker.start()
        self._maintenance.worker.start()

    def wake(self) -> None:
        """Look for due folds again, after a cut was committed. Any thread."""
        self._news.set()

    def stop(self, timeout_s: float | None = None) -> None:
        """End the threads after their current rounds; wait for each, for so many seconds at most."""
        self.abandon()
        self._worker.join(timeout_s)
        self._maintenance.worker.join(timeout_s)

    @property
    def failure(self) -> BaseException | None:
        """The error that ended one of the threads, if it failed."""
        return self._worker.failure or self._maintenance.worker.failure

    def abandon(self) -> None:
        """Let the threads end on their own, without waiting for them."""
        self._stopped.set()
        self._maintenance.stopped.set()
        self._news.set()

    def fold_all(self) -> None:
        """Fold every table to the last cut, whatever its schedule.

        Tables that fail are left as they are, with the error. Only while the threads aren't running.
        """
        self._fold_all()
        self._maintenance.maintain(at_once=True)

    def _fold_all(self) -> None:
        failures = 0
        self._make_way()
        while tasks := self._tasks(lambda _entry: True):
            before = self._reached()
            time.sleep(0.2 * failures)
            try:
                self._round(tasks)
            except (Py4JError, PySparkException) as error:
                failures += 1
                if failures >= _FAILED_JOBS_MAX:
                    raise EngineError(f"folding fails again and again: {without_stack(error)}") from error
                continue
            after = self._reached()
            # A table with very many records needs several folds.
            failures = 0 if after != before else failures + 1
            failed = [
                entry.fold_error for entry in self._pipeline_tables.tables.values() if entry.fold_error is not None
            ]
            hopeless = failed and not any(may_pass(error.code, error.retry) for error in failed)
            if failures >= _FAILED_JOBS_MAX or (hopeless and after == before):
                return

    def _reached(self) -> dict[TableId, tuple[Seq | None, Seq | None]]:
        return {entry.table_id: (entry.current_n, entry.scd2_n) for entry in self._pipeline_tables.tables.values()}

    def _loop(self) -> None:
        backoff = Backoff(0.4, 10.0, jitter=0)
        while not self._stopped.is_set():
            self._news.wait(_ROUND_S)
            self._news.clear()
            if self._stopped.is_set():
                return
            self._make_way()
            tasks = self._tasks(self._is_due)
            try:
                if tasks:
                    self._round(tasks)
                backoff.reset()
            except (Py4JError, PySparkException):
                # The job failed as a whole: a worker was killed, or the JVM is gone (which the driver detects).
                if backoff.attempts + 1 >= _FAILED_JOBS_MAX:
                    raise
                backoff.wait(self._stopped)

    def _is_due(self, entry: PipelineTable) -> bool:
        now = time.monotonic()
        return now >= entry.fold_again_s and fold_is_due(
            entry.fold,
            now,
            least_s=self._config.fold_interval_s,
            disk_factor=self._config.disk_factor,
            keep_s=self._config.maintenance.keep_s,
        )

    def _tasks(self, wanted: Callable[[PipelineTable], bool]) -> list[executor_tasks.FoldTask]:
        """Return the folds to do now, each table to the last cut."""
        cut = self._pipeline_tables.cut
        if cut is None or not self._config.folds:
            return []
        asked = {request.table_id: request.views for request in self._rebuilds.waiting() if not request.before_copy}
        wanted_now = {request.table_id for request in self._wanted_folds.waiting()}
        scheduled = self._config.folds_scheduled
        entries = list(self._pipeline_tables.tables.values())
        now = time.monotonic()
        waiting = [
            entry
            for entry in entries
            if (scheduled and entry.waiting_since_s is not None and wanted(entry))
            or ((entry.table_id in asked or entry.table_id in wanted_now) and now >= entry.fold_again_s)
        ]
        if not waiting:
            return []
        # The cut was committed before this: a copy that begins from here on has nothing in it.
        self._copies.observe(self._views.log.persisted_upto)
        unfinished = self._copies.unfinished(cut.n)
        index = CutByTable.of(cut)
        tasks = []
        for entry in waiting:
            schema = self._views.schema(entry)
            views = () if schema is None else self._views.folded(schema)
            if schema is None or not views:
                self._pipeline_tables.waits_no_longer(entry)
                continue
            if entry.table_id in unfinished:
                continue
            anew = asked.get(entry.table_id, ())
            spared = index.spared(entry.table_id)
            large = entry.fold.live_bytes >= SMALL_BYTES
            tasks += [
                executor_tasks.FoldTask(
                    self._config.layout,
                    schema,
                    cut.n,
                    entry.table_id,
                    view,
                    anew=view in anew,
                    sizes=self._config.fold_sizes,
                    keep_s=self._config.maintenance.keep_s if large else None,
                    spared=spared.get(view),
                )
                for view in views
            ]
        return tasks

    def _make_way(self) -> None:
        """Move damaged tables out of the way of requested copies. No fold of them runs, because their copies wait."""
        for request in self._rebuilds.waiting():
            entry = self._pipeline_tables.tables.get(request.table_id)
            schema = None if entry is None else self._views.schema(entry)
            if not request.before_copy or schema is None or self._pipeline_tables.cut is None:
                continue
            # No batch may be appended during this, and no file maintained.
            with self._batches, self._rebuilding:
                held = self._pipeline_tables.quarantine.tables.get(request.table_id)
                # The columns can't follow the source's: rows from before the copy don't fit the new ones.
                forget = held is not None and held.code == "lake_schema_conflict"
                n = self._pipeline_tables.cut.n if held is None or forget else held.after
                newest = self._catalog.latest_schemas(self._config.stream_id).get(request.table_id, schema)
                if request.erases:
                    n = self._views.log.persisted_upto()
                for view in request.views:
                    told = self._made_way(view, newest, n, forget=forget, erases=request.erases)
                    self._rebuilds.settle(request.table_id, view, told)
            QuarantineFacts(self._catalog, self._config.stream_id, self._config.pipeline).request_retry(
                request.table_id
            )

    def _made_way(self, view: str, schema: TableSchema, n: Seq, *, forget: bool, erases: bool) -> dict[str, Any]:
        try:
            if erases:
                earlier = self._catalog.schemas_of(schema.table_id)
                erase_view(self._config.layout, cast("View", view), schema, n, earlier=earlier)
                return {"state": "done", "aside": None}
            aside = make_way(self._config.layout, cast("View", view), schema, n, forget=forget)
        except (MillstreamError, OSError) as error:
            return _failed(executor_tasks.TableError.of(error))
        return {"state": "done", "aside": aside}

    def _map(
        self, function: Callable[[_Task], _Answer], tasks: list[_Task], *, every_core: bool = False
    ) -> list[_Answer]:
        """Run one job on all cores but one, which the batches keep; on every core if a task a slice is asked for."""
        slices = len(tasks) if every_core else max(1, min(len(tasks), self._context.defaultParallelism - 1))
        return run_job(self._context, function, tasks, slices)

    def _round(self, tasks: list[executor_tasks.FoldTask]) -> None:
        """Fold the tables, small ones in one job and large ones in parts; then commit a cut with their new versions."""
        started = time.monotonic()
        with self._rebuilding if any(task.anew for task in tasks) else contextlib.nullcontext():
            begun = self._map(executor_tasks.start_fold, tasks)
            answers = self._finished(begun, started)
        self._note(answers, started)
        self._pipeline_tables.commit(None, [answer.commit for answer in answers if answer.commit is not None])
        self._settle(tasks, begun, answers)
        self._folded()

    def _settle(
        self,
        tasks: list[executor_tasks.FoldTask],
        begun: list[executor_tasks.FoldAnswer],
        answers: list[executor_tasks.FoldAnswer],
    ) -> None:
        """Record the outcome for tables that were asked to be rebuilt or folded."""
        self._settle_folds(tasks, answers)
        asked = {(task.table_id, task.view) for task in tasks if task.anew}
        asides = {(answer.table_id, answer.view): answer.aside for answer in begun}
        for answer in answers:
            key = (answer.table_id, answer.view)
            if key not in asked:
                continue
            if answer.commit is not None:
                told = {"state": "done", "rows": answer.commit.rows, "aside": asides.get(key)}
            elif answer.error is not None and may_pass(answer.error.code, answer.error.retry):
                continue  # it is retried, as every fold is
            else:
                assert answer.error is not None, "a fold ends with a commit or an error"
                told = _failed(answer.error)
            self._rebuilds.settle(answer.table_id, answer.view, told)

    def _settle_folds(self, tasks: list[executor_tasks.FoldTask], answers: list[executor_tasks.FoldAnswer]) -> None:
        wanted = {(request.table_id, view) for request in self._wanted_folds.waiting() for view in request.views}
        upto = {(task.table_id, task.view): task.upto for task in tasks}
        for answer in answers:
            key = (answer.table_id, answer.view)
            if key not in wanted:
                continue
            if answer.commit is not None and answer.commit.n >= upto[key]:
                self._wanted_folds.settle(*key, {"state": "done", "rows": answer.commit.rows, "aside": None})
            elif answer.error is not None and not may_pass(answer.error.code, answer.error.retry):
                self._wanted_folds.settle(*key, _failed(answer.error))

    def _finished(self, answers: list[executor_tasks.FoldAnswer], started: float) -> list[executor_tasks.FoldAnswer]:
        """Return the answers, once the parts of large tables are written and committed."""
        plans = {answer.table_id: answer.plan for answer in answers if answer.plan is not None}
        if not plans:
            return answers
        parts = [task for plan in plans.values() for task in self._shared_out(plan)]
        written: dict[TableId, list[NewFile]] = {table_id: [] for table_id in plans}
        errors: dict[TableId, executor_tasks.TableError] = {}
        building = any(plan.build for plan in plans.values())
        for part in self._map(executor_tasks.write_parts, parts, every_core=building):
            written[part.table_id].extend(part.written)
            if part.error is not None:
                errors[part.table_id] = part.error
        took_s = time.monotonic() - started
        ready = [
            executor_tasks.CommitTask(plan, tuple(written[t]), took_s) for t, plan in plans.items() if t not in errors
        ]
        return [
            *(answer for answer in answers if answer.plan is None),
            *(executor_tasks.FoldAnswer(table_id, error=error) for table_id, error in errors.items()),
            *(self._map(executor_tasks.commit_fold, ready) if ready else ()),
        ]

    def _maintained(self, tasks: list[executor_tasks.MaintenanceTask]) -> list[executor_tasks.MaintenanceAnswer]:
        return self._map(executor_tasks.maintain_one, tasks)

    def _shared_out(self, plan: FoldPlan) -> list[executor_tasks.PartsTask]:
        """Return a plan's parts as tasks.

        Each part of a build is a task, because each reads its own files; a fold has as many tasks
        as run in parallel.
        """
        parts = range(plan.part_count)
        tasks = len(parts) if plan.build else min(len(parts), max(1, self._context.defaultParallelism - 1))
        return [executor_tasks.PartsTask(plan, tuple(parts[first::tasks])) for first in range(tasks)]

    def _note(self, answers: Iterable[executor_tasks.FoldAnswer], started: float) -> None:
        """Record each table's outcome, of all its views together because they are folded together."""
        ended = time.monotonic()
        by_table: dict[TableId, list[executor_tasks.FoldAnswer]] = {}
        for answer in answers:
            by_table.setdefault(answer.table_id, []).append(answer)
        for table_id, some in by_table.items():
            commits = [answer.commit for answer in some if answer.commit is not None]
            errors = [answer.error for answer in some if answer.error is not None]
            assert len(commits) + len(errors) == len(some), "a fold ends with a commit or an error"
            live, removed = sum(answer.live_bytes for answer in some), sum(answer.removed_bytes for answer in some)
            last = FoldHistory(ended, max(answer.took_s for answer in some), live, removed)
            self._pipeline_tables.folded(table_id, commits, last, started, errors[0] if errors else None)


def _failed(error: executor_tasks.TableError) -> dict[str, Any]:
    """Return a request's failure in the form that is reported to its caller."""
    facts = {"code": error.code, "message": error.message, "hint": error.hint, "retry": error.retry.value}
    return {"state": "failed", **facts}
