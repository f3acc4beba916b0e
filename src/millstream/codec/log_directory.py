"""The directory of a frame: its operations and their table batches, and the numbers that either carries.

A flag in each frame, and the columns that the segment's header names, give the `Numbering` of a
file's frames:

- *batch*: every table batch has its first number. This is what is written.
- *both*: operations have numbers too, so that a reader that knows only those still reads correctly.
- *operation*: only operations have a number, and their batches use it. A record's number is its
  operation's plus its index in the operation.

Either way an operation's numbers are `[number, number + records)`, so tokens between operations
mean the same. Only the numbers of records within an operation differ: by batch, or by index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

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

OPERATION_SEQ: Final = pa.field("seq", pa.int64(), nullable=False)
"""An operation's number: the first number of its records, over all its shards and frames."""
_FIRST_SEQ: Final = BATCH_SCHEMA.field("first_seq")
_ORDINAL: Final = BATCH_SCHEMA.field("operation")
Ints: TypeAlias = npt.NDArray[np.int64]
_OPERATION_NUMBERS: Final = 2
_NO_BATCH_NUMBERS: Final = 4


class Numbering(StrEnum):
    """The numbers that a file's frames carry."""

    BATCH = "batch"
    BOTH = "both"
    OPERATION = "operation"

    @property
    def flags(self) -> int:
        """The flags in a frame's header."""
        return _FLAGS[self]


_FLAGS: Final = {
    Numbering.BATCH: 0,
    Numbering.BOTH: _OPERATION_NUMBERS,
    Numbering.OPERATION: _OPERATION_NUMBERS | _NO_BATCH_NUMBERS,
}
NUMBERING_FLAGS: Final = _OPERATION_NUMBERS | _NO_BATCH_NUMBERS
NUMBERING_OF_FLAGS: Final = {flags: numbering for numbering, flags in _FLAGS.items()}
"""Numbering by the bits `NUMBERING_FLAGS` of a frame's flags; other bits are unknown."""


@dataclass(frozen=True, slots=True)
class Directory:
    """The Arrow schemas of a frame's two directory tables; the segment's header holds them."""

    operations: pa.Schema
    batches: pa.Schema
    numbering: Numbering = field(init=False, compare=False)

    def __post_init__(self) -> None:
        numbered = self.operations.get_field_index(OPERATION_SEQ.name) >= 0
        of_batches = Numbering.BOTH if numbered else Numbering.BATCH
        own = self.batches.get_field_index(_FIRST_SEQ.name) >= 0
        object.__setattr__(self, "numbering", of_batches if own or not numbered else Numbering.OPERATION)

    def check(self) -> Directory:
        """Return the value itself; raises `CorruptFrame` if a column that readers use is missing or of another type."""
        known = DIRECTORIES[self.numbering]
        for found, columns in ((self.operations, known.operations), (self.batches, known.batches)):
            for column in columns:
                place = found.get_field_index(column.name)
                if place < 0 or found.field(place).type != column.type:
                    raise CorruptFrame(f"the directory's column {column.name} is missing, or isn't what it must be")
        return self


_NUMBERED: Final = OPERATION_SCHEMA.append(OPERATION_SEQ)
DIRECTORIES: Final = {
    Numbering.BATCH: Directory(OPERATION_SCHEMA, BATCH_SCHEMA),
    Numbering.BOTH: Directory(_NUMBERED, BATCH_SCHEMA),
    Numbering.OPERATION: Directory(_NUMBERED, BATCH_SCHEMA.remove(BATCH_SCHEMA.get_field_index(_FIRST_SEQ.name))),
}
"""The directory schemas that this version writes."""
DIRECTORY: Final = DIRECTORIES[Numbering.BATCH]
"""The default. It also replaces a segment's own directory if that is lost; then each frame's flag
gives its numbering."""


def with_numbers(operations: pa.RecordBatch, numbers: pa.Array) -> pa.RecordBatch:
    """Return operations with their numbers."""
    return pa.RecordBatch.from_arrays([*operations.columns, numbers], schema=operations.schema.append(OPERATION_SEQ))


def without_batch_numbers(batches: pa.RecordBatch) -> pa.RecordBatch:
    """Return batches without numbers of their own, which use their operations' numbers."""
    kept = DIRECTORIES[Numbering.OPERATION].batches
    return pa.RecordBatch.from_arrays([batches.column(name) for name in kept.names], schema=kept)


