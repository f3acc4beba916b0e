"""Executors' tasks for a pipeline: write a batch's files, land a batch in a database, fold a table, maintain its files.

Every function here runs in a Python worker of Spark, perhaps twice (retries, speculation, a
restarted driver while the old one's task still ran). The lake's transactions make all but one of
the runs harmless: files that no commit names are deleted by maintenance. An error belongs to one table: it is returned as an answer, so that the other
tables of the batch land.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from millstream import failpoints
from millstream.errors import MillstreamError, Retry
from millstream.lake.commit_cuts import Cut
from millstream.lake.damaged_tables import prepare_rebuild
from millstream.lake.data_files import NewFile
from millstream.lake.folded.current_table import DEFAULT_SIZES, Fold, FoldOutcome, FoldPlan, FoldSizes, begin_fold
from millstream.lake.folded.scd2_table import fold_into_versions, rebuild_versions
from millstream.lake.history import WrittenRecords, bring_history, write_records
from millstream.lake.history_retention import HistoryBound, drop_history
from millstream.lake.layout import LakeLayout, TableCommit, View
from millstream.lake.maintenance import MaintenanceResult, MaintenanceRules, delete_unneeded, maintain_table
from millstream.lake.postgres.land import LandedTable, Loaded, land
from millstream.lake.postgres.target import PostgresTarget
from millstream.lake.table_renames import PackedPlaces
from millstream.model.ids import SchemaVersion, TableId
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema
from millstream.spark.batch_parts import BatchPart, Load, PartRecords, table_loads
from millstream.spark.python_worker_setup import spare_the_collector


@dataclass(frozen=True, slots=True)
class TableError:
    """The reason why a table could not be written, as facts that cross processes."""

    code: str
    message: str
    hint: str
    retry: Retry

    @classmethod
    def of(cls, error: Exception) -> TableError:
        """Return the facts of an error.

        An error outside of Millstream's tree is a bug of ours, reported with its place.
        """
        if isinstance(error, MillstreamError):
            return cls(error.code, error.message, error.hint, error.retry)
        # Refusals of the operating system (a full disk, a lost mount) are temporary; a bug isn't.
        retry = Retry.BACKOFF if isinstance(error, OSError | MemoryError) else Retry.NEVER
        where = "".join(traceback.format_exception(error, limit=-4))
        return cls("unexpected", f"{type(error).__name__}: {error}", where, retry)


@dataclass(frozen=True, slots=True)
class Around:
    """The driver's state when a batch lands."""

    cut: Cut | None
    """The last cut."""
    places: PackedPlaces
    """Places of its tables."""
    held: frozenset[TableId] = frozenset()
    """Tables that are quarantined."""
    unfinished: frozenset[TableId] = frozenset()
    """Tables whose copy isn't known to be complete at the start of the batch."""
    live: frozenset[TableId] = frozenset()
    """Tables that the source still has."""
    history_only: frozenset[TableId] = frozenset()
    """Tables whose rows weren't copied."""
    tables: int = 1
    """About how many tables have records in the batch."""


@dataclass(frozen=True, slots=True)
class TableAnswer:
    """One table of a part: what was written of it or landed, or the error; neither if it is quarantined."""

    table_id: TableId
    schema_version: SchemaVersion
    """Schema version of the last record."""
    newest_us: int | None = None
    """The newest commit time among the records, µs since 1970."""
    written: WrittenRecords | None = None
    """Files for the driver to commit."""
    commit: TableCommit | None = None
    """In a database: what the task has committed."""
    error: TableError | None = None


@dataclass(frozen=True, slots=True)
class WriteTask:
    """One part of a batch for a lake of files."""

    layout: LakeLayout
    part: BatchPart
    upto: Seq
    held: frozenset[TableId]
    """Nothing may be written to a table that failed before: its next batch would leave a gap."""
    places: PackedPlaces


