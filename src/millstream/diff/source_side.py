"""The source's side of `diff`: checksums over ranges of a table under one snapshot, then the rows that differ.

One pass computes the sums, some thousand pages at a time so that progress can be reported. Another pass
reads the rows of ranges that differ. They come ordered by range, so that memory holds one range at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import sql

from millstream.capture.column_rules.apply_to_copies import check_numbers, read_columns
from millstream.capture.connection import Connection, translated
from millstream.capture.copying.copy_output import CopyText, copy_pieces
from millstream.capture.publication import Restriction, inserts_name, list_published, restrictions
from millstream.capture.source_tables import SourceTable, read_table
from millstream.diff.column_texts import HASH, RANGE, HashName, RowTexts
from millstream.diff.hashed_rows import HashedRows, SourceRow, sorted_by_range
from millstream.errors import SourceError
from millstream.model.names import TablePatterns, quote

_STEP_PAGES: Final = 16384
"""Pages read between two reports of progress: 128 MiB of a table."""
_PIECE_BYTES: Final = 4 << 20
_LOCK_TIMEOUT: Final = "5s"

Sums = dict[int, tuple[int, int]]
"""(rows, sum of their hashes) by range; ranges without rows are omitted."""


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A table of the source as its publications let it through."""

    table: SourceTable
    """The table with the columns that are sent."""
    condition: str
    """The row filter; empty if there is none."""


def published_tables(connection: Connection, patterns: TablePatterns, publication: str) -> list[PublishedTable]:
    """Return the tables that a stream captures, restricted to the columns and rows that are sent."""
    sent = restrictions(connection, (publication, inserts_name(publication)))
    return [
        PublishedTable(table, sent.get((table.namespace, table.name), Restriction()).condition)
        for table in list_published(connection, patterns, publication)
    ]


def pick_hash(connection: Connection) -> HashName:
    """Return the hash that both sides use: md5, unless the server's policy (FIPS) forbids it."""
    try:
        with translated(), connection.transaction():
            connection.execute("SELECT pg_catalog.md5('')")
    except SourceError:
        return "sha256"
    return "md5"


# Rows are read of the present partitions, those of the snapshot are in the catalog's rows.
_MOVED_PARTITIONS: Final = """
WITH RECURSIVE tree (oid) AS (
    SELECT %(oid)s::oid
    UNION ALL SELECT h.inhrelid FROM tree t JOIN pg_inherits h ON h.inhparent = t.oid WHERE NOT h.inhdetachpending),
present AS (SELECT p.relid::oid AS oid FROM pg_partition_tree(%(oid)s) p)
(SELECT oid FROM tree EXCEPT SELECT oid FROM present) UNION ALL (SELECT oid FROM present EXCEPT SELECT oid FROM tree) LIMIT 1
"""


