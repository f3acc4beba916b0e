"""The directory of a frame: its operations and their table batches, and the numbers that the batches carry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.codec.arrow_ipc import ColumnPicker, decode_batch
from millstream.codec.checksums import Bytes
from millstream.errors import CorruptFrame
from millstream.model.operations import OPERATION_SCHEMA
from millstream.model.records import TIME_MAX_US, TIME_MIN_US

BATCH_SCHEMA: Final = pa.schema(
    [
        pa.field("operation", pa.int32(), nullable=False),
        pa.field("table_id", pa.int64(), nullable=False),
        pa.field("schema_version", pa.int32(), nullable=False),
        pa.field("partition", pa.string()),
        pa.field("first_seq", pa.int64(), nullable=False),
        pa.field("count", pa.int64(), nullable=False),
        pa.field("first_index", pa.int64()),
    ]
)
"""One row for every (operation, table, partition) of a frame: `operation` is the row in the frame's
operations; the numbers of its `count` records in this frame are `first_seq …`, and their indexes in
the operation `first_index …`. That is null if they aren't consecutive."""

_ADDED_LATER: Final = frozenset({"first_index"})
"""Columns that segments with batch headers of version 1 may lack."""
_BATCHES_V1: Final = pa.schema([field for field in BATCH_SCHEMA if field.name not in _ADDED_LATER])
_INDEX_MAX: Final = 2**62
"""Greatest index that a directory may have. Sums of an index and a count don't overflow."""
_ORDINAL: Final = BATCH_SCHEMA.field("operation")
Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Directory:
    """The Arrow schemas of a frame's two directory tables; the segment's header holds them."""

    operations: pa.Schema
    batches: pa.Schema

    def check(self) -> Directory:
        """Return the value itself; raises `CorruptFrame` if a column that readers use is missing or of another type."""
        for found, columns in ((self.operations, OPERATION_SCHEMA), (self.batches, BATCH_SCHEMA)):
            for column in columns:
                place = found.get_field_index(column.name)
                if place < 0 and column.name in _ADDED_LATER:
                    continue
                if place < 0 or found.field(place).type != column.type:
                    raise CorruptFrame(f"the directory's column {column.name} is missing, or isn't what it must be")
        return self


DIRECTORY: Final = Directory(OPERATION_SCHEMA, BATCH_SCHEMA)
"""The schemas that this version writes. It also replaces a segment's own directory if that is lost."""


