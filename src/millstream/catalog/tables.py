"""The catalog's tables, with their states; `schema_versions` numbers the versions of their schemas."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias
from uuid import UUID

from sqlalchemy import Connection, Row, Select, select, update

import millstream.catalog.sql_tables as t
from millstream.catalog.catalog_part import lock_stream, now_us
from millstream.catalog.row_types import TableRow, TableState
from millstream.catalog.schema_versions import SchemaVersions, schema_of
from millstream.errors import CatalogError, IngestError, InvalidValue, UnknownTable
from millstream.model.ids import SchemaVersion, ShardId, SourceId, StreamId, TableId
from millstream.model.names import name_in_full, qualified_name, same_bare
from millstream.model.schema import TableKind, TableSchema

NAME_TAKEN: Final = "applications write a table of this name into the stream: rename the one at the source"


Grow: TypeAlias = Callable[[TableSchema], TableSchema]
"""Returns the wanted schema of a table; see `Tables.application_table`."""


class Tables(SchemaVersions):
    """Tables and their states."""

    def table_for(
        self,
        stream: StreamId,
        source: SourceId,
        relation_oid: int,
        namespace: str,
        name: str,
        *,
        kind: TableKind = TableKind.TABLE,
        shard: ShardId = ShardId(0),
        state: TableState = TableState.COPY_REQUESTED,
        reason: str = "",
    ) -> TableRow:
        """Return the table of a relation; it is created with `shard`, `state` and `reason` if it is new.

        A relation is identified by its OID within the same system and database, whatever the timeline, and by `kind`.
        An existing table keeps id, shard and state; its name follows a rename. A table that is `GONE` is never found:
        a relation that comes back is a new table. If applications write a table of the relation's name, its table is
        quarantined: otherwise the two would have one location in the lake.
        """
        with self._database.write() as connection:
            lock_stream(connection, stream)
            origin = connection.execute(select(t.sources).where(t.sources.c.id == source)).first()
            if origin is None and source != 0:
                raise CatalogError(f"the catalog has no source {source}", source=source)
            query = select(t.tables).where(
                t.tables.c.stream == str(stream),
                t.tables.c.relation_oid == relation_oid,
                t.tables.c.kind == kind.value,
                t.tables.c.state != TableState.GONE.value,
            )
            if origin is None:
                query = query.where(t.tables.c.source == 0, t.tables.c.namespace == namespace, t.tables.c.name == name)
            else:
                branches = select(t.sources.c.id).where(
                    t.sources.c.stream == str(stream),
                    t.sources.c.system_identifier == origin.system_identifier,
                    t.sources.c.database == origin.database,
                )
                query = query.where(t.tables.c.source.in_(branches))
            row = connection.execute(query).first()
            if row is not None and (row.namespace, row.name) == (namespace, name):
                return table_row(row)
            taken = (
                source != 0 and kind is TableKind.TABLE and _written(connection, stream, namespace, name) is not None
            )
            if taken:
                state, reason = TableState.QUARANTINED, NAME_TAKEN
            stands = {"state": state.value, "reason": reason, "changed_us": now_us()}
            named = {"namespace": namespace, "name": name}
            if row is None:
                of = {"source": source, "relation_oid": relation_oid, "kind": kind.value, "shard": shard}
                row = self._insert_table(connection, stream, {**of, **named, **stands})
            else:
                renamed = update(t.tables).where(t.tables.c.id == row.id).values({**named, **(stands if taken else {})})
                row = connection.execute(renamed.returning(t.tables)).one()
        return table_row(row)

    def table(self, table: TableId) -> TableRow:
        """Return one table by its id; raise `UnknownTable` if there is none."""
        with self._database.read() as connection:
            row = connection.execute(select(t.tables).where(t.tables.c.id == table)).first()
        if row is None:
            raise UnknownTable(f"the catalog has no table {table}", table=table)
        return table_row(row)

    def tables(self, stream: StreamId, *, gone: bool = False) -> list[TableRow]:
        """Return the stream's tables by name; with `gone`, those that have left too."""
        query = select(t.tables).where(t.tables.c.stream == str(stream))
        if not gone:
            query = query.where(t.tables.c.state != TableState.GONE.value)
        with self._database.read() as connection:
            rows = connection.execute(query).all()
        return sorted((table_row(row) for row in rows), key=lambda table: (table.namespace, table.name, table.id))

    def states(self, stream: StreamId) -> dict[TableId, TableState]:
        """Return the states of the stream's tables, except those that have left: of 1,000 tables in a millisecond."""
        query = select(t.tables.c.id, t.tables.c.state).where(
            t.tables.c.stream == str(stream), t.tables.c.state != TableState.GONE.value
        )
        with self._database.read() as connection:
            return {TableId(table): TableState(state) for table, state in connection.execute(query)}

    def find_table(self, stream: StreamId, namespace: str, name: str) -> TableRow:
        """Return the table that has that name now; raise `UnknownTable` if none has.

        A table that applications write comes before a captured one. Among captured ones it is the newest: one that was
        dropped at the source keeps its name until capture has noticed that it is gone.
        """
        rows = self.tables(stream)
        named = [row for row in rows if (row.namespace, row.name) == (namespace, name)]
        if named:
            return max(named, key=lambda row: (row.source == 0, row.id))
        full_name = qualified_name(namespace, name)
        meant = name_in_full(same_bare(name, ((row.namespace, row.name) for row in rows)))
        raise UnknownTable(f"the stream has no table {full_name}", hint=meant or None, table=full_name)

    def set_state(
        self,
        table: TableId,
        state: TableState | str,
        reason: str = "",
        *,
        details: Mapping[str, Any] | None = None,
        copy_id: str | None = None,
        only_from: Iterable[TableState] | None = None,
    ) -> bool:
        """Set the state of a table, with the reason.

        Args:
            reason: one sentence for people.
            details: JSON-able facts, which replace the old ones.
            copy_id: the copy that begins; None: unchanged.
            only_from: change nothing unless the table is in one of these states (compare and set).

        Returns:
            Whether it was changed.
        """
        values: dict[str, Any] = {
            "state": TableState(state).value,
            "reason": reason.replace("\0", "\\0"),  # PostgreSQL's text has no such character
            "details": json.dumps(dict(details or {})),
            "changed_us": now_us(),
        }
        if copy_id is not None:
            values["copy_id"] = copy_id
        change = update(t.tables).where(t.tables.c.id == table).values(values)
        if only_from is not None:
            change = change.where(t.tables.c.state.in_([s.value for s in only_from]))
        with self._database.write() as connection:
            return connection.execute(change).rowcount > 0

    def application_table(
        self,
        stream: StreamId,
        namespace: str,
        name: str,
        *,
        shard: ShardId,
        grow: Grow,
    ) -> TableSchema:
        """Return the newest schema of a table that applications write, after `grow`.

        The table is created if it is new; a schema that is new is numbered.

        Args:
            grow: called once with the newest schema, which has no columns if the table is new; returns the wanted
                one. No other process changes the table during the call; if it raises, everything stays as it was.

        Raises:
            IngestError (`table_captured`): the name is a captured table's.
            InvalidValue: it differs from another table's name only in case.
        """
        return self.application_tables(stream, {(namespace, name): (shard, grow)})[namespace, name]

    def application_tables(
        self, stream: StreamId, wanted: Mapping[tuple[str, str], tuple[ShardId, Grow]]
    ) -> dict[tuple[str, str], TableSchema]:
        """Return the newest schemas of tables, each as `application_table` does, in one transaction.

        If it raises, no table is made or changed.

        Args:
            wanted: for each table, by schema and name, the shard that it gets if it is new, and `grow`.
        """
        schemas: dict[tuple[str, str], TableSchema] = {}
        with self._database.write() as connection:
            lock_stream(connection, stream)
            names = self._names(connection, stream)
            present: dict[str, list[Row[Any]]] = {}
            for had in connection.execute(_present(stream)):
                present.setdefault(_queried_as(had.namespace, had.name), []).append(had)
            for (namespace, name), (shard, grow) in wanted.items():
                alike = present.setdefault(_queried_as(namespace, name), [])
                # A table that applications write stays theirs, even if the source has got one of its name since.
                named = (had for had in alike if (had.source, had.namespace, had.name) == (0, namespace, name))
                row = next(named, None)
                if row is None:
                    _check_free(alike, namespace, name)
                    row = self._insert_table(
                        connection,
                        stream,
                        {
                            "source": 0,
                            "relation_oid": 0,
                            "namespace": namespace,
                            "name": name,
                            "kind": TableKind.TABLE.value,
                            "shard": shard,
                            "state": TableState.STREAMING.value,
                            "changed_us": now_us(),
                        },
                    )
                    alike.append(row)
                known = TableSchema(TableId(row.id), SchemaVersion(0), SourceId(0), namespace, name, ())
                newest = select(t.schema_versions.c.arrow).where(
                    t.schema_versions.c.table_id == row.id, t.schema_versions.c.version == row.schema_version
                )
                for blob in connection.execute(newest).scalars():
                    known = schema_of(blob)
                grown = grow(known)
                schemas[namespace, name] = known if grown == known else self._number(connection, grown, names)
        return schemas

    def _insert_table(self, connection: Connection, stream: StreamId, values: Mapping[str, Any]) -> Row[Any]:
        made = self._database.insert(t.tables).values({"stream": str(stream), **values})
        return connection.execute(made.returning(t.tables)).one()


