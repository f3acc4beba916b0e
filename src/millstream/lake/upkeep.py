"""Upkeep of lake tables: few files instead of many, and none that no reader needs any more.

Safe beside writes: compaction is a commit of Delta that changes no row, and what loses a race is left for the next time. A
file is deleted only if no version that a reader may still be at names it: none of the last `keep_s`, nor one that a kept cut names.
What interrupted writes left behind goes too: a file of a fold as soon as the version that its name speaks of has passed, any
other once it is too old to be part of a write under way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Final

import pyarrow as pa

from millstream import failpoints
from millstream.errors import LakeConflict
from millstream.lake.data_files import TableFiles, new_name, swap, version_in
from millstream.lake.delta import OpenTable, lake_errors, live_files, open_table
from millstream.lake.history import BOUNDED, PARTITION, day_folder, in_day
from millstream.lake.layout import LakeLayout, View
from millstream.lake.types import conform
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
_LOOK_BACK_VERSIONS: Final = 2_000


@dataclass(frozen=True, slots=True)
class UpkeepRules:
    """When and how a lake's files are tended."""

    keep_s: float = KEEP_S
    """How long replaced files stay."""
    interval_s: float = 60.0
    """From one upkeep to the next."""
    compact_files: int = COMPACT_FILES
    """Small files of a day of history from which on they are made one."""


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
    spared: int | None = None,
) -> Upkeep:
    """Compact history where it has many small files, and delete files that no reader needs any more.

    Call it about once a minute for a table that is written to. It may run beside appends and folds. Views that are folded
    need no compaction: folds keep their files in shape.

    Args:
        layout: where the lake is.
        view: which of the table's views.
        schema: names the table.
        now_ms: milliseconds since 1970, of the clock that stamps Delta's commits.
        keep_s: how long replaced files stay.
        compact_files: small files of a day from which on they are compacted.
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
    compacted = _compact(layout, opened, compact_files, today) if view == "history" else 0
    deleted = delete_unneeded(layout, path, app, now_ms=now_ms, keep_s=keep_s, spared=spared)
    newest = open_table(layout, path, app) or opened
    live = sum(size or 0 for size in live_files(newest).column("size_bytes").to_pylist())
    disk = sum(info.size or 0 for info in TableFiles(layout, path, ()).all().values())
    return Upkeep(compacted, deleted, int(live), int(disk))


def _compact(layout: LakeLayout, opened: OpenTable, compact_files: int, today: date) -> int:
    """Merge small files of history, neighbours in order of `seq`; returns how many there were."""
    done = 0
    for day, small in _small_files(opened).items():
        if len(small) < (
            compact_files
            if day is None or day >= today - timedelta(days=1)
            else min(compact_files, _COMPACT_FILES_PAST)
        ):
            continue
        files = TableFiles(layout, opened.path, BOUNDED)
        shape = pa.schema([field for field in opened.schema() if field.name != PARTITION])

        def rows(
            paths: list[str] = small, files: TableFiles = files, shape: pa.Schema = shape
        ) -> Iterator[pa.RecordBatch]:
            for path in paths:
                yield from conform(files.read(path), shape).to_batches()

        merged = files.write(rows(), shape, new_name(), partition=day_folder(day))
        failpoints.hit("lake.before_compaction_commit")
        try:
            swap(
                opened,
                opened.upkeep(),
                add=[in_day(merged, day)],
                remove=small,
                partition_by=[PARTITION],
                data_change=False,
            )
        except LakeConflict:
            continue
        done += len(small)
    return done


def _small_files(opened: OpenTable) -> dict[date | None, list[str]]:
    """Small files by day, ordered by `seq`, of each day as many as make one file."""
    actions = live_files(opened)
    if "min.__seq" not in actions.column_names:
        return {}
    found: dict[date | None, list[str]] = {}
    sizes: dict[date | None, int] = {}
    for row in (
        actions.select(["path", "size_bytes", "min.__seq", f"partition.{PARTITION}"]).sort_by("min.__seq").to_pylist()
    ):
        day, size = row[f"partition.{PARTITION}"], int(row["size_bytes"])
        if size < _SMALL_BYTES and sizes.get(day, 0) + size <= _TARGET_BYTES:
            found.setdefault(day, []).append(row["path"])
            sizes[day] = sizes.get(day, 0) + size
    return found


def delete_unneeded(
    layout: LakeLayout, path: str, app: str, *, now_ms: int, keep_s: float = KEEP_S, spared: int | None = None
) -> int:
    """Delete the files of a table that no reader needs; returns how many. Arguments as of `tend_table`."""
    opened = open_table(layout, path, app)
    kept = None if opened is None else _version_before(opened, int(now_ms - keep_s * 1000))
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
    files = TableFiles(layout, path, ())
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


def _live(opened: OpenTable) -> set[str]:
    return set(live_files(opened).column("path").to_pylist())


def _version_before(opened: OpenTable, before_ms: int) -> int | None:
    """The newest version committed at or before a time; None where the log doesn't reach back so far."""
    with lake_errors(opened.path):
        for info in opened.table.history(_LOOK_BACK_VERSIONS):
            if int(info["timestamp"]) <= before_ms:
                return int(info["version"])
    return None
