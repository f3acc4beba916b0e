"""Machine code that scans messages: it finds the records, each one's operation, and the places of its values.

Everything is a plain loop over bytes; a position is checked before it is read. Nothing here raises:
functions return a fault (a number) and the place where it happened.
"""

# ruff: noqa: PLR1714 — numba compiles comparisons better than sets

from __future__ import annotations

from typing import Any, Final

import numpy as np

from millstream.codec.machine_code import compiled, inlined
from millstream.codec.pgoutput.rare_messages import LSN_MAX, POSTGRES_EPOCH_US
from millstream.model.records import TIME_MAX_US, TIME_MIN_US

Array = Any  # numba knows the element types better than a type checker could

# Input of `scan`: a run of whole transactions, a block inside of one, or one whose messages carry xids.
RUN: Final = 0
BLOCK: Final = 1
STREAMED_BLOCK: Final = 2

FINE: Final = 0
TOO_SHORT: Final = 1
UNKNOWN_KIND: Final = 2
NESTED_BEGIN: Final = 3
NO_BEGIN: Final = 4
UNKNOWN_RELATION: Final = 5
MISPLACED_MESSAGE: Final = 6
NO_COMMIT: Final = 7
BAD_VALUE_KIND: Final = 8
WRONG_WIDTH: Final = 9
BEYOND_BOUNDS: Final = 10

NULL: Final = -1
UNCHANGED: Final = -2
NOT_SENT: Final = -3

_TRANSACTION: Final = 1
_MESSAGE: Final = 4
_TIME_MIN: Final = TIME_MIN_US - POSTGRES_EPOCH_US
_TIME_MAX: Final = TIME_MAX_US - POSTGRES_EPOCH_US


@inlined
def _u16(buffer: Array, at: int) -> Any:
    return (np.int64(buffer[at]) << 8) | np.int64(buffer[at + 1])


@inlined
def u32(buffer: Array, at: int) -> Any:
    """Return four bytes, the highest first, as a number."""
    value = np.int64(0)
    for i in range(4):
        value = (value << 8) | np.int64(buffer[at + i])
    return value


@inlined
def _i64(buffer: Array, at: int) -> Any:
    value = np.int64(0)
    for i in range(8):
        value = (value << 8) | np.int64(buffer[at + i])
    return value


@inlined
def _is_position(lsn: Any) -> Any:
    return 0 <= lsn <= LSN_MAX


@inlined
def _find(keys: Array, oid: int) -> Any:
    """Return the index of an oid in an open hash table, or the free slot for it (keys of free slots are -1)."""
    mask = len(keys) - 1
    place = (oid * 2654435761) & mask
    while keys[place] != -1 and keys[place] != oid:
        place = (place + 1) & mask
    return place


@inlined
def _among(values: Array, value: Any) -> Any:
    place = np.searchsorted(values, value)
    return place < len(values) and values[place] == value


