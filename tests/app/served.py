"""A home's server in the test's own process, on a port of its own."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from millstream.home.home import Home
from millstream.serving.access import Access
from millstream.serving.application import Application
from millstream.serving.http_server import HttpServer
from millstream.serving.server import connection_bounds


@contextmanager
def serving(
    home: Path, application: Application | None = None, *, port: int = 0, context: ssl.SSLContext | None = None
) -> Iterator[str]:
    """Serve a home until the block ends; yield the address."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    address = f"{'http' if context is None else 'https'}://127.0.0.1:{listener.getsockname()[1]}"
    made = Application(Home(home), Access.of_home(Home(home))) if application is None else application
    end: Future[Callable[[], object]] = Future()

    async def serve() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        end.set_result(lambda: loop.call_soon_threadsafe(ended.set))
        await HttpServer(made.asgi(), connection_bounds(made.home), drain_s=60, context=context).serve(listener, ended)

    listener.listen(2048)  # connections that come before the server accepts them wait
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield address
    finally:
        end.result(180)()
        thread.join(180)
        made.close()
        assert not thread.is_alive()
