"""Whether capture begins again after an error, and when: broken connections, a busy slot, a full disk."""

from __future__ import annotations

import time
from typing import Final

from millstream.backoff import Backoff
from millstream.errors import DiskFull, MillstreamError, Retry
from millstream.model.positions import Lsn

_WAIT_MAX_S: Final = 10.0
_WELL_S: Final = 10.0
"""A session that streamed for so long was well, also if nothing came."""
_SLOT_ACTIVE_MAX_S: Final = 2.0  # the server process of a killed capture goes within seconds; then every second counts
_PASSING: Final = frozenset({"slot_active", "source_behind", "source_switched"})
"""Errors that end while capture waits, even before its first connection."""


class SessionRetries:
    """The waits between the sessions of one capture. Progress makes them short again, a connection alone doesn't.

    Args:
        give_up_s: seconds of failures after which no other session begins; None: never.
    """

    def __init__(self, give_up_s: float | None) -> None:
        self._give_up_s = give_up_s
        self._backoff = Backoff(0.2, _WAIT_MAX_S)
        self._failing_since: float | None = None
        self._furthest = Lsn(0)
        """The position up to which any session made the source's commits durable."""
        self._moved = False
        """Whether the last session made anything durable."""

    def note_session(self, *, lasted_s: float, records: int, durable: Lsn) -> None:
        """Note the end of a session that had begun to stream.

        Args:
            lasted_s: seconds since then.
            records: number of records that it made durable, copies of tables included.
            durable: the position up to which every commit is durable.
        """
        self._moved = records > 0 or durable > self._furthest
        self._furthest = max(self._furthest, durable)
        if lasted_s >= _WELL_S:
            self._reset()

    def wait_s(self, error: MillstreamError, *, ever_connected: bool) -> float | None:
        """Return the seconds until another session; None if none begins.

        Args:
            ever_connected: whether the source was reached before. If it never was, its address may be wrong.
        """
        is_full = isinstance(error, DiskFull)
        # On a full disk a session may move on to the first record that has no room: that is no progress.
        if self._moved and not is_full:
            self._reset()
        self._moved = False
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        if not is_full and (error.retry is not Retry.BACKOFF or not (error.code in _PASSING or ever_connected)):
            return None
        if self._give_up_s is not None and now - self._failing_since >= self._give_up_s:
            return None
        wait_s = self._backoff.next_s()
        return min(wait_s, _SLOT_ACTIVE_MAX_S) if error.code == "slot_active" else wait_s

    def _reset(self) -> None:
        self._backoff.reset()
        self._failing_since = None
