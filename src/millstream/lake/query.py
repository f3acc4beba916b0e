"""SQL over all tables of a stream at one token, fresh: `current` at its last fold, under history's tail since then.

The token is that of the last commit cut. For each table the records between its fold and the token are folded in memory, and
a DuckDB view lays the outcome over `current`; so a query sees what the last batch brought, whatever the table's size, and never
half a transaction. Nothing is written to the lake, and the SQL can't reach files, extensions or Python's variables.

Views: `schema.table` for the rows, `history."schema.table"` for the records, `history._messages` for logical messages.
Only tables whose name stands in the SQL are prepared. DuckDB is imported when a session opens.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import pyarrow as pa

from millstream.errors import InvalidQuery, LakeError, MillstreamError, MissingExtra, TokenFromFuture
from millstream.lake.commits import Cut, CutTable, last_cut
from millstream.lake.current import current_columns, rows_of, tail_columns
from millstream.lake.delta import OpenTable, open_table
from millstream.lake.fold import EXACT, Folded, Lookup, fold_records
from millstream.lake.history import newest_schema, read_history
from millstream.lake.keys import Keys
from millstream.lake.layout import MESSAGES, LakeLayout, has_current
from millstream.lake.types import text_maps
from millstream.model.names import parse_qualified_name
from millstream.model.positions import Seq, StreamToken
from millstream.model.schema import TableSchema

if TYPE_CHECKING:
    import duckdb

HISTORY: Final = "history"
_CATALOG_WORDS: Final = re.compile(
    r"\b(show|describe|information_schema|pg_catalog|duckdb_\w+|sqlite_master|pg_\w+)\b", re.IGNORECASE
)
"""A query with one of these may list tables that it doesn't name."""


