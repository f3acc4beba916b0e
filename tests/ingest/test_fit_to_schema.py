"""Rows are fitted to their table's schema: no value changes on its way into a column."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import IngestError, InvalidValue
from millstream.ingest.fit_to_schema import fitted
from millstream.ingest.python_rows import table_of
from millstream.model.ids import SchemaVersion, SourceId, TableId
from millstream.model.schema import Column, TableSchema
from millstream.testing.errors import coded


def table(*, key: tuple[str, ...] = (), **types: pa.DataType) -> TableSchema:
    columns = tuple(Column(name, kind) for name, kind in types.items())
    return TableSchema(TableId(1), SchemaVersion(1), SourceId(0), "public", "clicks", columns, key, key)


def test_an_empty_list_fits_lists_of_anything() -> None:
    rows = table_of([{"tags": []}])
    assert fitted(table(tags=pa.list_(pa.string())), rows)[0].to_pylist() == [[]]
    assert fitted(table(tags=pa.list_(pa.int64())), rows)[0].to_pylist() == [[]]


def test_a_key_is_never_null() -> None:
    keyed = table(id=pa.int64(), name=pa.string(), key=("id",))
    for rows in ([{"id": None, "name": "a"}], [{"name": "a"}], [{"id": 1}, {"name": "a"}]):
        with pytest.raises(InvalidValue):
            fitted(keyed, table_of(rows))


def test_rows_that_would_fill_the_memory_with_what_they_lack_are_too_many() -> None:
    wide = table(**{f"c{n}": pa.string() for n in range(1000)}, id=pa.int64())
    rows = pa.table({"id": pa.nulls(20_000, pa.int64())})
    assert len(fitted(wide, rows)) == 1001
    with pytest.raises(IngestError, check=coded("rows_too_large")):
        fitted(wide, pa.table({"id": pa.nulls(40_000, pa.int64())}))


TYPES = (
    pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.decimal128(38, 9), pa.decimal128(20, 0), pa.string(), pa.bool_(),
    pa.binary(), pa.date32(), pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.list_(pa.int64()), pa.list_(pa.string()),
)  # fmt: skip
VALUES = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**63 - 1), st.integers(-300, 300), st.floats(), st.floats(width=32), st.text(max_size=3),
    st.binary(max_size=3), st.dates(), st.datetimes(), st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-(10**9), max_value=10**9),
    st.lists(st.integers(0, 9), min_size=1, max_size=2), st.lists(st.text(max_size=1), min_size=1, max_size=2),
)  # fmt: skip


@given(st.sampled_from(TYPES), VALUES)
def test_a_value_is_exactly_itself_in_its_column_or_refused(kind: pa.DataType, value: Any) -> None:
    rows = table_of({"a": value})
    try:
        (found,) = fitted(table(a=kind), rows)
    except InvalidValue:
        assert rows.column("a").type != kind, "a column takes values of its own type"
        return
    assert found.type == kind
    back = found.to_pylist()[0]
    assert back == value or (math.isnan(back) and math.isnan(value))
    assert isinstance(back, bool) == isinstance(value, bool)
    assert isinstance(back, str) == isinstance(value, str)
