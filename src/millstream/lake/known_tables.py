"""What capture knows of tables, and the lake not yet: names that they bear now, and tables that have no record."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from millstream.lake.types import lake_columns
from millstream.model.ids import TableId
from millstream.model.names import DEFAULT_SCHEMA, parse_qualified_name, qualified_name
from millstream.model.records import RECORD_PREFIX
from millstream.model.schema import TableSchema


@dataclass(frozen=True, slots=True)
class KnownTable:
    """A table as the source has it now."""

    table_id: TableId
    namespace: str
    name: str
    schema: TableSchema | None = None
    """Its newest columns, where anybody has seen them; under a name that it may have borne before."""
    waits: str = ""
    """Why it may have rows that the lake lacks; empty where it has none."""

    @property
    def full_name(self) -> str:
        """`schema.table`, each part quoted where PostgreSQL would."""
        return qualified_name(self.namespace, self.name)


def empty_rows(schema: TableSchema, types: Mapping[str, str]) -> pa.Table:
    """A table's rows in the lake while it has none; `LakeSchemaConflict`, `ConfigError` as `lake_columns`."""
    return lake_columns(schema, types).empty_table()


def empty_records(schema: TableSchema, types: Mapping[str, str]) -> pa.Table:
    """Its records; errors as `empty_rows`."""
    return pa.schema([*RECORD_PREFIX, *lake_columns(schema, types)]).empty_table()


def is_meant(said: str, full_name: str) -> bool:
    """Whether a name as `unknown_table` gives it means this table."""
    namespace, name = parse_qualified_name(full_name)
    # Whose quotes are DuckDB's, and whose the name's own, can't be told.
    return _bare(said) in {_bare(f"{namespace}.{name}"), _bare(full_name)}


def unknown_table(said: str) -> str | None:
    """The table that DuckDB's message says isn't there, with its schema, unquoted."""
    found = re.search(r'Table with name "?(.+?)"? does not exist', said)
    if found is None:
        return None
    # DuckDB leaves the schema out where it looks in any case.
    return found[1] if "." in found[1] else f"{DEFAULT_SCHEMA}.{found[1]}"


def _bare(name: str) -> str:
    return name.lower().strip('"')
