"""Topics in Kafka as a push sink: one message for each event, in Debezium's formats or as the record's JSON.

With transactions, a batch is one transaction, which also writes the ids of its messages to the ledger
(`delivery.kafka.ledger`). A process that takes over fences the earlier one by its transactional id, reads the ledger,
and accepts a message that it finds there without sending it. So a `read_committed` reader sees each message once.
The producer's settings, such as its partitioner, are in `settings`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from millstream.buffers.kafka_server import check_right_to_write, make_topic
from millstream.delivery.kafka.debezium import DebeziumEncoder, KafkaMessage
from millstream.delivery.kafka.from_json import records_of
from millstream.delivery.kafka.ledger import TOPIC as LEDGER
from millstream.delivery.kafka.ledger import Committed, Recent, make_ledger, read_committed
from millstream.delivery.kafka.settings import ANSWERS_WITHIN_S, KafkaSettings
from millstream.delivery.sinks import (
    ACCEPTED,
    LoggedRow,
    Outcome,
    Pacing,
    Place,
    PushMessage,
    Verdict,
    apart,
    failed,
    names_with_key,
)
from millstream.errors import BufferUnavailable, WriteBufferError
from millstream.model.schema import TableSchema

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, KafkaException, Producer
    from confluent_kafka.admin import AdminClient

HEADER: Final = "millstream-id"
_BATCH: Final = 5000
"""Most messages of a transaction."""
_LEFT_KEPT_S: Final = 600.0
"""How long a message of an earlier process is recognised: more than its delivery to that process can have lasted."""
_ROOM_AGAIN_S: Final = 0.01
_LOOKS_EVERY_S: Final = 0.5
"""How often a delivery that waits for answers looks whether the sink was closed."""


class _Sending:
    """A message of the batch on its way."""

    __slots__ = ("_failing", "error", "events", "failure", "is_judged", "is_known", "is_sent", "message")

    def __init__(self, message: PushMessage, failing: list[_Sending]) -> None:
        self.message = message
        self._failing = failing
        """Gets the messages that the broker refuses in this attempt."""
        self.failure: KafkaError | None = None
        """The broker's error in this attempt."""
        self.events: Sequence[KafkaMessage] = ()
        self.is_known = False
        """Whether an earlier transaction committed it."""
        self.is_sent = False
        self.error: str | None = None
        """The reason why it can't be sent."""
        self.is_judged = False
        """Whether the error is the message's, and not its topic's."""

    @property
    def changes_key(self) -> bool:
        """Whether it belongs to two groups."""
        return len({event.key for event in self.events}) > 1

    def note(self, error: KafkaError | None, _: Any) -> None:
        """Take the broker's answer: a method, since a closure for each message takes longer than all else of it."""
        if error is not None and self.failure is None:
            self.failure = error
            self._failing.append(self)


class _NotNow(Exception):
    """The broker can't take anything now."""


