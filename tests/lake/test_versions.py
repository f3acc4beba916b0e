"""The Delta table of versions: exact under any batches, folds, replays and kills, and readable by other engines."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from uuid import UUID

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.lake.landing import append_history
from tests.lake.test_fold import texts_in
from tests.lake.test_scd2 import CUTS, MIDNIGHT, STORIES, Told, at, schemas, told_by, version_of

from millstream.errors import InvalidQuery, LakeError
from millstream.lake.commit_cuts import commit_cut
from millstream.lake.folded.current_table import FoldSizes, fold_table
from millstream.lake.folded.scd2_rules import VERSION_COLUMNS
from millstream.lake.folded.scd2_table import fold_into_versions
from millstream.lake.history_folder import history_from_property
from millstream.lake.history_retention import HistoryBound, drop_history
from millstream.lake.layout import LakeLayout
from millstream.lake.maintenance import MaintenanceRules, maintain_table
from millstream.lake.query.query_session import LakeSession
from millstream.lake.table_format import open_table
from millstream.model.ids import SchemaVersion, SourceId, StreamId, TableId
from millstream.model.positions import Seq
from millstream.model.schema import Column, TableSchema

TINY = FoldSizes(leaf_bytes=3_000, small_bytes=0, rows_max=4)


def stored(layout: LakeLayout, schema: TableSchema) -> list[Told]:
    """Return the table's versions, as deltalake alone reads them."""
    rows = DeltaTable(layout.table_path("scd2", schema)).to_pyarrow_table()
    names = [field.name for field in VERSION_COLUMNS]
    facts = rows.select(names).to_pylist()
    assert all(fact["is_current"] == (fact["valid_to"] is None) for fact in facts)
    return sorted(
        (
            version_of(row, fact["valid_from"], fact["valid_to"], fact["__seq"])
            for row, fact in zip(texts_in(rows.drop_columns(names)), facts, strict=True)
        ),
        key=str,
    )


@pytest.mark.sampled
@schemas
@pytest.mark.parametrize("sizes", [FoldSizes(), TINY], ids=["one file", "many leaves"])
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(story=STORIES, cuts=CUTS, again=st.integers(0, 3))
def test_any_batches_folds_and_replays_leave_the_versions_that_the_source_had(
    schema: TableSchema,
    sizes: FoldSizes,
    story: list[tuple[bool, list[tuple[int, int, int, int]], int]],
    cuts: list[int],
    again: int,
):
    source = told_by(schema, story)
    ends = sorted(
        {0, len(source.records), *source.copied, *(source.ends[cut] for cut in cuts if cut < len(source.ends))}
    )
    with tempfile.TemporaryDirectory() as folder:
        layout = LakeLayout(folder, "shop", StreamId(UUID(int=7)))
        for place, (first, end) in enumerate(pairwise(ends)):
            n = Seq(int(str(source.records[end - 1]["__seq"])))
            for start in {first, max(0, first - again * 5)}:
                commit = append_history(layout, schema, [source.batch(start, end)], n)
            commit_cut(layout, n, [commit], committed_at=datetime.now(UTC))
            if place % 2 == 0 or end in source.copied:
                fold_into_versions(layout, schema, n, sizes=sizes)
        if source.records:
            for _ in range(2):
                done = fold_into_versions(layout, schema, n, sizes=sizes)
            assert done.commit.rows == 0, "what is there is not folded again"
            assert stored(layout, schema) == source.versions()


Records = Callable[..., pa.RecordBatch]
Evolved = Callable[..., TableSchema]


def land(layout: LakeLayout, schema: TableSchema, batch: pa.RecordBatch, n: int) -> None:
    commit = append_history(layout, schema, [batch], Seq(n))
    commit_cut(layout, Seq(n), [commit], committed_at=datetime.now(UTC))


def rows_in(layout: LakeLayout, schema: TableSchema, *names: str) -> list[tuple[object, ...]]:
    table = (
        DeltaTable(layout.table_path("scd2", schema))
        .to_pyarrow_table()
        .sort_by([("id", "ascending"), ("__seq", "ascending")])
    )
    return [tuple(row.values()) for row in table.select(list(names)).to_pylist()]


def seconds(layout: LakeLayout, schema: TableSchema) -> list[tuple[int, int, int | None]]:
    """Return each version as key, and seconds of its start and end."""
    return [
        (int(str(key)), *(None if t is None else round((t - MIDNIGHT).total_seconds()) for t in (began, ended)))  # type: ignore[misc,operator]
        for key, began, ended in rows_in(layout, schema, "id", "valid_from", "valid_to")
    ]


