"""Consumers over HTTP, of a server in a process of its own: nothing is lost, and every answer is as documented."""

from __future__ import annotations

import gzip
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.app.homes import done, make_home
from tests.app.served import serving
from tests.serving.serving_process import Served, served, web_home

from millstream.delivery.definition import REQUEST_FIELDS

WAITING = {"wait_for_ms": 30_000}
KEYS = '[streams.web.keys]\n"public.orders" = ["id"]\n'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(web_home(tmp_path_factory.mktemp("web") / "home", more=KEYS)) as found:
        for n in range(3):
            found.post("orders", [{"id": n, "note": f"n{n}"}])
        yield found


class Http:
    """Requests of paths behind an address; the empty path is the address itself."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = httpx.Client(timeout=60, trust_env=False)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self._client.post(self.url + path, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self._client.get(self.url + path, **options)

    def delete(self, path: str) -> httpx.Response:
        return self._client.delete(self.url + path)


class Client:
    """One stream's consumers, as a client calls them."""

    def __init__(self, url: str) -> None:
        self.http = Http(f"{url}/v1/streams/web/consumers")

    def make(self, name: str, status: int = 201, **fields: Any) -> dict[str, Any]:
        made: dict[str, Any] = self.answer(self.http.post("", json={"name": name, **fields}), status)
        return made

    def post(self, path: str, status: int = 200, **body: Any) -> Any:
        return self.answer(self.http.post(f"/{path}", json=body), status)

    def get(self, path: str, status: int = 200, **params: Any) -> Any:
        return self.answer(self.http.get(f"/{path}", params=params), status)

    def receive(self, name: str, **body: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.post(f"{name}/receive", **body)["messages"]
        return found

    def settle(self, name: str, how: str, *messages: dict[str, Any], **fields: Any) -> list[str]:
        ids = [message["ack_id"] for message in messages]
        results = self.post(f"{name}/{how}", ack_ids=ids, **fields)["results"]
        assert [result["ack_id"] for result in results] == ids
        return [result["status"] for result in results]

    @staticmethod
    def answer(response: httpx.Response, status: int) -> Any:
        assert response.status_code == status, response.text
        return response.json() if response.content else None


@pytest.mark.parametrize("path", ["consumers/c/ack", "consumers/c/receive", "query"])
def test_a_small_request_cannot_inflate_to_a_large_one(server: Served, path: str) -> None:
    """Sixteen megabytes of empty lists, 16 KiB as gzip, took half a gigabyte and stopped the event loop for a second."""
    url = f"{server.url}/v1/streams/web"
    httpx.post(f"{url}/consumers", json={"name": "c"}, trust_env=False)
    body = gzip.compress(b'{"ack_ids":[' + b"[]," * (1 << 20) + b"[]]}")
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = httpx.post(f"{url}/{path}", content=body, headers=headers, timeout=60, trust_env=False)
    assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")
    assert answer.json()["details"]["size_max"] == 2 << 20
    httpx.delete(f"{url}/consumers/c", trust_env=False)


def orders(messages: list[dict[str, Any]]) -> list[int]:
    return [message["record"]["row"]["id"] for message in messages]


def test_a_consumer_receives_and_acknowledges(server: Served) -> None:
    client = Client(server.url)
    made = client.make("search", tables=["public.orders"], start="earliest")
    assert made["cursor"].endswith(".s0")
    assert {name: value for name, value in made.items() if name != "cursor"} == {
        "name": "search", "tables": ["public.orders"], "where": None, "columns": None, "kind": "changes", "group_by": "key",
        "start": "earliest", "ack_wait_ms": 30000, "max_deliver": 10, "max_ack_pending": 1000, "backfill": False,
    }  # fmt: skip
    assert client.make("search", 200, tables=["public.orders"], start="earliest") == made
    refused = client.make("search", 409, start="earliest", max_deliver=1)
    assert (refused["code"], "with another max_deliver, tables" in refused["detail"]) == ("consumer_exists", True)
    messages = client.receive("search", batch_size=2)
    assert orders(messages) == [0, 1]
    lines = [json.loads(line) for line in done(server.home, "wal", "cat").splitlines()]
    assert [message["record"] for message in messages] == lines[:2]
    assert messages[0]["id"] == "web-{shard}-{epoch}-{offset}".format(**lines[0])
    assert [message["deliveries"] for message in messages] == [1, 1]
    assert all(len(message["ack_id"]) <= 200 for message in messages)
    assert client.settle("search", "ack", *messages, messages[0]) == ["acked", "acked", "already_acked"]
    shown = client.get("search")
    assert (shown["state"], shown["in_flight"], shown["dead"], shown["delivered"], shown["acked"]) == (
        "active",
        0,
        0,
        2,
        2,
    )
    assert (shown["lag"]["records"], shown["redelivered"], shown["error"], shown["backfill"]) == (1, 0, None, None)
    (last,) = client.receive("search")
    client.settle("search", "ack", last)
    assert client.get("search")["lag"] == {"records": 0, "bytes": 0, "seconds": 0.0}
    assert [one["name"] for one in client.answer(client.http.get(""), 200)["consumers"]] == ["search"]
    assert client.answer(client.http.delete("/search"), 204) is None
    assert client.get("search", 404)["code"] == "unknown_consumer"
    assert client.post("search/receive", 404)["code"] == "unknown_consumer"


def test_a_backfill_is_begun_once_under_a_key(server: Served) -> None:
    client = Client(server.url)
    client.make("keyed")
    begun = [
        client.answer(client.http.post("/keyed/backfill", headers={"Idempotency-Key": key}), status)
        for key, status in (("one", 202), ("one", 202), ("two", 409), ("", 422))
    ]
    assert begun[0] == begun[1]
    assert [one["code"] for one in begun[2:]] == ["backfill_running", "invalid_value"]
    client.http.delete("/keyed")


def test_a_nack_or_an_expiry_delivers_again_under_the_same_id(server: Served) -> None:
    client = Client(server.url)
    client.make("again", start="earliest", ack_wait_ms=300)
    first = client.receive("again", batch_size=1)[0]
    assert client.settle("again", "nack", first) == ["nacked"]
    second = client.receive("again", batch_size=1)[0]
    assert (second["id"], second["deliveries"]) == (first["id"], 2)
    assert client.settle("again", "ack", first) == ["superseded"]
    time.sleep(0.4)
    third = client.receive("again", batch_size=1)[0]
    assert (third["id"], third["deliveries"]) == (first["id"], 3)
    assert client.settle("again", "extend", third, ack_wait_ms=60_000) == ["extended"]
    time.sleep(0.4)
    assert third["id"] not in [message["id"] for message in client.receive("again")]
    assert client.settle("again", "ack", third) == ["acked"]
    client.http.delete("/again")


def test_forged_ack_ids_do_nothing(server: Served) -> None:
    client = Client(server.url)
    client.make("one", start="earliest")
    client.make("two", start="earliest")
    mine, other = client.receive("one")[0], client.receive("two")[0]
    ack_id = mine["ack_id"]
    forged = [ack_id[:-1] + ("A" if ack_id[-1] != "A" else "B"), "A" + ack_id[1:], "", "x" * 54, "é" * 54, ack_id + "="]
    forged = [text for text in forged if text != ack_id]
    results = client.post("one/ack", ack_ids=[*forged, other["ack_id"]])["results"]
    assert {result["status"] for result in results} == {"unknown"}
    assert client.get("one")["acked"] == 0
    client.http.delete("/one")
    client.make("one", start="earliest")
    assert client.receive("one")[0]["id"] == mine["id"]
    assert client.settle("one", "ack", mine) == ["unknown"]
    for name in ("one", "two"):
        client.http.delete(f"/{name}")


def test_one_answer_at_a_time_has_a_group(server: Served) -> None:
    client = Client(server.url)
    client.make("groups", tables=["public.orders"], start="latest")
    for n in range(3):
        server.post("orders", [{"id": 50, "note": f"{n}"}, {"id": 60 + n, "note": ""}])
    first = client.receive("groups", batch_size=3)
    assert orders(first) == [50, 60, 50]
    assert orders(client.receive("groups")) == [61, 62]
    assert first[0]["group"] == first[2]["group"] != first[1]["group"]
    assert client.settle("groups", "nack", first[0]) == ["nacked"]
    again = client.receive("groups")
    assert [(m["record"]["row"]["note"], m["deliveries"]) for m in again] == [("0", 2), ("1", 2), ("2", 1)]
    client.http.delete("/groups")


def test_a_poison_message_dies_alone_and_can_come_back(server: Served) -> None:
    client = Client(server.url)
    client.make("poison", tables=["public.orders"], start="earliest", max_deliver=2)
    poison: dict[str, Any] = {}
    for expected in (1, 2):
        poison, *others = [m for m in client.receive("poison") if m["record"]["row"]["id"] in {0, 1}]
        assert (poison["record"]["row"]["id"], poison["deliveries"]) == (0, expected)
        client.settle("poison", "nack", poison)
        if others:
            client.settle("poison", "ack", *others)
    shown = client.get("poison")
    assert shown["dead"] == 1
    page = client.get("poison/dead")
    (letter,) = page["dead"]
    assert page["next"] is None
    assert (letter["id"], letter["deliveries"], letter["group"]) == (poison["id"], 2, poison["group"])
    assert letter["record"] == poison["record"]
    assert set(letter) == {"id", "deliveries", "group", "record", "error", "died"}
    assert client.settle("poison", "nack", poison) == ["dead"]
    assert client.post("poison/dead/retry", ids=[letter["id"], "web-0-1-99999"])["results"] == [
        {"id": letter["id"], "status": "retried"},
        {"id": "web-0-1-99999", "status": "unknown"},
    ]
    (retried,) = client.receive("poison")
    assert (retried["id"], retried["deliveries"], retried["record"]) == (poison["id"], 1, poison["record"])
    assert client.settle("poison", "ack", retried) == ["acked"]
    assert client.get("poison/dead") == {"dead": [], "next": None}
    client.http.delete("/poison")


def test_a_waiting_receive_ends_with_the_first_record(server: Served) -> None:
    client = Client(server.url)
    client.make("waiting", tables=["public.later"])
    found: list[Any] = []

    def receive() -> None:
        begun = time.monotonic()
        found.extend([client.receive("waiting", wait_for_ms=30_000), time.monotonic() - begun])

    thread = threading.Thread(target=receive)
    thread.start()
    time.sleep(0.5)
    server.post("later", [{"id": 7}])
    thread.join(30)
    assert (orders(found[0]), found[1] < 10) == ([7], True)
    begun = time.monotonic()
    assert client.receive("waiting", wait_for_ms=300) == []
    assert 0.25 < time.monotonic() - begun < 10
    client.http.delete("/waiting")


@pytest.mark.parametrize(("how", "status"), [("pause", 200), ("delete", 404)])
def test_a_waiting_receive_ends_with_its_consumer(server: Served, how: str, status: int) -> None:
    client = Client(server.url)
    client.make("ends")
    found: list[httpx.Response] = []

    def receive() -> None:
        found.append(Client(server.url).http.post("/ends/receive", json=WAITING))

    thread = threading.Thread(target=receive)
    thread.start()
    time.sleep(0.5)
    begun = time.monotonic()
    if how == "pause":
        assert client.post("ends/pause")["state"] == "paused"
    else:
        client.http.delete("/ends")
    thread.join(30)
    assert time.monotonic() - begun < 10
    assert found[0].status_code == status
    client.http.delete("/ends")


def test_a_waiting_receive_ends_with_the_server(tmp_path: Path) -> None:
    found: list[httpx.Response] = []
    with serving(make_home(tmp_path / "home", "[streams.web]\n")) as url:
        client = Client(url)
        client.make("ends")
        thread = threading.Thread(target=lambda: found.append(client.http.post("/ends/receive", json=WAITING)))
        thread.start()
        time.sleep(0.5)
    thread.join(30)
    assert (found[0].status_code, found[0].json()) == (200, {"messages": []})


def test_a_paused_consumer_delivers_nothing_and_takes_acks(server: Served) -> None:
    client = Client(server.url)
    client.make("paused", start="earliest")
    message = client.receive("paused", batch_size=1)[0]
    assert client.post("paused/pause")["state"] == client.post("paused/pause")["state"] == "paused"
    assert client.receive("paused", wait_for_ms=10_000) == []
    assert client.settle("paused", "ack", message) == ["acked"]
    assert client.post("paused/resume")["state"] == "active"
    assert client.receive("paused", batch_size=1)[0]["id"] != message["id"]
    client.http.delete("/paused")


def test_rewinding_begins_again(server: Served) -> None:
    client = Client(server.url)
    client.make("rewound", tables=["public.orders"], start="earliest")
    first = client.receive("rewound")
    assert client.settle("rewound", "ack", *first[:2]) == ["acked", "acked"]
    assert client.post("rewound/rewind", to="earliest")["cursor"].endswith(".s0")
    assert client.settle("rewound", "ack", *first[:3]) == ["rewound"] * 3
    again = client.receive("rewound")
    assert [(m["id"], m["deliveries"]) for m in again] == [(m["id"], 1) for m in first]
    shown = client.post("rewound/rewind", to="latest")
    assert (shown["lag"]["records"], client.receive("rewound")) == (0, [])
    assert (
        client.post("rewound/rewind", 409, to=f"{shown['cursor'].split('.')[0]}.s999999")["code"] == "token_from_future"
    )
    assert client.post("rewound/rewind", 422, to="00000000.s1")["code"] == "invalid_value"
    assert client.post("rewound/rewind", 422, to="2999-01-01")["code"] == "invalid_value"
    assert client.get("rewound") == shown
    client.http.delete("/rewound")


def test_a_consumer_begins_at_a_token_or_a_time(server: Served) -> None:
    client = Client(server.url)
    server.post("times", [{"id": 1}])
    token = server.post("times", [{"id": 2}]).json()["token"]
    time.sleep(0.05)
    moment = time.time()
    time.sleep(0.05)
    server.post("times", [{"id": 3}])
    server.post("times", [{"id": 4}])
    text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment)) + f".{int(moment % 1 * 1e6):06d}"
    for name, start in (("token", token), ("time", text)):
        made = client.make(name, tables=["public.times"], start=start)
        assert (made["start"], made["cursor"]) == (start, token)
        assert orders(client.receive(name)) == [3, 4]
        client.http.delete(f"/{name}")
    for start in ("00000000.s1", f"{token.split('.')[0]}.s99999999", "2999-01-01", "sometime"):
        assert client.make("wrong", 422, start=start)["code"] == "invalid_consumer"


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("v/receive", {"batch_size": 0}, 422, "invalid_value"),
        ("v/receive", {"batch_size": 1001}, 422, "invalid_value"),
        ("v/receive", {"wait_for_ms": 30_001}, 422, "invalid_value"),
        ("v/receive", {"wait": 1}, 422, "invalid_value"),
        ("v/receive", [], 422, "invalid_value"),
        ("v/receive", None, 422, "invalid_value"),
        ("v/pause", None, 422, "invalid_value"),
        ("", None, 422, "invalid_consumer"),
        ("v/ack", {}, 422, "invalid_value"),
        ("v/ack", {"ack_ids": ["x"] * 10_001}, 422, "invalid_value"),
        ("v/nack", {"ack_ids": [], "delay_ms": -1}, 422, "invalid_value"),
        ("v/extend", {"ack_ids": [], "ack_wait_ms": 99}, 422, "invalid_value"),
        ("v/rewind", {}, 422, "invalid_value"),
        ("nothing/ack", {}, 404, "unknown_consumer"),
        ("v/pause", {"for_ms": 1000}, 422, "invalid_value"),
        ("v/resume", [], 422, "invalid_value"),
        ("v/dead/drop", {"ids": "some"}, 422, "invalid_value"),
        ("", {"name": "w", "kind": "newest"}, 422, "invalid_consumer"),
        ("", {"name": "w", "webhook": {"url": "https://example.com"}}, 422, "invalid_consumer"),
        ("", {"name": "w", "backfill": True, "start": "earliest"}, 422, "invalid_consumer"),
        ("", {"name": "w", "where": "nothing = 1", "tables": ["public.orders"]}, 422, "invalid_consumer"),
    ],
)
def test_what_is_wrong_is_refused(server: Served, path: str, body: Any, status: int, code: str) -> None:
    client = Client(server.url)
    client.http.post("", json={"name": "v", "start": "latest"})
    found = client.answer(client.http.post(f"/{path}" if path else "", content=json.dumps(body)), status)
    assert found["code"] == code
    assert found["hint"]


