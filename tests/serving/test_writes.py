"""Rows over HTTP: durable when they are answered, and refused by name if they can't be taken."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import json
import math
import random
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from tests.app.homes import wait_for
from tests.ingest.test_arrow_stream_decoding import MANY, SHARED
from tests.serving.serving_process import LINES, Served, served, web_home

from millstream.home.home import Home
from millstream.serving.access import Access
from millstream.serving.application import Application
from millstream.serving.request_bodies import Held, MemoryBudget, read_body

ARROW = {"content-type": "application/vnd.apache.arrow.stream"}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = web_home(tmp_path_factory.mktemp("homes") / "web", 'body_bytes_max = "1MiB"\nrows_max = 5000')
    with served(home) as found:
        yield found


def arrow(table: pa.Table, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as out:
        out.write_table(table)
    return bytes(sink.getvalue())


def test_rows_of_each_kind_of_body_are_durable_once_they_are_answered(server: Served) -> None:
    rows = [{"page": "/", "ms": 12.5, "n": 1}, {"page": "/ü", "ms": None, "n": 2**53 + 1}]
    lines = b"\r\n".join(json.dumps(row).encode() for row in rows)
    table = pa.Table.from_pylist(rows)
    bodies = [
        (LINES, lines),
        (LINES, lines + b"\n\n"),
        (JSON, json.dumps(rows).encode()),
        (ARROW, arrow(table)),
        (ARROW, arrow(table, compression="zstd")),
        ({**LINES, "content-encoding": "gzip"}, gzip.compress(lines)),
        ({**LINES, "content-encoding": "gzip"}, gzip.compress(lines[:10]) + gzip.compress(lines[10:])),
        ({**ARROW, "content-encoding": "gzip"}, gzip.compress(arrow(table))),
        ({"content-type": "application/x-ndjson; charset=utf-8"}, lines),
    ]
    with server.client() as client:
        for number, (headers, body) in enumerate(bodies):
            answer = client.post("/v1/streams/web/tables/kinds", content=body, headers=headers)
            assert answer.status_code == 200, answer.text
            said = answer.json()
            assert (said["rows"], said["duplicate"], said["rejected"]) == (2, False, [])
            found = server.rows("kinds")
            assert len(found) == 2 * (number + 1)
            assert [{name: row[name] for name in ("page", "ms", "n")} for row in found[-2:]] == rows
            assert [row["__seq"] for row in found[-2:]] == [said["first"], said["first"] + 1]
        one = client.post("/v1/streams/web/tables/one", content=b' {"a": {"b": [1, "x"]}} ', headers=JSON)
        assert one.status_code == 200
        assert server.rows("one")[0]["a"] == '{"b":[1,"x"]}'


def test_names_of_tables_are_as_everywhere(server: Served) -> None:
    with server.client() as client:
        odd = client.post(
            "/v1/streams/web/tables/%22Odd%2FSchema%22.%22Odd.Table%22", content=b'{"a":1}', headers=LINES
        )
        assert odd.status_code == 200, odd.text
        for name in ("a.b.c", "%22open", "%FF", ""):
            refused = client.post(f"/v1/streams/web/tables/{name}", content=b'{"a":1}', headers=LINES)
            assert (refused.status_code, refused.json()["code"]) == (400, "usage")
    assert server.rows('"Odd/Schema"."Odd.Table"')[0]["a"] == 1


def nested(depth: int) -> bytes:
    return b'{"v": ' + b"[" * depth + b"]" * depth + b"}"


def wide(columns: int) -> bytes:
    return json.dumps({f"c{number}": 1 for number in range(columns)}).encode()


@pytest.mark.parametrize(
    ("table", "body", "status", "code"),
    [
        ("nesting", nested(100), 200, ""),
        ("nesting", nested(101), 422, "invalid_value"),
        ("nesting", nested(400_000), 400, "invalid_body"),
        ("names", b'{"%s": 1}' % (b"n" * 255), 200, ""),
        ("names", b'{"%s": 1}' % (b"n" * 256), 422, "rows_too_large"),
        ("names", b'{"": 1}', 422, "invalid_value"),
        ("names", b'{"__op": 1}', 422, "invalid_value"),
        ("names", b'{"a\\u0000b": 1}', 422, "invalid_value"),
        ("names", b'{"Case": 1, "case": 1}', 422, "invalid_value"),
        ("columns", wide(1600), 200, ""),
        ("columns", wide(1601), 422, "rows_too_large"),
        ("rows", b'{"a":1}\n' * 5000, 200, ""),
        ("rows", b'{"a":1}\n' * 5001, 422, "rows_too_large"),
        ("empty", b"", 422, "invalid_value"),
        ("empty", b"\n \n", 422, "invalid_value"),
        ("empty", b"{}", 422, "invalid_value"),
        ("text", b'{"a": "x\xff"}', 400, "invalid_body"),
        ("text", b'{"a\xff": "x"}', 400, "invalid_body"),
        ("text", b'{"a": "\\ud800"}', 400, "invalid_body"),
        ("text", b'{"a": "\\u0000"}', 200, ""),
        ("numbers", b'{"a": NaN}', 400, "invalid_body"),
        ("numbers", b'{"a": Infinity}', 400, "invalid_body"),
        ("numbers", b'{"a": -Infinity}', 400, "invalid_body"),
        ("numbers", b'{"a": 1e400}', 400, "invalid_body"),
        ("numbers", b'{"a": 9223372036854775807}', 200, ""),
        ("numbers", b'{"a": 9223372036854775808}', 422, "invalid_value"),
        ("numbers", b'{"a": ' + b"9" * 5000 + b"}", 400, "invalid_body"),
        ("numbers", b'{"f": 0.5}\n{"f": 9007199254740993}', 422, "invalid_value"),
        ("kinds_of", b'{"a": 1}\n{"a": "x"}', 422, "invalid_value"),
        ("broken", b'{"a": 1}\n{"a" 2}', 400, "invalid_body"),
        ("broken", b'{"a": 1', 400, "invalid_body"),
        ("broken", b"[1]", 400, "invalid_body"),
        ("broken", b'\xef\xbb\xbf{"a": 1}', 400, "invalid_body"),
    ],
    ids=lambda value: value[:24] if isinstance(value, bytes) else None,
)
def test_lines_of_json_are_taken_up_to_each_bound_and_not_beyond(
    server: Served, table: str, body: bytes, status: int, code: str
) -> None:
    had = len(server.rows(table))
    with server.client() as client:
        answer = client.post(f"/v1/streams/web/tables/{table}", content=body, headers=LINES)
    assert (answer.status_code, answer.json().get("code", "")) == (status, code), answer.text
    assert code != "invalid_body" or answer.json()["hint"]
    assert len(server.rows(table)) == had + (answer.json()["rows"] if status == 200 else 0)


def test_a_problem_says_where(server: Served) -> None:
    with server.client() as client:
        answer = client.post("/v1/streams/web/tables/broken", content=b'{"a": 1}\n\n{"a": NaN}\n', headers=LINES)
    problem = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert (problem["type"], problem["status"]) == ("urn:millstream:error:invalid_body", 400)
    assert problem["details"]["line"] == 3
    assert "NaN" in problem["detail"]
    assert problem["hint"]


@pytest.mark.parametrize(
    ("headers", "parameters", "status", "code"),
    [
        ({}, "", 415, "media_type_unknown"),
        ({"content-type": "text/csv"}, "", 415, "media_type_unknown"),
        ({**LINES, "content-encoding": "br"}, "", 415, "media_type_unknown"),
        ({**LINES, "content-encoding": "gzip"}, "", 400, "invalid_body"),
        ({**JSON}, "", 200, ""),
        (LINES, "?on_clash=maybe", 400, "usage"),
        (LINES, "?deadline_s=soon", 400, "usage"),
        (LINES, "?deadline_s=nan", 400, "usage"),
        (LINES, "?deadline_s=-1", 400, "usage"),
        (LINES, "?deadline_s=5&on_clash=request", 200, ""),
        (LINES, "?%FF=1", 400, "usage"),
        ({**LINES, "millstream-session": "a"}, "", 400, "usage"),
        ({**LINES, "millstream-session-number": "1"}, "", 400, "usage"),
        ({**LINES, "millstream-session": "a", "millstream-session-number": "0"}, "", 422, "invalid_value"),
        ({**LINES, "millstream-session": "a", "millstream-session-number": "x"}, "", 422, "invalid_value"),
        (
            {**LINES, "idempotency-key": "k", "millstream-session": "a", "millstream-session-number": "1"},
            "",
            400,
            "usage",
        ),
        ({**LINES, "idempotency-key": ""}, "", 422, "invalid_value"),
        ({**LINES, "idempotency-key": "k" * 256}, "", 422, "rows_too_large"),
    ],
)
def test_what_a_request_says_beside_its_rows_is_looked_at(
    server: Served, headers: dict[str, str], parameters: str, status: int, code: str
) -> None:
    had = len(server.rows("beside"))
    with server.client() as client:
        answer = client.post(f"/v1/streams/web/tables/beside{parameters}", content=b'{"a":1}', headers=headers)
    assert (answer.status_code, answer.json().get("code", "")) == (status, code), answer.text
    assert len(server.rows("beside")) == had + (status == 200)


def test_arrow_from_anybody_is_bounded(server: Served) -> None:
    nothing = pa.table({"a": pa.nulls(5001)})
    bomb = pa.table({"a": pa.array([0] * 5000, pa.int64()).cast(pa.int64()), "b": ["x" * 40_000] * 5000})
    shared = pa.table({"a": pa.array(["y" * 100_000]).dictionary_encode().take(pa.array([0] * 5000))})
    deep = pa.table({"a": pa.FixedSizeListArray.from_arrays(pa.nulls(2**30), 2**30)})
    whole = arrow(pa.table({"a": [1, 2, 3]}))
    bodies = {
        "no bytes, many rows": (arrow(nothing), "rows_too_large"),
        "bomb": (arrow(bomb, compression="zstd"), "rows_too_large"),
        "shared text": (arrow(shared), "rows_too_large"),
        "a list of nothing": (arrow(deep), "rows_too_large"),
        "list views in objects": (arrow(pa.table({"a": SHARED["list views"].slice(0, 5000)})), "invalid_value"),
        "a union in objects": (arrow(pa.table({"a": SHARED["a union"].slice(0, 5000)})), "invalid_value"),
        "runs of a long text": (
            arrow(pa.table({"a": MANY["runs that are the column"].slice(0, 5000)})),
            "rows_too_large",
        ),
        "cut off": (whole[: len(whole) // 2], "invalid_body"),
        "not Arrow": (b"PAR1" * 100, "invalid_body"),
        "no rows": (arrow(pa.table({"a": pa.array([], pa.int64())})), "invalid_value"),
        "two columns of a name": (
            arrow(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])),
            "invalid_value",
        ),
    }
    assert all(len(body) < 1 << 20 for body, _ in bodies.values())
    with server.client() as client:
        for what, (body, code) in bodies.items():
            answer = client.post("/v1/streams/web/tables/arrows", content=body, headers=ARROW)
            assert (answer.json()["code"], answer.status_code) in {(code, 400), (code, 422)}, what
        floats = arrow(pa.table({"f": [math.nan, math.inf, -0.0]}))
        assert client.post("/v1/streams/web/tables/arrows", content=floats, headers=ARROW).status_code == 200
    assert str([row["f"] for row in server.rows("arrows")]) == "[nan, inf, -0.0]"


@pytest.mark.long
def test_a_body_is_taken_up_to_its_bound_as_it_is_and_inflated(server: Served) -> None:
    def body(size: int) -> bytes:
        return b'{"a":"%s"}' % (b"x" * (size - 8))

    def post(content: bytes | Iterator[bytes], headers: Mapping[str, str]) -> httpx.Response:
        # Each on a connection of its own: the server closes an idle one, also while the next body is made.
        with server.client() as client:
            return client.post("/v1/streams/web/tables/large", content=content, headers=headers)

    def pieces(content: bytes) -> Iterator[bytes]:
        yield from (content[at : at + 65536] for at in range(0, len(content), 65536))

    bound = 1 << 20
    for size, encoding, status in (
        (bound, "", 200),
        (bound + 1, "", 413),
        (bound, "gzip", 200),
        (bound + 1, "gzip", 413),
        (200 * bound, "gzip", 413),
    ):
        content = gzip.compress(body(size)) if encoding else body(size)
        headers = {**LINES, **({"content-encoding": encoding} if encoding else {})}
        assert post(content, headers).status_code == status, (size, encoding)
        assert post(pieces(content), headers).status_code == status, (size, encoding, "chunked")
    for damaged in (gzip.compress(body(1000))[:-9], gzip.compress(body(1000)) + b"more", b"\x1f\x8b" + b"x" * 50):
        answer = post(damaged, {**LINES, "content-encoding": "gzip"})
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_body")
    assert len(server.rows("large")) == 4


def test_paths_that_are_not_there_and_methods_that_are_not_taken_are_problems_too(server: Served) -> None:
    with server.client() as client:
        assert client.get("/nothing").json()["status"] == 404
        refused = client.get("/v1/streams/web/tables/x")
        assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
        assert refused.headers["content-type"] == "application/problem+json"
        missing = client.post("/v1/streams/nope/tables/x", content=b'{"a":1}', headers=LINES)
        assert (missing.status_code, missing.json()["code"]) == (404, "unknown_stream")


def test_what_the_server_says_of_itself(server: Served, tmp_path: Path) -> None:
    del tmp_path
    with server.client() as client:
        assert client.get("/readyz").json()["ready"] is True
        assert client.get("/healthz").status_code == 503
        assert client.get("/status").json()["streams"][0]["name"] == "web"
        assert "millstream_up" in client.get("/metrics").text
        paths = client.get("/openapi.json").json()["paths"]
        assert {"/v1/streams/{stream}/tables/{table}", "/write", "/api/v2/write", "/readyz"} <= set(paths)
        assert client.get("/docs").status_code == 200


def test_rows_that_have_no_place_are_left_out_and_named_where_that_is_asked_for(server: Served) -> None:
    def post(rows: list[Any], **headers: str) -> Any:
        with server.client() as client:
            address = "/v1/streams/web/tables/clashes?on_clash=rows"
            return client.post(address, json=rows, headers=headers)

    assert post([{"n": 1, "t": "a"}]).json()["rejected"] == []
    said = post([{"n": 2, "t": "b"}, {"n": "x", "t": "c"}, {"n": 1.5, "t": "d"}, {"n": 3}, {"t": 7}, {"n": 4.0}]).json()
    assert [row["row"] for row in said["rejected"]] == [1, 2, 4]
    assert {row["code"] for row in said["rejected"]} == {"invalid_value"}
    assert [row["column"] for row in said["rejected"]] == ["n", "n", "t"]
    assert said["rows"] == 3
    assert [row["n"] for row in server.rows("clashes")] == [1, 2, 3, 4]
    nothing = post([{"n": "x"}, {"n": "y"}])
    assert (nothing.status_code, nothing.json()["code"]) == (422, "invalid_value")
    deep = post([{"n": 5}, json.loads(nested(101))])
    assert (deep.status_code, deep.json()["code"]) == (422, "invalid_value")
    # Resent with its key, the request gets the same answer as the first time.
    for duplicate in (False, True):
        said = post([{"n": 6}, {"n": "x"}], **{"idempotency-key": "clash"}).json()
        assert (said["rows"], said["duplicate"]) == (1, duplicate)
    assert [row["n"] for row in server.rows("clashes")] == [1, 2, 3, 4, 6]


@pytest.mark.long
def test_a_request_that_cannot_be_taken_holds_up_none_that_wait_with_it(server: Served) -> None:
    def one(number: int) -> tuple[int, int]:
        row: dict[str, Any] = {"n": number, **({"n": "text"} if number % 7 == 3 else {}), f"c{number % 3}": number}
        return number, server.post("mixed", [row]).status_code

    assert server.post("mixed", [{"n": -1}]).status_code == 200
    with ThreadPoolExecutor(32) as pool:
        statuses = dict(pool.map(one, range(200)))
    assert {number for number, status in statuses.items() if status != 200} == {n for n in range(200) if n % 7 == 3}
    assert set(statuses.values()) == {200, 422}
    rows = [row for row in server.rows("mixed") if row["n"] >= 0]
    assert sorted(row["n"] for row in rows) == [n for n in range(200) if n % 7 != 3]
    assert all(row[f"c{row['n'] % 3}"] == row["n"] for row in rows)


def test_a_request_that_is_sent_again_is_answered_as_the_first_time(server: Served) -> None:
    with server.client() as client:
        for headers in (
            {"idempotency-key": "again"},
            {"millstream-session": "job", "millstream-session-number": "1"},
        ):
            table = f"again_{len(headers)}"
            answers = [
                client.post(f"/v1/streams/web/tables/{table}", content=b'{"n": 1}', headers={**LINES, **headers}).json()
                for _ in range(3)
            ]
            assert [answer["duplicate"] for answer in answers] == [False, True, True]
            assert len({(answer["token"], answer["first"], answer["rows"]) for answer in answers}) == 1
            assert len(server.rows(table)) == 1
        wait_for(lambda: client.post("/write?db=web", content=b"warm f=1").status_code == 204)
        lines = [
            client.post(
                "/write?db=web", content=b"again_lines f=1 1\nagain_more f=2 2", headers={"idempotency-key": "l"}
            )
            for _ in range(2)
        ]
        assert [answer.status_code for answer in lines] == [204, 204]
    assert [len(server.rows(table)) for table in ("again_lines", "again_more")] == [1, 1]


@pytest.mark.long
def test_a_body_of_many_members_takes_no_longer_than_its_bytes() -> None:
    """The bytes after each member were copied: a thousand empty members before megabytes took seconds."""
    many, one = _inflated_s(gzip.compress(b"") * 999), _inflated_s(b"")
    assert many < 5 * one + 0.5


def _inflated_s(before: bytes) -> float:
    """Return a core's seconds for a body that ends with 24 MiB of incompressible data."""
    noise = random.Random(1).randbytes(24 << 20)
    body = before + gzip.compress(noise, 1)
    headers = {b"content-encoding": b"gzip"}
    budget = MemoryBudget(1 << 30, 64 << 20)

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body}

    async def read() -> bytes:
        with Held(budget) as held:
            return await read_body(receive, headers, budget, held)

    began_s = time.process_time()
    assert asyncio.run(read()) == noise
    return time.process_time() - began_s


