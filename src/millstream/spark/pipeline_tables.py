"""The driver's state of its tables: each one's position, what waits for a fold, and the cut. `quarantine` has those that failed.

One object a run, shared by the thread that lands batches and the thread that folds. Cuts are
committed under a lock of their own, so that rows of `_commits` follow one another and each names versions that
go together. A lake that doesn't answer may hold it for minutes, in which progress is still reported.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from shlex import quote
from typing import Final

from millstream import process_metrics
from millstream.backoff import Backoff
from millstream.catalog import Catalog, TableState
from millstream.catalog.pipeline_tables import FoldFailures, LastFigures, QuarantinedTable, TableFigures
from millstream.errors import CatalogError
from millstream.lake.commit_cuts import Cut, CutTable
from millstream.lake.layout import TableCommit, View, has_current
from millstream.model.ids import SchemaVersion, TableId
from millstream.model.positions import Seq
from millstream.model.rates import Rate
from millstream.model.schema import TableSchema
from millstream.protocol.retention import HolderKind
from millstream.spark.batch_targets import LakeOfFiles
from millstream.spark.complete_copies import COPYING
from millstream.spark.executor_tasks import MaintenanceAnswer, TableError
from millstream.spark.fold_schedule import FoldHistory
from millstream.spark.pipeline import PipelineConfig, TableProgress
from millstream.spark.quarantine import Quarantine
from millstream.spark.unreachable_lake import patiently
from millstream.wal.reader import StreamReader

_NOTES_MAX: Final = 1000
"""Number of appends to a table that are noted one by one until a fold covers them; later ones share a note."""
_NO_VERSION: Final = SchemaVersion(0)
_KEEP_S: Final = 30.0
"""How often the tables' last changes are recorded: a kill loses the newest."""
_SAME_CODE_S: Final = 60.0
"""How long a fold's recorded failure stands before one of the same code replaces it."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class PipelineTable:
    """One table, as seen by this run."""

    table_id: TableId
    name: str = ""
    version: SchemaVersion = _NO_VERSION
    """Schema version of the newest records in the lake; 0 if this run has appended none."""
    rows: int = 0
    rate: Rate = field(default_factory=Rate)
    """Rate of records appended."""
    waiting: deque[tuple[Seq, int]] = field(default_factory=deque)
    """Appends of this run that no fold has covered: up to which position, how many records."""
    live_bytes: int | None = None
    """Size in bytes of `current`'s files when it was last maintained, by this run or an earlier one; None if it isn't known."""
    disk_bytes: int | None = None
    """Size in bytes of everything in `current`'s folder when it was last maintained."""
    written_s: float = field(default_factory=time.monotonic)
    """When it was last written to; initially, when this run began."""
    tended_s: float = float("-inf")
    """When its files were last maintained in this run."""
    changed_us: int | None = None
    """The newest commit time among its records, µs since 1970; None if it isn't known."""
    history_n: Seq = Seq(0)
    current_n: Seq | None = None
    scd2_n: Seq | None = None
    waiting_since_s: float | None = None
    """When the oldest record that waits for a fold was appended; None if none waits."""
    fold: FoldHistory = field(default_factory=FoldHistory)
    fold_error: TableError | None = None
    fold_again_s: float = float("-inf")
    """Earliest moment of the next fold, after a fold that failed."""
    fold_backoff: Backoff = field(default_factory=lambda: Backoff(1.0, 300.0, jitter=0))


@dataclass(frozen=True, slots=True)
class _RecordedFold:
    """A fold's failure as the catalog has it."""

    error: TableError
    at_s: float

    def is_replaced_by(self, error: TableError, now_s: float) -> bool:
        """Return whether another error is to be recorded: of another code, or in other words after a while.

        Some messages hold a path or a time that changes at each try.
        """
        return error.code != self.error.code or (
            error.message != self.error.message and now_s - self.at_s >= _SAME_CODE_S
        )


