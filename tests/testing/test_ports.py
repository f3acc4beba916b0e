"""Ports that are chosen before a server listens on them."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from millstream.testing._servers import ports as _ports
from millstream.testing._servers.ports import free_port


def test_each_is_free_and_another_one_and_none_that_the_system_gives_by_itself() -> None:
    given = [free_port() for _ in range(50)]
    assert len(set(given)) == 50
    with ExitStack() as held:
        for port in given:
            held.enter_context(socket.create_server(("127.0.0.1", port)))
    assert max(given) < _ports._first_ephemeral()


def test_one_that_is_taken_is_passed() -> None:
    turns = len(range(10_000, _ports._first_ephemeral(), _ports._SHARES))
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        # All the way round, and past it.
        assert taken.getsockname()[1] not in {free_port() for _ in range(turns)}
