"""The catalog's database: transactions, migrations and errors, the same over every backend.

`Backend` has the differences between backends, which live in `millstream.catalog.sqlite` and
`millstream.catalog.postgresql`. All transactions are short. None is repeated here; only its begin may be, while
nothing has been done in it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog
from sqlalchemy import Connection, Engine, Table, event, inspect, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from millstream.backoff import Backoff
from millstream.errors import CatalogError, MillstreamError
from millstream.libpq import is_address

if TYPE_CHECKING:
    from sqlalchemy.dialects.postgresql import Insert as PostgresInsert
    from sqlalchemy.dialects.sqlite import Insert as SqliteInsert

REVISION: Final = "0001"
"""The newest migration in this package; a test holds it equal to the scripts'."""
BUSY_TIMEOUT_S: Final = 15.0  # far longer than any of our transactions, shorter than a person's patience

SLOW_S: Final = 1.0
"""A statement or a commit that takes longer is logged: every call of a catalog takes milliseconds on a healthy disk or server."""

logger = structlog.get_logger("millstream.catalog")

_BEGAN: Final = "millstream.began"
_STATEMENT_CHARS: Final = 200


class Backend(Protocol):
    """The parts of a database product that differ."""

    @property
    def place(self) -> str:
        """Location of the catalog, for people: a path, or an address without its secrets."""

    @property
    def schema(self) -> str | None:
        """The schema that holds its tables; None if the product has none."""

    @property
    def address(self) -> str | None:
        """Address for libpq if the product is PostgreSQL, with our timeouts for connecting and silence.

        Contains secrets.
        """

    @property
    def driver_errors(self) -> tuple[type[Exception], ...]:
        """The driver's own exceptions, which SQLAlchemy doesn't wrap if the driver is called directly."""

    def engine(self) -> Engine:
        """Create the engine. Its connections are in autocommit: only `begin` begins transactions."""

    def begin(self, connection: Connection, *, reading: bool) -> tuple[str, str] | None:
        """Begin a transaction on a connection: one consistent view for reading, else one that may write.

        Returns:
            The identification of a writing transaction for `was_committed`.
        """

    def was_committed(self, transaction: tuple[str, str] | None, error: DBAPIError) -> bool | None:
        """Return the outcome of a transaction whose COMMIT raised `error`; None if it can't be known."""

    def check_files(self) -> None:
        """Raise `CatalogError` (`catalog_replaced`) if a file of the open connections is no longer the one at its path.

        A server has none.
        """

    def translate(self, error: BaseException) -> MillstreamError:
        """Return our error for one of the driver's, or of SQLAlchemy's around it."""

    def prepare(self, engine: Engine) -> None:
        """Prepare the database for the first transaction of a process."""

    def check_privileges(self, connection: Connection) -> None:
        """Raise `CatalogError` if this user lacks a privilege; the hint has the SQL."""

    def lock_for_migration(self, connection: Connection) -> None:
        """Keep other migrations out until the transaction's end, and create the schema if it is missing."""

    def insert(self, table: Table) -> SqliteInsert | PostgresInsert:
        """Return an INSERT that supports ON CONFLICT."""

    def number_above(self, connection: Connection, table: Table, floor: int) -> None:
        """Number new rows of a table above `floor` and all its numbers, even those that were inserted explicitly."""


@dataclass(frozen=True, slots=True)
class CatalogFacts:
    """The result of `examine_catalog`."""

    place: str
    revision: str | None
    """Revision of its schema; None if there is no catalog so far."""
    known: str = REVISION
    """The revision that this version upgrades it to."""


def examine_catalog(where: str | Path) -> CatalogFacts:
    """Examine a catalog without creating or upgrading it: whether it can be opened, and this user has the privileges.

    Raises:
        CatalogError: as `Catalog` would raise; or a privilege is missing, with the SQL in the hint.
    """
    if isinstance(where, Path) and not where.exists():
        return CatalogFacts(str(where), None)
    database = CatalogDatabase(where, look=True)
    try:
        return CatalogFacts(database.place, database.look())
    finally:
        database.close()


