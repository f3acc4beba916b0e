"""One HTTP exchange with a receiver that may be hostile: checked addresses, and bounds of time and size.

httpcore speaks HTTP/1.1 and keeps connections. Its connections are made here, by its hook for network backends. It
follows no redirects and reads no proxy variables.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final, TypeAlias

from millstream.delivery.public_addresses import is_public
from millstream.delivery.webhook_settings import Receiver
from millstream.errors.missing_extras import missing_extra
from millstream.workers import call_in_thread

try:
    import httpcore
except ModuleNotFoundError as error:
    raise missing_extra(f"webhooks need {error.name}", "run") from error

ANSWER_BYTES: Final = 64 << 10
"""Most bytes of an answer that are read, its head included."""
_IDLE_S: Final = 60.0
"""Seconds after which an idle connection isn't used again, so that a changed address is followed."""

Resolve: TypeAlias = Callable[[str, int], Sequence[str]]
"""Returns the IP addresses of a host name; raises `OSError` if it has none."""


class ExchangeFailed(Exception):
    """There was no whole answer; the text says why."""


class AddressRefused(ExchangeFailed):
    """The receiver's name has an address that isn't public: nothing was sent."""


class _TimedOut(httpcore.TimeoutException):
    """The time of the whole exchange is over."""


class _AnswerTooLong(httpcore.NetworkError):
    """The rest of the answer isn't read."""


@dataclass(frozen=True, slots=True)
class ReceiverAnswer:
    """The head of an answer."""

    status: int
    retry_after: str | None


class _Exchange(threading.local):
    """The bounds of the exchange that this thread is in."""

    deadline_s = 0.0
    """By the monotonic clock."""
    bytes_left = 0
    has_received = False
    has_connected = False
    """Whether its connection was made for it."""

    def remaining_s(self) -> float:
        """Return the time that is left; raises if there is none."""
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise _TimedOut
        return left_s


