"""Maintenance of an Iceberg table's metadata: expire old snapshots, delete files in `metadata/` that nothing names."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pyarrow.fs as pafs

from millstream.lake.data_files import UNCOMMITTED_S_MAX, storage_of
from millstream.lake.iceberg.facts import kept_by_refs
from millstream.lake.layout import LakeLayout

if TYPE_CHECKING:
    from pyiceberg.table import Table


def expire(table: Table, *, before_ms: float, spared: int | None) -> None:
    """Forget snapshots that are older than a moment, except the newest, `spared` and all later ones, and those with a branch or tag.

    Args:
        table: it is at the new state afterwards.
        before_ms: milliseconds since 1970.
        spared: the sequence number of the oldest snapshot that a kept cut names.
    """
    current, kept = table.current_snapshot(), kept_by_refs(table)
    gone = [
        snapshot.snapshot_id
        for snapshot in table.snapshots()
        if current is not None
        and snapshot.snapshot_id not in {current.snapshot_id, *kept}
        and snapshot.timestamp_ms <= before_ms
        and (spared is None or (snapshot.sequence_number or 0) < spared)
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
