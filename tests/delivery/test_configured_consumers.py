"""Consumers of `millstream.toml`: made, changed and removed by the file alone, and kept over restarts."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.app.homes import make_home, run, wait_for
from tests.serving.serving_process import served

from millstream.app.open_home import OpenHome
from millstream.config.file import load_config
from millstream.errors import ConfigError, DeliveryError
from millstream.home.home import Home
from millstream.testing.errors import coded
from millstream.writers.home_consumers import HomeConsumers, check_consumers, check_unmade

HEAD = '[streams.web]\n[streams.web.keys]\n"public.orders" = ["id"]\n"public.notes" = ["id"]\n'
SEARCH = '[streams.web.consumers.search]\nstart = "earliest"\n'


class Run:
    """A run of a home, until its file changes."""

    def __init__(self, home: Home, rows: OpenHome, consumers: HomeConsumers) -> None:
        self.home = home
        self.rows = rows
        self._call = consumers.call
        self.start = consumers.start
        """Makes the process a server's."""

    def call(self, what: str, body: Any = None, name: str | None = "search") -> Any:
        return self._call("web", what, name, {} if body is None else body).body

    def receive(self, count: int = 100) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.call("receive", {"batch_size": count})["messages"]
        return found

    def received(self, count: int = 100) -> list[dict[str, Any]]:
        """Receive messages and acknowledge them; return their rows."""
        messages = self.receive(count)
        self.settle("ack", messages)
        return [json.loads(message["record"])["row"] for message in messages]

    def settle(self, how: str, messages: list[dict[str, Any]]) -> list[str]:
        ids = [message["ack_id"] for message in messages]
        return [result["status"] for result in self.call(how, {"ack_ids": ids})["results"]]

    def append(self, table: str, *ids: int) -> None:
        self.rows.append("web", table, [{"id": n, "note": f"n{n}"} for n in ids])


class Deployment:
    """A home whose file changes between two runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextlib.contextmanager
    def run(self, *consumers: str) -> Iterator[Run]:
        """Run with these consumers in the file."""
        home = Home(make_home(self.folder, "\n".join((HEAD, *consumers))))
        with OpenHome(home) as rows, contextlib.closing(HomeConsumers(home)) as of_home:
            yield Run(home, rows, of_home)


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return Deployment(tmp_path / "home")


@pytest.mark.long
def test_the_file_makes_consumers_and_calls_do_not(tmp_path: Path) -> None:
    text = f'{HEAD}{SEARCH}where = "id >= ${{LEAST}}"\n[http]\nlisten = "127.0.0.1:0"\n'
    home, environ = make_home(tmp_path / "home", text), {"LEAST": "1"}
    for turn in range(2):
        with served(home, **environ) as server, server.client() as client:
            path = "/v1/streams/web/consumers"
            assert [one["where"] for one in client.get(path).json()["consumers"]] == ["id >= 1"]
            same = {"name": "search", "start": "earliest", "where": "id >= 1"}
            for answer in (
                client.post(path, json=same),
                client.post(path, json={"name": "search", "no": 1}),
                client.delete(f"{path}/search"),
            ):
                assert (answer.status_code, answer.json()["code"]) == (409, "consumer_configured")
            server.post("orders", [{"id": turn}, {"id": turn + 1}])
            messages = client.post(f"{path}/search/receive", json={"wait_for_ms": 10_000}).json()["messages"]
            assert [message["record"]["row"]["id"] for message in messages] == [[1], [1, 2]][turn]
            ids = [message["ack_id"] for message in messages]
            client.post(f"{path}/search/ack", json={"ack_ids": ids})
            for how, state in (("pause", "paused"), ("resume", "active"), ("rewind", "active")):
                body = {"to": "latest"} if how == "rewind" else {}
                assert client.post(f"{path}/search/{how}", json=body).json()["state"] == state
    ended = run(home, "consumer", "rm", "search", "--yes", **environ)
    assert (ended.returncode, "consumer_configured" in ended.stderr) == (2, True)
    assert "LEAST" in run(home, "consumer", "ls").stderr


def test_progress_and_a_pause_survive_a_restart(deployment: Deployment) -> None:
    with deployment.run(SEARCH) as first:
        first.append("orders", 1, 2, 3)
        first.settle("ack", first.receive(1))
        first.call("pause")
    with deployment.run(SEARCH, "max_deliver = 1") as second:
        assert (second.call("show")["state"], second.call("show")["max_deliver"]) == ("paused", 1)
        second.call("resume")
        (message,) = second.receive(1)
        assert second.settle("nack", [message]) == ["nacked"]
        assert second.call("show")["dead"] == 1
        assert second.received() == [{"id": 3, "note": "n3"}]


def test_another_condition_and_other_columns_hold_from_the_next_record(deployment: Deployment) -> None:
    with deployment.run(SEARCH) as before:
        before.append("orders", *range(10))
        acked, *flying = before.receive(4)
        before.settle("ack", [acked])
    with deployment.run(SEARCH, 'where = "id > 7"\ncolumns = ["id as number"]') as after:
        assert after.received() == [{"number": 8}, {"number": 9}]
        assert after.settle("nack", flying[:2]) == ["nacked", "nacked"]
        again = after.receive()
        assert [(json.loads(one["record"])["row"], one["deliveries"]) for one in again] == [
            ({"id": 1, "note": "n1"}, 2),
            ({"id": 2, "note": "n2"}, 2),
        ]
        assert after.settle("ack", [*again, flying[2]]) == ["acked"] * 3
        after.append("orders", 1, 11)
        assert after.received() == [{"number": 11}]
        assert after.call("show")["lag"]["records"] == 0
        after.call("rewind", {"to": "earliest"})
        assert after.received() == [{"number": 8}, {"number": 9}, {"number": 11}]


@pytest.mark.parametrize("tables", ['["public.notes"]', '["public.*"]'])
def test_other_tables_hold_from_the_next_record(deployment: Deployment, tables: str) -> None:
    """Messages in flight stay the same, though the tables that count an operation's messages are others."""
    with deployment.run(SEARCH, 'tables = ["public.orders"]') as before:
        for n in range(3):
            ids = [2 * n, 2 * n + 1]
            before.rows.append_all("web", {"notes": [{"id": i + 100} for i in ids], "orders": [{"id": i} for i in ids]})
        flying = before.receive(3)
        assert before.settle("ack", flying[1:2]) == ["acked"]
    with deployment.run(SEARCH, f"tables = {tables}") as after:
        everything = after.receive()
        found = {json.loads(one["record"])["row"]["id"] for one in everything}
        assert found == ({104, 105} if "notes" in tables else {3, 104, 4, 105, 5})
        assert after.settle("ack", [flying[0], *everything]) == ["acked"] * (1 + len(everything))
        assert after.settle("nack", flying[2:]) == ["nacked"]
        assert after.received() == [{"id": 2}]
        shown = after.call("show")
        assert (shown["lag"]["records"], shown["acked"]) == (0, 3 + len(everything))
    with deployment.run(SEARCH, f"tables = {tables}") as again:
        assert again.receive() == []
        again.append("notes", 7)
        assert again.received() == [{"id": 7, "note": "n7"}]


