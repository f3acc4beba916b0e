"""Forage's paths, answers and refusals, without sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from apps.forage.tests.bodies import ITEM
from apps.forage.tests.memory_home import SetClock, engine_on, seeded_home
from starlette.testclient import TestClient

from millstream import Guard
from millstream_forage.application import BODY_MAX, CALLS, Application, body_of
from millstream_forage.engine import ForageEngine
from millstream_forage.problems import MalformedBody
from millstream_forage.tables import home_config

SAVE = {"user_id": 1, "item_id": 1, "signal_type": "save"}


@pytest.fixture
def engine() -> Iterator[ForageEngine]:
    with engine_on(seeded_home(), SetClock()) as opened:
        yield opened


@pytest.fixture
def client(engine: ForageEngine, tmp_path: Path) -> Iterator[TestClient]:
    (tmp_path / "millstream.toml").write_text(home_config())
    guard = Guard(tmp_path)
    yield TestClient(Application(engine, guard), base_url="http://127.0.0.1:4242")
    guard.close()


def problem(response: Any, status: int) -> dict[str, Any]:
    """Return the problem document of an answer, after a look at its form."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = response.json()
    assert document["status"] == status
    assert {"type", "title", "detail", "code"} <= document.keys()
    return document


def test_a_feed_is_repeated_until_a_signal_and_a_skipped_item_stays_away(client: TestClient) -> None:
    feed = client.get("/feed?user=1").json()
    assert [item["slot"] for item in feed["items"]] == list(range(1, 8))
    assert client.get("/feed?user=1&limit=7").json() == feed
    first = feed["items"][0]
    skip = {"user_id": 1, "item_id": first["item_id"], "signal_type": "skip", "impression_id": first["impression_id"]}
    answer = client.post("/signal", json=skip).json()
    assert list(answer) == ["signal_id", "token", "duplicate"]
    assert client.post("/signal", json=skip).json()["duplicate"]
    after = client.get("/feed?user=1").json()
    assert after["feed_id"] != feed["feed_id"]
    assert first["item_id"] not in [item["item_id"] for item in after["items"]]


def test_previews_of_one_seed_are_equal_byte_for_byte(client: TestClient) -> None:
    path = "/feed?user=3&limit=9&seed=9007199254740991&preview=true"
    feed = client.get(path)
    assert client.get(path).content == feed.content
    assert feed.json()["feed_id"] is None
    assert {item["impression_id"] for item in feed.json()["items"]} == {None}


def test_hides_are_answered_with_a_token_and_count_at_once(client: TestClient) -> None:
    source = client.get("/feed?user=1&limit=1").json()["items"][0]["source"]
    muted = client.post("/hide", json={"user_id": 1, "target": {"source": source}, "kind": "mute"})
    assert (muted.status_code, list(muted.json())) == (200, ["token"])
    shown = client.get("/feed?user=1&limit=50").json()["items"]
    assert source not in {item["source"] for item in shown}


def test_a_field_that_is_given_twice_is_named(client: TestClient) -> None:
    body = b'{"user_id": 1, "item_id": 1, "signal_type": "save", "user_id": 2}'
    assert problem(client.post("/signal", content=body), 422)["field"] == "user_id"
    body = b'{"user_id": 1, "target": {"item": 1, "item": 2}, "kind": "hide"}'
    assert problem(client.post("/hide", content=body), 422)["field"] == "item"


