"""Every interface refuses names that no table may have, and creates the tables next to them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pyarrow as pa
import pyarrow.flight as fl
import pytest
from tests.app.homes import make_home, wait_for
from tests.app.served import serving

import millstream
from millstream.app.open_home import home_appender
from millstream.errors import MillstreamError, UnknownStream
from millstream.home.home import Home
from millstream.serving.access import Access
from millstream.serving.flight.server import FlightServer
from millstream.testing.errors import coded

LONG = "n" * 256
WRONG = [('"a\0b"', "usage"), ('"a\0b".t', "usage"), (LONG, "rows_too_large"), (f"{LONG}.t", "rows_too_large")]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("homes") / "web", "[streams.web]\n")


@pytest.fixture(scope="module")
def url(home: Path) -> Iterator[str]:
    with serving(home) as found:
        yield found


@pytest.mark.parametrize(("table", "error"), WRONG)
def test_over_http(url: str, table: str, error: str) -> None:
    """A name of kilobytes was taken, although no lake, file system or PostgreSQL has room for it."""
    answer = httpx.post(f"{url}/v1/streams/web/tables/{quote(table, safe='')}", json={"n": 1}, timeout=60)
    assert (answer.status_code, answer.json()["code"]) == (400 if error == "usage" else 422, error)
    assert len(answer.text) < 2000


@pytest.mark.parametrize(("table", "error"), WRONG)
def test_by_the_library(home: Path, table: str, error: str) -> None:
    with millstream.open(home) as opened, pytest.raises(MillstreamError, check=coded(error)):
        opened.append("web", table, [{"n": 1}])


def test_columns_and_keys_of_writes(home: Path, url: str) -> None:
    with millstream.open(home) as opened:
        for row, error in (
            ({"a\0b": 1}, "invalid_value"),
            ({LONG: 1}, "rows_too_large"),
            ({"\ud800": 1}, "invalid_value"),
        ):
            with pytest.raises(MillstreamError, check=coded(error)):
                opened.append("web", "columns", [row])
        for key in ("", "a\0b", "k" * 256):
            with pytest.raises(MillstreamError, check=coded("invalid_value", "rows_too_large")):
                opened.append("web", "columns", [{"n": 1}], idempotency_key=key)
        with pytest.raises(UnknownStream) as caught:
            opened.append("we\0b", "columns", [{"n": 1}])
        assert "\0" not in str(caught.value)
        assert "Stream names are" in (caught.value.hint or "")
    for headers in ({"idempotency-key": ""}, {"millstream-session": "", "millstream-session-number": "1"}):
        answer = httpx.post(f"{url}/v1/streams/web/tables/columns", json={"n": 1}, headers=headers, timeout=60)
        assert answer.status_code == 422, answer.text


def test_by_lines(home: Path, url: str) -> None:
    send = f"{url}/write?db=web"
    wait_for(lambda: httpx.post(send, content=b"warm f=1", timeout=60).status_code == 204)
    answer = httpx.post(send, content=b"a\0b f=1 1\n%s f=1 2\ngood f=1 3\ngood a\0b=1 4\n" % LONG.encode(), timeout=60)
    said = answer.json()["error"]
    assert answer.status_code == 400
    assert all(f"line {line}: " in said for line in (1, 2, 4)), said
    with millstream.open(home) as opened:
        assert sum(batch.num_rows for batch in opened.read("web", table="good")) == 1


def test_over_flight(tmp_path: Path) -> None:
    home = Home(make_home(tmp_path / "web", "[streams.web]\n"))
    home.prepare()
    appender = home_appender(home)
    server = FlightServer(home, Access(None), appender, ("127.0.0.1", 0), None)
    rows = pa.record_batch({"n": [1]})

    def put(client: fl.FlightClient, facts: dict[str, Any]) -> None:
        writer, _ = client.do_put(fl.FlightDescriptor.for_command(json.dumps(facts)), rows.schema)
        writer.write_batch(rows)
        writer.close()

    try:
        with fl.connect(f"grpc://{server.address}") as client:
            for table, error in WRONG:
                with pytest.raises(fl.FlightError, match=error):
                    put(client, {"stream": "web", "table": table})
            assert not list(client.list_flights())
            put(client, {"stream": "web", "table": "n" * 255})
            assert len(list(client.list_flights())) == 1
    finally:
        server.end()
        appender.close()
