"""Both ways of reading a replication connection give the same messages and the same errors."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import numpy as np
import numpy.typing as npt
import psycopg
import pytest
from tests.capture.beside import Beside

from millstream.capture.connection import connect_replication
from millstream.capture.stream._drain import drain
from millstream.capture.stream.frames import KEEPALIVE
from millstream.capture.stream.replication_connection import LibpqWire, SocketWire, Wire, start_replication
from millstream.errors import SourceError
from millstream.model.positions import Lsn
from millstream.testing.errors import coded
from millstream.testing.pytest_plugin import Database

DEADLINE_S = 30.0
COMMAND = "START_REPLICATION SLOT {slot} LOGICAL 0/0 (proto_version '2', publication_names 'p', streaming 'on', messages 'true')"


@pytest.fixture(params=[SocketWire, LibpqWire])
def way(request: pytest.FixtureRequest) -> type:
    """Return a way of reading; on an encrypted connection, libpq's is the only one."""
    return request.param


def start(database: Database, slot: str, way: type = SocketWire) -> Wire:
    command = COMMAND.format(slot=slot).encode()
    wire = start_replication(connect_replication(database.dsn), command, reads_socket=way is SocketWire)
    assert isinstance(wire, way)
    return wire


def read_until(wire: Wire, done: Callable[[list[bytes]], bool], *, gather_s: float = 0.0) -> list[bytes]:
    """Return the messages, without keepalives, once `done` accepts them."""
    found: list[bytes] = []
    deadline = time.monotonic() + DEADLINE_S
    while not done(found):
        assert time.monotonic() < deadline
        block = wire.read(gather_s)
        if block is not None:
            assert [message[0] for message in block.messages] == block.kinds.tolist()
            found += [message for message in block.messages if message[0] != KEEPALIVE]
    return found


@pytest.fixture
def source(postgres: Database) -> Database:
    with postgres.connect() as connection:
        connection.execute("CREATE TABLE t (id bigint PRIMARY KEY, note text)")
        connection.execute("CREATE PUBLICATION p FOR TABLE t")
        connection.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    return postgres


def commits(messages: list[bytes]) -> int:
    return sum(message[:1] == b"C" for message in messages)


@pytest.mark.parametrize("gather_s", [0.0, 0.01])
def test_messages_are_those_of_libpq_whatever_their_size(source: Database, gather_s: float):
    with source.connect() as connection:
        connection.execute("SELECT pg_copy_logical_replication_slot('s', 's2')")
        connection.execute("INSERT INTO t SELECT n, repeat('x', n % 50) FROM generate_series(1, 5000) n")
        connection.execute("INSERT INTO t VALUES (-1, repeat('y', 3000000))")  # larger than any buffer
        connection.execute("UPDATE t SET note = 'z' WHERE id = 7")
    with closing(start(source, "s")) as direct:
        found = read_until(direct, lambda messages: commits(messages) == 3, gather_s=gather_s)
    with closing(start(source, "s2", LibpqWire)) as through_libpq:
        assert read_until(through_libpq, lambda messages: commits(messages) == 3, gather_s=gather_s) == found
    assert len(found) > 5000


def test_a_refusal_is_the_servers_own(source: Database, way: type):
    with closing(connect_replication(source.dsn)) as connection, pytest.raises(SourceError, check=coded("slot_lost")):
        start_replication(connection, COMMAND.format(slot="nobody").encode(), reads_socket=way is SocketWire)
    with (
        closing(start(source, "s", way)),
        closing(connect_replication(source.dsn)) as connection,
        pytest.raises(SourceError, check=coded("slot_active")),
    ):
        start_replication(connection, COMMAND.format(slot="s").encode(), reads_socket=way is SocketWire)


@pytest.mark.parametrize("gather_s", [0.0, 0.01])
def test_a_server_process_that_is_ended_ends_the_stream(source: Database, way: type, gather_s: float):
    with closing(start(source, "s", way)) as wire, source.connect() as connection:
        connection.execute("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = 's'")
        with pytest.raises(SourceError, check=coded("source_unreachable")):
            read_until(wire, lambda _: False, gather_s=gather_s)


