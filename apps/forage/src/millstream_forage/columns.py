"""Columns that grow, and indexes over them: a million records fold in seconds, and one more in microseconds.

An index sorts a long stretch of new rows at once, when it is next asked, and keeps a short one in a dict.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream_forage.tables import REGION_BITS

Ints: TypeAlias = npt.NDArray[np.int64]

_SORTED_AT_ONCE: Final = 4096
"""New rows that are sorted in, not kept in the dict: sorting a million takes as long as some ten thousand dict entries."""
_BATCHES_MAX: Final = 256
"""Batches of a few rows that `Records` keeps before it joins them: each costs kilobytes, whatever it holds."""
_FIRST_ROWS: Final = 64


class Column:
    """A numpy array that rows are appended to."""

    __slots__ = ("_array", "_length")

    def __init__(self, dtype: npt.DTypeLike, *, width: int | None = None) -> None:
        """Make an empty column; with `width`, each row is an array of as many values."""
        shape: tuple[int, ...] = (_FIRST_ROWS,) if width is None else (_FIRST_ROWS, width)
        self._array: npt.NDArray[Any] = np.zeros(shape, dtype)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def values(self) -> npt.NDArray[Any]:
        """The rows so far: a view that may be written to. It may be cut off from the column by the next `extend`."""
        return self._array[: self._length]

    def extend(self, rows: npt.ArrayLike) -> None:
        """Append rows."""
        added = np.asarray(rows, self._array.dtype)
        end = self._length + len(added)
        if end > len(self._array):
            grown = np.zeros((max(end, 2 * len(self._array)), *self._array.shape[1:]), self._array.dtype)
            grown[: self._length] = self.values
            self._array = grown
        self._array[self._length : end] = added
        self._length = end


_STEP_MAX: Final = 1 << 32
"""The greatest step between two ids of a region. An id after a greater step was written by another program, and the region
doesn't continue from it: that could use up its ids."""


class Ids(Column):
    """Ids that regions handed out (`tables`)."""

    __slots__ = ("_far", "_is_ascending", "_last")

    def __init__(self) -> None:
        super().__init__(np.int64)
        self._is_ascending = True
        self._last: dict[int, int] = {}
        """By region, the greatest id that steps of at most `_STEP_MAX` reach from its first."""
        self._far: dict[int, Ints] = {}
        """By region, the ids above that."""

    def extend(self, rows: npt.ArrayLike) -> None:
        """Append ids."""
        added = np.asarray(rows, np.int64)
        regions = added >> REGION_BITS
        for region in np.unique(regions).tolist():
            last = self._last.get(region, region << REGION_BITS)
            newer = np.sort(np.concatenate([self._far.get(region, added[:0]), added[regions == region]]))
            newer = newer[newer > last]
            wide = np.flatnonzero(np.diff(newer, prepend=last) > _STEP_MAX)
            end = int(wide[0]) if len(wide) else len(newer)
            self._last[region] = int(newer[end - 1]) if end else last
            self._far[region] = newer[end:]
        before = self.values[-1:]
        super().extend(added)
        self._is_ascending &= bool((np.diff(np.concatenate([before, added])) > 0).all())

    def after(self, key: int, count: int) -> Ints:
        """Return the rows of the least ids above a number, by id: `count` of them, or as many as there are."""
        if self._is_ascending:
            begin = int(np.searchsorted(self.values, key, side="right"))
            return np.arange(begin, min(begin + count, len(self)))
        rows = np.flatnonzero(self.values > key)
        found: Ints = rows[np.argsort(self.values[rows], kind="stable")][:count]
        return found

    def next_of(self, region: int) -> int:
        """Return the next id for a region to hand out."""
        return self._last.get(region, region << REGION_BITS) + 1


