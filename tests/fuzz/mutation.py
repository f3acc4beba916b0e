"""Changes to valid inputs: a bit, a byte or a length, or a piece cut out, doubled, or taken from another input."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from random import Random
from typing import Final

_EDGES: Final = (
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0x8000,
    0xFFFF,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
_WIDTHS: Final = ((1, "B"), (2, "H"), (4, "I"), (8, "Q"))
_CHANGES_MAX: Final = 5


def mutate(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Make one to five changes to an input."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, _CHANGES_MAX)):
        rng.choice(_CHANGES)(rng, changed, others)
    return bytes(changed)


def _flip_bit(rng: Random, data: bytearray, _others: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set_byte(rng: Random, data: bytearray, _others: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.choice(
            (0, 255, rng.randrange(256), rng.choice(b'0123456789-.{}\\"\t\n+eN'))
        )


def _set_number(rng: Random, data: bytearray, _others: Sequence[bytes]) -> None:
    """Set a number of some width and byte order to an edge, or move it a little; it may be a length or a count."""
    width, letter = rng.choice(_WIDTHS)
    if len(data) < width:
        return
    at = rng.randrange(len(data) - width + 1)
    at -= at % width if rng.random() < 0.7 else 0  # formats align where they can
    order = rng.choice("<>")
    if rng.random() < 0.5:
        number = rng.choice(_EDGES)
    else:
        (number,) = struct.unpack_from(order + letter, data, at)
        number += rng.choice((-8, -1, 1, 8, len(data)))
    struct.pack_into(order + letter, data, at, number % (1 << 8 * width))


def _cut_end(rng: Random, data: bytearray, _others: Sequence[bytes]) -> None:
    del data[rng.randint(0, len(data)) :]


def _cut_out(rng: Random, data: bytearray, _others: Sequence[bytes]) -> None:
    start = rng.randint(0, len(data))
    del data[start : start + rng.choice((1, 4, 8, rng.randint(0, 64)))]


def _double(rng: Random, data: bytearray, _others: Sequence[bytes]) -> None:
    start = rng.randint(0, len(data))
    piece = data[start : start + rng.choice((1, 8, rng.randint(0, 128)))]
    data[start:start] = piece * rng.choice((1, 1, 2, 50))


def _splice(rng: Random, data: bytearray, others: Sequence[bytes]) -> None:
    other = rng.choice(others)
    start, length = rng.randint(0, len(other)), rng.choice((8, rng.randint(0, 256), len(other)))
    at = rng.randint(0, len(data))
    over = length if rng.random() < 0.5 else 0
    data[at : at + over] = other[start : start + length]


def _fill(rng: Random, data: bytearray, _others: Sequence[bytes]) -> None:
    start = rng.randint(0, len(data))
    end = min(len(data), start + rng.choice((4, 8, 32)))
    data[start:end] = bytes([rng.choice((0, 255, 48, 57))]) * (end - start)


_CHANGES: Final = (
    _flip_bit,
    _flip_bit,
    _set_byte,
    _set_byte,
    _set_number,
    _set_number,
    _set_number,
    _cut_end,
    _cut_out,
    _double,
    _splice,
    _fill,
)
