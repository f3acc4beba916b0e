"""Maintenance of lake tables: few files instead of many, and no files that readers no longer need.

Safe during writes: compaction is a commit that changes no row, and a commit that loses a race is left for the
next time. A file is deleted only if no version that a reader may still use names it: none of the last `keep_s`, nor
one that a kept cut names. Leftovers of interrupted writes are deleted too: a fold's file once the version in its
name has passed, any other once it is too old for a write in progress.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import Final, TypeVar

import pyarrow as pa

from millstream import failpoints
from millstream.errors import LakeConflict
from millstream.lake.column_conversion import conform
from millstream.lake.commit_cut_maintenance import compact_cuts
from millstream.lake.data_files import (
    UNCOMMITTED_S_MAX,
    NewFile,
    TableFiles,
    new_name,
    replace_files,
    table_in,
    version_in,
)
from millstream.lake.delta.log import CHECKPOINT_S, LOG_RETENTION_S
from millstream.lake.folded.scd2_rules import ENDED_FOLDER, IS_CURRENT
from millstream.lake.history_folder import BOUNDED, DATE
from millstream.lake.layout import BESIDE, LakeLayout, View
from millstream.lake.store_errors import lake_errors
from millstream.lake.table_format import OpenTable, Partition, format_of, open_table
from millstream.model.ids import TableId
from millstream.model.schema import TableSchema

KEEP_S: Final = 300.0
"""Longer than a plain reader's query takes."""
COMPACT_FILES: Final = 200
"""Number of a day's small files that are compacted to one: rare enough, and folds still open few files."""
_COMPACT_FILES_PAST: Final = 8
"""The same number for days that are over."""
_COMPACT_FILES_MONTH: Final = 2
"""The same number for a month that is over."""
_TARGET_BYTES: Final = 64 << 20
_SMALL_BYTES: Final = 16 << 20
"""Smaller files are compacted. A day with fewer bytes shares files with other days of its month, once it is over."""
_Group = TypeVar("_Group", bound=Hashable)


@dataclass(frozen=True, slots=True)
class MaintenanceRules:
    """When and how a lake's files are maintained."""

    keep_s: float = KEEP_S
    """How long replaced files stay."""
    interval_s: float = 60.0
    """Interval between maintenance runs."""
    compact_files: int = COMPACT_FILES
    """Number of small files of a day of history that are compacted to one."""
    log_retention_s: float = LOG_RETENTION_S
    """How long a version of a table can be opened after a later commit."""

    @property
    def watch_s(self) -> float:
        """How long a table is maintained after its last write, whose replaced files are deleted later."""
        return max(self.keep_s, self.log_retention_s + CHECKPOINT_S) + 3 * self.interval_s

    def is_due(self, *, written_s: float, tended_s: float, now_s: float) -> bool:
        """Whether a table's files are to be looked at: after a write, and once each of its effects is over.

        Args:
            written_s: when the table was last written to.
            tended_s: when its files were last looked at.
            now_s: the present, on the same clock.
        """
        # The first look may itself commit, up to an interval after the write.
        margin = 2 * self.interval_s
        files_go, commits_go = self.keep_s + margin, self.log_retention_s + CHECKPOINT_S + margin
        return any(tended_s < moment <= now_s for moment in (written_s, written_s + files_go, written_s + commits_go))


_DEFAULTS: Final = MaintenanceRules()


@dataclass(frozen=True, slots=True)
class MaintenanceResult:
    """The result of a maintenance run."""

    files_compacted: int = 0
    files_deleted: int = 0
    live_bytes: int = 0
    """Size in bytes of the files that the newest version names."""
    disk_bytes: int = 0
    """Size in bytes of all files in the table's folder now, except its log."""