def test_another_kind_of_groups_needs_another_consumer(deployment: Deployment) -> None:
    other = '[streams.web.consumers.other]\nstart = "earliest"\n'
    with deployment.run(SEARCH, other) as before:
        before.append("orders", 1)
        before.receive()
    with deployment.run(SEARCH, 'group_by = "none"\n', other) as after:
        for what in ("show", "receive", "pause"):
            with pytest.raises(
                ConfigError, match=r"millstream.toml:\d+: .*search\.group_by: .*another consumer"
            ) as error:
                after.call(what)
            assert error.value.details["line"] == 9
        assert len(after.call("receive", name="other")["messages"]) == 1
        assert "another consumer" in after.call("list", name=None)["consumers"][1]["error"]
        with pytest.raises(ConfigError):
            HomeConsumers(after.home).start()
        with pytest.raises(ConfigError):
            check_consumers(after.home, "web")
    with deployment.run(SEARCH) as mended:
        check_consumers(mended.home, "web")
        assert mended.call("show")["delivered"] == 1


def test_a_consumer_that_left_the_file_is_kept_and_paused(deployment: Deployment) -> None:
    with deployment.run(SEARCH) as before:
        before.append("orders", 1, 2)
        before.received(1)
    for _ in range(2):
        with deployment.run() as without:
            shown = without.call("show")
            assert (shown["state"], shown["lag"]["records"]) == ("paused", 2)
            assert "millstream.toml" in shown["error"]
            with pytest.raises(DeliveryError, check=coded("consumer_configured")):
                without.call("resume")
            assert without.call("rewind", {"to": "earliest"})["state"] == "paused"
    with deployment.run(SEARCH) as back:
        assert (back.call("show")["state"], back.call("show")["error"]) == ("active", None)
        assert [row["id"] for row in back.received()] == [1, 2]
        back.call("pause")
    with deployment.run():
        pass
    with deployment.run(SEARCH) as paused:
        assert paused.call("show")["state"] == "paused"
    with deployment.run() as without:
        assert without.call("delete") is None
        with pytest.raises(DeliveryError, check=coded("unknown_consumer")):
            without.call("show")


def test_a_consumer_that_a_call_made_gets_into_the_file(deployment: Deployment) -> None:
    with deployment.run() as before:
        before.append("orders", 1, 2)
        before.call("create", {"name": "search", "start": "earliest"}, name=None)
        before.received(1)
    with deployment.run('[streams.web.consumers.search]\nwhere = "id > 0"') as after:
        assert (after.call("show")["start"], after.received()) == ("latest", [{"id": 2, "note": "n2"}])


