"""Many consumers of a server that is killed again and again: nothing is lost, and each group keeps its order."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.app.homes import done, wait_for
from tests.seeds import Seeds
from tests.serving.serving_process import Served, served, web_home

pytestmark = [pytest.mark.siege, pytest.mark.timeout(1800)]

CONSUMERS, KILLS, ROWS = 50, 50, 20
POISON = 3
"""A row with this id is never acknowledged."""
KEYS = """[streams.web.keys]
"public.orders" = ["id"]
"public.notes" = ["id"]
[streams.web.log]
shards = 2
[streams.web.shards]
"public.notes" = 1
"""
Matches = Callable[[dict[str, Any]], bool]
KINDS: list[tuple[dict[str, Any], Matches]] = [
    ({}, lambda _: True),
    ({"tables": ["public.orders"]}, lambda record: record["table"] == "public.orders"),
    ({"where": "n > 50"}, lambda record: record["row"]["n"] > 50),
    ({"group_by": "none", "tables": ["public.notes"]}, lambda record: record["table"] == "public.notes"),
    ({"max_ack_pending": 5}, lambda _: True),
]


def id_of(record: dict[str, Any]) -> str:
    return "web-{shard}-{epoch}-{offset}".format(**record)


class Receiver:
    """One consumer's client. It acknowledges, returns, forgets and pauses at random, and outlives its server."""

    def __init__(self, number: int, seed: int) -> None:
        self.name = f"c{number}"
        self.fields, self.matches = KINDS[number % len(KINDS)]
        self.acked: dict[str, list[int]] = {}
        """The offsets of the acknowledged messages of each group, in the order of their first acknowledgement."""
        self.known: set[str] = set()
        self.unsure: set[str] = set()
        """Messages whose acknowledgement the server may not have got."""
        self.calm = False
        self.failure: BaseException | None = None
        self._chance = random.Random(seed * CONSUMERS + number)
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, server: Served) -> None:
        self._ending.clear()
        self._thread = threading.Thread(target=self._run, args=(server,))
        self._thread.start()

    def end(self) -> None:
        self._ending.set()
        assert self._thread is not None
        self._thread.join(120)
        assert not self._thread.is_alive()
        if self.failure is not None:
            raise self.failure

    def _run(self, server: Served) -> None:
        settled: set[str] = set()
        try:
            while not self._ending.wait(0.01) and server.process.poll() is None:
                # A server that lives closes connections, too: those that a busy machine let idle.
                with contextlib.suppress(httpx.TransportError):
                    self._call(server, settled)
        except BaseException as error:  # noqa: BLE001 - raised at the end
            self.failure = error

    def _call(self, server: Served, settled: set[str]) -> None:
        """Take turns over one connection."""
        url = f"{server.url}/v1/streams/web/consumers/{self.name}"
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            self._post(client, "resume", {})  # a kill may have come between the two calls of a pause
            while not self._ending.is_set():
                self._turn(client, settled)

    def _turn(self, client: httpx.Client, settled: set[str]) -> None:
        messages = self._post(client, "receive", {"batch_size": 20, "wait_for_ms": 300})["messages"]
        for message in messages:
            assert message["id"] not in settled, "an acknowledged message came again without a restart"
        fates: dict[str, list[dict[str, Any]]] = {"ack": [], "nack": [], "forget": []}
        returned: set[str] = set()
        for message in messages:
            chance = 1.0 if self.calm else self._chance.random()
            is_poison = message["record"]["row"]["id"] == POISON
            fate = "nack" if is_poison or chance < 0.05 else "forget" if chance < 0.07 else "ack"
            if message["group"] in returned:
                fate = "forget"  # it goes back with the earlier one of its group
            if fate != "ack":
                returned.add(message["group"])
            fates[fate].append(message)
        for how in ("ack", "nack"):
            ids = [message["ack_id"] for message in fates[how]]
            if how == "ack":
                self.unsure.update(message["id"] for message in fates[how])
            results = self._post(client, how, {"ack_ids": ids})["results"] if ids else []
            for message, result in zip(fates[how], results, strict=True):
                if result["status"] == "acked":
                    settled.add(message["id"])
                    self.unsure.discard(message["id"])
                    if message["id"] not in self.known:
                        self.known.add(message["id"])
                        self.acked.setdefault(message["group"], []).append(message["record"]["offset"])
        if not self.calm and self._chance.random() < 0.03:
            self._post(client, "pause", {})
            self._post(client, "resume", {})

    @staticmethod
    def _post(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
        answer = client.post(f"/{path}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


def test_consumers_of_a_server_that_is_killed_lose_nothing(tmp_path: Path, seeds: Seeds) -> None:
    seed = seeds.kept_or_new(1)
    chance = random.Random(seed)
    home = web_home(tmp_path / "home", more=KEYS)
    receivers = [Receiver(number, seed) for number in range(CONSUMERS)]
    written = 0
    dead: dict[str, set[str]] = {}
    for turn in range(KILLS + 1):
        is_last = turn == KILLS
        with served(home) as server, server.client() as client:
            if turn == 0:
                for receiver in receivers:
                    limits = {"ack_wait_ms": 1000, "max_deliver": 3}
                    body = {"name": receiver.name, "start": "earliest", **limits, **receiver.fields}
                    assert client.post("/v1/streams/web/consumers", json=body).status_code == 201
            for receiver in receivers:
                receiver.calm = is_last
                receiver.start(server)
            for _ in range(4):
                tables: dict[str, list[dict[str, int]]] = {"orders": [], "notes": []}
                for _ in range(ROWS // 4):
                    written += 1
                    row = {"id": chance.randrange(10), "n": chance.randrange(100), "v": written}
                    tables[chance.choice(["orders", "notes"])].append(row)
                assert client.post("/v1/streams/web/tables", json={"tables": tables}).status_code == 200
                time.sleep(chance.random() / 4)
            if is_last:
                wait_for(
                    lambda: any(receiver.failure for receiver in receivers) or not any(behind(client)),
                    seconds=300,
                    what=lambda: behind(client),
                )
                for receiver in receivers:
                    receiver.end()
                dead = {receiver.name: dead_ids(client, receiver.name) for receiver in receivers}
            else:
                server.process.send_signal(signal.SIGKILL)
                server.process.wait()
                for receiver in receivers:
                    receiver.end()
    records = [json.loads(line) for line in done(home, "wal", "cat").splitlines()]
    assert len(records) == written
    for receiver in receivers:
        wanted = {id_of(record): record for record in records if receiver.matches(record)}
        lost = wanted.keys() - receiver.known - receiver.unsure - dead[receiver.name]
        assert not lost, (receiver.name, lost)
        assert receiver.known <= wanted.keys()
        poison = {id_ for id_, record in wanted.items() if record["row"]["id"] == POISON}
        assert poison <= dead[receiver.name]
        if receiver.fields.get("group_by") != "none":
            for group, offsets in receiver.acked.items():
                assert offsets == sorted(offsets), (receiver.name, group)


def behind(client: httpx.Client) -> list[int]:
    """Return of each consumer the number of records that aren't settled."""
    found = client.get("/v1/streams/web/consumers").json()["consumers"]
    return [one["lag"]["records"] for one in found]


def dead_ids(client: httpx.Client, name: str) -> set[str]:
    page = client.get(f"/v1/streams/web/consumers/{name}/dead", params={"limit": 1000}).json()
    assert page["next"] is None
    return {letter["id"] for letter in page["dead"]}
