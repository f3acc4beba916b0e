"""Every interface refuses rows without a route, once, and stores the rows appended with them once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.flight as fl
import pytest
from tests.app.homes import make_home, wait_for
from tests.app.served import serving

import millstream
from millstream.app.open_home import home_appender
from millstream.errors import RoutingError
from millstream.home.home import Home
from millstream.serving.access import Access
from millstream.serving.flight.server import FlightServer
from millstream.testing.errors import coded

RULES = """
[streams.web.log]
shards = 2
[streams.web.routing]
rules = [
  { table = 'public\\.(cpu|mem|parted|typed_.*)', where = "host <> 'nowhere'", to = "shard:1" },
]
[streams.web.partitions]
"public.parted" = "{at:%Y-%m-%d}"
[http]
listen = "127.0.0.1:0"
"""


post = partial(httpx.post, timeout=60)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("homes") / "web", RULES)


@pytest.fixture(scope="module")
def url(home: Path) -> Iterator[str]:
    with serving(home) as found:
        wait_for(lambda: post(f"{found}/write?db=web", content=b"cpu,host=warm f=1").status_code == 204)
        yield found


def rows(home: Path, table: str) -> list[dict[str, Any]]:
    with millstream.open(home) as opened:
        return [row for batch in opened.read("web", table=table) for row in batch.to_pylist()]


@pytest.mark.parametrize("path", ["/write?db=web", "/api/v2/write?bucket=web"])
def test_lines_without_a_route_are_named_and_the_others_are_stored_once(home: Path, url: str, path: str) -> None:
    """Clients took the 500 for temporary: they resent all lines for ever, and valid ones were stored each time."""
    kind = path.rpartition("=")[0][1:6]
    body = f"cpu,host=a,run={kind} f=1 1\nother,host=a f=1 2\nmem,host=b,run={kind} f=2 3\nother,host=b f=3 4\n"
    answer = post(f"{url}{path}", content=body.encode())
    assert answer.status_code == 400, answer.text
    said = answer.json()
    message = said["error"] if "error" in said else said["message"]
    assert message.startswith("partial write: line 2: no rule takes 2 of 2 rows of public.other"), message
    assert "line 4: no rule takes" in message
    assert message.endswith("dropped=2")
    assert [row["f"] for table in ("cpu", "mem") for row in rows(home, table) if row.get("run") == kind] == [1.0, 2.0]


def test_lines_for_a_table_whose_key_was_changed_are_named_too(tmp_path: Path) -> None:
    """The error needs a person, as one of routing does, and is no temporary failure."""
    home = make_home(tmp_path / "web", "[streams.web]\n")
    with millstream.open(home) as opened:
        opened.append("web", "devices", [{"host": "a", "f": 1.0}])
    make_home(home, '[streams.web.keys]\n"public.devices" = ["host"]\n')
    with serving(home) as found:
        send = f"{found}/write?db=web"
        wait_for(lambda: post(send, content=b"warm f=1").status_code == 204)
        answer = post(send, content=b"cpu,host=a f=1 1\ndevices,host=a f=2 2\n")
    assert answer.status_code == 400, answer.text
    assert "line 2: " in answer.json()["error"]
    assert "dropped=1" in answer.json()["error"]
    assert len(rows(home, "cpu")) == 1


@pytest.mark.parametrize(
    ("table", "row", "code"),
    [
        ("other", {"host": "a"}, "no_route_matches"),
        ("cpu", {"host": "nowhere"}, "no_route_matches"),
        ("parted", {"host": "a", "at": "2026-01-01"}, "invalid_route"),
        ("typed", {"host": 7.5}, "invalid_route"),
    ],
)
@pytest.mark.parametrize("on_clash", ["request", "rows"])
def test_rows_without_a_route_are_refused_over_http(
    url: str, table: str, row: dict[str, Any], code: str, on_clash: str
) -> None:
    name = f"typed_{on_clash}" if table == "typed" else table  # each creates its columns
    answer = post(f"{url}/v1/streams/web/tables/{name}?on_clash={on_clash}", json=[row])
    assert answer.status_code == 422, answer.text
    assert answer.json()["code"] == code
    assert answer.json()["retry"] == "operator"


def test_a_client_is_told_at_once(url: str) -> None:
    with millstream.connect(url) as remote, pytest.raises(RoutingError, check=coded("no_route_matches")):
        remote.append("web", "other", [{"host": "a"}])


def test_a_bulk_append_without_a_route_is_refused_as_such(tmp_path: Path) -> None:
    home = Home(make_home(tmp_path / "web", RULES))
    home.prepare()
    appender = home_appender(home)
    server = FlightServer(home, Access(None), appender, ("127.0.0.1", 0), None)
    try:
        with fl.connect(f"grpc://{server.address}") as client:
            batch = pa.record_batch({"host": ["a"]})
            writer, reader = client.do_put(fl.FlightDescriptor.for_path("web", "other"), batch.schema)
            writer.write_batch(batch)
            assert b"no_route_matches" in reader.read().to_pybytes()
            with pytest.raises(fl.FlightServerError, match="no_route_matches") as caught:
                writer.close()
            assert not isinstance(caught.value, fl.FlightUnavailableError)
    finally:
        server.end()
        appender.close()