def _note_the_time(connection: Connection, *_: Any) -> None:
    connection.info[_BEGAN] = time.monotonic()


def make_backend(where: str | Path, busy_timeout_s: float) -> Backend:
    """Return the backend of a path or an address."""
    if isinstance(where, str) and is_address(where):
        from millstream.catalog.postgresql import PostgresBackend

        return PostgresBackend(where, busy_timeout_s)
    from millstream.catalog.sqlite import SqliteBackend

    return SqliteBackend(Path(where), busy_timeout_s)


class CatalogDatabase:
    """One process's handle on the catalog's database; any number of threads may use it.

    Opening a `Catalog` opens it; `Catalog.database` returns it. Other components that keep tables next to the
    catalog's (a sequencer's store, for example) use it like this:

    - `read()` and `write()` give a raw transaction as a SQLAlchemy `Connection`; the tables of
      `millstream.catalog.sql_tables` need no schema name in it. A write that reads first, and needs what it read to stay
      unchanged, locks a row for it (`select(…).with_for_update(key_share=True)`, which SQLite doesn't need and leaves
      out).
    - `insert(table)` returns an INSERT that supports `on_conflict_do_update` on both backends.
    - `address` is for a dedicated connection, `psycopg.connect(database.address)`; None on SQLite.

    Args:
        where: a path (SQLite), or an address as libpq takes it (PostgreSQL).
        busy_timeout_s: how long a call waits for locks, and for a server that has gone away.
        look: leave the schema as it is; only for `look`.

    Raises:
        CatalogError (`catalog_too_new`): a newer Millstream wrote it.
        CatalogError (`catalog_unreachable`): the server doesn't answer. Any call may raise this, after `busy_timeout_s`.
        CatalogError (`catalog_busy`, `catalog_replaced`), DiskFull, CatalogError: as `Catalog`.
    """

    def __init__(self, where: str | Path, *, busy_timeout_s: float = BUSY_TIMEOUT_S, look: bool = False) -> None:
        self._backend = make_backend(where, busy_timeout_s)
        self._busy_timeout_s = busy_timeout_s
        self._opened = False
        self._engine = self._backend.engine()
        event.listen(self._engine, "before_cursor_execute", _note_the_time)
        event.listen(self._engine, "after_cursor_execute", self._log_if_slow)
        self._foreign: tuple[type[Exception], ...] = (DBAPIError, PoolTimeout, *self._backend.driver_errors)
        try:
            with self._translated():
                self._backend.prepare(self._engine)
            if not look:
                self._migrate()
        except BaseException:
            self._engine.dispose()
            raise
        self._opened = True

    @property
    def place(self) -> str:
        """Location of the catalog, for people; without secrets."""
        return self._backend.place

    @property
    def address(self) -> str | None:
        """Address for libpq, for a dedicated connection; None on SQLite. It may hold a password: never show it."""
        return self._backend.address

    def insert(self, table: Table) -> Any:
        """Return an INSERT that supports `on_conflict_do_nothing` and `on_conflict_do_update`."""
        return self._backend.insert(table)

    def number_above(self, connection: Connection, table: Table, floor: int = 0) -> None:
        """Number new rows of a table above `floor` and all its numbers, even those that were inserted explicitly."""
        self._backend.number_above(connection, table, floor)

    def close(self) -> None:
        """Close every connection. The handle opens new ones if it is used again."""
        self._engine.dispose()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a consistent view; it sees everything that was committed before."""
        with self._translated():
            connection, _ = self._begun(reading=True)
            with connection:
                yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Open a transaction: durable when the block has ended, rolled back when it raises.

        If the connection breaks during the COMMIT, the backend is asked for the outcome. The block ends normally if the
        transaction was committed, and raises if it wasn't. If the outcome can't be known, because the server crashed
        or stayed away, it raises `CatalogError` (`catalog_unreachable`) with `outcome="unknown"` in its details. A caller that retries
        then may find the write done; all calls of `Catalog` allow that.
        """
        with self._translated():
            connection, transaction = self._begun(reading=False)
            with connection:
                yield connection
                began_s = time.monotonic()
                try:
                    connection.commit()
                except DBAPIError as error:
                    self._resolve(transaction, error)
                self._log("COMMIT", time.monotonic() - began_s)
                # A commit to a file that has been removed must not be acknowledged.
                self._backend.check_files()

    def _log_if_slow(self, connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        self._log(statement, time.monotonic() - connection.info[_BEGAN])

    def _log(self, statement: str, seconds: float) -> None:
        if seconds >= SLOW_S:
            # Values travel apart from the statement: its text has no secret.
            shown = " ".join(statement.split())[:_STATEMENT_CHARS]
            logger.warning("slow catalog statement", seconds=round(seconds, 1), statement=shown, catalog=self.place)

    def look(self) -> str | None:
        """Return the schema's revision, or None, after checking this user's privileges. See `examine_catalog`."""
        with self.read() as connection:
            self._backend.check_privileges(connection)
            return self._revision(connection)

    def check_files(self) -> None:
        """Check that the files are still those that were opened, without a transaction; does nothing over PostgreSQL.

        Raises:
            CatalogError (`catalog_replaced`): a file was removed, or another file is at its path.
        """
        self._backend.check_files()

    def _resolve(self, transaction: tuple[str, str] | None, error: DBAPIError) -> None:
        committed = self._backend.was_committed(transaction, error)
        if committed is None:
            raise CatalogError(
                f"{self.place}: the connection broke during a COMMIT, so its outcome is unknown",
                code="catalog_unreachable",
                hint="Check that the catalog's server runs.",
                outcome="unknown",
            ) from error
        if not committed:
            raise error

    def _begun(self, *, reading: bool) -> tuple[Connection, tuple[str, str] | None]:
        """Return a connection in a transaction.

        Broken connections are replaced; the call waits for a server that went away.
        """
        deadline = time.monotonic() + self._busy_timeout_s
        backoff: Backoff | None = None
        while True:
            connection: Connection | None = None
            try:
                connection = self._engine.connect()
                connection.begin()
                return connection, self._backend.begin(connection, reading=reading)
            except BaseException as error:
                said = self._said(error)
                gone = isinstance(said, CatalogError) and said.code == "catalog_unreachable"
                if connection is not None:
                    with contextlib.suppress(Exception):
                        if gone:
                            connection.invalidate()
                        connection.close()
                if not gone:
                    raise
                # The other connections in the pool are as old: replace all of them.
                self._engine.dispose()
                if not self._opened or (backoff is not None and time.monotonic() > deadline):
                    raise
            if backoff is None:
                backoff = Backoff(0.05, 0.5)  # the first retry is at once
            else:
                time.sleep(backoff.next_s())

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except self._foreign as error:
            raise self._backend.translate(error) from error

    def translate(self, error: Exception) -> MillstreamError:
        """Return our error for one of the driver's, on a connection of the caller's own."""
        return self._backend.translate(error)

    def _said(self, error: BaseException) -> BaseException:
        """Return the error that a caller gets."""
        return self._backend.translate(error) if isinstance(error, self._foreign) else error

    def _migrate(self) -> None:
        """Upgrade the schema to `REVISION`; of several processes at once, one does it and the others wait."""
        with self.read() as connection:
            found = self._revision(connection)
        if found == REVISION:
            return
        with self.write() as connection:
            self._backend.lock_for_migration(connection)
            found = self._revision(connection)
            if found != REVISION:
                from millstream.catalog.migrations import upgrade

                upgrade(connection)

    def _revision(self, connection: Connection) -> str | None:
        """Return the schema's revision; None if there is none; raise `catalog_too_new` if it is above ours."""
        schema = self._backend.schema
        if not inspect(connection).has_table("alembic_version", schema=schema):
            return None
        prefix = "" if schema is None else f"{schema}."
        found = connection.execute(text(f"SELECT version_num FROM {prefix}alembic_version")).scalar()
        if found is not None and str(found) > REVISION:
            raise CatalogError(
                f"{self.place} has schema {found}; this Millstream reads up to {REVISION}",
                code="catalog_too_new",
                file=self.place,
                found=str(found),
                known=REVISION,
            )
        return None if found is None else str(found)
