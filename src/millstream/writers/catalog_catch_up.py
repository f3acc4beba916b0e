"""A catalog that is older than its log takes over the log's entries before anything new gets a number.

The catalog records how far a log was read. A restored backup has that position as of its own time, and
everything after it is read again. A log that continues normally costs a look at its newest segments.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import structlog

from millstream.catalog.adopt_from_log import LoggedTable
from millstream.errors import CatalogError, MillstreamError
from millstream.model.positions import Offset
from millstream.wal.files import RealFiles
from millstream.wal.layout import segments_and_strays, shard_folder, shards_and_strays
from millstream.wal.salvage import schemas_in

if TYPE_CHECKING:
    from collections.abc import Collection

    from millstream.catalog import Catalog
    from millstream.model.ids import SchemaVersion, ShardId, SourceId, StreamId, TableId
    from millstream.model.schema import TableSchema

logger = structlog.get_logger("millstream.writers")

_SCOPE: Final = "logged"
_NOTED: Final = "segments"
_SEGMENTS_AGAIN_MAX: Final = 8
"""Up to this many segments are read again instead of noted: a note costs a transaction."""


def adopt_log(
    catalog: Catalog, stream: StreamId, folder: str, sources: Collection[SourceId], *, from_buffer: bool = False
) -> None:
    """Enter the tables, schemas and sources of the stream's log in the catalog.

    Call it while this process holds the shards, and before anything new is written.

    Args:
        sources: the sources whose positions the log holds (`LogWriter.reached`).
        from_buffer: whether the stream takes its operations from a write buffer.

    Raises:
        CatalogError (`catalog_older`): the catalog has something else under a number of the log's. Or it lacks a source of
            a stream that reads a write buffer, so that operations would be taken twice. Nothing was
            changed.
    """
    scope = f"{_SCOPE}/{stream}"
    noted: dict[str, int] = catalog.fact(scope, _NOTED, {})
    versions: dict[tuple[TableId, SchemaVersion], TableSchema] = {}
    shards: dict[TableId, ShardId] = {}
    ends: dict[str, int] = {}
    looked = 0
    files = RealFiles()
    for shard in shards_and_strays(files, folder)[0]:
        segments = segments_and_strays(files, shard_folder(folder, shard))[0]
        if not segments:
            continue
        ends[str(int(shard))] = int(segments[-1].base_offset)
        upto = Offset(noted.get(str(int(shard)), 0))
        if upto > segments[-1].base_offset:
            upto = Offset(0)  # another log than the one read before
        for segment in segments:
            if segment.base_offset < upto:
                continue
            looked += 1
            with contextlib.suppress(MillstreamError):  # readers report the damage; other segments have their tables
                for logged in schemas_in(files, shard, segment):
                    schema = logged.defined()
                    versions[schema.table_id, schema.version] = schema
                    shards[schema.table_id] = shard
    tables = _tables(versions, shards)
    bear = {*sources, *(schema.source for schema in versions.values())} - {0}
    lacking = bear - {row.id for row in catalog.all_sources(stream)}
    if lacking and from_buffer:
        raise CatalogError(
            f"the log has operations of the write buffer's source {min(lacking)}, which the catalog doesn't know: they would be taken twice",
            code="catalog_older",
            source=int(min(lacking)),
        )
    adopted = catalog.adopt_tables(stream, tables, lacking)
    if adopted or lacking:
        names = sorted(table.newest.full_name for table in tables if table.newest.table_id in adopted)
        logger.warning(
            "the catalog is older than the log: taken over from it", tables=names, sources=sorted(map(int, lacking))
        )
    if ends != noted and (adopted or looked > _SEGMENTS_AGAIN_MAX):
        catalog.put_fact(scope, _NOTED, ends)


def _tables(
    versions: dict[tuple[TableId, SchemaVersion], TableSchema], shards: dict[TableId, ShardId]
) -> list[LoggedTable]:
    found: dict[TableId, list[TableSchema]] = {}
    for (table, _), schema in sorted(versions.items(), key=lambda item: item[0]):
        found.setdefault(table, []).append(schema)
    return [LoggedTable(tuple(schemas), shards[table]) for table, schemas in found.items()]
