"""Consumers of a stream on several nodes: followers show them, and a promoted node continues them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.app.homes import done
from tests.delivery import kafka_topics
from tests.nodes.nodes import STREAM, Node, eventually, nodes

import millstream
from millstream.delivery.follower_consumers import copied_consumers
from millstream.errors import MillstreamError
from millstream.testing.kafka import EmbeddedKafka
from millstream.testing.pytest_plugin import Database

pytestmark = pytest.mark.siege

CONFIGURED = f"[streams.{STREAM}.consumers.fixed]\n"
KEYS = f'[streams.{STREAM}.keys]\n"public.orders" = ["id"]\n'


def call(node: Node, method: str, path: str = "", body: Any = None) -> httpx.Response:
    """Call a node about the stream's consumers."""
    return httpx.request(method, f"{node.url()}/v1/streams/{STREAM}/consumers{path}", json=body, timeout=60)


def shown(node: Node, name: str = "search") -> dict[str, Any]:
    answer = call(node, "GET", f"/{name}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def start(*of: Node) -> None:
    for node in of:
        node.start("owner")
        node.start("serve")
    eventually(lambda: all(node.url() for node in of), "they listen", *of)


def append(node: Node, *ids: int) -> None:
    with millstream.open(node.home) as home:
        for one in ids:
            home.append(STREAM, "orders", {"id": one}, deadline_s=100)


def received(node: Node, count: int, name: str = "search") -> list[dict[str, Any]]:
    answer = call(node, "POST", f"/{name}/receive", {"batch_size": count, "wait_for_ms": 10_000})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["messages"]
    return found


def all_of(node: Node, count: int) -> list[dict[str, Any]]:
    """Receive that many messages: a busy machine answers with fewer."""
    found: list[dict[str, Any]] = []
    while len(found) < count:
        some = received(node, count - len(found))
        assert some, f"only {found} came"
        found += some
    return found


def settled(node: Node, how: str, *messages: dict[str, Any], name: str = "search") -> list[str]:
    answer = call(node, "POST", f"/{name}/{how}", {"ack_ids": [message["ack_id"] for message in messages]})
    assert answer.status_code == 200, answer.text
    return [result["status"] for result in answer.json()["results"]]


def test_a_promoted_node_continues_the_consumers(tmp_path: Path) -> None:
    with nodes(tmp_path, acks="durable(1)", stream=KEYS + CONFIGURED) as (a, b):
        b.start("follow", "a")
        start(a, b)
        append(a, *range(6))
        made = call(a, "POST", body={"name": "search", "start": "earliest", "max_deliver": 1})
        assert made.status_code == 201, made.text
        for name in ("gone", "idle"):
            assert call(a, "POST", body={"name": name}).status_code == 201
        dead, acked, flying = all_of(a, 3)
        assert settled(a, "nack", dead) + settled(a, "ack", acked) == ["nacked", "acked"]
        call(a, "DELETE", "/gone")
        # A follower shows them while the log is idle.
        eventually(
            lambda: [one["name"] for one in call(b, "GET").json()["consumers"]] == ["fixed", "idle", "search"],
            "a's come",
            a,
            b,
        )
        eventually(lambda: (shown(b)["dead"], shown(b)["acked"]) == (1, 1), "with their progress", a, b)
        assert call(b, "GET", "/search/dead").json()["dead"][0]["id"] == dead["id"]
        assert [one["name"] for one in b.answer("status")["streams"][0]["consumers"]] == ["fixed", "idle", "search"]
        for method, path, body in (
            ("POST", "/search/receive", {}),
            ("POST", "/search/ack", {"ack_ids": [flying["ack_id"]]}),
            ("POST", "/search/pause", {}),
            ("POST", "", {"name": "other"}),
            ("DELETE", "/search", None),
        ):
            refused = call(b, method, path, body)
            assert (refused.status_code, refused.json()["code"]) == (503, "read_only"), refused.text
            assert refused.json()["details"]["address"].startswith("grpc://"), refused.text
        documents = list((b.home / "data" / "replication" / STREAM).glob("consumers*.document"))
        assert {file.name: file.stat().st_mode & 0o777 for file in documents} == {
            "consumers.document": 0o600,
            "consumers_key.document": 0o600,
        }
        a.kill()
        assert b.ask("promote").returncode == 0
        a.start("serve")
        a.start("follow", "b")
        eventually(lambda: a.log("serve").count("serve: listening") == 2, "a listens again", a)
        assert settled(b, "ack", flying) == ["acked"], "a delivery of before the promotion counts"
        assert [message["record"]["row"]["id"] for message in all_of(b, 3)] == [3, 4, 5]
        found = shown(b)
        assert (found["delivered"], found["redelivered"], found["acked"], found["dead"]) == (6, 0, 2, 1)
        refused = call(b, "DELETE", "/fixed")
        assert (refused.json()["code"], shown(b, "fixed")["state"]) == ("consumer_configured", "active")
        call(b, "DELETE", "/idle")
        call(b, "POST", "/search/pause", {})
        # The old leader has the new leader's consumers, and none of its own.
        eventually(
            lambda: [one["name"] for one in call(a, "GET").json()["consumers"]] == ["fixed", "search"], "b's come", a, b
        )
        eventually(lambda: shown(a)["state"] == "paused", "with their progress", a, b)
        assert not (a.home / "data" / "delivery" / STREAM).exists()


def test_a_promoted_node_goes_on_pushing_rows_of_postgresql_to_kafka_without_a_call(
    tmp_path: Path, postgres: Database, kafka_server: EmbeddedKafka
) -> None:
    """Its server had no consumers when it began, and pushed nothing until a call asked for them."""
    source = f'[streams.{STREAM}.source]\ndsn = {json.dumps(postgres.dsn)}\nslot = "kafka_{os.getpid()}"\n'
    topic, count = f"shop{secrets.token_hex(4)}", 3000
    with postgres.connect() as connection, nodes(tmp_path, acks="durable(1)", stream=source) as (a, b):
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY, total int NOT NULL)")
        connection.execute("INSERT INTO orders SELECT n, 0 FROM generate_series(1, %s) n", [count])
        b.start("follow", "a")
        a.start("serve")
        b.start("serve")
        a.start("owner")
        eventually(lambda: len(b.rows()) == count and a.url() and b.url(), "the copy comes", a, b)
        sink = {"location": kafka_server.servers, "topic": topic, "format": "json"}
        made = call(a, "POST", body={"name": "search", "start": "earliest", "max_ack_pending": 10, "kafka": sink})
        assert made.status_code == 201, made.text
        eventually(lambda: shown(a)["acked"] >= 100, "a pushes", a, b)
        eventually(lambda: shown(b)["acked"] > 0, "b knows of it", a, b)
        a.kill()
        assert len(kafka_topics.received(kafka_server.servers, topic)) < count
        assert b.ask("promote").returncode == 0
        b.start("owner")
        a.start("follow", "b")
        connection.execute("UPDATE orders SET total = 1 WHERE id % 3 = 0")
        wanted = {id_: int(id_ % 3 == 0) for id_ in range(1, count + 1)}

        def rows() -> dict[int, int]:
            found = [
                json.loads(message.value or b"")["row"]
                for message in kafka_topics.received(kafka_server.servers, topic)
            ]
            return {row["id"]: row["total"] for row in found}

        eventually(lambda: rows() == wanted, "b pushes", a, b)
        ids = [message.id for message in kafka_topics.received(kafka_server.servers, topic)]
        assert len(set(ids)) == len(ids) == count + count // 3


