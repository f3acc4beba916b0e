"""Read chunks of existing rows from the source, each in one short transaction that blocks no writer.

A chunk's transaction takes the lock that any SELECT takes, *then* the snapshot. So no rewrite or TRUNCATE
can lie between the two: those show an empty table to older snapshots. Then it reads the end of WAL, and
then the rows in key order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import psycopg
from psycopg import pq, sql

from millstream.capture.column_rules.apply_to_copies import (
    check_numbers,
    hashed_places,
    hasher,
    lines_with,
    read_columns,
)
from millstream.capture.column_rules.binding import ColumnRules
from millstream.capture.connection import Connection, all_rows, translate_result, translated
from millstream.capture.copying.copy_output import CopyText, as_messages, copy_out, copy_pieces
from millstream.capture.copying.copy_text import CopiedRows, last_key, read_copied
from millstream.capture.copying.source_snapshot import SourceSnapshot
from millstream.capture.publication import restriction
from millstream.capture.source_tables import (
    KeyColumn,
    SourceTable,
    as_record_end,
    current_snapshot,
    name_of,
    read_table,
    running_bound,
)
from millstream.codec.pgoutput import table_schema
from millstream.errors import SourceError
from millstream.model.column_rules import Rule
from millstream.model.ids import SourceId, TableId
from millstream.model.positions import Lsn, parse_lsn
from millstream.model.records import log_names
from millstream.model.schema import ReplicaIdentity, TableSchema
from millstream.protocol.copy_conflicts import Key, Snapshot

CHUNK_BYTES_MAX: Final = 64 << 20
"""Default bound at which reading stops; the rows read until then are a chunk as well."""
AGAIN: Final = "40001"
"""SQLSTATE of errors that a retry can resolve (serialization_failure)."""
_SAMPLE_PAGES: Final = 300
_SCAN_PIECE_BYTES: Final = 4 << 20
_LOCK_TIMEOUT: Final = "5s"
_PINNED_PATH: Final = "pg_catalog"
"""The search path under which values are printed, here and in the stream."""


class TableGone(SourceError):
    """The table no longer exists."""

    code = "table_gone"


class TableChanged(SourceError):
    """The table's key, or the rule of a column, has changed, which makes its chunks meaningless."""

    code = "table_changed"


@dataclass(frozen=True, slots=True)
class ChunkBounds:
    """The rows of a chunk: keys in `(after, upto]` (None: no bound), or the listed keys; all in one partition, if it has one."""

    after: Key | None = None
    upto: Key | None = None
    keys: tuple[Key, ...] = ()
    partition: int | None = None
    """OID of a partition of the table."""


class Moment(NamedTuple):
    """The snapshot, WAL position and time of a read."""

    snapshot: Snapshot
    lsn: Lsn
    """Upper bound of the commits that the snapshot sees: each lies at or below it."""
    at_us: int
    """The server's clock, in microseconds since 1970."""


@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """A table that is being read."""

    table: SourceTable
    """The table with the columns that are sent."""
    schema: TableSchema
    """The table's schema, whose version isn't known yet."""
    snapshot: Snapshot
    lsn: Lsn
    at_us: int


@dataclass(frozen=True, slots=True, eq=False)
class FetchedRows(Begun):
    """The rows of a read, still as text. Any thread may decode them, once."""

    copied: CopyText
    last: bool
    """Whether the bounds hold no further rows."""

    @property
    def size_bytes(self) -> int:
        """Size in bytes of the text."""
        return self.copied.size_bytes

    @property
    def row_count(self) -> int:
        """The number of rows."""
        return self.copied.row_count

    def last_key(self) -> Key:
        """Return the key of the last row, its columns in index order; needs at least one row, before `decoded`."""
        order = [column.name for column in self.table.key]
        return last_key(self.copied, self.table.relation, order, partitioned=self.table.partitioned)

    def decoded(self, schema: TableSchema) -> CopiedRows:
        """Decode the rows under a schema: this one, with its version.

        Raises:
            TableUndecodable: a value isn't UTF-8.
        """
        return read_copied(self.copied, self.table.relation, schema)


