"""Whether values fit their columns' types: rows are fitted to their table's schema exactly, or not at all.

A value is cast if its column's type can hold it unchanged, for example an int64 in an int16 that is wide enough. Nothing
is rounded or truncated, and text never becomes a number. `schema_on_write` extends the schema before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import InvalidValue
from millstream.ingest.increment_columns import checked_increments, is_number, unnamed_bytes
from millstream.ingest.log_types import cast_checked
from millstream.ingest.python_rows import ROWS_BYTES_MAX, too_large
from millstream.model.schema import Column, TableSchema

TableColumns: TypeAlias = Mapping[str, Mapping[str, pa.DataType]]
"""The types of existing tables' columns by the columns' names, by the tables' full names."""
ColumnsOf: TypeAlias = Callable[[Collection[str]], TableColumns]
"""A look-up of a stream's tables, by their full names, for rows whose values are of several kinds."""
FITTED_BYTES_MAX: Final = 2 * ROWS_BYTES_MAX
"""Size in bytes of a call's rows with all columns of their table: a table may have a thousand that the call
doesn't name."""
_ROW_BYTES: Final = 32
"""Approximate bytes that the log adds to a row."""
_VALUE_BYTES: Final = 5
"""Smallest size in bytes of a null, for example of text."""


def no_columns(_tables: Collection[str]) -> TableColumns:
    """Return that none of the tables exists."""
    return {}


def types_of(columns_of: ColumnsOf, table: str) -> Mapping[str, pa.DataType]:
    """Return the types of one table's columns, by their names; none if there is no such table."""
    return columns_of([table]).get(table, {})


def may_fit(one: pa.DataType, column: pa.DataType) -> bool:
    """Return whether a column may take values of a type: whether it takes each of them, `fits` tells."""
    return bool(one == column) or _is_kin(one, column)


def fitted_bytes(schema: TableSchema, rows: pa.Table) -> int:
    """Return the approximate size in bytes of rows with all columns of their table."""
    row_bytes = _ROW_BYTES + _VALUE_BYTES * len(schema.columns) + unnamed_bytes(schema)
    size: int = rows.nbytes + rows.num_rows * row_bytes
    return size


def fitted(schema: TableSchema, rows: pa.Table) -> list[pa.Array]:
    """Return the rows' columns as in the schema: in its order and types, null if the rows lack one.

    Args:
        schema: from `schema_on_write.grown`: it has all columns in which the rows have values.
        rows: in the log's types.

    Raises:
        IngestError (`rows_too_large`): with the missing columns they take more than `FITTED_BYTES_MAX`.
        InvalidValue: a value can't be stored exactly in its column's type, or a key is null; details:
            table, column.
    """
    size = fitted_bytes(schema, rows)
    if size > FITTED_BYTES_MAX:
        raise too_large(f"{rows.num_rows} rows of {schema.full_name}, in bytes,", size, FITTED_BYTES_MAX)
    fitted = []
    for column in schema.columns:
        place = rows.schema.get_field_index(column.name)
        values = None if place < 0 else rows.column(place)
        if column.name in schema.key and (values is None or values.null_count):
            raise InvalidValue(
                f"column {column.name} is part of the key of {schema.full_name}, and a row has no value for it",
                hint="Send the key columns in every row, or write to a table without a key.",
                table=schema.full_name,
                column=column.name,
            )
        if values is None or pa.types.is_null(values.type):
            fitted.append(pa.nulls(rows.num_rows, column.arrow))
            continue
        if column.accumulates:
            values = checked_increments(schema.full_name, column, values)
        elif values.type != column.arrow:
            values = _cast(schema, column, values)
        fitted.append(values.combine_chunks() if values.num_chunks != 1 else values.chunk(0))
    return fitted


def _cast(schema: TableSchema, column: Column, values: pa.ChunkedArray) -> pa.ChunkedArray:
    why = "it is another kind of value"
    if _is_kin(values.type, column.arrow):
        try:
            cast = cast_checked(values, column.arrow)
        except pa.ArrowException as error:
            why = str(error)
        else:
            if _keeps_digits(cast, values):
                return cast
            why = "a value has more digits"
    raise InvalidValue(
        f"{schema.full_name}, column {column.name} ({column.arrow}) can't take {values.type}: {why}",
        hint="Send values of the column's type, or under another column's name.",
        table=schema.full_name,
        column=column.name,
        type=str(column.arrow),
    )


def fits(schema: TableSchema, column: Column, values: pa.Array) -> bool:
    """Return whether all the values can be stored exactly in a column's type."""
    try:
        _cast(schema, column, pa.chunked_array([values]))
    except InvalidValue:
        return False
    return True


def _keeps_digits(cast: pa.ChunkedArray, values: pa.ChunkedArray) -> bool:
    """Return whether the floats of a cast equal those that were cast: Arrow rounds them silently."""
    if pa.types.is_list(cast.type):
        return pa.types.is_null(values.type.value_type) or _keeps_digits(
            *(pc.list_flatten(lists) for lists in (cast, values))
        )
    return cast.type != pa.float32() or pc.all(_same(cast.cast(values.type), values)).as_py() is not False


def _same(one: pa.ChunkedArray, other: pa.ChunkedArray) -> pa.ChunkedArray:
    if not pa.types.is_floating(one.type):
        return pc.equal(one, other)
    return pc.or_(pc.equal(one, other), pc.and_(pc.is_nan(one), pc.is_nan(other)))


def _is_kin(one: pa.DataType, other: pa.DataType) -> bool:
    """Return whether values of one type may fit another: numeric to numeric, if a safe cast accepts each."""
    if pa.types.is_list(one) and pa.types.is_list(other):
        return (
            pa.types.is_null(one.value_type)
            or bool(one.value_type == other.value_type)
            or _is_kin(one.value_type, other.value_type)
        )
    if pa.types.is_decimal(one) or pa.types.is_decimal(other):
        return not pa.types.is_floating(one) and not pa.types.is_floating(other) and is_number(one) and is_number(other)
    return is_number(one) and is_number(other)
