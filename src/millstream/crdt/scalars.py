"""Values of columns in merging states: one order over all of them, and one encoding each.

The kinds are those of a log's columns: null, booleans, integers, floats, decimals, text, bytes, dates, times, lists
of these. Kinds order by their tags, values of a kind in their usual order. Null comes first, NaN behind all floats,
-0.0 before 0.0; of equal decimals the one with more digits comes later. Texts order by code point, as their UTF-8
bytes do.
"""

from __future__ import annotations

import datetime as dt
import operator
import struct
from collections.abc import Iterable
from decimal import Decimal
from typing import Any, Final

from millstream.errors import InvalidValue, MergeStateUnreadable

_NULL, _FALSE, _TRUE, _INT, _FLOAT, _DECIMAL, _TEXT, _BYTES, _DATE, _MOMENT, _INSTANT, _LIST = range(12)
_LENGTH: Final = struct.Struct(">I")
_BITS: Final = struct.Struct(">d")
_WHOLE: Final = struct.Struct(">q")
_NAN: Final = float("nan")
_EPOCH: Final = dt.datetime(1970, 1, 1)  # noqa: DTZ001 - times without a zone have none
_US: Final = dt.timedelta(microseconds=1)
_SIGN: Final = 1 << 63


def order_of(value: Any) -> tuple[Any, ...]:
    """Return the sort key of a value among values of all kinds. `InvalidValue` for a kind that columns don't have."""
    tag = _tag(value)
    if tag == _FLOAT:
        return tag, _float_order(value)
    if tag == _DECIMAL:
        if value.is_nan():
            return tag, 3, 0, 0
        if value.is_infinite():
            return tag, (2 if value > 0 else 0), 0, 0
        return tag, 1, value, (not value.is_signed(), -int(value.as_tuple().exponent))
    if tag in {_MOMENT, _INSTANT}:
        return tag, _microseconds(value)
    if tag == _LIST:
        return tag, tuple(order_of(item) for item in value)
    return (tag,) if tag in {_NULL, _FALSE, _TRUE} else (tag, value)


def canonical(value: Any) -> Any:
    """Return one value for all values that encode alike: one NaN, lists as tuples."""
    tag = _tag(value)
    if tag == _FLOAT and value != value:  # noqa: PLR0124 - that is what NaN is
        return _NAN
    if tag == _DECIMAL and value.is_nan():
        return Decimal("NaN")
    if tag == _BYTES:
        return bytes(value)
    return tuple(canonical(item) for item in value) if tag == _LIST else value


def same(a: Any, b: Any) -> bool:
    """Return whether two values encode alike."""
    return encode_value(a) == encode_value(b)


def encode_value(value: Any) -> bytes:
    """Return a value's canonical bytes.

    `InvalidValue` for a kind that columns don't have, or text that isn't Unicode.
    """
    tag = _tag(value)
    return bytes((tag,)) + _payload(tag, value)


