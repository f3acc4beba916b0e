"""A sink to Kafka that had nothing to send for longer than the broker keeps connections, producers and transactional ids."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
from tests.app.homes import wait_for
from tests.delivery.test_kafka_sink import KafkaStage

from millstream.delivery.sinks import ACCEPTED, PushSink
from millstream.testing.kafka import EmbeddedKafka
from millstream.testing.push_sink import push_message

pytestmark = pytest.mark.siege
KEPT = """
connections.max.idle.ms=1000
transactional.id.expiration.ms=1000
transaction.remove.expired.transaction.cleanup.interval.ms=500
producer.id.expiration.ms=1000
producer.id.expiration.check.interval.ms=500
"""


def is_delivered(sink: PushSink, number: int) -> bool:
    return sink.deliver([push_message(number)]) == ACCEPTED


def is_over(end_s: float) -> bool:
    return time.monotonic() > end_s


def test_a_sink_goes_on_after_the_broker_has_forgotten_it(tmp_path: Path) -> None:
    with EmbeddedKafka(tmp_path / "kafka") as server:
        server.kill()
        with (tmp_path / "kafka" / "server.properties").open("a") as settings:
            settings.write(KEPT)
        server.start()
        for transactions in (True, False):
            stage = KafkaStage(server, format="json", transactions=transactions)
            sink = stage.open(stage.place)
            for number in range(3):
                wait_for(partial(is_delivered, sink, number))
                wait_for(partial(is_over, time.monotonic() + 5))
            assert [message.id for message in stage.messages()] == [f"shop-0-1-{number}" for number in range(3)]
            stage.close()
