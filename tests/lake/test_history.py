"""History: each record is appended once in spite of replays; columns follow the source; foreign commits are refused."""

from __future__ import annotations

import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from tests.lake.landing import append_history

from millstream.errors import LakeConflict, LakeError, LakeTableForeign, LakeUnavailable, PositionError
from millstream.lake import history, schema_history
from millstream.lake.commit_cuts import commit_cut
from millstream.lake.folded.current_table import FoldSizes, fold_table
from millstream.lake.folded.scd2_table import fold_into_versions
from millstream.lake.history import commit_records, open_history, write_records
from millstream.lake.history_scan import fold_step
from millstream.lake.layout import LakeLayout
from millstream.lake.maintenance import MaintenanceRules, maintain_table
from millstream.lake.new_and_wider_columns import union_schema
from millstream.lake.query.query_session import LakeSession
from millstream.lake.schema_history import Eras, era_at, newest_schema
from millstream.lake.table_format import open_table
from millstream.model.ids import SchemaVersion, SourceId, StreamId, TableId
from millstream.model.positions import Seq
from millstream.model.schema import Column, PgType, ReplicaIdentity, TableKind, TableSchema
from millstream.testing.errors import coded

Records = Callable[..., pa.RecordBatch]
Evolved = Callable[..., TableSchema]


def stored(layout: LakeLayout, schema: TableSchema, view: str = "history") -> pa.Table:
    table = DeltaTable(layout.table_path(view, schema)).to_pyarrow_table()  # type: ignore[arg-type]
    return table.sort_by("__seq" if view == "history" else "id")


def seqs(layout: LakeLayout, schema: TableSchema) -> list[int]:
    return stored(layout, schema).column("__seq").to_pylist()


def test_records_that_are_there_are_not_appended_again(layout: LakeLayout, orders: TableSchema, records: Records):
    first = append_history(layout, orders, [records(orders, ("c", 1, {"id": 1}), ("c", 2, {"id": 2}))], Seq(2))
    again = append_history(layout, orders, [records(orders, ("c", 1, {"id": 1}), ("c", 2, {"id": 2}))], Seq(2))
    other = append_history(layout, orders, [records(orders, ("c", 2, {"id": 2}), ("d", 9, {"id": 2}))], Seq(9))
    older = append_history(layout, orders, [records(orders, ("c", 2, {"id": 2}))], Seq(5))
    assert [c.rows for c in (first, again, other, older)] == [2, 0, 1, 0]
    assert seqs(layout, orders) == [1, 2, 9]


def test_tasks_that_append_the_same_batch_at_once_leave_it_there_once(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    append_history(layout, orders, [records(orders, ("c", 1, {"id": 1}))], Seq(1))
    batch = records(orders, *(("c", seq, {"id": seq}) for seq in range(2, 50)))

    def attempt(_: int) -> str:
        try:
            append_history(layout, orders, [batch], Seq(50))
        except LakeConflict:
            return "refused"
        return "done"

    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(attempt, range(8)))
    assert "done" in outcomes
    assert seqs(layout, orders) == list(range(1, 50))


def test_versions_of_what_applications_write_go_to_and_fro_and_the_table_keeps_the_newest(
    layout: LakeLayout, orders: TableSchema, records: Records, evolved: Evolved
):
    """Each of several writers learns of a new column when it needs one itself."""
    old, new = replace(orders, source=SourceId(0)), replace(evolved(more=pa.int64()), source=SourceId(0))
    append_history(layout, old, [records(old, ("c", 1, {"id": 1}))], Seq(1))
    mixed = [
        records(old, ("c", 2, {"id": 2})),
        records(new, ("c", 3, {"id": 3, "more": 3})),
        records(old, ("c", 4, {"id": 4})),
    ]
    append_history(layout, old, mixed, Seq(4))
    append_history(layout, old, [records(old, ("c", 5, {"id": 5}), ("c", 6, {"id": 3}))], Seq(6))
    assert stored(layout, new).column("more").to_pylist() == [None, None, 3, None, None, None]
    eras = Eras.of(open_history(layout, new)).told
    assert [(start, schema.version) for start, schema in eras] == [(1, 1), (2, 2)]
    fold_table(layout, new, Seq(6), sizes=FoldSizes())
    assert stored(layout, new, "current").select(["id", "more"]).to_pylist() == [
        {"id": n, "more": None} for n in range(1, 6)
    ]