def resolve(host: str, port: int) -> Sequence[str]:
    """Return the addresses of a name, by the system's resolver, in its order."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class HttpSender:
    """Sends requests to one receiver.

    Args:
        receiver: the receiver.
        connections: most connections.
        allow_private: whether addresses that aren't public are allowed.
        resolve: looks names up.
        tls: verifies the receiver; by default against the system's authorities.

    Concurrency: any number of threads.
    """

    def __init__(
        self,
        receiver: Receiver,
        *,
        connections: int,
        allow_private: bool,
        resolve: Resolve = resolve,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._url = httpcore.URL(
            scheme=receiver.scheme.encode(),
            host=receiver.host.encode(),
            port=receiver.port,
            target=receiver.target.encode(),
        )
        self._host_header = receiver.host_header
        self._exchange = _Exchange()
        self._open = _OpenStreams()
        self._pool = httpcore.ConnectionPool(
            ssl_context=ssl.create_default_context() if tls is None else tls,
            max_connections=connections,
            keepalive_expiry=_IDLE_S,
            network_backend=_Backend(self._exchange, self._open, resolve, allow_private=allow_private),
        )

    def post(self, headers: Mapping[str, str], body: bytes, *, timeout_s: float) -> ReceiverAnswer:
        """Send a request; return its answer once it is read to its end, or to `ANSWER_BYTES`.

        Args:
            headers: the request's headers; `host` and `content-length` are added.
            body: the request's body.
            timeout_s: bound of the whole exchange, from the look-up of the name on.

        Raises:
            AddressRefused: an address of the receiver isn't public.
            ExchangeFailed: there is no whole answer.
        """
        exchange = self._exchange
        exchange.deadline_s = time.monotonic() + timeout_s
        while True:
            exchange.bytes_left, exchange.has_received, exchange.has_connected = ANSWER_BYTES, False, False
            try:
                return self._post(headers, body)
            except httpcore.TimeoutException:
                raise ExchangeFailed(f"the receiver didn't answer within {timeout_s:g} s") from None
            except httpcore.ConnectError as error:
                raise ExchangeFailed(str(error)) from None
            except _AnswerTooLong:
                raise ExchangeFailed(f"the head of the answer is longer than {ANSWER_BYTES >> 10} KiB") from None
            except (httpcore.NetworkError, httpcore.ProtocolError) as error:
                if self._open.is_closed:
                    raise ExchangeFailed("the delivery has ended") from None
                if not exchange.has_connected and not exchange.has_received:
                    continue  # the receiver closed a kept connection; each attempt uses one up
                broken = isinstance(error, httpcore.NetworkError) or not exchange.has_received
                raise ExchangeFailed(
                    "the receiver closed the connection before its answer was whole"
                    if broken
                    else "the receiver's answer isn't HTTP"  # the library's text quotes it
                ) from None

    def close(self) -> None:
        """Close all connections; a request that is under way fails at once, unless it is still connecting."""
        self._open.close()
        self._pool.close()

    def _post(self, headers: Mapping[str, str], body: bytes) -> ReceiverAnswer:
        fields = [(b"host", self._host_header.encode()), (b"content-length", b"%d" % len(body))]
        fields += [(name.encode("ascii"), value.encode("latin-1")) for name, value in headers.items()]
        waits = {"timeout": {"pool": self._exchange.remaining_s()}}
        with self._pool.stream("POST", self._url, headers=fields, content=body, extensions=waits) as response:
            try:
                for _ in response.iter_stream():
                    pass
            except _AnswerTooLong:
                pass  # leaving the block closes the connection
            found = [value for name, value in response.headers if name.lower() == b"retry-after"]
            return ReceiverAnswer(response.status, found[0].decode("latin-1") if found else None)


class _OpenStreams:
    """The open connections of a sender. Any thread."""

    def __init__(self) -> None:
        self._streams: set[_Stream] = set()
        self.is_closed = False

    def add(self, stream: _Stream) -> None:
        """Take a connection that was made."""
        self._streams.add(stream)
        if self.is_closed:
            stream.cut()

    def discard(self, stream: _Stream) -> None:
        """Forget a connection that was closed."""
        self._streams.discard(stream)

    def close(self) -> None:
        """Cut all connections, and those that are still made."""
        self.is_closed = True
        for stream in tuple(self._streams):
            stream.cut()


class _Backend(httpcore.NetworkBackend):
    """Makes connections: only to addresses that it has checked."""

    def __init__(
        self, exchange: _Exchange, open_streams: _OpenStreams, resolve: Resolve, *, allow_private: bool
    ) -> None:
        self._exchange = exchange
        self._open = open_streams
        self._resolve = resolve
        self._allow_private = allow_private

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ARG002 (the exchange has one for all of it)
        local_address: str | None = None,  # noqa: ARG002
        socket_options: Iterable[Any] | None = None,  # noqa: ARG002
    ) -> httpcore.NetworkStream:
        """Look a name up, check its addresses, and connect to the first of them that answers."""
        addresses = self._addresses(host, port)
        if not self._allow_private:
            inner = [address for address in addresses if not is_public(ip_address(address))]
            if inner:
                raise AddressRefused(f"{host} has the address {inner[0]}, which isn't public")
        failure: OSError | None = None
        for number, address in enumerate(addresses):
            patience_s = self._exchange.remaining_s() / (len(addresses) - number)
            try:
                connection = socket.create_connection((address, port), patience_s)
            except OSError as error:
                failure = error
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._exchange.has_connected = True
            return _Stream(connection, self._exchange, self._open)
        if failure is None or isinstance(failure, TimeoutError):
            raise _TimedOut
        raise httpcore.ConnectError(f"{host} port {port} can't be reached: {failure.strerror or failure}")

    def _addresses(self, host: str, port: int) -> Sequence[str]:
        """Look a name up within the exchange's time, though the system's resolver has no bound of its own."""
        answer = call_in_thread("webhook-lookup", lambda: self._resolve(host, port))
        try:
            return answer.result(self._exchange.remaining_s())
        except TimeoutError:
            raise _TimedOut from None
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise httpcore.ConnectError(f"{host} can't be looked up: {why}") from error


class _Stream(httpcore.NetworkStream):
    """A connection, bounded by the exchange of the thread that uses it."""

    def __init__(self, connection: socket.socket, exchange: _Exchange, open_streams: _OpenStreams) -> None:
        self._socket = connection
        self._exchange = exchange
        self._open = open_streams
        open_streams.add(self)

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ARG002
        """Return some bytes; none at the end."""
        exchange = self._exchange
        if not exchange.bytes_left:
            raise _AnswerTooLong
        try:
            self._socket.settimeout(exchange.remaining_s())
            data = self._socket.recv(min(max_bytes, exchange.bytes_left))
        except TimeoutError:
            raise _TimedOut from None
        except OSError as error:
            raise httpcore.ReadError(str(error)) from error
        exchange.bytes_left -= len(data)
        exchange.has_received = exchange.has_received or bool(data)
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ARG002
        """Send all bytes."""
        left = memoryview(buffer)
        try:
            while left:
                self._socket.settimeout(self._exchange.remaining_s())
                left = left[self._socket.send(left) :]
        except TimeoutError:
            raise _TimedOut from None
        except OSError as error:
            raise httpcore.WriteError(str(error)) from error

    def close(self) -> None:
        """Close the connection."""
        self._open.discard(self)
        self._socket.close()

    def cut(self) -> None:
        """End what another thread reads or writes: closing the socket alone doesn't wake it."""
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # TLS's own would take the session from that thread

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ARG002
    ) -> httpcore.NetworkStream:
        """Begin TLS with the host of the URL, whichever address was connected to."""
        try:
            self._socket.settimeout(self._exchange.remaining_s())
            secured = ssl_context.wrap_socket(self._socket, server_hostname=server_hostname)
            self._open.discard(self)
            return _Stream(secured, self._exchange, self._open)
        except TimeoutError:
            self.close()
            raise _TimedOut from None
        except OSError as error:
            self.close()
            why = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error.strerror
            raise httpcore.ConnectError(f"TLS with {server_hostname} failed: {why or type(error).__name__}") from error

    def get_extra_info(self, info: str) -> Any:
        """Return facts of the connection by httpcore's names."""
        if info == "is_readable":
            poll = select.poll()
            try:
                poll.register(self._socket, select.POLLIN)
                return bool(poll.poll(0))
            except (OSError, ValueError):
                return True  # it is closed
        if info == "ssl_object" and isinstance(self._socket, ssl.SSLSocket):
            return self._socket
        return None
