"""DuckDB as the engine of `query`: a private connection that reads only a lake, and its scans of Delta tables.

DuckDB itself decodes a local table's files, up to four times as fast as through a dataset; it gets their bytes from
`HandedFiles`. The files of an object store come by way of a pyarrow dataset. The connection can use only a scratch
folder among the machine's files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from millstream.errors import LakeError, LakeUnavailable, MillstreamError
from millstream.errors.missing_extras import missing_extra
from millstream.lake.history_scan import records_of
from millstream.lake.query.query_limits import QueryBounds, QueryWatch
from millstream.lake.query.read_only_sql import reading_statements
from millstream.lake.query.readable_files import PREFIX, HandedFiles, file_system
from millstream.lake.store_errors import lake_errors, plain_text
from millstream.lake.table_format import OpenTable
from millstream.model.names import DEFAULT_SCHEMA, literal, quote
from millstream.workers import call_in_thread

if TYPE_CHECKING:
    import duckdb


_DATABASE: Final = "__millstream"
"""DuckDB's own is called `memory`, and a statement can't name a schema of that name while there is such a database."""

_UNREAD: Final = re.compile(r"reading the stream registered as '[^']*' failed: (?:IOError|OSError): (.*)", re.DOTALL)
"""DuckDB's error for a dataset of which a file can't be read."""


def path_of(namespace: str, name: str) -> str:
    """Return a view's full path: without the database, no schema could be called `system` or `temp`."""
    return f"{_DATABASE}.{quote(namespace)}.{quote(name)}"


def names(columns: Sequence[str]) -> str:
    """Return a list of columns for a SELECT."""
    return ", ".join(map(quote, columns))


class Engine:
    """A private DuckDB connection that reads a lake. For one thread, except `interrupt` of the connection."""

    def __init__(self, scratch: str, bounds: QueryBounds | None = None) -> None:
        """Begin to connect, which takes as long as determining what to read: both run at once.

        Raises:
            UsageError (`missing_extra`): DuckDB, or fsspec, by which it reads the lake's files, isn't installed.
        """
        for module in ("duckdb", "fsspec"):
            if find_spec(module) is None:
                raise missing_extra(f"SQL needs {module}", "run")
        self.files: Final = HandedFiles()
        self._connected = call_in_thread("millstream-duckdb", partial(_connect, scratch, bounds, self.files))
        self.watch: Final = QueryWatch(bounds, scratch, self._interrupt)
        self._scratch = scratch
        self._named = 0

    def _interrupt(self) -> None:
        if self._connected.done() and self._connected.exception() is None:
            self.connection.interrupt()

    @property
    def connection(self) -> duckdb.DuckDBPyConnection:
        """The connection itself."""
        return self._connected.result()

    def close(self) -> None:
        """Close the connection."""
        self.watch.end()
        self.connection.close()

    def register(self, data: object) -> str:
        """Register Arrow data in the connection; return its name."""
        self._named += 1
        name = f"__millstream_{self._named}"
        self.connection.register(name, data)
        return name

    def keep(self, data: pa.Table) -> str:
        """Copy Arrow data to a temporary table; return its name."""
        source = self.register(data)
        self.connection.execute(f"CREATE TEMP TABLE {source}_kept AS FROM {source}")
        self.connection.unregister(source)
        return f"{source}_kept"

    def scratch_file(self) -> str:
        """Return a path for a new Parquet file of the session's."""
        self._named += 1
        return f"{self._scratch}/{self._named}.parquet"

    def fetch(self, sql: str) -> pa.Table:
        """Return the result of a query of ours."""
        return self.connection.sql(sql).to_arrow_table()

    def type_of(self, registered: str, column: str) -> str:
        """Return DuckDB's name for the type of a registered column."""
        # fetchall ends the result: an open result keeps the connection from registering more.
        found = self.connection.execute(
            f"SELECT typeof({quote(column)}) FROM (SELECT 1) LEFT JOIN {registered} ON false"
        ).fetchall()
        return str(found[0][0])

    def view(self, namespace: str, name: str, sql: str) -> None:
        """Make one view. DuckDB ignores case, so only one of two names that differ by case can exist."""
        import duckdb

        try:
            self.connection.execute(f"CREATE SCHEMA IF NOT EXISTS {_DATABASE}.{quote(namespace)}")
            self.connection.execute(f"CREATE VIEW {path_of(namespace, name)} AS {sql}")
        except duckdb.CatalogException as error:
            raise LakeError("differs from another table only by case: use one of the two in a statement") from error

    def drop_views(self, namespace: str, name: str) -> None:
        """Drop a table's views: of its rows, its records and its versions. Case doesn't matter, as in DuckDB."""
        found = self.connection.execute(
            "SELECT schema_name, view_name FROM duckdb_views() WHERE NOT internal AND"
            " (lower(schema_name) = $1 AND lower(view_name) = $2 OR lower(view_name) = $1 || '.' || $2)",
            [namespace, name],
        )
        for schema, view in found.fetchall():
            self.connection.execute(f"DROP VIEW {path_of(schema, view)}")

    def drop_view(self, namespace: str, name: str) -> None:
        """Drop one view, if there is one of that name in the schema."""
        if self.has_view(namespace, name):
            self.connection.execute(f"DROP VIEW {path_of(namespace, name)}")

    def has_view(self, namespace: str, name: str) -> bool:
        """Whether there is a view of that name."""
        found = self.connection.execute(
            "SELECT 1 FROM duckdb_views() WHERE NOT internal AND schema_name = ? AND view_name = ?", [namespace, name]
        )
        # fetchall ends the result: an open result keeps the connection from other work.
        return bool(found.fetchall())

    def keywords(self) -> frozenset[str]:
        """Return the words that can't stand for a column everywhere unless they are quoted."""
        found = self.connection.execute(
            "SELECT keyword_name FROM duckdb_keywords() WHERE keyword_category <> 'unreserved'"
        )
        return frozenset(str(word) for (word,) in found.fetchall())

    def forget_views(self) -> None:
        """Drop all views; registered data, which are temporary views, stays."""
        found = self.connection.execute(
            "SELECT schema_name, view_name FROM duckdb_views() WHERE NOT internal AND NOT temporary"
        )
        for namespace, view in found.fetchall():
            self.connection.execute(f"DROP VIEW {path_of(namespace, view)}")

    def statements(self, sql: str) -> list[str]:
        """Return the statements of a text, each of which only reads; raises `InvalidQuery` as `reading_statements`."""
        return reading_statements(self.connection, sql)

    def scan(
        self,
        opened: OpenTable,
        paths: Sequence[str] | None,
        needed: Sequence[str],
        *,
        alike: Sequence[str] | None = None,
    ) -> tuple[str, list[str]]:
        """Return the text behind FROM that reads some of a table's files, and which of the needed columns it has.

        Args:
            paths: the files, within the table's folder, in order; None for all.
            needed: the columns that may be asked for.
            alike: the columns of the files, if known to be the same: then not all files need opening to find out.

        Returns:
            An empty text if there are no files.

        Raises:
            LakeUnavailable: files of it are gone.
        """
        import duckdb

        if "://" in opened.path:
            with lake_errors(opened.path):
                dataset = records_of(opened)
            return self.register(dataset), [name for name in needed if name in dataset.schema.names]
        # A tail's file has an absolute path.
        files = [os.path.join(opened.path, path) for path in (_paths(opened) if paths is None else paths)]  # noqa: PTH118
        if not files:
            return "", []
        if alike is not None:
            return self.parquet(files), [name for name in needed if name in alike]
        source = self.parquet(files, by_name=True)
        try:
            have = self.connection.sql(f"SELECT * FROM {source} LIMIT 0").columns
        except duckdb.Error as error:
            if (failure := self.take_failure(error)) is not None:
                raise unavailable(opened, failure) from error
            raise
        return source, [name for name in needed if name in have]

    def parquet(self, paths: Sequence[str], *, by_name: bool = False) -> str:
        """Return the text behind FROM that reads local files.

        Args:
            paths: in order.
            by_name: whether their columns may differ, and are matched by name.
        """
        listed = ", ".join(literal(self.files.hand_over(path)) for path in paths)
        return f"read_parquet([{listed}], {'union_by_name = true, ' if by_name else ''}hive_partitioning = false)"

    def failure_in(self, error: Exception) -> MillstreamError | None:
        """Return the reason why a file couldn't be read or written, after an error of DuckDB; None if all could."""
        if (unread := _UNREAD.search(str(error))) is None:
            return self.files.failure
        return LakeUnavailable(
            f"a file of the lake could not be read: {plain_text(unread[1])}",
            hint="Query again, in a new session; if it fails again, check the lake's disk or object store.",
        )

    def take_failure(self, error: Exception) -> MillstreamError | None:
        """Return `failure_in`, and forget what `files` recorded."""
        failure, self.files.failure = self.failure_in(error), None
        return failure


