"""Common parts of the readers of all write buffers: the position, decoding operations, and reporting gone offsets once.

`PlacedReader` is a `ports.ShardReader` without the access to the items.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from millstream.codec.buffered_op import decode_op
from millstream.errors import (
    BufferedOpUndecodable,
    BufferOffsetGone,
    CodecError,
    MillstreamError,
    UnsupportedFormat,
    WriteBufferError,
)
from millstream.model.buffered_operations import BUFFER_START, BufferedOp, BufferMeta, BufferOffset, ReadPause
from millstream.model.ids import ShardId


class PlacedReader(ABC):
    """A reader of one shard of a write buffer, with its own position: see `ports.ShardReader`.

    A subclass implements `next_op` and `extent`, and calls `seek_earliest` when it is
    constructed.
    """

    def __init__(self, buffer: str, shard: ShardId) -> None:
        self._buffer = buffer
        self._shard = shard
        self._place = BUFFER_START
        self._ended = False
        """Whether it has raised `BufferOffsetGone`."""

    @abstractmethod
    def next_op(self, wait_s: float) -> BufferedOp | None:
        """Return the operation at the position, or the first behind it if offsets have gaps; None if none came in time.

        A subclass makes it by `op_of`. Raises as `op_of` and `check_place`, or the buffer's own errors.
        """

    @abstractmethod
    def extent(self) -> tuple[BufferOffset, BufferOffset]:
        """Return the smallest offset available and the end, of one moment. Without an item both are the end."""

    def op_of(self, offset: BufferOffset, data: bytes, stored_at_us: int) -> BufferedOp:
        """Return what the buffer has stored at an offset as an operation, and move behind it.

        Args:
            stored_at_us: when they were stored, in microseconds since 1970 (UTC).

        Raises:
            BufferedOpUndecodable: the bytes are no operation; the position has moved all the same.
        """
        self._place = BufferOffset(offset + 1)  # before decoding, so that a faulty item isn't read twice
        try:
            op = decode_op(data, self._shard)
        except (CodecError, UnsupportedFormat) as error:
            raise undecodable(self._buffer, self._shard, offset, error) from error
        return BufferedOp(BufferMeta(self._shard, offset, stored_at_us, len(data)), op)

    def go_to(self, offset: BufferOffset) -> None:
        """Read from that offset on, and discard what was fetched."""
        self._place, self._ended = offset, False

    def check_place(self, first: BufferOffset, end: BufferOffset) -> None:
        """Raise if the position is no longer readable: `WriteBufferError` (`buffer_truncated`), each time; `BufferOffsetGone`, once."""
        if self._place > end:
            raise went_back(self._buffer, self._shard, self._place, end)
        if self._place < first:
            self._ended = True
            raise gone(self._buffer, self._shard, self._place, first)

    # --- as `ports.ShardReader` ------------------------------------------------------------------------------------

    @property
    def shard(self) -> ShardId:
        """The shard that it reads."""
        return self._shard

    @property
    def place(self) -> BufferOffset:
        return self._place

    def read(self, *, wait_s: float = 0.0) -> BufferedOp | ReadPause:
        if self._ended:
            return ReadPause.ENDED
        op = self.next_op(wait_s)
        return ReadPause.PENDING if op is None else op

    def seek(self, offset: BufferOffset) -> None:
        end = self.end_offset()
        if offset > end:
            raise beyond_end(self._buffer, self._shard, offset, end)
        self.go_to(offset)

    def seek_earliest(self) -> None:
        self.go_to(self.extent()[0])

    def end_offset(self) -> BufferOffset:
        return self.extent()[1]

    def close(self) -> None:  # noqa: B027 - not every buffer's reader holds something
        """Release the reader's resources. The base class has none."""


def unknown_shard(buffer: str, shard: ShardId, shards: tuple[ShardId, ...]) -> WriteBufferError:
    """Return the error that the shard doesn't exist."""
    return WriteBufferError(
        f"write buffer {buffer} has no shard {shard}; it has {len(shards)}",
        code="unknown_buffer_shard",
        hint="Use one of its shards; the routing sets a table's shard.",
        buffer=buffer,
        shard=int(shard),
        shards=[int(one) for one in shards],
    )


def replaced(buffer: str, known: str, found: str) -> WriteBufferError:
    """Return the error that the buffer isn't the one read before."""
    return WriteBufferError(
        f"write buffer {buffer} was created again while it was read",
        code="buffer_replaced",
        buffer=buffer,
        known=known,
        found=found,
    )


def gone(buffer: str, shard: ShardId, place: BufferOffset, first: BufferOffset) -> BufferOffsetGone:
    """Return the error that retention overtook a reader."""
    return BufferOffsetGone(
        f"write buffer {buffer} has dropped offset {place} of shard {shard}; {first} is the first that it has",
        buffer=buffer,
        shard=int(shard),
        place=int(place),
        first=int(first),
    )


def went_back(buffer: str, shard: ShardId, place: BufferOffset, end: BufferOffset) -> WriteBufferError:
    """Return the error that the end lies before offsets already read."""
    return WriteBufferError(
        f"shard {shard} of write buffer {buffer} ends at {end}, and was read up to {place} before",
        code="buffer_truncated",
        buffer=buffer,
        shard=int(shard),
        place=int(place),
        end=int(end),
    )


def beyond_end(buffer: str, shard: ShardId, place: BufferOffset, end: BufferOffset) -> WriteBufferError:
    """Return the error that an offset lies past the end."""
    return WriteBufferError(
        f"shard {shard} of write buffer {buffer} ends at {end}, and {place} was asked for",
        code="buffer_seek_beyond_end",
        buffer=buffer,
        shard=int(shard),
        place=int(place),
        end=int(end),
    )


def undecodable(buffer: str, shard: ShardId, offset: BufferOffset, error: MillstreamError) -> BufferedOpUndecodable:
    """Return the error that the item holds no operation."""
    return BufferedOpUndecodable(
        f"offset {offset} of shard {shard} of write buffer {buffer} holds no operation: {error.message}",
        buffer=buffer,
        shard=int(shard),
        offset=int(offset),
    )
