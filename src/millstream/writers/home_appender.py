"""`append` of an open home: through the process that writes its streams, or as that process if there is none."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
import time
import weakref
from asyncio import wrap_future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import structlog

from millstream.errors import HomeBusy, HomeClosed, MillstreamError, StaleEpoch, WriterClosed
from millstream.home.machine_code_folder import place_compiled_code
from millstream.ingest.append_client import AppendClient, AsyncAppendClient
from millstream.ingest.append_server import AppendServer
from millstream.ingest.appender import Appender
from millstream.ingest.uninterruptible import uninterruptible
from millstream.leadership.node_roles import Roles
from millstream.processes.control_socket import ControlServer, have_done
from millstream.processes.logs import leave_logs_to_application
from millstream.processes.role_locks import RoleLock, holder, writer_role
from millstream.workers import Worker, call_in_thread
from millstream.writers.allowed_writers import refuse_embedded_catalog
from millstream.writers.leased_writer import OwnIncarnations
from millstream.writers.stream_writer import stream_writer

if TYPE_CHECKING:
    from collections.abc import Callable

    from millstream.config.model import StreamConfig
    from millstream.home.home import Home
    from millstream.home.paths import HomePaths
    from millstream.model.operations import Appended
    from millstream.model.writes import AppendBatch, SessionFacts
    from millstream.writers.stream_sinks import OpenOther
    from millstream.writers.stream_writer import StreamWriter

logger = structlog.get_logger("millstream.append")

_Made = TypeVar("_Made")

_ASK_S: Final = 30.0
_TRY_EVERY_S: Final = 0.05
_LOOK_EVERY_S: Final = 0.2
"""How often a process that writes only because no other did checks whether `millstream run` wants the role."""
_RESHARDED_WITHIN_S: Final = 60.0
"""How long a change of the ring may take: a commit group, new segments, and a catalog that must answer."""
_STARTS_WITHIN_S: Final = 30.0
"""How long a process with the writer's role may take until it listens: recovery, or a restart by its supervisor."""


def append_socket(home: Home, writer: str | None) -> Path:
    """Return the socket on which the writer of a home listens for appends."""
    return home.make_socket_folder() / f"{writer_role(writer)}.sock"


_OPEN_HERE: Final[weakref.WeakSet[HomeAppender]] = weakref.WeakSet()


