"""Whole columns of the log as text and as JSON: `millstream.model.exact_values` by the column.

Arrow's functions render the types that they render as PostgreSQL does; other types go value by
value. Both ways give the same.
"""

from __future__ import annotations

import math
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import InvalidValue
from millstream.model.exact_values import storage_values, text_renderer
from millstream.model.schema import Column

JSON_INTEGER_MAX: Final = 2**53
"""JSON readers hold numbers as doubles, in which integers up to this one are exact."""


def render_column(array: pa.Array, column: Column) -> list[str | None]:
    """Return PostgreSQL's text of each value of a log column; None for NULL, and for values in `__exact`.

    Look in `__exact` first. Bytes that aren't of a PostgreSQL column (the content of a logical
    message) are text if they are UTF-8, else hex.

    Raises:
        InvalidValue: a value that the log never takes.
    """
    kind = array.type
    if pa.types.is_string(kind):
        return _list(array)
    if pa.types.is_integer(kind):
        return _list(array.cast(pa.string()))
    if pa.types.is_boolean(kind):
        return _list(pc.if_else(array, "t", "f"))
    if pa.types.is_date32(kind):
        return _list(array.cast(pa.string()))
    if pa.types.is_timestamp(kind) and kind.unit == "us":
        return _render_timestamps(array)
    if pa.types.is_decimal128(kind) and 0 <= kind.scale <= _DECIMAL_SCALE_FAST:
        return _list(array.cast(pa.string()))
    if pa.types.is_binary(kind) and column.pg is None:
        return [None if value is None else render_content(value) for value in array.to_pylist()]
    render = text_renderer(kind)
    try:
        return [None if value is None else render(value) for value in storage_values(array)]
    except (ValueError, OverflowError) as error:  # a date beyond the year 9999 in a list: never parsed from text
        raise InvalidValue(
            f"column {column.name} holds what no {kind} can be", column=column.name, type=str(kind)
        ) from error


# Arrow switches to an exponent if more than six zeros would stand behind the point.
_DECIMAL_SCALE_FAST: Final = 6


def render_content(value: bytes) -> str:
    r"""Return the bytes of a logical message as text if they are UTF-8, else as `\x…`."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return "\\x" + value.hex()


def _list(array: pa.Array) -> list[str | None]:
    values: list[str | None] = array.to_pylist()
    return values


def _render_timestamps(array: pa.Array) -> list[str | None]:
    zoned = array.type.tz is not None
    texts = array.cast(pa.timestamp("us")).cast(pa.string())  # always six digits behind the point
    texts = pc.utf8_rtrim(pc.utf8_rtrim(texts, characters="0"), characters=".")
    return _list(pc.binary_join_element_wise(texts, "+00", "") if zoned else texts)


def json_column(array: pa.Array, column: Column) -> list[Any]:
    """Return each value as JSON holds it exactly: as a number if possible, else PostgreSQL's text; None for NULL.

    Numbers are integers up to 2^53 and finite floats (a `real` as the shortest digits that give it
    back). Decimals are text: most aren't doubles, and their zeros count. Booleans of a PostgreSQL
    column are its text, `t` and `f`; those of a logical message are JSON's.
    """
    kind = array.type
    if pa.types.is_integer(kind):
        return [v if v is None or -JSON_INTEGER_MAX <= v <= JSON_INTEGER_MAX else str(v) for v in array.to_pylist()]
    if pa.types.is_floating(kind):
        render = text_renderer(kind)
        if pa.types.is_float64(kind):  # its text reads back as the same number
            return [v if v is None or math.isfinite(v) else render(v) for v in array.to_pylist()]
        return [None if v is None else _json_float(v, render(v)) for v in array.to_pylist()]
    if pa.types.is_boolean(kind) and column.pg is None:
        values: list[Any] = array.to_pylist()
        return values
    return list(render_column(array, column))


def _json_float(value: float, text: str) -> float | str:
    return float(text) if math.isfinite(value) else text
