"""The catalog in a SQLite file: the parts that differ in the embedded backend.

WAL mode lets readers and one writer work concurrently; `synchronous = FULL` makes a commit durable before it returns
(positions are guaranteed durable). Writers take the lock when they begin (`BEGIN IMMEDIATE`), so that no transaction
fails half-way because another one came between its read and its write; all of them are short.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any, Final

from sqlalchemy import URL, Connection, Engine, Table, create_engine, event, text
from sqlalchemy.dialects.sqlite import Insert, insert
from sqlalchemy.exc import DBAPIError

from millstream.errors import CatalogError, DiskFull, MillstreamError
from millstream.private_files import make_folder, open_private

_BUSY_CODES: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_BUSY | (2 << 8)})
_WITHOUT_SPACE: Final = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN})
"""Errors by which SQLite reports a lack of space, and other things."""
_PAGE_BYTES: Final = 1 << 16
"""Free space that SQLite needs to begin: its shared index is 32 KiB, and so is a folder's or journal's first part on
some disks."""
_Identity = tuple[int, int] | None
"""A file's device and inode; None if there is no file."""


class SqliteBackend:
    """`catalog.database.Backend` over one file; its folder is created."""

    schema: Final = None
    address: Final = None
    driver_errors: Final[tuple[type[Exception], ...]] = (sqlite3.Error,)

    def __init__(self, path: Path, busy_timeout_s: float) -> None:
        self.place = str(path)
        self._path = path
        self._busy_timeout_s = busy_timeout_s
        self._lock = threading.Lock()
        self._using: set[int] = set()
        """Connections that have opened the files, by `id`."""
        self._paths: Final = tuple(Path(f"{path}{suffix}") for suffix in ("", "-wal", "-shm"))
        self._files: tuple[_Identity, ...] = ()
        """The files that they use; SQLite removes none of them before the last connection is closed."""
        self._folder: _Identity = None
        """The folder that these files were in."""
        try:
            make_folder(path.parent)
        except OSError as error:
            raise CatalogError(
                f"the folder of {path} can't be made: {error.strerror}", hint="Make the home writable for this user."
            ) from error

    def _create(self) -> None:
        """Create the file, if it is missing, as private as its folder: SQLite gives its -wal and -shm the same mode."""
        # Never open an existing file: closing it would drop the locks that SQLite has on it in this process.
        with contextlib.suppress(OSError):  # SQLite tells what is wrong
            os.close(open_private(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL))

    def engine(self) -> Engine:
        """Return an engine whose connections write durably and enforce foreign keys."""
        self._create()
        engine = create_engine(
            URL.create("sqlite+pysqlite", database=self.place),
            connect_args={"timeout": self._busy_timeout_s, "check_same_thread": False},
        )

        @event.listens_for(engine, "connect")
        def _on_connect(connection: Any, _record: object) -> None:
            # We begin transactions: the driver would begin them late, and only before a write.
            connection.isolation_level = None
            cursor = connection.cursor()
            cursor.execute("PRAGMA synchronous = FULL")
            cursor.execute("PRAGMA foreign_keys = ON")
            cursor.close()

        @event.listens_for(engine, "close")
        @event.listens_for(engine, "close_detached")
        def _on_close(connection: Any, _record: object = None) -> None:
            with self._lock:
                self._using.discard(id(connection))

        return engine

    def begin(self, connection: Connection, *, reading: bool) -> tuple[str, str] | None:
        """Begin a transaction; take the file's write lock unless it is for reading."""
        connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")
        raw = id(connection.connection.dbapi_connection)
        if raw in self._using:
            self.check_files()
            return None
        # SQLite opens the files at the first read.
        connection.exec_driver_sql("SELECT 1 FROM sqlite_master LIMIT 1")
        with self._lock:
            if not self._using:
                self._files, self._folder = self._look(), _identity(self._path.parent)
            self._using.add(raw)
        self.check_files()
        return None

    def check_files(self) -> None:
        """Compare the files at the paths with those that the open connections use."""
        with self._lock:
            if not self._using:
                return
            known, found = self._files, self._look()
        for file, before, now in zip(self._paths, known, found, strict=True):
            if before != now:
                moved_to = self._moved_to()
                if moved_to is not None:
                    raise CatalogError(
                        f"{self._path.parent} was moved{moved_to} while this process had the catalog in it open",
                        code="catalog_replaced",
                        hint="Stop every process of this home, and start them with `--home` at the folder's new place.",
                        file=str(file),
                    )
                raise CatalogError(
                    f"{file} was {'removed' if now is None else 'replaced by another file'} while this process had it open: "
                    "other processes don't see what this one commits to the catalog, and it would be lost",
                    code="catalog_replaced",
                    file=str(file),
                )

    def _look(self) -> tuple[_Identity, ...]:
        return tuple(_identity(file) for file in self._paths)

    def _moved_to(self) -> str | None:
        """Return the words for the place to which the folder was moved, empty if it isn't known; None if it wasn't moved."""
        if _identity(self._path.parent) == self._folder:
            return None
        for descriptor in _descriptors():
            with contextlib.suppress(OSError):
                facts = os.fstat(int(descriptor.name))
                if (facts.st_dev, facts.st_ino) == self._files[0] and facts.st_nlink:  # 0: it was deleted
                    with contextlib.suppress(OSError):  # only Linux has links there
                        return f" to {descriptor.readlink().parent}"
                    return ""
        return None

    def was_committed(self, transaction: tuple[str, str] | None, error: DBAPIError) -> bool | None:
        """Return False: the process that commits is this one, and a failed COMMIT leaves nothing."""
        del transaction, error
        return False

    def translate(self, error: BaseException) -> MillstreamError:
        """Translate by SQLite's own code."""
        if isinstance(error, DBAPIError):
            error = error.orig or error
        code = getattr(error, "sqlite_errorcode", None)
        if code == sqlite3.SQLITE_FULL or (code is not None and code & 0xFF in _WITHOUT_SPACE and self._is_disk_full()):
            return DiskFull(f"no space for {self.place}", file=self.place)
        if code in _BUSY_CODES or "locked" in str(error):
            return CatalogError(
                f"{self.place} stayed locked for {self._busy_timeout_s:g} s",
                code="catalog_busy",
                hint="Check for another process with a long transaction, and that the disk responds.",
                file=self.place,
            )
        hint = "Check that the disk has space and that this user may write the home."
        if code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}:
            hint = "The file is damaged or not a catalog: restore it from a copy. The log itself doesn't depend on it."
        return CatalogError(f"{self.place}: {error}", hint=hint, file=self.place)

    def _is_disk_full(self) -> bool:
        """Return whether the disk has no space for a page, or no inode for a file that SQLite has next to its own.

        SQLite may report the first as an I/O error of its shared index, and the second as a file that can't be opened.
        """
        try:
            disk = os.statvfs(self._path.parent)
            has_no_inode = disk.f_files > 0 and disk.f_favail == 0  # some file systems count none
            return has_no_inode or disk.f_bavail * disk.f_frsize < _PAGE_BYTES
        except OSError:
            return False

    def prepare(self, engine: Engine) -> None:
        """Set WAL mode. If several processes open a new file at once, that doesn't wait by SQLite's busy timeout."""
        deadline = time.monotonic() + self._busy_timeout_s
        while True:
            try:
                raw = engine.raw_connection()
                try:
                    raw.cursor().execute("PRAGMA journal_mode = WAL")
                finally:
                    raw.close()
                return
            except (DBAPIError, sqlite3.Error) as error:
                if self.translate(error).code != "catalog_busy" or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def check_privileges(self, connection: Connection) -> None:
        """Check that the file and its folder may be written."""
        del connection
        for path in (self._path, self._path.parent):
            if not os.access(path, os.W_OK):
                raise CatalogError(f"{path} can't be written", hint="Make the home writable for this user.")

    def lock_for_migration(self, connection: Connection) -> None:
        """Do nothing: the transaction has the file's write lock already."""

    def insert(self, table: Table) -> Insert:
        """Return SQLite's INSERT."""
        return insert(table)

    def number_above(self, connection: Connection, table: Table, floor: int) -> None:
        """Note `floor`; SQLite itself notes the greatest number with every row."""
        given = {"name": table.name, "floor": floor}
        noted = text("UPDATE sqlite_sequence SET seq = max(seq, :floor) WHERE name = :name")
        if floor and not connection.execute(noted, given).rowcount:
            connection.execute(text("INSERT INTO sqlite_sequence (name, seq) VALUES (:name, :floor)"), given)


def _descriptors() -> list[Path]:
    """Return this process's open descriptors, as the system lists them; none if it doesn't."""
    with contextlib.suppress(OSError):
        return list(Path("/dev/fd").iterdir())
    return []


def _identity(file: Path) -> _Identity:
    try:
        facts = file.stat()
    except FileNotFoundError:
        return None
    return facts.st_dev, facts.st_ino
