"""Tables that wait to be captured, because the stream may still have changes of them from their time as leaf partitions."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.capture.leaves.leaf_relations import LeafRelations, may_be_leaf_of
from millstream.capture.source import Connection, SourceTable, insert_lsn
from millstream.model.positions import Lsn


class HeldTables:
    """The tables of one session that look like former leaf partitions."""

    def __init__(self, leaves: LeafRelations) -> None:
        self._leaves = leaves
        self._first_seen: dict[int, Lsn] = {}
        """LSNs above the changes that new tables may have had as leaf partitions, which no look has shown as such."""

    def without(self, connection: Connection, published: Sequence[SourceTable], passed: Lsn) -> list[SourceTable]:
        """Return the source's tables, except new ones whose earlier changes may be another table's.

        A leaf partition that left waits for its `x`, or until its table is given up if that is gone as well. A table that
        could be a leaf of a captured one waits until the stream has come to the look that found it.

        Args:
            connection: an ordinary connection.
            passed: how far the stream is in the log.
        """
        held, captured = self._leaves.known.held, self._leaves.captured
        roots = [table for table in published if table.partitioned and table.oid in captured]

        def is_held(table: SourceTable) -> bool:
            if table.oid in captured:
                return False
            if table.oid in held or any(partition.oid in held for partition in table.partitions):
                return True
            if not self._leaves.takes_leaves or not any(may_be_leaf_of(table.relation, root) for root in roots):
                return False
            if table.oid not in self._first_seen:
                self._first_seen[table.oid] = insert_lsn(connection)
            return passed < self._first_seen[table.oid]

        return [table for table in published if not is_held(table)]
