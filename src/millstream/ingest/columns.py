"""Rows as applications have them, as columns in the log's types: from dicts, and from all that speaks Arrow.

Nothing is guessed that could change a value: values of several kinds in one column are refused, and what has no type of its own in the
log (a time of day, a nested value) is text, as JSON where it is nested.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, Protocol, TypeAlias
from uuid import UUID

import pyarrow as pa

from millstream.errors import InvalidValue, RowsTooLarge
from millstream.model.pgtypes import DECIMAL_DIGITS_MAX
from millstream.model.records import INSTANT, RESERVED_COLUMNS, TIME_MAX_US, TIME_MIN_US

COLUMNS_MAX: Final = 1600
"""As many as a PostgreSQL table may have."""
NAME_BYTES_MAX: Final = 255
ROWS_BYTES_MAX: Final = 64 << 20
"""Of one call: it is in memory whole, here and where it is written."""
_DECIMAL_SCALE: Final = 9
"""Digits behind the point of a column that begins with Python's decimals, which don't say how many they may have."""
_UUID: Final = "arrow.uuid"
_NUMBERS: Final = frozenset({int, float})
_LISTS: Final = frozenset({list, tuple})
_NOT_A_VALUE: Final = (pa.ArrowException, TypeError, ValueError, OverflowError)


class ArrowStream(Protocol):
    """What hands over Arrow data: tables and batches of pyarrow, frames of polars and pandas, results of DuckDB."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """A capsule with an ArrowArrayStream."""


class ArrowArray(Protocol):
    """One record batch, likewise."""

    def __arrow_c_array__(self, requested_schema: object | None = None) -> tuple[object, object]:
        """Capsules with an ArrowSchema and an ArrowArray."""


Rows: TypeAlias = Mapping[str, Any] | Iterable[Mapping[str, Any]] | ArrowStream | ArrowArray
"""One row, several, or a frame."""


def table_of(rows: Rows) -> pa.Table:
    """Rows as columns in the log's types; a column of nothing but nulls has Arrow's null type.

    Args:
        rows: a dict or an iterable of them, where a column that a row lacks is null; a pyarrow table or batch; a frame of pandas (whose
            index is left out) or polars; anything else with `__arrow_c_stream__`.

    Raises:
        InvalidValue: a value has no place in the log, or a column has values of several kinds; details: column.
        RowsTooLarge: the rows take more than `ROWS_BYTES_MAX`, or have more columns than `COLUMNS_MAX`, or a name is too long.
    """
    table = _arrow(rows)
    _check_names(table.column_names)
    if table.nbytes > ROWS_BYTES_MAX:
        raise too_large("its rows' bytes", table.nbytes, ROWS_BYTES_MAX)
    columns = [_stored(name, column) for name, column in zip(table.column_names, table.columns, strict=True)]
    return pa.table(columns, names=table.column_names)


def _arrow(rows: Rows) -> pa.Table:
    if isinstance(rows, pa.Table):
        return rows
    if isinstance(rows, Mapping):
        return _of_dicts([rows])
    if type(rows).__module__.partition(".")[0] == "pandas":
        try:
            return pa.Table.from_pandas(rows, preserve_index=False)
        except _NOT_A_VALUE as error:
            raise InvalidValue(f"the frame can't be made columns: {error}") from error
    if hasattr(rows, "__arrow_c_stream__"):
        return pa.table(rows)
    if hasattr(rows, "__arrow_c_array__"):
        return pa.table(pa.record_batch(rows))
    if not isinstance(rows, Iterable):
        raise InvalidValue(f"rows are dicts or a frame (Arrow, pandas, polars), not {type(rows).__name__}")
    return _of_dicts(list(rows))


def _of_dicts(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    names: dict[str, None] = {}
    for row in rows:
        if not isinstance(row, Mapping):
            raise InvalidValue(f"a row is a dict, not {type(row).__name__}")
        names.update(dict.fromkeys(row))
    for name in names:
        if not isinstance(name, str):
            raise InvalidValue(f"a column's name is a string, not {type(name).__name__}")
    if rows and not names:
        raise InvalidValue("the rows have no columns")
    _check_names(list(names))
    return pa.table({name: _of_values(name, [row.get(name) for row in rows]) for name in names})


def _of_values(name: str, values: list[Any]) -> pa.Array:
    """Python's values as a column; of one kind, or else they are refused."""
    kinds = _kinds(values)
    try:
        if dict in kinds or any(_is_nested(value) for value in values):
            return pa.array([None if value is None else _json(value) for value in values], pa.string())
        inner = [item for value in values if isinstance(value, list | tuple) for item in value]
        _check_one_kind(name, kinds, values)
        _check_one_kind(name, _kinds(inner), inner)
        if kinds == {UUID}:
            return pa.array([None if value is None else str(value) for value in values], pa.string())
        found = pa.array(values)
        if Decimal in kinds:
            return found.cast(_roomy(found.type))
    except _NOT_A_VALUE as error:
        raise _no_value(name, str(error)) from error
    return found


