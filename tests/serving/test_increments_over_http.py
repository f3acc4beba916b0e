"""Increments and weights over HTTP and line protocol: taken, or refused with their codes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from tests.app.homes import make_home, wait_for
from tests.ingest.test_increment_columns import SHOP
from tests.serving.serving_process import LINES, Served, rows_of, served


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("homes") / "shop"
    make_home(home, SHOP.format(likes="pn_counter(increments)") + '[http]\nlisten = "127.0.0.1:0"\n')
    with served(home) as found:
        yield found


def post(server: Served, table: str, rows: list[dict[str, Any]], query: str = "") -> tuple[int, dict[str, Any]]:
    with server.client() as client:
        answer = client.post(f"/v1/streams/shop/tables/{table}{query}", json=rows)
    return answer.status_code, answer.json()


def test_json_rows_are_increments_or_refused_by_code(server: Served) -> None:
    assert post(server, "posts", [{"id": 1, "likes": 3, "stock": 1}, {"id": 2}])[0] == 200
    for value, code in ((True, "increment_unsuitable"), ("x", "increment_unsuitable"), (1.5, "increment_unsuitable")):
        for rows in ([{"id": 1, "likes": value}], [{"id": 1, "likes": 1}, {"id": 1, "likes": value}]):
            status, answer = post(server, "posts", rows)
            assert (status, answer["code"]) == (422, code)
    status, answer = post(server, "posts", [{"id": 1, "stock": -1}])
    assert (status, answer["code"]) == (422, "counter_grows_only")
    rows = [{"id": 1, "likes": 4}, {"id": 1, "likes": True}, {"id": 1, "stock": -1}]
    status, answer = post(server, "posts", rows, "?on_clash=rows")
    assert status == 200
    assert [(row["row"], row["code"]) for row in answer["rejected"]] == [
        (1, "increment_unsuitable"),
        (2, "counter_grows_only"),
    ]
    found = [(row["id"], row["likes"], row["__unchanged"]) for row in rows_of(server.home, "posts", "shop")]
    assert found == [(1, 3, None), (2, None, ["likes", "stock"]), (1, 4, ["stock"])]


def test_lines_name_columns_and_are_refused_alone(server: Served) -> None:
    with server.client() as client:
        body = "posts id=7i,likes=2i 1000000\nposts id=7i,likes=t 2000000\nposts id=7i,stock=-1i\nposts id=8i,likes=1i 3000000"
        # Until its parser is compiled, the server takes no lines.
        wait_for(lambda: client.post("/write?db=shop", content=b"others n=1i 1").status_code != 429)
        answer = client.post("/write?db=shop", content=body)
    assert answer.status_code == 400
    assert "line 2" in answer.json()["error"]
    assert "line 3" in answer.json()["error"]
    found = [row for row in rows_of(server.home, "posts", "shop") if row["id"] in {7, 8}]
    assert [(row["id"], row["likes"], "stock" in (row["__unchanged"] or [])) for row in found] == [
        (7, 2, True),
        (8, 1, True),
    ]


def test_an_ndjson_body_takes_increments(server: Served) -> None:
    with server.client() as client:
        answer = client.post(
            "/v1/streams/shop/tables/posts", content=b'{"id": 9, "likes": 1}\n{"id": 9}', headers=LINES
        )
    assert answer.status_code == 200


def test_weights_are_events_or_refused_with_their_request_or_alone(server: Served) -> None:
    assert post(server, "visits", [{"id": 1, "heat": 2}, {"id": 2, "heat": None}])[0] == 200
    for value in (-1, -0.5, True, "x"):
        status, answer = post(server, "visits", [{"id": 1, "heat": 1.0}, {"id": 1, "heat": value}])
        assert (status, answer["code"]) == (422, "invalid_value")
    status, answer = post(server, "visits", [{"id": 1, "heat": 0.5}, {"id": 1, "heat": -1}], "?on_clash=rows")
    assert status == 200
    assert [(row["row"], row["code"], row["column"]) for row in answer["rejected"]] == [(1, "invalid_value", "heat")]
    with server.client() as client:
        wait_for(lambda: client.post("/write?db=shop", content=b"others n=1i 1").status_code != 429)
        answer = client.post("/write?db=shop", content=b"visits id=1i,heat=4i\nvisits id=1i,heat=-4i")
        assert answer.status_code == 400
        assert "line 2" in answer.json()["error"]
        for at, left in (("", 1.0), ("&at=2100-01-01T00:00:00Z", 0.0)):
            answer = client.get(f"/v1/streams/shop/merged?table=visits{at}")
            row, other = pa.ipc.open_stream(answer.content).read_all().to_pylist()
            assert row["heat"] == pytest.approx(6.5 * left, rel=1e-2)
            assert (row["heat__1h"], row["heat__24h"], row["heat__7d"]) == (3 * left, 3 * left, 3 * left)
            assert (other["heat"], other["heat__7d"]) == (None, 0)
        for at in ("4102444800", "4102444800000", "20260301", "1.5", "soon", "", "2100-01-01T00:00:00+01:00"):
            answer = client.get(f"/v1/streams/shop/merged?table=visits&at={at}")
            assert (answer.status_code, answer.json()["code"]) == (400, "invalid_time")
