"""The consumers' state is moved or removed while a process has it: nothing is acknowledged that isn't stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.app.homes import done, make_home, run, wait_for

from millstream.administration.consumer_checks import check_consumer_state, has_consumers
from millstream.app.open_home import OpenHome
from millstream.app.status import collect_status
from millstream.delivery.service import StreamConsumers
from millstream.errors import DeliveryError
from millstream.home.home import Home
from millstream.testing.errors import coded
from millstream.writers.home_consumers import surroundings

MISSING = pytest.raises(DeliveryError, check=coded("consumer_state_missing"))


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(make_home(tmp_path / "home", "[streams.web]\n"))
    with OpenHome(home) as opened:
        for n in range(4):
            opened.append("web", "orders", {"id": n})
    return home


def receive(consumers: StreamConsumers, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = consumers.call("receive", "search", {"batch_size": count}).body["messages"]
    return found


def ack(consumers: StreamConsumers, message: dict[str, Any]) -> str:
    return str(consumers.call("ack", "search", {"ack_ids": [message["ack_id"]]}).body["results"][0]["status"])


def rows(messages: list[dict[str, Any]]) -> list[int]:
    return [json.loads(message["record"])["row"]["id"] for message in messages]


def test_an_ack_whose_state_is_gone_is_refused_and_taken_once_it_is_back(home: Home) -> None:
    """Regression: acks were answered `acked` for a quarter of a second, then with a hint to check the path."""
    delivery, moved = home.data / "delivery", home.data / "moved"
    with home.open_catalog() as catalog:
        around = surroundings(home, catalog, "web")
        consumers = StreamConsumers(around)
        consumers.call("create", None, {"name": "search", "start": "earliest", "group_by": "none"})
        first, second = receive(consumers, 2)
        consumers._sync()
        delivery.rename(moved)
        with pytest.raises(DeliveryError, check=coded("consumer_state_missing")) as refused:
            ack(consumers, first)
        assert "back where it was" in refused.value.hint
        for call in (lambda: ack(consumers, first), lambda: receive(consumers, 1)):
            with MISSING:
                call()
        moved.rename(delivery)
        wait_for(lambda: not consumers._store.wants_compaction)
        assert [ack(consumers, one) for one in (first, second)] == ["acked", "acked"]
        consumers.close()
        again = StreamConsumers(around)
        assert rows(receive(again, 4)) == [2, 3]
        again.close()


def test_a_state_that_is_replaced_by_a_copy_takes_nothing(home: Home) -> None:
    with home.open_catalog() as catalog:
        consumers = StreamConsumers(surroundings(home, catalog, "web"))
        consumers.call("create", None, {"name": "search", "start": "earliest"})
        (first,) = receive(consumers, 1)
        consumers._sync()
        file = home.delivery_folder("web") / "consumers.log"
        copy = file.with_name("copy")
        copy.write_bytes(file.read_bytes())
        copy.replace(file)
        with MISSING:
            ack(consumers, first)
        consumers.close()


def test_doctor_and_status_tell_that_the_state_of_consumers_is_gone(home: Home) -> None:
    """Regression: they found no consumers, and nothing wrong."""
    stream = home.config.streams["web"]
    assert not has_consumers(home, "web", stream)
    with OpenHome(home) as opened:
        opened.consumers("web").create("search", start="earliest")
        assert check_consumer_state(home, "web") == "the state of 1 consumer can be read"
        (home.data / "delivery").rename(home.data / "moved")
        assert has_consumers(home, "web", stream)
        with MISSING:
            check_consumer_state(home, "web")
        (problem,) = collect_status(home)["problems"]
        assert problem.startswith("consumers of web: the consumers' state in ")
        (home.data / "moved").rename(home.data / "delivery")
        assert collect_status(home)["problems"] == []


def test_a_process_that_starts_without_the_state_makes_no_consumer_until_the_loss_is_accepted(tmp_path: Path) -> None:
    """Regression: those of millstream.toml began again at `latest`, and nothing told of the records between."""
    home = Home(make_home(tmp_path / "home", "[streams.web]\n[streams.web.consumers.search]\n"))
    with OpenHome(home) as opened:
        assert opened.consumers("web").get("search")["acked"] == 0
        opened.append("web", "orders", [{"id": n} for n in range(3)])
        with opened.consume("web", "search", batch_size=1) as messages:
            next(messages)
        opened.consumers("web").create("other")
    delivery, moved = home.data / "delivery", home.data / "moved"
    delivery.rename(moved)
    with OpenHome(home) as opened:
        for call in (lambda: opened.consumers("web").get("search"), lambda: opened.consumers("web").create("more")):
            with MISSING:
                call()
        assert not delivery.exists()
        moved.rename(delivery)
        with opened.consume("web", "search", wait_s=0) as messages:
            assert [message.record["row"]["id"] for message in messages] == [1, 2]
    delivery.rename(moved)
    told = run(home.path, "consumer", "repair")
    assert (told.returncode, "would be lost: other, search, whose state in " in told.stdout) == (3, True), told
    with OpenHome(home) as opened, MISSING:
        opened.consumers("web").list()
    assert json.loads(done(home.path, "consumer", "repair", "--accept-loss", "--json"))["damage"]["touched"] == [
        "other",
        "search",
    ]
    with OpenHome(home) as opened:
        assert [one["name"] for one in opened.consumers("web").list()] == ["search"]
    assert done(home.path, "consumer", "repair").strip() == "nothing is damaged"
