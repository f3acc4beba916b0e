"""Tables that the lake has under another name, or has nothing of so far: found, empty, or reported as such."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.app.landed import LandedHome

from millstream import open as millstream_open
from millstream.diff.compare import Compared, diff_stream
from millstream.errors import InvalidQuery
from millstream.testing.pytest_plugin import Database


@pytest.mark.long
def test_what_capture_knows_and_the_lake_lacks(postgres: Database, tmp_path: Path) -> None:
    with postgres.connect() as source:
        source.execute("CREATE TABLE items (id int PRIMARY KEY, note text)")
        source.execute("INSERT INTO items SELECT i, 'a' FROM generate_series(1, 7) i")
        source.execute("CREATE TABLE things (id int PRIMARY KEY, price numeric(6,2))")
        source.execute("CREATE TABLE swapped (id int PRIMARY KEY)")
        source.execute("INSERT INTO swapped VALUES (1)")
        source.execute("CREATE TABLE keyless (a int)")
        source.execute("INSERT INTO keyless VALUES (1)")
    home = LandedHome(tmp_path / "shop", postgres.dsn)
    home.catch_up()
    with millstream_open(home.home.path) as opened:
        # A table that never had a row still has its columns, in a join and in a list of tables.
        sql = (
            "SELECT i.id, sum(t.price) AS price FROM public.items i LEFT JOIN public.things t ON t.id = i.id GROUP BY 1"
        )
        assert opened.query(f"{sql} ORDER BY 1").to_pylist()[0] == {"id": 1, "price": None}
        assert opened.query("FROM public.things").schema.names == ["id", "price"]
        assert opened.query('FROM history."public.things"').num_rows == 0
        assert "public.things" in opened.query("SHOW TABLES").column("name").to_pylist()
        before = opened.lake().token
        for name in ('history."public.keyless"', "public.keyless"):
            with pytest.raises(InvalidQuery, match="nothing in the lake yet: its replica identity gives") as caught:
                opened.query(f"FROM {name}")
            assert "`ALTER TABLE public.keyless REPLICA IDENTITY FULL`" in caught.value.hint
    with postgres.connect() as source:
        source.execute("ALTER TABLE items RENAME TO articles")
        source.execute("DROP TABLE swapped")
        source.execute("CREATE TABLE swapped (id int PRIMARY KEY)")
    home.catch_up()
    # The log has no record under the new name so far, and none of the new table that took the old name.
    report = diff_stream(home.home, None, timeout_s=30)
    assert {t.name: (t.state, t.rows_lake) for t in report.tables} == {
        "public.articles": (Compared.EQUAL, 7),
        "public.keyless": (Compared.SKIPPED, 0),
        "public.things": (Compared.EQUAL, 0),
        "public.swapped": (Compared.EQUAL, 0),
    }
    with millstream_open(home.home.path) as opened:
        assert opened.query("SELECT count(*) AS n FROM public.articles").to_pylist() == [{"n": 7}]
        assert opened.query('SELECT count(*) AS n FROM history."public.articles"').to_pylist() == [{"n": 7}]
        with pytest.raises(InvalidQuery, match=r"no table public\.things at \S+, or it was empty"):
            opened.query("FROM public.things", as_of="now")
    with postgres.connect() as source:
        source.execute("UPDATE articles SET note = 'b' WHERE id = 1")
        source.execute("INSERT INTO things VALUES (1, 2.5)")
    home.capture()
    with millstream_open(home.home.path) as opened:
        with pytest.raises(InvalidQuery, match="landed"):
            opened.query("FROM public.things", lake_only=True)
        assert opened.query("SELECT id FROM public.things").to_pylist() == [{"id": 1}]
        assert opened.query("SELECT count(*) AS n FROM public.articles WHERE note = 'a'").to_pylist() == [{"n": 6}]
    home.land()
    with millstream_open(home.home.path) as opened:
        assert opened.query("SELECT count(*) AS n FROM public.articles WHERE note = 'a'").to_pylist() == [{"n": 6}]
        with pytest.raises(InvalidQuery, match=r"it was called public\.items then"):
            opened.query("FROM public.articles", as_of=before)
        with pytest.raises(InvalidQuery, match="it had no record yet") as caught:
            opened.query("FROM public.things", as_of=before)
        assert re.search(r"Query \S+ \(\S+\) or later", caught.value.hint)
        assert "Others appear" not in caught.value.hint
