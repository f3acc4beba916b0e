"""The owner: the one process that writes a home's streams. It captures, appends and drops what nobody needs any more.

Each stream has a writer and a thread of its own. One that fails for good is reported, and the others go on; one that
may recover is begun again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import structlog

from millstream.app.control import ControlServer
from millstream.app.home import Home
from millstream.app.locks import RoleLock
from millstream.app.part import Lifeline
from millstream.app.retention import sweep
from millstream.app.wiring import capture_config, log_options, place_compiled_code
from millstream.app.writer_facts import note_capturing_writer, refuse_to_capture, refuse_to_own
from millstream.app.writers import SharedWriter
from millstream.errors import DiskFull, LogError, MillstreamError, Retry, ShardLocked, StaleEpoch
from millstream.model.ids import Epoch, ShardId, StreamId
from millstream.model.operations import FIRST_SHARD

if TYPE_CHECKING:
    from millstream.app.config.model import StreamConfig
    from millstream.capture import CaptureOutcome, CaptureProgress
    from millstream.catalog import Catalog
    from millstream.wal.writer import LogWriter

logger = structlog.get_logger("millstream.owner")

LOCK_PATIENCE_S: Final = 30.0
"""How long a supervised owner waits for one whose supervisor was killed: that one is gone within a second or two."""
_BACKOFF_FIRST_S: Final = 0.5
_BACKOFF_MAX_S: Final = 30.0
_ATTEMPTS_OF_A_JOB: Final = 5
"""How often `--until-caught-up` tries before it fails: some seconds, for a server that is just starting."""


class OwnedStream:
    """One stream of the owner; all but `run` may be looked at from any thread."""

    def __init__(self, home: Home, catalog: Catalog, name: str, config: StreamConfig) -> None:
        self.name: Final = name
        self.config: Final = config
        self.home: Final = home
        self.catalog: Final = catalog
        self.writer: LogWriter | None = None
        self.progress: CaptureProgress | None = None
        self.outcome: CaptureOutcome | None = None
        self.error: MillstreamError | None = None
        self.gave_up = False
        self.crash: Exception | None = None
        """A broken invariant: our bug, which ends the process."""
        self.since_s = time.time()
        self._stream_id: StreamId | None = None

    def run(
        self, stop: threading.Event, *, until_caught_up: bool, tell: Callable[[], None], supervised: bool = False
    ) -> None:
        """Capture until it ends by itself, is stopped, or can't go on. Never raises what is in our tree of errors.

        Args:
            stop: ends it.
            until_caught_up: whether it ends by itself.
            tell: called when there is progress.
            supervised: whether a supervisor says the last error: said twice it would look like two.
        """
        attempt = 0
        while True:
            try:
                self._capture(stop, until_caught_up=until_caught_up, tell=tell)
            except MillstreamError as error:
                self.error = error
                seen = self.progress is not None
                attempt = 1 if seen else attempt + 1
                self.progress = None
                mends_itself = error.retry is Retry.BACKOFF or isinstance(error, DiskFull)
                patient = (error.retry is Retry.REOPEN or mends_itself) and not (
                    until_caught_up and attempt >= _ATTEMPTS_OF_A_JOB
                )
                if not patient or stop.is_set():
                    self.gave_up = True
                    if not supervised:
                        logger.error(  # noqa: TRY400 - a person reads the error, not its traceback
                            "the stream stops", stream=self.name, code=error.code, error=error.message, hint=error.hint
                        )
                    return
                wait_s = min(_BACKOFF_MAX_S, _BACKOFF_FIRST_S * 2 ** min(attempt - 1, 10))
                logger.warning(
                    "the stream begins again",
                    stream=self.name,
                    code=error.code,
                    error=error.message,
                    hint=error.hint,
                    in_s=wait_s,
                )
                if stop.wait(wait_s):
                    return
            except Exception as error:  # noqa: BLE001 - a thread's end must not pass for the end of its work
                self.crash = error
                stop.set()
                return
            else:
                self.error = None if self.outcome is None else self.outcome.error
                return

    def facts(self) -> dict[str, Any]:
        """What is known of it now, JSON-able."""
        progress, writer = self.progress, self.writer
        return {
            "stream": self.name,
            "since": self.since_s,
            "progress": None if progress is None else dataclasses.asdict(progress),
            "writer": None if writer is None else dataclasses.asdict(writer.stats()),
            "outcome": None if self.outcome is None else _outcome_facts(self.outcome),
            "error": None if self.error is None else self.error.as_dict(),
            "gave_up": self.gave_up,
        }

    def drop_old_segments(self) -> None:
        """Let go of segments that nobody needs and that are too old or too many."""
        if self._stream_id is None or self.writer is None:
            return
        sweep(self.catalog, self.name, self._stream_id, self.home.wal_folder(self.name), self.config.log)

    def _capture(self, stop: threading.Event, *, until_caught_up: bool, tell: Callable[[], None]) -> None:
        from millstream.capture import run_capture

        def on_progress(progress: CaptureProgress) -> None:
            self.progress = progress
            tell()

        first_shard = FIRST_SHARD
        with contextlib.ExitStack() as opened:
            if self.home.config.writer.name is None:
                self.writer = opened.enter_context(self.open_writer())
            else:
                stream = self._resolve()
                shared = opened.enter_context(self._join_writers(stream, self.home.config.writer.name))
                self.writer, first_shard = shared.log, shared.shards[0]
                note_capturing_writer(self.catalog, stream, shared.name)
            opened.callback(self._let_go_of_writer)
            self.outcome = run_capture(
                capture_config(self.home, self.name, self.config, first_shard=first_shard),
                self.catalog,
                self.writer,
                stop=stop,
                until_caught_up=until_caught_up,
                on_progress=on_progress,
            )

    def _let_go_of_writer(self) -> None:
        self.writer = None

    def _resolve(self) -> StreamId:
        """The stream's id: that of the log that is there, where there is one."""
        from millstream.wal.reader import StreamReader

        folder = self.home.wal_folder(self.name)
        found = None
        if folder.is_dir():
            with contextlib.suppress(LogError):
                found = StreamReader(str(folder)).stream_id
        self._stream_id = self.catalog.resolve_stream(self.name, found=found)
        return self._stream_id

    def _join_writers(self, stream: StreamId, name: str) -> SharedWriter:
        """Become the one of the stream's writers that captures; `ConfigError` where another one does, else as `SharedWriter.open`."""
        own = self.home.config.writer
        refuse_to_capture(self.catalog, stream, self.name, name)
        return SharedWriter.open(
            self.catalog,
            stream,
            str(self.home.wal_folder(self.name)),
            name=name,
            location=self.home.identity().id,
            lease_s=own.lease_s,
            shard_count=self.config.log.shards,
            first_shard=own.first_shard,
            options=log_options(self.config),
        )

    def open_writer(self) -> LogWriter:
        """Become the stream's writer: a new epoch, the shards' locks, recovery.

        Raises:
            ConfigError: the stream has several writers, and the configuration says of none that it is this one.
            ShardLocked: another process holds a shard, and goes on holding it.
            CorruptWal, DiskFull …: as `LogWriter.open`.
        """
        from millstream.wal.writer import LogWriter

        stream = self._resolve()
        refuse_to_own(self.catalog, stream, self.name)
        above = Epoch(0)
        deadline = time.monotonic() + LOCK_PATIENCE_S
        while True:
            writer, epoch = self.catalog.register_writer(stream, above=above)
            try:
                return LogWriter.open(
                    str(self.home.wal_folder(self.name)),
                    stream=stream,
                    shards=[ShardId(shard) for shard in range(self.config.log.shards)],
                    epoch=epoch,
                    reservations=self.catalog.reservations(stream),
                    options=log_options(self.config),
                    writer=writer,
                )
            except StaleEpoch as error:
                # The shards' locks were ours, so that nobody newer writes: the catalog is older than the log.
                if above >= error.details.get("epoch", 0):
                    raise
                above = Epoch(error.details["epoch"])
            except ShardLocked:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)


