"""Authorization over the network: access tokens and client certificates, for HTTP and for Arrow Flight.

A call's token is looked up in memory. Tokens that were read from the catalog count for `FRESH_S`
seconds, so that a call costs no round trip, and a revoked token is refused within that time. An unknown
token is looked up in the catalog before it is refused, so that a new one works at once. A client that
guesses waits for this look-up, and can't cause more than `_GUESSES_PER_S` catalog reads a second.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs

import structlog

from millstream.errors import AccessError, CatalogError, MillstreamError, Unauthenticated
from millstream.model.access import ALL_STREAMS, EVERYTHING, Right, Rights, is_secret, token_parts
from millstream.serving.browser_sessions import Sessions, session_in
from millstream.workers import Pool

if TYPE_CHECKING:
    from millstream.catalog import AccessToken, Catalog
    from millstream.home.home import Home

logger = structlog.get_logger("millstream.serve")

FRESH_S: Final = 2.0
"""For how long a revoked token may still be accepted."""
_GUESSES_PER_S: Final = 4
_AWAY_S: Final = 60.0
"""For how long the last known tokens hold while the catalog can't be read: longer than a server restart takes."""
_CATALOG_PATIENCE_S: Final = 2.0
CERTIFICATE: Final = "millstream.certificate"
"""Key in an ASGI scope: the name in the client's certificate, if it has presented one."""
_SCHEMES: Final = ("bearer", "token", "basic")


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials that a call presents."""

    token: str | None = None
    """The text of an access token, or the text in its place."""
    certificate: str | None = None
    """The name in the client's certificate, verified by its authority."""
    session: str | None = None
    """A session that a browser keeps in a cookie; it counts if no token is presented."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller and its rights."""

    name: str | None
    """The token's name; None if no token is required."""
    rights: Rights

    def may(self, right: Right, stream: str = ALL_STREAMS) -> bool:
        """Return whether the caller has a right on that stream; on every stream, if none is named."""
        return self.rights.allow(right, stream)

    def check(self, right: Right, stream: str = ALL_STREAMS) -> None:
        """Raise `forbidden` if the caller lacks the right."""
        if not self.may(right, stream):
            what = "every stream" if stream == ALL_STREAMS else f"stream {stream}"
            grant = "--all " if stream == ALL_STREAMS else f"--stream {stream}="
            raise AccessError(
                f"token {self.name} has no right to {right.value} {what}",
                code="forbidden",
                hint=f"Use a token that has it: `millstream token create {grant}{right.value}` makes one.",
                name=self.name,
                right=right.value,
                stream=stream,
            )


EVERYBODY: Final = Caller(None, EVERYTHING)


class TokenBook:
    """The home's access tokens, as they were a moment ago.

    Args:
        fresh_s: for how long the tokens that were read count as current.
        away_s: for how long they hold while the catalog can't be read.
        guesses_per_s: greatest number of catalog reads a second for tokens that aren't among those read.

    Concurrency: any number of threads; one reads, the others wait for it.
    """

    def __init__(
        self,
        open_catalog: Callable[[], Catalog],
        *,
        fresh_s: float = FRESH_S,
        away_s: float = _AWAY_S,
        guesses_per_s: float = _GUESSES_PER_S,
    ) -> None:
        self._open_catalog = open_catalog
        self._fresh_s, self._away_s, self._guesses_per_s = fresh_s, away_s, guesses_per_s
        self._lock = threading.Lock()
        self._catalog: Catalog | None = None
        self._by_id: Mapping[str, AccessToken] = {}
        self._by_name: Mapping[str, AccessToken] = {}
        self._begun_s = self._tried_s = self._read_s = -float("inf")
        """When the last read began and ended, and when the current tokens were read."""
        self._failed: MillstreamError | None = None

    @property
    def is_fresh(self) -> bool:
        """Return whether the tokens that were read are still current."""
        return time.monotonic() - self._tried_s < self._fresh_s

    def by_id(self, token_id: str) -> AccessToken | None:
        """Return a token that was read, by its id."""
        return self._by_id.get(token_id)

    def by_name(self, name: str) -> AccessToken | None:
        """Return a token that was read, by its name."""
        return self._by_name.get(name)

    def refresh(self, *, since_s: float | None = None) -> None:
        """Read the catalog, if the tokens are no longer current. Blocks for as long as that takes.

        Args:
            since_s: on the monotonic clock: an earlier read doesn't count. For a token that isn't among
                those that were read.

        Raises:
            CatalogError (`catalog_unreachable`): it can't be read, and hasn't been for `away_s` seconds.
        """
        with self._lock:
            if since_s is not None and self._begun_s < since_s:
                time.sleep(max(0.0, self._begun_s + 1 / self._guesses_per_s - time.monotonic()))
                self._read()
            elif since_s is None and not self.is_fresh:
                self._read()
            if self._failed is not None and time.monotonic() - self._read_s > self._away_s:
                # Callers that aren't known get it: the reason, with the catalog's address, is in the log.
                raise CatalogError(
                    "the access tokens can't be read",
                    code="catalog_unreachable",
                    hint="Look at the log of `millstream serve`, and send the call again.",
                ) from self._failed

    def close(self) -> None:
        """Close the catalog."""
        with self._lock:
            if self._catalog is not None:
                self._catalog.close()
                self._catalog = None

    def _read(self) -> None:
        self._begun_s = self._tried_s = time.monotonic()
        try:
            if self._catalog is None:
                self._catalog = self._open_catalog()
            tokens = self._catalog.access_tokens()
        except MillstreamError as error:
            if self._failed is None:
                logger.warning(
                    "access tokens can't be read; they hold as they were", error=error.message, code=error.code
                )
            self._failed, self._tried_s = error, time.monotonic()
            return
        self._by_id = {token.id: token for token in tokens}
        self._by_name = {token.name: token for token in tokens}
        self._failed, self._read_s = None, self._begun_s


