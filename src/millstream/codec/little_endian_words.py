"""Eight bytes at once in machine code: little-endian words from anywhere in a buffer, and tests on them.

After a change here, also change the files of the calling functions: numba caches machine code by
those files. Nothing here checks bounds: callers ensure that eight bytes are there.
"""

# ruff: noqa: ARG001 — what an intrinsic is given has its types said in its signature

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from millstream.codec.machine_code import inlined

_WORD: Final = ir.IntType(64)
_IS_BIG: Final = sys.byteorder == "big"
_ONES: Final = np.uint64(0x0101010101010101)
_HIGHS: Final = np.uint64(0x8080808080808080)


def _at(context: Any, builder: Any, kind: Any, array: Any, place: Any) -> Any:
    """Return a pointer to the word that begins at an index of an array of bytes."""
    data = cgutils.create_struct_proxy(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [place]), _WORD.as_pointer())


def _load_word(_typing: Any, array: Any, place: Any) -> Any:
    """Load the eight bytes from `place` on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _at(context, builder, signature.args[0], arguments[0], arguments[1])
        word = builder.load(pointer, align=1)
        return builder.bswap(word) if _IS_BIG else word

    return types.uint64(array, types.int64), generate


def _store_word(_typing: Any, array: Any, place: Any, word: Any) -> Any:
    """Store eight bytes from `place` on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _at(context, builder, signature.args[0], arguments[0], arguments[1])
        word = builder.bswap(arguments[2]) if _IS_BIG else arguments[2]
        builder.store(word, pointer, align=1)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.uint64), generate


def _trailing_zeros(_typing: Any, word: Any) -> Any:
    """Count the zero bits below the lowest set bit; 64 if none is set."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.IntType(1)(0))

    return types.int64(types.uint64), generate


# For numba they take the parameters behind the first.
load_word: Any = intrinsic(_load_word)
store_word: Any = intrinsic(_store_word)
trailing_zeros: Any = intrinsic(_trailing_zeros)


@inlined
def zero_bytes(word: Any) -> Any:
    """Return a word whose lowest set bit is in the first byte that is 0; no bit is set if no byte is 0."""
    return (word - _ONES) & ~word & _HIGHS


_DIGITS_HIGH: Final = np.uint64(0xF0F0F0F0F0F0F0F0)
_SIXES: Final = np.uint64(0x0606060606060606)
_THREES: Final = np.uint64(0x3333333333333333)
_FOUR: Final = np.uint64(4)


@inlined
def are_digits(word: Any) -> Any:
    """Whether all eight bytes are decimal digits."""
    return ((word & _DIGITS_HIGH) | (((word + _SIXES) & _DIGITS_HIGH) >> _FOUR)) == _THREES


_ZEROS: Final = np.uint64(0x3030303030303030)
_PAIRS: Final = np.uint64(0x000000FF000000FF)
_HUNDREDS: Final = np.uint64(0x000F424000000064)
_TEN_THOUSANDS: Final = np.uint64(0x0000271000000001)
_TEN: Final = np.uint64(10)
_EIGHT: Final = np.uint64(8)
_SIXTEEN: Final = np.uint64(16)
_THIRTY_TWO: Final = np.uint64(32)


@inlined
def eight_digits(word: Any) -> Any:
    """Return the number that eight digits make; the first byte is the most significant digit."""
    digits = word - _ZEROS
    digits = digits * _TEN + (digits >> _EIGHT)
    upper = (digits & _PAIRS) * _HUNDREDS
    lower = ((digits >> _SIXTEEN) & _PAIRS) * _TEN_THOUSANDS
    return (upper + lower) >> _THIRTY_TWO
