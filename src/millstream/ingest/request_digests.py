"""Digests of requests: equal for the same rows of the same table.

A digest doesn't depend on the other requests of the batch, or on columns that the table has got since. A
column without values in a request isn't part of it. Its purpose is to notice a session's number, or a
key, that is reused for another write: it doesn't protect against an attacker who makes two writes with
one digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, compress
from typing import Any, Final

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_MASK: Final = (1 << 63) - 1
_MIX: Final = 0x9E37_79B9_7F4A_7C15
_MIX_64: Final = np.uint64(_MIX)
_MASK_64: Final = np.uint64(_MASK)
_SHIFT: Final = np.uint64(29)

_Ints = npt.NDArray[np.int64]
_Sums = npt.NDArray[np.uint64]


def digests_of(
    table: str, names: Sequence[str], columns: Sequence[pa.Array], counts: Sequence[int], wanted: Sequence[bool]
) -> list[int]:
    """Return a digest of each request's rows and of their table, from 0 to 2^63 - 1.

    Python's part is done for all requests of a column together, except one checksum each: that is most of
    a session's cost.

    Args:
        table: its name: the same rows for another table are another write.
        columns: the rows of all requests, one request after the other, in the table's types.
        counts: each request's rows, at least one.
        wanted: which requests get a digest; 0 for the others.
    """
    ends = np.fromiter(compress(accumulate(counts), wanted), np.int64)
    sizes = np.fromiter(compress(counts, wanted), np.int64)
    rows = _ItemRanges(ends - sizes, ends)
    digests = sizes.astype(np.uint64) + np.uint64(_seed(table) * _MIX & _MASK)
    telling = [(n, column) for n, column in zip(names, columns, strict=True) if column.null_count < len(column)]
    of_columns = np.empty((len(telling), len(ends)), np.uint64)
    nulls = []
    for sums, (name, column) in zip(of_columns, telling, strict=True):
        sums.fill(_seed(name))
        nulls.append(_sum_up(sums, column, rows, 1))
    of_columns &= _MASK_64
    of_columns ^= of_columns >> _SHIFT
    of_columns *= _MIX_64
    for sums, of_column in zip(of_columns, nulls, strict=True):
        if of_column is not None:
            sums[of_column == sizes] = 0  # the request has no value there
    digests += of_columns.sum(axis=0)
    digests &= _MASK_64
    found = iter(digests.tolist())
    return [next(found) if one else 0 for one in wanted]


def joined(digests: Sequence[int]) -> int:
    """Return the digest of a request's rows in several tables, in order; with one table it is that table's."""
    if not digests:
        return 0
    whole = digests[0]
    for digest in digests[1:]:
        whole = (whole * _MIX ^ digest) & _MASK
    return whole


@lru_cache(maxsize=4096)
def _seed(name: str) -> int:
    return int(google_crc32c.value(name.encode()))


class _ItemRanges:
    """The ranges of each request's items among all: `[firsts, ends)`."""

    __slots__ = ("_slices", "ends", "firsts", "some_have")

    def __init__(self, firsts: _Ints, ends: _Ints, some_have: npt.NDArray[np.bool_] | None = None) -> None:
        self.firsts = firsts
        self.ends = ends
        self.some_have = some_have
        """Which requests have items; None if all do."""
        self._slices: dict[int, list[slice]] = {}

    def slices(self, width: int) -> list[slice]:
        """Return the ranges in bytes, for items of that width each."""
        found = self._slices.get(width)
        if found is None:
            starts, ends = self.firsts * width, self.ends * width
            found = self._slices[width] = list(map(slice, starts.tolist(), ends.tolist()))
        return found

    def mapped(self, starts: npt.NDArray[Any]) -> _ItemRanges:
        """Return the ranges of nested items, given the start of each item's and the end of the last one's."""
        firsts, ends = starts[self.firsts], starts[self.ends]
        some_have = firsts < ends
        return _ItemRanges(firsts, ends, None if some_have.all() else some_have)

    def nulls_of(self, valid: npt.NDArray[np.uint8]) -> _Ints:
        """Return the number of each request's null items."""
        before = np.concatenate(([0], np.cumsum(valid == 0)))
        found: _Ints = before[self.ends] - before[self.firsts]
        return found


def _sum_up(sums: _Sums, column: pa.Array, rows: _ItemRanges, tag: int) -> _Ints | None:
    """Add a column's values to the sums of requests: in parts, each with a tag, since parts may be skipped.

    Returns:
        The number of each request's null values; None if no request has any.
    """
    size = len(column)
    if not size:
        return None
    valid = nulls = None
    if column.null_count:
        valid = _bits(column.buffers()[0], column)
        nulls = rows.nulls_of(valid)
        _add(sums, valid, 1, rows, tag, nulls > 0)
    kind = column.type
    if pa.types.is_list(kind):
        lengths = pc.list_value_length(column).fill_null(0).to_numpy()
        _add(sums, lengths, lengths.itemsize, rows, tag + 1)
        starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        _sum_up(sums, column.flatten(), rows.mapped(starts), tag + 2)
        return nulls
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        if valid is not None:
            column = column.cast(pa.binary()).fill_null(b"")  # bytes under a null are arbitrary
        _, places, data = column.buffers()
        offsets = np.frombuffer(places, np.int32, size + 1, column.offset * 4)
        _add(sums, offsets[1:] - offsets[:-1], 4, rows, tag + 1)
        if data is not None:
            _add(sums, data, 1, rows.mapped(offsets), tag + 2)
        return nulls
    if pa.types.is_boolean(kind):
        values, width = _bits(column.buffers()[1], column), 1
    else:
        width = kind.bit_width // 8
        values = np.frombuffer(column.buffers()[1], np.uint8, size * width, column.offset * width)
    if valid is not None:
        values = values.reshape(size, width) * valid[:, np.newaxis]
    _add(sums, values, width, rows, tag + 1)
    return nulls


def _add(
    sums: _Sums, items: Any, width: int, rows: _ItemRanges, tag: int, where: npt.NDArray[np.bool_] | None = None
) -> None:
    """Add one part: items of that many bytes each; only to some requests, and to none without items."""
    data = bytes(items)
    checksum = google_crc32c.value
    found = np.array([checksum(data[one]) + tag for one in rows.slices(width)], np.uint64)
    if where is None:
        where = rows.some_have
    elif rows.some_have is not None:
        where = where & rows.some_have
    if where is not None:
        found += sums * _MIX_64
        sums[where] = found[where]
        return
    sums *= _MIX_64
    sums += found


def _bits(data: pa.Buffer, column: pa.Array) -> npt.NDArray[np.uint8]:
    """Return a bit of each of a column's items, as a byte."""
    whole = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    return whole[column.offset : column.offset + len(column)]