class KafkaSink:
    """Topics of a Kafka cluster: `sinks.PushSink`.

    Args:
        settings: the settings.
        stream: the name of the consumer's stream.
        consumer: the consumer's name.
        place: more about the consumer.
    """

    def __init__(self, settings: KafkaSettings, *, stream: str, consumer: str, place: Place) -> None:
        self._settings = settings
        self._place = place
        self._encoder = DebeziumEncoder(stream, place.database, settings.options, settings.topic, place.columns)
        identity = f"-{place.identity}" if place.identity else ""
        self._transactional_id = f"millstream-{stream}-{consumer}{identity}"
        self._refusal: str | None = None
        """The newest reason why the brokers refuse the clients' connections."""
        self._client = {**settings.client_settings(consumer), "error_cb": self._note_error}
        self._lock = threading.Lock()
        """Held while a batch is sent."""
        self._is_closed = False
        """Also ends a delivery that is under way, at its next step."""
        self._admin: AdminClient | None = None
        """Replaced after each failure: one that was told of no brokers, by one that is fenced, asks again minutes later."""
        self._producer: Producer | None = None
        self._topics: set[str] = set()
        """Topics that are there, and that the user may write to."""
        self._failing_topics: set[str] = set()
        """Topics that weren't when they were last asked about."""
        self._left = Committed()
        """Messages that an earlier producer committed and that may be delivered again."""
        self._left_until_s = 0.0
        self._recent = Recent()

    @property
    def pacing(self) -> Pacing:
        """See `sinks.PushSink`."""
        return Pacing(
            batch_size=_BATCH,
            retry_min_s=0.5,
            retry_max_s=30.0,
            concurrency=2 if self._settings.transactions else 1,
            timeout_s=6 * ANSWERS_WITHIN_S,
            syncs=self._settings.transactions,
        )

    def deliver(self, messages: Sequence[PushMessage]) -> Outcome:
        """See `sinks.PushSink`."""
        from confluent_kafka import KafkaException

        with self._lock:
            if self._is_closed:
                return Outcome(Verdict.REFUSED, "the sink was closed")
            try:
                return self._deliver(messages)
            except (KafkaException, SystemError) as error:
                cause = _cause_of(error)
                if cause is None:
                    raise
                reason = f"Kafka can't take messages now: {cause.args[0].str()}"
            except (_NotNow, WriteBufferError) as error:
                reason = str(error)
            reason = self._with_cause(reason)
            self._drop_producer()
            self._admin = None
            return Outcome(Verdict.REFUSED, reason)

    def close(self) -> None:
        """See `sinks.PushSink`."""
        self._is_closed = True
        with self._lock:
            self._drop_producer()
            self._admin = None

    # --- a batch -----------------------------------------------------------------------------------------------------

    def _deliver(self, messages: Sequence[PushMessage]) -> Outcome:
        admin, producer = self._ready()
        generation = max(message.generation for message in messages)
        left = self._left_of(generation)
        failing: list[_Sending] = []
        sendings = [_Sending(message, failing) for message in messages]
        for sending in sendings if left.ids or left.earlier else ():
            id_ = sending.message.id
            sending.is_known = sending.message.generation == generation and (id_ in left.ids or id_ in left.earlier)
        self._encode([sending for sending in sendings if not sending.is_known])
        self._make_topics(admin, sendings)
        deadline_s = time.monotonic() + 3 * ANSWERS_WITHIN_S
        suspects: set[str] = set()
        while True:
            _hold_groups(sendings)
            going = [
                sending for sending in sendings if sending.events and sending.error is None and not sending.is_sent
            ]
            if not going:
                break
            self._check_open()
            if time.monotonic() > deadline_s:
                raise _NotNow("Kafka doesn't take the batch in time")
            for sending in failing:
                sending.failure = None
            failing.clear()
            if self._settings.transactions:
                ledger = self._ledger(sendings, left.ids, generation)
                suspects = self._transact(self._ready()[1], going, suspects, ledger, failing)
            else:
                suspects = self._send(producer, going, suspects, failing)
        settled = {sending.message.id for sending in sendings if sending.error is None} if left.ids else ()
        self._left = Committed(generation, left.ids.difference(settled), left.earlier)
        return _outcome(sendings)

    def _left_of(self, generation: int) -> Committed:
        """Return the messages of this generation that an earlier producer committed."""
        is_over = self._left.generation != generation or time.monotonic() > self._left_until_s
        return Committed(generation) if is_over else self._left

    def _ledger(self, sendings: Iterable[_Sending], left: frozenset[str], generation: int) -> Committed:
        """Return what is committed, once this transaction is. A message that is held now may have been committed before."""
        own = {
            sending.message.id
            for sending in sendings
            if sending.message.generation == generation and sending.error is None
        }
        return Committed(generation, left | own)

    def _transact(
        self,
        producer: Producer,
        going: Sequence[_Sending],
        suspects: set[str],
        ledger: Committed,
        failing: list[_Sending],
    ) -> set[str]:
        """Send in one transaction, which is aborted if a message fails; return as `_send`."""
        producer.begin_transaction()
        following = self._send(producer, going, suspects, failing)
        if failing:
            producer.abort_transaction(ANSWERS_WITHIN_S)
            # librdkafka has counted messages that the broker refused: its next ones would be out of order.
            self._drop_producer()
            for sending in going:
                sending.is_sent = False
            return following
        packed = ledger.packed()
        if self._place.identity:
            record = ledger.to_bytes(self._recent.of(ledger.generation), packed)
            producer.produce(LEDGER, record, self._place.identity.encode(), partition=0)
        producer.commit_transaction(ANSWERS_WITHIN_S)
        self._recent.add(ledger.generation, packed)
        return following

    def _send(
        self, producer: Producer, going: Sequence[_Sending], suspects: set[str], failing: list[_Sending]
    ) -> set[str]:
        """Send messages, and wait for the broker's answers.

        The broker refuses a whole request if it is too large. So messages of a request that was refused are suspects,
        and each is sent alone.

        Args:
            producer: the producer.
            going: the messages; those that fail get their error.
            suspects: ids of messages to be sent alone.
            failing: gets each message that failed.

        Returns:
            The ids of messages that failed, and have to be sent alone.

        Raises:
            _NotNow: the broker doesn't answer.
            KafkaException: the broker, or the client, can't go on.
        """
        from confluent_kafka import KafkaException

        for sending in going:
            is_suspect = bool(suspects) and sending.message.id in suspects
            if is_suspect:
                self._flush(producer, failing)
            if failing and self._settings.transactions:
                break
            self._produce(producer, sending, failing, KafkaException)
            if is_suspect:
                self._flush(producer, failing)
        self._flush(producer, failing)
        for sending in going:
            sending.is_sent = sending.failure is None
        causes = [(one, error) for one in failing if (error := one.failure) is not None and not _is_purge(error)]
        # Those that were purged weren't sent, since another one had failed.
        causes = causes or [(one, one.failure) for one in failing if one.failure is not None]
        following = set()
        for sending, error in causes:
            if _is_of_message(error) and len(causes) > 1 and sending.message.id not in suspects:
                following.add(sending.message.id)
            else:
                self._judge(sending, error)
        return following or (suspects if failing else set())

    def _produce(
        self, producer: Producer, sending: _Sending, failing: Sequence[_Sending], exception: type[KafkaException]
    ) -> None:
        headers: list[tuple[str, str | bytes | None]] = [(HEADER, sending.message.id.encode())]
        deadline_s = None
        for event in sending.events:
            own = headers if not event.headers else [*headers, *event.headers]
            while True:
                try:
                    producer.produce(event.topic, event.value, event.key, on_delivery=sending.note, headers=own)
                    break
                except BufferError:
                    now_s = time.monotonic()
                    deadline_s = now_s + ANSWERS_WITHIN_S if deadline_s is None else deadline_s
                    if now_s > deadline_s:
                        raise _NotNow("Kafka doesn't take messages in time") from None
                    producer.poll(_ROOM_AGAIN_S)
                except exception as error:
                    if not failing and not _is_of_message(error.args[0]):
                        raise
                    sending.note(error.args[0], None)
                    return

    def _flush(self, producer: Producer, failing: Sequence[_Sending]) -> None:
        end_s = time.monotonic() + ANSWERS_WITHIN_S
        while left := producer.flush(max(0.0, min(_LOOKS_EVERY_S, end_s - time.monotonic()))):
            self._check_open()
            if time.monotonic() >= end_s:
                break
        # A transaction with a message that failed is aborted. Without one, a message without an answer isn't sent.
        if left and not (failing and self._settings.transactions):
            raise _NotNow(f"Kafka doesn't acknowledge messages within {ANSWERS_WITHIN_S:g} s")

    def _judge(self, sending: _Sending, error: KafkaError) -> None:
        """Note why a message failed. Raises `_NotNow` if neither it nor its topic is the reason."""
        topics = ", ".join(sorted({event.topic for event in sending.events}))
        if _is_of_message(error):
            size = max(len(event.value or b"") + len(event.key or b"") for event in sending.events)
            no_key = " without a key" if any(event.key is None for event in sending.events) else ""
            sending.error = f"topic {topics} doesn't take a message of {size} bytes{no_key}: {error.str()}"
            sending.is_judged = True
        elif _is_of_topic(error):
            sending.error = f"topic {topics} doesn't take messages: {error.str()}"
            self._topics.difference_update(event.topic for event in sending.events)
        else:
            raise _NotNow(f"Kafka can't take messages now: {error.str()}")

    # --- messages of Kafka -------------------------------------------------------------------------------------------

    def _encode(self, sendings: Sequence[_Sending]) -> None:
        if self._settings.options.format == "json":
            for sending in sendings:
                sending.events = tuple(self._json(sending.message))
            return
        batches: dict[int, list[tuple[_Sending, LoggedRow]]] = {}
        for sending, logged in self._logged(sendings):
            batches.setdefault(id(logged.batch), []).append((sending, logged))
        now_ns = time.time_ns()
        for some in batches.values():
            _, (schema, batch, first, _) = some[0]
            rows = [logged.row for _, logged in some]
            is_slice = rows == list(range(first, first + len(rows)))
            part = batch.slice(first, len(rows)) if is_slice else batch.take(pa.array(rows))
            events = self._encoder.encode(schema, part, now_ns=now_ns)
            if [event.row for event in events] == list(range(len(some))):  # mostly, a record is one message
                for (sending, _), event in zip(some, events, strict=True):
                    sending.events = (event,)
                continue
            for row, of_row in groupby(events, _row):
                some[row][0].events = tuple(of_row)

    def _logged(self, sendings: Sequence[_Sending]) -> Iterator[tuple[_Sending, LoggedRow]]:
        """Yield the messages with their records in the log's form, which is made of the JSON if it isn't there."""
        by_schema: dict[TableSchema, list[_Sending]] = {}
        for sending in sendings:
            if sending.message.logged is not None:
                yield sending, sending.message.logged
                continue
            schema = self._place.schema_of(sending.message.value)
            if schema is None:
                sending.error = f"the table of message {sending.message.id} isn't known any longer"
                sending.is_judged = True
            else:
                by_schema.setdefault(schema, []).append(sending)
        for schema, some in by_schema.items():
            names = names_with_key(self._place.columns, schema.key)
            batch = records_of(schema, [sending.message.value for sending in some], names)
            for row, sending in enumerate(some):
                yield sending, LoggedRow(schema, batch, row)

    def _json(self, message: PushMessage) -> Iterable[KafkaMessage]:
        logged, facts, renamed = message.logged, message.value, self._place.columns or {}
        schema = self._place.schema_of(facts) if logged is None else logged.schema
        key = () if schema is None else [renamed.get(name, name) for name in schema.key]
        return self._encoder.json(facts, message.record, key)

    # --- the cluster -------------------------------------------------------------------------------------------------

    def _ready(self) -> tuple[AdminClient, Producer]:
        """Return the clients. A producer with transactions has ended those of the one before it."""
        from confluent_kafka import Producer
        from confluent_kafka.admin import AdminClient

        if self._admin is None:
            self._admin = AdminClient(self._client)
        if self._producer is None:
            producer = Producer({**self._client, **self._settings.producer_settings(self._transactional_id)})
            if self._settings.transactions:
                producer.init_transactions(ANSWERS_WITHIN_S)
                if self._place.identity:
                    make_ledger(self._admin, timeout_s=ANSWERS_WITHIN_S)
                    self._left = read_committed(
                        self._admin, self._client, self._place.identity, timeout_s=ANSWERS_WITHIN_S
                    )
                    self._left_until_s = time.monotonic() + _LEFT_KEPT_S
                    self._recent.add(self._left.generation, self._left.packed(whole=True))
            self._producer = producer
        return self._admin, self._producer

    def _note_error(self, error: KafkaError) -> None:
        if _is_of_connection(error):
            self._refusal = error.str()

    def _with_cause(self, reason: str) -> str:
        """Return a reason with that of a refused connection. The calls that fail report a time limit."""
        for client in (self._admin, self._producer):
            if client is not None:
                client.poll(0)  # it calls `_note_error`
        refusal, self._refusal = self._refusal, None
        return reason if refusal is None else f"{reason} ({refusal})"

    def _drop_producer(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge(in_queue=True, in_flight=True, blocking=False)
            producer.flush(0)

    def _check_open(self) -> None:
        if self._is_closed:
            raise _NotNow("the sink was closed")

    def _make_topics(self, admin: AdminClient, sendings: Sequence[_Sending]) -> None:
        """Make topics that aren't there. Messages of a topic that can't be made get the reason."""
        wanted = {event.topic for sending in sendings for event in sending.events} - self._topics
        failing: dict[str, str] = {}
        end_s = time.monotonic() + 2 * ANSWERS_WITHIN_S
        # Those that failed come last: with no time left for all, they keep none from being asked about.
        for topic in sorted(wanted, key=lambda topic: (topic in self._failing_topics, topic)):
            self._check_open()
            if time.monotonic() > end_s:
                failing[topic] = "Kafka doesn't answer in time about the topics of the batch"
                continue
            try:
                make_topic(admin, topic, timeout_s=ANSWERS_WITHIN_S)
                # A transaction with one message that may not be written takes none, and doesn't report which one.
                check_right_to_write(admin, topic, timeout_s=ANSWERS_WITHIN_S)
            except WriteBufferError as error:
                failing[topic] = self._with_cause(error.message)
                self._failing_topics.add(topic)
                self._admin = None if isinstance(error, BufferUnavailable) else self._admin
            else:
                self._topics.add(topic)
                self._failing_topics.discard(topic)
        for sending in sendings if failing else ():
            sending.error = next((failing[event.topic] for event in sending.events if event.topic in failing), None)


_error, _row = attrgetter("error"), attrgetter("row")


def _hold_groups(sendings: Sequence[_Sending]) -> None:
    """Give the later messages of each failing one's groups its error: they follow it."""
    if not any(map(_error, sendings)):
        return
    failing: dict[str, _Sending] = {}
    tables: dict[str, _Sending] = {}
    for sending in sendings:
        group, topics = sending.message.group, {event.topic for event in sending.events}
        if sending.error is None:
            cause = failing.get(group or "") or next((tables[topic] for topic in topics if topic in tables), None)
            if cause is None or not (sending.events or sending.is_known):
                continue
            sending.error, sending.is_judged, sending.is_sent = cause.error, cause.is_judged, False
        if group is not None:
            failing.setdefault(group, sending)
        if sending.changes_key:  # it holds the old key's group, too
            tables.update(dict.fromkeys(topics, sending))


def _outcome(sendings: Sequence[_Sending]) -> Outcome:
    if not any(map(_error, sendings)):
        return ACCEPTED
    parts: dict[str | None, list[_Sending]] = {}
    for sending in sendings:
        parts.setdefault(sending.error, []).append(sending)
    found = []
    for error, some in parts.items():
        messages = [sending.message for sending in some]
        if error is None:
            found.append((messages, ACCEPTED))
        else:
            found.append((messages, failed(error) if some[0].is_judged else Outcome(Verdict.REFUSED, error)))
    return apart(found)


def _cause_of(error: BaseException | None) -> KafkaException | None:
    """Return the client's error. Python makes a fatal one a `SystemError` if the client calls back while it raises it."""
    from confluent_kafka import KafkaException

    while error is not None and not isinstance(error, KafkaException):
        error = error.__cause__
    return error


def _is_of_message(error: KafkaError) -> bool:
    from confluent_kafka import KafkaError as Codes

    return error.code() in {Codes.MSG_SIZE_TOO_LARGE, Codes.RECORD_LIST_TOO_LARGE, Codes.INVALID_RECORD}


def _is_purge(error: KafkaError) -> bool:
    from confluent_kafka import KafkaError as Codes

    return error.code() in {Codes._PURGE_QUEUE, Codes._PURGE_INFLIGHT}  # noqa: SLF001 - the client's names


def _is_of_connection(error: KafkaError) -> bool:
    from confluent_kafka import KafkaError as Codes

    return error.code() in {Codes._AUTHENTICATION, Codes._SSL, Codes._RESOLVE}  # noqa: SLF001 - the client's names


def _is_of_topic(error: KafkaError) -> bool:
    from confluent_kafka import KafkaError as Codes

    return error.code() in {
        Codes.TOPIC_AUTHORIZATION_FAILED,
        Codes.UNKNOWN_TOPIC_OR_PART,
        Codes._UNKNOWN_TOPIC,  # noqa: SLF001 - the client's name
        Codes._UNKNOWN_PARTITION,  # noqa: SLF001
    }


def open_kafka(settings: Mapping[str, Any], *, stream: str, consumer: str, place: Place) -> KafkaSink:
    """Return a sink, as a `sinks.SinkFactory` does, for the consumer's place."""
    return KafkaSink(KafkaSettings.parse(settings, is_trusted=True), stream=stream, consumer=consumer, place=place)
