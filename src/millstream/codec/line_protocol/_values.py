"""Values in machine code: the ends of keys, texts and lines, and the reading of numbers, booleans and timestamps."""

# ruff: noqa: C901, PLR0911, PLR0912, PLR0915, PLR1714 — loops over bytes, as machine code wants them

from __future__ import annotations

from typing import Any, Final

import numpy as np

from millstream.codec.line_protocol._floats import INFINITE, UNSURE, double_bits, small_double
from millstream.codec.line_protocol.grammar import Fault, ValueKind
from millstream.codec.little_endian_words import are_digits, eight_digits, load_word, trailing_zeros, zero_bytes
from millstream.codec.machine_code import compiled, inlined

Array = Any  # numba knows the element types better than a type checker could

TEXT_ESCAPED: Final = 1 << 31
"""In the facts of a text, `where << 32 | size`: it has escapes, which aren't counted in its size."""
UNSURE_FLOAT: Final = 64
"""Instead of a kind: Python has to read the number's text."""


_FLOAT, _INTEGER, _UNSIGNED, _BOOLEAN = (
    int(ValueKind.FLOAT),
    int(ValueKind.INTEGER),
    int(ValueKind.UNSIGNED),
    int(ValueKind.BOOLEAN),
)
_FIELD_WITHOUT_VALUE = int(Fault.FIELD_WITHOUT_VALUE)
_NO_VALUE, _NOT_FINITE, _FLOAT_TOO_LARGE = int(Fault.NO_VALUE), int(Fault.NOT_FINITE), int(Fault.FLOAT_TOO_LARGE)
_INTEGER_TOO_LARGE, _UNSIGNED_TOO_LARGE = int(Fault.INTEGER_TOO_LARGE), int(Fault.UNSIGNED_TOO_LARGE)
_NO_TIME, _TIME_TOO_FAR = int(Fault.NO_TIME), int(Fault.TIME_TOO_FAR)

STOPS: Final = np.zeros(256, np.uint8)
"""Bytes that end a run of plain bytes, by context: 1 in a measurement, 2 in keys and tags, 4 in strings."""
for _stops, _where in ((b", \\\n", 1), (b",= \\\n", 2), (b'"\\\n', 4)):
    for _byte in _stops:
        STOPS[_byte] |= _where

_EVERY: Final = 0x0101010101010101
_COMMAS, _EQUALS, _SPACES = np.uint64(44 * _EVERY), np.uint64(61 * _EVERY), np.uint64(32 * _EVERY)
_BACKSLASHES, _NEWLINES, _QUOTES = np.uint64(92 * _EVERY), np.uint64(10 * _EVERY), np.uint64(34 * _EVERY)

_HIGH_BITS: Final = np.uint64(128 * _EVERY)

_ZERO: Final = np.uint64(0)
_TEN: Final = np.uint64(10)
_HUNDRED_MILLION: Final = np.uint64(100_000_000)
_INT_MAX: Final = np.uint64(2**63 - 1)
_WHOLE_MAX: Final = np.uint64(2**64 - 1)


@inlined
def is_line_end(buffer: Array, at: int) -> Any:
    return buffer[at] == 10 or (buffer[at] == 13 and buffer[at + 1] == 10)


@inlined
def key_end(buffer: Array, at: int) -> Any:
    """Return the end of a key or a tag's value, and the number of its escapes."""
    escapes = np.int64(0)
    while True:
        while at + 8 <= len(buffer):
            word = load_word(buffer, at)
            found = (
                zero_bytes(word ^ _COMMAS)
                | zero_bytes(word ^ _EQUALS)
                | zero_bytes(word ^ _SPACES)
                | zero_bytes(word ^ _BACKSLASHES)
                | zero_bytes(word ^ _NEWLINES)
            )
            if found != _ZERO:
                at += trailing_zeros(found) >> 3
                break
            at += 8
        while STOPS[buffer[at]] & 2 == 0:
            at += 1
        if buffer[at] != 92:
            return at, escapes
        at += 1
        if buffer[at] == 44 or buffer[at] == 61 or buffer[at] == 32:
            escapes += 1
            at += 1


@inlined
def end_of_line(buffer: Array, start: int, end: int) -> Any:
    """Return the end of the line that begins at `start`, valid or not; `end` is the body's end."""
    at, in_fields = start, False
    while at < end and buffer[at] != 10:
        if buffer[at] == 32 and (at == start or buffer[at - 1] != 92):
            in_fields = True
        elif in_fields and buffer[at] == 61 and at + 1 < end and buffer[at + 1] == 34 and buffer[at - 1] != 92:
            at += 2
            while at < end and buffer[at] != 34:
                if buffer[at] == 92 and at + 1 < end and (buffer[at + 1] == 34 or buffer[at + 1] == 92):
                    at += 1
                at += 1
        at += 1
    return min(at, end)


@compiled
def line_end(buffer: Array, start: int, end: int) -> int:
    """Return the end of the line that begins at `start`, valid or not; `end` is the body's end."""
    return int(end_of_line(buffer, start, end))


