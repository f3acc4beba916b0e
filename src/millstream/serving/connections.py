"""Connections that can't block others: limits of the header's bytes, of the time per request, and of their number.

uvicorn leaves these limits to a proxy in front. A timer for each request would cost as much as a tenth of
a small one, so one task checks all connections a few times within the shortest limit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from millstream.errors import RequestTimeout
from millstream.serving.problems import encoded, headers_of, plain_problem, problem_of

HEAD_BYTES_MAX: Final = 64 << 10
_LOOKS: Final = 4
"""Number of checks within a connection's shortest limit."""


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """The limits of a connection."""

    connections_max: int
    request_s: float
    """Seconds for a request to arrive, header and body."""
    idle_s: float
    """Seconds between two requests."""
    unread_bytes_max: int
    """Bytes of a body that is read and dropped: its request was answered before it was whole."""


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's protocol, with limits."""

    bounds: ClassVar[ConnectionBounds]
    """The limits; see `bounded`."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._coming_since: float | None = None
        """When the incomplete request began; for a new connection, when it was made."""
        self._head_bytes: int | None = 0
        """Bytes of the current header after its first piece; None after the header."""
        self._has_begun = False
        """Whether it has sent anything."""
        self._begun_here = False
        """Whether a request began or ended in the data being read."""
        self._unread_bytes = 0
        self._beside_bytes = 0
        """Bytes in a chunked body that aren't data, since the last chunk: chunk lengths and trailers."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        """Handle a new connection; see asyncio.Protocol."""
        super().connection_made(transport)
        self._coming_since = time.monotonic()
        if len(self.connections) > self.bounds.connections_max:
            self.refuse(plain_problem(503, f"{self.bounds.connections_max} connections are open, as many as may be"))

    def data_received(self, data: bytes) -> None:
        """Parse data; see asyncio.Protocol."""
        self._begun_here = False
        self._beside_bytes += len(data)
        self._parse(data)
        if self._head_bytes is None and self._beside_bytes > HEAD_BYTES_MAX + len(data):
            self.refuse(plain_problem(431, f"a body has more than {HEAD_BYTES_MAX} bytes beside its chunks"))
        # If a header begins within or after this data, the rest of the data isn't part of it; at most one
        # read's worth.
        if self._head_bytes is not None and not self._begun_here:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self.refuse(plain_problem(431, f"a request's head has more than {HEAD_BYTES_MAX} bytes"))

    def _parse(self, data: bytes) -> None:
        """Parse as uvicorn, except for a request that offers another protocol: it is served as HTTP (RFC 9110, 7.8).

        httptools takes the bytes after its header for the other protocol's. So its body was lost, or
        parsed as a request of its own. The request is parsed again without the offer.
        """
        self._unset_keepalive_if_required()
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
            except httptools.HttpParserUpgrade as offered:
                if self.parser.get_method() == b"CONNECT":
                    self.send_400_response("This is no proxy.")
                    return
                data = self._without_offer() + data[offered.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
                continue
            return

    def _without_offer(self) -> bytes:
        """Return the header of the request that was parsed last."""
        version = self.parser.get_http_version().encode()
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/", version, b"\r\n"]
        for name, value in self.headers:
            if name == b"connection" and b"close" in value.lower():
                head.append(b"connection: close\r\n")
            elif name not in {b"upgrade", b"connection"}:
                head += [name, b": ", value, b"\r\n"]
        return b"".join((*head, b"\r\n"))

    def on_message_begin(self) -> None:
        """Start a request; see httptools."""
        super().on_message_begin()
        self._has_begun = self._begun_here = True
        self._head_bytes = 0
        self._unread_bytes = 0
        if self._coming_since is None:
            self._coming_since = time.monotonic()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header.

        Ignore trailer fields: a trailer must never act as a header (it could forge `Authorization`).
        """
        if self._head_bytes is not None:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Finish the header; see httptools."""
        if self.parser.should_upgrade():
            return  # see `_parse`
        self._head_bytes = None
        self._beside_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body; see httptools."""
        self._beside_bytes = 0
        if self.cycle.response_complete:
            # Read on for a while: a reset connection loses an answer that the client hasn't read yet.
            self._unread_bytes += len(body)
            if self._unread_bytes > self.bounds.unread_bytes_max:
                self.transport.close()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Finish the request; see httptools."""
        if self.parser.should_upgrade():
            return
        self._coming_since = None
        self._head_bytes = 0
        self._begun_here = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse data that isn't HTTP."""
        self.refuse(plain_problem(400, msg))

    def look(self, now: float) -> None:
        """End the connection if its request takes too long to arrive."""
        since = self._coming_since
        if since is None or now - since <= self.bounds.request_s or self.transport.is_closing():
            return
        cycle: RequestResponseCycle | None = self.cycle
        if self._head_bytes is None:
            if cycle is not None and cycle.response_complete:
                self.transport.close()  # answered, and still sending
                return
        elif cycle is not None and not cycle.response_complete:
            return  # the previous request is being answered
        elif cycle is None and not self._has_begun:
            self.transport.close()  # it has never sent anything
            return
        self.refuse(problem_of(RequestTimeout(f"the request wasn't whole within {self.bounds.request_s:g} s")))

    def refuse(self, document: Mapping[str, Any]) -> None:
        """Answer with a problem, unless an answer has begun, and close the connection; drop the data being read."""
        if self.transport.is_closing():
            return
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.close()
                return
        body = encoded(document)
        status = int(document["status"])
        head = [STATUS_LINE[status], b"content-length: %d\r\nconnection: close\r\n" % len(body)]
        head += [name + b": " + value + b"\r\n" for name, value in headers_of(status)]
        self.transport.write(b"".join((*head, b"\r\n", body)))
        self.transport.close()


def bounded(bounds: ConnectionBounds) -> type[BoundedConnection]:
    """Return the protocol with these limits, as uvicorn takes it."""

    class Bounded(BoundedConnection):
        """A connection with these limits."""

    Bounded.bounds = bounds
    return Bounded


async def watch(state: ServerState, bounds: ConnectionBounds) -> None:
    """Check all connections until cancelled."""
    while True:
        await asyncio.sleep(min(bounds.request_s / _LOOKS, 1.0))
        now = time.monotonic()
        for connection in list(state.connections):
            if isinstance(connection, BoundedConnection):
                connection.look(now)
