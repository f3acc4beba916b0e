"""Clients of a writer's socket, for threads and for the tasks of an event loop.

The exchange over a connection is written once, as generators of steps (`model.steps`).
"""

from __future__ import annotations

import asyncio
import json
import select
import socket
import threading
from collections.abc import Generator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from millstream.errors import MillstreamError, WriterClosed
from millstream.ingest import socket_protocol as protocol
from millstream.model.steps import run, run_async

if TYPE_CHECKING:
    from millstream.model.operations import Appended
    from millstream.model.writes import AppendBatch, SessionFacts

CONNECTIONS_MAX: Final = 64
"""Limit of one client's connections for tasks: a writer's commit group takes all batches that have arrived, and more
connections only move the wait."""
_PIECE_BYTES: Final = 1 << 20


class _Connect(NamedTuple):
    path: str
    patience_s: float


class _Send(NamedTuple):
    data: Any
    patience_s: float


class _Receive(NamedTuple):
    size_bytes: int
    patience_s: float


_Io: TypeAlias = _Connect | _Send | _Receive
"""A step on a connection. It raises `TimeoutError` after its patience."""


class AppendClient:
    """Appends through a writer's socket. Any number of threads: a request uses its connection alone.

    Args:
        patience_s: how long an answer may take beyond a call's deadline.
    """

    def __init__(self, path: Path, *, patience_s: float = protocol.ANSWER_PATIENCE_S) -> None:
        self._path, self._patience_s = path, patience_s
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()

    def append_batch(self, stream: str, batch: AppendBatch, *, deadline_s: float) -> list[Appended | MillstreamError]:
        """Append as `Appender.append_batch`, in the process that writes.

        Raises:
            WriterClosed: no process listens, or it ended before the request was whole: nothing was
                appended.
            IngestError (`writer_version_differs`): the listening process is of another version.
            AppendOutcomeUnknown: it ended, or hangs, without an answer.
            MillstreamError: any error that the writer's process raised.
        """
        head, body = protocol.asking(stream, batch, deadline_s)
        return protocol.outcomes_of(self._asked(head, body, deadline_s))

    def session(self, stream: str, name: str, *, deadline_s: float) -> SessionFacts:
        """Return the session as `Appender.session`. Raises as `append_batch`."""
        return protocol.session_told(self._asked(protocol.asking_session(stream, name), b"", deadline_s))

    def _asked(self, head: bytes, body: Any, deadline_s: float) -> dict[str, Any]:
        with self._lock:
            connection, steps = _taken(self._idle, self._path)
        try:
            do = partial(_do, connection)
            run(steps, do)
            answer = run(_exchange(head, body, deadline_s + self._patience_s), do)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.append(connection)
        return answer

    def close(self) -> None:
        """Close idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


class AsyncAppendClient:
    """An `AppendClient` with coroutines. Any number of tasks of one event loop: a request uses its connection alone.

    Args:
        patience_s: how long an answer may take beyond a call's deadline.
    """

    def __init__(self, path: Path, *, patience_s: float = protocol.ANSWER_PATIENCE_S) -> None:
        self._path, self._patience_s = path, patience_s
        self._idle: list[socket.socket] = []
        self._room = asyncio.Semaphore(CONNECTIONS_MAX)
        self._closed = False

    async def append_batch(
        self, stream: str, batch: AppendBatch, *, deadline_s: float
    ) -> list[Appended | MillstreamError]:
        """Append; see `AppendClient.append_batch`. If it is cancelled, the batch may or may not be appended."""
        head, body = protocol.asking(stream, batch, deadline_s)
        return protocol.outcomes_of(await self._asked(head, body, deadline_s))

    async def _asked(self, head: bytes, body: Any, deadline_s: float) -> dict[str, Any]:
        async with self._room:
            connection, steps = _taken(self._idle, self._path)
            try:
                connection.setblocking(False)
                do = partial(_do_async, connection)
                await run_async(steps, do)
                answer = await run_async(_exchange(head, body, deadline_s + self._patience_s), do)
            except BaseException:
                connection.close()
                raise
            if self._closed:
                connection.close()
            else:
                self._idle.append(connection)
        return answer

    def close(self) -> None:
        """Close idle connections; busy ones close when they become idle."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()


