"""Machine code that scans lines once: it finds measurements, keys and texts, and reads numbers.

Lines of one measurement look alike. So a key is first compared with the key at its place in the
measurement's previous line, and looked up in a table only if it differs. A line that turns out
invalid leaves nothing behind except names.

The buffer ends with a newline, which ends all loops outside of strings.
"""

# ruff: noqa: C901, PLR0912, PLR0915, PLR0917 — loops over bytes, as machine code wants them

from __future__ import annotations

from typing import Any, Final

import numpy as np

from millstream.codec.line_protocol._names import (
    FIRST,
    KEPT,
    KINDS,
    LAST,
    NAME_AT,
    NAME_SIZE,
    NOWHERE,
    is_same,
    named,
)
from millstream.codec.line_protocol._values import (
    STOPS,
    TEXT_ESCAPED,
    UNSURE_FLOAT,
    end_of_line,
    is_line_end,
    is_utf8,
    key_end,
    read_number,
    read_string,
    read_timestamp,
)
from millstream.codec.line_protocol.grammar import Fault, ValueKind
from millstream.codec.machine_code import compiled

Array = Any  # numba knows the element types better than a type checker could

# Results of a scan.
DONE: Final = 0
MORE_MEASUREMENTS: Final = 1
"""There is no room for another one. Once there is room, the scan continues at the line that has it."""
MORE_COLUMNS: Final = 2

# The scan's state.
AT, NUMBER, LINES, TOKENS, MEASUREMENTS, COLUMNS, WRONG, SLOW = range(8)
STATE_SIZE: Final = 8

# A line's facts. LIKE is the first line with the same columns and kinds (itself, if it is the
# first), and ALIKE the number of such lines.
LINE_NUMBER, LINE_MEASUREMENT, LINE_TOKEN, LINE_AT, LIKE, ALIKE = range(6)
LINE_FACTS: Final = 6

# An invalid line's facts.
WRONG_NUMBER, WRONG_START, WRONG_END, WRONG_FAULT = range(4)

_STRING, _FLOAT, _TAG = int(ValueKind.STRING), int(ValueKind.FLOAT), int(ValueKind.TAG)
_NO_MEASUREMENT, _NO_FIELDS = int(Fault.NO_MEASUREMENT), int(Fault.NO_FIELDS)
_TAG_WITHOUT_KEY, _TAG_WITHOUT_VALUE = int(Fault.TAG_WITHOUT_KEY), int(Fault.TAG_WITHOUT_VALUE)
_TAG_WITH_EQUALS, _TAG_TWICE = int(Fault.TAG_WITH_EQUALS), int(Fault.TAG_TWICE)
_FIELD_WITHOUT_KEY, _FIELD_WITHOUT_VALUE = int(Fault.FIELD_WITHOUT_KEY), int(Fault.FIELD_WITHOUT_VALUE)
_STRING_WITHOUT_END, _BEHIND_A_STRING = int(Fault.STRING_WITHOUT_END), int(Fault.BEHIND_A_STRING)
_BEHIND_THE_TIME, _NOT_UTF8 = int(Fault.BEHIND_THE_TIME), int(Fault.NOT_UTF8)


@compiled
def count(line_count: int, token_count: int, lines: Array, columns_of: Array, kinds: Array, columns: Array) -> None:
    """Count each column's lines, and record its first value and the kinds of its values.

    Alike lines are counted by the first of them.
    """
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
    """Continue at the position in `state`, to the body's end or until there is no room for a name.

    Args:
        buffer: the body; its last byte is a newline, added if it had none.
        end: the body's own size.
        check_utf8: whether lines may be other than UTF-8.
        time_max: the latest.
        state: see the constants above; changed.
        lines: a row of facts for each valid line.
        timed: whether the lines have one.
        columns_of: for each value (token), in the order of the lines, its column.
        kinds: each value's kind.
        payload: for each value, an integer, a double's bits, 0 or 1, or a text's place.
        doubles: the same memory.
        slow: tokens that Python has to read.
        wrong: facts of the first invalid lines; the others are counted.
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
        if is_line_end(buffer, start):
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
                    is_known = is_same(buffer, measurements[measurement, NAME_AT], start, size)
                    i = start + size
            if not is_known:
                i = start
                while True:
                    while STOPS[buffer[i]] & 1 == 0:
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
                found = named(
                    buffer, NOWHERE, start, i - start, seed, measurements, measurement_slots, measurement_count
                )
                if found < 0:
                    outcome = MORE_MEASUREMENTS
                    break
                measurement = found
                measurement_count = max(measurement_count, found + 1)
            # The columns of the measurement's previous line: the next one is expected at `guess`.
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
                if is_line_end(buffer, i):
                    fault = _NO_FIELDS
                    break
            else:
                i += 1
            while True:  # a tag or a field each time, starting with its key
                column = np.int64(-1)
                if guess < guess_end:
                    expected = np.int64(columns_of[guess])
                    size = columns[expected, NAME_SIZE]
                    if (
                        i + size < len(buffer)
                        and buffer[i + size] == 61
                        and is_same(buffer, columns[expected, NAME_AT], i, size)
                    ):
                        column = expected
                        i += size
                        guess += 1
                if column < 0:
                    if is_like:
                        # From here on, check whether a tag occurs twice.
                        is_like = False
                        for back in range(first_token, token):
                            columns[columns_of[back], LAST] = line
                    key_at = i
                    i, _escapes = key_end(buffer, i)
                    if i == key_at:
                        fault = _FIELD_WITHOUT_KEY if in_fields else _TAG_WITHOUT_KEY
                        break
                    if buffer[i] != 61:
                        fault = _FIELD_WITHOUT_VALUE if in_fields else _TAG_WITHOUT_VALUE
                        break
                    column = named(buffer, measurement, key_at, i - key_at, seed, columns, column_slots, column_count)
                    if column < 0:
                        outcome = MORE_COLUMNS
                        break
                    column_count = max(column_count, column + 1)
                    # A key that is missing this time: go on behind it.
                    if guess + 1 < guess_end and columns_of[guess + 1] == column:
                        guess += 2
                i += 1
                if not is_like:
                    if columns[column, LAST] == line and not in_fields:
                        fault = _TAG_TWICE
                        break
                    columns[column, LAST] = line
                columns_of[token] = column
                token += 1  # a fault reverts this
                if not in_fields:
                    value_at = i
                    i, escapes = key_end(buffer, i)
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
                    if is_line_end(buffer, i):
                        fault = _NO_FIELDS
                        break
                    continue
                if buffer[i] == 34:
                    i, more = read_string(buffer, i + 1, end, token - 1, payload)
                    newlines += more
                    if i < 0:
                        fault = _STRING_WITHOUT_END
                        break
                    kind = np.int64(_STRING)
                    if not (buffer[i] == 44 or buffer[i] == 32 or is_line_end(buffer, i)):
                        fault = _BEHIND_A_STRING
                        break
                else:
                    i, kind = read_number(buffer, i, token - 1, payload, doubles)
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
            if not is_line_end(buffer, i):
                i, time, fault = read_timestamp(buffer, i, time_min, time_max)
                if fault != 0:
                    break
                while buffer[i] == 32 or buffer[i] == 9:
                    i += 1
                if not is_line_end(buffer, i):
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
        stop = end_of_line(buffer, start, end)
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
