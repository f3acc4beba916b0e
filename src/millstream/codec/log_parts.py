"""Parts of a payload: the columns that a part leaves out, and how a reader makes them.

Most parts need few of the columns that stand before a table's own. The records of an operation
usually have consecutive indexes in each table. A frame's directory then numbers them: an entry has
the index of its first record, and offsets follow from indexes and counts. The three sparse columns
are mostly null. So a part has flags, each for columns that its Arrow message leaves out. Such a
message doesn't depend on the numbers that the writer gives, and is half as large for a small part.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from itertools import starmap
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.codec.checksums import Bytes, crc32c
from millstream.codec.log_directory import Ints, first_indexes, ints_of, spread
from millstream.errors import CorruptFrame, UnsupportedFormat
from millstream.model.ids import SchemaVersion, TableId
from millstream.model.records import LOG_ROW_PREFIX, log_row_schema
from millstream.model.schema import TableSchema

NUMBERS: Final = 1
"""`__offset` and `__index` are left out: the directory has them."""
VALUES: Final = 2
"""`__unchanged` and `__exact` are left out: they are null in all rows."""
BEFORE: Final = 4
"""`__before` is left out: it is null in all rows."""
LEFT_OUT: Final[Mapping[int, tuple[str, ...]]] = {
    NUMBERS: ("__offset", "__index"),
    VALUES: ("__unchanged", "__exact"),
    BEFORE: ("__before",),
}
"""Flags of a part, and the columns that each leaves out. No two sets of flags leave as many Arrow
buffers: a reader detects a flag that isn't true of the message."""
PART_FLAGS: Final = sum(LEFT_OUT)
"""All flags that are known."""


_PART: Final = struct.Struct("<qIIIII")
"""table id, schema version, rows, length, crc, flags"""
_PART_V1: Final = struct.Struct("<qIIII")
"""The same without flags."""
PART_SIZES: Final = {1: _PART_V1.size, 2: _PART.size}
"""Size in bytes of a part in a head, by the version of the batch header."""
_NEVER_NULL: Final = tuple(field.name for field in LOG_ROW_PREFIX if not field.nullable)


class PayloadPart(NamedTuple):
    """A table's rows in a frame, under one schema version.

    A frame may have hundreds, and each reader decodes them all.
    """

    table_id: TableId
    schema_version: SchemaVersion
    rows: int
    length: int
    crc: int
    flags: int = 0
    """The columns that its message leaves out."""


_PART_OF: Final = partial(tuple.__new__, PayloadPart)
"""Construct a `PayloadPart` as `_make` does, without a Python call for each."""


def encode_parts(parts: Sequence[PayloadPart], version: int) -> bytes:
    """Encode parts for a head of this version; version 1 has no flags."""
    if version > 1:
        return b"".join([_PART.pack(*part) for part in parts])
    if any(part.flags for part in parts):
        raise AssertionError("batch header version 1 has no parts that leave columns out")
    return b"".join([_PART_V1.pack(*part[:-1]) for part in parts])


def decode_parts(data: memoryview, version: int) -> tuple[PayloadPart, ...]:
    """Decode the parts of a verified head. Raises `UnsupportedFormat` if one has unknown flags."""
    if version == 1:
        return tuple(starmap(PayloadPart, _PART_V1.iter_unpack(data)))
    parts = tuple(map(_PART_OF, _PART.iter_unpack(data)))
    if any(part.flags > PART_FLAGS for part in parts):
        raise UnsupportedFormat("a part of a frame has unknown flags", version=version)
    return parts


def verify_part(part: PayloadPart, data: Bytes) -> None:
    """Check a part's bytes against its length and its CRC32C; raises `CorruptFrame`."""
    if len(data) < part.length:
        raise CorruptFrame("the file ends inside of a frame's payload", code="truncated_frame")
    if crc32c(data) != part.crc:
        raise CorruptFrame(f"the rows of table {part.table_id} fail their checksum")


def check_rows(table_id: TableId, rows: pa.RecordBatch) -> None:
    """Raise `CorruptFrame` if a row lacks an offset, index or op; columns that weren't read aren't checked."""
    names = rows.schema.names
    if any(rows.column(name).null_count for name in _NEVER_NULL if name in names):
        raise CorruptFrame(f"a row of table {table_id} lacks its offset, index or op")


