"""The process that has a home's consumers: streams that can't be opened or closed hold no other ones."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.app.homes import make_home, wait_for

from millstream.app.open_home import OpenHome
from millstream.delivery.consumer_store import LOG_NAME
from millstream.errors import HomeBusy, MillstreamError, WriterClosed
from millstream.home.home import Home
from millstream.processes.control_socket import ControlServer
from millstream.processes.role_locks import RoleLock
from millstream.writers import home_consumers
from millstream.writers.home_consumers import HomeConsumers

STREAMS = ("one", "two")
NAMED = {"name": "search", "start": "earliest"}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(make_home(tmp_path / "home", "".join(f"[streams.{stream}]\n" for stream in STREAMS)))
    with OpenHome(home) as rows:
        for stream in STREAMS:
            rows.append(stream, "orders", {"id": 1})
        yield home


@pytest.fixture
def workers() -> Callable[[], list[str]]:
    """Return a function that returns the names of the threads that streams' consumers have, in this test."""
    before = set(threading.enumerate())
    return lambda: [
        one.name for one in threading.enumerate() if one not in before and one.name.startswith("consumers-")
    ]


def test_a_stream_whose_state_cannot_be_kept_at_the_end_leaves_no_other_one_open(
    home: Home, workers: Callable[[], list[str]]
) -> None:
    """The others went on in a process that no longer had the role: to sinks, and on the state that another process had."""
    consumers = HomeConsumers(home)
    for stream in STREAMS:
        consumers.call(stream, "create", None, NAMED)
    (home.delivery_folder("one") / LOG_NAME).unlink()
    with pytest.raises(MillstreamError):
        consumers.call("one", "receive", "search", {})
    with pytest.raises(MillstreamError):
        consumers.close()
    assert workers() == []


def test_a_call_that_comes_late_opens_nothing_without_the_role(home: Home, workers: Callable[[], list[str]]) -> None:
    consumers = HomeConsumers(home)
    consumers.call("one", "create", None, NAMED)
    owner = consumers._owner()
    assert owner is not None
    consumers.close()
    with pytest.raises(WriterClosed):
        owner.of("one")
    assert workers() == []


def test_a_server_opens_consumers_once_their_state_can_be_read_again(home: Home) -> None:
    """It tried twice: a consumer that only pushes then delivered nothing until a call asked for it."""
    consumers = HomeConsumers(home)
    for stream in STREAMS:
        consumers.call(stream, "create", None, NAMED)
    consumers.close()
    log = home.delivery_folder("one") / LOG_NAME
    data = log.read_bytes()
    log.write_bytes(b"x" + data[1:])
    server = HomeConsumers(home)
    try:
        server.start()
        owner = server._owner()
        assert owner is not None
        assert server._take()
        assert list(owner._streams) == ["two"]
        log.write_bytes(data)
        wait_for(lambda: list(owner._streams) == ["two", "one"])
        assert not server._take()
    finally:
        server.close()


def test_a_question_gives_a_process_up_that_is_stopped(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """A status waited 70 seconds for a server that was stopped by a signal."""
    monkeypatch.setattr(home_consumers, "_STARTS_WITHIN_S", 0.3)
    goes_on = threading.Event()

    def silent(_asked: Mapping[str, Any]) -> dict[str, Any]:
        goes_on.wait(120)
        return {}

    role = RoleLock.take(home.run_folder, "delivery")
    consumers = HomeConsumers(home)
    try:
        with ControlServer(home, "delivery", {}, {"consumers": silent}):
            began_s = time.monotonic()
            with pytest.raises(HomeBusy, match="doesn't answer"):
                consumers.call("one", "list")
            assert time.monotonic() - began_s < 30
    finally:
        goes_on.set()
        consumers.close()
        role.release()


@pytest.mark.parametrize("closes", [False, True])
def test_a_forked_child_has_the_consumers_once_its_parent_has_ended(home: Home, *, closes: bool) -> None:
    """Regression: a program that forks into the background asked its ended parent for ever (`home_busy`)."""
    received, report = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            _with_a_child(home, closes=closes, report=report)
        finally:
            os._exit(1)
    os.close(report)
    assert os.waitpid(parent, 0)[1] == 0
    with os.fdopen(received, "rb") as said:
        assert json.load(said) == [1, 2]


def _with_a_child(home: Home, *, closes: bool, report: int) -> None:
    """Have the home's consumers, fork, and end; the child reports what it receives once this process is gone."""
    here = OpenHome(home)
    here.consumers(STREAMS[0]).create("search", start="earliest")
    parent = os.getpid()
    if os.fork():
        if closes:
            here.close()
        os._exit(0)
    wait_for(lambda: os.getppid() != parent)
    here.append(STREAMS[0], "orders", {"id": 2})
    with here.consume(STREAMS[0], "search", wait_s=5.0) as messages:
        ids = [message.record["row"]["id"] for message in messages]
    os.write(report, json.dumps(ids).encode())
    here.close()
    os._exit(0)
