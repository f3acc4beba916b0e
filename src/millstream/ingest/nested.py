"""The memory that nested Arrow values take when they are written as JSON text, counted before any of them is made.

A few bytes of Arrow may stand for any number of nested values: nulls have no bytes, and the types that may use one value many times (views, unions,
dictionaries, runs) multiply at each level. The latter aren't counted: rows from the network may not nest them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import IngestError

Sizes = npt.NDArray[np.int64]
_PIECE_BYTES: Final = 8 << 20
"""Size of the values that are Python's at the same time, unless one row has more."""
_PIECE_ROWS: Final = 256
"""Rows that are Python's at the same time if their values can't be counted."""
_NULL_BYTES: Final = 16
_SCALAR_BYTES: Final = 112
_LIST_BYTES: Final = 80
_STRUCT_BYTES: Final = 240
_FIELD_BYTES: Final = 64
_ENTRY_BYTES: Final = 88


class TextRoom:
    """Bytes that all columns of a call may take together once they are text."""

    def __init__(self, size_max: int) -> None:
        self._size_max = size_max
        self._size = 0

    def take(self, name: str, size: int) -> None:
        """Count the text of a column's values; `IngestError` (`rows_too_large`) if there is no room for it."""
        self._size += size
        if self._size > self._size_max:
            raise IngestError(
                f"an append is too large: the rows' values that are written as text, up to column {name}, take more than {self._size_max} bytes",
                code="rows_too_large",
                hint="Append it in several calls.",
                what="its text",
                size=self._size,
                size_max=self._size_max,
            )


def is_countable(kind: pa.DataType, depth: int) -> bool:
    """Return whether a type nests at most `depth` deep, and consists of types that use each of their values once."""
    if isinstance(kind, pa.BaseExtensionType):
        return is_countable(kind.storage_type, depth)
    if is_shared(kind) or is_view(kind):
        return False
    if not pa.types.is_nested(kind):
        return True
    if not (pa.types.is_struct(kind) or pa.types.is_map(kind) or _is_list(kind)):
        return False  # list views, unions, and what Arrow gets in later versions
    return depth > 0 and all(is_countable(kind.field(place).type, depth - 1) for place in range(kind.num_fields))


def is_shared(kind: pa.DataType) -> bool:
    """Return whether several rows of a column may use one value."""
    return bool(pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind))


def is_view(kind: pa.DataType) -> bool:
    """Return whether values are places in a text, which several rows may use."""
    return bool(pa.types.is_string_view(kind) or pa.types.is_binary_view(kind))


def values_in(array: pa.Array) -> int:
    """Count the values in an array of a countable type, at all depths."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return values_in(array.storage)
    if pa.types.is_struct(kind):
        return len(array) + sum(values_in(array.field(place)) for place in range(kind.num_fields))
    if pa.types.is_map(kind):
        return len(array) + values_in(array.keys) + values_in(array.items)
    return len(array) + (values_in(array.values) if _is_list(kind) else 0)


def python_bytes(array: pa.Array) -> Sizes | int:
    """Estimate the bytes that each value takes as Python's objects and as JSON text, from above; one number if all take the same.

    Args:
        array: of a countable type.
    """
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return python_bytes(array.storage)
    if pa.types.is_null(kind):
        return _NULL_BYTES
    if pa.types.is_struct(kind):
        total: Sizes | int = _STRUCT_BYTES
        for place in range(kind.num_fields):
            total = total + python_bytes(array.field(place)) + _FIELD_BYTES + len(kind.field(place).name.encode())
        return total
    if pa.types.is_map(kind):
        entry = python_bytes(array.keys) + python_bytes(array.items) + _ENTRY_BYTES
        return _LIST_BYTES + _sums(entry, array.offsets)
    if pa.types.is_fixed_size_list(kind):
        inner = python_bytes(array.values)
        if isinstance(inner, int):
            return _LIST_BYTES + inner * int(kind.list_size)
        own = inner[array.offset * kind.list_size :][: len(array) * kind.list_size]
        sums: Sizes = own.reshape(len(array), kind.list_size).sum(axis=1)
        return _LIST_BYTES + sums
    if _is_list(kind):
        return _LIST_BYTES + _sums(python_bytes(array.values), array.offsets)
    sizes = text_bytes(array)
    return _SCALAR_BYTES if sizes is None else _SCALAR_BYTES + 2 * sizes


def text_bytes(values: pa.Array) -> Sizes | None:
    """Return the bytes of each text or binary value, 0 for nulls; None if the values are of another type."""
    kind = values.type
    if (
        pa.types.is_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_large_binary(kind)
    ):
        return np.asarray(pc.fill_null(pc.binary_length(values), 0).to_numpy(zero_copy_only=False), dtype=np.int64)
    return None


def pieces(column: pa.ChunkedArray) -> Iterator[pa.Array]:
    """Cut a column into arrays whose values can be Python's at the same time."""
    counted = is_countable(column.type, 1000)
    for chunk in column.chunks:
        start = 0
        sizes = python_bytes(chunk) if counted else _PIECE_BYTES // _PIECE_ROWS
        ends = None if isinstance(sizes, int) else np.cumsum(sizes)
        while start < len(chunk):
            if ends is None:
                rows = _PIECE_BYTES // int(sizes)
            else:
                before = int(ends[start - 1]) if start else 0
                rows = int(np.searchsorted(ends, before + _PIECE_BYTES, side="right")) - start
            rows = max(1, rows)
            yield chunk.slice(start, rows)
            start += rows


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _sums(inner: Sizes | int, offsets: pa.Array) -> Sizes:
    """Add up the sizes of the values between each two offsets."""
    places = offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    upto = places * inner if isinstance(inner, int) else np.concatenate(([0], np.cumsum(inner)))[places]
    sums: Sizes = np.diff(upto)
    return sums
