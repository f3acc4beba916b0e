"""Facts about a pipeline's tables that folds and maintenance share: schemas, folded views, and the cut by table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from millstream.catalog import Catalog
from millstream.lake.commit_cuts import Cut, CutTable
from millstream.lake.folded.scd2_table import has_versions
from millstream.lake.layout import View, has_current
from millstream.model.ids import SchemaVersion, TableId
from millstream.model.schema import TableSchema
from millstream.spark.pipeline import PipelineConfig
from millstream.spark.pipeline_tables import PipelineTable
from millstream.wal.reader import StreamReader


class TableViews:
    """The schemas of a pipeline's tables, and the views that are folded. For one thread: it has a reader of the log."""

    def __init__(self, config: PipelineConfig, catalog: Catalog) -> None:
        self._config = config
        self._catalog = catalog
        self.log = StreamReader(str(config.wal_folder))
        self._schemas: dict[tuple[TableId, SchemaVersion], TableSchema] = {}

    def schema(self, entry: PipelineTable) -> TableSchema | None:
        """Return the schema of the newest records in the lake, whose name is the table's name there."""
        key = (entry.table_id, entry.version)
        if key not in self._schemas and self._schemas and entry.version:
            schema = self._catalog.schema(*key)
            if schema is not None:
                self._schemas[key] = schema
        elif key not in self._schemas:
            stream = self._config.stream_id
            self._schemas = self._catalog.schemas(stream)
            newest = self._catalog.latest_schemas(stream) or self.log.schemas()
            self._schemas |= {(table_id, SchemaVersion(0)): schema for table_id, schema in newest.items()}
        return self._schemas.get(key)

    def folded(self, schema: TableSchema) -> tuple[View, ...]:
        """Return the views of a table that are folded from its history."""
        wanted = self._config.views
        views: list[View] = ["current"] if "current" in wanted and has_current(schema) else []
        return (*views, "scd2") if "scd2" in wanted and has_versions(schema) else tuple(views)


@dataclass(frozen=True, slots=True)
class CutByTable:
    """A cut's tables by their ids."""

    tables: Mapping[TableId, Sequence[CutTable]]

    @classmethod
    def of(cls, cut: Cut | None) -> CutByTable:
        """Return the index of a cut; it is empty before the first."""
        tables: dict[TableId, list[CutTable]] = {}
        for table in () if cut is None else cut.tables.values():
            tables.setdefault(table.table_id, []).append(table)
        return cls(tables)

    def spared(self, table: TableId) -> Mapping[View, int]:
        """Return, by view, the table's version that the cut names, because queries read it."""
        versions: dict[View, int] = {}
        for found in self.tables.get(table, ()):
            versions |= {"history": found.history, "current": found.current, "scd2": found.scd2}
        return {view: version for view, version in versions.items() if version >= 0}
