"""The log's types for Arrow's types: each holds every value of the original type, to the last digit."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

import pyarrow as pa

from millstream.errors import InvalidValue
from millstream.ingest.nested import TextRoom, pieces
from millstream.model.pgtypes import DECIMAL_DIGITS_MAX
from millstream.model.records import INSTANT, TIME_MAX_US, TIME_MIN_US

NOT_A_VALUE: Final = (pa.ArrowException, TypeError, ValueError, OverflowError)
"""Errors that conversions raise."""
_DAY_US: Final = 86_400_000_000
_UUID: Final = "arrow.uuid"
_EXTENSIONS: Final[Mapping[str, pa.DataType]] = {
    _UUID: pa.string(),
    "arrow.json": pa.string(),
    "arrow.bool8": pa.bool_(),
}
_SAME: Final[Mapping[pa.DataType, pa.DataType]] = {
    **{
        kind: kind
        for kind in (
            pa.null(), pa.bool_(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.string(), pa.binary(), pa.date32(),
        )
    },
    pa.int8(): pa.int16(),
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.large_string(): pa.string(),
    pa.string_view(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.binary_view(): pa.binary(),
    pa.date64(): pa.date32(),
}  # fmt: skip


_UNCHANGED: Final = frozenset(
    kind.id
    for kind in (pa.bool_(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.string(), pa.binary())
)
"""Types of which a column is its own: a lookup by number takes a tenth of one by type."""


def stored(name: str, column: pa.ChunkedArray, room: TextRoom | None = None) -> pa.ChunkedArray:
    """Return a column in the log's type; text takes its bytes from `room`, and raises as that does."""
    if column.type.id in _UNCHANGED:
        return column
    wanted = log_type(column.type)
    try:
        if wanted is None:
            raise no_value(name, f"the log has no type for {column.type}")
        if isinstance(column.type, pa.BaseExtensionType) and column.type.extension_name != _UUID:
            column = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
        if pa.types.is_dictionary(column.type):
            kind = column.type.value_type
            column = pa.chunked_array(
                [chunk.dictionary_decode() for chunk in _plain_dictionaries(column)], _plain(kind)
            )
        if _is_spelled(column.type):
            found = _spelled(name, column, pa.string(), text_of, room)
        elif pa.types.is_list(wanted) and _is_spelled(column.type.value_type):
            found = _spelled(name, column, wanted, _texts_of, room)
        else:
            found = column if column.type == wanted else cast_checked(column, wanted)
    except NOT_A_VALUE as error:
        raise no_value(name, str(error)) from error
    _check_years(name, found)
    return found


def cast_checked(column: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    """Return the column in another type.

    Raises:
        pa.ArrowException: a value has no equal there. Values that a slice leaves out don't count.
    """
    try:
        return column.cast(wanted)
    except pa.ArrowException:
        if not pa.types.is_nested(column.type):
            raise
    # Arrow's cast of a slice of lists also checks items behind the slice and items of null lists. A copy has neither.
    return column.take(pa.array(range(len(column)), pa.int64())).cast(wanted)


def _spelled(
    name: str, column: pa.ChunkedArray, wanted: pa.DataType, spell: Callable[[Any], Any], room: TextRoom | None
) -> pa.ChunkedArray:
    """Convert a column through Python's values, a piece at a time."""
    made = []
    for piece in pieces(column):
        values = [None if value is None else spell(value) for value in piece.to_pylist()]
        made.append(pa.array(values, wanted))
        if room is not None:
            room.take(name, made[-1].nbytes)
    found = pa.chunked_array(made, wanted)
    return found if found.num_chunks == 1 else pa.chunked_array([found.combine_chunks()], wanted)


def _texts_of(values: list[Any]) -> list[str | None]:
    return [None if item is None else text_of(item) for item in values]


def _plain(kind: pa.DataType) -> pa.DataType:
    return pa.large_string() if pa.types.is_string_view(kind) else kind


def _plain_dictionaries(column: pa.ChunkedArray) -> list[pa.DictionaryArray]:
    """Return dictionaries without views, which Arrow can't look up."""
    kind = _plain(column.type.value_type)
    return [pa.DictionaryArray.from_arrays(chunk.indices, chunk.dictionary.cast(kind)) for chunk in column.chunks]


def _is_spelled(kind: pa.DataType) -> bool:
    """Return whether values of a type become text by our own spelling, and not by a cast of Arrow's."""
    return log_type(kind) == pa.string() and kind not in _SAME and not pa.types.is_dictionary(kind)


def text_of(value: object) -> str:
    """Return the text of a value without a type in the log."""
    if isinstance(value, str):
        return value
    if isinstance(value, dt.time):
        return value.isoformat()
    return str(value) if isinstance(value, Decimal | UUID) else json_of(value)


def _check_years(name: str, column: pa.ChunkedArray) -> None:
    kind = column.type
    if pa.types.is_timestamp(kind):
        low, high, whole = TIME_MIN_US, TIME_MAX_US, pa.int64()
    elif pa.types.is_date32(kind):
        low, high, whole = TIME_MIN_US // _DAY_US, TIME_MAX_US // _DAY_US, pa.int32()
    else:
        return
    found = pa.compute.min_max(column.cast(whole)).as_py()
    if found["min"] is not None and not (low <= found["min"] and found["max"] <= high):
        raise no_value(name, "it has a time beyond the years 1 to 9999")


def log_type(kind: pa.DataType) -> pa.DataType | None:
    """Return the log's type for an Arrow type, one that holds each of its values; None if there is none."""
    if kind in _SAME:
        return _SAME[kind]
    if isinstance(kind, pa.BaseExtensionType):
        return _EXTENSIONS.get(kind.extension_name)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return log_type(kind.value_type)
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us") if kind.tz is None else INSTANT
    if pa.types.is_decimal(kind):
        return (
            pa.decimal128(kind.precision, kind.scale)
            if kind.precision <= DECIMAL_DIGITS_MAX and kind.scale >= 0
            else pa.string()
        )
    if pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    if pa.types.is_time(kind) or pa.types.is_struct(kind) or pa.types.is_map(kind):
        return pa.string()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _list_type(kind.value_type)
    return None


def _list_type(items: pa.DataType) -> pa.DataType | None:
    inner = log_type(items)
    if inner is None:
        return None
    return pa.string() if pa.types.is_nested(items) else pa.list_(inner)


def json_of(value: object) -> str:
    """Return a nested value as JSON; `TypeError`, `ValueError` if that would change it."""
    _check_keys(value)
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_json_scalar)


def _check_keys(value: object) -> None:
    """Raise `TypeError` if a name isn't text: JSON would make it text, and perhaps equal to another."""
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise TypeError(f"a name inside of it is {type(name).__name__}, not text")
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for item in inner:
        _check_keys(item)


def _json_scalar(value: object) -> str:
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, Decimal | UUID):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no place in JSON")


def no_value(name: str, why: str) -> InvalidValue:
    """Return the error of a column with unsupported values."""
    return InvalidValue(f"column {name} can't be taken: {why}", column=name)


def too_long_number(name: str) -> InvalidValue:
    """Return the error of a column with a whole number of more than 64 bits.

    Its hint doesn't hold for a column that takes increments, which gets an error of its own (`increments.as_increments`).
    """
    return InvalidValue(
        f"column {name} can't be taken: a whole number has more than 64 bits",
        hint="Send it as text, or as a Decimal from Python.",
        column=name,
    )
