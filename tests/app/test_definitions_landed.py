"""Changes of a table's definition, from the source to the answers of queries, before and after they land."""

from __future__ import annotations

from pathlib import Path

from tests.app.landed import LandedHome

import millstream
from millstream.testing.pytest_plugin import Database


def test_a_rename_that_no_record_shows_is_in_the_next_answers(tmp_path: Path, postgres: Database) -> None:
    with postgres.connect(autocommit=True) as source:
        source.execute("CREATE TABLE t (id int PRIMARY KEY, a text); INSERT INTO t VALUES (1, 'x')")
        landed = LandedHome(tmp_path / "shop", postgres.dsn)
        landed.catch_up()
        source.execute("ALTER TABLE t RENAME a TO b")
        landed.capture()
    wanted = [{"id": 1, "b": "x"}]
    with millstream.open(landed.home.path) as home:
        assert home.query("FROM public.t").to_pylist() == wanted
        assert home.query("FROM public.t", lake_only=True).to_pylist() == [{"id": 1, "a": "x"}]
        landed.land()
        assert home.query("FROM public.t", lake_only=True).to_pylist() == wanted
        assert home.query("FROM public.t", as_of=home.token("shop"), lake_only=True).to_pylist() == wanted
        assert home.query("SELECT id, b FROM history.\"public.t\" WHERE __op = 'r'").to_pylist() == wanted