def maintain_table(
    layout: LakeLayout,
    view: View,
    schema: TableSchema,
    *,
    now_ms: int,
    rules: MaintenanceRules = _DEFAULTS,
    spared: int | None = None,
) -> MaintenanceResult:
    """Compact append-only data with many small files, and delete files that no reader needs any longer.

    Call it about once a minute for a table that is written to. It may run concurrently with appends and folds. Rows
    that folds rewrite need no compaction: folds keep their files in shape. Not while the same table is rebuilt.

    Args:
        now_ms: milliseconds since 1970, of the clock that stamps Delta's commits.
        spared: the oldest version of the table that a kept cut names; its files, and those of all later ones, stay.

    Raises:
        LakeTableForeign: another program wrote into the table.
        LakeUnavailable: it can't be reached.
    """
    path, app = layout.table_path(view, schema), layout.app_id(view, schema.table_id)
    opened = open_table(layout, path, app)
    if opened is None:
        return MaintenanceResult()
    today = datetime.fromtimestamp(now_ms / 1000, UTC).date()
    compacted = 0
    if view == "history":
        compacted = _compact(layout, opened, rules.compact_files, today)
    elif view == "scd2":
        format_of(layout).remove(layout, path + BESIDE)  # of a rebuild that was killed
        compacted = _compact_ended(layout, opened, rules.compact_files)
    done = maintain_files(layout, path, app, now_ms=now_ms, rules=rules, spared=spared)
    return replace(done, files_compacted=compacted)


def maintain_files(
    layout: LakeLayout,
    path: str,
    app: str,
    *,
    now_ms: int,
    rules: MaintenanceRules,
    spared: int | None = None,
) -> MaintenanceResult:
    """Delete the files of a table that no reader needs any longer. Arguments and errors as of `maintain_table`."""
    deleted = delete_unneeded(layout, path, app, now_ms=now_ms, keep_s=rules.keep_s, spared=spared)
    newest = open_table(layout, path, app)
    if newest is None:
        return MaintenanceResult()
    newest.trim(now_ms=now_ms, keep_s=rules.keep_s, retention_s=rules.log_retention_s, spared=spared)
    live = sum(size or 0 for size in newest.files().column("size_bytes").to_pylist())
    disk = sum(info.size or 0 for info in TableFiles(layout, path).all().values())
    return MaintenanceResult(0, deleted, int(live), int(disk))


def _compact(layout: LakeLayout, opened: OpenTable, compact_files: int, today: date) -> int:
    """Merge small files of history, those of one table and day, or of its small days of a month; return how many."""
    done = 0
    partition = format_of(layout).partition
    together = _days_together(opened, partition, today)
    for (table, period, day), small in _small_files(opened, together).items():
        is_recent = period is None or (day is not None and day >= _recent_from(today))
        is_over = day is None and period is not None and period < _recent_from(today).strftime(partition.period)
        least = compact_files if is_recent else _COMPACT_FILES_MONTH if is_over else _COMPACT_FILES_PAST
        if len(small) < min(compact_files, least):
            continue
        files = TableFiles(layout, opened.path, BOUNDED)
        placed = partial(partition.placed, value=period)
        if _merge(
            layout, opened, files, small, partition.name, partition.folder(period), new_name(table=table), placed
        ):
            done += len(small)
    return done


def _recent_from(today: date) -> date:
    """Return the first day that may still get files: late records and long transactions have a grace of a day."""
    return today - timedelta(days=1)


def _days_together(
    opened: OpenTable, partition: Partition, today: date
) -> dict[str, tuple[TableId | None, str | None, date | None]]:
    """Return which files of history may be merged: the table, period and day of each; a day of None is any of the period.

    Recent days and large ones stay apart. Files that have several days aren't divided.
    """
    files = opened.files()
    names = ("path", "size_bytes", f"partition.{partition.name}", f"min.{DATE}", f"max.{DATE}")
    if not set(names) <= set(files.column_names):
        return {}
    rows = [(row, table_in(row["path"])) for row in files.select(names).to_pylist()]
    sizes: dict[tuple[TableId | None, date | None], int] = {}
    for row, table in rows:
        if row[f"min.{DATE}"] == row[f"max.{DATE}"]:
            of = table, row[f"max.{DATE}"]
            sizes[of] = sizes.get(of, 0) + int(row["size_bytes"])
    together: dict[str, tuple[TableId | None, str | None, date | None]] = {}
    for row, table in rows:
        first, last = row[f"min.{DATE}"], row[f"max.{DATE}"]
        is_apart = last is not None and (
            last >= _recent_from(today) or (first == last and sizes[table, last] >= _SMALL_BYTES)
        )
        together[row["path"]] = table, row[f"partition.{partition.name}"], last if is_apart else None
    return together


