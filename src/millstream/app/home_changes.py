"""A cheap look at a home: whether anything has changed that its status would show."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from millstream.errors import MillstreamError
from millstream.processes.role_locks import Role, holder, server_roles, writer_roles
from millstream.wal.layout import MARK_NAME

if TYPE_CHECKING:
    from millstream.home.home import Home


def look(home: Home) -> Hashable | None:
    """Return a value that differs from the last look's if records, the catalog, processes or the configuration changed.

    It misses figures that processes have in memory alone, such as the end of a source's WAL, and whatever time changes. None if
    the catalog can't be looked at cheaply: it is in PostgreSQL.
    """
    try:
        catalog = home.catalog_place()
    except MillstreamError:
        return None
    if not isinstance(catalog, Path):
        return None
    # SQLite writes a commit to the file with `-wal`.
    files = [home.config_file, catalog, Path(f"{catalog}-wal"), home.alerts_file]
    roles = (*get_args(Role), *writer_roles(home.run_folder), *server_roles(home.run_folder))
    return (
        tuple(_stamp(file) for file in files),
        tuple(holder(home.run_folder, role).get("pid") for role in roles),
        tuple(_marks(home.data / "wal")),
        tuple(_stamps(home.data / "delivery")),
        tuple(_stamps(home.data / "replication")),
    )


def _stamp(file: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        facts = file.stat()
        return facts.st_mtime_ns, facts.st_size
    return None


def _marks(logs: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the durable mark of each shard of each log; their files' times alone don't tell two quick commits apart."""
    for log in _listed(logs):
        for shard in _listed(log):
            with suppress(OSError), Path(shard, MARK_NAME).open("rb") as file:
                yield shard, file.read()


def _stamps(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Yield the files in a folder and in its folders, with their times and sizes."""
    for inner in (str(folder), *_listed(folder)):
        with suppress(OSError), os.scandir(inner) as entries:
            for entry in entries:
                facts = entry.stat()
                yield entry.path, facts.st_mtime_ns, facts.st_size


def _listed(folder: Path | str) -> list[str]:
    """Return the folders in a folder; none if it is missing."""
    with suppress(OSError), os.scandir(folder) as entries:
        return sorted(entry.path for entry in entries if entry.is_dir())
    return []
