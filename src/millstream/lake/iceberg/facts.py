"""Facts that Millstream keeps with an Iceberg table, by the names of their properties, and snapshots by their number."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from pyiceberg.table.refs import MAIN_BRANCH

from millstream.lake.table_format import Partition

if TYPE_CHECKING:
    from pyiceberg.table import Table
    from pyiceberg.table.snapshots import Snapshot

STREAM: Final = "millstream.stream"
VIEW: Final = "millstream.view"
TABLE_ID: Final = "millstream.table-id"
N: Final = "millstream.n"
NUMBER: Final = "millstream.number."
BOUNDED: Final = "millstream.bounded"
_KNOWN_MAX: Final = 50_000
known_ids: OrderedDict[tuple[str, int], int] = OrderedDict()
"""Ids of snapshots by the table's folder and the snapshot's sequence number."""
PARTITION: Final = Partition("__commit_date_day", "%Y-%m-%d", None)


def remember(path: str, snapshot: Snapshot | None) -> None:
    """Keep the id of a snapshot of this process's, for the next cut."""
    if snapshot is not None:
        known_ids[path, version_of(snapshot)] = snapshot.snapshot_id
        while len(known_ids) > _KNOWN_MAX:
            known_ids.popitem(last=False)


def forget_snapshots(path: str) -> None:
    """Drop the ids of a table's snapshots, which have expired."""
    for known in [known for known in list(known_ids) if known[0] == path]:
        known_ids.pop(known, None)


def snapshot_of(table: Table, version: int | None) -> Snapshot | None:
    """Return the snapshot with a sequence number; None if the table has none."""
    return next((found for found in table.snapshots() if version_of(found) == version), None)


def by_id(table: Table, snapshot_id: int | None) -> Snapshot | None:
    """Return the snapshot with an id; None if the table has none."""
    return None if snapshot_id is None else table.snapshot_by_id(snapshot_id)


def version_of(snapshot: Snapshot | None) -> int:
    """Return a snapshot's sequence number; 0 of a table without snapshots."""
    return 0 if snapshot is None else int(snapshot.sequence_number or 0)


def id_of(snapshot: Snapshot | None) -> int | None:
    """Return a snapshot's id."""
    return None if snapshot is None else snapshot.snapshot_id


def kept_by_refs(table: Table) -> set[int]:
    """Return the ids of the snapshots that branches and tags keep, without the newest of the table itself."""
    return {ref.snapshot_id for name, ref in table.refs().items() if name != MAIN_BRANCH}


def is_position(name: str) -> bool:
    """Whether a property is one of those that say how far the table is."""
    return name in {N, TABLE_ID} or name.startswith(f"{N}.")


def table_id_of(app: str) -> str | None:
    """Return the table id of an app; None for the table of cuts, which has none."""
    last = app.rpartition("/")[2]
    return last if last.isdecimal() else None
