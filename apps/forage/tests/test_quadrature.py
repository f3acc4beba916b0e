"""Chances by quadrature against integrals of mpmath and against closed forms."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream_forage.quadrature import GreatestOfBetas

PARAMETERS = st.lists(
    st.tuples(st.floats(1, 3_000), st.floats(1, 3_000)) | st.just((1.0, 1.0)), min_size=1, max_size=12
)


def exact(index: int, pairs: list[tuple[float, float]]) -> float:
    """Return the chance by mpmath, over pieces between the modes and the edges of every density."""
    cuts = {0.0, 1.0}
    for a, b in pairs:
        mean = a / (a + b)
        deviation = math.sqrt(mean * (1 - mean) / (a + b + 1))
        cuts |= {mean + k * deviation for k in (-8, -4, -2, 0, 2, 4, 8) if 0 < mean + k * deviation < 1}

    def integrand(x: mpmath.mpf) -> mpmath.mpf:
        a, b = pairs[index]
        value = x ** (a - 1) * (1 - x) ** (b - 1) / mpmath.beta(a, b)
        for other, (a, b) in enumerate(pairs):
            if other != index:
                value *= mpmath.betainc(a, b, 0, x, regularized=True)
        return value

    with mpmath.workdps(20):
        return float(mpmath.quad(integrand, sorted(cuts), maxdegree=5))


@pytest.mark.parametrize(
    "pairs",
    [
        [(1.0, 1.0), (1.3, 4.7), (2.5, 1.0)],
        pytest.param([(40.0, 60.0), (45.0, 55.0), (1.0, 1.0), (1.0, 1.0)], marks=pytest.mark.siege),
        pytest.param([(900.5, 100.25), (1.0, 1.75), (880.0, 120.0)], marks=pytest.mark.siege),
    ],
    ids=["few", "some", "sharp"],
)
def test_a_chance_agrees_with_mpmath_to_a_millionth(pairs: list[tuple[float, float]]) -> None:
    odds = GreatestOfBetas(*zip(*pairs, strict=True))
    for index in range(len(pairs)):
        assert odds.chance(index, np.arange(len(pairs))) == pytest.approx(exact(index, pairs), rel=1e-8)


@pytest.mark.parametrize(("a", "b", "c", "d"), [(1, 1, 1, 1), (3, 7, 5, 2), (60, 40, 50, 50), (1, 30, 1, 1)])
def test_two_arms_with_whole_parameters_have_the_closed_form(a: int, b: int, c: int, d: int) -> None:
    def log_beta(x: float, y: float) -> float:
        return math.lgamma(x) + math.lgamma(y) - math.lgamma(x + y)

    # Sum over i < a of B(c + i, b + d) / ((b + i) · B(1 + i, b) · B(c, d)).
    first = sum(
        math.exp(log_beta(c + i, b + d) - math.log(b + i) - log_beta(1 + i, b) - log_beta(c, d)) for i in range(a)
    )
    assert GreatestOfBetas([a, c], [b, d]).chance(0, np.arange(2)) == pytest.approx(first, rel=1e-9)


@given(PARAMETERS)
def test_the_chances_of_all_arms_sum_to_one(pairs: list[tuple[float, float]]) -> None:
    odds = GreatestOfBetas(*zip(*pairs, strict=True))
    total = sum(odds.chance(index, np.arange(len(pairs))) for index in range(len(pairs)))
    assert total == pytest.approx(1, abs=1e-8)


def test_hundreds_of_equal_arms_share_alike() -> None:
    odds = GreatestOfBetas([5.5] * 300, [2.25] * 300)
    assert odds.chance(7, np.arange(300)) == pytest.approx(1 / 300, rel=1e-8)
    assert odds.chance(7, np.arange(100)) == pytest.approx(1 / 100, rel=1e-8)
