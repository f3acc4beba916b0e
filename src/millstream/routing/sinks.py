"""Sinks in addition to the log's shards: write buffers that routing feeds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import replace
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa

from millstream.errors import MillstreamError
from millstream.model.buffered_operations import BufferMeta
from millstream.model.ids import ShardId
from millstream.model.operations import TableRows, WriteOps
from millstream.ports import BufferWriting, SinkOutcome
from millstream.routing.shard_map import ShardMap

TOOK: Final = "took"
"""Detail of a sink's error: the part of the operation that it took."""


def took_part(error: MillstreamError, what: object) -> MillstreamError:
    """Return the error of a sink that took a part of an operation: a caller that repeats it stores that part twice."""
    told = copy(error)  # other operations may have the same error
    told.details[TOOK] = what
    told.__cause__ = error
    return told


Sent: TypeAlias = list[tuple[ShardId, Future[BufferMeta]]]
"""An operation's parts, and their answers."""


def end_of(deadline_s: float | None) -> float | None:
    """Return the time by `time.monotonic` at which a deadline is over; None: never."""
    return None if deadline_s is None else time.monotonic() + deadline_s


def left_s(end_s: float | None) -> float | None:
    """Return the seconds until a time by `end_of`, at least 0; None: no limit."""
    return None if end_s is None else max(0.0, end_s - time.monotonic())


def send_parts(buffer: BufferWriting, op: WriteOps, end_s: float | None) -> Sent:
    """Hand an operation's part for each shard to a buffer. A part that it refuses is a failed future.

    Args:
        buffer: the buffer.
        op: the operation.
        end_s: when its parts wait no longer for room, by `end_of`: that of all operations of a call.
    """
    parts: Sent = []
    for shard, part in op.by_shard().items():
        try:
            future = buffer.submit(shard, part, deadline_s=left_s(end_s))
        except MillstreamError as error:
            future = Future()
            future.set_exception(error)
        parts.append((shard, future))
    return parts


class BufferSink:
    """A write buffer as a sink (`ports.RecordSink`): rows of a key go to one shard, a table without a key to one.

    Args:
        buffer: the buffer; closed with the sink.

    Raises:
        BufferUnavailable, BufferMissing: its shards can't be listed.
    """

    def __init__(self, buffer: BufferWriting) -> None:
        self._buffer = buffer
        self._ring = ShardMap.ring(buffer.shards())

    def append(self, ops: WriteOps, *, deadline_s: float | None) -> Sequence[SinkOutcome]:
        """Implement `ports.RecordSink`: each operation is one of the buffer's on each shard that has rows of it."""
        placed = replace(ops, tables=tuple(part for table in ops.tables for part in self._parts(table)))
        end_s = end_of(deadline_s)
        sent = [send_parts(self._buffer, op, end_s) for op in placed.split()]
        return [_outcome(parts) for parts in sent]

    def close(self) -> None:
        """Implement `ports.RecordSink`."""
        self._buffer.close()

    def _parts(self, table: TableRows) -> list[TableRows]:
        rows = table.rows
        if not table.schema.key:
            (shard,) = self._ring.shards_of_keys([pa.array([table.schema.full_name])]).tolist()
            return [TableRows(table.schema, rows, ShardId(shard), table.partition)]
        shards = self._ring.shards_of_keys([rows.column(name) for name in table.schema.key])
        return [
            TableRows(
                table.schema, rows.take(pa.array(np.flatnonzero(shards == shard))), ShardId(int(shard)), table.partition
            )
            for shard in np.unique(shards)
        ]


def _outcome(parts: Sent) -> SinkOutcome:
    """Return the outcome of an operation, once all its parts have their answers."""
    offsets: dict[str, int] = {}
    failed: MillstreamError | None = None
    for shard, answer in parts:
        try:
            offsets[str(int(shard))] = int(answer.result().offset)
        except MillstreamError as error:
            failed = failed or error
    if failed is None:
        return {"offsets": offsets}
    # The stored part stays: a caller that repeats the operation finds it by its write id, or stores it twice.
    return took_part(failed, offsets) if offsets else failed
