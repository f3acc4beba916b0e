"""A write buffer in Redis (or a server with its protocol).

A stream per shard, an entry per operation, at dense offsets.

The script that adds an entry also counts its offset, so there can be no gap; the offset is the
entry's id too. The script also stores the last number that each sender has given an operation. So
an operation that is sent again, because a connection broke before the answer, is stored once.

Acknowledged operations are as durable as the server's settings make them: `appendonly yes` with
`appendfsync always`. The settings are checked when the buffer is opened, and a server that promises
less is refused by name.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from millstream.buffers.redis_server import RedisKeys, check_durable, connect, error_of_redis, translated
from millstream.buffers.sending import QUEUE_BYTES_MAX, answered, encoded, no_answer
from millstream.closing import Closing
from millstream.codec.buffer_reading import PlacedReader, replaced, unknown_shard
from millstream.errors import (
    BufferMissing,
    BufferRefused,
    BufferUnavailable,
    MillstreamError,
    Overloaded,
    WriterClosed,
)
from millstream.model.buffered_operations import BufferedOp, BufferMeta, BufferOffset
from millstream.model.ids import ShardId
from millstream.model.operations import WriteOps
from millstream.workers import Worker

if TYPE_CHECKING:
    from redis import Redis

_BATCH_BYTES_MAX: Final = 4 << 20
"""Bytes of a batch, unless one operation is larger."""
_RETRY_S: Final = 0.05
_ITEM_BYTES: Final = 512
"""Bytes that a waiting operation holds apart from its content."""

# KEYS: the buffer's facts, the shard's stream, its next offset, its senders.
# ARGV: identity, sender, the batch's number, each operation's bytes.
_STORE: Final = """
if redis.call('HGET', KEYS[1], 'identity') ~= ARGV[1] then
  return redis.error_reply('MISSING the buffer is gone, or was made again')
end
local last = redis.call('HGET', KEYS[4], ARGV[2])
if last then
  local number, first, at = string.match(last, '(%d+) (%d+) (%d+)')
  if tonumber(number) == tonumber(ARGV[3]) then return {tonumber(first), tonumber(at)} end
  if tonumber(number) > tonumber(ARGV[3]) then return redis.error_reply('STALE a later batch of this sender is stored') end
