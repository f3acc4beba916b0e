"""Facts about tables that only capture knows so far: their present names, and tables without records."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import pyarrow as pa

from millstream.lake.column_conversion import history_prefix, lake_columns
from millstream.model.ids import TableId
from millstream.model.names import DEFAULT_SCHEMA, parse_qualified_name, qualified_name
from millstream.model.schema import TableSchema


@dataclass(frozen=True, slots=True)
class KnownTable:
    """A table as the source has it now."""

    table_id: TableId
    namespace: str
    name: str
    schema: TableSchema | None = None
    """The newest known columns, if any; perhaps under an earlier name of the table."""
    waits: str = ""
    """The reason why the table may have rows that the lake lacks; empty if it has none."""

    @property
    def full_name(self) -> str:
        """`schema.table`, each part quoted where PostgreSQL would."""
        return qualified_name(self.namespace, self.name)


def empty_rows(schema: TableSchema, types: Mapping[str, str]) -> pa.Table:
    """Return the lake's empty rows of a table; raises `lake_schema_conflict`, `ConfigError` as `lake_columns`."""
    return lake_columns(schema, types).empty_table()


def empty_records(schema: TableSchema, types: Mapping[str, str]) -> pa.Table:
    """Return a table's empty records; raises as `empty_rows`."""
    return pa.schema([*history_prefix(schema), *lake_columns(schema, types)]).empty_table()


def is_meant(said: str, full_name: str) -> bool:
    """Return whether a name as `unknown_table` returns it means this table."""
    namespace, name = parse_qualified_name(full_name)
    # It is unknown which quotes are DuckDB's and which belong to the name.
    return _bare(said) in {_bare(f"{namespace}.{name}"), _bare(full_name)}


def unknown_table(said: str, written: Collection[tuple[str, ...]]) -> str | None:
    """Return the unquoted name, with its schema, of the table that DuckDB's message reports as missing.

    Args:
        said: the message.
        written: the names in the statement, by their parts: DuckDB omits a schema that it has.
    """
    found = re.search(r'Table with name "?(.+?)"? does not exist', said)
    if found is None:
        return None
    name = found[1]
    if "." in name:
        return name
    schemas = {parts[-2] for parts in written if len(parts) > 1 and parts[-1].lower() == name.lower()}
    bare = not schemas or any(len(parts) == 1 and parts[0].lower() == name.lower() for parts in written)
    return f"{DEFAULT_SCHEMA if bare or DEFAULT_SCHEMA in schemas else min(schemas)}.{name}"


def where_they_land(node: str) -> str:
    """Return the hint for tables that another node lands."""
    return f"This node doesn't land the stream's tables: {node} leads the stream, and does. Ask there, or keep the lake in an object store that both name."


def _bare(name: str) -> str:
    return name.lower().strip('"')
