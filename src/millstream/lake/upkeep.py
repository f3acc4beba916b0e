"""Upkeep of lake tables: few files instead of many, and none that no reader needs any more.

Safe beside writes: both are commits of Delta, neither changes a row, and what loses a race is left for the next time.
Files that were replaced stay for `keep_s`, for readers that opened an older version; a file that a writer has just written and
not yet committed is never touched, since only files that the log names as removed are deleted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import FileSelector, PyFileSystem

from millstream.errors import LakeConflict
from millstream.lake.delta import WRITER, OpenTable, lake_errors, open_table
from millstream.lake.layout import LakeLayout, View
from millstream.model.schema import TableSchema

KEEP_S: Final = 300.0
"""Longer than a query of a plain reader takes."""
COMPACT_FILES: Final = 200
"""Compaction writes small files anew each time until they have grown large: seldom enough, and folds still open few files."""
_TARGET_BYTES: Final = 64 << 20
_SMALL_BYTES: Final = 16 << 20
_LOOK_BACK_VERSIONS: Final = 2_000


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What was done."""

    files_compacted: int = 0
    files_deleted: int = 0


def tend_table(
    layout: LakeLayout,
    view: View,
    schema: TableSchema,
    *,
    now_ms: int,
    keep_s: float = KEEP_S,
    compact_files: int = COMPACT_FILES,
) -> Upkeep:
    """Compact a table where it has many small files, and delete the files that were replaced more than `keep_s` ago.

    Call it about once a minute for a table that is written to. It may run beside appends and folds.

    Args:
        layout: where the lake is.
        view: which of the table's two.
        schema: names the table.
        now_ms: milliseconds since 1970, of the clock that stamps Delta's commits.
        keep_s: how long replaced files stay.
        compact_files: small files from which on they are compacted.

    Raises:
        LakeTableForeign: somebody else wrote into the table.
    """
    path, app = layout.table_path(view, schema), layout.app_id(view, schema.table_id)
    opened = open_table(layout, path, app)
    if opened is None:
        return Upkeep()
    compacted = _compact(opened, compact_files)
    return Upkeep(compacted, _delete_replaced(layout, path, app, int(now_ms - keep_s * 1000)))


def _compact(opened: OpenTable, compact_files: int) -> int:
    sizes = pa.table(opened.table.get_add_actions(flatten=True)).column("size_bytes").to_pylist()
    if sum(size < _SMALL_BYTES for size in sizes) < compact_files:
        return 0
    try:
        with lake_errors(opened.path):
            done = opened.table.optimize.compact(
                target_size=_TARGET_BYTES, writer_properties=WRITER, commit_properties=opened.upkeep()
            )
    except LakeConflict:
        return 0
    return int(done["numFilesRemoved"])


def _delete_replaced(layout: LakeLayout, path: str, app: str, before_ms: int) -> int:
    """Delete what the newest version that is old enough names as removed: no reader in time can need it.

    The list is a vacuum's dry run at that version. The vacuum itself counts in hours, and its commit would fail beside any
    write that removes files.
    """
    opened = open_table(layout, path, app)
    version = None if opened is None else _version_before(opened.table, before_ms)
    old = None if version is None else open_table(layout, path, app, version=version)
    if old is None:
        return 0
    with lake_errors(path):
        removed = set(old.table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=True))
        if not removed:
            return 0
        files = PyFileSystem(DeltaStorageHandler(path, dict(layout.storage_options) or None))
        stored = {
            info.path.lstrip("/") for info in files.get_file_info(FileSelector("", recursive=True)) if info.is_file
        }
        for name in removed & stored:
            files.delete_file(name)
        return len(removed & stored)


def _version_before(table: DeltaTable, before_ms: int) -> int | None:
    """The newest version committed at or before a time; None where the log doesn't reach back so far."""
    for info in table.history(_LOOK_BACK_VERSIONS):
        if int(info["timestamp"]) <= before_ms:
            return int(info["version"])
    return None