class PipelineTables:
    """The state of all tables of one run.

    `commit` is for any thread; other methods for the thread that lands batches, unless stated
    otherwise.
    """

    def __init__(self, config: PipelineConfig, catalog: Catalog) -> None:
        self._config = config
        self._catalog = catalog
        self._lock = threading.Lock()
        self._cutting = threading.Lock()
        """Held while a cut is committed."""
        self.wait: Callable[[float], object] = time.sleep
        """Waits so many seconds between two tries of a cut; returns true if the driver ends."""
        self.tables: dict[TableId, PipelineTable] = {}
        self.quarantine: Final = Quarantine(config, catalog)
        self._fold_failures = FoldFailures(catalog, config.stream_id, config.pipeline)
        self._recorded_folds: dict[TableId, _RecordedFold | None] = dict.fromkeys(self._fold_failures.all())
        """Each table's recorded failure; None for one of an earlier run."""
        self._last_figures = LastFigures(catalog, config.stream_id, config.pipeline)
        self._kept_s = time.monotonic()
        self.rows = 0
        self.cut = config.target.last_cut()
        """The last cut; None before the lake's first."""
        if self.cut is not None:
            now, schemas = time.monotonic(), catalog.latest_schemas(config.stream_id)
            _, figures = self._last_figures.all()
            for table in self.cut.tables.values():
                # Work that an earlier run left unfolded.
                self.tables[table.table_id] = PipelineTable(
                    table.table_id,
                    table.name,
                    history_n=self.cut.n,
                    current_n=table.current_n,
                    scd2_n=table.scd2_n,
                    waiting_since_s=now if _lacks_folds(config, table, schemas.get(table.table_id)) else None,
                )
                if (last := figures.get(table.table_id)) is not None:
                    entry = self.tables[table.table_id]
                    entry.live_bytes, entry.disk_bytes, entry.changed_us = (
                        last.live_bytes,
                        last.disk_bytes,
                        last.changed_us,
                    )
        self._drop_ended_failures()
        if self.cut is not None:
            self._take_held(config.target.held())
            for incomplete in self.lacking():
                if incomplete.table_id not in self.quarantine.tables:
                    self.quarantine.add(incomplete, retry_at_once=True)

    def lacking(self) -> list[QuarantinedTable]:
        """Return the tables with a view that was added to the configuration after records had landed without it."""
        target = self._config.target
        if isinstance(target, LakeOfFiles):  # folds build a view from all of history
            return []
        stream = self._config.stream_id
        states = {t: state for t, state in self._catalog.states(stream).items() if state not in COPYING}
        schemas = self._catalog.latest_schemas(stream)
        without_rows = {
            t
            for t, s in states.items()
            if s is TableState.HISTORY_ONLY or t not in schemas or not has_current(schemas[t])
        }
        found = []
        for table_id, (n, view) in target.lacking(states.keys(), without_rows=without_rows).items():
            name = schemas[table_id].full_name if table_id in schemas else f"table {table_id}"
            reason = f"the view `{view}` lacks records: `views` had it not while the table landed up to {n}"
            hint = f"Run `millstream tables copy {quote(name)}`."
            if table_id in schemas and schemas[table_id].source == 0:
                hint = f"Take `{view}` out of `views` in [streams.{self._config.stream}.lake]: what applications write can't be copied."
            found.append(QuarantinedTable(table_id, name, n, reason, "lake_view_incomplete", hint))
        return found

    def _take_held(self, held: Mapping[TableId, Seq]) -> None:
        """Quarantine the tables that the destination says it lacks records of, and the catalog doesn't.

        It was restored from a backup that was made while they were quarantined, or is in use again after another one.
        """
        known = {table_id: table.after for table_id, table in self.quarantine.tables.items()}
        lacking = {table_id: after for table_id, after in held.items() if after < known.get(table_id, Seq(after + 1))}
        if lacking:
            # Until `claim`, retention keeps everything: what a table needs can't go down in one step.
            self._catalog.release(self._config.stream_id, self._config.pipeline)
        for table_id, after in lacking.items():
            if table_id in known:
                self.quarantine.let_go(table_id)
            name = self.tables[table_id].name if table_id in self.tables else f"table {table_id}"
            reason = f"it was quarantined when the destination was as it is now, and lacks what came behind {after}"
            hint = "Wait: the pipeline tries it again."
            table = QuarantinedTable(table_id, name, after, reason, "restored", hint)
            self.quarantine.add(table, retry_at_once=True)

    def _entry(self, table_id: TableId, name: str = "") -> PipelineTable:
        """Return the table's entry, made if it is new."""
        entry = self.tables.setdefault(table_id, PipelineTable(table_id))
        entry.name = name or entry.name
        return entry

    def appended(
        self,
        commits: Iterable[TableCommit],
        versions: Mapping[TableId, SchemaVersion],
        newest_us: Mapping[TableId, int] | None = None,
    ) -> None:
        """Record what a batch appended.

        Args:
            versions: the schema version of each table's last record.
            newest_us: each table's newest commit time, µs since 1970.
        """
        now, stream = time.monotonic(), str(self._config.stream_id)
        with self._lock:
            for commit in commits:
                entry = self._entry(commit.table_id, commit.name)
                entry.version = versions[commit.table_id]
                entry.written_s = now
                if newest_us and commit.table_id in newest_us:
                    entry.changed_us = max(entry.changed_us or 0, newest_us[commit.table_id])
                entry.rows += commit.rows
                process_metrics.LANDED_ROWS.of(stream, entry.name).add(commit.rows)
                entry.rate.add(commit.rows, now)
                self._wait(entry, commit)
                self.rows += commit.rows
                entry.history_n = max(entry.history_n, commit.n)
                if entry.waiting_since_s is None and self._config.folds:
                    entry.waiting_since_s = now
        if now - self._kept_s >= _KEEP_S:
            self.keep_changes()

    def keep_changes(self) -> None:
        """Record the tables' last figures in the catalog, for the next run and for a status without one."""
        self._kept_s = time.monotonic()
        self._drop_ended_failures()
        entries = list(self.tables.values())
        if entries:
            self._last_figures.put(
                {
                    entry.table_id: TableFigures(entry.rows, entry.live_bytes, entry.disk_bytes, entry.changed_us)
                    for entry in entries
                }
            )

    def _wait(self, entry: PipelineTable, commit: TableCommit) -> None:
        """Note that records wait for a fold. A table that is never folded keeps a bounded number of notes."""
        if not self._config.folds:
            return
        rows = commit.rows
        if len(entry.waiting) >= _NOTES_MAX:
            rows += entry.waiting.pop()[1]
        entry.waiting.append((commit.n, rows))

    def waits_no_longer(self, entry: PipelineTable) -> None:
        """Record that nothing of a table is folded. Any thread."""
        with self._lock:
            entry.waiting_since_s = None
            entry.waiting.clear()
            entry.fold_error = None
        self._note_fold(entry.table_id, None)

    def _note_fold(self, table_id: TableId, error: TableError | None) -> None:
        """Record in the catalog whether a table's fold fails, for as long as it does.

        If the catalog can't be reached, the next try of the fold records it, or `keep_changes` removes it.
        """
        now = time.monotonic()
        with contextlib.suppress(CatalogError):
            if error is None:
                if table_id in self._recorded_folds:
                    self._fold_failures.drop(table_id)
                    self._recorded_folds.pop(table_id, None)
                return
            recorded = self._recorded_folds.get(table_id)
            if recorded is None or recorded.is_replaced_by(error, now):
                self._fold_failures.put(table_id, code=error.code, reason=error.message, hint=error.hint)
                self._recorded_folds[table_id] = _RecordedFold(error, now)

    def _drop_ended_failures(self) -> None:
        """Remove the recorded failures of tables that wait for no fold, and whose last one didn't fail."""
        for table_id in list(self._recorded_folds):
            entry = self.tables.get(table_id)
            if entry is None or (entry.waiting_since_s is None and entry.fold_error is None):
                self._note_fold(table_id, None)

    def folded(
        self,
        table_id: TableId,
        commits: Sequence[TableCommit],
        last: FoldHistory,
        started_s: float,
        error: TableError | None = None,
    ) -> None:
        """Record a table's folds that began at `started_s`. Any thread.

        Args:
            commits: of the views whose fold didn't fail.
            error: why a view's fold failed; the next try waits twice as long as this one did.
        """
        now = time.monotonic()
        with self._lock:
            entry = self.tables[table_id]
            if commits and error is None:
                covered = min(commit.n for commit in commits)
                while entry.waiting and entry.waiting[0][0] <= covered:
                    entry.waiting.popleft()
            for commit in commits:
                if commit.view == "current":
                    entry.current_n = commit.n
                else:
                    entry.scd2_n = commit.n
            if commits:
                entry.fold = last
                entry.written_s = now
            entry.fold_error = error
            if error is None:
                entry.fold_backoff.reset()
                reached = min(commit.n for commit in commits)
                entry.waiting_since_s = started_s if entry.history_n > reached else None
            else:
                entry.fold_again_s = now + entry.fold_backoff.next_s()
        self._note_fold(table_id, error)

    def maintained(self, answer: MaintenanceAnswer) -> None:
        """Record a table's disk bytes. Any thread."""
        current = answer.taken.get("current")
        if current is not None:
            entry = self.tables[answer.table_id]
            entry.live_bytes, entry.disk_bytes = current.live_bytes, current.disk_bytes

    def commit(
        self, n: Seq | None, commits: Iterable[TableCommit], *, newest_us: int | None = None, written_us: int = 0
    ) -> Cut | None:
        """Commit a cut: at `n`, or at the last one's position, with the tables' new versions. Any thread.

        Args:
            n: the position that all tables that aren't quarantined have reached; None: the last cut's.
            commits: the results of writes since the last cut.
            newest_us: the newest commit time among the batch's records, µs since 1970.
            written_us: when the log's newest group at or below `n` was written: the cut is never older.
        """
        commits = list(commits)
        with self._cutting:
            if n is None and not commits:
                return self.cut
            at = self.cut.n if n is None and self.cut is not None else n
            if at is None:
                return None  # a fold before the first cut: impossible, for folds need one
            return self._commit(at, commits, newest_us, written_us)

    def _commit(
        self, at: Seq, commits: Iterable[TableCommit], newest_us: int | None = None, written_us: int = 0
    ) -> Cut:
        """Commit a cut, with the tables that it leaves out."""
        commits = list(commits)
        self.cut = patiently(
            lambda: self._config.target.commit_cut(
                at,
                commits,
                committed_at=max(datetime.now(UTC), _EPOCH + timedelta(microseconds=written_us)),
                commit_ts_max=None if newest_us is None else _EPOCH + timedelta(microseconds=newest_us),
                held={table_id: table.after for table_id, table in list(self.quarantine.tables.items())},
            ),
            wait=self.wait,
        )
        return self.cut

    def release(self, table_id: TableId) -> None:
        """Let a table that has caught up land with the others again."""
        self.quarantine.remove(table_id)
        if self.cut is not None:
            # First the cut: a target that still named the table would have records read again that
            # the log drops from here on.
            with self._cutting:
                self._commit(self.cut.n, ())
        self.quarantine.let_go(table_id)

    def claim(self, needed_from: Seq) -> None:
        """Set again which part of the log this pipeline needs. At the start, before any batch.

        The position may go down: a lake that was moved away or restored to an earlier state needs
        again what had landed in it. Needs of tables that aren't quarantined are removed: a kill
        between the two writes of the quarantine leaves such needs behind.

        Args:
            needed_from: the lowest number that the engine may ask for.
        """
        stream, pipeline = self._config.stream_id, self._config.pipeline
        held = {self.quarantine.holder(table_id) for table_id in self.quarantine.tables}
        for position in self._catalog.pipelines(stream):
            is_table = position.kind is HolderKind.BACKLOG and position.name.startswith(f"{pipeline}/")
            if position.name == pipeline or (is_table and position.name not in held):
                # The home's pipeline needs everything until it has set its position, so nothing is
                # dropped in between.
                self._catalog.release(stream, position.name)
        self._catalog.set_landed(stream, pipeline, Seq(0) if self.cut is None else self.cut.n)
        self._catalog.set_needed_from(stream, pipeline, needed_from)

    def fold_errors(self) -> dict[str, TableError]:
        """Return the errors of the tables that only their fold holds back, by name. Any thread."""
        held = list(self.quarantine.tables)
        return {t.name: t.fold_error for t in list(self.tables.values()) if t.fold_error and t.table_id not in held}

    def quarantined(self) -> dict[str, str]:
        """Return the names of the tables that failed, with the reason: in history, or in the fold. Any thread."""
        found = {name: error.message for name, error in self.fold_errors().items()}
        return found | {table.name: table.reason for table in list(self.quarantine.tables.values())}

    def progress(self) -> tuple[TableProgress, ...]:
        """Return the progress of all tables of this run, by name. Any thread."""
        now = time.monotonic()
        with self._lock:
            entries = sorted(self.tables.values(), key=lambda entry: (entry.name, entry.table_id))
            return tuple(
                TableProgress(
                    entry.table_id,
                    entry.name,
                    entry.rows,
                    entry.history_n,
                    entry.current_n,
                    0.0 if entry.waiting_since_s is None else now - entry.waiting_since_s,
                    0 if entry.waiting_since_s is None else sum(rows for _, rows in entry.waiting),
                    round(entry.rate.per_s(now), 1),
                    entry.live_bytes,
                    entry.disk_bytes,
                    entry.changed_us,
                )
                for entry in entries
            )


def written_us(log: StreamReader, upto: Seq) -> int:
    """Return when the log's newest readable group at or below `upto` was written, in hybrid time: µs since 1970, rounded up."""
    return -(-max((header.hybrid_time for header in log.newest_headers(upto, readable=True)), default=0) // 1000)


def _lacks_folds(config: PipelineConfig, table: CutTable, schema: TableSchema | None) -> bool:
    """Whether a view lacks records that history has, as the cut shows, or its folder was deleted."""
    reached: dict[View, Seq] = {"current": table.current_n, "scd2": table.scd2_n}
    wanted = {view: n for view, n in reached.items() if view in config.views}
    if schema is None or any(n < table.history_n for n in wanted.values()):
        return True
    layout = config.target.layout if isinstance(config.target, LakeOfFiles) else None
    if layout is None or "://" in layout.location:  # a request a table at each start would be too many
        return False
    return not all(Path(layout.table_path(view, schema)).is_dir() for view in wanted)
