"""PostgreSQL's text of floating-point numbers: the shortest digits that read back as the same number.

`double_to_shortest_decimal_buf` (d2s.c) and its float twin differ from Python's `repr` in two ways.
They switch to an exponent elsewhere (from 1e15, for real from 1e6, and below 1e-4). And digits
exactly half-way between two numbers are not taken for either, because PostgreSQL doesn't rely on
readers that round to even.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

FIXED_BELOW_8: Final = 15
FIXED_BELOW_4: Final = 6
_FIXED_FROM: Final = -4
# With so few digits, only a whole number N * 10^j can lie half-way between two doubles (floats).
# Then 5^j divides the odd number that the half-way point is made of. That number is below 2^54
# (2^25), hence j <= 23 (10) and these bounds.
HALF_WAY_8: Final = (2.0**53, 1e41)
HALF_WAY_4: Final = (2.0**24, 1e20)


def render_float8(value: float) -> str:
    """Return PostgreSQL's text of a `double precision`."""
    if not math.isfinite(value):
        return _not_finite(value)
    digits, exponent = _digits(repr(abs(value)))
    if HALF_WAY_8[0] <= abs(value) < HALF_WAY_8[1] and _is_half_way(digits, exponent, np.float64(abs(value))):
        digits, exponent = _shorten(np.float64(abs(value)), 16)
    return _notation(digits, exponent, negative=math.copysign(1.0, value) < 0, fixed_below=FIXED_BELOW_8)


def render_float4(value: float) -> str:
    """Return PostgreSQL's text of a `real`, given as the double of the same value."""
    if not math.isfinite(value):
        return _not_finite(value)
    single = np.float32(abs(value))
    digits, exponent = _digits(np.format_float_scientific(single, unique=True, trim="-"))
    if HALF_WAY_4[0] <= single < HALF_WAY_4[1] and _is_half_way(digits, exponent, single):
        digits, exponent = _shorten(single, 8)
    return _notation(digits, exponent, negative=math.copysign(1.0, value) < 0, fixed_below=FIXED_BELOW_4)


def _not_finite(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _digits(text: str) -> tuple[str, int]:
    """Return the significant digits without zeros at either end, and the decimal exponent of the first digit."""
    mantissa, _, power = text.partition("e")
    whole, _, fraction = mantissa.partition(".")
    exponent = int(power or 0) + len(whole) - 1
    digits = whole + fraction
    stripped = digits.lstrip("0")
    if not stripped:
        return "0", 0
    exponent -= len(digits) - len(stripped)
    return stripped.rstrip("0"), exponent


def _notation(digits: str, exponent: int, *, negative: bool, fixed_below: int) -> str:
    sign = "-" if negative else ""
    if not _FIXED_FROM <= exponent < fixed_below:
        fraction = f".{digits[1:]}" if len(digits) > 1 else ""
        return f"{sign}{digits[0]}{fraction}e{'-' if exponent < 0 else '+'}{abs(exponent):02}"
    if exponent < 0:
        return f"{sign}0.{'0' * (-exponent - 1)}{digits}"
    whole, fraction = digits[: exponent + 1].ljust(exponent + 1, "0"), digits[exponent + 1 :]
    return f"{sign}{whole}.{fraction}" if fraction else f"{sign}{whole}"


def _whole(digits: str, exponent: int) -> int | None:
    """Return the whole number that digits and exponent denote; None if it isn't whole."""
    shift = exponent + 1 - len(digits)
    return int(digits) * 10**shift if shift >= 0 else None


def _is_half_way(digits: str, exponent: int, value: np.float64 | np.float32) -> bool:
    said = _whole(digits, exponent)
    if said is None:
        return False
    exact = int(value)
    neighbour = int(np.nextafter(value, type(value)(np.inf if said > exact else 0.0)))
    return said != exact and 2 * said == exact + neighbour


def _shorten(value: np.float64 | np.float32, precision_max: int) -> tuple[str, int]:
    """Return the fewest digits that read back as the number and aren't half-way, with the exponent of the first."""
    for precision in range(precision_max):
        digits, exponent = _digits(f"{float(value):.{precision}e}")
        is_same = type(value)(f"{digits}e{exponent + 1 - len(digits)}") == value
        if is_same and not _is_half_way(digits, exponent, value):
            return digits, exponent
    return _digits(f"{float(value):.{precision_max}e}")
