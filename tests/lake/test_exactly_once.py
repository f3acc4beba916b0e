"""A batch is committed once: a table that has reached its end gets nothing more, and one that has moved is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa
import pytest
from tests.lake.landing import append_history

from millstream.errors import LakeConflict
from millstream.lake.exactly_once import check_unmoved, reached
from millstream.lake.folded.current_table import fold_table
from millstream.lake.layout import LakeLayout, View
from millstream.lake.table_format import OpenTable, open_table
from millstream.model.ids import TableId
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema

Records = Callable[..., pa.RecordBatch]


def table(layout: LakeLayout, view: View, schema: TableSchema) -> OpenTable:
    opened = open_table(layout, layout.table_path(view, schema), layout.app_id(view, schema.table_id))
    assert opened is not None
    return opened


def test_a_table_has_reached_every_end_up_to_its_position(
    layout: LakeLayout, orders: TableSchema, records: Records
) -> None:
    assert reached(None, Seq(1)) is None
    append_history(layout, orders, [records(orders, ("c", 1, {"id": 1}))], Seq(5))
    before = table(layout, "history", orders)
    assert [reached(before, Seq(n)) for n in (4, 5, 6)] == [5, 5, None]
    other = open_table(layout, before.path, layout.app_id("history", TableId(9)))
    assert reached(other, Seq(1)) is None, "another app's position is its own"


def test_rows_that_another_table_has_folded_are_to_be_replaced_whatever_the_position(
    layout: LakeLayout, orders: TableSchema, records: Records
) -> None:
    append_history(layout, orders, [records(orders, ("c", 1, {"id": 1}))], Seq(5))
    fold_table(layout, orders, Seq(5))
    assert reached(table(layout, "current", orders), Seq(5), holds=True) == 5
    again = replace(orders, table_id=TableId(9))
    append_history(layout, again, [records(again, ("c", 6, {"id": 1}))], Seq(6))
    fold_table(layout, again, Seq(6))
    mine = table(layout, "current", orders)
    assert (reached(mine, Seq(5)), reached(mine, Seq(5), holds=True)) == (5, None)
    assert reached(table(layout, "current", again), Seq(6), holds=True) == 6


def test_a_table_that_another_task_appended_to_is_refused(
    layout: LakeLayout, orders: TableSchema, records: Records
) -> None:
    append_history(layout, orders, [records(orders, ("c", 1, {"id": 1}))], Seq(1))
    before = table(layout, "history", orders)
    check_unmoved(before, table(layout, "history", orders))
    append_history(layout, orders, [records(orders, ("c", 2, {"id": 2}))], Seq(2))
    with pytest.raises(LakeConflict):
        check_unmoved(before, table(layout, "history", orders))
