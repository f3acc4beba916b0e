"""How long to wait after a failure: twice as long each time, within bounds, and never two at the same beat."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """One caller's waits.

    Args:
        first_s: after the first failure, at most.
        most_s: after any.
    """

    first_s: float = 0.1
    most_s: float = 10.0
    _failed: int = 0

    def after_failure(self, chance: float) -> float:
        """Seconds to wait now. `chance`, in [0, 1), spreads those who failed together: half of the wait is drawn by it."""
        whole_s = min(self.most_s, self.first_s * 2.0 ** min(self._failed, 30))
        self._failed += 1
        return whole_s * (0.5 + 0.5 * chance)

    def succeeded(self) -> None:
        """The next failure is the first one again."""
        self._failed = 0
