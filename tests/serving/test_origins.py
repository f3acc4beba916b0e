"""Attacks by a web page, open on this machine, on a server that requires no tokens."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator

import httpx
import pytest
from tests.app.homes import make_home
from tests.app.served import serving

import millstream
from millstream.errors import AccessError
from millstream.serving.origin_check import Origins
from millstream.testing.errors import coded

ROWS = "/v1/streams/web/tables/clicks"
LINES = {"content-type": "application/x-ndjson"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = make_home(tmp_path_factory.mktemp("web"), '[streams.web]\n[http]\nhosts = ["Mill.example.com"]\n')
    with serving(home) as url:
        yield url


@pytest.mark.parametrize(
    "path", [ROWS, "/write?db=web", "/v1/streams/web/query", "/v1/streams", "/status", "/healthz", "/nothing"]
)
def test_pages_elsewhere_neither_write_nor_read(url: str, path: str) -> None:
    """Requests as a browser sends them: it posts plain text freely, and a rebound name is in `Host` and `Origin`."""
    port = url.rpartition(":")[2]
    method = "POST" if path in {ROWS, "/write?db=web", "/v1/streams/web/query"} else "GET"
    for headers, code, status in (
        ({"origin": "https://evil.example"}, "foreign_origin", 403),
        ({"origin": "null"}, "foreign_origin", 403),
        ({"origin": "http://localhost:3000"}, "foreign_origin", 403),
        ({"origin": f"http://rebound.example:{port}", "host": f"rebound.example:{port}"}, "unknown_host", 421),
        ({"host": f"rebound.example:{port}"}, "unknown_host", 421),
    ):
        answer = httpx.request(
            method, url + path, headers={**LINES, **headers}, content=b'{"n": 1}' * (method == "POST"), timeout=60
        )
        assert (answer.status_code, answer.json()["code"]) == (status, code), headers
        assert "[http] hosts" in answer.json()["hint"]
    assert httpx.get(f"{url}/v1/streams", timeout=60).json() == {"streams": []}, "nothing was written"


def test_a_server_of_ones_own_is_asked_as_before(url: str) -> None:
    port = url.rpartition(":")[2]
    for headers in (
        {},
        {"host": ""},
        {"host": f"localhost:{port}"},
        {"host": f"[::1]:{port}"},
        {"host": "mill.example.com"},
        {"host": "MILL.example.com.:443", "origin": "https://mill.example.com"},
        {"origin": url},
        {"host": f"localhost:{port}", "origin": f"http://localhost:{port}"},
        # A proxy that asks by the name that the server has for it.
        {"origin": "https://mill.example.com"},
    ):
        assert httpx.get(f"{url}/v1/streams", headers=headers, timeout=60).status_code == 200, headers
    with millstream.connect(url.replace("127.0.0.1", "localhost")) as there:
        assert there.streams() == []


@pytest.mark.parametrize(
    ("host", "origin", "refused"),
    [
        ("shop.example.com:8787", None, False),
        ("shop.example.com:8787", "https://shop.example.com:8787", False),
        ("shop.example.com", "https://shop.example.com", False),
        ("shop.example.com:8787", "https://shop.example.com", True),
        ("shop.example.com", "https://evil.example", True),
        ("shop.example.com", "https://shop.example.com.evil.example", True),
        ("shop.example.com", "http://[::1", True),
        ("shop.example.com", "http://shop.example.com:99999", True),
        ("", "https://", True),
    ],
)
def test_where_callers_show_tokens_names_are_free_and_pages_are_not(
    host: str, origin: str | None, *, refused: bool
) -> None:
    """Browsers add a client certificate or a password on their own."""
    headers = [(b"host", host.encode()), *([] if origin is None else [(b"origin", origin.encode())])]
    origins = Origins("0.0.0.0", [], any_host=True)
    for _ in range(2):  # the second time it is cached
        if not refused:
            origins.check(headers)
        else:
            with pytest.raises(AccessError, check=coded("foreign_origin")):
                origins.check(headers)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "10.0.0.1",
        "0.0.0.0",
        "[::]",
        "x@localhost",
        "localhost@x",
        "ü",
    ],
)
def test_what_only_looks_like_this_machine_is_another(host: str) -> None:
    with pytest.raises(AccessError, check=coded("unknown_host")):
        Origins("127.0.0.1", [], any_host=False).check([(b"host", host.encode("latin-1"))])


@pytest.mark.parametrize("second", ["127.0.0.1", "evil.example"])
@pytest.mark.parametrize("path", ["/v1/streams", "/healthz", "/nothing"])
def test_a_request_with_two_names_of_the_server_is_refused(url: str, path: str, second: str) -> None:
    """A proxy in front may have checked the other one (RFC 9112, 3.2)."""
    for _ in range(2):
        connection = http.client.HTTPConnection(url.partition("//")[2], timeout=60)
        connection.putrequest("GET", path)
        connection.putheader("Host", second)
        connection.endheaders()
        answer = connection.getresponse()
        told = json.loads(answer.read())
        connection.close()
        assert (answer.status, told["code"]) == (400, "usage"), told
        assert "2 Host headers" in told["detail"]
    assert httpx.get(f"{url}/v1/streams", timeout=60).status_code == 200
