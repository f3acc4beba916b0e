"""The port of push sinks, to which the home sends a consumer's messages, in batches; `open_sink` opens one by its kind.

A sink gets a batch and returns its outcome. It keeps no position and repeats nothing: `delivery.push_retries` does both.

A package adds a kind of sink by an entry point of the group `millstream.push_sinks`, named as the kind. It is a function
with the signature of `SinkFactory`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, partial
from importlib.metadata import EntryPoint, entry_points
from json.encoder import encode_basestring_ascii
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import pyarrow as pa
import structlog

from millstream.errors import DeliveryError, MillstreamError
from millstream.model.schema import TableSchema

logger = structlog.get_logger("millstream.delivery")

ENTRY_POINTS: Final = "millstream.push_sinks"
OURS: Final = ("webhook", "kafka", "redis", "command")
"""Kinds without an entry point. A further one is added here, to `sink_definition`, `config.consumer_model`,
`serving.consumer_requests` and `cli.consumers`."""


class LoggedRow(NamedTuple):
    """A record in the log's form, which has the types of its columns."""

    schema: TableSchema
    """The table's schema when the record was made."""
    batch: pa.RecordBatch
    """Records in `record_schema(schema, offsets=True)`."""
    row: int
    """The record's index in the batch."""
    texts: Callable[[pa.RecordBatch], list[str]] | None = None
    """Returns the JSON of such records, for one whose JSON wasn't made."""


def names_with_key(names: Mapping[str, str] | None, key: Iterable[str]) -> Mapping[str, str] | None:
    """Return the new name of each column that a consumer chose, and of the key's columns that it didn't; None: all."""
    return None if names is None else {name: name for name in key if name not in names} | dict(names)


@dataclass(frozen=True)
class Place:
    """Facts about a consumer that some sinks use."""

    identity: str = ""
    """A text that no other consumer has, not even a later one of its name; empty: there is none."""
    database: str = ""
    """Name of the source's database; empty: there is none."""
    columns: Mapping[str, str] | None = None
    """The new name of each column that the consumer receives; None: all, under their names."""
    schema_of: Callable[[Mapping[str, Any]], TableSchema | None] = field(default=lambda _: None, compare=False)
    """Returns the schema of a record's table, at best that of the time when it was made; None if it isn't known."""


class PushMessage(msgspec.Struct, frozen=True, dict=True):
    """One message on its way to a sink."""

    id: str
    """The id that never changes."""
    group: str | None
    """Its group: messages of one group are delivered in order. None if it has none."""
    deliveries: int
    """Number of this delivery, from 1."""
    record: bytes
    """The record as JSON: the object that `wal cat --format ndjson` prints; empty if the sink sends `logged` instead."""
    logged: LoggedRow | None = None
    """The record in the log's form; None if only its JSON is there."""
    generation: int = 0
    """Number of the consumer's rewinds before: a message that was rewound is delivered again, under its id."""
    failures: int = 0
    """Number of its deliveries that failed before it was received, for example before a restart."""

    @cached_property
    def value(self) -> Mapping[str, Any]:
        """The decoded record."""
        value: dict[str, Any] = json.loads(self.record)
        return value

    @cached_property
    def json(self) -> bytes:
        """The message as JSON: `id`, `deliveries`, `group` and `record`."""
        group = "null" if self.group is None else encode_basestring_ascii(self.group)
        head = f'{{"id":{encode_basestring_ascii(self.id)},"deliveries":{self.deliveries},"group":{group},"record":'
        return b"%b%b}" % (head.encode(), self.record)


class Verdict(StrEnum):
    """The kinds of outcomes of a batch."""

    ACCEPTED = "accepted"
    """The receiver has acknowledged every message."""
    FAILED = "failed"
    """The receiver didn't acknowledge all of them. It is a failed delivery, and the batch is repeated after a wait."""
    REFUSED = "refused"
    """The messages weren't judged: the home's own rules forbid the receiver, or it can't take any message now. The batch
    is repeated, and this isn't a failed delivery."""
    GONE = "gone"
    """The receiver wants no more messages: the consumer is paused. It isn't a failed delivery."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a batch."""

    verdict: Verdict
    reason: str = ""
    """The cause, for people, unless all was accepted. It contains no secret."""
    retry_after_s: float | None = None
    """Seconds that the receiver asks to wait before the next attempt; None: the sink's usual waits hold."""
    parts: tuple[tuple[Sequence[PushMessage], Outcome], ...] = ()
    """If the messages of a batch have different outcomes: each message's, in their order. No group is in two parts. The
    parts that weren't accepted are repeated apart from each other."""


ACCEPTED: Final = Outcome(Verdict.ACCEPTED)


