"""Topics in Kafka: the common suite, formats, failures of single messages and topics, and each message once."""

from __future__ import annotations

import itertools
import json
import random
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.admin._resource import ResourceType
from confluent_kafka.cimpl import NewTopic
from msgspec.structs import replace
from tests.app.homes import wait_for
from tests.delivery.kafka_topics import Received, received
from tests.delivery.test_debezium import ORDERS, records

from millstream.buffers.kafka_errors import SILENT
from millstream.delivery.kafka.ledger import Committed, Recent, read_committed
from millstream.delivery.sinks import ACCEPTED, LoggedRow, Outcome, Place, PushMessage, PushSink, Verdict, open_sink
from millstream.errors import BufferUnavailable, DeliveryError
from millstream.testing.errors import coded
from millstream.testing.kafka import EmbeddedKafka
from millstream.testing.push_sink import PushSinkConformance, push_message

_numbers = itertools.count(1)


class KafkaStage:
    """Opens sinks to topics of its own, and closes them."""

    def __init__(self, server: EmbeddedKafka, **settings: Any) -> None:
        self.server = server
        self.stream = f"shop{next(_numbers)}"
        self.settings: dict[str, Any] = {"location": server.servers, **settings}
        self.place = Place(secrets.token_hex(8))
        self.opened: list[PushSink] = []

    def open(self, place: Place | None = None) -> PushSink:
        sink = open_sink("kafka", self.settings, stream=self.stream, consumer="search", place=place)
        self.opened.append(sink)
        return sink

    def messages(self) -> list[Received]:
        return received(self.server.servers, f"{self.stream}.")

    def received(self) -> Sequence[tuple[str, Any]]:
        return [(message.id, json.loads(message.value)) for message in self.messages() if message.value is not None]

    def admin(self) -> AdminClient:
        settings: Any = {"bootstrap.servers": self.server.servers, "logger": SILENT}
        return AdminClient(settings)

    def make(self, rest: str, **options: str) -> str:
        topic = f"{self.stream}.{rest}"
        admin = self.admin()
        admin.create_topics([NewTopic(topic, 1, 1, config=options)])[topic].result(60)
        return topic

    def configure(self, rest: str, **options: str) -> None:
        change = AlterConfigOpType.SET
        entries = [ConfigEntry(name, value, incremental_operation=change) for name, value in options.items()]
        resource = ConfigResource(ResourceType.TOPIC, f"{self.stream}.{rest}", incremental_configs=entries)
        admin = self.admin()
        admin.incremental_alter_configs([resource])[resource].result(60)

    def break_down(self) -> None:
        # A marker of the end of a transaction has 78 bytes: with a lower bound, none could be aborted.
        self.configure("public.orders", **{"max.message.bytes": "100"})
        self.wait_until_large_messages_are(KafkaError.MSG_SIZE_TOO_LARGE)

    def mend(self) -> None:
        self.configure("public.orders", **{"max.message.bytes": "1048588"})
        self.wait_until_large_messages_are(None)

    def wait_until_large_messages_are(self, expected: int | None) -> None:
        """Wait for the broker, which applies a change of settings some time after it has confirmed it."""
        results: list[int | None] = []
        settings: Any = {"bootstrap.servers": self.server.servers, "logger": SILENT}
        producer = Producer(settings)
        wait_for(lambda: self._probed(producer, results) == expected)

    def _probed(self, producer: Producer, results: list[int | None]) -> int | None:
        producer.produce(
            f"{self.stream}.public.orders",
            key=b"k" * 200,
            on_delivery=lambda error, _: results.append(error.code() if error else None),
        )
        assert producer.flush(60) == 0
        return results[-1]

    def close(self) -> None:
        for sink in self.opened:
            sink.close()


@pytest.fixture(autouse=True)
def a_busy_machine_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the broker more time: a sink refuses its first batch if another test's load makes it wait."""
    for module in ("settings", "sink"):
        monkeypatch.setattr(f"millstream.delivery.kafka.{module}.ANSWERS_WITHIN_S", 60.0)


JSON: dict[str, Any] = {"format": "json", "client": {"compression.type": "gzip"}}


