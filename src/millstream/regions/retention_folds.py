"""Folding of merged tables before retention deletes the records that they lack.

A merged table holds the logs of all regions until its kept state has their records (`regions.region_retention`). The process that
writes a stream folds them in when a segment is due that such a table still needs. So a fold takes at least one segment's
records, and a home whose logs stay within their bounds folds nothing.

Only the kept state's position counts for retention, and the state is durable before it is replaced. If the process is
killed between the fold and the deletion, the next fold goes on from that position.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from millstream.errors import HomeBusy, LogError, MillstreamError
from millstream.home.retention import bounds_of
from millstream.regions.region_folders import region_logs
from millstream.regions.region_retention import merge_holder, merge_needs, merge_needs_of_copy
from millstream.wal.reader import StreamReader
from millstream.wal.segment_deletion import oldest_due

if TYPE_CHECKING:
    from millstream.catalog import Catalog
    from millstream.config.model import StreamConfig
    from millstream.home.home import Home
    from millstream.model.ids import StreamId
    from millstream.regions.state_files import KeptVectors

logger = structlog.get_logger("millstream.retention")

BYTES_MAX: Final = 1 << 30
"""Bytes of rows that a fold may hold, next to the writer: a larger table is left to `millstream reconcile`."""


class MergedFolds:
    """The merged tables of one stream. For one thread."""

    def __init__(self, home: Home, name: str, config: StreamConfig, kept: KeptVectors) -> None:
        self._home = home
        self._name = name
        self._config = config
        self._kept = kept
        self._failed: dict[str, str] = {}
        """By table: the message of the last logged error."""

    def look(self, catalog: Catalog, stream: StreamId) -> None:
        """Fold each table that needs a segment which is due in a region's log. A table that fails stops no other one.

        Raises:
            MillstreamError: a log can't be read.
        """
        for table in self._due(catalog, stream):
            self._fold(table)

    def _due(self, catalog: Catalog, stream: StreamId) -> list[str]:
        """Return the tables that need a due segment of any region's log."""
        if not self._config.merge:
            return []
        due = set()
        for region, folder in region_logs(self._home, self._name, self._config).items():
            try:
                segment = oldest_due(folder, bounds_of(self._config.log, Path(folder)))
                if segment is None:
                    continue
                if region == self._config.region:
                    needs = merge_needs(catalog, self._name, stream, self._config, self._kept)
                else:
                    reader = StreamReader(folder)
                    needs = merge_needs_of_copy(self._name, region, reader, self._config, self._kept)
            except LogError:
                if region == self._config.region:
                    raise
                continue  # nothing has come yet, or the copy is just being rebuilt: retention waits for it too
            due |= {holder for holder, needed_from in needs.items() if needed_from <= segment.last_seq}
        return [table for table in sorted(self._config.merge) if merge_holder(table) in due]

    def _fold(self, table: str) -> None:
        # Imported at the first fold: few owners have merged tables.
        from millstream.regions.reconcile import reconcile_stream

        try:
            (done,) = reconcile_stream(self._home, self._name, [table], bytes_max=BYTES_MAX, patience_s=0.0).tables
        except HomeBusy:
            return  # `millstream reconcile`, or another writer of this home, does the same work
        except MillstreamError as error:
            if self._failed.get(table) != error.message:
                logger.warning(
                    "a merged table isn't folded, so it holds the logs",
                    stream=self._name,
                    table=table,
                    code=error.code,
                    error=error.message,
                    hint=error.hint,
                )
            self._failed[table] = error.message
            return
        self._failed.pop(table, None)
        for taken in done.taken:
            if taken.begins_at is not None:
                logger.warning(
                    "records were dropped that were never merged",
                    stream=self._name,
                    table=table,
                    region=int(taken.region),
                    after=int(taken.after),
                    begins_at=int(taken.begins_at),
                )
        logger.info("merged table folded", stream=self._name, table=table, rows=done.rows)
