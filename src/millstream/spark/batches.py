"""Landing of micro-batches: one Spark job appends every table's records, then one cut covers them all.

The order, and why a crash after any step neither repeats nor loses anything:

1. Executors append each table's records to its history, in a transaction that records "this table
   has everything up to n". If repeated, each appends what it lacks.
2. The cut (n, versions) is committed. If repeated, it is there already.
3. The catalog records that the log is needed from the batch's start on: Spark may still ask for
   this batch again.
4. Spark notes the batch as done.

A table that fails is quarantined, durably, before the cut that leaves it out. No later batch is
appended to it, so it can never get a gap, and the log keeps what it lacks.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from pyspark.sql import DataFrame, SparkSession

from millstream import failpoints, process_metrics
from millstream.backoff import Backoff
from millstream.catalog import Catalog
from millstream.errors import EngineError, Retry
from millstream.lake.layout import TableCommit
from millstream.lake.renames import PackedPlaces, places_of
from millstream.model.ids import SchemaVersion, TableId
from millstream.model.positions import Seq
from millstream.spark.complete_copies import CompleteCopies
from millstream.spark.frames import MARKER
from millstream.spark.landing import Around, TableError
from millstream.spark.pipeline import OnProgress, PipelineConfig, PipelineProgress
from millstream.spark.pipeline_tables import HeldTable, PipelineTables
from millstream.spark.replaying import ReplayWatch
from millstream.wal.reader import StreamReader

ATTEMPTS_MAX: Final = 4
"""Number of attempts to write a table in one batch, if its error may be temporary."""
_LOOK_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Landed:
    """The result of one job."""

    after: Seq
    upto: Seq
    commits: Mapping[TableId, TableCommit]
    errors: Mapping[TableId, TableError]
    versions: Mapping[TableId, SchemaVersion]
    """The schema version of each table's last record."""
    newest_us: int | None
    """The newest commit time among the records."""