class TestWithTransactions(PushSinkConformance):
    @pytest.fixture
    def stage(self, kafka_server: EmbeddedKafka) -> Iterator[KafkaStage]:
        stage = KafkaStage(kafka_server, **JSON)
        yield stage
        stage.close()


class TestWithoutTransactions(PushSinkConformance):
    @pytest.fixture
    def stage(self, kafka_server: EmbeddedKafka) -> Iterator[KafkaStage]:
        stage = KafkaStage(kafka_server, **JSON, transactions=False)
        yield stage
        stage.close()


@pytest.fixture(params=[True, False], ids=["transactions", "idempotent"])
def stage(kafka_server: EmbeddedKafka, request: pytest.FixtureRequest) -> Iterator[KafkaStage]:
    stage = KafkaStage(kafka_server, format="json", transactions=request.param)
    yield stage
    stage.close()


@pytest.fixture
def debezium(kafka_server: EmbeddedKafka) -> Iterator[KafkaStage]:
    stage = KafkaStage(kafka_server, schemas_enable=False)
    yield stage
    stage.close()


def logged(*rows: dict[str, Any], first: int = 0, generation: int = 0) -> list[PushMessage]:
    """Return messages of a table, as a consumer has them."""
    batch = records(ORDERS, *rows)
    return [
        PushMessage(
            f"shop-0-1-{first + number}", f"g{row['id']}", 1, b"{}", LoggedRow(ORDERS, batch, number), generation
        )
        for number, row in enumerate(rows)
    ]


def parts(outcome: Outcome) -> dict[Verdict, list[str]]:
    return {part.verdict: [message.id for message in messages] for messages, part in outcome.parts}


# --- formats ---------------------------------------------------------------------------------------------------------


def test_debezium_s_messages_have_their_keys_headers_and_tombstones(debezium: KafkaStage) -> None:
    batch = logged(
        {"id": 1, "50%": "a"},
        {"__op": "u", "id": 2, "50%": "a", "__before": [("id", "1")]},
        {"__op": "d", "id": 2},
    )
    sink = debezium.open(Place("x1", "sales"))
    assert sink.deliver(batch) == ACCEPTED
    found = debezium.messages()
    assert {message.topic for message in found} == {f"{debezium.stream}.public.orders"}
    values = [None if message.value is None else json.loads(message.value) for message in found]
    one, two = b'{"id":1}', b'{"id":2}'
    assert [(m.key, v and v["op"]) for m, v in zip(found, values, strict=True)] == [
        (one, "c"),
        (one, "d"),
        (one, None),
        (two, "c"),
        (two, "d"),
        (two, None),
    ]
    assert [message.id for message in found] == [f"shop-0-1-{number}" for number in (0, 1, 1, 1, 2, 2)]
    changed = [{name: value for name, value in m.headers.items() if name != "millstream-id"} for m in found]
    assert changed == [{}, {"__debezium.newkey": two}, {"__debezium.newkey": two}, {"__debezium.oldkey": one}, {}, {}]
    source = json.loads(found[0].value or b"")["source"]
    assert (source["db"], source["name"]) == ("sales", debezium.stream)


def test_messages_of_several_batches_of_the_log_keep_their_order(debezium: KafkaStage) -> None:
    """Rows of a batch need not be neighbours: a consumer's `where` and its groups leave some out."""
    rows: list[dict[str, Any]] = [{"id": number} for number in range(8)]
    one, other = logged(*rows), logged(*rows, first=8)
    batch = [one[1], one[2], other[0], other[5], one[4], other[6], one[7]]
    assert debezium.open().deliver(batch) == ACCEPTED
    assert [message.id for message in debezium.messages()] == [message.id for message in batch]
    ids = [json.loads(message.value or b"")["after"]["id"] for message in debezium.messages()]
    assert ids == [1, 2, 0, 5, 4, 6, 7]


def test_columns_that_the_consumer_chose_are_sent_under_their_new_names_and_the_key_always(
    debezium: KafkaStage,
) -> None:
    place = Place(columns={"50%": "half"})
    batch = logged({"id": 1, "50%": "a", "total": 5}, {"__op": "u", "id": 1, "50%": "b", "__before": [("50%", "a")]})
    assert debezium.open(place).deliver(batch) == ACCEPTED
    found = debezium.messages()
    assert [message.key for message in found] == [b'{"id":1}'] * 2
    values = [json.loads(message.value or b"") for message in found]
    assert values[0]["after"] == {"id": 1, "half": "a"}
    assert values[1]["before"] == {"id": None, "half": "a"}
    assert values[1]["after"] == {"id": 1, "half": "b"}


