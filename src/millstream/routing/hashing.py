"""The hash of a key: the same for ever, on every machine, whatever Arrow type holds the values.

A key is a row's values in some columns, in their order. Its hash is XXH64, chained: `h = 0`; for each value
`h = XXH64(bytes, seed = h + tag)`. Bytes and tag of a value depend on the value, never on the width of its column:

| value | tag | bytes |
| --- | --- | --- |
| null, of any type | 0 | none |
| whole number | 1 | 8, two's complement, lowest first |
| text | 2 | its UTF-8 |
| bytes | 3 | themselves |
| true, false | 4 | 8, of 1 or 0 |
| floating point | 5 | 8, IEEE 754 of the double, lowest first; -0.0 as 0.0, every NaN as one |
| date | 6 | 8, days since 1970, as a whole number |
| moment or local time | 7 | 8, microseconds since 1970, as a whole number |
| decimal | 8 | ASCII: its digits without trailing zeros, `e`, the exponent: `-12.50` is `-125e-1`, 0 is `0e0` |

A key's shard follows from this hash: to change any of it is to move all rows of all streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Context, Decimal
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import RoutingError

Hashes: TypeAlias = npt.NDArray[np.uint64]

_WHOLE, _TEXT, _BYTES, _BOOL, _FLOAT, _DATE, _MOMENT, _DECIMAL = range(1, 9)
_EVERY_ROW_VALID: Final = np.empty(0, dtype=np.bool_)
_NAN: Final = np.uint64(0x7FF8000000000000)
_EXACT: Final = Context(prec=100)
"""More digits than any decimal has: the default rounds to 28."""


def key_hashes(columns: Sequence[pa.Array | pa.ChunkedArray]) -> Hashes:
    """Return the hash of each row's key.

    Args:
        columns: the key's columns, in order; at least one; of equal length.

    Raises:
        RoutingError (`invalid_route`): a column has a type that can't distinguish rows: a list, for example.
    """
    hashes = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        _add(column, hashes)
    return hashes


def is_hashable(kind: pa.DataType) -> bool:
    """Return whether a column of this type may be part of a key."""
    t = pa.types
    if t.is_dictionary(kind):
        return is_hashable(kind.value_type)
    return any(
        test(kind)
        for test in (
            t.is_null, t.is_integer, t.is_boolean, t.is_floating, t.is_date, t.is_timestamp, t.is_decimal, t.is_string,
            t.is_large_string, t.is_binary, t.is_large_binary, t.is_fixed_size_binary,
        )
    )  # fmt: skip


def _add(column: pa.Array | pa.ChunkedArray, hashes: Hashes) -> None:
    # Imported here: a process that never hashes needs no machine code.
    from millstream.routing._xxh64 import hash_bytes, hash_longs

    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):  # without rows
            return
    if not is_hashable(column.type):
        raise RoutingError(
            f"a column of type {column.type} can't be hashed to a shard", code="invalid_route", type=str(column.type)
        )
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    valid = _EVERY_ROW_VALID if column.null_count == 0 else column.is_valid().to_numpy(zero_copy_only=False)
    tag, values = _canonical(column)
    if isinstance(values, tuple):
        hash_bytes(*values, valid, tag, hashes)
    else:
        hash_longs(values, valid, tag, hashes)


def _canonical(column: pa.Array) -> tuple[int, Hashes | tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]]:
    """Return a column's tag, and its values as eight bytes each or as bytes with offsets; nulls have any value."""
    t, kind = pa.types, column.type
    if t.is_null(kind):
        return _WHOLE, np.zeros(len(column), dtype=np.uint64)
    if t.is_integer(kind):
        return _WHOLE, _longs(column if kind in {pa.int64(), pa.uint64()} else column.cast(pa.int64()))
    if t.is_boolean(kind):
        return _BOOL, _longs(column.cast(pa.int64()))
    if t.is_floating(kind):
        doubles = _plain(column.cast(pa.float64())) + 0.0  # -0.0 + 0.0 is 0.0
        return _FLOAT, np.where(np.isnan(doubles), _NAN, doubles.view(np.uint64))
    if t.is_date(kind):
        return _DATE, _longs(column.cast(pa.date32()).cast(pa.int32()).cast(pa.int64()))
    if t.is_timestamp(kind):
        return _MOMENT, _longs(column.cast(pa.timestamp("us", kind.tz), safe=False).cast(pa.int64()))
    if t.is_decimal(kind):
        return _DECIMAL, _pieces(pa.array([None if v is None else _digits(v) for v in column.to_pylist()], pa.string()))
    if t.is_string(kind) or t.is_large_string(kind):
        return _TEXT, _pieces(column)
    return _BYTES, _pieces(column.cast(pa.large_binary()) if t.is_fixed_size_binary(kind) else column)


def _plain(column: pa.Array) -> npt.NDArray[Any]:
    """Return the values of a column of fixed width; 0 for nulls."""
    found = column if column.null_count == 0 else pc.fill_null(column, pa.scalar(0, column.type))
    return np.ascontiguousarray(found.to_numpy(zero_copy_only=False))


def _longs(column: pa.Array) -> Hashes:
    return _plain(column).view(np.uint64)


def _pieces(column: pa.Array) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return bytes and offsets of a column of text or bytes."""
    wide = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    width = np.dtype(np.int64 if wide else np.int32)
    _, offsets, data = column.buffers()
    bounds = np.zeros(1, dtype=np.int64)
    if offsets is not None and offsets.size:
        found = np.frombuffer(offsets, dtype=width, count=len(column) + 1, offset=column.offset * width.itemsize)
        bounds = found.astype(np.int64)
    if data is None or not data.size:
        return np.zeros(1, dtype=np.uint8), bounds
    return np.frombuffer(data, dtype=np.uint8), bounds


def _digits(value: Decimal) -> str:
    sign, digits, exponent = _EXACT.normalize(value).as_tuple() if value else (0, (0,), 0)
    return f"{'-' if sign else ''}{''.join(map(str, digits))}e{exponent}"
