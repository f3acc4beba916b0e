"""Maintenance of an Iceberg table's metadata: expire old snapshots, delete files in `metadata/` that nothing names."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pyarrow.fs as pafs

from millstream.lake.data_files import UNCOMMITTED_S_MAX, storage_of
from millstream.lake.iceberg.facts import kept_by_refs, version_of
from millstream.lake.layout import LakeLayout

if TYPE_CHECKING:
    from pyiceberg.table import Table


def expire(table: Table, *, below: int) -> None:
    """Forget snapshots below a sequence number, except the newest and those with a branch or tag.

    Args:
        table: it is at the new state afterwards.
    """
    current, kept = table.current_snapshot(), kept_by_refs(table)
    gone = [
        snapshot.snapshot_id
        for snapshot in table.snapshots()
        if current is not None
        and snapshot.snapshot_id not in {current.snapshot_id, *kept}
        and version_of(snapshot) < below
    ]
    if gone:
        table.maintenance.expire_snapshots().by_ids(gone).commit()
        table.refresh()


def delete_orphans(layout: LakeLayout, path: str, table: Table, *, now_ms: int | None) -> int:
    """Delete files of the table's metadata that nothing names and that are too old for a commit in progress.

    Without a present moment no commit is in progress, and the age doesn't count. Returns the number deleted.
    """
    too_old = (
        datetime.max.replace(tzinfo=UTC)
        if now_ms is None
        else datetime.fromtimestamp(now_ms / 1000 - UNCOMMITTED_S_MAX, UTC)
    )
    storage = storage_of(layout, path)
    old = [
        info
        for info in storage.get_file_info(pafs.FileSelector("metadata", allow_not_found=True))
        if info.is_file and info.mtime is not None and info.mtime < too_old
    ]
    if not old:
        return 0
    needed = {table.metadata_location, *(entry.metadata_file for entry in table.metadata.metadata_log)}
    for snapshot in table.snapshots():
        needed.add(snapshot.manifest_list)
        needed |= {manifest.manifest_path for manifest in snapshot.manifests(table.io)}
    names = {address.rsplit("/", 1)[1] for address in needed}
    deleted = 0
    for info in old:
        if info.base_name not in names:
            storage.delete_file(info.path)
            deleted += 1
    return deleted
