"""Call every endpoint without the right to it: the application itself lists them, so none is missed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from tests.app.homes import make_home

from millstream.app.open_home import OpenHome
from millstream.catalog import Catalog
from millstream.home.home import Home
from millstream.model.access import Rights
from millstream.serving.access import Access, TokenBook
from millstream.serving.application import Application

LINES: Final = {"/write", "/api/v2/write"}
"""InfluxDB's clients expect errors of their own form there."""
OPEN: Final = {"/healthz", "/readyz", "/ping", "/health", "/openapi.json"}
"""Endpoints open to everyone: they report whether the server runs, and its interface, and none of its data."""


OF_ONES_OWN: Final = "/v1/streams"
"""It lists for each caller the streams that the caller may read."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A method on a path."""

    method: str
    path: str
    """The application's path, with `{stream}` in it if it is about one stream."""

    @property
    def url(self) -> str:
        """Return the URL for stream `shop`."""
        url = self.path
        if self.path in LINES:
            return f"{self.path}?db=shop&bucket=shop"
        for name, value in {
            "{stream}": "shop",
            "{s}": "shop",
            "{table}": "orders",
            "{t}": "orders",
            "{name}": "one",
            "{consumer}": "search",
        }.items():
            url = url.replace(name, value)
        if url.endswith("/tail"):
            url += "?where=("  # an answer, not a stream that never ends: this test reads all of it
        assert "{" not in url, f"say here what stands for the parameter of {self.path}"
        return url


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens by their kind."""

    texts: Mapping[str, str]

    def header(self, kind: str) -> dict[str, str]:
        """Return a caller's headers."""
        return {"Authorization": f"Bearer {self.texts[kind]}"} if kind in self.texts else {}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    folder = make_home(
        tmp_path_factory.mktemp("home"), "[streams.shop]\n[streams.web]\n[http]\ntokens_required = true\n"
    )
    home = Home(folder)
    home.prepare()
    return home


@pytest.fixture(scope="module")
def catalog(home: Home) -> Iterator[Catalog]:
    with home.open_catalog() as catalog:
        yield catalog


@pytest.fixture(scope="module")
def tokens(catalog: Catalog) -> Tokens:
    def token(*rights: str, **options: Any) -> str:
        return catalog.create_access_token(Rights.parse(rights), **options)[1]

    revoked = token("*=admin", name="revoked")
    catalog.revoke_access_token("revoked")
    return Tokens(
        {
            "wrong": "mst_000000000000_" + "a" * 43,
            "not one": "mst_",
            "revoked": revoked,
            "expired": token("*=admin", expires_us=1),
            "of another stream": token("web=admin"),
            "read": token("shop=read"),
            "read all": token("*=read"),
            "write": token("shop=write"),
            "admin": token("*=admin"),
        }
    )


@pytest.fixture(scope="module")
def app(home: Home) -> Iterator[Application]:
    # Each endpoint gets tokens that nothing knows: at the rate of a home they would wait for a minute.
    with (
        contextlib.closing(Access(TokenBook(home.open_catalog, guesses_per_s=1000))) as access,
        contextlib.closing(Application(home, access)) as application,
    ):
        yield application


def endpoints(app: Application) -> list[Endpoint]:
    """Return all endpoints that the application lists, also the routes that it answers without FastAPI."""
    whole = app.make_fastapi()
    found = [
        Endpoint(method, route.path.replace(":path}", "}"))
        for route in in_routers(whole.routes)
        for method in sorted(route.methods or ())
    ]
    assert set(whole.openapi()["paths"]) <= {endpoint.path.replace(":path", "") for endpoint in found}
    return [one for one in found if one.method not in {"HEAD", "OPTIONS"}]


def in_routers(routes: list[Any]) -> Iterator[Any]:
    for route in routes:
        if hasattr(route, "original_router"):
            yield from in_routers(route.original_router.routes)
        else:
            yield route


@functools.lru_cache(maxsize=2)
def asgi(app: Application) -> Any:
    """Return what a server calls. To make it takes longer than fifty requests do."""
    return app.asgi()


