"""Parsers of values in machine code, a column of texts at a time: each value OK, NULL, or BAD.

A value is OK only if its text is exactly what PostgreSQL prints for the number read. Every doubtful
value is BAD and goes through `millstream.model.exact_values`, which decides. `value_at` and `size` are
the texts' places in the buffer (a size below 0: no text). Bytes are read at unsigned places: for a
signed one numba checks each time whether it counts from the end, which takes longer than the rest.
"""

# ruff: noqa: C901, PLR0912, PLR0915, PLR1714 — loops over bytes, as machine code wants them

from __future__ import annotations

from typing import Any, Final

import numpy as np

from millstream.codec.machine_code import compiled, inlined

Array = Any  # numba knows the element types better than a type checker could

NULL: Final = 0
OK: Final = 1
BAD: Final = 2

_TEN: Final = np.uint64(10)
_HALF: Final = np.uint64(32)
_LOW_HALF: Final = np.uint64(0xFFFFFFFF)
_ONE: Final = np.uint64(1)
_ZERO: Final = np.uint64(0)
_TENTH: Final = np.int64(-922337203685477580)
"""A tenth of the smallest number, without its last digit, 8."""


@inlined
def _byte(buffer: Array, at: int) -> Any:
    return buffer[np.uint64(at)]


@compiled
def measure(size: Array, offsets: Array) -> int:
    """Fill a string array's offsets; return the total size in bytes."""
    total = 0
    offsets[0] = 0
    for row in range(len(size)):
        if size[row] > 0:
            total += size[row]
        offsets[row + 1] = total
    return total


@compiled
def gather(buffer: Array, value_at: Array, size: Array, offsets: Array, data: Array) -> None:
    """Concatenate all texts."""
    for row in range(len(size)):
        at = np.uint64(value_at[row])
        to = np.uint64(offsets[row])
        for i in range(np.uint64(max(0, size[row]))):
            data[to + i] = buffer[at + i]


@compiled
def read_integers(buffer: Array, value_at: Array, size: Array, low: int, high: int, out: Array, state: Array) -> int:
    """Read whole numbers between two bounds; return the number of BAD values."""
    bad = 0
    for row in range(len(size)):
        length = size[row]
        out[row] = 0
        if length < 0:
            state[row] = NULL
            continue
        at = value_at[row]
        end = at + length
        negative = length > 0 and _byte(buffer, at) == 45
        if negative:
            at += 1
        digits = end - at
        fine = 1 <= digits <= 19 and (_byte(buffer, at) != 48 or (digits == 1 and not negative))
        # The negative range reaches one further than the positive range.
        value = np.int64(0)
        if fine:
            for i in range(at, end):
                digit = np.int64(_byte(buffer, i)) - 48
                # Only a nineteenth digit can be too much.
                if digit < 0 or digit > 9 or (i == at + 18 and (value < _TENTH or (value == _TENTH and digit > 8))):
                    fine = False
                    break
                value = value * 10 - digit
        if fine and not negative:
            if value == -9223372036854775808:
                fine = False
            else:
                value = -value
        if fine and low <= value <= high:
            out[row] = value
            state[row] = OK
        else:
            state[row] = BAD
            bad += 1
    return bad


@compiled
def read_booleans(buffer: Array, value_at: Array, size: Array, out: Array, state: Array) -> int:
    """Read `t` and `f`; return the number of BAD values."""
    bad = 0
    for row in range(len(size)):
        out[row] = 0
        if size[row] < 0:
            state[row] = NULL
        elif size[row] == 1 and (_byte(buffer, value_at[row]) == 116 or _byte(buffer, value_at[row]) == 102):
            out[row] = 1 if _byte(buffer, value_at[row]) == 116 else 0
            state[row] = OK
        else:
            state[row] = BAD
            bad += 1
    return bad


