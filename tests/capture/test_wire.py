"""Both ways of reading a replication connection give the same messages and the same errors."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing

import psycopg
import pytest

from millstream.capture import wire as wires
from millstream.capture.connection import connect_replication
from millstream.capture.frames import KEEPALIVE
from millstream.capture.wire import LibpqWire, SocketWire, Wire, start_replication
from millstream.errors import SlotActive, SlotLost, SourceUnreachable
from millstream.model.positions import Lsn
from millstream.testing.pytest_plugin import Database

DEADLINE_S = 30.0
COMMAND = "START_REPLICATION SLOT {slot} LOGICAL 0/0 (proto_version '2', publication_names 'p', streaming 'on', messages 'true')"


@pytest.fixture(params=[SocketWire, LibpqWire])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type:
    """The way of reading; libpq's is what a process without numba takes."""
    if request.param is LibpqWire:
        monkeypatch.setattr(wires, "has_machine_code", lambda: False)
    return request.param


def start(database: Database, slot: str) -> Wire:
    return start_replication(connect_replication(database.dsn), COMMAND.format(slot=slot).encode())


def read_until(wire: Wire, done: Callable[[list[bytes]], bool]) -> list[bytes]:
    """The messages, keepalives left out, until there are enough of them."""
    found: list[bytes] = []
    deadline = time.monotonic() + DEADLINE_S
    while not done(found):
        assert time.monotonic() < deadline
        block = wire.read()
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


def test_messages_are_those_of_libpq_whatever_their_size(source: Database):
    with source.connect() as connection:
        connection.execute("SELECT pg_copy_logical_replication_slot('s', 's2')")
        connection.execute("INSERT INTO t SELECT n, repeat('x', n % 50) FROM generate_series(1, 5000) n")
        connection.execute("INSERT INTO t VALUES (-1, repeat('y', 3000000))")  # larger than any buffer
        connection.execute("UPDATE t SET note = 'z' WHERE id = 7")
    with closing(start(source, "s")) as direct:
        assert isinstance(direct, SocketWire)
        found = read_until(direct, lambda messages: commits(messages) == 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wires, "has_machine_code", lambda: False)
        with closing(start(source, "s2")) as through_libpq:
            assert isinstance(through_libpq, LibpqWire)
            assert read_until(through_libpq, lambda messages: commits(messages) == 3) == found
    assert len(found) > 5000


def test_a_refusal_is_the_servers_own(source: Database, way: type):
    with closing(connect_replication(source.dsn)) as connection, pytest.raises(SlotLost):
        start_replication(connection, COMMAND.format(slot="nobody").encode())
    with closing(start(source, "s")) as first:
        assert isinstance(first, way)
        with closing(connect_replication(source.dsn)) as connection, pytest.raises(SlotActive):
            start_replication(connection, COMMAND.format(slot="s").encode())


def test_a_server_process_that_is_ended_ends_the_stream(source: Database, way: type):
    with closing(start(source, "s")) as wire, source.connect() as connection:
        assert isinstance(wire, way)
        connection.execute("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = 's'")
        with pytest.raises(SourceUnreachable):
            read_until(wire, lambda _: False)


def test_what_is_sent_reaches_the_server_and_a_goodbye_frees_the_slot(source: Database, way: type):
    with source.connect() as connection, closing(start(source, "s")) as wire:
        assert isinstance(wire, way)
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