def write_part(task: WriteTask) -> list[TableAnswer]:
    """Write the files of a part's tables; the driver commits them."""
    failpoints.hit("pipeline.part_taken")
    answers = []
    places = task.places.unpacked()
    for table_id, load in table_loads(task.part):
        found = load()
        if found is None:
            continue
        version, newest_us = found.schema.version, found.newest_us
        if table_id in task.held:
            # A cut's time covers everything that was committed up to it.
            answers.append(TableAnswer(table_id, version, newest_us))
            continue
        try:
            batches = [batch for _, batch in found.batches]
            written = write_records(task.layout, found.schema, batches, task.upto, places=places)
            answers.append(TableAnswer(table_id, written.schema.version, newest_us, written))
        except Exception as failure:  # noqa: BLE001 - whatever it is, it is this table's alone
            answers.append(TableAnswer(table_id, version, newest_us, error=TableError.of(failure)))
    spare_the_collector("append")
    return answers


@dataclass(frozen=True, slots=True)
class BringTask:
    """A renamed table, whose earlier records are to be brought along."""

    layout: LakeLayout
    parts: tuple[WrittenRecords, ...]
    upto: Seq
    places: PackedPlaces


def bring_one(task: BringTask) -> TableError | None:
    """Bring a renamed table's records along, before the new ones are committed; return the error if it can't be."""
    try:
        bring_history(task.layout, task.parts, task.upto, places=task.places.unpacked())
    except Exception as failure:  # noqa: BLE001 - as above
        return TableError.of(failure)
    return None


@dataclass(frozen=True, slots=True)
class DatabaseTask:
    """A whole batch for a database."""

    target: PostgresTarget
    part: BatchPart
    upto: Seq
    around: Around


def land_in_database(task: DatabaseTask) -> list[TableAnswer]:
    """Land a batch in one transaction of a database."""
    found: dict[TableId, PartRecords] = {}
    around = task.around

    def loading(table_id: TableId, load: Load) -> Callable[[], Loaded]:
        def loaded() -> Loaded:
            batch = load()
            assert batch is not None, "its frames were found in the log"
            found[table_id] = replace(batch, batches=[])
            return Loaded(batch.schema, batch.batches)

        return loaded

    loads = dict(table_loads(task.part))
    asked = {table_id: loading(table_id, load) for table_id, load in loads.items() if table_id not in around.held}
    # Even without tables to land, it checks that the destination is at the expected position.
    landed = land(
        task.target,
        asked,
        task.upto,
        cut=Seq(0) if around.cut is None else around.cut.n,
        copying=around.unfinished,
        live=around.live,
        history_only=around.history_only,
    )
    for table_id in around.held & loads.keys():
        with contextlib.suppress(MillstreamError):
            loading(table_id, loads[table_id])()
    spare_the_collector("append")
    answers = []
    for table_id in loads:
        result, batch = landed.get(table_id, LandedTable(None)), found.get(table_id)
        version = SchemaVersion(0) if batch is None else batch.schema.version
        error = None if result.error is None else TableError.of(result.error)
        newest_us = None if batch is None else batch.newest_us
        answers.append(TableAnswer(table_id, version, newest_us, commit=result.commit, error=error))
    return answers


@dataclass(frozen=True, slots=True)
class FoldTask:
    """One table to fold, for an executor."""

    layout: LakeLayout
    schema: TableSchema
    """The table's newest schema."""
    upto: Seq
    table_id: TableId
    view: View = "current"
    anew: bool = False
    """Whether the view is rebuilt from all of its history."""
    sizes: FoldSizes = DEFAULT_SIZES
    keep_s: float | None = None
    """If set, files that were replaced that long ago are deleted first; the bound on a table's disk
    bytes relies on it."""
    spared: int | None = None
    """The version that the last cut names."""


@dataclass(frozen=True, slots=True)
class FoldAnswer:
    """The outcome of a fold: a commit, an error, or a plan whose parts are yet to be written."""

    table_id: TableId
    commit: TableCommit | None = None
    took_s: float = 0.0
    live_bytes: int = 0
    """Size in bytes of the view's files now."""
    removed_bytes: int = 0
    """Size in bytes of the files that this fold replaced."""
    error: TableError | None = None
    plan: FoldPlan | None = None
    view: View = "current"
    aside: str | None = None
    """Where a damaged table that is being rebuilt was moved."""


@dataclass(frozen=True, slots=True)
class PartsTask:
    """Some parts of a large table's fold; their common data is read once."""

    plan: FoldPlan
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PartsAnswer:
    """The parts' files, not yet committed; or an error."""

    table_id: TableId
    written: tuple[NewFile, ...] = ()
    error: TableError | None = None


