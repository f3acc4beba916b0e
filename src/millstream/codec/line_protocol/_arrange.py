"""Machine code that puts the results of `_line_scan` into columns.

It determines which lines agree with those before them, and puts each value into its column's row.
"""

# ruff: noqa: C901, PLR0912, PLR0915, PLR0917, PLR1714, SIM108 — loops over bytes, as machine code wants them

from __future__ import annotations

from typing import Any, Final

import numpy as np

from millstream.codec.line_protocol._line_scan import LINE_AT, LINE_MEASUREMENT, LINE_NUMBER, LINE_TOKEN
from millstream.codec.line_protocol._names import FIRST, KEPT
from millstream.codec.line_protocol._values import TEXT_ESCAPED
from millstream.codec.line_protocol.grammar import Refusal, ValueKind
from millstream.codec.little_endian_words import load_word, store_word
from millstream.codec.machine_code import compiled, inlined

Array = Any  # numba knows the element types better than a type checker could

_MEASUREMENT, _COLUMN = int(Refusal.MEASUREMENT), int(Refusal.COLUMN)
_OTHER_CASE, _OTHER_KIND = int(Refusal.OTHER_CASE), int(Refusal.OTHER_KIND)
_TOO_MANY_COLUMNS, _INFINITE = int(Refusal.TOO_MANY_COLUMNS), int(Refusal.INFINITE)
_NOT_THE_COLUMNS: Final = int(Refusal.NOT_THE_COLUMNS)
_FLOAT, _INTEGER, _UNSIGNED = int(ValueKind.FLOAT), int(ValueKind.INTEGER), int(ValueKind.UNSIGNED)
_STRING, _TAG = int(ValueKind.STRING), int(ValueKind.TAG)
_EXACT_MAX: Final = 1 << 53
"""The largest integer up to which a float holds each one: Arrow casts no larger one."""
_INTEGER_END: Final = 2.0**63

# The facts of a rejected line: its number, its start, the reason, its measurement, its column, the
# column or kind that it differs from, its kind.
REFUSED_NUMBER, REFUSED_AT, REFUSED_WHY, REFUSED_MEASUREMENT, REFUSED_COLUMN, REFUSED_OTHER, REFUSED_KIND = range(7)
REFUSED_FACTS: Final = 7

EVERYWHERE: Final = -(1 << 62)
_SIZE: Final = TEXT_ESCAPED - 1
"""The bits of a text's size."""


@inlined
def _as_kind(wanted: int, token: Any, kinds: Array, payload: Array, doubles: Array) -> Any:
    """Make a value one of the kind that its table's column has; return whether the column can hold it exactly."""
    kind = kinds[token]
    if kind == wanted or (kind == _TAG and wanted == _STRING):
        return True
    whole = payload[token]
    is_exact = False
    if wanted == _FLOAT and kind == _INTEGER and -_EXACT_MAX <= whole <= _EXACT_MAX:
        doubles[token] = np.float64(whole)
        is_exact = True
    elif wanted == _INTEGER and kind == _FLOAT:
        value = doubles[token]
        if value == np.floor(value) and -_INTEGER_END <= value < _INTEGER_END:
            payload[token] = np.int64(value)
            is_exact = True
    elif (wanted == _INTEGER and kind == _UNSIGNED) or (wanted == _UNSIGNED and kind == _INTEGER):
        is_exact = whole >= 0
    if is_exact:
        kinds[token] = wanted
    return is_exact


