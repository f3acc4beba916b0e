"""The lake's view `merged`: folded from the logs of a stream's regions, next to the stream's pipeline.

A thread of the pipeline's process folds each table that applications write with a key, as often as `current` is folded.
A fold reads what the logs have after the last one, so its cost follows the changed keys. A table that fails is tried
again; others go on.
"""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import structlog

from millstream.backoff import Backoff
from millstream.crdt.region_state import RegionState
from millstream.errors import LakeTableForeign, LogError, MillstreamError, PositionError
from millstream.lake.folded.current_table import DEFAULT_SIZES, FoldSizes
from millstream.lake.folded.merged import MERGED, REGIONS, MergedFold, MergedOutcome, MergedPlace
from millstream.lake.maintenance import MaintenanceRules, maintain_files
from millstream.model.ids import RegionId
from millstream.model.names import parse_qualified_name, qualified_name
from millstream.model.positions import Seq
from millstream.model.schema import TableKind
from millstream.regions.landed_state import place_of
from millstream.regions.merged_table import RegionTable
from millstream.regions.region_folders import region_logs
from millstream.spark.fold_schedule import DISK_FACTOR, FOLD_INTERVAL_S, FoldHistory, fold_is_due
from millstream.wal.cross_region_duplicates import RepeatedWrites
from millstream.wal.reader import StreamReader
from millstream.workers import Worker

if TYPE_CHECKING:
    from millstream.home.home import Home
    from millstream.lake.layout import LakeLayout

logger = structlog.get_logger("millstream.pipeline")

_LOOK_S: Final = 1.0
_HEAD_S: Final = 600.0
"""Interval at which the position of a table without changes is committed: retention may drop what it has passed."""
_TRIES_MAX: Final = 5
_PAUSE_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class MergedRules:
    """When tables are folded and maintained."""

    interval_s: float = FOLD_INTERVAL_S
    disk_factor: float = DISK_FACTOR
    maintenance: MaintenanceRules = field(default_factory=MaintenanceRules)
    sizes: FoldSizes = DEFAULT_SIZES


@dataclass(slots=True)
class _Table:
    """One table, as this process knows it."""

    fold: FoldHistory = field(default_factory=FoldHistory)
    seen: Mapping[RegionId, Seq] = field(default_factory=dict)
    """Ends of the logs when it was last folded."""
    beyond: tuple[Seq, RegionState] | None = None
    """Number of the last fold, and what was read after it without finding rows of the table."""
    head_s: float = float("-inf")
    """When its position was last committed."""
    place: MergedPlace | None = None
    error: MillstreamError | None = None
    again_s: float = float("-inf")
    backoff: Backoff = field(default_factory=lambda: Backoff(1.0, 300.0, jitter=0))


