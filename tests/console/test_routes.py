"""The console's paths: what they show, to whom, and what they refuse. No server and no browser."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from tests.console.homes import COLUMN, HOSTILE, VALUE, Site, filled_home, followed_home, site_of
from tests.console.test_html import Seen

from millstream.app.open_home import OpenHome
from millstream.app.status import collect_status
from millstream.console import table_page
from millstream.console.routes import Console, _live_path
from millstream.console.shared_status import Timing
from millstream.model.access import Rights
from millstream.model.ids import TableId
from millstream.serving import browser_sessions, health

PAGES = ("/", "/tables", "/tables/shop/public.orders", "/log", "/log/shop", "/query", "/consumers", "/nodes")
OWN = {"origin": "http://127.0.0.1:8787"}
FOREIGN = {"origin": "http://evil.example"}


@pytest.fixture(scope="module")
def open_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site_of(filled_home(tmp_path_factory.mktemp("open") / "home")) as site:
        yield site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder: Path = tmp_path_factory.mktemp("closed")
    with site_of(filled_home(folder / "home", "[http]\ntokens_required = true\n")) as site:
        yield site


def events(site: Site, path: str, until: str = "tick", **headers: str) -> tuple[int, list[tuple[str, Any]]]:
    """Return an event stream's status and its events up to one of a name."""

    async def listen() -> tuple[int, bytes]:
        gone, status, body = asyncio.Event(), 0, b""

        async def receive() -> Any:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal status, body
            status = message.get("status", status)
            body += message.get("body", b"")
            if f"event: {until}\n".encode() in body:
                gone.set()

        name, _, query = path.partition("?")
        scope = {
            "type": "http",
            "method": "GET",
            "path": name,
            "raw_path": name.encode(),
            "query_string": query.encode(),
            "scheme": "http",
            "server": ("127.0.0.1", 8787),
            "headers": [
                (b"host", b"127.0.0.1:8787"),
                *((key.encode(), value.encode()) for key, value in headers.items()),
            ],
        }
        async with asyncio.timeout(60):
            await site.asgi(scope, receive, send)
        return status, body

    status, body = site.loop.run(listen())
    if status != 200:
        return status, []
    found = re.findall(r"event: (\w+)\ndata: (.*)\n\n", body.decode())
    return status, [(name, json.loads(data)) for name, data in found]


def test_every_page_is_served_with_headers_that_keep_others_out(open_site: Site) -> None:
    for path in PAGES:
        answer = open_site.get(path)
        assert answer.status_code == 200, (path, answer.text)
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["cache-control"] == "no-store"
        seen = Seen(answer.text)
        addresses = [
            value for _, attributes in seen.tags for key, value in attributes.items() if key in {"src", "href"}
        ]
        assert all(address is not None and re.match(r"/(?!/)|#", address) for address in addresses), addresses
        # Nothing inline: the policy would refuse it.
        assert all("src" in attributes for name, attributes in seen.tags if name == "script")
        assert not [key for _, attributes in seen.tags for key in attributes if key == "style" or key.startswith("on")]
        assert sum(name == "h1" for name, _ in seen.tags) == 1


def test_files_are_served_under_an_address_of_their_content(open_site: Site) -> None:
    seen = Seen(open_site.get("/").text)
    files = [
        attributes.get("src") or attributes.get("href") for name, attributes in seen.tags if name in {"script", "link"}
    ]
    assert len(files) == 3
    for address in files:
        assert address is not None
        answer = open_site.get(address)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
    assert open_site.get("/console/static/console.py").status_code == 404
    assert open_site.get("/console/static/..%2Froutes.py").status_code == 404


def test_a_long_page_is_compressed_for_who_takes_it(open_site: Site) -> None:
    page = "/tables/shop/public.orders"
    packed, plain = (open_site.call("GET", page, {"accept-encoding": how}) for how in ("gzip", "identity"))
    assert packed.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in plain.headers
    assert packed.headers["vary"] == plain.headers["vary"] == "accept-encoding"
    assert int(packed.headers["content-length"]) < int(plain.headers["content-length"]) / 2
    assert "Last records" in packed.text


