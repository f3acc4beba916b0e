"""`Backoff`: what each wait may be, and what ends it."""

from __future__ import annotations

import threading
import time

from hypothesis import given
from hypothesis import strategies as st

from millstream.backoff import Backoff

SHARES = st.floats(0, 1)


@given(
    first_s=st.floats(1e-4, 10), times=st.floats(1, 1e4), factor=st.sampled_from([1.5, 2, 4]), jitter=SHARES,
    chances=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=2000),
)  # fmt: skip
def test_each_wait_is_longer_up_to_the_bound_and_chance_decides_the_given_part(
    first_s: float, times: float, factor: float, jitter: float, chances: list[float]
):
    most_s = first_s * times
    drawn = iter(chances)
    backoff = Backoff(first_s, most_s, factor=factor, jitter=jitter, chance=lambda: next(drawn))
    for number, chance in enumerate(chances):
        whole_s = min(most_s, first_s * factor ** min(number, 60))
        wait_s = backoff.next_s() if number % 2 else backoff.next_s(next(drawn))
        assert whole_s * (1 - jitter) * 0.999 <= wait_s <= whole_s * 1.001
        assert abs(wait_s - whole_s * (1 - jitter + jitter * chance)) <= whole_s * 1e-6
        assert backoff.attempts == number + 1


@given(before=st.integers(0, 100))
def test_a_reset_begins_with_the_shortest_wait(before: int):
    backoff = Backoff(0.25, 60.0, jitter=0)
    for _ in range(before):
        backoff.next_s()
    backoff.reset()
    assert [backoff.next_s() for _ in range(3)] == [0.25, 0.5, 1.0]


def test_many_callers_that_fail_together_do_not_return_together():
    waits = {Backoff(1.0, 1.0).next_s() for _ in range(100)}
    assert len(waits) > 90
    assert 0.5 <= min(waits) < 0.7
    assert 0.8 < max(waits) <= 1.0


def test_a_stop_ends_the_wait_at_once():
    stop = threading.Event()
    threading.Timer(0.05, stop.set).start()
    began = time.monotonic()
    assert Backoff(60.0, 60.0).wait(stop)
    assert time.monotonic() - began < 20
    assert not Backoff(0.001, 0.001).wait(threading.Event())
