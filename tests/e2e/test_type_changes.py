"""A type change that can't be followed sets one table aside, with a command to run that brings it back."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.harness import Home

from millstream.testing.postgres import EmbeddedPostgres

pytestmark = pytest.mark.siege


def rows(home: Home, sql: str) -> list[tuple[str, ...]]:
    return [tuple(row) for row in csv.reader(io.StringIO(home.command("query", sql, "--format", "csv")))][1:]


def table(home: Home, name: str) -> dict[str, Any]:
    tables: list[dict[str, Any]] = json.loads(home.command("tables", "--json"))
    return next(facts for facts in tables if facts["name"] == name)


@pytest.mark.usefixtures("spark")
def test_a_type_that_cannot_follow_is_mended_by_what_its_reason_says(
    tmp_path: Path, postgres_server: EmbeddedPostgres
) -> None:
    home = Home(tmp_path / "shop", postgres_server.create_database("types"), slot="types")
    home.init()
    with postgres_server.connect("types", autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY, placed timestamptz, note text)")
        connection.execute("CREATE TABLE customers (id int PRIMARY KEY, name text)")
        connection.execute("INSERT INTO orders SELECT i, '2026-03-01 12:00+00', 'n' FROM generate_series(1, 100) AS i")
        connection.execute("INSERT INTO customers VALUES (1, 'a')")
        assert home.caught_up_here() == {}
        connection.execute("UPDATE orders SET note = 'm' WHERE id = 7")
        connection.execute("ALTER TABLE orders ALTER COLUMN placed TYPE date USING placed::date")
        connection.execute("UPDATE orders SET note = 'later' WHERE id = 8")
        connection.execute("UPDATE customers SET name = 'b'")
        assert list(home.caught_up_here()) == ["public.orders"]

        assert rows(home, "SELECT name FROM public.customers") == [("b",)], "the others go on"
        told = table(home, "public.orders")
        assert told["state"] == "quarantined"
        assert "placed was timestamp[us, tz=UTC] in the lake and is now date32[day]" in told["reason"]
        remedy = "pipeline rebuild public.orders --from source"
        assert remedy in told["hint"]

        home.command(*remedy.split())
        connection.execute("UPDATE orders SET note = 'after' WHERE id = 9")
        assert home.caught_up_here() == {}
        assert table(home, "public.orders")["state"] == "streaming"
        assert rows(home, "SELECT count(*), min(placed), max(placed) FROM public.orders") == [
            ("100", "2026-03-01", "2026-03-01")
        ]
        assert rows(home, "SELECT id, note FROM public.orders WHERE note <> 'n' ORDER BY id") == [
            ("7", "m"), ("8", "later"), ("9", "after"),
        ]  # fmt: skip
        kept = list((home.path / "lake" / "shop" / "history").glob("public.orders.set-aside-*"))
        assert len(kept) == 1, "the history of before is kept beside the new one"
