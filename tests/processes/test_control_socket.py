"""A part answers calls for as long as it lives, whatever becomes of one of them."""

from __future__ import annotations

import errno
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.app.homes import make_home, wait_for

from millstream.home.home import Home
from millstream.processes import control_socket
from millstream.processes.control_socket import ControlServer, ask


@pytest.fixture
def home(tmp_path: Path) -> Home:
    found = Home(make_home(tmp_path / "home", "[streams.web]\n"))
    found.prepare()
    return found


def test_a_lack_of_descriptors_passes(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = [OSError(errno.EMFILE, "Too many open files")]

    class Socket(socket.socket):
        def accept(self) -> tuple[socket.socket, Any]:
            if lacks:
                raise lacks.pop()
            return super().accept()

    monkeypatch.setattr(control_socket, "_ACCEPTS_AGAIN_S", 0.01)
    monkeypatch.setattr(socket, "socket", Socket)
    with ControlServer(home, "owner", {"status": lambda: {"is": "there"}}):
        assert ask(home, "owner", "status") == {"is": "there"}
    assert not lacks


def test_a_call_after_one_that_fails_is_answered(home: Home) -> None:
    def fails() -> dict[str, Any]:
        raise RuntimeError("a bug")

    with ControlServer(home, "owner", {"fails": fails, "status": lambda: {"is": "there"}}):
        assert ask(home, "owner", "fails") is None
        assert ask(home, "owner", "status") == {"is": "there"}


def test_its_thread_ends_with_it(home: Home) -> None:
    server = ControlServer(home, "owner", {"status": dict})
    assert ask(home, "owner", "status") == {}
    server.close()
    wait_for(lambda: not any(one.name == "control-owner" for one in threading.enumerate()))
