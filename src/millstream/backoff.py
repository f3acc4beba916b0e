"""The waits between attempts: longer each time, within bounds, and with jitter."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

_DOUBLINGS_MAX: Final = 60


class StopEvent(Protocol):
    """A `threading.Event`, or what waits like one."""

    def wait(self, timeout: float) -> bool:
        """Return True as soon as it is set, or False after so many seconds."""


@dataclass(slots=True)
class Backoff:
    """The waits of one caller.

    Concurrency: one thread at a time.
    """

    first_s: float = 0.1
    """Longest wait after the first attempt."""
    most_s: float = 10.0
    """Longest wait after any attempt."""
    factor: float = 2.0
    """How many times as long each wait is as the one before."""
    jitter: float = 0.5
    """The part of each wait that chance decides, so that many callers don't return together; 0 to poll by a schedule."""
    attempts: int = 0
    """Waits since the last reset."""
    chance: Callable[[], float] = random.random
    """Draws from [0, 1)."""

    def next_s(self, chance: float | None = None) -> float:
        """Return the seconds to wait now, after one more attempt.

        Args:
            chance: what is drawn, in [0, 1), for a caller that must stay deterministic.
        """
        whole_s = min(self.most_s, self.first_s * self.factor ** min(self.attempts, _DOUBLINGS_MAX))
        self.attempts += 1
        if not self.jitter:
            return whole_s
        return whole_s * (1 - self.jitter + self.jitter * (self.chance() if chance is None else chance))

    def wait(self, stop: StopEvent) -> bool:
        """Wait after one more attempt; return whether `stop` was set, which ends the wait at once."""
        return stop.wait(self.next_s())

    def reset(self) -> None:
        """Begin again with the shortest wait, after a success."""
        self.attempts = 0
