"""HTTP/1.1 connections that can't block others: limits of a header's bytes, of a request's time, of their number.

httptools parses; an `Exchange` is one request and its answer, as an ASGI application sees them. A timer for each
request would cost as much as a tenth of a small one, so the server checks all connections a few times within the
shortest limit.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http import HTTPStatus
from typing import Any, Final, Protocol
from urllib.parse import unquote

import httptools
import structlog

from millstream.errors import HttpError
from millstream.serving.access import CERTIFICATE, name_in_certificate
from millstream.serving.client_hang_up import PeerState, peer_state
from millstream.serving.connection_bounds import ConnectionBounds
from millstream.serving.problem_documents import encoded, headers_of, plain_problem, problem_of
from millstream.serving.request_bodies import Receive
from millstream.serving.request_heads import FIELDS_MAX, HEAD_BYTES_MAX, HeadRefused, check_head
from millstream.serving.requests import ENDING, NEEDS_ITS_CLIENT, ClientStalledError, Scope, Send

logger = structlog.get_logger("millstream.serve")

Application = Callable[[Scope, Receive, Send], Awaitable[None]]
"""An ASGI application."""
_UNTAKEN_BYTES_MAX: Final = 64 << 10
"""Bytes of a body that arrive before the application takes them; no more is read then."""
_PARSED_BYTES: Final = 8 << 10
"""Bytes parsed at a time: a request takes forty times the memory of its bytes, and those behind one that waits aren't parsed yet."""
_STATUS_LINES: Final = {int(one): f"HTTP/1.1 {one:d} {one.phrase}\r\n".encode() for one in HTTPStatus}
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
"""Bytes that would end a header's value, or mean something else to another reader."""
_BODILESS: Final = {HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED}


