"""Upkeep of lake tables: few files instead of many, and none that no reader needs any more.

Safe beside writes: compaction is a commit of Delta that changes no row, and what loses a race is left for the next time. A
file is deleted only if no version that a reader may still be at names it: none of the last `keep_s`, nor one that a kept cut names.
What interrupted writes left behind goes too: a file of a fold as soon as the version that its name speaks of has passed, any
other once it is too old to be part of a write under way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import Any, Final

import pyarrow as pa

from millstream import failpoints
from millstream.errors import LakeConflict
from millstream.lake.data_files import NewFile, TableFiles, new_name, remove_folder, swap, table_in, version_in
from millstream.lake.delta import OpenTable, bounded_columns, lake_errors, live_files, open_table
from millstream.lake.delta_log import CHECKPOINT_S, LOG_RETENTION_S, log_files, trim_log
from millstream.lake.folded.scd2 import ENDED_FOLDER, IS_CURRENT
from millstream.lake.folder import BOUNDED, PARTITION, day_folder, in_day
from millstream.lake.layout import BESIDE, LakeLayout, View
from millstream.lake.snapshots import compact_cuts
from millstream.lake.types import conform
from millstream.model.ids import TableId
from millstream.model.schema import TableSchema

KEEP_S: Final = 300.0
"""Longer than a query of a plain reader takes."""
COMPACT_FILES: Final = 200
"""Small files of a day from which on they are made one: seldom enough, and folds still open few files."""
_COMPACT_FILES_PAST: Final = 8
"""The same of a day that is over."""
_TARGET_BYTES: Final = 64 << 20
_SMALL_BYTES: Final = 16 << 20
_WRITE_S_MAX: Final = 3_600.0
"""No write of ours holds a file uncommitted for as long."""
_CLOCK_MS: Final = 2_000
"""The storage's clock and the one that stamps commits may differ by this much."""


@dataclass(frozen=True, slots=True)
class UpkeepRules:
    """When and how a lake's files are tended."""

    keep_s: float = KEEP_S
    """How long replaced files stay."""
    interval_s: float = 60.0
    """From one upkeep to the next."""
    compact_files: int = COMPACT_FILES
    """Small files of a day of history from which on they are made one."""
    log_retention_s: float = LOG_RETENTION_S
    """How long a version of a table can be opened after a later commit."""

    @property
    def watch_s(self) -> float:
        """How long a table is tended after its last write: what that replaced goes a while after it."""
        return max(self.keep_s, self.log_retention_s + CHECKPOINT_S) + 3 * self.interval_s


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What was done."""

    files_compacted: int = 0
    files_deleted: int = 0
    live_bytes: int = 0
    """Of the files that the newest version names."""
    disk_bytes: int = 0
    """Of all files that lie in the table's folder now, its log aside."""


def tend_table(
    layout: LakeLayout,
    view: View,
    schema: TableSchema,
    *,
    now_ms: int,
    keep_s: float = KEEP_S,
    compact_files: int = COMPACT_FILES,
    log_retention_s: float = LOG_RETENTION_S,
    spared: int | None = None,
) -> Upkeep:
    """Compact what is only appended to where it has many small files, and delete files that no reader needs any more.

    Call it about once a minute for a table that is written to. It may run beside appends and folds. Rows that folds rewrite
    need no compaction: folds keep their files in shape. Not while the same table is built anew.

    Args:
        layout: where the lake is.
        view: which of the table's views.
        schema: names the table.
        now_ms: milliseconds since 1970, of the clock that stamps Delta's commits.
        keep_s: how long replaced files stay.
        compact_files: small files (of history: of a day) from which on they are compacted.
        log_retention_s: how long a version can be opened after a later commit.
        spared: the oldest version of the table that a kept cut names; its files, and those of all later ones, stay.

    Raises:
        LakeTableForeign: somebody else wrote into the table.
        LakeUnavailable: it can't be reached.
    """
    path, app = layout.table_path(view, schema), layout.app_id(view, schema.table_id)
    opened = open_table(layout, path, app)
    if opened is None:
        return Upkeep()
    today = datetime.fromtimestamp(now_ms / 1000, UTC).date()
    compacted = 0
    if view == "history":
        compacted = _compact(layout, opened, compact_files, today)
    elif view == "scd2":
        remove_folder(layout, path + BESIDE)  # of a rebuild that was killed
        compacted = _compact_ended(layout, opened, compact_files)
    deleted = delete_unneeded(layout, path, app, now_ms=now_ms, keep_s=keep_s, spared=spared)
    newest = open_table(layout, path, app) or opened
    trim_log(layout, newest, now_ms=now_ms, keep_s=keep_s, retention_s=log_retention_s, spared=spared)
    live = sum(size or 0 for size in live_files(newest).column("size_bytes").to_pylist())
    disk = sum(info.size or 0 for info in TableFiles(layout, path).all().values())
    return Upkeep(compacted, deleted, int(live), int(disk))


def _compact(layout: LakeLayout, opened: OpenTable, compact_files: int, today: date) -> int:
    """Merge small files of history, those of one table and day; returns how many there were."""
    done = 0
    for (day, table), small in _small_files(opened, PARTITION).items():
        past = day is not None and day < today - timedelta(days=1)
        if len(small) < (min(compact_files, _COMPACT_FILES_PAST) if past else compact_files):
            continue
        files = TableFiles(layout, opened.path, BOUNDED)
        name = new_name(table=table)
        if _merge(opened, files, small, PARTITION, day_folder(day), name, partial(in_day, day=day)):
            done += len(small)
    return done