def _present(stream: StreamId) -> Select[Any]:
    """Return a query for the stream's tables that aren't gone."""
    return select(t.tables).where(
        t.tables.c.stream == str(stream),
        t.tables.c.kind == TableKind.TABLE.value,
        t.tables.c.state != TableState.GONE.value,
    )


def _written(connection: Connection, stream: StreamId, namespace: str, name: str) -> Row[Any] | None:
    """Return the table of that name that applications write; None if there is none."""
    named = (t.tables.c.source == 0, t.tables.c.namespace == namespace, t.tables.c.name == name)
    return connection.execute(_present(stream).where(*named)).first()


def _queried_as(namespace: str, name: str) -> str:
    """Return the name by which a query finds a table: two tables can't share it."""
    return qualified_name(namespace, name).lower().replace('"', "")


def _check_free(alike: Iterable[Row[Any]], namespace: str, name: str) -> None:
    """Check that applications may create a table of that name; raise `table_captured` or `InvalidValue` if not.

    Args:
        alike: the stream's tables that a query would find by that name.
    """
    mine = qualified_name(namespace, name)
    for row in alike:
        if (row.namespace, row.name) == (namespace, name):
            raise IngestError(f"{mine} is captured from PostgreSQL", code="table_captured", table=mine)
        other = qualified_name(row.namespace, row.name)
        raise InvalidValue(
            f"tables {other} and {mine} would have one name in a query",
            hint="Write to the existing table, or use another name.",
            table=mine,
        )


def table_row(row: Row[Any]) -> TableRow:
    """Return a row of `tables` as a value."""
    return TableRow(
        id=TableId(row.id),
        stream=StreamId(UUID(row.stream)),
        source=SourceId(row.source),
        relation_oid=row.relation_oid,
        namespace=row.namespace,
        name=row.name,
        kind=TableKind(row.kind),
        shard=ShardId(row.shard),
        state=TableState(row.state),
        reason=row.reason,
        details=json.loads(row.details),
        schema_version=SchemaVersion(row.schema_version),
        copy_id=row.copy_id,
        changed_us=row.changed_us,
    )