@dataclass(slots=True)
class BatchLander:
    """The function that the streaming query calls for each micro-batch, in one thread at a time (Spark's own)."""

    config: PipelineConfig
    catalog: Catalog
    log: StreamReader
    """A reader of its own, used only under `lock`."""
    pipeline_tables: PipelineTables
    copies: CompleteCopies
    replay: ReplayWatch
    """Used only while reporting."""
    on_progress: OnProgress
    landed: Callable[[], None]
    """Called after each cut."""
    wait: Callable[[float], None] = time.sleep
    failure: BaseException | None = field(default=None)
    """The error that ended the query, before Spark turned it into text."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while a batch lands or a table catches up."""
    closed: bool = False
    _places: PackedPlaces = field(default_factory=PackedPlaces)
    _last: tuple[Landed, float, float | None] | None = None
    """The last batch, how long it took, and the age of its newest record when it had landed."""
    _trying: Mapping[str, str] = field(default_factory=dict)
    """Tables whose write failed and is retried, by name, with the reason."""
    _reporting: threading.Lock = field(default_factory=threading.Lock)
    """Held while a report is made and delivered, so that none overtakes another."""

    def __call__(self, batch: DataFrame, _batch_id: int) -> None:
        """Land one micro-batch; `foreachBatch` of the query."""
        # Spark's thread waits for this call, and stopping the query waits for Spark's thread: never
        # wait unboundedly.
        while not self.lock.acquire(timeout=_LOOK_S):
            if self.closed:
                break
        else:
            try:
                if not self.closed:
                    return self._land(batch)
            except BaseException as error:
                self.failure = error
                raise
            finally:
                self.lock.release()
        # Returning would note the batch as done.
        raise EngineError("the pipeline is stopping")

    def close(self) -> None:
        """Take no more batches; return when none is landing. The next batch is rejected and stays undone."""
        with self.lock:
            self.closed = True

    def retry_held(self, spark: SparkSession) -> None:
        """Retry tables that were quarantined, if a retry is due or requested. Any thread."""
        for held in self.pipeline_tables.retries_due():
            with self.lock:
                self._catch_up(spark, held)
            self.landed()

    def _catch_up(self, spark: SparkSession, held: HeldTable) -> None:
        """Append to a table what it lacks up to the last cut, then let it land with the others.

        If that fails, the table is quarantined again.
        """
        upto = self.pipeline_tables.cut.n if self.pipeline_tables.cut is not None else held.after
        after = held.after
        while after < upto:
            end = min(upto, self.log.cut(after, bytes_max=self.config.batch_bytes_max))
            if end <= after:
                break
            reader = spark.read.format("millstream").options(
                wal=str(self.config.wal_folder),
                layout="frames",
                tables=str(held.table_id),
                starting=self.config.token(after),
                ending=self.config.token(end),
            )
            landed = self._run(reader.load(), frozenset(), after)
            if landed is not None and landed.errors:
                self._hold(held.table_id, after, landed.errors[held.table_id])
                return
            if landed is not None:
                self.pipeline_tables.appended(landed.commits.values(), landed.versions)
                self.pipeline_tables.commit(None, landed.commits.values())
            after = end
        self.pipeline_tables.release(held.table_id)

    def _land(self, batch: DataFrame) -> None:
        started = time.monotonic()
        failpoints.hit("pipeline.before_batch")
        landed = self._write(batch, frozenset(self.pipeline_tables.held))
        if landed is None:
            return  # a replay of a batch that the lake has, from other notes than those that planned it
        for table_id, error in landed.errors.items():
            self._hold(table_id, landed.after, error)
        self.pipeline_tables.appended(landed.commits.values(), landed.versions)
        failpoints.hit("pipeline.before_lake_commit")
        self.pipeline_tables.commit(landed.upto, landed.commits.values(), newest_us=landed.newest_us)
        failpoints.hit("pipeline.after_lake_commit")
        stream, pipeline = self.config.stream_id, self.config.pipeline
        self.catalog.set_landed(stream, pipeline, landed.upto)
        self.catalog.set_needed_from(stream, pipeline, Seq(landed.after + 1))
        failpoints.hit("pipeline.before_spark_commit")
        self.landed()
        age_s = None if landed.newest_us is None else max(0.0, time.time() - landed.newest_us / 1e6)
        self._last = landed, time.monotonic() - started, age_s
        process_metrics.LAKE_BATCH_SECONDS.of(str(stream)).observe(self._last[1])
        self.report(self.log.persisted_upto())

    def _write(self, batch: DataFrame, held: frozenset[TableId]) -> Landed | None:
        """Run the job; repeat it for tables whose error may be temporary.

        None if the batch has no row, not even a marker.
        """
        start = Seq(0) if self.pipeline_tables.cut is None else self.pipeline_tables.cut.n
        landed = self._run(batch, held, start)
        backoff = Backoff(0.8, factor=4, most_s=60.0, jitter=0)
        for _ in range(1, ATTEMPTS_MAX):
            failing = [table_id for table_id, error in (landed.errors if landed else {}).items() if _may_pass(error)]
            if landed is None or not failing:
                break
            # Reported at once: a temporary fault, such as a full disk, may also last.
            self._try_again({self._name(table_id): landed.errors[table_id].message for table_id in failing})
            self.wait(backoff.next_s())
            again = self._run(batch.where(batch["table_id"].isin([int(table_id) for table_id in failing])), held, start)
            assert again is not None, "a table that failed has rows"
            landed = _joined(landed, again)
        if self._trying:
            self._try_again({})
        if landed is not None and landed.errors and not landed.commits and all(map(_may_pass, landed.errors.values())):
            # Not one table's fault: the disk, the mount, the network. Setting all tables aside wouldn't help.
            error = next(iter(landed.errors.values()))
            raise EngineError(f"no table of the lake can be written: {error.message}", hint=error.hint, code=error.code)
        return landed

    def _run(self, batch: DataFrame, held: frozenset[TableId], start: Seq) -> Landed | None:
        """Run the job; `start` is where its records begin, or earlier."""
        self.copies.observe(self.log.persisted_upto)
        copies = self.copies
        cut = self.pipeline_tables.cut
        self._places = self._places.followed_by(places_of(cut))
        around = Around(cut, self._places, held, copies.unfinished(start), copies.live, copies.history_only)
        answers = self.config.sink.land(batch, around)
        if not answers:
            return None
        commits: dict[TableId, TableCommit] = {}
        errors: dict[TableId, TableError] = {}
        for answer in answers:
            table_id = TableId(answer["table_id"])
            if answer["commit"] is not None:
                commits[table_id] = TableCommit.from_dict(json.loads(answer["commit"]))
            if answer["error"] is not None:
                errors[table_id] = TableError.from_json(answer["error"])
        assert MARKER not in errors, "a marker has nothing to write"
        times = [answer["commit_us"] for answer in answers if answer["commit_us"] is not None]
        after, upto = Seq(answers[0]["batch_after"]), Seq(answers[0]["batch_upto"])
        versions = {
            TableId(a["table_id"]): SchemaVersion(a["schema_version"]) for a in answers if a["commit"] is not None
        }
        return Landed(after, upto, commits, errors, versions, max(times, default=None))

    def _try_again(self, tables: Mapping[str, str]) -> None:
        self._trying = tables
        self.report(self.log.persisted_upto())

    def _hold(self, table_id: TableId, after: Seq, error: TableError) -> None:
        self.pipeline_tables.hold(
            HeldTable(table_id, self._name(table_id), after, error.message, error.code, error.hint)
        )

    def _name(self, table_id: TableId) -> str:
        name = self.pipeline_tables.tables[table_id].name if table_id in self.pipeline_tables.tables else ""
        schema = None if name else self.log.schemas().get(table_id)
        return name or (f"table {table_id}" if schema is None else schema.full_name)

    def report(self, durable: Seq) -> None:
        """Report the state, once a batch has landed or is retried, or a replay has begun. Any thread.

        Args:
            durable: the log's durable position now.
        """
        with self._reporting:
            self._report(durable)

    def _report(self, durable: Seq) -> None:
        trying, last, cut = self._trying, self._last, self.pipeline_tables.cut
        reached = Seq(0) if cut is None else cut.n
        replay = self.replay.look(reached)
        if last is None and not trying and replay is None:
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


def _may_pass(error: TableError) -> bool:
    return error.retry in {Retry.BACKOFF, Retry.REOPEN}


def _joined(first: Landed, again: Landed) -> Landed:
    """Return a job's answers, updated by those of its repetition for some tables."""
    repeated = set(again.commits) | set(again.errors)
    errors = {table_id: error for table_id, error in first.errors.items() if table_id not in repeated}
    times = [time for time in (first.newest_us, again.newest_us) if time is not None]
    return Landed(
        first.after,
        first.upto,
        {**first.commits, **again.commits},
        {**errors, **again.errors},
        {**first.versions, **again.versions},
        max(times, default=None),
    )
