"""A consumer's progress in `status` and `/metrics`: what it shows, and that a removed consumer's series are gone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.app.homes import make_home, wait_for
from tests.cli.in_process import command

from millstream.app.open_home import OpenHome
from millstream.app.status import collect_status
from millstream.home.home import Home
from millstream.process_metrics import CONSUMER_REQUEST_SECONDS
from millstream.serving.metrics import prometheus_text


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(make_home(tmp_path / "home", '[streams.web]\n[streams.web.keys]\n"public.orders" = ["id"]\n'))


@pytest.fixture
def opened(home: Home) -> Iterator[OpenHome]:
    with OpenHome(home) as found:
        for n in range(4):
            found.append("web", "orders", {"id": n})
        yield found


def series(home: Home, consumer: str) -> dict[str, float]:
    """Return the samples of a consumer, by name without the common prefix, and by state."""
    found = {}
    for family in text_string_to_metric_families(prometheus_text(lambda: collect_status(home)).decode()):
        for sample in family.samples:
            if sample.labels.get("consumer") == consumer and sample.labels.get("le") in {None, "+Inf"}:
                assert sample.labels["stream"] == "web"
                state = sample.labels.get("state")
                name = sample.name.removeprefix("millstream_consumer_") + (f" {state}" if state else "")
                found[name] = sample.value
    return found


def test_metrics_and_status_show_a_consumers_progress(home: Home, opened: OpenHome) -> None:
    opened.consumers("web").create("search", start="earliest", max_deliver=1)
    opened.consumers("web").create("other")
    fresh = series(home, "search")
    assert (fresh["lag_records"], fresh["acked_total"], fresh["in_flight"]) == (4, 0, 0)
    assert fresh["lag_seconds"] > 0
    assert fresh["lag_bytes"] > 0
    with opened.consume("web", "search", batch_size=3, wait_s=10) as messages:
        next(messages).nack()
        next(messages).ack()
        next(messages)
        found = series(home, "search")
        (shown,) = (one for one in collect_status(home)["streams"][0]["consumers"] if one["name"] == "search")
        text = command("--home", str(home.path), "status").stdout.decode()
    assert (shown["in_flight"], shown["dead"], shown["acked"], shown["delivered"]) == (1, 1, 1, 3)
    for key in ("in_flight", "dead"):
        assert found[key] == shown[key]
    for key in ("delivered", "redelivered", "acked"):
        assert found[f"{key}_total"] == shown[key]
    assert (found["state active"], found["state paused"], found["state cut_off"]) == (1, 0, 0)
    assert (found["delivery_seconds_count"], found["delivery_seconds_bucket"]) == (3, 3)
    assert found["delivery_seconds_sum"] > 0
    assert "delivery_seconds_count" not in series(home, "other")
    (line,) = (line.split("  ") for line in text.splitlines() if line.startswith("  search "))
    cells = [cell.strip() for cell in line if cell.strip()]
    assert cells[:2] == ["search", "active"]
    assert cells[2].startswith("2 records, ")
    assert cells[3:] == [str(shown[key]) for key in ("in_flight", "dead", "redelivered", "acked")]


def test_only_a_first_delivery_is_timed(home: Home, opened: OpenHome) -> None:
    opened.consumers("web").create("search", start="earliest", max_deliver=5)
    for _ in range(3):
        with opened.consume("web", "search", batch_size=4, wait_s=10) as messages:
            next(messages).nack()
    found = series(home, "search")
    assert found["delivery_seconds_count"] == found["delivered_total"] == 4
    assert found["redelivered_total"] > 0


def test_a_removed_consumer_has_no_series(home: Home, opened: OpenHome) -> None:
    consumers = opened.consumers("web")
    consumers.create("search", start="earliest")
    with opened.consume("web", "search", wait_s=10) as messages:
        next(messages)
    CONSUMER_REQUEST_SECONDS.of(collect_status(home)["streams"][0]["id"], "search").observe(0.5)
    assert {"delivery_seconds_count", "request_seconds_count", "dead"} <= series(home, "search").keys()
    consumers.delete("search")
    assert series(home, "search") == {}
    consumers.create("search")
    assert "delivery_seconds_count" not in series(home, "search")


def test_requests_to_a_sink_are_timed_and_one_that_outlives_its_consumer_is_not(home: Home, opened: OpenHome) -> None:
    consumers = opened.consumers("web")
    consumers.create("refused", start="earliest", redis={"location": "redis://127.0.0.1:1/0"})
    wait_for(lambda: series(home, "refused").get("request_seconds_count"), seconds=60)
    assert "error" in series(home, "refused")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        consumers.create(
            "silent", start="earliest", redis={"location": f"redis://127.0.0.1:{silent.getsockname()[1]}/0"}
        )
        connection, _ = silent.accept()
        consumers.delete("silent")
        connection.close()  # the request under way fails now
    wait_for(lambda: not any("push-silent" in thread.name for thread in threading.enumerate()), seconds=60)
    consumers.delete("refused")
    assert series(home, "silent") == series(home, "refused") == {}


def test_a_paused_consumer_says_so(home: Home, opened: OpenHome) -> None:
    opened.consumers("web").create("search")
    opened.consumers("web").pause("search")
    found = series(home, "search")
    assert (found["state active"], found["state paused"]) == (0, 1)
    assert "error" not in found