def run_owner(
    home: Home, lifeline: Lifeline, *, until_caught_up: bool = False, on_progress: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Own a home until told to stop, or until all its streams have caught up.

    Args:
        home: whose configured streams to capture.
        lifeline: says when to stop, and hears progress.
        until_caught_up: end when all that the sources had committed at the call is durable and copied.
        on_progress: called about once a second a stream, from their threads.

    Returns:
        By stream: `caught_up`, `set_aside`, `slot`, `slot_holds_bytes`, `tables`.

    Raises:
        HomeBusy: another process owns the home.
        MillstreamError: a stream couldn't go on (the first one's error, after the others have ended).
    """
    home.prepare()
    place_compiled_code(home)
    with (
        RoleLock.take(home.run_folder, "owner", patience_s=LOCK_PATIENCE_S if lifeline.supervised else 0.5),
        home.open_catalog() as catalog,
        contextlib.ExitStack() as stack,
    ):
        streams = [OwnedStream(home, catalog, name, config) for name, config in home.config.streams.items()]

        def facts() -> dict[str, Any]:
            return {"streams": {stream.name: stream.facts() for stream in streams}}

        def tell(stream: OwnedStream) -> None:
            told = stream.facts()
            lifeline.tell("progress", told)
            on_progress(told)

        stack.enter_context(ControlServer(home, "owner", {"status": facts}))
        threads = [
            threading.Thread(
                target=stream.run,
                args=(lifeline.stop,),
                kwargs={
                    "until_caught_up": until_caught_up,
                    "tell": lambda stream=stream: tell(stream),
                    "supervised": lifeline.supervised,
                },
                name=f"stream-{stream.name}",
            )
            for stream in streams
        ]
        done = threading.Event()
        keepers = [
            threading.Thread(target=_keep_retention, args=(stream, done), name=f"retention-{stream.name}", daemon=True)
            for stream in streams
        ]
        for thread in (*threads, *keepers):
            thread.start()
        _wait_for(threads, streams, lifeline)
        done.set()
        for keeper in keepers:
            keeper.join()
    for stream in streams:
        if stream.crash is not None:
            raise stream.crash
    failed = [stream.error for stream in streams if stream.gave_up and stream.error is not None]
    outcome = {s.name: _outcome_facts(s.outcome) for s in streams if s.outcome is not None}
    lifeline.tell("outcome", {"streams": outcome})
    if failed:
        raise failed[0]
    return outcome


def _wait_for(threads: list[threading.Thread], streams: list[OwnedStream], lifeline: Lifeline) -> None:
    reported: set[str] = set()
    while any(thread.is_alive() for thread in threads):
        for thread in threads:
            thread.join(0.2)
        for stream in streams:
            # The last one's error is this process's own, and told as such.
            others = any(thread.is_alive() for thread in threads)
            if others and stream.gave_up and stream.error is not None and stream.name not in reported:
                reported.add(stream.name)
                lifeline.tell("stream_failed", {"stream": stream.name, **stream.error.as_dict()})


def _keep_retention(stream: OwnedStream, done: threading.Event) -> None:
    while not done.wait(stream.config.log.retention_interval_s):
        try:
            stream.drop_old_segments()
        except MillstreamError as error:
            logger.warning("retention waits", stream=stream.name, code=error.code, error=error.message)
        except Exception:
            # Our bug. Keeping too much harms less than ending, and the next round may get by it.
            logger.exception("retention failed, and is tried again", stream=stream.name)


def _outcome_facts(outcome: CaptureOutcome) -> dict[str, Any]:
    return {
        "caught_up": outcome.caught_up,
        "reached": int(outcome.reached),
        "tables": list(outcome.tables),
        "set_aside": dict(outcome.set_aside),
        "slot": outcome.slot,
        "slot_holds_bytes": outcome.slot_holds_bytes,
    }
