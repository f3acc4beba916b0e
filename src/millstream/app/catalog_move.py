"""`catalog move`: what the embedded catalog holds, put into the PostgreSQL database that the configuration names.

All of it or nothing, in one transaction there. Tables and sources keep their numbers, which stand in the log's records: so
they must be free in that database.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, Table, select

from millstream.app.home import Home
from millstream.app.locks import Role, RoleLock, nobody_writes
from millstream.catalog import Catalog
from millstream.catalog import tables as t
from millstream.errors import CatalogError, UsageError
from millstream.model.ids import StreamId

_MOVES: Final = "moves"
"""The scope under which a home notes that its catalog has come: a move that was cut short behind that only renames the file."""
_ROLES: Final[tuple[Role, ...]] = ("run", "pipeline", "replay")

_Rows = Mapping[Table, Sequence[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Moved:
    """What was moved."""

    streams: tuple[str, ...]
    place: str
    kept: Path
    """The old file, which nothing reads any more."""


def move_catalog(home: Home) -> Moved:
    """Move a home's embedded catalog to where its configuration has it.

    Raises:
        UsageError: the configuration names no database, or there is no embedded catalog.
        HomeBusy: something of the home runs.
        CatalogError: the database has a stream of that name, or numbers of tables that this home's log uses (or a kin of it: it
            can't be opened). Nothing was changed.
    """
    address = home.catalog_address()
    if address is None:
        raise UsageError(
            f"{home.config_file} names no database to move to", hint="Put the database into [catalog] url first."
        )
    if not home.catalog_file.exists():
        raise UsageError(
            f"there is no {home.catalog_file} to move",
            hint="This home's catalog is in PostgreSQL already, or it has never run.",
        )
    home.prepare()
    kept = home.catalog_file.with_name(f"{home.catalog_file.name}.moved")
    identity = home.identity()
    with contextlib.ExitStack() as locks:
        for role in _ROLES:
            locks.enter_context(RoleLock.take(home.run_folder, role))
        locks.enter_context(nobody_writes(home.run_folder))
        with Catalog(home.catalog_file) as old, Catalog(address, home=identity) as new:
            names, place = tuple(stream.name for stream in old.streams()), new.database.place
            if new.fact(_MOVES, identity.id) is None:
                with old.database.read() as connection:
                    rows = {
                        table: [dict(row) for row in connection.execute(select(table)).mappings()]
                        for table in t.metadata.sorted_tables
                    }
                # An embedded catalog is one home's alone, and doesn't say whose.
                rows[t.access_tokens] = [row | {"home": identity.id} for row in rows[t.access_tokens]]
                with new.database.write() as connection:
                    _check_free(connection, place, rows)
                    _insert(connection, new, rows)
                    noted = new.database.insert(t.facts).values(scope=_MOVES, name=identity.id, value="true")
                    connection.execute(noted)
        home.catalog_file.rename(kept)
    return Moved(names, place, kept)


def _insert(connection: Connection, catalog: Catalog, rows: _Rows) -> None:
    for table, found in rows.items():
        if found:
            connection.execute(catalog.database.insert(table), found)
    for table in (t.sources, t.tables):
        catalog.database.number_above(connection, table)
    for row in rows[t.streams]:
        catalog.claim(connection, row["name"], StreamId(UUID(row["id"])))


def _check_free(connection: Connection, place: str, rows: _Rows) -> None:
    """`CatalogError` where the database has something that the rows would clash with."""
    for column, what in (
        (t.streams.c.name, "a stream of the name"),
        (t.streams.c.id, "the stream"),
        (t.sources.c.id, "a source of the number"),
        (t.tables.c.id, "a table of the number"),
    ):
        ours = [row[column.name] for row in rows[column.table]]
        taken = connection.execute(select(column).where(column.in_(ours)).order_by(column).limit(1)).scalar()
        if taken is not None:
            raise CatalogError(
                f"the {place} has {what} {taken} already, of another home",
                hint="What this home's log refers to can't be renumbered: name a database of its own in [catalog] url.",
            )
