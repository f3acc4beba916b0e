"""A proxy in front of an object store, for tests: it counts requests, and fails those that its rules name.

It speaks HTTP, so that a rule may go by a request's method and path, and decide whether the store gets the request
before the client gets an error. It runs in a process of its own: delta-rs holds the interpreter's lock while it
waits for some answers.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, Final
from urllib.parse import urlsplit

from millstream.testing._servers.ports import free_port
from millstream.testing._servers.processes import EmbeddedServer, ServerProcess


class Fault(StrEnum):
    """The fate of a request that a rule names."""

    BUSY = "busy"
    """503; the store doesn't get it."""
    BUSY_AFTER = "busy_after"
    """503, though the store has carried it out."""
    CUT = "cut"
    """The connection is closed without an answer; the store doesn't get the request."""
    CUT_AFTER = "cut_after"
    """The connection is closed without an answer, though the store has carried it out."""
    FORBIDDEN = "forbidden"
    """403 with the code AccessDenied."""


@dataclass(frozen=True, slots=True)
class FaultRule:
    """Requests that fail."""

    fault: Fault
    method: str = ""
    """The method; empty: any."""
    path: str = ""
    """A regular expression that a part of the path and query matches; empty: any."""
    times: int | None = None
    """How many of them fail; None: all."""


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """A request that came."""

    method: str
    path: str
    """With its query."""
    fault: Fault | None


_CONTROL: Final = "/-/proxy"
_STARTS_WITHIN_S: Final = 60.0


class StoreProxy(EmbeddedServer):
    """The proxy; a context manager."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        super().__init__(folder)
        self._endpoint = endpoint
        self._port = free_port()

    @property
    def url(self) -> str:
        """Return the proxy's address, for clients of the store."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it, without rules."""
        self._folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", __spec__.name, self._endpoint, str(self._port)]
        self._process = ServerProcess(command, log=self._folder / "proxy.log")
        self._process.wait_until(self._answers, within_s=_STARTS_WITHIN_S, what="the store's proxy")

    def set_rules(self, rules: Sequence[FaultRule]) -> None:
        """Replace the rules; the first that names a request decides."""
        self._call("PUT", json.dumps([asdict(rule) for rule in rules]).encode())

    def requests(self) -> list[StoreRequest]:
        """Return all requests since the start, in the order in which they came."""
        found = json.loads(self._call("GET"))
        return [StoreRequest(one[0], one[1], None if one[2] is None else Fault(one[2])) for one in found]

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            self._call("GET")
            return True
        return False

    def _call(self, method: str, body: bytes | None = None) -> bytes:
        asked = urllib.request.Request(self.url + _CONTROL, data=body, method=method)
        with urllib.request.urlopen(asked, timeout=30) as answer:
            found: bytes = answer.read()
        return found


_UNAVAILABLE: Final = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
_FORBIDDEN: Final = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
_ONE_HOP: Final = frozenset({"connection", "transfer-encoding", "keep-alive"})


class _Record:
    """The rules, and the requests that came."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._rules: list[dict[str, Any]] = []
        self._requests: list[tuple[str, str, str | None]] = []

    def decide(self, method: str, path: str) -> str | None:
        """Note a request; return its fate."""
        with self._lock:
            fault = None
            for rule in self._rules:
                fits = rule["method"] in {"", method} and re.search(rule["path"], path) is not None
                if fits and rule["times"] != 0:
                    fault = str(rule["fault"])
                    rule["times"] = None if rule["times"] is None else rule["times"] - 1
                    break
            self._requests.append((method, path, fault))
            return fault

    def control(self, method: str, body: bytes) -> bytes:
        """Take new rules, or return the requests."""
        with self._lock:
            if method == "PUT":
                self._rules = json.loads(body)
            return json.dumps(self._requests).encode()


class _Handler(BaseHTTPRequestHandler):
    """One client's connection, with a connection of its own to the store."""

    record: ClassVar[_Record]
    store_address: ClassVar[str]
    protocol_version = "HTTP/1.1"
    _store: http.client.HTTPConnection | None = None

    def _serve(self) -> None:
        body = self._body()
        if self.path == _CONTROL:
            self._answer(200, [], self.record.control(self.command, body))
            return
        fault = self.record.decide(self.command, self.path)
        forwarded = self._forward(body) if fault in {None, Fault.BUSY_AFTER, Fault.CUT_AFTER} else None
        if fault is None and forwarded is not None:
            self._answer(*forwarded)
        elif fault in {Fault.BUSY, Fault.BUSY_AFTER}:
            self._answer(503, [], _UNAVAILABLE)
        elif fault == Fault.FORBIDDEN:
            self._answer(403, [], _FORBIDDEN)
        else:
            self.close_connection = True

    def _body(self) -> bytes:
        if "chunked" not in (self.headers.get("Transfer-Encoding") or ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass  # fields of a trailer
        return b"".join(parts)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815 - names of the base class

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        if self._store is None:
            self._store = http.client.HTTPConnection(self.store_address, timeout=60)
        # The signature covers the host's name as the client wrote it.
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _ONE_HOP}
        self._store.request(self.command, self.path, body, headers)
        answer = self._store.getresponse()
        return answer.status, answer.getheaders(), answer.read()

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        self.send_response_only(status)
        sized = False
        for name, value in headers:
            if name.lower() not in _ONE_HOP:
                sized = sized or name.lower() == "content-length"
                self.send_header(name, value)
        if not sized:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def handle(self) -> None:
        """Serve the connection until either end closes it."""
        with contextlib.suppress(ConnectionError), contextlib.closing(self):
            super().handle()

    def close(self) -> None:
        """Close the connection to the store."""
        if self._store is not None:
            self._store.close()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Log nothing."""


def _run(endpoint: str, port: int) -> None:
    _Handler.record, _Handler.store_address = _Record(), urlsplit(endpoint).netloc
    server = ThreadingHTTPServer(("127.0.0.1", port), _Handler)
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    _run(sys.argv[1], int(sys.argv[2]))


__all__ = ["Fault", "FaultRule", "StoreProxy", "StoreRequest"]
