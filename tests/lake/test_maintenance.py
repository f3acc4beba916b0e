"""Maintenance changes no row, doesn't disturb readers of retained versions, and can run during writes."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from tests.lake.landing import append_history

from millstream import failpoints
from millstream.errors import LakeConflict, LakeError
from millstream.lake import maintenance
from millstream.lake.commit_cuts import commit_cut, last_cut
from millstream.lake.folded.current_table import Fold, begin_fold, fold_table
from millstream.lake.history_folder import history_from
from millstream.lake.history_retention import HistoryBound, drop_history
from millstream.lake.layout import LakeLayout, View
from millstream.lake.maintenance import MaintenanceRules, maintain_cuts, maintain_table
from millstream.lake.table_format import open_table
from millstream.model.ids import TableId
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema

Records = Callable[..., pa.RecordBatch]


def files(layout: LakeLayout, view: View, schema: TableSchema) -> int:
    return len(list(Path(layout.table_path(view, schema)).rglob("*.parquet"))) - len(
        list(Path(layout.table_path(view, schema), "_delta_log").rglob("*.parquet"))
    )


def write(layout: LakeLayout, schema: TableSchema, records: Records, first: int, end: int) -> None:
    for n in range(first, end):
        append_history(layout, schema, [records(schema, ("c", n, {"id": n}))], Seq(n))
        fold_table(layout, schema, Seq(n))


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@pytest.mark.long
def test_small_files_become_few_and_replaced_ones_go_once_readers_are_done(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    write(layout, orders, records, 1, 31)
    young = maintain_table(layout, "current", orders, now_ms=now_ms())
    assert (young.files_compacted, young.files_deleted) == (0, 0)
    assert files(layout, "current", orders) >= 30

    done = maintain_table(layout, "history", orders, now_ms=now_ms(), rules=MaintenanceRules(compact_files=20))
    assert done.files_compacted == 30
    assert len(DeltaTable(layout.table_path("history", orders)).file_uris()) == 1
    write(layout, orders, records, 31, 33)

    # A minute more than files are kept: the commit that compacts history comes after this moment, on any machine.
    in_a_while = now_ms() + 360_000
    assert maintain_table(layout, "current", orders, now_ms=in_a_while).files_deleted >= 30
    assert maintain_table(layout, "current", orders, now_ms=in_a_while).files_deleted == 0
    assert maintain_table(layout, "history", orders, now_ms=in_a_while).files_deleted == 33
    assert files(layout, "current", orders) == 1
    write(layout, orders, records, 33, 35)
    for view in ("history", "current"):
        assert DeltaTable(layout.table_path(view, orders)).to_pyarrow_table().num_rows == 34


def test_files_of_a_version_in_use_and_files_not_yet_committed_stay(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    write(layout, orders, records, 1, 5)
    cut = now_ms()
    opened = DeltaTable(layout.table_path("current", orders))
    uncommitted = Path(layout.table_path("current", orders), "part-being-written.parquet")
    uncommitted.write_bytes(b"")
    while now_ms() == cut:  # a later millisecond: Delta's commits are stamped in them
        continue
    write(layout, orders, records, 5, 8)
    assert maintain_table(layout, "current", orders, now_ms=cut + 300_000).files_deleted > 0
    assert opened.to_pyarrow_table().num_rows == 4
    assert uncommitted.exists()


def test_old_days_go_from_history_once_current_has_what_they_made(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    write(layout, orders, records, 1, 6)
    append_history(layout, orders, [records(orders, ("c", 6, {"id": 6}), ("c", 7, {"id": 7}))], Seq(7))
    path, app = layout.table_path("history", orders), layout.app_id("history", orders.table_id)
    assert drop_history(layout, orders, HistoryBound(Seq(5), date(2026, 3, 1))) == 0
    assert drop_history(layout, orders, HistoryBound(Seq(5), date(2026, 3, 2))) == 2, (
        "even numbers are of the first day"
    )
    opened = open_table(layout, path, app)
    assert opened is not None
    assert sorted(opened.dataset().to_table().column("__seq").to_pylist()) == [1, 3, 5, 6, 7]
    assert history_from(opened) == 4
    assert drop_history(layout, orders, HistoryBound(Seq(5))) == 3
    fold_table(layout, orders, Seq(7))
    assert DeltaTable(layout.table_path("current", orders)).to_pyarrow_table().num_rows == 7
    shutil.rmtree(layout.table_path("current", orders))
    with pytest.raises(LakeError, match="was dropped up to 5") as caught:
        fold_table(layout, orders, Seq(7))
    assert "rebuild public.orders --from source" in caught.value.hint


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_old_records_of_a_table_that_lost_its_name_stay_until_it_has_taken_them_along(
    layout: LakeLayout, orders: TableSchema, records: Records, kind: Literal["delta", "iceberg"], tmp_path: Path
):
    """Retention dropped them with those of the name's next table, and the table could never be folded again."""
    if kind == "iceberg":
        layout = replace(layout, format=kind, catalog={"type": "sql", "uri": f"sqlite:///{tmp_path}/iceberg.db"})
    write(layout, orders, records, 1, 3)
    new = replace(orders, table_id=TableId(9))
    write(layout, new, records, 3, 5)
    last = [append_history(layout, new, [], Seq(4)), fold_table(layout, new, Seq(4))]
    commit_cut(layout, Seq(4), last, committed_at=datetime.now(UTC))
    bound = HistoryBound(Seq(4), date(2026, 4, 1), frozenset({orders.table_id, new.table_id}))
    assert drop_history(layout, new, bound) == 2
    old = replace(orders, name="orders_old")
    write(layout, old, records, 5, 6)
    current = open_table(layout, layout.table_path("current", old), layout.app_id("current", old.table_id))
    assert current is not None
    assert sorted(current.dataset().to_table().column("id").to_pylist()) == [1, 2, 5]
    assert drop_history(layout, new, replace(bound, waiting=frozenset())) == 2
    assert drop_history(layout, old, replace(bound, upto=Seq(5))) == 3


