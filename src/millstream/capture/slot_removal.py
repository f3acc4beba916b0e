"""Removes a slot and its publications from a source that no stream captures with them any longer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from psycopg import sql

from millstream.capture.connection import connect, connect_replication, first_row, translated
from millstream.capture.leaves.sent_by_leaves import reads_leaves
from millstream.capture.publication import inserts_name
from millstream.capture.slot import drop_slot_of
from millstream.capture.source_tables import identify_replication
from millstream.errors import SourceError

if TYPE_CHECKING:
    from millstream.capture.noted_slots import NotedSlot
    from millstream.catalog import SourceRow


@dataclass(frozen=True, slots=True)
class Removal:
    """The outcome of a removal."""

    held_bytes: int | None
    """Bytes of WAL that the slot held; None if there was no such slot."""
    dropped: tuple[str, ...]
    """Names of the dropped publications."""
    kept: tuple[str, ...]
    """Names of the publications that are still there."""


def has_database(dsn: str, known: SourceRow) -> bool:
    """Return whether a DSN leads to the database of a stream's source, on whatever timeline.

    Raises:
        SourceError: the server can't be asked.
    """
    with connect_replication(dsn) as replication:
        found = identify_replication(replication)
    return (found.system_identifier, found.database) == (known.system_identifier, known.database)


def remove_slot(dsn: str, noted: NotedSlot, *, in_use: Collection[str]) -> Removal:
    """Drop a slot, then those of its publications that Millstream made.

    Args:
        dsn: leads to the slot's database.
        in_use: names of the publications of other streams, which stay.

    Raises:
        SourceError (`slot_active`): the slot is in use.
        SourceError: the source can't be reached, or refuses to drop the slot.
    """
    held = drop_slot_of(dsn, noted.slot)
    dropped, kept = [], []
    with connect(dsn, purpose="slot drop") as connection:
        for name in (noted.publication, inserts_name(noted.publication)):
            if first_row(connection, "SELECT FROM pg_publication WHERE pubname = %s", [name]) is None:
                continue
            try:
                if noted.publication in in_use or not reads_leaves(connection, [name]):
                    kept.append(name)
                    continue
                with translated():
                    connection.execute(sql.SQL("DROP PUBLICATION {}").format(sql.Identifier(name)))
                dropped.append(name)
            except SourceError:  # of another role, or on a standby
                kept.append(name)
    return Removal(held, tuple(dropped), tuple(kept))
