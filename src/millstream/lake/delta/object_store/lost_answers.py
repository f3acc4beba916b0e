"""Commits whose answer was lost: the store has the version, and its client learns of a failure or a conflict.

If a connection is cut after the store has written, or the store answers 503, the client may send the same version
again. The store then refuses it (412), since it is there. Each commit has an id in its stamp, so reading the new
versions decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from deltalake import DeltaTable

from millstream.errors import LakeConflict, LakeUnavailable


@contextmanager
def settled(table: DeltaTable, key: str, stamp: str) -> Iterator[None]:
    """Run a commit in the block; if it fails although the table has it, end as if it had been answered.

    Args:
        key: name of the stamp among the facts of a commit.
        stamp: the commit's stamp; no other commit has the same.

    Raises:
        LakeConflict, LakeUnavailable: the table doesn't have the commit, or can't be read.
    """
    version = int(table.version())
    try:
        yield
    except (LakeConflict, LakeUnavailable):
        if not _has(table, version, key, stamp):
            raise


def _has(table: DeltaTable, version: int, key: str, stamp: str) -> bool:
    try:
        # Not by the handle: it must not see other commits, which it would then no longer conflict with.
        again = DeltaTable(table.table_uri, storage_options=table._storage_options)  # noqa: SLF001 - no public way
        newer = int(again.version()) - version
        return newer > 0 and any(info.get(key) == stamp for info in again.history(newer))
    except OSError:
        return False  # the commit's own error is reported
