"""State that a process keeps if it takes a home's status repeatedly."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from millstream.app.lag import trim
from millstream.errors import MillstreamError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from millstream.catalog import Catalog
    from millstream.catalog.snapshot import NamesByFingerprint
    from millstream.home.home import Home
    from millstream.wal.backlog import Backlogs
    from millstream.wal.reader import StreamReader


class StatusCache:
    """Parts of a status that take long to read and seldom change, and the open catalog. For one thread at a time.

    Args:
        patience_s: how long a status waits for a catalog whose server has gone away; None: as long as any other call.
    """

    def __init__(self, *, patience_s: float | None = None) -> None:
        self._patience_s = patience_s
        self.backlogs: Final[dict[str, Backlogs]] = {}
        """Counts of the logs by their folders: the open segment isn't read from its beginning each time."""
        self.readers: Final[dict[str, StreamReader]] = {}
        """Readers of the logs of streams that the catalog lacks."""
        self.table_names: Final[NamesByFingerprint] = {}
        """Names in the catalog's schemas, which take long to decode."""
        self._catalog: tuple[Path | str, Catalog] | None = None

    @contextlib.contextmanager
    def catalog(self, home: Home) -> Iterator[Catalog]:
        """Yield the home's catalog. It stays open, with its compiled statements, until an error or `close`.

        Raises:
            ConfigError, CatalogError: as `Home.open_catalog`; or as the block.
        """
        try:
            place = home.catalog_place()
            if self._catalog is not None and self._catalog[0] != place:
                self.close()
            if self._catalog is None:
                self._catalog = place, home.open_catalog(busy_timeout_s=self._patience_s)
            yield self._catalog[1]
            trim(self.backlogs)
        except MillstreamError:
            self.close()
            raise

    def close(self) -> None:
        """Close the catalog; the next use opens it again."""
        if self._catalog is not None:
            self._catalog[1].close()
            self._catalog = None
