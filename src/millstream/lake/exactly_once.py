"""The rule by which a batch is committed exactly once to a lake table, whatever the table's format.

`delta.commits` and `iceberg.commits` make the commits: each has the handle, and rejects a stale commit as its format does.

A commit of rows records, in the same atomic step, the position `n` that its app has reached in the table
(`table_format.Commit`): Delta's `txn(app, n)`, a property of the table in Iceberg. A batch ends at a position. So a writer

1. opens the table for this one write, and asks whether it has reached the batch's end (`reached`). If it has, an earlier
   try committed the batch, perhaps one by a driver that was thought dead, or one whose answer was lost. Nothing is written.
2. leaves out the records at or below `n`, and commits through the same handle. The format rejects the commit if another
   of the same app came after the handle was opened. Through a handle that was opened later, it would accept it.
3. requires the same `n` if it has to open the table again in between, for example to add columns (`check_unmoved`).


Two tables have rules of their own. Several cuts may end at one position, because folds follow a batch: `commit_cuts`
compares the tables of a cut as well. A fold of regions' logs (`folded.merged`) may receive records twice, and joins them
without effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.errors import LakeConflict

if TYPE_CHECKING:
    from millstream.lake.table_format import OpenTable
    from millstream.model.positions import Seq


def reached(opened: OpenTable | None, n: Seq, *, holds: bool = False) -> Seq | None:
    """Return a table's position if it has everything up to `n`; None if a batch that ends there is to be committed.

    Args:
        opened: the handle that the batch will be committed through; None: there is no table yet.
        n: the batch's end.
        holds: whether the rows must be this app's, too: a folder of folded rows may be another table's by now.
    """
    if opened is None or opened.n is None or opened.n < n or (holds and not opened.held):
        return None
    return opened.n


def check_unmoved(opened: OpenTable, again: OpenTable) -> None:
    """Check that a table opened again is where it was: records were chosen by the first handle's position.

    Raises:
        LakeConflict: another task committed in between; call again.
    """
    if again.n != opened.n:
        raise LakeConflict(f"another task appended to {opened.path} at the same time", path=opened.path)
