"""Facts about tables that only capture knows so far: their present names, and tables without records."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from millstream.lake.column_conversion import history_prefix, lake_columns
from millstream.lake.folded.scd2_rules import VERSION_COLUMNS
from millstream.lake.folded.version_columns import next_to_version_columns
from millstream.lake.layout import has_current
from millstream.model.ids import TableId
from millstream.model.names import DEFAULT_SCHEMA, name_in_full, parse_qualified_name, qualified_name, quote, same_bare
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
    hint: str = ""
    """The remedy for that reason, if it is known."""

    @property
    def full_name(self) -> str:
        """`schema.table`, each part quoted where PostgreSQL would."""
        return qualified_name(self.namespace, self.name)


def empty_views(
    known: KnownTable, schema: TableSchema, types: Mapping[str, str], *, has_versions: bool
) -> dict[tuple[str, str], pa.Table]:
    """Return the views of a table that has never had a record, by their schema and name.

    Args:
        has_versions: whether the lake has versions of tables with a key.

    Raises:
        LakeError (`lake_schema_conflict`), ConfigError: as `lake_columns`.
    """
    columns, bare = lake_columns(schema, types), f"{known.namespace}.{known.name}"
    views = {("history", bare): pa.schema([*history_prefix(schema), *columns])}
    if has_current(schema):
        views[known.namespace, known.name] = pa.schema(columns)
    if has_versions and schema.key:
        schema = next_to_version_columns(schema) if schema.is_numbered else schema
        columns = lake_columns(schema, types)
        key, rest = ([one for one in columns if (one.name in schema.key) is is_key] for is_key in (True, False))
        views["scd2", bare] = pa.schema([*key, *VERSION_COLUMNS, *rest])
    return {name: shape.empty_table() for name, shape in views.items()}


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
    schemas = {parts[-2] for parts in written if len(parts) > 1 and _bare(parts[-1]) == _bare(name)}
    if "." in name:
        return f"{min(schemas)}.{name}" if schemas else name
    bare = not schemas or any(len(parts) == 1 and parts[0].lower() == name.lower() for parts in written)
    return f"{DEFAULT_SCHEMA if bare or DEFAULT_SCHEMA in schemas else min(schemas)}.{name}"


def where_they_land(node: str) -> str:
    """Return the hint for tables that another node lands."""
    return f"This node doesn't land the stream's tables: {node} leads the stream, and does. Ask there, or keep the lake in an object store that both name."


def tables_there(tables: Sequence[str], missing: Mapping[str, str], landed_by: str | None) -> str:
    """Return the hint for an unknown table that none has a name like.

    Args:
        tables: the names of those that are there.
        missing: those that can't be read, with the reason.
        landed_by: as of `LakeSession`.
    """
    if missing:
        return "Not readable: " + "; ".join(f"{name} ({reason})" for name, reason in missing.items())
    if not tables and landed_by is not None:
        return where_they_land(landed_by)
    if not tables:
        return "No table has landed in the lake yet: `millstream run` lands them, and `millstream status` shows what goes on."
    listed = ", ".join(tables[:20]) + (" …" if len(tables) > 20 else "")
    return f"Tables: {listed}. Others appear once the pipeline has landed them."


def other_name(view: str, bare: str, tables: Sequence[str], known: Iterable[KnownTable]) -> str:
    """Return the hint for an unknown table, `view.bare`, with the names that it may mean; empty if there are none.

    Args:
        view: the schema in SQL: that of the table, or a view's.
    """
    others = same_bare(bare, map(parse_qualified_name, tables))
    if view not in {"history", "scd2", "merged"}:
        return name_in_full(others)
    for name in (name for name in tables if is_meant(bare, name)):
        if '"' in bare:
            return f"Write {_in_view(view, name)}."
        if view == "scd2" and any(one.full_name == name and one.schema and not one.schema.key for one in known):
            return "Only tables with a key have versions."
        if view == "scd2":
            return "The lake keeps no versions of it so far: `millstream tables` names the reason if their fold fails."
    return name_in_full([_in_view(view, name) for name in others])


def _in_view(view: str, full_name: str) -> str:
    """Return how SQL names a table in a view, whose names have the schema in them."""
    return f"{view}.{quote('.'.join(parse_qualified_name(full_name)))}"


def _bare(name: str) -> str:
    return name.lower().strip('"')
