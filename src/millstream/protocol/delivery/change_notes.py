"""The part of a consumer's machine that hands out the changes of its state, with the time that they were made at."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

from millstream.protocol.delivery.state import State
from millstream.protocol.delivery.state_changes import Change, Moved, Started, Timed

_TIME_EVERY_MS: Final = 1000
"""How old the noted time may be: a wait that a clock set back would prolong is longer by as much."""


class Noted(ABC):
    """The changes. `Consumer` has the rest."""

    _changes: list[Change]
    _noted_cursor: int
    _newest_time: int
    """The greatest time of a call."""
    _noted_time: int

    @property
    @abstractmethod
    def cursor(self) -> int:
        """The `seq` of the token before which every message is settled."""

    def take_changes(self) -> list[Change]:
        """Return the changes since the last call, in order; `State.apply` takes them."""
        cursor = self.cursor
        if cursor != self._noted_cursor:
            self._noted_cursor = cursor
            self._changes.append(Moved(cursor))
        if self._changes and self._newest_time >= self._noted_time + _TIME_EVERY_MS:
            self._noted_time = self._newest_time
            self._changes.append(Timed(self._noted_time))
        taken, self._changes = self._changes, []
        return taken

    def _begin_changes(self, state: State, run: int, now: int) -> None:
        """Note that a run begins; move the state's times back if the clock was set back since they were noted."""
        self._changes = [Started(run)]
        if now:
            state.apply(Timed(now))
            self._changes.append(Timed(now))
        self._newest_time = self._noted_time = state.time
