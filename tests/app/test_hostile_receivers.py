"""Push sinks of a server that is killed, with receivers that behave badly: nothing is lost, each group keeps its order."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.app.homes import wait_for
from tests.delivery.receivers import Answerer, Receiver, Request, answer
from tests.serving.serving_process import Served, served, web_home

from millstream.testing.redis import EmbeddedRedis

SECRET = "whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
CONSUMERS = "/v1/streams/web/consumers"
KEYS = '[streams.web.keys]\n"public.orders" = ["id"]\n'
GROUPS, ROWS = 7, 20
WAITING_MAX = 100 * ROWS
Arrival = tuple[str, dict[str, Any]]
"""A message's id and its record."""


def hook(name: str, url: str, *more: str, limits: str = "") -> str:
    """Return a consumer of the file."""
    table = f"streams.web.consumers.{name}"
    head = f'[{table}]\nstart = "earliest"\n{limits}\n[{table}.webhook]\nurl = "{url}"\nsecret = "{SECRET}"\n'
    return head + "\n".join((*more, ""))


def shown(server: Served, name: str) -> dict[str, Any]:
    with server.client() as client:
        found: dict[str, Any] = client.get(f"{CONSUMERS}/{name}").json()
        return found


@contextmanager
def writing(server: Served, name: str, next_row: Callable[[], int]) -> Iterator[None]:
    """Append rows until the block ends; each group's rows have growing numbers.

    A hostile receiver takes a hundredth of what can be written: while much waits for it, nothing is.
    """
    is_over = threading.Event()

    def write() -> None:
        while not is_over.is_set():
            if shown(server, name)["lag"]["records"] > WAITING_MAX:
                is_over.wait(0.1)
                continue
            rows = [{"id": number % GROUPS, "n": number} for number in (next_row() for _ in range(ROWS))]
            assert server.post("orders", rows).status_code == 200

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(120)
        assert not thread.is_alive()


class Numbers:
    """Numbers of rows, for one thread at a time."""

    def __init__(self) -> None:
        self.count = 0

    def next(self) -> int:
        self.count += 1
        return self.count - 1


def run_with_kills(home: Path, name: str, kills: int, trouble: Callable[[int], None] = lambda _: None) -> int:
    """Write while the server is killed again and again, until all is acknowledged; return the number of rows."""
    numbers = Numbers()
    for kill in range(kills + 1):
        with served(home) as server:
            with writing(server, name, numbers.next):
                acked = shown(server, name)["acked"]
                trouble(kill)
                wait_for(
                    lambda acked=acked, server=server: shown(server, name)["acked"] > acked + ROWS,
                    what=lambda server=server: shown(server, name),
                )
            if kill < kills:
                server.process.kill()
                continue
            wait_for(
                lambda server=server: shown(server, name)["lag"]["records"] == 0,
                what=lambda server=server: shown(server, name),
            )
            assert shown(server, name)["dead"] == 0
    return numbers.count


def check(arrivals: Iterable[Arrival], rows: int) -> None:
    """Check that each row arrived, under one id alone, and first after all earlier ones of its group."""
    first: dict[str, dict[str, Any]] = {}
    for id_, record in arrivals:
        assert first.setdefault(id_, record) == record
        assert id_ == "web-{shard}-{epoch}-{offset}".format(**record)
    found = [(record["row"]["id"], record["row"]["n"]) for record in first.values()]
    assert sorted(n for _, n in found) == list(range(rows))
    for group in range(GROUPS):
        own = [n for id_, n in found if id_ == group]
        assert own == sorted(own)


# --- webhooks --------------------------------------------------------------------------------------------------------


def answers_badly(chance: random.Random) -> tuple[Answerer, list[Request]]:
    """Return an answerer that accepts about every second request, and the requests that it accepted."""
    accepted: list[Request] = []
    lock = threading.Lock()

    def never(connection: socket.socket, _: Request) -> None:
        connection.settimeout(5)
        connection.recv(1)  # until the other side gives up

    def slowly(connection: socket.socket, _: Request) -> None:
        for byte in b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok":
            connection.sendall(bytes((byte,)))

    def garbage(connection: socket.socket, _: Request) -> None:
        connection.sendall(b"\x00\xff not HTTP at all\r\n\r\n")

    def early(connection: socket.socket, _: Request) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-le")
        connection.shutdown(socket.SHUT_RDWR)

    bad: list[Answerer] = [
        never,
        garbage,
        early,
        answer(500),
        answer(400),
        answer(429, headers="retry-after: 0\r\n"),
        answer(302, headers="location: http://127.0.0.1:1/\r\n"),
    ]

    def sometimes(connection: socket.socket, request: Request) -> None:
        with lock:
            drawn = chance.randrange(2 * len(bad))
            if drawn >= len(bad):
                accepted.append(request)
        behave = bad[drawn] if drawn < len(bad) else slowly if drawn % 2 else answer(204)
        behave(connection, request)

    return sometimes, accepted


