"""Recent rates of events. Plain values: the caller passes the time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

WINDOW_S: Final = 30.0
"""Long enough to level batches out, short enough to show that something has stopped."""


@dataclass(slots=True)
class Rate:
    """Counts over the last `WINDOW_S` seconds."""

    _steps: deque[tuple[float, int]] = field(default_factory=deque)
    _held: int = 0
    _began_s: float = float("inf")

    def add(self, count: int, now_s: float) -> None:
        """Add a count at a moment; moments don't go back."""
        self._began_s = min(self._began_s, now_s)
        self._steps.append((now_s, count))
        self._held += count
        self._forget(now_s)

    def per_s(self, now_s: float) -> float:
        """Return the rate at a moment.

        It is taken over the window, or over the time since the first count if that is shorter (at
        least a second).
        """
        self._forget(now_s)
        if not self._steps:
            return 0.0
        return self._held / max(1.0, min(WINDOW_S, now_s - self._began_s))

    def _forget(self, now_s: float) -> None:
        while self._steps and self._steps[0][0] < now_s - WINDOW_S:
            self._held -= self._steps.popleft()[1]