@inlined
def is_utf8(buffer: Array, at: int, end: int) -> Any:
    """Whether these bytes are UTF-8 as Unicode defines it: no overlong forms, no surrogates."""
    while at < end:
        while at + 8 <= end and load_word(buffer, at) & _HIGH_BITS == _ZERO:
            at += 8
        if at == end:
            break
        byte = buffer[at]
        if byte < 0x80:
            at += 1
            continue
        low, high = 0x80, 0xBF
        if 0xC2 <= byte <= 0xDF:
            more = 1
        elif 0xE0 <= byte <= 0xEF:
            more = 2
            if byte == 0xE0:
                low = 0xA0
            elif byte == 0xED:
                high = 0x9F
        elif 0xF0 <= byte <= 0xF4:
            more = 3
            if byte == 0xF0:
                low = 0x90
            elif byte == 0xF4:
                high = 0x8F
        else:
            return False
        if at + more >= end or buffer[at + 1] < low or buffer[at + 1] > high:
            return False
        for i in range(2, more + 1):
            if buffer[at + i] < 0x80 or buffer[at + i] > 0xBF:
                return False
        at += more + 1
    return True


@inlined
def _boolean(buffer: Array, at: int, end: int) -> Any:
    """Return 1 or 0; -1 if it is no boolean."""
    size = end - at
    first = buffer[at]
    true = first == 116 or first == 84
    if not true and first != 102 and first != 70:
        return np.int64(-1)
    if size == 1:
        return np.int64(1 if true else 0)
    if size != (4 if true else 5):
        return np.int64(-1)
    word = (114, 117, 101, 0) if true else (97, 108, 115, 101)
    # All lower case, or all upper case; behind an initial capital, either.
    is_small = buffer[at + 1] >= 97
    if first >= 97 and not is_small:
        return np.int64(-1)
    for i in range(size - 1):
        if buffer[at + 1 + i] != (word[i] if is_small else word[i] - 32):
            return np.int64(-1)
    return np.int64(1 if true else 0)


@inlined
def _is_letter(byte: int, small: int) -> Any:
    return byte == small or byte == small - 32


@inlined
def _other_fault(buffer: Array, at: int, end: int) -> Any:
    """Return the fault of a word that is no number: it may be NaN or an infinity."""
    if buffer[at] == 45 or buffer[at] == 43:
        at += 1
    size = end - at
    if size == 3 and _is_letter(buffer[at], 110) and _is_letter(buffer[at + 1], 97) and _is_letter(buffer[at + 2], 110):
        return _NOT_FINITE
    if size == 3 or size == 8:
        infinity = (105, 110, 102, 105, 110, 105, 116, 121)
        for i in range(size):
            if not _is_letter(buffer[at + i], infinity[i]):
                return _NO_VALUE
        return _NOT_FINITE
    return _NO_VALUE


@inlined
def _long_whole(buffer: Array, at: int, end: int) -> Any:
    """Read any number of digits; return their number as a word, and whether it fits."""
    value = _ZERO
    for i in range(at, end):
        digit = np.uint64(buffer[i] - 48)
        if value > (_WHOLE_MAX - digit) // _TEN:
            return _ZERO, False
        value = value * _TEN + digit
    return value, True


@inlined
def _long_float(buffer: Array, at: int, end: int, exponent: Any) -> Any:
    """Return the bits of a double from its digits, or another result of `double_bits`.

    The digits may have a point, and end at the exponent.
    """
    digits = _ZERO
    count = 0
    point = False
    is_cut = False
    power = exponent
    for i in range(at, end):
        byte = buffer[i]
        if byte == 46:
            point = True
            continue
        if point:
            power -= 1
        if byte == 48 and count == 0:
            continue
        if count < 19:
            digits = digits * _TEN + np.uint64(byte - 48)
            count += 1
        else:
            power += 1
            is_cut = is_cut or byte != 48
    bits = double_bits(digits, power)
    if is_cut and bits != double_bits(digits + np.uint64(1), power):
        return np.int64(UNSURE)
    return bits


