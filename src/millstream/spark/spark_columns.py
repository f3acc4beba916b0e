"""Arrow columns in exactly the form that Spark takes.

Spark compares the batches of a Python source with the schema that it declared, field by field,
types and nullability; any difference is an error. So the declared schema decides. `spark_schema`
makes it from a record's schema, and `millstream.model.schema_conversion` converts rows of any version of
the table to it.
"""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

_DECIMAL_DIGITS_MAX = 38
_NUMBERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64())
_TIMES = (pa.date32(), pa.timestamp("us"), pa.timestamp("us", tz="UTC"))
_SAME = frozenset([pa.bool_(), *_NUMBERS, *_TIMES, pa.string(), pa.binary()])
_WIDENED = {
    pa.large_string(): pa.string(),
    pa.string_view(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.binary_view(): pa.binary(),
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
}


def spark_type(arrow: pa.DataType) -> pa.DataType:
    """Return the Arrow type in which Spark takes values of `arrow`; text if it has no type for them."""
    if arrow in _SAME:
        return arrow
    if arrow in _WIDENED:
        return _WIDENED[arrow]
    if pa.types.is_decimal128(arrow) and arrow.precision <= _DECIMAL_DIGITS_MAX and 0 <= arrow.scale <= arrow.precision:
        return arrow
    if pa.types.is_fixed_size_binary(arrow):
        return pa.binary()
    if pa.types.is_timestamp(arrow):
        return pa.timestamp("us", tz=None if arrow.tz is None else "UTC")
    if pa.types.is_dictionary(arrow):
        return spark_type(arrow.value_type)
    if pa.types.is_map(arrow):
        return pa.map_(spark_type(arrow.key_type), spark_type(arrow.item_type))
    if pa.types.is_list(arrow) or pa.types.is_large_list(arrow) or pa.types.is_fixed_size_list(arrow):
        return pa.list_(spark_type(arrow.value_type))
    if pa.types.is_struct(arrow):
        return pa.struct([field.with_type(spark_type(field.type)) for field in arrow])
    return pa.string()


def spark_schema(arrow: pa.Schema) -> StructType:
    """Return the schema to declare to Spark for rows of `arrow`; times without a zone stay without one."""
    fields = [pa.field(field.name, spark_type(field.type), field.nullable) for field in arrow]
    return from_arrow_schema(pa.schema(fields), prefer_timestamp_ntz=True)


def arrow_schema(declared: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark will compare batches with."""
    return to_arrow_schema(declared, timezone="UTC")
