"""Connections that the Flight server cuts: only the caller's, and no file of the process loses its locks."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.flight as fl
import pytest
from tests.app.homes import done, make_home, wait_for
from tests.serving.serving_process import served

from millstream.catalog import Catalog
from millstream.serving.flight.connections import Readers, Senders, cut_connections
from millstream.workers import Worker

TABLES = 40
ROWS = pa.record_batch({"id": [1]})


def locks_of_this_process() -> list[list[str]]:
    """Return the locks of this process that any `close` of the locked file would drop."""
    lines = [line.split()[1:] for line in Path("/proc/locks").read_text().splitlines()]
    return sorted(words for words in lines if words[0] == "POSIX" and words[3] == str(os.getpid()))


@contextmanager
def connected(host: str = "127.0.0.1", family: int = socket.AF_INET) -> Iterator[tuple[int, str, socket.socket]]:
    """Connect this process to itself: yield the server's port, the caller as gRPC names it, and the caller's end."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(family))
        listener.bind((host, 0))
        listener.listen()
        caller = stack.enter_context(socket.create_connection(listener.getsockname()[:2]))
        stack.enter_context(listener.accept()[0])
        port = caller.getsockname()[1]
        peer = f"ipv4:{host}:{port}" if family == socket.AF_INET else f"ipv6:%5B{host}%5D:{port}"
        yield listener.getsockname()[1], peer, caller


def test_a_cut_leaves_the_locks_of_every_file(tmp_path: Path) -> None:
    """POSIX drops all of a process's locks on a file when it closes any descriptor of that file, also a duplicate."""
    with Catalog(tmp_path / "catalog.db") as catalog, connected() as (port, peer, caller):
        catalog.resolve_stream("shop")
        before = locks_of_this_process()
        assert before, "SQLite holds locks while it is open"
        assert cut_connections(port, peer) == 1
        assert caller.recv(1) == b""
        assert locks_of_this_process() == before


def test_a_cut_ends_the_connections_of_one_caller_alone() -> None:
    with connected() as (port, _, caller), connected("::1", socket.AF_INET6) as (other_port, other_peer, other):
        assert cut_connections(port, other_peer) == 0
        assert cut_connections(other_port, other_peer) == 1
        assert other.recv(1) == b""
        caller.settimeout(0.05)
        with pytest.raises(TimeoutError):
            caller.recv(1)
        assert cut_connections(port) == 1, "every caller of the port"
        assert caller.recv(1) == b""


def test_callers_are_watched_on_after_a_lack_of_descriptors() -> None:
    """The watching thread ended with it: from then on no caller that hung was cut off, and none gave its place back."""
    readers, ended = Readers(within_s=0.1), threading.Event()
    with connected() as (port, peer, caller), readers.reading(peer):
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        try:
            # No lower: `poll` refuses more descriptors than the limit, also in threads of other tests.
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
            assert cut_connections(port, peer) == 0
            watching = Worker("watch", partial(readers.watch, port, ended)).start()
            assert not watching.join(0.3)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        caller.settimeout(10.0)
        assert caller.recv(1) == b""
        ended.set()
        assert watching.join(10.0)


def test_a_sender_that_cannot_be_warned_for_lack_of_a_thread_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that watches ended with it: no sender that hung was cut off from then on."""
    start, refused = Worker.start, list[str]()

    def start_some(worker: Worker) -> Worker:
        if worker.name == "flight-idle":
            refused.append(worker.name)
            raise OSError(errno.EAGAIN, "no more threads can be started")
        return start(worker)

    monkeypatch.setattr(Worker, "start", start_some)
    senders, ended = Senders(within_s=0.1), threading.Event()
    with connected() as (port, peer, caller), senders.sending(peer, len) as sender, sender.waited_for():
        watching = Worker("watch", partial(senders.watch, port, ended)).start()
        caller.settimeout(20.0)
        assert caller.recv(1) == b""
        ended.set()
        assert watching.join(10.0)
        watching.check()
    assert refused == ["flight-idle"]


@pytest.mark.long
def test_tables_that_were_acknowledged_after_a_cut_outlive_a_kill(tmp_path: Path) -> None:
    """The server lost its locks on the catalog at a cut.

    The next command then removed the catalog's WAL, and the server went on writing into it.
    """
    home = make_home(
        tmp_path / "home",
        '[streams.web]\n[http]\nlisten = "127.0.0.1:0"\n[flight]\nlisten = "127.0.0.1:0"\nidle_timeout = "1s"\n',
    )
    with served(home) as server:
        address = next(line["address"] for line in server.said if line.get("event") == "flight listens")

        def put(table: str) -> None:
            with fl.connect(f"grpc://{address}") as client:
                writer, reader = client.do_put(fl.FlightDescriptor.for_path("web", table), ROWS.schema)
                writer.write_batch(ROWS)
                assert json.loads(reader.read().to_pybytes())["rows"] == 1
                writer.close()

        put("first")
        with fl.connect(f"grpc://{address}") as client:
            writer, reader = client.do_put(fl.FlightDescriptor.for_path("web", "silent"), ROWS.schema)
            writer.write_batch(ROWS)
            reader.read()
            wait_for(lambda: any(line.get("event") == "a Flight sender is cut off" for line in server.said))
        done(home, "status")
        for number in range(TABLES):
            put(f"t{number}")
        assert (home / "data" / "catalog.db-wal").exists()
        server.process.kill()
        server.process.wait()
    with closing(sqlite3.connect(home / "data" / "catalog.db")) as opened:
        names = {name for (name,) in opened.execute("SELECT name FROM tables")}
    assert {f"t{number}" for number in range(TABLES)} <= names