@inlined
def read_number(buffer: Array, at: int, token: int, payload: Array, doubles: Array) -> Any:
    """Read a number: return its end, and its kind or a fault below 0 (`UNSURE_FLOAT` if Python has to read it)."""
    begin = at
    negative = buffer[at] == 45
    if negative:
        at += 1
    start = at
    digits = _ZERO
    while True:
        digit = np.uint8(buffer[at] - 48)
        if digit > 9:
            break
        digits = digits * _TEN + np.uint64(digit)
        at += 1
    whole_end = at
    if buffer[at] == 46:
        at += 1
        while True:
            digit = np.uint8(buffer[at] - 48)
            if digit > 9:
                break
            digits = digits * _TEN + np.uint64(digit)
            at += 1
    digits_end = at
    behind = digits_end - whole_end - 1 if digits_end > whole_end else 0
    count = whole_end - start + behind
    exponent = np.int64(0)
    byte = buffer[at]
    if count > 0:
        if byte == 101 or byte == 69:
            at += 1
            minus = buffer[at] == 45
            if minus or buffer[at] == 43:
                at += 1
            exponent_at = at
            while True:
                digit = np.uint8(buffer[at] - 48)
                if digit > 9:
                    break
                if exponent < 100_000_000_000:
                    exponent = exponent * 10 + np.int64(digit)
                at += 1
            if at == exponent_at:
                count = 0
            if minus:
                exponent = -exponent
        elif (byte == 105 or byte == 117) and digits_end == whole_end:
            at += 1
    end = at
    if not (buffer[at] == 44 or buffer[at] == 32 or is_line_end(buffer, at)):
        count = 0
        while not (buffer[end] == 44 or buffer[end] == 32 or is_line_end(buffer, end)):
            end += 1
    if count == 0:
        if end == begin:
            return end, np.int64(-_FIELD_WITHOUT_VALUE)
        value = _boolean(buffer, begin, end)
        if value >= 0:
            payload[token] = value
            return end, np.int64(_BOOLEAN)
        return end, np.int64(-_other_fault(buffer, begin, end))
    if at > digits_end and byte == 105:
        if count > 19:
            digits, fits = _long_whole(buffer, start, whole_end)
            if not fits:
                return end, np.int64(-_INTEGER_TOO_LARGE)
        if negative:
            if digits > _INT_MAX + np.uint64(1):
                return end, np.int64(-_INTEGER_TOO_LARGE)
            payload[token] = np.int64(_ZERO - digits)
        else:
            if digits > _INT_MAX:
                return end, np.int64(-_INTEGER_TOO_LARGE)
            payload[token] = np.int64(digits)
        return end, np.int64(_INTEGER)
    if at > digits_end and byte == 117:
        if negative:
            return end, np.int64(-_NO_VALUE)
        if count > 19:
            digits, fits = _long_whole(buffer, start, whole_end)
            if not fits:
                return end, np.int64(-_UNSIGNED_TOO_LARGE)
        payload[token] = np.int64(digits)
        return end, np.int64(_UNSIGNED)
    if count <= 19:
        power = exponent - behind
        number = small_double(digits, power)
        if number >= 0.0:
            doubles[token] = -number if negative else number
            return end, np.int64(_FLOAT)
        bits = double_bits(digits, power)
    else:
        bits = _long_float(buffer, start, digits_end, exponent)
    if bits == UNSURE:
        payload[token] = (begin << 32) | (end - begin)
        return end, np.int64(UNSURE_FLOAT)
    if bits == INFINITE:
        return end, np.int64(-_FLOAT_TOO_LARGE)
    payload[token] = bits | (np.int64(-9223372036854775808) if negative else np.int64(0))
    return end, np.int64(_FLOAT)


@inlined
def read_string(buffer: Array, at: int, end: int, token: int, payload: Array) -> Any:
    """Read a string whose opening quote stands before `at`; return its end and number of newlines.

    The end is behind the closing quote; -1 if there is none.
    """
    start = at
    escapes = np.int64(0)
    newlines = np.int64(0)
    while at < end:
        while at + 8 <= end:
            word = load_word(buffer, at)
            found = zero_bytes(word ^ _QUOTES) | zero_bytes(word ^ _BACKSLASHES) | zero_bytes(word ^ _NEWLINES)
            if found != _ZERO:
                at += trailing_zeros(found) >> 3
                break
            at += 8
        if at >= end:
            break
        if STOPS[buffer[at]] & 4 == 0:
            at += 1
        elif buffer[at] == 34:
            size = at - start - escapes
            payload[token] = (start << 32) | size | (TEXT_ESCAPED if escapes else 0)
            return at + 1, newlines
        elif buffer[at] == 10:
            newlines += 1
            at += 1
        elif at + 1 < end and (buffer[at + 1] == 34 or buffer[at + 1] == 92):
            escapes += 1
            at += 2
        else:
            at += 1
    return np.int64(-1), newlines


@inlined
def read_timestamp(buffer: Array, at: int, low: int, high: int) -> Any:
    """Read a timestamp; return its end, its value, and its fault."""
    negative = buffer[at] == 45
    if negative:
        at += 1
    start = at
    value = _ZERO
    while at + 8 <= len(buffer):
        word = load_word(buffer, at)
        if not are_digits(word):
            break
        value = value * _HUNDRED_MILLION + eight_digits(word)
        at += 8
    while True:
        digit = np.uint8(buffer[at] - 48)
        if digit > 9:
            break
        value = value * _TEN + np.uint64(digit)
        at += 1
    if at == start or not (buffer[at] == 32 or buffer[at] == 9 or buffer[at] == 13 or buffer[at] == 10):
        return at, np.int64(0), _NO_TIME
    if at - start > 19:
        value, fits = _long_whole(buffer, start, at)
        if not fits:
            return at, np.int64(0), _TIME_TOO_FAR
    if value > (_INT_MAX + np.uint64(1) if negative else _INT_MAX):
        return at, np.int64(0), _TIME_TOO_FAR
    time = np.int64(_ZERO - value) if negative else np.int64(value)
    return at, time, 0 if low <= time <= high else _TIME_TOO_FAR
