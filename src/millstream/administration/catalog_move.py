"""`catalog move`: copies the embedded catalog into the PostgreSQL database that the configuration names.

All of it or nothing, in one transaction there. Tables and sources keep their numbers, because the log's
records contain them: so these must be free in that database.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from millstream.catalog import Catalog
from millstream.catalog import sql_tables as t
from millstream.errors import UsageError
from millstream.home.catalog_rows import check_free, put_rows, rows_of
from millstream.home.home import Home
from millstream.processes.role_locks import Role, RoleLock, nobody_writes

_MOVES: Final = "moves"
"""The scope under which a home notes that its catalog has moved: a repeated move after that only renames the file."""
_ROLES: Final[tuple[Role, ...]] = ("run", "pipeline", "replay", "forget")

_NOT_FREE: Final = "The ids in this home's log can't be changed: name a database of its own in [catalog] url."


@dataclass(frozen=True, slots=True)
class CatalogMoveResult:
    """The result of a move."""

    streams: tuple[str, ...]
    place: str
    kept: Path
    """The old file, no longer read."""


def move_catalog(home: Home) -> CatalogMoveResult:
    """Move a home's embedded catalog to the configured database.

    Raises:
        UsageError: the configuration names no database, or there is no embedded catalog.
        HomeBusy: a process of the home runs.
        CatalogError: the database has a stream of that name, or table numbers that this home's log uses
            (or a subclass: it can't be opened). Nothing was changed.
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
                rows = dict(rows_of(old))
                # An embedded catalog belongs to one home, and doesn't record which.
                rows[t.access_tokens] = [row | {"home": identity.id} for row in rows[t.access_tokens]]
                with new.database.write() as connection:
                    check_free(connection, place, rows, hint=_NOT_FREE)
                    put_rows(connection, new, rows)
                    noted = new.database.insert(t.facts).values(scope=_MOVES, name=identity.id, value="true")
                    connection.execute(noted)
        home.catalog_file.rename(kept)
    return CatalogMoveResult(names, place, kept)