def _compact_ended(layout: LakeLayout, opened: OpenTable, compact_files: int) -> int:
    """Merge small files of versions that have ended; returns how many there were. Open ones are in shape by the folds."""
    small = _small_files(opened, IS_CURRENT.name).get((False, None), [])
    files = TableFiles(layout, opened.path, bounded_columns(opened))
    merged = partial(_merge, opened, files, small, IS_CURRENT.name, ENDED_FOLDER, new_name(), lambda file: file)
    if len(small) < compact_files or not merged():
        return 0
    return len(small)


def _merge(
    opened: OpenTable,
    files: TableFiles,
    paths: Sequence[str],
    partition: str,
    folder: str,
    name: str,
    placed: Callable[[NewFile], NewFile],
) -> bool:
    """Make some files of one folder one, in a commit that changes no row; False where another commit came first."""
    shape = pa.schema([field for field in opened.schema() if field.name != partition])
    rows = (batch for path in paths for batch in conform(files.read(path), shape).to_batches())
    merged = files.write(rows, shape, name, partition=folder)
    failpoints.hit("lake.before_compaction_commit")
    try:
        swap(opened, opened.upkeep(), add=[placed(merged)], remove=paths, partition_by=[partition], data_change=False)
    except LakeConflict:
        return False
    return True


def _small_files(opened: OpenTable, partition: str) -> dict[tuple[Any, TableId | None], list[str]]:
    """Small files by the value that partitions them and the table that their name tells, ordered by `seq`, of each as many as make one file."""
    actions = live_files(opened)
    if "min.__seq" not in actions.column_names:
        return {}
    found: dict[tuple[Any, TableId | None], list[str]] = {}
    sizes: dict[tuple[Any, TableId | None], int] = {}
    held = actions.select(["path", "size_bytes", "min.__seq", f"partition.{partition}"])
    for row in held.sort_by("min.__seq").to_pylist():
        value, size = (row[f"partition.{partition}"], table_in(row["path"])), int(row["size_bytes"])
        if size < _SMALL_BYTES and sizes.get(value, 0) + size <= _TARGET_BYTES:
            found.setdefault(value, []).append(row["path"])
            sizes[value] = sizes.get(value, 0) + size
    return found


def delete_unneeded(
    layout: LakeLayout, path: str, app: str, *, now_ms: int, keep_s: float = KEEP_S, spared: int | None = None
) -> int:
    """Delete the files of a table that no reader needs; returns how many. Arguments as of `tend_table`."""
    opened = open_table(layout, path, app)
    kept = None if opened is None else _version_before(layout, opened, int(now_ms - keep_s * 1000))
    if opened is None or kept is None:
        return 0
    oldest = kept if spared is None else min(kept, max(0, spared))
    before = open_table(layout, path, app, version=oldest)
    if before is None:
        return 0
    needed = _live(opened) | _live(before)
    with lake_errors(path):
        removed = set(before.table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=True))
    too_old = datetime.fromtimestamp((now_ms / 1000) - keep_s - _WRITE_S_MAX, UTC)
    files = TableFiles(layout, path)
    unneeded = []
    for name, info in files.all().items():
        version = version_in(name)
        if name in needed:
            continue
        # A file meant for a version is in it or in none; one that is gone by the oldest kept version is gone for good.
        passed = version is not None and version <= oldest
        if passed or name in removed or (version is None and info.mtime is not None and info.mtime < too_old):
            unneeded.append(name)
    failpoints.hit("lake.before_delete")
    with lake_errors(path):
        return files.delete(unneeded)


def tend_cuts(
    layout: LakeLayout, *, now_ms: int, keep_s: float = KEEP_S, log_retention_s: float = LOG_RETENTION_S
) -> int:
    """Keep `_commits` in few files; returns how many data files were deleted. It may run beside the commits of cuts."""
    path, app = layout.commits_path, layout.commits_app_id
    with contextlib.suppress(LakeConflict):
        compact_cuts(layout)
    deleted = delete_unneeded(layout, path, app, now_ms=now_ms, keep_s=keep_s)
    opened = open_table(layout, path, app)
    if opened is not None:
        trim_log(layout, opened, now_ms=now_ms, keep_s=keep_s, retention_s=log_retention_s)
    return deleted


def _live(opened: OpenTable) -> set[str]:
    return set(live_files(opened).column("path").to_pylist())


def _version_before(layout: LakeLayout, opened: OpenTable, before_ms: int) -> int | None:
    """The newest version committed at or before a time; None where the log doesn't reach back so far."""
    # Commits tell the exact time, but each is a file to read. The storage's times tell how many to read.
    commits = [file for file in log_files(layout, opened.path) if file.is_commit]
    later = sum(file.written_ms > before_ms - _CLOCK_MS for file in commits)
    with lake_errors(opened.path):
        for info in opened.table.history(min(later + 1, len(commits)) or 1):
            if int(info["timestamp"]) <= before_ms:
                return int(info["version"])
    return None
