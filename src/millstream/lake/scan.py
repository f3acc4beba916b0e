"""Reading of a table's history: some of its records, their number, and how far one fold of them goes.

Runs in executors, with only the core package and deltalake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import chain
from operator import or_
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.lake.delta import OpenTable, lake_errors, live_files
from millstream.lake.layout import LakeLayout
from millstream.lake.schema_history import ALL, Share
from millstream.lake.snapshots import cuts_between
from millstream.model.ids import TableId
from millstream.model.positions import Seq

if TYPE_CHECKING:
    import pyarrow.dataset as ds  # imports pandas if installed: seconds that a query needn't wait

_SCAN_ROWS: Final = 1 << 17


def read_history(
    opened: OpenTable, *, after: Seq, upto: Seq, columns: Sequence[str] | None = None, table: TableId | None = None
) -> pa.Table:
    """Return history's records in `(after, upto]`, in any order; see `scan_history`."""
    with lake_errors(opened.path):
        return scan_history(opened, after=after, upto=upto, columns=columns, table=table).to_table()


def scan_history(
    opened: OpenTable,
    *,
    after: Seq,
    upto: Seq,
    columns: Sequence[str] | None = None,
    table: TableId | None = None,
    only: pc.Expression | None = None,
) -> ds.Scanner:
    """Return a scan of history's records in `(after, upto]`; files that hold none of them aren't opened.

    Args:
        opened: the history table.
        after: exclusive.
        upto: inclusive.
        columns: None: all; names that the table lacks are left out.
        table: if given, only records of this table, not of others that have had its name.
        only: if given, only records for which it holds.
    """
    with lake_errors(opened.path):
        files = opened.table.to_pyarrow_dataset(file_pruning_predicate=f"__seq > {int(after)} AND __seq <= {int(upto)}")
        names = None if columns is None else [name for name in columns if name in files.schema.names]
        wanted = (pc.field("__seq") > int(after)) & (pc.field("__seq") <= int(upto))
        wanted = wanted if only is None else wanted & only
        scanners = [
            some.scanner(
                columns=names,
                filter=wanted if inside is None else wanted & inside,
                batch_size=_SCAN_ROWS,
                batch_readahead=4,
                fragment_readahead=2,
            )
            for some, inside in ([(files, None)] if table is None else _shared_out(files, opened, table))
        ]
        return scanners[0] if len(scanners) == 1 else _one_after_another(scanners)


def _shared_out(
    files: ds.FileSystemDataset, opened: OpenTable, table: TableId
) -> list[tuple[ds.FileSystemDataset, pc.Expression | None]]:
    """Return the files with records of a table: those with no others, and those with some numbers of the table's."""
    share = Share(opened, table)
    fragments = list(files.get_fragments())
    whole = [fragment for fragment in fragments if share.spans(fragment.path) == ALL]
    if len(whole) == len(fragments):
        return [(files, None)]
    mixed = [fragment for fragment in fragments if share.spans(fragment.path) not in {ALL, ()}]
    found: list[tuple[ds.FileSystemDataset, pc.Expression | None]] = []
    if whole or not mixed:
        found.append((_of(files, whole), None))
    if mixed:
        spans = [
            (pc.field("__seq") >= start) if end is None else (pc.field("__seq") >= start) & (pc.field("__seq") < end)
            for start, end in share.spans(mixed[0].path)
        ]
        found.append((_of(files, mixed), reduce(or_, spans)))
    return found


def _of(files: ds.FileSystemDataset, fragments: list[ds.Fragment]) -> ds.FileSystemDataset:
    """Return some of a dataset's files."""
    import pyarrow.dataset as ds

    return ds.FileSystemDataset(fragments, files.schema, files.format, files.filesystem)


def _one_after_another(scanners: Sequence[ds.Scanner]) -> ds.Scanner:
    """Return several scans of the same columns as one, for one use."""
    import pyarrow.dataset as ds

    batches = chain.from_iterable(scanner.to_batches() for scanner in scanners)
    return ds.Scanner.from_batches(batches, schema=scanners[0].projected_schema)


def count_history(opened: OpenTable, *, after: Seq) -> Callable[[Seq], int]:
    """Return a function for the maximum number of records in `(after, upto]`, from the files' statistics."""
    actions = live_files(opened)
    if not {"min.__seq", "max.__seq"} <= set(actions.column_names):
        return lambda _upto: 0  # no file holds a record
    counts, lows, highs = (actions.column(name).to_numpy() for name in ("num_records", "min.__seq", "max.__seq"))
    later = highs > after
    counts, lows = counts[later], lows[later]
    return lambda upto: int(counts[lows <= upto].sum())


def fold_step(layout: LakeLayout, opened: OpenTable, *, after: Seq, upto: Seq, rows_max: int, table: TableId) -> Seq:
    """Return how far a fold from `after` goes: to `upto`, or to the last cut reached with `rows_max` records in memory.

    If no cut is so near, it goes to the next one. Each step has a record, so that folds make progress. A file's
    bounds alone don't show that, because compaction makes files of which a fold has covered half.
    """
    if count_history(opened, after=after)(upto) <= rows_max:
        return upto
    seqs = _first_seqs(opened, after=after, upto=upto, most=rows_max + 1, table=table)
    if len(seqs) <= rows_max:
        return upto
    cuts = cuts_between(layout, after, upto)
    near = [n for n in cuts if seqs[0] <= n < seqs[rows_max]]
    far = [n for n in cuts if n >= seqs[rows_max]]
    return near[-1] if near else (far[0] if far else upto)


def _first_seqs(opened: OpenTable, *, after: Seq, upto: Seq, most: int, table: TableId) -> npt.NDArray[np.int64]:
    """Return the lowest numbers of the table's records in `(after, upto]`, ascending.

    A few times `most` are in memory at once.
    """
    held = np.zeros(0, np.int64)
    for batch in scan_history(opened, after=after, upto=upto, columns=["__seq"], table=table).to_batches():
        held = np.concatenate([held, batch.column("__seq").to_numpy()])
        if len(held) > 4 * most:
            held = np.partition(held, most)[:most]
    return np.sort(held)[:most]


def emptied(opened: OpenTable, after: Seq, upto: Seq, table: TableId) -> bool:
    """Whether a record in `(after, upto]` empties the table: a TRUNCATE, or the start of another copy."""
    scan = scan_history(opened, after=after, upto=upto, columns=["__op"], table=table, only=pc.field("__op") == "t")
    return bool(scan.count_rows())
