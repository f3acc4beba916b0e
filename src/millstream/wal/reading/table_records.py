"""Records of one table, as readers get them, and cuts of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.codec.log_frame import FrameHeader
from millstream.model.ids import Epoch, RegionId, ShardId
from millstream.model.positions import Offset, Seq
from millstream.model.schema import TableSchema


@dataclass(frozen=True, slots=True)
class TableRecords:
    """Records of one table under one schema version, from one frame or several, in the order of their numbers."""

    schema: TableSchema
    batch: pa.RecordBatch
    """Rows in `record_schema(schema)`, or the columns asked for and `__seq`; with `__offset` first if asked for."""
    shard: ShardId
    first_seq: Seq
    last_seq: Seq
    operation_seq: pa.Array
    """First number of each record's operation on this shard: shards are merged by it."""
    hybrid_ns: pa.Array
    """Hybrid time of each record's frame: regions are merged by it."""
    region: RegionId
    frame_offset: Offset
    """First offset of the (first) frame: records of several tables are merged by offset within one frame."""
    epoch: Epoch
    """Epoch in the header of the segment."""


@dataclass(frozen=True, slots=True)
class TablePart:
    """Contents of a stretch of the log, for one table under one schema version, from the heads of its frames."""

    schema: TableSchema
    first_seq: Seq
    last_seq: Seq
    """Bounds of its numbers."""
    rows: int
    size_bytes: int
    """Size in bytes in the log, compressed."""


def piece_of(
    header: FrameHeader,
    schema: TableSchema,
    batch: pa.RecordBatch,
    operation_seq: pa.Array,
    hybrid_ns: pa.Array,
) -> TableRecords:
    """Return some records of one frame, or of a run that begins with it."""
    seqs = batch.column("__seq")
    first, last = Seq(seqs[0].as_py()), Seq(seqs[-1].as_py())
    return TableRecords(
        schema,
        batch,
        header.shard,
        first,
        last,
        operation_seq,
        hybrid_ns,
        header.region,
        header.first_offset,
        header.epoch,
    )


def joined(some: Sequence[TableRecords]) -> TableRecords:
    """Return records of one table, schema version and segment as one, in the order given."""
    if len(some) == 1:
        return some[0]
    return replace(
        some[0],
        batch=pa.concat_batches([one.batch for one in some]),
        last_seq=some[-1].last_seq,
        operation_seq=pa.concat_arrays([one.operation_seq for one in some]),
        hybrid_ns=pa.concat_arrays([one.hybrid_ns for one in some]),
    )


def sum_of_parts(one: TablePart, other: TablePart) -> TablePart:
    """Return the sum of both, which are of one table and version."""
    return TablePart(
        one.schema,
        min(one.first_seq, other.first_seq),
        max(one.last_seq, other.last_seq),
        one.rows + other.rows,
        one.size_bytes + other.size_bytes,
    )


def straddles(first: Seq, last: Seq, after: Seq | None, upto: Seq | None) -> bool:
    """Return whether numbers `first` to `last` may lie outside `(after, upto]`."""
    return (after is not None and first <= after) or (upto is not None and last > upto)


def within_seqs(found: TableRecords, after: Seq | None, upto: Seq | None) -> Iterator[TableRecords]:
    """Yield the records with numbers in `(after, upto]`, if there are any."""
    seqs = found.batch.column("__seq").to_numpy()
    keep = np.ones(len(seqs), dtype=bool)
    if after is not None:
        keep &= seqs > after
    if upto is not None:
        keep &= seqs <= upto
    yield from filtered(found, keep)


def within_offsets(found: TableRecords, start: Offset, end: Offset) -> Iterator[TableRecords]:
    """Yield the records with offsets in `[start, end)`, or nothing."""
    offsets = found.batch.column("__offset").to_numpy()
    yield from filtered(found, (offsets >= start) & (offsets < end))


def filtered(found: TableRecords, keep: npt.NDArray[np.bool_]) -> Iterator[TableRecords]:
    """Yield the records where `keep` is true, or nothing."""
    if keep.all():
        yield found
        return
    if not keep.any():
        return
    mask = pa.array(keep)
    batch = found.batch.filter(mask)
    seqs = batch.column("__seq")
    yield replace(
        found,
        batch=batch,
        first_seq=Seq(seqs[0].as_py()),
        last_seq=Seq(seqs[-1].as_py()),
        operation_seq=found.operation_seq.filter(mask),
        hybrid_ns=found.hybrid_ns.filter(mask),
    )
