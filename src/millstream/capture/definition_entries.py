"""Definitions as operations: one record that names a table's columns, behind everything that its look saw."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from millstream.capture.copying.chunk_reader import table_of
from millstream.capture.copying.copy_text import chunk_operation, single_row
from millstream.capture.copying.table_copies import Entry
from millstream.capture.pending_definitions import Definition
from millstream.capture.table_directory import TableDirectory
from millstream.catalog import Catalog
from millstream.model.ids import StreamId
from millstream.model.operations import TableRows, WriteOps
from millstream.model.positions import Lsn
from millstream.model.records import Op


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
        renamed, filled = (list(texts.items()) or None for texts in (one.renamed, one.filled))
        row = single_row(schema.as_definition(), Op.DEFINITION, __before=renamed, __exact=filled)
        return WriteOps(operation, (TableRows(schema.as_definition(), row, directory.shard_of(one.table_id)),))
