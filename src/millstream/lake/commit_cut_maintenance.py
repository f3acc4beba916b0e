"""Maintenance of `_commits`: few files, in the order of their numbers, and few old rows.

Rows of the last `FULL_S` all stay. From older ones the last of each hour is kept, and the first of the lake. Rows older than
history's retention go, except the newest of them, which stands for the moments right after the bound. A row that
another one builds on (its `base`) stays as long as that one.

Files aren't rewritten once they are large, until they are old: the cost doesn't grow with the lake's age.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream import failpoints
from millstream.lake.commit_cuts import CUT_BOUNDS, CutFile, cut_files, cut_schema
from millstream.lake.data_files import TableFiles, new_name, replace_files
from millstream.lake.layout import LakeLayout
from millstream.lake.table_format import OpenTable, open_table

FULL_S: Final = 90 * 86_400.0
"""Age in seconds up to which every row stays."""
_COMPACT_FILES: Final = 100
"""Number of small files after which they are compacted to one. A commit makes a file."""
_LARGE_BYTES: Final = 8 << 20
"""Files of this size aren't compacted."""
_GROUP_ROWS: Final = 1024
"""Rows of a row group: a look-up by number reads one."""
_HOUR_US: Final = 3_600_000_000


def compact_cuts(layout: LakeLayout, *, now: datetime, kept_s: float | None = None, files: int = _COMPACT_FILES) -> int:
    """Compact small files if there are many, and remove rows that have expired; return the number removed.

    Args:
        now: the present, with a time zone.
        kept_s: history's retention in seconds; None: it has no bound.

    Raises:
        LakeConflict: another commit removed one of the files; call again.
        LakeTableForeign: another program wrote into `_commits`.
    """
    opened = open_table(layout, layout.commits_path, layout.commits_app_id)
    if opened is None:
        return 0
    rule = _Rule(now - timedelta(seconds=FULL_S), None if kept_s is None else now - timedelta(seconds=kept_s))
    there = cut_files(opened)
    small = [file for file in there if file.size_bytes < _LARGE_BYTES]
    # Old files apart from young ones: a file whose rows are all old goes as a whole.
    young = [file for file in small if file.committed_at[1] >= rule.full_from]
    old = [file for file in small if file.committed_at[1] < rule.full_from]
    removed = 0
    for some in (young, old):
        if len(some) >= files:
            removed += _rewrite(layout, opened, some, there, rule)
            there = cut_files(opened)
    for file in [file for file in there if rule.is_worth(file)]:
        removed += _rewrite(layout, opened, [file], cut_files(opened), rule)
    return removed


@dataclass(frozen=True, slots=True)
class _Rule:
    full_from: datetime
    """Every row from here on stays."""
    kept_from: datetime | None
    """Earlier rows go; None: no bound."""

    def is_worth(self, file: CutFile) -> bool:
        """Whether a rewrite removes about half of a file's rows, or more."""
        first, last = file.committed_at
        if self.kept_from is not None and last < self.kept_from:
            return file.rows > 4  # the newest, and those that it and a later file build on
        hours = (last - first).total_seconds() / 3600 + 1
        return last < self.full_from and file.rows > 4 * hours + 4

    def kept(self, rows: pa.Table, needed: frozenset[int]) -> npt.NDArray[np.bool_]:
        """Return which rows stay. `rows` are in order of their numbers; `needed` are numbers that others build on."""
        number = rows.column("number").to_numpy()
        at = rows.column("committed_at").cast(pa.int64()).to_numpy()
        stays = at >= _us(self.full_from)
        hour = at // _HOUR_US
        stays[:-1] |= hour[1:] != hour[:-1]
        stays[-1:] = True
        stays |= number == 1
        if self.kept_from is not None:
            gone = np.flatnonzero(at < _us(self.kept_from))
            stays[gone[:-1]] = False
        stays |= np.isin(number, list(needed))
        bases = rows.column("base").to_numpy()[stays]
        return np.asarray(stays | np.isin(number, bases), bool)


def _us(moment: datetime) -> int:
    return int(pa.scalar(moment, pa.timestamp("us", tz="UTC")).cast(pa.int64()).as_py())


def _rewrite(
    layout: LakeLayout, opened: OpenTable, some: Sequence[CutFile], there: Sequence[CutFile], rule: _Rule
) -> int:
    """Write some files' rows that stay into one file; return how many rows went."""
    paths = {file.path for file in some}
    needed = frozenset(f.base_from for f in there if f.path not in paths and f.base_from < f.number[0])
    files = TableFiles(layout, opened.path, CUT_BOUNDS)
    shape = cut_schema(layout)
    rows = pa.concat_tables(files.read(file.path).select(shape.names).cast(shape) for file in some)
    rows = rows.sort_by("number").combine_chunks()
    kept = rows.filter(pa.array(rule.kept(rows, needed)))
    written = files.write(kept.to_batches(max_chunksize=_GROUP_ROWS), shape, new_name())
    failpoints.hit("lake.before_compaction_commit")
    if not replace_files(layout, opened, add=[written], remove=sorted(paths)):
        return 0
    return int(rows.num_rows - kept.num_rows)
