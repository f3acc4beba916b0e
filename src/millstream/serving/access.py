"""Who may do what over the network: access tokens and client certificates, for HTTP and for Arrow Flight.

A call's token is looked for in memory: the home's tokens are read from the catalog at most every `FRESH_S` seconds, so that a call costs no
round trip and a revoked token is refused within that time. A token that isn't known is looked for before it is refused, so that a new one works
at once; who guesses waits for it, and can't have the catalog read more than `_GUESSES_PER_S` times a second.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs

import structlog

from millstream.errors import AccessTokenExpired, Forbidden, MillstreamError, Unauthenticated
from millstream.model.access import ALL_STREAMS, EVERYTHING, Right, Rights, is_secret, token_parts

if TYPE_CHECKING:
    from millstream.catalog import AccessToken, Catalog
    from millstream.home.home import Home

logger = structlog.get_logger("millstream.serve")

FRESH_S: Final = 2.0
"""For how long a token that was revoked may still open."""
_GUESSES_PER_S: Final = 4
_AWAY_S: Final = 60.0
"""For how long tokens hold as they were last seen while the catalog can't be read: longer than a server needs to start anew."""
_CATALOG_PATIENCE_S: Final = 2.0
CERTIFICATE: Final = "millstream.certificate"
"""In an ASGI scope: the name in the client's certificate, where it has shown one."""
_SCHEMES: Final = ("bearer", "token", "basic")


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a call shows of who sends it."""

    token: str | None = None
    """The text of an access token, or what stands in its place."""
    certificate: str | None = None
    """The name in the client's certificate, which its authority has vouched for."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, and what they may do."""

    name: str | None
    """The token's; None where nobody is asked."""
    rights: Rights

    def may(self, right: Right, stream: str = ALL_STREAMS) -> bool:
        """Whether they may do it with that stream; with every one, where none is named."""
        return self.rights.allow(right, stream)

    def check(self, right: Right, stream: str = ALL_STREAMS) -> None:
        """`Forbidden` where they may not."""
        if not self.may(right, stream):
            what = "every stream" if stream == ALL_STREAMS else f"stream {stream}"
            grant = "--all " if stream == ALL_STREAMS else f"--stream {stream}="
            raise Forbidden(
                f"token {self.name} has no right to {right.value} {what}",
                hint=f"Use a token that has it: `millstream token create {grant}{right.value}` makes one.",
                name=self.name,
                right=right.value,
                stream=stream,
            )


EVERYBODY: Final = Caller(None, EVERYTHING)


