"""The pipelines' process: one Spark session, and for each stream a driver thread that lands its log in the lake."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import structlog

from millstream.app.cluster import ACT, UNTESTED, checks_in
from millstream.app.master_watch import MasterWatch
from millstream.errors import EngineError, LogError, MillstreamError, may_pass
from millstream.errors.missing_extras import missing_extra
from millstream.home.config_mapping import pipeline_config, spark_options
from millstream.home.home import Home
from millstream.leadership.node_roles import Roles, ending_with_lead
from millstream.model.addresses import mask_address
from millstream.model.ids import StreamId
from millstream.processes.catalog_watch import watched_catalog
from millstream.processes.child_process import Lifeline
from millstream.processes.control_socket import ControlServer
from millstream.processes.role_locks import LOCK_PATIENCE_S, RoleLock
from millstream.workers import Worker
from millstream.writers.stall_reasons import forget_given_up, note_given_up

if TYPE_CHECKING:
    from millstream.catalog import Catalog
    from millstream.config.model import StreamConfig
    from millstream.regions.lake_folds import MergedViews
    from millstream.spark.pipeline import PipelineConfig, PipelineOutcome, PipelineProgress

logger = structlog.get_logger("millstream.pipeline")

_LOOK_EVERY_S: Final = 0.1
_SPARK_READY_S: Final = 200.0
_NO_MASTER: Final = "waiting for Spark's master, which doesn't answer"
_REPLAY_LINE_S: Final = 20.0
"""Seconds between log lines about a replay's progress."""


