"""Operations from a write buffer, converted for this stream: its catalog's table numbers, its shards."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from millstream.ingest.fit_to_schema import fitted
from millstream.ingest.schema_on_write import TableRules, grown
from millstream.ingest.uninterruptible import uninterruptible
from millstream.model.ids import StreamId
from millstream.model.operations import TableRows
from millstream.model.records import LOG_ROW_PREFIX, append_row_schema, log_row_prefix
from millstream.model.schema import TableSchema

if TYPE_CHECKING:
    from millstream.catalog import Catalog

_PREFIX: Final = len(LOG_ROW_PREFIX)


class OperationTaker:
    """Converts other writers' operations into operations of this stream.

    Args:
        rules: the configured rules of tables, and of the placement of their rows; a table without a
            configured key gets the rows' key.

    Concurrency: any number of threads.
    """

    def __init__(self, catalog: Catalog, stream: StreamId, rules: TableRules) -> None:
        self._catalog = catalog
        self._stream = stream
        self._rules = rules
        self._schemas: dict[tuple[str, str], TableSchema] = {}
        """The newest schema of each table that this process has seen."""

    def taken(self, table: TableRows) -> tuple[TableRows, ...]:
        """Convert a table's rows; its new parts are durable in the catalog when this returns.

        Raises:
            InvalidValue, UnknownTable, IngestError (`unknown_column`, `key_changed`, `table_captured`, `rows_too_large`): the table
                can't take them.
            RoutingError: they can't be placed.
        """
        namespace, name = table.schema.namespace, table.schema.name
        rules = self._rules.rules_of(namespace, name)
        if not rules.key:
            rules = replace(rules, key=table.schema.key)

        own = pa.Table.from_batches([table.rows]).select(table.rows.schema.names[len(log_row_prefix(table.schema)) :])

        def ours(schema: TableSchema) -> pa.RecordBatch:
            columns = [*table.rows.columns[:_PREFIX], *fitted(schema, own)]
            return pa.RecordBatch.from_arrays(columns, schema=append_row_schema(schema))

        known = self._schemas.get((namespace, name))
        if known is None or grown(known, own.schema, rules) is not known:

            def grow(newest: TableSchema) -> TableSchema:
                wanted = grown(newest, own.schema, rules)
                # Rows that don't fit, or can't be placed, create no table and no column.
                self._rules.check_place(wanted, ours(wanted))
                return wanted

            shard = self._rules.home_shard(f"{namespace}.{name}")
            known = uninterruptible(
                lambda: self._catalog.application_table(self._stream, namespace, name, shard=shard, grow=grow)
            )
            self._schemas[namespace, name] = known
        return tuple(
            replace(t, partition=t.partition or table.partition) for t in self._rules.place(known, ours(known))
        )
