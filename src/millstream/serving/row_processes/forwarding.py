"""Requests that one server process forwards to another, over a Unix socket: ASGI's events in frames.

A frame is a length and a MessagePack map. The first one has the request's scope. After that the answering process sends
the events of its answer, and a frame that asks for the next event of the request whenever its application does. So
backpressure, `100 Continue` and a client's end reach the application as without a process in between.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog

from millstream.serving.access import CERTIFICATE
from millstream.serving.problem_documents import encoded, headers_of, plain_problem
from millstream.serving.requests import ENDING, NEEDS_ITS_CLIENT, ClientStalledError, Scope, Send, answer

if TYPE_CHECKING:
    from millstream.serving.connections import Application
    from millstream.serving.request_bodies import Receive

logger = structlog.get_logger("millstream.serve")

FORWARDED_SOCKET: Final = "forwarded.sock"
"""Name of the socket, in the home's folder of sockets."""
_BACKLOG: Final = 1024
_CONNECTS_EVERY_S: Final = 0.02
"""Seconds between attempts to connect while the backlog is full."""
_CONNECTS_WITHIN_S: Final = 30.0
"""Seconds until a request is refused because the backlog stays full: that process may hang."""
_DRAIN_LOOKS_EVERY_S: Final = 0.02
_LENGTH: Final = struct.Struct("<I")
_SCOPE: Final = ("http_version", "method", "path", "raw_path", "query_string", "headers", "scheme", "client", "server")
_RECEIVE: Final = "millstream.receive"
"""Type of the frame that asks for the request's next event."""
_GONE: Final = {"type": "http.disconnect"}
_PIECE_BYTES: Final = 256 << 10
"""Bytes of an answer's body in a frame, so that the forwarding process holds few of each."""

_Frame = MutableMapping[str, Any]


class Forwarder:
    """The forwarding side: an ASGI application whose answers another process makes.

    Args:
        path: the socket of that process.
    """

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request as an ASGI application."""
        has_begun = False
        # After a 503 a client repeats its request. Once the process has the request, its death leaves the outcome unknown.
        status, why = 503, "the process that answers this request isn't ready"
        with suppress(OSError):
            reader, writer = await self._connected()
            status, why = 502, "the process that answers this request ended; the request may have been carried out"
            asked: asyncio.Task[None] | None = None
            try:
                facts = {name: scope[name] for name in (*_SCOPE, CERTIFICATE) if name in scope}
                _write(writer, facts)
                while (frame := await _next(reader)) is not None:
                    if frame["type"] == _RECEIVE:
                        if frame["needs_its_client"]:
                            scope[NEEDS_ITS_CLIENT] = True
                        asked = asyncio.create_task(_hand_over(receive, writer))
                        continue
                    has_begun = True
                    await send(frame)
                    if frame["type"] == "http.response.body" and not frame["more_body"]:
                        return
            finally:
                if asked is not None:
                    asked.cancel()
                writer.close()
        if not has_begun:
            await answer(send, status, encoded(plain_problem(status, why)), headers_of(status))

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        end_s = time.monotonic() + _CONNECTS_WITHIN_S
        while True:
            try:
                return await asyncio.open_unix_connection(self._path)
            except BlockingIOError:  # many requests came at once: the system lets none wait beyond the backlog
                if time.monotonic() > end_s:
                    raise
                await asyncio.sleep(_CONNECTS_EVERY_S)


async def _hand_over(receive: Receive, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        _write(writer, await receive())
        await writer.drain()


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """Yield a socket for forwarded requests. Only one process of a home has it: the one with the role `serve`."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(_BACKLOG)
        yield listener
    path.unlink(missing_ok=True)


