"""Rows of partitions that were attached: they are copied apart from the table's others, which the log has already.

The copy is one that was begun, as a restart finds it: the catalog has a key range for each such partition, and the
table's state names the copy. No record voids what the log had of the table. A row that changes during the copy is dealt
with as in any copy. While another copy of the table runs, the partitions wait for its end (`KnownLayouts.attached`).
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from millstream.capture.copying.copy_progress import fresh_copy_id
from millstream.capture.copying.key_ranges import Range
from millstream.capture.source_tables import PartitionFacts, SourceTable
from millstream.catalog import Catalog, TableRow, TableState
from millstream.model.human_text import human_bytes

logger = structlog.get_logger("millstream.capture")


def can_copy_apart(table: SourceTable, attached: Sequence[PartitionFacts]) -> bool:
    """Return whether a table's rows can be told apart by a key of the log, and these partitions be read by their names."""
    return bool(table.key) and not table.key_is_hashed and all(p.readable for p in attached)


def begin_copy_of(catalog: Catalog, row: TableRow, table: SourceTable, attached: Sequence[PartitionFacts]) -> bool:
    """Begin the copy of some partitions of a copied table; return False if its state is another one by now."""
    copy_id = fresh_copy_id()
    ranges = [Range(number, partition=partition.oid) for number, partition in enumerate(attached)]
    catalog.drop_chunks(row.id)
    catalog.put_chunks([one.saved(row.id, copy_id) for one in ranges])
    more = f" (and {len(attached) - 1} more)" if len(attached) > 1 else ""
    size = human_bytes(sum(partition.size_bytes for partition in attached))
    reason = f"partition {attached[0].name}{more} was attached: its rows ({size}) are copied"
    if not catalog.set_state(row.id, TableState.COPYING, reason, copy_id=copy_id, only_from=[TableState.STREAMING]):
        return False
    logger.info("rows of attached partitions are copied", table=table.full_name, reason=reason)
    return True
