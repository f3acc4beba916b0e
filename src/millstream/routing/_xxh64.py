"""XXH64 over columns, in machine code. The implementation never changes: a row's place follows from it.

The algorithm is xxHash's 64-bit one, written out here so that no version of a library can change it. Words are
little-endian, so the result is the same on every processor.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from millstream.codec.little_endian_words import load_word
from millstream.codec.machine_code import compiled, inlined

Array = Any  # numba knows the element types better than a type checker could

_P1: Final = np.uint64(0x9E3779B185EBCA87)
_P2: Final = np.uint64(0xC2B2AE3D27D4EB4F)
_P3: Final = np.uint64(0x165667B19E3779F9)
_P4: Final = np.uint64(0x85EBCA77C2B2AE63)
_P5: Final = np.uint64(0x27D4EB2F165667C5)
_ZERO: Final = np.uint64(0)
_R1, _R7, _R11, _R12, _R18, _R23, _R27, _R29, _R31, _R32, _R33 = (
    np.uint64(r) for r in (1, 7, 11, 12, 18, 23, 27, 29, 31, 32, 33)
)
_BITS: Final = np.uint64(64)
_EIGHT: Final = np.uint64(8)


@inlined
def _turn(x: Any, by: Any) -> Any:
    return (x << by) | (x >> (_BITS - by))


@inlined
def _round(held: Any, lane: Any) -> Any:
    return _turn(held + lane * _P2, _R31) * _P1


@inlined
def _merge(held: Any, lane: Any) -> Any:
    return (held ^ _round(_ZERO, lane)) * _P1 + _P4


@inlined
def _spread(h: Any) -> Any:
    h = (h ^ (h >> _R33)) * _P2
    h = (h ^ (h >> _R29)) * _P3
    return h ^ (h >> _R32)


@inlined
def _word(data: Array, at: int) -> Any:
    """Return the word of four bytes, lowest first."""
    low = np.uint64(data[at]) | (np.uint64(data[at + 1]) << np.uint64(8))
    return low | (np.uint64(data[at + 2]) << np.uint64(16)) | (np.uint64(data[at + 3]) << np.uint64(24))


@inlined
def _hash(data: Array, start: int, end: int, seed: Any) -> Any:
    """Return the XXH64 of bytes `[start, end)`."""
    at = start
    if end - start >= 32:
        one, two, three, four = seed + _P1 + _P2, seed + _P2, seed, seed - _P1
        while at + 32 <= end:
            one = _round(one, load_word(data, at))
            two = _round(two, load_word(data, at + 8))
            three = _round(three, load_word(data, at + 16))
            four = _round(four, load_word(data, at + 24))
            at += 32
        h = _turn(one, _R1) + _turn(two, _R7) + _turn(three, _R12) + _turn(four, _R18)
        h = _merge(_merge(_merge(_merge(h, one), two), three), four)
    else:
        h = seed + _P5
    h += np.uint64(end - start)
    while at + 8 <= end:
        h = _turn(h ^ _round(_ZERO, load_word(data, at)), _R27) * _P1 + _P4
        at += 8
    if at + 4 <= end:
        h = _turn(h ^ (_word(data, at) * _P1), _R23) * _P2 + _P3
        at += 4
    while at < end:
        h = _turn(h ^ (np.uint64(data[at]) * _P5), _R11) * _P1
        at += 1
    return _spread(h)


@compiled
def hash_bytes(data: Array, offsets: Array, valid: Array, tag: int, hashes: Array) -> None:
    """Add one more column of bytes to the rows' hashes.

    Args:
        data: uint8.
        offsets: int64, one more than rows: row n has bytes `[offsets[n], offsets[n + 1])`.
        valid: bool, one per row; empty if no row is null.
        tag: tag of the column's kind of value.
        hashes: uint64, the hashes of the earlier columns; changed in place.
    """
    kind = np.uint64(tag)
    all_valid = len(valid) == 0
    for row in range(len(hashes)):
        if all_valid or valid[row]:
            hashes[row] = _hash(data, offsets[row], offsets[row + 1], hashes[row] + kind)
        else:
            hashes[row] = _spread(hashes[row] + _P5)


@compiled
def hash_longs(values: Array, valid: Array, tag: int, hashes: Array) -> None:
    """Do the same as `hash_bytes`, for values of eight bytes each, lowest first: uint64."""
    kind = np.uint64(tag)
    all_valid = len(valid) == 0
    for row in range(len(hashes)):
        if all_valid or valid[row]:
            h = hashes[row] + kind + _P5 + _EIGHT
            h = _turn(h ^ _round(_ZERO, values[row]), _R27) * _P1 + _P4
            hashes[row] = _spread(h)
        else:
            hashes[row] = _spread(hashes[row] + _P5)
