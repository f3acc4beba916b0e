"""Folders of tables whose names differ only by case: one for each name, on any file system, for good."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from tests.spark.hand_made import Home, delete, insert
from tests.spark.lake_run import config_of, drain, rows_in

from millstream.lake.commit_cuts import last_cut
from millstream.lake.layout import LakeLayout
from millstream.lake.query.query_session import LakeSession
from millstream.lake.replay import replay_range
from millstream.model.positions import Seq
from millstream.spark.session import SparkOptions

pytestmark = [pytest.mark.siege, pytest.mark.usefixtures("spark")]
VIEWS = ("current", "history", "scd2")


def ids(rows: Iterable[dict[str, int]]) -> list[int]:
    return sorted(row["id"] for row in rows)


def folders(home: Home, view: str) -> set[str]:
    return {path.name for path in (home.path / "lake" / "shop" / view).iterdir()}


def test_names_that_differ_by_case_alone_have_a_folder_each(
    home: Home, spark_options: SparkOptions, tmp_path: Path
) -> None:
    def land() -> LakeLayout:
        # A driver of its own: it knows only what the lake reports.
        config = config_of(home.path, home.stream, spark_options, views=VIEWS)
        outcome = drain(config, home.catalog)
        assert not outcome.quarantined
        return config.layout

    first = home.table("public.User", id=pa.int64())
    home.commit(insert(first, id=1))
    land()
    second, other = (home.table(name, id=pa.int64()) for name in ("public.user", "public.other"))
    home.commit(insert(second, id=2), insert(other, id=3))
    layout = land()
    later = f"public.user~t{second.table_id}"
    for view in VIEWS:
        assert folders(home, view) == {"public.User", later, "public.other"}
        assert [ids(rows_in(home.path, view, f)) for f in ("public.User", later, "public.other")] == [[1], [2], [3]]
    with LakeSession(layout) as session:
        assert session.query('SELECT id FROM "User"').to_pydict() == {"id": [1]}
        assert session.query("SELECT id FROM user").to_pydict() == {"id": [2]}
        assert session.query('SELECT id FROM scd2."public.user"').to_pydict() == {"id": [2]}
    cut = last_cut(layout)
    assert cut is not None
    replay = replay_range(layout, cut, "public.user", after=Seq(0), upto=cut.n, into=str(tmp_path / "replay"))
    assert DeltaTable(replay.path).to_pyarrow_table().column("id").to_pylist() == [2]

    # Renamed to a third spelling, and its old name created again: the name keeps its folder, as any name does.
    renamed = home.catalog.put_schema(home.stream, replace(other, name="USER"))
    again = home.table("public.user", id=pa.int64())
    home.commit(insert(renamed, id=4), delete(second, id=2))
    home.commit(insert(again, id=5))
    layout = land()
    third = f"public.USER~t{other.table_id}"
    home.commit(insert(first, id=6), insert(renamed, id=7), insert(again, id=8))
    land()
    found = [ids(rows_in(home.path, "current", folder)) for folder in ("public.User", later, third)]
    assert found == [[1, 6], [5, 8], [3, 4, 7]]
    # A name that its table left: its folder is still there.
    left = home.table("public.Other", id=pa.int64())
    home.commit(insert(left, id=9))
    layout = land()
    fourth = f"public.Other~t{left.table_id}"
    assert folders(home, "history") == {"public.User", later, third, "public.other", fourth}
    assert len({folder.lower() for folder in folders(home, "history")}) == 5
    assert ids(rows_in(home.path, "current", fourth)) == [9]
    with LakeSession(layout) as session:
        for name, rows in (('"User"', [1, 6]), ("user", [5, 8]), ('"USER"', [3, 4, 7])):
            assert sorted(session.query(f"SELECT id FROM {name}")["id"].to_pylist()) == rows
    cut = last_cut(layout)
    assert cut is not None
    assert {table.name: folder for folder, table in cut.tables.items()} == {
        'public."User"': "public.User",
        'public."user"': later,
        'public."USER"': third,
        'public."Other"': fourth,
    }


def test_two_names_of_one_batch_have_a_folder_each(home: Home, spark_options: SparkOptions) -> None:
    tables = [home.table(f"public.{name}", id=pa.int64()) for name in ("orders", "Orders", "ORDERS")]
    home.commit(*(insert(table, id=n) for n, table in enumerate(tables)))
    drain(config_of(home.path, home.stream, spark_options), home.catalog)
    names = ["public.orders", *(f"public.{t.name}~t{t.table_id}" for t in tables[1:])]
    assert [ids(rows_in(home.path, "current", name)) for name in names] == [[0], [1], [2]]
