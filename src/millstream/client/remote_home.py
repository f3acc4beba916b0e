"""`millstream.connect`: a home behind an address, with the same calls as a home opened here."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

import pyarrow as pa

from millstream.client.appends import AppendRequest, HomeAppends, check_deadline
from millstream.client.batch_stream import Pieces, change_of, latest_of
from millstream.client.call_results import CONSUMED_AT_ONCE, LATEST_ROWS_MAX, Latest
from millstream.client.consumers import Ask, Consumers, Consumption, answer_of_call, call_of
from millstream.client.following import REMOTE_POLL_S, Following, Step
from millstream.client.http_requests import (
    Call,
    append_call,
    changes_call,
    check_name,
    check_url,
    latest_call,
    merged_call,
    of_stream,
    only_stream,
    query_call,
    records_call,
    session_call,
)
from millstream.client.http_retries import Exchange, HttpAnswer, Lost, Nap, appended, asked, json_of, whole_table
from millstream.client.write_session import Session, session_of
from millstream.errors import HomeClosed, RemoteError, UsageError
from millstream.errors.missing_extras import missing_extra
from millstream.model.positions import StreamToken
from millstream.model.steps import Steps, blocking, run
from millstream.model.writes import SessionFacts

try:
    import httpx
except ModuleNotFoundError as missing:
    raise missing_extra("millstream.connect needs httpx", "client") from missing

if TYPE_CHECKING:
    import ssl


logger: Final = logging.getLogger("millstream.client")
TIMEOUT_S: Final = 60.0
"""How long to wait for an answer's next bytes, and for a server to answer at all."""
_CONNECTIONS_MAX: Final = 64
_HANDSHAKE_S: Final = 2.0
_Result = TypeVar("_Result")


class RemoteSteps:
    """The calls of a home behind an address that threads and tasks share: its client's `_run` exchanges calls and answers."""

    _client: Callable[..., Any]
    _run: Callable[[Exchange[Any]], Any]
    _whole: Callable[[Call], Any]
    streams: Callable[[], Any]

    def __init__(self, url: str, *, token: str | None, tls: ssl.SSLContext | bool, timeout_s: float) -> None:
        self._url = check_url(url)
        self._timeout_s = timeout_s
        self._followings: weakref.WeakSet[Any] = weakref.WeakSet()
        self._settings = client_settings(self._url, token, tls, timeout_s)
        self._pid, self._own_http = os.getpid(), self._client(**self._settings)
        self._http_of_parent: Any = None
        """A forked child's copy of its parent's client. It stays, and isn't closed."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._url!r})"

    @property
    def _http(self) -> Any:
        """Return the HTTP client of this process: on a connection that it shared with its parent, each would get the other's answers."""
        if self._pid != os.getpid():
            if not self._own_http.is_closed:
                self._http_of_parent, self._own_http = self._own_http, self._client(**self._settings)
            self._pid = os.getpid()
        return self._own_http

    @property
    def url(self) -> str:
        """Return its address."""
        return self._url

    def _check_open(self) -> None:
        if self._http.is_closed:
            raise HomeClosed("this home was closed", url=self._url)

    def _json(self, call: Call) -> Steps[Any]:
        return json_of((yield from self._asked(call)), self._url)

    def _asked(self, call: Call) -> Steps[HttpAnswer]:
        steps = asked(call, url=self._url, patience_s=self._timeout_s, now=time.monotonic)
        answer: HttpAnswer = yield self._run(steps)
        return answer

    def _sent(self, request: AppendRequest, tables: Mapping[str, pa.Table]) -> Steps[Any]:
        call = append_call(request, tables)
        return (yield self._run(appended(call, request, url=self._url, now=time.monotonic)))

    def _of_consumers(self, stream: str, ask: Ask) -> Steps[Any]:
        return answer_of_call((yield from self._asked(call_of(stream, ask))), self._url)