def unavailable(opened: OpenTable, error: Exception) -> LakeUnavailable:
    """Return the error for a table's files that disappeared between opening and reading."""
    return LakeUnavailable(
        f"{opened.path}: files of version {opened.version} are gone: {error}",
        hint="Query again; if it fails again, files of the lake were deleted: run `millstream pipeline rebuild`.",
        path=opened.path,
    )


def _connect(scratch: str, bounds: QueryBounds | None, files: HandedFiles) -> duckdb.DuckDBPyConnection:
    """Open a private connection that reads registered data and files handed over.

    It writes only into its scratch folder.
    """
    import duckdb

    connection = duckdb.connect(
        ":memory:",
        config={
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "python_enable_replacements": "false",
            "temp_directory": scratch,
        },
    )
    for statement in (
        f"ATTACH ':memory:' AS {_DATABASE}",
        f"USE {_DATABASE}",
        "DETACH memory",
        f"CREATE SCHEMA {quote(DEFAULT_SCHEMA)}",
    ):
        connection.execute(statement)
    connection.register_filesystem(file_system(files))
    for setting in (
        *(() if bounds is None else bounds.settings()),
        "TimeZone = 'UTC'",
        f"search_path = '{DEFAULT_SCHEMA},main'",
        # A readable folder is also writable: none of the lake's is among them.
        f"allowed_directories = [{literal(scratch + '/')}, {literal(PREFIX)}]",
        "enable_external_access = false",
        "lock_configuration = true",
    ):
        connection.execute(f"SET {setting}")
    return connection


def _paths(opened: OpenTable) -> list[str]:
    return [str(path) for path in opened.files().column("path").to_pylist()]