def test_an_empty_batch_makes_the_table_and_nothing_else(layout: LakeLayout, orders: TableSchema):
    assert append_history(layout, orders, [], Seq(5)).version == 0
    assert stored(layout, orders).num_rows == 0


def test_the_table_says_what_it_is(layout: LakeLayout, orders: TableSchema, records: Records):
    append_history(layout, orders, [records(orders, ("c", 1, {"id": 1}))], Seq(1))
    facts = DeltaTable(layout.table_path("history", orders)).metadata()
    assert "public.orders" in facts.description
    assert "Millstream" in facts.description
    assert facts.partition_columns == ["__commit_month"]


@pytest.mark.parametrize("mode", ["append", "overwrite"])
def test_a_table_that_somebody_else_wrote_into_is_refused_by_name(
    layout: LakeLayout, orders: TableSchema, records: Records, mode: str
):
    append_history(layout, orders, [records(orders, ("c", 1, {"id": 1}))], Seq(1))
    path = layout.table_path("history", orders)
    write_deltalake(path, stored(layout, orders), mode=mode)  # type: ignore[call-overload]
    for _ in range(2):
        with pytest.raises(LakeTableForeign) as caught:
            append_history(layout, orders, [records(orders, ("c", 2, {"id": 2}))], Seq(2))
        assert caught.value.details == {"path": path, "version": 2}
        assert pickle.loads(pickle.dumps(caught.value)).details == caught.value.details
    assert DeltaTable(path).version() == 2


def test_rows_deleted_by_somebody_else_are_noticed(layout: LakeLayout, orders: TableSchema, records: Records):
    append_history(layout, orders, [records(orders, ("c", 1, {"id": 1}))], Seq(1))
    DeltaTable(layout.table_path("history", orders)).delete("id = 1")
    with pytest.raises(LakeTableForeign, match="DELETE"):
        append_history(layout, orders, [records(orders, ("c", 2, {"id": 2}))], Seq(2))


def test_maintenance_by_somebody_else_does_no_harm(layout: LakeLayout, orders: TableSchema, records: Records):
    for seq in (1, 2, 3):
        append_history(layout, orders, [records(orders, ("c", seq, {"id": seq}))], Seq(seq))
    table = DeltaTable(layout.table_path("history", orders))
    table.optimize.compact()
    table.create_checkpoint()
    append_history(layout, orders, [records(orders, ("c", 4, {"id": 4}))], Seq(4))
    assert seqs(layout, orders) == [1, 2, 3, 4]


@pytest.mark.parametrize("view", ["history", "current"])
def test_a_table_that_stood_there_before_is_left_alone(
    layout: LakeLayout, orders: TableSchema, records: Records, view: str
):
    path = layout.table_path(view, orders)  # type: ignore[arg-type]
    Path(path).mkdir(parents=True)
    write_deltalake(path, pa.table({"x": [1]}))
    batch = records(orders, ("c", 1, {"id": 1}))
    steps = {
        "history": lambda: append_history(layout, orders, [batch], Seq(1)),
        "current": lambda: append_history(layout, orders, [batch], Seq(1)) and fold_table(layout, orders, Seq(1)),
    }
    with pytest.raises(LakeTableForeign, match="didn't make"):
        steps[view]()
    assert DeltaTable(path).version() == 0


def test_another_streams_lake_is_left_alone(layout: LakeLayout, orders: TableSchema, records: Records):
    append_history(layout, orders, [records(orders, ("c", 1, {"id": 1}))], Seq(1))
    renewed = replace(layout, stream_id=StreamId(UUID(int=43)))
    with pytest.raises(LakeTableForeign, match=str(layout.stream_id)):
        append_history(renewed, orders, [records(orders, ("c", 1, {"id": 1}))], Seq(1))


