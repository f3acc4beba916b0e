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
    ]
)
"""One row for every (operation, table, partition) of a frame: `operation` is the row in the frame's
operations; the numbers of its `count` records in this frame are `first_seq …`."""

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
    of_batches = decode_batch(batches, directory.batches)
    _check_columns(of_operations, of_batches)
    if not of_batches.num_rows:
        raise CorruptFrame("a frame's directory is empty")
    _check_ordinals(ints_of(of_batches.column("operation")), of_operations.num_rows)
    return of_operations, of_batches


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
        operations: the frames' operations.
        batches: the frames' batches, at least one for each frame.
        starts: for each frame, the row of its first batch.
        announced: the headers' counts and numbers.
    """
    counts, firsts = (ints_of(batches.column(name)) for name in ("count", "first_seq"))
    most = np.maximum.reduceat(counts, starts)  # sums of counts this small can't overflow
    if counts.min() < 1 or (most > announced.count).any() or (np.add.reduceat(counts, starts) != announced.count).any():
        raise CorruptFrame("a frame's directory and its record count disagree")
    least, greatest = np.minimum.reduceat(firsts, starts), np.maximum.reduceat(firsts + counts, starts) - 1
    if (least != announced.first).any() or (greatest != announced.last).any():
        raise CorruptFrame("a frame's directory and its numbers disagree")
    times = operations.column("commit_ts")
    if times.null_count < len(times):
        found = pc.min_max(times)
        if found["min"].value < TIME_MIN_US or found["max"].value > TIME_MAX_US:
            raise CorruptFrame("an operation's commit time lies outside of the years 1 to 9999")
