"""Executors' tasks for a pipeline: append a table's records to its history, land a batch in a database, fold a table.

Every function here runs in a Python worker of Spark, perhaps twice (retries, speculation, a
restarted driver while the old one's task still ran). The lake's transactions make all but one of
the runs harmless. An error belongs to one table: it is returned as an answer, so that the other
tables of the batch land.
"""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from millstream import failpoints
from millstream.errors import MillstreamError, Retry
from millstream.lake.commit_cuts import Cut
from millstream.lake.data_files import NewFile
from millstream.lake.folded.current import DEFAULT_SIZES, Fold, FoldOutcome, FoldPlan, FoldSizes, begin_fold
from millstream.lake.folded.scd2 import fold_into_versions, rebuild_versions
from millstream.lake.history import append_history
from millstream.lake.layout import LakeLayout, TableCommit, View
from millstream.lake.maintenance import Upkeep, UpkeepRules, delete_unneeded, tend_table
from millstream.lake.postgres.land import LandedTable, Loaded, land
from millstream.lake.postgres.target import PostgresTarget
from millstream.lake.rebuild import prepare_rebuild
from millstream.lake.renames import PackedPlaces
from millstream.lake.retain import HistoryBound, drop_history
from millstream.model.ids import TableId
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema
from millstream.spark.frames import MARKER, records_in
from millstream.spark.workers import spare_the_collector

ANSWER_COLUMNS: Final = (
    "table_id long, schema_version long, batch_after long, batch_upto long, commit string, commit_us long, error string"
)
_ANSWER_SCHEMA: Final = pa.schema(
    [
        ("table_id", pa.int64()),
        ("schema_version", pa.int64()),
        ("batch_after", pa.int64()),
        ("batch_upto", pa.int64()),
        ("commit", pa.string()),
        ("commit_us", pa.int64()),
        ("error", pa.string()),
    ]
)


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

    def to_json(self) -> str:
        """Return the error as text."""
        return json.dumps({"code": self.code, "message": self.message, "hint": self.hint, "retry": self.retry.value})

    @classmethod
    def from_json(cls, text: str) -> TableError:
        """Parse an error's text."""
        facts: dict[str, Any] = json.loads(text)
        return cls(facts["code"], facts["message"], facts["hint"], Retry(facts["retry"]))


def table_writer(layout: LakeLayout, held: frozenset[TableId], places: PackedPlaces) -> Callable[[pa.Table], pa.Table]:
    """Return the function that Spark applies to each table's rows of a batch; tables in `held` are skipped.

    Nothing may be appended to a table that failed before: its next batch would leave a gap.
    `places` are those of the last cut.
    """

    def write(rows: pa.Table) -> pa.Table:
        group = _TableBatch.of(rows)
        commit: TableCommit | None = None
        error: Exception | None = None
        if group.table_id != MARKER:
            try:
                # Also for a skipped table: a cut's time covers everything that was committed up to it.
                schema, batches = group.load()
                if group.table_id not in held:
                    commit = append_history(layout, schema, batches, group.upto, places=places.unpacked())
            except Exception as failure:  # noqa: BLE001 - whatever it is, it is this table's alone
                error = None if group.table_id in held else failure
        spare_the_collector("append")
        return _answers([group.answer(commit, error)])

    return write


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


def database_writer(target: PostgresTarget, around: Around) -> Callable[[pa.Table], pa.Table]:
    """Return the function that Spark applies to all rows of a batch: one transaction of a database."""
    cut = Seq(0) if around.cut is None else around.cut.n
    # Tasks receive what they use, not the tables of the cut.
    held, copying, live, history_only = around.held, around.unfinished, around.live, around.history_only

    def write(rows: pa.Table) -> pa.Table:
        ids = [TableId(found) for found in pc.unique(rows.column("table_id")).to_pylist()]
        groups = {found: _TableBatch.of(rows.filter(pc.equal(rows.column("table_id"), int(found)))) for found in ids}
        asked = {found: _loader(group) for found, group in groups.items() if found != MARKER and found not in held}
        upto = next(iter(groups.values())).upto
        # Even without tables to land, it checks that the destination is at the expected position.
        landed = land(
            target,
            asked,
            upto,
            cut=cut,
            copying=copying,
            live=live,
            history_only=history_only,
        )
        for found in held & groups.keys():
            with contextlib.suppress(MillstreamError):
                groups[found].load()
        spare_the_collector("append")
        nothing = LandedTable(None)
        return _answers(
            [
                group.answer(landed.get(found, nothing).commit, landed.get(found, nothing).error)
                for found, group in groups.items()
            ]
        )

    return write


