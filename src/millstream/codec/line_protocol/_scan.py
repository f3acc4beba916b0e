"""Machine code that walks over lines once: where measurements, keys and texts lie, and numbers read.

Lines of one measurement look alike. So a key is compared first with the one that stood at its place in the measurement's line before, and
looked up in a table only where it is another. A line that turns out wrong leaves nothing behind but names.

The buffer ends with a newline, which ends all loops outside of strings.
"""

# ruff: noqa: C901, PLR0911, PLR0912, PLR0915, PLR0917, PLR1714, SIM110 — loops over bytes, as machine code wants them

from __future__ import annotations

from typing import Any, Final

import numpy as np

from millstream.codec.line_protocol._floats import INFINITE, UNSURE, double_bits, small_double
from millstream.codec.line_protocol._words import are_digits, eight_digits, load_word, trailing_zeros, zero_bytes
from millstream.codec.line_protocol.grammar import Fault, Kind
from millstream.codec.pgoutput._compiled import compiled, inlined

Array = Any  # numba knows the element types better than a type checker could

# How a walk ended.
DONE: Final = 0
MORE_MEASUREMENTS: Final = 1
"""There is no room for another one: the walk goes on at the line that has it once there is."""
MORE_COLUMNS: Final = 2

# The walk's state.
AT, NUMBER, LINES, TOKENS, MEASUREMENTS, COLUMNS, WRONG, SLOW = range(8)
STATE_SIZE: Final = 8

# A line's facts. LIKE is the line that this one is like, in its columns and their kinds (itself, where it is the first), and ALIKE how many are like it.
LINE_NUMBER, LINE_MEASUREMENT, LINE_TOKEN, LINE_AT, LIKE, ALIKE = range(6)
LINE_FACTS: Final = 6

# A name's facts, of measurements and of columns; KEPT counts its lines that are right, LAST is the newest of them. Columns' are counted by `count`.
NAME_AT, NAME_SIZE, NAME_HASH, KEPT, LAST, OF_MEASUREMENT, KINDS, FIRST = range(8)
NAME_FACTS: Final = 8
NOWHERE: Final = -1
"""What a measurement is of."""

# A wrong line's facts.
WRONG_NUMBER, WRONG_START, WRONG_END, WRONG_FAULT = range(4)

TEXT_ESCAPED: Final = 1 << 31
"""In the facts of a text, `where << 32 | size`: it has escapes, which aren't counted in its size."""
UNSURE_FLOAT: Final = 64
"""Instead of a kind: the number's text has to be read by Python."""

_FLOAT, _INTEGER, _UNSIGNED = int(Kind.FLOAT), int(Kind.INTEGER), int(Kind.UNSIGNED)
_STRING, _BOOLEAN, _TAG = int(Kind.STRING), int(Kind.BOOLEAN), int(Kind.TAG)
_NO_MEASUREMENT, _NO_FIELDS = int(Fault.NO_MEASUREMENT), int(Fault.NO_FIELDS)
_TAG_WITHOUT_KEY, _TAG_WITHOUT_VALUE = int(Fault.TAG_WITHOUT_KEY), int(Fault.TAG_WITHOUT_VALUE)
_TAG_WITH_EQUALS, _TAG_TWICE = int(Fault.TAG_WITH_EQUALS), int(Fault.TAG_TWICE)
_FIELD_WITHOUT_KEY, _FIELD_WITHOUT_VALUE = int(Fault.FIELD_WITHOUT_KEY), int(Fault.FIELD_WITHOUT_VALUE)
_NO_VALUE, _NOT_FINITE, _FLOAT_TOO_LARGE = int(Fault.NO_VALUE), int(Fault.NOT_FINITE), int(Fault.FLOAT_TOO_LARGE)
_INTEGER_TOO_LARGE, _UNSIGNED_TOO_LARGE = int(Fault.INTEGER_TOO_LARGE), int(Fault.UNSIGNED_TOO_LARGE)
_STRING_WITHOUT_END, _BEHIND_A_STRING = int(Fault.STRING_WITHOUT_END), int(Fault.BEHIND_A_STRING)
_NO_TIME, _TIME_TOO_FAR, _BEHIND_THE_TIME = int(Fault.NO_TIME), int(Fault.TIME_TOO_FAR), int(Fault.BEHIND_THE_TIME)
_NOT_UTF8 = int(Fault.NOT_UTF8)

