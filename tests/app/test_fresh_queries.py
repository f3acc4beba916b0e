"""Queries of a home answer from its log what hasn't landed: nothing is missing or doubled while batches land."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from tests.app.homes import make_home
from tests.app.landed import LandedHome
from tests.app.served import serving
from tests.cli.in_process import command

import millstream
from millstream.app.lake_sessions import HomeLogTail, open_lake
from millstream.catalog.row_types import COPY_HELD, TableState
from millstream.errors import LakeBehind, TokenFromFuture

STREAM = """
[streams.shop.ingest]
schema_on_write = "create"
[streams.shop.keys]
clicks = ["id"]
"""
COUNT = "SELECT count(*) AS n, count(DISTINCT id) AS ids, max(id) AS last FROM public.clicks"


@pytest.fixture
def landed(tmp_path: Path) -> LandedHome:
    make_home(tmp_path, STREAM)
    return LandedHome(tmp_path, None)


def test_a_write_is_in_the_next_answer_whether_it_has_landed_or_not(landed: LandedHome):
    with millstream.open(landed.home.path) as home:
        first = home.append("shop", "clicks", [{"id": 1, "page": "a"}])
        assert home.query("FROM public.clicks").to_pylist() == [{"id": 1, "page": "a"}]
        landed.land()
        second = home.append("shop", "clicks", [{"id": 1, "page": "b"}, {"id": 2, "page": "c", "more": 7}])
        rows = [{"id": 1, "page": "b", "more": None}, {"id": 2, "page": "c", "more": 7}]
        assert home.query("FROM public.clicks ORDER BY id").to_pylist() == rows
        assert home.query("FROM public.clicks", as_of=first.token).to_pylist() == [{"id": 1, "page": "a"}]
        assert home.query("FROM public.clicks", lake_only=True).to_pylist() == [{"id": 1, "page": "a"}]
        assert home.query("FROM public.clicks ORDER BY id", as_of=second.token).to_pylist() == rows
        assert home.lake().token == home.token("shop")
        with pytest.raises(TokenFromFuture):
            home.query("FROM public.clicks", as_of=second.token, lake_only=True)
        landed.land()
        assert home.query("FROM public.clicks ORDER BY id", as_of=second.token).to_pylist() == rows
        now = datetime.now(UTC) - timedelta(milliseconds=1)
        assert home.query("FROM public.clicks ORDER BY id", as_of=now).to_pylist() == rows


def test_no_row_is_missing_or_doubled_while_batches_land(landed: LandedHome):
    rounds, ended = 12, threading.Event()

    def land() -> None:
        while not ended.is_set():
            landed.land(fold=True)

    with millstream.open(landed.home.path) as home:
        home.append("shop", "clicks", [{"id": 1}])
        lander = threading.Thread(target=land)
        lander.start()
        try:
            for last in range(2, rounds):
                home.append("shop", "clicks", [{"id": last}])
                with home.lake() as early:
                    home.append("shop", "clicks", [{"id": last + 1000}])
                    assert early.query(COUNT.replace("max(id)", "max(id) FILTER (id < 1000)")).to_pylist() == [
                        {"n": 2 * last - 2, "ids": 2 * last - 2, "last": last}
                    ]
        finally:
            ended.set()
            lander.join(60)


def test_a_backlog_is_left_out_and_said(landed: LandedHome, monkeypatch: pytest.MonkeyPatch):
    with millstream.open(landed.home.path) as home:
        home.append("shop", "clicks", [{"id": 1}])
        landed.land()
        ack = home.append("shop", "clicks", [{"id": n} for n in range(2, 2000)])
        monkeypatch.setattr(
            "millstream.app.lake_sessions.HomeLogTail", lambda reader: HomeLogTail(reader, bytes_max=99)
        )
        assert home.query(COUNT).to_pylist() == [{"n": 1, "ids": 1, "last": 1}]
        with pytest.raises(LakeBehind):
            home.query(COUNT, as_of=ack.token)
        done = command("--home", str(landed.home.path), "query", COUNT, "--format", "csv")
        assert (done.returncode, done.stdout) == (0, b"n,ids,last\n1,1,1\n")
        assert b"the log's newest records are left out: the log has more than 99 bytes" in done.stderr
        with open_lake(landed.home, "shop") as lake:
            assert lake.is_newest()


@pytest.mark.long
def test_a_table_whose_copy_is_not_whole_is_named_with_its_rows(landed: LandedHome):
    """Over HTTP there was no reason at all, and for a running copy nowhere."""
    where = landed.home.path
    with millstream.open(where) as home:
        home.append("shop", "clicks", [{"id": 1}])
        home.append("shop", "others", [{"id": 1}])
        landed.land()
        home.append("shop", "clicks", [{"id": 2}])
    with landed.home.open_catalog() as catalog:
        stream = catalog.stream("shop").id
        row = catalog.find_table(stream, "public", "clicks")

    def change(state: TableState) -> None:
        with landed.home.open_catalog() as catalog:
            catalog.set_state(row.id, state, "a key column was added", details={"cause": COPY_HELD})

    with serving(where) as url, millstream.connect(url) as there:
        for state, code in (
            (TableState.COPYING, "copying"),
            (TableState.COPY_REQUESTED, "copy_held"),
            (TableState.GONE, "gone"),
            (TableState.STREAMING, ""),
        ):
            change(state)
            asked = httpx.post(f"{url}/v1/streams/shop/query", json={"sql": COUNT}, timeout=60)
            header = json.loads(asked.headers.get("millstream-reasons", "[]"))
            with millstream.open(where) as home:
                for rows in (home.query(COUNT), home.query(COUNT, lake_only=True), there.query(COUNT, stream="shop")):
                    told = json.loads((rows.schema.metadata or {}).get(b"millstream.reasons", b"[]"))
                    assert told == header
                assert home.query('FROM history."public.others"').schema.metadata is None
            assert [(reason["code"], reason["table"]) for reason in header] == [(code, "public.clicks")][: bool(code)]
            done = command("--home", str(where), "query", COUNT, "--format", "csv")
            assert (done.stdout, code.encode() in done.stderr) == (b"n,ids,last\n2,2,2\n", True)
            assert (b"public.clicks: " in done.stderr) == bool(code)
