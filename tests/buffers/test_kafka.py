"""The write buffer in Kafka passes the common suite on a real broker; and tests of Kafka's own behaviour."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from tests.app.homes import wait_for
from tests.buffers.kills import survive

from millstream.buffers.kafka import KafkaBuffer, KafkaOptions
from millstream.errors import BufferMissing, BufferOutcomeUnknown, BufferUnavailable, IngestError, Overloaded
from millstream.model.buffered_operations import BufferedOp, BufferOffset
from millstream.model.ids import ShardId
from millstream.ports import ShardReader
from millstream.testing.errors import coded
from millstream.testing.kafka import EmbeddedKafka
from millstream.testing.write_buffer import NORTH, WriteBufferConformance, application_op, next_op, texts_of

_numbers = itertools.count(1)


def test_options_are_shown_without_their_secrets() -> None:
    assert "s3cret" not in repr(KafkaOptions("h:9092", "orders", client_options={"sasl.password": "s3cret"}))


class KafkaStage:
    def __init__(self, kafka: EmbeddedKafka) -> None:
        self.kafka = kafka
        self.topic = f"orders-{next(_numbers)}"
        self.opened: list[KafkaBuffer] = []
        self.timeout_s = 30.0

    def open(self, *, create: bool = True, shards: int = 2) -> KafkaBuffer:
        create_shards = shards if create else None
        options = KafkaOptions(self.kafka.servers, self.topic, create_shards=create_shards, timeout_s=self.timeout_s)
        self.opened.append(KafkaBuffer(options))
        return self.opened[-1]

    def put_garbage(self, shard: ShardId, data: bytes) -> None:
        producer = Producer({"bootstrap.servers": self.kafka.servers})
        producer.produce(self.topic, data, partition=int(shard))
        assert producer.flush(60) == 0

    def drop_before(self, shard: ShardId, offset: BufferOffset) -> None:
        place = TopicPartition(self.topic, int(shard), int(offset))
        admin = self.admin()
        for future in admin.delete_records([place]).values():
            future.result(60)

    def remake(self) -> None:
        admin = self.admin()
        admin.delete_topics([self.topic])[self.topic].result(60)
        wait_for(
            lambda: self.topic not in admin.list_topics(timeout=60).topics
        )  # before that, clients may still be given the old broker
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


def repeatedly(call: Callable[[], object], within_s: float = 120.0) -> None:
    """Call it until it raises, or for the given time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        call()


def store(buffer: KafkaBuffer, text: str) -> None:
    """Append the operation until it is acknowledged: a broker that has just started may be slow.

    It may be stored several times.
    """

    def is_stored() -> bool:
        try:
            buffer.append(NORTH, application_op(texts=[text]))
        except (BufferOutcomeUnknown, BufferUnavailable):
            return False
        return True

    wait_for(is_stored)


def next_text(reader: ShardReader) -> str:
    """Return the next operation's outcome once its broker can be reached."""
    found: list[BufferedOp] = []

    def has_come() -> bool:
        with contextlib.suppress(BufferUnavailable):
            found.append(next_op(reader))
        return bool(found)

    wait_for(has_come)
    return texts_of(found[0])[0]


# Each start of a broker takes seconds of a core. Redis, whose buffer runs the same test, has four rounds.
@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.soak)])
def test_what_was_acknowledged_outlives_kills_and_is_there_once(own_kafka: EmbeddedKafka, rounds: int) -> None:
    options = KafkaOptions(own_kafka.servers, f"orders-{next(_numbers)}", create_shards=2, timeout_s=90)
    with KafkaBuffer(options) as buffer:
        survive(buffer, own_kafka.kill, own_kafka.start, rounds=rounds)


