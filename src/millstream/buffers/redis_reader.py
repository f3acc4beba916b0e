"""Reads one shard of a buffer in Redis, from a position of its own.

It acknowledges and trims nothing: the position is in the log, next to the records, and operators trim the stream.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from millstream.buffers.redis_server import RedisKeys, translated
from millstream.codec.buffer_reading import PlacedReader, replaced
from millstream.errors import BufferMissing, BufferRefused
from millstream.model.buffered_operations import BufferedOp, BufferOffset
from millstream.model.ids import ShardId

if TYPE_CHECKING:
    from redis import Redis

_FETCH_BYTES: Final = 4 << 20
_FETCH_ITEMS_MAX: Final = 256
_BLOCK_S: Final = 1.0
"""Seconds of one blocking call: a longer wait is split, because the connection times out."""


class RedisReader(PlacedReader):
    """Reader of a stream's entries.

    Args:
        client: of the server; others use it too.
        name: the buffer's.
        keys: the buffer's.
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
