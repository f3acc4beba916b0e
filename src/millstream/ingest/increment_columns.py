"""Columns whose values rows add to: which increments they take, and which columns a row says nothing about.

A row of a table with such a column says nothing about the columns that it doesn't name. Rows that name different
columns carry a bitmap of them, `NAMED`, on their way to the writer. The writer lists the columns that a row doesn't
name in the record's `__unchanged`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.crdt.columns import whole_column
from millstream.crdt.declared import ColumnMerge, MergeKind
from millstream.errors import InvalidValue
from millstream.model.operations import RejectedRow
from millstream.model.pgtypes import DECIMAL_DIGITS_MAX
from millstream.model.schema import Column, TableSchema

NAMED: Final = "__named"
"""A row's bitmap of the columns before and behind it that the row names, the first column in the lowest bit."""
NO_INCREMENTS: Final[Mapping[str, str]] = MappingProxyType({})
_UNSUITABLE: Final = "increment_unsuitable"
"""The code of a value that can't be added to a column."""
_SCALE: Final = 9
"""Digits after the point in a column that begins with decimals, as for decimals in any column."""
_SHOWN_MAX: Final = 40
"""Characters of a value in an error."""
_DECIMAL: Final = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"


def type_of(table: str, name: str, kind: pa.DataType, word: str) -> pa.DataType:
    """Return the type of a new column that increments of a type begin.

    Totals are larger than increments, so the type has the most digits.

    Raises:
        InvalidValue (`increment_unsuitable`): no values of that type can be added up.
    """
    is_text = pa.types.is_string(kind)
    if pa.types.is_integer(kind):
        return pa.int64()
    if is_text or pa.types.is_decimal(kind):
        return pa.decimal128(DECIMAL_DIGITS_MAX, _SCALE if is_text else max(_SCALE, kind.scale))
    if pa.types.is_floating(kind):
        return pa.float64()
    raise _unsuitable(table, name, word, f"{kind} can't be added")


