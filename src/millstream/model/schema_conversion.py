"""Conversion of rows from any version of a table to the columns of one version."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from millstream.errors import UsageError
from millstream.model.column_renames import Names, under_names

_DECIMAL_DIGITS_MAX: Final = 38


def conform(batch: pa.RecordBatch, target: pa.Schema, *, hint: str, names: Names | None = None) -> pa.RecordBatch:
    """Return the rows of `batch` in the columns and types of `target`.

    A column that the rows don't have is null; a column that `target` doesn't name is left out.

    Args:
        batch: rows of some version of the table.
        target: the columns of another version.
        hint: what the caller can do if the values don't fit.
        names: the columns' names in the rows, if a column was renamed; see `column_renames`.

    Raises:
        UsageError: values of an older version don't fit the current type; nothing is rounded or cut. Details: column.
    """
    if names:
        rows = under_names(pa.Table.from_batches([batch]), names)
        batch = pa.RecordBatch.from_arrays([column.combine_chunks() for column in rows.columns], schema=rows.schema)
    has = batch.schema
    if has.equals(target):
        return pa.RecordBatch.from_arrays(batch.columns, schema=target)
    columns = []
    for field in target:
        index = has.get_field_index(field.name)
        if index < 0:
            columns.append(pa.nulls(batch.num_rows, field.type))
            continue
        column = batch.column(index)
        columns.append(column if column.type.equals(field.type) else _cast(column, field, hint))
    return pa.RecordBatch.from_arrays(columns, schema=target)


def _cast(column: pa.Array, field: pa.Field, hint: str) -> pa.Array:
    try:
        if pa.types.is_integer(column.type) and pa.types.is_decimal128(field.type):
            # Arrow demands room for every int64, however small the values are.
            column = column.cast(pa.decimal128(_DECIMAL_DIGITS_MAX, field.type.scale))
        return column.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise UsageError(
            f"column {field.name} was {column.type} once, and a value of then is no {field.type}: {error}",
            hint=hint,
            column=field.name,
        ) from error
