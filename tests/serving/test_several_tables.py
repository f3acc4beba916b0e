"""Several tables in one request over HTTP, and in one body of lines: one operation each."""

from __future__ import annotations

import base64
import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from tests.app.homes import wait_for
from tests.serving.serving_process import Served, served, web_home

import millstream
from millstream.errors import InvalidValue, MillstreamError
from millstream.ingest.json_rows import tables_of_json

PATH = "/v1/streams/web/tables"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = web_home(
        tmp_path_factory.mktemp("homes") / "web",
        'body_bytes_max = "1MiB"\nrows_max = 5000',
        '[streams.web.keys]\n"public.users" = ["id"]',
    )
    with served(home) as found:
        yield found


def arrow(table: pa.Table) -> str:
    """Return a table as a request has it next to others."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as out:
        out.write_table(table)
    return base64.b64encode(sink.getvalue()).decode()


def moments(server: Served, table: str) -> list[Any]:
    return [row["__commit_ts"] for row in server.rows(table)]


def test_a_request_is_one_operation_and_tells_of_each_table(server: Served) -> None:
    with server.client() as client:
        answer = client.post(
            PATH, json={"tables": {"h_b": [{"n": 1}, {"n": 2}], "public.h_a": [{"n": 3}], '"h_E"': []}}
        )
        assert answer.status_code == 200, answer.text
        told = answer.json()
        first = told["tables"]["public.h_b"]["first"]
        assert told == {
            "token": told["token"],
            "duplicate": False,
            "tables": {
                "public.h_b": {"first": first, "rows": 2, "rejected": []},
                "public.h_a": {"first": first + 2, "rows": 1, "rejected": []},
                'public."h_E"': {"first": None, "rows": 0, "rejected": []},
            },
        }
        assert list(told["tables"]) == ["public.h_b", "public.h_a", 'public."h_E"']
        assert client.get("/v1/streams/web/token").json()["token"] == told["token"]
        assert set(moments(server, "h_b")) == set(moments(server, "h_a"))
        for body in (b"", b"{}", b'{"tables": {}}', b'{"tables": {"h_a": []}}'):
            empty = client.post(PATH, content=body, headers={"content-type": "application/json"})
            assert (empty.status_code, empty.json()["token"], empty.json()["duplicate"]) == (200, told["token"], False)
        assert client.post(PATH).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (
            json.dumps({"tables": {f"bad{n}": arrow(pa.table({"n": pa.nulls(3000)})) for n in range(2)}}).encode(),
            422,
            "rows_too_large",
        ),
        (b'{"tables": {"bad": [{"n": 1}], "bad": [{"n": 2}]}}', 422, "invalid_value"),
        (b'{"tables": {"bad": [{"n": 1}], "public.bad": [{"n": 2}]}}', 422, "invalid_value"),
        (b'{"tables": {"bad": [{"n": 1}], "BAD": []}}', 422, "invalid_value"),
        (b'{"tables": {"bad": [{"n": 1}]}, "tables": {"other": [{"n": 1}]}}', 422, "invalid_value"),
        (b'{"tables": {"bad": [{"n": 1}]}, "more": 1}', 422, "invalid_value"),
        (b'{"tables": {"bad": [{"n": 1}], "users": [{"id": null}]}}', 422, "invalid_value"),
        (b'{"tables": {"bad": [{"n": 1}, {"n": "x"}]}}', 422, "invalid_value"),
        (b'{"tables": {"bad": [{"n": 1}], "worse": [{}]}}', 422, "invalid_value"),
        (b'{"tables": {"bad": [{"n": 1}], "a.b.c": [{"n": 1}]}}', 400, "usage"),
        (b'{"tables": {"bad": {"n": 1}}}', 400, "invalid_body"),
        (b'{"tables": {"bad": [1]}}', 400, "invalid_body"),
        (b'{"tables": {"bad": null}}', 400, "invalid_body"),
        (b'{"tables": {"bad": "no base64"}}', 400, "invalid_body"),
        (b'{"tables": {"bad": "aGVsbG8="}}', 400, "invalid_body"),
        (b'{"tables": []}', 400, "invalid_body"),
        (b"[]", 400, "invalid_body"),
        (b'{"tables": {"bad": [{"n": 1}', 400, "invalid_body"),
        (b'{"tables": {"bad": [{"n": NaN}]}}', 400, "invalid_body"),
        (b'{"tables": {"bad": [{"n": "\xff"}]}}', 400, "invalid_body"),
        (json.dumps({"tables": {"bad": [{"n": 1}] * 3000, "worse": [{"n": 1}] * 3000}}).encode(), 422, "rows_too_large"),
        (json.dumps({"tables": {f"bad{n}": [{"n": 1}] for n in range(1001)}}).encode(), 422, "rows_too_large"),
    ],
)  # fmt: skip
def test_a_body_that_is_wrong_appends_nothing(server: Served, body: bytes, status: int, code: str) -> None:
    with server.client() as client:
        before = client.get("/v1/streams/web/token").text
        answer = client.post(PATH, content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
        assert client.get("/v1/streams/web/token").text == before
        assert "bad" not in client.get("/status").text


def test_the_options_work_as_for_one_table(server: Served) -> None:
    body = {"tables": {"o_a": [{"n": 1}, {"n": "x"}], "o_b": [{"n": "y"}]}}
    with server.client() as client:
        assert client.post(PATH, json={"tables": {"o_a": [{"n": 0}], "o_b": [{"n": 0}]}}).status_code == 200
        assert client.post(PATH, json=body).status_code == 422
        key = {"Idempotency-Key": "several"}
        kept = client.post(PATH, json=body, params={"on_clash": "rows"}, headers=key).json()
        parts = kept["tables"]
        assert [row["row"] for row in parts["public.o_a"]["rejected"]] == [1]
        assert (parts["public.o_b"]["first"], parts["public.o_b"]["rows"]) == (None, 0)
        again = client.post(PATH, json=body, params={"on_clash": "rows"}, headers=key).json()
        assert (again["duplicate"], again["tables"]) == (True, parts)
        # The tables have columns of integers: it doesn't matter which kind most values are of.
        texts = {"tables": {"o_a": [{"n": "x"}, {"n": "y"}, {"n": 2}]}}
        most = client.post(PATH, json=texts, params={"on_clash": "rows"}).json()["tables"]["public.o_a"]
        assert ([row["row"] for row in most["rejected"]], most["rows"]) == ([0, 1], 1)
        one = client.post(f"{PATH}/o_a", json=texts["tables"]["o_a"], params={"on_clash": "rows"}).json()
        assert ([row["row"] for row in one["rejected"]], one["rows"]) == ([0, 1], 1)
        none = client.post(f"{PATH}/o_a", json=[{"n": "x"}, {"n": 2.5}], params={"on_clash": "rows"})
        assert (none.status_code, [row["row"] for row in none.json()["details"]["rejected"]]) == (422, [0, 1])
        numbered = {"Millstream-Session": "h", "Millstream-Session-Number": "1"}
        assert client.post(PATH, json={"tables": {"o_a": [{"n": 5}]}}, headers=numbered).json()["duplicate"] is False
        assert client.post(PATH, json={"tables": {"o_a": [{"n": 5}]}}, headers=numbered).json()["duplicate"] is True
        assert client.post(PATH, json={"tables": {"o_a": [{"n": 6}]}}, headers=numbered).status_code == 422
        level = client.post(PATH, json={"tables": {"o_a": [{"n": 7}]}}, headers={"Millstream-Acks": "durable(1)"})
        assert level.json()["code"] == "ack_level_unavailable"
        for kind in ("application/x-ndjson", "application/vnd.apache.arrow.stream", "text/plain"):
            other = client.post(PATH, content=b'{"tables": {}}', headers={"content-type": kind})
            assert (other.status_code, other.json()["code"]) == (415, "media_type_unknown")
        assert client.post(PATH, content=b'{"tables": {}}').status_code == 415
        assert client.post(PATH, json={}, params={"clash": "rows"}).status_code == 400
        assert client.post("/v1/streams/nope/tables", content=b"!").status_code == 404
        got = client.get(PATH)
        assert (got.status_code, got.headers["allow"]) == (405, "POST")


def test_the_python_client_keeps_types_and_sessions(server: Served) -> None:
    with millstream.connect(server.url) as home:
        rows = {"p_a": [{"n": 1, "price": Decimal("1.50"), "raw": b"\0"}], "p_b": [{"n": 2}, {"n": "x"}]}
        with pytest.raises(InvalidValue):
            home.append_all("web", rows)
        told = home.append_all("web", rows, keep_valid_rows=True)
        assert [(part.rows, [row.row for row in part.rejected]) for part in told.tables.values()] == [(1, []), (1, [1])]
        assert server.rows("p_a")[0]["price"] == Decimal("1.50")
        session = home.session("web", "client")
        first = session.append_all({"p_a": [{"n": 3}], "p_b": [{"n": 3}]})
        again = session.append_all({"p_a": [{"n": 3}], "p_b": [{"n": 3}]}, number=1)
        assert (again.duplicate, again.tables) == (True, first.tables)
        with pytest.raises(MillstreamError):
            session.append_all({"p_a": [{"n": 3}], "p_a ": [{"n": 3}]})


def test_the_kept_lines_of_a_body_are_one_operation(server: Served) -> None:
    with server.client() as client:
        wait_for(lambda: client.post("/write?db=web", content=b"warm f=1").status_code == 204)  # the parser is compiled
        lines = b"l_cpu f=1 1000\nl_mem f=2 1000\nl_cpu f=3 2000\n"
        key = {"Idempotency-Key": "lines"}
        assert client.post("/write?db=web", content=lines, headers=key).status_code == 204
        assert client.post("/write?db=web", content=lines, headers=key).status_code == 204
        assert len(set(moments(server, "l_cpu") + moments(server, "l_mem"))) == 1
        numbered = {"Millstream-Session": "lines", "Millstream-Session-Number": "1"}
        assert client.post("/write?db=web", content=lines, headers=numbered).status_code == 204
        partly = client.post("/write?db=web", content=b'l_cpu f="x"\nl_mem f=4\nusers x=1\nl_new f="y"\n')
        assert partly.status_code == 400
        assert "line 1:" in partly.text
        assert "line 3:" in partly.text
        assert "dropped=2" in partly.text
        assert server.rows("l_mem")[-1]["__commit_ts"] == server.rows("l_new")[-1]["__commit_ts"]


@pytest.mark.long
def test_after_a_kill_each_request_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    home = web_home(tmp_path / "web", "")
    acknowledged: list[int] = []
    with served(home) as found:
        stop = threading.Event()

        def append(start: int) -> None:
            with found.client() as client:
                n = start
                while not stop.is_set():
                    tables = {"k_a": [{"n": n}], "k_b": [{"n": n}] * 3, "k_c": [{"n": n, "pad": "x" * 1000}] * 20}
                    try:
                        answer = client.post(PATH, json={"tables": tables})
                    except httpx.HTTPError:
                        return
                    if answer.status_code == 200:
                        acknowledged.append(n)
                    n += 8

        threads = [threading.Thread(target=append, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        while len(acknowledged) < 100:
            stop.wait(0.01)
        found.process.send_signal(signal.SIGKILL)
        found.process.wait()
        stop.set()
        for thread in threads:
            thread.join()
    with millstream.open(home) as opened:
        counts = {
            table: Counter(row["n"] for batch in opened.read("web", table=table) for row in batch.to_pylist())
            for table in ("k_a", "k_b", "k_c")
        }
    assert set(acknowledged) <= counts["k_a"].keys()
    assert counts["k_a"].keys() == counts["k_b"].keys() == counts["k_c"].keys()
    assert [set(of.values()) for of in counts.values()] == [{1}, {3}, {20}]


def test_a_table_that_a_body_names_twice_is_found_soon() -> None:
    """A body of 230 kB held the server's event loop for seconds, and a larger one a thread for hours."""
    names = [*range(20_000), 19_999]
    body = b'{"tables":{%s}}' % b",".join(b'"t%d":[]' % name for name in names)
    began_s = time.process_time()
    with pytest.raises(InvalidValue, match="names table t19999 twice"):
        tables_of_json(body)
    assert time.process_time() - began_s < 1
