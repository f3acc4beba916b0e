"""Backfills: a consumer's copy of its tables equals the source, whatever happens while rows are delivered."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.app.homes import make_home, wait_for

from millstream.app.open_home import OpenHome
from millstream.delivery.service import StreamConsumers
from millstream.errors import DeliveryError, InvalidValue, LakeBehind
from millstream.home.home import Home
from millstream.processes.control_socket import have_done
from millstream.testing.errors import coded
from millstream.wal.reader import StreamReader
from millstream.writers import home_consumers
from millstream.writers.home_consumers import HomeConsumers, surroundings

KEYS = '[streams.web]\n[streams.web.keys]\n"public.orders" = ["id"]\n"public.items" = ["id"]\n'


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(make_home(tmp_path / "home", KEYS))


@pytest.fixture
def opened(home: Home) -> Iterator[OpenHome]:
    with OpenHome(home) as found:
        found.append("web", "orders", [{"id": n, "total": n} for n in range(5)])
        found.append("web", "items", [{"id": 1, "total": 9}])
        found.append("web", "orders", [{"id": 1, "total": 100}])
        yield found


def received(opened: OpenHome, name: str) -> list[Any]:
    """Wait until a backfill has ended, and return everything up to the log's end."""
    found = []
    with opened.consume("web", name, wait_s=20) as messages:
        while True:
            shown = opened.consumers("web").get(name)
            if shown["backfill"] is None and not shown["lag"]["records"] and not shown["in_flight"]:
                return found
            message = next(messages)
            found.append(message)
            message.ack()


def test_rows_are_delivered_as_of_the_cursor_before_later_records(opened: OpenHome) -> None:
    consumers = opened.consumers("web")
    consumers.create("search", start="latest", tables=["orders"])
    opened.append("web", "orders", [{"id": 2, "total": 200}])
    number = consumers.backfill("search")
    found = received(opened, "search")
    rows, later = found[:5], found[5:]
    assert [row.id for row in rows] == [f"web-b{number}-{n}" for n in range(5)]
    assert {row.record["row"]["id"]: row.record["row"]["total"] for row in rows} == {0: 0, 1: 100, 2: 2, 3: 3, 4: 4}
    for row in rows:
        assert row.record["op"] == "r"
        assert row.record["table"] == "public.orders"
        assert {row.record[name] for name in ("seq", "epoch", "shard", "offset", "commit_index")} == {None}
    assert [message.record["row"] for message in later] == [{"id": 2, "total": 200}]
    same = [row.group for row in rows if row.record["row"]["id"] == 2]
    assert same == [later[0].group]
    assert consumers.get("search")["acked"] == 6


def test_a_consumer_made_with_a_backfill_gets_the_rows_first(opened: OpenHome) -> None:
    consumers = opened.consumers("web")
    made = consumers.create("search", backfill=True, where="total > 3", columns=["id as key"], group_by="none")
    assert made["backfill"] is True
    assert consumers.create("search", backfill=True, where="total > 3", columns=["id as key"], group_by="none") == made
    opened.append("web", "orders", [{"id": 3, "total": 300}, {"id": 4, "total": 0}])
    found = received(opened, "search")
    assert [(one.record["op"], one.record["row"]["key"]) for one in found] == [("r", 4), ("r", 1), ("r", 1), ("c", 3)]
    assert len({one.group for one in found}) == 4


def test_newest_states_come_after_their_rows(opened: OpenHome) -> None:
    consumers = opened.consumers("web")
    consumers.create("search", kind="latest", tables=["orders"], backfill=True)
    opened.append("web", "orders", [{"id": 0, "total": 5}])
    opened.append("web", "orders", [{"id": 0, "total": 6}])
    found = [
        (one.record["op"], one.record["row"]["id"], one.record["row"]["total"]) for one in received(opened, "search")
    ]
    assert found[:-1] == [("u", 0, 0), ("u", 2, 2), ("u", 3, 3), ("u", 4, 4), ("u", 1, 100)]
    assert found[-1] == ("u", 0, 6)


def test_tables_and_a_condition_of_the_backfill_select_rows(opened: OpenHome) -> None:
    consumers = opened.consumers("web")
    consumers.create("search", where="total > 1")
    consumers.backfill("search", tables=["orders"], where="id < 4")
    assert sorted(one.record["row"]["id"] for one in received(opened, "search")) == [1, 2, 3]


def test_tables_of_a_backfill_are_one_pattern_or_several(opened: OpenHome) -> None:
    """A text was taken for a list of its characters, and a number ended in a bare TypeError."""
    consumers = opened.consumers("web")
    consumers.create("search")
    not_tables: Any = 5
    with pytest.raises(InvalidValue, match="tables must be patterns of tables, not int"):
        consumers.backfill("search", tables=not_tables)
    consumers.backfill("search", tables="items")
    assert [one.record["row"]["id"] for one in received(opened, "search")] == [1]


