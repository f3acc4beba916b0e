"""A clock under a test's control: time passes on the test's command, sleepers wake in order."""

import threading
import time

_NS = 1_000_000_000


class ManualClock:
    """A `millstream.ports.Clock` that stands still until it's moved.

    Args:
        start_ns: the wall clock's first reading.
        sleeping_advances: a `sleep` moves the time itself and returns at once: for code of one thread
            that waits.

    Otherwise `sleep` blocks its thread until `advance` has moved the time far enough. `wait_for_sleepers`
    lets a test wait until the others sleep.

    Concurrency: any number of threads may call anything.
    """

    def __init__(self, start_ns: int = 1_750_000_000 * _NS, *, sleeping_advances: bool = False) -> None:
        self._wall_ns = start_ns
        self._monotonic_ns = 0
        self._sleeping_advances = sleeping_advances
        self._wakes: list[int] = []
        self._moved = threading.Condition()

    def now_ns(self) -> int:
        """Return the wall clock: nanoseconds since 1970-01-01 UTC."""
        with self._moved:
            return self._wall_ns

    def monotonic_ns(self) -> int:
        """Return nanoseconds since this clock was made."""
        with self._moved:
            return self._monotonic_ns

    def sleep(self, seconds: float) -> None:
        """Return once `advance` has passed that much time, or at once if sleeping advances."""
        with self._moved:
            wake_ns = self._monotonic_ns + _duration_ns(seconds)
            if self._sleeping_advances:
                self._move(wake_ns - self._monotonic_ns)
                return
            self._wakes.append(wake_ns)
            self._moved.notify_all()
            try:
                self._moved.wait_for(lambda: self._monotonic_ns >= wake_ns)
            finally:
                self._wakes.remove(wake_ns)

    def advance(self, seconds: float) -> None:
        """Let time pass, on both clocks."""
        with self._moved:
            self._move(_duration_ns(seconds))

    def step_wall(self, seconds: float) -> None:
        """Set the wall clock forward or back, as NTP or an operator would; the monotonic one doesn't change."""
        with self._moved:
            self._wall_ns += round(seconds * _NS)

    def wait_for_sleepers(self, count: int = 1, *, timeout_s: float = 10.0) -> None:
        """Return once at least that many threads sleep on this clock.

        Raises:
            TimeoutError: they didn't, in that much real time.
        """
        deadline = time.monotonic() + timeout_s
        with self._moved:
            while (sleeping := sum(wake > self._monotonic_ns for wake in self._wakes)) < count:
                if not self._moved.wait(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"{sleeping} threads sleep, not {count}")

    def _move(self, duration_ns: int) -> None:
        self._wall_ns += duration_ns
        self._monotonic_ns += duration_ns
        self._moved.notify_all()


def _duration_ns(seconds: float) -> int:
    if seconds < 0:
        raise ValueError(f"time doesn't pass by {seconds} s")
    return round(seconds * _NS)
