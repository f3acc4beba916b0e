"""The whole path, once: PostgreSQL, the log, Spark, lake tables; then updates, deletes, a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable
from tests.e2e.harness import Home

from millstream.testing.pytest_plugin import Database


@pytest.mark.long
@pytest.mark.usefixtures("spark")
def test_rows_follow_the_source_through_restarts(postgres: Database, tmp_path: Path) -> None:
    source = postgres.connect()
    source.execute("CREATE TABLE orders (id bigint PRIMARY KEY, total numeric(12,2), note text)")
    source.execute("INSERT INTO orders VALUES (1, 10.50, 'copied')")
    home = Home(tmp_path / "shop", postgres.dsn)
    home.init()
    home.caught_up()
    assert rows(home) == [(1, "10.50", "copied")]

    source.execute("INSERT INTO orders VALUES (2, 0.01, 'streamed'), (3, NULL, NULL)")
    source.execute("UPDATE orders SET note = 'changed' WHERE id = 1")
    source.execute("DELETE FROM orders WHERE id = 3")
    source.execute("UPDATE orders SET id = 20 WHERE id = 2")
    assert home.caught_up_here() == {}
    assert rows(home) == [(1, "10.50", "changed"), (20, "0.01", "streamed")]

    assert [(r["op"], r["row"].get("id"), r["before"]) for r in home.records()] == [
        ("r", 1, None), ("c", 2, None), ("c", 3, None), ("u", 1, None), ("d", 3, None), ("u", 20, {"id": 2}),
    ]  # fmt: skip
    history = DeltaTable(home.lake("history", "public.orders")).to_pyarrow_table().sort_by("__seq")
    assert history["__op"].to_pylist() == ["r", "c", "c", "u", "d", "u"]
    answer = home.command("query", "SELECT id, note FROM public.orders ORDER BY id", "--format", "csv")
    assert answer.splitlines() == ["id,note", "1,changed", "20,streamed"]


def rows(home: Home) -> list[tuple[int, str | None, str | None]]:
    """Return the rows of `current`."""
    table = DeltaTable(home.lake("current", "public.orders")).to_pyarrow_table().sort_by("id")
    return [(r["id"], None if r["total"] is None else str(r["total"]), r["note"]) for r in table.to_pylist()]