class MergedViews:
    """The views of one stream. Everything but `failed` is for one thread at a time.

    Args:
        on_failure: called if the thread fails, which only a bug makes it do.
    """

    def __init__(
        self,
        home: Home,
        stream: str,
        layout: LakeLayout,
        rules: MergedRules,
        *,
        on_failure: Callable[[BaseException], object] | None = None,
    ) -> None:
        self._home = home
        self._stream = stream
        self._layout = layout
        self._rules = rules
        self._tables: dict[str, _Table] = {}
        self._readers: dict[RegionId, StreamReader] = {}
        self._repeated = RepeatedWrites()
        self._learned: dict[RegionId, Seq] = {}
        """Ends of the logs when they were last looked at for tables."""
        self._tended_s = time.monotonic()
        self._lock = threading.Lock()
        self._worker = Worker("millstream-merged", self._look, every_s=_LOOK_S, on_failure=on_failure)

    def start(self) -> None:
        """Start folding."""
        self._worker.start()

    def stop(self) -> None:
        """End the thread after its current fold; raise if it failed."""
        self._worker.stop()
        self._worker.join()
        self._worker.check()

    @property
    def failed(self) -> dict[str, MillstreamError]:
        """Errors of the tables whose last fold failed, by name."""
        with self._lock:
            return {name: table.error for name, table in self._tables.items() if table.error is not None}

    def fold_all(self) -> None:
        """Fold every table to the ends of the logs, whatever its schedule. Only while the thread isn't running."""
        self._learn()
        for name, table in self._tables.items():
            for left in reversed(range(_TRIES_MAX)):
                self._fold(name, table, is_last=True)
                if table.error is None or not left:
                    break
                time.sleep(_PAUSE_S)
        self._maintain(at_once=True)

    def _look(self) -> bool:
        self._learn()
        rules = self._rules
        for name, table in self._tables.items():
            now = time.monotonic()
            is_due = fold_is_due(
                table.fold,
                now,
                least_s=rules.interval_s,
                disk_factor=rules.disk_factor,
                keep_s=rules.maintenance.keep_s,
            )
            if table.seen != self._learned and is_due and now >= table.again_s and not self._worker.stopping.is_set():
                table.seen = dict(self._learned)
                self._fold(name, table)
        self._maintain()
        return True

    def _learn(self) -> None:
        """Find the tables that applications of any region write with a key, among the logs' new records."""
        logs = region_logs(self._home, self._stream, self._home.config.streams.get(self._stream))
        for region, folder in logs.items():
            # A reader knows the index of what it has read.
            reader = self._readers.setdefault(region, StreamReader(folder))
            try:
                upto = reader.persisted_upto()
                after = max(self._learned.get(region, Seq(0)), Seq(reader.first_seq() - 1))
                for schema in reader.schemas_between(after, upto).values() if upto > after else ():
                    if schema.kind is TableKind.TABLE and schema.source == 0 and schema.key:
                        self._add(schema.full_name)
                self._learned[region] = upto
            except (LogError, PositionError):
                # Nothing has come yet, or the log was shortened since: it is read again from its beginning.
                self._readers.pop(region)
                self._learned.pop(region, None)

    def _add(self, name: str) -> None:
        with self._lock:
            self._tables.setdefault(qualified_name(*parse_qualified_name(name)), _Table())

    def _fold(self, name: str, table: _Table, *, is_last: bool = False) -> None:
        begun_s = time.monotonic()
        error: MillstreamError | None = None
        try:
            outcome = self._folded(name, table, is_last=is_last)
            table.backoff.reset()
            if outcome is not None:
                ended_s = table.head_s = time.monotonic()
                table.fold = FoldHistory(ended_s, ended_s - begun_s, outcome.live_bytes, outcome.removed_bytes)
        except LakeTableForeign as foreign:
            words = f"`millstream pipeline rebuild {shlex.quote(name)} --view merged`"
            error = LakeTableForeign(foreign.message, hint=f"Build the view again: {words}.", **foreign.details)
        except MillstreamError as failure:
            error = failure
        if error is not None:
            table.again_s = time.monotonic() + table.backoff.next_s()
            table.seen = {}
            if table.error is None or table.error.message != error.message:
                logger.warning(
                    "the merged view can't be folded, and is tried again",
                    stream=self._stream,
                    table=name,
                    code=error.code,
                    error=error.message,
                    hint=error.hint,
                )
        with self._lock:
            table.error = error

    def _folded(self, name: str, table: _Table, *, is_last: bool) -> MergedOutcome | None:
        """Fold one table; None if there was nothing to write."""
        rows = RegionTable(self._home, self._stream, name, with_kept=False, repeated=self._repeated)
        table.place = place_of(self._layout, rows)
        fold = MergedFold(table.place, rows.engine, rows.columns, sizes=self._rules.sizes)
        received = fold.received
        if received is None or fold.head is None:
            return self._replaced(name, fold)
        if table.beyond is not None and table.beyond[0] == fold.head.n:
            known = table.beyond[1]
        else:
            known, table.head_s = received, time.monotonic()
        news = rows.state_after(known.vector, known.ends, known=fold.known if rows.engine.merge.accumulates else None)
        if news is None:
            return self._replaced(name, fold)
        has_moved = news.vector != received.vector
        if not news.rows.num_rows and fold.fits(rows.columns):
            table.beyond = fold.head.n, news
            if not has_moved or not (is_last or time.monotonic() - table.head_s >= _HEAD_S):
                return None
        return fold.join(news)

    def _replaced(self, name: str, fold: MergedFold) -> MergedOutcome:
        """Build the view from the kept state and the logs: it is new, or the logs don't continue what it has."""
        return fold.replace(RegionTable(self._home, self._stream, name, repeated=self._repeated).merged_state())

    def _maintain(self, *, at_once: bool = False) -> None:
        """At intervals, delete files that no reader needs, of tables that were folded lately."""
        rules, now = self._rules.maintenance, time.monotonic()
        if not at_once and now - self._tended_s < rules.interval_s:
            return
        self._tended_s = now
        for table in self._tables.values():
            if table.place is None or now - table.fold.ended_s > rules.watch_s:
                continue
            for view in (MERGED, REGIONS):
                # A failure is left for the next time.
                with suppress(MillstreamError, OSError):
                    maintain_files(
                        self._layout,
                        table.place.path(view),
                        table.place.app(view),
                        now_ms=time.time_ns() // 1_000_000,
                        rules=rules,
                    )
