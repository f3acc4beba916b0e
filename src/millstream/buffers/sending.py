"""Common code of the buffers' writing halves: an operation's bytes, a blocking call on a future, and errors."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from typing import TYPE_CHECKING, Final

from millstream.codec.buffer_reading import unknown_shard
from millstream.codec.buffered_op import encode_op
from millstream.errors import BufferOutcomeUnknown, IngestError
from millstream.model.buffered_operations import BufferMeta
from millstream.model.ids import ShardId

if TYPE_CHECKING:
    from collections.abc import Collection

    from millstream.model.operations import WriteOps

OP_BYTES_MAX: Final = 64 << 20
"""Size in bytes above which an operation is refused."""
QUEUE_BYTES_MAX: Final = 64 << 20
"""Bytes of operations in flight, at most; beyond it their senders wait."""


def encoded(op: WriteOps, shard: ShardId, *, buffer: str, shards: Collection[ShardId]) -> bytes:
    """Return an operation as it is stored; raise if the buffer has no such shard, or the operation is too large."""
    data = encode_op(op)
    if shard not in shards:
        raise unknown_shard(buffer, shard, tuple(shards))
    if len(data) > OP_BYTES_MAX:
        raise too_large(buffer, len(data), OP_BYTES_MAX)
    return data


def too_large(buffer: str, size: int, size_max: int | None) -> IngestError:
    """Return the error for an operation that is too large; without `size_max`, for a topic of Kafka's."""
    bound = "" if size_max is None else f", {size_max}"
    of_topic = ", or raise the topic's max.message.bytes" if size_max is None else ""
    return IngestError(
        f"an operation of {size} bytes exceeds the limit of write buffer {buffer}{bound}",
        code="rows_too_large",
        hint=f"Send fewer rows at a time{of_topic}.",
        size=size,
        size_max=size_max,
    )


def answered(future: Future[BufferMeta], *, buffer: str, shard: ShardId, deadline_s: float | None) -> BufferMeta:
    """Wait for the answer and return it.

    Raise `BufferOutcomeUnknown` past the deadline: the operation is still in flight.
    """
    try:
        return future.result(deadline_s)
    except NotInTime:
        if future.done() and (error := future.exception()) is not None:
            raise error from None
        raise no_answer(buffer, shard, f"within {deadline_s:g} s") from None


def no_answer(buffer: str, shard: ShardId, why: str) -> BufferOutcomeUnknown:
    """Return the error for an operation that was sent, and whose outcome is unknown."""
    return BufferOutcomeUnknown(
        f"write buffer {buffer} didn't confirm {why} that shard {shard} has stored the operation",
        buffer=buffer,
        shard=int(shard),
    )