def test_columns_follow_the_source(layout: LakeLayout, orders: TableSchema, records: Records, evolved: Evolved):
    append_history(layout, orders, [records(orders, ("c", 1, {"id": 1, "note": "old"}))], Seq(1))
    fold_table(layout, orders, Seq(1))
    added = evolved(note=None, colour=pa.string())
    both = [records(orders, ("c", 2, {"id": 2, "note": "kept"})), records(added, ("c", 3, {"id": 3, "colour": "red"}))]
    append_history(layout, added, both, Seq(3))
    assert stored(layout, orders).column("note").to_pylist() == ["old", "kept", None]
    assert stored(layout, orders).column("colour").to_pylist() == [None, None, "red"]
    fold_table(layout, added, Seq(3))
    current = stored(layout, orders, "current")
    assert current.to_pylist() == [
        {"id": 1, "total": None, "colour": None},
        {"id": 2, "total": None, "colour": None},
        {"id": 3, "total": None, "colour": "red"},
    ]


def test_a_new_column_reaches_a_large_current_too(
    layout: LakeLayout, orders: TableSchema, records: Records, evolved: Evolved
):
    append_history(layout, orders, [records(orders, ("c", 1, {"id": 1}), ("c", 2, {"id": 2}))], Seq(2))
    fold_table(layout, orders, Seq(2), sizes=FoldSizes(small_bytes=0))
    added = evolved(colour=pa.string())
    update = records(added, ("u", 3, {"id": 2, "colour": "red", "total": None, "__exact": [("total", "NaN")]}))
    append_history(layout, added, [update], Seq(3))
    fold_table(layout, added, Seq(3), sizes=FoldSizes(small_bytes=0))
    assert stored(layout, orders, "current").to_pylist() == [
        {"id": 1, "total": None, "note": None, "colour": None, "__exact": None},
        {"id": 2, "total": None, "note": None, "colour": "red", "__exact": [("total", "NaN")]},
    ]


def test_a_wider_type_takes_the_old_values_along(layout: LakeLayout, orders: TableSchema, records: Records):
    narrow = replace(orders, columns=(Column("id", pa.int32()), *orders.columns[1:]))
    append_history(layout, narrow, [records(narrow, ("c", 1, {"id": 1}))], Seq(1))
    fold_table(layout, narrow, Seq(1))
    wide = replace(orders, version=SchemaVersion(2))
    append_history(layout, wide, [records(wide, ("c", 2, {"id": 2**40}))], Seq(2))
    append_history(layout, wide, [records(narrow, ("c", 3, {"id": 3}))], Seq(3))
    fold_table(layout, wide, Seq(3))
    assert stored(layout, orders).column("id").to_pylist() == [1, 2**40, 3]
    assert stored(layout, orders, "current").column("id").to_pylist() == [1, 3, 2**40]


def test_a_type_that_old_values_do_not_fit_is_an_error_that_writes_nothing(
    layout: LakeLayout, orders: TableSchema, records: Records, evolved: Evolved
):
    append_history(layout, orders, [records(orders, ("c", 1, {"id": 1, "note": "x"}))], Seq(1))
    other = evolved(note=pa.date32())
    with pytest.raises(LakeError, check=coded("lake_schema_conflict")) as caught:
        append_history(layout, other, [records(other, ("c", 2, {"id": 2}))], Seq(2))
    assert caught.value.details == {"table": "public.orders", "column": "note"}
    assert "`millstream pipeline rebuild public.orders --from source`" in caught.value.hint
    # A copy's marker may bring the new columns before records that still have the old ones.
    mixed = [records(other, ("t", 2, {})), records(orders, ("c", 3, {"id": 3, "note": "y"}))]
    with pytest.raises(
        LakeError, check=coded("lake_schema_conflict"), match=r"note was string in the lake and is now date32"
    ):
        append_history(layout, other, mixed, Seq(3))
    assert seqs(layout, orders) == [1]


def test_the_hint_has_a_name_as_a_shell_takes_it():
    """`public.Bad One` was two words, and no table's name."""
    with pytest.raises(LakeError) as caught:
        union_schema('public."Bad One"', pa.schema({"a": pa.list_(pa.int32())}), pa.schema({"a": pa.string()}))
    assert "`millstream pipeline rebuild 'public.\"Bad One\"' --from source`" in caught.value.hint


