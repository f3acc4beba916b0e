"""Consumers that push to Kafka, as a server runs them: created, steered, and each record once through kills."""

from __future__ import annotations

import itertools
import json
import random
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.app.homes import wait_for
from tests.delivery.kafka_topics import Received, received
from tests.serving.serving_process import Served, served, web_home

from millstream.testing.kafka import EmbeddedKafka

CONSUMERS = "/v1/streams/web/consumers"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return web_home(tmp_path / "home")


@pytest.fixture
def own_kafka(tmp_path: Path) -> Iterator[EmbeddedKafka]:
    """A broker that a test may kill."""
    with EmbeddedKafka(tmp_path / "kafka") as server:
        yield server


def create(server: Served, name: str, **fields: Any) -> httpx.Response:
    with server.client() as client:
        return client.post(CONSUMERS, json={"name": name, "start": "earliest", **fields})


def shown(server: Served, name: str) -> dict[str, Any]:
    with server.client() as client:
        found: dict[str, Any] = client.get(f"{CONSUMERS}/{name}").json()
        return found


def topic_of(kafka: EmbeddedKafka, topic: str) -> list[Received]:
    return [message for message in received(kafka.servers, topic) if message.topic == topic]


@pytest.mark.long
def test_a_consumer_pushes_to_kafka_from_its_creation_on(home: Path, kafka_server: EmbeddedKafka) -> None:
    topic = f"web{secrets.token_hex(4)}"
    sink = {"location": kafka_server.servers, "topic": topic, "schemas_enable": False}
    with served(home) as server:
        server.post("clicks", [{"id": n} for n in range(5)])
        client = {"sasl.password": "s3cret"}
        made = create(server, "search", kafka={**sink, "client": client}).json()
        assert made["kafka"]["client"] == {"sasl.password": "***"}
        assert (made["kafka"]["transactions"], made["kafka"]["format"]) == (True, "debezium")
        assert create(server, "search", kafka={**sink, "client": client}).status_code == 200
        assert create(server, "search", kafka={**sink, "client": {"sasl.password": "other"}}).status_code == 409
        wait_for(lambda: shown(server, "search")["acked"] == 5, what=lambda: shown(server, "search"))
        with server.client() as http:
            refused = http.post(f"{CONSUMERS}/search/receive", json={})
            assert (refused.status_code, refused.json()["code"]) == (409, "consumer_pushed")
            http.post(f"{CONSUMERS}/search/pause")
            server.post("clicks", [{"id": 5}])
            assert http.post(f"{CONSUMERS}/search/resume").json()["state"] == "active"
            wait_for(lambda: shown(server, "search")["acked"] == 6)
            http.post(f"{CONSUMERS}/search/rewind", json={"to": "earliest"})
            wait_for(lambda: shown(server, "search")["acked"] == 12, what=lambda: shown(server, "search"))
        assert shown(server, "search")["lag"]["records"] == 0
        found = topic_of(kafka_server, topic)
        assert [json.loads(message.value or b"")["after"]["id"] for message in found] == [*range(6), *range(6)]
        with server.client() as http:
            assert http.delete(f"{CONSUMERS}/search").status_code == 204


@pytest.mark.long
def test_a_record_that_is_too_large_is_dead_and_others_go_on(home: Path, kafka_server: EmbeddedKafka) -> None:
    topic = f"web{secrets.token_hex(4)}"
    with served(home) as server:
        server.post("clicks", [{"id": 0}, {"id": 1, "text": f"{random.Random(1).getrandbits(5_000_000):x}"}, {"id": 2}])
        sink = {"location": kafka_server.servers, "topic": topic, "format": "json"}
        create(server, "search", group_by="none", max_deliver=2, kafka=sink)
        wait_for(lambda: shown(server, "search")["dead"] == 1, what=lambda: shown(server, "search"))
        assert shown(server, "search")["acked"] == 2
        with server.client() as http:
            (letter,) = http.get(f"{CONSUMERS}/search/dead").json()["dead"]
            assert "doesn't take a message" in letter["error"]
            assert letter["record"]["row"]["id"] == 1
        assert sorted(json.loads(m.value or b"")["row"]["id"] for m in topic_of(kafka_server, topic)) == [0, 2]