_STOPS: Final = np.zeros(256, np.uint8)
"""Bytes that end a run of plain ones, by where: 1 in a measurement, 2 in keys and tags, 4 in strings."""
for _stops, _where in ((b", \\\n", 1), (b",= \\\n", 2), (b'"\\\n', 4)):
    for _byte in _stops:
        _STOPS[_byte] |= _where

_EVERY: Final = 0x0101010101010101
_COMMAS, _EQUALS, _SPACES = np.uint64(44 * _EVERY), np.uint64(61 * _EVERY), np.uint64(32 * _EVERY)
_BACKSLASHES, _NEWLINES, _QUOTES = np.uint64(92 * _EVERY), np.uint64(10 * _EVERY), np.uint64(34 * _EVERY)

_ZERO: Final = np.uint64(0)
_TEN: Final = np.uint64(10)
_HUNDRED_MILLION: Final = np.uint64(100_000_000)
_INT_MAX: Final = np.uint64(2**63 - 1)
_WHOLE_MAX: Final = np.uint64(2**64 - 1)
_HASH_PRIME: Final = np.uint64(0x100000001B3)


@inlined
def _is_line_end(buffer: Array, at: int) -> Any:
    return buffer[at] == 10 or (buffer[at] == 13 and buffer[at + 1] == 10)


@inlined
def _is_same(buffer: Array, one: int, other: int, size: int) -> Any:
    if size <= 8 and max(one, other) + 8 <= len(buffer):
        differs = load_word(buffer, one) ^ load_word(buffer, other)
        return size == 0 or differs << np.uint64(64 - 8 * size) == _ZERO
    for i in range(size):
        if buffer[one + i] != buffer[other + i]:
            return False
    return True


@inlined
def _name_hash(buffer: Array, at: int, size: int, seed: Any) -> Any:
    value = seed
    for i in range(size):
        value = (value ^ np.uint64(buffer[at + i])) * _HASH_PRIME
    return np.int64((value ^ (value >> np.uint64(32))) & _INT_MAX)


@inlined
def _named(buffer: Array, of: Any, at: Any, size: Any, seed: Any, names: Array, slots: Array, count: int) -> Any:
    """The place of a name among `names`, which it enters where it is new; -1 where there is no room for it."""
    found = _name_hash(buffer, at, size, seed + np.uint64(of))
    mask = len(slots) - 1
    slot = found & mask
    while slots[slot] >= 0:
        place = np.int64(slots[slot])
        if (
            names[place, NAME_HASH] == found
            and names[place, NAME_SIZE] == size
            and names[place, OF_MEASUREMENT] == of
            and _is_same(buffer, names[place, NAME_AT], at, size)
        ):
            return place
        slot = (slot + 1) & mask
    if count == len(names):
        return np.int64(-1)
    slots[slot] = count
    names[count, NAME_AT] = at
    names[count, NAME_SIZE] = size
    names[count, NAME_HASH] = found
    names[count, KEPT] = 0
    names[count, LAST] = -1
    names[count, OF_MEASUREMENT] = of
    names[count, KINDS] = 0
    names[count, FIRST] = 0
    return np.int64(count)


@compiled
def enter_again(names: Array, count: int, slots: Array) -> None:
    """Fill a larger table, of -1 so far, with the names that there are."""
    mask = len(slots) - 1
    for place in range(count):
        slot = names[place, NAME_HASH] & mask
        while slots[slot] >= 0:
            slot = (slot + 1) & mask
        slots[slot] = place


@compiled
def count(line_count: int, token_count: int, lines: Array, columns_of: Array, kinds: Array, columns: Array) -> None:
    """Count each column's lines, and note its first value and what kinds its values are of: by the first of lines that are alike."""
    for place in range(len(columns)):
        columns[place, LAST] = -1
    for line in range(line_count):
        if lines[line, LIKE] != line:
            continue
        end = np.int64(lines[line + 1, LINE_TOKEN]) if line + 1 < line_count else token_count
        for token in range(lines[line, LINE_TOKEN], end):
            column = columns_of[token]
            columns[column, KINDS] |= np.int64(1) << np.int64(kinds[token])
            if columns[column, LAST] != line:
                if columns[column, KEPT] == 0:
                    columns[column, FIRST] = token
                columns[column, KEPT] += lines[line, ALIKE]
                columns[column, LAST] = line