def _compact_ended(layout: LakeLayout, opened: OpenTable, compact_files: int) -> int:
    """Merge small files of ended versions; return how many there were. Folds keep open versions in shape."""
    paths, current = (opened.files().column(name).to_pylist() for name in ("path", f"partition.{IS_CURRENT.name}"))
    small = _small_files(opened, dict(zip(paths, current, strict=True))).get(False, [])
    files = TableFiles(layout, opened.path, opened.bounded)
    merged = partial(_merge, layout, opened, files, small, IS_CURRENT.name, ENDED_FOLDER, new_name(), lambda file: file)
    if len(small) < compact_files or not merged():
        return 0
    return len(small)


def _merge(
    layout: LakeLayout,
    opened: OpenTable,
    files: TableFiles,
    paths: Sequence[str],
    partition: str,
    folder: str,
    name: str,
    placed: Callable[[NewFile], NewFile],
) -> bool:
    """Merge some files of one folder, in a commit that changes no row; return False if another commit came first."""
    shape = pa.schema([field for field in opened.schema() if field.name != partition])
    rows = (batch for path in paths for batch in conform(files.read(path), shape).to_batches())
    merged = files.write(rows, shape, name, partition=folder)
    failpoints.hit("lake.before_compaction_commit")
    try:
        return replace_files(layout, opened, add=[placed(merged)], remove=paths)
    except LakeConflict:
        return False


def _small_files(opened: OpenTable, together: Mapping[str, _Group]) -> dict[_Group, list[str]]:
    """Return small files by their group, as many of each as make one file, ordered by `seq`."""
    actions = opened.files()
    if "min.__seq" not in actions.column_names:
        return {}
    found: dict[_Group, list[str]] = {}
    sizes: dict[_Group, int] = {}
    held = actions.select(["path", "size_bytes", "min.__seq"])
    for row in held.sort_by("min.__seq").to_pylist():
        group, size = together[row["path"]], int(row["size_bytes"])
        if size < _SMALL_BYTES and sizes.get(group, 0) + size <= _TARGET_BYTES:
            found.setdefault(group, []).append(row["path"])
            sizes[group] = sizes.get(group, 0) + size
    return found


def delete_unneeded(
    layout: LakeLayout, path: str, app: str, *, now_ms: int, keep_s: float, spared: int | None = None
) -> int:
    """Delete the files of a table that no reader needs; return how many. Arguments as of `maintain_table`."""
    opened = open_table(layout, path, app)
    kept = None if opened is None else opened.version_before(int(now_ms - keep_s * 1000))
    if opened is None or kept is None:
        return 0
    oldest = kept if spared is None else min(kept, max(0, spared))
    before = open_table(layout, path, app, version=oldest)
    bound = before if kept == oldest else open_table(layout, path, app, version=kept)
    if before is None or bound is None:
        return 0
    needed = _live(opened) | _live(before) | opened.pinned()
    if bound is not before:
        needed |= _live(bound)
    removed = before.removed()
    too_old = datetime.fromtimestamp((now_ms / 1000) - keep_s - UNCOMMITTED_S_MAX, UTC)
    files = TableFiles(layout, path)
    unneeded = []
    for name, info in files.all().items():
        version = version_in(name)
        if name in needed:
            continue
        # A file meant for a version is in that version or in none; a file removed by the oldest kept version stays
        # removed.
        passed = version is not None and version <= oldest
        if passed or name in removed or (version is None and info.mtime is not None and info.mtime < too_old):
            unneeded.append(name)
    failpoints.hit("lake.before_delete")
    with lake_errors(path):
        return files.delete(unneeded)


def maintain_cuts(
    layout: LakeLayout,
    *,
    now_ms: int,
    rules: MaintenanceRules = _DEFAULTS,
    kept_s: float | None = None,
) -> int:
    """Keep `_commits` in few files; return how many data files were deleted. It may run during commits of cuts.

    Arguments as of `maintain_table`, and `kept_s`: history's retention in seconds, after which cuts go too; None: no bound.
    """
    path, app = layout.commits_path, layout.commits_app_id
    with contextlib.suppress(LakeConflict):
        compact_cuts(layout, now=datetime.fromtimestamp(now_ms / 1000, UTC), kept_s=kept_s)
    deleted = delete_unneeded(layout, path, app, now_ms=now_ms, keep_s=rules.keep_s)
    opened = open_table(layout, path, app)
    if opened is not None:
        opened.trim(now_ms=now_ms, keep_s=rules.keep_s, retention_s=rules.log_retention_s, spared=None)
    return deleted


def _live(opened: OpenTable) -> set[str]:
    return set(opened.files().column("path").to_pylist())
