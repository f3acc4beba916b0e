"""The leader's catalog as a document that is shipped with its logs, and the part that a promoted node adopts.

It is the embedded catalog's file, copied by SQLite (also during writes), without access tokens: those are
a node's own. A catalog in PostgreSQL isn't sent: all nodes name the same database.
"""

from __future__ import annotations

import sqlite3
import tempfile
import time
import zlib
from collections.abc import Collection
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

from millstream.catalog import Catalog
from millstream.errors import CatalogError, ShipmentUnreadable
from millstream.home.catalog_rows import replace_rows, rows_of
from millstream.model.ids import StreamId
from millstream.model.replication import Document

if TYPE_CHECKING:
    from millstream.home.home import Home

CATALOG: Final = "catalog"
_AT_MOST_EVERY_S: Final = 1.0
_BYTES_MAX: Final = 1 << 30
"""Largest unpacked size in bytes: a larger file is no catalog."""


class CatalogDocument:
    """A home's embedded catalog, copied when it has changed. Not for sharing between threads."""

    def __init__(self, home: Home) -> None:
        self._file = home.catalog_file
        self._connection: sqlite3.Connection | None = None
        self._seen: int | None = None
        self._looked_s = 0.0
        self._newest: Document | None = None

    def newest(self) -> Document | None:
        """Return the catalog as of now or a second ago; None if there is no embedded catalog.

        Raises:
            CatalogError: it can't be read.
        """
        if time.monotonic() - self._looked_s < _AT_MOST_EVERY_S and self._looked_s:
            return self._newest
        self._looked_s = time.monotonic()
        try:
            if self._connection is None:
                if not self._file.exists():
                    return None
                self._connection = sqlite3.connect(f"{self._file.as_uri()}?mode=ro", uri=True, check_same_thread=False)
            (version,) = self._connection.execute("PRAGMA data_version").fetchone()
            if version != self._seen:
                data = _copied(self._connection)
                if self._newest is None or self._newest.data != data:
                    self._newest = Document(CATALOG, later_version(self._newest), data)
                self._seen = version
        except sqlite3.Error as error:
            raise CatalogError(f"{self._file} can't be copied: {error}") from error
        return self._newest

    def close(self) -> None:
        """Close the file."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def adopt_catalog(home: Home, data: bytes, streams: Collection[StreamId]) -> None:
    """Replace this home's catalog entries of some streams with the leader's.

    Raises:
        ShipmentUnreadable: the data is no catalog.
        CatalogError: this home's catalog has numbers that clash; or it can't be written.
    """
    with tempfile.TemporaryDirectory(dir=home.data, prefix=".adopted-") as folder:
        copy = Path(folder) / "catalog.db"
        copy.write_bytes(_unpacked(data))
        with Catalog(copy) as theirs:
            rows = rows_of(theirs, streams)
        with home.open_catalog() as own:
            replace_rows(
                own,
                rows,
                place=own.database.place,
                hint="This home has other streams whose numbers are taken: follow in a home of its own.",
            )


def _copied(connection: sqlite3.Connection) -> bytes:
    with closing(sqlite3.connect(":memory:")) as copy:
        connection.backup(copy)
        copy.execute("DELETE FROM access_tokens")
        copy.commit()
        copy.execute("VACUUM")
        return zlib.compress(copy.serialize(), level=1)


def _unpacked(data: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    try:
        found = unpacking.decompress(data, _BYTES_MAX)
    except zlib.error as error:
        raise ShipmentUnreadable(f"the leader's catalog can't be unpacked: {error}") from error
    if not unpacking.eof or not found.startswith(b"SQLite format 3\0"):
        raise ShipmentUnreadable("what came as the leader's catalog is none")
    return found


def later_version(before: Document | None) -> int:
    """Return a document's version above every earlier one in this process and, as far as clocks agree, in others."""
    return max(time.time_ns() // 1000, 0 if before is None else before.version + 1)