def _payload(tag: int, value: Any) -> bytes:
    if tag == _INT:
        return sized(value.to_bytes((value.bit_length() + 8) // 8, "big", signed=True))
    if tag == _FLOAT:
        return _BITS.pack(canonical(value))
    if tag == _DECIMAL:
        return sized(str(canonical(value)).encode())
    if tag == _TEXT:
        try:
            return sized(value.encode())
        except UnicodeEncodeError as error:
            raise InvalidValue(f"{value!r} isn't text") from error
    if tag == _BYTES:
        return sized(bytes(value))
    if tag == _DATE:
        return _WHOLE.pack(value.toordinal())
    if tag in {_MOMENT, _INSTANT}:
        return _WHOLE.pack(_microseconds(value))
    if tag == _LIST:
        return _LENGTH.pack(len(value)) + b"".join(map(encode_value, value))
    return b""


def whole_number(value: Any, name: str) -> int:
    """Return a whole number as an int, from any type of integers; `InvalidValue` for another value, a bool included.

    Args:
        value: the number.
        name: what it is, for the error: "a count".
    """
    if isinstance(value, bool):
        raise InvalidValue(f"{name} is a whole number, not {value!r}")
    try:
        return operator.index(value)
    except TypeError as error:
        raise InvalidValue(f"{name} is a whole number, not {value!r}") from error


class Cursor:
    """Reads an encoding from front to back; any error in it is a `MergeStateUnreadable` or a `ValueError`."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> bytes:
        """Return the next bytes."""
        found = self._data[self._at : self._at + size]
        if len(found) < size:
            raise MergeStateUnreadable("the bytes of a state end too early")
        self._at += size
        return found

    def whole(self) -> int:
        """Read a signed 64-bit number."""
        return int(_WHOLE.unpack(self.take(8))[0])

    def length(self) -> int:
        """Read a count or a length."""
        return int(_LENGTH.unpack(self.take(4))[0])

    def sized(self) -> bytes:
        """Read bytes after their length."""
        return self.take(self.length())

    def value(self) -> Any:
        """Read a value of `encode_value`."""
        tag = self.take(1)[0]
        if tag in {_NULL, _FALSE, _TRUE}:
            return (None, False, True)[tag]
        if tag == _LIST:
            return tuple(self.value() for _ in range(self.length()))
        if tag == _FLOAT:
            return _BITS.unpack(self.take(8))[0]
        if tag in {_DATE, _MOMENT, _INSTANT}:
            whole = self.whole()
            if tag == _DATE:
                return dt.date.fromordinal(whole)
            moment = _EPOCH + whole * _US
            return moment if tag == _MOMENT else moment.replace(tzinfo=dt.UTC)
        data = self.sized()
        if tag == _INT:
            return int.from_bytes(data, "big", signed=True)
        if tag == _DECIMAL:
            return Decimal(data.decode())
        if tag == _TEXT:
            return data.decode()
        if tag == _BYTES:
            return data
        raise MergeStateUnreadable(f"a state holds a value of unknown kind {tag}")

    def end(self) -> None:
        """Check that nothing follows."""
        if self._at != len(self._data):
            raise MergeStateUnreadable(f"{len(self._data) - self._at} bytes follow on the end of a state")


def whole(number: int) -> bytes:
    """Return the bytes for `Cursor.whole`. `InvalidValue` if the number has more than 64 bits."""
    try:
        return _WHOLE.pack(number)
    except struct.error as error:
        raise InvalidValue(f"{number} has more than 64 bits") from error


def sized(data: bytes) -> bytes:
    """Return the bytes for `Cursor.sized`."""
    return _LENGTH.pack(len(data)) + data


def counted(parts: Iterable[bytes]) -> bytes:
    """Return a count, and as many parts."""
    held = list(parts)
    return _LENGTH.pack(len(held)) + b"".join(held)


def _tag(value: Any) -> int:
    if value is None:
        return _NULL
    if isinstance(value, bool):
        return _TRUE if value else _FALSE
    if isinstance(value, dt.datetime) and value.tzinfo is not None:
        return _INSTANT
    for kind, tag in _TAGS:
        if isinstance(value, kind):
            return tag
    raise InvalidValue(f"a value of type {type(value).__name__} can't be merged")


_TAGS: Final[tuple[tuple[type | tuple[type, ...], int], ...]] = (
    (int, _INT),
    (float, _FLOAT),
    (Decimal, _DECIMAL),
    (str, _TEXT),
    ((bytes, bytearray, memoryview), _BYTES),
    (dt.datetime, _MOMENT),  # which is a date too
    (dt.date, _DATE),
    ((list, tuple), _LIST),
)


def _microseconds(moment: dt.datetime) -> int:
    if moment.tzinfo is not None:
        moment = moment.astimezone(dt.UTC).replace(tzinfo=None)
    return (moment - _EPOCH) // _US


def _float_order(value: float) -> int:
    (bits,) = struct.unpack(">q", _BITS.pack(canonical(value)))
    return int(bits) if bits >= 0 else -(bits + _SIGN) - 1
