"""A missing catalog, or one older than its log, assigns no number twice: every table's rows stay under its own name."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.app.homes import config, done, make_home, run

import millstream
from millstream.catalog import TableState
from millstream.catalog import sql_tables as catalog_tables
from millstream.errors import CatalogError
from millstream.home.home import Home
from millstream.model.ids import ShardId
from millstream.model.schema import TableKind
from millstream.testing import EmbeddedPostgres
from millstream.testing.errors import coded
from millstream.testing.pytest_plugin import Database

STREAM = "[streams.shop]\n"
TABLES = {"orders": ["first", "again"], "clicks": ["here"], "visits": ["now"], "late": ["new"]}


class Backups:
    """A home's catalog, saved and restored; after `back(saved=False)` there is none."""

    def __init__(self, home: Path, save: Callable[[], None], back: Callable[[bool], None]) -> None:
        self.home, self.save, self.back = home, save, back


@pytest.fixture(params=["sqlite", "postgresql"])
def backups(
    request: pytest.FixtureRequest, tmp_path: Path, postgres_server: EmbeddedPostgres, postgres: Database
) -> Iterator[Backups]:
    if request.param == "sqlite":
        home = make_home(tmp_path / "shop", STREAM)
        catalog, saved = home / "data" / "catalog.db", tmp_path / "saved.db"

        def back(is_saved: bool) -> None:
            for left in catalog.parent.glob("catalog.db*"):
                left.unlink()
            if is_saved:
                shutil.copy(saved, catalog)

        yield Backups(home, lambda: shutil.copy(catalog, saved) and None, back)
        return
    names = [f"{postgres.name}_{kind}" for kind in ("now", "saved", "back", "empty")]
    now, saved_name, back_name, empty = names

    def configure(dsn: str) -> Path:
        return make_home(tmp_path / "shop", f'[catalog]\nurl = "{dsn}"\n{STREAM}')

    home = configure(postgres_server.create_database(now))

    def put_back(is_saved: bool) -> None:
        made = postgres_server.create_database(back_name, template=saved_name) if is_saved else None
        configure(made or postgres_server.create_database(empty))

    yield Backups(home, lambda: postgres_server.create_database(saved_name, template=now) and None, put_back)
    for name in names:
        postgres_server.drop_database(name)


def append(home: Path, table: str, *names: str) -> None:
    with millstream.open(home) as opened:
        for name in names:
            opened.append("shop", table, {"name": name})


def read(home: Path, *tables: str) -> dict[str, list[str]]:
    with millstream.open(home) as opened:
        return {
            table: [row["name"] for batch in opened.read("shop", table=table) for row in batch.to_pylist()]
            for table in tables or TABLES
        }


@pytest.mark.sampled
@pytest.mark.parametrize("is_saved", [True, False], ids=["older", "gone"])
def test_rows_of_every_table_come_out_under_its_own_name(backups: Backups, is_saved: bool) -> None:
    home = backups.home
    append(home, "orders", "first")
    backups.save()
    append(home, "clicks", "here")
    append(home, "visits", "now")
    with Home(home).open_catalog() as catalog:
        stream = catalog.stream("shop").id
        before = {row.name: row.id for row in catalog.tables(stream)}
    backups.back(is_saved)
    append(home, "late", "new")
    append(home, "orders", "again")
    assert read(home) == TABLES
    with Home(home).open_catalog() as catalog:
        assert catalog.stream("shop").id == stream
        after = {row.name: row.id for row in catalog.tables(stream)}
        assert {name: after[name] for name in before} == before
        assert after["late"] > max(before.values())
        assert {row.state for row in catalog.tables(stream)} == {TableState.STREAMING}