@compiled
def read_decimals(
    buffer: Array, value_at: Array, size: Array, precision: int, scale: int, out: Array, state: Array
) -> int:
    """Read decimals of exactly `scale` fractional digits into pairs of 64-bit words; return the count of BAD values."""
    bad = 0
    for row in range(len(size)):
        out[2 * row] = 0
        out[2 * row + 1] = 0
        length = size[row]
        if length < 0:
            state[row] = NULL
            continue
        at = value_at[row]
        end = at + length
        negative = length > 0 and _byte(buffer, at) == 45
        if negative:
            at += 1
        point = end - scale - 1 if scale > 0 else end
        whole = point - at
        fine = whole >= 1 and (whole == 1 or _byte(buffer, at) != 48)
        if fine and scale > 0 and _byte(buffer, point) != 46:
            fine = False
        high = _ZERO  # up to 19 digits, then up to 19 more in `low`
        low = _ZERO
        digits = 0
        power = _ONE
        if fine:
            for i in range(at, end):
                if i == point:
                    continue
                if _byte(buffer, i) < 48 or _byte(buffer, i) > 57:
                    fine = False
                    break
                digit = np.uint64(_byte(buffer, i) - 48)
                if digits > 0 or digit != _ZERO:
                    digits += 1
                if digits <= 19:
                    high = high * _TEN + digit
                elif digits <= 38:
                    low = low * _TEN + digit
                    power = power * _TEN
        if not fine or digits > precision or (negative and digits == 0):
            state[row] = BAD
            bad += 1
            continue
        # high * power + low in 128 bits, by halves of 32.
        a, b = high >> _HALF, high & _LOW_HALF
        c, d = power >> _HALF, power & _LOW_HALF
        bd = b * d
        middle = (bd >> _HALF) + ((a * d) & _LOW_HALF) + ((b * c) & _LOW_HALF)
        word = (middle << _HALF) | (bd & _LOW_HALF)
        upper = a * c + ((a * d) >> _HALF) + ((b * c) >> _HALF) + (middle >> _HALF)
        total = word + low
        if total < word:
            upper = upper + _ONE
        if negative:
            total = ~total + _ONE
            upper = ~upper
            if total == _ZERO:
                upper = upper + _ONE
        out[2 * row] = np.int64(total)
        out[2 * row + 1] = np.int64(upper)
        state[row] = OK
    return bad


@inlined
def _two(buffer: Array, at: int) -> Any:
    """Return a number of two digits, or one above 99."""
    high = np.int64(_byte(buffer, at)) - 48
    low = np.int64(_byte(buffer, at + 1)) - 48
    if high < 0 or high > 9 or low < 0 or low > 9:
        return np.int64(1000)
    return high * 10 + low


@inlined
def _day(buffer: Array, at: int) -> Any:
    """Return the days since 1970 of `YYYY-MM-DD` (ten bytes); below -1,000,000 outside of the years 1 to 9999."""
    none = np.int64(-2_000_000)
    century = _two(buffer, at)
    rest = _two(buffer, at + 2)
    month = _two(buffer, at + 5)
    day = _two(buffer, at + 8)
    if century > 99 or rest > 99 or _byte(buffer, at + 4) != 45 or _byte(buffer, at + 7) != 45:
        return none
    year = century * 100 + rest
    if year < 1 or month < 1 or month > 12 or day < 1 or day > 31:
        return none
    if day > 28:
        leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
        last = np.int64(31)
        if month == 2:
            last = np.int64(29) if leap else np.int64(28)
        elif month == 4 or month == 6 or month == 9 or month == 11:
            last = np.int64(30)
        if day > last:
            return none
    # Days from civil, with years that start in March.
    shifted = year - 1 if month <= 2 else year
    era = shifted // 400
    of_era = shifted - era * 400
    of_year = (153 * (month - 3 if month > 2 else month + 9) + 2) // 5 + day - 1
    return era * 146097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719468


@compiled
def read_dates(buffer: Array, value_at: Array, size: Array, out: Array, state: Array) -> int:
    """Read dates as days since 1970; return the number of BAD values."""
    bad = 0
    for row in range(len(size)):
        out[row] = 0
        if size[row] < 0:
            state[row] = NULL
            continue
        days = _day(buffer, value_at[row]) if size[row] == 10 else np.int64(-2_000_000)
        if days > -1_000_000:
            out[row] = days
            state[row] = OK
        else:
            state[row] = BAD
            bad += 1
    return bad


@compiled
def read_timestamps(buffer: Array, value_at: Array, size: Array, zoned: Any, out: Array, state: Array) -> int:
    """Read timestamps as microseconds since 1970, those with a zone in UTC (`+00`); return the number of BAD values."""
    bad = 0
    for row in range(len(size)):
        out[row] = 0
        length = size[row]
        if length < 0:
            state[row] = NULL
            continue
        at = value_at[row]
        fine = True
        if zoned:
            length -= 3
            fine = length > 0 and _byte(buffer, at + length) == 43 and _two(buffer, at + length + 1) == 0
        fine = fine and (length == 19 or 21 <= length <= 26)
        value = np.int64(0)
        if fine:
            days = _day(buffer, at)
            hours = _two(buffer, at + 11)
            minutes = _two(buffer, at + 14)
            seconds = _two(buffer, at + 17)
            fine = (
                days > -1_000_000
                and _byte(buffer, at + 10) == 32
                and _byte(buffer, at + 13) == 58
                and _byte(buffer, at + 16) == 58
                and hours < 24
                and minutes < 60
                and seconds < 60
            )
            value = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
            value *= 1_000_000
            if fine and length > 19:
                fine = _byte(buffer, at + 19) == 46 and _byte(buffer, at + length - 1) != 48
                micros = np.int64(0)
                for i in range(20, 26):
                    digit = np.int64(0)
                    if i < length:
                        digit = np.int64(_byte(buffer, at + i)) - 48
                        if digit < 0 or digit > 9:
                            fine = False
                    micros = micros * 10 + digit
                value += micros
        if fine:
            out[row] = value
            state[row] = OK
        else:
            state[row] = BAD
            bad += 1
    return bad


