"""Write buffers compared with bare clients: a producer of Kafka, and pipelines of XADD, with the same bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from bench.figures import Figure, asked, compared, measures
from bench.places import folder
from millstream.buffers.kafka import KafkaBuffer, KafkaOptions
from millstream.buffers.redis import RedisBuffer, RedisOptions
from millstream.codec.buffered_op import encode_op
from millstream.model.ids import ShardId
from millstream.ports import WriteBuffer
from millstream.testing import EmbeddedKafka, EmbeddedRedis
from millstream.testing.write_buffer import application_op

OP_ROWS = 100
ROWS = 500_000
PIPELINE = 256
_SHARD = ShardId(0)
_OP = application_op(texts=[f"{number:064x}" for number in range(OP_ROWS)])


def _operations() -> int:
    return max(1, (asked.rows or ROWS) // OP_ROWS)


def _rate(send_all: Callable[[int], None]) -> float:
    started_s = time.perf_counter()
    count = _operations()
    send_all(count)
    return count * OP_ROWS / (time.perf_counter() - started_s)


def _submit(buffer: WriteBuffer, count: int) -> None:
    futures = [buffer.submit(_SHARD, _OP) for _ in range(count)]
    for future in futures:
        future.result()


@measures("buffer_kafka_vs_producer")
def kafka() -> Iterator[Figure]:
    """Measure operations of a hundred rows until each is acknowledged; the peer is an idempotent producer.

    The producer sends the same bytes, made once.
    """
    from confluent_kafka import Producer

    with (
        folder("kafka") as path,
        EmbeddedKafka(path) as server,
        KafkaBuffer(KafkaOptions(server.servers, "bench", create_shards=1)) as buffer,
    ):
        producer = Producer(
            {"bootstrap.servers": server.servers, "enable.idempotence": True, "acks": "all", "linger.ms": 1}
        )
        data = encode_op(_OP)

        def bare(count: int) -> None:
            for _ in range(count):
                while True:
                    try:
                        producer.produce("bench", data, partition=0)
                        break
                    except BufferError:
                        producer.poll(0.01)
            producer.flush()

        yield _compared("buffer_kafka_vs_producer", buffer, bare)


@measures("buffer_redis_vs_xadd")
def redis() -> Iterator[Figure]:
    """Measure the same into streams of Redis, fsynced; the peers are pipelines of bare XADDs."""
    import redis as client_of

    with (
        folder("redis") as path,
        EmbeddedRedis(path) as server,
        RedisBuffer(RedisOptions(server.url, "bench", create_shards=1)) as buffer,
    ):
        client: Any = client_of.Redis.from_url(server.url)
        data = encode_op(_OP)

        def bare(count: int) -> None:
            for start in range(0, count, PIPELINE):
                pipeline = client.pipeline(transaction=False)
                for _ in range(min(PIPELINE, count - start)):
                    pipeline.xadd("bare", {"op": data})
                pipeline.execute()

        yield _compared("buffer_redis_vs_xadd", buffer, bare)


def _compared(figure: str, buffer: WriteBuffer, bare: Callable[[int], None]) -> Figure:
    return compared(
        figure,
        lambda: _rate(lambda count: _submit(buffer, count)),
        lambda: _rate(bare),
        unit="rows/s",
        goal=">= 0.5",
        rows=_operations() * OP_ROWS,
        size_bytes=_operations() * len(encode_op(_OP)),
        note=f"operations of {OP_ROWS} rows in one shard, all submitted at once; encoding is in ours, and made once for the peer",
    )
