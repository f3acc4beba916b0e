"""Appends from other processes of the machine: the writer's socket. `append_client` has its clients.

`socket_protocol` has the protocol. A connection takes one request after the other; any number of them share commit
groups. Every user with access to the socket's folder may append.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import weakref
from asyncio import wrap_future
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from millstream.errors import MillstreamError, Retry, StaleEpoch, WriterClosed
from millstream.ingest import socket_protocol as protocol
from millstream.ingest.appender import Appender
from millstream.ingest.python_rows import ROWS_BYTES_MAX
from millstream.workers import Worker, call_in_thread

if TYPE_CHECKING:
    from millstream.model.operations import Appended
    from millstream.model.writes import SessionFacts

_ROOM_BYTES: Final = 4 * ROWS_BYTES_MAX
"""Limit in bytes of requests being read or written, over all connections; further senders wait."""
_SMALL_BYTES: Final = 64 << 10
"""Size in bytes up to which rows are checked on the loop's own thread: handing them to another takes longer."""
_LARGE_AT_ONCE: Final = 2
"""How many larger requests are prepared at a time: each may take some hundred megabytes."""
_SENDING_S: Final = 30.0
"""How long a request may take to be sent, once it has begun."""
_DRAIN_S: Final = 10.0
_LISTENING: Final[weakref.WeakSet[socket.socket]] = weakref.WeakSet()
"""This process's listening sockets. A forked child closes them: callers of a socket that it holds and
doesn't serve would wait for ever."""
_CONNECTED: Final[set[int]] = set()
"""Descriptors of this process's connections, for the same purpose."""


class AppendServer:
    """Answers appends on a socket until it is closed; on a thread of its own.

    Args:
        path: the socket's; no other process listens there: a dead process's socket is removed.
        appender_of: returns a stream's appender; raises if there is none now.
    """

    def __init__(self, path: Path, appender_of: Callable[[str], Appender]) -> None:
        self._path = path
        self._appender_of = appender_of
        self._loop = asyncio.new_event_loop()
        self._room = _Room(_ROOM_BYTES)
        self._large = asyncio.Semaphore(_LARGE_AT_ONCE)
        self._known: dict[str, Appender] = {}
        """Appenders by stream, for as long as the log's writer takes appends."""
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._busy: set[asyncio.Task[None]] = set()
        """The connections that have read a request and haven't answered it."""
        self._draining = False
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        listening.listen(128)
        _LISTENING.add(listening)
        self._server = self._loop.run_until_complete(
            asyncio.start_unix_server(self._connected, sock=listening, limit=1 << 20)
        )
        self._worker = Worker("append-server", self._loop.run_forever).start()

    def close(self) -> None:
        """Take no more requests, answer those that were read, and remove the socket."""
        asyncio.run_coroutine_threadsafe(self._take_no_more(), self._loop).result()
        with contextlib.suppress(OSError):
            self._path.unlink()
        asyncio.run_coroutine_threadsafe(self._drain(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._worker.join()
        self._loop.close()

    async def _take_no_more(self) -> None:
        self._draining = True
        self._server.close()
        for task in self._connections.keys() - self._busy:
            task.cancel()

    async def _drain(self) -> None:
        if self._connections:
            await asyncio.wait(self._connections, timeout=_DRAIN_S)
        # A client that doesn't read its answer holds up no other.
        for writer in self._connections.values():
            writer.transport.abort()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "it is one"
        self._connections[task] = writer
        descriptor = writer.get_extra_info("socket").fileno()
        _CONNECTED.add(descriptor)
        try:
            # The client has closed, also within a request: nothing of that was taken.
            with contextlib.suppress(
                asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError, TimeoutError
            ):
                await _send(writer, protocol.frame_of(protocol.HELLO))
                await self._serve(reader, writer, task)
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                if self._draining:
                    await _send(writer, protocol.frame_of(protocol.CLOSED))
        finally:
            # A bug of ours ends the connection, and the loop logs it; its caller learns that there is no
            # answer.
            del self._connections[task]
            _CONNECTED.discard(descriptor)
            writer.close()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: asyncio.Task[None]
    ) -> None:
        while not self._draining:
            head_length, body_length = protocol.LENGTHS.unpack(await reader.readexactly(protocol.LENGTHS.size))
            if head_length > protocol.HEAD_BYTES_MAX or body_length > protocol.BODY_BYTES_MAX:
                await _send(writer, protocol.frame_of({"error": protocol.oversized(body_length).as_dict()}))
                return
            size = head_length + body_length
            # A small request doesn't wait for slow senders.
            async with self._room.of(size) if size > _SMALL_BYTES else contextlib.nullcontext():
                async with asyncio.timeout(_SENDING_S):
                    head = await reader.readexactly(head_length)
                    body = await reader.readexactly(body_length)
                self._busy.add(task)
                try:
                    await _send(writer, await self._answer(head, body))
                finally:
                    self._busy.discard(task)

    async def _answer(self, head: bytes, body: bytes) -> bytes:
        try:
            if not body and (wanted := protocol.session_asked(head)) is not None:
                return protocol.frame_of({"session": (await self._session(*wanted)).as_dict()})
            return protocol.answered(await self._append(head, body))
        except MillstreamError as error:
            return protocol.frame_of({"error": error.as_dict()})

    async def _session(self, stream: str, name: str) -> SessionFacts:
        """Return the facts of the writer that is open now: one of `_known` that was closed would answer for its time."""

        def session() -> SessionFacts:
            return self._appender_of(stream).session(name, deadline_s=protocol.SESSION_PATIENCE_S)

        # It may have to open a log first, and wait for others to hold it.
        return await wrap_future(call_in_thread("append-session", session))

    async def _appender(self, stream: str) -> Appender:
        found = self._known.get(stream)
        if found is None:
            # It may have to open a log first.
            found = self._known[stream] = await wrap_future(
                call_in_thread("append-opens", lambda: self._appender_of(stream))
            )
        return found

    async def _append(self, head: bytes, body: bytes) -> list[Appended | MillstreamError]:
        stream, deadline_s, batch = protocol.asked(head, body)
        if self._draining:
            raise WriterClosed("the writer's process ends; nothing of it was appended")
        appender = await self._appender(stream)
        try:
            return await appender.append_batch_async(batch, deadline_s=deadline_s, large=self._large)
        except MemoryError as error:
            raise protocol.oversized(len(body)) from error
        except MillstreamError as error:
            if error.retry is Retry.REOPEN or isinstance(error, StaleEpoch):
                # That log's writer has ended: the next request gets another one.
                self._known.pop(stream, None)
            raise


class _Room:
    """A semaphore over bytes; one larger request may exceed the limit."""

    def __init__(self, size_bytes: int) -> None:
        self._free = self._all = size_bytes
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def of(self, size_bytes: int) -> Any:
        async with self._changed:
            await self._changed.wait_for(lambda: self._free >= min(size_bytes, self._all))
            self._free -= size_bytes
        try:
            yield
        finally:
            self._free += size_bytes
            async with self._changed:
                self._changed.notify_all()


async def _send(writer: asyncio.StreamWriter, frame: bytes) -> None:
    writer.write(frame)
    await writer.drain()


def _leave_all_to_parent() -> None:
    for listening in list(_LISTENING):
        listening.close()
    _LISTENING.clear()
    for descriptor in _CONNECTED:
        os.close(descriptor)
    _CONNECTED.clear()


os.register_at_fork(after_in_child=_leave_all_to_parent)
