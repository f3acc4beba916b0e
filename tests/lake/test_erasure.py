"""A table's data erased before another copy: all of it, under each name that the table has had, and no other table's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.lake.landing import append_history
from tests.lake.test_scd2 import at

from millstream.errors import LakeError, LakeTableForeign, LakeUnavailable
from millstream.lake.commit_cuts import commit_cut
from millstream.lake.damaged_tables import check_history, damage_of, erase_view, set_aside
from millstream.lake.data_files import table_in
from millstream.lake.folded.current_table import fold_table
from millstream.lake.folded.scd2_table import fold_into_versions
from millstream.lake.iceberg.catalog import catalog_of
from millstream.lake.iceberg.names import identifier_of
from millstream.lake.layout import BESIDE, LakeLayout, View
from millstream.lake.table_format import open_table
from millstream.model.ids import SchemaVersion, StreamId, TableId
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema
from millstream.testing.errors import coded

Records = Callable[..., pa.RecordBatch]
VIEWS: tuple[View, ...] = ("history", "current", "scd2")


def land(layout: LakeLayout, schema: TableSchema, batch: pa.RecordBatch, n: int) -> None:
    commits = [
        append_history(layout, schema, [batch], Seq(n)),
        fold_table(layout, schema, Seq(n)),
        fold_into_versions(layout, schema, Seq(n)).commit,
    ]
    commit_cut(layout, Seq(n), commits, committed_at=datetime.now(UTC))


def erase(layout: LakeLayout, schema: TableSchema, n: int, *earlier: TableSchema) -> None:
    for view in VIEWS:
        erase_view(layout, view, schema, Seq(n), earlier=earlier)


def rows(layout: LakeLayout, view: View, schema: TableSchema) -> list[dict[str, Any]]:
    opened = open_table(layout, layout.table_path(view, schema), layout.app_id(view, schema.table_id))
    return [] if opened is None else list(opened.dataset().to_table().sort_by("id").to_pylist())


def notes(layout: LakeLayout) -> set[str | None]:
    """Return the values of a column in all files of the lake, also those that no commit names."""
    files = [file for file in Path(layout.root).rglob("*.parquet") if "_delta_log" not in file.parts]
    return {
        note
        for file in files
        if "note" in (held := pq.ParquetFile(file).read()).column_names
        for note in held.column("note").to_pylist()
    }


@pytest.fixture
def taken_over(layout: LakeLayout, orders: TableSchema, records: Records) -> TableSchema:
    """Let another table take over the name of orders, whose records wait in its history; return it."""
    kept = [("c", n, {"id": n, "note": "kept", **at(1, n)}) for n in (1, 2)]
    land(layout, orders, records(orders, *kept), 2)
    new = replace(orders, table_id=TableId(9))
    land(layout, new, records(new, ("c", 3, {"id": 77, "note": "secret", **at(3)})), 3)
    return new


def test_records_of_another_table_that_wait_under_the_name_stay(
    layout: LakeLayout, orders: TableSchema, records: Records, taken_over: TableSchema
):
    erase(layout, taken_over, 4, taken_over)
    assert notes(layout) == {"kept"}
    erase(layout, taken_over, 5, taken_over)
    old = replace(orders, name="orders_old")
    land(layout, old, records(old, ("c", 6, {"id": 6, "note": "later", **at(6)})), 6)
    assert [row["id"] for row in rows(layout, "current", old)] == [1, 2, 6]
    with pytest.raises(LakeError, check=coded("lake_history_lost"), match="up to 5 have been dropped"):
        check_history(layout, taken_over)
    copied = [("t", 7, at(7, None)), ("r", 8, {"id": 78, "note": "copied", **at(7, None)})]
    land(layout, taken_over, records(taken_over, *copied), 8)
    for view in ("current", "scd2"):
        assert [row["id"] for row in rows(layout, view, taken_over)] == [78]


def test_records_of_another_table_in_a_damaged_history_stay_in_a_folder_aside(
    layout: LakeLayout, orders: TableSchema, taken_over: TableSchema
):
    path = Path(layout.table_path("history", taken_over))
    (path / "_delta_log" / "00000000000000000000.json").unlink()
    erase_view(layout, "history", taken_over, Seq(4))
    aside = path.with_name(f"{path.name}.set-aside-1")
    assert {table_in(str(file)) for file in aside.rglob("part-*.parquet")} == {orders.table_id}
    assert damage_of(layout, "history", taken_over) is None


def test_nothing_is_left_under_an_earlier_name(layout: LakeLayout, orders: TableSchema, records: Records):
    secret = ("c", 1, {"id": 1, "note": "secret", **at(1)})
    land(layout, orders, records(orders, secret, ("d", 2, {"id": 1, **at(2)})), 2)
    unreadable = set_aside(layout, layout.table_path("current", orders))
    (Path(str(unreadable)) / "_delta_log" / "00000000000000000000.json").unlink()
    beside = Path(layout.table_path("scd2", orders) + BESIDE)
    beside.mkdir()
    pq.write_table(pa.table({"note": ["secret"]}), beside / "part-1.parquet")
    renamed = replace(orders, name="clients", version=SchemaVersion(2))
    land(layout, renamed, records(renamed, ("c", 3, {"id": 2, "note": "secret", **at(3)})), 3)
    erase(layout, renamed, 4, orders, renamed)
    assert notes(layout) == set()
    assert [folder.name for folder in Path(layout.root, "history").iterdir()] == ["public.clients"]
    assert not any(Path(layout.root, view, "public.orders").exists() for view in VIEWS)


def test_an_earlier_name_that_another_table_has_keeps_that_tables_rows(
    layout: LakeLayout, orders: TableSchema, taken_over: TableSchema
):
    old = replace(orders, name="orders_old", version=SchemaVersion(2))
    erase(layout, old, 4, orders, old)
    assert [row["id"] for row in rows(layout, "current", taken_over)] == [77]
    history = Path(layout.table_path("history", taken_over))
    assert {table_in(str(file)) for file in history.rglob("part-*.parquet")} == {taken_over.table_id}
    assert all(damage_of(layout, view, taken_over) is None for view in VIEWS)


def test_what_cannot_be_read_under_a_name_that_another_table_has_is_not_deleted(
    layout: LakeLayout, orders: TableSchema, taken_over: TableSchema
):
    """It was the other table's, moved aside by its rebuild, and taken for this one's."""
    aside = Path(str(set_aside(layout, layout.table_path("current", taken_over))))
    begin = aside / "_delta_log" / "00000000000000000000.json"
    begin.rename(aside / "begin")
    fold_table(layout, taken_over, Seq(3))
    old = replace(orders, name="orders_old", version=SchemaVersion(2))
    with pytest.raises(LakeUnavailable, match="may have rows of another table"):
        erase_view(layout, "current", old, Seq(4), earlier=[orders, old])
    assert aside.exists()
    (aside / "begin").rename(begin)
    erase_view(layout, "current", old, Seq(4), earlier=[orders, old])
    assert aside.exists(), "it can be read again, and is the other table's"


@pytest.fixture
def iceberg(layout: LakeLayout, tmp_path: Path) -> LakeLayout:
    """Return a lake of Iceberg tables."""
    catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/lake"}
    return replace(layout, format="iceberg", catalog=catalog)


def manifests(layout: LakeLayout, view: View, schema: TableSchema) -> list[str]:
    """Return the manifests in a table's folder, which have bounds of columns."""
    return sorted(file.name for file in Path(layout.table_path(view, schema), "metadata").glob("*-m*.avro"))


