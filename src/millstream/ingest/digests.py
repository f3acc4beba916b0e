"""Digests of requests: the same for the same rows of the same table, whichever others they came with, and whatever columns the table has got since.

A column that a request says nothing in has no part in it. Its purpose is to notice a session's number, or a key, that is used again for another
write: no attacker has to be kept from making two writes with one digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_MASK: Final = (1 << 63) - 1
_MIX: Final = 0x9E37_79B9_7F4A_7C15


def digests_of(
    table: str, names: Sequence[str], columns: Sequence[pa.Array], counts: Sequence[int], wanted: Sequence[bool]
) -> list[int]:
    """A digest of each request's rows and of their table, from 0 to 2^63 - 1.

    Args:
        table: its name: the same rows for another table are another write.
        names: the columns'.
        columns: the rows of all requests, one request behind the other, in the table's types.
        counts: each request's rows, at least one.
        wanted: which requests have a digest made; 0 of the others.
    """
    ends = list(accumulate(counts))
    placed = _seed(table) * _MIX
    digests = [(placed + count) & _MASK if one else 0 for count, one in zip(counts, wanted, strict=True)]
    bounds = [(i, end - count, end) for i, (count, end) in enumerate(zip(counts, ends, strict=True)) if wanted[i]]
    for name, column in zip(names, columns, strict=True):
        if column.null_count == len(column):
            continue
        seed = _seed(name)
        parts = _parts(column)
        said = None
        if column.null_count:
            said = np.concatenate(([0], np.cumsum(column.is_valid().to_numpy(zero_copy_only=False))))
        for i, start, end in bounds:
            if said is not None and said[start] == said[end]:
                continue
            summed = seed
            for part in parts:
                first, last = (start, end) if part.starts is None else (part.starts[start], part.starts[end])
                if first < last and (part.nulls is None or part.nulls[last] > part.nulls[first]):
                    found = google_crc32c.value(part.data[first:last].tobytes())
                    summed = (summed * _MIX + found + part.tag) & _MASK
            digests[i] = (digests[i] + (summed ^ (summed >> 29)) * _MIX) & _MASK
    return digests


@lru_cache(maxsize=4096)
def _seed(name: str) -> int:
    return int(google_crc32c.value(name.encode()))


class _Part(NamedTuple):
    """What a column's values are, or something of it."""

    data: npt.NDArray[Any]
    """An item a row, or several."""
    tag: int = 1
    """What tells parts apart of which some may be passed over."""
    starts: list[int] | None = None
    """Where each row's items begin, and where the last ones end."""
    nulls: list[int] | None = None
    """How many items before each are null: of what is passed over where none is."""


def _parts(column: pa.Array, tag: int = 1) -> list[_Part]:
    found = []
    if not len(column):
        return []
    if column.null_count:
        valid = column.is_valid().cast(pa.uint8()).to_numpy()
        nulls = np.concatenate(([0], np.cumsum(1 - valid.astype(np.int64)))).tolist()
        found.append(_Part(valid, tag, nulls=nulls))
    kind = column.type
    if pa.types.is_list(kind):
        lengths = pc.list_value_length(column).fill_null(0).to_numpy()
        found.append(_Part(lengths, tag + 1))
        places = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        for part in _parts(column.flatten(), tag + 2):
            inner = places if part.starts is None else np.array(part.starts)[places]
            found.append(part._replace(starts=inner.tolist()))
        return found
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        plain = column.cast(pa.binary())
        if plain.null_count:
            plain = plain.fill_null(b"")  # what lies under a null is anything
        _, places, data = plain.buffers()
        offsets = np.frombuffer(places, np.int32, len(plain) + 1, plain.offset * 4)
        found.append(_Part(np.diff(offsets), tag + 1))
        text = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
        found.append(_Part(text, tag + 2, offsets.tolist()))
        return found
    plain = column.cast(pa.uint8()) if pa.types.is_boolean(kind) else column
    if plain.null_count:
        plain = plain.fill_null(_zero(plain.type))
    width = plain.type.bit_width // 8
    values = np.frombuffer(plain.buffers()[1], np.uint8, len(plain) * width, plain.offset * width)
    found.append(_Part(values.reshape(len(plain), width), tag + 1))
    return found


def _zero(kind: pa.DataType) -> pa.Scalar:
    if pa.types.is_decimal(kind):
        return pa.scalar(Decimal(0), kind)
    return pa.scalar(0, pa.int32() if kind.bit_width == 32 else pa.int64()).cast(kind)
