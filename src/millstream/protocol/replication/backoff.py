"""The wait after a failure: twice as long each time, within bounds, and with jitter."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """The waits of one caller.

    Args:
        first_s: the longest wait after the first failure.
        most_s: the longest wait after any.
    """

    first_s: float = 0.1
    most_s: float = 10.0
    _failed: int = 0

    def after_failure(self, chance: float) -> float:
        """Return the seconds to wait now. `chance`, in [0, 1), is the jitter: it draws half of the wait."""
        whole_s = min(self.most_s, self.first_s * 2.0 ** min(self._failed, 30))
        self._failed += 1
        return whole_s * (0.5 + 0.5 * chance)

    def succeeded(self) -> None:
        """Reset: the next failure counts as the first."""
        self._failed = 0
