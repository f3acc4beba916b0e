"""Machine code that finds messages in a connection's consecutive CopyData frames, of replication or a binary COPY."""

from __future__ import annotations

from typing import Any, Final

from millstream.codec.machine_code import compiled
from millstream.codec.pgoutput._row_messages import u32

Array = Any  # as in _row_messages

WHOLE: Final = 0
OTHER: Final = 1
MALFORMED: Final = 2

_COPY_DATA: Final = ord("d")
_XLOG_DATA: Final = ord("w")
_KEEPALIVE: Final = ord("k")
_HEADER: Final = 25  # of XLogData: 'w', its LSN, the server's end of WAL, the server's clock
_KEEPALIVE_BYTES: Final = 18
_COPY_HEADER: Final = 19  # of a binary COPY, in front of its first row: signature, flags, length of an extension
_COPY_SIGNATURE: Final = ord("P")  # no row begins with it: a row begins with its number of columns, as two bytes
_LENGTH_MAX: Final = 1 << 30  # PostgreSQL assembles what it sends in memory, in less than this (MaxAllocSize)


@compiled
def split_copy_data(buffer: Array, begin: Any, end: int, starts: Array, ends: Array, kinds: Array) -> Any:
    """Find the whole messages in `buffer[begin:end]`.

    A message of XLogData begins behind its header, and its kind is its first byte; a keepalive's
    begins with its `k`.

    Returns:
        Number of messages found; the place of the first byte outside of them; and why the search ended: the rest is
        incomplete or nothing (WHOLE), a frame of another kind begins (OTHER), or the bytes are invalid (MALFORMED).
    """
    at = begin
    count = 0
    while at + 5 <= end and count < len(starts):
        if buffer[at] != _COPY_DATA:
            return count, at, OTHER
        length = u32(buffer, at + 1)
        stop = at + 1 + length
        if length < 5 or length > _LENGTH_MAX:
            return count, at, MALFORMED
        if stop > end:
            break
        tag = buffer[at + 5]
        if tag == _XLOG_DATA and length > 4 + _HEADER:
            starts[count] = at + 5 + _HEADER
            kinds[count] = buffer[at + 5 + _HEADER]
        elif tag == _KEEPALIVE and length == 4 + _KEEPALIVE_BYTES:
            starts[count] = at + 5
            kinds[count] = _KEEPALIVE
        else:
            return count, at, MALFORMED
        ends[count] = stop
        count += 1
        at = stop
    return count, at, WHOLE


@compiled
def split_copy_rows(buffer: Array, begin: Any, end: int, starts: Array, ends: Array, kinds: Array) -> Any:
    """Find the whole messages in `buffer[begin:end]`, each the only column of a row of a binary COPY.

    The COPY's header and trailer are skipped. A message's kind is its first byte; a message of kind
    `k` is as long as a keepalive.

    Returns:
        As `split_copy_data`.
    """
    at = begin
    count = 0
    while at + 5 <= end and count < len(starts):
        if buffer[at] != _COPY_DATA:
            return count, at, OTHER
        length = u32(buffer, at + 1)
        stop = at + 1 + length
        if length < 6 or length > _LENGTH_MAX:
            return count, at, MALFORMED
        if stop > end:
            break
        row = at + 5
        if buffer[row] == _COPY_SIGNATURE:
            row += _COPY_HEADER
        if row + 2 == stop and buffer[row] == 255 and buffer[row + 1] == 255:
            at = stop  # the trailer
            continue
        if row + 6 >= stop or buffer[row] != 0 or buffer[row + 1] != 1:
            return count, at, MALFORMED
        size = u32(buffer, row + 2)
        kind = buffer[row + 6]
        if size != stop - row - 6 or (kind == _KEEPALIVE and size != _KEEPALIVE_BYTES):
            return count, at, MALFORMED
        starts[count] = row + 6
        ends[count] = stop
        kinds[count] = kind
        count += 1
        at = stop
    return count, at, WHOLE
