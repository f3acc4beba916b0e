"""Ranges that were given and aren't settled so far; they end in any order."""

from __future__ import annotations

from collections import deque

from millstream.errors import SequencingError
from millstream.model.positions import Seq, SeqRange


class InFlight:
    """Ranges in the order in which they were given. Ending one costs the same however many there are."""

    def __init__(self) -> None:
        self._given: deque[SeqRange] = deque()
        """Ranges from the oldest open one; some of the later ones may have ended."""
        self._open: set[SeqRange] = set()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def first(self) -> Seq | None:
        """The lowest number in flight; None if there is none."""
        return self._given[0].first if self._given else None

    def add(self, given: SeqRange) -> None:
        """Add a range that is in flight from now on; its numbers are above every number given before."""
        self._given.append(given)
        self._open.add(given)

    def end(self, given: SeqRange) -> Seq | None:
        """End a range that is settled.

        Returns:
            The last number before the first in flight now, if this range was the oldest; else None.

        Raises:
            SequencingError (`not_in_flight`): it was never added, or has ended before.
        """
        if given not in self._open:
            raise SequencingError(
                f"numbers {given.first} to {given.last} are not in flight here",
                code="not_in_flight",
                first=int(given.first),
                count=given.count,
            )
        self._open.remove(given)
        settled = None
        while self._given and self._given[0] not in self._open:
            settled = self._given.popleft().last
        return settled
