"""Reading existing rows on a standby, where an ordinary snapshot doesn't show which transactions run at the primary.

There `pg_current_snapshot()` omits running transactions, and a commit may become visible in another order than it is
logged. So chunks are read under the snapshot of a temporary logical slot: it sees exactly the commits below one LSN,
and names all others. Such a snapshot needs the primary's record of running transactions, which comes every 15 seconds
if anything is written. So one snapshot serves many chunks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final

import psycopg
from psycopg import sql

from millstream.capture.column_rules.binding import ColumnRules
from millstream.capture.connection import Connection
from millstream.capture.copying.chunk_reader import AGAIN, ChunkReader, Moment
from millstream.capture.copying.source_snapshot import SourceSnapshot
from millstream.capture.source_tables import SourceTable
from millstream.capture.table_directory import TableDirectory
from millstream.errors import SourceError
from millstream.model.ids import SourceId
from millstream.model.positions import Lsn

_PATIENCE_S: Final = 120.0
"""Three records from the primary, 15 seconds apart, are needed until a slot knows all running transactions."""
_AGE_MAX_S: Final = 60.0
"""Age after which a snapshot is replaced: vacuum, or the standby's replay, waits for it."""


class StandbySnapshots:
    """The snapshot under which a standby's chunks are read: one at a time, replaced when it has grown old.

    Thread-safe.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._lock = threading.Lock()
        self._snapshot: SourceSnapshot | None = None
        self._taken_at = 0.0
        self._asked = self._served = 0
        """How often a newer snapshot was requested, and up to which of these requests the present one was taken."""
        self._closed = False

    def close(self) -> None:
        """Take no more snapshots; a wait for one ends."""
        self._closed = True
        with self._lock:
            self._drop()

    def renew(self) -> None:
        """Make the next chunk use a newer snapshot."""
        self._asked += 1

    def begin(self, connection: Connection, not_before: Lsn) -> SourceSnapshot:
        """Set the snapshot of a transaction that has done nothing so far; it sees every commit below `not_before`.

        Raises:
            SourceError (`snapshot_waits`): the primary hasn't reported its running transactions.
            SourceError: the snapshot was lost; a later call takes another.
        """
        with self._lock:
            held, asked = self._snapshot, self._asked
            is_old = time.monotonic() - self._taken_at > _AGE_MAX_S or self._served != asked
            if held is None or is_old or held.lsn < not_before:
                self._drop()
                held = self._snapshot = SourceSnapshot.take(
                    self._dsn, patience_s=_PATIENCE_S, purpose="copy", stopped=lambda: self._closed
                )
                self._taken_at, self._served = time.monotonic(), asked
            if self._closed:
                self._drop()
                raise SourceError("the copy was ended", code="snapshot_waits")
            try:
                connection.execute(held.set_statement(), prepare=False)
            except psycopg.Error as error:
                self._drop()
                raise SourceError("the standby ended the transaction of the copy's snapshot", sqlstate=AGAIN) from error
            return held

    def _drop(self) -> None:
        if self._snapshot is not None:
            self._snapshot.close()
            self._snapshot = None


class StandbyChunkReader(ChunkReader):
    """Reads chunks on a standby: as on a primary, under the snapshots of slots."""

    def __init__(
        self,
        connection: Connection,
        source: SourceId,
        publications: Sequence[str],
        rules: ColumnRules,
        snapshots: StandbySnapshots,
    ) -> None:
        super().__init__(connection, source, publications, rules)
        self._snapshots = snapshots

    def running_bound(self) -> int:
        """Return no bound: everything logged before a copy began is below `not_before`, and seen by its snapshots."""
        return 0

    def _begin(self, name: sql.Composable) -> Moment:
        return self._lock_under(self._snapshots.begin(self._connection, self.not_before), name)

    def _check_files(self, table: SourceTable) -> None:
        try:
            self._check_not_rewritten(table)
        except SourceError:
            self._snapshots.renew()
            raise


def reader_on(
    connection: Connection,
    directory: TableDirectory,
    publications: Sequence[str],
    snapshots: StandbySnapshots | None,
) -> ChunkReader:
    """Return a reader of chunks over a connection: on a standby with its snapshots, else None."""
    on = (connection, directory.source, publications, directory.rules)
    return ChunkReader(*on) if snapshots is None else StandbyChunkReader(*on, snapshots)
