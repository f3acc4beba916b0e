"""Rows of applications as columns: each value comes back unchanged, or its call is refused."""

from __future__ import annotations

import datetime as dt
import math
import tracemalloc
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import IngestError, InvalidValue
from millstream.ingest.json_rows import columns_of
from millstream.ingest.log_types import log_type
from millstream.ingest.python_rows import COLUMNS_MAX, ROWS_BYTES_MAX, table_of
from millstream.model.names import NAME_BYTES_MAX
from millstream.model.records import INSTANT
from millstream.testing.errors import coded

VIENNA = dt.timezone(dt.timedelta(hours=1))
NAIVE = dt.datetime(2024, 1, 1, 5)  # noqa: DTZ001
KINDS: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(),
    "integer": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(allow_nan=False),
    "text": st.text(),
    "bytes": st.binary(),
    "date": st.dates(),
    "moment": st.integers(-(10**16), 10**17).map(
        lambda us: dt.datetime(2000, 1, 1, tzinfo=VIENNA) + dt.timedelta(microseconds=us)
    ),
    "naive": st.datetimes(),
    "decimal": st.decimals(allow_nan=False, allow_infinity=False, places=9, min_value=-(10**28), max_value=10**28),
    "numbers": st.lists(st.integers(-(2**63), 2**63 - 1)),
}


@given(
    st.lists(st.fixed_dictionaries({}, optional={name: st.none() | kind for name, kind in KINDS.items()}), min_size=1)
)
def test_values_of_dicts_come_back_as_they_were(rows: list[dict[str, Any]]) -> None:
    if not any(rows):
        with pytest.raises(InvalidValue):
            table_of(rows)
        return
    table = table_of(rows)
    assert table.num_rows == len(rows)
    for name in {name for row in rows for name in row}:
        column = table.column(name)
        assert pa.types.is_null(column.type) or log_type(column.type) == column.type
        assert column.to_pylist() == [row.get(name) for row in rows]


def test_what_has_no_type_of_its_own_is_text() -> None:
    row = {
        "uuid": UUID(int=5),
        "time": dt.time(1, 2, 3),
        "nested": {"a": [1, {"at": dt.date(2020, 1, 2), "is": Decimal("1.50")}]},
        "lists": [[1, 2], []],
        "dicts": [{"a": None}],
    }
    assert table_of(row).to_pylist() == [
        {
            "uuid": "00000000-0000-0000-0000-000000000005",
            "time": "01:02:03",
            "nested": '{"a":[1,{"at":"2020-01-02","is":"1.50"}]}',
            "lists": "[[1,2],[]]",
            "dicts": '[{"a":null}]',
        }
    ]


@pytest.mark.parametrize(
    "rows",
    [
        "text",
        [1],
        [{}],
        [{1: 2}],
        [{"": 1}],
        [{"a\0b": 1}],
        [{"__op": 1}],
        [{"__SEQ": 1}],
        [{"Name": 1, "name": 2}],
        [{"\ud800": 1}],
        [{"a": 1}, {"a": "x"}],
        [{"a": True}, {"a": 1}],
        [{"a": b"x"}, {"a": "x"}],
        [{"a": dt.date(2020, 1, 1)}, {"a": dt.datetime(2020, 1, 1)}],  # noqa: DTZ001
        [{"a": dt.datetime(2020, 1, 1)}, {"a": dt.datetime(2020, 1, 1, tzinfo=dt.UTC)}],  # noqa: DTZ001
        [{"a": [1, "x"]}],
        [{"a": [dt.date(2020, 1, 1), dt.datetime(2020, 1, 1)]}],  # noqa: DTZ001
        [{"a": 2**70}],
        [{"a": 2**60 + 1}, {"a": 0.5}],
        [{"a": "\ud800"}],
        [{"a": {"x": math.nan}}],
        [{"a": {"x": b"bytes"}}],
        [{"a": ...}],
        [{"a": pd.Timestamp("2024-01-01 00:00:00.123456789")}],
        [{"a": pd.Timestamp("2024-01-01")}, {"a": pd.Timestamp("2024-01-01", tz="UTC")}],
        [{"a": {1: "a", "1": "b"}}],
        [{"a": "x"}, {"a": {}}],
        [{"a": 2**63}],
        pd.DataFrame({"a": pd.Series([dt.date(2024, 1, 1), NAIVE], dtype=object)}),
        pd.DataFrame({"a": pd.Series([NAIVE, NAIVE.replace(tzinfo=VIENNA)], dtype=object)}),
        pd.DataFrame({"a": pd.Series(["a", b"x"], dtype=object)}),
        pd.DataFrame({"a": pd.PeriodIndex(["2024-01"], freq="M")}),
        pd.DataFrame([[1, 2]], columns=["v", "v"]),
        pd.Series([1]),
        pl.DataFrame({"a": [...]}),
        pl.DataFrame({"a": [1]}, schema={"a": pl.Int128}),
        pl.Series("a", [1]),
        pl.LazyFrame({"a": [1]}),
        pa.table([pa.array([1]), pa.array([2])], names=["v", "v"]),
        pa.table({"a": pa.array([b"\xff\xfe"]).view(pa.string())}),
        pa.chunked_array([[1]]),
        [{"a": dt.timedelta(1)}],
        pa.table({"a": pa.array([1001], pa.timestamp("ns"))}),
        pa.table({"a": pa.array([2**62], pa.timestamp("us"))}),
        pa.table({"a": pa.array([2**30], pa.date32())}),
        pa.table({"a": pa.array([None], pa.month_day_nano_interval())}),
    ],
    ids=lambda rows: repr(rows)[:50].replace("\n", " ") if "0x" not in repr(rows) else type(rows).__name__,
)
def test_what_would_not_come_back_is_refused_by_name(rows: Any) -> None:
    with pytest.raises(InvalidValue) as refused:
        table_of(rows)
    assert refused.value.message