def test_an_iceberg_table_is_emptied_in_all_its_snapshots(iceberg: LakeLayout, orders: TableSchema, records: Records):
    """It was refused. The table stays in the catalog, as do the rights to it."""
    land(iceberg, orders, records(orders, ("c", 1, {"id": 1, "note": "secret", **at(1)})), 1)
    old = open_table(iceberg, iceberg.table_path("current", orders), iceberg.app_id("current", orders.table_id))
    assert old is not None
    land(iceberg, orders, records(orders, ("d", 2, {"id": 1, **at(2)})), 2)
    assert notes(iceberg) >= {"secret"}
    for _ in range(2):  # a second call completes the first
        erase(iceberg, orders, 4, orders)
        assert notes(iceberg) == set()
        assert [manifests(iceberg, view, orders) for view in VIEWS] == [[], [], []]
        for view in VIEWS:
            path, app = iceberg.table_path(view, orders), iceberg.app_id(view, orders.table_id)
            opened = open_table(iceberg, path, app)
            assert opened is not None
            assert (opened.held, opened.n) == ((True, Seq(4)) if view == "history" else (False, None))
            assert open_table(iceberg, path, app, version=old.version) is None
    with pytest.raises(LakeError, check=coded("lake_history_lost"), match="up to 4 have been dropped"):
        check_history(iceberg, orders)
    copied = [("t", 5, at(5, None)), ("r", 6, {"id": 78, "note": "copied", **at(5, None)})]
    land(iceberg, orders, records(orders, *copied), 6)
    for view in ("current", "scd2"):
        assert [row["id"] for row in rows(iceberg, view, orders)] == [78]
    assert all(damage_of(iceberg, view, orders) is None for view in VIEWS)