@inlined
def _key_end(buffer: Array, at: int) -> Any:
    """Where a key or a tag's value ends, and how many escapes it has."""
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
        while _STOPS[buffer[at]] & 2 == 0:
            at += 1
        if buffer[at] != 92:
            return at, escapes
        at += 1
        if buffer[at] == 44 or buffer[at] == 61 or buffer[at] == 32:
            escapes += 1
            at += 1


@inlined
def _line_end(buffer: Array, start: int, end: int) -> Any:
    """Where the line ends that begins at `start`, right or wrong; `end` is the body's."""
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
    """Where the line ends that begins at `start`, right or wrong; `end` is the body's."""
    return int(_line_end(buffer, start, end))


@inlined
def is_utf8(buffer: Array, at: int, end: int) -> Any:
    """Whether these bytes are UTF-8, as Unicode has it: nothing longer than needed, no surrogates."""
    while at < end:
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
    """1 or 0; -1 for what isn't one."""
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
    # All small, or all capitals; behind a capital, either.
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
    """What is wrong with a word that is no number: it may be NaN or an infinity."""
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
    """Any number of digits: the word that they make, and whether it holds them."""
    value = _ZERO
    for i in range(at, end):
        digit = np.uint64(buffer[i] - 48)
        if value > (_WHOLE_MAX - digit) // _TEN:
            return _ZERO, False
        value = value * _TEN + digit
    return value, True


@inlined
def _long_float(buffer: Array, at: int, end: int, exponent: Any) -> Any:
    """The bits of a double from its digits (with a point among them, up to the exponent), or what `double_bits` says besides."""
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
def _number(buffer: Array, at: int, token: int, payload: Array, doubles: Array) -> Any:
    """Read a number: where it ends, its kind, or below 0 what is wrong with it (`UNSURE_FLOAT` where it must be read otherwise)."""
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
    if not (buffer[at] == 44 or buffer[at] == 32 or _is_line_end(buffer, at)):
        count = 0
        while not (buffer[end] == 44 or buffer[end] == 32 or _is_line_end(buffer, end)):
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
def _string(buffer: Array, at: int, end: int, token: int, payload: Array) -> Any:
    """Read a string whose quote stands before `at`: where it ends, behind its quote, and how many newlines it has; -1 where it has no end."""
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
        if _STOPS[buffer[at]] & 4 == 0:
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
def _timestamp(buffer: Array, at: int, low: int, high: int) -> Any:
    """Read a timestamp: where it ends, its value, and what is wrong with it."""
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