def test_a_body_that_does_not_arrive_whole_is_no_request() -> None:
    """Its beginning was taken for all of it if that was JSON."""
    messages = [{"type": "http.request", "body": b"{}", "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    with pytest.raises(MalformedBody, match="whole"):
        asyncio.run(body_of(receive))


def test_items_are_added_once_and_listed_by_pages(client: TestClient) -> None:
    added = client.post("/items", json=ITEM)
    assert (added.status_code, added.json()["duplicate"]) == (201, False)
    again = client.post("/items", json=ITEM)
    assert (again.status_code, again.json()["item_id"]) == (200, added.json()["item_id"])
    seen: list[int] = []
    page = client.get("/items?limit=40").json()
    assert client.get("/items?limit=40&after=").json() == page
    while True:
        seen += [item["item_id"] for item in page["items"]]
        if page["next"] is None:
            break
        page = client.get(f"/items?limit=40&after={page['next']}").json()
    assert len(seen) == 101
    assert seen == sorted(set(seen))
    assert "embedding" not in page["items"][0]
    assert page["items"][-1]["reading_time_min"] == 3


def test_an_agent_runs_when_no_heartbeat_came(client: TestClient) -> None:
    assert client.get("/browse-tasks").json()["should_run"]
    assert client.post("/discovery/heartbeat", json={}).json()["next_run"] > 0
    assert not client.get("/browse-tasks?user=1").json()["should_run"]


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/feed", "user"),
        ("/feed?user=", "user"),
        ("/feed?user=1.0", "user"),
        ("/feed?user=-1", "user"),
        ("/feed?user=9007199254740992", "user"),
        ("/feed?user=%D9%A1", "user"),
        ("/feed?user=1&user=2", "user"),
        ("/feed?user=1&limit=0", "limit"),
        ("/feed?user=1&limit=51", "limit"),
        ("/feed?user=1&seed=x", "seed"),
        ("/feed?user=1&preview=yes", "preview"),
        ("/feed?user=1&colour=red", "colour"),
        ("/items?limit=1001", "limit"),
        ("/items?after=-1", "after"),
        ("/browse-tasks?user=a", "user"),
    ],
)
def test_a_parameter_that_does_not_fit_is_named(client: TestClient, path: str, field: str) -> None:
    assert problem(client.get(path), 422)["field"] == field


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/signal", {"user_id": 1, "item_id": 1}, "signal_type"),
        ("/signal", SAVE | {"signal_type": "like"}, "signal_type"),
        ("/signal", SAVE | {"user_id": "1"}, "user_id"),
        ("/signal", SAVE | {"user_id": True}, "user_id"),
        ("/signal", SAVE | {"item_id": 1.0}, "item_id"),
        ("/signal", SAVE | {"duration_ms": 5}, "duration_ms"),
        ("/signal", SAVE | {"signal_type": "dwell"}, "duration_ms"),
        ("/signal", SAVE | {"mood": "good"}, "mood"),
        ("/signal", [SAVE], "body"),
        ("/hide", {"user_id": 1, "target": {"item": 1}, "kind": "mute"}, "target"),
        ("/hide", {"user_id": 1, "target": {"item": 1, "source": "a"}, "kind": "hide"}, "target"),
        ("/hide", {"user_id": 1, "target": {}, "kind": "unhide"}, "target"),
        ("/hide", {"user_id": 1, "target": {"item": 1}, "kind": "bury"}, "kind"),
        ("/hide", {"user_id": 1, "target": {"item": 1}, "kind": ["hide"]}, "kind"),
        ("/hide", {"user_id": 1, "target": {"item": 1}, "kind": {}}, "kind"),
        ("/items", ITEM | {"tags": ["one"]}, "tags"),
        ("/items", ITEM | {"reading_time_min": 2}, "reading_time_min"),
        ("/discovery/heartbeat", {"agent": "a"}, "agent"),
    ],
)
def test_a_field_that_does_not_fit_is_named(client: TestClient, path: str, body: Any, field: str) -> None:
    assert problem(client.post(path, json=body), 422)["field"] == field


