"""The HTTP server: accepts connections, watches their limits, and ends once earlier requests are answered."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from email.utils import formatdate
from typing import Final

import structlog

from millstream.serving.connections import Application, Connection, ConnectionBounds, Exchange

logger = structlog.get_logger("millstream.serve")

_LOOKS: Final = 4
"""Number of checks within a connection's shortest limit."""


class HttpServer:
    """Serves an ASGI application over HTTP/1.1, without lifespan events and WebSocket. One event loop.

    Args:
        application: answers the requests.
        bounds: the limits of each connection.
        drain_s: how long requests that have begun may take at the end.
        context: for TLS; None: without.
    """

    def __init__(
        self,
        application: Application,
        bounds: ConnectionBounds,
        *,
        drain_s: float,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self.application = application
        self.bounds = bounds
        self.connections: set[Connection] = set()
        self.date_line = b""
        self._drain_s = drain_s
        self._context = context
        self._tasks: set[asyncio.Task[None]] = set()
        self._left = asyncio.Event()
        """Set when a connection was closed."""

    def start(self, exchange: Exchange) -> None:
        """Start a task that answers a request."""
        task = asyncio.get_running_loop().create_task(exchange.run(self.application))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def leave(self, connection: Connection) -> None:
        """Forget a connection that was closed."""
        self.connections.discard(connection)
        self._left.set()

    async def serve(self, listener: socket.socket, ended: asyncio.Event, *, backlog: int = 2048) -> None:
        """Serve until `ended` is set, then take no more connections, and answer the requests that have begun.

        Args:
            listener: bound; it is closed at the end.
            ended: set on this loop's thread.
            backlog: connections that may wait to be accepted.
        """
        self._set_date()
        accepting = await asyncio.get_running_loop().create_server(
            lambda: Connection(self), sock=listener, ssl=self._context, backlog=backlog
        )
        watching = asyncio.create_task(self._watch())
        try:
            await ended.wait()
        finally:
            accepting.close()
            await self._drain()
            watching.cancel()

    async def _drain(self) -> None:
        for connection in list(self.connections):
            connection.end()
        try:
            async with asyncio.timeout(self._drain_s):
                while self.connections:
                    self._left.clear()
                    await self._left.wait()
                if self._tasks:
                    await asyncio.wait(self._tasks)
        except TimeoutError:
            logger.warning("requests are left unanswered", requests=len(self._tasks), after_s=self._drain_s)
            for task in self._tasks:
                task.cancel()
            for connection in self.connections:
                connection.transport.abort()

    async def _watch(self) -> None:
        """Check all connections' limits, and keep the date, until cancelled."""
        while True:
            await asyncio.sleep(min(self.bounds.request_s / _LOOKS, self.bounds.idle_s / _LOOKS, 1.0))
            self._set_date()
            now = time.monotonic()
            for connection in list(self.connections):
                connection.look(now)

    def _set_date(self) -> None:
        self.date_line = f"date: {formatdate(usegmt=True)}\r\n".encode()