def test_a_broker_that_is_gone_is_said_to_writers_and_readers_who_go_on_when_it_is_back(
    own_kafka: EmbeddedKafka,
) -> None:
    topic = f"orders-{next(_numbers)}"
    KafkaBuffer(KafkaOptions(own_kafka.servers, topic, create_shards=1, timeout_s=60)).close()
    options = KafkaOptions(own_kafka.servers, topic, timeout_s=3, queue_bytes_max=1 << 20)
    with KafkaBuffer(options) as buffer:
        store(buffer, "before")
        reader = buffer.reader(NORTH)
        own_kafka.kill()
        with pytest.raises(BufferOutcomeUnknown):
            buffer.append(NORTH, application_op(texts=["lost"]))
        large = application_op(texts=["x" * 400_000])
        with pytest.raises(Overloaded):
            repeatedly(lambda: buffer.submit(NORTH, large, deadline_s=0.1))
        with pytest.raises(BufferUnavailable):
            buffer.shards()
        with pytest.raises(BufferUnavailable):
            repeatedly(lambda: reader.read(wait_s=0.2))
        own_kafka.start()
        buffer.flush(deadline_s=60)
        store(buffer, "behind")
        with KafkaBuffer(KafkaOptions(own_kafka.servers, topic, timeout_s=60)) as patient:
            end = int(patient.reader(NORTH).end_offset())
        found = [next_text(reader) for _ in range(end)]
        assert (found[0], found[-1]) == ("before", "behind")
        assert found.count("lost") <= 1


def test_what_the_topic_does_not_take_is_refused_and_others_go_on(kafka_server: EmbeddedKafka) -> None:
    topic = f"small-{next(_numbers)}"
    options = KafkaOptions(
        kafka_server.servers, topic, create_shards=1, topic_options={"max.message.bytes": "100000"}, timeout_s=60
    )
    with KafkaBuffer(options) as buffer:
        with pytest.raises(IngestError, check=coded("rows_too_large")):
            buffer.append(NORTH, application_op(texts=[f"{number:x}" for number in range(200_000)]))
        buffer.append(NORTH, application_op(texts=["fine"]))
        assert texts_of(next_op(buffer.reader(NORTH))) == ["fine"]


def test_a_topic_is_made_only_where_that_is_asked_for(kafka_server: EmbeddedKafka) -> None:
    """Also if the broker creates a topic when a client names it."""
    stage = KafkaStage(kafka_server)
    with pytest.raises(BufferMissing):
        stage.open(create=False)
    assert stage.topic not in stage.admin().list_topics(timeout=60).topics
    assert len(stage.open().shards()) == 2
    assert len(stage.open(shards=5).shards()) == 2
    stage.timeout_s = 4.0  # a message to a deleted topic is retried for that long
    buffer = stage.open(create=False)
    admin = stage.admin()
    admin.delete_topics([stage.topic])[stage.topic].result(60)
    with pytest.raises((BufferMissing, BufferOutcomeUnknown)):
        repeatedly(lambda: buffer.append(NORTH, application_op(), deadline_s=5))
    assert stage.topic not in stage.admin().list_topics(timeout=60).topics
    stage.close()


def test_aborted_transactions_of_others_are_not_read(kafka_server: EmbeddedKafka) -> None:
    """Readers take only committed messages; offsets then have gaps, which are no loss."""
    stage = KafkaStage(kafka_server)
    with stage.open() as buffer:
        buffer.append(NORTH, application_op(texts=["0"]))
        producer = Producer({"bootstrap.servers": kafka_server.servers, "transactional.id": stage.topic})
        producer.init_transactions(60)
        producer.begin_transaction()
        producer.produce(stage.topic, b"aborted", partition=0)
        producer.flush(60)
        producer.abort_transaction(60)
        last = buffer.append(NORTH, application_op(texts=["1"]))
        reader = buffer.reader(NORTH)
        assert [texts_of(next_op(reader)) for _ in range(2)] == [["0"], ["1"]]
        assert last.offset > 1
        assert reader.place == last.offset + 1
    stage.close()
