"""A write buffer in Kafka: one topic, a partition per shard, a message per operation.

Writing uses an idempotent producer with `acks=all`; several operations travel in one request, each
as a message of its own. The broker's answer is the result; without an answer in time, the outcome
is unknown, and the caller gets that error. Each reader has its own consumer, which is *assigned*
its partition, so that no group rebalances it. It reads what is committed, and never skips what is
gone (`auto.offset.reset=error`).

`acks=all` means as many brokers as `min.insync.replicas` sets. With one, a message is as durable as
that broker's disk, which Kafka doesn't wait for.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from millstream.buffers.kafka_errors import SILENT, error_of_kafka, moving, nothing_stored, unknown_here, unreachable
from millstream.buffers.kafka_server import client_settings, describe_topic, make_topic
from millstream.buffers.sending import OP_BYTES_MAX, QUEUE_BYTES_MAX, answered, encoded, no_answer, too_large
from millstream.closing import Closing
from millstream.codec.buffer_reading import PlacedReader, unknown_shard
from millstream.errors import (
    BufferUnavailable,
    MillstreamError,
    Overloaded,
    WriteBufferError,
    WriterClosed,
)
from millstream.model.buffered_operations import BufferedOp, BufferMeta, BufferOffset
from millstream.model.ids import ShardId
from millstream.model.operations import WriteOps
from millstream.workers import Worker

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.admin._topic import TopicDescription

ENVELOPE_BYTES: Final = 1 << 16
"""Bytes that Kafka adds to a message, and a reserve."""
_POLL_S: Final = 0.1
_ROOM_AGAIN_S: Final = 0.005
_CREATED_WITHIN_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class KafkaOptions:
    """Options of the connection to Kafka."""

    servers: str
    """`host:port`, several separated by commas."""
    topic: str
    create_shards: int | None = None
    """Number of partitions to make the topic with if it doesn't exist; None: don't make it."""
    replication: int = -1
    """Replication factor of a topic that is made; -1: the brokers' own default."""
    topic_options: Mapping[str, str] = field(default_factory=dict)
    """Options of a topic that is made: `retention.ms`, `min.insync.replicas` …"""
    client_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Options of every client, as librdkafka names them: `security.protocol`, `sasl.password` …"""
    timeout_s: float = 30.0
    """Seconds, retries included, after which an unanswered operation's outcome counts as unknown;
    also the timeout of other requests.
    """
    queue_bytes_max: int = QUEUE_BYTES_MAX


class KafkaBuffer(Closing):
    """A client of a topic: `ports.WriteBuffer`.

    Raises:
        BufferMissing: there is no such topic, and it isn't to be made.
        BufferUnavailable, BufferRefused: the brokers can't be reached, or refuse.
        UsageError (`missing_extra`): confluent-kafka isn't installed.
    """

    def __init__(self, options: KafkaOptions) -> None:
        self._options = options
        self._admin = _admin_of(options)
        self._closed = False
        self._lock = threading.Lock()
        """Held while the fields below change."""
        self._sender: _Sender | None = None
        self._readers: list[KafkaReader] = []
        if options.create_shards is not None:
            self._create(options.create_shards)
        self._shards = self.shards()

    def shards(self) -> tuple[ShardId, ...]:
        self._shards = tuple(ShardId(partition.id) for partition in self._describe().partitions)
        return self._shards

    def identity(self) -> str:
        """Return the topic's own id: a topic made again has another."""
        return str(self._describe().topic_id)

    def submit(self, shard: ShardId, op: WriteOps, *, deadline_s: float | None = None) -> Future[BufferMeta]:
        data = encoded(op, shard, buffer=self._options.topic, shards=self._shards)
        key = next((table.partition for table in op.tables if table.partition is not None), None)
        return self._sending().submit(shard, data, key, deadline_s)

    def append(self, shard: ShardId, op: WriteOps, *, deadline_s: float | None = None) -> BufferMeta:
        future = self.submit(shard, op, deadline_s=deadline_s)
        return answered(future, buffer=self._options.topic, shard=shard, deadline_s=deadline_s)

    def flush(self, *, deadline_s: float | None = None) -> None:
        sender = self._sender
        if sender is not None and not sender.flush(self._options.timeout_s if deadline_s is None else deadline_s):
            raise no_answer(self._options.topic, self._shards[0], "in time")

    def reader(self, shard: ShardId) -> KafkaReader:
        options = self._options
        if shard not in self.shards():
            raise unknown_shard(options.topic, shard, self._shards)
        settings = {"bootstrap.servers": options.servers, **options.client_options}
        reader = KafkaReader(options.topic, shard, settings, timeout_s=options.timeout_s)
        with self._lock:
            self._readers = [one for one in self._readers if not one.is_closed]
            self._readers.append(reader)
        return reader

    def close(self) -> None:
        """Wait for operations in flight, up to `timeout_s`, and take no more."""
        with self._lock:
            self._closed = True
            sender, self._sender = self._sender, None
            readers, self._readers = self._readers, []
        if sender is not None:
            sender.close(self._options.timeout_s)
        for reader in readers:
            reader.close()

    def _sending(self) -> _Sender:
        """Return the producer; a new one if a fatal error has ended it."""
        with self._lock:
            if self._closed:
                raise WriterClosed(f"write buffer {self._options.topic} was closed; nothing was stored")
            if self._sender is not None and self._sender.has_failed:
                self._sender.close(0.0)
                self._sender = None
            if self._sender is None:
                self._sender = _Sender(self._options)
            return self._sender

    # --- the topic -------------------------------------------------------------------------------------------------

    def _describe(self) -> TopicDescription:
        return describe_topic(self._admin, self._options.topic, timeout_s=self._options.timeout_s)

    def _create(self, shards: int) -> None:
        options = self._options
        own = {
            "cleanup.policy": "delete",
            "max.message.bytes": str(OP_BYTES_MAX + ENVELOPE_BYTES),
            "unclean.leader.election.enable": "false",
        }
        make_topic(
            self._admin,
            options.topic,
            partitions=shards,
            replication=options.replication,
            options={**own, **options.topic_options},
            timeout_s=max(options.timeout_s, _CREATED_WITHIN_S),
        )


