"""The thread next to the stream that looks at the source's tables, every few seconds (`watched_tables`).

Every second it reads states that commands wrote (`tables retry`, `tables copy`). On an idle source it
emits a heartbeat, a logical message, so that the slot advances. Otherwise the slot would hold the
WAL of the server's other databases. It also measures what the slot holds. If the source or the catalog refuses something,
the next look retries it, and the stream goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

import structlog

from millstream.capture.config import CaptureConfig
from millstream.capture.connection import Connection, first_row, translated
from millstream.capture.slot import read_slot
from millstream.capture.source_tables import SourceIdentity, connect_same, insert_lsn
from millstream.capture.table_directory import TableDirectory
from millstream.capture.watched_tables import WatchedTables
from millstream.catalog import TableRow
from millstream.codec.pgoutput import HEARTBEAT_PREFIX
from millstream.errors import MillstreamError
from millstream.model.positions import Lsn
from millstream.workers import Worker

_HEARTBEAT: Final = f"SELECT pg_logical_emit_message(false, '{HEARTBEAT_PREFIX}', '')"
_MISSING_WAL: Final = {
    "unreserved": "the source is about to drop WAL that the slot needs",
    "lost": "the source has dropped WAL that the slot needs",
}
"""Warnings by the slot's `wal_status`."""
_STATES_EVERY_S: Final = 1.0
_HEARTBEAT_BYTES: Final = 64 << 10
"""Growth of an idle source's WAL below which no heartbeat is sent: a heartbeat is WAL too."""
_REFUSALS: Final = frozenset({"42501", "25006"})
"""SQLSTATEs of a source that refuses heartbeats: the role may not emit logical messages, or the server is read-only."""
_REFUSED_S: Final = 300.0
"""Seconds until a heartbeat after a refusal, which the source logs as an error."""

logger = structlog.get_logger("millstream.capture")


class Watcher:
    """The watcher's thread. It holds one ordinary connection and reopens it if it breaks.

    Args:
        passed: returns how far the stream is.
        on_look: called with the tables' rows after every look and every refresh of the states.
        broken: called if a bug of Millstream ends the thread; `check` raises it then.
    """

    def __init__(
        self,
        config: CaptureConfig,
        identity: SourceIdentity,
        tables: WatchedTables,
        directory: TableDirectory,
        *,
        passed: Callable[[], Lsn],
        on_look: Callable[[list[TableRow]], None],
        broken: Callable[[], None],
    ) -> None:
        self._config = config
        self._identity = identity
        self._tables = tables
        self._directory = directory
        self._passed = passed
        self._on_look = on_look
        self._stop = threading.Event()
        self._beat = threading.Event()
        self._wake = threading.Event()
        directory.hurry = self._wake.set
        self._looked_at = time.monotonic()
        self._last_end = Lsn(0)
        self._last_beat = time.monotonic()
        self._no_beat_before = 0.0
        self._wal_status = ""
        self.source_end = Lsn(0)
        """The end of the source's WAL, at the last look."""
        self.slot_holds_bytes: int | None = None
        """WAL that the slot keeps at the source, at the last look."""
        self.spilled_bytes: int | None = None
        """Bytes that decoding for the slot has spilled to the source's disk since its statistics began."""
        self._worker = Worker("millstream-watcher", self._look_on, on_failure=lambda _: broken())

    def start(self) -> None:
        """Start the thread."""
        self._worker.start()

    def stop(self) -> None:
        """Stop the thread and wait for its end."""
        self._stop.set()
        self._wake.set()
        self._worker.join()

    def check(self) -> None:
        """Raise the bug that ended the thread: a session without it would miss new tables and wait for copies forever."""
        self._worker.check()

    def beat_soon(self) -> None:
        """Send a heartbeat within a second, even if the source isn't idle."""
        self._beat.set()
        self._wake.set()

    def _look_on(self) -> None:
        while not self._stop.is_set():
            try:
                with connect_same(self._config.dsn, self._identity, purpose="watch") as connection:
                    self._watch(connection)
            except MillstreamError as error:
                logger.warning("looking at the source failed", code=error.code, error=error.message)
                self._stop.wait(self._config.look_s)

    def _watch(self, connection: Connection) -> None:
        asked = False
        while not self._stop.is_set():
            if time.monotonic() - self._looked_at >= self._config.look_s or self._directory.look_wanted.is_set():
                self._directory.look_wanted.clear()
                try:
                    self._config.on_moment("look", {})
                    self._look_at_slot(connection)
                    self._tables.look(connection, self._passed())
                except MillstreamError as error:
                    logger.warning("the source's tables couldn't be looked at", code=error.code, error=error.message)
                    if connection.broken:
                        raise
                self._looked_at = time.monotonic()
            self._on_look(self._directory.refresh())
            if not self._identity.on_standby:
                self._beat_where_idle(connection, asked=asked)
            self._wake.wait(min(_STATES_EVERY_S, self._config.look_s))
            self._wake.clear()
            asked = self._beat.is_set()
            self._beat.clear()

    def _look_at_slot(self, connection: Connection) -> None:
        self.source_end = insert_lsn(connection)
        slot = read_slot(connection, self._config.slot)
        self.slot_holds_bytes = None if slot is None else slot.held_bytes
        status = "" if slot is None else slot.wal_status
        if status != self._wal_status and status in _MISSING_WAL:
            logger.warning(_MISSING_WAL[status], slot=self._config.slot, status=status)
        self._wal_status = status
        row = first_row(
            connection, "SELECT spill_bytes FROM pg_stat_replication_slots WHERE slot_name = %s", [self._config.slot]
        )
        self.spilled_bytes = None if row is None else int(row[0])

    def _beat_where_idle(self, connection: Connection, *, asked: bool) -> None:
        now = time.monotonic()
        if now < self._no_beat_before or (not asked and now - self._last_beat < self._config.heartbeat_s):
            return
        self._last_beat = now
        end = insert_lsn(connection)
        if not asked and end - self._last_end < _HEARTBEAT_BYTES:
            return
        try:
            with translated():
                connection.execute(_HEARTBEAT)
        except MillstreamError as error:
            if connection.broken:
                raise
            logger.info("no heartbeat", code=error.code, error=error.message)
            if error.details.get("sqlstate") in _REFUSALS:
                self._no_beat_before = now + _REFUSED_S
        self._last_end = insert_lsn(connection)