def test_json_is_the_record_under_its_key(stage: KafkaStage) -> None:
    record = b'{"op":"d","table":"public.orders","row":{"id":7},"before":null}'
    (message,) = logged({"__op": "d", "id": 7})
    message = PushMessage(message.id, message.group, 1, record, message.logged)
    assert stage.open().deliver([message]) == ACCEPTED
    assert [(m.key, m.value, m.id) for m in stage.messages()] == [
        (b'{"id":7}', record, message.id),
        (b'{"id":7}', None, message.id),
    ]


def test_characters_that_a_topic_can_t_have_become_underscores(stage: KafkaStage) -> None:
    stage.settings["topic"] = "{stream}.cdc.{schema}/{table}"
    batch = [push_message(0, table='"My schema"."Größe"'), push_message(1, table=None, op="m")]
    assert stage.open().deliver(batch) == ACCEPTED
    topics = [message.topic for message in stage.messages()]
    assert topics == [f"{stage.stream}.cdc.My_schema_Gr__e", f"{stage.stream}.message"]


# --- messages and topics that fail -----------------------------------------------------------------------------------


def test_a_message_that_is_too_large_fails_with_its_group_alone(stage: KafkaStage) -> None:
    stage.make("public.orders", **{"max.message.bytes": "20000"})
    batch = [push_message(number, text="x" * (50_000 if number in {4, 5} else 10)) for number in range(12)]
    outcome = stage.open().deliver(batch)
    assert outcome.verdict is Verdict.FAILED
    assert "public.orders doesn't take a message of 50" in outcome.reason
    # Groups are number % 3: the messages behind 4 and 5 of their groups fail with them.
    failing = [4, 5, 7, 8, 10, 11]
    accepted = [number for number in range(12) if number not in failing]
    held: dict[str, list[int]] = {"ok": [], "bad": []}
    for messages, part in outcome.parts:
        held["ok" if part == ACCEPTED else "bad"] += [int(message.id.rsplit("-", 1)[1]) for message in messages]
    assert (held["ok"], sorted(held["bad"])) == (accepted, failing)
    ids = [message.id for message in stage.messages()]
    assert [id_ for id_ in ids if id_ in {f"shop-0-1-{number}" for number in accepted}] == [
        f"shop-0-1-{number}" for number in accepted
    ]
    if stage.settings["transactions"]:
        assert len(ids) == len(accepted)


def test_small_messages_pass_though_a_request_of_them_is_too_large(stage: KafkaStage) -> None:
    """The client packs messages into requests, which a topic's bound may refuse as a whole."""
    stage.make("public.orders", **{"max.message.bytes": "3000"})
    batch = [push_message(number, text=f"{random.Random(number).getrandbits(8000):x}") for number in range(10)]
    assert stage.open().deliver(batch) == ACCEPTED
    assert [message.id for message in stage.messages()] == [message.id for message in batch]


@pytest.mark.parametrize(
    ("skipped", "left"), [("none", ["c", "u", "t", "d", None]), ("t,d", ["c", "u"]), ("c,u", ["t", "d", None])]
)
def test_skipped_operations_are_accepted_and_not_sent(
    debezium: KafkaStage, skipped: str, left: list[str | None]
) -> None:
    debezium.settings["skipped_operations"] = skipped
    batch = logged({"id": 1}, {"id": 1, "__op": "u"}, {"id": None, "__op": "t"}, {"id": 1, "__op": "d"})
    assert debezium.open(debezium.place).deliver(batch) == ACCEPTED
    values = [None if message.value is None else json.loads(message.value) for message in debezium.messages()]
    assert [value and value["op"] for value in values] == left


@pytest.mark.parametrize("op", ["t", "x"])
def test_a_compacted_topic_takes_no_record_without_a_key(stage: KafkaStage, op: str) -> None:
    stage.make("public.orders", **{"cleanup.policy": "compact"})
    batch = _rows_around(op)
    outcome = stage.open().deliver(batch)
    assert parts(outcome) == {Verdict.ACCEPTED: [batch[0].id, batch[2].id], Verdict.FAILED: [batch[1].id]}
    assert "public.orders doesn't take a message of" in outcome.reason
    assert "without a key" in outcome.reason