@compiled
def scan(  # noqa: C901, PLR0911, PLR0912, PLR0915, PLR0917 — one loop over bytes, as machine code wants it
    buffer: Array,
    starts: Array,
    ends: Array,
    mode: int,
    aborted: Array,
    known_oids: Array,
    keys: Array,
    slots: Array,
    messages_slot: int,
    after: int,
    heartbeat: Array,
    record_op: Array,
    record_slot: Array,
    record_at: Array,
    record_message: Array,
    record_transaction: Array,
    transactions: Array,
) -> Any:
    """Find the records and transactions of a run.

    A *slot* is one Relation message: the known ones first (`known_oids`), then those of the run in
    order; behind them `messages_slot` for logical messages. Records of transactions that end at or
    below `after` are left out.

    Fills `record_*` (op, slot, start of its tuples, number of its message, number of its
    transaction) and `transactions` (rows: kind, commit LSN, end LSN, xid, time since 1970 in µs).

    Returns:
        Number of records, number of transactions, last end LSN (-1: none), fault, number of the message at fault.
    """
    for number in range(len(known_oids)):
        place = _find(keys, known_oids[number])
        keys[place] = known_oids[number]
        slots[place] = number
    next_slot = len(known_oids)
    records = 0
    count = 0
    first_record = 0
    reached = np.int64(-1)
    inside = mode != RUN
    xid_bytes = 4 if mode == STREAMED_BLOCK else 0
    begin_xid = np.int64(0)
    for number in range(len(starts)):
        at = starts[number]
        end = ends[number]
        if at >= end:
            return records, count, reached, TOO_SHORT, number
        kind = buffer[at]
        at += 1
        size = end - at
        if kind == 66:  # B
            if size != 20:
                return records, count, reached, TOO_SHORT, number
            if inside:
                return records, count, reached, NESTED_BEGIN, number
            if not (_is_position(_i64(buffer, at)) and _TIME_MIN <= _i64(buffer, at + 8) <= _TIME_MAX):
                return records, count, reached, BEYOND_BOUNDS, number
            begin_xid = u32(buffer, at + 16)
            inside = True
            first_record = records
            continue
        if kind == 67:  # C
            if size != 25:
                return records, count, reached, TOO_SHORT, number
            if not inside or mode != RUN:
                return records, count, reached, NO_BEGIN, number
            if not (
                _is_position(_i64(buffer, at + 1))
                and _is_position(_i64(buffer, at + 9))
                and _TIME_MIN <= _i64(buffer, at + 17) <= _TIME_MAX
            ):
                return records, count, reached, BEYOND_BOUNDS, number
            reached = _i64(buffer, at + 9)
            if reached <= after:
                records = first_record
            elif records > first_record:
                transactions[0, count] = _TRANSACTION
                transactions[1, count] = _i64(buffer, at + 1)
                transactions[2, count] = reached
                transactions[3, count] = begin_xid
                transactions[4, count] = _i64(buffer, at + 17) + POSTGRES_EPOCH_US
                count += 1
            inside = False
            continue
        if kind == 79:  # O
            stop = at + 8
            while stop < end and buffer[stop] != 0:
                stop += 1
            if stop != end - 1:
                return records, count, reached, TOO_SHORT, number
            continue
        if size < xid_bytes + 4:
            return records, count, reached, TOO_SHORT, number
        xid = np.int64(0)
        if xid_bytes:
            xid = u32(buffer, at)
            at += xid_bytes
        if kind == 82:  # R; the caller has parsed it
            oid = u32(buffer, at)
            place = _find(keys, oid)
            keys[place] = oid
            slots[place] = next_slot
            next_slot += 1
            continue
        if kind == 89:  # Y
            continue
        if kind == 77:  # M
            if end - at < 14:
                return records, count, reached, TOO_SHORT, number
            stop = at + 9
            while stop < end and buffer[stop] != 0:
                stop += 1
            if stop + 5 > end or stop + 5 + u32(buffer, stop + 1) != end:
                return records, count, reached, TOO_SHORT, number
            if not _is_position(_i64(buffer, at + 1)):
                return records, count, reached, BEYOND_BOUNDS, number
            alone = buffer[at] & 1 == 0
            if alone == inside:
                return records, count, reached, MISPLACED_MESSAGE, number
            is_heartbeat = stop - (at + 9) == len(heartbeat)
            if is_heartbeat:
                for i in range(len(heartbeat)):
                    if buffer[at + 9 + i] != heartbeat[i]:
                        is_heartbeat = False
                        break
            if alone:
                lsn = _i64(buffer, at + 1)
                reached = lsn  # the end of its record
                if is_heartbeat or reached <= after:
                    continue
                transactions[0, count] = _MESSAGE
                transactions[1, count] = lsn
                transactions[2, count] = reached
            if is_heartbeat or (xid_bytes and _among(aborted, xid)):
                continue
            record_op[records] = 109  # m
            record_slot[records] = messages_slot
            record_at[records] = at
            record_message[records] = number
            record_transaction[records] = count
            records += 1
            if alone:
                count += 1
            continue
        if kind != 73 and kind != 85 and kind != 68 and kind != 84:
            return records, count, reached, UNKNOWN_KIND, number
        if not inside:
            return records, count, reached, NO_BEGIN, number
        if kind == 84:  # T
            if end - at < 5:
                return records, count, reached, TOO_SHORT, number
            tables = u32(buffer, at)
            if end - at != 5 + 4 * tables:
                return records, count, reached, TOO_SHORT, number
            if xid_bytes and _among(aborted, xid):
                continue
            for i in range(tables):
                oid = u32(buffer, at + 5 + 4 * i)
                place = _find(keys, oid)
                if keys[place] != oid:
                    return records, count, reached, UNKNOWN_RELATION, number
                record_op[records] = 116  # t
                record_slot[records] = slots[place]
                record_at[records] = end
                record_message[records] = number
                record_transaction[records] = count
                records += 1
            continue
        if xid_bytes and _among(aborted, xid):
            continue
        oid = u32(buffer, at)
        place = _find(keys, oid)
        if keys[place] != oid:
            return records, count, reached, UNKNOWN_RELATION, number
        record_op[records] = 99 if kind == 73 else (117 if kind == 85 else 100)
        record_slot[records] = slots[place]
        record_at[records] = at + 4
        record_message[records] = number
        record_transaction[records] = count
        records += 1
    if inside and mode == RUN:
        return records, count, reached, NO_COMMIT, len(starts) - 1
    return records, count, reached, FINE, 0