class Access:
    """Identifies the callers.

    Args:
        book: the tokens; None if no token is required (`tokens_required`).
        clients: the token that a certificate stands for, by the name in it.

    Concurrency: any number of threads and tasks.
    """

    def __init__(self, book: TokenBook | None, clients: Mapping[str, str] | None = None) -> None:
        self._book = book
        self._clients = clients or {}
        self._reads = Pool(1, thread_name_prefix="access")
        self._sessions = Sessions()

    @classmethod
    def of_home(cls, home: Home) -> Access:
        """Return the access of the home's configuration."""
        http = home.config.http
        if not http.tokens_required:
            return cls(None)
        return cls(TokenBook(lambda: home.open_catalog(busy_timeout_s=_CATALOG_PATIENCE_S)), http.clients)

    @property
    def is_asked(self) -> bool:
        """Return whether callers have to authenticate."""
        return self._book is not None

    def caller(self, shown: Credentials) -> Caller:
        """Return the caller. Blocks if the catalog has to be read: for threads.

        Raises:
            Unauthenticated: no credentials are presented, or they are unknown or no longer known.
            Unauthenticated (`access_token_expired`): the token has expired.
            CatalogError: the catalog can't be read (or a subclass).
        """
        if self._book is None:
            return EVERYBODY
        if not self._is_known(shown):
            self._book.refresh(since_s=time.monotonic())
        elif not self._book.is_fresh:
            self._book.refresh()
        return self._caller(shown)

    async def caller_async(self, shown: Credentials) -> Caller:
        """Return as `caller`, for a task."""
        if self._book is None:
            return EVERYBODY
        since_s = None if self._is_known(shown) else time.monotonic()
        if since_s is not None or not self._book.is_fresh:
            # On one thread: clients that guess must not occupy the threads that others wait for.
            read = partial(self._book.refresh, since_s=since_s)
            await asyncio.get_running_loop().run_in_executor(self._reads, read)
        return self._caller(shown)

    async def caller_of(self, scope: Mapping[str, Any], *, in_query: bool = False) -> Caller:
        """Return the caller of a request; raises as `caller`.

        Args:
            in_query: whether the address may contain a token as `p=…` too, as InfluxDB's clients send it.
        """
        return EVERYBODY if self._book is None else await self.caller_async(credentials_of(scope, in_query=in_query))

    async def allowed(
        self, scope: Mapping[str, Any], right: Right, stream: str = ALL_STREAMS, *, in_query: bool = False
    ) -> Caller:
        """Return the caller of a request that has a right on the stream: for paths without a dependency.

        Raises:
            Unauthenticated, Unauthenticated (`access_token_expired`), CatalogError: as `caller`.
            AccessError (`forbidden`): the caller lacks the right.
        """
        caller = await self.caller_of(scope, in_query=in_query)
        caller.check(right, stream)
        return caller

    def session_of(self, token: str) -> tuple[str, int]:
        """Return a session for a token that was just accepted, and for how many seconds it lasts."""
        assert self._book is not None
        parts = token_parts(token)
        found = None if parts is None else self._book.by_id(parts[0])
        assert found is not None
        return self._sessions.issue(found.id, found.digest, expires_us=found.expires_us)

    def end_session(self, scope: Mapping[str, Any]) -> None:
        """End the session in a request's cookies, if there is one. For one event loop."""
        session = session_in(scope)
        token_id = None if session is None else Sessions.token_id(session)
        found = None if token_id is None or self._book is None else self._book.by_id(token_id)
        if session is not None and found is not None:
            self._sessions.end(session, found.digest)

    def close(self) -> None:
        """Close the catalog."""
        self._reads.shutdown()
        if self._book is not None:
            self._book.close()

    def _is_known(self, shown: Credentials) -> bool:
        """Return whether the last read decides the call. Text that is no token at all is decided."""
        assert self._book is not None
        if shown.token is not None:
            parts = token_parts(shown.token)
            return parts is None or self._book.by_id(parts[0]) is not None
        if shown.session is not None:
            token_id = Sessions.token_id(shown.session)
            return token_id is None or self._book.by_id(token_id) is not None
        name = self._clients.get(shown.certificate or "")
        return name is None or self._book.by_name(name) is not None

    def _caller(self, shown: Credentials) -> Caller:
        assert self._book is not None
        if shown.token is not None:
            parts = token_parts(shown.token)
            found = None if parts is None else self._book.by_id(parts[0])
            if parts is None or found is None or not is_secret(parts[1], found.digest):
                raise Unauthenticated("the access token isn't one of this home's, or was revoked")
        elif shown.session is not None:
            token_id = Sessions.token_id(shown.session)
            found = None if token_id is None else self._book.by_id(token_id)
            if found is None or not self._sessions.is_valid(shown.session, found.digest):
                raise Unauthenticated("the session has ended", hint="Log in again, at /console/login.")
        else:
            name = self._clients.get(shown.certificate or "")
            found = None if name is None else self._book.by_name(name)
            if found is None:
                raise self._unknown(shown.certificate, name)
        if found.has_expired(time.time_ns() // 1000):
            assert found.expires_us is not None
            expired = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(found.expires_us / 1e6))
            raise Unauthenticated(
                f"access token {found.name} expired at {expired}",
                code="access_token_expired",
                name=found.name,
                expired=expired,
            )
        return Caller(found.name, found.rights)

    @staticmethod
    def _unknown(certificate: str | None, token: str | None) -> Unauthenticated:
        if certificate is None:
            return Unauthenticated("the call has no access token")
        if token is None:
            return Unauthenticated(
                f"the client certificate of {certificate} isn't mapped to an access token",
                hint=f'Map the certificate to a token, [http.clients] "{certificate}" = "…" in millstream.toml, or send a '
                "token too.",
                certificate=certificate,
            )
        return Unauthenticated(
            f"the client certificate of {certificate} is mapped to access token {token}, which doesn't exist or was "
            "revoked",
            hint=f"`millstream token create --name {token} …` makes it.",
            certificate=certificate,
        )