@pytest.mark.sampled
@pytest.mark.parametrize("is_saved", [True, False], ids=["older", "gone"])
def test_versions_numbers_epochs_and_keys_are_given_once(backups: Backups, is_saved: bool) -> None:
    home = backups.home
    append(home, "orders", "first")
    backups.save()
    with millstream.open(home) as opened:
        opened.append("shop", "orders", {"name": "again", "color": "red"})
        opened.append("shop", "orders", {"name": "keyed"}, idempotency_key="k1")
        opened.append("shop", "orders", {"name": "of a session"}, session="s", number=1)
    with Home(home).open_catalog() as catalog:
        stream = catalog.stream("shop").id
        (epoch,) = [writer.epoch for writer in catalog.writers(stream)]
        reserved = catalog.reservations(stream).reserved()
    backups.back(is_saved)
    with millstream.open(home) as opened:
        opened.append("shop", "orders", {"name": "wide", "weight": 3})
        opened.append("shop", "orders", {"name": "keyed"}, idempotency_key="k1")
        opened.append("shop", "orders", {"name": "of a session"}, session="s", number=1)
        rows = [row for batch in opened.read("shop", table="orders") for row in batch.to_pylist()]
    assert [row["name"] for row in rows] == ["first", "again", "keyed", "of a session", "wide"]
    assert [(row.get("color"), row.get("weight")) for row in rows[1::3]] == [("red", None), (None, 3)]
    assert [row["__seq"] for row in rows] == sorted({row["__seq"] for row in rows})
    assert rows[-1]["__seq"] > reserved
    with Home(home).open_catalog() as catalog:
        assert {writer.epoch > epoch for writer in catalog.writers(stream)} == {True}
        assert sorted(version for _, version in catalog.schemas(stream)) == [1, 2, 3]


@pytest.mark.parametrize(("clashes", "name"), [("number", "other"), ("name", "clicks")])
def test_a_catalog_that_has_given_a_number_again_is_refused(backups: Backups, clashes: str, name: str) -> None:
    """A catalog once did so: table 2 is clicks in the log and another in the catalog; or clicks has two numbers."""
    home = backups.home
    append(home, "orders", "first")
    backups.save()
    append(home, "clicks", "here")
    backups.back(True)
    with Home(home).open_catalog() as catalog:
        stream = catalog.stream("shop").id
        if clashes == "name":
            with catalog.database.write() as connection:
                catalog.database.number_above(connection, catalog_tables.tables, 7)
        catalog.application_table(stream, "public", name, shard=ShardId(0), grow=lambda schema: schema)
    with millstream.open(home) as opened, pytest.raises(CatalogError, check=coded("catalog_older")) as caught:
        opened.append("shop", "orders", {"name": "again"})
    assert "clicks" in caught.value.message
    assert "data/wal" in caught.value.hint
    assert read(home, "clicks") == {"clicks": ["here"]}


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("is_saved", [True, False], ids=["older", "gone"])
def test_captured_tables_go_on_under_their_names(tmp_path: Path, postgres: Database, is_saved: bool) -> None:
    home = make_home(tmp_path / "shop", config(postgres.dsn, None, tables='["public.*"]'))
    catalog, saved, newest = home / "data" / "catalog.db", tmp_path / "saved.db", tmp_path / "newest.db"
    with postgres.connect() as source:
        source.execute("CREATE TABLE first (id int PRIMARY KEY); INSERT INTO first VALUES (1)")
        done(home, "capture", "run", "--until-caught-up")
        shutil.copy(catalog, saved)
        source.execute("CREATE TABLE second (id int PRIMARY KEY)")
        expected = {"first": {1}, "second": set[int]()}
        for number in range(2, 10):
            source.execute("INSERT INTO second VALUES (%s)", [number])
            expected["second"].add(number)
            done(home, "capture", "run", "--until-caught-up")
            catalog.replace(newest)
            if is_saved:
                shutil.copy(saved, catalog)
            source.execute(f"CREATE TABLE new{number} (id int PRIMARY KEY); INSERT INTO new{number} VALUES (3)")
            source.execute("INSERT INTO first VALUES (%s)", [number])
            expected["first"].add(number)
            expected[f"new{number}"] = {3}
            ended = run(home, "capture", "run", "--until-caught-up")
            if "slot_ahead" not in ended.stderr:
                break
            # The server wrote WAL of its own behind the log's last record: only the newest catalog knows of it.
            shutil.copy(newest, catalog)
        assert ended.returncode == 0, ended.stderr
    with millstream.open(home) as opened:
        rows = {
            table: {row["id"] for batch in opened.read("shop", table=table) for row in batch.to_pylist()} - {None}
            for table in expected
        }
    assert rows == expected
    with Home(home).open_catalog() as known:
        present = known.tables(known.stream("shop").id)
        assert {(row.name, row.state) for row in present if row.kind is TableKind.TABLE} == {
            (name, TableState.STREAMING) for name in expected
        }
