"""Columns in groups: the newest of each, sums, greatest values, unions of lists; whole columns at a time.

Each row has the code of its group, 0 and up, in an array of codes. Codes of `ranked` order as the values do. So a
result sorted by codes is sorted by values, and doesn't depend on the order of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.crdt.declared import TableMerge
from millstream.errors import InvalidValue

Codes: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]
_ROOM: Final = 2**62
_INT32: Final = 2**31 - 1
_SPREAD: Final = 4
"""Numbers whose range is at most so many times their count are ordered by a slot for each possible number."""
_UNION_ROWS: Final = 65_536


def moments_of(name: str) -> tuple[str, str]:
    """Return the state columns next to a column of a partial table: number and time of the newest row that names it.

    0: none does.
    """
    return f"__named_seq.{name}", f"__named_ns.{name}"


@dataclass(frozen=True, slots=True)
class Grouped:
    """A table's region rows in groups: of a key and region when they are folded, of a key when they are merged."""

    column: Callable[[str], pa.Array]
    """Returns a column in one piece, by its name."""
    codes: Codes
    """Each row's group."""
    count: int
    """Number of groups."""
    newest: pa.Array
    """Index of each group's newest row."""
    merge: TableMerge
    """How the columns merge."""
    at_ns: int = 0
    """The moment for which signals are read."""
    sequence: Codes | None = None
    """The rows that accumulate, as indices: for each group its newest state, then the records that follow it, in the
    order of their log. None: there are no records, so that the newest row has it all."""
    states: int = 0
    """Number of rows that are states; records come after them."""

    @property
    def subtracted(self) -> Mask:
        """The rows that are subtracted: repeats, which stand in a region's sum already; see `tables`."""
        found: Mask = self.column("__region").to_numpy() < 0
        return found

    @property
    def is_distinct(self) -> bool:
        """Whether each row is a group of its own."""
        return self.count == len(self.codes)

    def newest_named(self, name: str) -> dict[str, pa.Array]:
        """Return a column of each group's newest row that names it, with that row's moment if not all rows do."""
        if not self.merge.is_partial:
            return self.newest_of(name)
        names = (name, *moments_of(name))
        if self.is_distinct:
            return self.newest_of(*names)
        last = pa.array(last_of_each(self.codes, self.column(names[1]).to_numpy()))
        return {one: self.column(one).take(last) for one in names}

    def newest_of(self, *names: str) -> dict[str, pa.Array]:
        """Return columns of each group's newest row."""
        return {name: self.column(name).take(self.newest) for name in names}


def ranked(column: pa.Array) -> tuple[Codes, pa.Array]:
    """Return each value's index among the distinct ones in order, and these; null's index is behind them."""
    if pa.types.is_integer(column.type) and len(column) and not column.null_count:
        numbers = column.to_numpy()
        least, most = int(numbers.min()), int(numbers.max())
        if most - least < min(_SPREAD * len(numbers), _INT32) and most < _ROOM and least > -_ROOM:
            places, there = _placed(numbers.astype(np.int64) - least, most - least + 1)
            return places, pa.array(np.flatnonzero(there) + least).cast(column.type)
    encoded = pc.dictionary_encode(column)
    order = pc.sort_indices(encoded.dictionary)
    rank = np.empty(len(order) + 1, np.int64)
    rank[order.to_numpy()] = np.arange(len(order))
    rank[len(order)] = len(order)
    places = encoded.indices.fill_null(len(order)) if encoded.indices.null_count else encoded.indices
    return rank[places.to_numpy(zero_copy_only=False)], encoded.dictionary.take(order)


def _placed(numbers: Codes, room: int) -> tuple[Codes, npt.NDArray[np.bool_]]:
    """Return each number's index among the distinct ones of `[0, room)`, and which of those occur: without sorting."""
    there = np.zeros(room, bool)
    there[numbers] = True
    # Half as wide as codes: this array is the largest.
    return np.cumsum(there, dtype=np.int32)[numbers].astype(np.int64) - 1, there


def codes_of(columns: Sequence[pa.Array]) -> Codes:
    """Return one code for each row: equal exactly if all columns are equal, and in their order."""
    codes: Codes = np.zeros(len(columns[0]), np.int64)
    room = 1
    for column in columns:
        part, values = ranked(column)
        size = len(values) + 1
        if room * size >= _ROOM:
            codes = np.unique(codes, return_inverse=True)[1].astype(np.int64)
            room = int(codes.max()) + 1
        codes = codes * size + part
        room *= size
    if room <= min(_SPREAD * len(codes), _INT32):
        return _placed(codes, room)[0]
    return np.unique(codes, return_inverse=True)[1].astype(np.int64)