def test_progress_is_shown_and_another_one_is_refused_while_one_runs(opened: OpenHome) -> None:
    consumers = opened.consumers("web")
    consumers.create("search")
    number = consumers.backfill("search")
    with opened.consume("web", "search", batch_size=1, wait_s=20) as messages:
        assert next(messages).ack() == "acked"
        assert consumers.get("search")["backfill"] == {"tables": ["public.items", "public.orders"], "rows": 1, "of": 6}
        with pytest.raises(DeliveryError, match="a backfill of consumer search runs") as caught:
            consumers.backfill("search")
        assert caught.value.code == "backfill_running"
    assert len(received(opened, "search")) == 5
    assert consumers.backfill("search") > number


def test_a_request_that_comes_again_begins_no_other_backfill(opened: OpenHome, home: Home) -> None:
    """Its first answer was lost: while the backfill ran, it was refused, and later it delivered all rows again."""
    opened.consumers("web").create("search")

    def begun(key: str) -> int:
        with closing(HomeConsumers(home)) as others:
            return int(others.call("web", "backfill", "search", {"tables": ["orders"]}, key=key).body["backfill"])

    number = begun("one")
    assert begun("one") == number
    assert len(received(opened, "search")) == 5
    assert begun("one") == number
    assert received(opened, "search") == []
    later = begun("two")
    assert later > number
    opened.close()  # the next process reads what this one has stored
    assert [begun("one"), begun("two")] == [number, later]