class Exchange:
    """One request and its answer."""

    def __init__(self, connection: Connection, scope: Scope, *, keeps_alive: bool, expects_continue: bool) -> None:
        self.scope: Final = scope
        self.body = bytearray()
        """Bytes that have arrived and weren't taken."""
        self.more_body = True
        self.ends_connection = False  # set if the answer comes before the body, behind which it closes
        self.changed: Final = asyncio.Event()
        """Set if `receive` has something to return."""
        self.keeps_alive = keeps_alive
        """Whether the connection takes another request after the answer."""
        self.is_gone = False
        """Whether the client is gone, so that an answer isn't read."""
        self.has_begun = False
        """Whether the answer has begun …"""
        self.is_answered = False
        """… and is whole."""
        self._connection = connection
        self._expects_continue = expects_continue
        self._left_bytes: int | None = None
        """Bytes of the answer's body that are still to be sent; None if it gave no length."""
        self._is_chunked = False
        self._head = b""  # the answer's header, until its first part goes out with it

    async def run(self, application: Application) -> None:
        """Have the application answer; an error of it is our bug, and answered with 500 if there is no answer."""
        try:
            await application(self.scope, self.receive, self.send)
        except asyncio.CancelledError:
            self._connection.transport.close()
            raise
        except ClientStalledError:
            logger.warning("a client that doesn't read was dropped", path=self.scope["path"])
            self._connection.transport.abort()
            return
        except Exception:
            logger.exception("a request failed", path=self.scope["path"])
            if self.is_answered:
                return
        else:
            if self.is_answered or self.is_gone:
                return
            logger.error("a request wasn't answered", path=self.scope["path"])
        if self.has_begun:
            self._connection.transport.close()
        else:
            self._connection.end_with(plain_problem(500, "this is a bug of the server's"))

    async def receive(self) -> MutableMapping[str, Any]:
        """Return the next part of the body once it has arrived, or that the client is gone; see ASGI."""
        if self._expects_continue and not self._connection.transport.is_closing():
            self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._expects_continue = False
        if not self.is_gone and not self.is_answered:
            if self.more_body:
                self._connection.resume_reading()
            await self.changed.wait()
            self.changed.clear()
        if self.is_gone or self.is_answered:
            return {"type": "http.disconnect"}
        body, self.body = bytes(self.body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Send the answer's header, or a part of its body; waits while the client doesn't read. See ASGI."""
        can_write = self._connection.can_write
        if not can_write.is_set() and not self.is_gone:
            await can_write.wait()
        if self.is_gone:
            return
        if not self.has_begun and message["type"] == "http.response.start":
            self._send_head(message["status"], message.get("headers", ()))
        elif self.has_begun and not self.is_answered and message["type"] == "http.response.body":
            self._send_body(message.get("body", b""), more=message.get("more_body", False))
        else:
            raise RuntimeError(f"{message['type']} is out of turn")

    def _send_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        if self._expects_continue and self.more_body:
            self.keeps_alive = False  # whether the body will come isn't known
        self.has_begun, self._expects_continue = True, False
        head = [_STATUS_LINES[status], self._connection.server.date_line]
        for name, value in headers:
            if _CONTROL.search(value):
                raise RuntimeError(f"the answer's header {name!r} has a control character")
            if name == b"content-length":
                self._left_bytes = int(value)
            head += [name, b": ", value, b"\r\n"]
        if self.scope["method"] == "HEAD" or status in _BODILESS:
            self._left_bytes = 0
        elif self._left_bytes is None and self.scope["http_version"] == "1.1":
            self._is_chunked = True
            head.append(b"transfer-encoding: chunked\r\n")
        elif self._left_bytes is None:
            self.keeps_alive = False  # the connection's end is the body's
        length = next((value for name, value in self.scope["headers"] if name == b"content-length"), None)
        may_be_cut_off = length is None or int(length) > self._connection.bounds.unread_bytes_max
        self.ends_connection = self.more_body and may_be_cut_off
        if self.ends_connection or not self.keeps_alive:
            head.append(b"connection: close\r\n")
        head.append(b"\r\n")
        self._head = b"".join(head)
        if not self._left_bytes:
            self._send_body(b"", more=True)

    def _send_body(self, body: bytes, *, more: bool) -> None:
        if self._is_chunked:
            end = b"" if more else b"0\r\n\r\n"
            body = b"".join((b"%x\r\n" % len(body), body, b"\r\n", end)) if body else end
        elif self.scope["method"] == "HEAD":
            body = b""
        elif self._left_bytes is not None:
            self._left_bytes -= len(body)
            if self._left_bytes < 0 or (self._left_bytes and not more):
                raise RuntimeError("the answer isn't as long as its Content-Length")
        self._connection.write(self._head + body)  # each write is a system call, and a packet
        self._head = b""
        if not more:
            self.is_answered = True
            self.changed.set()
            if not self.keeps_alive:
                self._connection.transport.close()
            self._connection.go_on()


class Server(Protocol):
    """The part of a server that a connection needs."""

    application: Application
    bounds: ConnectionBounds
    connections: set[Connection]
    date_line: bytes
    """The header of each answer that has the time."""
    ending: asyncio.Event
    """Set once it takes no more requests."""

    def start(self, exchange: Exchange) -> None:
        """Start a task that answers a request."""

    def enter(self, connection: Connection) -> int:
        """Take a connection that was made; return how many there are."""

    def leave(self, connection: Connection) -> None:
        """Forget a connection that was closed."""


class Connection(asyncio.Protocol):
    """A client's connection, with limits."""

    def __init__(self, server: Server) -> None:
        self.server: Final = server
        self.transport: asyncio.Transport
        self.exchange: Exchange | None = None
        """The newest request with a whole header."""
        self._running: Exchange | None = None
        """The request that is being answered, or was answered last."""
        self._waiting: deque[Exchange] = deque()
        """Requests that came before earlier ones were answered."""
        self._parser = self._new_parser()
        self.bounds = server.bounds
        self._is_paused = False
        self._is_half_closed = False
        """Whether the client has ended its side, and the rest of the answers is being sent."""
        self._silence: tuple[float, int] | None = None
        """When a client that has ended its side was last sent anything, and the bytes written by then."""
        self.can_write = asyncio.Event()
        """Cleared while the client doesn't read what was sent."""
        self.can_write.set()
        self._base: dict[str, Any] = {}
        """The parts of each request's scope that are the connection's."""
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._expects_continue = False
        self._coming_since: float | None = None
        """When the incomplete request began; for a new connection, when it was made."""
        self._idle_since: float | None = None
        """When the last answer was whole, if no request has begun since."""
        self._head_bytes: int | None = 0
        """Bytes of the current header after its first piece; None after the header."""
        self._has_begun = False
        """Whether it has sent anything."""
        self._begun_here = False
        """Whether a request began or ended in the data being read."""
        self._unparsed = b""
        """Bytes behind requests that wait."""
        self._unread_bytes = 0
        self._written_bytes = self._taken_bytes = 0
        """Bytes of answers, in all and up to what the client had taken at the last look."""
        self._taken_at = 0.0
        """When the client was last seen to take any, or had nothing to take."""
        self._beside_bytes = 0
        """Bytes in a chunked body that aren't data, since the last chunk: chunk lengths and trailers."""

    # --- from the transport ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # a stream's
        """Handle a new connection; see asyncio.Protocol."""
        self.transport = transport
        self._coming_since = time.monotonic()
        secured = transport.get_extra_info("ssl_object")
        client, own = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        self._base = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "scheme": "http" if secured is None else "https",
            "client": tuple(client[:2]) if client else None,
            "server": tuple(own[:2]) if own else None,
            "root_path": "",
            ENDING: self.server.ending,
        }
        if secured is not None and (name := name_in_certificate(secured.getpeercert())) is not None:
            self._base[CERTIFICATE] = name
        if self.server.enter(self) > self.bounds.connections_max:
            self.refuse(plain_problem(503, f"{self.bounds.connections_max} connections are open, which is the limit"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the application that its client is gone; see asyncio.Protocol."""
        del exc
        self.server.leave(self)
        if self._running is not None:
            self._leave(self._running)
        if self.exchange is not None:
            self._leave(self.exchange)
        self._drop_waiting()
        self.can_write.set()
        # These refer to the connection, too: without them it needs no garbage collection.
        self.exchange = self._running = self._parser = None

    def eof_received(self) -> bool:
        """Return whether to go on sending after the client has ended its side; see asyncio.Protocol.

        A client that has sent its requests may end its side of the connection and wait for the answers. A client that is gone looks
        the same until it is sent something. So answers to complete requests are sent to their ends. The application is told that the
        client is gone once the connection is reset, or no byte of an answer was sent for `half_closed_s`. An application that has set
        `NEEDS_ITS_CLIENT` in the scope is told at once. With TLS the end of the client's side ends the connection, since asyncio has
        no half-closed ones.
        """
        if self._base["scheme"] == "https":
            return False
        newest, running = self.exchange, self._running
        if newest is not None and newest is not running and newest.more_body:
            self._waiting.pop()  # the newest: it will never be whole
        elif running is not None and running.more_body:
            return False
        if running is None or running.is_answered or running.scope.get(NEEDS_ITS_CLIENT):
            return False
        self.exchange = self._waiting[-1] if self._waiting else running
        self.exchange.keeps_alive = False
        self._is_half_closed = True
        self._coming_since = self._idle_since = None
        return True

    def pause_writing(self) -> None:
        """Let answers wait; see asyncio.Protocol."""
        self.can_write.clear()

    def resume_writing(self) -> None:
        """Let answers go on; see asyncio.Protocol."""
        self.can_write.set()

    def data_received(self, data: bytes) -> None:
        """Parse data; see asyncio.Protocol."""
        for start in range(0, len(data), _PARSED_BYTES):
            if self._waiting or self._unparsed or self.transport.is_closing():
                self._unparsed += data[start:]
                return
            self._take(data[start : start + _PARSED_BYTES])

    def _take(self, data: bytes) -> None:
        self._begun_here = False
        self._beside_bytes += len(data)
        self._parse(data)
        if self._head_bytes is None and self._beside_bytes > HEAD_BYTES_MAX + len(data):
            self.refuse(plain_problem(431, f"a body has more than {HEAD_BYTES_MAX} bytes outside its chunks"))
        # If a header begins within or after this data, the rest of the data isn't part of it.
        if self._head_bytes is not None and not self._begun_here:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self.refuse(plain_problem(431, f"a request's head has more than {HEAD_BYTES_MAX} bytes"))

    # --- from the parser -------------------------------------------------------------------------------------------

    def _new_parser(self) -> Any:
        parser = httptools.HttpRequestParser(self)
        # A request before one that is refused is still answered.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _parse(self, data: bytes) -> None:
        """Parse; a request that offers another protocol is served as HTTP (RFC 9110, 7.8).

        httptools takes the bytes after its header for the other protocol's. So its body was lost, or
        parsed as a request of its own. The request is parsed again without the offer.
        """
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as offered:
                if self._parser.get_method() == b"CONNECT":
                    self.refuse(plain_problem(400, "This is no proxy."))
                    return
                data = self._without_offer() + data[offered.args[0] :]
                self._parser = self._new_parser()
                continue
            except httptools.HttpParserError as error:
                found = error.__context__  # raised by `on_headers_complete`
                if isinstance(found, HeadRefused):
                    self.refuse(found.document)
                else:
                    self.refuse(plain_problem(400, "Invalid HTTP request received."))
            return

    def _without_offer(self) -> bytes:
        """Return the header of the request that was parsed last."""
        version = self._parser.get_http_version().encode()
        head = [self._parser.get_method(), b" ", self._url, b" HTTP/", version, b"\r\n"]
        for name, value in self._headers:
            if name == b"connection" and b"close" in value.lower():
                head.append(b"connection: close\r\n")
            elif name not in {b"upgrade", b"connection"}:
                head += [name, b": ", value, b"\r\n"]
        return b"".join((*head, b"\r\n"))

    def on_message_begin(self) -> None:
        """Start a request; see httptools."""
        self._url, self._headers, self._expects_continue = b"", [], False
        self._has_begun = self._begun_here = True
        self._head_bytes = 0
        self._unread_bytes = 0
        self._idle_since = None
        if self._coming_since is None:
            self._coming_since = time.monotonic()

    def on_url(self, url: bytes) -> None:
        """Take a part of the address; see httptools."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header.

        Ignore trailer fields: a trailer must never act as a header (it could forge `Authorization`).
        """
        if self._head_bytes is None:
            return
        name, value = name.lower(), value.rstrip(b" \t")  # no part of the value (RFC 9110, 5.5)
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True
        if len(self._headers) == FIELDS_MAX:
            raise HeadRefused(plain_problem(431, f"a request's head has more than {FIELDS_MAX} fields"))
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Finish the header, and answer the request once those before it are answered; see httptools."""
        parser = self._parser
        if parser.should_upgrade():
            return  # see `_parse`
        version = parser.get_http_version()
        check_head(version, self._url, self._headers)
        self._head_bytes = self._idle_since = None
        self._beside_bytes = 0
        url = httptools.parse_url(self._url)
        path = url.path.decode("ascii")
        scope = self._base | {
            "http_version": version,
            "method": parser.get_method().decode("ascii"),
            "path": unquote(path) if "%" in path else path,
            "raw_path": url.path,
            "query_string": url.query or b"",
            "headers": self._headers,
        }
        keeps_alive = version != "1.0" and parser.should_keep_alive()
        before = self.exchange
        self.exchange = Exchange(self, scope, keeps_alive=keeps_alive, expects_continue=self._expects_continue)
        if before is None or before.is_answered:
            self._start(self.exchange)
        else:
            self.pause_reading()
            self._waiting.append(self.exchange)

    def on_body(self, body: bytes) -> None:
        """Take a part of the body; see httptools."""
        self._beside_bytes = 0
        exchange = self.exchange
        assert exchange is not None, "its header was whole"
        if exchange.is_answered:
            # Read on for a while: a reset connection loses an answer that the client hasn't read yet.
            self._unread_bytes += len(body)
            if self._unread_bytes > self.bounds.unread_bytes_max:
                self.transport.close()
            return
        exchange.body += body
        if len(exchange.body) > _UNTAKEN_BYTES_MAX:
            self.pause_reading()
        exchange.changed.set()

    def on_message_complete(self) -> None:
        """Finish the request; see httptools."""
        if self._parser.should_upgrade():
            return
        self._coming_since = None
        self._head_bytes = 0
        self._begun_here = True
        assert self.exchange is not None, "its header was whole"
        exchange = self.exchange
        exchange.more_body = False
        exchange.changed.set()
        if exchange.is_answered and exchange.ends_connection:
            self.transport.close()

    # --- for exchanges and the server ------------------------------------------------------------------------------

    def pause_reading(self) -> None:
        """Read nothing more from the client for now."""
        if not self._is_paused and not self._is_half_closed:
            self._is_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again what the client sends."""
        if self._is_paused:
            self._is_paused = False
            data, self._unparsed = self._unparsed, b""
            self.data_received(data)
            if not self._is_paused:
                self.transport.resume_reading()

    def go_on(self) -> None:
        """Go on with the next request after an answer."""
        if self.transport.is_closing():
            return
        if self._waiting:
            if self._coming_since is not None:
                self._coming_since = time.monotonic()  # nothing was read while it waited
            self._start(self._waiting.popleft())
        else:
            self._idle_since = time.monotonic()
            self.resume_reading()

    def _start(self, exchange: Exchange) -> None:
        self._running = exchange
        self.server.start(exchange)

    def write(self, data: bytes) -> None:
        """Send a part of an answer."""
        self._written_bytes += len(data)
        self.transport.write(data)

    def end(self) -> None:
        """Close the connection after the answer to the request that has begun, or at once."""
        if self.exchange is None or self.exchange.is_answered:
            self.transport.close()
        else:
            self.exchange.keeps_alive = False

    def look(self, now: float) -> None:
        """End the connection if its request takes too long to arrive, none comes, or its answer isn't read."""
        unsent_bytes = self.transport.get_write_buffer_size()
        if not unsent_bytes or self._written_bytes - unsent_bytes != self._taken_bytes:
            self._taken_bytes, self._taken_at = self._written_bytes - unsent_bytes, now
        elif now - self._taken_at > self.bounds.idle_s:
            self.transport.abort()
            return
        if self.transport.is_closing():
            return
        if self._is_gone(now, unsent_bytes):
            self.transport.abort()
            return
        if self._waiting:
            return
        if self._coming_since is None:
            if self._idle_since is not None and now - self._idle_since > self.bounds.idle_s:
                self.transport.close()
            return
        if now - self._coming_since <= self.bounds.request_s:
            return
        exchange = self.exchange
        if self._head_bytes is None:
            if exchange is not None and exchange.is_answered:
                self.transport.close()  # answered, and still sending
                return
        elif exchange is not None and not exchange.is_answered:
            return  # the previous request is being answered
        elif exchange is None and not self._has_begun:
            self.transport.close()  # it has never sent anything
            return
        self.refuse(
            problem_of(
                HttpError(f"the request wasn't whole within {self.bounds.request_s:g} s", code="request_timeout")
            )
        )

    def _is_gone(self, now: float, unsent_bytes: int) -> bool:
        """Return whether the client of the running request is gone, though nothing was read that shows it.

        While requests wait nothing is read, and after the end of the client's side there is nothing to read.
        """
        running = self._running
        is_read = not self._is_paused and not self._is_half_closed
        if is_read or running is None or running.is_answered or running.more_body:
            self._silence = None
            return False
        state = peer_state(self.transport.get_extra_info("socket").fileno())
        if state is not PeerState.ENDED:
            self._silence = None
            return state is PeerState.GONE
        if self._silence is None or unsent_bytes or self._silence[1] != self._written_bytes:
            self._silence = now, self._written_bytes
        return now - self._silence[0] > self.bounds.half_closed_s

    def refuse(self, document: Mapping[str, Any]) -> None:
        """Answer a request that can't be taken with a problem, behind the answers before it; close the connection.

        If another request is being answered, close after its answer, and drop those behind it. If the request's own answer has begun,
        close at once.
        """
        running = self._running
        if running is None or running.is_answered or (running is self.exchange and running.more_body):
            self.end_with(document)
            return
        running.keeps_alive = False
        self._drop_waiting()
        self.pause_reading()

    def end_with(self, document: Mapping[str, Any]) -> None:
        """Answer with a problem, unless an answer has begun, and close the connection."""
        if self.transport.is_closing():
            return
        running = self._running
        if running is not None and not running.is_answered:
            self._leave(running)
            if running.has_begun:
                self.transport.close()
                return
        body = encoded(document)
        status = int(document["status"])
        head = [_STATUS_LINES[status], b"content-length: %d\r\nconnection: close\r\n" % len(body)]
        head += [name + b": " + value + b"\r\n" for name, value in headers_of(status)]
        self.write(b"".join((*head, b"\r\n", body)))
        self.transport.close()

    def _drop_waiting(self) -> None:
        for exchange in self._waiting:
            self._leave(exchange)
        self._waiting.clear()

    def _leave(self, exchange: Exchange) -> None:
        exchange.is_gone = True
        exchange.changed.set()
