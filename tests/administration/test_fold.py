"""Fold tables on request, as a command with nothing else running."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from deltalake import DeltaTable
from tests.app.homes import run
from tests.app.landed import LandedHome

from millstream import open as millstream_open
from millstream.administration.fold import fold_tables
from millstream.app.table_requests import copy_table
from millstream.catalog.rebuilds import Rebuilds
from millstream.errors import InvalidQuery, UnknownTable, UsageError
from millstream.home.paths import PIPELINE
from millstream.testing.pytest_plugin import Database


@pytest.fixture
def home(postgres: Database, tmp_path: Path) -> LandedHome:
    with postgres.connect() as source:
        source.execute("CREATE TABLE items (id int PRIMARY KEY, note text)")
        source.execute("INSERT INTO items SELECT i, 'old' FROM generate_series(1, 5) i")
        source.execute("CREATE TABLE keyless (a int)")
        source.execute("INSERT INTO keyless VALUES (1)")
    home = LandedHome(tmp_path / "shop", postgres.dsn)
    text = home.home.config_file.read_text()
    assert "[streams.shop.lake]\n" in text
    home.home.config_file.write_text(text.replace("[streams.shop.lake]\n", '[streams.shop.lake]\nfold = "manual"\n'))
    home.capture()
    home.land(fold=False)
    return home


def ids(home: LandedHome) -> list[int]:
    table = DeltaTable(home.home.path / "lake" / "shop" / "current" / "public.items")
    return sorted(row["id"] for row in table.to_pyarrow_table().to_pylist())


def test_the_command_folds_what_has_landed_and_the_cut_names_it(home: LandedHome, postgres: Database) -> None:
    done = run(home.home.path, "pipeline", "fold", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [{"table": "public.items", "view": "current", "rows": 5}]
    assert ids(home) == [1, 2, 3, 4, 5]
    with postgres.connect() as source:
        source.execute("DELETE FROM items WHERE id > 2")
    home.capture()
    home.land(fold=False)
    assert ids(home) == [1, 2, 3, 4, 5]
    assert [(view.table, view.view) for view in fold_tables(home.home, ["public.items"])] == [
        ("public.items", "current")
    ]
    assert ids(home) == [1, 2]
    with home.home.open_catalog() as catalog:
        assert not Rebuilds(catalog, catalog.stream("shop").id, PIPELINE, "fold").waiting()
    with millstream_open(home.home.path) as opened:
        assert len(opened.query("FROM public.items", lake_only=True)) == 2
        with pytest.raises(InvalidQuery):
            opened.query('FROM merged."public.items"', lake_only=True)


def test_tables_that_cannot_be_folded_are_refused(home: LandedHome, postgres: Database) -> None:
    with postgres.connect() as source:
        source.execute("INSERT INTO keyless VALUES (2)")
        source.execute("CREATE TABLE others (id int PRIMARY KEY); INSERT INTO others VALUES (1)")
    home.capture()
    home.land(fold=False)
    with pytest.raises(UnknownTable):
        fold_tables(home.home, ["public.absent"])
    with pytest.raises(UsageError, match="history only"):
        fold_tables(home.home, ["public.keyless"])
    with home.home.open_catalog() as catalog:
        stream = catalog.stream("shop").id
        copy_table(catalog, stream, "public.items", held="a column was added")
        with pytest.raises(UsageError, match=r"public\.items waits for a copy") as refused:
            fold_tables(home.home, ["public.others", "public.items"])
        assert refused.value.hint == "Run `millstream tables copy public.items` when the source can bear it."
        assert not Rebuilds(catalog, stream, PIPELINE, "fold").waiting(), "a refused command leaves no request"


def test_rows_whose_key_is_stored_out_of_line_stay_apart(postgres: Database, tmp_path: Path) -> None:
    """PostgreSQL sends such a key in the old key alone: all updated rows became one with the key NULL."""
    with postgres.connect() as source:
        source.execute(
            "CREATE TABLE pages (url text PRIMARY KEY, hits int); ALTER TABLE pages ALTER url SET STORAGE EXTERNAL"
        )
        source.execute("INSERT INTO pages SELECT repeat(n::text, 2100), 0 FROM generate_series(1, 3) n")
        home = LandedHome(tmp_path / "shop", postgres.dsn)
        home.catch_up()
        source.execute("UPDATE pages SET hits = hits + 1")
        source.execute("UPDATE pages SET hits = hits + 1 WHERE url LIKE '3%'")
    home.catch_up()
    rows = DeltaTable(home.home.path / "lake/shop/current/public.pages").to_pyarrow_table().to_pylist()
    assert sorted((row["url"][:1], len(row["url"]), row["hits"]) for row in rows) == [
        ("1", 2100, 1),
        ("2", 2100, 1),
        ("3", 2100, 2),
    ]