@pytest.mark.long
@pytest.mark.parametrize("form", ["debezium-flat", "json"])
@pytest.mark.parametrize("kind", ["changes", "latest"])
def test_the_key_is_sent_with_columns_that_leave_it_out(
    tmp_path: Path, kafka_server: EmbeddedKafka, kind: str, form: str
) -> None:
    """Rows of a backfill and newest states had `{"id":null}` as their key: a compacted topic kept one of them."""
    home, topic = web_home(tmp_path / "home", more='[streams.web.keys]\n"public.orders" = ["id"]'), secrets.token_hex(4)
    with served(home) as server:
        server.post("orders", [{"id": n, "note": f"n{n}"} for n in range(3)])
        sink = {"location": kafka_server.servers, "topic": topic, "format": form, "schemas_enable": False}
        made = create(server, "search", kafka=sink, kind=kind, columns=["note as text"], start="latest", backfill=True)
        assert made.status_code == 201, made.text
        wait_for(lambda: shown(server, "search")["backfill"] is None, what=lambda: shown(server, "search"))
        server.post("orders", [{"id": 3, "note": "n3"}])
        wait_for(lambda: len(topic_of(kafka_server, topic)) == 4, what=lambda: shown(server, "search"))
    found = topic_of(kafka_server, topic)
    assert [message.key for message in found] == [b'{"id":%d}' % n for n in range(4)]
    values = [json.loads(message.value or b"") for message in found]
    assert [value.get("row", value) for value in values] == [{"id": n, "text": f"n{n}"} for n in range(4)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kills", "kills_broker"), [(2, False), pytest.param(30, True, marks=pytest.mark.siege)], ids=["server", "both"]
)
def test_a_reader_of_committed_messages_sees_each_record_once_through_kills(
    home: Path, request: pytest.FixtureRequest, kills: int, kills_broker: bool
) -> None:
    kafka: EmbeddedKafka = request.getfixturevalue("own_kafka" if kills_broker else "kafka_server")
    topic, chance = f"web{secrets.token_hex(4)}", random.Random(kills)
    numbers, sent = itertools.count(), 0
    for kill in range(kills + 1):
        with served(home) as server, ThreadPoolExecutor(1) as pool:
            if kill == 0:
                server.post("clicks", [{"id": next(numbers)}])
                sink = {"location": kafka.servers, "topic": topic, "format": "json"}
                assert create(server, "search", kafka=sink).status_code == 201
            is_over = threading.Event()

            def write(server: Served = server, is_over: threading.Event = is_over) -> int:
                count = 0
                while not is_over.is_set():
                    server.post("clicks", [{"id": next(numbers)} for _ in range(10)])
                    count += 10
                return count

            writing = pool.submit(write)
            before = shown(server, "search")["acked"]
            wait_for(
                lambda before=before, server=server: shown(server, "search")["acked"] > before + 20,
                what=lambda server=server: shown(server, "search"),
            )
            if kills_broker and chance.random() < 0.5:
                kafka.kill()
                kafka.start()
            is_over.set()
            writing.result(60)
            if kill < kills:
                server.process.kill()
                continue
            wait_for(
                lambda server=server: shown(server, "search")["lag"]["records"] == 0,
                what=lambda server=server: shown(server, "search"),
            )
            sent = next(numbers)
    found = topic_of(kafka, topic)
    ids = [json.loads(message.value or b"")["row"]["id"] for message in found]
    if ids != list(range(sent)):
        kept = {message.id for message in received(kafka.servers, topic, isolation="read_uncommitted")}
        lacking = sorted(set(range(sent)) - set(ids))
        pytest.fail(f"{len(lacking)} lack, from {lacking[:1]}; {len(kept)} of {sent} are there, committed or not")
    assert len({message.id for message in found}) == len(found)
