"""The owner: the one process that writes a home's streams.

It captures, appends and drops segments that are no longer needed. `processes.role_locks` lets only one be it; where
no `run` is, `home_appender` chooses one of the processes that append.

Each stream has a writer and a thread of its own. A stream that fails for good is reported, and the others
go on; a stream that may recover is restarted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import structlog

from millstream.errors import (
    Fenced,
    LogError,
    MillstreamError,
    ReadOnly,
    UnknownStream,
    WriterClosed,
)
from millstream.home.config_mapping import capture_config
from millstream.home.home import Home
from millstream.home.machine_code_folder import place_compiled_code
from millstream.home.retention import is_for_sessions, sweep
from millstream.home.rows_before_rules import kept_raw_values, until_words
from millstream.ingest.append_server import AppendServer
from millstream.leadership.node_roles import Roles
from millstream.model.ids import StreamId
from millstream.processes.catalog_watch import watched_catalog
from millstream.processes.child_process import Lifeline
from millstream.processes.control_socket import ControlServer
from millstream.processes.open_files import raise_open_files
from millstream.processes.role_locks import LOCK_PATIENCE_S, RoleLock, writer_role
from millstream.regions.region_clocks import RegionClocks
from millstream.regions.region_retention import expect_followers, merge_needs
from millstream.regions.retention_folds import MergedFolds
from millstream.regions.state_files import KeptVectors
from millstream.wal.files import error_of_os
from millstream.workers import Worker, watching
from millstream.writers.allowed_writers import note_capturing_writer, refuse_embedded_catalog, refuse_to_capture
from millstream.writers.buffer_consumer import BufferTaking
from millstream.writers.home_appender import append_socket
from millstream.writers.leased_writer import OwnIncarnations
from millstream.writers.left_slots import left_hint, left_slots, left_words
from millstream.writers.stall_reasons import forget_given_up, note_given_up
from millstream.writers.stream_retries import StreamRetries
from millstream.writers.stream_writer import StreamWriter, operation_taker, stream_writer
from millstream.writers.write_buffers import buffer_name, open_buffer

if TYPE_CHECKING:
    from millstream.capture.config import CaptureOutcome, CaptureProgress
    from millstream.catalog import Catalog
    from millstream.config.model import BufferConfig, StreamConfig
    from millstream.config.replication_model import ReplicationConfig
    from millstream.writers.buffer_consumer import TakingProgress
    from millstream.writers.stream_sinks import OpenOther

logger = structlog.get_logger("millstream.owner")

_NOTHING_CAPTURED: Final[dict[str, Any]] = {
    "reached": 0,
    "tables": [],
    "quarantined": {},
    "paused": [],
    "copies_held": {},
    "slot": "",
    "slot_holds_bytes": None,
}
_LOOK_EVERY_S: Final = 0.1


class OwnedStream:
    """One stream of the owner; any thread may read everything except `run`."""

    def __init__(self, home: Home, catalog: Catalog, name: str, config: StreamConfig, open_other: OpenOther) -> None:
        self.name: Final = name
        self.config: Final = config
        self.home: Final = home
        self._open_other: Final = open_other
        self.catalog: Final = catalog
        self.writer: StreamWriter | None = None
        self.progress: CaptureProgress | None = None
        self.taking: TakingProgress | None = None
        """Progress, if the stream reads from a write buffer."""
        self.facts_at_end: dict[str, Any] | None = None
        """The stream's final facts, JSON-able, as `run_owner` returns them."""
        self.error: MillstreamError | None = None
        """Why the stream waits or was given up; None while it makes progress."""
        self.gave_up = False
        self.others_done: Final = threading.Event()
        """Set when no stream captures any longer."""
        self.since_s = time.time()
        self._retries = StreamRetries(is_named=home.config.writer.name is not None)
        self._kept = KeptVectors(home)
        self._folds = MergedFolds(home, name, config, self._kept)
        self._clocks = RegionClocks(home, name, config)
        self._before = OwnIncarnations()
        self._unheard: str | None = None
        """Message of the last logged error about a region's log."""
        self._is_job = False
        """Whether it ends once it has caught up."""
        self._is_supervised = False
        """Whether a supervisor reports the last error, so that it isn't reported twice."""
        self._tell: Callable[[], None] = lambda: None
        """Called when there is progress."""

    def run(
        self, stop: threading.Event, *, until_caught_up: bool, tell: Callable[[], None], supervised: bool = False
    ) -> None:
        """Capture until caught up, stopped, or unable to continue. Never raises an error of our tree.

        Args:
            supervised: whether a supervisor reports the last error, so that it isn't reported twice.
        """
        self._is_job, self._is_supervised, self._tell = until_caught_up, supervised, tell
        roles = Roles(self.home)
        while True:
            try:
                if not self._wait_for_lead(roles, stop):
                    return
                with (
                    stream_writer(
                        self.home,
                        self.catalog,
                        self.name,
                        self.config,
                        self._open_other,
                        check=self._check_captures,
                        before=self._before,
                    ) as writer,
                    _while_it_writes(self.home, self.name, writer, stop) as ended,
                ):
                    self.writer = writer
                    self._run_with(writer, ended)
                    failure = writer.log.failure()
                    if failure is not None and not stop.is_set():
                        self.facts_at_end, self.gave_up = None, False
                        raise failure
                    if not roles.leads_surely(self.name):
                        writer.log.ends_as("another node leads from here on")
                if stop.is_set() or roles.leads(self.name):
                    return
                logger.warning("another node leads", stream=self.name, leader=roles.of(self.name).leader)
            except (ReadOnly, Fenced):
                continue  # just now
            except (MillstreamError, OSError) as error:
                if not self._again(error_of_os(error) if isinstance(error, OSError) else error, stop):
                    return
            finally:
                self.writer = None

    def _wait_for_lead(self, roles: Roles, stop: threading.Event) -> bool:
        """Wait until this node leads the stream; return False if it has to end before.

        A job doesn't wait: there is nothing to capture here.
        """
        while not roles.leads(self.name):
            if self._is_job:
                self.facts_at_end = _NOTHING_CAPTURED | {"caught_up": True}
                self._tell()
                return False
            if stop.wait(_LOOK_EVERY_S):
                return False
        return True

    def _check_captures(self, stream: StreamId) -> None:
        own = self.home.config.writer.name
        if own is not None and self.config.source is not None:
            refuse_to_capture(self.catalog, stream, self.name, own)

    def _run_with(self, writer: StreamWriter, stop: threading.Event) -> None:
        """Capture, and let applications append at the same time, also while the source is away.

        Raises if the writer has failed.
        """
        if self.config.buffer is not None and self.config.buffer.role == "reads":
            self._take_from_buffer(writer, self.config.buffer, stop)
            return
        if self.config.source is None:
            self._gets_on()
            self._tell()
            # A job goes on for as long as the other streams take, so that applications can append.
            while not stop.wait(_LOOK_EVERY_S) and not (self._is_job and self.others_done.is_set()):
                if (failure := writer.log.failure()) is not None:
                    raise failure
                self._hear_regions(writer)
            self.facts_at_end = _NOTHING_CAPTURED | {"caught_up": self._is_job}
            return
        if writer.name is not None:
            note_capturing_writer(self.catalog, writer.stream, writer.name)
        while True:
            try:
                outcome = self._capture(writer, stop)
            except MillstreamError as error:
                if writer.log.failure() is not None:
                    raise
                if not self._again(error, stop):
                    return
            else:
                self.error, self.facts_at_end = outcome.error, _outcome_facts(outcome)
                return

    def _hear_regions(self, writer: StreamWriter) -> None:
        """Make later writes here newer than everything received from other regions.

        A wrong clock elsewhere stops nothing here.
        """
        try:
            self._clocks.hear(writer.log)
        except (MillstreamError, OSError) as error:
            told = error_of_os(error) if isinstance(error, OSError) else error
            if self._unheard != told.message:
                logger.warning("a region's clock can't be read", stream=self.name, code=told.code, error=told.message)
            self._unheard = told.message
        else:
            self._unheard = None

    def _take_from_buffer(self, writer: StreamWriter, config: BufferConfig, stop: threading.Event) -> None:
        """Take the operations that others have put into the stream's buffer."""
        name = buffer_name(self.name, config)
        told_s = 0.0

        def told() -> None:
            nonlocal told_s
            self._retries.reset()
            self._gets_on()
            if time.monotonic() - told_s >= 1.0:
                told_s = time.monotonic()
                self._tell()

        with open_buffer(self.home, self.name, config) as buffer:
            taker = operation_taker(self.catalog, writer, self.config)
            taking = BufferTaking(buffer, name, self.catalog, writer.stream, writer.log, taker)
            self.taking = taking.progress
            try:
                taking.run(stop, until_caught_up=self._is_job, tell=told)
            except MillstreamError as error:
                raise writer.log.failure() or error from None
        self.facts_at_end = _NOTHING_CAPTURED | {"caught_up": self._is_job}

    def _again(self, error: MillstreamError, stop: threading.Event) -> bool:
        """Handle an error: wait and return whether to restart; otherwise the stream is given up, or was stopped."""
        wait_s = self._retries.wait_s(error, is_job=self._is_job)
        self._waits(error)
        if wait_s is None or stop.is_set():
            self.gave_up = True
            if not stop.is_set():
                note_given_up(self.catalog, self.name, "capture", error)
            if not self._is_supervised:
                logger.error(
                    "the stream stops", stream=self.name, code=error.code, error=error.message, hint=error.hint
                )
            return False
        logger.warning(
            "the stream begins again",
            stream=self.name,
            code=error.code,
            error=error.message,
            hint=error.hint,
            in_s=round(wait_s, 2),
        )
        return not stop.wait(wait_s)

    def _gets_on(self) -> None:
        """Note that the stream makes progress again: the cause of its wait is over."""
        if self._retries.note_progress():
            self.error = None
            forget_given_up(self.catalog, self.name, "capture")

    def _waits(self, error: MillstreamError) -> None:
        """Note that the stream waits, and why: its known progress is out of date."""
        self.error, self.progress = error, None
        self._retries.note_wait()

    def facts(self) -> dict[str, Any]:
        """Return the current facts, JSON-able."""
        progress, writer = self.progress, self.writer
        return {
            "stream": self.name,
            "since": self.since_s,
            "progress": None if progress is None else dataclasses.asdict(progress),
            "buffer": self._buffer_facts(),
            "writer": None if writer is None else dataclasses.asdict(writer.log.stats()),
            "outcome": self.facts_at_end,
            "error": None if self.error is None else self.error.as_dict(),
            "gave_up": self.gave_up,
        }

    def _buffer_facts(self) -> dict[str, Any] | None:
        """Return the write buffer's facts, if there is one."""
        if self.config.buffer is None:
            return None
        if self.taking is not None:
            return self.taking.facts()
        return {"name": buffer_name(self.name, self.config.buffer), "role": self.config.buffer.role}

    def fold_merged_tables(self) -> None:
        """Fold the merged tables for which retention keeps segments."""
        writer = self.writer
        if writer is not None:
            self._folds.look(self.catalog, writer.stream)

    def drop_old_segments(self) -> None:
        """Drop segments that are no longer needed and are too old or too many."""
        writer = self.writer
        if writer is None:
            return
        expect_followers(self.catalog, self.name, writer.stream, self.config, _replication_now(self.home))
        merges = merge_needs(self.catalog, self.name, writer.stream, self.config, self._kept)
        swept = sweep(self.catalog, self.name, writer.stream, self.home.wal_folder(self.name), self.config.log, merges)
        if is_for_sessions(swept):
            writer.log.copy_sessions()  # the next round drops it

    def _capture(self, writer: StreamWriter, stop: threading.Event) -> CaptureOutcome:
        from millstream.capture.run import run_capture

        def on_progress(progress: CaptureProgress) -> None:
            self._gets_on()
            self.progress = progress
            self._tell()

        with contextlib.suppress(LogError, OSError):  # `status` and `doctor` report it
            for raw in kept_raw_values(self.home, self.catalog, self.name, writer.stream, time.time()).values():
                logger.warning(
                    "older values are kept", code="raw_values_kept", table=raw["table"], reason=until_words(raw)
                )
        return run_capture(
            capture_config(self.home, self.name, self.config, first_shard=writer.first_shard),
            self.catalog,
            writer.log,
            stop=stop,
            until_caught_up=self._is_job,
            on_progress=on_progress,
            on_wait=self._waits,
        )


