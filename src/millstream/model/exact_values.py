r"""Conversion of PostgreSQL's text of a value to what an Arrow column of the log holds, and back to the same text.

One rule makes this exact: a type *holds* a text only if rendering the parsed value gives the text
again. Everything else (infinite or BC dates, years beyond 9999, NaN in a numeric, arrays with lower
bounds or of several dimensions …) is `INEXACT`: its column is null and the text goes into the
record's `__exact` map.

The texts are those of a session with DateStyle ISO, TimeZone UTC, IntervalStyle postgres,
bytea_output hex and extra_float_digits of 1 or more.

*Storage values* stand between text and Arrow, and are what `pa.array` takes: int, float, bool, str,
bytes, Decimal; a date as days and a timestamp as microseconds since 1970; for a list, a list of
such values (None for NULL).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from datetime import date
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final

import pyarrow as pa

from millstream.model.floats import render_float4, render_float8


class Inexact:
    """The type of `INEXACT`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "INEXACT"


INEXACT: Final = Inexact()
"""The result of a parser for a text that a type can't hold exactly."""

_EPOCH_ORDINAL: Final = date(1970, 1, 1).toordinal()
_DAY_US: Final = 86_400_000_000

Parser = Callable[[str], Any]
Renderer = Callable[[Any], str]


@lru_cache(maxsize=1024)
def text_parser(kind: pa.DataType) -> Parser:
    """Return a function from PostgreSQL's text to the storage value of a column of this type, or `INEXACT`."""
    parse, render = _pair(kind)
    if pa.types.is_string(kind):
        return parse

    def parse_exactly(text: str) -> Any:
        try:
            value = parse(text)
        except (ValueError, OverflowError, ArithmeticError):
            return INEXACT
        return value if value is not INEXACT and render(value) == text else INEXACT

    return parse_exactly


@lru_cache(maxsize=1024)
def text_renderer(kind: pa.DataType) -> Renderer:
    """Return a function from a storage value of a column of this type to PostgreSQL's text."""
    return _pair(kind)[1]