def _kinds(values: Iterable[Any]) -> set[type]:
    return {type(value) for value in values if value is not None}


def _is_nested(value: object) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(item, list | tuple | dict) for item in value)


def _check_one_kind(name: str, kinds: set[type], values: Iterable[Any]) -> None:
    if len(kinds) > 1 and not kinds <= _NUMBERS and not kinds <= _LISTS:
        raise _no_value(name, f"it has values of several kinds: {', '.join(sorted(kind.__name__ for kind in kinds))}")
    if dt.datetime in kinds and len({value.tzinfo is None for value in values if value is not None}) > 1:
        raise _no_value(name, "some of its times have a zone and some have none")


def _roomy(kind: pa.DataType) -> pa.DataType:
    """A decimal for values that are yet to come, too."""
    return pa.decimal128(DECIMAL_DIGITS_MAX, max(_DECIMAL_SCALE, kind.scale))


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_json_scalar)


def _json_scalar(value: object) -> str:
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, Decimal | UUID):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no place in JSON")


def _check_names(names: Sequence[str]) -> None:
    if len(names) > COLUMNS_MAX:
        raise too_large("its columns", len(names), COLUMNS_MAX)
    seen: dict[str, str] = {}
    for name in names:
        if not name or "\0" in name:
            raise InvalidValue(f"{name!r} can't be a column's name", column=name)
        if name.lower() in RESERVED_COLUMNS:
            raise InvalidValue(
                f"{name} is the name of a column that each record has",
                hint="Give yours another name; names that begin with __ are Millstream's.",
                column=name,
            )
        try:
            size = len(name.encode())
        except UnicodeEncodeError as error:
            raise InvalidValue(f"{name!r} isn't text", column=ascii(name)) from error
        if size > NAME_BYTES_MAX:
            raise too_large(f"the bytes of the name {name[:20]}…", size, NAME_BYTES_MAX)
        other = seen.setdefault(name.lower(), name)
        if other is not name:
            raise InvalidValue(f"columns {other} and {name} have one name in a lake table", column=name)


def _stored(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column in the type that the log has for it."""
    if isinstance(column.type, pa.BaseExtensionType) and column.type.extension_name != _UUID:
        column = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
    wanted = log_type(column.type)
    try:
        if wanted is None:
            raise _no_value(name, f"the log has no type for {column.type}")
        if pa.types.is_string(wanted) and _as_text(column.type):
            texts = [None if value is None else _text(value) for value in column.to_pylist()]
            return pa.chunked_array([pa.array(texts, pa.string())])
        stored = column if column.type == wanted else column.cast(wanted)
    except _NOT_A_VALUE as error:
        raise _no_value(name, str(error)) from error
    _check_years(name, stored)
    return stored


def _as_text(kind: pa.DataType) -> bool:
    """Whether values of a type go into text by their own spelling, and not by a cast of Arrow's."""
    return _SAME.get(kind) != pa.string() and not pa.types.is_dictionary(kind)


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dt.time):
        return value.isoformat()
    return str(value) if isinstance(value, Decimal | UUID) else _json(value)


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
        raise _no_value(name, "it has a time beyond the years 1 to 9999")


_DAY_US: Final = 86_400_000_000


def log_type(kind: pa.DataType) -> pa.DataType | None:
    """The type that a column of some Arrow type has in the log: one that holds each of its values; None where there is none."""
    if kind in _SAME:
        return _SAME[kind]
    if isinstance(kind, pa.BaseExtensionType):
        return pa.string() if kind.extension_name == _UUID else log_type(kind.storage_type)
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
        inner = log_type(kind.value_type)
        if inner is None or pa.types.is_nested(kind.value_type):
            return None if inner is None else pa.string()
        return pa.list_(inner)
    return None


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


def _no_value(name: str, why: str) -> InvalidValue:
    return InvalidValue(f"column {name} can't be taken: {why}", column=name)


def too_large(what: str, size: int, size_max: int) -> RowsTooLarge:
    """The error of what is over its bound."""
    return RowsTooLarge(
        f"an append is too large: {what} are {size}, of at most {size_max}",
        hint="Append it in several calls." if size_max == ROWS_BYTES_MAX else "",
        what=what,
        size=size,
        size_max=size_max,
    )