def decode_directory(directory: Directory, operations: Bytes, batches: Bytes) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Decode a frame's operations and batches, and check each.

    Raises:
        CorruptFrame: they are invalid.
    """
    of_operations = decode_batch(operations, directory.operations)
    of_batches = _decode_batches(directory, batches)
    _check_columns(of_operations, of_batches)
    if not of_batches.num_rows:
        raise CorruptFrame("a frame's directory is empty")
    _check_ordinals(ints_of(of_batches.column("operation")), of_operations.num_rows)
    return of_operations, of_batches


def _decode_batches(directory: Directory, batches: Bytes) -> pa.RecordBatch:
    try:
        return decode_batch(batches, directory.batches)
    except CorruptFrame:
        if directory is not DIRECTORY:
            raise
        return decode_batch(batches, _BATCHES_V1)  # the segment's own directory may be lost


class DirectoryDecoders:
    """Decoders for many directories of a segment at once."""

    def __init__(self, directory: Directory) -> None:
        self.operations: Final = ColumnPicker(directory.operations, None)
        self.batches: Final = ColumnPicker(directory.batches, None)


def decode_directories(
    of: DirectoryDecoders, messages: Sequence[tuple[Bytes, Bytes]]
) -> tuple[pa.RecordBatch, pa.RecordBatch, Ints]:
    """Decode the directories of several frames as one: (operations, batches, the frame index of each batch).

    See `decode_directory`.

    Raises:
        CorruptFrame: one of them is invalid. `decode_directory` identifies it.
    """
    operations, operation_counts = of.operations.decode_all([message for message, _ in messages])
    batches, batch_counts = of.batches.decode_all([message for _, message in messages])
    _check_columns(operations, batches)
    if min(batch_counts) == 0:
        raise CorruptFrame("a frame's directory is empty")
    frame = np.repeat(np.arange(len(messages)), batch_counts)
    in_frame = np.array(operation_counts)
    ordinals = ints_of(batches.column("operation"))
    _check_ordinals(ordinals, in_frame[frame])
    shifted = pa.array((ordinals + (np.cumsum(in_frame) - in_frame)[frame]).astype(np.int32))
    return operations, batches.set_column(batches.schema.get_field_index("operation"), _ORDINAL, shifted), frame


def ints_of(column: pa.Array) -> Ints:
    """Return a column of whole numbers without nulls. `to_numpy` would import pandas, most of the time of a first status."""
    return cast("Ints", np.from_dlpack(column))


def first_indexes(batches: pa.RecordBatch) -> Ints:
    """Return the first index of each batch; -1 if it has none."""
    place = batches.schema.get_field_index("first_index")
    if place < 0 or batches.column(place).null_count == batches.num_rows:
        return np.full(batches.num_rows, -1, np.int64)
    column = batches.column(place)
    found = ints_of(column.fill_null(-1) if column.null_count else column)
    return np.where((found < 0) | (found > _INDEX_MAX), -1, found)


def spread(firsts: Ints, counts: Ints) -> Ints:
    """Return `first, first + 1, …` for each entry, as many as its count (at least 1), concatenated."""
    if len(firsts) == 1:
        return np.arange(firsts[0], firsts[0] + counts[0], dtype=np.int64)
    ends = np.cumsum(counts)
    if not len(ends) or len(ends) == ends[-1]:
        return firsts
    steps = np.ones(ends[-1], np.int64)  # their sum takes half as long as repeating each first number
    steps[0] = firsts[0]
    steps[ends[:-1]] = firsts[1:] - firsts[:-1] - counts[:-1] + 1
    return np.cumsum(steps, out=steps)


def _check_columns(operations: pa.RecordBatch, batches: pa.RecordBatch) -> None:
    for columns, found in ((OPERATION_SCHEMA, operations), (BATCH_SCHEMA, batches)):
        if any(found.column(column.name).null_count for column in columns if not column.nullable):
            raise CorruptFrame("a frame's directory has nulls where there can be none")


def _check_ordinals(ordinals: Ints, operations: int | Ints) -> None:
    if int(ordinals.min()) < 0 or np.any(ordinals >= operations):
        raise CorruptFrame("a frame's directory names an operation that it doesn't hold")


@dataclass(frozen=True, slots=True)
class Announced:
    """The counts and numbers that frames' headers name, as parallel arrays."""

    count: Ints
    first: Ints
    """First number."""
    last: Ints
    """Last number, inclusive."""


def check_directory(operations: pa.RecordBatch, batches: pa.RecordBatch, starts: Ints, announced: Announced) -> None:
    """Raise `CorruptFrame` unless the directory's counts and numbers are those of the frames' headers.

    Args:
        batches: the frames' batches, at least one for each frame.
        starts: for each frame, the row of its first batch.
    """
    counts, firsts = (ints_of(batches.column(name)) for name in ("count", "first_seq"))
    most = np.maximum.reduceat(counts, starts)  # sums of counts this small can't overflow
    if counts.min() < 1 or (most > announced.count).any() or (np.add.reduceat(counts, starts) != announced.count).any():
        raise CorruptFrame("a frame's directory and its record count disagree")
    least, greatest = np.minimum.reduceat(firsts, starts), np.maximum.reduceat(firsts + counts, starts) - 1
    if (least != announced.first).any() or (greatest != announced.last).any():
        raise CorruptFrame("a frame's directory and its numbers disagree")
    if (firsts[1:] < (firsts + counts)[:-1]).any():
        frame = np.searchsorted(starts, np.arange(len(firsts)), side="right")
        order = np.lexsort((firsts, frame))  # chunks of a large operation don't go by number
        is_twice = firsts[order][1:] < (firsts + counts)[order][:-1]
        if (is_twice & (frame[1:] == frame[:-1])).any():
            raise CorruptFrame("a frame's directory gives a number twice")
    times = operations.column("commit_ts")
    if times.null_count < len(times):
        found = pc.min_max(times)
        if found["min"].value < TIME_MIN_US or found["max"].value > TIME_MAX_US:
            raise CorruptFrame("an operation's commit time lies outside of the years 1 to 9999")