class TokenBook:
    """The home's access tokens, as they were a moment ago.

    Args:
        open_catalog: opens the catalog when the first token is looked for.
        fresh_s: for how long what was read is taken for what is.

    Concurrency: any number of threads; one reads, the others wait for it.
    """

    def __init__(self, open_catalog: Callable[[], Catalog], *, fresh_s: float = FRESH_S) -> None:
        self._open_catalog = open_catalog
        self._fresh_s = fresh_s
        self._lock = threading.Lock()
        self._catalog: Catalog | None = None
        self._by_id: Mapping[str, AccessToken] = {}
        self._by_name: Mapping[str, AccessToken] = {}
        self._begun_s = self._tried_s = self._read_s = -float("inf")
        """When it was last begun to be read, when that ended, and when what is known was read."""
        self._failed: MillstreamError | None = None

    @property
    def is_fresh(self) -> bool:
        """Whether what was read still counts."""
        return time.monotonic() - self._tried_s < self._fresh_s

    def by_id(self, token_id: str) -> AccessToken | None:
        """What was read of a token."""
        return self._by_id.get(token_id)

    def by_name(self, name: str) -> AccessToken | None:
        """Likewise, by its name."""
        return self._by_name.get(name)

    def refresh(self, *, since_s: float | None = None) -> None:
        """Read the catalog, where what was read counts no more. Blocks for as long as that takes.

        Args:
            since_s: of the monotonic clock: what was read before it doesn't count. For a token that isn't among what was read.

        Raises:
            CatalogError: it can't be read, and hasn't been for `_AWAY_S` seconds (or a kin of it).
        """
        with self._lock:
            if since_s is not None and self._begun_s < since_s:
                time.sleep(max(0.0, self._begun_s + 1 / _GUESSES_PER_S - time.monotonic()))
                self._read()
            elif since_s is None and not self.is_fresh:
                self._read()
            if self._failed is not None and time.monotonic() - self._read_s > _AWAY_S:
                raise self._failed

    def close(self) -> None:
        """Let go of the catalog."""
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
    """Says who a call's sender is.

    Args:
        book: the tokens; None where nobody is asked who they are (`tokens_required`).
        clients: which token a certificate stands for, by the name in it.

    Concurrency: any number of threads and tasks.
    """

    def __init__(self, book: TokenBook | None, clients: Mapping[str, str] | None = None) -> None:
        self._book = book
        self._clients = clients or {}
        self._reads = ThreadPoolExecutor(1, thread_name_prefix="access")

    @classmethod
    def of_home(cls, home: Home) -> Access:
        """As the home's configuration has it."""
        http = home.config.http
        if not http.tokens_required:
            return cls(None)
        return cls(TokenBook(lambda: home.open_catalog(busy_timeout_s=_CATALOG_PATIENCE_S)), http.clients)

    @property
    def is_asked(self) -> bool:
        """Whether callers have to say who they are."""
        return self._book is not None

    def caller(self, shown: Credentials) -> Caller:
        """Who it is. Blocks where the catalog has to be read: for threads.

        Raises:
            Unauthenticated: nothing is shown, or it isn't known here (any more).
            AccessTokenExpired: it was known.
            CatalogError: the catalog can't be read (or a kin of it).
        """
        if self._book is None:
            return EVERYBODY
        if not self._is_known(shown):
            self._book.refresh(since_s=time.monotonic())
        elif not self._book.is_fresh:
            self._book.refresh()
        return self._caller(shown)

    async def caller_async(self, shown: Credentials) -> Caller:
        """As `caller`, for a task."""
        if self._book is None:
            return EVERYBODY
        since_s = None if self._is_known(shown) else time.monotonic()
        if since_s is not None or not self._book.is_fresh:
            # By one thread: who guesses must not keep those busy that others wait for.
            read = partial(self._book.refresh, since_s=since_s)
            await asyncio.get_running_loop().run_in_executor(self._reads, read)
        return self._caller(shown)

    async def caller_of(self, scope: Mapping[str, Any], *, in_query: bool = False) -> Caller:
        """Who sends a request; raises as `caller`.

        Args:
            scope: ASGI's.
            in_query: whether a token may stand in the address as `p=…` too, as InfluxDB's clients put it.
        """
        return EVERYBODY if self._book is None else await self.caller_async(credentials_of(scope, in_query=in_query))

    async def allowed(
        self, scope: Mapping[str, Any], right: Right, stream: str = ALL_STREAMS, *, in_query: bool = False
    ) -> Caller:
        """Who sends a request, who may do that with the stream: for paths that no dependency guards.

        Raises:
            Unauthenticated, AccessTokenExpired, CatalogError: as `caller`.
            Forbidden: they may not.
        """
        caller = await self.caller_of(scope, in_query=in_query)
        caller.check(right, stream)
        return caller

    def close(self) -> None:
        """Let go of the catalog."""
        self._reads.shutdown()
        if self._book is not None:
            self._book.close()

    def _is_known(self, shown: Credentials) -> bool:
        """Whether what was read last has an answer. What is no token at all is known for that."""
        assert self._book is not None
        if shown.token is not None:
            parts = token_parts(shown.token)
            return parts is None or self._book.by_id(parts[0]) is not None
        name = self._clients.get(shown.certificate or "")
        return name is None or self._book.by_name(name) is not None

    def _caller(self, shown: Credentials) -> Caller:
        assert self._book is not None
        if shown.token is not None:
            parts = token_parts(shown.token)
            found = None if parts is None else self._book.by_id(parts[0])
            if parts is None or found is None or not is_secret(parts[1], found.digest):
                raise Unauthenticated("the access token isn't one of this home's, or was revoked")
        else:
            name = self._clients.get(shown.certificate or "")
            found = None if name is None else self._book.by_name(name)
            if found is None:
                raise self._unknown(shown.certificate, name)
        if found.has_expired(time.time_ns() // 1000):
            assert found.expires_us is not None
            expired = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(found.expires_us / 1e6))
            raise AccessTokenExpired(
                f"access token {found.name} expired at {expired}", name=found.name, expired=expired
            )
        return Caller(found.name, found.rights)

    @staticmethod
    def _unknown(certificate: str | None, token: str | None) -> Unauthenticated:
        if certificate is None:
            return Unauthenticated("the call has no access token")
        if token is None:
            return Unauthenticated(
                f"the client certificate of {certificate} stands for no access token",
                hint=f'Say which: [http.clients] "{certificate}" = "…" in millstream.toml; or send a token beside it.',
                certificate=certificate,
            )
        return Unauthenticated(
            f"the client certificate of {certificate} stands for access token {token}, which there isn't (any more)",
            hint=f"`millstream token create --name {token} …` makes it.",
            certificate=certificate,
        )


def credentials_of(scope: Mapping[str, Any], *, in_query: bool = False) -> Credentials:
    """What a request shows. See `Access.caller_of` for the arguments."""
    said = next((value for name, value in scope["headers"] if name == b"authorization"), None)
    token = None if said is None else token_said(said.decode("latin-1"))
    if token is None and in_query:
        token = next(iter(parse_qs(scope.get("query_string", b"").decode("latin-1")).get("p", ())), None)
    return Credentials(token, scope.get(CERTIFICATE))


def token_said(authorization: str) -> str | None:
    """The token of an `Authorization` header: `Bearer …`, `Token …` as InfluxDB's clients say it, or the password of `Basic …`.

    Returns:
        None where it says nothing of that kind; text that is no token as it stands.
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
    """The name by which a client is known: the first subject alternative name, else the common name, as gRPC has it too.

    Args:
        certificate: as `ssl.SSLSocket.getpeercert` gives it; None or empty where none was shown.
    """
    if not certificate:
        return None
    others: Iterable[tuple[str, str]] = certificate.get("subjectAltName", ())
    subject = (pair for part in certificate.get("subject", ()) for pair in part)
    names = [*(value for _, value in others), *(value for key, value in subject if key == "commonName")]
    return names[0] if names else None


def allow(right: Right, stream: str | None = None) -> Callable[..., Any]:
    """A FastAPI dependency: the request's sender has a right, or the request goes no further.

    Args:
        right: what the endpoint does.
        stream: with which stream; None for the one that the path has as `{stream}` or `{s}`, and where it has none for every one.

    Returns:
        What `Depends` takes; it gives the `Caller`. Raises as `Access.allowed`. The application has the `Access` in `app.state.access`.
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
