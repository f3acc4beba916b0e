"""Landing of batches: the lake's last cut says where the next begins, one Spark job lands it, then a cut covers it.

The order, and why a crash after any step neither repeats nor loses anything:

1. The batch is what the log has behind the last cut, in whole commit groups. No other place has a position.
2. Executors read their parts of it from the log, and write files. No commit names these yet.
3. The driver commits each table's files, in a transaction that records "this table has everything up to n".
   If repeated, each table gets what it lacks.
4. The cut (n, versions) is committed. If repeated, it is there already.
5. The catalog records from where the log is needed: from this batch's start on. The lake's newest commits may
   not survive a power loss, because delta-rs doesn't sync them.

A table that fails again and again (`quarantine.ATTEMPTS_MAX`) is quarantined, durably, before the cut that leaves it out. No later batch is appended to it, so it
can never get a gap, and the log keeps what it lacks. A lake that can't be reached is
waited for (`unreachable_lake.LAKE_PATIENCE_S`). If the lake fails, the run ends (`quarantine.failure_of_lake`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from pyspark import SparkContext

from millstream import failpoints, process_metrics
from millstream.catalog import Catalog
from millstream.catalog.lake_state import forget_lake_state
from millstream.catalog.pipeline_tables import QuarantinedTable
from millstream.errors import LakeUnavailable, OffsetExpired, may_pass
from millstream.lake.layout import TableCommit
from millstream.lake.table_renames import PackedPlaces, places_of
from millstream.model.ids import SchemaVersion, TableId
from millstream.model.positions import Seq
from millstream.spark.batch_parts import SPAN_BYTES, BatchPart
from millstream.spark.complete_copies import CompleteCopies
from millstream.spark.executor_access import ExecutorLog
from millstream.spark.executor_tasks import Around, TableError
from millstream.spark.initial_replay import ReplayWatch
from millstream.spark.pipeline import OnProgress, PipelineConfig, PipelineProgress
from millstream.spark.pipeline_tables import PipelineTables, written_us
from millstream.spark.quarantine import failure_of_lake, gives_up
from millstream.spark.unreachable_lake import pauses
from millstream.wal.reader import StreamReader

_LOCK_S: Final = 1.0
"""How long a retry of a quarantined table waits for the batch that lands."""


@dataclass(frozen=True, slots=True)
class Landed:
    """The result of one job."""

    after: Seq
    upto: Seq
    commits: Mapping[TableId, TableCommit]
    errors: Mapping[TableId, TableError]
    versions: Mapping[TableId, SchemaVersion]
    """The schema version of each table's last record."""
    newest_us: Mapping[TableId, int]
    """Each table's newest commit time, µs since 1970."""


