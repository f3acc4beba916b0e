"""How the configuration merges a stream's tables, checked against their columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from millstream.crdt.declared import TableMerge
from millstream.errors import IngestError
from millstream.model.names import parse_qualified_name, qualified_name
from millstream.model.schema import TableSchema
from millstream.regions.region_folders import region_readers

if TYPE_CHECKING:
    from millstream.config.model import StreamConfig
    from millstream.home.home import Home


def declared_tables(home: Home, stream: str) -> list[str]:
    """Return the names of the tables whose merge the configuration declares, and that a region has written.

    Raises:
        ReplicationError (`other_region`), LogError: as `RegionTable`.
    """
    config = home.configured(stream)
    declared = {parse_qualified_name(name) for name in (() if config is None else config.merge)}
    written = {
        (schema.namespace, schema.name)
        for reader in (region_readers(home, stream, config).values() if declared else ())
        for schema in reader.schema_versions().values()
    }
    return sorted(qualified_name(*name) for name in declared & written)


def merge_of(config: StreamConfig | None, table: str) -> TableMerge:
    """Return how a table merges, however its name is written."""
    wanted = parse_qualified_name(table)
    declared: Mapping[str, Mapping[str, str]] = {} if config is None else config.merge
    return next(
        (TableMerge.parse(words) for name, words in declared.items() if parse_qualified_name(name) == wanted),
        TableMerge(),
    )


def check_forms(table: str, schemas: Iterable[TableSchema], merge: TableMerge) -> None:
    """Raise `IngestError` (`merge_changed`) if a column's rows hold increments and the configuration says totals, or the reverse."""
    for schema in schemas:
        for column in schema.columns:
            configured = merge.increments.get(column.name, "")
            if column.accumulates != configured:
                raise IngestError(
                    f"rows of {table} have {column.accumulates or 'values'} in column {column.name}, and the "
                    f"configuration says {configured or 'values'}",
                    code="merge_changed",
                    table=table,
                    column=column.name,
                )


def check_merges(config: StreamConfig, schemas: Iterable[TableSchema]) -> None:
    """Refuse merge declarations that don't fit the tables' columns; `merge_unsuitable` names table and column."""
    declared = {parse_qualified_name(name) for name in config.merge}
    for schema in schemas:
        if schema.source == 0 and (schema.namespace, schema.name) in declared:
            merge_of(config, schema.full_name).check(schema.full_name, schema.to_arrow(), schema.key, whole=False)
