"""The schemas of one segment, with which its frames are decoded."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import pyarrow as pa

from millstream.codec.arrow_ipc import ColumnPicker
from millstream.codec.log_directory import DIRECTORY, Directory, DirectoryDecoders
from millstream.errors import CorruptFrame
from millstream.model.ids import SchemaVersion, TableId
from millstream.model.records import log_row_schema
from millstream.model.schema import TableSchema


@dataclass(slots=True)
class SchemaSet:
    """The schemas of one segment: of its directory, and of the tables seen so far."""

    directory: Directory = DIRECTORY
    tables: dict[tuple[TableId, SchemaVersion], TableSchema] = field(default_factory=dict)
    _log_rows: dict[tuple[TableId, SchemaVersion], pa.Schema] = field(default_factory=dict)
    _pickers: dict[tuple[TableId, SchemaVersion, frozenset[str] | None, bool], ColumnPicker] = field(
        default_factory=dict
    )

    _directories: DirectoryDecoders | None = None

    def directories(self) -> DirectoryDecoders:
        """Return the decoders for many directories at once, made once."""
        if self._directories is None:
            self._directories = _directories(self.directory)
        return self._directories

    def add(self, schema: TableSchema) -> None:
        """Add a schema frame's content."""
        key = (schema.table_id, schema.version)
        self.tables[key] = schema
        self._log_rows.pop(key, None)
        self._pickers = {picked: picker for picked, picker in self._pickers.items() if picked[:2] != key}

    def __contains__(self, key: tuple[TableId, SchemaVersion]) -> bool:
        return key in self.tables

    def find(self, table_id: TableId, version: SchemaVersion) -> TableSchema:
        """Return the schema; raises `CorruptFrame` if the segment hasn't brought it so far."""
        try:
            return self.tables[table_id, version]
        except KeyError:
            raise CorruptFrame(
                f"schema {version} of table {table_id} isn't in the segment before its first use"
            ) from None

    def log_rows(self, table_id: TableId, version: SchemaVersion) -> pa.Schema:
        """Return `log_row_schema` of a table and version, made once."""
        key = (table_id, version)
        if key not in self._log_rows:
            self._log_rows[key] = log_row_schema(self.find(table_id, version))
        return self._log_rows[key]

    def picker(
        self, table_id: TableId, version: SchemaVersion, columns: frozenset[str] | None, *, threads: bool
    ) -> ColumnPicker:
        """Return the decoder of these columns (None: all) of a table and version's `log_row_schema`, made once."""
        key = (table_id, version, columns, threads)
        if key not in self._pickers:
            self._pickers[key] = _picker(self.find(table_id, version), columns, threads)
        return self._pickers[key]


@lru_cache(maxsize=16)  # a log's segments mostly have the same
def _directories(directory: Directory) -> DirectoryDecoders:
    return DirectoryDecoders(directory)


@lru_cache(maxsize=256)  # the next segment has the same tables
def _picker(table: TableSchema, columns: frozenset[str] | None, threads: bool) -> ColumnPicker:  # noqa: FBT001 - a key
    return ColumnPicker(log_row_schema(table), columns, threads=threads)
