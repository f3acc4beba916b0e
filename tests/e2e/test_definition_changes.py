"""Definitions that change under a running pipeline: keys, partitions, values; every view ends as the source."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from tests.e2e.harness import Home, wait_for

from millstream.testing.postgres import EmbeddedPostgres

pytestmark = pytest.mark.siege

MAKE = """
CREATE TABLE other_key (id int PRIMARY KEY, code int NOT NULL, v text);
INSERT INTO other_key SELECT i, 100 + i, 'v' FROM generate_series(1, 50) i;
CREATE TABLE no_key (id int PRIMARY KEY, v text);
INSERT INTO no_key SELECT i, 'v' || i FROM generate_series(1, 10) i;
CREATE TABLE swaps (id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED, big text);
ALTER TABLE swaps REPLICA IDENTITY FULL; ALTER TABLE swaps ALTER big SET STORAGE EXTERNAL;
INSERT INTO swaps SELECT i, repeat(i::text, 4000) FROM generate_series(1, 4) i;
CREATE TABLE retyped (id int PRIMARY KEY, v int);
INSERT INTO retyped SELECT i, i FROM generate_series(1, 10) i;
CREATE TABLE back (id int PRIMARY KEY, v text);
INSERT INTO back SELECT i, 'v' || i FROM generate_series(1, 10) i;
CREATE TABLE plain (id int PRIMARY KEY, g int GENERATED ALWAYS AS (id * 2) STORED);
INSERT INTO plain SELECT generate_series(1, 10);
CREATE TYPE mood AS ENUM ('sad', 'ok'); CREATE TYPE spot AS (x int, y int);
CREATE TABLE felt (id int PRIMARY KEY, m mood, s spot);
INSERT INTO felt SELECT i, 'sad', ROW(i, i)::spot FROM generate_series(1, 5) i;
CREATE TABLE named (id int PRIMARY KEY, a text, b text, c text);
INSERT INTO named SELECT i, 'a' || i, 'b' || i, 'c' || i FROM generate_series(1, 5) i;
CREATE TABLE parts (id int PRIMARY KEY, v int) PARTITION BY RANGE (id);
CREATE TABLE parts_low PARTITION OF parts FOR VALUES FROM (0) TO (100);
CREATE TABLE parts_mid PARTITION OF parts FOR VALUES FROM (100) TO (200);
CREATE TABLE graded (id int PRIMARY KEY, a text); INSERT INTO graded SELECT i, 'a' || i FROM generate_series(1, 5) i;
CREATE TABLE idle (id int PRIMARY KEY, v int); INSERT INTO idle SELECT i, i FROM generate_series(1, 5) i;
INSERT INTO parts SELECT i, i FROM generate_series(95, 105) i;
CREATE TABLE parts_high (id int PRIMARY KEY, v int); INSERT INTO parts_high VALUES (201, 1), (202, 2)
"""
CHANGE = (
    "DELETE FROM other_key WHERE id = 3; UPDATE other_key SET id = 998 WHERE id = 5",
    "BEGIN; ALTER TABLE other_key DROP CONSTRAINT other_key_pkey; ALTER TABLE other_key ADD PRIMARY KEY (code); COMMIT",
    "UPDATE other_key SET v = 'n' WHERE code = 101; DELETE FROM other_key WHERE code = 107",
    "DELETE FROM no_key WHERE id = 1",
    "BEGIN; ALTER TABLE no_key DROP CONSTRAINT no_key_pkey; ALTER TABLE no_key REPLICA IDENTITY FULL; COMMIT",
    "DELETE FROM no_key WHERE id = 2; INSERT INTO no_key VALUES (7, 'v7')",
    "UPDATE swaps SET id = CASE id WHEN 1 THEN 2 ELSE 1 END WHERE id IN (1, 2)",
    "UPDATE swaps SET id = id + 1",
    "ALTER TABLE retyped ALTER v TYPE int USING v * 2; UPDATE retyped SET v = 7 WHERE id = 1",
    "ALTER TABLE plain ALTER g DROP EXPRESSION; INSERT INTO plain VALUES (11, 11)",
    "INSERT INTO felt VALUES (6, 'ok', '(6,6)'); ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'",
    "ALTER TYPE mood ADD VALUE 'new'; ALTER TYPE spot DROP ATTRIBUTE x",
    "INSERT INTO felt VALUES (7, 'new', '(7)')",
    "BEGIN; INSERT INTO named VALUES (6, 'a6', 'b6', 'c6')",
    "ALTER TABLE named RENAME a TO t; ALTER TABLE named RENAME b TO a; ALTER TABLE named RENAME t TO b",
    "INSERT INTO named VALUES (7, 'b7', 'a7', 'c7'); ALTER TABLE named DROP c",
    "INSERT INTO named VALUES (8, 'b8', 'a8'); ALTER TABLE named ADD c text, ADD d int DEFAULT 4; COMMIT",
    "ALTER TABLE graded ADD g int NOT NULL DEFAULT 5; INSERT INTO graded VALUES (6, 'a6', 6)",
    "ALTER TABLE graded ADD h text DEFAULT 'h', ADD k int DEFAULT 1; UPDATE graded SET h = NULL WHERE id = 1",
    "ALTER TABLE graded RENAME h TO i; ALTER TABLE graded ADD h numeric DEFAULT 1.50; ALTER TABLE graded ALTER h DROP DEFAULT",
    "ALTER TABLE back RENAME v TO w",
    "INSERT INTO back VALUES (11, 'w11'); UPDATE back SET w = 'new' WHERE id = 1",
    "ALTER TABLE back RENAME w TO v",
    "ALTER TABLE idle RENAME v TO w; ALTER TABLE idle RENAME id TO key",
    "ALTER TABLE parts ATTACH PARTITION parts_high FOR VALUES FROM (200) TO (300)",
    "ALTER TABLE parts DETACH PARTITION parts_mid; INSERT INTO parts VALUES (1, 1)",
)
COLUMNS = {
    "other_key": "id, code, v",
    "no_key": "id, v",
    "swaps": "id, md5(big)",
    "retyped": "id, v",
    "back": "id, v",
    "plain": "id, g",
    "felt": "id, m, s",
    "named": "id, a, b, coalesce(c, '-'), d",
    "parts": "id, v",
    "idle": "key, w",
    "graded": "id, a, g, coalesce(i, '-'), k, h",
}
VERSIONED = ("other_key", "retyped", "back", "plain", "felt", "named", "parts", "idle", "graded")


@pytest.mark.usefixtures("spark")
def test_the_lake_ends_as_the_source(tmp_path: Path, postgres_server: EmbeddedPostgres) -> None:
    home = Home(tmp_path / "shop", postgres_server.create_database("definitions"), slot="definitions")
    home.init()
    config = home.path / "millstream.toml"
    views = '[streams.shop.lake]\nviews = ["current", "history", "scd2"]'
    config.write_text(config.read_text().replace("[streams.shop.lake]", views, 1))
    with postgres_server.connect("definitions", autocommit=True) as source:
        source.execute(MAKE)
        assert home.caught_up_here() == {}
        with home.running_here():
            wait_for(lambda: streams(source), "it streams")
            for statements in CHANGE:
                source.execute(statements)
            there = {(int(row[0]), int(row[1])) for row in of_the_source(source, "parts")}
            wait_for(lambda: folded(home, "parts") == there, "the partitions' rows", timeout_s=400)
        assert home.caught_up_here() == {}
        assert_as_the_source(home, source)
        home.command("pipeline", "rebuild", "public.other_key")
        home.command("pipeline", "rebuild", "public.idle")
        home.command("pipeline", "rebuild", "public.graded")
        assert_as_the_source(home, source)
        source.execute("ALTER TABLE idle RENAME w TO x; ALTER TABLE graded ADD z int DEFAULT 9")
        home.command("capture", "run", "--until-caught-up")
        for from_lake in (False, True):
            there = [(str(i), str(i)) for i in range(1, 6)]
            assert rows(home, "SELECT key, x FROM public.idle") == there
            assert rows(home, 'SELECT key, x FROM scd2."public.idle" WHERE is_current') == there
            assert set(rows(home, "SELECT z FROM public.graded")) == {("9",)}
            assert set(rows(home, 'SELECT z FROM scd2."public.graded" WHERE is_current')) == {("9",)}
            assert set(rows(home, 'SELECT * FROM history."public.graded" WHERE z IS NOT NULL')) == set()
            assert from_lake or home.caught_up_here() == {}
        log = [json.loads(line) for line in home.command("wal", "cat", "--table", "public.graded").splitlines()]
        assert [record["op"] for record in log].count("r") == 5, "nothing was copied again"
        log = [json.loads(line) for line in home.command("wal", "cat", "--table", "public.idle").splitlines()]
        assert [record["op"] for record in log if record["op"] != "s"] == ["r"] * 5, "nothing was copied again"
        assert log[-1]["row"]["renamed"] == {"w": "x"}
        assert [(c["name"], c["number"]) for c in log[-1]["row"]["columns"]] == [("key", 1), ("x", 2)]
        assert (log[-1]["commit_index"], log[-1]["xid"]) == (None, None)
        assert rows(home, """SELECT count(*) FROM history."public.idle" WHERE __op = 's'""") == [("0",)]


def streams(source: Any) -> bool:
    return bool(
        source.execute("SELECT FROM pg_replication_slots WHERE slot_name = 'definitions' AND active").fetchall()
    )


def of_the_source(source: Any, table: str) -> list[tuple[str, ...]]:
    return sorted(tuple(map(str, row)) for row in source.execute(f"SELECT {COLUMNS[table]} FROM {table}").fetchall())


def folded(home: Home, table: str) -> set[tuple[int, int]]:
    found = DeltaTable(home.lake("current", f"public.{table}")).to_pyarrow_table(columns=["id", "v"]).to_pylist()
    return {(row["id"], row["v"]) for row in found}


def assert_as_the_source(home: Home, source: Any) -> None:
    for table, columns in COLUMNS.items():
        there = of_the_source(source, table)
        assert rows(home, f"SELECT {columns} FROM public.{table}") == there, table
        if table in VERSIONED:
            versions = f'SELECT {columns} FROM scd2."public.{table}" WHERE is_current'
            assert rows(home, versions) == there, f"versions of {table}"


def rows(home: Home, sql: str) -> list[tuple[str, ...]]:
    found = csv.reader(io.StringIO(home.command("query", sql, "--format", "csv")))
    return sorted(tuple(row) for row in list(found)[1:])
