"""Rows of one version of a table in the columns of another: all of them, or none."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import pyarrow as pa
import pytest

from millstream.errors import UsageError
from millstream.model.column_renames import names_in
from millstream.model.ids import SchemaVersion, SourceId, TableId
from millstream.model.records import record_schema
from millstream.model.schema import Column, TableSchema
from millstream.model.schema_conversion import conform


def test_rows_of_another_version_are_filled_with_nulls_and_lose_what_is_not_declared() -> None:
    target = pa.schema([pa.field("b", pa.decimal128(10, 2)), pa.field("c", pa.list_(pa.string()))])
    batch = pa.RecordBatch.from_arrays([pa.array([1, 2]), pa.array([3, 4], pa.int32())], ["a", "b"])
    result = conform(batch, target, hint="")

    assert result.schema.equals(target)
    assert result.to_pylist() == [{"b": Decimal("3.00"), "c": None}, {"b": Decimal("4.00"), "c": None}]


def test_columns_are_found_by_their_numbers_under_other_names() -> None:
    old = schema({1: "id", 2: "a", 3: "b", 4: "c"})
    facts = {"__op": "u", "__seq": 1, "__source": 1, "__unchanged": ["b", "c"], "__before": [("id", "9"), ("a", "8")]}
    batch = pa.RecordBatch.from_pylist([{**facts, "id": 1, "a": 2}], schema=record_schema(old))
    for names in ({1: "id", 2: "b", 3: "a"}, {1: "a", 2: "x", 3: "id"}, {1: "id", 2: "c", 5: "a"}):
        new = schema(names)
        (row,) = conform(batch, record_schema(new), hint="", names=names_in(old, new)).to_pylist()
        assert [row.get(names.get(number, "")) for number in (1, 2, 3)] == [1, 2, None]
        assert row["__unchanged"] == ([names[3], "c"] if 3 in names else ["b"])
        assert dict(row["__before"]) == {names[1]: "9", names[2]: "8"}
        assert names.get(5) is None or row[names[5]] is None
    assert names_in(old, replace(new, columns=(Column("id", pa.int64()),))) == {}


def schema(names: dict[int, str]) -> TableSchema:
    columns = tuple(Column(name, pa.int64(), number=number) for number, name in names.items())
    return TableSchema(TableId(1), SchemaVersion(1), SourceId(1), "public", "t", columns, key=(names[1],))


def test_a_value_that_does_not_fit_the_declared_type_is_an_error() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array(["1", "many"])], ["a"])
    with pytest.raises(UsageError, match="column a") as caught:
        conform(batch, pa.schema([pa.field("a", pa.int64())]), hint="Read on from there.")
    assert caught.value.hint == "Read on from there."
