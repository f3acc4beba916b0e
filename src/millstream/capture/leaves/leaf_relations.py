"""Relations of the stream that are leaf partitions: the captured table of each, and its columns in that table's order.

A leaf that a look or an earlier record has shown is known. The source is asked once about any other relation. A relation
that is no partition by now, and that no publication names, was one when its change was made. It is taken for a leaf of
the one captured table with such columns in such an order, and its `x` follows with the next look. If there are several
tables with such columns, or their order is another one, its changes are left out, and those tables are copied again.

Columns of a leaf may have another order than those of its table. Renames keep each column's position in both, so that
positions decide as long as no column came or went. A leaf of another order whose columns came or went since its change
is refused: the table is quarantined. If a leaf of another order is gone, the source no longer shows the table's column at
each position. Its names don't tell either: two columns of the table may have swapped theirs since.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import structlog

from millstream.capture.config import CaptureConfig
from millstream.capture.connection import Connection, connect
from millstream.capture.leaves.detached_leaves import KnownLeaves, LeafColumns
from millstream.capture.publication import inserts_name
from millstream.capture.source_tables import PartitionPlace, SourceTable, insert_lsn, partition_place, read_table
from millstream.catalog import TableRow
from millstream.codec.pgoutput import Relation
from millstream.codec.pgoutput.relations import undecodable
from millstream.model.positions import Lsn
from millstream.model.schema import ReplicaIdentity

_LOOK_WITHIN_S: Final = 5.0
"""How long changes of an attached partition wait for a look; it takes milliseconds."""

logger = structlog.get_logger("millstream.capture")


class LeafRelations:
    """The leaf partitions among one session's relations. Any thread.

    Args:
        captured: returns the captured tables and the facts of the last look, by OID.
        copy_again: requests another copy of a table.
        have_look: has the source's tables looked at soon.
    """

    def __init__(
        self,
        known: KnownLeaves,
        config: CaptureConfig,
        captured: Callable[[], tuple[dict[int, TableRow], dict[int, SourceTable]]],
        copy_again: Callable[[TableRow, SourceTable, str], None],
        have_look: Callable[[], None],
    ) -> None:
        self.known: Final = known
        self._config = config
        self._captured = captured
        self._copy_again = copy_again
        self._have_look = have_look
        self._lock = threading.Lock()
        self._left_out: dict[int, bytes] = {}
        """Relations of which nothing is captured as leaves: of several tables, or of none that fits, or in another order."""
        self._own: dict[int, bytes] = {}
        """Relations that are no leaves."""
        self.takes_leaves = False
        """Whether the stream's publications are ours: then every relation that they don't name is a leaf."""

    @property
    def captured(self) -> frozenset[int]:
        """OIDs of the captured tables."""
        return frozenset(self._captured()[0])

    def root_of(self, relation: Relation) -> TableRow | None:
        """Return the captured table that a relation is a leaf partition of; None if it is none, or if `is_left_out`.

        Raises:
            MillstreamError: the source couldn't be asked.
        """
        rows, facts = self._captured()
        if relation.oid in facts:
            return None
        if relation.oid not in self.known.first_xids:
            self.known.met.add(relation.oid)
        if (id_ := self.known.table_of(relation.oid)) is not None:
            return next((row for row in rows.values() if row.id == id_), None)
        if not self.takes_leaves or relation.oid in rows or self._own.get(relation.oid) == relation.encoded:
            return None
        if self._left_out.get(relation.oid) == relation.encoded:
            return None
        with self._lock:
            return self._found(relation, rows, facts)

    def is_left_out(self, oid: int) -> bool:
        """Return whether nothing of a relation is captured because its table or columns aren't certain.

        If it was detached, that ends once the relation is a captured table of its own.
        """
        return oid in self._left_out and self.known.table_of(oid) is None and oid not in self._captured()[1]

    def _found(
        self, relation: Relation, rows: Mapping[int, TableRow], facts: Mapping[int, SourceTable]
    ) -> TableRow | None:
        place = self._place(relation.oid)
        self._left_out.pop(relation.oid, None)
        for oid, columns in reversed(place.above[1:]):
            if oid in rows and oid in facts:
                own = place.above[0][1]
                order = None if own == columns else LeafColumns(own, columns)
                self.known.note_record(rows[oid].id, relation.oid, relation.qualified_name, order, is_there=True)
                if place.was_attached:
                    # It may have brought rows, and changes of these leave values out: first their copy begins.
                    self._have_look()
                    self.known.wait_for_look(_LOOK_WITHIN_S)
                return rows[oid]
        if place.is_published:
            self._own[relation.oid] = relation.encoded
            return None
        fitting = [t for t in facts.values() if t.partitioned and t.oid in rows and may_be_leaf_of(relation, t)]
        ordered = [table for table in fitting if _has_order_of(relation, table)]
        if len(fitting) == len(ordered) == 1:
            id_ = rows[fitting[0].oid].id
            self.known.note_record(id_, relation.oid, relation.qualified_name, None, is_there=False)
            return rows[fitting[0].oid]
        self._left_out[relation.oid] = relation.encoded
        logger.warning(
            "changes of a partition that is gone are left out: its table or columns aren't certain",
            partition=relation.qualified_name,
            tables=[table.full_name for table in fitting],
        )
        why = "its columns had another order" if len(fitting) == 1 else "may have been another table's"
        for table in fitting:
            news = f"partition {relation.qualified_name} came and went, and {why}"
            self._copy_again(rows[table.oid], table, news)
        return None

    def _place(self, oid: int) -> PartitionPlace:
        names = self._config.publication, inserts_name(self._config.publication)
        with connect(self._config.dsn, purpose="partitions") as connection:
            return partition_place(connection, oid, names)

    def as_root(
        self, relation: Relation, row: TableRow, table: SourceTable | None
    ) -> tuple[Relation, tuple[int, ...] | None]:
        """Return a leaf's relation as the table's: its name, order of columns and identity.

        Also returns the place in the leaf of each of its columns; None if both have the same order.

        Args:
            table: the table's facts; None if it is gone by now.

        Raises:
            TableUndecodable: the order can't be told, or the leaf's identity doesn't identify the table's rows.
        """
        named = replace(relation, oid=row.relation_oid, namespace=row.namespace, name=row.name)
        order = self._order(relation, named)
        columns = relation.columns if order is None else tuple(relation.columns[place] for place in order)
        named = replace(named, columns=columns)
        if table is None:
            return named, order
        if not _identifies(relation, table):
            self._check_identity(relation, named)
            return named, order  # the identity that both had then
        identity = {column.name for column in table.relation.columns if column.in_identity}
        columns = tuple(replace(column, in_identity=column.name in identity) for column in columns)
        return replace(named, replica_identity=table.replica_identity, columns=columns), order

    def _order(self, relation: Relation, named: Relation) -> tuple[int, ...] | None:
        found = self.known.orders(relation.oid)
        if not found:
            return None
        names = [column.name for column in relation.columns]
        order = _places(names, found)
        if order is None:  # a column came, went or got another name since the last look
            above = self._place(relation.oid).above
            order = _places(names, [LeafColumns(above[0][1], columns) for oid, columns in above if oid == named.oid])
        if order is None:
            order = _places(names, [grown for one in found if (grown := _grown(one, names)) is not None])
        if order is None:
            raise undecodable(
                named,
                f"its partition {relation.qualified_name} has its columns in another order, and they were changed",
            )
        return order

    def _check_identity(self, relation: Relation, named: Relation) -> None:
        """Refuse a leaf whose identity isn't its table's today either; one that had another then is right."""
        with connect(self._config.dsn, purpose="partitions") as connection:
            leaf, root = read_table(connection, relation.oid), read_table(connection, named.oid)
        if leaf is not None and root is not None and root.usable and not _identifies(leaf.relation, root):
            raise undecodable(
                named, f"its partition {relation.qualified_name} has another replica identity than the table"
            )


def may_be_leaf_of(relation: Relation, table: SourceTable) -> bool:
    """Return whether a relation's columns are those of a table, with those that it excludes or without."""
    types = {column.name: column.type_oid for column in table.layout}
    names = {column.name for column in relation.columns}
    if not {column.name for column in table.relation.columns} <= names <= types.keys():
        return False
    return all(c.name in table.rules or c.type_oid == types[c.name] for c in relation.columns)


