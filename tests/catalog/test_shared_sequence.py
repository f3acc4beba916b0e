"""The shared numbers of a stream in PostgreSQL and in memory: one suite, and the failures that only a server has."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import TypeAlias

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import text
from tests.app.homes import wait_for
from tests.catalog.sequencing import MakeStore, MemorySequenceStore, SequenceStoreConformance

from millstream.catalog import Catalog
from millstream.catalog.shared_sequence import PostgresSequenceStore
from millstream.catalog.writer_notifications import PostgresAnnouncements
from millstream.errors import CatalogError, SequencingError, StaleEpoch
from millstream.model.ids import Epoch, StreamId, WriterId
from millstream.model.positions import SEQ_MAX, Seq, SeqRange
from millstream.protocol.sequencer import Announcement, Drawn
from millstream.testing import EmbeddedPostgres
from millstream.testing.errors import coded
from millstream.testing.pytest_plugin import Database


class TestMemory(SequenceStoreConformance):
    @pytest.fixture
    def make(self) -> MakeStore:
        return lambda lease_s: MemorySequenceStore(lease_s=lease_s)


class TestPostgres(SequenceStoreConformance):
    @pytest.fixture
    def make(self, postgres: Database) -> Iterator[MakeStore]:
        yield from _stores(postgres.dsn)


class TestOldestPostgres(SequenceStoreConformance):
    @pytest.fixture
    def make(self, oldest: EmbeddedPostgres, request: pytest.FixtureRequest) -> Iterator[MakeStore]:
        yield from _stores(oldest.create_database(f"seq{abs(hash(request.node.name)) % 10**9}"))


@pytest.fixture(scope="module")
def oldest() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(14, fsync=False) as server:
        yield server


def _stores(address: str) -> Iterator[MakeStore]:
    with Catalog(address) as catalog:
        made = []

        def make(lease_s: float) -> PostgresSequenceStore:
            stream = catalog.resolve_stream(f"s{len(made)}")
            made.append(PostgresSequenceStore(catalog.database, stream, lease_s=lease_s))
            return made[-1]

        yield make
        for store in made:
            store.close()


@pytest.fixture
def catalog(postgres: Database) -> Iterator[Catalog]:
    with Catalog(postgres.dsn) as catalog:
        yield catalog


def _sequence(stream: StreamId) -> str:
    return f"millstream.numbers_{stream.hex}"


@pytest.mark.parametrize(
    ("altered", "says"),
    [
        ("ALTER SEQUENCE {} CACHE 20", "CACHE 20"),
        ("ALTER SEQUENCE {} CYCLE", "CYCLE"),
        ("ALTER SEQUENCE {} INCREMENT 5", "INCREMENT 5"),
        ("ALTER SEQUENCE {} AS integer", "AS integer"),
        ("ALTER SEQUENCE {} SET UNLOGGED", "UNLOGGED"),
        ("ALTER SEQUENCE {} RESTART", "stands at"),
        ("SELECT setval('{}', 3)", "stands at 3"),
        ("DROP SEQUENCE {}", "is gone"),
    ],
)
def test_trouble_with_the_sequence_is_found_at_start_and_its_remedy_works(
    catalog: Catalog, postgres: Database, altered: str, says: str
):
    stream = catalog.resolve_stream("shop")
    store = PostgresSequenceStore(catalog.database, stream)
    mine = store.register("a", "here")
    store.recovered(mine.writer, mine.epoch)
    given = store.draw(mine.writer, mine.epoch, 7, position=Seq(0)).given
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        connection.execute(altered.format(_sequence(stream)))
        if says.startswith(("stands", "is")):
            with pytest.raises(SequencingError, check=coded("sequence_unusable"), match=says):
                store.draw(mine.writer, mine.epoch, 1, position=Seq(0))
        with pytest.raises(SequencingError, check=coded("sequence_unusable"), match=says):
            store.check()
        with pytest.raises(SequencingError, check=coded("sequence_unusable"), match=says) as caught:
            store.register("a", "here")
        connection.execute(caught.value.hint)
    again = store.register("a", "here")
    assert again.newest >= given.last
    store.recovered(again.writer, again.epoch)
    assert store.draw(again.writer, again.epoch, 1, position=Seq(0)).given.first > given.last
    store.close()


@pytest.mark.parametrize("counted", ["joining", "elsewhere", "nothing"])
def test_a_draw_is_flushed_if_others_count_its_position_whatever_the_database_says(
    catalog: Catalog, postgres: Database, counted: str
):
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        name = sql.Identifier(connection.info.dbname)
        connection.execute(sql.SQL("ALTER DATABASE {} SET synchronous_commit = off").format(name))
        store = PostgresSequenceStore(catalog.database, catalog.resolve_stream("shop"))
        mine = store.register("a", "here")
        store.recovered(mine.writer, mine.epoch)
        store.draw(mine.writer, mine.epoch, 1, position=Seq(0))  # it reserves
        other = store.register("b", "there" if counted == "elsewhere" else "here")
        store.recovered(other.writer, other.epoch)
        if counted == "nothing":
            store.report(other.writer, other.epoch, position=Seq(0))
        flushed = 0
        for _ in range(30):
            store.draw(mine.writer, mine.epoch, 1, position=Seq(0))
            row = connection.execute("SELECT pg_current_wal_flush_lsn() >= pg_current_wal_insert_lsn()").fetchone()
            flushed += row == (True,)
        # A server process may write between the draw and the look.
        assert flushed <= 10 if counted == "nothing" else flushed >= 20
        store.close()


@pytest.mark.parametrize("is_restarted", [True, False])
def test_numbers_go_on_above_those_of_draws_that_a_crashed_server_forgot(is_restarted: bool):
    lazy = {"wal_writer_delay": "10s", "autovacuum": "off"}
    with EmbeddedPostgres(settings=lazy) as server, Catalog(server.create_database("numbers")) as catalog:
        stream = catalog.resolve_stream("shop")
        store = PostgresSequenceStore(catalog.database, stream)
        mine, idle = store.register("a", "here"), store.register("b", "here")
        for own in (mine, idle):
            store.recovered(own.writer, own.epoch)
            store.report(own.writer, own.epoch, position=Seq(0))
        flushed = store.draw(mine.writer, mine.epoch, 5, position=Seq(0)).given.last
        given = [store.draw(mine.writer, mine.epoch, 5, position=Seq(0)).given.last for _ in range(20)][-1]
        if is_restarted:
            server.restart("immediate")
        else:
            with psycopg.connect(server.dsn()) as connection:
                os.kill(connection.info.backend_pid, signal.SIGKILL)
                with suppress(psycopg.OperationalError):
                    connection.execute("SELECT pg_sleep(60)")
        with suppress(CatalogError):
            while True:  # the server ends its other processes a little later
                given = store.draw(mine.writer, mine.epoch, 5, position=Seq(0)).given.last
        store.check()
        with catalog.database.read() as connection:
            kept = connection.execute(text(f"SELECT last_value FROM {_sequence(stream)}")).scalar_one()
        assert flushed <= kept < given, "the server forgot none: the test shows nothing"
        seen, _ = store.report(idle.writer, idle.epoch, position=Seq(0))
        assert seen.newest > given
        assert store.last(mine.writer, mine.epoch).last <= given
        again = store.draw(mine.writer, mine.epoch, 5, position=Seq(0)).given
        assert again.first == seen.newest + 1
        assert store.draw(idle.writer, idle.epoch, 5, position=Seq(0)).given.first == again.last + 1
        store.close()


def test_numbers_reserved_by_a_writer_that_owned_the_stream_are_not_given_again(catalog: Catalog):
    stream = catalog.resolve_stream("shop")
    _, epoch = catalog.register_writer(stream)
    catalog.reservations(stream).reserve_to(Seq(1000), epoch=epoch)
    store = PostgresSequenceStore(catalog.database, stream)
    mine = store.register("writer", "")
    assert (mine.newest, mine.epoch > epoch) == (1000, True)
    store.recovered(mine.writer, mine.epoch)
    assert store.draw(mine.writer, mine.epoch, 5, position=Seq(0)).given == SeqRange(Seq(1001), 5)
    store.close()


def test_a_fence_waits_for_a_draw_and_no_draw_comes_behind_it(catalog: Catalog):
    stream = catalog.resolve_stream("shop")
    store = PostgresSequenceStore(catalog.database, stream)
    mine = store.register("a", "here")
    store.recovered(mine.writer, mine.epoch)
    drawn: list[SeqRange] = []

    def draw() -> None:
        with suppress(StaleEpoch):
            drawn.extend(store.draw(mine.writer, mine.epoch, 1, position=Seq(0)).given for _ in range(100_000))

    thread = threading.Thread(target=draw)
    thread.start()
    wait_for(lambda: len(drawn) > 10)
    with Catalog(catalog.database.address or "") as other:
        fence = PostgresSequenceStore(other.database, stream)
        again = fence.register("a", "here")
        thread.join(180)
        assert not thread.is_alive()
        assert drawn[-1].last == again.newest
        fence.close()
    store.close()


@pytest.mark.siege
def test_a_server_that_crashes_gives_no_number_twice():
    with EmbeddedPostgres(fsync=True) as server, Catalog(server.create_database("numbers")) as catalog:
        stores = [PostgresSequenceStore(catalog.database, catalog.resolve_stream("shop")) for _ in range(4)]
        drawn: list[list[SeqRange]] = [[] for _ in stores]
        done = threading.Event()

        def draw(number: int) -> None:
            store = stores[number]
            mine = store.register(f"w{number}", "here")
            store.recovered(mine.writer, mine.epoch)
            while not done.is_set():
                try:
                    drawn[number].append(store.draw(mine.writer, mine.epoch, 10, position=Seq(0)).given)
                except CatalogError:
                    time.sleep(0.05)

        def go_on() -> None:
            """Return once each writer has drawn since the call."""
            had = list(map(len, drawn))
            wait_for(lambda: all(len(own) > before for own, before in zip(drawn, had, strict=True)))

        threads = [threading.Thread(target=draw, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            go_on()
            server.restart("immediate")
        go_on()
        done.set()
        for thread in threads:
            thread.join()
        given = [one for own in drawn for one in own]
        firsts = [one.first for one in given]
        assert len(set(firsts)) == len(firsts)
        ends = sorted((one.first, one.last) for one in given)
        assert all(last < first for (_, last), (first, _) in pairwise(ends))
        for store in stores:
            store.close()


Called: TypeAlias = tuple[PostgresAnnouncements, PostgresAnnouncements, PostgresAnnouncements]


@pytest.fixture
def called(postgres: Database) -> Iterator[Called]:
    """Yield two writers of one stream, and one of another stream; all of them listen."""
    with Catalog(postgres.dsn) as catalog:
        one, other = catalog.resolve_stream("one"), catalog.resolve_stream("other")
        ends = [PostgresAnnouncements(catalog.database, stream, again_s=0.2) for stream in (one, one, other)]
        for end in ends:
            assert end.hear(0.0) == []
        yield ends[0], ends[1], ends[2]
        for end in ends:
            end.close()


A = Announcement(WriterId(1), Epoch(7), Seq(300))


def test_what_a_writer_calls_is_heard_by_the_others_of_its_stream(called: Called) -> None:
    first, second, other = called
    first.tell(A)
    first.tell(replace(A, position=SEQ_MAX))
    heard: list[Announcement] = []
    wait_for(lambda: heard.extend(second.hear(1.0)) or len(heard) >= 2)
    assert heard == [A, replace(A, position=SEQ_MAX)]
    assert first.hear(0.1) == other.hear(0.1) == []


def test_who_hears_nothing_waits_for_as_long_as_it_said(called: Called) -> None:
    began = time.monotonic()
    assert called[0].hear(0.2) == []
    assert time.monotonic() - began >= 0.19


@pytest.mark.parametrize("text", ["", "1.2", "1.2.3.4", "1.2.-3", "1.2.٣", f"1.2.{SEQ_MAX + 1}", "1.2." + "9" * 4000])
def test_what_cant_be_read_is_not_heard(called: Called, postgres: Database, text: str) -> None:
    with Catalog(postgres.dsn) as catalog, postgres.connect() as connection:
        channel = f"millstream_{catalog.stream('one').id.hex}"
        connection.execute("SELECT pg_notify(%s, %s), pg_notify(%s, %s)", (channel, text, channel, str(A)))
    heard: list[Announcement] = []
    wait_for(lambda: heard.extend(called[0].hear(1.0)) or heard)
    assert heard == [A]


def test_a_connection_that_was_cut_is_silence_until_there_is_another(called: Called, postgres: Database) -> None:
    first, second, _ = called
    with postgres.connect() as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND pid <> pg_backend_pid()"
        )
    began = time.monotonic()
    assert second.hear(0.1) == []
    first.tell(A)
    assert time.monotonic() - began >= 0.09
    deadline = time.monotonic() + 60
    heard: list[Announcement] = []
    while not heard:
        assert time.monotonic() < deadline
        first.tell(A)
        heard += second.hear(0.1)
    assert set(heard) == {A}


DEFAULTS = [
    ("default_transaction_isolation = 'repeatable read'",),
    ("default_transaction_isolation = 'serializable'", "default_transaction_deferrable = on"),
]


@pytest.mark.parametrize("defaults", DEFAULTS)
def test_draws_and_calls_are_read_committed_whatever_the_database_says(
    postgres: Database, defaults: tuple[str, ...]
) -> None:
    with postgres.connect() as connection:
        for setting in defaults:
            connection.execute(
                sql.SQL("ALTER DATABASE {} SET ").format(sql.Identifier(postgres.name)) + sql.SQL(setting)
            )
    with Catalog(postgres.dsn) as catalog:
        stream = catalog.resolve_stream("shop")
        store = PostgresSequenceStore(catalog.database, stream, lease_s=1e6)
        mine, joins = store.register("mine", "here"), store.register("joins", "here")
        store.recovered(mine.writer, mine.epoch)
        store.draw(mine.writer, mine.epoch, 5, position=Seq(0))
        # The draw begins while another step has its row locked; that step commits before the draw
        # goes on.
        drawn: list[Drawn | CatalogError] = []

        def draw() -> None:
            try:
                drawn.append(store.draw(mine.writer, mine.epoch, 5, position=Seq(5)))
            except CatalogError as error:
                drawn.append(error)

        thread = threading.Thread(target=draw)
        with catalog.database.write() as raw:
            raw.exec_driver_sql("UPDATE writers SET lease_until_us = lease_until_us + 1")
            thread.start()
            with postgres.connect() as connection:
                wait_for(
                    lambda: connection.execute(
                        "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
                    ).fetchone()
                )
            raw.exec_driver_sql("UPDATE writers SET phase = 'joining', position = 5 WHERE name = 'joins'")
        thread.join()
        assert joins.writer == 2
        assert drawn == [Drawn(SeqRange(Seq(6), 5), Seq(5))]
        hears, tells = (PostgresAnnouncements(catalog.database, stream) for _ in range(2))
        assert hears.hear(0.01) == []
        tells.tell(Announcement(mine.writer, mine.epoch, Seq(10)))
        assert [told.position for told in hears.hear(10.0)] == [10]
        for closing in (store, hears, tells):
            closing.close()
