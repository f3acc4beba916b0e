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
import numpy.typing as npt
import pyarrow as pa

from millstream.codec.checksums import Bytes
from millstream.codec.log_directory import Ints, check_directory, decode_directories
from millstream.codec.log_frame import FrameHeader, announced
from millstream.codec.log_parts import EntryNumbers, LeftOut, PayloadPart, check_rows, verify_part
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
        self._first_offset = np.array([header.first_offset for header in headers], np.int64)
        self._numbers: EntryNumbers | None = None
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
        mine = of_part(self._batches, schema)
        count = self._batches.column("count").to_numpy()[mine]
        frames = len(self._first_offset)
        told = np.bincount(self._frame[mine], count, frames).astype(np.int64)
        there = np.zeros(frames, np.int64)
        np.add.at(there, [frame for frame, _, _ in parts], [part.rows for _, part, _ in parts])
        if (told != there).any():
            raise CorruptFrame(f"the directory and the rows of table {table} disagree")
        needed = log_columns(schema, columns, offsets=offsets)
        rows = self._rows(schema, parts, needed, mine, threads=columns is None)
        batch = records_of(
            schema,
            rows,
            self._operations,
            self._batches,
            self._entry_numbers,
            columns=columns,
            offsets=offsets,
            moments=moments,
        )
        first, operation = (self._batches.column(name).to_numpy()[mine] for name in ("first_seq", "operation"))
        ascends = bool((first[1:] >= (first + count)[:-1]).all())
        return RunRecords(schema, batch, ascends, np.repeat(self._first[operation], count))

    def _rows(
        self,
        schema: TableSchema,
        parts: Sequence[FramePart],
        needed: frozenset[str],
        mine: npt.NDArray[np.bool_],
        *,
        threads: bool,
    ) -> pa.RecordBatch:
        """Decode parts of one table and version; `mine` are its entries.

        If parts leave different columns out, those with the same flags are decoded at once.
        """
        by_flags: dict[int, list[FramePart]] = {}
        for part in parts:
            by_flags.setdefault(part.part.flags, []).append(part)
        if len(by_flags) == 1:
            return self._rows_alike(schema, parts, needed, threads=threads)
        count = self._batches.column("count").to_numpy()
        pieces, frames = [], []
        for alike in by_flags.values():
            of_these = [part.frame for part in alike]
            own = mine & np.isin(self._frame, of_these)
            left_out = LeftOut(schema, count[own], own, self._entry_numbers)
            pieces.append(left_out.added_to(self._rows_alike(schema, alike, needed, threads=threads), needed))
            frames.append(np.repeat(of_these, [part.part.rows for part in alike]))
        return pa.concat_batches(pieces).take(pa.array(np.argsort(np.concatenate(frames), kind="stable")))

    def _rows_alike(
        self, schema: TableSchema, parts: Sequence[FramePart], needed: frozenset[str], *, threads: bool
    ) -> pa.RecordBatch:
        table, flags = schema.table_id, parts[0].part.flags
        picker = self._schemas.picker(table, schema.version, flags, needed, threads=threads)
        rows, counts = picker.decode_all([data for _, _, data in parts])
        check_rows(table, rows)
        if counts != [part.rows for _, part, _ in parts]:
            raise CorruptFrame(f"the directory and the rows of table {table} disagree")
        return rows

    def _entry_numbers(self) -> EntryNumbers:
        if self._numbers is None:
            self._numbers = EntryNumbers(self._batches, self._frame, self._first_offset)
        return self._numbers
