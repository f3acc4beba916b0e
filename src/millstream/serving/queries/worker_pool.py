"""Callers' queries, run in separate processes that limit what DuckDB doesn't: planning time, memory, a crash.

A worker is started for the first query that finds none free, and answers one query after the other. It is
killed when a query's time is over, its caller goes away, or its answer isn't taken. Its pipe holds it
back while the caller doesn't read.
"""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, TYPE_CHECKING, Final, cast

from millstream.errors import LakeError, MillstreamError, error_of
from millstream.model.query_reasons import REASONS_HEADER, as_header
from millstream.model.region_ages import REGIONS_HEADER
from millstream.private_files import make_folder
from millstream.serving.queries.frames import POSITION_HEADER, Frame, QueryRequest, WorkerStart, read_frame
from millstream.workers import Worker

if TYPE_CHECKING:
    from millstream.home.home import Home
    from millstream.lake.query.query_limits import QueryBounds

_GRACE_S: Final = 0.5
"""How long a worker has to end a query after its time is over: DuckDB stops soon, unless it is planning."""
_SAID_MAX: Final = 4096
_NO_MEMORY: Final = (
    b"bad_alloc",
    b"MemoryError",
    b"memory allocation",
    b"Cannot allocate memory",
    b"can't start new thread",
)


@dataclass(frozen=True, slots=True)
class Asking:
    """One query of a caller."""

    stream: str
    sql: str
    as_of: str | None
    lake_only: bool
    in_pieces: bool


class QueryWorkers:
    """The processes of one server. For several threads."""

    def __init__(self, home: Home, bounds: QueryBounds) -> None:
        self._home = home
        self.bounds: Final = bounds
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, asking: Asking) -> AskedQuery:
        """Return a query that runs once its parts are taken."""
        return AskedQuery(self, asking)

    def close(self) -> None:
        """End the free workers, and the others when their queries end."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.end()

    def take(self, request: QueryRequest, uses: Callable[[_Worker], None]) -> _Worker:
        """Return a worker that has taken a request; `uses` gets each worker before, since it may hang."""
        while True:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            is_new = worker is None
            worker = worker or _Worker(WorkerStart(self._home, self.bounds.memory_bytes, self.bounds.spill_bytes))
            uses(worker)
            if worker.takes(request):
                return worker
            status, said = worker.end()
            if is_new:
                raise LakeError(
                    f"a process for queries didn't start (status {status}): {said.decode(errors='replace')}",
                    code="query_crashed",
                    status=status,
                )

    def give_back(self, worker: _Worker) -> None:
        """Keep a worker whose query has ended."""
        with self._lock:
            if not self._closed:
                self._idle.append(worker)
                return
        worker.end()


class AskedQuery:
    """One query. Its parts are taken by one thread at a time; any thread may call `give_up`."""

    def __init__(self, workers: QueryWorkers, asking: Asking) -> None:
        self._workers = workers
        self._asking = asking
        self._until_s = time.monotonic() + workers.bounds.time_s
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._failure: MillstreamError | None = None
        self.headers: dict[str, str] = {}
        """Headers of the answer, from the first part on: its token, the regions of merged rows, and the reasons why rows may be missing."""

    def give_up(self) -> None:
        """End the query, now or before it begins."""
        self._end(LakeError("the query was cancelled: its caller no longer waits"))

    def parts(self) -> Generator[bytes, None, None]:
        """Yield the answer's bytes, as they are made.

        Raises:
            LakeError (`query_timeout`, `query_memory_full`, `query_spill_full`): it exceeded its limit.
            LakeError (`query_crashed`): its process ended.
            MillstreamError: the errors of `LakeSession.stream`.
        """
        bounds, asking = self._workers.bounds, self._asking
        make_folder(bounds.folder)
        limit = Worker("query-limit", partial(self._end, self._over()), every_s=self._left_s() + _GRACE_S).start()
        free: _Worker | None = None
        try:
            with tempfile.TemporaryDirectory(dir=bounds.folder, ignore_cleanup_errors=True) as folder:
                request = QueryRequest(
                    asking.stream,
                    asking.sql,
                    asking.as_of,
                    asking.lake_only,
                    asking.in_pieces,
                    self._left_s(),
                    folder,
                )
                worker = self._taken(request)
                try:
                    yield from self._frames(worker)
                finally:
                    free = self._leaves(worker)
        finally:
            limit.stop()
            if free is not None:
                self._workers.give_back(free)

    def _taken(self, request: QueryRequest) -> _Worker:
        """Return a worker that has taken the request; raise the query's failure if it was ended before."""
        try:
            return self._workers.take(request, self._runs_in)
        except LakeError as error:
            raise self._failure or error from None

    def _leaves(self, worker: _Worker) -> _Worker | None:
        """Return the worker if it is free for another query; otherwise end it."""
        with self._lock:
            self._worker = None
            is_free = worker.is_free and self._failure is None
        if is_free:
            return worker
        worker.end()
        return None

    def _over(self) -> LakeError:
        time_s = self._workers.bounds.time_s
        return LakeError(f"the query didn't finish within {time_s:g} s", code="query_timeout", time_s=time_s)

    def _left_s(self) -> float:
        return max(0.0, self._until_s - time.monotonic())

    def _runs_in(self, worker: _Worker) -> None:
        with self._lock:
            self._worker = worker
            if self._failure is not None:
                worker.kill()

    def _end(self, error: MillstreamError) -> None:
        with self._lock:
            self._failure = self._failure or error
            if self._worker is not None:
                self._worker.kill()

    def _frames(self, worker: _Worker) -> Iterator[bytes]:
        error: MillstreamError | None = None
        while (frame := worker.next()) is not None:
            kind, body = frame
            if kind == Frame.PART:
                yield body
            elif kind == Frame.TOKEN:
                self.headers[POSITION_HEADER] = body.decode()
            elif kind == Frame.REGIONS:
                self.headers[REGIONS_HEADER] = body.decode()
            elif kind == Frame.REASONS:
                self.headers[REASONS_HEADER] = as_header(body.decode())
            elif kind == Frame.ERROR:
                error = error_of(json.loads(body))
            else:
                worker.is_free = kind == Frame.READY
                if error is not None:
                    # The worker had only the rest of the time.
                    raise self._over() if error.code == "query_timeout" else error
                return
        status, said = worker.end()
        if self._failure is not None:
            raise self._failure
        size = self._workers.bounds.memory_bytes
        # The system kills processes that take more than there is.
        if status == -signal.SIGKILL or any(words in said for words in _NO_MEMORY):
            raise LakeError(
                f"the query needs more than {size} bytes of memory at once", code="query_memory_full", size_max=size
            )
        last = said.decode(errors="replace").strip().rpartition("\n")[2]
        raise LakeError(
            f"the query's process ended with status {status}{': ' if last else ''}{last}",
            code="query_crashed",
            status=status,
        )


