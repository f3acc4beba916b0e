"""Definitions as operations: one record that names a table's columns, behind everything that its look saw."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pyarrow as pa

from millstream.capture.copying.chunk_reader import table_of
from millstream.capture.copying.copy_text import chunk_operation
from millstream.capture.copying.table_copies import Entry
from millstream.capture.pending_column_renames import Definition
from millstream.capture.table_directory import TableDirectory
from millstream.catalog import Catalog
from millstream.model.ids import StreamId
from millstream.model.operations import TableRows, WriteOps
from millstream.model.positions import Lsn
from millstream.model.records import Op, append_row_schema
from millstream.model.schema import TableSchema


class DefinitionEntries:
    """The definitions that enter the log. On the applier's thread."""

    def __init__(self, catalog: Catalog, directory: TableDirectory, stream: StreamId) -> None:
        self._catalog, self._directory, self._stream = catalog, directory, stream
        self._passed = Lsn(0)

    @property
    def are_waiting(self) -> bool:
        """Whether a definition waits for the stream, or isn't durable."""
        return self._directory.definitions.are_waiting

    def passed(self, lsn: Lsn) -> None:
        """Note that everything that committed at or below `lsn` has been submitted."""
        self._passed = lsn

    def ready(self) -> Iterator[Entry]:
        """Yield the operations that may enter now."""
        for one in self._directory.definitions.ready(self._passed):
            yield self._operation(one), partial(self._directory.definitions.durable, one)

    def _operation(self, one: Definition) -> WriteOps:
        directory = self._directory
        schema = directory.defaults.told(table_of(one.table, directory.source, one.table_id))
        schema = self._catalog.put_schema(self._stream, schema)
        name = f"definition/{int(one.table_id)}/{int(schema.version)}/{int(self._passed)}"
        operation = chunk_operation(directory.source, name, self._passed, time.time_ns() // 1000)
        rows = definition_row(schema.as_definition(), one)
        return WriteOps(operation, (TableRows(schema.as_definition(), rows, directory.shard_of(one.table_id)),))


def definition_row(schema: TableSchema, one: Definition) -> pa.RecordBatch:
    """Return the one row of a definition, with the renamed columns in `__before`, and the filled ones in `__exact`."""
    arrow = append_row_schema(schema)
    own: dict[str, Any] = {
        arrow.names[0]: pa.array([0], pa.int32()),
        "__index": pa.array([0], pa.int64()),
        "__op": pa.array([int(Op.DEFINITION)], pa.uint8()),
        "__before": pa.array([list(one.renamed.items()) or None], arrow.field("__before").type),
        "__exact": pa.array([list(one.filled.items()) or None], arrow.field("__exact").type),
    }
    arrays = [own[field.name] if field.name in own else pa.nulls(1, field.type) for field in arrow]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow)
