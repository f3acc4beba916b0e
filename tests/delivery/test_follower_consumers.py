"""A leader's consumers on another node: shown there, and continued on its log, also if that ends earlier."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from tests.app.homes import make_home
from tests.delivery.test_store import stored

from millstream.app.open_home import OpenHome
from millstream.delivery.consumer_store import LOG_NAME, Store
from millstream.delivery.consumers_log_format import whole
from millstream.delivery.follower_consumers import CopiedConsumers, adopt_consumers, packed
from millstream.delivery.service import StreamConsumers
from millstream.errors import DeliveryError
from millstream.home.home import Home
from millstream.nodes.consumers_document import ConsumersDocuments
from millstream.testing.errors import coded
from millstream.wal.reader import StreamReader
from millstream.writers.home_consumers import surroundings

KEYS = '[streams.web]\n[streams.web.keys]\n"public.orders" = ["id"]\n'


class Pair:
    """A leader's home and one that has its log up to the fourth of six rows; the leader's consumers are open."""

    def __init__(self, folder: Path) -> None:
        self.one = Home(make_home(folder / "one", KEYS))
        self.two = Home(make_home(folder / "two", KEYS))
        with OpenHome(self.one) as opened:
            for n in range(4):
                opened.append("web", "orders", {"id": n})
        self.copy_log()
        with OpenHome(self.one) as opened:
            for n in range(4, 6):
                opened.append("web", "orders", {"id": n})
        self.catalog = self.one.open_catalog()
        self.leader = StreamConsumers(surroundings(self.one, self.catalog, "web"))

    def copy_log(self) -> None:
        shutil.copytree(self.one.wal_folder("web"), self.two.wal_folder("web"), dirs_exist_ok=True)

    def shipped(self) -> tuple[bytes, bytes]:
        """Return the leader's two documents."""
        folder = self.one.delivery_folder("web")
        return packed(whole((folder / "consumers.log").read_bytes())), (folder / "key").read_bytes()

    def reader(self) -> StreamReader:
        return StreamReader(str(self.two.wal_folder("web")))

    def adopt(self) -> dict[str, int] | None:
        data, key = self.shipped()
        self.two.prepare()
        return adopt_consumers(self.two.delivery_folder("web"), data, key, "web", self.reader)

    def close(self) -> None:
        self.leader.close()
        self.catalog.close()


@pytest.fixture
def pair(tmp_path: Path) -> Any:
    made = Pair(tmp_path)
    yield made
    made.close()


def received(consumers: StreamConsumers, count: int, name: str = "search") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = consumers.call("receive", name, {"batch_size": count}).body["messages"]
    return found


def settled(consumers: StreamConsumers, how: str, *messages: dict[str, Any]) -> list[str]:
    answer = consumers.call(how, "search", {"ack_ids": [message["ack_id"] for message in messages]})
    return [result["status"] for result in answer.body["results"]]


def test_another_node_continues_what_its_log_has(pair: Pair) -> None:
    pair.leader.call("create", None, {"name": "search", "start": "earliest", "max_deliver": 1})
    dead, acked, flying, *_ = received(pair.leader, 3)
    assert settled(pair.leader, "nack", dead) == ["nacked"]
    assert settled(pair.leader, "ack", acked) == ["acked"]
    assert pair.adopt() == {"search": 2}
    with pair.two.open_catalog() as catalog:
        promoted = StreamConsumers(surroundings(pair.two, catalog, "web"))
        shown = promoted.call("show", "search", None).body
        assert (shown["in_flight"], shown["dead"], shown["acked"], shown["delivered"]) == (1, 1, 1, 3)
        assert [one["id"] for one in promoted.call("dead", "search", {}).body["dead"]] == [dead["id"]]
        assert settled(promoted, "ack", flying) == ["acked"], "a delivery of before the promotion counts"
        (rest,) = received(promoted, 10)
        assert json.loads(rest["record"])["row"] == {"id": 3}
        promoted.close()


def test_a_delivery_of_a_record_that_was_lost_settles_no_other_one(pair: Pair) -> None:
    """The state that came may be older than the lost delivery, and another record may get its number."""
    pair.leader.call("create", None, {"name": "search", "start": "earliest"})
    first, *_ = received(pair.leader, 4)
    shipped = pair.shipped()
    lost = received(pair.leader, 2)
    pair.two.prepare()
    assert adopt_consumers(pair.two.delivery_folder("web"), *shipped, "web", pair.reader) == {"search": 0}
    with OpenHome(pair.two) as opened:
        for n in range(10, 12):
            opened.append("web", "orders", {"id": n})
        ids = [message["ack_id"] for message in (first, *lost)]
        consumers = opened.consumers("web")
        results = opened._home_consumers().call("web", "ack", "search", {"ack_ids": ids}).body["results"]
        assert [one["status"] for one in results] == ["acked", "rewound", "rewound"]
        with opened.consume("web", "search", wait_s=10) as messages:
            assert [next(messages).record["row"]["id"] for _ in range(2)] == [10, 11]
        assert consumers.get("search")["acked"] == 3


