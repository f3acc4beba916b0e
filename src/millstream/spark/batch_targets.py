"""Targets of a pipeline's batches: a lake of files, or a database. One Spark job a batch.

In a lake of files executors write data files, and the driver commits each table's files and its position
together. In a database the data and the commit are one transaction, so a task does both. Then the driver
commits the cut that covers all tables.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from pyspark import SparkContext

from millstream import failpoints
from millstream.lake import commit_cuts
from millstream.lake.commit_cuts import Cut
from millstream.lake.history import WrittenRecords, commit_records
from millstream.lake.layout import LakeLayout, TableCommit
from millstream.lake.postgres import cuts, view_gaps
from millstream.lake.postgres.land import begin
from millstream.lake.postgres.target import PostgresTarget
from millstream.model.ids import TableId
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema
from millstream.private_files import make_folder
from millstream.spark import executor_tasks
from millstream.spark.batch_parts import BatchPart, divided
from millstream.spark.jobs import run_job
from millstream.workers import call_in_thread

_COMMITS_AT_ONCE: Final = 4
"""Most of a commit's time is spent outside of Python, or waiting for an object store."""


@dataclass(frozen=True, slots=True)
class LakeOfFiles:
    """A lake of Delta tables: tasks write the files of their parts, and the driver commits each table in a transaction."""

    layout: LakeLayout

    @property
    def pipeline(self) -> str:
        """The pipeline's name, under which positions are kept."""
        return self.layout.pipeline

    def begin(self, schemas: Iterable[TableSchema], sources: Collection[tuple[int, str]]) -> None:  # noqa: ARG002 - a database needs them
        """Prepare the target for the first batch of a run: make its folder. Tables are made when they are written to.

        Args:
            sources: system identifier and database of each source of the stream.

        Raises:
            LakeError: nothing can land there.
        """
        if "://" not in self.layout.location:
            make_folder(Path(self.layout.root))

    def last_cut(self) -> Cut | None:
        """Return the last cut; None before the first."""
        return commit_cuts.last_cut(self.layout)

    def held(self) -> dict[TableId, Seq]:
        """Return the tables that the last cut left out because they were quarantined, with each one's landed position."""
        cut = self.last_cut()
        return {} if cut is None else dict(cut.held)

    def commit_cut(
        self,
        n: Seq,
        table_commits: Iterable[TableCommit],
        *,
        committed_at: datetime,
        commit_ts_max: datetime | None,
        held: Mapping[TableId, Seq],
    ) -> Cut:
        """Commit that every table has everything up to `n`, except those held: `lake.commit_cuts.commit_cut`."""
        return commit_cuts.commit_cut(
            self.layout, n, table_commits, committed_at=committed_at, commit_ts_max=commit_ts_max, held=held
        )

    def land(
        self, context: SparkContext, batch: BatchPart, upto: Seq, around: executor_tasks.Around
    ) -> list[executor_tasks.TableAnswer]:
        """Run the job that lands a batch up to `upto`; return an answer for each of its tables."""
        parallel = context.defaultParallelism if batch.only is None else 1
        parts = divided(batch, tasks=parallel, tables=around.tables)
        tasks = [executor_tasks.WriteTask(self.layout, part, upto, around.held, around.places) for part in parts]
        by_table: dict[TableId, list[executor_tasks.TableAnswer]] = {}
        for answers in run_job(context, executor_tasks.write_part, tasks):
            for answer in answers:
                by_table.setdefault(answer.table_id, []).append(answer)
        written = {table: _joined(answers) for table, answers in by_table.items()}
        renamed = {
            table: executor_tasks.BringTask(self.layout, answer[1], upto, around.places)
            for table, answer in written.items()
            if answer[0].error is None and any(part.elsewhere for part in answer[1])
        }
        brought = dict(zip(renamed, run_job(context, executor_tasks.bring_one, list(renamed.values())), strict=True))
        failpoints.hit("pipeline.files_written")
        places = around.places.unpacked()

        def commit(answer: executor_tasks.TableAnswer, files: tuple[WrittenRecords, ...]) -> executor_tasks.TableAnswer:
            error = answer.error or brought.get(answer.table_id)
            if error is None and files:
                try:
                    return replace(answer, commit=commit_records(self.layout, files, upto, places=places))
                except Exception as failure:  # noqa: BLE001 - whatever it is, it is this table's alone
                    error = executor_tasks.TableError.of(failure)
            return replace(answer, error=error)

        return _in_threads([partial(commit, *found) for found in written.values()])


def _joined(
    answers: Sequence[executor_tasks.TableAnswer],
) -> tuple[executor_tasks.TableAnswer, tuple[WrittenRecords, ...]]:
    """Return a table's answers from all parts as one, without the files, and the files."""
    parts = tuple(answer.written for answer in answers if answer.written is not None)
    version = max(parts, key=lambda part: part.last).schema.version if parts else answers[-1].schema_version
    times = [answer.newest_us for answer in answers if answer.newest_us is not None]
    error = next((answer.error for answer in answers if answer.error is not None), None)
    return executor_tasks.TableAnswer(answers[0].table_id, version, max(times, default=None), error=error), parts


def _in_threads(calls: Sequence[Callable[[], executor_tasks.TableAnswer]]) -> list[executor_tasks.TableAnswer]:
    """Return the results, in order; a few calls run at a time."""
    count = min(_COMMITS_AT_ONCE, len(calls))
    if count < 2:
        return [call() for call in calls]
    waiting = iter(list(enumerate(calls)))
    results: dict[int, executor_tasks.TableAnswer] = {}

    def work() -> None:
        for place, call in waiting:
            results[place] = call()

    for future in [call_in_thread("millstream-commit", work) for _ in range(count)]:
        future.result()
    return [results[place] for place in range(len(calls))]


@dataclass(frozen=True, slots=True)
class LakeDatabase:
    """Tables of a PostgreSQL database: one task, because they all share one transaction, by one writer at a time.

    Its methods promise what those of `LakeOfFiles` do.
    """

    target: PostgresTarget = field(repr=False)

    @property
    def pipeline(self) -> str:
        return self.target.pipeline

    def begin(self, schemas: Iterable[TableSchema], sources: Collection[tuple[int, str]]) -> None:
        begin(self.target, schemas, sources)

    def last_cut(self) -> Cut | None:
        return cuts.last_cut(self.target)

    def held(self) -> dict[TableId, Seq]:
        return cuts.held_there(self.target)

    def lacking(
        self, tables: Collection[TableId], *, without_rows: Collection[TableId]
    ) -> dict[TableId, tuple[Seq, str]]:
        """Return the tables with a view that lacks records of those that have landed: their positions, and the view."""
        return dict(view_gaps.lacking(self.target, tables, without_rows=without_rows))

    def commit_cut(
        self,
        n: Seq,
        table_commits: Iterable[TableCommit],
        *,
        committed_at: datetime,
        commit_ts_max: datetime | None,
        held: Mapping[TableId, Seq],
    ) -> Cut:
        return cuts.commit_cut(
            self.target, n, table_commits, committed_at=committed_at, commit_ts_max=commit_ts_max, held=held
        )

    def land(
        self, context: SparkContext, batch: BatchPart, upto: Seq, around: executor_tasks.Around
    ) -> list[executor_tasks.TableAnswer]:
        task = executor_tasks.DatabaseTask(self.target, batch, upto, around)
        return run_job(context, executor_tasks.land_in_database, [task])[0]


BatchTarget: TypeAlias = LakeOfFiles | LakeDatabase
