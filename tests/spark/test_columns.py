"""Rows as Spark takes them: whatever the log holds, in exactly the declared types."""

from __future__ import annotations

import pyarrow as pa
import pytest

from millstream.model.records import RECORD_PREFIX
from millstream.model.schema_conversion import conform
from millstream.spark.spark_columns import arrow_schema, spark_schema, spark_type

LOG_TYPES = [
    *(pa.bool_(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.string(), pa.binary()),
    *(pa.date32(), pa.timestamp("us"), pa.timestamp("us", tz="UTC"), pa.decimal128(38, 9), pa.list_(pa.int64())),
    *(pa.list_(pa.string()), pa.list_(pa.decimal128(5, 2)), pa.map_(pa.string(), pa.string())),
]


@pytest.mark.parametrize("log_type", LOG_TYPES, ids=str)
def test_types_that_spark_has_pass_unchanged(log_type: pa.DataType) -> None:
    declared = arrow_schema(spark_schema(pa.schema([pa.field("a", log_type)])))

    assert spark_type(log_type) == log_type
    assert declared.field("a").type == log_type


@pytest.mark.parametrize(
    ("log_type", "values", "expected"),
    [
        (pa.large_string(), ["a", None], pa.string()),
        (pa.binary(2), [b"ab", None], pa.binary()),
        (pa.uint64(), [2**64 - 1, None], pa.decimal128(20, 0)),
        (pa.dictionary(pa.int32(), pa.string()), ["a", None], pa.string()),
        (pa.timestamp("ns", tz="Europe/Berlin"), [1000, None], pa.timestamp("us", tz="UTC")),
    ],
    ids=str,
)
def test_other_types_become_the_nearest_that_holds_their_values(
    log_type: pa.DataType, values: list[object], expected: pa.DataType
) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array(values, log_type)], ["a"])
    target = arrow_schema(spark_schema(batch.schema))
    result = conform(batch, target, hint="")

    assert result.schema.equals(target)
    assert result.column("a").type == expected
    assert result.column("a").null_count == 1


def test_the_declared_schema_says_which_record_columns_are_never_null() -> None:
    declared = arrow_schema(spark_schema(pa.schema(RECORD_PREFIX)))

    assert declared.equals(pa.schema(RECORD_PREFIX))
