"""PostgreSQL's text of a value as the JSON that Debezium sends: one function a conversion.

A *fragment* is a piece of JSON text. Functions take PostgreSQL's text (never NULL's) and return a
fragment. Facts are those of Debezium's PostgreSQL connector 3.4.
"""

from __future__ import annotations

import re
import struct
from base64 import b64decode, b64encode, urlsafe_b64encode
from collections.abc import Callable
from decimal import Decimal
from json.encoder import encode_basestring
from typing import Final

NULL: Final = "null"
PLACEHOLDER: Final = "__debezium_unavailable_value"
"""Stands for a TOAST value that an update left unchanged, and that PostgreSQL doesn't send."""

Fragment = Callable[[str], str]

quoted: Final[Fragment] = encode_basestring
"""Return a text as a JSON string."""


def same(text: str) -> str:
    """Return a text that is JSON already: an integer."""
    return text


def boolean(text: str) -> str:
    """Return `t` and `f` as JSON's."""
    return "true" if text == "t" else "false"


def floating(text: str) -> str:
    """Return a float of its text."""
    return number(float(text))


def number(value: float) -> str:
    """Return a float; what JSON has no number for is a string, as Jackson writes it."""
    if value - value != 0:  # NaN and infinities
        return '"NaN"' if value != value else ('"Infinity"' if value > 0 else '"-Infinity"')  # noqa: PLR0124
    return repr(value)


# --- decimals ----------------------------------------------------------------------------------------------------

_NOT_FINITE: Final = {"NaN": '"NAN"', "Infinity": '"POSITIVE_INFINITY"', "-Infinity": '"NEGATIVE_INFINITY"'}