def _has_order_of(relation: Relation, table: SourceTable) -> bool:
    """Return whether a relation that may be a leaf of a table has its columns in the table's order, by their names."""
    names = [column.name for column in relation.columns]
    return names == [column.name for column in table.layout if column.name in names]


def _identifies(relation: Relation, table: SourceTable) -> bool:
    """Return whether a leaf's old rows or keys identify rows of its table."""
    if not table.usable or relation.replica_identity is ReplicaIdentity.FULL:
        return True
    is_full = table.replica_identity is ReplicaIdentity.FULL
    if is_full and not table.key:
        return False
    key = table.key if is_full else [column for column in table.relation.columns if column.in_identity]
    return {column.name for column in key} <= {column.name for column in relation.columns if column.in_identity}


def _grown(known: LeafColumns, names: Sequence[str]) -> LeafColumns | None:
    """Return a leaf's columns as a look found them, with those that were added to it and its table since; None if it isn't so."""
    new = tuple(name for name in names if name not in known.own)
    grown = LeafColumns(known.own + new, known.table + new)
    return grown if [name for name in grown.own if name in names] == [*names] else None


def _places(names: Sequence[str], known: Sequence[LeafColumns]) -> tuple[int, ...] | None:
    """Return the place among a leaf's columns of each of its table's, in the table's order; None if it isn't certain."""
    sent = set(names)
    pairs = [([n for n in one.own if n in sent], [n for n in one.table if n in sent]) for one in known]
    found = [(own, table) for own, table in pairs if sorted(own) == sorted(table) == sorted(names)]
    # If columns swapped their names since, those of `names` stand in another order than in `own`: then positions are right.
    found.sort(key=lambda one: one[0] != [*names])
    return tuple(found[0][0].index(name) for name in found[0][1]) if found else None


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