class ChunkReader:
    """Read chunks over one ordinary connection of its own.

    Args:
        connection: pinned as `connect` pins it, in autocommit; its search path, planner settings and transactions are changed.
    """

    def __init__(
        self, connection: Connection, source: SourceId, publications: Sequence[str], rules: ColumnRules
    ) -> None:
        self._connection = connection
        self._source = source
        self._publications = tuple(publications)
        self._rules = rules
        self._search_path: list[str] = []
        self.not_before = Lsn(0)
        """Commits below this LSN must be visible to the next chunk; an ordinary snapshot sees every commit."""
        # The queries of the catalogs are the same for each chunk, and planning them took the source 5 ms of CPU: as much
        # as a tenth of its rows.
        connection.prepare_threshold = 1
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        with translated():
            # Chunks follow the key's index; a plan that sorts the table again for each would be quadratic.
            connection.execute(
                "SET enable_seqscan = off; SET enable_bitmapscan = off; SET max_parallel_workers_per_gather = 0;"
                f" SET jit = off; SET lock_timeout = '{_LOCK_TIMEOUT}'; SET plan_cache_mode = force_generic_plan"
            )

    def running_bound(self) -> int:
        """Return an id above every transaction that may have committed before now and not be visible yet."""
        return running_bound(self._connection)

    def current_snapshot(self) -> Snapshot:
        """Return a snapshot that shows which transactions have ended by now."""
        return current_snapshot(self._connection)

    def fetch(
        self,
        table: SourceTable,
        table_id: TableId,
        bounds: ChunkBounds,
        *,
        rows_max: int | None = None,
        bytes_max: int = CHUNK_BYTES_MAX,
    ) -> FetchedRows:
        """Read the rows in the bounds, from the lowest key on.

        Args:
            table: the table as last seen; the bounds are keys of it.
            bounds: the rows to read.
            rows_max: number of rows to stop after; None reads all.
            bytes_max: bytes of text to stop after, including the row that exceeds it.

        Raises:
            TableGone: the table no longer exists.
            TableChanged: the table's key has changed.
            ConfigError: its rules can't be applied.
            MillstreamError: PostgreSQL refused; the transaction is over.
        """
        connection = self._connection
        with self._reading(table, table_id, None) as (begun, condition):
            found, key = begun.table, begun.schema.key
            query = _copy_query(found, self._place_of(found, bounds), key, bounds, condition, rows_max)
            self._take_any_bytes()
            mask = hasher(found, self._rules.rules.hashed)
            if bounds.keys and found.key_is_hashed:
                copied = self._scan(found, key, bounds.keys, query, mask, bytes_max)
            else:
                copied = mask(copy_out(connection, query.as_bytes(connection), bytes_max=bytes_max))
        is_last = copied.whole and (rows_max is None or copied.row_count < rows_max)
        return FetchedRows(found, begun.schema, begun.snapshot, begun.lsn, begun.at_us, copied, is_last)

    def _scan(
        self,
        table: SourceTable,
        key_names: Sequence[str],
        keys: Sequence[Key],
        query: sql.Composed,
        mask: Callable[[CopyText], CopyText],
        bytes_max: int,
    ) -> CopyText:
        """Return the rows whose keys have these hashes, found by reading the table; stop as `copy_out` does.

        The rows may be some more if the key also has columns without a rule: those with their values in another
        combination.
        """
        names = log_names([column.name for column in table.relation.columns])
        places = [at for at in hashed_places(table.relation, table) if names[at] in key_names]
        parts = [key_names.index(names[at]) for at in places]
        wanted = {tuple(key[part].encode() for part in parts) for key in keys}
        connection = self._connection
        connection.execute("SET LOCAL enable_seqscan = on")
        found: list[bytes] = []
        with closing(
            copy_pieces(connection, query.as_bytes(connection), piece_bytes=lambda: _SCAN_PIECE_BYTES)
        ) as pieces:
            for piece in pieces:
                found += lines_with(mask(piece), places, wanted)
                if piece.whole or sum(map(len, found)) >= bytes_max:
                    return CopyText(as_messages(found), len(found), piece.whole)
        raise AssertionError("the last piece is whole")

    def read_whole(
        self,
        table: SourceTable,
        table_id: TableId,
        *,
        under: SourceSnapshot | None,
        piece_bytes: Callable[[], int],
        began: Callable[[Begun], None],
        take: Callable[[CopyText], None],
    ) -> None:
        """Read all rows in pieces, in no particular order.

        Args:
            under: the snapshot to read under; None takes one now.
            piece_bytes: returns the approximate size of the next piece; called before each.
            began: called once, before the first piece.
            take: called with each piece; the last may be empty. An exception from it ends the reading.

        Raises:
            TableGone: the table no longer exists.
            TableChanged: the table's key has changed.
            MillstreamError: PostgreSQL refused; the transaction is over.
        """
        connection = self._connection
        with self._reading(table, table_id, under) as (begun, condition):
            found, bounds = begun.table, ChunkBounds()
            query = _copy_query(found, self._place_of(found, bounds), begun.schema.key, bounds, condition, None)
            began(begun)
            connection.execute("SET LOCAL enable_seqscan = on")
            self._take_any_bytes()
            with closing(copy_pieces(connection, query.as_bytes(connection), piece_bytes=piece_bytes)) as pieces:
                mask = hasher(found, self._rules.rules.hashed)
                for piece in pieces:
                    take(mask(piece))

    @contextmanager
    def _reading(
        self, table: SourceTable, table_id: TableId, under: SourceSnapshot | None
    ) -> Iterator[tuple[Begun, str]]:
        """Open a transaction for reading the table; yield the table, and its row filter, as published."""
        connection = self._connection
        name = sql.Identifier(table.namespace, table.name)
        self._widen_search_path(table)
        with translated(), connection.transaction():
            moment = self._begin(name) if under is None else self._begin_under(under, name)
            found = read_table(connection, table.oid)
            if found is None:
                raise TableGone(f"the table {table.full_name} is gone")
            if found.key != table.key:
                raise TableChanged(f"the key of table {table.full_name} changed", table=table.full_name)
            if (found.namespace, found.name) != (table.namespace, table.name):
                raise SourceError(f"the table {table.full_name} was renamed", sqlstate="42P01")
            if under is None:
                self._check_files(found)
            else:
                self._check_not_rewritten(found)
            published, condition = self._as_published(found)
            if published.key_is_hashed != table.key_is_hashed:
                raise TableChanged(f"the key of table {table.full_name} changed", table=table.full_name)
            check_numbers(connection, published)
            yield Begun(published, table_of(published, self._source, table_id), *moment), condition

    def _place_of(self, table: SourceTable, bounds: ChunkBounds) -> sql.Composable:
        """Return where to read a chunk's rows from: the table with all below it, or a partition, whose columns have the same names.

        Raises:
            SourceError: the partition isn't one of the table's by now; the next look at the source's tables deals with that.
        """
        if bounds.partition is None:
            only = sql.SQL("") if table.partitioned else sql.SQL("ONLY ")
            return only + sql.Identifier(table.namespace, table.name)
        name = name_of(self._connection, bounds.partition)
        if name is None or all(part.oid != bounds.partition for part in table.partitions):
            raise SourceError(f"a partition that is copied has left the table {table.full_name}", sqlstate=AGAIN)
        return sql.Identifier(*name)

    def _take_any_bytes(self) -> None:
        """Make a database without an encoding send its text unchanged; later answers no longer come in ours."""
        if self._connection.info.parameter_status("server_encoding") == "SQL_ASCII":
            self._connection.execute("SET LOCAL client_encoding = 'SQL_ASCII'")

    def _lock(self, name: sql.Composable) -> None:
        """Lock the table. It isn't prepared, since that may take a snapshot first."""
        self._connection.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(name), prepare=False)

    def _begin(self, name: sql.Composable) -> Moment:
        """Lock the table, then take the transaction's snapshot."""
        connection = self._connection
        self._lock(name)
        # PostgreSQL takes a query's snapshot before it evaluates anything.
        row = connection.execute(
            "SELECT pg_current_snapshot()::text, pg_current_wal_insert_lsn()::text,"
            " (extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
        ).fetchone()
        assert row is not None
        return Moment(Snapshot.parse(row[0]), as_record_end(parse_lsn(row[1])), int(row[2]))

    def _begin_under(self, snapshot: SourceSnapshot, name: sql.Composable) -> Moment:
        """Import a snapshot, then lock the table."""
        try:
            self._connection.execute(snapshot.set_statement(), prepare=False)
        except psycopg.Error as error:
            raise SourceError("the source ended the transaction of the copy's snapshot", sqlstate=AGAIN) from error
        return self._lock_under(snapshot, name)

    def _lock_under(self, snapshot: SourceSnapshot, name: sql.Composable) -> Moment:
        self._lock(name)
        row = self._connection.execute(
            "SELECT pg_current_snapshot()::text, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
        ).fetchone()
        assert row is not None
        return Moment(Snapshot.parse(row[0]), snapshot.lsn, int(row[1]))

    def _check_files(self, table: SourceTable) -> None:
        """Accept the table: the lock preceded the snapshot, so nothing was rewritten between the two."""

    def _check_not_rewritten(self, table: SourceTable) -> None:
        """Raise if the table was rewritten or truncated between snapshot and lock: the snapshot shows no rows then."""
        seen = {table.oid: table.relfilenode, **{part.oid: part.relfilenode for part in table.partitions}}
        rows = all_rows(
            self._connection,
            "SELECT oid::bigint, coalesce(pg_relation_filenode(oid), 0)::bigint FROM unnest(%s::bigint[]) AS oid",
            [list(seen)],
        )
        if any(seen[oid] != now for oid, now in rows if seen[oid]):
            raise SourceError(f"the table {table.full_name} was rewritten during the read", sqlstate=AGAIN)

    def sample_keys(self, table: SourceTable) -> list[Key]:
        """Return the keys of a random sample of the table's rows, in key order; perhaps none."""
        pages = max(1, table.size_bytes // 8192)
        percent = min(100.0, 100.0 * _SAMPLE_PAGES / pages)
        keys = sql.SQL(", ").join(sql.Identifier(column.name) for column in table.key)
        order = sql.SQL(", ").join(_as_compared(column) for column in table.key)
        only = sql.SQL("") if table.partitioned else sql.SQL("ONLY ")
        query = sql.SQL("SELECT {} FROM {}{} TABLESAMPLE SYSTEM ({}) ORDER BY {}").format(
            keys, only, sql.Identifier(table.namespace, table.name), sql.Literal(percent), order
        )
        self._widen_search_path(table)
        with translated():
            result = self._connection.pgconn.exec_(query.as_bytes(self._connection))
        if result.status != pq.ExecStatus.TUPLES_OK:
            raise translate_result(result)
        rows = [[result.get_value(row, column) for column in range(len(table.key))] for row in range(result.ntuples)]
        return [tuple(value.decode() for value in row if value is not None) for row in rows if None not in row]

    def _as_published(self, table: SourceTable) -> tuple[SourceTable, str]:
        """Return the table with the columns that are sent and its rules applied, and its row filter.

        Raises:
            ConfigError: its rules can't be applied.
        """
        found = restriction(self._connection, self._publications, table)
        published = self._rules.applied(found.applied_to(table))
        if published.refusal is not None:
            raise published.refusal
        return published, found.condition

    def _widen_search_path(self, table: SourceTable) -> None:
        """Set the search path so that comparison operators of the key's types are found.

        Operators of an extension's type are found by the search path alone. The text of a value may depend on
        the path too.
        """
        spaces = [_PINNED_PATH, *sorted({k.operator_namespace for k in table.key} - {_PINNED_PATH})]
        if spaces != self._search_path:
            with translated():
                path = sql.SQL(", ").join(map(sql.Identifier, spaces))
                self._connection.execute(sql.SQL("SET search_path = {}").format(path))
            self._search_path = spaces


def table_of(table: SourceTable, source: SourceId, table_id: TableId) -> TableSchema:
    """Return the schema of a table as the source's catalogs have it now; its version isn't known yet."""
    full = table.replica_identity is ReplicaIdentity.FULL
    key = tuple(column.name for column in table.key) if full else None
    schema = table_schema(table.relation, source=source, key=key, table_id=table_id)
    return replace(schema.with_numbers(table.column_numbers), partitioned=table.partitioned)


def _copy_query(
    table: SourceTable,
    place: sql.Composable,
    key_names: Sequence[str],
    bounds: ChunkBounds,
    condition: str,
    rows_max: int | None,
) -> sql.Composed:
    """Return the COPY of a chunk, whose rows are read from a place.

    Bounds are in the index's column order. `bounds.keys` are in the schema's: `key_names`, as the log has them. Behind
    the columns of a partitioned table stands the OID of the row's leaf partition.
    """
    read = read_columns(table)
    if table.partitioned:
        read.append(sql.SQL("tableoid"))  # LOCK TABLE has shown that we may read it
    columns = sql.SQL(", ").join(read)
    query = sql.SQL("SELECT {} FROM {}").format(columns, place)
    conditions: list[sql.Composable] = [sql.SQL("({})").format(sql.SQL(condition))] if condition else []
    sent = [c.name for c in table.relation.columns]
    named = dict(zip(sent, log_names(sent), strict=True))
    names = [named.get(c.name, c.name) for c in table.key]
    types = {name: sql.SQL(c.type) for name, c in zip(names, table.key, strict=True)}
    compared = {name: _as_compared(c) for name, c in zip(names, table.key, strict=True)}
    key = _row(list(compared.values())) if table.key and not table.key_is_hashed else None
    hashed = {named[name] for name, rule in table.rules.items() if rule is Rule.HASH}
    plain = [name for name in key_names if name not in hashed]
    if bounds.keys and plain:
        places = [key_names.index(name) for name in plain]
        parts = dict.fromkeys(tuple(one[place] for place in places) for one in bounds.keys)
        wanted = sql.SQL(", ").join(_literals(one, plain, types) for one in parts)
        conditions.append(sql.SQL("{} IN ({})").format(_row([compared[name] for name in plain]), wanted))
    if key is not None:
        if bounds.after is not None:
            conditions.append(sql.SQL("{} > {}").format(key, _literals(bounds.after, names, types)))
        if bounds.upto is not None:
            conditions.append(sql.SQL("{} <= {}").format(key, _literals(bounds.upto, names, types)))
    if any(column.operator_namespace != _PINNED_PATH for column in table.key):
        # The statement is parsed by now, and names of objects are printed by the path at the time of printing.
        conditions.insert(0, sql.SQL(f"(SELECT set_config('search_path', '{_PINNED_PATH}', true)) IS NOT NULL"))
    if conditions:
        query += sql.SQL(" WHERE {}").format(sql.SQL(" AND ").join(conditions))
    if key is not None and not bounds.keys:
        query += sql.SQL(" ORDER BY {}").format(sql.SQL(", ").join(compared.values()))
    if rows_max is not None:
        query += sql.SQL(" LIMIT {}").format(sql.Literal(rows_max))
    return sql.SQL("COPY ({}) TO STDOUT").format(query)


def _literals(key: Key, names: Sequence[str], types: Mapping[str, sql.SQL]) -> sql.Composed:
    """Return a key's texts cast to their types.

    Without the cast PostgreSQL reads a `regclass` as a number, and can't read a row type.
    """
    return _row([sql.SQL("{}::{}").format(sql.Literal(t), types[n]) for t, n in zip(key, names, strict=True)])


def _as_compared(column: KeyColumn) -> sql.Composed:
    """Return a key's column as its index compares it."""
    named = sql.Identifier(column.name)
    return sql.Composed(
        [named] if column.collation is None else [named, sql.SQL(" COLLATE "), sql.Identifier(*column.collation)]
    )


def _row(parts: Sequence[sql.Composable]) -> sql.Composed:
    return sql.SQL("({})" if len(parts) == 1 else "ROW({})").format(sql.SQL(", ").join(parts))


def encode_key(key: Key | None) -> str | None:
    """Return a key as the catalog stores it."""
    return None if key is None else json.dumps(list(key))


def decode_key(text: str | None) -> Key | None:
    """Return the key that `encode_key` encoded."""
    return None if text is None else tuple(json.loads(text))