class RemoteHome(RemoteSteps, HomeAppends):
    """A home behind an address. Made by `connect`.

    It raises the errors of an `OpenHome`, rebuilt from the server's answer, and in addition:
    `server_unreachable` (nothing was done), `RemoteError` (`answer_cut_off`) (an answer ended before its end),
    `RemoteError` (`answer_unreadable`) (the server isn't Millstream). An append is resent until its deadline if no answer came, or the
    server has no room just now.

    Concurrency: any number of threads. A forked child has connections of its own.
    """

    _client = httpx.Client

    def close(self) -> None:
        """Close the connections."""
        for following in list(self._followings):
            following.close()
        self._http.close()

    @blocking
    def streams(self) -> Steps[list[str]]:
        """Return as `OpenHome.streams`."""
        return [str(name) for name in (yield from self._json(Call("GET", "/v1/streams")))["streams"]]

    @blocking
    def token(self, stream: str, *, vector: bool = False) -> Steps[StreamToken]:
        """Return as `OpenHome.token`."""
        params = {"vector": "true"} if vector else {}
        return StreamToken.parse((yield from self._json(Call("GET", of_stream(stream, "token"), params)))["token"])

    def read(
        self,
        stream: str,
        *,
        table: str | None = None,
        after: StreamToken | str | None = None,
        upto: StreamToken | str | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Read as `OpenHome.read`."""
        for piece in self._pieces(records_call(stream, table, after, upto)):
            yield from piece.to_batches()

    def follow(
        self,
        stream: str,
        *,
        table: str | Sequence[str] | None = None,
        after: StreamToken | str | None = None,
    ) -> Following:
        """Follow as `OpenHome.follow`; an unknown stream, and a token that isn't there, are reported at the call."""
        end = self.token(stream)
        at = end if after is None else StreamToken.parse(str(after))
        steps = self._changes(stream, table, at, end)
        following = Following(steps, at, REMOTE_POLL_S, first=next(steps))
        self._followings.add(following)
        return following

    def _changes(
        self, stream: str, table: str | Sequence[str] | None, at: StreamToken, end: StreamToken
    ) -> Generator[Step, None, None]:
        is_first = True
        while True:
            if is_first or not end <= at:
                for piece in self._pieces(changes_call(stream, table, at, end)):
                    batches, token = change_of(piece)
                    for batch in batches:
                        yield batch, token
                at, is_first = end, False
            yield None, at
            end = self.token(stream)

    def read_latest(
        self,
        stream: str,
        table: str,
        *,
        after: StreamToken | str | None = None,
        upto: StreamToken | str | None = None,
        rows_max: int = LATEST_ROWS_MAX,
    ) -> Iterator[Latest]:
        """Read as `OpenHome.read_latest`."""
        for piece in self._pieces(latest_call(stream, table, after, upto, rows_max)):
            yield Latest(*latest_of(piece))

    @blocking
    def merged(self, stream: str, table: str, *, at: datetime | str | None = None) -> Steps[pa.Table]:
        """Return as `OpenHome.merged`."""
        return (yield self._whole(merged_call(stream, table, at)))

    def _append(self, request: AppendRequest, tables: Mapping[str, pa.Table]) -> Any:
        return run(self._sent(request, tables))

    def session(self, stream: str, name: str | None = None, *, next_number: int | None = None) -> Session:
        """Return as `OpenHome.session`."""
        check_name(stream)
        return Session(self._append, self.session_facts, stream, *session_of(name, next_number))

    @blocking
    def session_facts(self, stream: str, name: str) -> Steps[SessionFacts]:
        """Return as `OpenHome.session_facts`."""
        return SessionFacts.from_dict((yield from self._json(session_call(stream, name))))

    def consumers(self, stream: str) -> Consumers:
        """Return as `OpenHome.consumers`."""
        check_name(stream)
        return Consumers(partial(self._carry_ask, stream))

    def consume(
        self, stream: str, name: str, *, batch_size: int = CONSUMED_AT_ONCE, wait_s: float | None = None
    ) -> Consumption:
        """Receive as `OpenHome.consume`."""
        check_name(stream)
        return Consumption(partial(self._carry_ask, stream), name, batch_size, wait_s)

    def _carry_ask(self, stream: str, ask: Ask) -> Any:
        return run(self._of_consumers(stream, ask))

    @blocking
    def query(
        self,
        sql: str,
        *,
        stream: str | None = None,
        as_of: StreamToken | datetime | str | None = None,
        lake_only: bool = False,
    ) -> Steps[pa.Table]:
        """Query as `OpenHome.query`. For a task: cancelling it ends the query."""
        named = only_stream((yield self.streams())) if stream is None else stream
        return (yield self._whole(query_call(sql, named, as_of, lake_only=lake_only)))

    @blocking
    def status(self) -> Steps[dict[str, Any]]:
        """Return as `OpenHome.status`."""
        return self._json(Call("GET", "/status"))

    def _whole(self, call: Call) -> pa.Table:
        return whole_table(self._pieces(call), self._url)

    def _pieces(self, call: Call) -> Iterator[pa.Table]:
        response: httpx.Response = run(self._asked(call)).open
        pieces = Pieces()
        with contextlib.closing(response):
            try:
                for data in response.iter_bytes():
                    yield from pieces.feed(data)
            except httpx.RequestError as error:
                raise cut_off(self._url, str(error)) from error
        if not pieces.ended:
            raise cut_off(self._url, "the connection was closed")

    def _run(self, steps: Exchange[_Result]) -> _Result:
        return run(steps, self._do)

    def _do(self, step: Call | Nap) -> HttpAnswer | Lost | None:
        if isinstance(step, Nap):
            if step.warning:
                logger.warning(step.warning)
            time.sleep(step.seconds)
            return None
        return self._exchanged(step)

    def _exchanged(self, call: Call) -> HttpAnswer | Lost:
        request = request_of(self._http, call, self._timeout_s)
        try:
            response = self._http.send(request, stream=True)
            with contextlib.ExitStack() as unless_open:
                unless_open.callback(response.close)
                if call.in_pieces and response.status_code == 200:
                    unless_open.pop_all()
                    return answer_of(response, b"", response)
                return answer_of(response, response.read(), None)
        except httpx.RequestError as error:
            return lost_of(error, self._url)
        except RuntimeError:
            self._check_open()
            raise


def connect(
    url: str,
    *,
    token: str | None = None,
    verify: bool | str = True,
    cert: str | tuple[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> RemoteHome:
    """Return a home behind an address, served by `millstream serve` (or `run`); connects on the first call.

    Args:
        url: as in `http://127.0.0.1:8787`.
        token: authenticates the caller: `mst_…`.
        verify: a file (or folder) of certificates to trust instead of the machine's own.
        cert: a file with the caller's own certificate and key, or one of each.
        timeout_s: how long to wait for an answer's next bytes, and for a server to answer. After two seconds without a
            server, the logger `millstream.client` warns.

    Raises:
        UsageError: the address isn't HTTP, or a certificate can't be read.
        UsageError (`missing_extra`): this needs `millstream[client]`.
    """
    return RemoteHome(url, token=token, tls=tls_of(verify, cert), timeout_s=timeout_s)


def tls_of(verify: bool | str, cert: str | tuple[str, str] | None) -> ssl.SSLContext | bool:  # noqa: FBT001 - as `connect`
    """Return the TLS settings: the server's trusted certificates, and the caller's own.

    Raises:
        UsageError: a file can't be read as certificate or key, or verification is turned off.
    """
    import ssl
    from pathlib import Path

    if verify is False:
        raise UsageError(
            "verification of the server's certificate can't be turned off",
            hint="Pass the file of its certificate: verify='server.pem'.",
        )
    if verify is True and cert is None:
        return True
    try:
        if verify is True:
            context = httpx.create_ssl_context()
        else:
            folder = Path(verify).is_dir()
            context = ssl.create_default_context(cafile=None if folder else verify, capath=verify if folder else None)
        if cert is not None:
            context.load_cert_chain(*([cert] if isinstance(cert, str) else cert))
    except OSError as error:  # ssl's errors are OSErrors, too
        raise UsageError(f"a certificate can't be read: {error}") from error
    return context


def client_settings(url: str, token: str | None, tls: ssl.SSLContext | bool, timeout_s: float) -> dict[str, Any]:  # noqa: FBT001 - as httpx takes it
    """Return httpx's settings, for the blocking client and the asynchronous one."""
    from millstream import __version__

    headers = {"User-Agent": f"millstream/{__version__}"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    host = str(urlsplit(url).hostname)
    return {
        "base_url": url,
        # A proxy from the environment is another machine: requests for this one aren't sent there, with
        # their token.
        "mounts": {f"all://{f'[{host}]' if ':' in host else host}": None} if is_own(host) else None,
        "headers": headers,
        "verify": tls,
        "timeout": check_deadline(timeout_s, "timeout_s", default_s=TIMEOUT_S),
        "limits": httpx.Limits(max_connections=_CONNECTIONS_MAX, max_keepalive_connections=_CONNECTIONS_MAX),
    }


def is_own(host: str) -> bool:
    """Return whether a host, as written, is this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def request_of(client: httpx.Client | httpx.AsyncClient, call: Call, timeout_s: float) -> httpx.Request:
    """Return the request of a call."""
    timeout = httpx.Timeout(timeout_s, read=timeout_s + call.more_patience_s)
    return client.build_request(
        call.method,
        call.path,
        params=dict(call.params),
        headers=dict(call.headers),
        content=call.body or None,
        timeout=timeout,
    )


def answer_of(response: httpx.Response, body: bytes, opened: object) -> HttpAnswer:
    """Return the answer in a response."""
    return HttpAnswer(
        response.status_code, {name.lower(): value for name, value in response.headers.items()}, body, opened
    )


def lost_of(error: httpx.RequestError, url: str) -> Lost:
    """Return the loss of an answer: whether the request may have arrived, and what to change if it never can.

    Blocks for up to two seconds.
    """
    why = str(error) or type(error).__name__
    # A server that broke off within an answer speaks HTTP, and the caller that waits for its rows has no
    # time to lose.
    has_begun = "message body" in why
    if url.startswith("http:") and isinstance(error, httpx.RemoteProtocolError) and not has_begun and _speaks_tls(url):
        return Lost("it speaks TLS", sent=False, hint=f"Connect to https:{url.partition(':')[2]}.")
    if "WRONG_VERSION_NUMBER" in why or "RECORD_LAYER_FAILURE" in why:
        return Lost("it speaks no TLS", sent=False, hint=f"Connect to http:{url.partition(':')[2]}.")
    if "CERTIFICATE_VERIFY_FAILED" in why:
        hint = "Name the file of its certificate, or of the authority that signed it: verify='server.pem'."
        return Lost(why, sent=False, hint=hint)
    if "CERTIFICATE_REQUIRED" in why:
        return Lost(
            why,
            sent=False,
            hint="The server accepts only callers with a client certificate: pass cert=('client.pem', 'client.key').",
        )
    return Lost(why, sent=not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout))


def _speaks_tls(url: str) -> bool:
    """Return whether a server that closed without an answer expects a TLS handshake."""
    import socket
    import ssl

    parts = urlsplit(url)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent, and nothing trusted
    try:
        address = (str(parts.hostname), parts.port or 80)
        with socket.create_connection(address, _HANDSHAKE_S) as connection, context.wrap_socket(connection):
            return True
    except (OSError, ValueError):
        return False


def cut_off(url: str, why: str) -> RemoteError:
    """Return the error of an answer that ended before its end."""
    return RemoteError(f"{url} broke off its answer: {why}", code="answer_cut_off", url=url)