def _loader(group: _TableBatch) -> Callable[[], Loaded]:
    def load() -> Loaded:
        schema, batches = group.load()
        return Loaded(schema, [(TableSchema.from_arrow(batch.schema), batch) for batch in batches])

    return load


@dataclass(slots=True)
class _TableBatch:
    """One table's rows of a batch, or a marker's."""

    table_id: TableId
    rows: pa.Table
    after: Seq
    upto: Seq
    version: int
    """Schema version of the last record, once the records are loaded."""
    newest_us: int | None = None
    """The newest commit time among the records, µs since 1970, once they are loaded."""

    @classmethod
    def of(cls, rows: pa.Table) -> _TableBatch:
        rows = rows.sort_by("first_seq")
        first = [rows.column(name)[0].as_py() for name in ("table_id", "batch_after", "batch_upto")]
        version = int(pc.max(rows.column("schema_version")).as_py())
        return cls(TableId(first[0]), rows, Seq(first[1]), Seq(first[2]), version)

    def load(self) -> tuple[TableSchema, list[pa.RecordBatch]]:
        """Return the schema of the last record, and the records."""
        schema, batches, self.newest_us = _records(self.table_id, self.rows)
        self.version = int(schema.version)
        return schema, batches

    def answer(self, commit: TableCommit | None, error: Exception | None) -> list[Any]:
        """Return a row of `ANSWER_COLUMNS`."""
        told = None if commit is None else json.dumps(commit.as_dict())
        failed = None if error is None else TableError.of(error).to_json()
        return [self.table_id, self.version, self.after, self.upto, told, self.newest_us, failed]


def _answers(answers: list[list[Any]]) -> pa.Table:
    columns = zip(*answers, strict=True)
    return pa.Table.from_arrays(
        [pa.array(values, field.type) for values, field in zip(columns, _ANSWER_SCHEMA, strict=True)],
        schema=_ANSWER_SCHEMA,
    )


def _records(table_id: TableId, rows: pa.Table) -> tuple[TableSchema, list[pa.RecordBatch], int | None]:
    """Return one table's records: the last one's schema, the batches, and the newest commit time, µs since 1970."""
    last: tuple[int, TableSchema] | None = None
    batches: list[pa.RecordBatch] = []
    for ipc, span in zip(rows.column("ipc"), rows.column("span").to_pylist(), strict=True):
        for schema, batch in records_in(table_id, ipc.as_buffer(), span):
            batches.append(batch)
            # Not by version: a table that is renamed back to an earlier name also has that name's version again.
            ends = pc.max(batch.column("__seq")).as_py() or 0
            last = (ends, schema) if last is None or ends >= last[0] else last
    assert last is not None, "a group of rows has at least one"
    times = [pc.max(batch.column("__commit_ts").cast(pa.int64())).as_py() for batch in batches]
    return last[1], batches, max((time for time in times if time is not None), default=None)


@dataclass(frozen=True, slots=True)
class FoldTask:
    """One table to fold, for an executor."""

    layout: LakeLayout
    schema: bytes
    """The table's newest schema: Arrow's serialised form of `to_arrow()`."""
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
    schema = TableSchema.from_arrow(pa.ipc.read_schema(pa.py_buffer(task.schema)))
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
class TendTask:
    """One table whose files to tend, for an executor."""

    layout: LakeLayout
    schema: bytes
    views: tuple[View, ...]
    spared: Mapping[View, int]
    """By view, the version that the last cut names."""
    rules: UpkeepRules
    bound: HistoryBound | None = None
    """The bound of what may be dropped from history; None: nothing."""


@dataclass(frozen=True, slots=True)
class TendAnswer:
    """Disk bytes of a table's views, by view; views whose upkeep failed are missing."""

    table_id: TableId
    taken: Mapping[View, Upkeep]


def tend_one(task: TendTask) -> TendAnswer:
    """Compact a table's small files and delete those that readers no longer need.

    Failures are left for the next time.
    """
    taken: dict[View, Upkeep] = {}
    schema = TableSchema.from_arrow(pa.ipc.read_schema(pa.py_buffer(task.schema)))
    now_ms = time.time_ns() // 1_000_000
    if task.bound is not None:
        with contextlib.suppress(MillstreamError, OSError):
            drop_history(task.layout, schema, task.bound)
    for view in task.views:
        with contextlib.suppress(MillstreamError, OSError):
            taken[view] = tend_table(
                task.layout,
                view,
                schema,
                now_ms=now_ms,
                keep_s=task.rules.keep_s,
                compact_files=task.rules.compact_files,
                log_retention_s=task.rules.log_retention_s,
                spared=task.spared.get(view),
            )
    return TendAnswer(schema.table_id, taken)
