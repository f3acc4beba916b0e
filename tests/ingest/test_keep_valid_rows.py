"""Rows that are kept although others of their request are rejected: indexes of both, a reason for each rejected."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.app.homes import make_home

import millstream
from millstream.app.open_home import home_appender
from millstream.errors import InvalidValue, MillstreamError
from millstream.home.home import Home
from millstream.ingest.append_requests import sole_outcome
from millstream.ingest.fit_to_schema import fitted
from millstream.ingest.keep_valid_rows import REJECTED_MAX, columns_for, table_of_valid, valid_part
from millstream.ingest.python_rows import NESTING_MAX, table_of
from millstream.ingest.schema_on_write import SchemaOnWrite, WriteRules, grown
from millstream.model.ids import SchemaVersion, SourceId, TableId
from millstream.model.operations import Appended, RejectedRow, all_rejected
from millstream.model.schema import Column, TableSchema
from millstream.model.writes import AppendBatch
from millstream.writers.home_appender import HomeAppender

WEB = '[streams.web]\n[streams.web.keys]\n"public.users" = ["id"]\n'
NOON = dt.datetime(2020, 1, 1, 12, tzinfo=dt.UTC)
KEYED = WriteRules(SchemaOnWrite.CREATE, ("id",))
KNOWN = TableSchema(
    TableId(1), SchemaVersion(1), SourceId(0), "public", "users",
    (Column("id", pa.int64()), Column("small", pa.int16()), Column("half", pa.float32()), Column("name", pa.string()), Column("tags", pa.list_(pa.int16()))),
    ("id",), ("id",),
)  # fmt: skip


@pytest.fixture
def home(tmp_path: Path) -> Iterator[HomeAppender]:
    make_home(tmp_path / "web", WEB)
    appender = home_appender(Home(tmp_path / "web"))
    yield appender
    appender.close()


def append(home: HomeAppender, table: str, rows: list[dict[str, Any]], *, keep_valid_rows: bool = False) -> Appended:
    columns, rejected = columns_for(rows, keep_valid_rows=keep_valid_rows)
    request = AppendBatch.of_request({table: columns}, keep_valid_rows=keep_valid_rows)
    return sole_outcome(home.append_batch("web", request, deadline_s=5)).with_rejected(rejected)


def rows_of(home: HomeAppender, table: str) -> list[dict[str, Any]]:
    with millstream.open(home._home.path) as opened:
        return [row for batch in opened.read("web", table=table) for row in batch.to_pylist()]


def test_rows_that_clash_are_named_and_the_others_kept(home: HomeAppender) -> None:
    append(home, "users", [{"id": 1, "name": "a", "age": 5}])
    told = append(
        home,
        "users",
        [
            {"id": 2, "name": "b", "age": 7},
            {"name": "no id"},
            {"id": 3, "age": "old"},
            {"id": "x"},
            {"id": 4, "age": 6, "new": 1},
            5,
        ],  # type: ignore[list-item]
        keep_valid_rows=True,
    )
    assert told.row_count == 2
    assert [(row.row, row.code, row.column) for row in told.rejected] == [
        (1, "invalid_value", "id"),
        (2, "invalid_value", "age"),
        (3, "invalid_value", "id"),
        (5, "invalid_value", None),
    ]
    assert all(row.reason for row in told.rejected)
    assert [(row["id"], row["age"], row.get("new")) for row in rows_of(home, "users")] == [
        (1, 5, None),
        (2, 7, None),
        (4, 6, 1),
    ]
    with pytest.raises(InvalidValue) as refused:
        append(home, "users", [{"name": "c"}, {"id": None}], keep_valid_rows=True)
    assert [row["row"] for row in refused.value.details["rejected"]] == [0, 1]
    with pytest.raises(InvalidValue):
        append(home, "users", [{"id": 5}, {"id": None}])
    assert len(rows_of(home, "users")) == 3


def test_requests_of_a_batch_keep_their_own_rows(home: HomeAppender) -> None:
    append(home, "users", [{"id": 0, "n": 1}])
    rows = pa.table({"id": [1, None, 3, None, None, 6], "n": [1.0, 2.0, 0.5, 1.0, 1.0, 2.0]})
    batch = AppendBatch.of_table("users", rows, [3, 2, 1], [None] * 3, keep_valid_rows=True)
    first, second, third = home.append_batch("web", batch, deadline_s=5)
    assert isinstance(first, Appended)
    assert isinstance(third, Appended)
    assert isinstance(second, InvalidValue)
    assert [(row.row, row.column) for row in first.rejected] == [(1, "id"), (2, "n")]
    assert (first.row_count, third.row_count, third.rejected) == (1, 1, ())
    assert [(row["id"], row["n"]) for row in rows_of(home, "users")] == [(0, 1), (1, 1), (6, 2)]


def test_a_column_that_may_not_be_added_costs_the_rows_that_have_it(home: HomeAppender) -> None:
    append(home, "users", [{"id": 0}])
    home.close()
    make_home(home._home.path, WEB + '[streams.web.ingest]\nschema_on_write = "strict"\n')
    strict = home_appender(Home(home._home.path))
    told = append(strict, "users", [{"id": 1}, {"id": 2, "more": 1}], keep_valid_rows=True)
    assert [(row.row, row.code, row.column) for row in told.rejected] == [(1, "unknown_column", "more")]
    with pytest.raises(MillstreamError, match="may not make one"):
        append(strict, "others", [{"id": 1}], keep_valid_rows=True)
    strict.close()
    assert [row["id"] for row in rows_of(home, "users")] == [0, 1]


def test_more_rejected_rows_than_can_be_told_refuse_the_request(home: HomeAppender) -> None:
    append(home, "users", [{"id": 0}])
    for bad, taken in ((REJECTED_MAX, True), (REJECTED_MAX + 1, False)):
        rows = [{"id": 1}, *[{"id": None}] * bad]
        mixed = [*[{"id": 2}] * (bad + 1), *[{"id": "x"}] * bad]
        for some, kept in ((rows, 1), (mixed, bad + 1)):
            if taken:
                told = append(home, "users", some, keep_valid_rows=True)
                assert (told.row_count, len(told.rejected)) == (kept, REJECTED_MAX)
            else:
                with pytest.raises(InvalidValue):
                    append(home, "users", some, keep_valid_rows=True)
    assert len(rows_of(home, "users")) == 3 + REJECTED_MAX


VALUES = {
    "id": st.none() | st.integers(0, 5),
    "small": st.none() | st.integers(-40_000, 40_000),
    "half": st.none() | st.floats(allow_nan=True) | st.integers(-100, 1 << 60).map(float),
    "name": st.none() | st.text(max_size=2),
    "tags": st.none() | st.lists(st.integers(-40_000, 40_000), max_size=2),
    "new": st.none() | st.booleans(),
}


@given(st.lists(st.fixed_dictionaries(VALUES), min_size=1, max_size=12))
def test_exactly_the_rows_that_fit_alone_are_kept(rows: list[dict[str, Any]]) -> None:
    types = [pa.int64(), pa.int64(), pa.float64(), pa.string(), pa.list_(pa.int64()), pa.bool_()]
    table = pa.table(
        [pa.array([row[name] for row in rows], kind) for name, kind in zip(VALUES, types, strict=True)], list(VALUES)
    )
    part = valid_part(KNOWN, table, KEYED)

    def fits_alone(place: int) -> bool:
        try:
            alone = table.slice(place, 1)
            fitted(grown(KNOWN, alone.schema, KEYED), alone)
        except InvalidValue:
            return False
        return True

    fitting = [fits_alone(place) for place in range(len(rows))]
    assert [place not in part.clashes for place in range(len(rows))] == fitting
    wanted = grown(KNOWN, part.rows.schema, KEYED)
    assert fitted(wanted, part.rows)[0].to_pylist() == [
        row["id"] for row, fits in zip(rows, fitting, strict=True) if fits
    ]


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ([1, "a", 2, None, 2.5], [0, 2, 3, 4]),
        (["a", 1, "b"], [0, 2]),
        ([1, "a"], [0]),
        ([True, 1, True], [0, 2]),
        ([1 << 70, 1, 2], [1, 2]),
        ([NOON.replace(tzinfo=None), NOON.replace(tzinfo=None), NOON], [0, 1]),
        ([[1], ["a"], [2, None], []], [0, 2]),
        ([{"a": 1}, [1], 3, {"b": float("nan")}], [0, 1]),
        ([Decimal(1), Decimal(2), 1.5], [0, 1]),
        ([uuid.UUID(int=1), "text", uuid.UUID(int=2)], [0, 2]),
        ([object(), 1], [1]),
    ],
)
def test_values_of_another_kind_than_most_are_left_out(values: list[Any], kept: list[int]) -> None:
    table, rejected = table_of_valid([{"n": i, "v": value} for i, value in enumerate(values)])
    assert table.column("n").to_pylist() == kept
    assert [row.row for row in rejected] == [i for i in range(len(values)) if i not in kept]
    assert {row.column for row in rejected} == {"v"}


@pytest.mark.parametrize(
    ("column", "values", "kept"),
    [
        (pa.int64(), ["x", 2], [2]),
        (pa.int64(), ["x", "y", 2.5, None, 3], [2.5, None, 3.0]),
        (pa.string(), [1, 2, "x"], ["x"]),
        (pa.string(), [1, {"a": 1}, 2], ['{"a":1}']),
        (pa.bool_(), ["x", "y", True], [True]),
        (pa.list_(pa.int64()), ["x", "y", [1]], [[1]]),
        (pa.decimal128(38, 9), ["x", "y", Decimal(1)], [Decimal(1)]),
        (pa.binary(), ["x", 1, 2], [1, 2]),
    ],
)
def test_the_tables_column_decides_which_kind_is_kept(column: pa.DataType, values: list[Any], kept: list[Any]) -> None:
    table, rejected = table_of_valid([{"v": value} for value in values], types=lambda: {"v": column})
    assert table.column("v").to_pylist() == kept
    assert len(rejected) == len(values) - len(kept)


def test_tables_are_looked_up_only_for_values_of_several_kinds() -> None:
    def types() -> dict[str, pa.DataType]:
        pytest.fail("it was looked up")

    assert table_of_valid([{"v": "x"}, {"v": "y"}], types=types)[1] == ()


def test_rows_that_fit_the_table_are_kept_whatever_most_rows_hold(tmp_path: Path) -> None:
    make_home(tmp_path / "web", WEB)
    with millstream.open(tmp_path / "web") as home:
        home.append("web", "n", {"a": 1})
        for call in (home.append, lambda _, *rest, **options: home.session("web", "s").append(*rest, **options)):
            told = call("web", "n", [{"a": "x"}, {"a": 2}], keep_valid_rows=True)
            assert ([row.row for row in told.rejected], told.row_count) == ([0], 1)
        both = home.append_all("web", {"n": [{"a": None}, {"a": "x"}, {"a": 3}]}, keep_valid_rows=True)
        assert [row.row for row in both.tables["public.n"].rejected] == [1]
        assert [row["a"] for batch in home.read("web", table="n") for row in batch.to_pylist()] == [1, 2, 2, None, 3]


def test_each_row_of_a_refused_request_is_named(tmp_path: Path) -> None:
    make_home(tmp_path / "web", WEB)
    with millstream.open(tmp_path / "web") as home:
        home.append("web", "users", {"id": 1, "n": 1})
        rows = [{"id": 2, "n": "x"}, {"n": 3}, {"id": 4, "n": True}, {"n": 5}]
        with pytest.raises(InvalidValue) as refused:
            home.append("web", "users", rows, keep_valid_rows=True)
        assert [row["row"] for row in refused.value.details["rejected"]] == [0, 1, 2, 3]
        with pytest.raises(InvalidValue) as refused:
            home.append_all("web", {"users": rows, "other": [5]}, keep_valid_rows=True)
        assert [(row["table"], row["row"]) for row in refused.value.details["rejected"]] == [
            ("public.users", 0), ("public.users", 1), ("public.users", 2), ("public.users", 3), ("public.other", 0),
        ]  # fmt: skip


@given(st.lists(st.sampled_from(["before", "later", "kept"]), max_size=30))
def test_rejected_rows_are_named_by_their_places_among_all_rows(fates: list[str]) -> None:
    rows = [RejectedRow(place, "invalid_value", f"row {place}") for place in range(len(fates))]
    before = [row for row, fate in zip(rows, fates, strict=True) if fate == "before"]
    appended = [row for row, fate in zip(rows, fates, strict=True) if fate != "before"]
    later = [replace(row, row=at) for at, row in enumerate(appended) if fates[row.row] == "later"]
    assert list(all_rejected(before, later)) == [row for row, fate in zip(rows, fates, strict=True) if fate != "kept"]


def test_rows_without_a_clash_are_made_columns_as_ever() -> None:
    rows = [{"a": 1, "b": "x"}, {"a": 2}]
    assert table_of_valid(rows) == (table_of(rows), ())
    assert table_of_valid(table_of(rows))[1] == ()
    assert table_of_valid({"a": 1})[0].num_rows == 1
    with pytest.raises(InvalidValue):
        table_of_valid([1, 2])  # type: ignore[list-item]


def test_values_may_lie_in_each_other_so_deep_and_no_deeper() -> None:
    def nested(depth: int) -> Any:
        value: Any = 1
        for i in range(depth):
            value = [value] if i % 2 else {"a": value}
        return value

    assert table_of([{"v": nested(NESTING_MAX)}]).num_rows == 1
    with pytest.raises(InvalidValue, match="deep"):
        table_of([{"v": nested(NESTING_MAX + 1)}])
    with pytest.raises(InvalidValue, match="deep"):
        table_of([{"v": nested(100_000)}])
    table, rejected = table_of_valid([{"v": nested(2)}, {"v": nested(NESTING_MAX + 1)}, {"v": nested(4)}])
    assert ([row.row for row in rejected], table.num_rows) == ([1], 2)


def of_lists(item: pa.DataType) -> TableSchema:
    return TableSchema(
        TableId(1), SchemaVersion(1), SourceId(0), "public", "users", (Column("tags", pa.list_(item)),), (), ()
    )


def test_a_slice_of_lists_is_judged_by_its_own_items() -> None:
    rows = pa.table({"tags": pa.array([[0], None, [32768], [5]], pa.list_(pa.int64()))})
    schema = of_lists(pa.int16())
    taken = [fitted(schema, rows.slice(place, 1))[0].to_pylist() for place in (0, 1, 3)]
    assert taken == [[[0]], [None], [[5]]]
    with pytest.raises(InvalidValue, match="32768"):
        fitted(schema, rows.slice(2, 1))
    assert list(valid_part(schema, rows, WriteRules(SchemaOnWrite.CREATE, ())).clashes) == [2]


def test_floats_in_lists_are_not_rounded() -> None:
    rows = pa.table({"tags": pa.array([[0.5, None], [0.1], None, [float("nan")]], pa.list_(pa.float64()))})
    schema = of_lists(pa.float32())
    assert list(valid_part(schema, rows, WriteRules(SchemaOnWrite.CREATE, ())).clashes) == [1]
    with pytest.raises(InvalidValue, match="more digits"):
        fitted(schema, rows)


def test_a_table_of_columns_made_here_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = table_of([{"id": 1, "name": "x"}])
    given = pa.table({"id": [1], "at": pa.array([1], pa.time64("ns"))})
    checked = table_of(given)
    with monkeypatch.context() as patch:
        patch.setattr("millstream.ingest.python_rows.stored", lambda *_: pytest.fail("it was checked twice"))
        assert table_of(made) is made
        assert table_of(checked) is checked
    assert table_of(given).schema.field("at").type == pa.string(), "only what was made here needs no check"
    assert table_of(made.slice(0, 0)) is not made
