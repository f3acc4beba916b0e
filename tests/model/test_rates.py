"""A rate covers only recent events, and falls to zero when nothing happens."""

from __future__ import annotations

import pytest

from millstream.model.rates import WINDOW_S, Rate


def test_a_steady_stream_has_its_rate_from_the_first_seconds_on() -> None:
    rate = Rate()
    for second in range(100):
        rate.add(50, float(second))
        if second >= 5:
            assert rate.per_s(float(second)) == pytest.approx(50, rel=0.25)


def test_what_has_stopped_goes_to_nothing_within_the_window() -> None:
    rate = Rate()
    assert rate.per_s(0.0) == 0
    rate.add(3_000, 10.0)
    assert rate.per_s(10.0) == 3_000
    assert 0 < rate.per_s(10.0 + WINDOW_S / 2) < 3_000
    assert rate.per_s(10.1 + WINDOW_S) == 0
    rate.add(300, 500.0)
    assert rate.per_s(500.0) == pytest.approx(300 / WINDOW_S)