@pytest.mark.parametrize("name", ["NOTE", "__seq", "__Op"])
def test_names_that_delta_cannot_tell_apart_are_an_error_with_the_column(
    layout: LakeLayout, evolved: Evolved, name: str
):
    clash = evolved(**{name: pa.string()})
    with pytest.raises(LakeError, check=coded("lake_schema_conflict")) as caught:
        append_history(layout, clash, [], Seq(2))
    assert caught.value.details["column"] == name


def test_the_configured_type_holds_numbers_and_keeps_the_rest_as_text(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    text = replace(orders, columns=(orders.columns[0], Column("note", pa.string()), Column("total", pa.string())))
    numeric = replace(text, columns=(*text.columns[:2], replace(text.columns[2], pg=PgType(1700, -1, "numeric"))))
    typed = replace(layout, types={"public.orders.total": "decimal(38,3)"})
    values = ["1.5", "NaN", "0.12345", None]
    batch = records(numeric, *(("c", i + 1, {"id": i, "total": value}) for i, value in enumerate(values)))
    append_history(typed, numeric, [batch], Seq(4))
    fold_table(typed, numeric, Seq(4))
    for view in ("history", "current"):
        rows = stored(typed, numeric, view)
        assert [None if v is None else str(v) for v in rows.column("total").to_pylist()] == ["1.500", None, None, None]
        assert rows.column("__exact").to_pylist() == [None, [("total", "NaN")], [("total", "0.12345")], None]


def test_a_table_dropped_and_made_again_starts_over_in_current_and_goes_on_in_history(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    append_history(layout, orders, [records(orders, ("c", 1, {"id": 1}), ("c", 2, {"id": 2}))], Seq(4))
    fold_table(layout, orders, Seq(4))
    again = replace(orders, table_id=TableId(8))
    append_history(layout, again, [records(again, ("c", 6, {"id": 1, "note": "new"}))], Seq(9))
    append_history(layout, orders, [records(orders, ("d", 5, {"id": 2}))], Seq(9))
    fold_table(layout, again, Seq(9))
    fold_table(layout, again, Seq(10))
    assert seqs(layout, orders) == [1, 2, 5, 6]
    assert stored(layout, again, "current").to_pylist() == [{"id": 1, "total": None, "note": "new"}]


def test_a_fold_before_any_history_is_to_be_tried_again(layout: LakeLayout, orders: TableSchema):
    with pytest.raises(LakeUnavailable):
        fold_table(layout, orders, Seq(1))


def test_many_waiting_records_are_folded_by_way_of_earlier_cuts(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    append_history(layout, orders, [records(orders, ("c", 1, {"id": 1}))], Seq(1))
    fold_table(layout, orders, Seq(1))
    for n in range(2, 30, 2):
        batch = records(orders, ("u", n, {"id": 1, "note": f"at {n}"}), ("c", n + 1, {"id": n}))
        commit_cut(
            layout, Seq(n + 1), [append_history(layout, orders, [batch], Seq(n + 1))], committed_at=datetime.now(UTC)
        )
    fold_table(layout, orders, Seq(29), sizes=FoldSizes(rows_max=9))
    commits = [h for h in DeltaTable(layout.table_path("current", orders)).history() if h["operation"] == "WRITE"]
    assert 4 <= len(commits) <= 8
    assert stored(layout, orders, "current").column("note").to_pylist() == ["at 28", *[None] * 14]


def test_messages_of_several_sources_lie_in_one_table(layout: LakeLayout, orders: TableSchema, records: Records):
    columns = (Column("prefix", pa.string()), Column("content", pa.binary()), Column("transactional", pa.bool_()))
    first = replace(
        orders, kind=TableKind.MESSAGES, columns=columns, key=(), identity=(), replica_identity=ReplicaIdentity.NOTHING
    )
    second = replace(first, table_id=TableId(9))
    for schema, seq in ((first, 1), (second, 2), (first, 3)):
        append_history(layout, schema, [records(schema, ("m", seq, {"prefix": "p", "content": b"\0\xff"}))], Seq(seq))
    assert layout.table_path("history", first).endswith("/history/_messages")
    assert seqs(layout, first) == [1, 2, 3]


def test_messages_that_another_program_wrote_into_begin_again_by_the_way_that_the_hint_names(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    """The hint named `pipeline rebuild`, which takes no name of logical messages: the source has no copy of them."""
    columns = (Column("prefix", pa.string()), Column("content", pa.binary()), Column("transactional", pa.bool_()))
    schema = replace(
        orders, kind=TableKind.MESSAGES, columns=columns, key=(), identity=(), replica_identity=ReplicaIdentity.NOTHING
    )
    batch = records(schema, ("m", 1, {"prefix": "p", "content": b"x"}))
    append_history(layout, schema, [batch], Seq(1))
    path = Path(layout.table_path("history", schema))
    write_deltalake(str(path), DeltaTable(str(path)).to_pyarrow_table(), mode="append")
    later = records(schema, ("m", 2, {"prefix": "p", "content": b"y"}))
    with pytest.raises(LakeTableForeign) as caught:
        append_history(layout, schema, [later], Seq(2))
    assert caught.value.hint.startswith("Move that folder away, then run `millstream tables retry _messages`;")
    path.rename(path.with_name("aside"))
    append_history(layout, schema, [later], Seq(2))
    assert seqs(layout, schema) == [2]


WRITER = """
import pickle, sys
from millstream.lake.commit_cuts import commit_cut
from millstream.lake.folded.current_table import fold_table
from millstream.lake.history import commit_records, write_records
layout, schema, batch, n = pickle.load(sys.stdin.buffer)
commit_records(layout, [write_records(layout, schema, [batch], n)], n)
fold_table(layout, schema, n)
"""


@pytest.mark.sampled
@pytest.mark.parametrize(
    "point",
    ["lake.before_history_commit", "lake.after_history_commit", "lake.before_fold_commit", "lake.after_fold_commit"],
)
def test_a_writer_killed_at_any_point_repeats_and_loses_nothing(
    layout: LakeLayout, orders: TableSchema, records: Records, point: str
):
    done = records(orders, ("c", 1, {"id": 1, "note": "a"}))
    append_history(layout, orders, [done], Seq(1))
    fold_table(layout, orders, Seq(1))
    batch = records(
        orders, ("c", 2, {"id": 2}), ("u", 3, {"id": 1, "__unchanged": ["note"], "total": None}), ("c", 4, {"id": 3})
    )
    work = pickle.dumps((layout, orders, batch, Seq(4)))
    environment = os.environ | {"MILLSTREAM_FAILPOINTS": point}
    ended = subprocess.run([sys.executable, "-c", WRITER], input=work, env=environment, timeout=600, check=False)
    assert ended.returncode == -signal.SIGKILL
    append_history(layout, orders, [batch], Seq(4))
    fold_table(layout, orders, Seq(4))
    assert seqs(layout, orders) == [1, 2, 3, 4]
    assert [(r["id"], r["note"]) for r in stored(layout, orders, "current").to_pylist()] == [
        (1, "a"),
        (2, None),
        (3, None),
    ]


FULL_DISK = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (600, resource.RLIM_INFINITY))
"""
TOLD = """
except MillstreamError as error:
    print(type(error).__name__, error.retry.value)
"""


def test_a_disk_that_takes_no_more_is_an_error_to_be_tried_again(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    append_history(layout, orders, [records(orders, ("c", 1, {"id": 1}))], Seq(1))
    batch = records(orders, ("c", 2, {"id": 2, "note": "a text that is longer than the disk has room for" * 50}))
    work = pickle.dumps((layout, orders, batch, Seq(2)))
    code = FULL_DISK + WRITER.replace(
        "commit_records(l", "from millstream.errors import MillstreamError\ntry:\n    commit_records(l"
    )
    code = code.replace("fold_table(l", "    fold_table(l") + TOLD
    ended = subprocess.run([sys.executable, "-c", code], input=work, timeout=600, check=True, capture_output=True)
    assert ended.stdout.decode().strip() == "LakeUnavailable backoff"
    assert seqs(layout, orders) == [1]
    append_history(layout, orders, [batch], Seq(2))
    assert seqs(layout, orders) == [1, 2]


def test_a_location_that_delta_cannot_keep_is_refused(orders: TableSchema, tmp_path: Path):
    layout = LakeLayout(str(tmp_path / "100%25"), "shop", StreamId(UUID(int=1)))
    with pytest.raises(LakeError, match="percent"):
        append_history(layout, orders, [], Seq(1))


def test_an_update_that_came_before_the_copy_of_its_row_folds_once_the_copy_is_there(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    """An update during the table copy left its long note out: the log has the copied row after it."""
    update = ("u", 2, {"id": 1, "total": 2, "__unchanged": ["note"]})
    recopied = ("u", 4, {"id": 2, "total": 5, "__unchanged": ["note"]})
    append_history(
        layout,
        orders,
        [
            records(
                orders,
                ("r", 1, {"id": 2, "total": 1, "note": "old"}),
                update,
                ("t", 3, {}),
                recopied,
                ("r", 5, {"id": 1, "total": 2, "note": "long"}),
                ("r", 6, {"id": 2, "total": 5, "note": "old"}),
            )
        ],
        Seq(6),
    )
    fold_table(layout, orders, Seq(6))
    rows = stored(layout, orders, "current").sort_by("id").to_pylist()
    assert [(row["id"], row["note"]) for row in rows] == [(1, "long"), (2, "old")]
    append_history(layout, orders, [records(orders, ("u", 7, {"id": 9, "total": 1, "__unchanged": ["note"]}))], Seq(7))
    with pytest.raises(LakeError, match="no earlier state"):
        fold_table(layout, orders, Seq(7))


def test_the_schema_at_any_position_is_told_by_history_itself(
    layout: LakeLayout, orders: TableSchema, records: Records, evolved: Evolved
):
    wide = evolved(paid=pa.bool_())
    other = replace(wide, version=SchemaVersion(3), columns=wide.columns[:1])
    remade = replace(other, table_id=TableId(9), version=SchemaVersion(1))

    def era(n: int, schema: TableSchema = orders) -> tuple[int, int, int] | None:
        opened = open_table(layout, layout.table_path("history", schema), layout.app_id("history", schema.table_id))
        assert opened is not None
        found = era_at(opened, Seq(n))
        return None if found is None else (found.schema.table_id, found.schema.version, found.first)

    append_history(layout, orders, [records(orders, ("c", 3, {"id": 1}))], Seq(4))
    assert [era(n) for n in (2, 3, 99)] == [None, (3, 1, 3), (3, 1, 3)]
    # One batch of the stream may hold records of several versions.
    some = [
        records(orders, ("c", 5, {"id": 2})),
        records(wide, ("c", 6, {"id": 3})),
        records(other, ("d", 8, {"id": 3})),
    ]
    append_history(layout, other, some, Seq(8))
    append_history(layout, other, some, Seq(8))
    assert [era(n) for n in (5, 6, 7, 8)] == [(3, 1, 3), (3, 2, 3), (3, 2, 3), (3, 3, 3)]
    renamed = replace(other, name="orders_old", version=SchemaVersion(4))
    append_history(layout, remade, [records(remade, ("c", 11, {"id": 1}))], Seq(11))
    commit_cut(
        layout, Seq(11), [append_history(layout, remade, [], Seq(11))], committed_at=datetime(2026, 3, 1, tzinfo=UTC)
    )
    append_history(layout, renamed, [records(renamed, ("c", 12, {"id": 9}))], Seq(12))
    assert [era(n) for n in (9, 11, 12)] == [(3, 3, 3), (9, 1, 11), (9, 1, 11)]
    assert [era(n, renamed) for n in (2, 5, 9, 12)] == [None, (3, 1, 3), (3, 3, 3), (3, 4, 3)]


def test_a_history_that_knows_no_schemas_by_position_gives_the_newest_until_columns_change(
    layout: LakeLayout, orders: TableSchema, records: Records, evolved: Evolved, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as older:
        older.setattr("millstream.lake.history._begun", lambda eras, _batches, _after: eras)
        append_history(layout, orders, [records(orders, ("c", 1, {"id": 1}))], Seq(1))

    def version(n: int) -> int:
        opened = open_table(layout, layout.table_path("history", orders), layout.app_id("history", orders.table_id))
        assert opened is not None
        found = era_at(opened, Seq(n))
        assert found is not None
        assert newest_schema(opened).version >= found.schema.version
        return found.schema.version

    assert [version(n) for n in (0, 1, 9)] == [1, 1, 1]
    wide = evolved(paid=pa.bool_())
    append_history(layout, wide, [records(wide, ("c", 5, {"id": 2}))], Seq(5))
    assert [version(n) for n in (0, 4, 5)] == [1, 1, 2]


@pytest.mark.long
def test_folds_in_steps_get_on_beside_compacted_files_and_cuts_of_other_tables(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    timed = {"__commit_ts": datetime(2026, 3, 1, tzinfo=UTC), "__commit_lsn": 1}
    for n in range(1, 9):
        batch = records(orders, ("c", 10 * n, {"id": n, **timed, "__commit_index": n}))
        commit = append_history(layout, orders, [batch], Seq(10 * n))
        for cut in (10 * n, 10 * n + 3, 10 * n + 6):  # two of three bring nothing for this table
            commit_cut(layout, Seq(cut), [commit], committed_at=datetime.now(UTC))
        if n == 2:
            fold_table(layout, orders, Seq(20))
            fold_into_versions(layout, orders, Seq(20))
    # One file now holds records that the folds have and records that they lack.
    assert (
        maintain_table(
            layout, "history", orders, now_ms=time.time_ns() // 10**6, rules=MaintenanceRules(compact_files=2)
        ).files_compacted
        == 8
    )
    assert fold_table(layout, orders, Seq(86), sizes=FoldSizes(rows_max=2)).n == 86
    assert fold_into_versions(layout, orders, Seq(86), sizes=FoldSizes(rows_max=2)).commit.n == 86
    for view in ("current", "scd2"):
        assert sorted(stored(layout, orders, view).column("id").to_pylist()) == list(range(1, 9))
    history = open_history(layout, orders)
    step = fold_step(layout, history, after=Seq(20), upto=Seq(86), most=(2, 1 << 30), table=orders.table_id)
    assert step == 46, "the last cut with two records more"
    assert fold_step(layout, history, after=Seq(20), upto=Seq(86), most=(6, 1 << 30), table=orders.table_id) == 86


@pytest.mark.parametrize("seed", range(20))
def test_a_bound_on_schemas_changes_no_owner_and_no_beginning(
    orders: TableSchema, monkeypatch: pytest.MonkeyPatch, seed: int
):
    monkeypatch.setattr(schema_history, "ERAS_MAX", 5)
    chance = random.Random(seed)
    whole = bounded = Eras("public.orders", ())
    table, name = 3, "orders"
    for start in range(1, 120):
        if chance.random() < 0.1:
            table, name = chance.choice([3, 9]), chance.choice(["orders", "orders_old"])
        schema = replace(orders, table_id=TableId(table), name=name, version=SchemaVersion(start))
        whole, bounded = whole.having(Seq(start), schema), bounded.having(Seq(start), schema).bounded()
    assert len(bounded.told) < len(whole.told) / 2
    assert bounded.told[-5:] == whole.told[-5:]
    assert (bounded.since, bounded.taken_since, bounded.taken_over) == (
        whole.since,
        whole.taken_since,
        whole.taken_over,
    )
    for n in map(Seq, range(121)):
        assert bounded.owner_at(n) == whole.owner_at(n)
        for owner in (TableId(3), TableId(9)):
            assert bounded.of_table(owner)[:1] == whole.of_table(owner)[:1]
            if n >= bounded.complete_from:
                assert bounded.schema_at(owner, n) == whole.schema_at(owner, n)


@pytest.mark.long
def test_the_schemas_in_the_properties_are_bounded_and_an_older_moment_is_refused(
    layout: LakeLayout, orders: TableSchema, records: Records, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(schema_history, "ERAS_MAX", 4)
    sizes = []
    for n in range(1, 31):
        schema = replace(orders, version=SchemaVersion(n))
        landed = append_history(layout, schema, [records(schema, ("c", n, {"id": n}))], Seq(n))
        commit_cut(layout, Seq(n), [landed], committed_at=datetime(2026, 3, n, tzinfo=UTC))
        opened = open_history(layout, orders)
        sizes.append(sum(len(name) + len(value or "") for name, value in opened.properties.items()))
    assert max(sizes[6:]) < 1.1 * sizes[5]
    eras = Eras.of(opened)
    assert [start for start, _ in eras.told] == [1, 27, 28, 29, 30]
    assert eras.complete_from == 27
    for n, rows in ((30, 30), (27, 27)):
        with LakeSession(layout, as_of=Seq(n)) as session:
            assert session.query("SELECT count(*) AS c FROM public.orders").to_pylist() == [{"c": rows}]
    with (
        LakeSession(layout, as_of=Seq(26)) as session,
        pytest.raises(PositionError, check=coded("beyond_retention"), match="changed more than"),
    ):
        session.query("SELECT count(*) FROM public.orders")


def test_files_of_another_position_or_of_long_ago_are_never_committed(
    layout: LakeLayout, orders: TableSchema, records: Records, monkeypatch: pytest.MonkeyPatch
):
    some = [records(orders, ("c", 1, {"id": 1}), ("c", 2, {"id": 2}))]
    late = write_records(layout, orders, some, Seq(2))
    append_history(layout, orders, [records(orders, ("c", 1, {"id": 1}))], Seq(1))
    with pytest.raises(LakeConflict):
        commit_records(layout, [late], Seq(2))
    parts = [write_records(layout, orders, [records(orders, ("c", seq, {"id": seq}))], Seq(3)) for seq in (2, 3)]
    now_s = time.time()
    with monkeypatch.context() as changed:
        changed.setattr(time, "time", lambda: now_s + 3_000)
        with pytest.raises(LakeConflict):
            commit_records(layout, parts, Seq(3))
    assert commit_records(layout, parts, Seq(3)).rows == 2
    assert commit_records(layout, parts, Seq(3)).rows == 0
    assert seqs(layout, orders) == [1, 2, 3]


def test_parts_under_two_names_of_a_table_are_written_again_as_one(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    """Each part's files lie in the folder of its own name."""
    other = replace(orders, name="renamed", version=SchemaVersion(2))
    parts = [
        write_records(layout, orders, [records(orders, ("c", 1, {"id": 1}))], Seq(2)),
        write_records(layout, other, [records(other, ("c", 2, {"id": 2}))], Seq(2)),
    ]
    with pytest.raises(LakeConflict):
        commit_records(layout, parts, Seq(2))
    both = [records(orders, ("c", 1, {"id": 1})), records(other, ("c", 2, {"id": 2}))]
    append_history(layout, other, both, Seq(2))
    assert seqs(layout, other) == [1, 2]


def test_a_batch_with_other_bounds_after_a_kill_claims_no_records_that_a_table_lacks(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    first = records(orders, ("c", 1, {"id": 1}))
    append_history(layout, orders, [first], Seq(1))  # killed before the cut
    commit_cut(layout, Seq(5), [append_history(layout, orders, [first], Seq(5))], committed_at=datetime.now(UTC))
    append_history(layout, orders, [records(orders, ("c", 7, {"id": 7}))], Seq(7))
    assert seqs(layout, orders) == [1, 7]


def test_files_that_grew_old_while_the_table_was_made_ready_are_never_committed(
    layout: LakeLayout, orders: TableSchema, records: Records, monkeypatch: pytest.MonkeyPatch
):
    """A wider type rewrites all of history, which may take hours."""
    append_history(layout, orders, [records(orders, ("c", 1, {"id": 1}))], Seq(1))
    part = write_records(layout, orders, [records(orders, ("c", 2, {"id": 2}))], Seq(2))
    now_s, widened = time.time(), history.widened
    with monkeypatch.context() as changed:

        def slow(*arguments: Any) -> Any:
            changed.setattr(time, "time", lambda: now_s + 9_000)
            return widened(*arguments)

        changed.setattr(history, "widened", slow)
        with pytest.raises(LakeConflict):
            commit_records(layout, [part], Seq(2))
    assert seqs(layout, orders) == [1]