def array_of(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return an Arrow array of storage values (None for NULL)."""
    return pa.array(values, type=kind)


def parse_texts(texts: Sequence[str | None], kind: pa.DataType) -> tuple[pa.Array, dict[int, str]]:
    """Return a column of PostgreSQL's texts as an array of its type in the log.

    Also returns the texts that the type can't hold, by row.
    """
    parse = text_parser(kind)
    exact: dict[int, str] = {}
    values: list[Any] = []
    for row, text in enumerate(texts):
        value = None if text is None else parse(text)
        if value is INEXACT:
            assert text is not None
            exact[row] = text
            value = None
        values.append(value)
    return array_of(values, kind), exact


def storage_values(array: pa.Array) -> list[Any]:
    """Return the storage values of an Arrow array (None for NULL)."""
    storage = _storage_type(array.type)
    values: list[Any] = (array if storage == array.type else array.cast(storage)).to_pylist()
    return values


def _storage_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_date32(kind):
        return pa.int32()
    if pa.types.is_timestamp(kind):
        return pa.int64()
    if pa.types.is_list(kind):
        return pa.list_(_storage_type(kind.value_type))
    return kind


def _pair(kind: pa.DataType) -> tuple[Parser, Renderer]:
    if pa.types.is_list(kind):
        return _array_pair(kind.value_type)
    if pa.types.is_decimal128(kind):
        return _decimal_pair(kind.precision, kind.scale)
    if pa.types.is_timestamp(kind):
        return (_parse_timestamp, _render_timestamp) if kind.tz is None else (_parse_timestamptz, _render_timestamptz)
    found = _PAIRS.get(kind)
    return (_refuse, str) if found is None else found


def _refuse(text: str) -> Inexact:  # noqa: ARG001 — a parser takes a text
    return INEXACT


# --- numbers -----------------------------------------------------------------------------------------------------


def _integer_parser(bits: int) -> Parser:
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1

    def parse(text: str) -> Any:
        value = int(text)
        return value if low <= value <= high else INEXACT

    return parse


def _parse_float4(text: str) -> float:
    import numpy as np

    with np.errstate(over="ignore"):  # overflow gives infinity, which isn't what the text means
        return float(np.float32(text))


_DECIMAL_TEXT: Final = re.compile(r"-?[0-9]+(?:\.[0-9]+)?\Z")


def _decimal_pair(precision: int, scale: int) -> tuple[Parser, Renderer]:
    def parse(text: str) -> Any:
        if _DECIMAL_TEXT.match(text) is None:
            return INEXACT
        value = Decimal(text)
        _, digits, exponent = value.as_tuple()
        if exponent != -scale or len(digits) > precision or (value.is_zero() and text[0] == "-"):
            return INEXACT
        return value

    return parse, "{:f}".format


# --- dates -------------------------------------------------------------------------------------------------------


def _parse_date(text: str) -> int:
    return date.fromisoformat(text).toordinal() - _EPOCH_ORDINAL


def _render_date(days: int) -> str:
    return date.fromordinal(days + _EPOCH_ORDINAL).isoformat()


_TIMESTAMP_TEXT: Final = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2}) ([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]{1,6}))?\Z"
)


def _parse_timestamp(text: str) -> Any:
    found = _TIMESTAMP_TEXT.match(text)
    if found is None:
        return INEXACT
    hours, minutes, seconds = int(found[2]), int(found[3]), int(found[4])
    micros = int((found[5] or "0").ljust(6, "0"))
    return _parse_date(found[1]) * _DAY_US + ((hours * 60 + minutes) * 60 + seconds) * 1_000_000 + micros


def _render_timestamp(micros: int) -> str:
    days, rest = divmod(micros, _DAY_US)
    seconds, fraction = divmod(rest, 1_000_000)
    text = f"{_render_date(days)} {seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return text if fraction == 0 else f"{text}.{fraction:06}".rstrip("0")


def _parse_timestamptz(text: str) -> Any:
    return _parse_timestamp(text[:-3]) if text.endswith("+00") else INEXACT


def _render_timestamptz(micros: int) -> str:
    return _render_timestamp(micros) + "+00"


# --- the rest ----------------------------------------------------------------------------------------------------


def _parse_bytea(text: str) -> Any:
    return bytes.fromhex(text[2:]) if text.startswith("\\x") else INEXACT


# array_out in arrayfuncs.c quotes an element that is empty, reads NULL, or holds one of these.
_QUOTED_ELEMENT: Final = re.compile(r'[{}",\\ \t\n\r\v\f]|\A\Z|\A[nN][uU][lL][lL]\Z')
_ESCAPED: Final = re.compile(r'(["\\])')
_ELEMENT: Final = re.compile(r'"((?:[^"\\]|\\.)*)"|([^{}",\\]+)', re.DOTALL)
_UNESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)


def _array_pair(element: pa.DataType) -> tuple[Parser, Renderer]:
    parse_element = text_parser(element)
    render_element = text_renderer(element)

    def parse(text: str) -> Any:
        texts = array_elements(text)
        if texts is None:
            return INEXACT
        values = [None if item is None else parse_element(item) for item in texts]
        return INEXACT if any(value is INEXACT for value in values) else values

    def render(values: list[Any]) -> str:
        return "{" + ",".join("NULL" if v is None else _quote_element(render_element(v)) for v in values) + "}"

    return parse, render


def _quote_element(text: str) -> str:
    return text if _QUOTED_ELEMENT.search(text) is None else '"' + _ESCAPED.sub(r"\\\1", text) + '"'


def array_elements(text: str) -> list[str | None] | None:
    """Return the elements of a one-dimensional array's text; None for any other text."""
    if len(text) < 2 or text[0] != "{" or text[-1] != "}":
        return None
    if text == "{}":
        return []
    elements: list[str | None] = []
    position, end = 1, len(text) - 1
    while True:
        found = _ELEMENT.match(text, position, end)
        if found is None:
            return None
        if found[1] is not None:
            elements.append(_UNESCAPED.sub(r"\1", found[1]))
        else:
            elements.append(None if found[2] == "NULL" else found[2])
        position = found.end()
        if position == end:
            return elements
        if text[position] != ",":
            return None
        position += 1


def parse_float8(text: str) -> float:
    """Return the double of a text; raises `ValueError` if it is none."""
    value = float(text)
    if math.isinf(value) and text not in {"Infinity", "-Infinity"}:
        raise ValueError(text)
    return value


_PAIRS: Final[dict[pa.DataType, tuple[Parser, Renderer]]] = {
    pa.int16(): (_integer_parser(16), str),
    pa.int32(): (_integer_parser(32), str),
    pa.int64(): (_integer_parser(64), str),
    pa.bool_(): (lambda text: text == "t", lambda value: "t" if value else "f"),
    pa.float32(): (_parse_float4, render_float4),
    pa.float64(): (parse_float8, render_float8),
    pa.string(): (str, str),
    pa.date32(): (_parse_date, _render_date),
    pa.binary(): (_parse_bytea, lambda value: "\\x" + value.hex()),
}
