"""Adoption of a log's facts that its catalog lacks: tables, versions of schemas and numbers of sources.

A catalog that was lost, or restored from a backup, is older than its log. It would give numbers again that the log's
records use, and rows would come back under another table's name. The log's schemas have everything that the numbers
stand for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Row, select, update

import millstream.catalog.sql_tables as t
from millstream.catalog.catalog_part import CatalogPart, lock_stream, now_us
from millstream.catalog.row_types import TableState
from millstream.catalog.schema_versions import fingerprint_of, schema_of
from millstream.catalog.tables import NAME_TAKEN
from millstream.errors import CatalogError
from millstream.model.ids import SchemaVersion, ShardId, SourceId, StreamId, TableId
from millstream.model.names import qualified_name
from millstream.model.schema import ReplicaIdentity, TableKind, TableSchema

_REASON: Final = "the catalog is older than the log, which has this table"


@dataclass(frozen=True, slots=True)
class LoggedTable:
    """A table as its log has it."""

    versions: tuple[TableSchema, ...]
    """Its schemas in the log, by version; at least one."""
    shard: ShardId
    """Shard of the newest schema."""

    @property
    def newest(self) -> TableSchema:
        """The schema of its last records."""
        return self.versions[-1]


class Adoption(CatalogPart):
    """Adopts a log's facts."""

    def adopt_tables(
        self, stream: StreamId, tables: Iterable[LoggedTable], sources: Collection[SourceId] = ()
    ) -> list[TableId]:
        """Adopt the tables and schema versions that the catalog lacks, and number new ones above them; all or nothing.

        Args:
            sources: numbers of sources in its records; none of them is given again.

        A table of applications goes on as it was. A captured table is copied again, because the log doesn't show
        whether its copy had ended. If the catalog doesn't know its source, the table is gone: the log doesn't name
        the source's database, so the database gets a new number, and its tables are new ones. If two captured tables
        have one name, the older one is gone.

        Returns:
            The tables that the catalog lacked, or lacked a version of.

        Raises:
            CatalogError (`catalog_older`): one of the log's numbers means something else in the catalog. Nothing was changed.
            UnknownStream: the catalog has no such stream.
        """
        logged = {table.newest.table_id: table for table in tables}
        with self._database.write() as connection:
            lock_stream(connection, stream)
            rows = {row.id: row for row in connection.execute(select(t.tables).where(t.tables.c.id.in_(list(logged))))}
            known = _versions(connection, logged)
            for number, table in logged.items():
                if number in rows:
                    _check_same(stream, rows[number], table, known[number])
            missing = {number: table for number, table in logged.items() if number not in rows}
            own = select(t.sources.c.id).where(t.sources.c.stream == str(stream))
            states = _states(_present(connection, stream), missing, set(connection.execute(own).scalars()))
            for number, table in missing.items():
                connection.execute(self._database.insert(t.tables).values(_row(stream, table, states[number])))
            adopted = [
                number for number, table in logged.items() if self._add_versions(connection, table, known[number])
            ]
            if missing:
                self._database.number_above(connection, t.tables)
            highest = max(sources, default=SourceId(0))
            if highest:
                self._check_sources(connection, stream, sources)
                self._database.number_above(connection, t.sources, highest)
        return sorted(adopted)

    def _add_versions(
        self, connection: Connection, table: LoggedTable, known: Mapping[SchemaVersion, TableSchema]
    ) -> bool:
        """Add the versions that the catalog lacks; return whether there were any."""
        lacking = [schema for schema in table.versions if schema.version not in known]
        for schema in lacking:
            connection.execute(
                self._database.insert(t.schema_versions).values(
                    table_id=schema.table_id,
                    version=schema.version,
                    fingerprint=fingerprint_of(schema),
                    arrow=schema.to_arrow().serialize().to_pybytes(),
                    created_us=now_us(),
                )
            )
        if lacking and table.newest.version > max(known, default=SchemaVersion(0)):
            newest = table.newest
            changed = {"schema_version": newest.version, "namespace": newest.namespace, "name": newest.name}
            connection.execute(update(t.tables).where(t.tables.c.id == newest.table_id).values(changed))
        return bool(lacking)

    def _check_sources(self, connection: Connection, stream: StreamId, sources: Collection[SourceId]) -> None:
        """Raise `catalog_older` if another stream has one of the numbers."""
        others = select(t.sources.c.id).where(t.sources.c.id.in_(list(sources)), t.sources.c.stream != str(stream))
        taken = connection.execute(others.order_by(t.sources.c.id).limit(1)).scalar()
        if taken is not None:
            raise CatalogError(
                f"the log has records of source {taken}, which in the catalog is another stream's",
                code="catalog_older",
                source=taken,
            )


