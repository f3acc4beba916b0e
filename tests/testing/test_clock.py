import threading

import pytest

from millstream.testing import ManualClock


def test_time_stands_still_until_it_is_moved():
    clock = ManualClock(start_ns=5)
    assert (clock.now_ns(), clock.monotonic_ns()) == (5, 0)
    clock.advance(1.5)
    assert (clock.now_ns(), clock.monotonic_ns()) == (1_500_000_005, 1_500_000_000)


def test_a_wall_clock_that_steps_back_leaves_the_monotonic_one_alone():
    clock = ManualClock(start_ns=10**18)
    clock.step_wall(-3600)
    assert clock.now_ns() == 10**18 - 3600 * 10**9
    assert clock.monotonic_ns() == 0


def test_a_sleeper_wakes_when_its_time_has_passed_and_not_before():
    clock = ManualClock()
    woken: list[float] = []
    threads = [threading.Thread(target=lambda s=s: (clock.sleep(s), woken.append(s))) for s in (2.0, 1.0)]
    for thread in threads:
        thread.start()
    clock.wait_for_sleepers(2)
    clock.advance(1.0)
    threads[1].join(180)
    assert woken == [1.0]
    clock.wait_for_sleepers(1)
    clock.advance(1.0)
    threads[0].join(180)
    assert woken == [1.0, 2.0]


def test_sleeping_can_move_the_time_itself():
    clock = ManualClock(sleeping_advances=True)
    clock.sleep(3)
    assert clock.monotonic_ns() == 3_000_000_000


def test_time_does_not_run_backward_and_missing_sleepers_are_told():
    clock = ManualClock()
    with pytest.raises(ValueError, match="doesn't pass"):
        clock.advance(-1)
    with pytest.raises(TimeoutError, match="0 threads sleep, not 1"):
        clock.wait_for_sleepers(timeout_s=0.01)
