"""Rows of one version of a table in the columns of another: all of them, or none."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest

from millstream.errors import UsageError
from millstream.model.schema_conversion import conform


def test_rows_of_another_version_are_filled_with_nulls_and_lose_what_is_not_declared() -> None:
    target = pa.schema([pa.field("b", pa.decimal128(10, 2)), pa.field("c", pa.list_(pa.string()))])
    batch = pa.RecordBatch.from_arrays([pa.array([1, 2]), pa.array([3, 4], pa.int32())], ["a", "b"])
    result = conform(batch, target, hint="")

    assert result.schema.equals(target)
    assert result.to_pylist() == [{"b": Decimal("3.00"), "c": None}, {"b": Decimal("4.00"), "c": None}]


def test_a_value_that_does_not_fit_the_declared_type_is_an_error() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array(["1", "many"])], ["a"])
    with pytest.raises(UsageError, match="column a") as caught:
        conform(batch, pa.schema([pa.field("a", pa.int64())]), hint="Read on from there.")
    assert caught.value.hint == "Read on from there."