class Index:
    """The rows of a column of whole numbers, by value."""

    __slots__ = ("_column", "_indexed", "_keys", "_order", "_recent")

    def __init__(self, column: Column) -> None:
        self._column = column
        self._order: Ints = np.zeros(0, np.int64)
        self._keys: Ints = np.zeros(0, np.int64)
        # Rows from len(self._order) to self._indexed, by value.
        self._recent: dict[int, list[int]] = {}
        self._indexed = 0

    def rows(self, key: int) -> Ints:
        """Return the rows that have a value, in order."""
        self.catch_up()
        begin, end = self._keys.searchsorted(key), self._keys.searchsorted(key, side="right")
        recent = self._recent.get(key)
        return self._order[begin:end] if recent is None else np.concatenate([self._order[begin:end], recent])

    def first(self, key: int) -> int | None:
        """Return the first row that has a value."""
        self.catch_up()
        at = int(np.searchsorted(self._keys, key))
        if at < len(self._keys) and self._keys[at] == key:
            return int(self._order[at])
        recent = self._recent.get(key)
        return None if recent is None else recent[0]

    def first_rows(self, keys: Ints) -> Ints:
        """Return the first row of each value; -1 for a value that no row has."""
        self.catch_up()
        if not self._recent and not len(self._keys):
            return np.full(len(keys), -1)
        found = np.full(len(keys), -1)
        if len(self._keys):
            at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
            found = np.where(self._keys[at] == keys, self._order[at], -1)
        if self._recent:
            missing = np.flatnonzero(found < 0)
            found[missing] = [self._recent.get(key, (-1,))[0] for key in keys[missing].tolist()]
        return found

    def catch_up(self) -> None:
        """Index the rows that came since the last call; the other calls do so themselves."""
        values = self._column.values
        if len(values) - self._indexed > _SORTED_AT_ONCE:
            self._order = np.argsort(values, kind="stable")
            self._keys = values[self._order]
            self._recent.clear()
        else:
            for row, key in enumerate(values[self._indexed :].tolist(), self._indexed):
                self._recent.setdefault(key, []).append(row)
        self._indexed = len(values)


class Names:
    """Numbers for names, from 0, in the order in which they first came."""

    __slots__ = ("_codes", "names")

    def __init__(self) -> None:
        self.names: list[str] = []
        self._codes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.names)

    def code(self, name: str) -> int | None:
        """Return the number of a name that came before."""
        return self._codes.get(name)

    def of(self, name: str) -> int:
        """Return the number of a name; a new name gets a new one."""
        code = self._codes.get(name)
        if code is None:
            code = self._codes[name] = len(self.names)
            self.names.append(name)
        return code

    def codes(self, column: pa.Array) -> Ints:
        """Return the number of each name of a column of texts, none of them null; new names get new numbers."""
        encoded = column.dictionary_encode()
        numbers = np.array([self.of(name) for name in encoded.dictionary.to_pylist()], np.int64)
        codes: Ints = numbers[encoded.indices.to_numpy()]
        return codes


class Records:
    """Rows that are kept as Arrow: read one by one, and rarely."""

    __slots__ = ("_batches", "_starts")

    def __init__(self) -> None:
        self._batches: list[pa.RecordBatch] = []
        self._starts: list[int] = [0]

    def __len__(self) -> int:
        return self._starts[-1]

    def extend(self, batch: pa.RecordBatch) -> None:
        """Append a batch of the same columns as the ones before."""
        self._batches.append(batch)
        self._starts.append(self._starts[-1] + batch.num_rows)
        if (
            len(self._batches) % _BATCHES_MAX == 0
            and self._starts[-1] - self._starts[-_BATCHES_MAX - 1] < _SORTED_AT_ONCE
        ):
            joined = pa.Table.from_batches(self._batches[-_BATCHES_MAX:]).combine_chunks().to_batches()
            self._batches[-_BATCHES_MAX:] = joined
            self._starts[-_BATCHES_MAX:] = [self._starts[-1]]

    def row(self, row: int, names: Sequence[str] | None = None) -> dict[str, Any]:
        """Return a row's values by column: those of some columns, or all."""
        at = bisect_right(self._starts, row) - 1
        batch, place = self._batches[at], row - self._starts[at]
        return {name: batch.column(name)[place].as_py() for name in names or batch.schema.names}


def ages_ns(times_ns: Ints, now_ns: int | Ints) -> Ints:
    """Return how long before a moment each time was; 0 for a time after it."""
    ages: Ints = np.maximum(now_ns - times_ns, 0)
    return ages
