"""A write buffer in memory, for tests: many streams, concurrent readers and writers, retention, and failures on demand.

A `MemoryServer` holds the contents of buffers by name; each `MemoryBuffer` is a client of it. As
elsewhere, bytes are stored.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final
from uuid import uuid4

from millstream.buffers.sending import answered, no_answer
from millstream.closing import Closing
from millstream.codec.buffer_reading import PlacedReader, replaced, unknown_shard
from millstream.codec.buffered_op import encode_op
from millstream.errors import BufferMissing, BufferUnavailable, IngestError, MillstreamError, WriterClosed
from millstream.model.buffered_operations import BufferedOp, BufferMeta, BufferOffset
from millstream.model.ids import ShardId
from millstream.model.operations import WriteOps

_ITEM_BYTES_MAX: Final = 64 << 20


@dataclass(slots=True)
class _Shard:
    first: int = 0
    items: deque[tuple[bytes, int]] = field(default_factory=deque)
    """Bytes, and when they were stored."""

    @property
    def end(self) -> int:
        return self.first + len(self.items)


@dataclass(slots=True)
class _Stream:
    identity: str
    shards: list[_Shard]


@dataclass(frozen=True, slots=True)
class BufferFailure:
    """Failure of an append, in place of storing and answering."""

    error: MillstreamError
    """Error that the caller gets."""
    stored: bool = False
    """Whether the operation is stored nevertheless, as when the answer is lost."""


class MemoryServer:
    """Contents of buffers, by name. Any number of threads may use it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._streams: dict[str, _Stream] = {}
        self._failures: deque[BufferFailure] = deque()
        self._away = False

    def create(self, name: str, shards: int) -> None:
        """Make the stream if it doesn't exist; any number of callers may do so at a time."""
        with self._changed:
            if name not in self._streams:
                self._streams[name] = _Stream(uuid4().hex, [_Shard() for _ in range(shards)])

    def drop(self, name: str) -> None:
        """Drop a stream, with everything in it."""
        with self._changed:
            del self._streams[name]
            self._changed.notify_all()

    def fail_next(self, *failures: BufferFailure) -> None:
        """Make the next appends, by any caller, fail in this way, one after the other."""
        with self._changed:
            self._failures.extend(failures)

    def go_away(self) -> None:
        """Stop answering, until `come_back`."""
        self._away = True

    def come_back(self) -> None:
        """Answer again."""
        self._away = False

    def drop_before(self, name: str, shard: ShardId, offset: BufferOffset) -> None:
        """Drop what lies before an offset, as retention does."""
        with self._changed:
            found = self._streams[name].shards[shard]
            while found.items and found.first < offset:
                found.items.popleft()
                found.first += 1

    def cut_from(self, name: str, shard: ShardId, offset: BufferOffset) -> None:
        """Drop what lies at an offset and after it, as a restored backup does."""
        with self._changed:
            found = self._streams[name].shards[shard]
            while found.items and found.end > offset:
                found.items.pop()

    def put(self, name: str, shard: ShardId, data: bytes) -> BufferOffset:
        """Store bytes, whatever they are."""
        with self._changed:
            found = self._streams[name].shards[shard]
            found.items.append((data, time.time_ns() // 1000))
            self._changed.notify_all()
            return BufferOffset(found.end - 1)

    def store(self, name: str, shard: ShardId, data: bytes) -> BufferMeta:
        """Store an operation, or fail as requested."""
        with self._changed:
            found = self._shard(name, shard)
            failure = self._failures.popleft() if self._failures else None
            if failure is not None and not failure.stored:
                raise failure.error
            stamp = time.time_ns() // 1000
            found.items.append((data, stamp))
            self._changed.notify_all()
            if failure is not None:
                raise failure.error
            return BufferMeta(shard, BufferOffset(found.end - 1), stamp, len(data))

    def extent(self, name: str, shard: ShardId) -> tuple[BufferOffset, BufferOffset]:
        """Return the first offset that is there, and the end."""
        with self._changed:
            found = self._shard(name, shard)
            return BufferOffset(found.first), BufferOffset(found.end)

    def fetch(self, name: str, shard: ShardId, place: BufferOffset, wait_s: float) -> tuple[bytes, int] | None:
        """Return the operation at a position; None if there is none within `wait_s`.

        Not for positions that are gone.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._away or place != self._shard(name, shard).end, wait_s)
            found = self._shard(name, shard)
            if found.first <= place < found.end:
                return found.items[place - found.first]
            return None

    def describe(self, name: str) -> tuple[str, int]:
        """Return the stream's identity and the number of its shards."""
        with self._changed:
            found = self._stream(name)
            return found.identity, len(found.shards)

    def _stream(self, name: str) -> _Stream:
        if self._away:
            raise BufferUnavailable(f"write buffer {name} doesn't answer", buffer=name)
        if name not in self._streams:
            raise BufferMissing(f"write buffer {name} isn't there", buffer=name)
        return self._streams[name]

    def _shard(self, name: str, shard: ShardId) -> _Shard:
        shards = self._stream(name).shards
        if not 0 <= shard < len(shards):
            raise unknown_shard(name, shard, tuple(map(ShardId, range(len(shards)))))
        return shards[shard]


class MemoryBuffer(Closing):
    """A client of a `MemoryServer`: `ports.WriteBuffer`.

    Args:
        server: the server.
        name: the buffer's.
        create_shards: number of shards to make it with if it doesn't exist; None: don't make it.
        op_bytes_max: size above which an operation is refused.

    Raises:
        BufferMissing: it doesn't exist, and isn't to be made.
        BufferUnavailable: the server is away.
    """

    def __init__(
        self,
        server: MemoryServer,
        name: str,
        *,
        create_shards: int | None = None,
        op_bytes_max: int = _ITEM_BYTES_MAX,
    ) -> None:
        self._server = server
        self._name = name
        self._op_bytes_max = op_bytes_max
        self._closed = False
        if create_shards is not None:
            server.create(name, create_shards)
        server.describe(name)

    def shards(self) -> tuple[ShardId, ...]:
        return tuple(map(ShardId, range(self._server.describe(self._name)[1])))

    def identity(self) -> str:
        return self._server.describe(self._name)[0]

    def submit(self, shard: ShardId, op: WriteOps, *, deadline_s: float | None = None) -> Future[BufferMeta]:  # noqa: ARG002 - it never waits
        if self._closed:
            raise WriterClosed(f"write buffer {self._name} was closed; nothing was stored")
        data = encode_op(op)
        if len(data) > self._op_bytes_max:
            raise IngestError(
                f"an operation of {len(data)} bytes exceeds the limit of write buffer {self._name}, {self._op_bytes_max}",
                code="rows_too_large",
                size=len(data),
                size_max=self._op_bytes_max,
            )
        future: Future[BufferMeta] = Future()
        try:
            future.set_result(self._server.store(self._name, shard, data))
        except MillstreamError as error:
            future.set_exception(error)
        return future

    def append(self, shard: ShardId, op: WriteOps, *, deadline_s: float | None = None) -> BufferMeta:
        return answered(self.submit(shard, op), buffer=self._name, shard=shard, deadline_s=deadline_s)

    def flush(self, *, deadline_s: float | None = None) -> None:
        """See `ports.BufferWriting.flush`: nothing is ever in flight."""

    def reader(self, shard: ShardId) -> MemoryReader:
        return MemoryReader(self._server, self._name, shard)

    def close(self) -> None:
        """Take no more."""
        self._closed = True


class MemoryReader(PlacedReader):
    """Reader of one shard."""

    def __init__(self, server: MemoryServer, name: str, shard: ShardId) -> None:
        super().__init__(name, shard)
        self._server = server
        self._identity = server.describe(name)[0]
        self.seek_earliest()

    def next_op(self, wait_s: float) -> BufferedOp | None:
        found = self._server.fetch(self._buffer, self._shard, self._place, wait_s)
        identity = self._server.describe(self._buffer)[0]
        if identity != self._identity:
            raise replaced(self._buffer, self._identity, identity)
        if found is None:
            self.check_place(*self.extent())
            return None
        data, stored_at_us = found
        return self.op_of(self._place, data, stored_at_us)

    def extent(self) -> tuple[BufferOffset, BufferOffset]:
        return self._server.extent(self._buffer, self._shard)


def lost_answer(buffer: str, shard: ShardId) -> BufferFailure:
    """Return a failure in which the operation is stored, and its caller gets no answer."""
    return BufferFailure(no_answer(buffer, shard, "at all"), stored=True)