def _replication_now(home: Home) -> ReplicationConfig:
    """Return who may follow, from the current file: `serve` may have restarted with another one.

    If it can't be read, the previous settings.
    """
    with contextlib.suppress(MillstreamError):
        return Home(home.path, needs_source=False).config.replication
    return home.config.replication


@contextlib.contextmanager
def _while_it_writes(home: Home, name: str, writer: StreamWriter, stop: threading.Event) -> Iterator[threading.Event]:
    """Yield an event that is set with `stop`, and once this node no longer leads the stream, or its writer has failed.

    One of several writers may be fenced while nothing is appended, and capture of a quiet source wouldn't notice it.
    """
    if not home.config.replication.nodes and writer.name is None:
        yield stop
        return
    roles = Roles(home)

    def writes() -> bool:
        return writer.log.failure() is None and (not home.config.replication.nodes or roles.leads_surely(name))

    with watching(f"writes-{name}", _LOOK_EVERY_S, writes, stop=stop) as ended:
        yield ended


def run_owner(
    home: Home,
    lifeline: Lifeline,
    *,
    open_other: OpenOther,
    until_caught_up: bool = False,
    on_progress: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Own a home until told to stop, or until all its streams have caught up.

    Args:
        open_other: opens the homes that its sinks are.
        until_caught_up: end when everything that the sources had committed at the call is durable and
            copied.
        on_progress: called about once a second per stream, from the streams' threads.

    Returns:
        By stream: `caught_up`, `quarantined`, `paused`, `slot`, `slot_holds_bytes`, `tables`.

    Raises:
        HomeBusy: another process owns the home.
        ConfigError: it configures no stream.
        MillstreamError: a stream couldn't go on (the first one's error, after the others have ended).
    """
    home.check_names_stream()
    raise_open_files()
    home.prepare()
    place_compiled_code(home)
    if home.config.writer.name is not None:
        refuse_embedded_catalog(home)
    with (
        RoleLock.take(
            home.run_folder,
            "owner",
            patience_s=LOCK_PATIENCE_S if lifeline.supervised else 0.5,
            writer=home.config.writer.name,
        ),
        # An application that has been writing gives up the role, once it has answered its waiting
        # callers.
        RoleLock.take(home.run_folder, writer_role(home.config.writer.name), patience_s=LOCK_PATIENCE_S),
        home.open_catalog() as catalog,
        watched_catalog(home, lifeline),
        contextlib.ExitStack() as stack,
    ):
        _warn_of_left_slots(home, catalog)
        streams = [OwnedStream(home, catalog, name, config, open_other) for name, config in home.config.streams.items()]

        def facts() -> dict[str, Any]:
            return {"streams": {stream.name: stream.facts() for stream in streams}}

        def tell(stream: OwnedStream) -> None:
            told = stream.facts()
            lifeline.tell("progress", told)
            on_progress(told)

        by_name = {stream.name: stream for stream in streams}
        acts = {
            "reshard": lambda asked: _writer_of(by_name, str(asked["stream"])).routing.reshard(int(asked["shards"]))
        }
        stack.enter_context(ControlServer(home, "owner", {"status": facts}, acts))
        socket = append_socket(home, home.config.writer.name)
        server = AppendServer(socket, lambda stream: _writer_of(by_name, stream).appender)
        stack.callback(server.close)
        for stream in streams:
            every_s = stream.config.log.retention_interval_s
            stack.enter_context(watching(f"retention-{stream.name}", every_s, partial(_keep_retention, stream)))
        workers = [
            Worker(
                f"stream-{stream.name}",
                partial(
                    stream.run,
                    lifeline.stop,
                    until_caught_up=until_caught_up,
                    tell=partial(tell, stream),
                    supervised=lifeline.supervised,
                ),
                on_failure=lambda _: lifeline.stop.set(),  # our bug, which ends the process
            ).start()
            for stream in streams
        ]
        _wait_for(workers, streams, lifeline)
    for worker in workers:
        worker.check()
    failed = [stream.error for stream in streams if stream.gave_up and stream.error is not None]
    outcome = {s.name: s.facts_at_end for s in streams if s.facts_at_end is not None}
    lifeline.tell("outcome", {"streams": outcome})
    if failed:
        raise failed[0]
    return outcome


def _warn_of_left_slots(home: Home, catalog: Catalog) -> None:
    with contextlib.suppress(MillstreamError):
        for row in catalog.streams():
            for noted in left_slots(home, catalog, row.id):
                logger.warning(left_words(noted), stream=row.name, code="slot_left", hint=left_hint(row.name, noted))


def _writer_of(streams: dict[str, OwnedStream], name: str) -> StreamWriter:
    """Return a stream's writer; `WriterClosed` while it starts."""
    stream = streams.get(name)
    if stream is None:
        raise UnknownStream(f"the process that writes has no stream {name}: it was started before there was one")
    if stream.gave_up and stream.error is not None:
        raise stream.error
    writer = stream.writer
    if writer is None:
        Roles(stream.home).check_leads(name)
        raise WriterClosed(f"the log of {name} is just being opened; nothing of it was appended")
    return writer


