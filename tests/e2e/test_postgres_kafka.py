"""Rows of PostgreSQL in topics of Kafka, end to end: copies, changes and backfills, through what happens while they are pushed."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.app.homes import config, make_home, wait_for
from tests.commands import Command
from tests.delivery.kafka_topics import Received, received
from tests.serving.serving_process import Served, served

from millstream.testing.kafka import EmbeddedKafka
from millstream.testing.pytest_plugin import Database

CONSUMERS = "/v1/streams/shop/consumers"
SEARCH = f"{CONSUMERS}/search"
ROWS = 600
FILL = f"""
CREATE TABLE orders (id int PRIMARY KEY, total int NOT NULL);
CREATE TABLE items (id int PRIMARY KEY);
INSERT INTO orders SELECT n, 0 FROM generate_series(1, {ROWS}) n
"""


@dataclass
class Shop:
    """A captured database, and a consumer that pushes it to a topic."""

    database: Database
    kafka: EmbeddedKafka
    topic: str
    http: httpx.Client
    server: Served

    def execute(self, *statements: str) -> None:
        with self.database.connect() as connection:
            for statement in statements:
                connection.execute(statement)

    def rows(self) -> dict[int, int]:
        """Return the table's rows."""
        with self.database.connect() as connection:
            return dict(connection.execute("SELECT id, total FROM orders").fetchall())

    def create(self, **fields: Any) -> None:
        """Make the consumer; so few messages are in flight that a push of all takes many transactions."""
        sink = {"location": self.kafka.servers, "topic": f"{self.topic}.{{table}}", "format": "json"}
        body = {"name": "search", "start": "earliest", "max_ack_pending": 10, "kafka": sink, **fields}
        answer = self.http.post(CONSUMERS, json=body)
        assert answer.status_code == 201, answer.text

    def post(self, what: str, **body: Any) -> dict[str, Any]:
        answer = self.http.post(f"{SEARCH}/{what}", json=body)
        assert answer.is_success, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def shown(self) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get(SEARCH).json()
        return found

    def wait_acked(self, least: int) -> None:
        wait_for(lambda: self.shown()["acked"] >= least, what=self.shown)

    def wait_settled(self) -> None:
        wait_for(lambda: self.shown()["lag"]["records"] == 0 and self.shown()["backfill"] is None, what=self.shown)

    def wait_pushed(self, count: int) -> None:
        """Wait until so many messages are settled and none is left."""
        self.wait_acked(count)
        self.wait_settled()
        assert self.shown()["acked"] == count, self.shown()

    def messages(self, table: str = "orders") -> list[Received]:
        """Return a topic's committed messages; tombstones of deletes have no value and are left out."""
        topic = f"{self.topic}.{table}"
        found = received(self.kafka.servers, topic)
        return [message for message in found if message.topic == topic and message.value is not None]


def state(messages: list[Received]) -> dict[int, int]:
    """Return the rows that a reader of the topic has."""
    rows: dict[int, int] = {}
    for message in messages:
        record = json.loads(message.value or b"")
        if record["op"] == "d":
            rows.pop(record["row"]["id"], None)  # a copy may have begun behind the delete
        else:
            rows[record["row"]["id"]] = record["row"]["total"]
    return rows


def assert_once(messages: list[Received]) -> None:
    twice = [id_ for id_, count in Counter(message.id for message in messages).items() if count > 1]
    assert not twice, twice[:5]


@contextmanager
def capturing(home: Path) -> Iterator[None]:
    """Run capture."""
    log = home.parent / "capture.log"
    with (
        log.open("ab") as output,
        Command(
            ["--home", str(home), "capture", "run"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "HOME": "/nonexistent"},
        ) as process,
    ):
        try:
            yield
            assert process.poll() is None, log.read_text()[-4000:]
        finally:
            process.kill()
            process.wait()


@contextmanager
def running(home: Path, database: Database, kafka: EmbeddedKafka, topic: str) -> Iterator[Shop]:
    """Capture and serve the home."""
    with capturing(home), served(home) as server, server.client() as http:
        wait_for(lambda: http.get(CONSUMERS).status_code == 200, what=lambda: http.get(CONSUMERS).text)
        yield Shop(database, kafka, topic, http, server)


@pytest.fixture
def home(tmp_path: Path, postgres: Database) -> Path:
    """A home with 600 rows to copy."""
    text = config(postgres.dsn, None, tables='["public.orders", "public.items"]') + '[http]\nlisten = "127.0.0.1:0"\n'
    with postgres.connect() as connection:
        connection.execute(FILL)
    return make_home(tmp_path / "home", text)


@pytest.fixture
def topic() -> str:
    return f"shop{secrets.token_hex(4)}"


@pytest.fixture
def shop(home: Path, postgres: Database, kafka_server: EmbeddedKafka, topic: str) -> Iterator[Shop]:
    with running(home, postgres, kafka_server, topic) as found:
        yield found