def test_a_backfill_goes_on_though_its_node_dies_and_another_is_promoted(tmp_path: Path) -> None:
    """Every row comes, before any later record of its key; nothing stays from the rows of before under another id."""
    count = 400
    with nodes(tmp_path, acks="durable(1)", stream=KEYS) as (a, b):
        b.start("follow", "a")
        start(a, b)
        append(a, *range(count))
        assert call(a, "POST", body={"name": "search", "backfill": True}).status_code == 201
        before = all_of(a, 50)
        assert settled(a, "ack", *before) == ["acked"] * 50
        append(a, *range(count, count + 20))

        def known_rows() -> int:
            answer = call(b, "GET", "/search").json()  # 404 until the first state with the consumer has come
            return int((answer.get("backfill") or {}).get("rows", 0))

        eventually(lambda: known_rows() >= 50, "b knows of it", a, b)
        a.kill()
        assert b.ask("promote").returncode == 0
        b.start("owner")
        a.start("follow", "b")
        append(b, count + 20)
        rows: dict[str, int] = {}
        keys: list[int] = []

        def take() -> bool:
            some = received(b, 50)
            if some:
                settled(b, "ack", *some)
            for message in some:
                key = message["record"]["row"]["id"]
                if message["record"]["op"] == "r":
                    assert not keys, "a record came before the last row"
                    assert rows.setdefault(message["id"], key) == key
                else:
                    keys.append(key)
            return len(keys) > 20 and shown(b)["backfill"] is None

        eventually(take, "all come", a, b)
        assert sorted(rows.values()) == list(range(count))
        assert {message["id"] for message in before}.isdisjoint(rows)
        assert keys == list(range(count, count + 21))
        assert shown(b)["lag"]["records"] == 0


