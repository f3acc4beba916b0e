"""Partitions that the source no longer has at a snapshot, and whose `x` the log doesn't have at the number compared.

Capture notices at a look that a partition was dropped or detached, so the partition's `x` comes later than what committed
right behind. Until then its rows are in the lake, and are none of the table's: `diff` leaves them out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import pyarrow.compute as pc

from millstream.capture.leaves.detached_leaves import KnownLeaves, live_leaves
from millstream.capture.source_tables import SourceTable
from millstream.catalog import Catalog
from millstream.model.ids import StreamId, TableId
from millstream.model.positions import Seq
from millstream.model.records import PARTITION_OID, Op
from millstream.wal.reader import StreamReader


class Departures:
    """The partitions of a stream's tables whose `x` comes behind a number, or may come.

    Raises:
        LogError: the log can't be read.
    """

    def __init__(self, catalog: Catalog, stream: StreamId, reader: StreamReader, after: Seq) -> None:
        # The log comes second: a leaf is known until its `x` is durable.
        self._known = KnownLeaves(catalog, stream)
        self._told = _told_after(reader, after)

    def left(self, id_: TableId, table: SourceTable) -> frozenset[int]:
        """Return the OIDs of partitions that a table lacks at the source, and whose rows the lake may have."""
        known = self._known.leaves(id_) if self._known.was_read_by_leaves(id_) else frozenset()
        return (known | self._told.get(id_, frozenset())) - live_leaves(table).keys()


def _told_after(reader: StreamReader, after: Seq) -> Mapping[TableId, frozenset[int]]:
    found = defaultdict[TableId, set[int]](set)
    for part in reader.read_between(after, reader.persisted_upto()):
        if part.schema.partitioned:
            is_left = pc.equal(part.batch.column("__op"), Op.PARTITION_LEFT.letter)
            found[part.schema.table_id].update(part.batch.column(PARTITION_OID.name).filter(is_left).to_pylist())
    return {id_: frozenset(oids) for id_, oids in found.items()}
