"""The newest schema of each table that a log has rows of, each loaded once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from millstream.errors import CorruptFrame
from millstream.model.ids import TableId
from millstream.model.marks import DurableMark
from millstream.model.schema import TableSchema
from millstream.ports import Files
from millstream.wal.frame_index import NewestSchema, ShardIndex, damage, load_schemas, read_header


class NewestSchemas:
    """See the module. For one thread."""

    def __init__(self, files: Files) -> None:
        self._files: Final = files
        self._loaded: dict[TableId, tuple[NewestSchema, TableSchema]] = {}

    def of(self, shards: Iterable[tuple[ShardIndex, DurableMark]]) -> dict[TableId, TableSchema]:
        """Return them, by table.

        Args:
            shards: each shard's index, and the mark up to which it is read.

        Raises:
            CorruptWal: a schema is damaged.
            FileNotFoundError: a segment is gone.
        """
        newest: dict[TableId, NewestSchema] = {}
        for index, mark in shards:
            for table, found in index.newest_schemas(mark).items():
                if table not in newest or found.place.version >= newest[table].place.version:
                    newest[table] = found
        self._loaded = {table: (found, self._load(table, found)) for table, found in sorted(newest.items())}
        return {table: schema for table, (_, schema) in self._loaded.items()}

    def forget(self) -> None:
        """Forget the loaded ones: the log may be another."""
        self._loaded.clear()

    def _load(self, table: TableId, found: NewestSchema) -> TableSchema:
        known = self._loaded.get(table)
        if known is not None and known[0] == found:
            return known[1]
        place, segment, _ = found
        schemas = load_schemas(self._files, segment.path, read_header(self._files, segment), (place,))
        try:
            return schemas.find(place.table_id, place.version)
        except CorruptFrame as error:
            base = segment.base_offset
            raise damage(error, file=segment.path, byte=place.position, offset_from=base, offset_to=base) from error