@compiled
def scan(
    buffer: Array,
    end: int,
    seed: Any,
    check_utf8: Any,
    time_min: int,
    time_max: int,
    state: Array,
    lines: Array,
    times: Array,
    timed: Array,
    columns_of: Array,
    kinds: Array,
    payload: Array,
    doubles: Array,
    slow: Array,
    measurements: Array,
    measurement_slots: Array,
    columns: Array,
    column_slots: Array,
    wrong: Array,
) -> int:
    """Walk on from where `state` says, to the body's end or until there is no room for a name.

    Args:
        buffer: the body; its last byte is a newline, added where it had none.
        end: the body's own size.
        seed: of the names' hashes.
        check_utf8: whether lines may be other than UTF-8.
        time_min: the earliest timestamp that is taken.
        time_max: the latest.
        state: as the constants above tell; changed.
        lines: a row of facts for each line that is right.
        times: their timestamps.
        timed: whether they have one.
        columns_of: of each value (token), in the order of the lines, its column.
        kinds: of each value.
        payload: of each value: an integer, a double's bits, 0 or 1, or where a text lies.
        doubles: the same memory.
        slow: tokens that Python has to read.
        measurements: facts of names.
        measurement_slots: a hash table of them.
        columns: facts of names.
        column_slots: a hash table of them.
        wrong: facts of the first lines that are wrong; the others are counted.
    """
    at, number = state[AT], state[NUMBER]
    line, token = state[LINES], state[TOKENS]
    measurement_count, column_count = state[MEASUREMENTS], state[COLUMNS]
    wrong_count, slow_count = state[WRONG], state[SLOW]
    measurement = np.int64(0)
    outcome = DONE
    while at < end:
        start = at
        while buffer[start] == 32 or buffer[start] == 9:
            start += 1
        if buffer[start] == 35:
            while buffer[start] != 10:
                start += 1
            at = start + 1
            number += 1
            continue
        if _is_line_end(buffer, start):
            at = start + (1 if buffer[start] == 10 else 2)
            number += 1
            continue
        first_token, first_slow = token, slow_count
        before = np.int64(-1)
        guess, guess_end = token, token
        is_like, is_other = False, False
        fault = 0
        newlines = np.int64(0)
        i = start
        has_time = 0
        while True:  # once: a fault leaves it
            is_known = False
            if measurement_count > 0:
                size = measurements[measurement, NAME_SIZE]
                if start + size < len(buffer) and (buffer[start + size] == 44 or buffer[start + size] == 32):
                    is_known = _is_same(buffer, measurements[measurement, NAME_AT], start, size)
                    i = start + size
            if not is_known:
                i = start
                while True:
                    while _STOPS[buffer[i]] & 1 == 0:
                        i += 1
                    if buffer[i] != 92:
                        break
                    i += 1
                    if buffer[i] == 44 or buffer[i] == 32:
                        i += 1
                if i == start:
                    fault = _NO_MEASUREMENT
                    break
                if buffer[i] == 10:
                    fault = _NO_FIELDS
                    break
                found = _named(
                    buffer, NOWHERE, start, i - start, seed, measurements, measurement_slots, measurement_count
                )
                if found < 0:
                    outcome = MORE_MEASUREMENTS
                    break
                measurement = found
                measurement_count = max(measurement_count, found + 1)
            # Where the measurement's line before has its columns: the next one is expected at `guess`.
            before = measurements[measurement, LAST]
            guess, guess_end = first_token, first_token
            if before >= 0:
                guess = np.int64(lines[before, LINE_TOKEN])
                if before + 1 < line:
                    guess_end = np.int64(lines[before + 1, LINE_TOKEN])
            is_like, is_other = before >= 0, False
            in_fields = False
            if buffer[i] == 32:
                in_fields = True
                while buffer[i] == 32 or buffer[i] == 9:
                    i += 1
                if _is_line_end(buffer, i):
                    fault = _NO_FIELDS
                    break
            else:
                i += 1
            while True:  # a tag or a field each time, from its key on
                column = np.int64(-1)
                if guess < guess_end:
                    expected = np.int64(columns_of[guess])
                    size = columns[expected, NAME_SIZE]
                    if (
                        i + size < len(buffer)
                        and buffer[i + size] == 61
                        and _is_same(buffer, columns[expected, NAME_AT], i, size)
                    ):
                        column = expected
                        i += size
                        guess += 1
                if column < 0:
                    if is_like:
                        # From here on it must be looked whether a tag comes twice.
                        is_like = False
                        for back in range(first_token, token):
                            columns[columns_of[back], LAST] = line
                    key_at = i
                    i, _escapes = _key_end(buffer, i)
                    if i == key_at:
                        fault = _FIELD_WITHOUT_KEY if in_fields else _TAG_WITHOUT_KEY
                        break
                    if buffer[i] != 61:
                        fault = _FIELD_WITHOUT_VALUE if in_fields else _TAG_WITHOUT_VALUE
                        break
                    column = _named(buffer, measurement, key_at, i - key_at, seed, columns, column_slots, column_count)
                    if column < 0:
                        outcome = MORE_COLUMNS
                        break
                    column_count = max(column_count, column + 1)
                    # A key that isn't there this time: go on behind it.
                    if guess + 1 < guess_end and columns_of[guess + 1] == column:
                        guess += 2
                i += 1
                if not is_like:
                    if columns[column, LAST] == line and not in_fields:
                        fault = _TAG_TWICE
                        break
                    columns[column, LAST] = line
                columns_of[token] = column
                token += 1  # a fault takes it back
                if not in_fields:
                    value_at = i
                    i, escapes = _key_end(buffer, i)
                    value_end = i
                    if buffer[i] == 10 and i > value_at and buffer[i - 1] == 13:
                        value_end -= 1
                    if value_end == value_at:
                        fault = _TAG_WITHOUT_VALUE
                        break
                    if buffer[i] == 61:
                        fault = _TAG_WITH_EQUALS
                        break
                    payload[token - 1] = (
                        (value_at << 32) | (value_end - value_at - escapes) | (TEXT_ESCAPED if escapes else 0)
                    )
                    kinds[token - 1] = _TAG
                    is_other = is_other or (is_like and kinds[guess - 1] != _TAG)
                    if buffer[i] == 44:
                        i += 1
                        continue
                    if buffer[i] == 10:
                        fault = _NO_FIELDS
                        break
                    in_fields = True
                    while buffer[i] == 32 or buffer[i] == 9:
                        i += 1
                    if _is_line_end(buffer, i):
                        fault = _NO_FIELDS
                        break
                    continue
                if buffer[i] == 34:
                    i, more = _string(buffer, i + 1, end, token - 1, payload)
                    newlines += more
                    if i < 0:
                        fault = _STRING_WITHOUT_END
                        break
                    kind = np.int64(_STRING)
                    if not (buffer[i] == 44 or buffer[i] == 32 or _is_line_end(buffer, i)):
                        fault = _BEHIND_A_STRING
                        break
                else:
                    i, kind = _number(buffer, i, token - 1, payload, doubles)
                    if kind < 0:
                        fault = -kind
                        break
                    if kind == UNSURE_FLOAT:
                        slow[slow_count] = token - 1
                        slow_count += 1
                        kind = np.int64(_FLOAT)
                kinds[token - 1] = kind
                is_other = is_other or (is_like and kinds[guess - 1] != kind)
                if buffer[i] != 44:
                    break
                i += 1
            if fault != 0 or outcome != DONE:
                break
            while buffer[i] == 32 or buffer[i] == 9:
                i += 1
            if not _is_line_end(buffer, i):
                i, time, fault = _timestamp(buffer, i, time_min, time_max)
                if fault != 0:
                    break
                while buffer[i] == 32 or buffer[i] == 9:
                    i += 1
                if not _is_line_end(buffer, i):
                    fault = _BEHIND_THE_TIME
                    break
                times[line] = time
                has_time = 1
            if check_utf8 and not is_utf8(buffer, start, i):
                fault = _NOT_UTF8
            break
        if fault == 0 and outcome == DONE:
            lines[line, LINE_NUMBER] = number
            lines[line, LINE_MEASUREMENT] = measurement
            lines[line, LINE_TOKEN] = first_token
            lines[line, LINE_AT] = start
            if is_like and not is_other and guess == guess_end:
                like = lines[before, LIKE]
                lines[line, LIKE] = like
                lines[like, ALIKE] += 1
            else:
                lines[line, LIKE] = line
                lines[line, ALIKE] = 1
            timed[line] = has_time
            if has_time == 0:
                times[line] = 0
            measurements[measurement, LAST] = line
            if measurements[measurement, KEPT] == 0:
                measurements[measurement, FIRST] = line
            measurements[measurement, KEPT] += 1
            line += 1
            number += newlines + 1
            at = i + (1 if buffer[i] == 10 else 2)
            continue
        for back in range(first_token, token):
            columns[columns_of[back], LAST] = -1
        token, slow_count = first_token, first_slow
        if outcome != DONE:
            break
        stop = _line_end(buffer, start, end)
        if wrong_count < len(wrong):
            wrong[wrong_count, WRONG_NUMBER] = number
            wrong[wrong_count, WRONG_START] = start
            wrong[wrong_count, WRONG_END] = stop
            wrong[wrong_count, WRONG_FAULT] = fault
        wrong_count += 1
        for k in range(start, stop):
            number += buffer[k] == 10
        number += 1
        at = stop + 1
    state[AT], state[NUMBER] = at, number
    state[LINES], state[TOKENS] = line, token
    state[MEASUREMENTS], state[COLUMNS] = measurement_count, column_count
    state[WRONG], state[SLOW] = wrong_count, slow_count
    return outcome
