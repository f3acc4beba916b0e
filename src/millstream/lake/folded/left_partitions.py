"""Partitions that leave a table: which rows an `x` ends, in a run of records and among earlier rows.

An `x` names a leaf partition by its OID. It ends every row whose newest record before it names the same OID. Rows
whose partition isn't known stay: capture copies a table again if it may have such rows when a partition leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.model.records import PARTITION_OID, Op

Indexes = npt.NDArray[np.int64]

NEVER: Final = int(np.iinfo(np.int64).max)
"""In place of a record: the partition didn't leave."""
UNKNOWN: Final = 0
"""In place of an OID: the partition isn't known. No relation has it."""


def partitions_of(rows: pa.Table) -> Indexes:
    """Return the OID of each row's leaf partition; `UNKNOWN` for rows that have none."""
    index = rows.schema.get_field_index(PARTITION_OID.name)
    if index < 0:
        return np.full(rows.num_rows, UNKNOWN, np.int64)
    oids = pc.fill_null(rows.column(index).cast(pa.int64()), UNKNOWN)  # text, in a lake in a database
    return np.asarray(oids.to_numpy(), np.int64)


@dataclass(frozen=True, slots=True)
class LeftPartitions:
    """The partitions that leave in a run of records, with the places of their records `x`."""

    oids: Indexes
    places: Indexes
    """Ascending for each OID. A record is ended by an `x` at a greater place."""

    @classmethod
    def of(cls, tail: pa.Table, ops: npt.NDArray[np.uint8], places: Indexes) -> Self:
        """Return those of some records."""
        at = np.flatnonzero(ops == Op.PARTITION_LEFT)
        oids, places = partitions_of(tail.take(pa.array(at))), places[at]
        order = np.lexsort((places, oids))
        order = order[oids[order] != UNKNOWN]
        return cls(oids[order], places[order])

    @classmethod
    def none(cls) -> Self:
        """Return no partitions."""
        return cls(np.zeros(0, np.int64), np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.oids)

    @property
    def distinct(self) -> tuple[int, ...]:
        """The OIDs of the partitions, ascending."""
        return tuple(np.unique(self.oids).tolist())

    @property
    def first(self) -> tuple[tuple[int, int], ...]:
        """Each partition's OID and the place of its first `x`."""
        oids, at = np.unique(self.oids, return_index=True)
        return tuple(zip(oids.tolist(), self.places[at].tolist(), strict=True))

    def next_after(self, oids: Indexes, places: Indexes) -> Indexes:
        """Return, for each row, the first place above its own at which its partition leaves; `NEVER` if none is.

        Args:
            places: the places of the records that wrote the rows, -2 or above.
        """
        found = np.full(len(oids), NEVER, np.int64)
        known = np.unique(self.oids)
        if not len(known) or not len(oids):
            return found
        rank = np.minimum(np.searchsorted(known, oids), len(known) - 1)
        mine = np.flatnonzero(known[rank] == oids)
        room = max(int(self.places.max()), int(places.max())) + 4
        own = np.searchsorted(known, self.oids) * room + self.places + 2
        at = np.searchsorted(own, rank[mine] * room + places[mine] + 2, "right")
        inside = np.minimum(at, len(own) - 1)
        leaves = (at < len(own)) & (self.oids[inside] == oids[mine])
        found[mine[leaves]] = self.places[inside[leaves]]
        return found


def without_left(rows: pa.Table, left: tuple[int, ...]) -> pa.Table:
    """Return the rows that aren't in one of some partitions."""
    if not left:
        return rows
    return rows.filter(pa.array(~np.isin(partitions_of(rows), left)))
