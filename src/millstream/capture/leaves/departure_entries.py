"""Leaf partitions that left, as operations: one record `x`, behind everything that was seen by the look that found the leaf gone."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from millstream.capture.copying.copy_text import chunk_operation, single_row
from millstream.capture.copying.table_copies import Entry
from millstream.capture.leaves.detached_leaves import Departure
from millstream.capture.table_directory import TableDirectory
from millstream.catalog import Catalog
from millstream.model.ids import StreamId, TableId
from millstream.model.operations import SpilledOp, TableRows, WriteOps
from millstream.model.positions import Lsn
from millstream.model.records import PARTITION_OID, Op
from millstream.model.schema import TableKind


class DepartureEntries:
    """The departures that enter the log. On the applier's thread."""

    def __init__(self, catalog: Catalog, directory: TableDirectory, stream: StreamId) -> None:
        self._catalog, self._directory, self._stream = catalog, directory, stream
        self._known = directory.leaves.known
        self._passed = Lsn(0)

    @property
    def are_waiting(self) -> bool:
        """Whether a departure waits for the stream or a copy, or isn't durable."""
        return self._known.are_waiting

    @property
    def wait_for_stream(self) -> bool:
        """Whether a departure waits for the stream."""
        return self._known.wait_beyond(self._passed)

    def passed(self, lsn: Lsn) -> None:
        """Note that everything that committed at or below `lsn` has been submitted."""
        self._passed = lsn
        self._known.passed(lsn)

    def note(self, ops: WriteOps | SpilledOp) -> None:
        """Note the first records of leaves in operations that are about to be submitted."""
        if not (met := self._known.met):
            return
        if isinstance(ops, SpilledOp):
            found = dict.fromkeys(met, _transaction(ops.operation, 0))
        else:
            found = first_transactions(ops, met)
        for oid, (xid, committed) in found.items():
            if xid is not None:
                self._known.note_first(oid, xid, committed)
        met.clear()

    def ready(self, busy: Collection[TableId]) -> Iterator[Entry]:
        """Yield the operations that may enter now.

        If rows of the log don't name their leaf, another copy of the table is requested: the record can't say which are gone.
        The same if a leaf with changes in the log was found attached and empty. No copy of it follows an `x`, which may enter
        behind its new rows.

        Args:
            busy: tables of which a copy or a repair may have read rows that haven't entered.
        """
        for one in self._known.ready(busy):
            if one.is_empty:
                news = f"partition {one.name} had changes, and was found attached and empty"
                self._directory.request_copy_of(one.table_id, news)
                self._known.durable(one)
                continue
            if not one.is_back and not self._known.is_whole(one.table_id):
                self._directory.request_copy_of(one.table_id, f"partition {one.name} was detached or dropped")
            operation = self._operation(one)
            if operation is None:
                self._known.durable(one)
            else:
                yield operation, partial(self._known.durable, one)

    def _operation(self, one: Departure) -> WriteOps | None:
        """Return the operation of a departure; None if the log has no row of the table that names a leaf."""
        schema = self._catalog.latest_schemas(self._stream).get(one.table_id)
        if schema is None or schema.kind is not TableKind.TABLE or not schema.partitioned:
            return None
        name = f"left/{int(one.table_id)}/{one.oid}/{int(one.at)}"
        operation = chunk_operation(self._directory.source, name, self._passed, one.at_us)
        shard = self._directory.shard_of(one.table_id)
        before = [("partition", one.name)]
        row = single_row(schema, Op.PARTITION_LEFT, __before=before, **{PARTITION_OID.name: one.oid})
        return WriteOps(operation, (TableRows(schema, row, shard),))


def first_transactions(ops: WriteOps, leaves: Collection[int]) -> dict[int, tuple[int | None, Lsn]]:
    """Return the transactions of the first records of some leaf partitions, by OID; those without a record are missing."""
    found: dict[int, tuple[int | None, Lsn]] = {}
    for table in ops.tables:
        if table.schema.kind is TableKind.TABLE and table.schema.partitioned:
            oids = table.rows.column(PARTITION_OID.name)
            for oid in leaves:
                if oid not in found and (at := pc.index(oids, pa.scalar(oid, oids.type)).as_py()) >= 0:
                    operation = table.rows.column(0)[at].as_py()
                    found[oid] = _transaction(ops.operations, operation)
    return found


def _transaction(operations: pa.RecordBatch, number: int) -> tuple[int | None, Lsn]:
    """Return the id of an operation's transaction and the LSN of its commit."""
    xid, committed = (operations.column(name)[number].as_py() for name in ("xid", "commit_lsn"))
    return xid, Lsn(committed or 0)