class HomeAppender:
    """Appends to a home's streams, in whichever process writes them. The first append of an `OpenHome` makes it.

    Concurrency: any number of threads. A forked child starts with its own.
    """

    def __init__(self, home: Home, open_other: OpenOther) -> None:
        leave_logs_to_application()
        self._home = home
        self._open_other = open_other
        self._writer = home.config.writer.name
        self._begin()
        _OPEN_HERE.add(self)

    def _begin(self) -> None:
        self._opening = threading.Lock()
        """Held while a way to append is opened, which may take a while; taken before `_lock`."""
        self._lock = threading.Lock()
        """Guards the attributes below, for moments only: event loops take it, too."""
        self._closed = False
        self._client: AppendClient | None = None
        self._clients_of_loops: dict[asyncio.AbstractEventLoop, AsyncAppendClient] = {}
        """The clients for tasks, by event loop."""
        self._own: _OwnWriter | None = None
        self._pid = os.getpid()

    def append_batch(self, stream: str, batch: AppendBatch, *, deadline_s: float) -> list[Appended | MillstreamError]:
        """Append as `Appender.append_batch`, in the process that writes. Also raises `UnknownStream`, `HomeBusy`.

        The deadline bounds the wait for a process that is about to write, too.
        """
        return self._through(
            stream, lambda way, left_s: way.append_batch(stream, batch, deadline_s=left_s), deadline_s=deadline_s
        )

    def session(self, stream: str, name: str, *, deadline_s: float = _ASK_S) -> SessionFacts:
        """Return the session as `Appender.session`, from the process that writes."""
        return self._through(
            stream, lambda way, left_s: way.session(stream, name, deadline_s=left_s), deadline_s=deadline_s
        )

    def _through(
        self, stream: str, call: Callable[[AppendClient | _OwnWriter, float], _Made], *, deadline_s: float
    ) -> _Made:
        """Call the current writer and return its result; retry while a writer starts or hands over.

        The call gets the seconds that are left until the deadline.
        """
        _written(self._home, stream)
        self._begin_in_child()
        wait = _Wait(deadline_s)
        while True:
            way, left_s = None, wait.left_s()
            try:
                way = self._way()
                return call(way, left_s)
            except MillstreamError as error:
                if not self._is_between_writers(error):
                    raise
                self._forget(way)
                if self._closed or wait.is_over():
                    raise
                time.sleep(_TRY_EVERY_S)

    def _is_between_writers(self, error: MillstreamError) -> bool:
        """Whether nothing of a batch was appended, and a writer may take it soon: it hands over, was fenced, or starts.

        Only one of several comes back after it was fenced, once its shards are recovered.
        """
        fenced = {StaleEpoch.code, "writer_alive"} if self._writer else set()
        return isinstance(error, WriterClosed | HomeBusy) or error.code in fenced

    def reshard(self, stream: str, shards: int) -> dict[str, Any]:
        """Reshard a stream as `StreamRouting.reshard`, in the process that writes.

        Raises:
            UnknownStream, RoutingError (`reshard_refused`), DiskFull …: as there.
            HomeBusy: another process writes the home, and doesn't answer.
        """

        def reshard(way: AppendClient | _OwnWriter, _left_s: float) -> dict[str, Any]:
            if isinstance(way, _OwnWriter):
                return way.reshard(stream, shards)
            return self._reshard_there(stream, shards)

        # A repeated request whose change was already made reports no change.
        return self._through(stream, reshard, deadline_s=_STARTS_WITHIN_S)

    def _reshard_there(self, stream: str, shards: int) -> dict[str, Any]:
        asked = {"stream": stream, "shards": shards}
        for role in ("owner", writer_role(self._writer)):
            found = have_done(self._home, role, "reshard", asked, deadline_s=_RESHARDED_WITHIN_S)
            if found is not None:
                return found
        pid = holder(self._home.run_folder, writer_role(self._writer)).get("pid")
        raise HomeBusy(
            f"process {pid or 'unknown'} writes the home, and doesn't answer",
            hint="Repeat the call if the process is starting; `millstream status` shows it and the hash ring in force.",
            pid=pid,
        )

    async def append_batch_async(
        self, stream: str, batch: AppendBatch, *, deadline_s: float
    ) -> list[Appended | MillstreamError]:
        """Append as `append_batch`, for a task of any event loop; the loop isn't blocked."""
        _written(self._home, stream)
        self._begin_in_child()
        wait = _Wait(deadline_s)
        while True:
            way: AppendClient | _OwnWriter | None = None
            left_s = wait.left_s()
            try:
                way = self._ready_way()
                if way is None:
                    way = await wrap_future(call_in_thread("append-opens", self._way))
                if isinstance(way, AppendClient):
                    return await self._client_here().append_batch(stream, batch, deadline_s=left_s)
                appender = way.opened_appender_of(stream)
                if appender is None:
                    appender = await wrap_future(call_in_thread("append-opens", partial(way.appender_of, stream)))
                return await appender.append_batch_async(batch, deadline_s=left_s)
            except MillstreamError as error:
                if not self._is_between_writers(error):
                    raise
                self._forget(way)
                if self._closed or wait.is_over():
                    raise
                await asyncio.sleep(_TRY_EVERY_S)

    def _begin_in_child(self) -> None:
        if self._pid != os.getpid():
            self._begin()

    def _client_here(self) -> AsyncAppendClient:
        """Return the running event loop's client, and drop the clients of loops that have ended."""
        loop = asyncio.get_running_loop()
        with self._lock:
            for other in [other for other in self._clients_of_loops if other.is_closed()]:
                self._clients_of_loops.pop(other).close()
            found = self._clients_of_loops.get(loop)
            if found is None:
                found = AsyncAppendClient(append_socket(self._home, self._writer))
                self._clients_of_loops[loop] = found
            return found

    def _ready_way(self) -> AppendClient | _OwnWriter | None:
        """Return `_way` if that is known without waiting."""
        with self._lock:
            if self._closed or (self._own is not None and self._own.has_ended):
                return None
            return self._own or self._client

    def close(self) -> None:
        """Stop writing the home's streams, if this process does."""
        if self._pid != os.getpid():
            return
        # If it is interrupted, it can be called again.
        self._closed = True
        uninterruptible(self._close)

    def _close(self) -> None:
        with self._opening, self._lock:
            client, own = self._client, self._own
            clients, self._clients_of_loops = self._clients_of_loops, {}
        for of_loop in clients.values():
            of_loop.close()
        if client is not None:
            client.close()
        if own is not None:
            own.close()

    def _way(self) -> AppendClient | _OwnWriter:
        with self._opening:
            with self._lock:
                if self._closed:
                    raise HomeClosed("the home was closed before the append began; nothing was appended")
                if self._own is not None and self._own.has_ended:
                    self._own = None
                way = self._own or self._client
            if way is not None:
                return way
            self._home.prepare()
            if not self._is_written():
                return uninterruptible(self._become)
            client = AppendClient(append_socket(self._home, self._writer))
            with self._lock:
                self._client = client
            return client

    def _become(self) -> _OwnWriter:
        own = _OwnWriter(self._home, self._writer, self._open_other)
        with self._lock:
            self._own = own
        return own

    def _is_written(self) -> bool:
        """Return whether another process is the writer, or is becoming it."""
        role = writer_role(self._writer)
        return bool(holder(self._home.run_folder, role)) or will_write(self._home, self._writer)

    def _forget(self, way: AppendClient | _OwnWriter | None) -> None:
        with self._lock:
            if way is not None and way is self._client:
                self._client.close()
                self._client = None


