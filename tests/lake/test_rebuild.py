"""Tables rebuilt from their history: whatever happened to them, in one commit, in spite of kills."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, write_deltalake
from tests.lake.landing import append_history
from tests.lake.test_scd2 import at
from tests.lake.test_versions import seconds

from millstream.errors import LakeError, LakeTableForeign
from millstream.lake import damaged_tables
from millstream.lake.commit_cuts import commit_cut
from millstream.lake.damaged_tables import check_history, damage_of, prepare_rebuild, rebuild_view, restart_history
from millstream.lake.folded.current_table import FoldSizes, fold_table
from millstream.lake.folded.scd2_table import fold_into_versions
from millstream.lake.layout import LakeLayout, View
from millstream.lake.maintenance import MaintenanceRules, maintain_table
from millstream.lake.table_format import OpenTable
from millstream.model.ids import SchemaVersion
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema
from millstream.testing.errors import coded

Records = Callable[..., pa.RecordBatch]
VIEWS: tuple[View, ...] = ("current", "scd2")
both = pytest.mark.parametrize("view", VIEWS)


def land(layout: LakeLayout, schema: TableSchema, batch: pa.RecordBatch, n: int) -> None:
    commit = append_history(layout, schema, [batch], Seq(n))
    commit_cut(layout, Seq(n), [commit], committed_at=datetime.now(UTC))


def fold(layout: LakeLayout, schema: TableSchema, n: int, **sizes: int) -> None:
    fold_table(layout, schema, Seq(n), sizes=FoldSizes(**sizes))
    fold_into_versions(layout, schema, Seq(n), sizes=FoldSizes(**sizes))


def ids(layout: LakeLayout, schema: TableSchema) -> list[int]:
    rows = DeltaTable(layout.table_path("current", schema)).to_pyarrow_table()
    return sorted(rows.column("id").to_pylist())


@pytest.fixture
def landed(layout: LakeLayout, orders: TableSchema, records: Records) -> LakeLayout:
    """Land rows 1 to 8, then change row 3 and delete row 4; fold in two steps."""
    land(layout, orders, records(orders, *(("c", n, {"id": n, "note": "a", **at(1, n)}) for n in range(1, 9))), 8)
    fold(layout, orders, 8)
    land(layout, orders, records(orders, ("u", 9, {"id": 3, "note": "b", **at(5)}), ("d", 10, {"id": 4, **at(6)})), 10)
    fold(layout, orders, 10)
    return layout


def check(layout: LakeLayout, orders: TableSchema) -> None:
    assert ids(layout, orders) == [1, 2, 3, 5, 6, 7, 8]
    changed = {3: [(1, 5), (5, None)], 4: [(1, 6)]}
    assert seconds(layout, orders) == [(n, *span) for n in range(1, 9) for span in changed.get(n, [(1, None)])]


@both
def test_a_table_in_order_is_replaced_in_one_commit_under_the_eyes_of_its_readers(
    landed: LakeLayout, orders: TableSchema, view: View
):
    path = landed.table_path(view, orders)
    reader = DeltaTable(path)
    rows = reader.to_pyarrow_table().num_rows
    assert prepare_rebuild(landed, view, orders) is None
    commit = rebuild_view(landed, view, orders, Seq(10))
    assert (commit.version, commit.n) == (reader.version() + 1, 10)
    assert reader.to_pyarrow_table().num_rows == rows, "who has it open goes on reading"
    assert not set(DeltaTable(path).file_uris()) & set(reader.file_uris())
    check(landed, orders)
    assert [folder.name for folder in Path(path).parent.iterdir()] == ["public.orders"]


@both
def test_a_table_that_somebody_else_wrote_into_is_moved_aside_and_built_again(
    landed: LakeLayout, orders: TableSchema, records: Records, view: View
):
    path = landed.table_path(view, orders)
    write_deltalake(path, DeltaTable(path).to_pyarrow_table().slice(0, 1), mode="append")
    land(landed, orders, records(orders, ("c", 11, {"id": 11, "note": "a", **at(11)})), 11)
    folds = {"current": fold_table, "scd2": fold_into_versions}[view]
    with pytest.raises(LakeTableForeign) as caught:
        folds(landed, orders, Seq(11))
    assert "millstream pipeline rebuild" in caught.value.hint
    aside = prepare_rebuild(landed, view, orders)
    assert aside == f"{path}.set-aside-1"
    rebuild_view(landed, view, orders, Seq(10))
    check(landed, orders)
    assert DeltaTable(aside).to_pyarrow_table().num_rows > 0, "nothing of what was there is lost"
    folds(landed, orders, Seq(11))
    assert damage_of(landed, view, orders) is None


@both
@pytest.mark.parametrize("damage", ["files", "log", "folder"])
def test_a_table_that_was_vacuumed_to_nothing_broken_or_deleted_is_built_again(
    landed: LakeLayout, orders: TableSchema, view: View, damage: str
):
    path = Path(landed.table_path(view, orders))
    if damage == "files":
        for file in [*path.glob("*.parquet"), *path.glob("*/*.parquet")]:
            file.unlink()
        assert "files are gone" in str(damage_of(landed, view, orders))
    elif damage == "log":
        (path / "_delta_log" / "00000000000000000000.json").unlink()
        assert damage_of(landed, view, orders) is not None
    else:
        shutil.rmtree(path)
    prepare_rebuild(landed, view, orders)
    rebuild_view(landed, view, orders, Seq(10))
    check(landed, orders)
    assert damage_of(landed, view, orders) is None


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("view", "point"),
    [
        ("current", "lake.fold_file_written"),
        ("current", "lake.before_fold_commit"),
        ("current", "lake.after_fold_commit"),
        ("scd2", "lake.after_scd2_commit"),  # of the table that is built next to it
        ("scd2", "lake.rebuild.before_swap"),
        ("scd2", "lake.after_scd2_commit:2"),
    ],
)
def test_killed_anywhere_the_old_table_or_the_new_one_is_there_and_nothing_is_left_behind(
    landed: LakeLayout, orders: TableSchema, records: Records, tmp_path: Path, view: View, point: str
):
    (tmp_path / "asked").write_bytes(pickle.dumps((landed, view, orders)))
    program = (
        "import pickle, sys; from millstream.lake.damaged_tables import rebuild_view\n"
        "rebuild_view(*pickle.load(open(sys.argv[1], 'rb')), 10)\n"
    )
    environment = os.environ | {"MILLSTREAM_FAILPOINTS": point}
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "asked"], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    check(landed, orders)
    maintain_table(landed, view, orders, now_ms=time.time_ns() // 1_000_000)
    assert [left.name for left in Path(landed.table_path(view, orders)).parent.iterdir()] == ["public.orders"]
    rebuild_view(landed, view, orders, Seq(10))
    check(landed, orders)
    land(landed, orders, records(orders, ("u", 11, {"id": 8, "note": "c", **at(9)})), 11)
    fold(landed, orders, 11)
    maintain_table(landed, view, orders, now_ms=time.time_ns() // 1_000_000 + 10_000, rules=MaintenanceRules(keep_s=0))
    folder = Path(landed.table_path(view, orders))
    files = {str(file) for file in folder.rglob("*.parquet") if "_delta_log" not in file.parts}
    assert files == {uri.removeprefix("file://") for uri in DeltaTable(folder).file_uris()}
    assert [left.name for left in folder.parent.iterdir()] == ["public.orders"]


def test_a_history_that_is_damaged_begins_anew_with_a_copy_of_the_source(
    landed: LakeLayout, orders: TableSchema, records: Records
):
    path = Path(landed.table_path("history", orders))
    land(landed, orders, records(orders, ("c", 11, {"id": 11, "note": "a", **at(7)})), 11)
    for file in path.glob("*/*.parquet"):
        file.unlink()
    with pytest.raises(LakeError, check=coded("lake_history_lost")) as caught:
        check_history(landed, orders)
    assert "--from source" in caught.value.hint
    aside = restart_history(landed, orders, Seq(11))
    assert aside == f"{path}.set-aside-1"
    assert restart_history(landed, orders, Seq(11)) is None, "what is in order stays"
    # Row 11 came and was never folded, the delete of row 5 was never seen; the copy shows both.
    kept = (1, 2, 3, 6, 7, 8)
    copied = [("r", 20 + n, {"id": n, "note": "b" if n == 3 else "a", **at(12, None)}) for n in kept]
    land(landed, orders, records(orders, ("t", 20, at(12, None)), *copied), 30)
    fold(landed, orders, 30)
    assert ids(landed, orders) == list(kept)
    assert [row for row in seconds(landed, orders) if row[2] is None] == [(n, 5 if n == 3 else 1, None) for n in kept]
    with pytest.raises(LakeError, check=coded("lake_history_lost"), match="have been dropped"):
        check_history(landed, orders)


def test_a_copy_that_follows_an_earlier_one_shows_in_one_commit_however_large(
    landed: LakeLayout, orders: TableSchema, records: Records
):
    land(landed, orders, records(orders, ("u", 11, {"id": 1, "note": "z", **at(8)})), 11)
    land(landed, orders, records(orders, ("t", 12, at(9, None)), ("r", 13, {"id": 1, "note": "z", **at(9, None)})), 13)
    for n in range(14, 20):
        land(landed, orders, records(orders, ("r", n, {"id": n, "note": "z", **at(9, None)})), n)
    before = {view: DeltaTable(landed.table_path(view, orders)).version() for view in VIEWS}
    fold(landed, orders, 19, rows_max=3, build_rows_min=0)
    for view in VIEWS:
        path = landed.table_path(view, orders)
        wanted = None if view == "current" else pc.field("is_current")
        counts = [
            DeltaTable(path, version=version).to_pyarrow_dataset().count_rows(filter=wanted)
            for version in range(before[view] + 1, DeltaTable(path).version() + 1)
        ]
        assert set(counts) == {7}, "never a part of the table"


@pytest.mark.parametrize("maintained", [False, True])
def test_a_history_that_was_set_back_is_an_error_with_the_way_out(
    landed: LakeLayout, orders: TableSchema, records: Records, *, maintained: bool
):
    """If its newest commit is lost, or its folder was restored, later records must not follow a gap."""
    log = Path(landed.table_path("history", orders), "_delta_log")
    max(log.glob("*.json")).unlink()
    if maintained:
        maintain_table(
            landed, "history", orders, now_ms=time.time_ns() // 10**6, rules=MaintenanceRules(compact_files=2)
        )
    batch = records(orders, ("c", 11, {"id": 11, "note": "c", **at(7)}))
    with pytest.raises(
        LakeError, check=coded("lake_history_lost"), match="was set back: it ends at 8, and went to 10 before"
    ) as caught:
        append_history(landed, orders, [batch], Seq(11))
    assert "--from source" in caught.value.hint
    with pytest.raises(LakeError, check=coded("lake_history_lost"), match="set back"):
        check_history(landed, orders)
    assert restart_history(landed, orders, Seq(10)) is not None
    assert append_history(landed, orders, [batch], Seq(11)).rows == 1
    assert damage_of(landed, "history", orders) is None


def test_a_history_that_grows_during_the_look_is_whole(
    landed: LakeLayout, orders: TableSchema, records: Records, monkeypatch: pytest.MonkeyPatch
):
    """The last cut may name a version that comes after the one looked at."""
    opening = damaged_tables.open_table
    batches = iter([records(orders, ("c", 11, {"id": 11, **at(7)}))])

    def open_before_the_next_batch(layout: LakeLayout, path: str, app: str) -> OpenTable | None:
        opened = opening(layout, path, app)
        for batch in batches:
            land(landed, orders, batch, 11)
        return opened

    monkeypatch.setattr(damaged_tables, "open_table", open_before_the_next_batch)
    assert damage_of(landed, "history", orders) is None


def test_a_renamed_table_whose_records_are_gone_does_not_begin_without_them(
    landed: LakeLayout, orders: TableSchema, records: Records
):
    shutil.rmtree(landed.table_path("history", orders))
    renamed = replace(orders, name="sales", version=SchemaVersion(2))
    with pytest.raises(LakeError, check=coded("lake_history_lost"), match=r"public\.orders was moved away"):
        append_history(landed, renamed, [records(renamed, ("c", 11, {"id": 11, **at(7)}))], Seq(11))