@pytest.mark.parametrize("body", [b"", b"{", b'{"user_id": NaN}', b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_json_is_400(client: TestClient, body: bytes) -> None:
    assert problem(client.post("/signal", content=body), 400)["code"] == "malformed_body"


def test_numbers_of_any_length_are_refused_by_name(client: TestClient) -> None:
    body = json.dumps(SAVE).replace('"item_id": 1', f'"item_id": {"9" * 5000}')
    assert problem(client.post("/signal", content=body), 422)["field"] == "item_id"


def test_a_body_that_is_too_long_is_413(client: TestClient) -> None:
    assert problem(client.post("/items", content=b" " * (BODY_MAX + 1)), 413)["code"] == "body_too_large"


def test_unknown_things_are_404_and_another_signal_under_a_key_is_409(client: TestClient) -> None:
    assert problem(client.get("/nothing"), 404)["code"] == "unknown_path"
    assert problem(client.post("/signal", json=SAVE | {"item_id": 7_000}), 404)["code"] == "unknown_item"
    assert problem(client.post("/signal", json=SAVE | {"impression_id": 7}), 404)["code"] == "unknown_impression"
    hide = {"user_id": 1, "target": {"item": 7_000}, "kind": "hide"}
    assert problem(client.post("/hide", json=hide), 404)["code"] == "unknown_item"
    first = client.post("/signal", json=SAVE | {"idempotency_key": "k"}).json()
    again = client.post("/signal", json=SAVE | {"idempotency_key": "k"}).json()
    assert (again["signal_id"], again["duplicate"]) == (first["signal_id"], True)
    other = SAVE | {"idempotency_key": "k", "item_id": 2}
    assert problem(client.post("/signal", json=other), 409)["code"] == "key_reused"


def test_each_path_refuses_other_methods_and_names_its_own(client: TestClient) -> None:
    for path in {path for _, path in CALLS} | {"/", "/metrics"}:
        refused = client.request("DELETE", path)
        assert problem(refused, 405)["code"] == "method_not_allowed"
        assert refused.headers["allow"]
    assert client.head("/feed?user=1").status_code == 405


def test_pages_of_other_sites_are_refused(client: TestClient) -> None:
    foreign = {"origin": "http://evil.example"}
    assert problem(client.post("/signal", json=SAVE, headers=foreign), 403)["code"] == "foreign_origin"
    crossed = client.get("/feed?user=1", headers={"sec-fetch-site": "cross-site"})
    assert problem(crossed, 403)["code"] == "cross_site"
    assert problem(client.get("/feed?user=1", headers={"host": "evil.example"}), 421)["code"] == "unknown_host"
    own = {"origin": "http://127.0.0.1:4242", "sec-fetch-site": "same-origin"}
    assert client.post("/signal", json=SAVE, headers=own).status_code == 200


def test_without_a_token_only_the_page_is_served_if_tokens_are_required(engine: ForageEngine, tmp_path: Path) -> None:
    (tmp_path / "millstream.toml").write_text(home_config() + "[http]\ntokens_required = true\n")
    guard = Guard(tmp_path)
    client = TestClient(Application(engine, guard), base_url="http://127.0.0.1:4242")
    refused = client.get("/feed?user=1")
    assert problem(refused, 401)["code"] == "unauthenticated"
    assert refused.headers["www-authenticate"].startswith("Bearer")
    assert client.get("/").status_code == 200
    guard.close()


def test_an_engine_that_failed_is_503(client: TestClient, engine: ForageEngine) -> None:
    engine.close()
    refused = client.get("/feed?user=1")
    assert problem(refused, 503)["code"] == "engine_failed"
    assert refused.headers["retry-after"] == "1"


def test_metrics_count_requests_slots_and_signals(client: TestClient) -> None:
    client.get("/feed?user=1")
    client.post("/signal", json=SAVE)
    lines = client.get("/metrics").text.splitlines()
    assert 'forage_request_seconds_count{method="GET",path="/feed",status="200"} 1.0' in lines
    assert 'forage_signals_total{duplicate="false",signal_type="save"} 1.0' in lines
    slots = [float(line.rpartition(" ")[2]) for line in lines if line.startswith("forage_feed_slots_total{")]
    assert sum(slots) == 7


def test_the_page_needs_no_build_and_loads_nothing_from_elsewhere(client: TestClient) -> None:
    page = client.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for name in ("/page.css", "/page.js"):
        assert name in page.text
        assert client.get(name).status_code == 200
    assert "http" not in page.text