# --- the exchange ----------------------------------------------------------------------------------------------------


_SILENT_HINT: Final = (
    "Repeat the call if that process is starting. If it goes on, end the process, which `millstream status` shows: the next"
    " call takes its place."
)


def _taken(idle: list[socket.socket], path: Path) -> tuple[socket.socket, Generator[_Io, Any, None]]:
    """Return a connection, and the steps that make it ready: none for one of `idle` that is still open."""
    while idle:
        connection = idle.pop()
        # Readable data before a request means that the other side has closed.
        arrived = select.poll()  # select() refuses descriptors from 1024 on
        arrived.register(connection, select.POLLIN)
        if not arrived.poll(0):
            return connection, _ready()
        connection.close()
    return socket.socket(socket.AF_UNIX), _greeting(path)


def _ready() -> Generator[_Io, Any, None]:
    yield from ()


def _greeting(path: Path) -> Generator[_Io, Any, None]:
    """Connect, and receive the server's greeting."""
    try:
        yield _Connect(str(path), protocol.HELLO_PATIENCE_S)
        protocol.greeted((yield from _heard(protocol.HELLO_PATIENCE_S)))
    except (OSError, EOFError, ValueError) as error:
        # The server reads nothing before its greeting was received.
        raise WriterClosed("the process that writes the home doesn't answer", hint=_SILENT_HINT) from error


def _exchange(head: bytes, body: Any, patience_s: float) -> Generator[_Io, Any, dict[str, Any]]:
    """Send a request and return its answer."""
    try:
        yield _Send(head, patience_s)
        yield _Send(body, patience_s)
    except TimeoutError as error:
        # Its last byte may have arrived just then.
        raise protocol.no_answer(error) from error
    except OSError as error:
        # The request wasn't sent whole. A server that refused it in between has sent the reason.
        with suppress(OSError, EOFError, ValueError):
            return protocol.answer_in((yield from _heard(protocol.HELLO_PATIENCE_S)))
        raise WriterClosed("the writer's process went away; nothing of it was appended") from error
    try:
        return protocol.answer_in((yield from _heard(patience_s)))
    except (OSError, EOFError, ValueError) as error:
        raise protocol.no_answer(error) from error


def _heard(patience_s: float) -> Generator[_Io, Any, dict[str, Any]]:
    """Return the next frame's facts; `OSError`, `EOFError`, `ValueError` if there is none."""
    length, _ = protocol.LENGTHS.unpack((yield _Receive(protocol.LENGTHS.size, patience_s)))
    facts: dict[str, Any] = json.loads((yield _Receive(length, patience_s)))
    return facts


def _do(connection: socket.socket, io: _Io) -> bytes:
    """Do a step, blocking; return what was received."""
    connection.settimeout(io.patience_s)
    found = bytearray()
    if isinstance(io, _Connect):
        connection.connect(io.path)
    elif isinstance(io, _Send):
        connection.sendall(io.data)
    else:
        while len(found) < io.size_bytes:
            _add(found, connection.recv(min(io.size_bytes - len(found), _PIECE_BYTES)))
    return bytes(found)


async def _do_async(connection: socket.socket, io: _Io) -> bytes:
    """Do a step as `_do`, on the running event loop."""
    loop = asyncio.get_running_loop()
    found = bytearray()
    async with asyncio.timeout(io.patience_s):
        if isinstance(io, _Connect):
            await loop.sock_connect(connection, io.path)
        elif isinstance(io, _Send):
            await loop.sock_sendall(connection, io.data)
        else:
            while len(found) < io.size_bytes:
                _add(found, await loop.sock_recv(connection, min(io.size_bytes - len(found), _PIECE_BYTES)))
    return bytes(found)


def _add(found: bytearray, piece: bytes) -> None:
    if not piece:
        raise EOFError("it ended")
    found += piece