def big_integer(value: int) -> bytes:
    """Return the shortest two's complement, big-endian: Java's `BigInteger.toByteArray`."""
    bits = value.bit_length() if value >= 0 else (~value).bit_length()
    return value.to_bytes(bits // 8 + 1, "big", signed=True)


def unscaled(value: int) -> str:
    """Return the digits of a decimal as a JSON string of Base64."""
    return f'"{b64encode(big_integer(value)).decode()}"'


def digits(value: str, scale: int) -> str:
    """Return a JSON string of Base64 as the number that it stands for, in the form of Java's `BigDecimal.toString`."""
    whole = Decimal(int.from_bytes(b64decode(value.strip('"')), "big", signed=True)).as_tuple()
    return str(Decimal((whole.sign, whole.digits, -scale)))


def _digits(text: str) -> int:
    # Not by `int(text)`, which refuses more than 4300 digits.
    return int(Decimal(text))


def decimal(scale: int) -> Fragment:
    """Return the conversion of a numeric with a scale to Connect's `Decimal`."""

    def convert(text: str) -> str:
        if text in _NOT_FINITE:
            return NULL
        whole, _, behind = text.partition(".")
        return unscaled(_digits(whole + behind.ljust(scale, "0")))

    return convert


def variable_decimal(text: str) -> str:
    """Return a numeric without a scale as Debezium's `VariableScaleDecimal`; zeros at its end are dropped."""
    if text in _NOT_FINITE:
        return NULL
    whole, _, behind = text.partition(".")
    behind = behind.rstrip("0")
    return f'{{"scale":{len(behind)},"value":{unscaled(_digits(whole + behind))}}}'


def decimal_text(scale: int | None) -> Fragment:
    """Return the conversion of a numeric to its digits."""

    def convert(text: str) -> str:
        if text in _NOT_FINITE:
            return _NOT_FINITE[text]
        if scale is None:
            return f'"{text}"'
        whole, _, behind = text.partition(".")
        return f'"{whole}.{behind.ljust(scale, "0")}"' if scale else f'"{whole}"'

    return convert


_MONEY_CENTS: Final = re.compile(r"[.,](\d{1,2})\D*\Z")


def money_text(text: str) -> str:
    """Return the digits of a money value, whatever `lc_monetary` wraps them in: `-1234.50`."""
    cents = _MONEY_CENTS.search(text)
    whole = re.sub(r"\D", "", text[: cents.start()] if cents else text) or "0"
    sign = "-" if "-" in text or "(" in text else ""
    return f"{sign}{whole}.{(cents[1] if cents else '').ljust(2, '0')}"


# --- days and times ----------------------------------------------------------------------------------------------

DATE_INFINITY: Final = -2147472692
"""Debezium's number for the date `infinity`."""
DATE_MINUS_INFINITY: Final = -2147472691
INFINITY_US: Final = 9223372036825200000
"""Debezium's microseconds for the timestamp `infinity`."""
MINUS_INFINITY_US: Final = -9223372036832400000
DAY_US: Final = 86_400_000_000

_DATE: Final = re.compile(r"(\d+)-(\d\d)-(\d\d)(?: (\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?)?(?:\+00)?( BC)?\Z")
_TIME: Final = re.compile(r"(\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?(?:([+-])(\d\d)(?::(\d\d))?(?::(\d\d))?)?\Z")


def days_of(year: int, month: int, day: int) -> int:
    """Return the days since 1970-01-01 of a date of the proleptic Gregorian calendar; year 0 is 1 BC."""
    year -= month <= 2
    era, of_era = divmod(year, 400)
    of_year = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5 + day - 1
    return era * 146097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719468


def iso_date(days: int) -> str:
    """Return the date of `days` since 1970-01-01 as Java's ISO format has it: years beyond 9999 with a sign."""
    era, of_era = divmod(days + 719468, 146097)
    years = (of_era - of_era // 1460 + of_era // 36524 - of_era // 146096) // 365
    of_year = of_era - (365 * years + years // 4 - years // 100)
    part = (5 * of_year + 2) // 153
    day, month = of_year - (153 * part + 2) // 5 + 1, part + (3 if part < 10 else -9)
    year = years + era * 400 + (month <= 2)
    sign = "+" if year > 9999 else "-" if year < 0 else ""
    return f"{sign}{abs(year):04}-{month:02}-{day:02}"


def date_days(text: str) -> int:
    """Return a date's days since 1970-01-01, or Debezium's numbers for the infinite ones."""
    found = _DATE.match(text)
    if found is None:
        return DATE_INFINITY if text == "infinity" else DATE_MINUS_INFINITY
    year = int(found[1])
    return days_of(1 - year if found[8] else year, int(found[2]), int(found[3]))


def timestamp_us(text: str) -> int:
    """Return a timestamp's microseconds since 1970, or Debezium's numbers for the infinite ones."""
    found = _DATE.match(text)
    if found is None:
        return INFINITY_US if text == "infinity" else MINUS_INFINITY_US
    seconds = (int(found[4]) * 60 + int(found[5])) * 60 + int(found[6])
    return date_days(text) * DAY_US + seconds * 1_000_000 + int((found[7] or "").ljust(6, "0"))


def time_us(text: str) -> int:
    """Return a time's microseconds since midnight; with a zone, in UTC and within its day."""
    found = _TIME.match(text)
    if found is None:
        raise ValueError(text)
    seconds = (int(found[1]) * 60 + int(found[2])) * 60 + int(found[3])
    if found[5]:
        ahead = (int(found[6]) * 60 + int(found[7] or 0)) * 60 + int(found[8] or 0)
        seconds = (seconds - (ahead if found[5] == "+" else -ahead)) % 86400
    return seconds * 1_000_000 + int((found[4] or "").ljust(6, "0"))


def iso_time(micros: int) -> str:
    """Return a time of day as Java's ISO format has it; 24:00 is 00:00."""
    seconds, fraction = divmod(micros % DAY_US, 1_000_000)
    text = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return f"{text}.{fraction:06}".rstrip("0") if fraction else text


def iso_timestamp(micros: int) -> str:
    """Return a moment as Java's ISO format has it, with `Z`."""
    days, rest = divmod(micros, DAY_US)
    return f"{iso_date(days)}T{iso_time(rest)}Z"


def zoned_timestamp(digits: int) -> Fragment:
    """Return the conversion of a timestamp with a time zone: always as many digits as the column has."""

    def convert(text: str) -> str:
        found = _DATE.match(text)
        if found is None:
            return f'"{text}"'
        fraction = "." + (found[7] or "").ljust(digits, "0") if digits else ""
        return f'"{iso_date(date_days(text))}T{found[4]}:{found[5]}:{found[6]}{fraction}Z"'

    return convert


def zoned_time(text: str) -> str:
    """Return a time with a time zone, in UTC."""
    return f'"{iso_time(time_us(text))}Z"'


def wrapped(value: int) -> str:
    """Return a product as Java's `long` holds it: beyond 64 bits it wraps."""
    return str(((value + 2**63) & (2**64 - 1)) - 2**63)


_INTERVAL: Final = re.compile(r"([+-]?\d+) (year|mon|day)s?")
_INTERVAL_TIME: Final = re.compile(r"([+-]?)(\d+):(\d\d):(\d\d)(?:\.(\d{1,6}))?\Z")


def _interval(text: str) -> tuple[int, int, int, int, int, int]:
    """Return years, months, days, and the signed hours, minutes and microseconds; all 0 if it is infinite."""
    parts = {unit: int(number) for number, unit in _INTERVAL.findall(text)}
    found = _INTERVAL_TIME.search(text)
    hours = minutes = micros = 0
    if found is not None:
        sign = -1 if found[1] == "-" else 1
        hours, minutes = sign * int(found[2]), sign * int(found[3])
        micros = sign * (int(found[4]) * 1_000_000 + int((found[5] or "").ljust(6, "0")))
    return parts.get("year", 0), parts.get("mon", 0), parts.get("day", 0), hours, minutes, micros


def interval_us(text: str) -> str:
    """Return an interval's microseconds, with a month of 30.4375 days."""
    years, months, days, hours, minutes, micros = _interval(text)
    # 30.4375 days are 2,629,800 seconds.
    seconds = (years * 12 + months) * 2_629_800 + days * 86400 + hours * 3600 + minutes * 60
    return wrapped(seconds * 1_000_000 + micros)


def interval_text(text: str) -> str:
    """Return an interval as ISO 8601's duration, with every unit."""
    years, months, days, hours, minutes, micros = _interval(text)
    seconds, fraction = divmod(abs(micros), 1_000_000)
    written = f"{seconds}.{fraction:06}".rstrip("0").rstrip(".") if fraction else str(seconds)
    return f'"P{years}Y{months}M{days}DT{hours}H{minutes}M{"-" if micros < 0 else ""}{written}S"'


# --- bytes, bits, points -----------------------------------------------------------------------------------------


def base64(value: bytes) -> str:
    """Return bytes as a JSON string of Base64."""
    return f'"{b64encode(value).decode()}"'


def base64_url_safe(value: bytes) -> str:
    """Return bytes as a JSON string of Base64 in the alphabet for URLs."""
    return f'"{urlsafe_b64encode(value).decode()}"'


def hexadecimal(value: bytes) -> str:
    """Return bytes as a JSON string of hexadecimal digits."""
    return f'"{value.hex()}"'


def bytea(text: str) -> bytes:
    r"""Return the bytes of `\x…`."""
    return bytes.fromhex(text[2:])


def bits(text: str) -> str:
    """Return a bit string as Debezium's `Bits`: bytes, the lowest first, without zeros at the end."""
    value = int(text or "0", 2)
    return base64(value.to_bytes((value.bit_length() + 7) // 8, "little"))


def bit(text: str) -> str:
    """Return a single bit as JSON's boolean."""
    return "true" if text == "1" else "false"


def point(text: str) -> str:
    """Return a point as Debezium's `Point`, with its well-known binary."""
    x, y = (float(part) for part in text.strip("()").split(","))
    wkb = base64(struct.pack("<BIdd", 1, 1, x, y))
    return f'{{"x":{floating(str(x))},"y":{floating(str(y))},"wkb":{wkb},"srid":null}}'


def numbers(text: str) -> str:
    """Return an `int2vector` or `oidvector` as an array."""
    return "[" + ",".join(text.split()) + "]"
