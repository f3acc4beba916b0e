"""Machine code over COPY's text: finds each value, and removes its escapes."""

from __future__ import annotations

from typing import Any, Final

from millstream.codec.machine_code import compiled

Array = Any  # numba knows the element types better than a type checker could

FINE: Final = 0
WRONG_WIDTH: Final = 1
UNFINISHED: Final = 2
TOO_MANY: Final = 3

PARTIAL: Final = 0
NO_ROOM: Final = -1
MALFORMED: Final = -2
_LENGTH_MAX: Final = 1 << 30  # PostgreSQL builds a message in memory, and allocates less than this (MaxAllocSize)

_TAB, _NEWLINE, _BACKSLASH = 9, 10, 92
_DATA = 100
_B, _F, _N, _R, _T, _V, _NULL = 98, 102, 110, 114, 116, 118, 78


@compiled
def scan_rows(  # noqa: C901, PLR0912, PLR0915 - a walk byte by byte is one loop
    buffer: Array, width: int, value_at: Array, size: Array
) -> tuple[int, int]:
    """Walk COPY's text; unescape values in place, because an escape is longer than the text it stands for.

    Fills `value_at[column, row]` and `size[column, row]` (-1: NULL), which are as wide as the table; more rows than
    they hold are a fault. Returns the fault and the number of rows read without one.
    """
    rows_max = value_at.shape[1]
    rows = 0
    column = 0
    start = 0
    to = 0
    at = 0
    end = len(buffer)
    null = False
    while at < end:
        byte = buffer[at]
        if byte == _BACKSLASH:
            at += 1
            if at == end:
                return UNFINISHED, rows
            byte = buffer[at]
            if byte == _NULL:
                null = True
            else:
                if byte == _N:
                    byte = 10
                elif byte == _T:
                    byte = 9
                elif byte == _R:
                    byte = 13
                elif byte == _B:
                    byte = 8
                elif byte == _F:
                    byte = 12
                elif byte == _V:
                    byte = 11
                buffer[to] = byte
                to += 1
        elif byte == _TAB or byte == _NEWLINE:  # noqa: PLR1714, SIM109 - machine code
            is_empty_row = width == 0 and byte == _NEWLINE and to == start and not null
            if column >= width and not is_empty_row:
                return WRONG_WIDTH, rows
            if rows >= rows_max:
                return TOO_MANY, rows
            if not is_empty_row:
                value_at[column, rows] = start
                size[column, rows] = -1 if null else to - start
                column += 1
            null = False
            if byte == _NEWLINE:
                # A row without columns is an empty line, and so is a row of a single empty text.
                if column != width:
                    return WRONG_WIDTH, rows
                rows += 1
                column = 0
            start = at + 1
            to = start
        else:
            if to != at:
                buffer[to] = byte
            to += 1
        at += 1
    return (FINE if column == 0 and start == end else UNFINISHED), rows


@compiled
def take_rows(block: Array, filled: int, text: Array, to: int) -> tuple[int, int, int, int]:
    """Put the rows of whole CopyData messages one behind the other.

    Stops at the first message that is of another kind, isn't complete (PARTIAL), has no room in `text` (NO_ROOM), or
    has an impossible length (MALFORMED). Returns where in `block` it stopped, the kind it stopped at, the new end of
    `text`, and the number of rows added.
    """
    at = 0
    rows = 0
    while at + 5 <= filled:
        if block[at] != _DATA:
            return at, int(block[at]), to, rows
        length = (
            (int(block[at + 1]) << 24) | (int(block[at + 2]) << 16) | (int(block[at + 3]) << 8) | int(block[at + 4])
        ) - 4
        if length < 0 or length > _LENGTH_MAX:
            return at, MALFORMED, to, rows
        if at + 5 + length > filled:
            return at, PARTIAL, to, rows
        if to + length > len(text):
            return at, NO_ROOM, to, rows
        text[to : to + length] = block[at + 5 : at + 5 + length]
        to += length
        at += 5 + length
        rows += 1
    return at, PARTIAL, to, rows