class _Sender:
    """A producer, and the thread that takes its answers."""

    def __init__(self, options: KafkaOptions) -> None:
        from confluent_kafka import Producer

        self._options = options
        self._fatal: MillstreamError | None = None
        self._ended = threading.Event()
        settings: dict[str, Any] = {
            "client.id": "millstream",
            "linger.ms": 1,
            "message.timeout.ms": max(1, round(options.timeout_s * 1000)),
            "message.max.bytes": OP_BYTES_MAX + ENVELOPE_BYTES,
            "queue.buffering.max.kbytes": max(1, options.queue_bytes_max >> 10),
            "queue.buffering.max.messages": 10_000_000,  # bounded by bytes
            "allow.auto.create.topics": False,
            **_settings_of(options),
            # Users can't change these: the buffer's promises rest on them.
            "enable.idempotence": True,
            "acks": "all",
            # With several requests on their way, a broker that has just made a topic may refuse the first one and take
            # the second. It then answers the repeated first one as a duplicate, and its operations are lost.
            "max.in.flight.requests.per.connection": 1,
            "error_cb": self._on_error,
        }
        self._producer: Producer = Producer(settings)
        self._worker = Worker(f"kafka-{options.topic}", self._take_answers).start()

    @property
    def has_failed(self) -> bool:
        """Whether it takes no more, because a broker's answer prevents it from storing once and in order."""
        return self._fatal is not None

    def submit(self, shard: ShardId, data: bytes, key: str | None, deadline_s: float | None) -> Future[BufferMeta]:
        from confluent_kafka import KafkaException

        topic = self._options.topic
        future: Future[BufferMeta] = Future()
        future.set_running_or_notify_cancel()
        give_up_s = time.monotonic() + (self._options.timeout_s if deadline_s is None else deadline_s)
        while True:
            try:
                self._producer.produce(
                    topic,
                    data,
                    key=None if key is None else key.encode(),
                    partition=int(shard),
                    on_delivery=self._answer_of(future, shard, len(data)),
                )
                return future
            except BufferError:
                if time.monotonic() >= give_up_s:
                    raise Overloaded(
                        f"{self._options.queue_bytes_max} bytes are on their way to {topic}; nothing of this was sent",
                        buffer=topic,
                    ) from None
                time.sleep(_ROOM_AGAIN_S)
            except KafkaException as error:
                raise self._translated(error.args[0], shard, len(data), sent=False) from error

    def flush(self, within_s: float) -> bool:
        """Wait for all answers; return whether they came."""
        return self._producer.flush(within_s) == 0

    def close(self, patience_s: float) -> None:
        """Wait for answers; operations without one then get an unknown outcome."""
        self._producer.flush(patience_s)
        self._producer.purge(in_queue=True, in_flight=True, blocking=False)
        self._producer.flush(1.0)
        self._ended.set()
        self._worker.join()

    def _take_answers(self) -> None:
        while not self._ended.is_set():
            self._producer.poll(_POLL_S)

    def _on_error(self, error: KafkaError) -> None:
        if error.fatal():
            self._fatal = error_of_kafka(error, self._options.topic)

    def _answer_of(
        self, future: Future[BufferMeta], shard: ShardId, size: int
    ) -> Callable[[KafkaError | None, Message], None]:
        def on_delivery(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                future.set_exception(self._translated(error, shard, size, sent=True))
                return
            offset = message.offset()
            assert offset is not None
            future.set_result(BufferMeta(shard, BufferOffset(offset), message.timestamp()[1] * 1000, size))

        return on_delivery

    def _translated(self, error: KafkaError, shard: ShardId, size: int, *, sent: bool) -> MillstreamError:
        from confluent_kafka import KafkaError as Codes

        if error.code() in {Codes.MSG_SIZE_TOO_LARGE, Codes.RECORD_LIST_TOO_LARGE}:
            return too_large(self._options.topic, size, None)
        if sent and error.code() not in nothing_stored():
            return no_answer(self._options.topic, shard, f"({error.str()})")
        return error_of_kafka(error, self._options.topic)


def _settings_of(options: KafkaOptions) -> dict[str, Any]:
    return client_settings(options.servers, options.client_options, options.topic, what="write buffer")


def _admin_of(options: KafkaOptions) -> AdminClient:
    settings = _settings_of(options)
    from confluent_kafka.admin import AdminClient

    return AdminClient(settings)


_FETCHED_KBYTES: Final = 16 << 10
"""Kilobytes of messages that wait in the client, at most; one message may exceed it."""
_ASK_AGAIN_S: Final = 0.05
_ASK_MIN_S: Final = 0.5


class KafkaReader(PlacedReader):
    """A consumer that is assigned one partition.

    Args:
        settings: of the client, as librdkafka names them.
    """

    def __init__(self, topic: str, shard: ShardId, settings: Mapping[str, Any], *, timeout_s: float) -> None:
        from confluent_kafka import Consumer

        super().__init__(topic, shard)
        self._timeout_s = timeout_s
        self._lost: WriteBufferError | None = None
        """Reason why brokers may be out of reach; checked before "nothing came" is returned."""
        self.is_closed = False
        self._consumer: Consumer = Consumer(
            {
                "client.id": "millstream",
                "fetch.wait.max.ms": 100,
                "queued.max.messages.kbytes": _FETCHED_KBYTES,
                "check.crcs": True,
                **settings,
                # Users can't change these: the reader's promises rest on them. A group name is
                # required, but no consumer joins the group.
                "group.id": "millstream",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",
                "isolation.level": "read_committed",
                "allow.auto.create.topics": False,
                "error_cb": self._on_error,
                "logger": SILENT,
            }
        )
        try:
            self.seek_earliest()
        except BaseException:
            self.close()
            raise

    def next_op(self, wait_s: float) -> BufferedOp | None:
        message = self._consumer.poll(wait_s)
        if message is None:
            if self._lost is not None:
                self.extent()  # raises if they still are
                self._lost = None
            return None
        error = message.error()
        if error is not None:
            self._handle(error)
            return None
        offset = message.offset()
        assert offset is not None
        self._lost = None
        return self.op_of(BufferOffset(offset), bytes(message.value() or b""), message.timestamp()[1] * 1000)

    def go_to(self, offset: BufferOffset) -> None:
        self._consumer.assign([self._partition(offset)])
        super().go_to(offset)

    def close(self) -> None:
        """Disconnect from the brokers."""
        if not self.is_closed:
            self.is_closed = True
            with contextlib.suppress(RuntimeError):
                self._consumer.close()

    def _handle(self, error: KafkaError) -> None:
        """Raise an error, or read on if it passes."""
        from confluent_kafka import KafkaError as Codes

        if error.code() != Codes._AUTO_OFFSET_RESET:  # noqa: SLF001 - the client's name
            if error.retriable():
                return
            raise error_of_kafka(error, self._buffer)
        first, end = self.extent()
        if self._place < first:
            self._consumer.unassign()
        else:
            self.go_to(self._place)  # the broker had just come back, and had less; or the error comes again
        self.check_place(first, end)

    def extent(self) -> tuple[BufferOffset, BufferOffset]:
        from confluent_kafka import KafkaException

        deadline = time.monotonic() + self._timeout_s
        while True:
            left_s = max(_ASK_MIN_S, deadline - time.monotonic())
            try:
                found = self._consumer.get_watermark_offsets(self._partition(None), timeout=left_s, cached=False)
            except KafkaException as error:
                code = error.args[0].code()
                if code in unknown_here():
                    self._look_for_topic(left_s)
                elif code not in moving() or time.monotonic() > deadline:
                    raise error_of_kafka(error.args[0], self._buffer) from error
                if time.monotonic() > deadline:
                    raise BufferUnavailable(
                        f"partition {self._shard} of topic {self._buffer} has no leader", buffer=self._buffer
                    ) from error
                time.sleep(_ASK_AGAIN_S)
                continue
            if found is None:
                raise BufferUnavailable(f"Kafka didn't return the end of topic {self._buffer}", buffer=self._buffer)
            return BufferOffset(found[0]), BufferOffset(found[1])

    def _look_for_topic(self, timeout_s: float) -> None:
        """Ask the brokers whether the topic exists; raise if it doesn't, or if they can't be reached.

        A client that has no broker doesn't know.
        """
        from confluent_kafka import KafkaException

        try:
            found = self._consumer.list_topics(self._buffer, timeout=timeout_s).topics[self._buffer]
        except KafkaException as error:
            raise error_of_kafka(error.args[0], self._buffer) from error
        if found.error is not None and found.error.code() not in moving():
            raise error_of_kafka(found.error, self._buffer)

    def _partition(self, offset: BufferOffset | None) -> TopicPartition:
        from confluent_kafka import TopicPartition

        return (
            TopicPartition(self._buffer, int(self._shard))
            if offset is None
            else TopicPartition(self._buffer, int(self._shard), int(offset))
        )

    def _on_error(self, error: KafkaError) -> None:
        if error.code() in unreachable():
            self._lost = error_of_kafka(error, self._buffer)
