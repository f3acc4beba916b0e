"""Appends through a writer's socket, by tasks of one event loop."""

from __future__ import annotations

import asyncio
import json
import select
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from millstream.errors import MillstreamError, WriterClosed
from millstream.ingest.frames import (
    ANSWER_PATIENCE_S,
    HELLO_PATIENCE_S,
    LENGTHS,
    answer_in,
    asking,
    asking_session,
    greeted,
    no_answer,
    outcomes_of,
    session_told,
)

if TYPE_CHECKING:
    from millstream.model.operations import Appended
    from millstream.model.writes import AppendBatch, SessionFacts

CONNECTIONS_MAX: Final = 64
"""Limit of one client's connections: a writer's commit group takes all batches that have arrived, and more
connections only move the wait."""


class AsyncAppendClient:
    """An `AppendClient` with coroutines. Any number of tasks of one event loop: a request uses its connection alone.

    Args:
        path: the socket's.
        connections_max: how many requests are under way at a time; others wait.
    """

    def __init__(self, path: Path, *, connections_max: int = CONNECTIONS_MAX) -> None:
        self._path = path
        self._idle: list[socket.socket] = []
        self._room = asyncio.Semaphore(connections_max)
        self._closed = False

    async def append_batch(
        self, stream: str, batch: AppendBatch, *, deadline_s: float
    ) -> list[Appended | MillstreamError]:
        """Append; see `AppendClient.append_batch`. If it is cancelled, the batch may or may not be appended."""
        head, body = asking(stream, batch, deadline_s)
        return outcomes_of(await self._asked(head, body, deadline_s))

    async def session(self, stream: str, name: str, *, deadline_s: float) -> SessionFacts:
        """Return the session; see `AppendClient.session`."""
        return session_told(await self._asked(asking_session(stream, name), b"", deadline_s))

    async def _asked(self, head: bytes, body: Any, deadline_s: float) -> dict[str, Any]:
        async with self._room:
            connection = await self._take()
            try:
                answer = await self._ask(connection, head, body, deadline_s + ANSWER_PATIENCE_S)
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

    async def _ask(self, connection: socket.socket, head: bytes, body: Any, patience_s: float) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(patience_s):
                await loop.sock_sendall(connection, head)
                await loop.sock_sendall(connection, body)
        except TimeoutError as error:
            # Its last byte may have arrived just then.
            raise no_answer(error) from error
        except OSError as error:
            # The request wasn't sent whole. A server that refused it in between has sent the reason.
            with suppress(OSError, EOFError, ValueError):
                return answer_in(await _heard(connection, HELLO_PATIENCE_S))
            raise WriterClosed("the writer's process went away; nothing of it was appended") from error
        try:
            return answer_in(await _heard(connection, patience_s))
        except (OSError, EOFError, ValueError) as error:
            raise no_answer(error) from error

    async def _take(self) -> socket.socket:
        while self._idle:
            connection = self._idle.pop()
            # Readable data before a request means that the other side has closed.
            if not select.select([connection], [], [], 0)[0]:
                return connection
            connection.close()
        return await self._connect()

    async def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.setblocking(False)
            async with asyncio.timeout(HELLO_PATIENCE_S):
                await asyncio.get_running_loop().sock_connect(connection, str(self._path))
            greeted(await _heard(connection, HELLO_PATIENCE_S))
        except (OSError, EOFError, ValueError) as error:
            # The server reads nothing before its greeting was received.
            connection.close()
            raise WriterClosed("no writer listens") from error
        except BaseException:
            connection.close()
            raise
        return connection


async def _heard(connection: socket.socket, patience_s: float) -> dict[str, Any]:
    """Return the next frame's facts; `OSError`, `EOFError`, `ValueError` if there is none."""
    async with asyncio.timeout(patience_s):
        length, _ = LENGTHS.unpack(await _exactly(connection, LENGTHS.size))
        facts: dict[str, Any] = json.loads(await _exactly(connection, length))
    return facts


async def _exactly(connection: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    found = bytearray()
    while len(found) < size:
        piece = await loop.sock_recv(connection, min(size - len(found), 1 << 20))
        if not piece:
            raise EOFError("it ended")
        found += piece
    return bytes(found)
