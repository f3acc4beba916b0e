"""Rows that applications append reach the lake: by a writer next to capture, with new columns, across restarts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.app.homes import done, make_home
from tests.e2e.harness import land

import millstream
from millstream.testing.pytest_plugin import Database

pytestmark = pytest.mark.siege

WRITE = """
import sys, millstream
with millstream.open(sys.argv[1]) as home:
    for number in range(int(sys.argv[2]), int(sys.argv[3])):
        home.append("shop", "visits", {"id": number % 50, "seen": number, sys.argv[4]: number})
        home.append("shop", "clicks", [{"number": number}, {"number": number + 0.5}])
"""


def write(home: Path, first: int, last: int, column: str, **environ: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITE, str(home), str(first), str(last), column], env={**os.environ, **environ}
    )


@pytest.mark.usefixtures("spark")
def test_two_writers_and_capture_land_in_one_lake(tmp_path: Path, postgres: Database) -> None:
    with postgres.connect() as connection:
        connection.execute("CREATE TABLE orders (id bigint PRIMARY KEY)")
        connection.execute("INSERT INTO orders SELECT generate_series(1, 100)")
    home = make_home(
        tmp_path / "shop",
        f'[catalog]\nurl = {json.dumps(postgres.dsn)}\n[writer]\nname = "a"\n[streams.shop.source]\ndsn = {json.dumps(postgres.dsn)}\n'
        f'slot = "{postgres.name}"\n[streams.shop.keys]\nvisits = ["id"]\n[streams.shop.lake]\nviews = ["current", "history", "scd2"]\n',
    )
    for first in (0, 200):
        # Both start with the table's first rows, each with a column of its own. One of them is the writer, or
        # goes through the other's socket.
        others = [
            write(home, first, first + 100, "mine"),
            write(home, first + 100, first + 200, "yours", MILLSTREAM_WRITER__NAME="b"),
        ]
        done(home, "capture", "run", "--until-caught-up")
        assert land(home) == {}
        assert [other.wait(600) for other in others] == [0, 0]
        done(home, "capture", "run", "--until-caught-up")
        assert land(home) == {}
        with millstream.open(home) as opened:
            visits = opened.query("select * from public.visits order by id").to_pylist()
            assert len(visits) == 50
            records = [r for batch in opened.read("shop", table="visits") for r in batch.to_pylist()]
            newest = {record["id"]: record for record in records}
            assert {v["id"]: v["seen"] for v in visits} == {key: r["seen"] for key, r in newest.items()}
            assert {v["id"]: v["mine"] for v in visits} == {key: r.get("mine") for key, r in newest.items()}
            assert {v["id"]: v["yours"] for v in visits} == {key: r.get("yours") for key, r in newest.items()}
            history = opened.query('select * from history."public.visits" order by __seq').to_pylist()
            assert [(r["__seq"], r["seen"]) for r in history] == [(r["__seq"], r["seen"]) for r in records]
            assert len(history) == first + 200
            clicks = (
                opened.query('select number from history."public.clicks" order by number').column("number").to_pylist()
            )
            assert clicks == [number / 2 for number in range(2 * first + 400)]
            assert opened.query("select count(*) as n from public.orders").to_pylist() == [{"n": 100}]
            assert opened.query('select count(*) as n from scd2."public.visits"').to_pylist() == [{"n": first + 200}]
            middle = records[len(records) // 2]["__seq"]
            before = opened.query(
                "select sum(seen) as s from public.visits", as_of=f"{opened.token('shop').stream}.s{middle}"
            )
            newest = {record["id"]: record["seen"] for record in records if record["__seq"] <= middle}
            assert before.to_pylist() == [{"s": sum(newest.values())}]
    tables = {t["name"]: t["state"] for t in json.loads(done(home, "tables", "--json"))}
    assert tables == {"public.clicks": "streaming", "public.orders": "streaming", "public.visits": "streaming"}
    assert "public.orders: equal" in done(home, "diff")
