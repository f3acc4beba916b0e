"""A heap of the times at which deliveries expire and waits end. `consumer` decides what happens then (`expire`)."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

_KEPT_MIN: Final = 1024
"""Number of timers up to which void ones aren't searched for."""


class Timer(NamedTuple):
    """A time, and the answer that expires then; or the position of a message whose wait ends, if `run` is -1."""

    time: int
    run: int
    number: int


class Timers:
    """A heap of timers. Those whose reason is gone are dropped once they may be most of it."""

    def __init__(self, is_void: Callable[[Timer], bool]) -> None:
        self._is_void = is_void
        self._heap: list[Timer] = []
        self._kept = _KEPT_MIN
        """Number of timers that were left by the last search."""

    def set(self, time: int, run: int, number: int) -> None:
        """Add a timer."""
        heappush(self._heap, Timer(time, run, number))
        if len(self._heap) > 2 * self._kept:
            self._heap = [timer for timer in self._heap if not self._is_void(timer)]
            heapify(self._heap)
            self._kept = max(len(self._heap), _KEPT_MIN)

    def pop_due(self, now: int) -> Timer | None:
        """Remove and return the first timer, if its time has come."""
        return heappop(self._heap) if self._heap and self._heap[0].time <= now else None

    def next_time(self) -> int | None:
        """Return the time of the first timer that isn't void; None if there is none."""
        while self._heap and self._is_void(self._heap[0]):
            heappop(self._heap)
        return self._heap[0].time if self._heap else None

    def clear(self) -> None:
        """Forget all timers."""
        self._heap.clear()
