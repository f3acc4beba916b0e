"""Whether the owner begins a stream again after an error, and when."""

from __future__ import annotations

import time
from typing import Final

from millstream.backoff import Backoff
from millstream.errors import MillstreamError, SourceError, StaleEpoch, may_pass

_WELL_S: Final = 10.0
"""After this long without an error, or with another cause, the waits start again with the shortest."""
_ATTEMPTS_OF_A_JOB: Final = 5
"""How often `--until-caught-up` tries before it fails: some seconds, for a server that is just starting."""


class StreamRetries:
    """The waits between the tries of one stream.

    Args:
        is_named: whether its writer is one of several. If its lease ended, it registers again: see `OwnIncarnations`.
    """

    def __init__(self, *, is_named: bool) -> None:
        self._is_named = is_named
        self._backoff = Backoff(0.5, 30.0)
        self._failed_by = ""
        """The code of the error that `_backoff` counts."""
        self._well_since_s: float | None = None

    def note_progress(self) -> bool:
        """Note that the stream makes progress; return whether it made none before."""
        is_first = self._well_since_s is None
        if is_first:
            self._well_since_s = time.monotonic()
        return is_first

    def note_wait(self) -> None:
        """Note that the stream makes no progress."""
        self._well_since_s = None

    def reset(self) -> None:
        """Let the next wait be the shortest."""
        self._backoff.reset()

    def wait_s(self, error: MillstreamError, *, is_job: bool) -> float | None:
        """Return the seconds until the stream begins again after an error; None: it is given up.

        Args:
            error: why it ended.
            is_job: whether it ends once it has caught up. A job fails with an error that needs work at the source; a
                service goes on once that work is done.
        """
        was_well = self._well_since_s is not None and time.monotonic() - self._well_since_s >= _WELL_S
        if was_well or error.code != self._failed_by:
            self.reset()
        self._failed_by = error.code
        self.note_wait()
        mends_itself = may_pass(error.code, error.retry) or (self._is_named and isinstance(error, StaleEpoch))
        if isinstance(error, SourceError) and not is_job:
            mends_itself = mends_itself or error.mends_at_source
        if not mends_itself or (is_job and self._backoff.attempts + 1 >= _ATTEMPTS_OF_A_JOB):
            return None
        return self._backoff.next_s()