@pytest.mark.parametrize("op", ["t", "x"])
def test_records_without_a_key_are_left_out_of_a_compacted_topic(stage: KafkaStage, op: str) -> None:
    stage.make("public.orders", **{"cleanup.policy": "compact"})
    stage.settings["skipped_operations"] = "t,x"
    batch = _rows_around(op)
    assert stage.open().deliver(batch) == ACCEPTED
    assert [message.id for message in stage.messages()] == [batch[0].id, batch[2].id]


def _rows_around(op: str) -> list[PushMessage]:
    """Return a record of all rows, or of a partition's, between those of two rows, with their keys."""
    rows: list[dict[str, Any]] = [{"id": 1}, {"id": None, "__op": op}, {"id": 2}]
    return [
        replace(message, record=json.dumps({"table": "public.orders", "before": None, "op": own, "row": row}).encode())
        for message, own, row in zip(logged(*rows), ["c", op, "c"], [rows[0], None, rows[2]], strict=True)
    ]


def test_a_topic_that_can_t_be_made_stops_nothing_else(stage: KafkaStage) -> None:
    sink = stage.open()
    name = "x" * 250  # more than Kafka takes
    batch = [push_message(0), push_message(1, table=f"public.{name}"), push_message(2), push_message(4)]
    outcome = sink.deliver(batch)
    assert parts(outcome) == {
        Verdict.ACCEPTED: [batch[0].id, batch[2].id],
        Verdict.REFUSED: [batch[1].id, batch[3].id],  # of one group
    }
    assert name in outcome.reason
    assert [message.id for message in stage.messages()] == [batch[0].id, batch[2].id]
    assert sink.deliver([batch[1]]).verdict is Verdict.REFUSED  # it is tried again, and isn't a failed delivery
    assert sink.deliver([push_message(5)]) == ACCEPTED