@compiled
def settle(
    line_count: int,
    token_count: int,
    lines: Array,
    times: Array,
    timed: Array,
    columns_of: Array,
    kinds: Array,
    payload: Array,
    doubles: Array,
    measurements: Array,
    columns: Array,
    refused_lines: Array,
    refused_measurements: Array,
    refused_columns: Array,
    case_of: Array,
    fixed: Array,
    owner: Array,
    kind_of: Array,
    width: Array,
    columns_max: int,
    refused: Array,
) -> tuple[int, int, int]:
    """Remove the lines that disagree with their table's columns, or with lines before them.

    Returns how many lines and values stay, and how many lines go.

    Args:
        line_count: number of lines in `lines`, `times` and `timed`; changed.
        token_count: number of values in `columns_of`, `kinds` and `payload`; changed.
        doubles: the same memory as `payload`, as floats.
        measurements: facts of names; counted again.
        columns: the same.
        refused_lines: which lines have a float beyond a double's range.
        refused_measurements: which measurements reject their lines.
        refused_columns: which columns reject their lines.
        case_of: a number for each column, the same for names of one measurement that differ only in case.
        fixed: the kind of each column that its table has already; -1: the first line decides.
        owner: for each of those numbers, the first column that had it; initially -1.
        kind_of: each column's kind; initially -1.
        width: each measurement's number of columns; initially 0.
        refused: facts of the first lines that are removed.
    """
    for place in range(len(measurements)):
        measurements[place, KEPT] = 0
    for place in range(len(columns)):
        columns[place, KEPT] = 0
    kept_lines, kept_tokens, gone = 0, 0, 0
    last_of = np.full(len(columns), line_count, np.int64)
    for line in range(line_count):
        measurement = lines[line, LINE_MEASUREMENT]
        begin = np.int64(lines[line, LINE_TOKEN])
        end = np.int64(lines[line + 1, LINE_TOKEN]) if line + 1 < line_count else token_count
        why, column, other = 0, np.int64(-1), np.int64(-1)
        if refused_lines[line]:
            why = _INFINITE
        elif refused_measurements[measurement]:
            why = _MEASUREMENT
        seen = begin
        brings = 0
        while why == 0 and seen < end:
            column = np.int64(columns_of[seen])
            case = case_of[column]
            if refused_columns[column]:
                why = _COLUMN
            elif owner[case] >= 0 and owner[case] != column:
                why, other = _OTHER_CASE, np.int64(owner[case])
            elif fixed[column] >= 0 and not _as_kind(fixed[column], seen, kinds, payload, doubles):
                why, other = _NOT_THE_COLUMNS, np.int64(fixed[column])
            elif kind_of[column] >= 0 and kind_of[column] != kinds[seen]:
                why, other = _OTHER_KIND, np.int64(kind_of[column])
            else:
                if kind_of[column] < 0:
                    # Marked so that it can be reverted: a rejected line leaves no columns or kinds behind.
                    kind_of[column] = kinds[seen]
                    owner[case] = column
                    last_of[column] = ~line
                    brings += 1
                seen += 1
        if why == 0 and brings > 0 and width[measurement] + brings > columns_max:
            why = _TOO_MANY_COLUMNS
        if why != 0:
            for token in range(begin, seen):
                brought = columns_of[token]
                if last_of[brought] == ~line:
                    kind_of[brought] = -1
                    owner[case_of[brought]] = -1
            if gone < len(refused):
                refused[gone, REFUSED_NUMBER] = lines[line, LINE_NUMBER]
                refused[gone, REFUSED_AT] = lines[line, LINE_AT]
                refused[gone, REFUSED_WHY] = why
                refused[gone, REFUSED_MEASUREMENT] = measurement
                refused[gone, REFUSED_COLUMN] = column
                refused[gone, REFUSED_OTHER] = other
                refused[gone, REFUSED_KIND] = kinds[min(seen, end - 1)]
            gone += 1
            continue
        width[measurement] += brings
        if measurements[measurement, KEPT] == 0:
            measurements[measurement, FIRST] = kept_lines
        measurements[measurement, KEPT] += 1
        lines[kept_lines] = lines[line]
        lines[kept_lines, LINE_TOKEN] = kept_tokens
        times[kept_lines] = times[line]
        timed[kept_lines] = timed[line]
        for token in range(begin, end):
            column = np.int64(columns_of[token])
            if last_of[column] != line:
                if columns[column, KEPT] == 0:
                    columns[column, FIRST] = kept_tokens
                columns[column, KEPT] += 1
                last_of[column] = line
            columns_of[kept_tokens] = column
            kinds[kept_tokens] = kinds[token]
            payload[kept_tokens] = payload[token]
            kept_tokens += 1
        kept_lines += 1
    return kept_lines, kept_tokens, gone