@dataclass(frozen=True, slots=True)
class CommitTask:
    """A fold whose parts are written."""

    plan: FoldPlan
    written: tuple[NewFile, ...]
    took_s: float
    """Seconds so far."""


def start_fold(task: FoldTask) -> FoldAnswer:
    """Fold one table; if it is large, only find the parts that separate tasks will write."""
    schema = task.schema
    failpoints.hit("fold.start")
    started = time.monotonic()
    try:
        aside = prepare_rebuild(task.layout, task.view, schema) if task.anew else None
        if task.keep_s is not None:
            path, app = task.layout.table_path(task.view, schema), task.layout.app_id(task.view, schema.table_id)
            now_ms = time.time_ns() // 1_000_000
            with contextlib.suppress(MillstreamError, OSError):
                delete_unneeded(task.layout, path, app, now_ms=now_ms, keep_s=task.keep_s, spared=task.spared)
        if task.view == "scd2":
            fold = rebuild_versions if task.anew else fold_into_versions
            return replace(_folded(fold(task.layout, schema, task.upto, sizes=task.sizes), started), aside=aside)
        begun = begin_fold(task.layout, schema, task.upto, sizes=task.sizes, anew=task.anew)
        if isinstance(begun, FoldOutcome):
            return replace(_folded(begun, started), aside=aside)
        if begun.plan.part_count > 1:
            return FoldAnswer(schema.table_id, took_s=time.monotonic() - started, plan=begun.plan, aside=aside)
        return replace(_folded(begun.commit(begun.write(0)), started), aside=aside)
    except Exception as failure:  # noqa: BLE001 - as above
        return FoldAnswer(schema.table_id, error=TableError.of(failure), view=task.view)


def write_parts(task: PartsTask) -> PartsAnswer:
    """Write parts of a large table."""
    table_id = task.plan.schema.table_id
    fold = Fold(task.plan)
    try:
        return PartsAnswer(table_id, tuple(file for part in task.parts for file in fold.write(part)))
    except Exception as failure:  # noqa: BLE001 - as above
        return PartsAnswer(table_id, error=TableError.of(failure))


def commit_fold(task: CommitTask) -> FoldAnswer:
    """Commit a large table's parts."""
    started = time.monotonic() - task.took_s
    try:
        return _folded(Fold(task.plan).commit(task.written), started)
    except Exception as failure:  # noqa: BLE001 - as above
        return FoldAnswer(task.plan.schema.table_id, error=TableError.of(failure))


def _folded(done: FoldOutcome, started: float) -> FoldAnswer:
    took_s = time.monotonic() - started
    live, removed = done.live_bytes, done.removed_bytes
    return FoldAnswer(done.commit.table_id, done.commit, took_s, live, removed, view=done.commit.view)


@dataclass(frozen=True, slots=True)
class MaintenanceTask:
    """One table whose files to maintain, for an executor."""

    layout: LakeLayout
    schema: TableSchema
    views: tuple[View, ...]
    spared: Mapping[View, int]
    """By view, the version that the last cut names."""
    rules: MaintenanceRules
    bound: HistoryBound | None = None
    """The bound of what may be dropped from history; None: nothing."""


@dataclass(frozen=True, slots=True)
class MaintenanceAnswer:
    """Disk bytes of a table's views, by view; views whose maintenance failed are missing."""

    table_id: TableId
    taken: Mapping[View, MaintenanceResult]


def maintain_one(task: MaintenanceTask) -> MaintenanceAnswer:
    """Compact a table's small files and delete those that readers no longer need.

    Failures are left for the next time.
    """
    taken: dict[View, MaintenanceResult] = {}
    schema = task.schema
    now_ms = time.time_ns() // 1_000_000
    if task.bound is not None:
        with contextlib.suppress(MillstreamError, OSError):
            drop_history(task.layout, schema, task.bound)
    for view in task.views:
        with contextlib.suppress(MillstreamError, OSError):
            spared = task.spared.get(view)
            taken[view] = maintain_table(task.layout, view, schema, now_ms=now_ms, rules=task.rules, spared=spared)
    return MaintenanceAnswer(schema.table_id, taken)
