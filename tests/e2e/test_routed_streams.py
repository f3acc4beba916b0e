"""A table spread over shards and partitions, landed by Spark.

`current` and `history` have exactly the appended rows, across changes of the ring.
"""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest
from tests.app.homes import done, make_home
from tests.e2e.harness import land

import millstream

pytestmark = pytest.mark.siege

HOME = """
[streams.shop.log]
shards = 4
[streams.shop.keys]
"public.clicks" = ["id"]
[streams.shop.routing]
rules = [{ table = 'public\\.clicks', where = "kind = 'bot'", to = "devnull" }]
hash_ring = {}
[streams.shop.partitions]
"public.clicks" = "{at:%Y-%m-%d}/{kind}"
"""
DAY = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
KEYS = 37


def click(n: int) -> dict[str, Any]:
    """Keys repeat soon, in other partitions, also within one request."""
    kind = ("man", "woman", "bot")[n % 11 % 3]
    return {"id": n * n % KEYS, "n": n, "kind": kind, "at": DAY + dt.timedelta(days=n % 4)}


@pytest.mark.usefixtures("spark")
def test_a_table_on_several_shards_and_partitions_lands_as_it_was_appended(tmp_path: Path) -> None:
    home = make_home(tmp_path / "shop", HOME)
    appended: list[dict[str, Any]] = []
    for shards in (4, 6, 3):
        with millstream.open(home) as opened:
            for first in range(len(appended), len(appended) + 600, 60):
                rows = [click(n) for n in range(first, first + 60)]
                opened.append("shop", "clicks", rows)
                appended += rows
        told = json.loads(done(home, "reshard", "--shards", str(shards), "--json"))
        assert told["changed"] == (shards != 4)
        with millstream.open(home) as opened:
            rows = [click(n) for n in range(len(appended), len(appended) + 60)]
            opened.append("shop", "clicks", rows)
            appended += rows
        assert land(home) == {}
        kept = [row for row in appended if row["kind"] != "bot"]
        newest = {row["id"]: row for row in kept}
        with millstream.open(home) as opened:
            current = opened.query('select id, n, kind, "at" from public.clicks order by id').to_pylist()
            assert current == [newest[key] for key in sorted(newest)]
            history = opened.query('select id, n, __seq, __op from history."public.clicks" order by __seq').to_pylist()
            records = [row for batch in opened.read("shop", table="clicks") for row in batch.to_pylist()]
        assert sorted(row["n"] for row in history) == [row["n"] for row in kept]
        assert {row["n"]: row["__seq"] for row in history} == {row["n"]: row["__seq"] for row in records}
        last: dict[int, int] = {}
        for row in history:
            assert last.get(row["id"], -1) < row["n"]
            last[row["id"]] = row["n"]
    shards_used = {path.name for path in (home / "data" / "wal" / "shop").iterdir() if path.is_dir()}
    assert shards_used == {f"{n:05d}" for n in range(6)}
    (status,) = json.loads(done(home, "status", "--json"))["streams"]
    assert [era["shards"] for era in status["ring"]] == [4, 6, 3]
    assert status["lag"]["lake"]["records"] == 0
