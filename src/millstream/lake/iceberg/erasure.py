"""Erasure of an Iceberg table's rows: in all snapshots, with all files, while the table itself stays in the catalog.

Other programs know the table, and its grants are the catalog's; so it is emptied, not dropped. A snapshot that removes
files still has manifests with their bounds, which are values. So another, empty snapshot follows, which keeps none of
these manifests; then all earlier snapshots expire, and what nothing names is deleted. Each step may be repeated: a
second call completes one that was interrupted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.update import RemoveSnapshotRefUpdate

from millstream.errors import LakeError
from millstream.lake.data_files import TableFiles
from millstream.lake.iceberg import maintenance
from millstream.lake.iceberg.clearing import own_tags, stage_no_files
from millstream.lake.iceberg.facts import NUMBER, STREAM, N, forget_snapshots, is_position, version_of
from millstream.lake.layout import LakeLayout

if TYPE_CHECKING:
    from pyiceberg.table import Table


def empty(layout: LakeLayout, path: str, table: Table) -> None:
    """Remove all rows of a table of ours, and its positions: as if it had been made just now.

    Raises:
        LakeError: another program's branch or tag keeps a snapshot.
        As pyiceberg's, from the caller's `catalog_errors`.
    """
    _check_refs(path, table)
    positions = [name for name in table.properties if name == N or name.startswith((f"{N}.", NUMBER))]
    transaction = table.transaction()
    if positions:
        transaction.remove_properties(*positions)
    stage_no_files(layout, table, transaction)
    transaction.commit_transaction()
    forget_versions(layout, path, table)
    files = TableFiles(layout, path)
    files.delete(files.all())


def forget_versions(layout: LakeLayout, path: str, table: Table) -> None:
    """Let all snapshots of a table expire but the newest, and delete what they alone name in the table's metadata.

    Tags of ours go, which kept what was there before a rebuild. Data files stay: the caller knows which of them no snapshot has. Raises as `empty`.
    """
    _check_refs(path, table)
    facts = {name: value for name, value in table.properties.items() if is_position(name)}
    transaction = table.transaction()
    for tag in own_tags(table):
        transaction._apply((RemoveSnapshotRefUpdate.model_validate({"ref-name": tag}),), ())  # noqa: SLF001
    update = transaction.update_snapshot(snapshot_properties=facts | {STREAM: str(layout.stream_id)})
    with update.fast_append():
        pass
    transaction.commit_transaction()
    maintenance.expire(table, below=version_of(table.current_snapshot()))
    maintenance.delete_orphans(layout, path, table, now_ms=None)
    forget_snapshots(path)


def _check_refs(path: str, table: Table) -> None:
    """Raise if a branch or tag of another program keeps rows."""
    others = sorted(table.refs().keys() - {MAIN_BRANCH, *own_tags(table)})
    if others:
        raise LakeError(
            f"{'.'.join(table.name())} has branches or tags that keep older rows: {', '.join(others)}",
            hint="Drop them with the program that made them. Then repeat the command.",
            path=path,
        )
