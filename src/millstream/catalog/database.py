"""The catalog's SQLite database: opening, migrating, transactions, and its errors in our words.

WAL mode lets readers and one writer work side by side; `synchronous = FULL` makes a commit durable before it returns
(positions are promised durable). Writers take the lock when they begin (`BEGIN IMMEDIATE`), so that no transaction fails
half-way because another one came between its read and its write; all of them are short.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.exc import DBAPIError

from millstream.errors import CatalogBusy, CatalogError, CatalogTooNew, DiskFull, MillstreamError

REVISION: Final = "0002"
"""The newest migration in this package; a test holds it equal to the scripts'."""
BUSY_TIMEOUT_S: Final = 15.0  # longer than any of our transactions by far, shorter than a person's patience

_BUSY_CODES: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_BUSY | (2 << 8)})


class Database:
    """One process's handle; any number of threads may use it. `CatalogError` and its kin where it can't be opened."""

    def __init__(self, path: Path, *, busy_timeout_s: float = BUSY_TIMEOUT_S) -> None:
        self.path = path
        self._busy_timeout_s = busy_timeout_s
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CatalogError(
                f"the folder of {path} can't be made: {error.strerror}", hint="Make the home writable for this user."
            ) from error
        self._engine = _engine(path, busy_timeout_s)
        try:
            self._migrate()
        except BaseException:
            self._engine.dispose()
            raise

    def close(self) -> None:
        """Close every connection. The handle opens new ones if it is used again."""
        self._engine.dispose()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """One consistent view; sees everything that was committed before."""
        with self._translated(), self._engine.connect().execution_options(millstream_read=True) as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """One transaction: durable when the block has ended, undone when it raises."""
        with self._translated(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            raise self._error(error.orig or error) from error
        except sqlite3.Error as error:
            raise self._error(error) from error

    def _error(self, error: BaseException) -> MillstreamError:
        code = getattr(error, "sqlite_errorcode", None)
        if code == sqlite3.SQLITE_FULL:
            return DiskFull(f"no space for {self.path}", file=str(self.path))
        if code in _BUSY_CODES or "locked" in str(error):
            return CatalogBusy(
                f"{self.path} stayed locked for {self._busy_timeout_s:g} s",
                hint="Another process holds it in a long transaction, or the disk hangs; it is tried again.",
                file=str(self.path),
            )
        hint = "Check that the disk has space and that this user may write the home."
        if code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}:
            hint = "The file is damaged or not a catalog: restore it from a copy. The log itself doesn't depend on it."
        return CatalogError(f"{self.path}: {error}", hint=hint, file=str(self.path))

    def _migrate(self) -> None:
        """Bring the schema up to `REVISION`; of several processes at once, one does it and the others wait."""
        self._use_wal_mode()
        with self.read() as connection:
            found = _revision(connection)
        if found == REVISION:
            return
        with self.write() as connection:
            found = _revision(connection)
            if found is not None and found > REVISION:
                raise CatalogTooNew(
                    f"{self.path} has schema {found}; this Millstream knows up to {REVISION}",
                    file=str(self.path),
                    found=found,
                    known=REVISION,
                )
            if found != REVISION:
                from millstream.catalog.migrations import upgrade

                upgrade(connection)

    def _use_wal_mode(self) -> None:
        # Changing the mode doesn't wait by SQLite's busy timeout when several processes open a new file at once.
        deadline = time.monotonic() + self._busy_timeout_s
        while True:
            try:
                with self._translated():
                    raw = self._engine.raw_connection()
                    try:
                        raw.cursor().execute("PRAGMA journal_mode = WAL")
                    finally:
                        raw.close()
                return
            except CatalogBusy:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)


def _engine(path: Path, busy_timeout_s: float) -> Engine:
    engine = create_engine(
        URL.create("sqlite+pysqlite", database=str(path)),
        connect_args={"timeout": busy_timeout_s, "check_same_thread": False},
    )

    @event.listens_for(engine, "connect")
    def _on_connect(connection: Any, _record: object) -> None:
        # Transactions are ours to begin: the driver would begin them late, and only before a write.
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Connection) -> None:
        reading = connection.get_execution_options().get("millstream_read", False)
        connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")

    return engine


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return None if found is None else str(found)
