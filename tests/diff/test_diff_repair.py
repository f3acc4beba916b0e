"""`diff --repair` reads differing rows again through the log; then none differ, despite kills and live changes."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.app.homes import run
from tests.app.landed import LandedHome
from tests.diff.test_diff import behind_captures_back, reasons, told

from millstream.diff.asked_repairs import ask_repairs, wait_for_repairs
from millstream.diff.compare import diff_stream
from millstream.errors import LakeBehind
from millstream.testing.pytest_plugin import Database
from millstream.testing.workloads.shop import ShopWorkload

TABLES = (
    "CREATE TABLE items (id int PRIMARY KEY, note text)",
    "INSERT INTO items SELECT i, 'old' FROM generate_series(1, 500) i",
    "CREATE TABLE bag (a int); ALTER TABLE bag REPLICA IDENTITY FULL",
    "INSERT INTO bag VALUES (1), (1), (2)",
)
DAMAGE = (
    "DELETE FROM items WHERE id < 100",
    "UPDATE items SET note = NULL WHERE id = 200",
    "INSERT INTO items VALUES (900, '')",
)


def damaged_home(postgres: Database, tmp_path: Path) -> LandedHome:
    with postgres.connect() as source:
        for statement in TABLES:
            source.execute(statement)
        home = LandedHome(tmp_path / "shop", postgres.dsn)
        home.catch_up()
        behind_captures_back(source, *DAMAGE)
        behind_captures_back(source, "DELETE FROM bag WHERE a = 1")
    home.catch_up()
    return home


def millstream(home: LandedHome, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return run(home.home.path, *words, **environ)


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("point", ["", "capture.repair.before_append", "capture.repair.durable"])
def test_a_repair_that_is_killed_is_done_by_the_next_run(postgres: Database, tmp_path: Path, point: str) -> None:
    home = damaged_home(postgres, tmp_path)
    asked = millstream(home, "diff", "--repair", "--json")
    assert asked.returncode == 3, asked.stdout + asked.stderr
    facts: dict[str, Any] = json.loads(asked.stdout)
    assert facts["repair"] == [
        {"table": "public.bag", "how": "copy", "keys": 0, "reason": "it has no key"},
        {"table": "public.items", "how": "keys", "keys": 101, "reason": ""},
    ]
    assert " run` repairs the tables" in asked.stderr
    assert "still to be copied" in reasons(diff_stream(home.home))["public.bag"]
    if point:
        killed = millstream(home, "capture", "run", "--until-caught-up", MILLSTREAM_FAILPOINTS=point)
        assert killed.returncode == -9, killed.stderr
        home.land()
    home.catch_up()
    found = diff_stream(home.home)
    assert found.exit_code == 0, found.as_dict()
    assert told(found, "public.items")["rows"] == {"source": 402, "lake": 402}


def test_columns_of_reserved_names_are_compared_with_those_that_hold_them(postgres: Database, tmp_path: Path) -> None:
    with postgres.connect() as source:
        source.execute('CREATE TABLE items ("__seq" int PRIMARY KEY, "__op" text, "__op_" date)')
        source.execute("INSERT INTO items SELECT i, 'copied', '2020-01-01' FROM generate_series(1, 50) i")
        source.execute('CREATE TABLE bag ("__offset" text); ALTER TABLE bag REPLICA IDENTITY FULL')
        source.execute("INSERT INTO bag VALUES ('a'), ('a')")
        home = LandedHome(tmp_path / "shop", postgres.dsn)
        home.catch_up()
        source.execute("UPDATE items SET __op = 'streamed' WHERE __seq < 5; DELETE FROM items WHERE __seq = 9")
        source.execute("UPDATE items SET __seq = 90, __op_ = 'infinity' WHERE __seq = 10")
        home.catch_up()
        same = diff_stream(home.home)
        assert same.exit_code == 0, same.as_dict()
        assert told(same, "public.items")["notes"] == []
        damage = ("UPDATE items SET __op = 'unseen' WHERE __seq = 1", "DELETE FROM items WHERE __seq = 2")
        behind_captures_back(source, *damage)
    found = diff_stream(home.home)
    assert told(found, "public.items")["differences"] == [
        {
            "key": {"__seq_": "1"},
            "what": "values",
            "columns": {"__op__": {"lake": "streamed", "source": "unseen"}},
        },
        {"key": {"__seq_": "2"}, "what": "missing_in_source"},
    ]
    assert [(one.how, one.keys) for one in ask_repairs(home.home, found).tables] == [("keys", 2)]
    home.catch_up()
    mended = diff_stream(home.home)
    assert mended.exit_code == 0, mended.as_dict()


def test_waiting_for_a_repair_needs_somebody_who_does_it(postgres: Database, tmp_path: Path) -> None:
    home = damaged_home(postgres, tmp_path)
    found = diff_stream(home.home, tables=["public.items"], limit=5)
    assert (told(found, "public.items")["different"], told(found, "public.items")["listed"]) == (101, 5)
    asked = ask_repairs(home.home, found)
    assert [(one.how, one.reason) for one in asked.tables] == [("copy", "more keys differ than --limit lists")]
    with pytest.raises(LakeBehind, match="no capture runs"):
        wait_for_repairs(home.home, found, asked, timeout_s=5, on_wait=lambda _words: None)


@pytest.mark.siege
def test_damage_is_found_and_repaired_while_everything_moves(postgres: Database, tmp_path: Path) -> None:
    shop = ShopWorkload(seed=3)
    with postgres.connect() as source:
        shop.setup(source)
        home = LandedHome(tmp_path / "shop", postgres.dsn)
        home.catch_up()
        behind_captures_back(source, "UPDATE orders SET status = 'lost' WHERE id % 7 = 0")
    stop = threading.Event()

    def work() -> None:
        with postgres.connect() as connection:
            while not stop.wait(0.005):
                shop.step(connection)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        with home.running():
            found = diff_stream(home.home, tables=["public.orders"])
            assert told(found, "public.orders")["different"] > 500
            asked = ask_repairs(home.home, found)
            wait_for_repairs(home.home, found, asked, timeout_s=180, on_wait=lambda _words: None)
            again = diff_stream(home.home, tables=["public.orders"])
            assert again.exit_code == 0, again.as_dict()
    finally:
        stop.set()
        worker.join()