class LakeSession:
    """A stream's tables at one token, as views of a private DuckDB connection.

    Use it from one thread. It stands at the last cut of the moment it was opened; open another to see more.
    """

    def __init__(self, layout: LakeLayout, *, as_of: Seq | None = None) -> None:
        """Open a session.

        Args:
            layout: where the lake is.
            as_of: an earlier cut's n, whose state is then rebuilt from history; None for the last cut.

        Raises:
            MissingExtra: DuckDB isn't installed.
            TokenFromFuture: the lake hasn't reached `as_of`.
            LakeTableForeign: somebody else wrote into `_commits`.
        """
        self._layout = layout
        self._scratch = tempfile.TemporaryDirectory(prefix="millstream-query-")
        self._connection = _connect(self._scratch.name)
        self._cut: Cut | None = last_cut(layout)
        reached = Seq(0) if self._cut is None else self._cut.n
        if as_of is not None and as_of > reached:
            raise TokenFromFuture(f"the lake stands at {reached}, {as_of} is beyond it", reached=int(reached))
        self._as_of = as_of
        self._n = reached if as_of is None else as_of
        self._tables: Mapping[str, CutTable] = {} if self._cut is None else self._cut.tables
        self._rows_left = set(self._tables)
        self._records_left = set(self._tables)
        self._missing: dict[str, str] = {}
        self._registered = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the session; its results stay."""
        self._connection.close()
        self._scratch.cleanup()

    @property
    def token(self) -> StreamToken:
        """Where all tables stand."""
        return StreamToken.scalar(self._layout.stream_id, self._n)

    @property
    def cut(self) -> Cut | None:
        """The cut that the session stands at; None where nothing has landed yet."""
        return self._cut

    @property
    def missing(self) -> Mapping[str, str]:
        """Tables that the last query named and that can't be read, with the reason."""
        return self._missing

    def query(self, sql: str) -> pa.Table:
        """The result of one SQL query.

        Raises:
            InvalidQuery: DuckDB refuses it; the message is DuckDB's.
        """
        import duckdb

        self._prepare(sql)
        try:
            relation = self._connection.sql(sql)
            # What gives no rows gives no relation, though DuckDB's stubs say that there always is one.
            result: pa.Table = pa.table({}) if relation is None else relation.to_arrow_table()  # type: ignore[redundant-expr]
            return result
        except duckdb.Error as error:
            raise InvalidQuery(_words(str(error)), hint=self._hint()) from error

    def connection(self) -> duckdb.DuckDBPyConnection:
        """The connection itself, with every table's views: for programs that go on from there."""
        self._prepare(None)
        return self._connection

    def _hint(self) -> str:
        if self._missing:
            return "Not readable: " + "; ".join(f"{name} ({reason})" for name, reason in self._missing.items())
        if not self._tables:
            return "No table has landed in the lake yet; `millstream status` shows what goes on."
        names = sorted(table.name for table in self._tables.values())
        listed = ", ".join(names[:20]) + (" …" if len(names) > 20 else "")
        return f"Tables: {listed}. Others appear once the pipeline has landed them."

    def _prepare(self, sql: str | None) -> None:
        """Make the views that a query may name, once each; all of them for None."""
        text = None if sql is None or _CATALOG_WORDS.search(sql) else sql.lower()
        for left, make in ((self._rows_left, self._make_rows), (self._records_left, self._make_records)):
            if left is self._records_left and text is not None and HISTORY not in text:
                continue
            for folder in sorted(folder for folder in left if text is None or self._bare(folder) in text):
                left.discard(folder)
                try:
                    make(folder)
                except MillstreamError as error:
                    self._missing[self._tables[folder].name] = error.message

    def _bare(self, folder: str) -> str:
        """What a query must hold, in lower case, to name the table."""
        if folder == MESSAGES:
            return MESSAGES
        return parse_qualified_name(self._tables[folder].name)[1].replace('"', '""').lower()

    def _history(self, folder: str) -> tuple[OpenTable, TableSchema]:
        path = f"{self._layout.root}/history/{folder}"
        opened = open_table(self._layout, path, self._layout.app_id("history", self._tables[folder].table_id))
        if opened is None:
            raise LakeError(f"the Delta table {path} is gone", path=path)
        return opened, newest_schema(opened)

    def _make_records(self, folder: str) -> None:
        """`history."schema.table"`: every record up to the token."""
        opened, schema = self._history(folder)
        name = MESSAGES if folder == MESSAGES else f"{schema.namespace}.{schema.name}"
        source = self._register(opened.table.to_pyarrow_dataset())
        self._view(HISTORY, name, f"SELECT * FROM {source} WHERE __seq <= {int(self._n)}")

    def _make_rows(self, folder: str) -> None:
        """`schema.table`: the rows at the token."""
        if folder == MESSAGES:
            return
        history, schema = self._history(folder)
        if not has_current(schema):
            raise LakeError(f'has no key: its records are in history."{schema.namespace}.{schema.name}"')
        columns = current_columns(self._layout, schema, history)
        current = self._current(folder, schema)
        after = Seq(0) if current is None or current.n is None else current.n
        tail = read_history(history, after=after, upto=self._n, columns=tail_columns(columns), table=schema)
        folded = fold_records(tail, schema, columns, _lookup(current, columns))
        del tail
        self._view(schema.namespace, schema.name, self._rows_sql(schema, columns, current, folded))

    def _current(self, folder: str, schema: TableSchema) -> OpenTable | None:
        """The newest `current` at or below the token; None where all must come from history."""
        if self._as_of is not None:
            return None
        path, app = f"{self._layout.root}/current/{folder}", self._layout.app_id("current", schema.table_id)
        opened = open_table(self._layout, path, app)
        if opened is None or opened.n is None or opened.n <= self._n:
            return opened if opened is not None and opened.n is not None else None
        table = self._tables[folder]
        if table.current < 0 or table.table_id != schema.table_id:
            return None
        return open_table(self._layout, path, app, version=table.current)

    def _rows_sql(self, schema: TableSchema, columns: pa.Schema, current: OpenTable | None, folded: Folded) -> str:
        """The rows that the fold puts in, under those of `current` that it leaves."""
        have = [] if current is None or folded.truncated else current.schema().names
        with_exact = EXACT.name in have or folded.rows.column(EXACT.name).null_count < folded.rows.num_rows
        names = [column.name for column in schema.columns] + ([EXACT.name] if with_exact else [])
        rows = self._register(folded.rows)
        fresh = f"SELECT {_list(names)} FROM {rows}"
        if current is None or folded.truncated:
            return fresh
        source = self._register(current.table.to_pyarrow_dataset())
        whole = ", ".join(
            f"c.{quote(n)}" if n in have else f"NULL::{_duck_type(self._connection, rows, n)} AS {quote(n)}"
            for n in names
        )
        kept = f"SELECT {whole} FROM {source} c"
        if len(folded.gone):
            gone = self._register(_gone_table(folded.gone))
            if schema.key:
                kept += f" ANTI JOIN {gone} g ON {_same_key(folded.gone, with_exact=EXACT.name in have)}"
            else:
                kept = _without(kept, f"SELECT {_list(names)} FROM {gone}", names, columns)
        return f"{kept} UNION ALL {fresh}"

    def _register(self, data: object) -> str:
        """Give Arrow data a name in the connection."""
        self._registered += 1
        name = f"__millstream_{self._registered}"
        self._connection.register(name, data)
        return name

    def _view(self, namespace: str, name: str, sql: str) -> None:
        """Make one view; DuckDB ignores case, so that of two names that differ by case only one can be had."""
        import duckdb

        try:
            self._connection.execute(f"CREATE SCHEMA IF NOT EXISTS {quote(namespace)}")
            self._connection.execute(f"CREATE VIEW {quote(namespace)}.{quote(name)} AS {sql}")
        except duckdb.CatalogException as error:
            raise LakeError(f"can't be named in a query: {error}") from error


