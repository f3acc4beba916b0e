"""Reads one shard of a buffer in Redis, from a place of its own."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from millstream.buffers.answers import beyond_end, gone, op_of, went_back
from millstream.buffers.redis_server import Keys, translated
from millstream.errors import BufferMissing, BufferRefused, BufferReplaced
from millstream.model.buffers import BUFFER_START, BufferedOp, BufferMeta, BufferOffset, ReadPause
from millstream.model.ids import ShardId

if TYPE_CHECKING:
    from redis import Redis

_FETCH_BYTES: Final = 4 << 20
_FETCH_ITEMS_MAX: Final = 256
_BLOCK_S: Final = 1.0
"""A wait is cut into such pieces: the connection gives up sooner than a day."""


class RedisReader:
    """Reads a stream's entries: `ports.ShardReader`.

    Args:
        client: of the server; others use it too.
        name: the buffer's.
        shard: whose operations.
        keys: the buffer's.
        identity: the buffer's; one made anew under its name is said.
    """

    def __init__(self, client: Redis, name: str, shard: ShardId, keys: Keys, *, identity: str) -> None:
        self._client = client
        self._name = name
        self._shard = shard
        self._keys = keys
        self._identity = identity
        self._place = BUFFER_START
        self._ended = False
        self._fetched: deque[tuple[BufferOffset, bytes, int]] = deque()
        """From the place on, without gaps: offset, bytes, when stored."""
        self._count = 1
        """How many to fetch at a time: as many as are about `_FETCH_BYTES`."""
        self.seek_earliest()

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
        deadline = time.monotonic() + wait_s
        while not self._fetched:
            self._fetch()
            left_s = deadline - time.monotonic()
            if self._fetched:
                break
            if left_s <= 0:
                return ReadPause.PENDING
            self._wait(min(left_s, _BLOCK_S))
        offset, data, stored_at_us = self._fetched.popleft()
        self._place = BufferOffset(offset + 1)
        return op_of(data, BufferMeta(self._shard, offset, stored_at_us, len(data)), buffer=self._name)

    def seek(self, offset: BufferOffset) -> None:
        """See `ports.ShardReader.seek`."""
        end = self.end_offset()
        if offset > end:
            raise beyond_end(self._name, self._shard, offset, end)
        self._go_to(offset)

    def seek_earliest(self) -> None:
        """See `ports.ShardReader.seek_earliest`."""
        end, entries = self._ask("-", 1)
        self._go_to(_offset_of(entries[0]) if entries else end)

    def end_offset(self) -> BufferOffset:
        """See `ports.ShardReader.end_offset`."""
        return self._ask("-", 1)[0]

    def close(self) -> None:
        """Forget what was fetched."""
        self._fetched.clear()

    def _go_to(self, offset: BufferOffset) -> None:
        self._place, self._ended = offset, False
        self._fetched.clear()

    def _fetch(self) -> None:
        """Get what lies at the place and behind it; nothing where that is the end."""
        end, entries = self._ask(f"{self._place + 1}-0", self._count)
        if self._place > end:
            raise went_back(self._name, self._shard, self._place, end)
        if entries and _offset_of(entries[-1]) >= end:
            raise BufferRefused(
                f"shard {self._shard} of write buffer {self._name} has an entry that no sender has counted",
                hint="Somebody else adds to its stream: stop that, and take the entry out (XDEL).",
                buffer=self._name,
            )
        first = _offset_of(entries[0]) if entries else end
        if first > self._place:
            self._ended = True
            raise gone(self._name, self._shard, self._place, first)
        size = 0
        for entry in entries:
            offset = _offset_of(entry)
            if offset != self._place + len(self._fetched):
                break  # said when it is its turn
            data, stored_at_us = _content_of(entry)
            size += len(data)
            self._fetched.append((offset, data, stored_at_us))
        if self._fetched:
            each = max(1, size // len(self._fetched))
            self._count = max(1, min(_FETCH_ITEMS_MAX, _FETCH_BYTES // each, self._count * 8))

    def _ask(self, start: str, count: int) -> tuple[BufferOffset, list[Any]]:
        """The shard's end, and some entries from an id on: all as at one moment."""
        with translated(self._name):
            asked = self._client.pipeline(transaction=True)
            asked.hget(self._keys.facts, "identity")
            asked.get(self._keys.next(self._shard))
            asked.xrange(self._keys.stream(self._shard), min=start, count=count)
            identity, end, entries = asked.execute()
        if identity is None:
            raise BufferMissing(f"write buffer {self._name} is gone from Redis", buffer=self._name)
        if identity.decode() != self._identity:
            raise BufferReplaced(
                f"write buffer {self._name} was made anew while it was read",
                buffer=self._name,
                known=self._identity,
                found=identity.decode(),
            )
        return BufferOffset(int(end or 0)), entries

    def _wait(self, seconds: float) -> None:
        """Return when something is added behind the place, or after that many seconds."""
        with translated(self._name):
            place: Any = {self._keys.stream(self._shard): f"{self._place}-0"}
            self._client.xread(place, count=1, block=max(1, round(seconds * 1000)))


def _offset_of(entry: Any) -> BufferOffset:
    return BufferOffset(int(entry[0].split(b"-")[0]) - 1)


def _content_of(entry: Any) -> tuple[bytes, int]:
    """The bytes, and when they were stored; no bytes where it isn't an entry of ours."""
    fields = entry[1] or {}
    at = fields.get(b"at", b"0")
    return fields.get(b"op", b""), int(at) if at.isdigit() else 0