end
local now = redis.call('TIME')
local at = now[1] * 1000000 + now[2]
local first = redis.call('INCRBY', KEYS[3], #ARGV - 3) - (#ARGV - 3)
for i = 4, #ARGV do
  redis.call('XADD', KEYS[2], string.format('%.0f-0', first + i - 3), 'op', ARGV[i], 'at', string.format('%.0f', at))
end
redis.call('HSET', KEYS[4], ARGV[2], string.format('%.0f %.0f %.0f', tonumber(ARGV[3]), first, at))
return {first, at}
"""

# KEYS: the buffer's facts. ARGV: identity, number of shards.
_CREATE: Final = """
if redis.call('HSETNX', KEYS[1], 'identity', ARGV[1]) == 1 then redis.call('HSET', KEYS[1], 'shards', ARGV[2]) end
return 1
"""


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """Options of the connection to Redis."""

    url: str = field(repr=False)
    """`redis://…`, `rediss://…` (TLS), `unix://…`."""
    name: str
    """Prefix of the keys."""
    create_shards: int | None = None
    """Number of shards to make the buffer with if it doesn't exist; None: don't make it."""
    accept_loss: bool = False
    """Whether to use a server that doesn't promise to keep what it acknowledged."""
    timeout_s: float = 30.0
    """Seconds, retries included, after which an unanswered operation's outcome counts as unknown;
    also the timeout of other requests.
    """


@dataclass(slots=True)
class _PendingWrite:
    shard: ShardId
    data: bytes
    future: Future[BufferMeta]
    give_up_s: float

    @property
    def held_bytes(self) -> int:
        return len(self.data) + _ITEM_BYTES


class RedisBuffer(Closing):
    """A client of a buffer in Redis: `ports.WriteBuffer`.

    Raises:
        BufferMissing: it doesn't exist, and isn't to be made.
        WriteBufferError (`buffer_not_durable`): the server doesn't promise to keep what it acknowledges.
        BufferUnavailable, BufferRefused: the server can't be reached, or refuses.
        UsageError (`missing_extra`): redis isn't installed.
    """

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._keys = RedisKeys(options.name)
        self._client = connect(options.url, options.name, timeout_s=options.timeout_s)
        check_durable(self._client, options.name, accept_loss=options.accept_loss)
        if options.create_shards is not None:
            self._create(options.create_shards)
        self._identity = self.identity()
        self._shards = self.shards()
        self._sender = uuid4().hex
        self._changed = threading.Condition()
        """Held while the fields below change."""
        self._waiting: deque[_PendingWrite] = deque()
        self._held_bytes = 0
        self._on_their_way = 0
        self._numbers = dict.fromkeys(self._shards, 0)
        self._closed = False
        self._worker = Worker(f"redis-{options.name}", self._send).start()

    def shards(self) -> tuple[ShardId, ...]:
        return tuple(map(ShardId, range(int(self._fact("shards")))))

    def identity(self) -> str:
        """Return the random identity that the buffer was made with."""
        return self._fact("identity")

    def submit(self, shard: ShardId, op: WriteOps, *, deadline_s: float | None = None) -> Future[BufferMeta]:
        name, options = self._options.name, self._options
        data = encoded(op, shard, buffer=name, shards=self._shards)
        future: Future[BufferMeta] = Future()
        future.set_running_or_notify_cancel()
        patience_s = options.timeout_s if deadline_s is None else deadline_s
        give_up_s = time.monotonic() + patience_s
        with self._changed:
            fits = self._changed.wait_for(
                lambda: self._closed or not self._held_bytes or self._held_bytes + len(data) <= QUEUE_BYTES_MAX,
                patience_s,
            )
            if self._closed:
                raise WriterClosed(f"write buffer {name} was closed; nothing was stored")
            if not fits:
                raise Overloaded(
                    f"{self._held_bytes} bytes are on their way to write buffer {name}; nothing of this was sent",
                    buffer=name,
                )
            waiting = _PendingWrite(shard, data, future, give_up_s)
            self._held_bytes += waiting.held_bytes
            self._on_their_way += 1
            self._waiting.append(waiting)
            self._changed.notify_all()
        return future

    def append(self, shard: ShardId, op: WriteOps, *, deadline_s: float | None = None) -> BufferMeta:
        future = self.submit(shard, op, deadline_s=deadline_s)
        return answered(future, buffer=self._options.name, shard=shard, deadline_s=deadline_s)

    def flush(self, *, deadline_s: float | None = None) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: not self._on_their_way, deadline_s):
                raise no_answer(self._options.name, self._shards[0], "in time")

    def reader(self, shard: ShardId) -> RedisReader:
        if shard not in self.shards():
            raise unknown_shard(self._options.name, shard, self._shards)
        return RedisReader(self._client, self._options.name, shard, self._keys, identity=self._identity)

    def close(self) -> None:
        """Wait for operations in flight, up to `timeout_s`, and take no more."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._worker.join()
        with contextlib.suppress(MillstreamError), translated(self._options.name):
            for shard in self._shards:
                self._client.hdel(self._keys.senders(shard), self._sender)
        self._client.close()

    def _create(self, shards: int) -> None:
        """Make the buffer if it doesn't exist: in one step, so that any number of processes may do so at a time."""
        with translated(self._options.name):
            self._client.eval(_CREATE, 1, self._keys.facts, uuid4().hex, str(shards))

    def _fact(self, name: str) -> str:
        with translated(self._options.name):
            found: Any = self._client.hget(self._keys.facts, name)
        if found is None:
            raise BufferMissing(f"Redis has no write buffer {self._options.name}", buffer=self._options.name)
        return bytes(found).decode()

    # --- sending: one thread ---------------------------------------------------------------------------------------

    def _send(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting)
                if not self._waiting:
                    return
                batch = self._take()
            self._numbers[batch[0].shard] += 1
            self._deliver(batch)
            with self._changed:
                self._on_their_way -= len(batch)
                self._held_bytes -= sum(waiting.held_bytes for waiting in batch)
                self._changed.notify_all()

    def _take(self) -> list[_PendingWrite]:
        """Take operations of one shard, in order; the others keep waiting in theirs."""
        shard, size = self._waiting[0].shard, 0
        batch: list[_PendingWrite] = []
        left: deque[_PendingWrite] = deque()
        for waiting in self._waiting:
            if waiting.shard == shard and (not batch or size + waiting.held_bytes <= _BATCH_BYTES_MAX):
                batch.append(waiting)
                size += waiting.held_bytes
            else:
                left.append(waiting)
                size = _BATCH_BYTES_MAX if waiting.shard == shard else size
        self._waiting = left
        return batch

    def _deliver(self, batch: list[_PendingWrite]) -> None:
        """Send a batch until there is an answer, or no caller waits for one any longer."""
        name, shard = self._options.name, batch[0].shard
        keys = (self._keys.facts, self._keys.stream(shard), self._keys.next(shard), self._keys.senders(shard))
        command = ("EVAL", _STORE, len(keys), *keys, self._identity, self._sender, self._numbers[shard])
        was_sent = False
        while True:
            tried: _Tried = self._try((*command, *(waiting.data for waiting in batch)))
            was_sent = was_sent or tried.sent
            if tried.answer is not None:
                first, at_us = tried.answer
                for number, waiting in enumerate(batch):
                    if not waiting.future.done():
                        meta = BufferMeta(shard, BufferOffset(first + number), at_us, len(waiting.data))
                        waiting.future.set_result(meta)
                return
            assert tried.error is not None
            now_s = time.monotonic()
            is_final = not isinstance(tried.error, BufferUnavailable)
            for waiting in batch:
                if not waiting.future.done() and (is_final or now_s >= waiting.give_up_s):
                    unknown = was_sent and not (is_final and tried.only)
                    waiting.future.set_exception(no_answer(name, shard, "in time") if unknown else tried.error)
            if all(waiting.future.done() for waiting in batch):
                return
            time.sleep(_RETRY_S)

    def _try(self, command: tuple[Any, ...]) -> _Tried:
        """Send once, on an existing connection."""
        import redis

        pool, name = self._client.connection_pool, self._options.name
        try:
            connection: Any = pool.get_connection()
        except redis.RedisError as error:
            return _Tried(error=error_of_redis(error, name))
        try:
            connection.send_command(*command)
            first, at_us = connection.read_response()
            return _Tried(answer=(int(first), int(at_us)), sent=True)
        except redis.ResponseError as error:
            # The server read it, and did nothing.
            return _Tried(error=error_of_redis(error, name), only=True)
        except redis.RedisError as error:
            connection.disconnect()
            return _Tried(error=error_of_redis(error, name), sent=True)
        finally:
            pool.release(connection)