class _Worker:
    """A process. One thread at a time, except for `kill`."""

    def __init__(self, start: WorkerStart) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "millstream.serving.queries.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            start_new_session=True,
        )
        self.is_free = False
        """Whether its last query has ended, and it waits for another."""
        self._status: tuple[int, bytes] | None = None
        self._start: WorkerStart | None = start

    def takes(self, request: QueryRequest) -> bool:
        """Hand over a request; return whether the process is there to take it."""
        self.is_free = False
        start, self._start = self._start, None
        if start is not None:
            self._send(start)
        self._send(request)
        return self.next() == (Frame.TAKEN, b"")

    def next(self) -> tuple[int, bytes] | None:
        """Return the next frame, once it comes; None if the process has ended."""
        return read_frame(cast("IO[bytes]", self._process.stdout))

    def kill(self) -> None:
        """End the process; from any thread."""
        self._process.kill()

    def end(self) -> tuple[int, bytes]:
        """End the process and wait for that; return its status, and its last output on stderr."""
        if self._status is None:
            self._process.kill()
            status = self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with suppress(OSError):
                    cast("IO[bytes]", pipe).close()
            with self._said as said:
                said.seek(max(0, said.seek(0, 2) - _SAID_MAX))
                self._status = status, said.read()
        return self._status

    def _send(self, message: WorkerStart | QueryRequest) -> None:
        pipe = cast("IO[bytes]", self._process.stdin)
        with suppress(OSError):  # it has ended: no frame comes
            pickle.dump(message, pipe)
            pipe.flush()