def call(app: Application, endpoint: Endpoint, headers: Mapping[str, str]) -> httpx.Response:
    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(app=asgi(app), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(endpoint.method, endpoint.url, headers=headers)

    return asyncio.run(asked())


def guarded(app: Application) -> list[Endpoint]:
    return [one for one in endpoints(app) if one.path not in OPEN]


@pytest.mark.parametrize("kind", ["none", "wrong", "not one", "revoked", "expired"])
def test_who_is_not_known_gets_nowhere(app: Application, tokens: Tokens, kind: str) -> None:
    for endpoint in guarded(app):
        answer = call(app, endpoint, tokens.header(kind))
        assert answer.status_code == 401, (endpoint, answer.text)
        assert answer.headers["www-authenticate"].startswith("Bearer")
        if endpoint.path not in LINES:
            assert answer.json()["code"] == ("access_token_expired" if kind == "expired" else "unauthenticated")
            assert answer.headers["content-type"] == "application/problem+json"


def test_who_has_another_stream_s_token_gets_nowhere(app: Application, tokens: Tokens) -> None:
    for endpoint in guarded(app):
        answer = call(app, endpoint, tokens.header("of another stream"))
        if endpoint.path == OF_ONES_OWN:
            assert answer.json() == {"streams": []}
            continue
        assert answer.status_code == 403, (endpoint, answer.text)
        if endpoint.path != "/write":
            assert answer.json()["code"] == "forbidden"


def test_who_may_read_writes_nothing_and_who_may_write_reads_nothing(app: Application, tokens: Tokens) -> None:
    writes = 0
    for endpoint in guarded(app):
        if endpoint.path == OF_ONES_OWN:
            continue
        allowed = {
            kind: call(app, endpoint, tokens.header(kind)).status_code not in {401, 403}
            for kind in ("read", "read all", "write")
        }
        # Exactly one of the two rights opens it; an endpoint about all streams needs the right to all of them.
        assert not (allowed["read all"] and allowed["write"]), endpoint
        assert allowed["read all"] or not allowed["read"], endpoint
        writes += allowed["write"]
        answer = call(app, endpoint, tokens.header("admin"))
        assert answer.status_code not in {401, 403}, (endpoint, answer.text)


def test_what_everybody_may_ask_tells_nothing_of_what_there_is(app: Application, tokens: Tokens) -> None:
    asked = [one for one in endpoints(app) if one.path in OPEN]
    assert "/healthz" in {one.path for one in asked}
    for endpoint in asked:
        answer = call(app, endpoint, {})
        assert answer.status_code in {200, 204, 503}, endpoint
        if endpoint.path != "/openapi.json":
            assert "shop" not in answer.text
            assert "owner" not in answer.text
    health = Endpoint("GET", "/healthz")
    assert set(json.loads(call(app, health, {}).text)) == {"healthy"}
    assert "owner" in json.loads(call(app, health, tokens.header("read all")).text)


def test_a_reason_against_writes_is_for_readers(tmp_path: Path) -> None:
    """The address told everyone names and folders of streams whose logs were gone."""
    home = Home(make_home(tmp_path / "home", "[streams.shop]\n[http]\ntokens_required = true\n"))
    home.prepare()
    with OpenHome(home) as opened:
        opened.append("shop", "public.orders", [{"id": 1}])
    home.wal_folder("shop").rename(tmp_path / "elsewhere")
    with home.open_catalog() as catalog:
        made = {kind: catalog.create_access_token(Rights.parse([f"*={kind}"]))[1] for kind in ("read", "write")}
    with contextlib.closing(Access.of_home(home)) as access, contextlib.closing(Application(home, access)) as app:
        for path, field in (("/readyz", "detail"), ("/health", "message")):
            for kind in ("none", "write", "read"):
                answer = call(app, Endpoint("GET", path), Tokens(made).header(kind))
                assert answer.status_code == 503
                assert ("shop" in answer.json()[field]) == ("shop" in answer.text) == (kind == "read"), answer.text


def test_where_no_token_is_asked_for_a_wrong_one_opens_as_well(home: Home, tmp_path: Path) -> None:
    open_home = Home(make_home(tmp_path / "open", "[streams.shop]\n"))
    open_home.prepare()
    with contextlib.closing(Application(open_home, Access(None))) as app:
        for endpoint in endpoints(app):
            assert call(app, endpoint, {"Authorization": "Token anything"}).status_code not in {401, 403}, endpoint
    assert home.config.http.tokens_required


@pytest.mark.parametrize("kind", ["none", "of another stream", "write"])
def test_nothing_is_taken_of_what_somebody_sends_who_may_not(app: Application, tokens: Tokens, kind: str) -> None:
    """FastAPI reads a whole body before it checks the token: a body without one filled the server's memory."""
    for endpoint in guarded(app):
        if endpoint.method != "POST" or (kind == "write" and not endpoint.path.endswith("/query")):
            continue
        path, _, parameters = endpoint.url.partition("?")
        headers = {"content-type": "application/json", **tokens.header(kind)}
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": parameters.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        }
        said: list[Any] = []

        async def receive(endpoint: Endpoint = endpoint) -> Any:
            raise AssertionError(f"{endpoint} takes the body")

        async def send(message: Any, said: list[Any] = said) -> None:
            said.append(message)

        asyncio.run(app.asgi()(scope, receive, send))
        assert said[0]["status"] == (401 if kind == "none" else 403), endpoint


def test_a_question_is_bounded_and_json(app: Application, tokens: Tokens) -> None:
    endpoint = Endpoint("POST", "/v1/streams/{stream}/query")
    header = tokens.header("read")

    def asked(body: bytes, kind: str = "application/json") -> tuple[int, str]:
        async def post() -> httpx.Response:
            transport = httpx.ASGITransport(app=app.asgi())
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                return await client.post(endpoint.url, content=body, headers={**header, "content-type": kind})

        answer = asyncio.run(post())
        return answer.status_code, answer.text

    too_large = b'{"sql": "' + b" " * app.budget.body_bytes_max + b'"}'
    assert asked(too_large)[0] == 413
    assert asked(b'{"sql": "SELECT 1"}', "text/plain")[0] == 415
    for wrong in (b"{", b"[]", b'{"sql": 1}', b'{"sql": "", "more": 1}', b'{"sql": "' + b" " * ((1 << 20) + 1) + b'"}'):
        assert asked(wrong)[0] == 400, wrong[:20]
    status, said = asked(b'{"sql": "secret of mine", "more": 1}')
    assert status == 400
    assert "secret of mine" not in said
    assert app.budget.held_bytes == 0


@pytest.mark.parametrize(
    "path",
    ["/v1%2Fstreams/shop/tables/orders", "/v1/streams%2Fshop/tables/orders", "/v1/streams/shop/tables%2Forders"],
)
def test_a_slash_in_a_name_parts_no_path(app: Application, tokens: Tokens, path: str) -> None:
    answer = call(app, Endpoint("POST", path), tokens.header("admin"))
    assert (answer.status_code, answer.json()["code"]) == (404, "unknown_path")
