"""Tables whose rows add to columns: however a log is split into folds, totals are sums over all records."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st
from tests.lake.landing import append_history

from millstream.crdt.accumulating import LogRuns
from millstream.errors import InvalidValue
from millstream.export.net_changes import latest_rows, with_latest
from millstream.lake.commit_cuts import commit_cut
from millstream.lake.folded.current_table import fold_table
from millstream.lake.folded.scd2_table import fold_into_versions
from millstream.lake.layout import LakeLayout
from millstream.lake.query.query_session import LakeSession
from millstream.model.ids import SourceId
from millstream.model.positions import Seq
from millstream.model.schema import Column, TableSchema

Records = Callable[..., pa.RecordBatch]
Event = tuple[str, int, dict[str, Any]]


@pytest.fixture
def posts(orders: TableSchema) -> TableSchema:
    columns = (
        Column("id", pa.int64()),
        Column("title", pa.string()),
        Column("likes", pa.int64(), accumulates="pn_counter(increments)"),
        Column("paid", pa.decimal128(38, 9), accumulates="g_counter(increments)"),
        Column("score", pa.float64(), accumulates="pn_counter(increments)"),
    )
    return replace(orders, name="posts", source=SourceId(0), columns=columns)


@dataclass
class Counting:
    """The rows as a plain model has them."""

    rows: dict[int, dict[str, Any]] = field(default_factory=dict)

    def event(self, chance: random.Random, seq: int) -> Event:
        """Return a record with some of the columns, and add it up."""
        values: dict[str, Any] = {
            "title": chance.choice([None, f"t{seq}"]),
            "likes": chance.choice([None, 1, -3, 2**40]),
            "paid": chance.choice([None, Decimal("0.25"), Decimal(3)]),
            "score": chance.choice([None, 0.1, -0.7, 1e10]),
        }
        named = {name: value for name, value in values.items() if chance.random() < 0.6}
        key = chance.randrange(6)
        row = self.rows.setdefault(key, {"id": key, **dict.fromkeys(values)})
        for name, value in named.items():
            if name == "title":
                row[name] = value
            elif value is not None:
                row[name] = value if row[name] is None else row[name] + value
        return "c", seq, {"id": key, **named, "__unchanged": [name for name in values if name not in named] or None}


def by_key(rows: pa.Table) -> dict[int, dict[str, Any]]:
    names = ("id", "title", "likes", "paid", "score")
    return {row["id"]: {name: row[name] for name in names} for row in rows.to_pylist()}


@pytest.mark.parametrize("seed", range(6))
def test_however_a_log_is_split_into_stretches_the_latest_rows_have_the_totals(
    posts: TableSchema, records: Records, seed: int
) -> None:
    chance, model = random.Random(seed), Counting()
    before, seq = None, 0
    for _ in range(12):
        some = [model.event(chance, seq := seq + 1) for _ in range(chance.randrange(1, 9))]
        latest = latest_rows(posts, [records(posts, *some)], before)
        changed = {row["id"] for _, _, row in some}
        assert by_key(latest.rows) == {key: model.rows[key] for key in changed}
        assert latest.rows.column("__unchanged").null_count == latest.rows.num_rows
        before = with_latest(before, latest)
    assert by_key(before) == model.rows


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(3))
def test_the_lake_shows_totals_in_current_and_versions_and_increments_in_history(
    layout: LakeLayout, posts: TableSchema, records: Records, seed: int
) -> None:
    chance, model = random.Random(seed), Counting()
    told: list[Event] = []
    seq = 0
    for _ in range(3):
        some = [model.event(chance, seq := seq + 1) for _ in range(chance.randrange(3, 20))]
        told += some
        landed = append_history(layout, posts, [records(posts, *some)], Seq(seq))
        commit_cut(layout, Seq(seq), [landed], committed_at=datetime.now(UTC))
        with LakeSession(layout) as session:
            assert by_key(session.query("select * from public.posts")) == model.rows
            history = session.query('select * from history."public.posts" order by __seq')
        assert history.column("likes").to_pylist() == [row.get("likes") for _, _, row in told]
        fold_table(layout, posts, Seq(seq))
        fold_into_versions(layout, posts, Seq(seq))
        with LakeSession(layout) as session:
            assert by_key(session.query("select * from public.posts")) == model.rows
        versions = DeltaTable(layout.table_path("scd2", posts)).to_pyarrow_table()
        assert by_key(versions.filter(pc.field("is_current"))) == model.rows


def test_records_of_an_earlier_version_say_nothing_about_columns_that_they_lack(
    posts: TableSchema, records: Records
) -> None:
    newer = replace(posts, version=posts.version + 1, columns=(*posts.columns, Column("more", pa.string())))
    old = records(posts, ("c", 2, {"id": 1, "likes": 2, "__unchanged": ["title", "paid", "score"]}))
    new = records(newer, ("c", 1, {"id": 1, "title": "a", "more": "x", "__unchanged": ["likes", "paid", "score"]}))
    (row,) = latest_rows(posts, [new, old]).rows.to_pylist()
    assert (row["title"], row["likes"], row["more"]) == ("a", 2, "x")


def test_a_total_beyond_64_bits_fails_the_read_and_comes_back(posts: TableSchema, records: Records) -> None:
    some = [("c", seq, {"id": 1, "likes": 2**62}) for seq in (1, 2)]
    with pytest.raises(InvalidValue, match=r"likes .* has more than 64 bits"):
        latest_rows(posts, [records(posts, *some)])
    back = ("c", 3, {"id": 1, "likes": -1})
    assert latest_rows(posts, [records(posts, *some, back)]).rows.column("likes").to_pylist() == [2**63 - 1]


def test_versions_go_on_when_increments_bring_a_total_back_into_64_bits(
    layout: LakeLayout, posts: TableSchema, records: Records
) -> None:
    def land(*some: Event) -> Seq:
        n = Seq(some[-1][1])
        commit_cut(
            layout, n, [append_history(layout, posts, [records(posts, *some)], n)], committed_at=datetime.now(UTC)
        )
        return n

    n = land(("c", 1, {"id": 1, "likes": 2**62}), ("c", 2, {"id": 1, "likes": 2**62}))
    with pytest.raises(InvalidValue, match="more than 64 bits"):
        fold_into_versions(layout, posts, n)
    n = land(("c", 3, {"id": 1, "likes": -1}))
    fold_into_versions(layout, posts, n)
    versions = DeltaTable(layout.table_path("scd2", posts)).to_pyarrow_table().sort_by("__seq")
    assert versions.column("likes").to_pylist() == [2**62, None, 2**63 - 1]
    assert versions.column("is_current").to_pylist() == [False, False, True]


@pytest.mark.parametrize("table", ["public.posts", 'scd2."public.posts"'])
def test_sql_over_a_total_beyond_64_bits_fails_with_the_totals_own_error(
    layout: LakeLayout, posts: TableSchema, records: Records, table: str
) -> None:
    some = [("c", seq, {"id": 1, "likes": 2**62}) for seq in (1, 2)]
    landed = append_history(layout, posts, [records(posts, *some)], Seq(2))
    commit_cut(layout, Seq(2), [landed], committed_at=datetime.now(UTC))
    with LakeSession(layout) as session, pytest.raises(InvalidValue) as caught:
        session.query(f"SELECT * FROM {table}")
    assert caught.value.message == "a total of column likes of public.posts has more than 64 bits"
    assert "of the other sign" in caught.value.hint


@given(st.lists(st.tuples(st.integers(0, 4), st.none() | st.integers(-(2**63), 2**63 - 1)), max_size=40))
def test_running_totals_are_sums_of_each_group(events: list[tuple[int, int | None]]) -> None:
    codes = np.array([code for code, _ in events], np.int64)
    totals = LogRuns.of(codes).totals(pa.array([value for _, value in events], pa.int64()))
    sums: dict[int, int | None] = {}
    for place, (code, value) in enumerate(events):
        if value is not None:
            sums[code] = (sums.get(code) or 0) + value
        expected = sums.get(code)
        fits = expected is None or -(2**63) <= expected < 2**63
        assert totals.beyond[place] == (not fits)
        assert totals.values[place].as_py() == (expected if fits else None)


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(-1e9, 1e9)), max_size=300), st.data())
def test_floats_are_added_in_the_logs_order_to_the_bit(events: list[tuple[int, float]], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(events)))
    codes, values = (np.array([event[at] for event in events]) for at in (0, 1))
    whole = LogRuns.of(codes.astype(np.int64))
    once = whole.totals(pa.array(values.astype(np.float64))).values.to_pylist()
    first = {}
    for (code, _), total in zip(events[:cut], once[:cut], strict=True):
        first[code] = total
    rest_codes = np.array([*first, *codes[cut:]], np.int64)
    rest_values = pa.array([*first.values(), *values[cut:]], pa.float64())
    rest = LogRuns.of(rest_codes).totals(rest_values).values.to_pylist()
    assert rest[len(first) :] == once[cut:]
