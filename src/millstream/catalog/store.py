"""The catalog's calls. Each is one short transaction, durable when it returns, safe from any thread and process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from millstream.catalog.access_tokens import Tokens
from millstream.catalog.adopt_from_log import Adoption
from millstream.catalog.copy_chunks import Copies
from millstream.catalog.database import BUSY_TIMEOUT_S, CatalogDatabase
from millstream.catalog.facts import Facts
from millstream.catalog.retention_holders import Holders
from millstream.catalog.row_types import HomeIdentity
from millstream.catalog.sources import Sources
from millstream.catalog.streams import Streams
from millstream.catalog.tables import Tables
from millstream.catalog.writer_epochs import WriterEpochs
from millstream.closing import Closing

if TYPE_CHECKING:
    from millstream.model.ids import StreamId
    from millstream.protocol.sequencer import Ledger


class Catalog(Streams, WriterEpochs, Sources, Tables, Adoption, Copies, Holders, Tokens, Facts, Closing):
    """A home's catalog. Opening it creates it, or upgrades it to this version's schema.

    Args:
        where: a file's path (SQLite), or the address of a PostgreSQL database as libpq takes it.
        home: the home, if several may share the catalog. The object then returns this home's streams only, and no
            other home may have a stream of the same name. None: all streams.
        busy_timeout_s: how long a call waits for a lock, or for a server that has gone away.

    Raises:
        CatalogError (`catalog_too_new`): a newer Millstream wrote it.
        CatalogError (`catalog_busy`): it stayed locked past the busy timeout (any call may raise that).
        CatalogError (`catalog_unreachable`): its server doesn't answer (any call may raise that, once it has waited as long).
        CatalogError (`catalog_replaced`): one of its files was removed or replaced while it was open (any call may raise that).
        DiskFull: there is no space for what a call writes; nothing was changed.
        CatalogError: it can't be read or written (any call may raise that).

    Concurrency: any number of threads and processes; one object serves all threads of a process. Open it after a fork,
    never before.
    """

    def __init__(
        self, where: str | Path, *, home: HomeIdentity | None = None, busy_timeout_s: float = BUSY_TIMEOUT_S
    ) -> None:
        self._home = home
        self._database = CatalogDatabase(where, busy_timeout_s=busy_timeout_s)
        self._known_names = {}

    @property
    def home(self) -> HomeIdentity | None:
        """The home whose streams it returns; None: those of all."""
        return self._home

    @property
    def database(self) -> CatalogDatabase:
        """The database below, for components that keep tables of their own next to the catalog's."""
        return self._database

    def shared_ledger(self, stream: StreamId) -> tuple[Ledger, int] | None:
        """Return the writers of a stream and their numbers, and the server's time in microseconds since 1970.

        An entry without a location is a writer that owned the stream. None if writers can't share the catalog.
        """
        if self._database.address is None:
            return None
        from millstream.catalog.shared_sequence import PostgresSequenceStore

        return PostgresSequenceStore(self._database, stream).look()

    def close(self) -> None:
        """Close the connections; completed calls are durable already."""
        self._database.close()