class _Wait:
    """The wait of one call for a process that writes: until its deadline, and for as long as such a process may start."""

    def __init__(self, deadline_s: float) -> None:
        now_s = time.monotonic()
        self._ends_s = now_s + deadline_s
        self._gives_up_s = now_s + min(deadline_s, _STARTS_WITHIN_S)

    def left_s(self) -> float:
        """Return the seconds until the deadline."""
        return max(0.0, self._ends_s - time.monotonic())

    def is_over(self) -> bool:
        """Return whether to try no more."""
        return time.monotonic() >= self._gives_up_s


def _written(home: Home, stream: str) -> StreamConfig:
    """Return a stream to write to. Raises as `Home.written_stream`; `ReadOnly`, `Fenced` if another node leads it."""
    found = home.written_stream(stream)
    if home.config.replication.nodes:
        Roles(home).check_leads(stream)
    return found


def will_write(home: HomePaths, writer: str | None) -> bool:
    """Return whether `millstream run` or `millstream capture run` of this writer's name writes, or is about to.

    A job (`run --until-caught-up`) whose capture hasn't begun or is done doesn't count: its pipeline goes
    on alone.
    """
    owner, run = (holder(home.run_folder, role) for role in ("owner", "run"))
    return any(facts and facts.get("writer") == writer for facts in (owner, {} if run.get("job") else run))


