"""Which of a home's logs are gone although the catalog has given numbers to their records."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from millstream.errors import CorruptWal, LogError, MillstreamError
from millstream.model.positions import Seq
from millstream.protocol.replication.node_promises import Role, RoleFact
from millstream.wal.files import RealFiles
from millstream.wal.missing_log import find_missing, find_missing_shards

if TYPE_CHECKING:
    from millstream.catalog import Catalog
    from millstream.home.home import Home


def find_missing_log(home: Home, stream: str, catalog: Catalog | None = None) -> CorruptWal | None:
    """Return the error if a stream's whole log was moved or removed; None if there is no sign of that.

    A missing log is no error on a node that follows, since it comes from the leader; nor without a readable catalog.

    Args:
        catalog: the home's, if it is open.
    """
    try:
        found = find_missing(RealFiles(), str(home.wal_folder(stream)), lambda: _given(home, stream, catalog))
    except (LogError, OSError):
        return None  # a reader of the log reports it
    return found if found is None or _leads(home, stream) else None


def check_log(home: Home, stream: str, catalog: Catalog | None = None) -> None:
    """Raise `CorruptWal` (`log_missing`) as `find_missing_log` returns it."""
    found = find_missing_log(home, stream, catalog)
    if found is not None:
        raise found


def find_missing_part(home: Home, stream: str, catalog: Catalog | None = None) -> CorruptWal | None:
    """Return as `find_missing_log`, or the error if some of the log's shards were moved or removed."""
    found = find_missing_log(home, stream, catalog)
    with contextlib.suppress(LogError, OSError):
        found = found or find_missing_shards(RealFiles(), str(home.wal_folder(stream)))
    return found


def _given(home: Home, stream: str, opened: Catalog | None) -> Seq:
    """Return the greatest number that the catalog has given to this home's writers of a stream; 0 if that is unknown."""
    with contextlib.suppress(ImportError, MillstreamError):
        if opened is not None:
            return _given_by(opened, home, stream)
        from millstream.catalog import examine_catalog

        # Reading must neither create a catalog nor upgrade it.
        found = examine_catalog(home.catalog_place())
        if found.revision is None or found.revision != found.known:
            return Seq(0)
        with home.open_catalog() as catalog:
            return _given_by(catalog, home, stream)
    return Seq(0)


def _given_by(catalog: Catalog, home: Home, stream: str) -> Seq:
    known = catalog.stream(stream).id
    ledger, _ = catalog.shared_ledger(known) or (None, 0)
    shared = [] if ledger is None else [entry for entry in ledger.writers if entry.location]
    if not shared:
        return catalog.reserved(known)
    here = home.identity().id
    return max((entry.given_to for entry in shared if entry.location == here), default=Seq(0))


def _leads(home: Home, stream: str) -> bool:
    """Return whether this node writes the log; `leadership.node_roles` has the role's rules."""
    try:
        return RoleFact.from_json(home.role_file(stream).read_bytes()).role is Role.LEADS
    except FileNotFoundError:
        return True
    except (MillstreamError, OSError):
        return False
