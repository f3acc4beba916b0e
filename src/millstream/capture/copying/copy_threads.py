"""Threads that read chunks of tables: tasks in the order of their time, each thread with a connection of its own."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import psycopg
import structlog

from millstream.capture.connection import Connection
from millstream.capture.copying.chunk_reader import ChunkReader
from millstream.errors import CodecError, ConfigError, MillstreamError, Retry, SourceError
from millstream.workers import Worker

logger = structlog.get_logger("millstream.capture")

S = TypeVar("S")

_RETRY_S: Final = 1.0
_CANCEL_S: Final = 2.0
_CANCELS_EVERY_S: Final = 0.1
_RETRY_MAX_S: Final = 10.0
_TRANSIENT: Final = frozenset({"55P03", "57014", "42P01", "3F000", "40001", "40P01"})
"""SQLSTATEs after which a task is retried: locks not acquired in time, names that change, conflicts."""

Work = Callable[[ChunkReader], None]


class ChunkWorkers(Generic[S]):
    """Runs tasks, each on behalf of a subject: a table's copy, or its repair. Thread-safe.

    A task that fails with a transient error is retried, later each time; other Millstream errors end the subject.
    """

    def __init__(
        self,
        purpose: str,
        count: int,
        *,
        connect: Callable[[str], Connection],
        reader: Callable[[Connection], ChunkReader],
        wanted: Callable[[S], bool],
        gone: Callable[[S], bool],
        failed: Callable[[S, MillstreamError], None],
        name_of: Callable[[S], str],
        broken: Callable[[], None],
    ) -> None:
        """See the class.

        Args:
            purpose: the purpose in the names of threads and connections.
            connect: opens a connection to the source, given the purpose.
            wanted: whether a subject's tasks are still to be run.
            gone: whether a subject's table has gone, so that no failure is transient.
            failed: ends a subject whose task can't be done.
            broken: called after a task raised an exception that isn't Millstream's: `error` has it, and its thread is
                gone.
        """
        self.error: BaseException | None = None
        self._purpose, self._connect, self._reader = purpose, connect, reader
        self._wanted, self._gone, self._failed = wanted, gone, failed
        self._name_of, self._broken = name_of, broken
        self._tasks: list[tuple[float, int, S, Work, int]] = []
        self._counter = itertools.count()
        self._changed = threading.Condition()
        self._stopped = False
        self._connections: set[Connection] = set()
        self._workers = [Worker(f"millstream-{purpose}-{n}", self._main, on_failure=self.fail) for n in range(count)]

    def start(self) -> None:
        """Start the threads."""
        for worker in self._workers:
            worker.start()

    def stop(self) -> None:
        """End the threads; their queries at the source are cancelled."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        # Again and again: a cancellation ends a query that runs, and none that is about to begin.
        while not all(worker.join(_CANCELS_EVERY_S) for worker in self._workers):
            with self._changed:
                busy = list(self._connections)
            for connection in busy:
                with contextlib.suppress(psycopg.Error):
                    connection.cancel_safe(timeout=_CANCEL_S)

    def check(self) -> None:
        """Raise the error that ended the session, if there is one."""
        if self.error is not None:
            raise self.error

    def fail(self, error: BaseException) -> None:
        """End the session by an error that isn't a subject's own. Any thread."""
        self.error = error
        self._broken()

    def queue(self, subject: S, work: Work, *, after_s: float = 0.0, attempt: int = 0) -> None:
        """Queue a task, to run not before some seconds have passed."""
        with self._changed:
            due = time.monotonic() + after_s
            heapq.heappush(self._tasks, (due, next(self._counter), subject, work, attempt))
            self._changed.notify()

    def _next(self) -> tuple[S, Work, int] | None:
        """Return the next task once its time has come; None at the end."""
        with self._changed:
            while not self._stopped:
                wait_s = self._tasks[0][0] - time.monotonic() if self._tasks else None
                if wait_s is not None and wait_s <= 0:
                    _, _, subject, work, attempt = heapq.heappop(self._tasks)
                    return subject, work, attempt
                self._changed.wait(wait_s)
        return None

    def _main(self) -> None:
        connection: Connection | None = None
        reader: ChunkReader | None = None
        while (task := self._next()) is not None:
            subject, work, attempt = task
            if not self._wanted(subject):
                continue
            try:
                if connection is None or reader is None or connection.closed:
                    connection = self._connect(self._purpose)
                    with self._changed:
                        self._connections = {one for one in self._connections if not one.closed} | {connection}
                    reader = self._reader(connection)
                work(reader)
            except BaseException as error:  # noqa: BLE001 - what isn't the table's own is raised again
                self._on_error(subject, work, attempt + 1, error)
                if connection is not None:
                    connection.close()  # in any state: the next task gets a new one
        if connection is not None:
            connection.close()

    def _on_error(self, subject: S, work: Work, attempt: int, error: BaseException) -> None:
        """End the subject if the source or a value causes the error; raise any other, which ends the session."""
        if not isinstance(error, SourceError | CodecError | ConfigError) and not (
            isinstance(error, MillstreamError) and error.retry is Retry.BACKOFF
        ):
            raise error
        self._again_or_failed(subject, work, attempt, error)

    def _again_or_failed(self, subject: S, work: Work, attempt: int, error: MillstreamError) -> None:
        passes = error.retry is Retry.BACKOFF or error.details.get("sqlstate") in _TRANSIENT
        if passes and not self._gone(subject):
            logger.info("a chunk is tried again", table=self._name_of(subject), error=error.message, attempt=attempt)
            self.queue(subject, work, after_s=min(_RETRY_MAX_S, _RETRY_S * attempt), attempt=attempt)
        else:
            self._failed(subject, error)
