"""Which tables' copies are whole in the log, and by which position: until then a table's rows aren't all there to be shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from millstream.catalog import Catalog, TableState
from millstream.model.ids import StreamId, TableId
from millstream.model.positions import Seq

COPYING: Final = frozenset({TableState.COPY_REQUESTED, TableState.COPYING})


class Copies:
    """See the module. Any thread."""

    def __init__(self, catalog: Catalog, stream: StreamId) -> None:
        self._catalog = catalog
        self._stream = stream
        self._whole_at: dict[TableId, Seq] = {}
        self.live: frozenset[TableId] = frozenset()
        """Tables that the source still has, at the last look."""
        self.history_only: frozenset[TableId] = frozenset()
        """… and those of them whose rows weren't copied."""

    def observe(self, position: Callable[[], Seq]) -> Seq:
        """Note which copies are whole in the log by now.

        Args:
            position: how far the log is; asked *after* the tables' states are read, with a reader of the calling thread's own.

        Returns:
            The position.
        """
        rows = self._catalog.tables(self._stream)
        upto = position()
        self.live = frozenset(row.id for row in rows)
        self.history_only = frozenset(row.id for row in rows if row.state is TableState.HISTORY_ONLY)
        for row in rows:
            if row.state in COPYING:
                self._whole_at.pop(row.id, None)
            else:
                self._whole_at.setdefault(row.id, upto)
        return upto

    def unfinished(self, at: Seq) -> frozenset[TableId]:
        """Tables whose copy isn't known to be whole in what the log has up to `at`."""
        return frozenset(t for t in self.live if t not in self._whole_at or self._whole_at[t] > at)