class _OwnWriter:
    """The home's streams, written by this process for itself and for others that find its socket.

    It ends when `millstream run` starts. From then on that process writes, and this one appends through
    it. Callers that still wait for other machines by then get `NotEnoughReplicas`, and a session repeats its write.

    Raises:
        HomeBusy: another process has just taken the role, and doesn't listen yet.
    """

    def __init__(self, home: Home, writer: str | None, open_other: OpenOther) -> None:
        place_compiled_code(home)
        if writer is not None:
            refuse_embedded_catalog(home)
        self._home = home
        self._open_other = open_other
        self._writer = writer
        self._ended = threading.Event()
        self._closing = threading.Lock()
        self._lock = threading.Lock()
        self._streams: dict[str, tuple[contextlib.ExitStack, StreamWriter]] = {}
        self._before: dict[str, OwnIncarnations] = {}
        with contextlib.ExitStack() as opened:
            opened.enter_context(
                RoleLock.take(
                    home.run_folder,
                    writer_role(writer),
                    what="an application that appends (`millstream.open`)",
                    writer=writer,
                )
            )
            self._catalog = opened.enter_context(home.open_catalog())
            server = AppendServer(append_socket(home, writer), self.appender_of)
            opened.callback(server.close)
            opened.callback(self._let_go)  # first: it answers the callers that the server waits for
            acts = {"reshard": lambda asked: self.reshard(str(asked["stream"]), int(asked["shards"]))}
            opened.enter_context(ControlServer(home, writer_role(writer), {}, acts))
            with self._closing:  # the worker closes it no sooner than all is noted
                Worker("append-steps-aside", self._step_aside).start()
                self._opened = opened.pop_all()

    @property
    def has_ended(self) -> bool:
        """Return whether it takes no more appends."""
        return self._ended.is_set()

    def append_batch(self, stream: str, batch: AppendBatch, *, deadline_s: float) -> list[Appended | MillstreamError]:
        """Append as `Appender.append_batch`."""
        return self.appender_of(stream).append_batch(batch, deadline_s=deadline_s)

    def session(self, stream: str, name: str, *, deadline_s: float) -> SessionFacts:
        """Return the session as `Appender.session`."""
        return self.appender_of(stream).session(name, deadline_s=deadline_s)

    def opened_appender_of(self, stream: str) -> Appender | None:
        """Return the stream's appender if its log is open and takes appends; None if `appender_of` has to open it."""
        if self.has_ended:
            return None
        found = self._streams.get(stream)
        return None if found is None or found[1].log.failure() is not None else found[1].appender

    def appender_of(self, stream: str) -> Appender:
        """Return the stream's appender; raises as `writer_of`."""
        opened = self.opened_appender_of(stream)  # without the lock: another stream's log may be opening
        return self.writer_of(stream).appender if opened is None else opened

    def reshard(self, stream: str, shards: int) -> dict[str, Any]:
        """Reshard as `StreamRouting.reshard`."""
        routing = self.writer_of(stream).routing
        return uninterruptible(lambda: routing.reshard(shards))

    def writer_of(self, stream: str) -> StreamWriter:
        """Return the stream's writer. Opens its log if it isn't open, and reopens it if it has failed."""
        with self._lock:
            if self.has_ended:
                raise WriterClosed("this process writes the home no more")
            found = self._streams.get(stream)
            if found is not None and found[1].log.failure() is not None:
                del self._streams[stream]
                found[0].close()
                found = None
            if found is None:
                found = uninterruptible(lambda: self._open(stream))
            return found[1]

    def _open(self, stream: str) -> tuple[contextlib.ExitStack, StreamWriter]:
        with contextlib.ExitStack() as stack:
            config = _written(self._home, stream)
            before = self._before.setdefault(stream, OwnIncarnations())
            writer = stack.enter_context(
                stream_writer(self._home, self._catalog, stream, config, self._open_other, before=before)
            )
            self._streams[stream] = stack.pop_all(), writer
        return self._streams[stream]

    def close(self) -> None:
        """Answer the waiting callers, and give the role back."""
        with self._closing:
            self._ended.set()
            self._opened.close()

    def _let_go(self) -> None:
        with self._lock:
            self._ended.set()  # also if it never began: the server opens no more streams
            streams, self._streams = self._streams, {}
        with contextlib.ExitStack() as all_of_them:
            for stack, _ in streams.values():
                all_of_them.callback(stack.close)

    def _step_aside(self) -> None:
        roles = Roles(self._home)
        while not self._ended.wait(_LOOK_EVERY_S):
            if not all(roles.leads_surely(stream) for stream in list(self._streams)):
                why = "another node leads from here on"
            elif will_write(self._home, self._writer):
                why = "another process writes from here on"
            else:
                continue
            logger.info(why, home=str(self._home.path))
            for _, writer in list(self._streams.values()):
                writer.log.ends_as(why)
            break
        # Also ends what an interrupted `close` has begun.
        self.close()


@atexit.register
def _close_all() -> None:
    """Answer waiting callers and free the role at once when an application exits without closing."""
    for appender in list(_OPEN_HERE):
        with contextlib.suppress(MillstreamError):
            appender.close()
