"""A column gets a type that holds no earlier value: it goes on. A key's column sets its table aside, with a command that mends it."""

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
def test_a_column_gets_any_type_and_a_key_is_mended_by_what_its_reason_says(
    tmp_path: Path, postgres_server: EmbeddedPostgres
) -> None:
    home = Home(tmp_path / "shop", postgres_server.create_database("types"), slot="types")
    home.init()
    with postgres_server.connect("types", autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY, placed timestamptz, note text)")
        connection.execute("CREATE TABLE days (day timestamptz PRIMARY KEY, note text)")
        connection.execute("INSERT INTO orders SELECT i, '2026-03-01 12:00+00', 'n' FROM generate_series(1, 100) AS i")
        connection.execute("INSERT INTO days SELECT '2026-03-01 12:00+00'::timestamptz + i * interval '1 day', 'n' "
                           "FROM generate_series(0, 99) AS i")  # fmt: skip
        assert home.caught_up_here() == {}
        for name, column in (("orders", "placed"), ("days", "day")):
            connection.execute(f"UPDATE {name} SET note = 'm' WHERE ctid = '(0,7)'")
            connection.execute(f"ALTER TABLE {name} ALTER COLUMN {column} TYPE date USING {column}::date")
            connection.execute(f"UPDATE {name} SET note = 'later' WHERE ctid = '(0,8)'")
        assert list(home.caught_up_here()) == ["public.days"]

        assert rows(home, "SELECT count(*), min(placed), max(placed) FROM public.orders") == [
            ("100", "2026-03-01", "2026-03-01")
        ], "another column goes on"
        assert len(rows(home, "SELECT id FROM public.orders WHERE note <> 'n'")) == 2
        told = table(home, "public.days")
        assert told["state"] == "quarantined"
        assert "day was timestamp[us, tz=UTC] in the lake and is now date32[day]" in told["reason"]
        remedy = "pipeline rebuild public.days --from source"
        assert remedy in told["hint"]

        home.command(*remedy.split())
        connection.execute("UPDATE days SET note = 'after' WHERE day = '2026-03-20'")
        assert home.caught_up_here() == {}
        assert table(home, "public.days")["state"] == "streaming"
        assert rows(home, "SELECT count(*), min(day), max(day) FROM public.days") == [
            ("100", "2026-03-01", "2026-06-08")
        ]
        assert len(rows(home, "SELECT day FROM public.days WHERE note <> 'n'")) == 3
        kept = list((home.path / "lake" / "shop" / "history").glob("public.days.set-aside-*"))
        assert len(kept) == 1, "the history of before is kept beside the new one"
        home.command("diff")
