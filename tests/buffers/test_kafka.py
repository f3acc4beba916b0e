"""The write buffer in Kafka passes what all do, on a real broker; and what is Kafka's own about it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from millstream.buffers.kafka import KafkaBuffer, KafkaOptions
from millstream.model.buffers import BufferOffset
from millstream.model.ids import ShardId
from millstream.testing.kafka import EmbeddedKafka
from millstream.testing.write_buffer import WriteBufferConformance

_numbers = itertools.count(1)


class KafkaStage:
    def __init__(self, kafka: EmbeddedKafka) -> None:
        self.kafka = kafka
        self.topic = f"orders-{next(_numbers)}"
        self.opened: list[KafkaBuffer] = []

    def open(self, *, create: bool = True, shards: int = 2) -> KafkaBuffer:
        options = KafkaOptions(self.kafka.servers, self.topic, create_shards=shards if create else None)
        self.opened.append(KafkaBuffer(options))
        return self.opened[-1]

    def put_garbage(self, shard: ShardId, data: bytes) -> None:
        producer = Producer({"bootstrap.servers": self.kafka.servers})
        producer.produce(self.topic, data, partition=int(shard))
        assert producer.flush(10) == 0

    def drop_before(self, shard: ShardId, offset: BufferOffset) -> None:
        place = TopicPartition(self.topic, int(shard), int(offset))
        admin = self.admin()
        for future in admin.delete_records([place]).values():
            future.result(10)

    def remake(self) -> None:
        admin = self.admin()
        admin.delete_topics([self.topic])[self.topic].result(10)
        self.open()

    def admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.kafka.servers})

    def close(self) -> None:
        for buffer in self.opened:
            buffer.close()


class TestKafka(WriteBufferConformance):
    @pytest.fixture
    def stage(self, kafka_server: EmbeddedKafka) -> Iterator[KafkaStage]:
        stage = KafkaStage(kafka_server)
        yield stage
        stage.close()
