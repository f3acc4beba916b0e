"""Decimal digits to the nearest double, in machine code, exact or not at all.

The algorithm is Lemire's ("Number Parsing at a Gigabyte per Second", 2021). A number is `digits *
10 ** power` with up to 19 digits. If both are small, one multiplication or division of doubles
rounds once, and so correctly. Otherwise the digits are multiplied with the 128 highest bits of the
power of five. If these bits can't decide between two doubles, the result is `UNSURE`.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from millstream.codec.machine_code import inlined

POWER_MIN: Final = -342
"""Below this power even 19 digits make 0."""
POWER_MAX: Final = 308
UNSURE: Final = -1
"""No double has these bits, without the sign."""
INFINITE: Final = 0x7FF << 52
_SMALL_POWER: Final = 22
_SMALL_DIGITS: Final = np.uint64(1 << 53)
_TENS: Final = np.array([10.0**power for power in range(_SMALL_POWER + 1)])

_ZERO: Final = np.uint64(0)
_ONE: Final = np.uint64(1)
_THREE: Final = np.uint64(3)
_HALF: Final = np.uint64(32)
_LOW_HALF: Final = np.uint64(0xFFFFFFFF)
_ALL: Final = np.uint64(0xFFFFFFFFFFFFFFFF)
_UNTOLD: Final = np.uint64(0x1FF)
"""The bits of a product's high word below those that a double keeps, two to round by and one that may
be shifted out."""


def _powers_of_five() -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return the highest 128 bits of each power, in two words.

    They are truncated if the power is whole, and rounded up if it is a fraction.
    """
    words = []
    for power in range(POWER_MIN, POWER_MAX + 1):
        five = 5 ** abs(power)
        if power >= 0:
            bits = five << 127 >> (five.bit_length() - 1)
        else:
            shift = (five - 1).bit_length()
            bits = (1 << (shift + 127 if power >= -27 else 2 * shift + 128)) // five + 1
            bits >>= max(bits.bit_length() - 128, 0)
        words += [bits >> 64, bits & (2**64 - 1)]
    return np.array(words, np.uint64)


_POWERS: Final = _powers_of_five()


@inlined
def _high(a: Any, b: Any) -> Any:
    """Return the high word of a product of two words."""
    a1, a0 = a >> _HALF, a & _LOW_HALF
    b1, b0 = b >> _HALF, b & _LOW_HALF
    middle = ((a0 * b0) >> _HALF) + ((a1 * b0) & _LOW_HALF) + ((a0 * b1) & _LOW_HALF)
    return a1 * b1 + ((a1 * b0) >> _HALF) + ((a0 * b1) >> _HALF) + (middle >> _HALF)


@inlined
def _leading_zeros(word: Any) -> Any:
    """Return the number of leading zeros of a word that isn't 0."""
    count = np.int64(0)
    for step in (32, 16, 8, 4, 2, 1):
        if word >> np.uint64(64 - step) == _ZERO:
            count += step
            word = word << np.uint64(step)
    return count


@inlined
def double_bits(digits: Any, power: Any) -> Any:
    """Return the bits of the double nearest to `digits * 10 ** power`, `INFINITE` beyond the largest, or `UNSURE`."""
    if digits == _ZERO or power < POWER_MIN:
        return np.int64(0)
    if power > POWER_MAX:
        return np.int64(INFINITE)
    zeros = _leading_zeros(digits)
    word = digits << np.uint64(zeros)
    place = 2 * (power - POWER_MIN)
    high, low = _high(word, _POWERS[place]), word * _POWERS[place]
    if high & _UNTOLD == _UNTOLD:
        more = _high(word, _POWERS[place + 1])
        low += more
        if more > low:
            high += _ONE
    if low == _ALL and not -27 <= power <= 55:
        return np.int64(UNSURE)
    upper = np.int64(high >> np.uint64(63))
    shift = np.uint64(upper + 9)
    mantissa = high >> shift
    exponent = ((217706 * power) >> 16) + 63 + upper - zeros + 1023
    if exponent <= 0:
        if exponent <= -63:
            return np.int64(0)
        mantissa = mantissa >> np.uint64(1 - exponent)
        mantissa += mantissa & _ONE
        # A number that rounds up to the smallest normal number has its bits.
        return np.int64(mantissa >> _ONE)
    # Half-way between two doubles: to the even one.
    if low <= _ONE and -4 <= power <= 23 and mantissa & _THREE == _ONE and mantissa << shift == high:
        mantissa = mantissa & ~_ONE
    mantissa += mantissa & _ONE
    mantissa = mantissa >> _ONE
    if mantissa >> np.uint64(53) != _ZERO:
        mantissa = mantissa >> _ONE
        exponent += 1
    if exponent >= 0x7FF:
        return np.int64(INFINITE)
    return np.int64(mantissa & np.uint64((1 << 52) - 1)) | (np.int64(exponent) << 52)


@inlined
def small_double(digits: Any, power: Any) -> Any:
    """Return the double if one operation computes it correctly; else a number below 0."""
    if digits > _SMALL_DIGITS or not -_SMALL_POWER <= power <= _SMALL_POWER:
        return -1.0
    if power < 0:
        return np.float64(digits) / _TENS[-power]
    return np.float64(digits) * _TENS[power]