def test_a_cursor_behind_the_end_is_moved_back(pair: Pair) -> None:
    pair.leader.call("create", None, {"name": "search", "start": "earliest"})
    for message in received(pair.leader, 6):
        settled(pair.leader, "ack", message)
    pair.leader.call("create", None, {"name": "late", "start": "latest"})
    assert pair.adopt() == {"search": 4, "late": 4}
    with OpenHome(pair.two) as opened:
        opened.append("web", "orders", {"id": 10})
        for name in ("search", "late"):
            with opened.consume("web", name, wait_s=10) as messages:
                assert next(messages).record["row"] == {"id": 10}


def rows_of(consumers: StreamConsumers, count: int) -> list[dict[str, Any]]:
    """Receive that many messages; a backfill's rows take a while to be written."""
    found: list[dict[str, Any]] = []
    deadline_s = time.monotonic() + 60
    while len(found) < count:
        assert time.monotonic() < deadline_s, found
        body = {"batch_size": count - len(found), "wait_for_ms": 1000}
        found += consumers.call("receive", "search", body).body["messages"]
    return found


def ids_of(messages: list[dict[str, Any]]) -> list[int]:
    return [json.loads(message["record"])["row"]["id"] for message in messages]


@pytest.mark.parametrize("is_lost", [False, True], ids=["whole log", "shorter log"])
def test_a_backfill_that_ran_begins_again_on_the_log_that_is_there(pair: Pair, is_lost: bool) -> None:
    """Its rows stayed on the node that led: all come again, under another number, and before later records."""
    if not is_lost:
        pair.copy_log()
    kept = 4 if is_lost else 6
    pair.leader.call("create", None, {"name": "search", "backfill": True, "start": "latest"})
    acked, flying = rows_of(pair.leader, 2)
    assert settled(pair.leader, "ack", acked) == ["acked"]
    assert pair.leader.call("show", "search", None).body["backfill"]["rows"] == 1
    assert set(pair.adopt() or ()) == {"search"}
    with OpenHome(pair.two) as opened:
        opened.append("web", "orders", {"id": 10})
    with pair.two.open_catalog() as catalog:
        promoted = StreamConsumers(surroundings(pair.two, catalog, "web"))
        rows = rows_of(promoted, kept)
        assert sorted(ids_of(rows)) == list(range(kept))
        assert {message["id"] for message in rows}.isdisjoint({acked["id"], flying["id"]})
        assert settled(promoted, "ack", flying) == ["rewound"], "its row comes again under another id"
        assert promoted.call("show", "search", None).body["backfill"]["of"] == kept
        assert received(promoted, 10) == []
        assert settled(promoted, "ack", *rows) == ["acked"] * kept
        assert ids_of(rows_of(promoted, 1)) == [10]
        assert promoted.call("show", "search", None).body["backfill"] is None
        promoted.close()


def test_a_copy_shows_the_leaders_consumers_and_keeps_nothing(pair: Pair, tmp_path: Path) -> None:
    file = tmp_path / "consumers.document"
    copies = CopiedConsumers("web", file, pair.reader)
    assert copies.call("list", None, None).body == {"consumers": []}
    pair.leader.call("create", None, {"name": "search", "start": "earliest", "max_deliver": 1})
    (dead,) = received(pair.leader, 1)
    settled(pair.leader, "nack", dead)
    file.write_bytes(pair.shipped()[0])
    (shown,) = copies.call("list", None, None).body["consumers"]
    assert (shown["name"], shown["dead"], shown["lag"]["records"]) == ("search", 1, 3)
    assert copies.call("dead", "search", {}).body["dead"][0]["id"] == dead["id"]
    with pytest.raises(DeliveryError, check=coded("unknown_consumer")):
        copies.call("show", "other", None)
    assert not pair.two.delivery_folder("web").exists()


def test_a_damaged_copy_stops_no_promotion_and_is_told_of(pair: Pair) -> None:
    pair.leader.call("create", None, {"name": "search", "start": "earliest"})
    data, key = pair.shipped()
    pair.two.prepare()
    assert adopt_consumers(pair.two.delivery_folder("web"), data[:-9], key, "web", pair.reader) is None
    with OpenHome(pair.two) as opened, pytest.raises(DeliveryError, check=coded("consumer_state_unreadable")):
        opened.consumers("web").list()


def test_a_state_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old bytes counted as those of the new file, and followers lacked its consumers until the next change."""
    store, _ = Store.open(tmp_path)
    store.create(stored("one"))
    opens = Path.open

    def overtaken(path: Path, *arguments: Any) -> Any:
        file = opens(path, *arguments)
        monkeypatch.undo()
        store.compact([stored("one")])
        store.create(stored("two"))
        return file

    documents = ConsumersDocuments(tmp_path)
    monkeypatch.setattr(Path, "open", overtaken)
    documents.newest()
    documents._due_s = 0
    state, _ = documents.newest()
    assert state.data == packed((tmp_path / LOG_NAME).read_bytes())
    store.close()
