"""The write buffer in Redis passes what all do, on a real server; and what is Redis's own about it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import redis

from millstream.buffers.redis import RedisBuffer, RedisOptions
from millstream.model.buffers import BufferOffset
from millstream.model.ids import ShardId
from millstream.testing.redis import EmbeddedRedis
from millstream.testing.write_buffer import WriteBufferConformance

_numbers = itertools.count(1)


class RedisStage:
    def __init__(self, server: EmbeddedRedis) -> None:
        self.server = server
        self.name = f"orders{next(_numbers)}"
        self.client = redis.Redis.from_url(server.url)
        self.opened: list[RedisBuffer] = []

    def open(self, *, create: bool = True, shards: int = 2) -> RedisBuffer:
        options = RedisOptions(self.server.url, self.name, create_shards=shards if create else None)
        self.opened.append(RedisBuffer(options))
        return self.opened[-1]

    def key(self, *rest: object) -> str:
        return ":".join([f"{{millstream:{self.name}}}", *map(str, rest)])

    def put_garbage(self, shard: ShardId, data: bytes) -> None:
        offset = int(self.client.incr(self.key(shard, "next")))
        self.client.xadd(self.key(shard), {"said": data}, id=f"{offset}-0")

    def drop_before(self, shard: ShardId, offset: BufferOffset) -> None:
        self.client.xtrim(self.key(shard), minid=f"{offset + 1}-0", approximate=False)

    def remake(self) -> None:
        self.client.delete(*self.client.keys(f"*{self.name}*"))
        self.open()

    def close(self) -> None:
        for buffer in self.opened:
            buffer.close()
        self.client.close()


class TestRedis(WriteBufferConformance):
    @pytest.fixture
    def stage(self, redis_server: EmbeddedRedis) -> Iterator[RedisStage]:
        stage = RedisStage(redis_server)
        yield stage
        stage.close()
