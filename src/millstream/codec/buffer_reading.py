"""What readers of every write buffer do alike: keep their place, make operations of bytes, and say what is gone, once.

`PlacedReader` is a `ports.ShardReader` but for the way to the items.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from millstream.codec.buffered_op import decode_op
from millstream.errors import (
    BufferedOpUndecodable,
    BufferOffsetGone,
    BufferReplaced,
    BufferSeekBeyondEnd,
    BufferTruncated,
    CodecError,
    MillstreamError,
    UnknownBufferShard,
    UnsupportedFormat,
)
from millstream.model.buffers import BUFFER_START, BufferedOp, BufferMeta, BufferOffset, ReadPause
from millstream.model.ids import ShardId


class BufferItem(NamedTuple):
    """What a buffer has stored at an offset."""

    offset: BufferOffset
    data: bytes
    stored_at_us: int
    """In microseconds since 1970 (UTC)."""


class PlacedReader(ABC):
    """Reads one shard of a write buffer from a place of its own: see `ports.ShardReader`.

    What is left to a buffer: `next_item` and `extent`, and to call `seek_earliest` when it is made.

    Args:
        buffer: what the buffer is called, for errors.
        shard: whose operations.
    """

    def __init__(self, buffer: str, shard: ShardId) -> None:
        self._buffer = buffer
        self._shard = shard
        self._place = BUFFER_START
        self._ended = False
        """Whether it has said that its place is gone."""

    @abstractmethod
    def next_item(self, wait_s: float) -> BufferItem | None:
        """The item at the place, or the first behind it where offsets have gaps; None where none came in time. Raises as `check_place`, or the buffer's own."""

    @abstractmethod
    def extent(self) -> tuple[BufferOffset, BufferOffset]:
        """The smallest offset that is there, and the end: of one moment. Without an item both are the end."""

    def go_to(self, offset: BufferOffset) -> None:
        """Read from there on; what was fetched is to be forgotten."""
        self._place, self._ended = offset, False

    def check_place(self, first: BufferOffset, end: BufferOffset) -> None:
        """Raise where nothing can be read at the place any more: `BufferTruncated`, each time; `BufferOffsetGone`, once."""
        if self._place > end:
            raise went_back(self._buffer, self._shard, self._place, end)
        if self._place < first:
            self._ended = True
            raise gone(self._buffer, self._shard, self._place, first)

    # --- as `ports.ShardReader` ------------------------------------------------------------------------------------

    @property
    def shard(self) -> ShardId:
        """Whose operations it reads."""
        return self._shard

    @property
    def place(self) -> BufferOffset:
        """See `ports.ShardReader.place`."""
        return self._place

    def read(self, *, wait_s: float = 0.0) -> BufferedOp | ReadPause:
        """See `ports.ShardReader.read`."""
        if self._ended:
            return ReadPause.ENDED
        item = self.next_item(wait_s)
        if item is None:
            return ReadPause.PENDING
        self._place = BufferOffset(item.offset + 1)  # whatever becomes of it: no item is met twice
        meta = BufferMeta(self._shard, item.offset, item.stored_at_us, len(item.data))
        try:
            return BufferedOp(meta, decode_op(item.data, self._shard))
        except (CodecError, UnsupportedFormat) as error:
            raise undecodable(self._buffer, self._shard, item.offset, error) from error

    def seek(self, offset: BufferOffset) -> None:
        """See `ports.ShardReader.seek`."""
        end = self.end_offset()
        if offset > end:
            raise beyond_end(self._buffer, self._shard, offset, end)
        self.go_to(offset)

    def seek_earliest(self) -> None:
        """See `ports.ShardReader.seek_earliest`."""
        self.go_to(self.extent()[0])

    def end_offset(self) -> BufferOffset:
        """See `ports.ShardReader.end_offset`."""
        return self.extent()[1]

    def close(self) -> None:  # noqa: B027 - not every buffer's reader holds something
        """Give up what it holds: nothing, where nothing else is said."""


def unknown_shard(buffer: str, shard: ShardId, shards: tuple[ShardId, ...]) -> UnknownBufferShard:
    """There is no such shard."""
    return UnknownBufferShard(
        f"write buffer {buffer} has no shard {shard}; it has {len(shards)}",
        hint="Name one of them; a table's rows lie on the shard that the routing says.",
        buffer=buffer,
        shard=int(shard),
        shards=[int(one) for one in shards],
    )


def replaced(buffer: str, known: str, found: str) -> BufferReplaced:
    """It isn't the one that was read before."""
    return BufferReplaced(
        f"write buffer {buffer} was made anew while it was read", buffer=buffer, known=known, found=found
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


def went_back(buffer: str, shard: ShardId, place: BufferOffset, end: BufferOffset) -> BufferTruncated:
    """The end lies before what was read already."""
    return BufferTruncated(
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


def undecodable(buffer: str, shard: ShardId, offset: BufferOffset, error: MillstreamError) -> BufferedOpUndecodable:
    """What lies there holds no operation."""
    return BufferedOpUndecodable(
        f"offset {offset} of shard {shard} of write buffer {buffer} holds no operation: {error.message}",
        buffer=buffer,
        shard=int(shard),
        offset=int(offset),
    )
