"""The catalog: state that processes agree on and that outlives them, except the log's own.

It has streams and their ids, writers and epochs, number reservations, sources and the positions reached, tables with
their states and schema versions, table-copy chunks, pipelines' positions, and access tokens. It is embedded in SQLite
(`data/catalog.db`), or in a PostgreSQL database that several homes may share. The owner, the pipeline's driver and
commands have it open at once.

Values are those of `millstream.model` and `millstream.catalog.row_types`. Readers of the log don't use it: segments and
the mark file are enough for them.
"""

from millstream.catalog.database import CatalogFacts, examine_catalog
from millstream.catalog.row_types import (
    COPY_HELD,
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
from millstream.catalog.store import Catalog

__all__ = [
    "COPY_HELD",
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
