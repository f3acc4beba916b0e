"""Rewriting of leaves: rows that a fold leaves in place and rows that it inserts, in key order, in larger files."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream import failpoints
from millstream.lake.column_conversion import EXACT, conform
from millstream.lake.data_files import NewFile, TableFiles, new_name
from millstream.lake.filled_columns import renamed_rows
from millstream.lake.folded.key_leaves import LEAF_BYTES, Leaf, Leaves, in_key_order
from millstream.lake.folded.left_partitions import UNKNOWN, partitions_of, without_left
from millstream.lake.row_identity import Keys, key_codes
from millstream.model.column_renames import FilledNames
from millstream.model.records import PARTITION_OID

_COMPRESSED: Final = 0.3
"""Approximate file bytes over Arrow's bytes, if there is no file to measure yet."""


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one leaf."""

    leaf: Leaf | None
    """None: no leaf yet, rows are only inserted."""
    gone: Keys | None
    """Keys whose rows are deleted; None: none is."""
    put: pa.Table
    """Rows to insert: the columns and `__exact`."""
    left: tuple[int, ...] = ()
    """OIDs of partitions whose rows are deleted, too."""


class LeafWriter:
    """Writes the leaves of one part of a table, in key order. For one thread."""

    def __init__(
        self,
        files: TableFiles,
        target: pa.Schema,
        key: Sequence[str],
        version: int,
        *,
        leaf_bytes: int = LEAF_BYTES,
        partition: str = "",
        renamed: FilledNames | None = None,
    ) -> None:
        """See the class.

        Args:
            version: the only version that the files can be committed as.
            partition: the folder, `column=value`, in a partitioned table.
            renamed: the columns' names in the files to rewrite, if they are others, and values that they lack.
        """
        self._files = files
        self._target = target
        self._full = pa.schema([*(f for f in target if f.name != EXACT.name), EXACT])
        self._key = tuple(key)
        self._version = version
        self._leaf_bytes = leaf_bytes
        self._partition = partition
        self._renamed = renamed
        self._held: list[pa.Table] = []
        self._held_bytes = 0.0
        # One file is written while the rows of the next are read and merged; no more, to limit memory.
        self._writer = ThreadPoolExecutor(1)
        self._writing: list[Future[NewFile]] = []

    def rewrite(self, changes: Iterable[tuple[int, Change]], taken: npt.NDArray[np.bool_] | None = None) -> None:
        """Write changed leaves.

        Args:
            changes: with each leaf's index among all leaves; small neighbours are joined.
            taken: for a bag: which rows of its changes' common `gone` were found; written to.
        """
        last = None
        for place, change in changes:
            if last is not None and place != last + 1:
                self.flush()
            last = place
            rows, density = change.put, _COMPRESSED
            if change.leaf is not None:
                held = named(self._files.read(change.leaf.path), self._renamed, self._full)
                density = change.leaf.size_bytes / max(1, held.nbytes)
                if change.gone is not None:
                    held = surviving(without_left(held, change.left), change.gone, taken)
                rows = pa.concat_tables([held, rows])
            self.add(rows, density)
            if self._held_bytes >= self._leaf_bytes / 2:
                self.flush()

    def add(self, rows: pa.Table, density: float = _COMPRESSED) -> None:
        """Hold rows back for the next file; `density` is a file's bytes over Arrow's."""
        if rows.num_rows:
            self._held.append(rows)
            self._held_bytes += rows.nbytes * density

    def flush(self) -> None:
        """Write the held rows, as files of about the leaf's size."""
        if not self._held:
            return
        rows = conform(pa.concat_tables(self._held), self._target)
        pieces = max(1, round(self._held_bytes / self._leaf_bytes))
        self._held, self._held_bytes = [], 0.0
        if self._key:
            rows = in_key_order(rows, self._key)
        bounds = np.linspace(0, rows.num_rows, min(pieces, rows.num_rows) + 1).astype(int)
        if self._writing:
            self._writing[-1].result()
        for start, end in pairwise(bounds.tolist()):
            self._writing.append(self._writer.submit(self._write, rows.slice(start, end - start)))

    def written(self) -> list[NewFile]:
        """Return the files, once all of them are written; the writer takes no more."""
        self.flush()
        self._writer.shutdown()
        return [file.result() for file in self._writing]

    def _write(self, rows: pa.Table) -> NewFile:
        file = self._files.write(rows, self._target, new_name(self._version), partition=self._partition)
        failpoints.hit("lake.fold_file_written")
        return file


def named(rows: pa.Table, renamed: FilledNames | None, shape: pa.Schema) -> pa.Table:
    """Return a file's rows in some columns, which may have other names in it."""
    return conform(rows, shape) if renamed is None else renamed_rows(rows, renamed, shape)


