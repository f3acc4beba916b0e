"""Errors of Kafka's client, translated into this project's errors."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Final

from millstream.errors import BufferMissing, BufferRefused, BufferUnavailable, WriteBufferError

if TYPE_CHECKING:
    from confluent_kafka import KafkaError

SILENT: Final = logging.getLogger("millstream.buffers.kafka.client")
"""Logger for librdkafka, which prints to stderr by default; its relevant messages are raised as errors."""
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
    """Return the codes with which an operation that was handed over certainly isn't stored."""
    from confluent_kafka import KafkaError

    return _missing() | _refused() | {KafkaError._PURGE_QUEUE}  # noqa: SLF001


@cache
def unknown_here() -> frozenset[int]:
    """Return the codes for a topic that a client doesn't know.

    With brokers out of reach, it may just not have been told.
    """
    from confluent_kafka import KafkaError

    return frozenset({KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION})  # noqa: SLF001 - the client's names


@cache
def unreachable() -> frozenset[int]:
    """Return the codes that a client reports on its own if it may not reach the brokers."""
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
    """Return the codes of a partition that is being given a leader: a retry succeeds soon."""
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
    """Return this project's error; by default, that the brokers can't be reached now."""
    if error.code() in _missing():
        return BufferMissing(f"Kafka has no topic {topic}: {error.str()}", buffer=topic)
    if error.code() in _refused():
        return BufferRefused(
            f"Kafka refuses topic {topic}: {error.str()}",
            hint="Grant the user the missing rights, or correct the options of its clients.",
            buffer=topic,
        )
    return BufferUnavailable(f"Kafka can't be asked about topic {topic}: {error.str()}", buffer=topic)
