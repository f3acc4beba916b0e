"""`serve`: a home over HTTP, and over Arrow Flight if configured. A graceful end answers earlier requests first."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import shutil
import socket
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog

from millstream.config.quantities import size_bytes
from millstream.home.home import Home
from millstream.model.durations import duration_s
from millstream.private_files import make_folder
from millstream.processes.catalog_watch import watched_catalog
from millstream.processes.child_process import Lifeline
from millstream.processes.control_socket import ControlServer
from millstream.processes.listening import BACKLOG, listen
from millstream.processes.open_files import raise_open_files
from millstream.processes.role_locks import LOCK_PATIENCE_S, RoleLock
from millstream.serving.bind_check import check_protected
from millstream.serving.request_bodies import alone
from millstream.serving.row_processes.forwarding import FORWARDED_SOCKET, answering, listening
from millstream.serving.tls_files import LOOK_EVERY_S, Renewal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future
    from pathlib import Path

    from millstream.nodes.log_shipping import Shipping
    from millstream.serving.application import Application, Part
    from millstream.serving.connection_bounds import ConnectionBounds
    from millstream.serving.flight.server import FlightService
    from millstream.serving.request_batching import RequestBatches
    from millstream.serving.row_processes.server_process import ServerProcess

logger = structlog.get_logger("millstream.serve")

_OBJECTS_A_COLLECTION: Final = 20_000
"""Number of new objects after which cycles among them are looked for: a large answer has as many."""


def serve_home(
    home: Home,
    lifeline: Lifeline,
    parts: Iterable[Callable[[Application], Part]] = (),
    process: ServerProcess | None = None,
) -> None:
    """Serve until told to stop; then answer earlier requests, and end. After an earlier stop no port is opened.

    Args:
        process: this process's part, as the first of several on one port.

    Raises:
        HomeBusy: the home is served already.
        MillstreamError (`address_in_use`): it can't listen there.
        AccessError (`unprotected`): other machines would reach it, without TLS or without tokens.
        AccessError (`certificate_unusable`): TLS is configured, but not usable.
        ConfigError: the variable that has this node's token isn't set; or a consumer can't be as `millstream.toml` has it.
    """
    from millstream.serving.access import Access
    from millstream.serving.application import Application

    home.loaded_config.node_token()
    home.prepare()
    host, port = home.config.http.address
    check_protected("http", (host, port), home.config.http)
    renewal = Renewal.of_home(home)
    share = alone if process is None else process.share_of("held_bytes")
    if process is None and lifeline.stop.is_set():  # of several, each answers what its open socket has received
        return
    with (
        contextlib.closing(Access.of_home(home)) as access,
        RoleLock.take(home.run_folder, "serve", patience_s=LOCK_PATIENCE_S if lifeline.supervised else 0.5),
        watched_catalog(home, lifeline),
        listen(host, port) if process is None else process.listener() as listener,
        contextlib.closing(Application(home, access, parts, share)) as application,
        _shipping(home) as shipping,
        _flight(home, application, shipping) as flight,
        _forwarded(home, process) as answers,
        _told(home, shipping),
    ):
        application.start()
        # A wildcard address isn't one that a person can open.
        address = f"{host}:{listener.getsockname()[1]}"
        url = f"{'http' if home.config.http.tls_certificate is None else 'https'}://{address}/"
        lifeline.tell("listening", {"address": address, "url": url})
        logger.info("listening", address=address, console=url)
        _clear(home.queries_folder)
        serve_until_told(home, lifeline, application, listener, renewal, flight, process=process, answers=answers)


class Served(Protocol):
    """An application as a server runs it."""

    @property
    def batches(self) -> RequestBatches:
        """The appends of requests."""

    @property
    def parser(self) -> Future[Any]:
        """The parser of lines, once it is compiled."""

    def asgi(self) -> Any:
        """Return the application, as a server calls it."""

    def drains(self) -> None:
        """Report from now on that the server is about to end."""


def serve_until_told(
    home: Home,
    lifeline: Lifeline,
    application: Served,
    listener: socket.socket,
    renewal: Renewal | None,
    flight: FlightService | None = None,
    *,
    process: ServerProcess | None = None,
    answers: socket.socket | None = None,
) -> None:
    """Serve an application on a listening socket until the process is told to stop, and answer earlier requests.

    Args:
        process: this process's part, if several share the port.
        answers: the socket on which other processes forward requests, if they do.
    """
    raise_open_files()
    # Objects that exist by now stay: collecting them repeatedly takes as long as a tenth of the
    # requests.
    gc.collect()
    gc.freeze()
    # A request makes thousands of objects, and none of them in a cycle.
    gc.set_threshold(_OBJECTS_A_COLLECTION)
    # So do the compiler's, which come later: each receive would go through them.
    application.parser.add_done_callback(lambda _: gc.freeze())
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(_serve(home, lifeline, application, listener, renewal, flight, process, answers))


async def _serve(
    home: Home,
    lifeline: Lifeline,
    application: Served,
    listener: socket.socket,
    renewal: Renewal | None,
    flight: FlightService | None,
    process: ServerProcess | None,
    answers: socket.socket | None,
) -> None:
    from millstream.serving.http_server import HttpServer

    drain_s = duration_s(home.config.http.drain_timeout)
    answered_by = application.asgi()
    server = HttpServer(
        answered_by,
        connection_bounds(home),
        drain_s=drain_s,
        context=None if renewal is None else renewal.context,
        share=alone if process is None else process.share_of("connections"),
    )
    loop = asyncio.get_running_loop()
    told, ended = asyncio.Event(), asyncio.Event()

    def hear() -> None:
        with contextlib.suppress(RuntimeError):  # it has ended already
            loop.call_soon_threadsafe(told.set)

    lifeline.on_word(hear)
    if lifeline.stop.is_set() or lifeline.drain.is_set():
        told.set()

    async def end_when_told() -> None:
        await told.wait()
        application.drains()
        await asyncio.sleep(duration_s(home.config.http.drain_delay))
        ended.set()

    aside = [asyncio.create_task(end_when_told())]
    if renewal is not None:
        aside.append(asyncio.create_task(_renewing(renewal, flight)))
    forwarded: contextlib.AbstractAsyncContextManager[None] = contextlib.nullcontext()
    if answers is not None and process is not None:
        draining = partial(process.share_of("draining"), 1)
        forwarded = answering(answered_by, answers, server.ending, drain_s, draining)
    try:
        async with forwarded:
            await server.serve(listener, ended, backlog=BACKLOG)
        # No caller waits for these, but their rows count: their senders may take them for appended.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await application.batches.drain()
    finally:
        for task in aside:
            task.cancel()


async def _renewing(renewal: Renewal, flight: FlightService | None) -> None:
    """Take renewed certificates, without an end."""
    is_due = False
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        # On the loop's own thread: no connection of the context is made at the same time.
        is_due |= renewal.look()
        if is_due and flight is not None:
            with contextlib.suppress(OSError):  # it lacks a thread; the next look tries again
                flight.renew()
                is_due = False


@contextlib.contextmanager
def _shipping(home: Home) -> Iterator[Shipping | None]:
    """Ship to other nodes and an object store, if the home is a node; missing records are shipped before the end."""
    if home.config.replication.node is None:
        yield None
        return
    from millstream.nodes.log_shipping import Shipping

    shipping = Shipping(home)
    shipping.start()
    yield shipping


@contextlib.contextmanager
def _forwarded(home: Home, process: ServerProcess | None) -> Iterator[socket.socket | None]:
    """Take requests that other server processes forward, if there are such processes."""
    if process is None:
        yield None
        return
    with listening(home.make_socket_folder() / FORWARDED_SOCKET) as listener:
        yield listener


@contextlib.contextmanager
def _told(home: Home, shipping: Shipping | None) -> Iterator[None]:
    """Run the server's control socket; and end shipping while followers' links are still up."""
    try:
        with ControlServer(home, "serve", {} if shipping is None else {"replication": shipping.facts}):
            yield
    finally:
        if shipping is not None:
            shipping.end()


@contextlib.contextmanager
def _flight(home: Home, application: Application, shipping: Shipping | None) -> Iterator[FlightService | None]:
    """Run Flight next to HTTP, if it is configured; it isn't imported otherwise."""
    if home.config.flight.listen is None:
        yield None
        return
    from millstream.serving.flight.server import flight_of

    with flight_of(home, application.access, application.appender, shipping) as flight:
        yield flight


def connection_bounds(home: Home) -> ConnectionBounds:
    """Return the configured limits of each connection; half of the files that may be open are left for the home's own."""
    from millstream.serving.connection_bounds import ConnectionBounds

    http = home.config.http
    return ConnectionBounds(
        connections_max=min(http.connections_max, max(1, raise_open_files() // 2)),
        request_s=duration_s(http.request_timeout),
        idle_s=duration_s(http.idle_timeout),
        unread_bytes_max=size_bytes(http.body_bytes_max),
    )


def _new_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


def _clear(queries: Path) -> None:
    """Remove the files of queries that a killed server left behind: this one has the home's lock."""
    make_folder(queries)
    for left in queries.iterdir():
        shutil.rmtree(left, ignore_errors=True)
