"""The holders of a log for the regions that write a stream together: the other regions, and the merged tables here.

Records that another region has not followed yet, and records that a merged table lacks,
exist nowhere else: both hold the log.

- A region is a follower like any other, at the position it has acknowledged. A configured region that has
  never connected needs everything. It is in the catalog from the first look on, so that it can be cut off
  by name.
- The kept state of each merged table (`data/regions`) records its own position. It can be deleted, and is
  missing on a newly promoted node; so the position isn't noted a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import structlog

from millstream.errors import UnknownTable
from millstream.model.ids import RegionId, StreamId
from millstream.model.names import parse_qualified_name, qualified_name
from millstream.model.positions import Seq
from millstream.model.replication import OBJECT_STORE, NodeName, follower_holder, follower_of_holder, region_node
from millstream.protocol.retention import HolderKind

if TYPE_CHECKING:
    from millstream.catalog import Catalog
    from millstream.config.model import StreamConfig
    from millstream.config.replication_model import ReplicationConfig
    from millstream.regions.state_files import KeptVectors
    from millstream.wal.reader import StreamReader

logger = structlog.get_logger("millstream.retention")


def expect_followers(
    catalog: Catalog, name: str, stream: StreamId, config: StreamConfig, replication: ReplicationConfig
) -> None:
    """Make the configured regions hold the log before they first connect, and drop those that may no longer follow."""
    regions = {region_node(region) for region in replication.region_addresses}
    # This node itself followed before its promotion, and is in the catalog that came from the old leader.
    known = {NodeName(node) for node in replication.nodes if node != replication.node} | regions
    if replication.object_store is not None:
        known.add(OBJECT_STORE)
    held = {p.name: p for p in catalog.pipelines(stream) if p.kind is HolderKind.FOLLOWER}
    for holder in held:
        node = follower_of_holder(holder)
        if node is not None and node not in known:
            catalog.release(stream, holder)
            if node == replication.node:
                logger.info("holds the log as a follower no more: it leads now", stream=name, node=node)
            else:
                logger.info("holds the log no more: it isn't among those that may follow", stream=name, node=node)
    for node in sorted(regions) if config.region else ():
        if follower_holder(node) not in held:
            catalog.set_needed_from(stream, follower_holder(node), Seq(0), kind=HolderKind.FOLLOWER)


def merge_needs(
    catalog: Catalog, name: str, stream: StreamId, config: StreamConfig, kept: KeptVectors
) -> Mapping[str, Seq]:
    """Return by holder (`merge public.posts`) the first own-log number that a merged table lacks.

    Tables that haven't been written here need nothing.
    """

    def is_there(table: str) -> bool:
        try:
            catalog.find_table(stream, *parse_qualified_name(table))
        except UnknownTable:
            return False
        return True

    return _needs(name, RegionId(config.region), config, kept, is_there)


def merge_needs_of_copy(
    name: str, region: RegionId, reader: StreamReader, config: StreamConfig, kept: KeptVectors
) -> Mapping[str, Seq]:
    """Return as `merge_needs`, for the copy of another region's log. Raises `LogError` if it can't be read."""

    def is_there(table: str) -> bool:
        wanted = parse_qualified_name(table)
        return any((schema.namespace, schema.name) == wanted for schema in reader.schema_versions().values())

    return _needs(name, region, config, kept, is_there)


def _needs(
    name: str,
    region: RegionId,
    config: StreamConfig,
    kept: KeptVectors,
    is_there: Callable[[str], bool],
) -> dict[str, Seq]:
    found = {}
    for table in sorted(config.merge):
        token = kept.of(name, config, table, region)
        if token is not None:
            found[merge_holder(table)] = Seq(token.linear() + 1)
        elif is_there(table):
            found[merge_holder(table)] = Seq(0)
    return found


def merge_holder(table: str) -> str:
    """Return the name of a merged table's holder of a log."""
    return f"merge {qualified_name(*parse_qualified_name(table))}"
