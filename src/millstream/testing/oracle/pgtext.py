"""Typed columns of a lake table as PostgreSQL's text: from an Arrow array to PostgreSQL's output.

Written from PostgreSQL's documentation of its output formats and checked against it value by value; it
doesn't depend on how the values came into the lake.
"""

import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa

_DAY_US = 86_400_000_000
_NEEDS_QUOTES = re.compile(r'[{}",\\ \t\n\r\v\f]|^$|^null$', re.IGNORECASE)  # ASCII white space only
# The power of ten from which floats have an exponent: 10**15 for double precision, 10**6 for real.
_EXPONENT_FROM = {"double": 15, "float": 6}


def texts(values: "pa.Array | pa.ChunkedArray") -> list[str | None]:
    """Return each value as PostgreSQL prints it under ISO dates, UTC and hex bytea; None for null.

    Raises:
        TypeError: no column of the lake should have this type.
    """
    if isinstance(values, pa.ChunkedArray):
        return [text for chunk in values.chunks for text in texts(chunk)]
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        return _arrays(values)
    raw, one = _renderer(values)
    return [None if value is None else one(value) for value in raw]


def _renderer(values: pa.Array) -> tuple[list[Any], Callable[[Any], str]]:
    kind = values.type
    if pa.types.is_boolean(kind):
        return values.to_pylist(), lambda value: "t" if value else "f"
    if pa.types.is_integer(kind):
        return values.to_pylist(), str
    if pa.types.is_floating(kind):
        return values.to_pylist(), lambda value: _float(value, str(kind))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view():
        return values.to_pylist(), str
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or kind == pa.binary_view():
        return values.to_pylist(), lambda value: "\\x" + value.hex()
    if pa.types.is_decimal(kind):
        return values.to_pylist(), lambda value: format(Decimal(value), "f")
    if pa.types.is_date32(kind):
        return values.cast(pa.int32()).to_pylist(), lambda days: _date(days, "")
    if pa.types.is_timestamp(kind):
        assert kind.tz in (None, "UTC", "+00:00"), f"a timestamp of zone {kind.tz}"
        zone = "" if kind.tz is None else "+00"
        numbers = values.cast(pa.timestamp("us", tz=kind.tz)).cast(pa.int64())
        return numbers.to_pylist(), lambda number: _timestamp(number, zone)
    raise TypeError(f"a lake column of type {kind}")


def _arrays(values: pa.Array) -> list[str | None]:
    rows = []
    for index in range(len(values)):
        row = values[index]
        rows.append(None if not row.is_valid else "{" + ",".join(map(_element, texts(row.values))) + "}")
    return rows


def _element(text: str | None) -> str:
    if text is None:
        return "NULL"
    if _NEEDS_QUOTES.search(text):
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return text


def _float(value: float, kind: str) -> str:
    if value != value:  # noqa: PLR0124 - the definition of NaN
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    number = np.float32(value) if kind == "float" else np.float64(value)
    if number == 0:
        return "-0" if np.signbit(number) else "0"
    mantissa, exponent_text = _shortest(abs(number)).split("e")
    sign, digits, exponent = "-" if number < 0 else "", mantissa.replace(".", ""), int(exponent_text)
    if not -4 <= exponent < _EXPONENT_FROM[kind]:
        point = "." if len(digits) > 1 else ""
        return f"{sign}{digits[0]}{point}{digits[1:]}e{'-' if exponent < 0 else '+'}{abs(exponent):02d}"
    if exponent < 0:
        return f"{sign}0.{'0' * (-exponent - 1)}{digits}"
    whole, fraction = digits[: exponent + 1].ljust(exponent + 1, "0"), digits[exponent + 1 :]
    return f"{sign}{whole}" + (f".{fraction}" if fraction else "")


def _shortest(number: "np.floating[Any]") -> str:
    """Return the shortest digits that read back as the same value, as PostgreSQL prints since version 12.

    They lie between the halfway points to the value's neighbours, exclusive. A halfway point reads back
    as the value only if halves are rounded to even, and PostgreSQL doesn't rely on it.
    """
    text = np.format_float_scientific(number, unique=True, trim="-")
    value = Fraction(float(number))
    infinity = type(number)(np.inf)
    below = Fraction(float(np.nextafter(number, -infinity)))
    with np.errstate(over="ignore"):  # for the greatest value
        above = np.nextafter(number, infinity)
    highest = Fraction(float(above)) if np.isfinite(above) else 2 * value - below
    digits = len(text.split("e")[0].replace(".", ""))
    while not (value + below) / 2 < Fraction(text) < (value + highest) / 2:
        digits += 1
        text = f"{float(number):.{digits - 1}e}"
    return text


def _civil(days: int) -> tuple[int, int, int]:
    """Return year (0 is 1 BC), month and day of a day counted from 1970-01-01, in the proleptic Gregorian calendar.

    Howard Hinnant's `civil_from_days`: Python's own dates end at the year 9999.
    """
    days += 719_468
    era, day_of_era = divmod(days, 146_097)
    year_of_era = (day_of_era - day_of_era // 1460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    shifted = (5 * day_of_year + 2) // 153
    month = shifted + 3 if shifted < 10 else shifted - 9
    return year_of_era + era * 400 + (month <= 2), month, day_of_year - (153 * shifted + 2) // 5 + 1


def _date(days: int, rest: str) -> str:
    year, month, day = _civil(days)
    era = "" if year > 0 else " BC"
    return f"{year if year > 0 else 1 - year:04d}-{month:02d}-{day:02d}{rest}{era}"


def _timestamp(microseconds: int, zone: str) -> str:
    days, in_day = divmod(microseconds, _DAY_US)
    seconds, fraction = divmod(in_day, 1_000_000)
    hours, rest = divmod(seconds, 3600)
    minutes, second = divmod(rest, 60)
    decimals = f".{fraction:06d}".rstrip("0") if fraction else ""
    return _date(days, f" {hours:02d}:{minutes:02d}:{second:02d}{decimals}{zone}")