@compiled
def first_uses(record_slot: Array, records: int, first: Array) -> None:
    """Set for each slot the number of its first record; unused slots are unchanged."""
    for record in range(records - 1, -1, -1):
        first[record_slot[record]] = record


@compiled
def arrange(
    record_slot: Array,
    record_transaction: Array,
    records: int,
    entry_of_slot: Array,
    first_index: int,
    entry_start: Array,
    row_record: Array,
    row_operation: Array,
    row_index: Array,
    operation_transaction: Array,
) -> int:
    """Number the captured records by operation and index, and group each entry's rows, in their order.

    `entry_of_slot` is -1 if a slot isn't captured. Entry e's rows are `entry_start[e]` to
    `entry_start[e + 1]`.

    Returns:
        Number of operations.
    """
    for record in range(records):
        entry = entry_of_slot[record_slot[record]]
        if entry >= 0:
            entry_start[entry + 1] += 1
    for entry in range(len(entry_start) - 1):
        entry_start[entry + 1] += entry_start[entry]
    cursor = entry_start.copy()
    operations = 0
    last = -1
    index = np.int64(first_index)
    for record in range(records):
        entry = entry_of_slot[record_slot[record]]
        if entry < 0:
            continue
        transaction = record_transaction[record]
        if transaction != last:
            last = transaction
            operation_transaction[operations] = transaction
            operations += 1
            index = np.int64(first_index)
        row = cursor[entry]
        cursor[entry] = row + 1
        row_record[row] = record
        row_operation[row] = operations - 1
        row_index[row] = index
        index += 1
    return operations


@inlined
def _walk_tuple(
    buffer: Array,
    at: int,
    end: int,
    columns: int,
    masked: Any,
    identity: Array,
    value_at: Array,
    size: Array,
    row: int,
    unchanged: Array,
) -> Any:
    """Record the places of a tuple's values; return the position behind it, or minus a fault.

    With `masked`, columns outside of the identity are recorded as NOT_SENT. `unchanged[0]` counts
    values that are UNCHANGED.
    """
    if at + 2 > end:
        return -TOO_SHORT
    if _u16(buffer, at) != columns:
        return -WRONG_WIDTH
    at += 2
    for column in range(columns):
        if at >= end:
            return -TOO_SHORT
        kind = buffer[at]
        at += 1
        value_at[column, row] = at
        length = np.int64(NULL)
        if kind == 116:  # t
            if at + 4 > end:
                return -TOO_SHORT
            length = u32(buffer, at)
            at += 4
            if length > end - at:
                return -TOO_SHORT
            value_at[column, row] = at
            at += length
        elif kind == 117:  # u
            length = np.int64(UNCHANGED)
            if not masked or identity[column] != 0:
                unchanged[0] += 1
        elif kind != 110:  # n
            return -BAD_VALUE_KIND
        size[column, row] = NOT_SENT if masked and identity[column] == 0 else length
    return at