class Receiver:
    """A client that receives and acknowledges, at whichever node leads, until it is ended."""

    def __init__(self, of: list[Node]) -> None:
        self._nodes = of
        self._ending = threading.Event()
        self.rows: dict[str, int] = {}
        """The row of each message, by the message's id."""
        self.first: dict[int, list[int]] = defaultdict(list)
        """For each key its values, in the order in which their messages first came."""
        self.broken: list[str] = []
        self.duplicates = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.is_set():
            for node in self._nodes:
                with contextlib.suppress(httpx.HTTPError, AssertionError, ValueError):
                    some = received(node, 7)
                    for message in some:
                        self._take(message)
                    settled(node, "ack", *some)
            time.sleep(0.05)

    def _take(self, message: dict[str, Any]) -> None:
        row = message["record"]["row"]
        known = self.rows.setdefault(message["id"], row["value"])
        if known != row["value"]:
            self.broken.append(f"{message['id']} was {known}, and is {row['value']}")
        if row["value"] in self.first[row["id"]]:
            self.duplicates += 1
        else:
            self.first[row["id"]].append(row["value"])

    def values(self) -> set[int]:
        """Return the values that have come."""
        return {value for values in list(self.first.values()) for value in list(values)}

    def end(self) -> None:
        self._ending.set()
        self._thread.join(120)
        assert not self._thread.is_alive()


def test_promotions_under_kills_lose_no_message(tmp_path: Path) -> None:
    written: list[int] = []
    with nodes(tmp_path, acks="durable(1)", stream=KEYS) as (a, b):
        b.start("follow", "a")
        start(a, b)
        append(a, -1)
        assert call(a, "POST", body={"name": "search", "ack_wait_ms": 2000}).status_code == 201
        eventually(lambda: call(b, "GET", "/search").status_code == 200, "it comes", a, b)
        receiver = Receiver([a, b])
        ending = threading.Event()

        def write() -> None:
            value = 0
            while not ending.is_set():
                for node in (a, b):
                    with (
                        contextlib.suppress(MillstreamError, OSError),
                        millstream.connect(node.url(), timeout_s=2.0) as home,
                    ):
                        for _ in range(20):
                            value += 1
                            home.append(STREAM, "orders", {"id": value % 5, "value": value}, deadline_s=2)
                            written.append(value)

        writer = threading.Thread(target=write)
        writer.start()
        try:
            leader, follower = a, b
            for _ in range(4):
                count = len(written)
                eventually(lambda before=count: len(written) > before + 40, "writes go on", a, b)
                leader.kill()
                promoted = follower.ask("promote")
                assert promoted.returncode == 0, promoted.stderr
                leader.start("follow", follower.name)
                leader.start("owner")
                leader.start("serve")
                leader, follower = follower, leader
            count = len(written)
            eventually(lambda: len(written) > count + 40, "writes go on", a, b)
        finally:
            ending.set()
            writer.join(120)
        last = max(written)
        try:
            eventually(lambda: set(written) <= receiver.values(), f"all up to {last} come", a, b)
        finally:
            receiver.end()
        assert receiver.broken == []
        for key, values in receiver.first.items():
            assert values == sorted(values), f"key {key} came out of order"


def test_a_restored_home_has_its_consumers(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with nodes(tmp_path, "a", more=f'object_store = "{store.as_uri()}"\n', stream=KEYS) as (a,):
        start(a)
        append(a, *range(4))
        assert call(a, "POST", body={"name": "search", "start": "earliest", "ack_wait_ms": 20_000}).status_code == 201
        acked, flying, _ = all_of(a, 3)
        assert settled(a, "ack", acked) == ["acked"]

        def stored() -> list[int]:
            files = sorted(store.glob(f"{STREAM}/*/documents/consumers/*/*"))
            found = copied_consumers(files[-1]) if files else {}
            return [one.state.counters.acked for one in found.values()]

        eventually(lambda: stored() == [1], "an idle log's consumers are stored", a)
        assert not list(store.rglob("consumers_key"))
        a.kill()
    done(a.home, "restore", "--from", store.as_uri(), "--stream", STREAM, str(tmp_path / "restored"))
    with (tmp_path / "restored" / "millstream.toml").open("a") as config:
        config.write(KEYS)
    with millstream.open(tmp_path / "restored") as home:
        found = home.consumers(STREAM).get("search")
        assert (found["acked"], found["in_flight"], found["lag"]["records"]) == (1, 2, 3)
        answer = home._home_consumers().call(STREAM, "ack", "search", {"ack_ids": [flying["ack_id"]]})
        assert [result["status"] for result in answer.body["results"]] == ["unknown"], "the key isn't in the store"
        home.append(STREAM, "orders", {"id": 9})
        with home.consume(STREAM, "search", wait_s=40) as messages:
            ids = [message.record["row"]["id"] for _, message in zip(range(4), messages, strict=False)]
        assert sorted(ids) == [1, 2, 3, 9]