def apart(parts: Sequence[tuple[Sequence[PushMessage], Outcome]]) -> Outcome:
    """Return the outcome of a batch of several parts."""
    if len(parts) == 1:
        return parts[0][1]
    worst = next((outcome for _, outcome in parts if outcome.verdict is not Verdict.ACCEPTED), ACCEPTED)
    return Outcome(worst.verdict, worst.reason, worst.retry_after_s, tuple(parts))


def failed(reason: str, *, retry_after_s: float | None = None) -> Outcome:
    """Return the outcome of a failed delivery."""
    return Outcome(Verdict.FAILED, reason, retry_after_s)


@dataclass(frozen=True, slots=True)
class Pacing:
    """How a sink is to be fed."""

    batch_size: int = 100
    """Most messages of a batch."""
    concurrency: int = 1
    """Most batches on their way at once; they have no group in common."""
    retry_min_s: float = 1.0
    """Wait after the first failure of a batch; it doubles with each further failure."""
    retry_max_s: float = 300.0
    """Longest such wait."""
    timeout_s: float = 30.0
    """Seconds within which `deliver` returns, apart from delays of the machine."""
    syncs: bool = False
    """Whether acknowledgements of a batch must be durable before the next one is sent. `concurrency` is then the number
    of batches that are received ahead while there is a backlog."""


class PushSink(Protocol):
    """A destination. Its conformance suite is `millstream.testing.push_sink`.

    Concurrency: `deliver` is called by up to `pacing.concurrency` threads at once.
    """

    @property
    def pacing(self) -> Pacing:
        """How to feed it."""

    def deliver(self, messages: Sequence[PushMessage]) -> Outcome:
        """Send a batch once and return its outcome, within a bounded time.

        The receiver may have some of the messages although the outcome isn't `ACCEPTED`. The same messages come again
        then, with the same ids and greater `deliveries`. A failure of the receiver or of the way there is an outcome.

        Args:
            messages: at least one; those of one group are in order.
        """

    def close(self) -> None:
        """Release connections and processes. Calls of `deliver` that are running may fail."""


class SinkFactory(Protocol):
    """Makes a sink, without contact to its receiver."""

    def __call__(self, settings: Mapping[str, Any], *, stream: str, consumer: str) -> PushSink:
        """Return a sink.

        Args:
            settings: the consumer's table of that kind, as it was written.
            stream: the name of the consumer's stream.
            consumer: the consumer's name.

        Raises:
            DeliveryError (`invalid_consumer`): a setting is missing, unknown or not valid.
        """


def open_sink(
    kind: str, settings: Mapping[str, Any], *, stream: str, consumer: str, place: Place | None = None
) -> PushSink:
    """Return a sink of a kind: one of `OURS`, or another package's.

    Args:
        kind: the kind.
        settings: the consumer's table of that kind.
        stream: the name of the consumer's stream.
        consumer: the consumer's name.
        place: more about the consumer. Without it, a sink in Kafka doesn't recognise messages that an earlier one sent.

    Raises:
        DeliveryError (`invalid_consumer`): there is no such kind, or a setting isn't valid.
    """
    if kind == "kafka":
        from millstream.delivery.kafka.sink import open_kafka

        return open_kafka(settings, stream=stream, consumer=consumer, place=place or Place())
    return _factory(kind)(settings, stream=stream, consumer=consumer)


def _factory(kind: str) -> SinkFactory:
    if kind == "webhook":
        from millstream.delivery.webhook_sink import open_webhook

        return open_webhook
    if kind == "redis":
        from millstream.delivery.redis_stream_sink import open_redis

        return open_redis
    if kind == "command":
        from millstream.delivery.command_sink import open_command

        return open_command
    others = entry_points(group=ENTRY_POINTS)
    for entry_point in others:
        if entry_point.name == kind:
            return partial(_of_package, entry_point)
    known = sorted({*OURS, *others.names})
    raise DeliveryError(
        f"no push sink is of kind {kind[:80]!r}",
        code="invalid_consumer",
        hint=f"Use one of {', '.join(known)}, or install a package with an entry point of {ENTRY_POINTS}.",
        field=kind[:80],
    )


def _of_package(entry_point: EntryPoint, settings: Mapping[str, Any], *, stream: str, consumer: str) -> PushSink:
    try:
        sink: PushSink = entry_point.load()(settings, stream=stream, consumer=consumer)
        return sink
    except MillstreamError:
        raise
    except Exception as error:  # a fault of the package must not stop the other consumers
        logger.exception("a package's push sink can't be opened", kind=entry_point.name)
        problem = f"the push sink {entry_point.name} of another package raised {type(error).__name__}"
        hint = "Read the process's log, then mend the settings or the package."
        raise DeliveryError(problem, code="invalid_consumer", hint=hint, field=entry_point.name) from error