def test_hostile_names_and_values_are_text(open_site: Site) -> None:
    plain = {name for path in PAGES for name, _ in Seen(open_site.get(path).text).tags}
    assert not plain & {"img"}
    page = open_site.get(f"/tables/web/{quote(HOSTILE, safe='')}")
    assert page.status_code == 200
    seen = Seen(page.text)
    assert [attributes for name, attributes in seen.tags if name in {"script", "img"}] == [
        {"src": next(a["src"] for n, a in seen.tags if n == "script"), "defer": None}
    ]
    for text in (HOSTILE, COLUMN, VALUE):
        assert text in seen.text
    tables = Seen(open_site.get("/tables").text)
    links = [attributes["href"] for name, attributes in tables.tags if name == "a"]
    assert f"/tables/web/{quote(HOSTILE, safe='')}" in links
    dots = next(link for link in links if link is not None and "%22..%22" in link)
    assert open_site.get(dots).status_code == 200


def test_a_page_of_a_table_shows_its_records_and_versions(open_site: Site) -> None:
    text = Seen(open_site.get("/tables/shop/public.orders").text).text
    assert "Version 2: public.orders, 3 columns (added note)" in text
    assert re.search(r"Version 1: public\.orders, 2 columns, since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d\+00:00", text)
    assert text.count(", since 20") == 2
    assert text.count("insert into public.orders") == 20
    assert "number 31," in text
    assert "number 11," not in text


def test_a_log_shows_its_holders_its_segments_and_the_filters_of_its_tail(open_site: Site) -> None:
    assert "/log/shop" in open_site.get("/log").text
    page = open_site.get("/log/web").text
    text = Seen(page).text
    for words in ("the pipeline lake", "Shard 0: 1 segment", "Holders", "Live tail"):
        assert words in text
    options = [attributes.get("value") for name, attributes in Seen(page).tags if name == "option"]
    assert set(options) == {"", HOSTILE, '".."."."'}
    assert open_site.get("/log/other").status_code == 404


def test_the_last_records_are_found_behind_a_gap_of_numbers(tmp_path: Path) -> None:
    home = filled_home(tmp_path / "home")
    with OpenHome(home) as opened:
        # A writer that starts leaves the rest of the numbers that the one before had taken.
        opened.append("shop", "public.customers", [{"id": 1}])
        assert int(str(opened.token("shop")).partition(".s")[2]) > 100_000
    assert table_page.last_records(home, "shop", TableId(1)).count("<li>") == 20


def test_an_error_is_a_page_with_its_code_and_hint(open_site: Site) -> None:
    answer = open_site.get("/tables/shop/public.%3Cb%3E")
    assert answer.status_code == 404
    seen = Seen(answer.text)
    assert "unknown_table" in seen.text
    assert "public.<b>" in seen.text
    assert not [name for name, _ in seen.tags if name == "b"]


def test_without_tokens_it_opens_at_once_and_only_to_its_own_pages(open_site: Site) -> None:
    assert open_site.get("/console/login").headers["location"] == "/"
    for path in PAGES:
        assert open_site.call("GET", path, FOREIGN).status_code == 403
        assert open_site.call("GET", path, {"host": "evil.example"}).status_code == 421
    for path in ("/console/login", "/console/logout"):
        assert open_site.call("POST", path, FOREIGN).status_code == 403
        assert open_site.call("POST", path).status_code == 403, "no browser's form"