def _wait_for(workers: list[Worker], streams: list[OwnedStream], lifeline: Lifeline) -> None:
    reported: set[str] = set()
    capturing = [worker for worker, stream in zip(workers, streams, strict=True) if stream.config.source is not None]
    while any(worker.is_alive for worker in workers):
        if not any(worker.is_alive for worker in capturing):
            for stream in streams:
                stream.others_done.set()
        for worker in workers:
            worker.join(0.2)
        for stream in streams:
            # The last stream's error is this process's own, and reported as such.
            others = any(worker.is_alive for worker in workers)
            if others and stream.gave_up and stream.error is not None and stream.name not in reported:
                reported.add(stream.name)
                lifeline.tell("stream_failed", {"stream": stream.name, **stream.error.as_dict()})


def _keep_retention(stream: OwnedStream) -> bool:
    try:
        stream.fold_merged_tables()
        stream.drop_old_segments()
    except MillstreamError as error:
        logger.warning("retention waits", stream=stream.name, code=error.code, error=error.message)
    except Exception:
        # Our bug. Keeping too much does less harm than ending, and the next round may succeed.
        logger.exception("retention failed, and is tried again", stream=stream.name)
    return True


def _outcome_facts(outcome: CaptureOutcome) -> dict[str, Any]:
    return {
        "caught_up": outcome.caught_up,
        "reached": int(outcome.reached),
        "tables": list(outcome.tables),
        "quarantined": dict(outcome.quarantined),
        "paused": list(outcome.paused),
        "copies_held": dict(outcome.copies_held),
        "slot": outcome.slot,
        "slot_holds_bytes": outcome.slot_holds_bytes,
    }
