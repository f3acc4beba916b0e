"""Upkeep changes no row, leaves readers in time alone, and can be done beside writes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable

from millstream.lake.current import fold_table
from millstream.lake.history import append_history
from millstream.lake.layout import LakeLayout, View
from millstream.lake.upkeep import tend_table
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


def test_small_files_become_few_and_replaced_ones_go_once_readers_are_done(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    write(layout, orders, records, 1, 31)
    young = tend_table(layout, "current", orders, now_ms=now_ms())
    assert (young.files_compacted, young.files_deleted) == (0, 0)
    assert files(layout, "current", orders) >= 30

    done = tend_table(layout, "history", orders, now_ms=now_ms(), compact_files=20)
    assert done.files_compacted == 30
    assert len(DeltaTable(layout.table_path("history", orders)).file_uris()) == 2
    write(layout, orders, records, 31, 33)

    in_a_while = now_ms() + 301_000
    assert tend_table(layout, "current", orders, now_ms=in_a_while).files_deleted >= 30
    assert tend_table(layout, "current", orders, now_ms=in_a_while).files_deleted == 0
    assert tend_table(layout, "history", orders, now_ms=in_a_while).files_deleted == 30
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
    assert tend_table(layout, "current", orders, now_ms=cut + 300_000).files_deleted > 0
    assert opened.to_pyarrow_table().num_rows == 4
    assert uncommitted.exists()


def test_a_table_that_is_not_there_needs_nothing(layout: LakeLayout, orders: TableSchema):
    assert tend_table(layout, "current", orders, now_ms=now_ms()).files_deleted == 0
