"""Damaged Iceberg tables emptied in place, so that Millstream can make them again as if they weren't there.

A table stays in its catalog, because other programs know it and its grants are the catalog's. So it isn't moved aside: one
commit leaves it without files, and marks it. A marked table counts as none (`is_cleared`), until `renew` gives it the columns and
properties of a new one. The snapshot before it gets a tag, so that nothing of what was there is lost. Snapshots that can't be read expire.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import Operation, Summary, update_snapshot_summaries
from pyiceberg.table.update import AssertRefSnapshotId, RemoveSnapshotsUpdate, SetSnapshotRefUpdate
from pyiceberg.table.update.snapshot import _FastAppendFiles
from pyiceberg.typedef import EMPTY_DICT

from millstream import failpoints
from millstream.errors import LakeFilesGone
from millstream.lake.iceberg.catalog import files_read
from millstream.lake.iceberg.commits import take_columns
from millstream.lake.iceberg.data_files import entries_of
from millstream.lake.iceberg.facts import STREAM, id_of, kept_by_refs
from millstream.lake.layout import LakeLayout

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.manifest import ManifestFile
    from pyiceberg.table import Table, Transaction

_CLEARED: Final = "millstream.cleared"
_TAG: Final = "millstream-set-aside-"
_KEPT: Final = frozenset({STREAM, "millstream.view", "millstream.layout"})


class _WithoutFiles(_FastAppendFiles):
    """A snapshot without files, made without a look at the manifests of the one before."""

    def _existing_manifests(self) -> list[ManifestFile]:
        return []

    def _summary(self, snapshot_properties: dict[str, str] = EMPTY_DICT) -> Summary:
        return update_snapshot_summaries(Summary(Operation.DELETE, **snapshot_properties))


def stage_no_files(layout: LakeLayout, table: Table, transaction: Transaction) -> None:
    """Add to a transaction of a table that it has no files from then on."""
    producer = _WithoutFiles(
        operation=Operation.DELETE,
        transaction=transaction,
        io=table.io,
        snapshot_properties={STREAM: str(layout.stream_id)},
    )
    producer.commit()


def is_cleared(table: Table) -> bool:
    """Whether a table counts as one that isn't there."""
    return _CLEARED in table.properties


def clear(layout: LakeLayout, path: str, table: Table) -> str | None:
    """Empty a damaged table of ours and mark it, in one commit; snapshots that can't be read expire in it.

    Returns:
        The tag that keeps what the table had; None if it had nothing, or can't be read.

    Raises:
        As pyiceberg's, from the caller's `catalog_errors`.
    """
    transaction = table.transaction()
    gone = [name for name in table.properties if name.startswith("millstream.") and name not in _KEPT]
    transaction.remove_properties(*gone)
    transaction.set_properties({_CLEARED: "true"})
    stage_no_files(layout, table, transaction)
    broken, before, tag = _unreadable(path, table), table.current_snapshot(), None
    if expired := sorted(broken - kept_by_refs(table)):
        # Maintenance reads the manifests of all snapshots, and would fail until these have expired.
        transaction._apply((RemoveSnapshotsUpdate.model_validate({"snapshot-ids": expired}),), ())  # noqa: SLF001
    if before is not None and before.snapshot_id not in broken and entries_of(before, table.io):
        tag = f"{_TAG}{1 + max((int(name.removeprefix(_TAG)) for name in own_tags(table)), default=0)}"
        named = {"ref-name": tag, "type": "tag", "snapshot-id": before.snapshot_id}
        transaction._apply((SetSnapshotRefUpdate.model_validate(named),), ())  # noqa: SLF001
    failpoints.hit("lake.iceberg.before_clear")
    transaction.commit_transaction()
    failpoints.hit("lake.rebuild.set_aside")
    return tag


def own_tags(table: Table) -> list[str]:
    """Return the tags that keep what a table had before it was cleared."""
    return [name for name in table.refs() if name.startswith(_TAG) and name.removeprefix(_TAG).isdecimal()]


def _unreadable(path: str, table: Table) -> set[int]:
    """Return the ids of snapshots whose manifests are gone or broken."""
    broken = set[int]()
    for snapshot in table.snapshots():
        try:
            with files_read(path):
                entries_of(snapshot, table.io)
        except LakeFilesGone:
            broken.add(snapshot.snapshot_id)
    return broken


def renew(table: Table, columns: pa.Schema, key: Sequence[str], properties: Mapping[str, str]) -> None:
    """Give a cleared table the columns, the key and the properties of a new one, if no commit came since it was loaded."""
    transaction = table.transaction()
    take_columns(transaction, columns, key, None)
    transaction.remove_properties(_CLEARED)
    transaction.set_properties(dict(properties))
    base = {"ref": MAIN_BRANCH, "snapshot-id": id_of(table.current_snapshot())}
    transaction._apply((), (AssertRefSnapshotId.model_validate(base),))  # noqa: SLF001
    failpoints.hit("lake.iceberg.before_renew")
    transaction.commit_transaction()
    failpoints.hit("lake.iceberg.after_renew")
