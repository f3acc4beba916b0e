"""Names that move between tables under a running pipeline: released blue/green, rolled back, swapped.

Every table keeps its rows.
"""

from __future__ import annotations

import csv
import io
from functools import partial
from pathlib import Path

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from psycopg import Connection
from tests.e2e.harness import Home, wait_for

from millstream.testing.postgres import EmbeddedPostgres

pytestmark = pytest.mark.siege

Rows = list[tuple[str, str]]


def queried(home: Home, name: str, *arguments: str) -> Rows:
    said = home.command("query", f"SELECT id, v FROM public.{name} ORDER BY id", "--format", "csv", *arguments)
    return [(key, value) for key, value in list(csv.reader(io.StringIO(said)))[1:]]


def folded(home: Home, view: str, name: str) -> Rows:
    try:
        table = DeltaTable(home.lake(view, f"public.{name}")).to_pyarrow_table()
    except TableNotFoundError:
        return []
    table = table.filter(table["is_current"]) if view == "scd2" else table
    rows = table.sort_by("id").select(["id", "v"]).to_pylist()
    return [(str(row["id"]), row["v"]) for row in rows]


def is_folded(home: Home, view: str, name: str, rows: Rows) -> bool:
    return folded(home, view, name) == rows


def settled(home: Home, source: Connection[tuple[object, ...]], *names: str) -> dict[str, Rows]:
    """Return the source's rows, once both views of each table have them too."""
    shown = {}
    for name in names:
        rows = [(str(key), str(v)) for key, v in source.execute(f"SELECT id, v FROM {name} ORDER BY id").fetchall()]
        shown[name] = rows
        for view in ("current", "scd2"):
            landed = partial(is_folded, home, view, name, rows)
            wait_for(landed, f"{view} of {name} is {rows}", timeout_s=240)
        assert queried(home, name) == rows
    return shown


@pytest.mark.usefixtures("spark")
def test_tables_that_trade_names_keep_their_rows(tmp_path: Path, postgres_server: EmbeddedPostgres) -> None:
    home = Home(tmp_path / "shop", postgres_server.create_database("names"), slot="names")
    home.init()
    config = home.path / "millstream.toml"
    views = '[streams.shop.lake]\nviews = ["current", "history", "scd2"]\n'
    config.write_text(config.read_text().replace("[streams.shop.lake]\n", views, 1))
    with postgres_server.connect("names", autocommit=True) as connection:
        run = connection.execute
        run("CREATE TABLE bg (id int PRIMARY KEY, v text)")
        run("INSERT INTO bg SELECT i, 'old' || i FROM generate_series(1, 5) AS i")
        run("CREATE TABLE a (id int PRIMARY KEY, v text)")
        run("INSERT INTO a SELECT i, 'a' || i FROM generate_series(1, 4) AS i")
        run("CREATE TABLE b (id int PRIMARY KEY, v text)")
        run("INSERT INTO b VALUES (1, 'b1'), (2, 'b2')")
        with home.running_here():
            run("CREATE TABLE bg_new (id int PRIMARY KEY, v text)")
            run("INSERT INTO bg_new SELECT i, 'new' || i FROM generate_series(1, 3) AS i")
            before = settled(home, connection, "bg", "bg_new", "a", "b")
            token = home.status()["streams"][0]["tokens"]["landed"]

            with connection.transaction():
                run("ALTER TABLE bg RENAME TO bg_old")
                run("ALTER TABLE bg_new RENAME TO bg")
            run("INSERT INTO bg VALUES (10, 'new10')")
            run("INSERT INTO bg_old VALUES (10, 'old10')")
            with connection.transaction():
                run("ALTER TABLE a RENAME TO t")
                run("ALTER TABLE b RENAME TO a")
                run("ALTER TABLE t RENAME TO b")
            run("UPDATE a SET v = 'b1 in a' WHERE id = 1")
            run("DELETE FROM b WHERE id = 1")
            settled(home, connection, "bg", "bg_old", "a", "b")

            with connection.transaction():
                run("ALTER TABLE bg RENAME TO bg_bad")
                run("ALTER TABLE bg_old RENAME TO bg")
            run("INSERT INTO bg VALUES (11, 'old11')")
            run("INSERT INTO bg_bad VALUES (11, 'new11')")
            after = settled(home, connection, "bg", "bg_bad", "a", "b")
            home.command("pipeline", "rebuild", "public.bg")
            home.command("pipeline", "rebuild", "public.a")
            assert settled(home, connection, "bg", "bg_bad", "a", "b") == after
            for name, rows in before.items():
                assert queried(home, name, "--as-of", token) == rows
            home.command("diff")
