"""The catalog's versions of tables' schemas: equal facts have one version, new ones the next.

A version also has the lake folder of the name that the table had then.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa
from sqlalchemy import Connection, Select, func, select, update

import millstream.catalog.sql_tables as t
from millstream.catalog.catalog_part import CatalogPart, lock_stream, now_us
from millstream.errors import UnknownTable
from millstream.model.ids import SchemaVersion, StreamId, TableId
from millstream.model.schema import TableKind, TableSchema


class NameOfTable(NamedTuple):
    """The name that a table has in one version of its schema, and the id in the name of its lake folder."""

    table_id: TableId
    version: SchemaVersion
    namespace: str
    name: str
    folder_id: TableId
    written: TableSchema | None = None
    """The schema itself, if applications write the table."""


_NamesByCase: TypeAlias = dict[tuple[str, ...], list[NameOfTable]]
"""The names of tables, by `_without_case`."""


class SchemaVersions(CatalogPart):
    """The versions of tables' schemas, and their numbering."""

    _known_names: dict[tuple[int, int], NameOfTable]

    def put_schema(self, stream: StreamId, schema: TableSchema) -> TableSchema:
        """Number a schema: equal facts get the same version, new ones the next. It becomes the table's newest.

        Args:
            schema: a schema with a table id of `table_for`; its version is ignored.

        Raises:
            UnknownTable: the stream has no table of that id.
        """
        with self._database.write() as connection:
            owner = connection.execute(select(t.tables.c.stream).where(t.tables.c.id == schema.table_id)).scalar()
            if owner != str(stream):
                raise UnknownTable(f"the stream has no table {schema.table_id}", table=schema.table_id)
            # Two processes with new schemas number them one after the other, and see each other's names.
            lock_stream(connection, stream)
            return self._number(connection, schema, self._names(connection, stream))

    def _number(self, connection: Connection, schema: TableSchema, names: _NamesByCase) -> TableSchema:
        """Number a schema and make it the table's newest. The caller has locked the stream.

        Args:
            names: every name that the stream's tables have or had; gets the table's.
        """
        alike = names.setdefault(_without_case((schema.namespace, schema.name)), [])
        schema = replace(schema, folder_id=_folder_id(alike, schema))
        fingerprint = fingerprint_of(schema)
        of_table = t.schema_versions.c.table_id == schema.table_id
        same = select(t.schema_versions.c.version).where(of_table, t.schema_versions.c.fingerprint == fingerprint)
        version = connection.execute(same).scalar()
        if version is None:
            last = select(func.coalesce(func.max(t.schema_versions.c.version), 0)).where(of_table)
            version = connection.execute(last).scalar_one() + 1
            numbered = replace(schema, version=SchemaVersion(version))
            connection.execute(
                self._database.insert(t.schema_versions).values(
                    table_id=schema.table_id,
                    version=version,
                    fingerprint=fingerprint,
                    arrow=numbered.to_arrow().serialize().to_pybytes(),
                    created_us=now_us(),
                )
            )
        newest = update(t.tables).where(t.tables.c.id == schema.table_id, t.tables.c.schema_version != version)
        connection.execute(newest.values(schema_version=version))
        numbered = replace(schema, version=SchemaVersion(version))
        alike.append(_named(numbered))
        return numbered

    def _names(self, connection: Connection, stream: StreamId) -> _NamesByCase:
        """Return the name of every version of the stream's tables. A version never changes, so each is decoded once."""
        keys = select(t.schema_versions.c.table_id, t.schema_versions.c.version).join(t.tables)
        there = {tuple(key) for key in connection.execute(keys.where(t.tables.c.stream == str(stream)))}
        lacking = {table_id for table_id, _ in there - self._known_names.keys()}
        if lacking:
            blobs = select(t.schema_versions.c.arrow).where(t.schema_versions.c.table_id.in_(lacking))
            for known in map(name_of, connection.execute(blobs).scalars()):
                self._known_names[known.table_id, known.version] = known
        names: _NamesByCase = {}
        for known in (self._known_names[key] for key in there):
            names.setdefault(_without_case((known.namespace, known.name)), []).append(known)
        return names

    def schemas(self, stream: StreamId) -> dict[tuple[TableId, SchemaVersion], TableSchema]:
        """Return every version of every table's schema."""
        query = select(t.schema_versions.c.arrow).join(t.tables).where(t.tables.c.stream == str(stream))
        return {(schema.table_id, schema.version): schema for schema in self._schemas(query)}

    def schema_times(self, table: TableId) -> dict[SchemaVersion, int]:
        """Return when each version of a table's schema was first recorded here, in microseconds since 1970-01-01 UTC."""
        columns = t.schema_versions.c
        query = select(columns.version, columns.created_us).where(columns.table_id == table)
        with self._database.read() as connection:
            return {SchemaVersion(row.version): row.created_us for row in connection.execute(query)}

    def schema(self, table: TableId, version: SchemaVersion) -> TableSchema | None:
        """Return one version of a table's schema; None if the catalog doesn't have it."""
        query = select(t.schema_versions.c.arrow).where(
            t.schema_versions.c.table_id == table, t.schema_versions.c.version == version
        )
        return next(iter(self._schemas(query)), None)

    def schemas_of(self, table: TableId) -> list[TableSchema]:
        """Return every version of a table's schema that the catalog has, in any order."""
        return self._schemas(select(t.schema_versions.c.arrow).where(t.schema_versions.c.table_id == table))

    def latest_schemas(self, stream: StreamId) -> dict[TableId, TableSchema]:
        """Return the newest schema of every table that has one."""
        query = select(t.schema_versions.c.arrow).join(t.tables).where(t.tables.c.stream == str(stream))
        newest = query.where(t.schema_versions.c.version == t.tables.c.schema_version)
        return {schema.table_id: schema for schema in self._schemas(newest)}

    def newest_names(self, stream: StreamId) -> dict[TableId, NameOfTable]:
        """Return the name in the newest schema of every table that has one."""
        return {table: _named(schema) for table, schema in self.latest_schemas(stream).items()}

    def _schemas(self, query: Select[Any]) -> list[TableSchema]:
        with self._database.read() as connection:
            blobs = connection.execute(query).scalars().all()
        return [schema_of(blob) for blob in blobs]

    def application_schema(self, stream: StreamId, namespace: str, name: str) -> TableSchema | None:
        """Return the newest schema of a table that applications write; None if there is no such table."""
        named = (t.tables.c.source == 0, t.tables.c.namespace == namespace, t.tables.c.name == name)
        query = select(t.schema_versions.c.arrow).join(t.tables).where(t.tables.c.stream == str(stream), *named)
        found = self._schemas(query.where(t.schema_versions.c.version == t.tables.c.schema_version))
        return found[0] if found else None