def credentials_of(scope: Mapping[str, Any], *, in_query: bool = False) -> Credentials:
    """Return the credentials of a request. See `Access.caller_of` for the arguments."""
    said = next((value for name, value in scope["headers"] if name == b"authorization"), None)
    token = None if said is None else token_said(said.decode("latin-1"))
    if token is None and in_query:
        token = next(iter(parse_qs(scope.get("query_string", b"").decode("latin-1")).get("p", ())), None)
    return Credentials(token, scope.get(CERTIFICATE), None if said is not None else session_in(scope))


def token_said(authorization: str) -> str | None:
    """Return the token of an `Authorization` header: `Bearer …`, InfluxDB's `Token …`, or the password of `Basic …`.

    Returns:
        None if the header has another form. A text that isn't a token is returned as it is.
    """
    scheme, _, rest = authorization.strip().partition(" ")
    rest = rest.strip()
    if scheme.lower() not in _SCHEMES or not rest:
        return None
    if scheme.lower() != "basic":
        return rest
    try:
        user, _, password = base64.b64decode(rest, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return rest
    return password or user or None


def name_in_certificate(certificate: Mapping[str, Any] | None) -> str | None:
    """Return a client's name: its certificate's first subject alternative name, or the common name, as in gRPC.

    Args:
        certificate: as `ssl.SSLSocket.getpeercert` returns it; None or empty if none was presented.
    """
    if not certificate:
        return None
    others: Iterable[tuple[str, str]] = certificate.get("subjectAltName", ())
    subject = (pair for part in certificate.get("subject", ()) for pair in part)
    names = [*(value for _, value in others), *(value for key, value in subject if key == "commonName")]
    return names[0] if names else None


def allow(right: Right, stream: str | None = None) -> Callable[..., Any]:
    """Return a FastAPI dependency that requires a right of the request's caller.

    Args:
        stream: the stream; None for the path's `{stream}` or `{s}`, and if it has none, for every stream.

    Returns:
        An argument of `Depends`; its value is the `Caller`. Raises as `Access.allowed`. The application
        has the `Access` in `app.state.access`.
    """
    from starlette.requests import Request

    async def dependency(request: Request) -> Caller:
        access: Access = request.app.state.access
        named = stream or request.path_params.get("stream") or request.path_params.get("s") or ALL_STREAMS
        return await access.allowed(request.scope, right, named)

    dependency.__annotations__["request"] = (
        Request  # FastAPI looks names up in the module, and starlette is imported when it is needed
    )
    return dependency
