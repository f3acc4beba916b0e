"""The settings of a consumer's sink in Kafka, and of its clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

from millstream.buffers.kafka_server import client_settings
from millstream.delivery.kafka.debezium_options import DebeziumOptions
from millstream.delivery.kafka.topic_names import TOPIC
from millstream.delivery.redis_stream_names import template_fault
from millstream.delivery.sink_settings import SinkSettings
from millstream.errors import BufferRefused, ConfigError
from millstream.model.addresses import mask_address, mask_option

_OPTIONS: Final = tuple(option.name for option in fields(DebeziumOptions))
_KNOWN: Final = ("location", "client", "transactions", "topic", *_OPTIONS)
_IN_FLIGHT: Final = "max.in.flight.requests.per.connection"
_OURS: Final = (
    "bootstrap.servers",
    "enable.idempotence",
    "acks",
    "request.required.acks",
    "max.in.flight",
    _IN_FLIGHT,
    "delivery.report.only.error",
)
"""Properties on which the sink's promises rest."""
_RUN_CODE: Final = ("plugin.library.paths", "ssl.engine.location", "sasl.kerberos.kinit.cmd")
"""Properties that load libraries or run programs."""
_GUARDED: Final = ("ssl.", "sasl.", "https.")
"""Beginnings of properties some of which name files or libraries of this machine, commands' arguments, or servers that get what a file has."""
_UNGUARDED: Final = frozenset({
    "sasl.mechanism", "sasl.mechanisms", "sasl.username", "sasl.password", "ssl.ca.pem", "ssl.certificate.pem", "ssl.key.pem", "ssl.key.password",
    "ssl.cipher.suites", "ssl.curves.list", "ssl.sigalgs.list", "ssl.endpoint.identification.algorithm",
})  # fmt: skip
"""Those that do none of this: only these may come in a request. Otherwise a person who may make consumers could read the files of
the server's user (`sasl.oauthbearer.assertion.file`), or run code as this user (`ssl.providers`)."""

MESSAGE_BYTES_MAX: Final = 64 << 20
"""The client's own bound. The topic's `max.message.bytes` decides; a broker takes no request of 100 MiB."""
ANSWERS_WITHIN_S: Final = 10.0
"""Time for each of the steps of a batch: connecting, reading what was sent, sending, committing."""


