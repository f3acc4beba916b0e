"""What the halves of every write buffer do alike: one call made of a future, and errors that name the buffer."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime

from millstream.codec.buffered_op import decode_op
from millstream.errors import (
    BufferedOpUndecodable,
    BufferOffsetGone,
    BufferOutcomeUnknown,
    BufferSeekBeyondEnd,
    BufferWentBack,
    CodecError,
    UnknownBufferShard,
    UnsupportedFormat,
)
from millstream.model.buffers import BufferedOp, BufferMeta, BufferOffset
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


def unknown_shard(buffer: str, shard: ShardId, shards: tuple[ShardId, ...]) -> UnknownBufferShard:
    """There is no such shard."""
    return UnknownBufferShard(
        f"write buffer {buffer} has no shard {shard}; it has {len(shards)}",
        hint="Name one of them; a table's rows lie on the shard that the routing says.",
        buffer=buffer,
        shard=int(shard),
        shards=[int(one) for one in shards],
    )


def gone(buffer: str, shard: ShardId, place: BufferOffset, first: BufferOffset) -> BufferOffsetGone:
    """Retention was faster than a reader."""
    return BufferOffsetGone(
        f"write buffer {buffer} has dropped offset {place} of shard {shard}; {first} is the first that it has",
        buffer=buffer,
        shard=int(shard),
        place=int(place),
        first=int(first),
    )


def went_back(buffer: str, shard: ShardId, place: BufferOffset, end: BufferOffset) -> BufferWentBack:
    """The end lies before what was read already."""
    return BufferWentBack(
        f"shard {shard} of write buffer {buffer} ends at {end}, and was read up to {place} before",
        buffer=buffer,
        shard=int(shard),
        place=int(place),
        end=int(end),
    )


def beyond_end(buffer: str, shard: ShardId, place: BufferOffset, end: BufferOffset) -> BufferSeekBeyondEnd:
    """Nothing can be read from there as yet."""
    return BufferSeekBeyondEnd(
        f"shard {shard} of write buffer {buffer} ends at {end}, and {place} was asked for",
        buffer=buffer,
        shard=int(shard),
        place=int(place),
        end=int(end),
    )


def op_of(data: bytes, meta: BufferMeta, *, buffer: str) -> BufferedOp:
    """What a reader returns of an item's bytes; `BufferedOpUndecodable` where they hold no operation."""
    try:
        return BufferedOp(meta, decode_op(data, meta.shard))
    except (CodecError, UnsupportedFormat) as error:
        raise BufferedOpUndecodable(
            f"offset {meta.offset} of shard {meta.shard} of write buffer {buffer} holds no operation: {error.message}",
            buffer=buffer,
            shard=int(meta.shard),
            offset=int(meta.offset),
        ) from error
