"""A pipeline's driver: one streaming query for all tables of a stream, and folds, until it is stopped or caught up.

The driver coordinates; executors read, append and fold. It starts at the lake's last cut, or at
Spark's own notes if they agree with it. It ends in order when `stop` or `drain` is set, and with an
error when the engine fails. Then its supervisor starts another process, because a dead JVM can't be
restarted in this one.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from typing import Final

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from millstream import errors
from millstream.catalog import Catalog
from millstream.errors import EngineError, MillstreamError, OffsetExpired
from millstream.model.positions import Seq
from millstream.private_files import make_folder
from millstream.spark.batches import BatchLander
from millstream.spark.checkpoint import goes_on_from, prepare_checkpoint
from millstream.spark.complete_copies import CompleteCopies
from millstream.spark.folding import FoldThread
from millstream.spark.pipeline import OnProgress, PipelineConfig, PipelineOutcome
from millstream.spark.pipeline_tables import PipelineTables
from millstream.spark.replaying import ReplayWatch
from millstream.spark.session import open_session
from millstream.spark.sinks import LakeOfFiles
from millstream.wal.reader import StreamReader

_POLL_S: Final = 0.1
"""How often the driver checks whether it should stop; a wait inside Python, which costs next to nothing."""
_NOTE_S: Final = 2.0
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
        config: the pipeline.
        catalog: open; used from several threads.
        stop: set from anywhere: end after the batch that is in flight. Data that has landed stays.
        drain: set from anywhere, or before the call: land everything that is durable in the log at that moment, fold
            every table, then end. The log needn't be idle.
        on_progress: called after each cut and each fold, from other threads.

    Returns:
        The lake's position, and which tables were quarantined.

    Raises:
        EngineError (`checkpoint_foreign`): `checkpoint_dir` holds another stream's notes.
        OffsetExpired: the log no longer has what the lake lacks.
        LakeTableForeign: another program wrote into `_commits`.
        EngineError (`java_missing`), EngineError: Spark doesn't start, or failed; nothing is lost, start another process.
    """
    log = StreamReader(str(config.wal_folder))
    assert log.stream_id == config.stream_id, "the configuration names this log's stream"
    sources = {(source.system_identifier, source.database) for source in catalog.sources(config.stream_id)}
    config.sink.begin(catalog.latest_schemas(config.stream_id).values(), sources)
    pipeline_tables = PipelineTables(config, catalog)
    take_up(config, log, pipeline_tables)
    spark = open_session(config.spark)
    return _Run(config, catalog, log, pipeline_tables, spark, on_progress).until(stop, drain)


def take_up(config: PipelineConfig, log: StreamReader, pipeline_tables: PipelineTables) -> None:
    """Ensure that a query may start at the lake's last cut, and that the log keeps what it will read.

    Raises:
        EngineError (`checkpoint_foreign`), OffsetExpired: as `run_pipeline`.
    """
    start = Seq(0) if pipeline_tables.cut is None else pipeline_tables.cut.n
    prepare_checkpoint(
        config.checkpoint_dir, config.stream_id, None if pipeline_tables.cut is None else start, log.first_seq()
    )
    _check_log_reaches(log, start, config)
    # Before the first batch is planned: retention may drop nothing above the lake's own cut, nor
    # the batch that Spark repeats although the lake has it.
    noted = goes_on_from(config.checkpoint_dir, config.stream_id)
    pipeline_tables.claim(Seq((start if noted is None else min(start, noted)) + 1))


