"""Reads one partition of a topic, from a place of its own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from millstream.buffers.answers import beyond_end, gone, op_of, went_back
from millstream.buffers.kafka_errors import SILENT, error_of_kafka, moving, unknown_here, unreachable
from millstream.errors import BufferUnavailable, WriteBufferError
from millstream.model.buffers import BUFFER_START, BufferedOp, BufferMeta, BufferOffset, ReadPause
from millstream.model.ids import ShardId

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, TopicPartition

_FETCHED_KBYTES: Final = 16 << 10
"""Messages that wait in the client, at most; one message may be larger."""
_ASK_AGAIN_S: Final = 0.05
_ASK_MIN_S: Final = 0.5


class KafkaReader:
    """A consumer that is assigned one partition: `ports.ShardReader`.

    Args:
        topic: whose.
        shard: the partition.
        settings: of the client, as librdkafka names them.
        timeout_s: how long a question may take.
    """

    def __init__(self, topic: str, shard: ShardId, settings: Mapping[str, Any], *, timeout_s: float) -> None:
        from confluent_kafka import Consumer

        self._topic = topic
        self._shard = shard
        self._timeout_s = timeout_s
        self._place = BUFFER_START
        self._ended = False
        self._lost: WriteBufferError | None = None
        """Why brokers may be out of reach; it is looked at before "nothing came" is said."""
        self.is_closed = False
        self._consumer: Consumer = Consumer(
            {
                "client.id": "millstream",
                "fetch.wait.max.ms": 100,
                "queued.max.messages.kbytes": _FETCHED_KBYTES,
                "check.crcs": True,
                **settings,
                # Not for users to change: they are what is promised. The group's name is asked for, and nobody joins it.
                "group.id": "millstream",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",
                "isolation.level": "read_committed",
                "allow.auto.create.topics": False,
                "error_cb": self._heard,
                "logger": SILENT,
            }
        )
        try:
            self.seek_earliest()
        except BaseException:
            self.close()
            raise

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
        message = self._consumer.poll(wait_s)
        if message is None:
            if self._lost is not None:
                self._extent()  # raises where they still can't
                self._lost = None
            return ReadPause.PENDING
        error = message.error()
        if error is not None:
            return self._about(error)
        offset = message.offset()
        assert offset is not None
        data = message.value() or b""
        meta = BufferMeta(self._shard, BufferOffset(offset), message.timestamp()[1] * 1000, len(data))
        self._place, self._lost = BufferOffset(offset + 1), None
        return op_of(bytes(data), meta, buffer=self._topic)

    def seek(self, offset: BufferOffset) -> None:
        """See `ports.ShardReader.seek`."""
        end = self.end_offset()
        if offset > end:
            raise beyond_end(self._topic, self._shard, offset, end)
        self._go_to(offset)

    def seek_earliest(self) -> None:
        """See `ports.ShardReader.seek_earliest`."""
        self._go_to(self._extent()[0])

    def end_offset(self) -> BufferOffset:
        """See `ports.ShardReader.end_offset`."""
        return self._extent()[1]

    def close(self) -> None:
        """Leave the brokers."""
        if not self.is_closed:
            self.is_closed = True
            with contextlib.suppress(RuntimeError):
                self._consumer.close()

    def _about(self, error: KafkaError) -> ReadPause:
        """What an error means. Raises it, or reads on."""
        from confluent_kafka import KafkaError as Codes

        if error.code() != Codes._AUTO_OFFSET_RESET:  # noqa: SLF001 - the client's name
            if error.retriable():
                return ReadPause.PENDING
            raise error_of_kafka(error, self._topic)
        first, end = self._extent()
        if first <= self._place <= end:
            self._go_to(self._place)  # the broker had just come back, and knew less
            return ReadPause.PENDING
        if self._place > end:
            self._go_to(self._place)  # so that it is said again
            raise went_back(self._topic, self._shard, self._place, end)
        self._ended = True
        self._consumer.unassign()
        raise gone(self._topic, self._shard, self._place, first)

    def _go_to(self, offset: BufferOffset) -> None:
        self._consumer.assign([self._partition(offset)])
        self._place, self._ended = offset, False

    def _extent(self) -> tuple[BufferOffset, BufferOffset]:
        """The first offset that is there, and the end."""
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
                    raise error_of_kafka(error.args[0], self._topic) from error
                if time.monotonic() > deadline:
                    raise BufferUnavailable(
                        f"partition {self._shard} of topic {self._topic} has no leader", buffer=self._topic
                    ) from error
                time.sleep(_ASK_AGAIN_S)
                continue
            if found is None:
                raise BufferUnavailable(f"Kafka didn't say where topic {self._topic} ends", buffer=self._topic)
            return BufferOffset(found[0]), BufferOffset(found[1])

    def _look_for_topic(self, timeout_s: float) -> None:
        """Ask the brokers whether it is there; raises where it isn't, or they can't be asked. A client that knows of none doesn't know."""
        from confluent_kafka import KafkaException

        try:
            found = self._consumer.list_topics(self._topic, timeout=timeout_s).topics[self._topic]
        except KafkaException as error:
            raise error_of_kafka(error.args[0], self._topic) from error
        if found.error is not None and found.error.code() not in moving():
            raise error_of_kafka(found.error, self._topic)

    def _partition(self, offset: BufferOffset | None) -> TopicPartition:
        from confluent_kafka import TopicPartition

        return (
            TopicPartition(self._topic, int(self._shard))
            if offset is None
            else TopicPartition(self._topic, int(self._shard), int(offset))
        )

    def _heard(self, error: KafkaError) -> None:
        if error.code() in unreachable():
            self._lost = error_of_kafka(error, self._topic)
