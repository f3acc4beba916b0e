"""A catalog's rows, copied from one catalog to another: of all its streams, or of some.

Numbers stay: logs contain them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Table, delete, select

from millstream.catalog import Catalog
from millstream.catalog import sql_tables as t
from millstream.errors import CatalogError
from millstream.model.ids import StreamId

Rows = Mapping[Table, Sequence[dict[str, Any]]]


def rows_of(catalog: Catalog, streams: Collection[StreamId] | None = None) -> Rows:
    """Return every row, or those of some streams, without access tokens then.

    Each table comes after those it refers to.
    """
    with catalog.database.read() as connection:
        rows: dict[Table, list[dict[str, Any]]] = {
            table: [dict(row) for row in connection.execute(select(table)).mappings()]
            for table in t.metadata.sorted_tables
        }
    if streams is None:
        return rows
    ids = {str(stream) for stream in streams}
    of_table = {row["id"] for row in rows[t.tables] if row["stream"] in ids}
    found: dict[Table, list[dict[str, Any]]] = {}
    for table, its in rows.items():
        if table is t.access_tokens:
            found[table] = []
        elif table is t.facts:
            # `kind/<stream>`, `kind/<stream>/more`
            found[table] = [row for row in its if ids & set(row["scope"].split("/")[1:2])]
        elif table is t.streams:
            found[table] = [row for row in its if row["id"] in ids]
        elif "stream" in table.c:
            found[table] = [row for row in its if row["stream"] in ids]
        else:
            found[table] = [row for row in its if row["table_id"] in of_table]
    return found


def put_rows(connection: Connection, catalog: Catalog, rows: Rows) -> None:
    """Put rows into a catalog without conflicting ones (`check_free`), and note that its home has the streams."""
    for table, found in rows.items():
        if found:
            connection.execute(catalog.database.insert(table), found)
    for table in (t.sources, t.tables):
        catalog.database.number_above(connection, table)
    for row in rows[t.streams]:
        stream = StreamId(UUID(row["id"]))
        catalog.claim(connection, row["name"], stream, found=stream)


def check_free(connection: Connection, place: str, rows: Rows, *, hint: str) -> None:
    """Raise `CatalogError` if the database has conflicting rows."""
    for column, what in (
        (t.streams.c.name, "a stream of the name"),
        (t.streams.c.id, "the stream"),
        (t.sources.c.id, "a source of the number"),
        (t.tables.c.id, "a table of the number"),
    ):
        ours = [row[column.name] for row in rows[column.table]]
        taken = connection.execute(select(column).where(column.in_(ours)).order_by(column).limit(1)).scalar()
        if taken is not None:
            raise CatalogError(f"the {place} has {what} {taken} already, of another home", hint=hint)


def replace_rows(catalog: Catalog, rows: Rows, *, place: str, hint: str) -> None:
    """Replace a catalog's rows of one or several streams: all of them, or nothing.

    Raises:
        CatalogError: rows of other streams conflict; the hint says what to do.
    """
    ids = [row["id"] for row in rows[t.streams]]
    with catalog.database.write() as connection:
        of_table = select(t.tables.c.id).where(t.tables.c.stream.in_(ids))
        for table in reversed(t.metadata.sorted_tables):
            if table is t.facts:
                for one in ids:
                    of_stream = t.facts.c.scope.like(f"%/{one}") | t.facts.c.scope.like(f"%/{one}/%")
                    connection.execute(delete(t.facts).where(of_stream))
            elif table is t.streams:
                connection.execute(delete(table).where(table.c.id.in_(ids)))
            elif "stream" in table.c:
                connection.execute(delete(table).where(table.c.stream.in_(ids)))
            elif "table_id" in table.c:
                connection.execute(delete(table).where(table.c.table_id.in_(of_table)))
        check_free(connection, place, rows, hint=hint)
        put_rows(connection, catalog, rows)