def _versions(
    connection: Connection, logged: Mapping[TableId, LoggedTable]
) -> defaultdict[TableId, dict[SchemaVersion, TableSchema]]:
    found: defaultdict[TableId, dict[SchemaVersion, TableSchema]] = defaultdict(dict)
    of_them = select(t.schema_versions.c.arrow).where(t.schema_versions.c.table_id.in_(list(logged)))
    for blob in connection.execute(of_them).scalars():
        schema = schema_of(blob)
        found[schema.table_id][schema.version] = schema
    return found


def _check_same(
    stream: StreamId, row: Row[Any], table: LoggedTable, known: Mapping[SchemaVersion, TableSchema]
) -> None:
    """Raise `catalog_older` unless the catalog's table of the number is the log's."""
    newest, named = table.newest, qualified_name(row.namespace, row.name)
    by_fingerprint = {fingerprint_of(schema): version for version, schema in known.items()}
    is_same = (
        row.stream == str(stream)
        and row.relation_oid == newest.relation_oid
        and (TableKind(row.kind) is _kind(newest))
        and (row.source == 0) is (newest.source == 0)
        # Applications' tables keep their names; captured ones are the same if their relation is.
        and (newest.source != 0 or (row.namespace, row.name) == (newest.namespace, newest.name))
    )
    if not is_same:
        raise CatalogError(
            f"the log has table {row.id} as {newest.full_name}, the catalog as {named}",
            code="catalog_older",
            table=newest.full_name,
            table_id=row.id,
        )
    for schema in table.versions:
        if by_fingerprint.get(fingerprint_of(schema), schema.version) != schema.version or (
            schema.version in known and fingerprint_of(known[schema.version]) != fingerprint_of(schema)
        ):
            raise CatalogError(
                f"the log has version {schema.version} of {newest.full_name} with other columns than the catalog",
                code="catalog_older",
                table=newest.full_name,
                table_id=row.id,
                version=int(schema.version),
            )


def _present(connection: Connection, stream: StreamId) -> dict[tuple[bool, str, str], TableId]:
    """Return the stream's tables that aren't gone, by whether they are captured and by name."""
    query = select(t.tables).where(
        t.tables.c.stream == str(stream),
        t.tables.c.kind == TableKind.TABLE.value,
        t.tables.c.state != TableState.GONE.value,
    )
    return {(row.source != 0, row.namespace, row.name): TableId(row.id) for row in connection.execute(query)}


def _states(
    present: Mapping[tuple[bool, str, str], TableId],
    missing: Mapping[TableId, LoggedTable],
    sources: Collection[SourceId],
) -> dict[TableId, tuple[TableState, str]]:
    """Return the state in which each missing table is adopted, with the reason.

    Raises:
        CatalogError (`catalog_older`): the catalog has a table of its name under another number.
    """
    states: dict[TableId, tuple[TableState, str]] = {}
    named: dict[tuple[bool, str, str], TableId] = {}
    for number in sorted(missing, reverse=True):
        schema = missing[number].newest
        name = (schema.source != 0, schema.namespace, schema.name)
        kind, is_captured = _kind(schema), schema.source != 0
        if kind is TableKind.TABLE and name in present:
            raise CatalogError(
                f"the log has {schema.full_name} as table {number}, the catalog as table {present[name]}",
                code="catalog_older",
                table=schema.full_name,
                table_id=int(number),
            )
        if is_captured and (schema.source not in sources or name in named):
            states[number] = (TableState.GONE, _REASON)
        elif not is_captured or kind is TableKind.MESSAGES:
            states[number] = (TableState.STREAMING, _REASON)
        elif (False, schema.namespace, schema.name) in present or schema.kind is TableKind.RAW:
            taken = schema.kind is not TableKind.RAW
            states[number] = (TableState.QUARANTINED, NAME_TAKEN if taken else f"{_REASON} quarantined")
        elif not schema.identity and schema.replica_identity is ReplicaIdentity.NOTHING:
            states[number] = (TableState.HISTORY_ONLY, _REASON)
        else:
            states[number] = (TableState.COPY_REQUESTED, _REASON)
        named.setdefault(name, number)
    return states


def _row(stream: StreamId, table: LoggedTable, state: tuple[TableState, str]) -> dict[str, Any]:
    schema = table.newest
    return {
        "id": schema.table_id,
        "stream": str(stream),
        "source": schema.source,
        "relation_oid": schema.relation_oid,
        "namespace": schema.namespace,
        "name": schema.name,
        "kind": _kind(schema).value,
        "shard": table.shard,
        "state": state[0].value,
        "reason": state[1],
        "changed_us": now_us(),
    }


def _kind(schema: TableSchema) -> TableKind:
    """Return a table's kind: a table that is quarantined has schemas of raw changes."""
    return TableKind.TABLE if schema.kind is TableKind.RAW else schema.kind
