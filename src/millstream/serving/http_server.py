"""The HTTP server: accepts connections, watches their limits, and ends once earlier requests are answered."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from email.utils import formatdate
from typing import Final

import structlog

from millstream.serving.connection_bounds import ConnectionBounds
from millstream.serving.connections import Application, Connection, Exchange
from millstream.serving.request_bodies import alone

logger = structlog.get_logger("millstream.serve")

_LOOKS: Final = 4
"""Number of checks within a connection's shortest limit."""
_HANDSHAKE_S: Final = 60.0
"""How long a TLS handshake may take, if requests may take longer."""
_ACCEPTS_AGAIN_S: Final = 1.0
"""Seconds between attempts to accept a connection, if the process has no descriptor left."""


class HttpServer:
    """Serves an ASGI application over HTTP/1.1, without lifespan events and WebSocket. One event loop.

    Args:
        drain_s: how long requests that have begun may take at the end.
        share: publishes the number of this process's connections, and returns that of other processes.
    """

    def __init__(
        self,
        application: Application,
        bounds: ConnectionBounds,
        *,
        drain_s: float,
        context: ssl.SSLContext | None = None,
        share: Callable[[int], int] = alone,
    ) -> None:
        self.application = application
        self.bounds = bounds
        self.connections: set[Connection] = set()
        self.date_line = b""
        self.ending = asyncio.Event()
        self._drain_s = drain_s
        self._context = context
        self._share = share
        self._tasks: set[asyncio.Task[None]] = set()
        self.handshakes: dict[Connection, asyncio.Task[None]] = {}
        """TLS connections whose handshake isn't done, and their tasks."""
        self._left = asyncio.Event()
        """Set when a connection was closed."""

    def start(self, exchange: Exchange) -> None:
        """Start a task that answers a request."""
        task = asyncio.get_running_loop().create_task(exchange.run(self.application))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def enter(self, connection: Connection) -> int:
        """Take a connection that was made; return how many there are."""
        self.handshakes.pop(connection, None)
        self.connections.add(connection)
        return self._count()

    def leave(self, connection: Connection) -> None:
        """Forget a connection that was closed."""
        self.connections.discard(connection)
        self._count()
        self._left.set()

    def _count(self) -> int:
        """Return the number of open connections of all processes, handshakes among them."""
        own = len(self.connections) + len(self.handshakes)
        return own + self._share(own)

    async def serve(self, listener: socket.socket, ended: asyncio.Event, *, backlog: int = 2048) -> None:
        """Serve until `ended` is set, then take no more connections, and answer the requests that have begun.

        Args:
            listener: bound; it is closed at the end.
            ended: set on this loop's thread.
            backlog: connections that may wait to be accepted.
        """
        self._set_date()
        watching = asyncio.create_task(self._watch())
        try:
            async with self._accepting(listener, backlog):
                await ended.wait()
        finally:
            await self._drain()
            watching.cancel()

    @contextlib.asynccontextmanager
    async def _accepting(self, listener: socket.socket, backlog: int) -> AsyncIterator[None]:
        if self._context is None:
            server = await asyncio.get_running_loop().create_server(
                lambda: Connection(self), sock=listener, backlog=backlog
            )
            try:
                yield
            finally:
                server.close()
            return
        with listener:
            listener.setblocking(False)
            listener.listen(backlog)
            accepting = asyncio.create_task(self._accept(listener, self._context))
            try:
                yield
            finally:
                left = [accepting, *self.handshakes.values()]
                for task in left:
                    task.cancel()
                await asyncio.wait(left)

    async def _accept(self, listener: socket.socket, context: ssl.SSLContext) -> None:
        """Accept connections of TLS until cancelled.

        asyncio's own server knows of a connection only after its handshake, so any number of silent clients could
        connect. Here handshakes count as connections. A client that is one too many gets no handshake.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError as error:
                logger.warning("a connection couldn't be accepted", error=str(error))
                await asyncio.sleep(_ACCEPTS_AGAIN_S)
                continue
            if self._count() >= self.bounds.connections_max:
                client.close()
                await asyncio.sleep(0)  # other connections have their turn
                continue
            connection = Connection(self)
            self.handshakes[connection] = loop.create_task(self._shake_hands(connection, client, context))

    async def _shake_hands(self, connection: Connection, client: socket.socket, context: ssl.SSLContext) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                client,
                ssl=context,
                ssl_handshake_timeout=min(_HANDSHAKE_S, self.bounds.request_s),
            )
        except OSError as error:  # TLS's own errors, too
            logger.debug("a TLS handshake failed", error=str(error))
        finally:
            self.handshakes.pop(connection, None)

    async def _drain(self) -> None:
        self.ending.set()
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
