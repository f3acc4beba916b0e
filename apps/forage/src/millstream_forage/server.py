"""`millstream-forage serve`: one engine over HTTP on this machine, until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

import uvicorn

from millstream import Guard
from millstream_forage.application import Application
from millstream_forage.engine import ForageEngine
from millstream_forage.errors import ForageError

HOST: Final = "127.0.0.1"
DRAIN_S: Final = 5
"""How long requests that have begun may take at the end."""
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class AddressInUse(ForageError):
    """The port can't be listened on."""

    code = "address_in_use"
    default_hint = "Name another port with --port; 0 picks a free one."


class Server(uvicorn.Server):
    """uvicorn's server, which prints its address once it answers, and ends with 0."""

    def __init__(self, config: uvicorn.Config, address: str) -> None:
        super().__init__(config)
        self._address: Final = address

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        if self.started:
            sys.stdout.write(f"listening on {self._address}\n")
            sys.stdout.flush()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End at a signal. uvicorn's own way raises the signal again at the end, so the process would die of it."""
        with handled_by(self.handle_exit):
            yield


def serve(home: Path | None, *, port: int, corpus: bool) -> None:
    """Serve until SIGTERM or SIGINT; then answer the requests that have begun, and return.

    Args:
        home: the home's folder, made if there is none; None: a home that is gone at the end.
        port: the port to listen on; 0: a free one.
        corpus: whether to fill an empty stream with the default corpus.

    Raises:
        AddressInUse: the port can't be listened on.
        HomeBusy, NotForagesHome, MillstreamError: as `ForageEngine.open`.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    with ExitStack() as held:
        held.enter_context(handled_by(leave))
        # The engine first: who starts a second server learns that the home is in use, and not that the port is.
        engine = held.enter_context(ForageEngine.ephemeral() if home is None else ForageEngine.open(home))
        listener = held.enter_context(bound(port))
        if corpus and not engine.items(limit=1).items:
            engine.seed_default_corpus()
        guard = held.enter_context(closing(Guard(engine.path, listen=HOST)))
        config = uvicorn.Config(
            Application(engine, guard),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=DRAIN_S,
        )
        server = Server(config, f"http://{HOST}:{listener.getsockname()[1]}")
        asyncio.run(server.serve([listener]))


@contextmanager
def handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have the signals that end a server handled by a function; restore the handlers before it at the end."""
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


def bound(port: int) -> socket.socket:
    """Return a socket that is bound, and doesn't listen yet: a client that connects is refused until the engine is there."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OSError as error:
        listener.close()
        raise AddressInUse(f"can't listen on {HOST}:{port}: {error.strerror}") from error
    return listener


def leave(number: int, frame: FrameType | None) -> None:
    """End the process while it starts, with 0: nothing is lost, since nothing was answered."""
    del number, frame
    sys.exit(0)
