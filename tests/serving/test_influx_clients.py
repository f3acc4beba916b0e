"""InfluxDB's own clients of versions 2 and 3 write here unchanged, and so do requests as version 1 sends them."""

from __future__ import annotations

import datetime as dt
import gzip
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from influxdb_client import InfluxDBClient
from influxdb_client import Point as Point2
from influxdb_client import WriteOptions as WriteOptions2
from influxdb_client import WritePrecision as Precision2
from influxdb_client.client.write_api import SYNCHRONOUS
from influxdb_client.rest import ApiException
from influxdb_client_3 import SYNCHRONOUS as SYNCHRONOUS3
from influxdb_client_3 import InfluxDBClient3, InfluxDBError, write_client_options
from influxdb_client_3 import Point as Point3
from influxdb_client_3 import WriteOptions as WriteOptions3
from tests.app.homes import wait_for
from tests.serving.serving_process import Served, served, web_home

WHEN = dt.datetime(2026, 3, 1, 12, 30, 15, 123456, tzinfo=dt.UTC)
ODD = 'a "b", c=d \\ é 💧'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(web_home(tmp_path_factory.mktemp("homes") / "web", 'body_bytes_max = "1MiB"')) as found:
        # A server compiles the parser at its start, which takes a while if no machine code exists.
        with found.client() as client:
            wait_for(lambda: client.post("/write?db=web", content=b"warm f=1").status_code == 204)
        yield found


def point(kind: Any, measurement: str) -> Any:
    return (
        kind(measurement)
        .tag("odd tag", "v,1 = 2")
        .tag("host", "ä")
        .field("f", -1.5e-300)
        .field("whole", 2**62)
        .field("flag", True)
        .field("text", ODD)
        .field("odd field", 1.0)
        .time(WHEN)
    )


EXPECTED = {
    "time": WHEN,
    "odd tag": "v,1 = 2",
    "host": "ä",
    "f": -1.5e-300,
    "whole": 2**62,
    "flag": True,
    "text": ODD,
    "odd field": 1.0,
}


def without_facts(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith("__")}


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:This method is deprecated")  # health(), which its users call all the same
@pytest.mark.parametrize("zipped", [False, True])
def test_influxdb_client_writes_unchanged(server: Served, zipped: bool) -> None:
    table = "v2_zipped" if zipped else "v2_plain"
    with InfluxDBClient(url=server.url, token="any", org="any", enable_gzip=zipped) as client:
        assert client.ping()
        assert client.version().startswith("v1.8")
        assert client.health().status == "pass"
        with client.write_api(write_options=SYNCHRONOUS) as write:
            write.write(bucket="web", record=point(Point2, table))
            for precision, time in (
                (Precision2.S, 1_700_000_000),
                (Precision2.MS, 1_700_000_000_123),
                (Precision2.US, 1_700_000_000_123_456),
                (Precision2.NS, 1_700_000_000_123_456_000),
            ):
                write.write(
                    bucket="web",
                    record={"measurement": table, "fields": {"f": 1.0}, "time": time},
                    write_precision=precision,
                )
            write.write(bucket="web", record=[f"{table} f=2 1700000000000000000", f"{table} f=3 1700000000000000001"])
            with pytest.raises(ApiException) as refused:
                write.write(bucket="web", record=[f"{table} f=4", f'{table} f="text"', f"{table}", f"{table} f=5"])
            assert refused.value.status == 400
            assert "line 2" in refused.value.body
            assert "line 3" in refused.value.body
            assert "partial write" in refused.value.message
            with pytest.raises(ApiException) as missing:
                write.write(bucket="nope", record=f"{table} f=1")
            assert (missing.value.status, '"not found"' in missing.value.body) == (404, True)
    rows = server.rows(table)
    assert without_facts(rows[0]) | EXPECTED == without_facts(rows[0])
    second = dt.datetime(2023, 11, 14, 22, 13, 20, tzinfo=dt.UTC)
    assert [row["time"] for row in rows[1:5]] == [
        second, second.replace(microsecond=123000), second.replace(microsecond=123456), second.replace(microsecond=123456),
    ]  # fmt: skip
    assert [row["f"] for row in rows[5:]] == [2.0, 3.0, 4.0, 5.0]
    assert rows[6]["time_ns"] == 1_700_000_000_000_000_001


def test_the_tables_columns_decide_which_lines_are_kept(server: Served) -> None:
    with server.client() as client:

        def write(*lines: str) -> tuple[int, list[int]]:
            said = client.post("/api/v2/write?bucket=web", content="\n".join(lines).encode())
            return said.status_code, [int(number) for number in re.findall(r"line (\d+):", said.text)]

        assert write("decided v=1.5") == (204, [])
        assert write('decided v="x"', "decided v=1", "decided v=2", "decided v=3") == (400, [1])
        assert write("decided v=1i", "decided v=2.5") == (204, [])
        assert write('decided V="x"', "decided v=4", 'decided v="y",n="t"', "decided n=5") == (400, [1, 3])
        assert write('undecided v="x"', "undecided v=1") == (400, [2])
    rows = [without_facts(row) for row in server.rows("decided")]
    assert [(row.get("v"), row.get("n")) for row in rows] == [
        (1.5, None), (1.0, None), (2.0, None), (3.0, None), (1.0, None), (2.5, None), (4.0, None), (None, 5.0),
    ]  # fmt: skip


