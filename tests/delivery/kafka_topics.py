"""Reading topics back, as a consumer with `read_committed` sees them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from millstream.buffers.kafka_errors import SILENT


class Received(NamedTuple):
    """A message of a topic."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: Mapping[str, bytes]

    @property
    def id(self) -> str:
        return self.headers["millstream-id"].decode()


def received(servers: str, prefix: str, *, isolation: str = "read_committed") -> list[Received]:
    """Return all committed messages of the topics with a prefix: by topic, each in its order."""
    from confluent_kafka import Consumer, IsolationLevel, KafkaError, TopicPartition
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.admin._listoffsets import OffsetSpec

    client: dict[str, Any] = {"bootstrap.servers": servers, "logger": SILENT}
    admin = AdminClient(client)
    topics = {name: known for name, known in admin.list_topics(timeout=30).topics.items() if name.startswith(prefix)}
    partitions = [TopicPartition(name, number) for name, known in topics.items() for number in known.partitions]
    if not partitions:
        return []
    asked = admin.list_offsets(
        {partition: OffsetSpec.latest() for partition in partitions},  # type: ignore[no-untyped-call]
        isolation_level=IsolationLevel.READ_UNCOMMITTED,
        request_timeout=30,
    )
    ends = {(at.topic, at.partition): future.result(30).offset for at, future in asked.items()}
    own = {
        "group.id": "test",
        "enable.auto.commit": False,
        "fetch.wait.max.ms": 20,
        "isolation.level": isolation,
    }
    reader = Consumer({**client, **own, "enable.partition.eof": True, "auto.offset.reset": "error"})
    found: dict[tuple[str, int], list[Received]] = {(at.topic, at.partition): [] for at in partitions}
    left = {place for place, end in ends.items() if end}
    deadline_s = time.monotonic() + 90
    try:
        reader.assign([TopicPartition(*place, 0) for place in found])
        while left:
            assert time.monotonic() < deadline_s, left
            for message in reader.consume(1000, timeout=0.05):
                topic, partition = str(message.topic()), message.partition()
                assert partition is not None
                place = (topic, partition)
                error = message.error()
                if error is not None:
                    assert error.code() == KafkaError._PARTITION_EOF, error
                    if (message.offset() or 0) >= ends[place]:  # else an open transaction stands before the end
                        left.discard(place)
                    continue
                headers = {name: bytes(value) for name, value in _pairs(message.headers())}
                found[place].append(Received(topic, partition, message.key(), message.value(), headers))
    finally:
        reader.close()
    return [message for place in sorted(found) for message in found[place]]


def _pairs(headers: Any) -> Sequence[tuple[str, Any]]:
    return headers or ()