def decode_directory(
    directory: Directory, numbering: Numbering, operations: Bytes, batches: Bytes
) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Decode a frame's operations and batches, and check each. Batches without numbers get their operation's.

    Args:
        directory: the segment's.
        numbering: the numbering by the frame's flag.
        operations: an Arrow message.
        batches: an Arrow message.

    Raises:
        CorruptFrame: they are invalid.
    """
    if numbering is not directory.numbering:
        if directory is not DIRECTORY:
            raise CorruptFrame(f"a frame with numbers by {numbering} stands in a segment of others")
        directory = DIRECTORIES[numbering]
    of_operations = decode_batch(operations, directory.operations)
    of_batches = decode_batch(batches, directory.batches)
    _check_columns(numbering, of_operations, of_batches)
    if not of_batches.num_rows:
        raise CorruptFrame("a frame's directory is empty")
    _check_ordinals(of_batches.column("operation").to_numpy(), of_operations.num_rows)
    if numbering is Numbering.OPERATION:
        taken = pc.take(of_operations.column(OPERATION_SEQ.name), of_batches.column("operation"))
        of_batches = pa.RecordBatch.from_arrays(
            [*of_batches.columns, taken], schema=of_batches.schema.append(_FIRST_SEQ)
        )
    return of_operations, of_batches


class DirectoryDecoders:
    """Decoders for many directories of a segment at once."""

    def __init__(self, directory: Directory) -> None:
        self.numbering: Final = directory.numbering
        self.operations: Final = ColumnPicker(directory.operations, None)
        self.batches: Final = ColumnPicker(directory.batches, None)


def decode_directories(
    of: DirectoryDecoders, messages: Sequence[tuple[Bytes, Bytes]]
) -> tuple[pa.RecordBatch, pa.RecordBatch, Ints]:
    """Decode the directories of several frames as one: (operations, batches, the frame index of each batch).

    See `decode_directory`.

    Args:
        of: decoders of the frames' segment, whose batches have numbers of their own.
        messages: each frame's operations and batches.

    Raises:
        CorruptFrame: one of them is invalid. `decode_directory` identifies it.
    """
    operations, operation_counts = of.operations.decode_all([message for message, _ in messages])
    batches, batch_counts = of.batches.decode_all([message for _, message in messages])
    _check_columns(of.numbering, operations, batches)
    if min(batch_counts) == 0:
        raise CorruptFrame("a frame's directory is empty")
    frame = np.repeat(np.arange(len(messages)), batch_counts)
    in_frame = np.array(operation_counts)
    ordinals = batches.column("operation").to_numpy()
    _check_ordinals(ordinals, in_frame[frame])
    shifted = pa.array((ordinals + (np.cumsum(in_frame) - in_frame)[frame]).astype(np.int32))
    return operations, batches.set_column(batches.schema.get_field_index("operation"), _ORDINAL, shifted), frame


def _check_columns(numbering: Numbering, operations: pa.RecordBatch, batches: pa.RecordBatch) -> None:
    known = DIRECTORIES[numbering]
    for columns, found in ((known.operations, operations), (known.batches, batches)):
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


def check_directory(
    numbering: Numbering, operations: pa.RecordBatch, batches: pa.RecordBatch, starts: Ints, announced: Announced
) -> None:
    """Raise `CorruptFrame` unless the directory's counts and numbers are those of the frames' headers.

    Args:
        numbering: of the frames.
        operations: the frames' operations.
        batches: the frames' batches, at least one for each frame.
        starts: for each frame, the row of its first batch.
        announced: the headers' counts and numbers.
    """
    counts, firsts = (batches.column(name).to_numpy() for name in ("count", "first_seq"))
    most = np.maximum.reduceat(counts, starts)  # sums of counts this small can't overflow
    if counts.min() < 1 or (most > announced.count).any() or (np.add.reduceat(counts, starts) != announced.count).any():
        raise CorruptFrame("a frame's directory and its record count disagree")
    least, greatest = np.minimum.reduceat(firsts, starts), np.maximum.reduceat(firsts + counts, starts) - 1
    if numbering is Numbering.BATCH:
        agree = (least == announced.first) & (greatest == announced.last)
    elif numbering is Numbering.BOTH:
        agree = (announced.first <= least) & (greatest <= announced.last)
    else:  # the rows determine which of an operation's numbers are here
        agree = (least >= 0) & (least <= announced.first) & (np.maximum.reduceat(firsts, starts) <= announced.last)
    if not agree.all():
        raise CorruptFrame("a frame's directory and its numbers disagree")
    times = operations.column("commit_ts")
    if times.null_count < len(times):
        found = pc.min_max(times)
        if found["min"].value < TIME_MIN_US or found["max"].value > TIME_MAX_US:
            raise CorruptFrame("an operation's commit time lies outside of the years 1 to 9999")