@pytest.mark.long
@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=[pytest.mark.siege, pytest.mark.timeout(1800)])])
def test_a_hostile_webhook_gets_everything_in_order_through_kills(tmp_path: Path, kills: int) -> None:
    answerer, accepted = answers_badly(random.Random(kills))
    with Receiver(answerer) as receiver:
        settings = 'allow_private = true\nbatch_size = 5\ntimeout = "300ms"\nretry_min = "10ms"\nretry_max = "50ms"'
        home = web_home(tmp_path / "home", more=KEYS + hook("search", receiver.url, settings, limits="max_deliver = 0"))
        rows = run_with_kills(home, "search", kills)
        requests = list(receiver.requests)
    messages: dict[str, list[str]] = {}
    for request in requests:
        found = [message["id"] for message in json.loads(request.body)["messages"]]
        assert messages.setdefault(request.headers["webhook-id"], found) == found  # a retry repeats the same messages
    for some in (requests, accepted):
        bodies = [json.loads(request.body)["messages"] for request in some]
        check(((message["id"], message["record"]) for body in bodies for message in body), rows)


@pytest.mark.long
def test_a_name_with_a_private_address_is_shown_tried_again_and_no_failure(tmp_path: Path) -> None:
    with Receiver() as refused, Receiver() as other:
        home = web_home(tmp_path / "home", more=KEYS + hook("other", other.url, "allow_private = true"))
        with served(home) as server, server.client() as client:
            settings = {"url": f"http://localhost:{refused.port}/", "secret": SECRET, "retry_min": "10ms"}
            settings["retry_max"] = "10ms"
            body = {"name": "inner", "start": "earliest", "max_deliver": 1, "webhook": settings}
            made = client.post(CONSUMERS, json=body)
            assert (made.status_code, made.json()["webhook"]["secret"]) == (201, "***")
            server.post("orders", [{"id": 1}])
            wait_for(lambda: "public" in str(shown(server, "inner")["error"]), what=lambda: shown(server, "inner"))
            wait_for(lambda: shown(server, "other")["acked"] == 1, what=lambda: shown(server, "other"))
            found = shown(server, "inner")
            assert (found["state"], found["dead"], found["acked"]) == ("active", 0, 0)
            assert SECRET.removeprefix("whsec_") not in "".join(map(str, (found, server.said)))
            assert client.delete(f"{CONSUMERS}/inner").status_code == 204
        assert refused.connections == 0


@pytest.mark.long
def test_a_request_in_flight_outlives_a_pause_and_not_a_rewind(tmp_path: Path) -> None:
    may_answer, arrived = threading.Event(), threading.Event()

    def held(connection: socket.socket, request: Request) -> None:
        arrived.set()
        may_answer.wait(60)
        answer(200)(connection, request)

    with Receiver(held) as receiver:
        home = web_home(tmp_path / "home", more=KEYS + hook("search", receiver.url, "allow_private = true"))
        with served(home) as server, server.client() as client:
            server.post("orders", [{"id": 1}])
            assert arrived.wait(60)
            assert client.post(f"{CONSUMERS}/search/pause").json()["in_flight"] == 1
            may_answer.set()
            wait_for(lambda: shown(server, "search")["acked"] == 1, what=lambda: shown(server, "search"))
            may_answer.clear()
            arrived.clear()
            client.post(f"{CONSUMERS}/search/rewind", json={"to": "earliest"})
            client.post(f"{CONSUMERS}/search/resume")
            assert arrived.wait(60)
            client.post(f"{CONSUMERS}/search/rewind", json={"to": "earliest"})
            may_answer.set()
            wait_for(lambda: shown(server, "search")["acked"] == 2, what=lambda: shown(server, "search"))
            wait_for(lambda: shown(server, "search")["lag"]["records"] == 0)
        bodies = [json.loads(request.body)["messages"] for request in receiver.requests]
        assert [message["deliveries"] for body in bodies for message in body] == [1, 1, 1]
        assert len({request.headers["webhook-id"] for request in receiver.requests}) <= len(receiver.requests)


# --- Redis -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("kills", [1, pytest.param(30, marks=[pytest.mark.siege, pytest.mark.timeout(1800)])])
def test_streams_of_redis_have_everything_in_order_through_kills_of_both(tmp_path: Path, kills: int) -> None:
    import redis

    with EmbeddedRedis(tmp_path / "redis") as store:
        table = f'[streams.web.consumers.search]\nstart = "earliest"\nmax_deliver = 0\nredis.location = "{store.url}"\n'
        home = web_home(tmp_path / "home", more=KEYS + table)

        def trouble(kill: int) -> None:
            if kill % 2 == 0:
                store.kill()
                store.start()

        rows = run_with_kills(home, "search", kills, trouble)
        with redis.Redis.from_url(store.url, decode_responses=True) as client:
            entries: Any = client.xrange("web.public.orders")
        assert {frozenset(fields) for _, fields in entries} == {frozenset({"id", "op", "record"})}
        check(((fields["id"], json.loads(fields["record"])) for _, fields in entries), rows)
