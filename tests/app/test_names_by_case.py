"""Two captured tables whose names differ only by case, through renames, drops and tables that are created again."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.app.landed import LandedHome

from millstream import open as millstream_open
from millstream.app.status import collect_status
from millstream.diff.compare import Compared, diff_stream
from millstream.testing.pytest_plugin import Database


def folders(home: LandedHome) -> dict[str, str]:
    """Return the name of each table's folder under `current`, by table."""
    tables = collect_status(home.home)["streams"][0]["tables"]
    return {table["name"]: Path(table["paths"]["current"]).name for table in tables if "current" in table["paths"]}


def rows(home: LandedHome, table: str) -> list[int]:
    with millstream_open(home.home.path) as opened:
        return opened.query(f"SELECT id FROM {table} ORDER BY 1").column("id").to_pylist()


def check_equal(home: LandedHome) -> None:
    report = diff_stream(home.home, None, timeout_s=60)
    compared = [table for table in report.tables if table.state is not Compared.NOT_COMPARED]  # not the dropped table's
    assert len(compared) == 2
    assert {table.state for table in compared} == {Compared.EQUAL}, report.tables


@pytest.mark.siege
def test_each_has_its_own_folder_and_keeps_it(postgres: Database, tmp_path: Path) -> None:
    with postgres.connect() as source:
        source.execute('CREATE TABLE "User" (id int PRIMARY KEY); INSERT INTO "User" VALUES (1)')
    home = LandedHome(tmp_path / "shop", postgres.dsn)
    home.catch_up()
    with postgres.connect() as source:
        source.execute('CREATE TABLE "user" (id int PRIMARY KEY); INSERT INTO "user" VALUES (2)')
    home.catch_up()
    before = folders(home)
    assert before['public."User"'] == "public.User"
    assert before['public."user"'].startswith("public.user~t")
    assert (rows(home, 'public."User"'), rows(home, 'public."user"')) == ([1], [2])
    check_equal(home)
    with postgres.connect() as source:
        source.execute('DROP TABLE "user"; CREATE TABLE "user" (id int PRIMARY KEY); INSERT INTO "user" VALUES (3)')
        source.execute('ALTER TABLE "User" RENAME TO people; INSERT INTO people VALUES (4)')
    home.catch_up()
    after = folders(home)
    assert after["public.people"] == "public.people"
    assert {after[name] for name in after.keys() & before.keys()} <= set(before.values())
    assert (rows(home, "people"), rows(home, 'public."user"')) == ([1, 4], [3])
    check_equal(home)
    with postgres.connect() as source:
        source.execute('ALTER TABLE people RENAME TO "User"; INSERT INTO "User" VALUES (5)')
    home.catch_up()
    assert folders(home) == before
    assert (rows(home, 'public."User"'), rows(home, 'public."user"')) == ([1, 4, 5], [3])
    check_equal(home)
