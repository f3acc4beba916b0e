"""Names in machine code: the place of each in the buffer, and a hash table to look it up.

Names are compared as they are written. Each has one spelling, because everything that may be
escaped must be.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from millstream.codec.little_endian_words import load_word
from millstream.codec.machine_code import compiled, inlined

Array = Any  # numba knows the element types better than a type checker could

# Facts of the names of measurements and columns. KEPT counts a name's valid lines; LAST is the
# newest of them. `count` counts a column's.
NAME_AT, NAME_SIZE, NAME_HASH, KEPT, LAST, OF_MEASUREMENT, KINDS, FIRST = range(8)
NAME_FACTS: Final = 8
NOWHERE: Final = -1
"""The owner of a measurement's name."""


_ZERO: Final = np.uint64(0)
_INT_MAX: Final = np.uint64(2**63 - 1)
_HASH_PRIME: Final = np.uint64(0x100000001B3)


@inlined
def is_same(buffer: Array, one: int, other: int, size: int) -> Any:
    """Whether `size` bytes are equal at two places."""
    # Short names are compared in one step, if eight bytes are there.
    if size <= 8 and max(one, other) + 8 <= len(buffer):
        differs = load_word(buffer, one) ^ load_word(buffer, other)
        return size == 0 or differs << np.uint64(64 - 8 * size) == _ZERO
    for i in range(size):  # noqa: SIM110 - machine code
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
def named(buffer: Array, of: Any, at: Any, size: Any, seed: Any, names: Array, slots: Array, count: int) -> Any:
    """Return the index of a name in `names`, to which it is added if it is new; -1 if there is no room for it."""
    found = _name_hash(buffer, at, size, seed + np.uint64(of))
    mask = len(slots) - 1
    slot = found & mask
    while slots[slot] >= 0:
        place = np.int64(slots[slot])
        if (
            names[place, NAME_HASH] == found
            and names[place, NAME_SIZE] == size
            and names[place, OF_MEASUREMENT] == of
            and is_same(buffer, names[place, NAME_AT], at, size)
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
    """Fill a larger table, of -1 so far, with the existing names."""
    mask = len(slots) - 1
    for place in range(count):
        slot = names[place, NAME_HASH] & mask
        while slots[slot] >= 0:
            slot = (slot + 1) & mask
        slots[slot] = place
