"""Reading of a table's history: some of its records, their number, and how far one fold of them goes.

Runs in executors, with only the packages of the extra `executor`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.lake.column_conversion import conform, same_type
from millstream.lake.column_names import Renames, renames_in
from millstream.lake.commit_cuts import cuts_between
from millstream.lake.data_files import table_in
from millstream.lake.layout import LakeLayout
from millstream.lake.store_errors import lake_errors
from millstream.lake.table_format import OpenTable
from millstream.model.ids import TableId
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema

if TYPE_CHECKING:
    import pyarrow.dataset as ds  # imports pandas if installed: seconds that a query needn't wait

_SCAN_ROWS: Final = 1 << 17
_EXPANSION: Final = 5
"""Arrow's bytes over a compressed file's, at most about."""


def read_history(
    opened: OpenTable, *, after: Seq, upto: Seq, columns: Sequence[str] | None = None, table: TableId | None = None
) -> pa.Table:
    """Return history's records in `(after, upto]`, in any order; see `scan_history`."""
    with lake_errors(opened.path):
        return scan_history(opened, after=after, upto=upto, columns=columns, table=table).to_table()


@dataclass(frozen=True, slots=True)
class NamedScan:
    """A scan of one table's records under the names that its columns have in a schema."""

    scanner: ds.Scanner
    renames: Renames | None
    """How the records name the columns; None: as the schema."""
    schema: pa.Schema
    """The columns of the records, the table's own in their own types."""

    def batches(self) -> Iterator[pa.Table]:
        """Yield the records in pieces of bounded size, in any order."""
        for batch in self.scanner.to_batches():
            yield self._named(pa.Table.from_batches([batch]))

    def to_table(self) -> pa.Table:
        """Return all records."""
        return self._named(self.scanner.to_table())

    def _named(self, rows: pa.Table) -> pa.Table:
        return conform(rows, self.schema) if self.renames is None else self.renames.renamed(rows, self.schema)


def scan_named(
    opened: OpenTable,
    schema: TableSchema,
    *,
    after: Seq,
    upto: Seq,
    columns: Sequence[str],
    own: pa.Schema,
    only: Callable[[str], pc.Expression | None] | None = None,
) -> NamedScan:
    """Return a scan of a table's records in `(after, upto]`, under the names of a schema.

    Args:
        columns: names of that schema, and of the records' own columns; those that no record has are left out.
        own: the schema's columns in types that hold all values that each has had.
        only: returns a condition on the first key column, by its name in the files; records for which none holds may be
            left out.
    """
    table, renames = schema.table_id, renames_in(opened, schema.table_id, schema, after=after, upto=upto)
    if renames is None:
        some = None if only is None else only(schema.key[0])
        scanner = scan_history(opened, after=after, upto=upto, columns=columns, table=table, only=some)
        return NamedScan(scanner, None, _in_own_types(scanner.projected_schema, own))
    have = opened.schema()
    shape = renames.shape(columns, have, own)
    some = None if only is None else _any_of([only(name) for name in renames.names_of(schema.key[0], have)])
    scanner = scan_history(opened, after=after, upto=upto, columns=renames.physical(columns), table=table, only=some)
    return NamedScan(scanner, renames, shape)


def scan_live(
    opened: OpenTable, schema: TableSchema, *, after: Seq, upto: Seq, columns: Sequence[str], own: pa.Schema
) -> NamedScan:
    """Return the scan of `scan_named`, from the last record on that empties the table if a name was another column's.

    Records before it that lack the columns' numbers may have values of other columns, of any type, under their names.
    """
    have = opened.schema()
    is_renamed = renames_in(opened, schema.table_id, schema, after=after, upto=upto) is not None
    if is_renamed or any(not same_type(have.field(c.name).type, c.type) for c in own if c.name in have.names):
        after = Seq(max(after, last_truncate(opened, upto, schema.table_id, after=after) - 1))
    return scan_named(opened, schema, after=after, upto=upto, columns=columns, own=own)


def _in_own_types(columns: pa.Schema, own: pa.Schema) -> pa.Schema:
    return pa.schema([own.field(column.name) if column.name in own.names else column for column in columns])