def _words(said: str) -> str:
    """DuckDB's message; of a table that isn't there in our words, for its guesses are DuckDB's own tables."""
    table = re.search(r'Table with name "?(.+?)"? does not exist', said)
    return said if table is None else f"there is no table {table[1]} in the lake"


def quote(name: str) -> str:
    """An SQL identifier, quoted whatever it holds."""
    return '"' + name.replace('"', '""') + '"'


def _connect(scratch: str) -> duckdb.DuckDBPyConnection:
    """A private connection that reads what is registered and nothing else."""
    try:
        import duckdb
    except ImportError as error:
        raise MissingExtra(
            "SQL needs DuckDB, which isn't installed", hint="pip install 'millstream[run]'", extra="run"
        ) from error
    connection = duckdb.connect(
        ":memory:",
        config={
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "python_enable_replacements": "false",
            "temp_directory": scratch,
        },
    )
    for setting in ("TimeZone = 'UTC'", "enable_external_access = false", "lock_configuration = true"):
        connection.execute(f"SET {setting}")
    return connection


def _lookup(current: OpenTable | None, columns: pa.Schema) -> Lookup:
    if current is None:
        empty = pa.schema([*columns, EXACT]).empty_table()
        return lambda _keys: empty
    table = current.table
    return lambda keys: rows_of(table, keys, columns)


def _list(names: list[str]) -> str:
    return ", ".join(quote(name) for name in names)


def _duck_type(connection: duckdb.DuckDBPyConnection, view: str, name: str) -> str:
    """DuckDB's name for the type of a registered column."""
    # fetchall ends the result: an open one keeps the connection from registering more.
    found = connection.execute(f"SELECT typeof({quote(name)}) FROM (SELECT 1) LEFT JOIN {view} ON false").fetchall()
    return str(found[0][0])


def _without(kept: str, gone: str, names: list[str], columns: pa.Schema) -> str:
    """A bag's rows without as many equal ones as `gone` has; 0 and -0, equal in SQL, are told apart by their texts."""
    signs = "".join(f", CAST({quote(f.name)} AS VARCHAR)" for f in columns if pa.types.is_floating(f.type))
    both = " EXCEPT ALL ".join(f"SELECT {_list(names)}{signs} FROM ({rows})" for rows in (kept, gone))
    return f"SELECT {_list(names)} FROM ({both})"


def _gone_table(gone: Keys) -> pa.Table:
    """Keys as a table: the typed columns, `__exact`, and each column's text beside it."""
    exact = [pa.nulls(len(gone), pa.string()) if e is None else e for e in gone.exact]
    arrays = [*gone.columns, text_maps(gone.names, exact, len(gone)), *exact]
    return pa.table(arrays, names=[*gone.names, EXACT.name, *(f"__exact.{name}" for name in gone.names)])


def _same_key(gone: Keys, *, with_exact: bool) -> str:
    """Whether a row of `current` (`c`) has a key of `gone` (`g`)."""
    if gone.typed:
        return " AND ".join(f"c.{quote(name)} = g.{quote(name)}" for name in gone.names)
    same = []
    for name in gone.names:
        same.append(f"c.{quote(name)} IS NOT DISTINCT FROM g.{quote(name)}")
        literal = name.replace("'", "''")
        text = f"c.__exact['{literal}']" if with_exact else "NULL"
        same.append(f"{text} IS NOT DISTINCT FROM g.{quote(f'__exact.{name}')}")
    return " AND ".join(same)
