"""Contents of write buffers: operations of one shard each, in order, at offsets that only grow."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, NewType

from millstream.model.ids import ShardId
from millstream.model.operations import WriteOps

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