@lru_cache(maxsize=4096)
def part_schema(table: TableSchema, flags: int) -> pa.Schema:
    """Return the schema of a part with these flags, without metadata."""
    left_out = {name for flag, names in LEFT_OUT.items() if flags & flag for name in names}
    return pa.schema([field for field in log_row_schema(table) if field.name not in left_out])


def flags_of(rows: pa.RecordBatch) -> int:
    """Return the flags of a part of these rows: `part_schema` of some flags."""
    find = rows.schema.get_field_index
    return sum([flag for flag, (name, *_) in LEFT_OUT.items() if find(name) < 0])


class EntryNumbers:
    """The index and the offset of the first record of each entry of some frames' directories.

    An operation's entries are numbered if each has a first index, and their ranges of indexes don't
    overlap. Offsets go by operation, then by index.

    Args:
        batches: the entries; the ordinals of operations ascend from frame to frame.
        frame: each entry's frame, ascending from 0.
        first_offset: each frame's.
    """

    def __init__(self, batches: pa.RecordBatch, frame: Ints, first_offset: Ints) -> None:
        index, count, operation = first_indexes(batches), *map(ints_of, map(batches.column, ("count", "operation")))
        self._count, self._frame, self._first_offset = count, frame, first_offset
        self._order = None if _ascend(operation, index, count).all() else np.lexsort((index, operation))
        is_bad = index < 0
        if self._order is not None:
            of, first, size = operation[self._order], index[self._order], count[self._order]
            is_bad = is_bad[self._order]
            is_bad[1:] |= ~_ascend(of, first, size)
            index = np.where(np.isin(operation, of[is_bad]), -1, index)
        elif is_bad.any():
            index = np.where(np.isin(operation, operation[is_bad]), -1, index)
        self.index: Final = index
        """-1 if the directory doesn't number the records of the entry's operation."""

    @cached_property
    def offset(self) -> Ints:
        """The offsets; wrong if an entry of the operation isn't numbered."""
        count = self._count if self._order is None else self._count[self._order]
        begins = np.cumsum(count) - count
        of_frame = self._first_offset - begins[np.flatnonzero(np.diff(self._frame, prepend=-1))]
        if self._order is None:
            return begins + of_frame[self._frame]
        offset = np.empty_like(begins)
        offset[self._order] = begins
        return offset + of_frame[self._frame]


def _ascend(operation: Ints, index: Ints, count: Ints) -> npt.NDArray[np.bool_]:
    """Return for each entry but the first whether it is behind the one before, by operation and index."""
    found: npt.NDArray[np.bool_] = (operation[1:] > operation[:-1]) | (
        (operation[1:] == operation[:-1]) & (index[1:] >= index[:-1] + count[:-1])
    )
    return found


class LeftOut:
    """The columns that the messages of some parts of one table and schema version leave out.

    Args:
        counts: the counts of the entries that the rows belong to, in order.
        mine: which of the directory's entries those are.
        numbers: returns the numbers of all entries; called if a reader asks for one.
    """

    def __init__(
        self, table: TableSchema, counts: Ints, mine: npt.NDArray[np.bool_], numbers: Callable[[], EntryNumbers]
    ) -> None:
        self._table = table
        self._counts = counts
        self._mine = mine
        self._numbers = numbers

    def column(self, name: str, kind: pa.DataType) -> pa.Array:
        """Return a column. Raises `CorruptFrame` if the directory doesn't number the rows."""
        if name not in LEFT_OUT[NUMBERS]:
            return pa.nulls(int(self._counts.sum()), kind)
        numbers = self._numbers()
        index = numbers.index[self._mine]
        if (index < 0).any():
            raise CorruptFrame(f"the directory doesn't number the rows of table {self._table.table_id}")
        return pa.array(spread(numbers.offset[self._mine] if name == "__offset" else index, self._counts))

    def added_to(self, rows: pa.RecordBatch, names: Collection[str] | None) -> pa.RecordBatch:
        """Return rows with all these columns of `log_row_schema`; None: with all. Raises as `column`."""
        schema, there = log_row_schema(self._table), set(rows.schema.names)
        if len(there) == len(schema if names is None else names):
            return rows
        fields = [field for field in schema if names is None or field.name in names]
        columns = [
            rows.column(field.name) if field.name in there else self.column(field.name, field.type) for field in fields
        ]
        return pa.RecordBatch.from_arrays(columns, schema=schema if names is None else pa.schema(fields))