@asynccontextmanager
async def answering(
    application: Application,
    listener: socket.socket,
    ending: asyncio.Event,
    drain_s: float,
    draining: Callable[[], int] = lambda: 0,
) -> AsyncIterator[None]:
    """Answer forwarded requests by an application while the block lasts, then those that have begun.

    After the block, the processes that drain at the same time may still forward requests that they accepted earlier.

    Args:
        listener: as `listening` yields it.
        ending: as in each request's scope.
        drain_s: how long all of that may take.
        draining: returns how many other processes are draining.
    """
    tasks: set[asyncio.Task[Any]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "it is one"
        tasks.add(task)
        try:
            with suppress(ConnectionError):
                facts = await _next(reader)
                if facts is not None:
                    await _Forwarded(reader, writer, facts, ending).run(application)
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_unix_server(connected, sock=listener, backlog=_BACKLOG)
    try:
        yield
    finally:
        with suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while draining():  # noqa: ASYNC110 - it is another process's, in shared memory
                    await asyncio.sleep(_DRAIN_LOOKS_EVERY_S)
                server.close()
                if tasks:
                    await asyncio.wait(tasks)
        server.close()
        for task in tasks:
            task.cancel()


class _Forwarded:
    """A forwarded request and its answer."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, facts: _Frame, ending: asyncio.Event
    ) -> None:
        headers = [(name, value) for name, value in facts["headers"]]
        ends = {name: facts[name] and tuple(facts[name]) for name in ("client", "server")}
        version = {"version": "3.0", "spec_version": "2.3"}
        self._scope = {**facts, **ends, "headers": headers, "type": "http", "asgi": version, "root_path": ""}
        self._scope[ENDING] = ending
        self._reader, self._writer = reader, writer
        self._events: asyncio.Queue[_Frame] = asyncio.Queue()
        self._is_asked = self._is_gone = self._has_begun = False

    async def run(self, application: Application) -> None:
        """Have the application answer; an error of it is our bug, and answered with 500 if there is no answer."""
        listening = asyncio.create_task(self._listen())
        try:
            await application(self._scope, self._receive, self._send)
        except (ClientStalledError, ConnectionError):
            logger.warning("a forwarded request's client is gone", path=self._scope["path"])
        except Exception:
            logger.exception("a request failed", path=self._scope["path"])
            if not self._has_begun:
                document = plain_problem(500, "this is a bug of the server's")
                await answer(self._send, 500, encoded(document), headers_of(500))
        finally:
            listening.cancel()

    async def _listen(self) -> None:
        with suppress(ConnectionError):
            while (event := await _next(self._reader)) is not None:
                self._is_asked = False
                self._events.put_nowait(event)
        self._is_gone = True
        self._events.put_nowait(_GONE)

    async def _receive(self) -> _Frame:
        if self._events.empty():
            if self._is_gone:
                return _GONE
            if not self._is_asked:  # an application may cancel a call, whose event the next one gets
                self._is_asked = True
                _write(self._writer, {"type": _RECEIVE, "needs_its_client": self._scope.get(NEEDS_ITS_CLIENT, False)})
        return await self._events.get()

    async def _send(self, message: _Frame) -> None:
        if self._is_gone:
            return
        self._has_begun = True
        body = memoryview(message.get("body", b""))
        if message["type"] == "http.response.body":
            more = message.get("more_body", False)
            for start in range(0, max(1, len(body)), _PIECE_BYTES):
                piece = body[start : start + _PIECE_BYTES]
                ends_later = more or start + _PIECE_BYTES < len(body)
                _write(self._writer, {"type": message["type"], "body": piece, "more_body": ends_later})
                await self._writer.drain()
        else:
            _write(self._writer, message)


def _write(writer: asyncio.StreamWriter, frame: _Frame) -> None:
    data = msgspec.msgpack.encode(frame)
    writer.write(_LENGTH.pack(len(data)) + data)


async def _next(reader: asyncio.StreamReader) -> _Frame | None:
    """Return the next frame; None at the end."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        frame: _Frame = msgspec.msgpack.decode(await reader.readexactly(length))
    except asyncio.IncompleteReadError:
        return None
    return frame
