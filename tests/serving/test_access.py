"""Access rights: tokens in every form in which clients send them, their cache in memory, and refused requests."""

from __future__ import annotations

import asyncio
import base64
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.app.homes import wait_for

from millstream.catalog import AccessToken, Catalog
from millstream.errors import AccessError, CatalogError, Unauthenticated, UsageError
from millstream.model.access import ALL_STREAMS, Right, Rights, token_parts
from millstream.serving import access as module
from millstream.serving.access import EVERYBODY, Access, Credentials, TokenBook, credentials_of, name_in_certificate
from millstream.testing.errors import coded

READ_SHOP = Rights.parse(["shop=read"])


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with Catalog(tmp_path / "catalog.db") as catalog:
        yield catalog


@pytest.fixture
def access(catalog: Catalog) -> Iterator[Access]:
    found = Access(TokenBook(lambda: catalog, fresh_s=0.1), {"loader.example.com": "loader"})
    yield found
    found.close()


def scope(authorization: str | None = None, query: str = "") -> dict[str, Any]:
    headers = [(b"accept", b"*/*")]
    if authorization is not None:
        headers.append((b"authorization", authorization.encode()))
    return {"type": "http", "headers": headers, "query_string": query.encode()}


@pytest.mark.parametrize(
    ("texts", "right", "stream", "allowed"),
    [
        (["shop=read"], Right.READ, "shop", True),
        (["shop=read"], Right.WRITE, "shop", False),
        (["shop=read"], Right.READ, "web", False),
        (["shop=read"], Right.READ, ALL_STREAMS, False),
        (["shop=write"], Right.READ, "shop", False),
        (["shop=read,write"], Right.WRITE, "shop", True),
        (["shop=admin"], Right.WRITE, "shop", True),
        (["shop=admin"], Right.ADMIN, "web", False),
        (["*=read", "shop=write"], Right.READ, "web", True),
        (["*=read", "shop=write"], Right.WRITE, "shop", True),
        (["*=read"], Right.READ, ALL_STREAMS, True),
        ([], Right.READ, "shop", False),
    ],
)
def test_a_right_is_one_stream_s_or_all_of_them_s(texts: list[str], right: Right, stream: str, allowed: bool) -> None:
    rights = Rights.parse(texts)
    assert rights.allow(right, stream) is allowed
    assert Rights.from_dict(rights.as_dict()) == rights


@pytest.mark.parametrize("text", ["shop", "shop=", "shop=all", "Shop=read", "=read", "shop=read,"])
def test_what_says_no_right_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Rights.parse([text])


def test_a_token_comes_in_the_header_in_three_ways_and_in_the_address_where_that_is_allowed() -> None:
    def basic(text: str) -> str:
        return "Basic " + base64.b64encode(text.encode()).decode()

    for said in (
        "Bearer mst_x",
        "bearer  mst_x ",
        "Token mst_x",
        basic("anybody:mst_x"),
        basic("mst_x:"),
        basic(":mst_x"),
    ):
        assert credentials_of(scope(said)).token == "mst_x", said
    assert credentials_of(scope(None, "db=a&p=mst%5Fx"), in_query=True).token == "mst_x"
    assert credentials_of(scope(None, "db=a&p=mst_x")).token is None
    assert credentials_of(scope("Bearer mst_y", "p=mst_x"), in_query=True).token == "mst_y"
    for said in ("Bearer", "Digest abc", "", "mst_x"):
        assert credentials_of(scope(said)).token is None, said
    # Unreadable credentials count as a wrong token, not as none: no other credentials replace them.
    assert credentials_of(scope("Basic !")).token == "!"


def test_where_nobody_is_asked_everybody_may() -> None:
    access = Access(None)
    assert asyncio.run(access.allowed(scope("Bearer nonsense"), Right.ADMIN)) is EVERYBODY
    assert access.caller(Credentials()) is EVERYBODY
    access.close()


def test_a_caller_is_known_by_its_token_alone_and_may_what_that_says(access: Access, catalog: Catalog) -> None:
    _, text = catalog.create_access_token(READ_SHOP, name="grafana")

    async def check() -> None:
        caller = await access.allowed(scope(f"Bearer {text}"), Right.READ, "shop")
        assert caller.name == "grafana"
        for right, stream in ((Right.WRITE, "shop"), (Right.READ, "web"), (Right.READ, ALL_STREAMS)):
            with pytest.raises(AccessError, check=coded("forbidden"), match="grafana has no right") as caught:
                await access.allowed(scope(f"Token {text}"), right, stream)
            assert "millstream token create" in caught.value.hint
        with pytest.raises(Unauthenticated, match="no access token"):
            await access.allowed(scope(), Right.READ, "shop")
        parts = token_parts(text)
        assert parts is not None
        for wrong in (
            text[:-1] + ("a" if text[-1] != "a" else "b"),
            "mst_x",
            "",
            f"mst_{'0' * 12}_{parts[1]}",
            text + "a",
        ):
            with pytest.raises(Unauthenticated) as refused:
                await access.allowed(scope(f"Bearer {wrong}"), Right.READ, "shop")
            assert parts[1][:20] not in str(refused.value) + repr(refused.value.details)

    asyncio.run(check())


