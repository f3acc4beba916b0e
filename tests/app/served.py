"""A home's server in the test's own process, on a port of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from tests.app.homes import wait_for

from millstream.home.home import Home
from millstream.serving.access import Access
from millstream.serving.application import Application


@contextmanager
def serving(home: Path, application: Application | None = None, *, port: int = 0, **settings: Any) -> Iterator[str]:
    """Serve a home until the block ends; yield the address."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    made = Application(Home(home), Access.of_home(Home(home))) if application is None else application
    server = uvicorn.Server(uvicorn.Config(made.asgi(), log_config=None, access_log=False, lifespan="off", **settings))
    server.capture_signals = _leave_signals  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_for(lambda: server.started, what=lambda: "the server starts")
        scheme = "https" if "ssl_certfile" in settings else "http"
        yield f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(180)
        listener.close()
        made.close()
        assert not thread.is_alive()


@contextmanager
def _leave_signals() -> Iterator[None]:
    yield
