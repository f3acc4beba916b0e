"""The texts that both sides of `diff` hash: DuckDB writes what PostgreSQL writes, and tells the same values apart."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.diff.column_texts import ComparedColumn, RowTexts, ranges_for
from millstream.diff.compare import What, differences_of
from millstream.model.exact_values import array_of, text_renderer

UTC = pa.timestamp("us", tz="UTC")
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
MICROS = st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999)
VALUES: dict[pa.DataType, tuple[int, st.SearchStrategy[Any]]] = {
    pa.int64(): (20, st.integers(-(2**63), 2**63 - 1)),
    pa.bool_(): (16, st.booleans()),
    pa.string(): (25, TEXT),
    pa.binary(): (17, st.binary()),
    pa.date32(): (1082, st.integers(-719_162, 2_932_896)),
    pa.timestamp("us"): (1114, MICROS),
    UTC: (1184, MICROS),
    pa.decimal128(12, 3): (1700, st.integers(-(10**11), 10**11).map(lambda n: Decimal(n).scaleb(-3))),
    pa.list_(pa.string()): (1009, st.lists(st.none() | TEXT)),
    pa.list_(UTC): (1185, st.lists(st.none() | MICROS)),
    pa.list_(pa.int32()): (1007, st.lists(st.none() | st.integers(-(2**31), 2**31 - 1))),
}
CONNECTION = duckdb.connect(config={"threads": "1", "autoinstall_known_extensions": "false"})
NUMERIC_12_3 = ((12 << 16) | 3) + 4


def column(kind: pa.DataType | None, oid: int, modifier: int = -1, name: str = 'odd "name"') -> ComparedColumn:
    return ComparedColumn(name, oid, modifier, kind)


def duck(sql: str, values: pa.Array, name: str = 'odd "name"') -> list[Any]:
    CONNECTION.register("given", pa.table([values], names=[name]))
    return [row[0] for row in CONNECTION.execute(f"SELECT {sql} FROM given").fetchall()]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", list(VALUES), ids=str)
@given(data=st.data())
def test_duckdb_writes_postgresqls_text(kind: pa.DataType, data: st.DataObject) -> None:
    oid, strategy = VALUES[kind]
    values = data.draw(st.lists(st.none() | strategy, min_size=1, max_size=20))
    compared = column(kind, oid, NUMERIC_12_3 if oid == 1700 else -1)
    render = text_renderer(kind)
    assert duck(compared.lake_sql(with_exact=False), array_of(values, kind)) == [
        None if value is None else render(value) for value in values
    ]


@given(st.lists(st.floats(), min_size=1, max_size=50))
def test_doubles_texts_read_back_as_the_same_doubles(values: list[float]) -> None:
    texts = duck(column(pa.float64(), 701).lake_sql(with_exact=False), pa.array(values, pa.float64()))
    for value, text in zip(values, texts, strict=True):
        assert repr(float(text)) == repr(value) or math.isnan(value)
        assert not text.endswith(".0")
        assert ("e" in text) == (value != 0 and math.isfinite(value) and not 1e-4 <= abs(value) < 1e15)


@given(st.lists(st.tuples(st.none() | TEXT, st.none() | TEXT), min_size=1, max_size=30))
def test_rows_have_one_hash_only_where_they_are_equal(rows: list[tuple[str | None, str | None]]) -> None:
    texts = RowTexts((column(pa.string(), 25, name="a"), column(pa.string(), 25, name="b")), (), 7)
    with duckdb.connect() as connection:
        connection.register(
            "given", pa.table([pa.array(c, pa.string()) for c in zip(*rows, strict=True)], names=["a", "b"])
        )
        hashes = connection.sql(texts.lake_sql("given", with_exact=False)).fetchall()
    assert len({hashed for _, hashed, *_ in hashes}) == len(set(rows))
    assert all(0 <= place < 7 and place == hashed % 7 for place, hashed, *_ in hashes)


def test_numbers_whose_scale_the_lake_does_not_keep_are_compared_by_value() -> None:
    plain, asked = column(pa.string(), 1700), column(pa.decimal128(20, 4), 1700)
    kept = column(pa.decimal128(12, 3), 1700, NUMERIC_12_3)
    for compared, same in ((plain, False), (asked, True), (kept, False)):
        assert (compared.comparable("1.5000", of_source=False) == compared.comparable("1.5", of_source=True)) is same
    assert asked.comparable("NaN", of_source=True) == "NaN"
    assert asked.comparable("100.0000", of_source=False) == "100"
    real = column(pa.float64(), 700)
    assert real.comparable("0.1", of_source=True) == real.comparable("0.10000000149011612", of_source=False)
    assert real.comparable("0", of_source=True) != real.comparable("-0", of_source=False)


ROW = st.tuples(st.integers(0, 5).map(str), st.sampled_from(["x", "y", None]))


@given(st.lists(ROW, unique_by=lambda row: row[0]), st.lists(ROW, unique_by=lambda row: row[0]))
def test_keyed_differences_are_just_those(lake: list[Any], source: list[Any]) -> None:
    texts = RowTexts((column(pa.int32(), 23, name="k"), column(pa.string(), 25, name="v")), ("k",), 1)
    ours, theirs = dict(lake), dict(source)
    found = {d.key["k"]: (d.what, dict(d.columns)) for d in differences_of(texts, lake, source)}
    wanted: dict[str | None, Any] = {}
    for key in ours.keys() | theirs.keys():
        if key not in ours:
            wanted[key] = (What.MISSING_IN_LAKE, {})
        elif key not in theirs:
            wanted[key] = (What.MISSING_IN_SOURCE, {})
        elif ours[key] != theirs[key]:
            wanted[key] = (What.VALUES, {"v": (ours[key], theirs[key])})
    assert found == wanted


@given(st.lists(ROW), st.lists(ROW))
def test_differences_of_bags_count_equal_rows(lake: list[Any], source: list[Any]) -> None:
    texts = RowTexts((column(pa.int32(), 23, name="k"), column(pa.string(), 25, name="v")), (), 1)
    found = {(d.key["k"], d.key["v"]): d.counts for d in differences_of(texts, lake, source)}
    assert found == {
        row: (lake.count(row), source.count(row)) for row in {*lake, *source} if lake.count(row) != source.count(row)
    }


def test_ranges_bound_rows_and_bytes() -> None:
    assert ranges_for(0, 0, rows_max=10, bytes_max=100) == 1
    assert ranges_for(25, 0, rows_max=10, bytes_max=100) == 3
    assert ranges_for(25, 1000, rows_max=10, bytes_max=100) == 10
