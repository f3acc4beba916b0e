"""Moments of a table's commits, which never go back, though the clock may be set back between two commits.

pyiceberg takes the clock as it is. Iceberg's libraries in Java, Rust and Go refuse a table whose log of snapshots or of
metadata goes back by more than a minute, and a REST catalog's server refuses such a commit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyiceberg.table.update import AddSnapshotUpdate, TableUpdate

if TYPE_CHECKING:
    from pyiceberg.table.metadata import TableMetadata


def ordered(table: TableMetadata, updates: tuple[TableUpdate, ...]) -> tuple[TableUpdate, ...]:
    """Return updates whose new snapshots have moments after everything that a table's metadata records."""
    # pyiceberg replaces the moment of a change by the clock's if it is that of the last one.
    least_ms = newest_moment_ms(table) + 1
    return tuple(
        update.model_copy(update={"snapshot": update.snapshot.model_copy(update={"timestamp_ms": least_ms})})
        if isinstance(update, AddSnapshotUpdate) and update.snapshot.timestamp_ms < least_ms
        else update
        for update in updates
    )


def newest_moment_ms(table: TableMetadata) -> int:
    """Return the latest moment that a table's metadata records, in milliseconds since 1970."""
    snapshots = [entry.timestamp_ms for entry in table.snapshot_log[-1:]]
    return max([table.last_updated_ms, *snapshots, *(entry.timestamp_ms for entry in table.metadata_log[-1:])])
