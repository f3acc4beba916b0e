"""Whether capture begins again after an error, and when: broken connections, a busy slot, a full disk."""

from __future__ import annotations

import time
from typing import Final

from millstream.backoff import Backoff
from millstream.errors import DiskFull, MillstreamError, Retry

_WAIT_MAX_S: Final = 10.0
_SLOT_ACTIVE_MAX_S: Final = 2.0  # the server process of a killed capture goes within seconds; then every second counts
_PASSING: Final = frozenset({"slot_active", "source_behind", "source_switched"})
"""Errors that end while capture waits, even before its first connection."""


class SessionRetries:
    """The waits between the sessions of one capture.

    Args:
        give_up_s: seconds of failures after which no other session begins; None: never.
    """

    def __init__(self, give_up_s: float | None) -> None:
        self._give_up_s = give_up_s
        self._backoff = Backoff(0.2, _WAIT_MAX_S)
        self._failing_since: float | None = None

    def wait_s(self, error: MillstreamError, *, connected_s: float | None, ever_connected: bool) -> float | None:
        """Return the seconds until another session; None if none begins.

        Args:
            connected_s: how long the session lasted, if it connected.
            ever_connected: whether the source was reached before. If it never was, its address may be wrong.
        """
        is_full = isinstance(error, DiskFull)
        # On a full disk a session connects, and ends at the first record: that is no progress.
        if connected_s is not None and not (is_full and connected_s < _WAIT_MAX_S):
            self._backoff.reset()
            self._failing_since = None
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        if not is_full and (error.retry is not Retry.BACKOFF or not (error.code in _PASSING or ever_connected)):
            return None
        if self._give_up_s is not None and now - self._failing_since >= self._give_up_s:
            return None
        wait_s = self._backoff.next_s()
        return min(wait_s, _SLOT_ACTIVE_MAX_S) if error.code == "slot_active" else wait_s