@inlined
def _take_old(
    value_at: Array, size: Array, row: int, old_at: Array, old_size: Array, old: int, unchanged: Array
) -> None:
    """Take the unchanged values of an update from its old key or row, if it has them."""
    for column in range(size.shape[0]):
        if size[column, row] == UNCHANGED and old_size[column, old] >= NULL:
            value_at[column, row] = old_at[column, old]
            size[column, row] = old_size[column, old]
            unchanged[0] -= 1


@compiled
def walk_rows(
    buffer: Array,
    ends: Array,
    record_op: Array,
    record_at: Array,
    record_message: Array,
    rows: Array,
    identity: Array,
    value_at: Array,
    size: Array,
    old_at: Array,
    old_size: Array,
    old_row: Array,
) -> Any:
    """Record the places of the values of a table's rows: `value_at` and `size` are [columns, rows].

    A size below 0 is NULL, UNCHANGED or NOT_SENT. Old keys and rows of updates go to `old_at` and
    `old_size` ([columns, old rows]), with the row that each belongs to in `old_row`. An unchanged value
    that its old key or row has is that one: PostgreSQL sends a key that is stored out of line in the
    old key alone, although the update didn't change it.

    Returns:
        Number of old rows, number of unchanged values, a fault, and the row at fault.
    """
    columns = len(identity)
    olds = 0
    unchanged = np.zeros(1, np.int64)
    unchanged_old = np.zeros(1, np.int64)
    for row in range(len(rows)):
        record = rows[row]
        op = record_op[record]
        if op == 116:  # t
            for column in range(columns):
                value_at[column, row] = 0
                size[column, row] = NULL
            continue
        at = record_at[record]
        end = ends[record_message[record]]
        if at >= end:
            return olds, unchanged[0], TOO_SHORT, row
        kind = buffer[at]
        at += 1
        if op == 100:  # d
            if kind != 75 and kind != 79:
                return olds, unchanged[0], BAD_VALUE_KIND, row
            at = _walk_tuple(buffer, at, end, columns, kind == 75, identity, value_at, size, row, unchanged)
        else:
            if op == 117 and (kind == 75 or kind == 79):
                at = _walk_tuple(buffer, at, end, columns, True, identity, old_at, old_size, olds, unchanged_old)
                if at < 0:
                    return olds, unchanged[0], -at, row
                if at >= end:
                    return olds, unchanged[0], TOO_SHORT, row
                old_row[olds] = row
                olds += 1
                kind = buffer[at]
                at += 1
            if kind != 78:
                return olds, unchanged[0], BAD_VALUE_KIND, row
            at = _walk_tuple(buffer, at, end, columns, False, identity, value_at, size, row, unchanged)
            if at >= 0 and olds > 0 and old_row[olds - 1] == row:
                _take_old(value_at, size, row, old_at, old_size, olds - 1, unchanged)
        if at < 0:
            return olds, unchanged[0], -at, row
        if at != end:
            return olds, unchanged[0], TOO_SHORT, row
    return olds, unchanged[0], FINE, 0


@compiled
def list_unchanged(size: Array, offsets: Array, names: Array) -> int:
    """List each row's unchanged columns, as a list's offsets and column numbers; return their number."""
    columns, rows = size.shape
    found = 0
    offsets[0] = 0
    for row in range(rows):
        for column in range(columns):
            if size[column, row] == UNCHANGED:
                names[found] = column
                found += 1
        offsets[row + 1] = found
    return found


@compiled
def list_old(
    old_at: Array,
    old_size: Array,
    old_row: Array,
    olds: int,
    rows: int,
    offsets: Array,
    names: Array,
    value_at: Array,
    size: Array,
) -> int:
    """List each row's old values that were sent, as a map's offsets, column numbers and places; return their number."""
    columns = old_size.shape[0]
    found = 0
    old = 0
    offsets[0] = 0
    for row in range(rows):
        if old < olds and old_row[old] == row:
            for column in range(columns):
                length = old_size[column, old]
                if length >= NULL:
                    names[found] = column
                    value_at[found] = old_at[column, old]
                    size[found] = length
                    found += 1
            old += 1
        offsets[row + 1] = found
    return found
