"""Consecutive frames of one segment, decoded together.

A small frame costs calls, not bytes: decoding a frame of one row takes as long as one of a
thousand. So readers decode runs of frames: all directories at once, and each table's rows at once.
A run gets every check of `decode_frame`. A failed check doesn't name its frame: the caller then
decodes the frames one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from millstream.codec.checksums import Bytes
from millstream.codec.log_directory import Ints, check_directory, decode_directories
from millstream.codec.log_frame import FrameHeader, PayloadPart, announced, check_rows, verify_part
from millstream.codec.log_records import first_seqs, log_columns, of_part, records_of
from millstream.codec.log_schemas import SchemaSet
from millstream.errors import CorruptFrame
from millstream.model.schema import TableSchema


class FrameHead(NamedTuple):
    """A records frame's verified head."""

    header: FrameHeader
    operations: Bytes
    batches: Bytes


class FramePart(NamedTuple):
    """A payload part, and the index of its frame in the run."""

    frame: int
    part: PayloadPart
    data: Bytes


@dataclass(frozen=True, slots=True)
class RunRecords:
    """A run's records of one table and schema version, in frame order, as many of each frame as its part names."""

    schema: TableSchema
    batch: pa.RecordBatch
    """Records, as `records_of` returns them."""
    ascends: bool
    """Whether their numbers ascend from frame to frame."""
    operation_seq: Ints
    """For each record, the first number that its operation has in its frame."""


class FrameRun:
    """Frames of one segment.

    Raises:
        CorruptFrame: the directory of one frame is invalid.
    """

    def __init__(self, heads: Sequence[FrameHead], schemas: SchemaSet) -> None:
        self._schemas = schemas
        self._operations, self._batches, self._frame = decode_directories(
            schemas.directories(), [(head.operations, head.batches) for head in heads]
        )
        starts = np.flatnonzero(np.diff(self._frame, prepend=-1))
        headers = [head.header for head in heads]
        check_directory(self._operations, self._batches, starts, announced(headers))
        self._frames = len(heads)
        self._first = first_seqs(self._operations, self._batches)

    def records(
        self,
        parts: Sequence[FramePart],
        *,
        columns: frozenset[str] | None = None,
        offsets: bool = False,
        moments: bool = False,
    ) -> RunRecords:
        """Return the records of one table and schema version; see `RecordsFrame.records`.

        Raises:
            CorruptFrame: a part fails its checksum, or rows and directory disagree.
        """
        for _, part, data in parts:
            verify_part(part, data)
        table, version = parts[0].part.table_id, parts[0].part.schema_version
        schema = self._schemas.find(table, version)
        needed = log_columns(schema, columns, offsets=offsets)
        picker = self._schemas.picker(table, version, needed, threads=columns is None)
        rows, counts = picker.decode_all([data for _, _, data in parts])
        check_rows(table, rows)
        mine = of_part(self._batches, schema)
        count = self._batches.column("count").to_numpy()[mine]
        told = np.bincount(self._frame[mine], count, self._frames).astype(np.int64)
        there = np.zeros(self._frames, np.int64)
        np.add.at(there, [frame for frame, _, _ in parts], counts)
        if counts != [part.rows for _, part, _ in parts] or (told != there).any():
            raise CorruptFrame(f"the directory and the rows of table {table} disagree")
        batch = records_of(
            schema, rows, self._operations, self._batches, columns=columns, offsets=offsets, moments=moments
        )
        first, operation = (self._batches.column(name).to_numpy()[mine] for name in ("first_seq", "operation"))
        ascends = bool((first[1:] >= (first + count)[:-1]).all())
        return RunRecords(schema, batch, ascends, np.repeat(self._first[operation], count))