class StreamPipeline:
    """One stream's pipeline; any thread may read everything except `run`."""

    def __init__(self, home: Home, catalog: Catalog, name: str, config: StreamConfig) -> None:
        self.name: Final = name
        self._home = home
        self._catalog = catalog
        self._config = config
        self.progress: PipelineProgress | None = None
        self.outcome: PipelineOutcome | None = None
        self.error: MillstreamError | None = None
        self._replay_said_s = 0.0
        self._goes_on = False  # whether it has landed something, or had nothing to land
        self._merged: MergedViews | None = None

    def run(self, lifeline: Lifeline, tell: Callable[[], None]) -> None:
        """Land the stream until told to stop or drained.

        `error` holds the cause of its end; only a bug is raised, which ends the process.
        """

        def on_progress(progress: PipelineProgress) -> None:
            if self._merged is not None and (failed := self._merged.failed):
                reasons = {name: error.message for name, error in failed.items()}
                progress = dataclasses.replace(progress, quarantined={**progress.quarantined, **reasons})
            self._say_quarantined(progress.quarantined)
            self._say_trying(progress.trying)
            self._say_replay(progress)
            if not self._goes_on and (progress.batch_s or not progress.lag_records):
                self._goes_on = True
                forget_given_up(self._catalog, self.name, "pipeline")
            self.progress = progress
            tell()

        try:
            # Imported here: a failing import must not pass for the end of the work.
            from millstream.spark.driver import run_pipeline

            stream = self._wait_for_log(lifeline)
            if stream is None:
                return
            config = pipeline_config(self._home, self.name, self._config, stream)
            with self._merged_views(config, lifeline) as merged:
                self._merged = merged
                outcome = run_pipeline(
                    config, self._catalog, stop=lifeline.stop, drain=lifeline.drain, on_progress=on_progress
                )
            if merged is not None and outcome.caught_up:
                merged.fold_all()
                failed = merged.failed
                outcome = dataclasses.replace(
                    outcome,
                    quarantined={**outcome.quarantined, **{name: error.message for name, error in failed.items()}},
                    fold_errors={
                        **outcome.fold_errors,
                        **{name: {"code": error.code, "hint": error.hint} for name, error in failed.items()},
                    },
                )
            self.outcome = outcome
            if outcome.caught_up:
                forget_given_up(self._catalog, self.name, "pipeline")
        except MillstreamError as error:
            self.error = error
            # An error after a stop may come of it, unless no restart mends it.
            if not (self.is_retried and lifeline.stop.is_set()):
                note_given_up(self._catalog, self.name, "pipeline", error)
            if not lifeline.supervised or len(self._home.config.streams) > 1:
                # A supervisor reports a single stream's error.
                logger.error(  # noqa: TRY400 - a person reads the error, not its traceback
                    "the pipeline stops", stream=self.name, code=error.code, error=error.message, hint=error.hint
                )
            if self.is_retried:
                # Another process may do better: the others drain, this one ends, and the supervisor
                # restarts it.
                lifeline.stop.set()

    @property
    def is_retried(self) -> bool:
        """Whether it ended by an error that another process may not meet."""
        return self.error is not None and may_pass(self.error.code, self.error.retry)

    @contextlib.contextmanager
    def _merged_views(self, config: PipelineConfig, lifeline: Lifeline) -> Iterator[MergedViews | None]:
        """Fold the stream's merged views until the block ends; None if its lake has none."""
        if "merged" not in config.views:
            yield None
            return
        # It runs in this process: it needs the regions' logs, and no Spark.
        from millstream.regions.lake_folds import MergedRules, MergedViews

        rules = MergedRules(config.fold_interval_s, config.disk_factor, config.maintenance, config.fold_sizes)
        merged = MergedViews(self._home, self.name, config.layout, rules, on_failure=lambda _: lifeline.stop.set())
        merged.start()
        try:
            yield merged
        finally:
            merged.stop()

    def _say_quarantined(self, now: Mapping[str, str]) -> None:
        """Log each table that was quarantined, or that continues, since the last progress."""
        before = {} if self.progress is None else self.progress.quarantined
        for table in sorted(now.keys() - before.keys()):
            logger.warning(
                "table quarantined; `millstream tables` says what to run",
                stream=self.name,
                table=table,
                reason=now[table],
            )
        for table in sorted(before.keys() - now.keys()):
            logger.info("table goes on", stream=self.name, table=table)

    def _say_trying(self, now: Mapping[str, str]) -> None:
        """Log each new reason for which tables' writes fail."""
        before = {} if self.progress is None else self.progress.trying
        for reason in sorted(set(now.values()) - set(before.values())):
            tables = ", ".join(sorted(table for table, told in now.items() if told == reason))
            logger.warning("can't be written, and is tried again", stream=self.name, table=tables, reason=reason)

    def _say_replay(self, now: PipelineProgress) -> None:
        """Log when a replay begins, periodically while it lasts, and when it is over."""
        before, replay = self.progress, now.replay
        if replay is not None and (before is None or before.replay is None):
            self._replay_said_s = time.monotonic()
            logger.info(
                "replay begins: the log has what the lake lacks",
                stream=self.name,
                segments=replay.segments.left,
                records=replay.records.left,
                bytes=replay.size_bytes.left,
            )
        elif replay is not None and time.monotonic() - self._replay_said_s >= _REPLAY_LINE_S:
            self._replay_said_s = time.monotonic()
            logger.info(
                "replaying",
                stream=self.name,
                segments_done=replay.segments.done,
                segments_left=replay.segments.left,
                records_done=replay.records.done,
                records_left=replay.records.left,
                bytes_done=replay.size_bytes.done,
                bytes_left=replay.size_bytes.left,
                eta_s=None if replay.eta_s is None else round(replay.eta_s),
            )
        if now.replayed is not None and (before is None or before.replayed is None):
            done = now.replayed
            logger.info(
                "replay is over: the lake has everything that the log had at the start",
                stream=self.name,
                segments=done.segments.done,
                records=done.records.done,
                bytes=done.size_bytes.done,
                seconds=round(done.seconds, 1),
            )

    def facts(self) -> dict[str, Any]:
        """Return the current facts, JSON-able."""
        progress = self.progress
        return {
            "stream": self.name,
            "progress": None if progress is None else _progress_facts(progress),
            "outcome": None if self.outcome is None else _outcome_facts(self.outcome),
            "error": None if self.error is None else self.error.as_dict(),
            "gave_up": self.error is not None and not self.is_retried,
        }

    def _wait_for_log(self, lifeline: Lifeline) -> StreamId | None:
        """Return the stream's id once there is a log to read, and this node leads it; None if the work ended before."""
        from millstream.wal.reader import StreamReader

        while not lifeline.stop.is_set():
            folder = self._home.wal_folder(self.name)
            if folder.is_dir() and Roles(self._home).leads(self.name):
                with contextlib.suppress(LogError):
                    return StreamReader(str(folder)).stream_id
            if lifeline.drain.is_set():
                return None
            lifeline.stop.wait(_LOOK_EVERY_S)
        return None


