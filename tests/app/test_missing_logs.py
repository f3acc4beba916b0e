"""A log, or a shard of one, that is moved or removed while the home stands is reported wherever someone looks."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.app.homes import make_home, wait_for
from tests.cli.in_process import command
from tests.serving.servers import Served, served

from millstream.administration import doctor as doctors
from millstream.app.open_home import OpenHome
from millstream.app.status import collect_status
from millstream.errors import CorruptWal, UnknownStream
from millstream.home.home import Home
from millstream.leadership.node_roles import Roles
from millstream.model.replication import NodeName
from millstream.protocol.replication.node_promises import Role, RoleFact
from millstream.serving.health import Health
from millstream.testing.errors import coded

GONE = pytest.mark.parametrize("gone", ["", "shop", "shop/00000"])
"""The folders that go: `data/wal`, the stream's, its only shard's."""


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(make_home(tmp_path / "home", "[streams.shop]\n"))
    home.prepare()
    with OpenHome(home) as opened:
        opened.append("shop", "public.orders", [{"id": 1}])
    return home


def move(home: Home, gone: str) -> None:
    (home.data / "wal" / gone).rename(home.data / "moved")


def put_back(home: Home, gone: str) -> None:
    folder = home.data / "wal" / gone
    if not gone and folder.exists():
        folder.rmdir()
    (home.data / "moved").rename(folder)


@GONE
def test_everyone_who_looks_is_told_that_a_log_is_gone_and_what_to_do(home: Home, gone: str) -> None:
    """Regression: doctor and status found nothing wrong, verify an empty log or none, and serve was ready."""
    move(home, gone)
    missing = pytest.raises(CorruptWal, check=coded("log_missing"), match=r"data/wal/shop is missing")
    with OpenHome(home) as opened:
        with missing as refused:
            opened.append("shop", "public.orders", [{"id": 2}])
        with missing:
            opened.token("shop")
        with missing:
            opened.query("SELECT 1")
    hint = refused.value.hint
    assert "Put the folder back" in hint

    for words in (("verify",), ("ls",), ("cat",), ("stats", "--stream", "shop")):
        ended = command("--home", str(home.path), "wal", *words)
        assert ended.returncode == 1
        assert "error[log_missing]" in ended.stderr.decode()
    (found,) = doctors._one("log of shop", lambda: doctors._log(home, "shop"))
    assert (found.code, found.fix, found.is_wrong) == ("log_missing", hint, True)

    status = collect_status(home)
    (stream,) = status["streams"]
    assert (stream["errors"]["log"]["code"], stream["errors"]["log"]["hint"]) == ("log_missing", hint)
    assert (stream["tokens"]["durable"], stream["log"]["segments"]) == (None, None)
    assert status["problems"] == [f"log of shop: {refused.value.message}"]
    said = command("--home", str(home.path), "status").stdout.decode()
    assert f"log: log_missing: {refused.value.message}\n    Put the folder back" in said
    assert Health(home).ready() == (False, refused.value.message)

    put_back(home, gone)
    assert Health(home).ready()[0]
    assert collect_status(home)["problems"] == []
    with OpenHome(home) as opened:
        opened.append("shop", "public.orders", [{"id": 2}])


def test_the_log_that_is_left_is_not_taken_for_the_one_that_is_gone(home: Home) -> None:
    """Without --stream, a command read the other stream's log and reported that all is well."""
    make_home(home.path, "[streams.shop]\n[streams.web]\n[streams.new]\n")
    home = Home(home.path)
    assert home.pick_stream(None) == "shop", "the others never had a log"
    with OpenHome(home) as opened:
        opened.append("web", "public.clicks", [{"id": 1}])
    move(home, "shop")
    ended = command("--home", str(home.path), "wal", "verify")
    assert ended.returncode == 2
    assert "several streams" in ended.stderr.decode()
    assert "Name one with --stream. Streams here: shop, web." in ended.stderr.decode()
    assert command("--home", str(home.path), "wal", "verify", "--stream", "web").returncode == 0
    (home.path / "millstream.toml").write_text("[streams.web\n")
    assert Home(home.path).pick_stream(None) == "web", "reading needs no configuration"


def test_a_server_whose_log_is_moved_goes_on_once_it_is_back(home: Home) -> None:
    """Regression: its writes failed with `io_failed` and the hint to check the path, and it was ready."""
    with served(home.path) as server:
        assert post(server)[0] == 200
        move(home, "shop")
        for _ in range(2):
            status, answer = post(server)
            assert (status, answer["code"]) == (500, "log_missing")
            assert "Put the folder back" in answer["hint"]
        assert get(server, "/readyz")[0] == 503
        wait_for(lambda: [one["code"] for one in get(server, "/healthz")[1]["errors"]] == ["log_missing"])
        assert get(server, "/v1/streams/shop/token")[1]["code"] == "log_missing"
        put_back(home, "shop")
        assert post(server)[0] == 200
        assert get(server, "/readyz")[0] == 200


def test_a_shard_that_is_gone_among_others_is_told_with_what_to_do(tmp_path: Path) -> None:
    """Regression: serve was ready, and the status had no hint."""
    home = Home(make_home(tmp_path, "[streams.shop]\n[streams.shop.log]\nshards = 2\n"))
    home.prepare()
    with OpenHome(home) as opened:
        for number in range(20):
            opened.append("shop", f"public.t{number}", [{"id": 1}])
    (home.wal_folder("shop") / "00001").rename(tmp_path / "moved")
    with OpenHome(home) as opened, pytest.raises(CorruptWal, check=coded("log_missing")) as refused:
        opened.append("shop", "public.t1", [{"id": 2}])
    assert "shards are missing" in refused.value.message
    ready, why = Health(home).ready()
    assert not ready
    assert why == refused.value.message
    (stream,) = collect_status(home)["streams"]
    assert stream["errors"]["log"]["code"] == "log_missing"
    ended = command("--home", str(home.path), "wal", "verify")  # it still reports what is left
    assert ended.returncode == 3
    assert b"shards are missing" in ended.stderr


def test_a_log_that_never_was_or_comes_from_a_leader_is_not_missing(home: Home, tmp_path: Path) -> None:
    fresh = Home(make_home(tmp_path / "fresh", "[streams.shop]\n"))
    fresh.prepare()
    with pytest.raises(UnknownStream):
        fresh.pick_stream("shop")
    assert Health(fresh).ready()[0]
    move(home, "shop")
    with Roles(home).changing("shop") as changing:
        changing.put(replace(RoleFact(role=Role.FENCED), leader=NodeName("b")).following(NodeName("b")))
    with pytest.raises(UnknownStream):
        home.pick_stream("shop")


def post(server: Served) -> tuple[int, dict[str, Any]]:
    body = urllib.request.Request(
        f"http://{server.address}/v1/streams/shop/tables/public.orders",
        b'{"id": 3}',
        {"Content-Type": "application/json"},
    )
    return _answer(body)


def get(server: Served, path: str) -> tuple[int, dict[str, Any]]:
    return _answer(urllib.request.Request(f"http://{server.address}{path}"))


def _answer(request: urllib.request.Request) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)
