"""The process that has a home's consumers: streams that can't be opened or closed hold no other ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.app.homes import make_home, wait_for

from millstream.app.open_home import OpenHome
from millstream.delivery.consumer_store import LOG_NAME
from millstream.errors import MillstreamError, WriterClosed
from millstream.home.home import Home
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
