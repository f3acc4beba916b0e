"""Retention of a home's log: the catalog has the holders and their needs, the configuration the amounts to keep.

Holders register their needs in the catalog, each from its own process, and the catalog outlives them all.
So a tracker is rebuilt from the catalog each time: no registration can be missed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import structlog

from millstream.config.quantities import disk_bytes
from millstream.home.paths import PIPELINE
from millstream.model.ids import StreamId
from millstream.model.positions import Seq
from millstream.protocol.retention import CutOff, HolderKind, Retention, RetentionBounds

if TYPE_CHECKING:
    from millstream.catalog import Catalog, PipelinePosition
    from millstream.config.model import LogConfig
    from millstream.wal.segment_deletion import Sweep

logger = structlog.get_logger("millstream.retention")

_MOVED = "moved_us"


_NO_MERGES: Final[Mapping[str, Seq]] = MappingProxyType({})


def tracker_of(positions: Iterable[PipelinePosition], merges: Mapping[str, Seq] = _NO_MERGES) -> Retention:
    """Return the tracker of a log's holders. Until the home's pipeline has registered, it needs everything.

    Args:
        merges: see `region_retention.merge_needs`.
    """
    tracker = Retention([PIPELINE])
    for position in positions:
        if position.needed_from is None or position.cut_off_at is not None:
            continue
        tracker.needs(position.name, position.kind, position.needed_from, position.position)
        if position.kind is HolderKind.PIPELINE:
            # Tables that the pipeline has quarantined are holders of their own.
            tracker.landed(position.name, Seq(1), position.landed)
    for name, needed_from in merges.items():
        tracker.needs(name, HolderKind.MERGE, needed_from)
    return tracker


def bounds_of(log: LogConfig, folder: Path) -> RetentionBounds:
    """Return how much of a log is kept in a folder."""
    disk = disk_bytes(folder)
    size = log.retention_bytes_of(disk)
    # The configuration was checked against the home's disk; the log's may be another one.
    return RetentionBounds(log.retention_age_s, size, max(size, log.retention_bytes_max_of(disk)))


def sweep(
    catalog: Catalog,
    name: str,
    stream: StreamId,
    folder: Path,
    log: LogConfig,
    merges: Mapping[str, Seq] = _NO_MERGES,
) -> Sweep:
    """Drop segments that are no longer needed and are too old or too many; cut off holders that keep too much.

    Raises:
        CorruptWal, CatalogError …: as `drop_segments` and the catalog.

    Concurrency: one caller at a time, the owner's.
    """
    from millstream.wal.segment_deletion import drop_segments

    def cut_off(gone: CutOff) -> bool:
        done = catalog.cut_off(stream, gone)
        if done:
            logger.warning(
                "cut off: the log is larger than retention_bytes_max",
                stream=name,
                kind=gone.kind.value,
                holder=gone.name,
                needed_from=int(gone.needed_from),
                first=int(gone.first),
            )
        return done

    tracker = tracker_of(catalog.pipelines(stream), merges)
    swept = drop_segments(str(folder), tracker, bounds_of(log, folder), cut_off=cut_off)
    if swept.dropped:
        catalog.put_fact(_scope(stream), _MOVED, time.time_ns() // 1000)
        logger.info("segments dropped", stream=name, segments=len(swept.dropped))
    return swept


def is_for_sessions(swept: Sweep) -> bool:
    """Return whether only the copy of the sessions keeps the oldest segment."""
    from millstream.wal.segment_deletion import SESSIONS_HOLDER

    return swept.kept.needed_by == (SESSIONS_HOLDER,)


def moved_us(catalog: Catalog, stream: StreamId) -> int:
    """Return when a segment was last dropped, µs since 1970; 0: never."""
    return int(catalog.fact(_scope(stream), _MOVED, 0))


def _scope(stream: StreamId) -> str:
    return f"retention/{stream}"
