"""A fold's memory is bounded by the bytes of its records, not by their number alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from tests.lake.landing import append_history

from millstream.lake.commit_cuts import commit_cut
from millstream.lake.folded.current_table import Fold, FoldSizes, begin_fold, fold_table
from millstream.lake.folded.scd2_table import fold_into_versions
from millstream.lake.history import open_history
from millstream.lake.history_scan import Held
from millstream.lake.layout import LakeLayout
from millstream.lake.table_format import open_table
from millstream.model.ids import TableId
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema

Records = Callable[..., pa.RecordBatch]
WIDE = 20_000
"""Bytes of a record, which don't compress."""


@pytest.fixture
def wide(layout: LakeLayout, orders: TableSchema, records: Records) -> LakeLayout:
    """Land ten records of `WIDE` bytes, each with its cut."""
    letters = random.Random(1)
    for n in range(1, 11):
        note = letters.randbytes(WIDE // 2).hex()
        batch = records(orders, ("c", n, {"id": n, "note": note}))
        commit_cut(layout, Seq(n), [append_history(layout, orders, [batch], Seq(n))], committed_at=datetime.now(UTC))
    return layout


def test_few_records_are_built_in_parts_if_they_are_long(wide: LakeLayout, orders: TableSchema) -> None:
    sizes = FoldSizes(fold_bytes=5 * WIDE, build_bytes=10 * WIDE)
    fold = begin_fold(wide, orders, Seq(10), sizes=sizes)
    assert isinstance(fold, Fold)
    assert fold.plan.build
    whole = begin_fold(wide, orders, Seq(10))
    assert isinstance(whole, Fold)
    assert not whole.plan.build
    fold_table(wide, orders, Seq(10), sizes=sizes)
    current = open_table(wide, wide.table_path("current", orders), wide.app_id("current", orders.table_id))
    assert current is not None
    assert sorted(current.dataset().to_table().column("id").to_pylist()) == list(range(1, 11))


def test_a_fold_of_long_records_goes_by_way_of_earlier_cuts(wide: LakeLayout, orders: TableSchema) -> None:
    fold_table(wide, orders, Seq(1))
    sizes = FoldSizes(fold_bytes=10 * WIDE)
    fold = begin_fold(wide, orders, Seq(10), sizes=sizes)
    assert isinstance(fold, Fold)
    assert 1 < fold.plan.upto < 10
    assert fold_table(wide, orders, Seq(10), sizes=sizes).n == 10
    assert fold_into_versions(wide, orders, Seq(10), sizes=sizes).commit.version > 1, "in several commits"


def test_the_records_of_a_range_are_estimated_by_their_files(
    wide: LakeLayout, orders: TableSchema, records: Records
) -> None:
    other = replace(orders, table_id=TableId(9))
    append_history(wide, other, [records(other, *(("c", n, {"id": n}) for n in range(11, 31)))], Seq(30))
    history = open_history(wide, orders)
    whole = Held.of(history, after=Seq(0), upto=Seq(30), table=orders.table_id)
    half = Held.of(history, after=Seq(5), upto=Seq(30), table=orders.table_id)
    assert 10 * WIDE // 2 < whole.size_bytes < 10 * WIDE * 5
    assert abs(2 * half.size_bytes - whole.size_bytes) < WIDE
    assert (whole.rows_in(whole.size_bytes), whole.rows_in(half.size_bytes + WIDE), whole.rows_in(0)) == (10, 5, 1)
    some = Held.of(history, after=Seq(20), upto=Seq(30), table=other.table_id)
    assert some.rows.sum() == pytest.approx(10, abs=1)
    assert Held.of(history, after=Seq(0), upto=Seq(30), table=TableId(5)).size_bytes == 0