def test_a_consumer_that_cannot_begin_is_reported_and_begins_once_it_can(deployment: Deployment) -> None:
    with deployment.run() as before:
        before.append("orders", 1)
    with deployment.run(SEARCH, 'where = "color = 1"') as run_:
        with contextlib.closing(HomeConsumers(run_.home)) as begun:
            begun.start()
        for what in ("show", "receive"):
            with pytest.raises(ConfigError, match=r"search\.where: no matching table has a column 'color'"):
                run_.call(what)
        (listed,) = run_.call("list", name=None)["consumers"]
        assert (listed["name"], listed["state"], listed["cursor"], listed["lag"]["records"]) == (
            "search",
            "paused",
            None,
            None,
        )
        assert "no matching table has a column 'color'" in listed["error"]
        shown = run(run_.home.path, "consumer", "ls")
        assert ("search" in shown.stdout, "no matching table" in shown.stderr) == (True, True)
        run_.rows.append("web", "orders", {"id": 2, "color": 1})
        wait_for(lambda: run_.received() == [{"id": 2, "note": None, "color": 1}])


def test_reading_needs_no_secret_and_a_server_does(tmp_path: Path) -> None:
    hook = '[streams.web.consumers.hook.webhook]\nurl = "https://example.com/"\nsecret = "${HOOK}"\nheaders = { a = "${HOOK}" }\n'
    file = make_home(tmp_path / "home", HEAD + hook) / "millstream.toml"
    assert load_config(file, {}).unset_consumers("web")["hook"].hint == "export HOOK=…"
    home = Home(file.parent)
    with OpenHome(home) as rows, contextlib.closing(HomeConsumers(home)) as consumers:
        rows.append("web", "orders", [{"id": 1, "note": None}])
        (listed,) = consumers.call("web", "list").body["consumers"]
        assert (listed["name"], "HOOK is not set" in listed["error"]) == ("hook", True)
        for call in (lambda: consumers.call("web", "show", "hook"), consumers.start, lambda: check_unmade(home, "web")):
            with pytest.raises(ConfigError, match="HOOK is not set"):
                call()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HOOK", "whsec_" + "A" * 32)
        again = Home(file.parent)
        with contextlib.closing(HomeConsumers(again)) as consumers:
            made = consumers.call("web", "show", "hook").body
        check_unmade(again, "web")
    later = Home(file.parent)
    with contextlib.closing(HomeConsumers(later)) as consumers:
        shown = consumers.call("web", "show", "hook").body
        assert (shown["cursor"], shown["state"], "HOOK is not set" in shown["error"]) == (
            made["cursor"],
            "active",
            True,
        )


def test_a_consumer_that_cannot_be_made_is_found_before(deployment: Deployment) -> None:
    with deployment.run(SEARCH + 'where = "color = 1"') as run_:
        check_unmade(run_.home, "web")
        run_.append("orders", 1)
        with pytest.raises(ConfigError, match=r"search\.where: no matching table has a column 'color'"):
            check_unmade(run_.home, "web")


def test_damaged_state_stops_no_server(deployment: Deployment) -> None:
    with deployment.run(SEARCH) as before:
        before.call("show")
    log = before.home.delivery_folder("web") / "consumers.log"
    log.write_bytes(b"x" + log.read_bytes()[1:])
    with deployment.run(SEARCH) as after:
        with contextlib.closing(HomeConsumers(after.home)) as begun:
            begun.start()
        with pytest.raises(DeliveryError, check=coded("consumer_state_unreadable")):
            after.call("show")


@pytest.mark.parametrize(
    ("consumer", "key", "what"),
    [
        ("[streams.web.consumers.Search]", "consumers.Search", "can't name a consumer"),
        (SEARCH + 'where = "id >"', "consumers.search.where", ""),
        (SEARCH + "tables = []", "consumers.search.tables", ""),
        (SEARCH + 'tables = ["a.b.c"]', "consumers.search.tables", ""),
        (SEARCH + 'columns = ["id", "id"]', "consumers.search.columns", "twice"),
        (SEARCH + 'group_by = "color"', "consumers.search.group_by", '"key", "none" or a list'),
        (SEARCH + "group_by = [1]", "consumers.search.group_by", '"key", "none" or a list'),
        (SEARCH + 'kind = "newest"', "consumers.search.kind", "must be one of"),
        (SEARCH + "ack_wait_ms = 99", "consumers.search.ack_wait_ms", "100"),
        (SEARCH + 'max_deliver = "1"', "consumers.search.max_deliver", "a whole number"),
        (SEARCH + "max_delivery = 1", "consumers.search.max_delivery", "did you mean max_deliver?"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path: Path, consumer: str, key: str, what: str) -> None:
    home = make_home(tmp_path / "home", HEAD + consumer)
    with pytest.raises(ConfigError) as error:
        load_config(home / "millstream.toml", {})
    assert error.value.details["key"] == f"streams.web.{key}"
    assert error.value.details["line"] == (HEAD + consumer).count("\n") + 1
    assert what in error.value.message
