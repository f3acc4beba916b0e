"""Splitting rows by place, in machine code: owners of hashes, rows of each group, keys that change partition."""

from __future__ import annotations

from typing import Any

import numpy as np

from millstream.codec.machine_code import compiled

Array = Any  # numba knows the element types better than a type checker could


@compiled
def owners_of(hashes: Array, points: Array, owners: Array, buckets: Array, shift: int) -> Array:
    """See `ShardMap`; `buckets` has the first point that hashes with these highest bits may belong to."""
    found = np.empty(len(hashes), dtype=np.int64)
    down = np.uint64(shift)
    last = len(points)
    for row in range(len(hashes)):
        at = buckets[hashes[row] >> down]
        while at < last and points[at] < hashes[row]:
            at += 1
        found[row] = owners[at] if at < last else owners[0]
    return found


@compiled
def rows_by_group(codes: Array, groups: int) -> tuple[Array, Array]:
    """Return the numbers of rows, group by group, each in its order.

    And the start of each group, with the end of the last.
    """
    starts = np.zeros(groups + 1, dtype=np.int64)
    for row in range(len(codes)):
        starts[codes[row] + 1] += 1
    for group in range(groups):
        starts[group + 1] += starts[group]
    at = starts[:-1].copy()
    rows = np.empty(len(codes), dtype=np.int64)
    for row in range(len(codes)):
        code = codes[row]
        rows[at[code]] = row
        at[code] += 1
    return rows, starts


@compiled
def stretches(hashes: Array, codes: Array, operations: Array) -> Array:
    """Number the stretches of operations: a new one begins when a key changes its group.

    So within a stretch no key is in two groups.

    Each operation's stretches are numbered from 0. Keys with equal hashes count as one, which at most makes more
    stretches.
    """
    size = 4
    while size < 2 * len(hashes):
        size *= 2
    mask = np.uint64(size - 1)
    key = np.empty(size, dtype=np.uint64)
    code = np.empty(size, dtype=np.int64)
    of = np.full(size, -1, dtype=np.int64)
    found = np.empty(len(hashes), dtype=np.int64)
    now = np.int64(0)
    first = np.int64(0)
    """First stretch of the row's operation."""
    for row in range(len(hashes)):
        if row and operations[row] != operations[row - 1]:
            now += 1
            first = now
        at = hashes[row] & mask
        while of[at] >= 0 and key[at] != hashes[row]:
            at = (at + np.uint64(1)) & mask
        if of[at] == now and code[at] != codes[row]:
            now += 1
        key[at], code[at], of[at] = hashes[row], codes[row], now
        found[row] = now - first
    return found