def test_the_hint_for_a_wrong_wait_of_an_extension_names_the_consumers_own(server: Served) -> None:
    client = Client(server.url)
    client.http.post("", json={"name": "v", "start": "latest", "ack_wait_ms": 5000})
    hint = client.post("v/extend", 422, ack_ids=[], ack_wait_ms=99)["hint"]
    assert hint == "Send such a number, or leave the field out: the default is the consumer's."


def test_hints_offer_nothing_that_requests_may_not_set(server: Served) -> None:
    client = Client(server.url)
    for body, offered, refused in (
        ({"name": "w", "color": 1}, "webhook", "command"),
        ({"name": "w", "webhook": {"color": 1}}, "timeout", "allow_private"),
    ):
        hint = client.answer(client.http.post("", json=body), 422)["hint"]
        assert (offered in hint, refused in hint) == (True, False)


def test_the_document_describes_every_field_that_a_definition_may_have(server: Served) -> None:
    """It lacked kafka, and the kind latest."""
    document = httpx.get(f"{server.url}/openapi.json", timeout=60, trust_env=False).json()
    body = document["paths"]["/v1/streams/{stream}/consumers"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"]["properties"].keys() == set(REQUEST_FIELDS)
    assert body["schema"]["properties"]["kind"]["enum"] == ["changes", "latest"]


def test_a_page_of_dead_letters_begins_at_the_next_of_an_answer(server: Served) -> None:
    client = Client(server.url)
    client.http.post("", json={"name": "v", "start": "latest"})
    for after in ("x", "1", "².x", "1."):
        assert client.get("v/dead", 422, after=after)["code"] == "invalid_value"


def test_a_body_that_isnt_json_is_refused(server: Served) -> None:
    client = Client(server.url)
    client.http.post("", json={"name": "v", "start": "latest"})
    for body in (b"{", b"\xff", b"NaN", b'{"ack_ids": ["\\ud800"]}'):
        for path in ("/v/receive", "/v/ack", "/v/pause", ""):
            assert client.answer(client.http.post(path, content=body), 400)["code"] == "invalid_body"
    assert client.answer(client.http.post("/v/receive", content=b""), 200) == {"messages": []}
    elsewhere = Http(f"{server.url}/v1/streams/nowhere/consumers").post("", content=b"{")
    assert client.answer(elsewhere, 404)["code"] == "unknown_stream"


def test_a_client_that_goes_away_takes_nothing(server: Served) -> None:
    client = Client(server.url)
    client.make("left", tables=["public.left"])
    with pytest.raises(httpx.ReadTimeout):
        Client(server.url).http.post("/left/receive", json={"wait_for_ms": 30_000}, timeout=0.5)
    time.sleep(1)
    server.post("left", [{"id": 1}])
    (message,) = client.receive("left", wait_for_ms=5000)
    assert message["deliveries"] == 1
    client.http.delete("/left")


@pytest.mark.long
def test_a_consumer_outlives_a_killed_server(tmp_path: Path) -> None:
    home = web_home(tmp_path / "home", more=KEYS)
    seen: dict[str, int] = {}
    acked: set[str] = set()
    in_flight: dict[str, Any] = {}
    for turn in range(3):
        with served(home) as server:
            client = Client(server.url)
            if turn == 0:
                # Before the first row: the stream has no log so far.
                client.make("search", start="earliest", ack_wait_ms=1000)
            server.post("orders", [{"id": n, "note": f"turn {turn}"} for n in range(20)])
            shown = client.get("search")
            assert (shown["acked"], shown["state"]) == (len(acked), "active")
            if in_flight:
                # Deliveries of the killed server still count.
                assert client.settle("search", "ack", in_flight) == ["acked"]
                acked.add(in_flight["id"])
            messages = client.receive("search", batch_size=10, wait_for_ms=5000)
            for message in messages:
                assert message["id"] not in acked
                assert message["deliveries"] == seen.get(message["id"], 0) + 1
                seen[message["id"]] = message["deliveries"]
            assert client.settle("search", "ack", *messages[:5]) == ["acked"] * 5
            acked |= {message["id"] for message in messages[:5]}
            in_flight = messages[5]
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
    with served(home) as server:
        client = Client(server.url)
        rest: dict[str, list[str]] = {}
        deadline = time.monotonic() + 60
        while client.get("search")["lag"]["records"]:
            assert time.monotonic() < deadline
            messages = client.receive("search", wait_for_ms=1000)
            for message in messages:
                assert message["id"] not in acked
                rest.setdefault(message["group"], []).append(message["record"]["row"]["note"])
            client.settle("search", "ack", *messages)
            acked |= {message["id"] for message in messages}
        lines = [json.loads(line) for line in done(home, "wal", "cat").splitlines()]
        assert acked == {"web-{shard}-{epoch}-{offset}".format(**line) for line in lines}
        assert all(notes == sorted(notes) for notes in rest.values())
