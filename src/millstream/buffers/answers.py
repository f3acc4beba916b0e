"""What the writing halves of buffers do alike: one call made of a future, and what is said where no answer came."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime

from millstream.errors import BufferOutcomeUnknown
from millstream.model.buffers import BufferMeta
from millstream.model.ids import ShardId


def answered(future: Future[BufferMeta], *, buffer: str, shard: ShardId, deadline_s: float | None) -> BufferMeta:
    """The answer, once it is there; `BufferOutcomeUnknown` past the deadline: it is on its way."""
    try:
        return future.result(deadline_s)
    except NotInTime:
        if future.done() and (error := future.exception()) is not None:
            raise error from None
        raise no_answer(buffer, shard, f"within {deadline_s:g} s") from None


def no_answer(buffer: str, shard: ShardId, why: str) -> BufferOutcomeUnknown:
    """An operation was sent, and nobody said what became of it."""
    return BufferOutcomeUnknown(
        f"write buffer {buffer} didn't say {why} whether shard {shard} has the operation",
        buffer=buffer,
        shard=int(shard),
    )
