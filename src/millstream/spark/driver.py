"""A pipeline's driver: a loop of Spark jobs for all tables of a stream, and folds, until it is stopped or caught up.

The driver coordinates and commits; executors read, write and fold. `batch_landing` has the steps of a batch,
`fold_thread` those of a fold. Each batch begins at the lake's last cut, and no other place has a position. The driver ends
in order when `stop` or `drain` is set, and with an error when the engine fails. Then its supervisor starts another
process, because a dead JVM can't be restarted in this one.
"""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Final

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import PySparkException

from millstream.catalog import Catalog
from millstream.catalog.lake_state import keeping_lake_state
from millstream.crdt.hlc import DRIFT_MAX_NS
from millstream.errors import CatalogError, EngineError, LakeError, MillstreamError, OffsetExpired
from millstream.lake.commit_cuts import Cut
from millstream.lake.layout import LakeLayout
from millstream.model.positions import Seq
from millstream.spark.batch_landing import BatchLander
from millstream.spark.batch_pause import INTERVAL_S_MIN, pause_s
from millstream.spark.batch_targets import LakeOfFiles
from millstream.spark.complete_copies import CompleteCopies
from millstream.spark.executor_access import ExecutorLog, ExecutorWatch, check_lake, translated
from millstream.spark.fold_thread import FoldThread
from millstream.spark.initial_replay import ReplayWatch
from millstream.spark.pipeline import OnProgress, PipelineConfig, PipelineOutcome
from millstream.spark.pipeline_tables import PipelineTables, written_us
from millstream.spark.session import open_context
from millstream.spark.unreachable_lake import patiently
from millstream.wal.reader import StreamReader
from millstream.workers import Worker

_POLL_S: Final = 0.1
"""How often the driver checks whether it should stop; a wait inside Python, which costs next to nothing."""
_LAST_S: Final = 30.0
"""How long a driver that ends by an error waits for each thread: if Spark is gone, they end at once."""
_REPORT_S: Final = 1.0
"""Interval of reports while nothing lands, since lags grow."""
_RETRY_ROUND_S: Final = 5.0


def run_pipeline(
    config: PipelineConfig,
    catalog: Catalog,
    *,
    stop: threading.Event,
    drain: threading.Event,
    on_progress: OnProgress = lambda _progress: None,
) -> PipelineOutcome:
    """Run a pipeline until `stop` or `drain`.

    Args:
        catalog: open; used from several threads.
        stop: set from anywhere: end after the batch that is in flight. Data that has landed stays.
        drain: set from anywhere, or before the call: land everything that is durable in the log at that moment, fold
            every table, then end. The log needn't be idle.
        on_progress: called after each cut and each fold, from other threads.

    Returns:
        The lake's position, and which tables were quarantined.

    Raises:
        OffsetExpired: the log no longer has what the lake lacks.
        LakeError (`lake_of_another_log`): the log has records below the lake's position that the lake never got.
        LakeUnavailable: the lake couldn't be reached for minutes, or refuses the keys.
        LakeTableForeign: another program wrote into `_commits`.
        EngineError (`java_missing`), EngineError: Spark doesn't start, or failed; nothing is lost, start another process.
        EngineError (`log_unreachable`, `lake_unreachable`, `executor_version`, `executors_missing`): what a cluster's
            executors lack.
    """
    with keeping_lake_state(catalog, config.stream_id):
        return _run_pipeline(config, catalog, stop, drain, on_progress)


def _run_pipeline(
    config: PipelineConfig, catalog: Catalog, stop: threading.Event, drain: threading.Event, on_progress: OnProgress
) -> PipelineOutcome:
    log = StreamReader(str(config.wal_folder))
    assert log.stream_id == config.stream_id, "the configuration names this log's stream"
    sources = {(source.system_identifier, source.database) for source in catalog.sources(config.stream_id)}
    schemas = catalog.latest_schemas(config.stream_id)
    patiently(lambda: config.target.begin(schemas.values(), sources), wait=stop.wait)
    pipeline_tables = patiently(lambda: PipelineTables(config, catalog), wait=stop.wait)
    take_up(config, log, pipeline_tables)
    context = open_context(config.spark)
    executor_log = ExecutorLog(config, context, catalog)
    hint = log_hint(config)
    with ExecutorWatch(context) as watch, contextlib.closing(executor_log):
        try:
            executor_log.choose()
            catalog.put_fact(f"pipeline/{config.stream_id}", "log_access", executor_log.way)
            if isinstance(config.target, LakeOfFiles):
                patiently(lambda: _check_lake(context, config.layout), wait=stop.wait)
            run = _Run(config, catalog, log, pipeline_tables, context, executor_log, on_progress)
            return run.until(stop, drain)
        except (PySparkException, Py4JError, OSError) as error:
            raise watch.failure(error, hint) from error
        except MillstreamError as error:
            if watch.error is None or watch.error is error:
                raise
            raise watch.error from error


