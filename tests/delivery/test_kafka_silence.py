"""A broker that takes connections and answers nothing: deliveries end within their bound, and with the sink."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError

from millstream.delivery.kafka.sink import KafkaSink
from millstream.delivery.sinks import PushMessage, PushSink, Verdict, open_sink
from millstream.testing.push_sink import push_message

TABLES = 30


@pytest.fixture
def sink() -> Iterator[PushSink]:
    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent:
        settings = {"location": f"127.0.0.1:{silent.getsockname()[1]}", "format": "json", "transactions": False}
        yield open_sink("kafka", settings, stream="shop", consumer="search")


def messages() -> list[PushMessage]:
    return [push_message(number, table=f"public.t{number}") for number in range(TABLES)]


def test_messages_of_many_topics_are_refused_within_the_bound(sink: PushSink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each topic was asked about in turn, and each answer waited for."""
    monkeypatch.setattr("millstream.delivery.kafka.sink.ANSWERS_WITHIN_S", 0.5)
    began_s = time.monotonic()
    outcome = sink.deliver(messages())
    took_s = time.monotonic() - began_s
    sink.close()
    assert outcome.parts
    assert all(part.verdict is Verdict.REFUSED for _, part in outcome.parts)
    assert took_s < 6 * 0.5 + 3


def test_the_end_of_a_sink_cuts_a_delivery_off(sink: PushSink, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for the delivery: for longer than a supervisor waits for the process."""
    monkeypatch.setattr("millstream.delivery.kafka.sink.ANSWERS_WITHIN_S", 5.0)
    with ThreadPoolExecutor(1) as threads:
        delivery = threads.submit(sink.deliver, messages())
        with pytest.raises(TimeoutError):
            delivery.result(1)
        began_s = time.monotonic()
        sink.close()
        assert time.monotonic() - began_s < 9
        assert delivery.result(1).verdict is Verdict.REFUSED


class HalfSilent:
    """A producer whose broker refuses messages of one topic, and answers nothing about the others."""

    def __init__(self, refused: str) -> None:
        self._refused = refused
        self._left = 0

    def produce(self, topic: str, *_: Any, on_delivery: Callable[[KafkaError, object], None], **__: Any) -> None:
        if topic == self._refused:
            on_delivery(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), None)
        else:
            self._left += 1

    def flush(self, _timeout_s: float) -> int:
        return self._left

    def poll(self, _timeout_s: float) -> None:
        """Do nothing: what comes has come."""

    def purge(self, **_: Any) -> None:
        """Do nothing: no message is sent later."""


def test_a_message_without_an_answer_is_not_accepted_because_another_one_is_refused(
    sink: PushSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as sent, was acknowledged to the consumer, and lost if its broker never took it."""
    monkeypatch.setattr("millstream.delivery.kafka.sink.ANSWERS_WITHIN_S", 0.2)
    refused, unanswered = messages()[:2]
    kafka = cast("KafkaSink", sink)
    topics = [f"shop.{table}" for table in ("public.t0", "public.t1")]
    kafka._topics = set(topics)
    kafka._admin, kafka._producer = cast("Any", HalfSilent("")), cast("Any", HalfSilent(topics[0]))
    outcome = sink.deliver([refused, unanswered])
    accepted = [message for some, part in outcome.parts if part.verdict is Verdict.ACCEPTED for message in some]
    assert outcome.verdict is not Verdict.ACCEPTED
    assert accepted == []
