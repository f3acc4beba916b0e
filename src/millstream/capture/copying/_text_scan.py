"""Machine code over the messages of a COPY's text: finds rows and values, and removes escapes.

Places are unsigned: for a signed one numba would check at each byte whether it counts from the end.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from millstream.codec.machine_code import compiled

Array = Any  # numba knows the element types better than a type checker could

HEAD_BYTES: Final = 5
"""Size of the head of a message: its kind, and its length without the kind."""

FINE: Final = 0
WRONG_WIDTH: Final = 1
UNFINISHED: Final = 2
TOO_MANY: Final = 3

PARTIAL: Final = 0
MALFORMED: Final = -1
_LENGTH_MAX: Final = 1 << 30  # PostgreSQL builds a message in memory, and allocates less than this (MaxAllocSize)

_DATA, _TAB, _NEWLINE, _BACKSLASH, _NULL = (np.uint8(ord(char)) for char in "d\t\n\\N")
_ENDS_RUN = np.zeros(256, np.bool_)
_ENDS_RUN[[_TAB, _NEWLINE, _BACKSLASH]] = True
_ESCAPED = np.arange(256, dtype=np.uint8)
"""The byte that an escape stands for, by the byte behind its backslash."""
for _letter, _byte in zip(b"bfnrtv", b"\b\f\n\r\t\v", strict=True):
    _ESCAPED[_letter] = _byte
_ONE, _HEAD = np.uint64(1), np.uint64(HEAD_BYTES)


@compiled
def walk_rows(buffer: Array, begin: int, end: int) -> tuple[int, int, int, int]:
    """Walk over whole CopyData messages, each of them one row, in `buffer[begin:end]`.

    Stops at the first message that is of another kind, isn't complete (PARTIAL), or has an impossible length
    (MALFORMED). Returns where it stopped, the kind it stopped at, the number of rows, and where the last one begins.
    """
    at = last = begin
    rows = 0
    while at + HEAD_BYTES <= end:
        if buffer[at] != _DATA:
            return at, int(buffer[at]), rows, last
        length = np.int64(0)
        for i in range(1, HEAD_BYTES):
            length = (length << 8) | np.int64(buffer[at + i])
        if length < HEAD_BYTES - 1 or length > _LENGTH_MAX:
            return at, MALFORMED, rows, last
        if at + 1 + length > end:
            break
        last = at
        at += 1 + int(length)
        rows += 1
    return at, PARTIAL, rows, last


@compiled
def scan_rows(buffer: Array, width: int, value_at: Array, size: Array) -> tuple[int, int]:
    """Find the values of whole CopyData messages; unescape them in place, because an escape is longer than its text.

    Fills `value_at[column, row]` and `size[column, row]` (-1: NULL), which are as wide as the table; more rows than
    they hold are a fault. Returns the fault and the number of rows read without one.
    """
    rows = 0
    end = np.uint64(0)
    while end < np.uint64(len(buffer)):
        at = end + _HEAD
        if at > np.uint64(len(buffer)) or buffer[end] != _DATA:
            return UNFINISHED, rows
        length = np.uint64(0)
        for place in range(end + _ONE, at):
            length = (length << np.uint64(8)) | np.uint64(buffer[place])
        end += _ONE + length
        last = end - _ONE
        if end <= at or end > np.uint64(len(buffer)) or buffer[last] != _NEWLINE:
            return UNFINISHED, rows
        if rows >= value_at.shape[1]:
            return TOO_MANY, rows
        column = 0
        while at < end and (width > 0 or at < last):  # without columns, a row is an empty line
            start = at
            while not _ENDS_RUN[buffer[at]]:
                at += _ONE  # the row's newline ends the last run
            to = at
            null = False
            while buffer[at] != _TAB and buffer[at] != _NEWLINE:
                byte = buffer[at]
                if byte == _BACKSLASH:
                    at += _ONE
                    if at == last:
                        return UNFINISHED, rows
                    null = null or buffer[at] == _NULL
                    byte = _ESCAPED[buffer[at]]
                buffer[to] = byte
                to += _ONE
                at += _ONE
            if column >= width or (buffer[at] == _NEWLINE and at != last):
                return WRONG_WIDTH, rows
            value_at[column, rows] = start
            size[column, rows] = -1 if null else np.int64(to - start)
            column += 1
            at += _ONE
        if column != width:
            return WRONG_WIDTH, rows
        rows += 1
    return FINE, rows
