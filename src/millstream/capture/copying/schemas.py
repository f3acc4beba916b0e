"""The schemas under which copies enter: their versions in the catalog, and the record with which a copy begins."""

from __future__ import annotations

import threading
import time

from millstream.capture.copying.chunk_reader import table_of
from millstream.capture.copying.copy_text import chunk_operation, single_row
from millstream.capture.source_tables import SourceTable
from millstream.capture.table_directory import TableDirectory
from millstream.catalog import Catalog
from millstream.model.ids import StreamId, TableId
from millstream.model.operations import TableRows, WriteOps
from millstream.model.positions import Lsn
from millstream.model.records import Op
from millstream.model.schema import TableSchema


class CopySchemas:
    """The schemas of one session's copies. `voiding` on the applier's thread, `numbered` on any."""

    def __init__(self, catalog: Catalog, directory: TableDirectory, stream: StreamId) -> None:
        self._catalog = catalog
        self._directory = directory
        self._stream = stream
        self._lock = threading.Lock()
        self._numbered: dict[TableSchema, TableSchema] = {}

    def numbered(self, schema: TableSchema) -> TableSchema:
        """Return a schema as it was read, with its version."""
        schema = self._directory.defaults.told(schema)
        with self._lock:
            found = self._numbered.get(schema)
        if found is None:
            found = self._catalog.put_schema(self._stream, schema)
            with self._lock:
                self._numbered[schema] = found
        self._directory.note_form(found)
        return found

    def voiding(self, table: SourceTable, table_id: TableId, copy_id: str, lsn: Lsn) -> WriteOps:
        """Return the operation that voids what the log had of a table, entering at that LSN."""
        directory = self._directory
        directory.defaults.forget(table_id)
        schema = self._catalog.put_schema(self._stream, table_of(table, directory.source, table_id))
        directory.note_key(schema)
        operation = chunk_operation(directory.source, f"{copy_id}/begin", lsn, time.time_ns() // 1000)
        rows = TableRows(schema, single_row(schema, Op.TRUNCATE), directory.shard_of(table_id))
        return WriteOps(operation, (rows,))
