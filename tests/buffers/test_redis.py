"""The write buffer in Redis passes the common suite on a real server; and tests of Redis's own behaviour."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from tests.buffers.kills import survive

from millstream.buffers.redis import RedisBuffer, RedisOptions
from millstream.errors import BufferOutcomeUnknown, BufferRefused, BufferUnavailable, WriteBufferError
from millstream.model.buffered_operations import BufferOffset
from millstream.model.ids import ShardId
from millstream.testing.errors import coded
from millstream.testing.redis import DURABLE, EmbeddedRedis
from millstream.testing.write_buffer import NORTH, WriteBufferConformance, application_op, next_op, texts_of

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


def test_what_was_acknowledged_outlives_kills_and_is_there_once(own_redis: EmbeddedRedis) -> None:
    options = RedisOptions(own_redis.url, "orders", create_shards=2, timeout_s=60)
    with RedisBuffer(options) as buffer:
        survive(buffer, own_redis.kill, own_redis.start, rounds=4)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (("--appendonly", "no"), "appendonly"),
        (("--appendonly", "yes", "--appendfsync", "everysec"), "appendfsync"),
        ((*DURABLE, "--no-appendfsync-on-rewrite", "yes"), "no-appendfsync-on-rewrite"),
        ((*DURABLE, "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"), "maxmemory-policy"),
        ((*DURABLE, "--rename-command", "CONFIG", ""), "can't be read"),
    ],
)
def test_a_server_that_may_lose_what_it_acknowledged_is_refused_by_name(
    tmp_path: Path, settings: tuple[str, ...], named: str
) -> None:
    with EmbeddedRedis(tmp_path, settings) as server:
        with pytest.raises(WriteBufferError, check=coded("buffer_not_durable")) as caught:
            RedisBuffer(RedisOptions(server.url, "orders", create_shards=1))
        assert any(named in wrong for wrong in caught.value.details["settings"])
        with RedisBuffer(RedisOptions(server.url, "orders", create_shards=1, accept_loss=True)) as buffer:
            buffer.append(NORTH, application_op())


def test_a_server_that_is_silent_leaves_the_outcome_unknown_and_one_that_is_gone_does_not(
    own_redis: EmbeddedRedis,
) -> None:
    """An operation that was sent may be stored: the buffer itself sends it again, and it is stored once."""
    with RedisBuffer(RedisOptions(own_redis.url, "orders", create_shards=1, timeout_s=3.0)) as buffer:
        buffer.append(NORTH, application_op(texts=["0"]))
        own_redis.pause()
        with pytest.raises(BufferOutcomeUnknown):
            buffer.append(NORTH, application_op(texts=["1"]))
        own_redis.resume()
        buffer.append(NORTH, application_op(texts=["2"]))
        own_redis.kill()
        wait_until_refused(buffer)
        own_redis.start()
        buffer.append(NORTH, application_op(texts=["3"]))
        reader = buffer.reader(NORTH)
        texts = [texts_of(next_op(reader))[0] for _ in range(int(reader.end_offset()))]
        assert texts in (["0", "2", "3"], ["0", "1", "2", "3"])


def wait_until_refused(buffer: RedisBuffer) -> None:
    """Connections that are still open may take an operation and never answer; after that there are none."""
    deadline = time.monotonic() + 120
    while True:
        assert time.monotonic() < deadline
        try:
            buffer.append(NORTH, application_op(texts=["lost"]))
        except BufferUnavailable:
            return
        except BufferOutcomeUnknown:
            continue


def test_an_entry_that_nobody_counted_is_said_and_not_taken_for_a_gap(redis_server: EmbeddedRedis) -> None:
    stage = RedisStage(redis_server)
    with stage.open() as buffer:
        buffer.append(NORTH, application_op(texts=["ours"]))
        stage.client.xadd(stage.key(0), {"op": b"theirs"})
        reader = buffer.reader(NORTH)
        assert texts_of(next_op(reader)) == ["ours"]
        with pytest.raises(BufferRefused):
            reader.read()
        with pytest.raises(BufferRefused):
            buffer.append(NORTH, application_op(texts=["more"]))
    stage.close()


def test_senders_forget_themselves_when_they_close(redis_server: EmbeddedRedis) -> None:
    stage = RedisStage(redis_server)
    buffer = stage.open()
    buffer.append(NORTH, application_op())
    assert stage.client.hlen(stage.key(0, "senders")) == 1
    buffer.close()
    assert stage.client.hlen(stage.key(0, "senders")) == 0
    stage.close()