@pytest.mark.long
def test_copies_changes_and_a_backfill_reach_the_topic_once_and_in_the_order_of_each_key(shop: Shop) -> None:
    shop.create(max_ack_pending=200)
    shop.execute("UPDATE orders SET total = 1 WHERE id <= 10", "DELETE FROM orders WHERE id = 1")
    wait_for(lambda: state(shop.messages()) == shop.rows(), what=shop.shown)
    # A change that commits during the copy may be in it, and is delivered behind it as well: a last one shows that all came.
    shop.execute("INSERT INTO orders VALUES (0, 7)")
    wait_for(lambda: state(shop.messages()) == shop.rows(), what=shop.shown)
    shop.wait_settled()
    assert_once(shop.messages())
    before = len(shop.messages())
    number = shop.post("backfill", tables=["public.orders"])["backfill"]
    shop.execute("UPDATE orders SET total = total + 1 WHERE id % 2 = 0", "DELETE FROM orders WHERE id = 3")
    changes = len([id_ for id_ in shop.rows() if id_ % 2 == 0]) + 1
    shop.wait_pushed(before + ROWS + changes)
    added = shop.messages()[before:]
    rows = [message for message in added if message.id.startswith(f"shop-b{number}-")]
    assert (len(rows), len(added)) == (ROWS, ROWS + changes)
    assert state(added) == shop.rows(), "each row of the backfill stands before later changes of its key"
    assert_once(shop.messages())


@pytest.mark.long
def test_a_consumer_that_is_paused_while_it_pushes_goes_on_where_it_was(shop: Shop) -> None:
    shop.create()
    shop.wait_acked(30)
    assert shop.post("pause")["state"] == "paused"
    shop.execute("INSERT INTO orders VALUES (0, 7)")
    stood = len(shop.messages())
    assert 30 <= stood < ROWS, "it was paused while it pushed"
    assert shop.post("resume")["state"] == "active"
    shop.wait_pushed(ROWS + 1)
    assert_once(shop.messages())
    assert state(shop.messages()) == shop.rows()


@pytest.mark.long
def test_a_consumer_that_is_deleted_while_it_pushes_stops_and_another_of_its_name_pushes_all(shop: Shop) -> None:
    shop.create()
    shop.wait_acked(30)
    assert shop.http.delete(SEARCH).status_code == 204
    assert shop.http.get(SEARCH).json()["code"] == "unknown_consumer"
    first = shop.messages()
    assert 30 <= len(first) < ROWS, "it was deleted while it pushed"
    assert_once(first)
    shop.create(max_ack_pending=200)
    shop.wait_pushed(ROWS)
    found = shop.messages()
    assert [message.id for message in found[: len(first)]] == [message.id for message in first]
    again = found[len(first) :]
    assert_once(again)
    assert state(again) == shop.rows()


@pytest.mark.long
def test_records_of_a_table_that_is_dropped_while_they_are_pushed_all_come(shop: Shop) -> None:
    shop.create()
    shop.wait_acked(30)
    shop.execute("DROP TABLE orders", "INSERT INTO items VALUES (1), (2)")
    assert len(shop.messages()) < ROWS, "it was dropped while it was pushed"
    wait_for(lambda: len(shop.messages("items")) == 2 and len(shop.messages()) >= ROWS, what=shop.shown)
    wait_for(lambda: shop.shown()["lag"]["records"] == 0, what=shop.shown)
    rows = [message for message in shop.messages() if json.loads(message.value or b"")["op"] == "r"]
    assert state(rows) == dict.fromkeys(range(1, ROWS + 1), 0)
    assert_once(shop.messages())
    assert (shop.shown()["state"], shop.shown()["error"], shop.shown()["dead"]) == ("active", None, 0)


@pytest.fixture
def small_disk(home: Path) -> Iterator[Path]:
    """The folder of the consumers' state, on a disk of 4 MiB."""
    folder = home / "data" / "delivery"
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.as_root  # only root can mount a disk
@pytest.mark.long
@pytest.mark.parametrize("is_killed", [False, True], ids=["freed", "killed"])
def test_a_consumer_whose_disk_is_full_while_it_pushes_goes_on_once_there_is_room(
    home: Path, small_disk: Path, postgres: Database, kafka_server: EmbeddedKafka, topic: str, is_killed: bool
) -> None:
    """Messages that Kafka had committed aren't sent again, though their acknowledgements aren't durable."""
    ballast = small_disk / "ballast"
    with running(home, postgres, kafka_server, topic) as shop:
        shop.create()
        shop.wait_acked(30)
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 12))
        assert ballast.stat().st_size > 1 << 20
        wait_for(lambda: "space" in str(shop.shown()["error"]), what=shop.shown)
        assert len(shop.messages()) < ROWS, "the disk was full while it pushed"
        if is_killed:
            shop.server.process.kill()
            shop.server.process.wait()
        ballast.unlink()
        if not is_killed:
            shop.wait_pushed(ROWS)
            assert (shop.shown()["error"], shop.shown()["dead"]) == (None, 0)
    with running(home, postgres, kafka_server, topic) as shop:
        wait_for(lambda: len(shop.messages()) >= ROWS, what=shop.shown)
        wait_for(lambda: shop.shown()["lag"]["records"] == 0, what=shop.shown)
        assert_once(shop.messages())
        assert state(shop.messages()) == shop.rows()
