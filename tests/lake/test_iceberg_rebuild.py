"""Iceberg tables rebuilt whatever happened to them, in place, in spite of kills; a catalog's server behaves as the file."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pyarrow as pa
import pytest
from pyiceberg.table import Table
from tests.lake.landing import append_history
from tests.lake.test_scd2 import at

from millstream.errors import LakeError, LakeTableForeign, LakeUnavailable
from millstream.lake import damaged_tables
from millstream.lake.commit_cuts import commit_cut
from millstream.lake.damaged_tables import (
    check_history,
    damage_of,
    erase_view,
    make_way,
    prepare_rebuild,
    rebuild_view,
    restart_history,
)
from millstream.lake.folded.current_table import fold_table
from millstream.lake.folded.scd2_table import fold_into_versions
from millstream.lake.iceberg.catalog import catalog_of
from millstream.lake.iceberg.names import identifier_of
from millstream.lake.layout import LakeLayout, View
from millstream.lake.maintenance import MaintenanceRules, maintain_table
from millstream.lake.table_format import open_table
from millstream.model.addresses import IN_CATALOG
from millstream.model.ids import SchemaVersion, StreamId
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema
from millstream.testing.errors import coded

Records = Callable[..., pa.RecordBatch]
FOLDED: tuple[View, ...] = ("current", "scd2")
both = pytest.mark.parametrize("view", FOLDED)
KEEPS_NOTHING = MaintenanceRules(keep_s=0, log_retention_s=0)
numbers = itertools.count()


@pytest.fixture(params=["sql", pytest.param("rest", marks=pytest.mark.long)])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> LakeLayout:
    if request.param == "sql":
        catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/iceberg.db"}
        return LakeLayout(str(tmp_path / "lake"), "shop", StreamId(UUID(int=42)), format="iceberg", catalog=catalog)
    catalog = {"type": "rest", "uri": request.getfixturevalue("iceberg_catalog").uri}
    stream = f"rebuilt_{next(numbers)}"
    return LakeLayout(IN_CATALOG, stream, StreamId(UUID(int=42)), format="iceberg", catalog=catalog)


def land(layout: LakeLayout, schema: TableSchema, batch: pa.RecordBatch, n: int) -> None:
    landed = [
        append_history(layout, schema, [batch], Seq(n)),
        fold_table(layout, schema, Seq(n)),
        fold_into_versions(layout, schema, Seq(n)).commit,
    ]
    commit_cut(layout, Seq(n), landed, committed_at=datetime.now(UTC))


@pytest.fixture
def landed(lake: LakeLayout, orders: TableSchema, records: Records) -> LakeLayout:
    """Land rows 1 to 4, then change row 3 and delete row 4."""
    land(lake, orders, records(orders, *(("c", n, {"id": n, "note": "a", **at(1, n)}) for n in range(1, 5))), 4)
    land(lake, orders, records(orders, ("u", 5, {"id": 3, "note": "b", **at(5)}), ("d", 6, {"id": 4, **at(6)})), 6)
    return lake


def table_of(layout: LakeLayout, view: View, schema: TableSchema) -> Table:
    return catalog_of(layout).load_table(identifier_of(layout, layout.table_path(view, schema)))


def rows(layout: LakeLayout, view: View, schema: TableSchema) -> list[tuple[Any, ...]]:
    """Return a view's rows as another program reads them."""
    names = ("id", "note") if view == "current" else ("id", "note", "is_current")
    found = table_of(layout, view, schema).scan().to_arrow().select(names).to_pylist()
    return sorted(tuple(row.values()) for row in found)


def check(layout: LakeLayout, schema: TableSchema) -> None:
    assert rows(layout, "current", schema) == [(1, "a"), (2, "a"), (3, "b")]
    versions = [(1, "a", True), (2, "a", True), (3, "a", False), (3, "b", True), (4, "a", False)]
    assert rows(layout, "scd2", schema) == versions
    assert {damage_of(layout, view, schema) for view in ("history", *FOLDED)} == {None}


def metadata_of(table: Table) -> Path:
    return Path(table.location().removeprefix("file://")) / "metadata"