@dataclass(frozen=True, slots=True)
class _Tried:
    """Result of sending a batch."""

    answer: tuple[int, int] | None = None
    error: MillstreamError | None = None
    sent: bool = False
    """Whether the server may have received it, and may have stored it."""
    only: bool = False
    """Whether the server has read it, and refused it."""


_FETCH_BYTES: Final = 4 << 20
_FETCH_ITEMS_MAX: Final = 256
_BLOCK_S: Final = 1.0
"""Seconds of one blocking call: a longer wait is split, because the connection times out."""


class RedisReader(PlacedReader):
    """Reader of a stream's entries.

    Args:
        identity: the buffer's; a buffer made again under its name is reported.
    """

    def __init__(self, client: Redis, name: str, shard: ShardId, keys: RedisKeys, *, identity: str) -> None:
        super().__init__(name, shard)
        self._client = client
        self._keys = keys
        self._identity = identity
        self._fetched: deque[tuple[BufferOffset, bytes, int]] = deque()
        """Fetched items from the current position on, without gaps, as `op_of` takes them."""
        self._count = 1
        """Number of entries to fetch at a time: about `_FETCH_BYTES`."""
        self.seek_earliest()

    def next_op(self, wait_s: float) -> BufferedOp | None:
        deadline = time.monotonic() + wait_s
        while not self._fetched:
            self._fetch()
            left_s = deadline - time.monotonic()
            if self._fetched:
                break
            if left_s <= 0:
                return None
            self._wait(min(left_s, _BLOCK_S))
        return self.op_of(*self._fetched.popleft())

    def extent(self) -> tuple[BufferOffset, BufferOffset]:
        end, entries = self._ask("-", 1)
        return (_offset_of(entries[0]) if entries else end), end

    def go_to(self, offset: BufferOffset) -> None:
        super().go_to(offset)
        self._fetched.clear()

    def close(self) -> None:
        """Drop what was fetched."""
        self._fetched.clear()

    def _fetch(self) -> None:
        """Fetch entries from the current position on; nothing if that is the end."""
        end, entries = self._ask(f"{self._place + 1}-0", self._count)
        if entries and self._place <= end and _offset_of(entries[-1]) >= end:
            raise BufferRefused(
                f"shard {self._shard} of write buffer {self._buffer} has an entry that no sender has counted",
                hint="Stop the other program that adds to the stream, and delete the entry (XDEL).",
                buffer=self._buffer,
            )
        self.check_place(_offset_of(entries[0]) if entries else end, end)
        size = 0
        for entry in entries:
            offset = _offset_of(entry)
            if offset != self._place + len(self._fetched):
                break  # raised when its turn comes
            data, stored_at_us = _content_of(entry)
            size += len(data)
            self._fetched.append((offset, data, stored_at_us))
        if self._fetched:
            each = max(1, size // len(self._fetched))
            self._count = max(1, min(_FETCH_ITEMS_MAX, _FETCH_BYTES // each, self._count * 8))

    def _ask(self, start: str, count: int) -> tuple[BufferOffset, list[Any]]:
        """Return the shard's end, and some entries from an id on, as of one moment."""
        with translated(self._buffer):
            asked = self._client.pipeline(transaction=True)
            asked.hget(self._keys.facts, "identity")
            asked.get(self._keys.next(self._shard))
            asked.xrange(self._keys.stream(self._shard), min=start, count=count)
            identity, end, entries = asked.execute()
        if identity is None:
            raise BufferMissing(f"write buffer {self._buffer} is gone from Redis", buffer=self._buffer)
        if identity.decode() != self._identity:
            raise replaced(self._buffer, self._identity, identity.decode())
        return BufferOffset(int(end or 0)), entries

    def _wait(self, seconds: float) -> None:
        """Return when an entry is added after the position, or after that many seconds."""
        with translated(self._buffer):
            place: Any = {self._keys.stream(self._shard): f"{self._place}-0"}
            self._client.xread(place, count=1, block=max(1, round(seconds * 1000)))


def _offset_of(entry: Any) -> BufferOffset:
    return BufferOffset(int(entry[0].split(b"-")[0]) - 1)


def _content_of(entry: Any) -> tuple[bytes, int]:
    """Return the bytes, and when they were stored; no bytes if the entry isn't ours."""
    fields = entry[1] or {}
    at = fields.get(b"at", b"0")
    return fields.get(b"op", b""), int(at) if at.isdigit() else 0
