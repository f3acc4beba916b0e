"""The tables whose copies are complete in the log, and from which position on.

Before it a table's rows are incomplete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from millstream.catalog import Catalog, TableState
from millstream.model.ids import StreamId, TableId
from millstream.model.positions import Seq

COPYING: Final = frozenset({TableState.COPY_REQUESTED, TableState.COPYING})


class CompleteCopies:
    """State of the tables' copies. Any thread."""

    def __init__(self, catalog: Catalog, stream: StreamId) -> None:
        self._catalog = catalog
        self._stream = stream
        self._whole_at: dict[TableId, Seq] = {}
        self.live: frozenset[TableId] = frozenset()
        """Tables that the source still has, as last observed."""
        self.history_only: frozenset[TableId] = frozenset()
        """… and those of them whose rows weren't copied."""

    def observe(self, position: Callable[[], Seq]) -> Seq:
        """Record which copies are complete in the log by now.

        Args:
            position: returns the log's position; called *after* the tables' states are read, with the calling
                thread's own reader.

        Returns:
            The position.
        """
        states = self._catalog.states(self._stream)
        upto = position()
        self.live = frozenset(states)
        self.history_only = frozenset(table for table, state in states.items() if state is TableState.HISTORY_ONLY)
        for table, state in states.items():
            if state in COPYING:
                self._whole_at.pop(table, None)
            else:
                self._whole_at.setdefault(table, upto)
        return upto

    def unfinished(self, at: Seq) -> frozenset[TableId]:
        """Return the tables whose copy isn't known to be complete in the log up to `at`."""
        return frozenset(t for t in self.live if t not in self._whole_at or self._whole_at[t] > at)