def test_what_is_sent_reaches_the_server_and_a_goodbye_frees_the_slot(source: Database, way: type):
    with source.connect() as connection, closing(start(source, "s", way)) as wire:
        connection.execute("INSERT INTO t VALUES (1, 'a')")
        found = read_until(wire, lambda messages: commits(messages) == 1)
        end = int.from_bytes(found[-1][10:18], "big")
        wire.tell(Lsn(end), Lsn(end), ask=False)
        wire.say_goodbye()
        wire.close()
        _wait_until_free(connection)
        row = connection.execute(
            "SELECT (confirmed_flush_lsn - '0/0')::bigint FROM pg_replication_slots WHERE slot_name = 's'"
        ).fetchone()
        assert row == (end,)


def _wait_until_free(connection: psycopg.Connection) -> None:
    deadline = time.monotonic() + DEADLINE_S
    query = "SELECT active FROM pg_replication_slots WHERE slot_name = 's'"
    while connection.execute(query).fetchone() != (False,):
        assert time.monotonic() < deadline


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        yield ours, theirs


def drained(ours: socket.socket, memory: npt.NDArray[np.uint8], filled: int, limit: int, *, turns: int = 100) -> int:
    return int(drain(ours.fileno(), memory, filled, limit, 1000, 200, turns))


def test_a_drain_takes_what_is_there_behind_what_was_and_no_more_than_fits(pair: tuple[socket.socket, socket.socket]):
    ours, theirs = pair
    data = bytes(range(256)) * 8
    theirs.sendall(data)
    memory = np.zeros(4096, np.uint8)
    assert drained(ours, memory, 100, 1100) == 1100
    assert memory[:100].tobytes() == bytes(100)
    assert drained(ours, memory, 1100, 4096) == 100 + len(data)
    assert memory[100 : 100 + len(data)].tobytes() == data
    assert not memory[100 + len(data) :].any()


def test_a_drain_goes_on_while_something_comes_without_holding_the_interpreter(
    pair: tuple[socket.socket, socket.socket],
):
    ours, theirs = pair
    memory = np.zeros(1 << 20, np.uint8)
    deadline = time.monotonic() + DEADLINE_S
    found = 1
    while (
        found == 1
    ):  # a busy machine may leave the sender without a turn; holding the interpreter, no drain would ever find more
        assert time.monotonic() < deadline
        found = drained_beside_a_sender(ours, theirs, memory, 50_000)
    assert found > 1


def drained_beside_a_sender(
    ours: socket.socket, theirs: socket.socket, memory: npt.NDArray[np.uint8], size: int
) -> int:
    """Return what one drain finds while a byte lies there and others arrive, as each send takes the interpreter."""
    answers: queue.SimpleQueue[int] = queue.SimpleQueue()
    # As long as the test sends, a turn finds less than it needs to stop napping, and more than
    # nothing.
    theirs.sendall(b"x")
    thread = Beside(lambda: answers.put(drained(ours, memory, 0, size, turns=1 << 30)))
    sent = 1
    while sent < size and thread.is_alive():
        with suppress(BlockingIOError):  # a drain that has ended reads nothing: a blocked sender would wait for ever
            sent += theirs.send(b"x" * min(100, size - sent), socket.MSG_DONTWAIT)
    found = answers.get(timeout=DEADLINE_S)
    while sent > found:
        sent -= len(ours.recv(min(sent - found, 1 << 16)))
    return found


def test_a_drain_of_a_socket_that_gives_nothing_ends_with_what_was(pair: tuple[socket.socket, socket.socket]):
    ours, theirs = pair
    memory = np.zeros(16, np.uint8)
    assert drained(ours, memory, 3, 16, turns=1 << 30) == 3
    theirs.close()
    assert drained(ours, memory, 3, 16, turns=1 << 30) == 3