def test_a_token_that_was_just_made_opens_at_once_and_one_that_was_revoked_soon_no_more(
    access: Access, catalog: Catalog
) -> None:
    for name in ("a", "b", "c"):
        _, text = catalog.create_access_token(READ_SHOP, name=name)
        assert access.caller(Credentials(text)).name == name
    catalog.revoke_access_token("c")

    def refused() -> bool:
        try:
            access.caller(Credentials(text))
        except Unauthenticated:
            return True
        return False

    wait_for(refused)


def test_an_expired_token_is_told_so(access: Access, catalog: Catalog) -> None:
    _, text = catalog.create_access_token(READ_SHOP, name="old", expires_us=1)
    with pytest.raises(Unauthenticated, check=coded("access_token_expired"), match="expired at 1970-01-01T00:00:00Z"):
        access.caller(Credentials(text))


def test_a_certificate_stands_for_the_token_that_the_configuration_says(access: Access, catalog: Catalog) -> None:
    with pytest.raises(Unauthenticated, match=r"which doesn't exist"):
        access.caller(Credentials(certificate="loader.example.com"))
    catalog.create_access_token(READ_SHOP, name="loader")
    _, other = catalog.create_access_token(Rights.parse(["*=admin"]), name="ops")
    assert access.caller(Credentials(certificate="loader.example.com")).name == "loader"
    assert access.caller(Credentials(other, "loader.example.com")).name == "ops"
    with pytest.raises(Unauthenticated, match="isn't mapped to an access token"):
        access.caller(Credentials(certificate="other.example.com"))
    with pytest.raises(Unauthenticated):
        access.caller(Credentials("mst_wrong", "loader.example.com"))


def test_a_certificate_s_name_is_its_first_alternative_name_else_its_common_one() -> None:
    subject = ((("organizationName", "Example"),), (("commonName", "loader"),))
    assert name_in_certificate({"subject": subject}) == "loader"
    assert (
        name_in_certificate({"subject": subject, "subjectAltName": (("DNS", "a.example.com"), ("URI", "b"))})
        == "a.example.com"
    )
    assert name_in_certificate({"subject": subject[:1]}) is None
    assert name_in_certificate({}) is None


class Counted:
    """A catalog that counts how often it is read, and fails on request."""

    def __init__(self, tokens: list[AccessToken]) -> None:
        self.tokens = tokens
        self.reads = 0
        self.fails = False

    def access_tokens(self) -> list[AccessToken]:
        self.reads += 1
        if self.fails:
            raise CatalogError("catalog at db.example: it is away", code="catalog_unreachable")
        return self.tokens

    def close(self) -> None:
        self.fails = True


def counted(catalog: Catalog) -> tuple[Counted, str]:
    made, text = catalog.create_access_token(READ_SHOP, name="one")
    return Counted([made]), text


def test_calls_cost_no_look_into_the_catalog_and_guesses_few(catalog: Catalog) -> None:
    store, text = counted(catalog)
    access = Access(TokenBook(lambda: store, fresh_s=3600))  # type: ignore[arg-type, return-value]

    async def many() -> None:
        for _ in range(100):
            await access.allowed(scope(f"Bearer {text}"), Right.READ, "shop")
        begun = time.monotonic()
        guesses = [access.allowed(scope(f"Bearer mst_{n:012x}_{'a' * 43}"), Right.READ, "shop") for n in range(200)]
        answers = await asyncio.gather(*guesses, return_exceptions=True)
        assert {type(answer) for answer in answers} == {Unauthenticated}
        elapsed_s = time.monotonic() - begun
        assert store.reads <= 2 + module._GUESSES_PER_S * elapsed_s

    asyncio.run(many())
    access.close()


def test_tokens_hold_for_a_while_where_the_catalog_is_away(catalog: Catalog) -> None:
    store, text = counted(catalog)
    access, strict = (
        Access(TokenBook(lambda: store, fresh_s=0, away_s=away_s))  # type: ignore[arg-type, return-value]
        for away_s in (60.0, 0.0)
    )
    assert access.caller(Credentials(text)).name == strict.caller(Credentials(text)).name == "one"
    store.fails = True
    assert access.caller(Credentials(text)).name == "one"
    assert store.reads == 3
    for shown in (text, None):
        with pytest.raises(CatalogError, check=coded("catalog_unreachable")) as refused:
            strict.caller(Credentials(shown))
        assert "db.example" not in str(refused.value.as_dict()), "a caller without a token gets it"
    store.fails = False
    assert strict.caller(Credentials(text)).name == "one"


def test_threads_share_one_look(catalog: Catalog) -> None:
    store, text = counted(catalog)
    access = Access(TokenBook(lambda: store, fresh_s=3600))  # type: ignore[arg-type, return-value]
    found: list[str | None] = []
    threads = [threading.Thread(target=lambda: found.append(access.caller(Credentials(text)).name)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["one"] * 20
    assert store.reads <= 2