@pytest.mark.siege
def test_cuts_lie_in_few_files_and_the_many_go(layout: LakeLayout, orders: TableSchema, records: Records):
    commit = append_history(layout, orders, [records(orders, ("c", 1, {"id": 1}))], Seq(1))
    for n in range(1, 506):
        commit_cut(layout, Seq(n), [replace(commit, n=Seq(n))], committed_at=datetime.now(UTC))
    assert maintain_cuts(layout, now_ms=now_ms()) == 0
    assert len(DeltaTable(layout.commits_path).file_uris()) == 1
    assert maintain_cuts(layout, now_ms=now_ms() + 301_000) == 505
    cut = last_cut(layout)
    assert cut is not None
    assert (cut.n, cut.number) == (505, 505)


def test_a_table_that_is_not_there_needs_nothing(layout: LakeLayout, orders: TableSchema):
    assert maintain_table(layout, "current", orders, now_ms=now_ms()).files_deleted == 0


def test_what_an_interrupted_fold_left_goes_and_what_one_under_way_writes_stays(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    write(layout, orders, records, 1, 4)
    append_history(layout, orders, [records(orders, ("c", 4, {"id": 4}))], Seq(4))
    interrupted, under_way = (begin_fold(layout, orders, Seq(4)) for _ in range(2))
    assert isinstance(interrupted, Fold)
    assert isinstance(under_way, Fold)
    interrupted.write(0)
    written = under_way.write(0)
    later = now_ms() + 301_000
    before = files(layout, "current", orders)
    maintain_table(layout, "current", orders, now_ms=later)
    assert files(layout, "current", orders) == 3, "the live file, and those that may yet be committed"
    assert before > 3
    under_way.commit(written)
    with pytest.raises(LakeConflict):
        interrupted.commit(interrupted.write(0))
    maintain_table(layout, "current", orders, now_ms=now_ms() + 301_000)
    assert files(layout, "current", orders) == 1
    assert DeltaTable(layout.table_path("current", orders)).to_pyarrow_table().num_rows == 4


def test_files_that_a_kept_cut_names_stay_however_old_they_are(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    write(layout, orders, records, 1, 5)
    opened = DeltaTable(layout.table_path("current", orders))
    write(layout, orders, records, 5, 8)
    in_a_while = now_ms() + 301_000
    maintain_table(layout, "current", orders, now_ms=in_a_while, spared=opened.version())
    assert opened.to_pyarrow_table().num_rows == 4
    maintain_table(layout, "current", orders, now_ms=in_a_while)
    with pytest.raises(FileNotFoundError):
        opened.to_pyarrow_table()


def test_replaced_files_that_came_after_the_last_cut_stay_as_long_as_others(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    """A merged file was deleted in the very run in which it was replaced, under a reader that had just opened it."""
    day = date(2026, 3, 1)
    landed = [
        append_history(layout, orders, [records(orders, ("c", n, {"id": n, "__commit_date": day}))], Seq(n))
        for n in range(1, 4)
    ]
    spared = landed[-1].version
    maintain_table(layout, "history", orders, now_ms=now_ms(), rules=MaintenanceRules(compact_files=3), spared=spared)
    path, app = layout.table_path("history", orders), layout.app_id("history", orders.table_id)
    opened = open_table(layout, path, app)
    assert opened is not None
    (merged,) = opened.files().column("path").to_pylist()
    between = now_ms()
    hours_ago_s = between / 1000 - 7_200
    os.utime(Path(path, merged), (hours_ago_s, hours_ago_s))
    while now_ms() == between:  # a later millisecond: Delta's commits are stamped in them
        continue
    assert drop_history(layout, orders, HistoryBound(Seq(3))) == 1
    maintain_table(layout, "history", orders, now_ms=between + 300_000, spared=spared)
    assert opened.dataset().to_table().num_rows == 3
    maintain_table(layout, "history", orders, now_ms=now_ms() + 300_000, spared=spared)
    assert not Path(path, merged).exists()
    assert files(layout, "history", orders) == 3, "those that the cut names"


def test_compaction_keeps_records_in_order_of_their_numbers_and_recent_days_apart(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    write(layout, orders, records, 1, 12)
    march_third = int(datetime(2026, 3, 3, 12, tzinfo=UTC).timestamp() * 1000)
    maintain_table(layout, "history", orders, now_ms=march_third, rules=MaintenanceRules(compact_files=4))
    assert bounds(layout, orders) == [(1, 11), (2, 10)], "the second is yesterday, the first is over"
    table = DeltaTable(layout.table_path("history", orders))
    assert table.to_pyarrow_table().num_rows == 11
    assert not [action for action in pa.table(table.get_add_actions()).to_pylist() if action["num_records"] is None]


def bounds(layout: LakeLayout, schema: TableSchema) -> list[tuple[int, int]]:
    """The lowest and the greatest number in each file of history."""
    found = pa.table(DeltaTable(layout.table_path("history", schema)).get_add_actions(flatten=True)).to_pylist()
    return sorted((f["min.__seq"], f["max.__seq"]) for f in found)


def at_noon(day: date) -> int:
    return int(datetime(day.year, day.month, day.day, 12, tzinfo=UTC).timestamp() * 1000)


def append_daily(
    layout: LakeLayout, schema: TableSchema, records: Records, first: date, last: date, **values: object
) -> int:
    """Append a record a day and look at the table each day, as a pipeline does; return the greatest number of files."""
    opened = open_table(layout, layout.table_path("history", schema), layout.app_id("history", schema.table_id))
    n = 0 if opened is None or opened.n is None else int(opened.n)
    most = 0
    for number in range((last - first).days + 1):
        n, day = n + 1, first + timedelta(days=number)
        append_history(layout, schema, [records(schema, ("c", n, {"id": n, "__commit_date": day, **values}))], Seq(n))
        maintain_table(layout, "history", schema, now_ms=at_noon(day))
        most = max(most, len(bounds(layout, schema)))
    return most


@pytest.mark.long
def test_a_small_table_gets_a_file_a_month(layout: LakeLayout, orders: TableSchema, records: Records):
    most = append_daily(layout, orders, records, date(2026, 1, 1), date(2026, 3, 2))
    assert most <= 1 + 12, "a month's file and those of days that wait"
    append_daily(layout, orders, records, date(2026, 3, 3), date(2026, 3, 3))
    files_now = bounds(layout, orders)
    assert files_now[:2] == [(1, 31), (32, 59)], "January and February"
    rows = DeltaTable(layout.table_path("history", orders)).to_pyarrow_table()
    assert sorted(rows.column("__seq").to_pylist()) == list(range(1, 63))
    assert [f"{day:%Y-%m}" for day in rows["__commit_date"].to_pylist()] == rows["__commit_month"].to_pylist()


def test_a_large_day_keeps_files_of_its_own(
    layout: LakeLayout, orders: TableSchema, records: Records, monkeypatch: pytest.MonkeyPatch
):
    append_daily(layout, orders, records, date(2026, 1, 1), date(2026, 1, 4))
    path = layout.table_path("history", orders)
    sizes = pa.table(DeltaTable(path).get_add_actions(flatten=True)).column("size_bytes").to_pylist()
    # Nine appends make the fifth a large day.
    monkeypatch.setattr(maintenance, "_SMALL_BYTES", 3 * max(sizes))
    fifth = [records(orders, ("c", n, {"id": n, "__commit_date": date(2026, 1, 5)})) for n in range(5, 14)]
    for batch in fifth:
        append_history(layout, orders, [batch], Seq(batch.column("__seq")[0].as_py()))
    append_history(layout, orders, [records(orders, ("c", 14, {"id": 14, "__commit_date": date(2026, 1, 6)}))], Seq(14))
    maintain_table(layout, "history", orders, now_ms=at_noon(date(2026, 2, 20)))
    assert bounds(layout, orders) == [(1, 14), (5, 13)]


@pytest.mark.long
def test_readers_filter_by_day_in_files_that_have_many(layout: LakeLayout, orders: TableSchema, records: Records):
    append_daily(layout, orders, records, date(2026, 1, 1), date(2026, 1, 31))
    undated = records(orders, ("c", 40, {"id": 40, "__commit_date": None}), ("c", 41, {"id": 41}))
    append_history(layout, orders, [undated], Seq(41))
    maintain_table(layout, "history", orders, now_ms=at_noon(date(2026, 2, 3)))
    table = DeltaTable(layout.table_path("history", orders))
    dataset = table.to_pyarrow_dataset()
    day = pc.field("__commit_date") == date(2026, 1, 17)
    assert dataset.to_table(filter=day).column("__seq").to_pylist() == [17]
    assert len(list(dataset.get_fragments(filter=day))) == 1
    assert dataset.to_table(filter=pc.field("__commit_date").is_null()).column("__seq").to_pylist() == [40]
    assert len(list(dataset.get_fragments(filter=pc.field("__commit_month") == "2026-03"))) == 1


@pytest.mark.long
def test_a_month_is_dropped_whole_once_its_last_day_is_old(layout: LakeLayout, orders: TableSchema, records: Records):
    append_daily(layout, orders, records, date(2026, 1, 1), date(2026, 2, 3))
    assert bounds(layout, orders)[0] == (1, 31)
    assert drop_history(layout, orders, HistoryBound(Seq(34), date(2026, 1, 31))) == 0
    assert drop_history(layout, orders, HistoryBound(Seq(30), date(2026, 2, 1))) == 0, "a record isn't in current yet"
    assert drop_history(layout, orders, HistoryBound(Seq(34), date(2026, 2, 1))) == 1
    opened = open_table(layout, layout.table_path("history", orders), layout.app_id("history", orders.table_id))
    assert opened is not None
    assert history_from(opened) == 31
    assert bounds(layout, orders)[0] == (32, 32)


def test_a_merge_that_is_killed_or_overtaken_changes_no_row(
    layout: LakeLayout, orders: TableSchema, records: Records, monkeypatch: pytest.MonkeyPatch
):
    append_daily(layout, orders, records, date(2026, 1, 1), date(2026, 1, 8))
    before = bounds(layout, orders)
    later = at_noon(date(2026, 2, 3))

    def killed(place: str) -> None:
        if place == "lake.before_compaction_commit":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "hit", killed)
        with pytest.raises(KeyboardInterrupt):
            maintain_table(layout, "history", orders, now_ms=later)
    assert bounds(layout, orders) == before

    def overtaken(place: str) -> None:
        if place == "lake.before_compaction_commit":
            monkeypatch.undo()
            assert maintain_table(layout, "history", orders, now_ms=later).files_compacted == 8
            batch = records(orders, ("c", 9, {"id": 9, "__commit_date": date(2026, 1, 9)}))
            append_history(layout, orders, [batch], Seq(9))
            fold_table(layout, orders, Seq(9))

    monkeypatch.setattr(failpoints, "hit", overtaken)
    assert maintain_table(layout, "history", orders, now_ms=later).files_compacted == 0, "another merge came first"
    assert bounds(layout, orders) == [(1, 8), (9, 9)]
    rows = DeltaTable(layout.table_path("current", orders)).to_pyarrow_table()
    assert sorted(rows.column("id").to_pylist()) == list(range(1, 10))


def commits(layout: LakeLayout, view: View, schema: TableSchema) -> list[int]:
    return sorted(int(file.stem) for file in Path(layout.table_path(view, schema), "_delta_log").glob("*[0-9].json"))


def age(layout: LakeLayout, view: View, schema: TableSchema, *, upto: int, by_s: float) -> None:
    """Move the times of a table's log files, up to a version, into the past."""
    for file in Path(layout.table_path(view, schema), "_delta_log").glob("*.*"):
        if file.name[:20].isdecimal() and int(file.name[:20]) <= upto:
            at = file.stat().st_mtime - by_s
            os.utime(file, (at, at))


@pytest.mark.long
def test_commits_never_clean_up_the_log(layout: LakeLayout, orders: TableSchema, records: Records):
    write(layout, orders, records, 1, 22)
    for view in ("history", "current"):
        age(layout, view, orders, upto=10**9, by_s=7 * 3600)
    write(layout, orders, records, 22, 64)
    for view in ("history", "current"):
        found = commits(layout, view, orders)
        assert found == list(range(found[-1] + 1)), view
        assert (
            DeltaTable(layout.table_path(view, orders)).metadata().configuration["delta.enableExpiredLogCleanup"]
            == "false"
        )


@pytest.mark.long
def test_maintenance_cuts_the_log_behind_the_retention_and_versions_within_it_can_be_opened(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    write(layout, orders, records, 1, 44)
    for view in ("history", "current"):
        path = layout.table_path(view, orders)
        newest = commits(layout, view, orders)[-1]
        rows = DeltaTable(path).to_pyarrow_table().num_rows
        age(layout, view, orders, upto=newest - 10, by_s=1_000)
        maintain_table(layout, view, orders, now_ms=now_ms())

        kept = commits(layout, view, orders)
        assert kept == list(range(kept[0], kept[-1] + 1)), "no gap"
        assert newest - 10 - 20 <= kept[0] <= newest - 10
        # Retention lasts from the commit that replaced a version: the newest old one can still be opened.
        for version in range(newest - 10, newest + 1):
            assert DeltaTable(path, version=version).version() == version
        assert DeltaTable(path).to_pyarrow_table().num_rows == rows


def test_a_table_that_is_written_rarely_is_checkpointed_by_maintenance_and_its_log_is_cut_too(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    write(layout, orders, records, 1, 6)
    newest = commits(layout, "current", orders)[-1]
    maintain_table(layout, "current", orders, now_ms=now_ms() + 31_000)
    assert commits(layout, "current", orders)[0] == 0
    write(layout, orders, records, 6, 8)
    maintain_table(layout, "current", orders, now_ms=now_ms() + 901_000)
    assert commits(layout, "current", orders) == [newest, newest + 1, newest + 2]
    assert DeltaTable(layout.table_path("current", orders)).to_pyarrow_table().num_rows == 7


@pytest.mark.long
def test_the_log_of_a_version_that_a_kept_cut_names_stays(layout: LakeLayout, orders: TableSchema, records: Records):
    write(layout, orders, records, 1, 30)
    path = layout.table_path("current", orders)
    for _ in range(2):
        maintain_table(layout, "current", orders, now_ms=now_ms() + 2_000_000, spared=3)
        assert DeltaTable(path, version=3).version() == 3
    maintain_table(layout, "current", orders, now_ms=now_ms() + 2_000_000, spared=25)
    assert DeltaTable(path, version=25).version() == 25
    assert commits(layout, "current", orders)[0] > 3


def test_the_log_of_a_lake_of_before_is_taken_over_by_maintenance(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    write(layout, orders, records, 1, 3)
    table = DeltaTable(layout.table_path("current", orders))
    table.alter.set_table_properties({"delta.enableExpiredLogCleanup": "true"}, raise_if_not_exists=False)
    maintain_table(layout, "current", orders, now_ms=now_ms(), rules=MaintenanceRules(keep_s=3600.0))
    after = DeltaTable(layout.table_path("current", orders)).metadata().configuration
    assert after["delta.enableExpiredLogCleanup"] == "false"
    assert after["delta.deletedFileRetentionDuration"] == "interval 7200 seconds"
    version = DeltaTable(layout.table_path("current", orders)).version()
    maintain_table(layout, "current", orders, now_ms=now_ms(), rules=MaintenanceRules(keep_s=3600.0))
    assert DeltaTable(layout.table_path("current", orders)).version() == version


def test_the_log_of_cuts_is_cut_too(layout: LakeLayout, orders: TableSchema, records: Records):
    commit = append_history(layout, orders, [records(orders, ("c", 1, {"id": 1}))], Seq(1))
    for n in range(1, 46):
        commit_cut(layout, Seq(n), [replace(commit, n=Seq(n))], committed_at=datetime.now(UTC))
    maintain_cuts(layout, now_ms=now_ms() + 901_000)
    left = sorted(Path(layout.commits_path, "_delta_log").glob("*[0-9].json"))
    assert len(left) < 20
    cut = last_cut(layout)
    assert cut is not None
    assert cut.n == 45


def test_a_table_is_tended_after_a_write_and_when_its_replaced_files_and_its_commits_may_go() -> None:
    rules = MaintenanceRules()
    looks = []
    tended_s = float("-inf")
    for now_s in range(0, 7200, 60):
        if rules.is_due(written_s=100.0, tended_s=tended_s, now_s=now_s):
            looks.append(now_s)
            tended_s = now_s
    assert looks == [120, 540, 1200]