def _any_of(conditions: Sequence[pc.Expression | None]) -> pc.Expression | None:
    """Return whether one of some conditions holds; None if one of them is none."""
    found: pc.Expression | None = None
    for condition in conditions:
        if condition is None:
            return None
        found = condition if found is None else found | condition
    return found


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
        columns: None: all; names that the table lacks are left out.
        table: if given, only records of this table, not of others that have had its name.
        only: if given, only records for which it holds.
    """
    with lake_errors(opened.path):
        mine = records_of(opened, table=table, within=("__seq", int(after), int(upto)))
        names = None if columns is None else [name for name in columns if name in mine.schema.names]
        wanted = (pc.field("__seq") > int(after)) & (pc.field("__seq") <= int(upto))
        wanted = wanted if only is None else wanted & only
        return mine.scanner(
            columns=names, filter=wanted, batch_size=_SCAN_ROWS, batch_readahead=4, fragment_readahead=2
        )


def records_of(
    opened: OpenTable, *, table: TableId | None = None, within: tuple[str, int, int] | None = None
) -> ds.Dataset:
    """Return a history's records, those of its tail included.

    Args:
        table: if given, only records of this table, not of others that have had its name.
        within: as of `OpenTable.dataset`.
    """
    import pyarrow.dataset as ds

    with lake_errors(opened.path):
        files = opened.dataset(within)
        mine = files if table is None else _of_table(files, table)
        if opened.tail is None or (table is not None and table_in(opened.tail.path) != table):
            return mine
        shape, fragments = opened.tail.schema, list(mine.get_fragments())
        # Not by `replace_schema`, which refuses wider types.
        landed = ds.FileSystemDataset(fragments, shape, mine.format, mine.filesystem)
        return ds.dataset([landed, ds.dataset(opened.tail.path, schema=shape, format="parquet")])


def _of_table(files: ds.FileSystemDataset, table: TableId) -> ds.FileSystemDataset:
    """Return the files with records of a table."""
    import pyarrow.dataset as ds

    fragments = list(files.get_fragments())
    mine = [fragment for fragment in fragments if table_in(fragment.path) == table]
    whole = len(mine) == len(fragments)
    return files if whole else ds.FileSystemDataset(mine, files.schema, files.format, files.filesystem)


def count_history(opened: OpenTable, *, after: Seq) -> Callable[[Seq], int]:
    """Return a function for the maximum number of records in `(after, upto]`, from the files' statistics."""
    actions = opened.files()
    if not {"min.__seq", "max.__seq"} <= set(actions.column_names):
        return lambda _upto: 0  # no file holds a record
    counts, lows, highs = (actions.column(name).to_numpy() for name in ("num_records", "min.__seq", "max.__seq"))
    later = highs > after
    counts, lows = counts[later], lows[later]
    return lambda upto: int(counts[lows <= upto].sum())


@dataclass(frozen=True, slots=True)
class Held:
    """Memory that a table's records in a range of history take, from the files' statistics."""

    rows: npt.NDArray[np.float64]
    """Records of each file in the range, as if their numbers were spread evenly, in order of their least numbers."""
    sizes: npt.NDArray[np.float64]
    """Their bytes in Arrow, about."""

    @classmethod
    def of(cls, opened: OpenTable, *, after: Seq, upto: Seq, table: TableId) -> Held:
        """Return it for a table's records in `(after, upto]`."""
        files = opened.files()
        if not {"min.__seq", "max.__seq"} <= set(files.column_names):
            return cls(np.zeros(0), np.zeros(0))
        files = files.filter(
            pa.array([table_in(path) == table for path in files.column("path").to_pylist()], pa.bool_())
        )
        files = files.sort_by("min.__seq")
        names = ("num_records", "size_bytes", "min.__seq", "max.__seq")
        rows, sizes, lows, highs = (files.column(name).to_numpy() for name in names)
        within = np.minimum(highs, int(upto)) - np.maximum(lows - 1, int(after))
        share = np.clip(within / (highs - lows + 1), 0, 1)
        return cls(rows * share, sizes * share * _EXPANSION)

    @property
    def size_bytes(self) -> int:
        """Bytes of all."""
        return int(self.sizes.sum())

    def rows_in(self, bytes_max: int) -> int:
        """Return how many of the first records take so many bytes; at least one."""
        ends = np.concatenate([[0.0], np.cumsum(self.sizes)])
        return max(1, int(np.interp(bytes_max, ends, np.concatenate([[0.0], np.cumsum(self.rows)]))))


def fold_step(
    layout: LakeLayout, opened: OpenTable, *, after: Seq, upto: Seq, most: tuple[int, int], table: TableId
) -> Seq:
    """Return how far a fold from `after` goes: to `upto`, or to the last cut reached with so many records in memory.

    If no cut is so near, it goes to the next one. Each step has a record, so that folds make progress. A file's
    bounds alone don't show that, because compaction makes files of which a fold has covered half.

    Args:
        after: exclusive.
        upto: inclusive.
        most: number of records in memory, and their bytes in Arrow, about.
    """
    rows_max, bytes_max = most
    held = Held.of(opened, after=after, upto=upto, table=table)
    if held.size_bytes > bytes_max:
        rows_max = min(rows_max, held.rows_in(bytes_max))
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


def last_truncate(opened: OpenTable, upto: Seq, table: TableId, *, after: Seq = Seq(0)) -> Seq:
    """Return the number of the last record in `(after, upto]` that empties the table; 0 if none does."""
    scan = scan_history(opened, after=after, upto=upto, columns=["__seq"], table=table, only=pc.field("__op") == "t")
    return Seq(pc.max(scan.to_table().column("__seq")).as_py() or 0)
