"""Retention of a follower's log: by this node's own bounds, and never beyond what its leader has dropped.

The holders of a log are in the leader's catalog, which a promoted node takes over: what they need has to
be here then. Records that only this home needs are held here: writes of sessions that the received copy
lacks, and what merged tables lack of another region's log.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Final

import structlog

from millstream.errors import DeliveryError
from millstream.home.retention import bounds_of
from millstream.leadership.node_roles import replication_folder
from millstream.model.ids import RegionId, parse_region_log_name
from millstream.model.positions import Seq
from millstream.protocol.delivery import Phase
from millstream.protocol.replication.node_promises import SESSIONS
from millstream.protocol.retention import HolderKind, Retention
from millstream.wal.reader import StreamReader
from millstream.wal.segment_deletion import SESSIONS_HOLDER, drop_segments
from millstream.wal.writing.session_file import HEAD_BYTES, covered_in

if TYPE_CHECKING:
    from millstream.home.home import Home
    from millstream.regions.state_files import KeptVectors

logger = structlog.get_logger("millstream.retention")


class CopyRetention:
    """Retention of one stream's log that this home follows, another region's too (`shop@2`). For one thread."""

    def __init__(self, home: Home, name: str) -> None:
        self._home: Final = home
        self._name: Final = name
        copied = parse_region_log_name(name)
        self._stream: Final = name if copied is None else copied[0]
        self._region: Final[RegionId | None] = None if copied is None else copied[1]
        self._kept: KeptVectors | None = None
        if self._region is not None:
            # Few logs are another region's: the followers of others start sooner without the merge
            # imports.
            from millstream.regions.state_files import KeptVectors

            self._kept = KeptVectors(home)
        self._looked_s: float | None = None

    def look(self, leader_dropped: Seq) -> int:
        """Drop segments that are no longer needed, if a look is due; return how many.

        Raises:
            LogError: the log can't be read.
        """
        config = self._home.config.streams.get(self._stream)
        now_s = time.monotonic()
        if config is None or (self._looked_s is not None and now_s < self._looked_s + config.log.retention_interval_s):
            return 0
        self._looked_s = now_s
        folder = self._home.wal_folder(self._name)
        tracker = Retention()
        tracker.needs("the leader", HolderKind.LEADER, Seq(leader_dropped + 1))
        consumer = self._consumers_need()
        if consumer is not None:
            tracker.needs("consumers", HolderKind.CONSUMER, consumer)
        covered = self._sessions_covered()
        if covered is not None:
            tracker.needs(SESSIONS_HOLDER, HolderKind.SESSIONS, Seq(covered + 1))
        if self._region is not None and self._kept is not None:
            from millstream.regions.region_retention import merge_needs_of_copy

            reader = StreamReader(str(folder))
            merges = merge_needs_of_copy(self._stream, self._region, reader, config, self._kept)
            for holder, needed_from in merges.items():
                tracker.needs(holder, HolderKind.MERGE, needed_from)
        swept = drop_segments(str(folder), tracker, bounds_of(config.log, folder))
        if swept.dropped:
            logger.info("segments dropped", stream=self._name, segments=len(swept.dropped))
        return len(swept.dropped)

    def _consumers_need(self) -> Seq | None:
        """Return the lowest number that a consumer of the leader's copy needs: that copy is older than the leader's log."""
        file = self._home.consumers_document(self._name)
        if not file.exists():
            return None
        # Few streams have consumers: the followers of others start sooner without these imports.
        from millstream.delivery.follower_consumers import copied_consumers

        with contextlib.suppress(DeliveryError):  # a promotion can't use a damaged one either
            cursors = [
                one.state.cursor for one in copied_consumers(file).values() if one.state.phase is not Phase.CUT_OFF
            ]
            return Seq(min(cursors) + 1) if cursors else None
        return None

    def _sessions_covered(self) -> Seq | None:
        """Return the number that the leader's copy of the sessions covers."""
        file = replication_folder(self._home, self._name) / f"{SESSIONS}.document"
        with contextlib.suppress(FileNotFoundError), file.open("rb") as document:
            return covered_in(document.read(HEAD_BYTES))
        return None