@dataclass(frozen=True)
class KafkaSettings:
    """Valid settings, with their defaults. Made by `parse`."""

    location: str = field(repr=False)
    client: Mapping[str, str] = field(repr=False)
    transactions: bool
    topic: str
    """Template of the topics' names."""
    options: DebeziumOptions

    @classmethod
    def parse(cls, settings: object, *, is_trusted: bool = False) -> KafkaSettings:
        """Read settings.

        Args:
            settings: a JSON value, or the table of the configuration file.
            is_trusted: whether properties of the clients may name files, libraries and servers of their own. They may in the configuration
                file alone.

        Raises:
            DeliveryError (`invalid_consumer`): a setting is missing, unknown or not valid. It shows no secret.
            UsageError (`missing_extra`): confluent-kafka isn't installed.
        """
        own = SinkSettings("kafka", settings, _KNOWN)
        location = own.text("location", hint="Write the brokers as host:9092,host:9092.")
        template = own.text("topic", TOPIC)
        fault = template_fault(template)
        if fault is not None:
            own.refuse("topic", fault, "Use {stream}, {schema} and {table}.")
        given = {name: own.value(name) for name in _OPTIONS if own.value(name) is not None}
        try:
            options = DebeziumOptions(**given)
        except ConfigError as error:
            own.refuse(str(error.details["key"]), "isn't one of its values", error.hint)
        except TypeError:  # a list or an object
            own.refuse(next(iter(given)), "isn't one of its values")
        client = _properties(own, is_trusted=is_trusted)
        transactions = own.flag("transactions", default=True)
        found = cls(location, client, transactions, template, options)
        try:
            settings_of_client = found.client_settings("consumer")
        except BufferRefused as error:
            own.refuse("location", "can't be read as a list of brokers", error.hint)
        fault = _fault({**settings_of_client, **found.producer_settings("millstream")})
        if fault is not None:
            own.refuse("client", f"can't be used: {fault}", "Use the properties of librdkafka, by their names.")
        return found

    def as_dict(self, *, masked: bool = True) -> dict[str, Any]:
        """Return every setting; `parse` reads it again.

        Args:
            masked: whether secrets are replaced by `***`.
        """
        client = {name: mask_option(name, value) if masked else value for name, value in self.client.items()}
        return {
            "location": mask_address(self.location) if masked else self.location,
            "client": client,
            "transactions": self.transactions,
            "topic": self.topic,
            **asdict(self.options),
        }

    def client_settings(self, name: str) -> dict[str, Any]:
        """Return the settings of all clients. Raises `BufferRefused`, `UsageError` as `buffers.kafka_server`."""
        own = {name: value for name, value in self.client.items() if name != "transactional.id"}
        settings = {"client.id": "millstream", **own}
        return client_settings(self.location, settings, name, what="consumer")

    def producer_settings(self, transactional_id: str) -> dict[str, Any]:
        """Return the settings of the producer in addition to those of all clients."""
        timeout_ms = round(ANSWERS_WITHIN_S * 1000)
        defaults: dict[str, Any] = {
            "linger.ms": 5,
            "message.max.bytes": MESSAGE_BYTES_MAX,
            "message.timeout.ms": timeout_ms,
            "queue.buffering.max.messages": 10_000_000,  # bounded by bytes
            "queue.buffering.max.kbytes": 128 << 10,
            # The partition of a key is the one that Java's clients choose.
            "partitioner": "murmur2_random",
        }
        if self.transactions:
            defaults |= {"transaction.timeout.ms": 6 * timeout_ms, "transactional.id": transactional_id}
        wanted = {**defaults, **{name: value for name, value in self.client.items() if self._is_own(name)}}
        ours = {
            "enable.idempotence": True,
            "acks": "all",
            # With several requests on their way, a broker that has just made a topic may refuse the first one and take
            # the second. It then answers the repeated first one as a duplicate, and its messages are lost.
            _IN_FLIGHT: 1,
            "delivery.report.only.error": True,
        }
        return wanted | ours

    def _is_own(self, name: str) -> bool:
        return self.transactions or name != "transactional.id"


def _properties(own: SinkSettings, *, is_trusted: bool) -> dict[str, str]:
    """Return the properties for the clients as texts, as librdkafka reads them."""
    client = own.value("client")
    if client is None:
        return {}
    if not isinstance(client, Mapping):
        own.refuse("client", "isn't an object", "Use the properties of librdkafka, by their names.")
    found = {}
    for name, value in client.items():
        key = f"client.{str(name)[:80]}"
        if name in _OURS:
            hint = "Write the brokers into `location`." if name == "bootstrap.servers" else "Leave it out."
            own.refuse(key, "can't be set", hint)
        if name in _RUN_CODE:
            own.refuse(key, "can't be set: it runs code on this machine", "Leave it out.")
        if not is_trusted and name.startswith(_GUARDED) and name not in _UNGUARDED:
            own.refuse(
                key,
                "can be set only in millstream.toml",
                "Send certificates and keys as `ssl.ca.pem`, `ssl.certificate.pem` and `ssl.key.pem`; or define the consumer in "
                "millstream.toml, as [streams.S.consumers.C.kafka].",
            )
        if isinstance(value, bool):
            found[name] = str(value).lower()
        elif isinstance(value, str | int | float):
            found[name] = str(value)
        else:
            own.refuse(key, "is neither a text nor a number")
    return found


def _fault(settings: Mapping[str, Any]) -> str | None:
    """Return why the client takes no such settings; None if it does. There is no contact to a broker."""
    from confluent_kafka import KafkaException, Producer

    alone = {name: value for name, value in settings.items() if name != "bootstrap.servers"}
    try:
        Producer(alone)
    except KafkaException as error:
        return str(error.args[0].str())
    except (TypeError, ValueError, AttributeError) as error:  # the last: for a property that is a table of others
        return str(error)
    return None