def hurt(layout: LakeLayout, view: View, schema: TableSchema, damage: str) -> None:
    table = table_of(layout, view, schema)
    snapshot = table.current_snapshot()
    assert snapshot is not None
    match damage:
        case "commit":
            with table.transaction() as transaction, transaction.update_snapshot().fast_append():
                pass
        case "rows":
            table.append(table.scan().to_arrow().slice(0, 1))
        case "files":
            for task in table.scan().plan_files():
                Path(task.file.file_path.removeprefix("file://")).unlink()
        case "manifest":
            Path(snapshot.manifests(table.io)[0].manifest_path.removeprefix("file://")).unlink()
        case "torn manifest":
            file = Path(snapshot.manifests(table.io)[0].manifest_path.removeprefix("file://"))
            file.write_bytes(file.read_bytes()[:100])
        case "list":
            Path(snapshot.manifest_list.removeprefix("file://")).unlink()
        case "metadata":
            Path(table.metadata_location.removeprefix("file://")).unlink()
        case "torn metadata":
            file = Path(table.metadata_location.removeprefix("file://"))
            file.write_bytes(file.read_bytes()[:-100])
        case "entry":
            catalog_of(layout).drop_table(table.name())
    # This process has read what is gone by now, as the process that rebuilds has not.
    from millstream.lake.iceberg import data_files

    data_files._known.clear()