def last_of_each(codes: Codes, *by: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the greatest row of each code by some numbers, the first of which weighs most; ascending by code."""
    order = np.lexsort((*reversed(by), codes))
    grouped = codes[order]
    return order[np.append(grouped[1:] != grouped[:-1], True)] if len(order) else order


def greatest(column: pa.Array, codes: Codes, groups: int) -> pa.Array:
    """Return the greatest value of each group; null if it has none."""
    table = pa.table({"code": codes, "value": column})
    # Threads make it slower: six times at ten rows, and by half at 100,000 (two cores).
    found = table.group_by("code", use_threads=False).aggregate([("value", "max")]).sort_by("code")
    assert found.num_rows == groups
    return whole_column(found.column("value_max")).cast(column.type)


def sums(column: pa.Array, codes: Codes, groups: int, *, less: Mask | None = None) -> pa.Array:
    """Return the sum of each group's values; null if it has none, ascending by code.

    Values of a group are added in their order in the column.

    Args:
        column: the values.
        codes: each value's group.
        groups: the number of groups.
        less: which values are subtracted; None: none of them.

    Raises:
        InvalidValue: a sum is beyond its type.
    """
    valid = np.asarray(column.is_valid())
    there = np.bincount(codes[valid], minlength=groups) > 0
    signs = np.where(np.zeros(len(codes), bool) if less is None else less, -1, 1)
    if pa.types.is_decimal(column.type):
        return _decimal_sums(column, codes, there, signs)
    if pa.types.is_integer(column.type):
        values = column.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
        total = np.zeros(groups, np.int64)
        np.add.at(total, codes, values * signs)
        about = np.bincount(codes, np.abs(values.astype(np.float64)), groups)
        if len(about) and float(about.max()) >= 2.0**62:
            # Near the limit of the type: add Python integers, which have none.
            exact = [0] * groups
            for code, value, sign in zip(codes.tolist(), values.tolist(), signs.tolist(), strict=True):
                exact[code] += sign * value
            if not all(-(2**63) <= value < 2**63 for value in exact):
                raise InvalidValue("a counter's sum over the regions has more than 64 bits")
        return pa.array(total, mask=~there)
    floats = column.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False) * signs
    return pa.array(_float_sums(floats[valid], codes[valid], groups), mask=~there)


def _float_sums(values: npt.NDArray[np.float64], codes: Codes, groups: int) -> npt.NDArray[np.float64]:
    """Return the sums, added one after the other, from 0.0: rounding depends on the order."""
    total = np.zeros(groups, np.float64)
    if len(codes):
        starts = np.flatnonzero(np.append(True, codes[1:] != codes[:-1]))
        sizes = np.diff(np.append(starts, len(codes)))
        for step in range(int(sizes.max())):
            some = starts[sizes > step]
            total[codes[some]] += values[some + step]
    return total


def _decimal_sums(column: pa.Array, codes: Codes, there: Mask, signs: Codes) -> pa.Array:
    exact: list[Decimal | None] = [Decimal(0) if has else None for has in there.tolist()]
    with localcontext() as context:
        context.prec = 80
        for code, value, sign in zip(codes.tolist(), column.to_pylist(), signs.tolist(), strict=True):
            held = exact[code]
            if value is not None and held is not None:
                exact[code] = held + sign * value
    try:
        return pa.array(exact, pa.decimal128(38, column.type.scale))
    except pa.ArrowInvalid as error:
        raise InvalidValue("a counter's sum over the regions has more than 38 digits") from error


def unions(column: pa.Array, codes: Codes, groups: int) -> pa.Array:
    """Return the distinct values of each group's lists, in order; null if it has no list. Nulls in lists are ignored.

    Works on so few rows at a time that their items take little memory.
    """
    if len(codes) <= _UNION_ROWS:
        return _unions(column, codes, groups)
    order = np.argsort(codes, kind="stable")
    found, begin = [], 0
    while begin < len(order):
        end = int(np.searchsorted(codes, codes[order[min(begin + _UNION_ROWS, len(order)) - 1]], "right", sorter=order))
        some = order[begin:end]
        first, last = int(codes[some[0]]), int(codes[some[-1]])
        found.append(_unions(column.take(pa.array(some)), codes[some] - first, last - first + 1))
        begin = end
    return pa.concat_arrays(found)


def _unions(column: pa.Array, codes: Codes, groups: int) -> pa.Array:
    listed = np.zeros(groups, bool)
    listed[codes[np.asarray(column.is_valid())]] = True
    items = pc.list_flatten(column)
    of_item = codes[pc.list_parent_indices(column).to_numpy()]
    if items.null_count:
        kept = np.asarray(items.is_valid())
        items, of_item = items.drop_null(), of_item[kept]
    place, values = ranked(items)
    size = len(values) + 1
    assert groups * size < _ROOM
    found = np.sort(of_item * size + place)  # np.unique hashes, which takes several times as long
    found = found[np.append(True, found[1:] != found[:-1])] if len(found) else found
    offsets = np.searchsorted(found // size, np.arange(groups + 1)).astype(np.int32)
    flat = values.take(pa.array(found % size))
    lists = pa.ListArray.from_arrays(pa.array(offsets), flat)
    return pc.if_else(pa.array(listed), lists, pa.scalar(None, lists.type)).cast(column.type)


def whole_column(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column in one piece."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
