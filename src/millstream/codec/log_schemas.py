"""The schemas of one segment, with which its frames are decoded."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from millstream.codec.arrow_ipc import ColumnPicker
from millstream.codec.log_directory import DIRECTORY, Directory, DirectoryDecoders
from millstream.codec.log_parts import part_schema
from millstream.errors import CorruptFrame
from millstream.model.ids import SchemaVersion, TableId
from millstream.model.schema import TableSchema


@dataclass(slots=True)
class SchemaSet:
    """The schemas of one segment: of its directory, and of the tables seen so far."""

    directory: Directory = DIRECTORY
    tables: dict[tuple[TableId, SchemaVersion], TableSchema] = field(default_factory=dict)
    _pickers: dict[tuple[TableId, SchemaVersion, int, frozenset[str] | None, bool], ColumnPicker] = field(
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

    def picker(
        self,
        table_id: TableId,
        version: SchemaVersion,
        flags: int,
        columns: frozenset[str] | None = None,
        *,
        threads: bool = True,
    ) -> ColumnPicker:
        """Return the decoder of parts of a table and version with these flags, made once.

        It decodes the named columns of `log_row_schema`, those that a part has; None: all.
        """
        key = (table_id, version, flags, columns, threads)
        if key not in self._pickers:
            self._pickers[key] = _picker(self.find(table_id, version), flags, columns, threads)
        return self._pickers[key]


@lru_cache(maxsize=16)  # a log's segments mostly have the same
def _directories(directory: Directory) -> DirectoryDecoders:
    return DirectoryDecoders(directory)


@lru_cache(maxsize=256)  # the next segment has the same tables
def _picker(table: TableSchema, flags: int, columns: frozenset[str] | None, threads: bool) -> ColumnPicker:  # noqa: FBT001 - a key
    return ColumnPicker(part_schema(table, flags), columns, threads=threads)