def test_an_answer_that_another_process_lost_changes_nothing(
    opened: OpenHome, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened.consumers("web").create("search")
    done = []

    def losing(*arguments: Any, **options: Any) -> dict[str, Any] | None:
        done.append(have_done(*arguments, **options))
        return done[-1] if len(done) > 1 else None

    monkeypatch.setattr(home_consumers, "have_done", losing)
    with closing(HomeConsumers(home)) as others:
        answer = others.call("web", "backfill", "search")
        assert done == [{"body": answer.body, "is_new": False, "has_ended": False}] * 2
        done.clear()
        others.call("web", "delete", "search")
        assert len(done) == 1
        with pytest.raises(DeliveryError, check=coded("unknown_consumer")):
            others.call("web", "delete", "search")


def test_bad_requests_change_nothing(opened: OpenHome) -> None:
    consumers = opened.consumers("web")
    with pytest.raises(DeliveryError, match="can't have a backfill"):
        consumers.create("search", start="earliest", backfill=True)
    consumers.create("search", tables=["orders"])
    for wrong in (
        {"tables": ["items"]},
        {"tables": []},
        {"tables": ["a.b.c.d"]},
        {"where": "id ="},
        {"where": "size > 1"},
        {"where": "total = 'much'"},  # every row passed
    ):
        with pytest.raises(InvalidValue):
            consumers.backfill("search", **wrong)
    assert consumers.get("search")["backfill"] is None


def test_without_the_tables_beginning_it_is_refused(opened: OpenHome, monkeypatch: pytest.MonkeyPatch) -> None:
    consumers = opened.consumers("web")
    consumers.create("search")
    monkeypatch.setattr(StreamReader, "first_seq", lambda _: 3)
    with pytest.raises(LakeBehind, match="neither the log nor the lake"):
        consumers.backfill("search")
    with pytest.raises(LakeBehind):
        consumers.create("other", backfill=True)
    assert [one["name"] for one in consumers.list()] == ["search"]


def test_a_row_that_dies_is_a_dead_letter_and_holds_nothing_else(opened: OpenHome) -> None:
    consumers = opened.consumers("web")
    consumers.create("search", max_deliver=1, tables=["orders"])
    consumers.backfill("search")
    with opened.consume("web", "search", batch_size=1, wait_s=20) as messages:
        bad = next(messages)
        assert bad.nack() == "nacked"
    assert len(received(opened, "search")) == 4
    (letter,) = consumers.dead("search")["dead"]
    assert (letter["id"], letter["record"]) == (bad.id, bad.record)
    assert consumers.retry("search", [bad.id])["results"][0]["status"] == "retried"
    with opened.consume("web", "search", wait_s=20) as messages:
        again = next(messages)
        assert (again.id, again.record, again.deliveries) == (bad.id, bad.record, 1)
        assert again.ack() == "acked"
    assert consumers.get("search")["dead"] == 0


def test_what_was_in_flight_comes_again_behind_the_rows(opened: OpenHome) -> None:
    consumers = opened.consumers("web")
    consumers.create("search", tables=["orders"])
    opened.append("web", "orders", [{"id": 7, "total": 1}, {"id": 8, "total": 1}])
    with opened.consume("web", "search", wait_s=20) as messages:
        first = next(messages)
        second = messages._fetched[0]
        assert second.ack() == "acked"
        consumers.backfill("search")
        assert first.ack() == "rewound"
        messages._fetched.clear()
        messages._current = None
    found = [one.record["row"]["id"] for one in received(opened, "search")]
    assert found == [0, 2, 3, 4, 1, 7, 8]


def test_a_rewind_ends_it_and_deleting_removes_its_file(home: Home, opened: OpenHome) -> None:
    consumers = opened.consumers("web")
    consumers.create("search")
    consumers.backfill("search")
    folder = home.delivery_folder("web")
    with opened.consume("web", "search", wait_s=20) as messages:
        row = next(messages)
        assert len(list(folder.glob("backfill-*"))) == 1
        consumers.pause("search")
        assert consumers.get("search")["backfill"]["rows"] == 0
        consumers.resume("search")
        consumers.rewind("search", "earliest")
        assert row.ack() == "rewound"
        messages._fetched.clear()
        messages._current = None
    assert [one.record["op"] for one in received(opened, "search")] == ["c"] * 7
    consumers.backfill("search")
    wait_for(lambda: consumers.get("search")["backfill"]["of"] == 6, seconds=20)
    consumers.delete("search")
    assert not list(folder.glob("backfill-*"))


@pytest.mark.usefixtures("opened")
def test_rows_that_a_kill_left_behind_are_removed_by_the_next_process(home: Home) -> None:
    """A backfill's end is noted before its file is removed: after a kill between the two, its rows stayed for ever."""
    folder = home.delivery_folder("web")
    with home.open_catalog() as catalog:
        around = surroundings(home, catalog, "web")
        with closing(StreamConsumers(around)) as consumers:
            consumers.call("create", None, {"name": "search"})
            number = consumers.call("backfill", "search", {}).body["backfill"]
            wait_for(lambda: consumers.call("show", "search", {}).body["backfill"]["of"] == 6, seconds=20)
        for left in ("backfill-7.rows", "backfill-8.part"):
            (folder / left).touch()
        with closing(StreamConsumers(around)) as consumers:
            assert [path.name for path in folder.glob("backfill-*")] == [f"backfill-{number}.rows"]
            assert len(consumers.call("receive", "search", {}).body["messages"]) == 6


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(3))
def test_a_copy_equals_the_source_however_often_the_process_is_killed(home: Home, opened: OpenHome, seed: int) -> None:
    """A kill is played by the state of some steps before: what happened since is forgotten."""
    rng = random.Random(seed)
    source: dict[int, int] = {0: 0, 1: 100, 2: 2, 3: 3, 4: 4}

    def write() -> None:
        rows = [{"id": rng.randrange(12), "total": rng.randrange(1000)} for _ in range(rng.randrange(1, 4))]
        opened.append("web", "orders", rows)
        source.update({row["id"]: row["total"] for row in rows})

    with home.open_catalog() as catalog:
        around = surroundings(home, catalog, "web")
        kind = rng.choice(["changes", "latest"])
        one = StreamConsumers(around)
        body = {"name": "search", "tables": ["orders"], "backfill": True, "kind": kind, "ack_wait_ms": 100}
        one.call("create", None, body)
        saved = home.delivery_folder("web").with_name("saved")
        copy: dict[int, int] = {}
        ids: dict[str, Any] = {}
        begun = 1
        while True:
            if len(ids) < 40 and rng.random() < 0.4:
                write()
            if begun < 4 and rng.random() < 0.2:
                with suppress(DeliveryError):  # one runs
                    one.call("backfill", "search", {})
                    begun += 1
            if rng.random() < 0.3:
                shutil.rmtree(saved, ignore_errors=True)
                try:
                    shutil.copytree(around.folder, saved)
                except shutil.Error:  # a file got its name during the copy, which no kill leaves behind
                    shutil.rmtree(saved)
            if saved.exists() and rng.random() < 0.2:
                one.close()
                shutil.rmtree(around.folder)
                saved.rename(around.folder)
                one = StreamConsumers(around)
            found = one.call("receive", "search", {"batch_size": rng.randrange(1, 5), "wait_for_ms": 50}).body[
                "messages"
            ]
            for message in found:
                record = json.loads(message["record"])
                if record["op"] == "r":
                    assert ids.setdefault(message["id"], record) == record
                ids.setdefault(message["id"], record)
            done = found[: rng.randrange(len(found) + 1)]
            answers = one.call("ack", "search", {"ack_ids": [message["ack_id"] for message in done]}).body["results"]
            for message, answer in zip(done, answers, strict=True):
                if answer["status"] == "acked":
                    row = json.loads(message["record"])["row"]
                    copy[row["id"]] = row["total"]
            shown = one.call("show", "search", None).body
            if (
                len(ids) >= 40
                and begun == 4
                and shown["backfill"] is None
                and not shown["lag"]["records"]
                and not shown["in_flight"]
            ):
                break
            if len(ids) < 40:
                write()
        one.close()
    assert copy == source
