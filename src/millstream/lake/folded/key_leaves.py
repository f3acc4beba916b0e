"""The files of a keyed table as leaves of a tree: each holds a range of keys, in key order.

A fold rewrites only leaves that may hold a key of its records. A new row goes to the leaf whose range includes it,
so that ranges stay disjoint. When leaves are rewritten (`leaf_rewriting`), one that outgrows its size
is split, and neighbours that have shrunk are joined. The ranges are the table format's own statistics: there is no other index to keep.

If ranges overlap, only speed suffers: a look-up compares the ranges of all leaves, and opens each that may hold the key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.lake.row_identity import Keys
from millstream.lake.table_format import OpenTable

LEAF_BYTES: Final = 8 << 20
"""Approximate size on disk. A look-up opens one leaf, a fold of few keys rewrites few bytes, and 100 M short rows are
some hundred files."""
_NULL: Final = -1

Flags = npt.NDArray[np.bool_]
Ranks = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One live file."""

    path: str
    size_bytes: int
    rows: int


class Leaves:
    """A table's live files, in order of their lowest keys."""

    def __init__(self, opened: OpenTable, key: Sequence[str], *, partition: str | None = None) -> None:
        actions = opened.files()
        if partition is not None:
            column, _, value = partition.partition("=")
            held = pc.cast(actions.column(f"partition.{column}"), pa.string())
            actions = actions.filter(pc.equal(held, value))
        self._actions = actions
        self._key = tuple(key)
        self._low = [self._bound("min", name) for name in key]
        self._high = [self._bound("max", name) for name in key]
        self._reorder()
        table = self._actions
        self.files: tuple[Leaf, ...] = tuple(
            Leaf(path, int(size or 0), int(rows or 0))
            for path, size, rows in zip(
                table.column("path").to_pylist(),
                table.column("size_bytes").to_pylist(),
                table.column("num_records").to_pylist(),
                strict=True,
            )
        )

    def __len__(self) -> int:
        return len(self.files)

    @property
    def size_bytes(self) -> int:
        """Total size in bytes."""
        return sum(leaf.size_bytes for leaf in self.files)

    def holding(self, keys: Keys) -> tuple[Flags, list[Ranks | None]]:
        """Return which leaves may hold one of the keys, and for each of them which keys, by index (None: any)."""
        hit = np.zeros(len(self), bool)
        which: list[Ranks | None] = [None] * len(self)
        if not len(keys) or not len(self):
            return hit, which
        ranked = [self._ranked(place, keys.columns[place]) for place in range(len(self._key))]
        if ranked[0] is None:
            return np.ones(len(self), bool), which
        first = ranked[0][2]
        order = np.argsort(first, kind="stable")
        in_order = first[order]
        for leaf in range(len(self)):
            low, high = int(ranked[0][0][leaf]), int(ranked[0][1][leaf])
            if low < 0:
                # No bounds: only nulls, or unknown.
                hit[leaf] = True
                continue
            some = order[np.searchsorted(in_order, low) : np.searchsorted(in_order, high, "right")]
            nulls = order[: np.searchsorted(in_order, 0)] if self._has_nulls(leaf, 0) else order[:0]
            for place, column in enumerate(ranked[1:], 1):
                if column is not None and len(some):
                    below, above, codes = int(column[0][leaf]), int(column[1][leaf]), column[2][some]
                    if below >= 0:
                        within = (codes >= below) & (codes <= above)
                        within |= (codes == _NULL) & self._has_nulls(leaf, place)
                        some = some[within]
            some = np.concatenate([some, nulls])
            hit[leaf] = len(some) > 0
            which[leaf] = some
        return hit, which

    def place(self, keys: Keys) -> Ranks:
        """Return for each key the leaf whose range includes it; `len(self)` beyond the last leaf's greatest key."""
        if not len(self):
            return np.zeros(len(keys), np.int64)
        lows, values, highs = [], [], []
        for place in range(len(self._key)):
            ranked = self._ranked(place, keys.columns[place])
            if ranked is None:
                break
            lows.append(ranked[0])
            values.append(ranked[2])
            highs.append(ranked[1])
        if not lows:
            return np.full(len(keys), len(self) - 1, np.int64)
        ranks = _tuple_ranks([np.concatenate([a, b, c]) for a, b, c in zip(lows, values, highs, strict=True)])
        low, value, high = np.split(ranks, [len(self), len(self) + len(keys)])
        # The lows ascend except for leaves without bounds, which come first.
        found = np.maximum(np.searchsorted(np.maximum.accumulate(low), value, "right") - 1, 0)
        return np.where(value > int(high.max()), len(self), found).astype(np.int64)

    def _bound(self, which: str, name: str) -> pa.Array | None:
        column = f"{which}.{name}"
        if column not in self._actions.column_names:
            return None
        found = self._actions.column(column)
        return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found

    def _has_nulls(self, leaf: int, place: int) -> bool:
        """Whether a leaf's key column may hold a null, for values that exist only as text."""
        column = f"null_count.{self._key[place]}"
        if column not in self._actions.column_names:
            return True
        count = self._actions.column(column)[leaf].as_py()
        return count is None or count > 0

    def _ranked(self, place: int, values: pa.Array) -> tuple[Ranks, Ranks, Ranks] | None:
        """Return numbers in value order, -1 for null: of the leaves' lows, of their highs, and of some values."""
        low, high = self._low[place], self._high[place]
        if low is None or high is None:
            return None
        if pa.types.is_string(low.type) != pa.types.is_string(values.type):
            return None  # the key became text, and these files are in another order
        try:
            parts = [part.cast(values.type) for part in (low, high)]
            ranks = pc.rank(pa.concat_arrays([*parts, values]), tiebreaker="dense")
        except pa.ArrowException:
            return None
        every = np.asarray(ranks, np.int64)
        every[np.asarray(pa.concat_arrays([*parts, values]).is_null())] = _NULL
        a, b, c = np.split(every, [len(low), len(low) + len(high)])
        return a, b, c

    def _reorder(self) -> None:
        """Sort the leaves by their lowest keys; those without bounds first."""
        columns = []
        for low in self._low:
            if low is None:
                break
            try:
                ranks = np.array(pc.rank(low, tiebreaker="dense"), np.int64)
            except pa.ArrowException:
                break
            ranks[np.asarray(low.is_null())] = _NULL
            columns.append(ranks)
        if not columns:
            return
        at = pa.array(np.lexsort(columns[::-1]))
        self._actions = self._actions.take(at)
        self._low = [None if low is None else low.take(at) for low in self._low]
        self._high = [None if high is None else high.take(at) for high in self._high]


def _tuple_ranks(columns: list[Ranks]) -> Ranks:
    """Return dense numbers of rows in the order of several columns."""
    order = np.lexsort(columns[::-1])
    changes = np.zeros(len(order), bool)
    for column in columns:
        ordered = column[order]
        changes[1:] |= ordered[1:] != ordered[:-1]
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.cumsum(changes)
    return ranks


def in_key_order(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """Return rows in key order, as far as their types have one."""
    try:
        order = pc.sort_indices(rows.select(list(key)), sort_keys=[(name, "ascending") for name in key])
    except pa.ArrowException:
        return rows
    ranks = np.asarray(order)
    return rows if bool(np.all(ranks[1:] > ranks[:-1])) else rows.take(order)