class TableSide:
    """One table at the source, read over a connection in a transaction under the snapshot.

    Args:
        published: the table, with the rules of its columns applied.
        hashed: returns what stands for a text in a hashed column.

    Raises (any call):
        SourceError (`table_moved`): the snapshot doesn't show the table as it was.
        MillstreamError: PostgreSQL refused.
    """

    def __init__(self, connection: Connection, published: PublishedTable, hashed: Callable[[bytes], bytes]) -> None:
        self._connection = connection
        self._published = published
        self._hashed = hashed
        self._table = published.table
        self._utf8 = connection.info.parameter_status("server_encoding") in {"UTF8", "SQL_ASCII"}
        self._lock()

    def _lock(self) -> None:
        """Lock out rewrites and TRUNCATE, and detect an earlier one: the snapshot would show an empty table."""
        table = self._table
        name = sql.Identifier(table.namespace, table.name)
        connection = self._connection
        moved = SourceError(
            f"{table.full_name} was rewritten, renamed or dropped, or got or lost a partition, while `diff` ran",
            code="table_moved",
            hint="Run `diff` again for this table.",
            table=table.full_name,
        )
        with translated():
            connection.execute(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT}'")
            there = connection.execute(
                "SELECT pg_catalog.to_regclass(%s)::oid::bigint", [name.as_string(connection)]
            ).fetchone()
            if there is None or there[0] != table.oid:
                raise moved
            connection.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(name))
            # The functions read the present state, the query reads the snapshot's.
            same = connection.execute(
                "SELECT bool_and(pg_catalog.pg_relation_filenode(c.oid) IS NOT DISTINCT FROM nullif(c.relfilenode, 0))"
                " FROM pg_class c WHERE c.oid = %s OR c.oid IN (SELECT p.relid FROM pg_partition_tree(%s) p WHERE p.isleaf)",
                [table.oid, table.oid],
            ).fetchone()
            if same is None or not same[0] or read_table(connection, table.oid) is None:
                raise moved
            if table.partitioned and connection.execute(_MOVED_PARTITIONS, {"oid": table.oid}).fetchone() is not None:
                raise moved
            spaces = ["pg_catalog", *sorted({k.operator_namespace for k in table.key} - {"pg_catalog"})]
            if table.rules:
                # Values are hashed as the stream prints them. No operator of a key is needed.
                check_numbers(connection, table)
                spaces = ["pg_catalog"]
            connection.execute(
                sql.SQL("SET LOCAL search_path = {}").format(sql.SQL(", ").join(map(sql.Identifier, spaces)))
            )

    def sums(self, texts: RowTexts, tell: Callable[[int], None]) -> Sums:
        """Return the sums of all ranges; call `tell` with the number of rows read so far."""
        found: Sums = {}
        rows_through = 0
        for step in self._steps():
            if texts.hashed:
                rows_through += self._add_hashed(texts, step, found)
                tell(rows_through)
                continue
            query = (
                f"SELECT {RANGE}, count(*), sum({HASH})::text FROM ({texts.source_sql(self._rows(step), utf8=self._utf8)}) r"
                f" GROUP BY {RANGE}"
            )
            with translated():
                for place, rows, total in self._connection.execute(query.encode()):
                    had = found.get(place, (0, 0))
                    found[place] = (had[0] + rows, had[1] + int(total))
                    rows_through += rows
            tell(rows_through)
        return found

    def _add_hashed(self, texts: RowTexts, step: str, found: Sums) -> int:
        """Add a step's rows of a table with hashed columns to the sums; return their number."""
        rows_through = 0
        query = texts.unhashed_sql(self._rows(step), utf8=self._utf8)
        with self._copied(f"COPY ({query}) TO STDOUT") as pieces:
            for place, hashed in HashedRows(texts, self._hashed).sums(pieces):
                rows, total = found.get(place, (0, 0))
                found[place] = (rows + 1, total + hashed)
                rows_through += 1
        return rows_through

    def _hashed_rows(self, texts: RowTexts, ranges: Collection[int]) -> Iterator[SourceRow]:
        query = texts.unhashed_sql(self._rows(""), utf8=self._utf8)
        if texts.source_ranges:
            query = f"SELECT * FROM ({query}) r WHERE {RANGE} = ANY ({_array(ranges)}) ORDER BY {RANGE}"
        with self._copied(f"COPY ({query}) TO STDOUT") as pieces:
            rows = HashedRows(texts, self._hashed).rows(pieces)
            yield from rows if texts.source_ranges else sorted_by_range(rows, ranges, len(texts.columns))

    @contextmanager
    def _copied(self, query: str) -> Iterator[Iterator[CopyText]]:
        connection = self._connection
        any_bytes = connection.info.parameter_status("server_encoding") == "SQL_ASCII"
        with translated():
            if any_bytes:
                connection.execute("SET LOCAL client_encoding = 'SQL_ASCII'")
            with closing(copy_pieces(connection, query.encode(), piece_bytes=lambda: _PIECE_BYTES)) as pieces:
                yield pieces
            if any_bytes:
                connection.execute("SET LOCAL client_encoding = 'UTF8'")

    def rows(self, texts: RowTexts, ranges: Collection[int]) -> Iterator[SourceRow]:
        """Return (range, hash, the columns' texts as PostgreSQL prints them) of every row of some ranges, by range.

        A hashed column has hashes. Without such columns, the server begins at the call, not when the first row is
        requested.
        """
        if texts.hashed:
            return self._hashed_rows(texts, ranges)
        query = (
            f"COPY (SELECT * FROM ({texts.source_sql(self._rows(''), utf8=self._utf8)}) r"
            f" WHERE {RANGE} = ANY ({_array(ranges)}) ORDER BY {RANGE}) TO STDOUT"
        )
        with translated(), ExitStack() as stack:
            copy = stack.enter_context(self._connection.cursor().copy(query.encode()))
            return self._split(copy, stack.pop_all())

    @staticmethod
    def _split(copy: psycopg.Copy, stack: ExitStack) -> Iterator[SourceRow]:
        with translated(), stack:
            for place, hashed, *columns in copy.rows():
                yield int(place), int(hashed), tuple(columns)

    def _rows(self, step: str) -> str:
        only = "" if self._table.partitioned else "ONLY "
        name = sql.Identifier(self._table.namespace, self._table.name).as_string(self._connection)
        conditions = [f"({part})" for part in (self._published.condition, step) if part]
        rows = f"{only}{name}" + (f" WHERE {' AND '.join(conditions)}" if conditions else "")
        if not self._table.rules:
            return rows
        # A redacted column's values are replaced by the server, an excluded column isn't read.
        read = zip(read_columns(self._table), self._table.relation.columns, strict=True)
        columns = ", ".join(f"{one.as_string(self._connection)} AS {quote(column.name)}" for one, column in read)
        return f"(SELECT {columns} FROM {rows}) ruled"

    def _steps(self) -> Iterator[str]:
        """Yield conditions that cut the table into pieces of pages; rows keep their place under the snapshot."""
        pages = self._table.size_bytes // 8192
        if self._table.partitioned or pages <= _STEP_PAGES:
            yield ""
            return
        for first in range(0, pages, _STEP_PAGES):
            last = first + _STEP_PAGES >= pages
            # The last piece has no end: the table may have grown between the snapshot and the reading of its size.
            end = "" if last else f" AND ctid < '({first + _STEP_PAGES},0)'::pg_catalog.tid"
            yield f"ctid >= '({first},0)'::pg_catalog.tid{end}"


def _array(ranges: Collection[int]) -> str:
    return f"'{{{','.join(map(str, sorted(ranges)))}}}'::pg_catalog.int8[]"