@inlined
def _nibble(byte: int) -> Any:
    if 48 <= byte <= 57:
        return np.int64(byte) - 48
    if 97 <= byte <= 102:
        return np.int64(byte) - 87
    return np.int64(-1)


@compiled
def measure_bytea(buffer: Array, value_at: Array, size: Array, offsets: Array, state: Array) -> int:
    r"""Fill a binary array's offsets for values like `\x00ff`; return the total size in bytes.

    Values of another form are BAD.
    """
    total = 0
    offsets[0] = 0
    for row in range(len(size)):
        at = value_at[row]
        length = size[row]
        if length < 0:
            state[row] = NULL
        elif length < 2 or length % 2 != 0 or buffer[at] != 92 or buffer[at + 1] != 120:
            state[row] = BAD
        else:
            state[row] = OK
            total += (length - 2) // 2
        offsets[row + 1] = total
    return total


@compiled
def read_bytea(buffer: Array, value_at: Array, offsets: Array, data: Array, state: Array) -> int:
    """Read the hex digits of values that `measure_bytea` accepted; return the total number of BAD values."""
    bad = 0
    for row in range(len(state)):
        if state[row] == OK:
            at = value_at[row] + 2
            for to in range(offsets[row], offsets[row + 1]):
                high = _nibble(buffer[at])
                low = _nibble(buffer[at + 1])
                at += 2
                if high < 0 or low < 0:
                    state[row] = BAD
                    break
                data[to] = high * 16 + low
        if state[row] == BAD:
            bad += 1
    return bad


@inlined
def _shortest_text(text: Array, start: int, end: int, fixed_below: int, out: Array) -> Any:
    """Write PostgreSQL's text of a number given in another shortest notation; return its length, 0 if it isn't finite.

    See `millstream.model.floats`: the digits are the same, the notation isn't.
    """
    at = start
    to = 0
    if at < end and text[at] == 45:
        out[to] = 45
        to += 1
        at += 1
    digits = np.empty(32, np.uint8)
    count = 0
    exponent: Any = 0
    point = False
    power: Any = 0
    while at < end:
        byte = text[at]
        at += 1
        if byte == 46:
            point = True
        elif byte == 101 or byte == 69:
            minus = False
            if at < end and (text[at] == 45 or text[at] == 43):
                minus = text[at] == 45
                at += 1
            while at < end:
                power = power * 10 + np.int64(text[at]) - 48
                at += 1
            if minus:
                power = -power
        elif byte < 48 or byte > 57 or count >= 32:
            return 0
        elif count > 0 or byte != 48:
            digits[count] = byte
            count += 1
            if not point:
                exponent += 1
        elif point:
            exponent -= 1
    while count > 0 and digits[count - 1] == 48:
        count -= 1
    if count == 0:
        out[to] = 48
        return to + 1
    exponent += power - 1
    if exponent < -4 or exponent >= fixed_below:
        out[to] = digits[0]
        to += 1
        if count > 1:
            out[to] = 46
            to += 1
            for i in range(1, count):
                out[to] = digits[i]
                to += 1
        out[to] = 101
        out[to + 1] = 45 if exponent < 0 else 43
        to += 2
        rest = abs(exponent)
        if rest >= 100:
            out[to] = 48 + rest // 100
            to += 1
        out[to] = 48 + rest // 10 % 10
        out[to + 1] = 48 + rest % 10
        return to + 2
    if exponent < 0:
        out[to] = 48
        out[to + 1] = 46
        to += 2
        for _ in range(-exponent - 1):
            out[to] = 48
            to += 1
        for i in range(count):
            out[to] = digits[i]
            to += 1
        return to
    for i in range(max(count, exponent + 1)):
        if i == exponent + 1:
            out[to] = 46
            to += 1
        out[to] = digits[i] if i < count else 48
        to += 1
    return to


@compiled
def check_floats(
    buffer: Array,
    value_at: Array,
    size: Array,
    values: Array,
    shortest_at: Array,
    shortest: Array,
    fixed_below: int,
    half_way_from: float,
    half_way_to: float,
    state: Array,
) -> int:
    """Compare texts of floats with the shortest texts of the numbers read from them; return the number of BAD values.

    `shortest_at` and `shortest` are a string array's offsets and bytes. Numbers of the range in
    which PostgreSQL's digits may differ from the shortest (see `millstream.model.floats`) are BAD.
    """
    bad = 0
    out = np.empty(64, np.uint8)
    for row in range(len(size)):
        if size[row] < 0:
            state[row] = NULL
            continue
        length = _shortest_text(shortest, shortest_at[row], shortest_at[row + 1], fixed_below, out)
        fine = length == size[row] and not half_way_from <= abs(values[row]) < half_way_to
        if fine:
            for i in range(length):
                if buffer[value_at[row] + i] != out[i]:
                    fine = False
                    break
        state[row] = OK if fine else BAD
        if not fine:
            bad += 1
    return bad