def _check_lake(context: SparkContext, layout: LakeLayout) -> None:
    if (error := check_lake(context, layout)) is not None:
        raise error


def take_up(config: PipelineConfig, log: StreamReader, pipeline_tables: PipelineTables) -> None:
    """Ensure that the log has what the lake lacks, and keeps it.

    Raises:
        OffsetExpired, LakeError: as `run_pipeline`.
    """
    start = Seq(0) if pipeline_tables.cut is None else pipeline_tables.cut.n
    _check_log_reaches(log, start, config)
    if pipeline_tables.cut is not None:
        _check_log_is_the_lakes(log, pipeline_tables.cut, config)
    # Before the first batch: retention may drop nothing above the lake's own cut.
    pipeline_tables.claim(Seq(start + 1))


class _Run:
    """The loop, and what runs next to it."""

    def __init__(
        self,
        config: PipelineConfig,
        catalog: Catalog,
        log: StreamReader,
        pipeline_tables: PipelineTables,
        context: SparkContext,
        executor_log: ExecutorLog,
        on_progress: OnProgress,
    ) -> None:
        self.config = config
        self.log = log
        self.pipeline_tables = pipeline_tables
        self.context = context
        self.news = threading.Event()
        batches = threading.Lock()
        self.copies = CompleteCopies(catalog, config.stream_id)
        self.folder = (
            FoldThread(config, catalog, pipeline_tables, context, self.news.set, batches, self.copies)
            if isinstance(config.target, LakeOfFiles)
            else None
        )
        # A reader of the log belongs to one thread, so each part has its own.
        lander_log = StreamReader(str(config.wal_folder))
        start = Seq(0) if pipeline_tables.cut is None else pipeline_tables.cut.n
        replay = ReplayWatch(str(config.wal_folder), start, log.persisted_upto(), bytes_max=config.batch_bytes_max)
        self.ending = threading.Event()
        pipeline_tables.wait = self.ending.wait
        self.draining = threading.Event()
        """Set once a drain or the end is asked for: no batch waits long for records any longer."""
        self.lander = BatchLander(
            context,
            config,
            catalog,
            lander_log,
            pipeline_tables,
            self.copies,
            executor_log,
            replay,
            on_progress,
            self._landed,
            wait=self.ending.wait,
            lock=batches,
        )
        self.batches = Worker("millstream-batches", self._step, on_failure=lambda _: self.news.set())

    def until(self, stop: threading.Event, drain: threading.Event) -> PipelineOutcome:
        """Land batches; see `run_pipeline`."""
        target: Seq | None = None
        try:
            self.lander.retry_held()
            self.batches.start()
            if self.folder is not None:
                self.folder.start()
            # The first batch is under way: counting what there is to replay takes a moment.
            self.lander.report(self.log.persisted_upto())
            rounds = 0
            while not stop.is_set():
                if drain.is_set() and target is None:
                    target = self.copies.observe(self.log.persisted_upto)
                    self.draining.set()
                if target is not None and self._has(target):
                    break
                self._check()
                self.news.wait(_POLL_S)
                self.news.clear()
                rounds += 1
                if rounds % round(_REPORT_S / _POLL_S) == 0:
                    self.lander.report(self.log.persisted_upto())
                if rounds % round(_RETRY_ROUND_S / _POLL_S) == 0:
                    self.lander.retry_held()
            self._end()
            self.batches.join()
            self.batches.check()
            if self.folder is not None:
                self.folder.stop()
            caught_up = target is not None and not stop.is_set()
            if caught_up:
                self.lander.retry_held()
                if self.folder is not None:
                    self.folder.fold_all()
            return self._outcome(caught_up=caught_up)
        finally:
            # A process that ends while a thread is inside delta-rs may crash, and its error would be lost.
            self._end()
            self.batches.join(_LAST_S)
            if self.folder is not None:
                self.folder.stop(_LAST_S)
            with contextlib.suppress(CatalogError):
                self.pipeline_tables.keep_changes()

    def _end(self) -> None:
        self.ending.set()
        self.draining.set()

    def _step(self) -> bool:
        """Land a batch, then wait for the next one's time, unless a backlog is waiting."""
        started = time.monotonic()
        if not self.lander.land_next():
            interval_ms = self.config.trigger_interval_ms
            left_s = pause_s(time.monotonic() - started, None if interval_ms is None else interval_ms / 1000)
            self.draining.wait(max(0.0, left_s - INTERVAL_S_MIN))
            self.ending.wait(min(left_s, INTERVAL_S_MIN))
        return not self.ending.is_set()

    def _has(self, target: Seq) -> bool:
        """Whether all records up to `target` are in the lake."""
        n = Seq(0) if self.pipeline_tables.cut is None else self.pipeline_tables.cut.n
        # Numbers that were reserved and never used have no record that a batch could bring.
        return n >= target or self.log.cut(n, rows_max=1) == n

    def _landed(self) -> None:
        if self.folder is not None:
            self.folder.wake()
        self.news.set()

    def _check(self) -> None:
        """Raise if the batches, the folds or the JVM have ended."""
        gateway = self.context._gateway  # noqa: SLF001 - there is no public way to its process
        process = getattr(gateway, "proc", None)
        if process is not None and process.poll() is not None:
            raise EngineError(
                f"Spark's Java process ended ({process.returncode})",
                hint=f"Read {self.config.spark.work_dir / 'spark.out'}; the usual cause is a lack of memory.",
            )
        if self.folder is not None and self.folder.failure is not None:
            raise translated(self.folder.failure, log_hint(self.config)) from self.folder.failure
        if self.batches.failure is not None:
            raise translated(self.batches.failure, log_hint(self.config)) from self.batches.failure

    def _outcome(self, *, caught_up: bool) -> PipelineOutcome:
        n = self.pipeline_tables.cut.n if self.pipeline_tables.cut is not None else Seq(0)
        tables = self.pipeline_tables
        errors = {name: {"code": error.code, "hint": error.hint} for name, error in tables.fold_errors().items()}
        return PipelineOutcome(n, self.config.token(n), tables.rows, caught_up, tables.quarantined(), errors)