@dataclass(slots=True)
class BatchLander:
    """Lands one batch after another, in one thread at a time."""

    context: SparkContext
    config: PipelineConfig
    catalog: Catalog
    log: StreamReader
    """A reader of its own, used only under `lock`."""
    pipeline_tables: PipelineTables
    copies: CompleteCopies
    executor_log: ExecutorLog
    replay: ReplayWatch
    """Used only while reporting."""
    on_progress: OnProgress
    landed: Callable[[], None]
    """Called after each cut."""
    wait: Callable[[float], object] = time.sleep
    """Waits so many seconds; returns true if the driver ends."""
    clock: Callable[[], float] = time.monotonic
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while a batch lands or a table catches up."""
    _places: PackedPlaces = field(default_factory=PackedPlaces)
    _last: tuple[Landed, float, float | None] | None = None
    """The last batch, how long it took, and the age of its newest record when it had landed."""
    _lake_answered: bool = False
    _trying: Mapping[str, str] = field(default_factory=dict)
    """Tables whose write failed and is retried, by name, with the reason."""
    _reporting: threading.Lock = field(default_factory=threading.Lock)
    """Held while a report is made and delivered, so that none overtakes another."""

    def land_next(self) -> bool:
        """Land the next batch, if the log has one; return whether even more is waiting."""
        with self.lock:
            after = self._reached()
            durable = self.log.persisted_upto()
            upto = self.log.cut(after, bytes_max=self.config.batch_bytes_max)
            if upto > after and not self._land(after, upto):
                return False
            self._lake_answers()
            return upto < durable

    def _lake_answers(self) -> None:
        """Record, once, that the lake takes batches: an earlier run may have ended because it didn't."""
        if not self._lake_answered:
            forget_lake_state(self.catalog, self.config.stream_id)
            self._lake_answered = True

    def retry_held(self) -> None:
        """Retry tables that were quarantined, if a retry is due or requested. Any thread.

        A batch may wait for the lake for minutes. So a caller that can't have the lock leaves the retries to the next call.
        """
        for held in self.pipeline_tables.quarantine.retries_due():
            if not self.lock.acquire(timeout=_LOCK_S):
                return
            try:
                self._catch_up(held)
            finally:
                self.lock.release()
            self.landed()

    def _catch_up(self, held: QuarantinedTable) -> None:
        """Append to a table what it lacks up to the last cut, then let it land with the others.

        If that fails, the table is quarantined again.
        """
        upto = self.pipeline_tables.cut.n if self.pipeline_tables.cut is not None else held.after
        after = held.after
        while after < upto:
            try:
                end = min(upto, self.log.cut(after, bytes_max=self.config.batch_bytes_max))
            except OffsetExpired as error:  # of a lake that was put back: the log has what the other tables lack
                what = f"the log begins at {self.log.first_seq()}, and the table is at {after}: its records between are gone"
                hint = "Restore the lake from a newer backup, or the log from an older one."
                self._hold(held.table_id, after, TableError(error.code, what, hint, error.retry))
                return
            if end <= after:
                break
            landed = self._run(after, end, frozenset(), only=frozenset({held.table_id}))
            if landed.errors:
                self._hold(held.table_id, after, landed.errors[held.table_id])
                return
            self.pipeline_tables.appended(landed.commits.values(), landed.versions, landed.newest_us)
            self.pipeline_tables.commit(None, landed.commits.values())
            after = end
        lacking = next((t for t in self.pipeline_tables.lacking() if t.table_id == held.table_id), None)
        if lacking is not None:
            # Its other views go on at each call, and a copy in the log ends it.
            still = replace(lacking, after=max(after, lacking.after))
            self.pipeline_tables.quarantine.add(still, retry_at_once=True)
            return
        self.pipeline_tables.release(held.table_id)

    def _land(self, after: Seq, upto: Seq) -> bool:
        """Land a batch; return False if the driver ends before its cut: the next run begins with it."""
        started = time.monotonic()
        failpoints.hit("pipeline.before_batch")
        landed = self._write(after, upto, frozenset(self.pipeline_tables.quarantine.tables))
        if landed is None:
            return False
        for table_id, error in landed.errors.items():
            self._hold(table_id, after, error)
        self.pipeline_tables.appended(landed.commits.values(), landed.versions, landed.newest_us)
        failpoints.hit("pipeline.before_lake_commit")
        written, newest_us = written_us(self.log, upto), max(landed.newest_us.values(), default=None)
        try:
            self.pipeline_tables.commit(upto, landed.commits.values(), newest_us=newest_us, written_us=written)
        except LakeUnavailable:
            if self.wait(0):
                return False
            raise
        failpoints.hit("pipeline.after_lake_commit")
        stream, pipeline = self.config.stream_id, self.config.pipeline
        self.catalog.set_landed(stream, pipeline, upto)
        self.catalog.set_needed_from(stream, pipeline, Seq(after + 1))
        failpoints.hit("pipeline.after_catalog")
        self.landed()
        age_s = None if newest_us is None else max(0.0, time.time() - newest_us / 1e6)
        self._last = landed, time.monotonic() - started, age_s
        process_metrics.LAKE_BATCH_SECONDS.of(str(stream)).observe(self._last[1])
        self.report(self.log.persisted_upto())
        return True

    def _write(self, after: Seq, upto: Seq, held: frozenset[TableId]) -> Landed | None:
        """Run the job; repeat it for tables whose error may be temporary. None if the driver ends before the repetition."""
        landed = self._run(after, upto, held)
        backoff, began_s = pauses(), self.clock()
        while failing := frozenset(
            table_id for table_id, error in landed.errors.items() if may_pass(error.code, error.retry)
        ):
            errors = [landed.errors[table_id] for table_id in failing]
            if gives_up(errors, attempts=backoff.attempts + 1, failing_s=self.clock() - began_s):
                break
            # Reported at once: a temporary fault, such as a full disk, may also last.
            self._try_again({self._name(table_id): landed.errors[table_id].message for table_id in failing})
            if self.wait(backoff.next_s()):
                return None
            landed = _joined(landed, self._run(after, upto, held, only=failing))
        if self._trying:
            self._try_again({})
        failure = failure_of_lake(list(landed.errors.values()), landed_tables=len(landed.commits))
        if failure is not None:
            raise failure
        return landed

    def _run(
        self, after: Seq, upto: Seq, held: frozenset[TableId], *, only: frozenset[TableId] | None = None
    ) -> Landed:
        """Run the job for the records of `(after, upto]`, of some tables or all."""
        self.copies.observe(self.log.persisted_upto)
        copies = self.copies
        cut = self.pipeline_tables.cut
        self._places = self._places.followed_by(places_of(cut))
        copying = copies.unfinished(self._reached())
        tables = 1 if self._last is None else len(self._last[0].commits)
        around = Around(cut, self._places, held, copying, copies.live, copies.history_only, tables)
        spans = self.log.spans(after, upto, bytes_target=SPAN_BYTES)
        batch = BatchPart(str(self.config.wal_folder.absolute()), tuple(spans), only, flight=self.executor_log.flight())
        answers = self.config.target.land(self.context, batch, upto, around)
        return Landed(
            after,
            upto,
            {answer.table_id: answer.commit for answer in answers if answer.commit is not None},
            {answer.table_id: answer.error for answer in answers if answer.error is not None},
            {answer.table_id: answer.schema_version for answer in answers if answer.commit is not None},
            {answer.table_id: answer.newest_us for answer in answers if answer.newest_us is not None},
        )

    def _reached(self) -> Seq:
        return Seq(0) if self.pipeline_tables.cut is None else self.pipeline_tables.cut.n

    def _try_again(self, tables: Mapping[str, str]) -> None:
        self._trying = tables
        self.report(self.log.persisted_upto())

    def _hold(self, table_id: TableId, after: Seq, error: TableError) -> None:
        self.pipeline_tables.quarantine.add(
            QuarantinedTable(table_id, self._name(table_id), after, error.message, error.code, error.hint)
        )

    def _name(self, table_id: TableId) -> str:
        name = self.pipeline_tables.tables[table_id].name if table_id in self.pipeline_tables.tables else ""
        schema = None if name else self.log.schemas().get(table_id)
        return name or (f"table {table_id}" if schema is None else schema.full_name)

    def report(self, durable: Seq) -> None:
        """Report the state, once a batch has landed or is retried, or a replay has begun. Any thread."""
        with self._reporting:
            self._report(durable)

    def _report(self, durable: Seq) -> None:
        trying, last, reached = self._trying, self._last, self._reached()
        replay = self.replay.look(reached)
        if last is None and not trying and replay is None and durable > reached:
            return
        n = last[0].upto if last is not None else reached
        rows = 0 if last is None else sum(commit.rows for commit in last[0].commits.values())
        batch_s = 0.0 if last is None else last[1]
        self.on_progress(
            PipelineProgress(
                n=n,
                rows=self.pipeline_tables.rows,
                rows_per_s=rows / batch_s if batch_s else 0.0,
                batch_s=batch_s,
                lag_s=None if last is None else last[2],
                lag_records=max(0, durable - n),
                tables=self.pipeline_tables.progress(),
                quarantined=self.pipeline_tables.quarantined(),
                trying=trying,
                replay=replay,
                replayed=self.replay.finished,
            )
        )


def _joined(first: Landed, again: Landed) -> Landed:
    """Return a job's answers, updated by those of its repetition for some tables."""
    repeated = set(again.commits) | set(again.errors)
    errors = {table_id: error for table_id, error in first.errors.items() if table_id not in repeated}
    return Landed(
        first.after,
        first.upto,
        {**first.commits, **again.commits},
        {**errors, **again.errors},
        {**first.versions, **again.versions},
        {**first.newest_us, **again.newest_us},
    )
