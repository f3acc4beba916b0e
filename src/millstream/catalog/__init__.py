"""The catalog: what must be agreed on between processes and outlive them, but is not the log's own.

Streams and their ids, writers and epochs, number reservations, sources and the positions reached, tables with their
states and schema versions, table-copy chunks, pipelines' positions, access tokens. Embedded in SQLite (`data/catalog.db`), or in a
PostgreSQL database that several homes may share; the owner, the pipeline's driver and commands have it open at once.

Values go in and out as those of `millstream.model` and `millstream.catalog.values`. Readers of the log never come here:
segments and the mark file are enough for them.
"""

from millstream.catalog.database import CatalogFacts, examine_catalog
from millstream.catalog.store import Catalog
from millstream.catalog.values import (
    AccessToken,
    ChunkState,
    CopyChunk,
    HomeIdentity,
    PipelinePosition,
    SourceRow,
    StreamRow,
    TableRow,
    TableState,
    WriterRow,
)

__all__ = [
    "AccessToken",
    "Catalog",
    "CatalogFacts",
    "ChunkState",
    "CopyChunk",
    "HomeIdentity",
    "PipelinePosition",
    "SourceRow",
    "StreamRow",
    "TableRow",
    "TableState",
    "WriterRow",
    "examine_catalog",
]
