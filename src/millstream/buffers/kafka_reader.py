"""Reads one partition of a topic, from a position of its own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from millstream.buffers.kafka_errors import SILENT, error_of_kafka, moving, unknown_here, unreachable
from millstream.codec.buffer_reading import PlacedReader
from millstream.errors import BufferUnavailable, WriteBufferError
from millstream.model.buffered_operations import BufferedOp, BufferOffset
from millstream.model.ids import ShardId

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, TopicPartition

_FETCHED_KBYTES: Final = 16 << 10
"""Kilobytes of messages that wait in the client, at most; one message may exceed it."""
_ASK_AGAIN_S: Final = 0.05
_ASK_MIN_S: Final = 0.5


class KafkaReader(PlacedReader):
    """A consumer that is assigned one partition.

    Args:
        topic: its name.
        shard: the partition.
        settings: of the client, as librdkafka names them.
        timeout_s: timeout of a request.
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
                "error_cb": self._heard,
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
            self._heed(error)
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

    def _heed(self, error: KafkaError) -> None:
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
                raise BufferUnavailable(f"Kafka didn't say where topic {self._buffer} ends", buffer=self._buffer)
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

    def _heard(self, error: KafkaError) -> None:
        if error.code() in unreachable():
            self._lost = error_of_kafka(error, self._buffer)