def _folder_id(alike: list[NameOfTable], schema: TableSchema) -> TableId:
    """Return the id that the name of the table's lake folder ends in; 0 if it bears the table's name alone.

    A name keeps its folder: an earlier version of any table under this name decides. A new name ends in the table's id if it
    differs by case alone from a name that any table has or had, because the folder of a former name keeps its records.

    Args:
        alike: the names that differ from the table's at most by case.
    """
    if schema.kind is TableKind.MESSAGES:
        return TableId(0)
    # The table's own first: it goes back to where its records are.
    for known in sorted(alike, key=lambda known: (known.table_id != schema.table_id, known.table_id, known.version)):
        if (known.namespace, known.name) == (schema.namespace, schema.name):
            return known.folder_id
    return schema.table_id if alike else TableId(0)


def fingerprint_of(schema: TableSchema) -> str:
    """Return the SHA-256 over every fact except the version."""
    arrow = replace(schema, version=SchemaVersion(0)).to_arrow()
    types = [[field.name, str(field.type)] for field in arrow]
    metadata = sorted((key.decode(), value.decode()) for key, value in arrow.metadata.items())
    return hashlib.sha256(json.dumps([types, metadata]).encode()).hexdigest()


def _without_case(name: tuple[str, str]) -> tuple[str, ...]:
    """Return a name with ASCII letters in lower case: folders escape other letters, so their case is no collision."""
    return tuple("".join(char.lower() if char.isascii() else char for char in part) for part in name)


def schema_of(blob: bytes) -> TableSchema:
    """Return a schema from its bytes in `schema_versions`."""
    return TableSchema.from_arrow(pa.ipc.read_schema(pa.py_buffer(blob)))


def name_of(blob: bytes) -> NameOfTable:
    """Return the name in a schema, from its bytes in `schema_versions`."""
    return _named(schema_of(blob))


def _named(schema: TableSchema) -> NameOfTable:
    is_written = schema.source == 0 and schema.kind is TableKind.TABLE
    return NameOfTable(
        schema.table_id, schema.version, schema.namespace, schema.name, schema.folder_id, schema if is_written else None
    )