@compiled
def spread(
    line_count: int,
    token_count: int,
    lines: Array,
    times: Array,
    timed: Array,
    columns_of: Array,
    payload: Array,
    row_at: Array,
    value_at: Array,
    there_at: Array,
    unit_ns: int,
    now_us: int,
    numbers: Array,
    times_us: Array,
    times_ns: Array,
    is_odd: Array,
    values: Array,
    there: Array,
) -> None:
    """Put values, times and numbers of lines into columns, measurement by measurement.

    Args:
        line_count: number of lines in `lines`, `times` and `timed`.
        token_count: number of values in `columns_of` and `payload`.
        row_at: index of each measurement's next row in `numbers`, `times_us` and `times_ns`; advanced.
        value_at: index of each column's start in `values`, less its measurement's first row.
        there_at: the same in `there`; `EVERYWHERE` if each row has a value.
        unit_ns: unit of the timestamps.
        now_us: the time of lines that have none.
        is_odd: for each measurement, whether some time isn't whole microseconds.
    """
    unit_us = unit_ns // 1000
    for line in range(line_count):
        measurement = lines[line, LINE_MEASUREMENT]
        row = row_at[measurement]
        row_at[measurement] = row + 1
        numbers[row] = lines[line, LINE_NUMBER]
        time = times[line]
        if timed[line] == 0:
            times_us[row] = now_us
            times_ns[row] = now_us * 1000
        elif unit_us > 0:
            times_us[row] = time * unit_us
        else:
            whole = time // 1000
            times_us[row] = whole
            times_ns[row] = time
            if whole * 1000 != time:
                is_odd[measurement] = 1
        end = np.int64(lines[line + 1, LINE_TOKEN]) if line + 1 < line_count else token_count
        for token in range(lines[line, LINE_TOKEN], end):
            column = columns_of[token]
            values[value_at[column] + row] = payload[token]
            if there_at[column] != EVERYWHERE:
                there[there_at[column] + row] = 1


@compiled
def measure_texts(values: Array, begins: Array, counts: Array, offsets: Array, starts: Array) -> Any:
    """Fill string arrays' offsets, column by column; return the total size in bytes.

    Args:
        begins: start of each column in `values`.
        counts: number of rows of each column.
        offsets: for each column, one more than its rows.
        starts: start of each column's bytes, and finally their end.
    """
    place = np.int64(0)
    begun = np.int64(0)
    for column in range(len(begins)):
        starts[column] = begun
        total = np.int64(0)
        offsets[place] = 0
        place += 1
        for row in range(begins[column], begins[column] + counts[column]):
            total += values[row] & _SIZE
            offsets[place] = total
            place += 1
        begun += total
    starts[len(begins)] = begun
    return begun


@compiled
def gather_texts(
    buffer: Array,
    values: Array,
    begins: Array,
    counts: Array,
    are_strings: Array,
    offsets: Array,
    starts: Array,
    data: Array,
) -> None:
    """Concatenate all texts without their escapes, those of strings or of keys and tags.

    `data` has room for eight bytes more.
    """
    place = np.int64(0)
    for column in range(len(begins)):
        start = starts[column]
        is_string = are_strings[column] != 0
        for row in range(begins[column], begins[column] + counts[column]):
            text = values[row]
            at = text >> 32
            to = start + offsets[place]
            end = start + offsets[place + 1]
            place += 1
            if text & TEXT_ESCAPED != 0:
                _unescape(buffer, at, is_string, data, to, end)
            elif at + (end - to) + 8 <= len(buffer):
                # Eight bytes at once, some of them too many: the next text overwrites those.
                while to < end:
                    store_word(data, to, load_word(buffer, at))
                    to += 8
                    at += 8
            else:
                for i in range(end - to):
                    data[to + i] = buffer[at + i]
        place += 1


@inlined
def _unescape(buffer: Array, at: int, is_string: Any, data: Array, to: int, end: int) -> None:
    while to < end:
        byte = buffer[at]
        if byte == 92:
            behind = buffer[at + 1]
            if is_string:
                is_escape = behind == 34 or behind == 92
            else:
                is_escape = behind == 44 or behind == 61 or behind == 32
            if is_escape:
                byte = behind
                at += 1
        data[to] = byte
        to += 1
        at += 1