class _Run:
    """One query, and what runs next to it."""

    def __init__(
        self,
        config: PipelineConfig,
        catalog: Catalog,
        log: StreamReader,
        pipeline_tables: PipelineTables,
        spark: SparkSession,
        on_progress: OnProgress,
    ) -> None:
        self.config = config
        self.log = log
        self.pipeline_tables = pipeline_tables
        self.spark = spark
        self.news = threading.Event()
        batches = threading.Lock()
        self.copies = CompleteCopies(catalog, config.stream_id)
        self.folder = (
            FoldThread(config, catalog, pipeline_tables, spark, self.news.set, batches, self.copies)
            if isinstance(config.sink, LakeOfFiles)
            else None
        )
        # A reader of the log belongs to one thread, so each part has its own.
        lander_log = StreamReader(str(config.wal_folder))
        start = Seq(0) if pipeline_tables.cut is None else pipeline_tables.cut.n
        replay = ReplayWatch(str(config.wal_folder), start, log.persisted_upto(), bytes_max=config.batch_bytes_max)
        self.lander = BatchLander(
            config, catalog, lander_log, pipeline_tables, self.copies, replay, on_progress, self._landed, lock=batches
        )

    def until(self, stop: threading.Event, drain: threading.Event) -> PipelineOutcome:
        """Run the query; see `run_pipeline`."""
        target: Seq | None = None
        query: StreamingQuery | None = None
        try:
            self.lander.retry_held(self.spark)
            query = self._start()
            if self.folder is not None:
                self.folder.start()
            # The query is starting already: counting what there is to replay takes a moment.
            self.lander.report(self.log.persisted_upto())
            rounds = 0
            while not stop.is_set():
                if drain.is_set() and target is None:
                    target = self.copies.observe(self.log.persisted_upto)
                if target is not None and self._has(target):
                    break
                self._check(query)
                self.news.wait(_POLL_S)
                self.news.clear()
                rounds += 1
                if rounds % round(_REPORT_S / _POLL_S) == 0:
                    self.lander.report(self.log.persisted_upto())
                if rounds % round(_RETRY_ROUND_S / _POLL_S) == 0:
                    self.lander.retry_held(self.spark)
            self.lander.close()
            self._let_note(query)
            query.stop()
            if self.folder is not None:
                self.folder.stop()
            caught_up = target is not None and not stop.is_set()
            if caught_up:
                self.lander.retry_held(self.spark)
                if self.folder is not None:
                    self.folder.fold_all()
            return self._outcome(caught_up=caught_up)
        except (PySparkException, Py4JError, OSError) as error:
            raise self._translated(error) from error
        finally:
            if self.folder is not None:
                self.folder.abandon()
            if query is not None:
                with contextlib.suppress(PySparkException, Py4JError, OSError):
                    query.stop()

    def _start(self) -> StreamingQuery:
        cut = self.pipeline_tables.cut
        frames = self.spark.readStream.format("millstream").options(
            wal=str(self.config.wal_folder),
            layout="frames",
            # Used only if there are no notes of Spark's.
            starting="earliest" if cut is None else self.config.token(cut.n),
            max_bytes_per_trigger=str(self.config.batch_bytes_max),
        )
        make_folder(self.config.checkpoint_dir.parent)
        return (
            frames.load()
            .writeStream.option("checkpointLocation", self.config.checkpoint_dir.absolute().as_uri())
            .trigger(processingTime=f"{self.config.trigger_interval_ms} milliseconds")
            .foreachBatch(self.lander)
            .start()
        )

    def _has(self, target: Seq) -> bool:
        """Whether all records up to `target` are in the lake."""
        n = Seq(0) if self.pipeline_tables.cut is None else self.pipeline_tables.cut.n
        # Numbers that were reserved and never used have no record that a batch could bring.
        return n >= target or self.log.cut(n, rows_max=1) == n

    def _let_note(self, query: StreamingQuery) -> None:
        """Give Spark a moment to note the batch that has just landed; if interrupted, the next run repeats it."""
        deadline = time.monotonic() + _NOTE_S
        while query.isActive and query.status["isTriggerActive"] and time.monotonic() < deadline:
            self.news.wait(_POLL_S / 4)

    def _landed(self) -> None:
        if self.folder is not None:
            self.folder.wake()
        self.news.set()

    def _check(self, query: StreamingQuery) -> None:
        """Raise if the query, the folds or the JVM have ended."""
        gateway = self.spark.sparkContext._gateway  # noqa: SLF001 - there is no public way to its process
        process = getattr(gateway, "proc", None)
        if process is not None and process.poll() is not None:
            raise EngineError(
                f"Spark's Java process ended ({process.returncode})",
                hint=f"Read {self.config.spark.work_dir / 'spark.out'}; the usual cause is a lack of memory.",
            )
        if self.folder is not None and self.folder.failure is not None:
            raise self._translated(self.folder.failure) from self.folder.failure
        if not query.isActive:
            failure = self.lander.failure or query.exception()
            raise self._translated(failure) from failure

    def _translated(self, error: BaseException | None) -> MillstreamError:
        """Return an error of our tree for an error from Spark, py4j or our own code in Spark's threads."""
        known = self.lander.failure or error
        if isinstance(known, MillstreamError):
            return known
        return _typed(str(known)) or EngineError(
            f"Spark failed: {_said(known)}",
            hint=f"{self.config.spark.work_dir / 'spark.log'} has the whole story.",
        )

    def _outcome(self, *, caught_up: bool) -> PipelineOutcome:
        n = self.pipeline_tables.cut.n if self.pipeline_tables.cut is not None else Seq(0)
        return PipelineOutcome(
            n, self.config.token(n), self.pipeline_tables.rows, caught_up, self.pipeline_tables.quarantined()
        )


_DUMP: Final = re.compile(r"\n*(=== Streaming Query ===|JVM stacktrace:)")


def _said(error: BaseException | None) -> str:
    """Return an error's message without the query's plan and Java's stack, which are in Spark's own log."""
    said = "" if error is None else _DUMP.split(str(error), maxsplit=1)[0].strip()
    return said or type(error).__name__


_RAISED: Final = re.compile(r"millstream\.errors\.(?:_\w+\.)?([A-Za-z]+): (.*)")


def _typed(text: str) -> MillstreamError | None:
    """Return the error that one of Spark's Python processes raised; Spark passes its traceback on as text."""
    for name, message in _RAISED.findall(text):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, MillstreamError):
            return kind(message.strip())
    return None


def _check_log_reaches(log: StreamReader, start: Seq, config: PipelineConfig) -> None:
    """Raise if the log begins above what the lake lacks."""
    try:
        log.cut(start)
    except OffsetExpired as error:
        raise OffsetExpired(
            f"the log of {config.stream} begins at {log.first_seq()}, and the lake stands at {start}: what lies between is gone",
            hint="Copy the tables again (`millstream tables copy T`), or restore the lake or the log.",
            first=int(log.first_seq()),
        ) from error