@pytest.mark.parametrize("path", ["/v1/streams/web/tables/grown", "/v1/streams/web/tables"])
def test_rows_count_with_the_memory_that_they_take_once_decoded(tmp_path: Path, path: str) -> None:
    """Thirty requests of 3 kB took two gigabytes at a time, beyond any bound."""
    zeros = pa.nulls(300_000).cast(pa.int64()).fill_null(0)
    body = arrow(pa.table({f"c{n}": zeros for n in range(20)}), compression="zstd")
    assert len(body) < 10_000
    headers = ARROW
    if path.endswith("tables"):
        body, headers = json.dumps({"tables": {"grown": base64.b64encode(body).decode()}}).encode(), JSON
    with served(web_home(tmp_path / "web", 'inflight_bytes_max = "32MiB"')) as server, server.client() as client:
        answer = client.post(path, content=body, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (422, "rows_too_large"), answer.text
        assert answer.json()["details"]["what"] == "memory"
        assert server.post("grown", [{"c0": 1}]).status_code == 200


@pytest.mark.parametrize("path", ["/v1/streams/web/tables/nested", "/v1/streams/web/tables"])
def test_other_requests_are_answered_while_a_small_body_is_decoded_for_long(tmp_path: Path, path: str) -> None:
    """A body of 300 bytes held up all requests for seconds."""
    objects = pa.StructArray.from_arrays([pa.nulls(60_000)], names=["x"])
    # The last column is refused, after the objects took half a second.
    table = pa.table({"a": objects, "b": pa.nulls(60_000).cast(pa.duration("s"))})
    body = arrow(table, compression="zstd")
    assert len(body) < 1000
    headers = ARROW
    if path.endswith("tables"):
        body, headers = json.dumps({"tables": {"nested": base64.b64encode(body).decode()}}).encode(), JSON

    async def turns() -> int:
        """Return how many turns other tasks have while the rows are appended."""
        count = 0

        async def count_turns() -> None:
            nonlocal count
            while True:
                await asyncio.sleep(0.005)
                count += 1

        counting = asyncio.create_task(count_turns())
        await posted()
        counting.cancel()
        return count

    async def posted() -> None:
        transport = httpx.ASGITransport(app=app.asgi())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answer = await client.post(path, content=body, headers=headers, timeout=60)
        assert answer.json()["code"] == "invalid_value", answer.text

    home = Home(web_home(tmp_path / "web"))
    home.prepare()
    with contextlib.closing(Application(home, Access(None))) as app:
        assert asyncio.run(turns()) > 10