@pytest.mark.sampled
def test_a_topic_that_was_deleted_is_made_again(stage: KafkaStage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.delivery.kafka.settings.ANSWERS_WITHIN_S", 5.0)  # it waits so long for the topic
    monkeypatch.setattr("millstream.delivery.kafka.sink.ANSWERS_WITHIN_S", 5.0)
    sink = stage.open()
    assert sink.deliver([push_message(0)]) == ACCEPTED
    topic = f"{stage.stream}.public.orders"
    admin = stage.admin()
    admin.delete_topics([topic])[topic].result(60)
    wait_until(lambda: topic not in admin.list_topics(timeout=30).topics)
    wait_until(lambda: sink.deliver([push_message(1)]) == ACCEPTED)
    assert [message.id for message in stage.messages()] == ["shop-0-1-1"]


# --- each message once -----------------------------------------------------------------------------------------------


@pytest.fixture
def once(kafka_server: EmbeddedKafka) -> Iterator[KafkaStage]:
    stage = KafkaStage(kafka_server, format="json")
    yield stage
    stage.close()


def test_another_process_accepts_what_was_committed_without_sending_it(once: KafkaStage) -> None:
    """The batches of the next process may be cut at other messages, and hold new ones."""
    first = [push_message(number) for number in range(10)]
    assert once.open(once.place).deliver(first) == ACCEPTED
    following = once.open(once.place)
    assert following.deliver(first[:4]) == ACCEPTED
    assert following.deliver([*first[4:7], push_message(10)]) == ACCEPTED
    third = once.open(once.place)  # some of the first batch haven't come back so far
    assert third.deliver([*first[7:], push_message(10), push_message(11)]) == ACCEPTED
    assert [message.id for message in once.messages()] == [f"shop-0-1-{number}" for number in range(12)]


def test_a_promoted_follower_accepts_what_was_committed_in_the_last_seconds_without_sending_it(
    once: KafkaStage,
) -> None:
    """A follower has the acknowledgements a second later. The ledger named the last transaction alone."""
    batches = [[push_message(first + number) for number in range(3)] for first in range(0, 12, 3)]
    leader = once.open(once.place)
    for batch in batches[:3]:
        assert leader.deliver(batch) == ACCEPTED
    promoted = once.open(once.place)
    assert promoted.deliver(batches[3]) == ACCEPTED
    assert promoted.deliver([message for batch in batches[:3] for message in batch]) == ACCEPTED
    assert once.open(once.place).deliver([message for batch in batches for message in batch]) == ACCEPTED
    assert [message.id for message in once.messages()] == [f"shop-0-1-{number}" for number in range(12)]


def test_a_committed_message_that_another_one_of_its_group_holds_is_not_sent_again(once: KafkaStage) -> None:
    """A sink forgot messages that came back in a batch that failed, and sent them again in the next one."""
    assert once.open(once.place).deliver([push_message(6)]) == ACCEPTED
    held = [push_message(3, table="public." + "x" * 250), push_message(6)]  # of one group; no topic has such a name
    following = once.open(once.place)
    assert following.deliver(held).verdict is Verdict.REFUSED
    assert following.deliver([*held, push_message(7)]).verdict is Verdict.REFUSED
    for sink in (following, once.open(once.place)):
        assert sink.deliver([push_message(6)]) == ACCEPTED
    assert [message.id for message in once.messages()] == ["shop-0-1-6", "shop-0-1-7"]


def test_a_rewind_delivers_again(once: KafkaStage) -> None:
    first = logged({"id": 1}, {"id": 2})
    once.settings = {**once.settings, "format": "debezium"}
    assert once.open(once.place).deliver(first) == ACCEPTED
    again = logged({"id": 1}, {"id": 2}, generation=1)
    assert once.open(once.place).deliver(again) == ACCEPTED
    assert once.open(once.place).deliver(again) == ACCEPTED
    assert [message.id for message in once.messages()] == 2 * [message.id for message in first]


def test_another_consumer_of_the_name_delivers_again(once: KafkaStage) -> None:
    assert once.open(once.place).deliver([push_message(0)]) == ACCEPTED
    assert once.open(Place(secrets.token_hex(8))).deliver([push_message(0)]) == ACCEPTED
    assert len(once.messages()) == 2


def test_a_process_that_was_replaced_sends_nothing_more(once: KafkaStage) -> None:
    former = once.open(once.place)
    assert former.deliver([push_message(0)]) == ACCEPTED
    assert once.open(once.place).deliver([push_message(1)]) == ACCEPTED
    outcome = former.deliver([push_message(2)])
    assert outcome.verdict is Verdict.REFUSED
    assert [message.id for message in once.messages()] == ["shop-0-1-0", "shop-0-1-1"]


def test_what_was_committed_is_read_behind_other_consumers_transactions(once: KafkaStage) -> None:
    """The last stable offset stands before another consumer's open transaction; our record may stand behind it."""
    from confluent_kafka import Producer

    former = once.open(once.place)
    assert former.deliver([push_message(0)]) == ACCEPTED
    settings: Any = {"bootstrap.servers": once.server.servers, "transactional.id": f"other-{once.stream}"}
    other = Producer(settings)
    other.init_transactions(30)
    other.begin_transaction()
    other.produce("_millstream_consumers", b"{}", b"other", partition=0)
    other.flush(30)
    assert former.deliver([push_message(1)]) == ACCEPTED
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(once.open(once.place).deliver, [push_message(1)])
        with pytest.raises(TimeoutError):
            outcome.result(1.0)
        client: Any = {"bootstrap.servers": once.server.servers}
        for timeout_s in (1.0, 5.0, 30.0):  # a busy machine may not answer in the first
            with pytest.raises(BufferUnavailable) as waits:
                read_committed(once.admin(), client, "another", timeout_s=timeout_s)
            if "didn't answer" not in waits.value.message:
                break
        assert re.search(r"transaction of another producer is open at offset \d+ of \d+", waits.value.message)
        other.abort_transaction(30)
        assert outcome.result(60) == ACCEPTED
    assert [message.id for message in once.messages()] == ["shop-0-1-0", "shop-0-1-1"]


class _LedgerOfOthers:
    """Clients of a ledger that other consumers write without a pause: a record every 50 ms, and no look at its end."""

    def __init__(self, end: int) -> None:
        self._end = end
        self._offset = -1
        self.is_closed = False

    def list_offsets(self, partitions: Any, **_: Any) -> Any:
        found: Future[Any] = Future()
        found.set_result(SimpleNamespace(offset=self._end))
        return dict.fromkeys(partitions, found)

    def consume(self, _count: int, timeout: float) -> Any:
        time.sleep(timeout)
        self._offset += 1
        offset, is_own = self._offset, self._offset == 3
        own = Committed(0, frozenset({"shop-0-1-0"})).to_bytes()
        return [
            SimpleNamespace(
                error=lambda: None,
                offset=lambda: offset,
                key=lambda: b"own" if is_own else b"other",
                value=lambda: own if is_own else b"{}",
            )
        ]

    def assign(self, partitions: Any) -> None:
        assert [partition.offset for partition in partitions] == [0]

    def close(self) -> None:
        self.is_closed = True


def test_a_ledger_is_read_to_its_end_of_that_moment_however_long_that_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 10 s, and only to an end that didn't move: a slow line, or others' records, kept the consumer standing."""
    ledger = _LedgerOfOthers(end=20)
    monkeypatch.setattr("confluent_kafka.Consumer", lambda _settings: ledger)
    found = read_committed(ledger, {}, "own", timeout_s=0.5)  # type: ignore[arg-type]
    assert (found.ids, ledger.is_closed) == ({"shop-0-1-0"}, True)


@pytest.mark.parametrize(
    "ids", [[], ["shop-0-1-7"], ["shop-0-1-7", "shop-0-1-9", "shop-1-2-0", "shop-b3-17", "shop-0-1-7-old", "x"]]
)
def test_ids_are_packed_without_loss(ids: list[str]) -> None:
    committed = Committed(3, frozenset(ids))
    assert Committed.from_bytes(committed.to_bytes()) == committed
    many = Committed(0, frozenset(f"shop-0-1-{number * 3}" for number in range(1000)))
    assert len(many.to_bytes()) < 2100
    assert Committed.from_bytes(many.to_bytes()) == many


@pytest.mark.parametrize("rounds", [3, pytest.param(30, marks=pytest.mark.siege)])
def test_each_message_is_there_once_and_in_order_through_kills_of_the_broker(
    own_kafka: EmbeddedKafka, rounds: int
) -> None:
    """A sink is also given up at times, before its acknowledgement counts: the messages come again in other batches."""
    stage = KafkaStage(own_kafka, format="json")
    chance = random.Random(rounds)
    is_over, accepted = threading.Event(), threading.Semaphore(0)

    def push() -> int:
        sink, done, settled = stage.open(stage.place), 0, set[str]()
        while not is_over.is_set():
            while push_message(done).id in settled:
                done += 1
            batch = [push_message(number) for number in range(done, done + chance.randint(1, 20))]
            batch = [message for message in batch if message.id not in settled]
            outcome = sink.deliver(batch)
            # A part that was accepted is settled, as in a pusher: no other part of the batch has its groups.
            for messages, part in outcome.parts or [(batch, outcome)]:
                settled.update(message.id for message in messages if part == ACCEPTED)
            if outcome != ACCEPTED:
                continue
            accepted.release()
            if chance.random() < 0.2:
                settled.difference_update(message.id for message in batch)
                sink.close()
                sink = stage.open(stage.place)
        return done

    def wait_for_one() -> None:
        deadline_s = time.monotonic() + 90
        while not accepted.acquire(timeout=1):
            assert not pushing.done(), pushing.result()
            assert time.monotonic() < deadline_s

    with ThreadPoolExecutor(1) as pool:  # a broker ends with the thread that started it
        pushing = pool.submit(push)
        try:
            for _ in range(rounds):
                wait_for_one()
                time.sleep(chance.uniform(0.0, 0.3))
                own_kafka.kill()
                own_kafka.start()
                while accepted.acquire(blocking=False):
                    pass
            wait_for_one()
        finally:
            is_over.set()
        done = pushing.result(120)
    ids = [message.id for message in stage.messages()]
    assert done > 0
    assert ids[:done] == [f"shop-0-1-{number}" for number in range(done)]
    assert ids == [f"shop-0-1-{number}" for number in range(len(ids))]  # the last acknowledgement may not have counted
    stage.close()


@pytest.mark.long
def test_the_ledger_names_transactions_of_the_last_seconds_within_a_bound() -> None:
    now_s = 0.0
    recent = Recent(lambda: now_s)

    def named(generation: int = 0) -> list[str]:
        return sorted(Committed.from_bytes(Committed(generation).to_bytes(recent.of(generation))).earlier)

    recent.add(0, Committed(0, frozenset({"shop-0-1-1", "x"}), frozenset({"shop-0-1-0"})).packed(whole=True))
    now_s = 3.0
    recent.add(0, Committed(0, frozenset({"shop-0-1-2"})).packed())
    assert named() == ["shop-0-1-0", "shop-0-1-1", "shop-0-1-2", "x"]
    now_s = 5.5
    assert named() == ["shop-0-1-2"]
    assert named(1) == []
    for first in range(0, 1_000_000, 50_000):
        recent.add(1, Committed(1, frozenset(f"shop-0-1-{number}" for number in range(first, first + 50_000))).packed())
    assert len(b"".join(recent.of(1))) <= 256 << 10
    assert "shop-0-1-999999" in named(1)


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({}, "kafka.location"),
        ({"location": "h:1", "brokers": "h:1"}, "kafka.brokers"),
        ({"location": "app:PASSWORD@h:1"}, "kafka.location"),
        ({"location": "h:1", "format": "avro"}, "kafka.format"),
        ({"location": "h:1", "format": ["json"]}, "kafka.format"),
        ({"location": "h:1", "decimal_handling_mode": "exact"}, "kafka.decimal_handling_mode"),
        ({"location": "h:1", "schemas_enable": "yes"}, "kafka.schemas_enable"),
        ({"location": "h:1", "skipped_operations": "r"}, "kafka.skipped_operations"),
        ({"location": "h:1", "topic": "{database}"}, "kafka.topic"),
        ({"location": "h:1", "transactions": 1}, "kafka.transactions"),
        ({"location": "h:1", "client": ["a"]}, "kafka.client"),
        ({"location": "h:1", "client": {"no.such.property": "1"}}, "kafka.client"),
        ({"location": "h:1", "client": {"linger.ms": "soon"}}, "kafka.client"),
        ({"location": "h:1", "client": {"default.topic.config": "acks"}}, "kafka.client"),
        ({"location": "h:1", "client": {"bootstrap.servers": "h:2"}}, "kafka.client.bootstrap.servers"),
        ({"location": "h:1", "client": {"plugin.library.paths": "/x.so"}}, "kafka.client.plugin.library.paths"),
        ({"location": "h:1", "client": {"linger.ms": {}}}, "kafka.client.linger.ms"),
    ],
)
def test_a_setting_that_isn_t_valid_is_refused_by_its_name(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(DeliveryError, check=coded("invalid_consumer")) as raised:
        open_sink("kafka", settings, stream="shop", consumer="search")
    assert raised.value.details["field"] == field
    assert "PASSWORD" not in str(raised.value)


def test_settings_are_shown_with_their_defaults_and_without_secrets() -> None:
    from millstream.delivery.kafka.settings import KafkaSettings

    client = {"sasl.password": "s3cret", "sasl.username": "app", "linger.ms": 20}
    settings = KafkaSettings.parse({"location": "h:9092,i:9092", "client": client})
    assert settings.as_dict() == {
        "location": "h:9092,i:9092",
        "client": {"sasl.password": "***", "sasl.username": "app", "linger.ms": "20"},
        "transactions": True,
        "topic": "{stream}.{schema}.{table}",
        "format": "debezium",
        "decimal_handling_mode": "precise",
        "time_precision_mode": "adaptive",
        "binary_handling_mode": "bytes",
        "interval_handling_mode": "numeric",
        "schemas_enable": True,
        "tombstones_on_delete": True,
        "skipped_operations": "none",
        "include_unknown_datatypes": False,
    }
    assert "s3cret" not in repr(settings)
    assert KafkaSettings.parse(settings.as_dict(masked=False)) == settings
    assert (
        KafkaSettings.parse({"location": "h:9092,i:9092", "client": {**client, "sasl.password": "other"}}) != settings
    )


def wait_until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline_s