def checked_increments(table: str, column: Column, values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return increments in their column's type.

    Raises:
        InvalidValue (`increment_unsuitable`): a value is no number, isn't finite, or isn't whole in a column of whole numbers.
        InvalidValue (`counter_grows_only`): a value is negative, and the counter only grows.
    """
    word = column.accumulates
    found = values
    _check_finite(table, column.name, word, values)
    try:
        if pa.types.is_floating(values.type) and pa.types.is_decimal(column.arrow):
            found = _of_text(column, values.cast(pa.string()))  # the shortest text of a number is what was meant
        elif pa.types.is_string(values.type):
            found = _of_text(column, values)
        elif not is_number(values.type):
            raise _unsuitable(table, column.name, word, f"{values.type} can't be added to {column.arrow}")
        elif values.type != column.arrow:
            found = values.cast(column.arrow)
    except pa.ArrowException as error:
        raise _unsuitable(table, column.name, word, str(error)) from error
    _check_finite(table, column.name, word, found)
    if ColumnMerge.parse(word).kind is MergeKind.G_COUNTER and pc.any(pc.less(found, _zero(found.type))).as_py():
        raise InvalidValue(
            f"column {column.name} of {table} is a counter that only grows, and an increment is negative",
            code="counter_grows_only",
            table=table,
            column=column.name,
        )
    return found


def takes(table: str, column: Column, values: pa.Array) -> InvalidValue | None:
    """Return why a column doesn't take some increments; None if it does."""
    try:
        checked_increments(table, column, pa.chunked_array([values]))
    except InvalidValue as error:
        return error
    return None


def as_increments(error: InvalidValue, accumulates: Mapping[str, str]) -> InvalidValue:
    """Return the error of a value that isn't one of its column's kind, as that of an increment if the column takes these.

    Rows become columns where the declaration isn't known, so that values of several kinds fail there.
    """
    name = error.details.get("column")
    if error.code != InvalidValue.code or not isinstance(name, str) or name not in accumulates:
        return error
    return InvalidValue(
        f"column {name} takes increments ({accumulates[name]}): {error.message}", code=_UNSUITABLE, **error.details
    )


def rejected_as_increments(rejected: Sequence[RejectedRow], accumulates: Mapping[str, str]) -> tuple[RejectedRow, ...]:
    """Return rejected rows with the codes of increments, as `as_increments`."""
    return tuple(
        replace(row, code=_UNSUITABLE) if row.code == InvalidValue.code and row.column in accumulates else row
        for row in rejected
    )


def _of_text(column: Column, values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return decimal text as numbers."""
    is_whole = pa.types.is_integer(column.arrow)
    fits = pc.match_substring_regex(values, _DECIMAL)
    refused = values.drop_null() if is_whole else values.filter(pc.invert(fits))
    if len(refused):
        raise pa.ArrowInvalid(f"{_named(refused[0].as_py())} is no {'whole' if is_whole else 'decimal'} number")
    return values.cast(column.arrow)


def _named(text: str) -> str:
    """Return the text of a value for an error. An object or a list of lists has become JSON before it comes here."""
    shown = text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…"
    kind = {"{}": "the object", "[]": "the list"}.get(text[:1] + text[-1:])
    return f"the text {shown!r}" if kind is None else f"{kind} {shown}"


def _check_finite(table: str, column: str, word: str, values: pa.ChunkedArray) -> None:
    if pa.types.is_floating(values.type) and pc.all(pc.is_finite(values)).as_py() is False:
        raise _unsuitable(table, column, word, "NaN and infinities can't be added")


def _zero(kind: pa.DataType) -> pa.Scalar:
    return pa.scalar(0, pa.int64()).cast(kind)


def _unsuitable(table: str, column: str, word: str, why: str) -> InvalidValue:
    return InvalidValue(
        f"column {column} of {table} takes increments ({word}): {why}", code=_UNSUITABLE, table=table, column=column
    )


# --- the columns that a row names ------------------------------------------------------------------------------------


def with_named(table: pa.Table, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return rows with a bitmap of the columns that each names; as they are if each names all of them.

    Args:
        rows: the same rows, each with the names of its own columns.
    """
    names = table.column_names
    if sum(map(len, rows)) == len(rows) * len(names):
        return table
    bits = np.array([[name in row for name in names] for row in rows], bool)
    return table.append_column(NAMED, _bitmap(bits))


def with_nulls_unnamed(table: pa.Table) -> pa.Table:
    """Return rows with a bitmap, where a null stands for a column that a row doesn't name."""
    if not any(column.null_count for column in table.columns):
        return table
    bits = np.column_stack([column.is_valid().to_numpy() for column in table.columns])
    return table.append_column(NAMED, _bitmap(bits))


def _bitmap(bits: npt.NDArray[np.bool_]) -> pa.Array:
    packed = np.packbits(bits, axis=1, bitorder="little")
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(packed.shape[1]), len(packed), [None, pa.py_buffer(np.ascontiguousarray(packed))]
    )


def without_named(table: pa.Table) -> tuple[pa.Table, pa.ChunkedArray | None]:
    """Return rows without the bitmap, and it.

    Raises:
        InvalidValue: a column of its name is something else.
    """
    place = table.schema.get_field_index(NAMED)
    if place < 0:
        return table, None
    found = table.column(place)
    if found.type != pa.binary((table.num_columns + 6) // 8) or found.null_count:
        raise InvalidValue(
            f"{NAMED} is the name of a column that rows may have on their way to the writer",
            hint="Rename the column.",
            column=NAMED,
        )
    return table.remove_column(place), found


def unnamed(schema: TableSchema, rows: pa.Table) -> pa.Array | None:
    """Return the columns that each row doesn't name, as a record's `__unchanged`; None if no column accumulates."""
    if not schema.accumulating:
        return None
    own = [name for name in rows.column_names if name != NAMED]
    others = [column.name for column in schema.columns if column.name not in schema.key]
    left_out = np.ones((rows.num_rows, len(others)), bool)
    place = rows.schema.get_field_index(NAMED)
    bits = None
    if place >= 0:
        packed = whole_column(rows.column(place))
        width = packed.type.byte_width
        start = packed.offset * width
        flat = np.frombuffer(packed.buffers()[1], np.uint8)[start : start + rows.num_rows * width]
        bits = np.unpackbits(flat.reshape(-1, width), axis=1, bitorder="little", count=len(own)).astype(bool)
    place_of = {name: at for at, name in enumerate(own)}
    for at, name in enumerate(others):
        if name in place_of:
            left_out[:, at] = False if bits is None else ~bits[:, place_of[name]]
    counts = left_out.sum(axis=1)
    offsets = np.append(0, np.cumsum(counts)).astype(np.int32)
    names = pa.array(others, pa.string()).take(pa.array(np.nonzero(left_out)[1]))
    return pa.ListArray.from_arrays(pa.array(offsets), names, mask=pa.array(counts == 0))


def unnamed_bytes(schema: TableSchema) -> int:
    """Return the most bytes that a record's `__unchanged` takes; 0 if no column accumulates."""
    return sum(len(column.name) + 4 for column in schema.columns) if schema.accumulating else 0


def is_number(kind: pa.DataType) -> bool:
    """Return whether values of a type are numbers."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))
