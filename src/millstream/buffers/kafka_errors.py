"""What Kafka's client says, in the words of our tree of errors."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Final

from millstream.errors import BufferMissing, BufferRefused, BufferUnavailable, WriteBufferError

if TYPE_CHECKING:
    from confluent_kafka import KafkaError

SILENT: Final = logging.getLogger("millstream.buffers.kafka.client")
"""librdkafka prints to stderr by itself; what matters of it is said as errors."""
SILENT.setLevel(logging.CRITICAL + 1)


@cache
def _missing() -> frozenset[int]:
    from confluent_kafka import KafkaError

    return frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION})  # noqa: SLF001 - the client's names


@cache
def _refused() -> frozenset[int]:
    from confluent_kafka import KafkaError

    return frozenset(
        {
            KafkaError.TOPIC_AUTHORIZATION_FAILED,
            KafkaError.CLUSTER_AUTHORIZATION_FAILED,
            KafkaError.GROUP_AUTHORIZATION_FAILED,
            KafkaError.SASL_AUTHENTICATION_FAILED,
            KafkaError._AUTHENTICATION,  # noqa: SLF001
            KafkaError._SSL,  # noqa: SLF001
            KafkaError.POLICY_VIOLATION,
            KafkaError.INVALID_CONFIG,
            KafkaError.INVALID_REPLICATION_FACTOR,
            KafkaError.INVALID_PARTITIONS,
            KafkaError.INVALID_RECORD,
            KafkaError.TOPIC_EXCEPTION,
            KafkaError._INVALID_ARG,  # noqa: SLF001
        }
    )


@cache
def nothing_stored() -> frozenset[int]:
    """Codes with which an operation that was handed over certainly isn't stored."""
    from confluent_kafka import KafkaError

    return _missing() | _refused() | {KafkaError._PURGE_QUEUE}  # noqa: SLF001


@cache
def unknown_here() -> frozenset[int]:
    """Codes by which a client says that it doesn't know a topic; it may not have been told, where brokers are out of reach."""
    from confluent_kafka import KafkaError

    return frozenset({KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION})  # noqa: SLF001 - the client's names


@cache
def unreachable() -> frozenset[int]:
    """Codes by which a client says, on its own account, that it may not reach the brokers."""
    from confluent_kafka import KafkaError

    return frozenset(
        {
            KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001 - the client's names
            KafkaError._TRANSPORT,  # noqa: SLF001
            KafkaError._RESOLVE,  # noqa: SLF001
            KafkaError._AUTHENTICATION,  # noqa: SLF001
            KafkaError._SSL,  # noqa: SLF001
        }
    )


@cache
def moving() -> frozenset[int]:
    """Codes of a partition that is being given a leader: the same question has an answer soon."""
    from confluent_kafka import KafkaError

    return frozenset(
        {
            KafkaError.NOT_LEADER_FOR_PARTITION,
            KafkaError.LEADER_NOT_AVAILABLE,
            KafkaError.REPLICA_NOT_AVAILABLE,
            KafkaError.OFFSET_NOT_AVAILABLE,
            KafkaError.FENCED_LEADER_EPOCH,
            KafkaError.UNKNOWN_LEADER_EPOCH,
        }
    )


def error_of_kafka(error: KafkaError, topic: str) -> WriteBufferError:
    """The error; where nothing else is known of it, the brokers can't be asked now."""
    if error.code() in _missing():
        return BufferMissing(f"Kafka has no topic {topic}: {error.str()}", buffer=topic)
    if error.code() in _refused():
        return BufferRefused(
            f"Kafka refuses topic {topic}: {error.str()}",
            hint="Give the user the rights that it lacks, or mend the buffer's options.",
            buffer=topic,
        )
    return BufferUnavailable(f"Kafka can't be asked about topic {topic}: {error.str()}", buffer=topic)
