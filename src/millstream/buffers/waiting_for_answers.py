"""Common code of the buffers' writing halves: a blocking call on a future, and the error for a missing answer."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime

from millstream.errors import BufferOutcomeUnknown
from millstream.model.buffered_operations import BufferMeta
from millstream.model.ids import ShardId


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
