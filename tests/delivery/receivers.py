"""Receivers of webhooks on loopback: they answer as a test says, well or badly."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from millstream.workers import Worker


@dataclass(frozen=True)
class Request:
    """A request as it arrived."""

    connection: int
    target: str
    headers: Mapping[str, str]
    body: bytes


Answerer = Callable[[socket.socket, Request], None]


def answer(status: int, headers: str = "", body: bytes = b"ok") -> Answerer:
    """Return an answerer that behaves well. `headers` are whole lines."""
    head = f"HTTP/1.1 {status} Text\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode()
    return lambda connection, _: connection.sendall(head + body)


class Receiver:
    """A server with a thread for each connection. `answerer` may be replaced at any time."""

    def __init__(self, answerer: Answerer | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.answerer = answerer or answer(200)
        self.requests: list[Request] = []
        self.connections = 0
        self.stopping = threading.Event()
        self.server_names: list[str | None] = []
        self._tls = tls
        if tls is not None:
            tls.sni_callback = lambda _, name, __: self.server_names.append(name)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._workers = [Worker("receiver", self._accept).start()]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook?a=b"

    def close(self) -> None:
        self.stopping.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for worker in self._workers:
            worker.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> bool:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return False
        self.connections += 1
        number = self.connections
        self._open.append(connection)
        self._workers.append(Worker("connection", lambda: self._serve(connection, number)).start())
        return True

    def _serve(self, connection: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError), connection:
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            with connection, connection.makefile("rb") as data:
                while (line := data.readline()).startswith(b"POST "):
                    target = line.split()[1].decode()
                    headers = {}
                    while (line := data.readline()).strip():
                        name, _, value = line.decode("latin-1").partition(":")
                        headers[name.lower()] = value.strip()
                    body = data.read(int(headers.get("content-length", 0)))
                    if not line or len(body) < int(headers["content-length"]):
                        return  # the sender was killed, or gave up, while it sent
                    request = Request(number, target, headers, body)
                    self.requests.append(request)
                    self.answerer(connection, request)
