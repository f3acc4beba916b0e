"""Changes of a table's definition, from the source to the answers of queries, before and after they land."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.app.landed import LandedHome
from tests.capture.test_definitions import MAKE, MORE_NAMES, NAMES, Source
from tests.seeds import Seeds

import millstream
from millstream.delivery.backfill.rows import Rows, Wanted, tables_of, write_rows
from millstream.delivery.definition import Definition
from millstream.lake.query.query_session import LakeSession
from millstream.model.positions import Seq
from millstream.model.records import log_names
from millstream.testing.pytest_plugin import Database
from millstream.wal.reader import StreamReader


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
def test_swapped_names_and_a_renamed_key_copy_nothing_and_keep_all_values(tmp_path: Path, postgres: Database) -> None:
    with postgres.connect(autocommit=True) as source:
        source.execute("CREATE TABLE t (id int PRIMARY KEY, a text, b text, n int)")
        source.execute("ALTER TABLE t ALTER a SET STORAGE EXTERNAL, ALTER b SET STORAGE EXTERNAL")
        source.execute("INSERT INTO t SELECT i, repeat('a', 5000), repeat('b', 5000), i FROM generate_series(1, 3) i")
        landed = LandedHome(tmp_path / "shop", postgres.dsn)
        landed.catch_up()
        source.execute("ALTER TABLE t RENAME a TO x; ALTER TABLE t RENAME b TO a; ALTER TABLE t RENAME x TO b")
        source.execute("ALTER TABLE t RENAME id TO key; UPDATE t SET n = 10 WHERE key = 1; DELETE FROM t WHERE key = 3")
        landed.capture()
    wanted = [{"key": key, "b": "a" * 5000, "a": "b" * 5000, "n": n} for key, n in ((1, 10), (2, 2))]
    with millstream.open(landed.home.path) as home:
        assert home.query("FROM public.t ORDER BY key").to_pylist() == wanted
        landed.land()
        assert home.query("FROM public.t ORDER BY key", lake_only=True).to_pylist() == wanted
        copied = home.query("SELECT count(*) AS n FROM history.\"public.t\" WHERE __op = 'r'").to_pylist()
        assert copied == [{"n": 3}]
    reader = StreamReader(str(landed.home.wal_folder("shop")))
    for kind in ("changes", "latest"):
        definition = Definition.parse({"name": "search", "kind": kind})
        rows = Wanted("shop", definition, None, tables_of(reader, definition), reader.persisted_upto())
        write_rows(tmp_path / kind, rows, reader, no_lake, lambda: False)
        found = [json.loads(row.record)["row"] for row in Rows(tmp_path / kind, definition).read(0, 10)]
        assert sorted(found, key=lambda row: row["key"]) == wanted


def no_lake(_: Seq) -> LakeSession:
    raise AssertionError("the log has all records")


def test_a_name_whose_case_alone_changes_is_followed_in_every_view(tmp_path: Path, postgres: Database) -> None:
    with postgres.connect(autocommit=True) as source:
        source.execute("CREATE TABLE t (id int PRIMARY KEY, a text, b text); INSERT INTO t VALUES (1, 'x', 'gone')")
        landed = LandedHome(tmp_path / "shop", postgres.dsn)
        landed.catch_up()
        with millstream.open(landed.home.path) as home:
            first = home.token("shop")
        source.execute('ALTER TABLE t RENAME a TO "A"; ALTER TABLE t DROP b; ALTER TABLE t ADD "B" int')
        source.execute("INSERT INTO t VALUES (2, 'y', 5)")
        landed.capture()
    wanted = [{"id": 1, "A": "x", "B": None}, {"id": 2, "A": "y", "B": 5}]
    with millstream.open(landed.home.path) as home:
        assert home.query("FROM public.t ORDER BY id").to_pylist() == wanted
        landed.land()
        assert home.query("FROM public.t ORDER BY id", lake_only=True).to_pylist() == wanted
        old = home.query("FROM public.t", as_of=first).to_pylist()
        assert old == [{"id": 1, "a": "x", "b": "gone"}]
        records = home.query("SELECT __op, a, b FROM history.\"public.t\" WHERE __op <> 't' ORDER BY id").to_pylist()
        assert records == [{"__op": "r", "A": "x", "B": "gone"}, {"__op": "c", "A": "y", "B": "5"}]
    with postgres.connect(autocommit=True) as source:
        source.execute("ALTER TABLE t RENAME \"A\" TO a; UPDATE t SET a = 'z' WHERE id = 2")
    landed.catch_up()
    with millstream.open(landed.home.path) as home:
        copied = home.query("SELECT count(*) AS n FROM history.\"public.t\" WHERE __op = 'r'").to_pylist()
        assert copied == [{"n": 1}]
        assert home.query("SELECT id, a FROM public.t ORDER BY id").to_pylist() == [
            {"id": 1, "a": "x"},
            {"id": 2, "a": "z"},
        ]


@pytest.mark.long
@pytest.mark.parametrize("seed", [700, 701])
def test_random_changes_are_answered_before_and_after_they_land(
    tmp_path: Path, postgres: Database, seeds: Seeds, seed: int
) -> None:
    seed = seeds.kept_or_new(seed)
    with postgres.connect(autocommit=True) as connection:
        for statement in MAKE:
            connection.execute(statement)
        landed = LandedHome(tmp_path / "shop", postgres.dsn)
        landed.catch_up()
        source = Source(connection, Random(seed), (NAMES, MORE_NAMES)[seed % 2])
        for _ in range(4):
            source.play(5)
            landed.capture()
            if an_array_became_a_text(landed):
                return
            found = connection.execute("SELECT * FROM t ORDER BY id")
            names = log_names([column.name for column in found.description or ()])
            wanted = [dict(zip(names, map(printed, row), strict=True)) for row in found.fetchall()]
            assert answered(landed, names, lake_only=False) == wanted, source.done
            landed.land()
            assert answered(landed, names, lake_only=True) == wanted, source.done


def an_array_became_a_text(landed: LandedHome) -> bool:
    """Whether a dropped array's name passed to a text: no type holds both, so the table waits for a rebuild."""
    with millstream.open(landed.home.path) as home:
        reasons = json.loads((home.query("FROM public.t").schema.metadata or {}).get(b"millstream.reasons", b"[]"))
    conflicts = [reason for reason in reasons if reason["code"] == "quarantined"]
    assert all("list<item: int32> in the lake and is now string" in reason["detail"] for reason in conflicts), conflicts
    return bool(conflicts)


def answered(landed: LandedHome, names: list[str], *, lake_only: bool) -> list[dict[str, str | None]]:
    """Return the rows as texts; a column that no record has had since it was added is null in every row."""
    with millstream.open(landed.home.path) as home:
        rows = home.query("FROM public.t ORDER BY id", lake_only=lake_only).to_pylist()
    return [{name: printed(row.get(name)) for name in names} for row in rows]


def printed(value: Any) -> str | None:
    """Return a value as a text: a lake's column may have become one."""
    return None if value is None else str(value)