ARROW: list[tuple[pa.Array, pa.DataType, list[Any]]] = [
    (pa.array([1], pa.int8()), pa.int16(), [1]),
    (pa.array([255], pa.uint8()), pa.int16(), [255]),
    (pa.array([2**32 - 1], pa.uint32()), pa.int64(), [2**32 - 1]),
    (pa.array([2**64 - 1], pa.uint64()), pa.decimal128(20, 0), [Decimal(2**64 - 1)]),
    (pa.array(["a", None, "a"]).dictionary_encode(), pa.string(), ["a", None, "a"]),
    (pa.array(["a"], pa.large_string()), pa.string(), ["a"]),
    (pa.array(["a"], pa.string_view()), pa.string(), ["a"]),
    (pa.array([b"ab"], pa.binary(2)), pa.binary(), [b"ab"]),
    (pa.array([1000], pa.timestamp("ns", "Europe/Vienna")), INSTANT, [dt.datetime(1970, 1, 1, 0, 0, 0, 1, tzinfo=dt.UTC)]),
    (pa.array([dt.date(2020, 1, 1)], pa.date64()), pa.date32(), [dt.date(2020, 1, 1)]),
    (pa.array([[1]], pa.large_list(pa.int32())), pa.list_(pa.int32()), [[1]]),
    (pa.array([{"x": 1}]), pa.string(), ['{"x":1}']),
    (pa.array([Decimal("1e39")], pa.decimal256(60, 2)), pa.string(), ["1" + "0" * 39 + ".00"]),
    (pa.array([UUID(int=1)]), pa.string(), ["00000000-0000-0000-0000-000000000001"]),
    (pa.array([[]]), pa.list_(pa.null()), [[]]),
    (pa.array([None]), pa.null(), [None]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("array", "kind", "values"), ARROW, ids=lambda part: str(part)[:40] if isinstance(part, pa.DataType) else ""
)
def test_arrow_columns_are_of_the_logs_types(array: pa.Array, kind: pa.DataType, values: list[Any]) -> None:
    column = table_of(pa.table({"a": array})).column("a")
    assert column.type == kind
    assert column.to_pylist() == values


def test_frames_of_others_are_rows_too() -> None:
    expected = [{"id": 1, "name": "a"}, {"id": 2, "name": None}]
    pandas = pd.DataFrame({"id": [1, 2], "name": ["a", None]}, index=[7, 8])
    for rows in (
        pandas,
        pl.DataFrame(expected),
        pa.Table.from_pylist(expected),
        iter(expected),
        pa.RecordBatch.from_pylist(expected),
    ):
        assert table_of(rows).to_pylist() == expected


def test_what_is_too_large_says_so() -> None:
    with pytest.raises(IngestError, check=coded("rows_too_large")):
        table_of({f"c{n}": 1 for n in range(COLUMNS_MAX + 1)})
    assert table_of({f"c{n}": 1 for n in range(COLUMNS_MAX)}).num_columns == COLUMNS_MAX
    with pytest.raises(IngestError, check=coded("rows_too_large")):
        table_of({"é" * (NAME_BYTES_MAX // 2 + 1): 1})
    half = pa.array([b"x" * (ROWS_BYTES_MAX // 2 - 16)])
    assert table_of(pa.table({"a": half, "b": half})).num_rows == 1
    with pytest.raises(IngestError, check=coded("rows_too_large")):
        table_of(pa.table({"a": half, "b": half, "c": half}))


def test_columns_are_counted_before_they_are_made() -> None:
    rows = [{f"c{n}": 1 for n in range(100_000)}]
    tracemalloc.start()
    with pytest.raises(IngestError, check=coded("rows_too_large"), match="its columns are 100000"):
        columns_of(rows)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20


def test_values_of_frames_are_those_of_dicts() -> None:
    pandas = pd.DataFrame(
        {
            "times": pd.Series([dt.time(12, tzinfo=VIENNA), None], dtype=object),
            "nested": pd.Series([{"a": 1}, {"b": [1]}], dtype=object),
            "kind": pd.Categorical(["x", None]),
            "missing": [1.5, float("nan")],
            "whole": pd.array([1, None], dtype="Int64"),
        }
    ).set_index(pd.Index(["k", "l"], name="key"))
    assert table_of(pandas).to_pylist() == [
        {"key": "k", "times": "12:00:00+01:00", "nested": '{"a":1}', "kind": "x", "missing": 1.5, "whole": 1},
        {"key": "l", "times": None, "nested": '{"b":[1]}', "kind": None, "missing": None, "whole": None},
    ]
    polars = pl.DataFrame({"kind": ["x", None, "x"]}, schema={"kind": pl.Categorical})
    assert table_of(polars).column("kind").to_pylist() == ["x", None, "x"]
    assert table_of([{"a": np.int64(1)}, {"a": 2}]).column("a").to_pylist() == [1, 2]
    uuids = pa.array([[UUID(int=1).bytes, None]], pa.list_(pa.binary(16))).cast(pa.list_(pa.uuid()))
    for rows in ([{"a": [UUID(int=1), None]}], pa.table({"a": uuids})):
        assert table_of(rows).column("a").to_pylist() == [["00000000-0000-0000-0000-000000000001", None]]
    assert table_of([{"a": [dt.time(12)]}]).column("a").to_pylist() == [["12:00:00"]]