def log_hint(config: PipelineConfig) -> str:
    """Return the place of Spark's own account of a failure."""
    return f"{config.spark.work_dir / 'spark.log'} has the whole story."


def _check_log_reaches(log: StreamReader, start: Seq, config: PipelineConfig) -> None:
    """Raise if the log begins above what the lake lacks."""
    try:
        log.cut(start)
    except OffsetExpired as error:
        raise OffsetExpired(
            f"the log of {config.stream} begins at {log.first_seq()}, and the lake is at {start}: the records between are gone",
            hint="Restore the lake or the log from a backup. Without one, run `millstream slot drop`, then use a new home and "
            "an empty lake.",
            first=int(log.first_seq()),
        ) from error


def _check_log_is_the_lakes(log: StreamReader, cut: Cut, config: PipelineConfig) -> None:
    """Raise if the log has a group below the lake's position that was written after the lake had reached it.

    Groups' times may be ahead of the clock by as much as regions and writers accept from each other, and the cuts of earlier
    versions have the clock's: that much passes.
    """
    passes_us = (cut.committed_at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(
        microseconds=1
    ) + DRIFT_MAX_NS // 1000
    if written_us(log, cut.n) > passes_us:
        raise LakeError(
            f"the lake had everything up to number {cut.n} at {cut.committed_at.isoformat()}, and the log of "
            f"{config.stream} has records below that were written later",
            code="lake_of_another_log",
            hint=f"Restore the lake and the log from one backup; or begin a new lake: {_how_to_begin_anew(config)}.",
        )


def _how_to_begin_anew(config: PipelineConfig) -> str:
    """Return what gives the stream an empty lake."""
    section = f"[streams.{config.stream}.lake]"
    if not isinstance(config.target, LakeOfFiles):
        return f"name another database in `location` of {section}"
    if config.layout.format == "iceberg":
        return (
            "move the lake's folder and the home's data/iceberg.db away, or name another `location` and another catalog "
            f"in {section}"
        )
    return f"name another `location` in {section}, or move the lake's folder away"