def test_a_fold_rewrites_only_leaves_that_hold_its_keys_and_never_what_has_ended(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    sizes = FoldSizes(leaf_bytes=4_000, small_bytes=0)
    note = [f"{n * 7919 % 1000:03d}" * 30 for n in range(1_000)]
    land(
        layout,
        orders,
        records(orders, *(("c", n, {"id": n, "note": note[n], **at(1, n)}) for n in range(1, 1_000))),
        1_000,
    )
    fold_into_versions(layout, orders, Seq(1_000), sizes=sizes)
    before = set(DeltaTable(layout.table_path("scd2", orders)).file_uris())
    assert len(before) > 5
    for n in (500, 501):
        land(layout, orders, records(orders, ("u", 600 + n, {"id": n, "note": "new", **at(n)})), 600 + n)
        done = fold_into_versions(layout, orders, Seq(600 + n), sizes=sizes)
        after = set(DeltaTable(layout.table_path("scd2", orders)).file_uris())
        assert len(before - after) == 1, "one leaf was replaced"
        assert sorted("is_current=false" in uri for uri in after - before) == [False, True]
        assert 0 < done.removed_bytes < done.live_bytes
        before = after
    assert len(rows_in(layout, orders, "id")) == 1_001
    assert sum(row == (True,) for row in rows_in(layout, orders, "is_current")) == 999


def test_columns_that_are_added_widened_or_dropped_are_followed(
    layout: LakeLayout, orders: TableSchema, records: Records, evolved: Evolved
):
    land(layout, orders, records(orders, ("c", 1, {"id": 1, "note": "a", **at(1)}), ("c", 2, {"id": 2, **at(1, 1)})), 2)
    fold_into_versions(layout, orders, Seq(2))
    wide = evolved(total=pa.decimal128(20, 2), extra=pa.int64(), note=None)
    land(layout, wide, records(wide, ("u", 3, {"id": 1, "total": Decimal("123456789012.34"), "extra": 5, **at(3)})), 3)
    fold_into_versions(layout, wide, Seq(3))
    assert rows_in(layout, wide, "id", "total", "note", "extra", "is_current") == [
        (1, None, "a", None, False),
        (1, Decimal("123456789012.34"), None, 5, True),
        (2, None, None, None, True),
    ]


def test_another_key_is_followed(layout: LakeLayout, orders: TableSchema, records: Records):
    sizes = FoldSizes(leaf_bytes=1_000, small_bytes=0)
    land(layout, orders, records(orders, *(("c", n, {"id": n, "note": f"n{n}", **at(1, n)}) for n in range(1, 60))), 60)
    fold_into_versions(layout, orders, Seq(60), sizes=sizes)
    by_note = replace(orders, version=SchemaVersion(2), key=("note",), identity=("note",))
    land(
        layout,
        by_note,
        records(by_note, ("u", 61, {"id": 99, "note": "n7", **at(2)}), ("d", 62, {"note": "n9", **at(3)})),
        62,
    )
    fold_into_versions(layout, by_note, Seq(62), sizes=sizes)
    table = DeltaTable(layout.table_path("scd2", orders)).to_pyarrow_dataset()
    found = table.to_table(filter=pc.field("note").isin(["n7", "n9"])).sort_by("__seq").select(["id", "is_current"])
    assert found.to_pylist() == [
        {"id": 7, "is_current": False},
        {"id": 9, "is_current": False},
        {"id": 99, "is_current": True},
    ]


def test_a_table_made_again_goes_on_behind_the_one_that_bore_its_name(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    land(layout, orders, records(orders, *(("c", n, {"id": n, "note": "a", **at(9, n)}) for n in (1, 2))), 2)
    fold_into_versions(layout, orders, Seq(2))
    again = replace(orders, table_id=TableId(9))
    land(layout, again, records(again, ("c", 3, {"id": 1, "note": "a", **at(4)})), 3)
    fold_into_versions(layout, again, Seq(3))
    assert seconds(layout, again) == [(1, 9, 9), (1, 9, None), (2, 9, 9)]
    assert fold_into_versions(layout, orders, Seq(3)).commit.rows == 0


@pytest.mark.parametrize(("source", "hint"), [(0, "Write to a table without"), (1, "Rename the column at the source")])
def test_a_column_of_ours_without_a_number_is_an_error_by_name(
    layout: LakeLayout, orders: TableSchema, records: Records, source: int, hint: str
):
    odd = replace(orders, source=SourceId(source), columns=(*orders.columns, Column("Valid_From", pa.string())))
    land(layout, odd, records(odd, ("c", 1, {"id": 1, **at(1)})), 1)
    with pytest.raises(LakeError, match=r"column Valid_From of public\.orders") as caught:
        fold_into_versions(layout, odd, Seq(1))
    assert (caught.value.code, caught.value.hint.startswith(hint)) == ("lake_schema_conflict", True)


def test_columns_of_ours_have_their_numbers_in_versions_that_go_on_from_current(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    names = ("id", "valid_from", "Valid_To")
    columns = tuple(Column(name, pa.int64(), number=number) for number, name in enumerate(names, 1))
    prices = replace(orders, columns=columns, key=names[:2], identity=names[:2])
    rows = (("c", n, {"id": n, "valid_from": 10 * n, "Valid_To": n, **at(1, n)}) for n in (1, 2))
    land(layout, prices, records(prices, *rows), 2)
    path, app = layout.table_path("history", prices), layout.app_id("history", prices.table_id)

    def lose_history(n: int) -> None:
        fold_table(layout, prices, Seq(n))
        commit_cut(layout, Seq(n), [], committed_at=MIDNIGHT, commit_ts_max=MIDNIGHT + timedelta(seconds=n))
        history = open_table(layout, path, app)
        assert history is not None
        history.set_properties({history_from_property(prices.table_id): str(n)})

    lose_history(2)
    fold_into_versions(layout, prices, Seq(2))
    in_versions = ("id", "valid_from__2", "Valid_To__3", "is_current")
    assert rows_in(layout, prices, *in_versions) == [(1, 10, 1, True), (2, 20, 2, True)]
    land(layout, prices, records(prices, ("u", 3, {"id": 1, "valid_from": 10, "Valid_To": 7, **at(5)})), 3)
    lose_history(3)
    fold_into_versions(layout, prices, Seq(3))
    both = [(1, 10, 1, False), (1, 10, 7, True), (2, 20, 2, True)]
    assert rows_in(layout, prices, *in_versions) == both


def test_where_history_lacks_its_beginning_versions_begin_as_current_has_them(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    land(layout, orders, records(orders, *(("c", n, {"id": n, "note": "a", **at(1, n)}) for n in (1, 2))), 2)
    fold_table(layout, orders, Seq(2))
    commit_cut(layout, Seq(2), [], committed_at=MIDNIGHT, commit_ts_max=MIDNIGHT + timedelta(seconds=1))
    land(layout, orders, records(orders, ("u", 3, {"id": 1, "note": "b", **at(5)})), 3)
    history = open_table(layout, layout.table_path("history", orders), layout.app_id("history", orders.table_id))
    assert history is not None
    history.set_properties({history_from_property(orders.table_id): "2"})
    fold_into_versions(layout, orders, Seq(3))
    told = rows_in(layout, orders, "id", "note", "is_current", "__seq")
    assert told == [(1, "a", False, 2), (1, "b", True, 3), (2, "a", True, 2)]


@pytest.mark.long
def test_versions_that_have_ended_are_compacted_beside_the_folds(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    sizes = FoldSizes(leaf_bytes=2_000, small_bytes=0)
    land(
        layout, orders, records(orders, *(("c", n, {"id": n, "note": "x" * n, **at(1, n)}) for n in range(1, 100))), 100
    )
    for n in range(101, 111):
        land(layout, orders, records(orders, ("u", n, {"id": n - 90, "note": "b", **at(n)})), n)
        fold_into_versions(layout, orders, Seq(n), sizes=sizes)
    before = rows_in(layout, orders, "id", "note", "valid_from", "valid_to", "is_current", "__seq")
    leaves = {uri for uri in DeltaTable(layout.table_path("scd2", orders)).file_uris() if "is_current=true" in uri}
    now_ms = time.time_ns() // 1_000_000
    assert (
        maintain_table(layout, "scd2", orders, now_ms=now_ms, rules=MaintenanceRules(compact_files=5)).files_compacted
        == 10
    )
    uris = set(DeltaTable(layout.table_path("scd2", orders)).file_uris())
    assert (len(uris - leaves), leaves <= uris) == (1, True)
    assert rows_in(layout, orders, "id", "note", "valid_from", "valid_to", "is_current", "__seq") == before
    land(layout, orders, records(orders, ("d", 111, {"id": 50, **at(111)})), 111)
    assert fold_into_versions(layout, orders, Seq(111), sizes=sizes).commit.rows > 0


def test_others_read_the_versions_and_find_them_by_time_and_key(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    land(layout, orders, records(orders, *(("c", n, {"id": n, "note": "a", **at(1, n)}) for n in range(1, 9))), 8)
    fold_into_versions(layout, orders, Seq(8))
    land(layout, orders, records(orders, ("u", 9, {"id": 3, "note": "b", **at(5)}), ("d", 10, {"id": 4, **at(6)})), 10)
    fold_into_versions(layout, orders, Seq(10))
    versions = DeltaTable(layout.table_path("scd2", orders)).to_pyarrow_dataset()
    assert DeltaTable(layout.table_path("scd2", orders)).metadata().partition_columns == ["is_current"]
    with duckdb.connect() as connection:
        connection.register("versions", versions)
        for second, note, count in [(4, "a", 8), (5, "b", 8), (6, "b", 7)]:
            moment = MIDNIGHT + timedelta(seconds=second)
            valid = "valid_from <= $1 AND (valid_to > $1 OR valid_to IS NULL)"
            rows = connection.execute(f"SELECT id, note FROM versions WHERE {valid}", [moment]).fetchall()
            assert (len(rows), dict(rows)[3]) == (count, note)


@pytest.mark.sampled
@pytest.mark.parametrize("point", ["lake.fold_file_written", "lake.before_scd2_commit", "lake.after_scd2_commit"])
def test_a_fold_that_is_killed_is_there_whole_or_not_at_all_and_leaves_nothing_behind(
    layout: LakeLayout, orders: TableSchema, records: Records, tmp_path: Path, point: str
):
    land(layout, orders, records(orders, *(("c", n, {"id": n, "note": "a", **at(1, n)}) for n in range(1, 9))), 8)
    fold_into_versions(layout, orders, Seq(8))
    land(
        layout,
        orders,
        records(orders, ("u", 9, {"id": 3, "note": "b", **at(5)}), ("t", 10, at(6)), ("c", 11, {"id": 12, **at(7)})),
        11,
    )
    (tmp_path / "asked").write_bytes(pickle.dumps((layout, orders)))
    program = (
        "import pickle, sys; from millstream.lake.folded.scd2_table import fold_into_versions\n"
        "fold_into_versions(*pickle.load(open(sys.argv[1], 'rb')), 11)\n"
    )
    environment = os.environ | {"MILLSTREAM_FAILPOINTS": point}
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "asked"], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    before = 1 if point == "lake.after_scd2_commit" else 8
    assert sum(row == (True,) for row in rows_in(layout, orders, "is_current")) == before
    fold_into_versions(layout, orders, Seq(11))
    ended = [(n, *span) for n in range(1, 9) for span in ([(1, 5), (5, 6)] if n == 3 else [(1, 6)])]
    assert seconds(layout, orders) == [*ended, (12, 7, None)]
    land(layout, orders, records(orders, ("u", 12, {"id": 12, "note": "c", **at(8)})), 12)
    fold_into_versions(layout, orders, Seq(12))
    maintain_table(
        layout, "scd2", orders, now_ms=time.time_ns() // 1_000_000 + 10_000, rules=MaintenanceRules(keep_s=0)
    )
    stored_files = {str(file) for file in Path(layout.table_path("scd2", orders)).rglob("*.parquet")}
    assert {file for file in stored_files if "_delta_log" not in file} == {
        uri.removeprefix("file://") for uri in DeltaTable(layout.table_path("scd2", orders)).file_uris()
    }


@pytest.mark.sampled
@schemas
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(story=STORIES, folded=st.integers(0, 14))
def test_a_query_lays_what_is_not_folded_yet_over_the_versions(
    schema: TableSchema, story: list[tuple[bool, list[tuple[int, int, int, int]], int]], folded: int
):
    # A copy that isn't folded yet is left out as a whole: see the test below.
    source = told_by(schema, [(False, steps, moment) for _, steps, moment in story])
    ends = [end for end in source.ends if 0 < end < len(source.records)]
    if not ends:
        return
    with tempfile.TemporaryDirectory() as folder:
        layout = LakeLayout(folder, "shop", StreamId(UUID(int=7)))
        first = ends[folded % len(ends)]
        for start, end in ((0, first), (first, len(source.records))):
            n = Seq(int(str(source.records[end - 1]["__seq"])))
            commits = [append_history(layout, schema, [source.batch(start, end)], n)]
            if start == 0:
                commits.append(fold_into_versions(layout, schema, n).commit)
            commit_cut(layout, n, commits, committed_at=datetime.now(UTC))
        with LakeSession(layout) as session:
            names = [column.name for column in VERSION_COLUMNS]
            asked = session.query('SELECT * FROM scd2."public.Odd Name"')
            told = [
                version_of(row, fact["valid_from"], fact["valid_to"], fact["__seq"])
                for row, fact in zip(texts_in(asked.drop_columns(names)), asked.select(names).to_pylist(), strict=True)
            ]
            assert sorted(told, key=str) == source.versions()


def test_versions_stay_as_they_were_while_the_table_is_copied_again(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    history = append_history(
        layout, orders, [records(orders, *(("c", n, {"id": n, **at(1, n)}) for n in (1, 2)))], Seq(2)
    )
    done = fold_into_versions(layout, orders, Seq(2))
    commit_cut(layout, Seq(2), [history, done.commit], committed_at=datetime.now(UTC))
    land(
        layout,
        orders,
        records(orders, ("d", 3, {"id": 1, **at(2)}), ("t", 4, at(3, None)), ("r", 5, {"id": 7, **at(4, None)})),
        5,
    )
    with LakeSession(layout) as session:
        found = session.query('SELECT id FROM scd2."public.orders" WHERE is_current ORDER BY id')
        assert found.column(0).to_pylist() == [2]
    said = pytest.raises(InvalidQuery, match=r"public\.orders has versions .* valid_from <= T")
    with LakeSession(layout, as_of=Seq(2)) as session, said:
        session.query('SELECT id FROM scd2."public.orders"')


def test_versions_that_stood_still_while_history_was_dropped_go_on_from_current(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    """`scd2` left the views, so that history kept only records that `current` lacked; then `scd2` returned."""
    many = [("c", n, {"id": n, "note": "a", **at(1, n)}) for n in (1, 2, 3)]
    land(layout, orders, records(orders, *many), 3)
    fold_table(layout, orders, Seq(3))
    fold_into_versions(layout, orders, Seq(3))
    land(layout, orders, records(orders, ("d", 4, {"id": 3, **at(4)}), ("u", 5, {"id": 2, "note": "b", **at(5)})), 5)
    fold_table(layout, orders, Seq(5))
    moment = MIDNIGHT + timedelta(seconds=6)
    commit_cut(layout, Seq(5), [], committed_at=moment, commit_ts_max=moment)
    assert drop_history(layout, orders, HistoryBound(Seq(5))) == 2
    land(layout, orders, records(orders, ("c", 6, {"id": 4, "note": "d", **at(9)})), 6)
    fold_table(layout, orders, Seq(6))
    commit_cut(layout, Seq(6), [], committed_at=moment, commit_ts_max=MIDNIGHT + timedelta(seconds=9))
    assert fold_into_versions(layout, orders, Seq(6)).commit.n == 6
    told = rows_in(layout, orders, "id", "note", "is_current")
    assert told == [(1, "a", True), (2, "a", False), (2, "b", True), (3, "a", False), (4, "d", True)]
    assert seconds(layout, orders)[0] == (1, 1, None), "what didn't change goes on"


def test_a_view_that_stood_still_while_history_was_dropped_is_an_error_until_a_copy_comes(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    land(layout, orders, records(orders, *(("c", n, {"id": n, "note": "a", **at(1, n)}) for n in (1, 2, 3))), 3)
    fold_table(layout, orders, Seq(3))
    fold_into_versions(layout, orders, Seq(3))
    land(layout, orders, records(orders, ("d", 4, {"id": 3, **at(4)})), 4)
    assert drop_history(layout, orders, HistoryBound(Seq(4))) == 2
    land(layout, orders, records(orders, ("u", 5, {"id": 1, "note": "b", **at(5)})), 5)
    for fold in (fold_table, fold_into_versions):
        with pytest.raises(LakeError, match="dropped up to 4") as caught:
            fold(layout, orders, Seq(5))
        assert "--from source" in caught.value.hint
    copied = [
        ("t", 6, at(6, None, 0)),
        *(("r", 6 + n, {"id": n, "note": "b" if n == 1 else "a", **at(7, None)}) for n in (1, 2)),
    ]
    land(layout, orders, records(orders, *copied), 8)
    fold_table(layout, orders, Seq(8))
    fold_into_versions(layout, orders, Seq(8))
    assert rows_in(layout, orders, "id", "note", "is_current") == [
        (1, "a", False), (1, "b", True), (2, "a", True), (3, "a", False),
    ]  # fmt: skip
    current = DeltaTable(layout.table_path("current", orders)).to_pyarrow_table().sort_by("id")
    assert current.column("note").to_pylist() == ["b", "a"]
