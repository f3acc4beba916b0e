"""A master that doesn't answer is noticed at once, and one that comes back is, too."""

from __future__ import annotations

import queue
import socket

import pytest
from tests.app.homes import wait_for

from millstream.app import master_watch
from millstream.app.master_watch import MasterWatch
from millstream.testing._servers.ports import free_port


def test_a_silent_master_is_named_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(master_watch, "_LOOK_EVERY_S", 0.01)
    port, silences = free_port(), queue.SimpleQueue[bool]()
    watch = MasterWatch(f"spark://127.0.0.1:{port}", lambda: silences.put(True))
    with watch.watching():
        assert silences.get(timeout=30)
        assert watch.waits_for == f"spark://127.0.0.1:{port}"
        with socket.create_server(("127.0.0.1", port)):
            wait_for(lambda: watch.waits_for is None)
        assert silences.get(timeout=30)
    assert watch.waits_for is None


@pytest.mark.parametrize("master", ["local[*]", "yarn", "k8s://https://127.0.0.1:1"])
def test_nothing_is_said_of_other_masters(master: str) -> None:
    watch = MasterWatch(master, lambda: pytest.fail("it was called silent"))
    with watch.watching():
        assert watch.waits_for is None


def test_one_of_several_masters_is_enough() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        places = f"127.0.0.1:{free_port()},127.0.0.1:{server.getsockname()[1]}"
        watch = MasterWatch(f"spark://{places}", lambda: pytest.fail("it was called silent"))
        with watch.watching():
            server.settimeout(30)
            server.accept()[0].close()
