"""The brokers under a user of Kafka: settings of its clients, and its topics.

Write buffers, routing's sinks and consumers' sinks share it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from millstream.buffers.kafka_errors import SILENT, error_of_kafka
from millstream.errors import BufferMissing, BufferRefused, BufferUnavailable
from millstream.errors.missing_extras import missing_extra
from millstream.model.addresses import is_brokers

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.admin._topic import TopicDescription

_POLL_S: Final = 0.1


def client_settings(servers: str, options: Mapping[str, str], name: str, *, what: str) -> dict[str, Any]:
    """Return the settings that all clients of one user share.

    Args:
        servers: `host:port`, several separated by commas.
        options: more settings, as librdkafka names them.
        name: the name of the user, for errors.
        what: the kind of the user, for errors.

    Raises:
        UsageError (`missing_extra`): confluent-kafka isn't installed.
        BufferRefused: the addresses are invalid.
    """
    try:
        import confluent_kafka  # noqa: F401 - only whether it is there
    except ModuleNotFoundError as error:
        raise missing_extra(f"{what} {name} needs {error.name}", "kafka") from error
    if not is_brokers(servers):
        raise BufferRefused(
            f"the brokers of {what} {name} can't be read as a list of addresses",
            hint="Write the brokers as host:9092,host:9092, with user and password in client (`sasl.username`, "
            "`sasl.password`).",
            buffer=name,
        )
    return {**options, "bootstrap.servers": servers, "logger": SILENT}


def describe_topic(
    admin: AdminClient, topic: str, *, timeout_s: float, includes_rights: bool = False
) -> TopicDescription:
    """Return a topic's description.

    Raises:
        BufferMissing: there is no such topic.
        BufferUnavailable, BufferRefused: the brokers can't be reached, or refuse.
    """
    from confluent_kafka import KafkaException, TopicCollection

    try:
        asked = admin.describe_topics(
            TopicCollection([topic]), include_authorized_operations=includes_rights, request_timeout=timeout_s
        )
        found: TopicDescription = asked[topic].result(timeout_s)
        return found
    except KafkaException as error:
        raise error_of_kafka(error.args[0], topic) from error
    except TimeoutError as error:
        raise BufferUnavailable(f"Kafka didn't answer about topic {topic} in time", buffer=topic) from error


def make_topic(
    admin: AdminClient,
    topic: str,
    *,
    partitions: int = -1,
    replication: int = -1,
    options: Mapping[str, str] | None = None,
    timeout_s: float,
) -> None:
    """Make a topic if it doesn't exist, and wait until its partitions have leaders.

    Any number of processes may do so at a time.

    Args:
        partitions: number of partitions; -1: the brokers' own default.
        replication: replication factor; -1: the brokers' own default.
        timeout_s: bound of each request, and of the wait for leaders.

    Raises:
        BufferUnavailable, BufferRefused: the brokers can't be reached, or refuse.
    """
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.cimpl import NewTopic

    deadline = time.monotonic() + timeout_s
    try:
        describe_topic(admin, topic, timeout_s=timeout_s)
    except BufferMissing:
        wanted = NewTopic(topic, num_partitions=partitions, replication_factor=replication, config=dict(options or {}))
        try:
            admin.create_topics([wanted], request_timeout=timeout_s)[topic].result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise error_of_kafka(error.args[0], topic) from error
    while not _is_led(admin, topic, timeout_s):
        if time.monotonic() > deadline:
            raise BufferUnavailable(f"topic {topic} has partitions that no broker leads", buffer=topic)
        time.sleep(_POLL_S)


def check_right_to_write(admin: AdminClient, topic: str, *, timeout_s: float) -> None:
    """Return if the user may write to a topic, or if the brokers don't report it.

    Raises:
        BufferRefused: it may not.
        BufferMissing, BufferUnavailable: as `describe_topic`.
    """
    from confluent_kafka.admin._acl import AclOperation

    found = describe_topic(admin, topic, timeout_s=timeout_s, includes_rights=True).authorized_operations
    if found and AclOperation.WRITE not in found:
        raise BufferRefused(
            f"the user of Kafka may not write to topic {topic}", hint="Grant it the right to write.", buffer=topic
        )


def _is_led(admin: AdminClient, topic: str, timeout_s: float) -> bool:
    try:
        partitions = describe_topic(admin, topic, timeout_s=timeout_s).partitions
    except BufferMissing:
        return False
    # For a partition without a leader, the client returns node -1.
    return bool(partitions) and all(p.leader.id >= 0 for p in partitions)