def run_pipelines(home: Home, lifeline: Lifeline, *, on_progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Land every configured stream until told to stop, or to drain and end.

    Returns:
        By stream: `n`, `token`, `rows`, `caught_up`, `quarantined`, `fold_errors`.

    Raises:
        HomeBusy: another process runs the home's pipelines.
        ConfigError: it configures no stream.
        UsageError (`missing_extra`): pyspark isn't installed.
        MillstreamError: a pipeline couldn't go on (one's error, after the others have ended; if another process may do
            better for one of them, that one's).
    """
    home.check_names_stream()
    home.prepare()
    try:
        from millstream.spark.session import open_context
    except ImportError as error:
        raise missing_extra(f"the pipeline needs {error.name}", "spark") from error
    with (
        RoleLock.take(home.run_folder, "pipeline", patience_s=LOCK_PATIENCE_S if lifeline.supervised else 0.5),
        home.open_catalog() as catalog,
        watched_catalog(home, lifeline),
        contextlib.ExitStack() as stack,
    ):
        pipelines = [StreamPipeline(home, catalog, name, config) for name, config in home.config.streams.items()]

        def facts() -> dict[str, Any]:
            waits = {"waits_for": master.waits_for}
            return {"streams": {pipeline.name: pipeline.facts() | waits for pipeline in pipelines}}

        def tell(pipeline: StreamPipeline) -> None:
            told = pipeline.facts()
            lifeline.tell("progress", told)
            on_progress(told)

        def examined(_arguments: Mapping[str, Any]) -> dict[str, Any]:
            if not is_ready.wait(_SPARK_READY_S):
                raise EngineError("the pipeline's Spark is still starting", hint="Run `millstream doctor` again later.")
            return {"checks": checks_in(open_context(spark_options(home)), home, catalog)}

        master = MasterWatch(home.config.spark.master, lambda: _say_silence(home, lifeline))
        is_ready = threading.Event()
        stack.enter_context(ControlServer(home, "pipeline", {"status": facts}, {ACT: examined}))
        if not _wait_for_lead(home, lifeline):
            return {}
        if home.config.spark.is_untested:
            logger.warning(UNTESTED, code="master_untested", master=mask_address(home.config.spark.master))
        # Spark starts while capture is still finding its position; the threads below share the session.
        with master.watching(), noted(catalog, home.config.streams):
            if not _start_spark(lifeline, lambda: open_context(spark_options(home))):
                return {}
        is_ready.set()
        workers = [
            Worker(
                f"pipeline-{pipeline.name}",
                partial(pipeline.run, lifeline, partial(tell, pipeline)),
                on_failure=lambda _: lifeline.stop.set(),
            ).start()
            for pipeline in pipelines
        ]
        with ending_with_lead(home, lifeline):
            for worker in workers:
                worker.join()
    for worker in workers:
        worker.check()
    outcome = {p.name: _outcome_facts(p.outcome) for p in pipelines if p.outcome is not None}
    lifeline.tell("outcome", {"streams": outcome})
    if (cause := first_error(pipelines)) is not None:
        raise cause
    return outcome


def first_error(pipelines: Sequence[StreamPipeline]) -> MillstreamError | None:
    """Return the error that ends the pipelines' process: one that another process may not meet comes first.

    By an error that no restart mends, the supervisor gives the process up, and none of the streams would go on.
    """
    errors = [pipeline.error for pipeline in sorted(pipelines, key=lambda one: not one.is_retried)]
    return next((error for error in errors if error is not None), None)


@contextlib.contextmanager
def noted(catalog: Catalog, streams: Iterable[str]) -> Iterator[None]:
    """Record an error of the block as the one that ends the pipelines of all streams."""
    try:
        yield
    except MillstreamError as error:
        for name in streams:
            note_given_up(catalog, name, "pipeline", error)
        raise


def _wait_for_lead(home: Home, lifeline: Lifeline) -> bool:
    """Wait until this node leads one of its streams: a stream's leader lands it. False if the work ended before."""
    roles = Roles(home)
    while not any(roles.leads_surely(name) for name in home.config.streams):
        for name in home.config.streams:
            roles.of(name)  # an unreadable one is reported
        if lifeline.drain.is_set() or lifeline.stop.wait(_LOOK_EVERY_S):
            return False
    return True


def _start_spark(lifeline: Lifeline, start: Callable[[], object]) -> bool:
    """Start Spark and report it; False if there is nothing left to do.

    A supervised process that is told to stop before it has begun doesn't wait for Spark: it ends at once.
    """
    starting = threading.Event()

    def leave() -> None:
        if lifeline.supervised and lifeline.stop.is_set() and starting.is_set():
            os._exit(0)

    lifeline.on_word(leave)
    starting.set()
    if lifeline.stop.is_set():
        return False
    _say_spark(lifeline, "starting", None)
    began_s = time.monotonic()
    start()
    starting.clear()
    _say_spark(lifeline, "ready", round(time.monotonic() - began_s, 1))
    return True


def _say_silence(home: Home, lifeline: Lifeline) -> None:
    """Report that Spark waits for a master that doesn't answer."""
    master = mask_address(home.config.spark.master)
    if lifeline.supervised:
        lifeline.tell("spark", {"state": "waiting", "master": master})
    else:
        logger.warning(_NO_MASTER, master=master)


def _say_spark(lifeline: Lifeline, state: str, seconds: float | None) -> None:
    if lifeline.supervised:
        lifeline.tell("spark", {"state": state, "seconds": seconds})
    elif seconds is None:
        logger.info("starting Spark")
    else:
        logger.info("ready", seconds=seconds)


def _progress_facts(progress: PipelineProgress) -> dict[str, Any]:
    facts = dataclasses.asdict(progress)
    facts["quarantined"], facts["trying"] = dict(progress.quarantined), dict(progress.trying)
    for which, replay in (("replay", progress.replay), ("replayed", progress.replayed)):
        facts[which] = None if replay is None else replay.as_dict()
    return facts


def _outcome_facts(outcome: PipelineOutcome) -> dict[str, Any]:
    return {
        "n": int(outcome.n),
        "token": outcome.token,
        "rows": outcome.rows,
        "caught_up": outcome.caught_up,
        "quarantined": dict(outcome.quarantined),
        "fold_errors": {name: dict(facts) for name, facts in outcome.fold_errors.items()},
    }
