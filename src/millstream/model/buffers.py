"""Contents of write buffers: operations of one shard each, in order, at offsets that only grow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, NewType

import numpy as np
import pyarrow as pa

from millstream.model.ids import ShardId
from millstream.model.operations import TableRows, WriteOps

BufferOffset = NewType("BufferOffset", int)
"""An operation's place in its shard of a write buffer. It grows in the order in which operations were
stored, and may have gaps."""
BUFFER_START: Final = BufferOffset(0)


class ReadPause(Enum):
    """The reason why a reader returns no operation."""

    PENDING = "pending"
    """There is nothing behind its position so far."""
    ENDED = "ended"
    """It has raised `BufferOffsetGone`, and continues after the next seek."""


@dataclass(frozen=True, slots=True)
class BufferMeta:
    """Where a write buffer has stored an operation."""

    shard: ShardId
    offset: BufferOffset
    stored_at_us: int
    """When it was stored, by the buffer's clock, in microseconds since 1970 (UTC)."""
    size_bytes: int
    """Stored size in bytes."""


@dataclass(frozen=True, slots=True)
class BufferedOp:
    """An operation read from a write buffer."""

    meta: BufferMeta
    op: WriteOps
    """One operation; all its rows are of the buffer's shard."""


def parts_of_shards(op: WriteOps) -> dict[ShardId, WriteOps]:
    """Return an operation's part for each shard, in order of the shards' first rows.

    A buffer takes operations of one shard.
    """
    tables: dict[ShardId, list[TableRows]] = {}
    for table in op.tables:
        if table.rows.num_rows:
            tables.setdefault(table.shard, []).append(table)
    return {shard: replace(op, tables=tuple(found)) for shard, found in tables.items()}


def single_operations(ops: WriteOps) -> list[WriteOps]:
    """Split operations that travel together; the sources' positions that several share are given to none of them.

    Args:
        ops: any number of operations, of one shard or of several.
    """
    count = ops.operations.num_rows
    if count == 1:
        return [ops]
    found: list[list[TableRows]] = [[] for _ in range(count)]
    for table in ops.tables:
        ordinals = table.rows.column(0).to_numpy()
        starts = np.searchsorted(ordinals, np.arange(count + 1))
        for number in range(count):
            start, end = int(starts[number]), int(starts[number + 1])
            if start < end:
                rows = table.rows.slice(start, end - start)
                first = pa.array(np.zeros(end - start, dtype=np.int32))
                alone = rows.set_column(0, rows.schema.field(0), first)
                found[number].append(replace(table, rows=alone))
    return [WriteOps(ops.operations.slice(number, 1), tuple(found[number])) for number in range(count)]