@both
@pytest.mark.parametrize(
    "damage",
    ["rows", *(pytest.param(one, marks=pytest.mark.long) for one in ("files", "manifest", "list")), "torn manifest"],
)
def test_a_damaged_table_is_built_again_in_place(
    landed: LakeLayout, orders: TableSchema, records: Records, view: View, damage: str
) -> None:
    """It was refused, because an Iceberg table can't be moved aside."""
    before = table_of(landed, view, orders)
    hurt(landed, view, orders, damage)
    assert damage_of(landed, view, orders) is not None
    kept = prepare_rebuild(landed, view, orders)
    assert (kept or "").startswith("the tag millstream-set-aside-1 of ") == (damage == "rows")
    rebuild_view(landed, view, orders, Seq(6))
    check(landed, orders)
    after = table_of(landed, view, orders)
    assert after.metadata.table_uuid == before.metadata.table_uuid
    assert after.properties == before.properties
    assert after.schema().identifier_field_ids == before.schema().identifier_field_ids
    snapshot = after.current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    assert snapshot.summary["total-records"] == str(len(rows(landed, view, orders)))
    if damage == "rows":
        old = after.scan().use_ref("millstream-set-aside-1").to_arrow()
        assert old.num_rows == 1 + before.scan().to_arrow().num_rows, "nothing of what was there is lost"
        after.manage_snapshots().remove_tag("millstream-set-aside-1").commit()
    land(landed, orders, records(orders, ("d", 7, {"id": 3, **at(7)})), 7)
    maintain_table(landed, view, orders, now_ms=time.time_ns() // 1_000_000 + 7_200_000, rules=KEEPS_NOTHING)
    assert rows(landed, "current", orders) == [(1, "a"), (2, "a")]
    live = {task.file.file_path for task in table_of(landed, view, orders).scan().plan_files()}
    folder = Path(after.location().removeprefix("file://"))
    assert {f"file://{file}" for file in folder.rglob("*.parquet")} == live


@pytest.mark.sampled
@both
@pytest.mark.parametrize("damage", ["metadata", "torn metadata", "entry"])
def test_a_table_without_readable_metadata_is_moved_aside(
    landed: LakeLayout, orders: TableSchema, records: Records, view: View, damage: str
) -> None:
    if landed.location == IN_CATALOG:
        pytest.skip("its server reads the metadata")
    hurt(landed, view, orders, damage)
    assert damage_of(landed, view, orders) is not None
    assert prepare_rebuild(landed, view, orders) == f"{landed.table_path(view, orders)}.set-aside-1"
    rebuild_view(landed, view, orders, Seq(6))
    check(landed, orders)
    land(landed, orders, records(orders, ("d", 7, {"id": 3, **at(7)})), 7)
    assert rows(landed, "current", orders) == [(1, "a"), (2, "a")]


@pytest.mark.sampled
@both
@pytest.mark.parametrize(
    "point",
    [
        "lake.iceberg.before_clear",
        "lake.rebuild.set_aside",
        "lake.iceberg.before_renew",
        "lake.iceberg.after_renew",
        "lake.before_scd2_commit",
        "lake.after_scd2_commit",
        "lake.rebuild.before_swap",
        "lake.fold_file_written",
        "lake.before_fold_commit",
        "lake.after_fold_commit",
    ],
)
def test_killed_anywhere_a_rebuild_can_be_repeated(
    landed: LakeLayout, orders: TableSchema, records: Records, tmp_path: Path, view: View, point: str
) -> None:
    if view != ("scd2" if "scd2" in point or "swap" in point else "current" if "fold" in point else view):
        pytest.skip("not a point of this view's rebuild")
    hurt(landed, view, orders, "rows")
    (tmp_path / "asked").write_bytes(pickle.dumps((landed, view, orders)))
    program = (
        "import pickle, sys; from millstream.lake.damaged_tables import prepare_rebuild, rebuild_view\n"
        "asked = pickle.load(open(sys.argv[1], 'rb')); prepare_rebuild(*asked); rebuild_view(*asked, 6)\n"
    )
    environment = os.environ | {"MILLSTREAM_FAILPOINTS": point}
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "asked"], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    prepare_rebuild(landed, view, orders)
    rebuild_view(landed, view, orders, Seq(6))
    check(landed, orders)
    assert (f"{landed.stream_name}_building",) not in catalog_of(landed).list_namespaces()
    land(landed, orders, records(orders, ("u", 7, {"id": 2, "note": "c", **at(9)})), 7)
    maintain_table(landed, view, orders, now_ms=time.time_ns() // 1_000_000 + 7_200_000, rules=KEEPS_NOTHING)
    assert rows(landed, "current", orders) == [(1, "a"), (2, "c"), (3, "b")]
    table = table_of(landed, view, orders)
    table.manage_snapshots().remove_tag("millstream-set-aside-1").commit()
    maintain_table(landed, view, orders, now_ms=time.time_ns() // 1_000_000 + 7_200_000, rules=KEEPS_NOTHING)
    folder = metadata_of(table_of(landed, view, orders)).parent
    live = {task.file.file_path for task in table_of(landed, view, orders).scan().plan_files()}
    assert {f"file://{file}" for file in folder.rglob("*.parquet")} == live


def test_rows_of_another_program_in_an_emptied_table_are_set_aside_too(landed: LakeLayout, orders: TableSchema) -> None:
    for n in (1, 2):
        hurt(landed, "current", orders, "rows" if n == 1 else "commit")
        kept = prepare_rebuild(landed, "current", orders)
        assert (kept or "").startswith("the tag millstream-set-aside-1 of ") == (n == 1), "the second has no rows"
    rebuild_view(landed, "current", orders, Seq(6))
    check(landed, orders)
    hurt(landed, "current", orders, "rows")
    assert (prepare_rebuild(landed, "current", orders) or "").startswith("the tag millstream-set-aside-2 of ")


@both
def test_a_table_that_only_cannot_be_read_now_keeps_its_rows(
    landed: LakeLayout, orders: TableSchema, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store answered again a moment later, and the table was emptied until the rebuild's end."""
    before = rows(landed, view, orders)

    def down(layout: LakeLayout, path: str, *_: Any) -> Any:
        if path == layout.table_path(view, orders):
            raise LakeUnavailable("the store doesn't answer", path=path)
        return open_table(layout, path, *_)

    monkeypatch.setattr(damaged_tables, "open_table", down)
    with pytest.raises(LakeUnavailable):
        prepare_rebuild(landed, view, orders)
    assert rows(landed, view, orders) == before


def test_a_persons_data_is_erased_from_what_was_set_aside(landed: LakeLayout, orders: TableSchema) -> None:
    for view in FOLDED:
        hurt(landed, view, orders, "rows")
        prepare_rebuild(landed, view, orders)
    hurt(landed, "history", orders, "commit")
    restart_history(landed, orders, Seq(6))
    for view in ("history", *FOLDED):
        erase_view(landed, view, orders, Seq(6))
        table = table_of(landed, view, orders)
        assert [len(table.refs()), len(table.snapshots())] == [1, 1 if view != "history" else 2]
        assert not list(metadata_of(table).parent.rglob("*.parquet"))


def test_after_a_kill_the_next_fold_builds_the_table(landed: LakeLayout, orders: TableSchema, records: Records) -> None:
    """A table that was emptied counts as one that isn't there, for folds as for queries."""
    for view in FOLDED:
        hurt(landed, view, orders, "rows")
        prepare_rebuild(landed, view, orders)
        path, app = landed.table_path(view, orders), landed.app_id(view, orders.table_id)
        assert open_table(landed, path, app) is None
        assert damage_of(landed, view, orders) is None
    land(landed, orders, records(orders, ("c", 7, {"id": 9, "note": "c", **at(9)})), 7)
    assert [row[0] for row in rows(landed, "current", orders)] == [1, 2, 3, 9]
    assert [row[0] for row in rows(landed, "scd2", orders)] == [1, 2, 3, 3, 4, 9]


@pytest.mark.sampled
@pytest.mark.parametrize("damage", ["commit", "files", "list"])
def test_a_damaged_history_begins_again_with_a_copy(
    landed: LakeLayout, orders: TableSchema, records: Records, damage: str
) -> None:
    hurt(landed, "history", orders, damage)
    with pytest.raises(LakeError, check=coded("lake_history_lost")):
        check_history(landed, orders)
    kept = restart_history(landed, orders, Seq(6))
    assert (kept is None) == (damage == "list")
    assert damage_of(landed, "history", orders) is None
    with pytest.raises(LakeError, check=coded("lake_history_lost"), match="have been dropped"):
        check_history(landed, orders)
    copied = [("r", 10 + n, {"id": n, "note": "r", **at(12, None)}) for n in (1, 2)]
    land(landed, orders, records(orders, ("t", 10, at(12, None)), *copied), 20)
    assert rows(landed, "current", orders) == [(1, "r"), (2, "r")]
    maintain_table(landed, "history", orders, now_ms=time.time_ns() // 1_000_000 + 7_200_000, rules=KEEPS_NOTHING)


def test_a_history_whose_columns_cannot_follow_the_source_gets_new_ones(
    landed: LakeLayout, records: Records, evolved: Callable[..., TableSchema]
) -> None:
    other = replace(evolved(note=pa.int64()), version=SchemaVersion(2))
    for view in ("history", *FOLDED):
        make_way(landed, view, other, Seq(6), forget=True)
    copied = [("r", 11, {"id": 1, "note": 5, **at(12, None)})]
    land(landed, other, records(other, ("t", 10, at(12, None)), *copied), 20)
    assert rows(landed, "current", other) == [(1, 5)]
    assert pa.types.is_int64(table_of(landed, "history", other).scan().to_arrow().schema.field("note").type)


@both
def test_a_table_of_another_stream_is_left_alone(landed: LakeLayout, orders: TableSchema, view: View) -> None:
    other = replace(landed, stream_id=StreamId(uuid4()))
    with pytest.raises(LakeTableForeign, check=coded("lake_of_another_stream")):
        make_way(other, view, orders, Seq(6))
    check(landed, orders)


def test_a_namespace_that_a_kill_left_is_dropped(lake: LakeLayout, orders: TableSchema, records: Records) -> None:
    """The rebuild's table was dropped, and its namespace not; then the namespace stayed."""
    land(lake, orders, records(orders, ("c", 1, {"id": 1, "note": "a", **at(1)})), 1)
    catalog_of(lake).create_namespace(f"{lake.stream_name}_building")
    rebuild_view(lake, "scd2", orders, Seq(1))
    maintain_table(lake, "scd2", orders, now_ms=time.time_ns() // 1_000_000)
    assert (f"{lake.stream_name}_building",) not in catalog_of(lake).list_namespaces()


def test_maintenance_keeps_what_another_program_has_a_tag_for(
    landed: LakeLayout, orders: TableSchema, records: Records
) -> None:
    """Maintenance failed from then on, after it had deleted the tagged snapshot's files."""
    table = table_of(landed, "current", orders)
    snapshot = table.current_snapshot()
    assert snapshot is not None
    table.manage_snapshots().create_tag(snapshot.snapshot_id, "audit").commit()
    for n in (7, 8):
        land(landed, orders, records(orders, ("u", n, {"id": 2, "note": str(n), **at(n)})), n)
        later_ms = time.time_ns() // 1_000_000 + 7_200_000
        for _ in range(2):
            maintain_table(landed, "current", orders, now_ms=later_ms, rules=KEEPS_NOTHING)
    table = table_of(landed, "current", orders)
    assert len(table.snapshots()) == 2
    tagged = table.scan().use_ref("audit").to_arrow().select(["id", "note"]).to_pylist()
    assert sorted(row["note"] for row in tagged) == ["a", "a", "b"]
    table.manage_snapshots().remove_tag("audit").commit()
    for _ in range(2):
        maintain_table(landed, "current", orders, now_ms=later_ms, rules=KEEPS_NOTHING)
    assert len(list(Path(table.location().removeprefix("file://")).rglob("*.parquet"))) == 1