def test_records_of_another_iceberg_table_under_the_name_stay(
    iceberg: LakeLayout, orders: TableSchema, records: Records
):
    kept = [("c", n, {"id": n, "note": "kept", **at(1, n)}) for n in (1, 2)]
    land(iceberg, orders, records(orders, *kept), 2)
    new = replace(orders, table_id=TableId(9))
    land(iceberg, new, records(new, ("c", 3, {"id": 77, "note": "secret", **at(3)})), 3)
    before = manifests(iceberg, "history", new)
    erase(iceberg, new, 4, new)
    assert notes(iceberg) == {"kept"}
    left = manifests(iceberg, "history", new)
    assert len(left) == 1 < len(before)
    old = replace(orders, name="orders_old")
    land(iceberg, old, records(old, ("c", 6, {"id": 6, "note": "later", **at(6)})), 6)
    assert [row["id"] for row in rows(iceberg, "current", old)] == [1, 2, 6]


def test_nothing_of_an_iceberg_table_is_left_under_an_earlier_name(
    iceberg: LakeLayout, orders: TableSchema, records: Records
):
    land(iceberg, orders, records(orders, ("c", 1, {"id": 1, "note": "secret", **at(1)})), 1)
    renamed = replace(orders, name="clients", version=SchemaVersion(2))
    land(iceberg, renamed, records(renamed, ("c", 3, {"id": 2, "note": "secret", **at(3)})), 3)
    erase(iceberg, renamed, 4, orders, renamed)
    assert notes(iceberg) == set()
    assert [manifests(iceberg, view, table) for view in VIEWS for table in (orders, renamed)] == [[]] * 6


def test_a_tag_of_another_program_keeps_an_iceberg_table_from_being_erased(
    iceberg: LakeLayout, orders: TableSchema, records: Records
):
    land(iceberg, orders, records(orders, ("c", 1, {"id": 1, "note": "secret", **at(1)})), 1)
    table = catalog_of(iceberg).load_table(identifier_of(iceberg, iceberg.table_path("current", orders)))
    snapshot = table.current_snapshot()
    assert snapshot is not None
    table.manage_snapshots().create_tag(snapshot.snapshot_id, "audit").commit()
    with pytest.raises(LakeError, match="keep older rows: audit"):
        erase_view(iceberg, "current", orders, Seq(2))
    table.manage_snapshots().remove_tag("audit").commit()
    erase_view(iceberg, "current", orders, Seq(2))
    assert rows(iceberg, "current", orders) == []


def test_a_table_that_another_stream_made_is_not_erased(iceberg: LakeLayout, orders: TableSchema, records: Records):
    land(iceberg, orders, records(orders, ("c", 1, {"id": 1, "note": "kept", **at(1)})), 1)
    other = replace(iceberg, stream_id=StreamId(uuid4()))
    for view in VIEWS:
        with pytest.raises(LakeTableForeign):
            erase_view(other, view, orders, Seq(2))
    assert rows(iceberg, "current", orders)