def surviving(rows: pa.Table, gone: Keys, taken: npt.NDArray[np.bool_] | None = None) -> pa.Table:
    """Return the rows that a fold leaves in place.

    For a bag (`taken` given), equal rows use up the entries of `taken`: one entry a row of `gone`.
    """
    if not len(gone):
        return rows
    have, codes = key_codes([Keys.of(rows, gone.names), gone], signed_zero=taken is not None)
    if taken is None:
        return rows.filter(pa.array(~np.isin(have, codes)))
    keep = np.ones(len(have), bool)
    open_by_code: dict[int, list[int]] = {}
    for place in np.flatnonzero(~taken).tolist():
        open_by_code.setdefault(int(codes[place]), []).append(place)
    for row in np.flatnonzero(np.isin(have, codes)).tolist():
        places = open_by_code.get(int(have[row]))
        if places:
            taken[places.pop()] = True
            keep[row] = False
    return rows.filter(pa.array(keep))


def in_their_partitions(gone: Keys, standing: Iterable[pa.Table]) -> Keys:
    """Return the rows that a bag of a partitioned table loses, each in the partition of an equal row that it has.

    That is a row's own partition if the bag has such a row; else the unknown one, in which rows are from before
    partitions were known; and any partition if the row's own isn't known.

    Args:
        gone: whole rows, with their partitions.
    """
    if not len(gone):
        return gone
    plain = gone.without(PARTITION_OID.name)
    oids = partitions_of(gone.to_table()).copy()
    groups = key_codes([plain], signed_zero=True)[0]
    free = Counter[tuple[int, int]]()
    for rows in standing:
        have, mine = key_codes([Keys.of(rows, plain.names), plain], signed_zero=True)
        known, first = np.unique(mine, return_index=True)
        at = np.minimum(np.searchsorted(known, have), len(known) - 1)
        equal = known[at] == have
        free.update(zip(groups[first[at[equal]]].tolist(), partitions_of(rows)[equal].tolist(), strict=True))
    partitions = defaultdict[int, list[int]](list)
    for group, oid in sorted(free):
        partitions[group].append(oid)
    wanted = list(zip(groups.tolist(), oids.tolist(), strict=True))
    lacking = list[int]()
    for place in np.flatnonzero(oids != UNKNOWN).tolist():
        if free[wanted[place]] > 0:
            free[wanted[place]] -= 1
        else:
            lacking.append(place)
    # Those that can be any row come last.
    for place in [*lacking, *np.flatnonzero(oids == UNKNOWN).tolist()]:
        group, oid = wanted[place]
        choices = partitions[group] if oid == UNKNOWN else [UNKNOWN]
        found = next((other for other in choices if free[group, other] > 0), None)
        if found is not None:
            free[group, found] -= 1
            oids[place] = found
    at_column = gone.names.index(PARTITION_OID.name)
    column = pa.array(oids, pa.int64(), mask=oids == UNKNOWN).cast(gone.columns[at_column].type)
    return replace(gone, columns=(*gone.columns[:at_column], column, *gone.columns[at_column + 1 :]))


@dataclass(frozen=True, slots=True)
class Touched:
    """The leaves that a fold changes, and the keys to delete in each."""

    hit: tuple[int, ...]
    """Indexes of leaves to rewrite, ascending; `len(leaves)` for rows beyond the last."""
    gone: dict[int, npt.NDArray[np.int64] | None]
    """By leaf, which of the records' keys it may hold (None: perhaps any)."""


def touched(
    leaves: Leaves,
    gone: Keys,
    put_at: npt.NDArray[np.int64],
    *,
    everything: bool,
    also: Sequence[int] = (),
) -> Touched:
    """Find the leaves that a fold rewrites.

    Args:
        put_at: the leaf of each row to insert, by `placed`.
        also: indexes of leaves that are rewritten for another reason.
    """
    may_hold, which = leaves.holding(gone)
    hit = np.zeros(len(leaves) + 1, bool)
    hit[: len(leaves)] = may_hold | everything
    hit[put_at] = True
    hit[list(also)] = True
    places = np.flatnonzero(hit).tolist()
    return Touched(tuple(places), {place: which[place] for place in places if place < len(leaves)})


def having_partitions(files: TableFiles, leaves: Leaves, oids: Sequence[int]) -> list[int]:
    """Return the indexes of the leaves with rows of one of some partitions; their other columns aren't read."""
    if not oids:
        return []
    return [place for place, leaf in enumerate(leaves.files) if np.isin(partitions_in(files, leaf.path), oids).any()]


def partitions_in(files: TableFiles, path: str) -> npt.NDArray[np.int64]:
    """Return the partitions of a file's rows; `UNKNOWN` alone if the file doesn't have them."""
    with files.open(path) as file:
        if PARTITION_OID.name not in file.schema_arrow.names:
            return np.full(1, UNKNOWN, np.int64)
        return partitions_of(file.read(columns=[PARTITION_OID.name]))


def placed(leaves: Leaves, keys: Keys, *, leaf_bytes: int = LEAF_BYTES) -> npt.NDArray[np.int64]:
    """Return the leaf for each new row: `len(leaves)` for a new leaf, if the last one is large enough already."""
    at = leaves.place(keys)
    if len(leaves) and leaves.files[-1].size_bytes < leaf_bytes / 2:
        at = np.minimum(at, len(leaves) - 1)
    return at