def test_who_has_no_token_is_sent_to_the_login_and_gets_no_data(site: Site) -> None:
    for path in PAGES:
        answer = site.get(path)
        assert answer.status_code == 303
        assert answer.headers["location"] == f"/console/login?next={path}"
        assert not answer.content
    # A name's own `?` stays a part of the path, and a `Host` that is no address is no bug of ours.
    odd = site.get("/tables/web/a%3Fb", host="[").headers["location"]
    assert odd == "/console/login?next=/tables/web/a%253Fb"
    answer = site.call("POST", "/console/login", OWN, token=site.tokens["all"], next="/tables/web/a%3Fb")
    assert answer.headers["location"] == "/tables/web/a%3Fb"
    assert site.call("POST", "/console/act", OWN).headers["location"] == "/console/login?next=/"
    assert events(site, "/console/events?path=/")[0] == 401
    form = Seen(site.get("/console/login?next=//evil.example").text)
    assert next(a["value"] for n, a in form.tags if n == "input" and a["name"] == "next") == "/"
    assert "shop" not in form.text


@pytest.mark.parametrize(
    "back", ["//evil.example", "/\\evil.example", "http://evil.example", "javascript:x", "/\r\nx: y"]
)
def test_a_login_leads_to_no_other_server(site: Site, back: str) -> None:
    answer = site.call("POST", "/console/login", OWN, token=site.tokens["all"], next=back)
    assert answer.headers["location"] == "/"


def test_a_session_opens_the_pages_and_has_no_secret(site: Site) -> None:
    answer = site.call("POST", "/console/login", OWN, token=site.tokens["all"], next="/tables")
    assert (answer.status_code, answer.headers["location"]) == (303, "/tables")
    (cookie,) = SimpleCookie(answer.headers["set-cookie"]).values()
    assert cookie["httponly"]
    assert cookie["samesite"] == "strict"
    assert cookie["path"] == "/"
    assert site.tokens["all"].rpartition("_")[2] not in answer.headers["set-cookie"]
    shown = f"{cookie.key}={cookie.value}"
    for path in PAGES:
        assert site.get(path, cookie=shown).status_code == 200
    assert site.get("/v1/streams/shop/token", cookie=shown).status_code == 200
    # A request that may change something needs its page's name: other pages' requests carry the cookie, too.
    query: dict[str, Any] = {"cookie": shown}
    assert site.call("POST", "/v1/streams/shop/query", query).status_code == 401
    assert site.call("POST", "/v1/streams/shop/query", query | FOREIGN).status_code == 403
    assert site.call("POST", "/v1/streams/shop/query", query | OWN).status_code not in {401, 403}
    for wrong in (
        shown[:-1] + ("0" if shown[-1] != "0" else "1"),
        shown.replace(".", ".9", 1),
        "millstream_8787=x",
        "x=y",
    ):
        assert site.get("/", cookie=wrong).status_code == 303, wrong
    assert site.get("/", cookie="millstream_1=a; " + shown).status_code == 200


