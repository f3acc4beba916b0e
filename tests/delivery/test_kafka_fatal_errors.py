"""Errors that end a client of Kafka: the sink refuses the batch, and the next one goes by a new client."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from tests.delivery.test_kafka_sink import JSON, KafkaStage

from millstream.delivery.sinks import ACCEPTED, Verdict
from millstream.testing.kafka import EmbeddedKafka
from millstream.testing.push_sink import push_message


def test_a_fatal_error_that_the_client_raises_amid_its_callbacks_is_refused(
    kafka_server: EmbeddedKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_amid_callbacks(*_: Any) -> None:
        fenced = KafkaException(KafkaError(KafkaError._FENCED, "fenced", fatal=True))
        raise SystemError("returned a result with an exception set") from fenced

    monkeypatch.setattr("millstream.delivery.kafka.sink.ANSWERS_WITHIN_S", 60.0)
    stage = KafkaStage(kafka_server, **JSON)
    sink = stage.open(stage.place)
    with monkeypatch.context() as patched:
        patched.setattr(sink, "_flush", raise_amid_callbacks)
        outcome = sink.deliver([push_message(0)])
    assert (outcome.verdict, "fenced" in outcome.reason) == (Verdict.REFUSED, True)
    assert sink.deliver([push_message(0)]) == ACCEPTED
    stage.close()