@pytest.mark.parametrize("path", ["/write?db=web", "/api/v2/write?bucket=web"])
def test_answers_have_the_lines_position(server: Served, path: str) -> None:
    with server.client() as client:
        for content, status in ((b"placed f=1", 204), (b'placed f=2\nplaced f="x"', 400)):
            answer = client.post(path, content=content)
            newest = client.get("/v1/streams/web/token").json()["token"]
            assert (answer.status_code, answer.headers["millstream-token"]) == (status, newest)
        assert "millstream-token" not in client.post(path, content=b"wrong").headers


def test_influxdb_client_batches_in_the_background(server: Served) -> None:
    failed: list[Any] = []
    with InfluxDBClient(url=server.url, token="any", org="any", enable_gzip=True) as client:
        options = WriteOptions2(batch_size=500, flush_interval=100)
        with client.write_api(write_options=options, error_callback=lambda *said: failed.append(said)) as write:
            for number in range(5000):
                write.write(bucket="web", record=Point2("v2_batches").field("n", number).tag("host", f"h{number % 7}"))
    assert failed == []
    assert sorted(row["n"] for row in server.rows("v2_batches")) == list(range(5000))


@pytest.mark.parametrize("zipped", [False, True])
def test_influxdb3_python_writes_unchanged(server: Served, zipped: bool) -> None:
    table = "v3_zipped" if zipped else "v3_plain"
    options = write_client_options(write_options=SYNCHRONOUS3)
    with InfluxDBClient3(
        host=server.url, token="any", database="web", write_client_options=options, enable_gzip=zipped
    ) as client:
        assert client.get_server_version().startswith("v1.8")
        client.write(record=point(Point3, table))
        client.write(record=[Point3(table).field("f", float(number)) for number in range(100)])
        with pytest.raises(InfluxDBError) as refused:
            client.write(record=[f"{table} f=4", f'{table} f="text"'])
        assert "partial write: line 2" in str(refused.value)
    rows = server.rows(table)
    assert without_facts(rows[0]) | EXPECTED == without_facts(rows[0])
    assert [row["f"] for row in rows[1:]] == [*map(float, range(100)), 4.0]


def test_influxdb3_python_batches_in_the_background(server: Served) -> None:
    done, failed = threading.Semaphore(0), []
    options = write_client_options(
        success_callback=lambda *_: done.release(),
        error_callback=lambda *said: failed.append(said),
        write_options=WriteOptions3(batch_size=500, flush_interval=100),
    )
    with InfluxDBClient3(host=server.url, token="any", database="web", write_client_options=options) as client:
        for number in range(2000):
            client.write(record=Point3("v3_batches").field("n", number))
    assert done.acquire(timeout=30)
    assert failed == []
    assert sorted(row["n"] for row in server.rows("v3_batches")) == list(range(2000))


@pytest.mark.parametrize(
    ("address", "body", "status", "said"),
    [
        ("/write?db=web", b"v1 f=1", 204, None),
        ("/write?db=web&precision=s", b"v1 f=1 1700000000\n# none\n\nv1 f=2 1700000001\n", 204, None),
        ("/write?db=web&rp=autogen&u=me&p=secret&consistency=one", b"v1 f=1", 204, None),
        ("/write", b"v1 f=1", 400, "db"),
        ("/write?db=", b"v1 f=1", 400, "db"),
        ("/write?db=nope", b"v1 f=1", 404, "nope"),
        ("/write?db=web&precision=fortnight", b"v1 f=1", 400, "precision"),
        ("/write?db=web", b"", 400, "no lines"),
        ("/write?db=web", b"v1 f=", 400, "line 1"),
        ("/write?db=web", b"v1 f=1\nv1 f=\xff\nv1 f=3", 400, "line 2"),
        ("/write?db=web", b'v1 f="x"', 400, "line 1"),
        ("/api/v2/write?bucket=web", b'v1 f="x"', 400, "line 1"),
        ("/api/v2/write?org=a", b"v1 f=1", 400, "bucket"),
        ("/api/v2/write?bucket=web", b"v1 f=" + b"1" * (1 << 20), 413, "bytes"),
        ("/write?db=web", b'v1 f=1,x="' + b"y" * (1 << 20) + b'"', 413, "bytes"),
    ],
)
def test_what_clients_of_version_1_and_2_are_told(
    server: Served, address: str, body: bytes, status: int, said: str | None
) -> None:
    with server.client() as client:
        answer = client.post(address, content=body)
        assert answer.status_code == status, answer.text
        assert answer.headers["x-influxdb-version"].startswith("v1.8")
        if said is None:
            assert answer.content == b""
            return
        text = answer.json()["error" if address.startswith("/write") else "message"]
        assert said in text


def test_the_lines_beside_wrong_ones_are_durable_and_counted(server: Served) -> None:
    lines = [b"partial f=%d" % number if number % 3 else b"partial" for number in range(300)]
    with server.client() as client:
        answer = client.post(
            "/api/v2/write?bucket=web", content=gzip.compress(b"\n".join(lines)), headers={"content-encoding": "gzip"}
        )
    assert answer.status_code == 400
    assert answer.json()["code"] == "invalid"
    assert answer.json()["line"] == 1
    assert "dropped=100" in answer.json()["message"]
    assert [row["f"] for row in server.rows("partial")] == [float(n) for n in range(300) if n % 3]


def test_clients_that_ask_whether_somebody_listens_are_told(server: Served) -> None:
    with server.client() as client:
        for method in ("GET", "HEAD"):
            answer = client.request(method, "/ping")
            assert (answer.status_code, answer.headers["x-influxdb-build"]) == (204, "OSS")
        assert client.get("/health").json()["status"] == "pass"