def test_a_session_ends_by_time_by_logout_and_with_its_token(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with site.home.open_catalog() as catalog:
        site.tokens["brief"] = catalog.create_access_token(Rights.parse(["*=read"]), name="brief")[1]
        gone, shown = site.cookie("brief"), site.cookie("brief")
        for cookie_sent in (gone, shown):
            assert site.get("/", cookie=cookie_sent).status_code == 200
        site.call("POST", "/console/logout", FOREIGN | {"cookie": gone})
        assert site.get("/", cookie=gone).status_code == 200, "another site's page logged out"
        out = site.call("POST", "/console/logout", OWN | {"cookie": gone})
        assert site.get("/", cookie=gone).status_code == 303, "a copy of the cookie outlives the logout"
        assert site.get("/", cookie=shown).status_code == 200, "the same token's session in another browser"
        (cookie,) = SimpleCookie(out.headers["set-cookie"]).values()
        assert cookie.value == ""
        assert cookie["max-age"] == "0"
        moment = browser_sessions.time.time() + browser_sessions.LASTS_S + 1
        with monkeypatch.context() as later:
            later.setattr(browser_sessions.time, "time", lambda: moment)
            assert site.get("/", cookie=shown).status_code == 303
        assert site.get("/", cookie=shown).status_code == 200
        catalog.revoke_access_token("brief")
        site.application.access._book.refresh(since_s=browser_sessions.time.monotonic())
        assert site.get("/", cookie=shown).status_code == 303


def test_a_session_behind_a_proxy_that_ends_tls_is_never_sent_without_tls(site: Site) -> None:
    for scheme, is_secure in (("http", False), ("https", True)):
        headers = {"host": "millstream.example", "origin": f"{scheme}://millstream.example"}
        answer = site.call("POST", "/console/login", headers, token=site.tokens["all"])
        assert answer.status_code == 303, answer.text
        assert ("secure" in answer.headers["set-cookie"].lower()) == is_secure


def test_a_wrong_token_and_one_without_the_right_open_nothing(site: Site) -> None:
    for token, status in (("mst_x", 401), ("", 401), (site.tokens["write"], 403)):
        answer = site.call("POST", "/console/login", OWN, token=token, next="/tables")
        assert answer.status_code == status
        assert "set-cookie" not in answer.headers
        assert "Access token" in answer.text
        inputs = [attributes for name, attributes in Seen(answer.text).tags if name == "input"]
        assert next(one["value"] for one in inputs if one["name"] == "next") == "/tables", (
            "the second try leads elsewhere"
        )
    header = {"authorization": f"Bearer {site.tokens['write']}"}
    for path in PAGES:
        assert site.call("GET", path, header).status_code == 403


def test_who_may_read_one_stream_sees_nothing_of_others(site: Site) -> None:
    shown = site.cookie("shop")
    for path in ("/", "/tables", "/log", "/log/shop", "/consumers", "/nodes"):
        text = site.get(path, cookie=shown).text
        assert "web" not in text, path
        assert "web" in site.get("/tables", cookie=site.cookie("all")).text
        _, found = events(site, f"/console/events?path={path}", cookie=shown)
        assert "web" not in json.dumps(found)
    assert site.get(f"/tables/web/{quote(HOSTILE, safe='')}", cookie=shown).status_code == 404
    assert site.get("/log/web", cookie=shown).status_code == 404
    assert site.get("/v1/streams/web/tail", cookie=shown).status_code == 403
    _, found = events(site, f"/console/events?path=/tables/web/{quote(quote(HOSTILE, safe=''))}", cookie=shown)
    assert "is no longer among the tables" in json.dumps(found)


def test_the_paths_are_described_to_everyone_without_another_hosts_script(site: Site) -> None:
    answer = site.get("/docs")
    assert answer.status_code == 200
    shown = Seen(answer.text)
    for name, attributes in shown.tags:
        address = attributes.get("src") or (attributes.get("href") if name == "link" else None)
        assert address is None or address.startswith("/console/static/"), (name, attributes)
    described = site.get("/openapi.json").json()["paths"]
    assert len(described) > 20
    for path, methods in described.items():
        for method, facts in methods.items():
            assert f"<code>{method.upper()} {path}</code>" in answer.text
            for one in facts.get("parameters", ()):
                assert f"<code>{one['name']}</code>" in answer.text
    assert "shop" not in answer.text
    assert site.get("/redoc").status_code == 404


def test_a_head_of_the_event_stream_ends(open_site: Site) -> None:
    async def asked() -> int:
        async with asyncio.timeout(60):
            transport = httpx.ASGITransport(app=open_site.asgi)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8787") as client:
                return (await client.head("/console/events")).status_code

    assert open_site.loop.run(asked()) == 200


def test_a_page_has_one_area_whatever_spelling_viewers_use(open_site: Site) -> None:
    live = next(part.live for part in open_site.application._parts if isinstance(part, Console))
    for path in ("/%74ables", "/t%61bles"):
        assert _live_path(path) == "/tables"
        assert events(open_site, f"/console/events?path={quote(path)}")[0] == 200
        assert live._current is not None
        assert path not in {view.path for view in live._current.areas}
    for path in (
        "/",
        f"/tables/web/{quote(HOSTILE, safe='')}",
        "/tables/web/%2E%2E",
        "/log/shop",
        "/consumers/shop/a",
        "/nodes",
        "/charts/day/shop",
    ):
        assert _live_path(path) == path


def test_a_page_that_does_not_exist_is_no_other_page(open_site: Site) -> None:
    odd = ("/x", "/y/z", "", "tables", "//tables", "/log/a/b", "/nodes/", "/query", "/console/act", "/charts/year/shop")
    for path in odd:
        assert events(open_site, f"/console/events?path={quote(path)}")[0] == 404, path
    for path in ("/charts/year/shop", "/charts/hour/nothing", "/log/nothing", "/consumers/shop/nothing"):
        assert open_site.get(path).status_code == 404, path


def test_the_event_stream_has_differences_alone(open_site: Site) -> None:
    version = re.search(r'data-version="(\w+)"', open_site.get("/tables").text)
    assert version is not None
    _, found = events(open_site, f"/console/events?path=/tables&version={version[1]}")
    assert {name for name, _ in found} == {"tick"}
    assert found[0][1]["troubles"] == 0
    _, found = events(open_site, "/console/events?path=/tables&version=x")
    assert [name for name, _ in found][:2] == ["whole", "tick"]
    assert "public.orders" in found[0][1]["live"]


def test_while_the_first_status_hangs_pages_say_so_and_show_it_once_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each page waited for it without end."""
    may = threading.Event()

    def hanging(*arguments: Any) -> dict[str, Any]:
        assert may.wait(60)
        return collect_status(*arguments)

    monkeypatch.setattr(health, "collect_status", hanging)
    with site_of(filled_home(tmp_path / "home"), Timing(patience_s=0.05, first_patience_s=0.1)) as site:
        for path in ("/", "/tables", "/tables/shop/public.orders", "/log/shop", "/diff"):
            answer = site.get(path)
            assert answer.status_code == 503, path
            assert "status_hangs" in answer.text
            assert "millstream doctor" in answer.text
        # A page that was open before the server began again goes on.
        timer = threading.Timer(0.3, may.set)
        timer.start()
        _, found = events(site, "/console/events?path=/tables&version=x")
        timer.join()
        assert [name for name, _ in found][:2] == ["whole", "tick"]
        assert "public.orders" in found[0][1]["live"]


def test_the_first_page_shows_the_status_that_was_taken_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may = threading.Event()
    with site_of(filled_home(tmp_path / "home"), Timing(patience_s=0.05, first_patience_s=0.1)) as site:
        site.application.health.status()
        monkeypatch.setattr(health, "collect_status", lambda *_: may.wait(60))
        answer = site.get("/tables/shop/public.orders")
        may.set()
        assert answer.status_code == 200
        assert "Version 2: public.orders" in Seen(answer.text).text


def test_a_node_that_has_never_led_shows_its_log_and_its_tables(tmp_path: Path) -> None:
    """Its catalog lacks the stream: each page was empty or an error."""
    with site_of(followed_home(tmp_path)) as site:
        overview = Seen(site.get("/").text).text
        assert "Stream shop follows" in overview
        assert "durable" in overview
        assert "append to it" not in overview
        assert "1 segment" in Seen(site.get("/log/shop").text).text
        for path in ("/log", "/log/shop", "/tables", "/tables/shop/public.orders"):
            answer = site.get(path)
            assert answer.status_code == 200, (path, answer.text)
        assert "public.orders" in Seen(site.get("/tables").text).text
        table = Seen(site.get("/tables/shop/public.orders").text).text
        assert "follows" in table
        assert "Version 2: public.orders, 3 columns (added note)" in table
