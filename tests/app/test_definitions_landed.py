"""Changes of a table's definition, from the source to the answers of queries, before and after they land."""

from __future__ import annotations

from datetime import UTC, datetime
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


def test_a_timestamp_that_gets_the_name_of_a_text_has_its_values(tmp_path: Path, postgres: Database) -> None:
    with postgres.connect(autocommit=True) as source:
        source.execute("CREATE TABLE t (id int PRIMARY KEY, a text); INSERT INTO t VALUES (1, 'x')")
        landed = LandedHome(tmp_path / "shop", postgres.dsn)
        landed.catch_up()
        source.execute("ALTER TABLE t RENAME a TO a_old")
        source.execute("ALTER TABLE t ADD a timestamptz; INSERT INTO t VALUES (2, 'y', '2026-01-01 00:00:00+00')")
        landed.capture()
    wanted = [{"id": 1, "a_old": "x", "a": None}, {"id": 2, "a_old": "y", "a": datetime(2026, 1, 1, tzinfo=UTC)}]
    with millstream.open(landed.home.path) as home:
        assert home.query("FROM public.t ORDER BY id").to_pylist() == wanted
        landed.land()
        assert home.query("FROM public.t ORDER BY id", lake_only=True).to_pylist() == wanted
        records = home.query("SELECT a FROM history.\"public.t\" WHERE __op = 'c'").to_pylist()
        assert records == [{"a": datetime(2026, 1, 1, tzinfo=UTC)}]
