"""A standby is a source like another: streamed from, copied from, and followed when it is promoted.

If it can't be one, an error reports it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from structlog.testing import capture_logs
from tests.capture.beside import until_done, wait_until
from tests.capture.test_timelines import Servers, copy_slot, make_servers
from tests.servers.standby import promote, wait_for_replay

from millstream.app.table_requests import copy_table
from millstream.catalog import TableState
from millstream.errors import SourceError
from millstream.testing.postgres import EmbeddedPostgres

pytestmark = pytest.mark.siege

PUBLISH = "CREATE PUBLICATION millstream_shop FOR TABLE orders"


@contextmanager
def telling(primary: EmbeddedPostgres) -> Iterator[None]:
    """Let a primary send its running transactions to its standbys more often than every 15 seconds."""

    def tell(done: threading.Event) -> None:
        with primary.connect() as connection:
            while not done.wait(0.1):
                connection.execute("SELECT pg_log_standby_snapshot()")

    with until_done(tell):
        yield


def on_primary(servers: Servers, *statements: str) -> None:
    with servers.primary.connect() as connection:
        for statement in statements:
            connection.execute(statement)


def caught_up(servers: Servers, standby: EmbeddedPostgres) -> None:
    """Wait until the log has what the primary has committed by now."""
    wait_for_replay(servers.primary, standby)
    wait_until(servers.same, "the log has what the standby has")


@pytest.mark.parametrize("version", [16, 18])
def test_a_standby_is_copied_and_streamed_while_its_primary_is_written(version: int, tmp_path: Path) -> None:
    with make_servers(version, tmp_path) as servers:
        stage, standby = servers.stage, servers.standby()
        on_primary(
            servers,
            PUBLISH,
            "CREATE TABLE notes (t text)",
            "ALTER TABLE notes REPLICA IDENTITY FULL",
            "ALTER PUBLICATION millstream_shop ADD TABLE notes",
            "INSERT INTO notes SELECT 'n' || n % 3 FROM generate_series(1, 9) n",
            "INSERT INTO orders SELECT n, 'many' FROM generate_series(1000, 2000) n",
        )
        wait_for_replay(servers.primary, standby)
        servers.point_at(standby)
        stage.config = replace(stage.config, chunk_rows=50)
        # The transaction's commit comes after the first chunks are read: they mustn't have its rows,
        # and the stream must.
        with servers.primary.connect(autocommit=False) as open_one, telling(servers.primary):
            running = stage.start()
            wait_until(lambda: running.ended or stage.slot_confirmed(), "the slot is made")
            open_one.execute("UPDATE orders SET item = 'open' WHERE id % 10 = 0")
            wait_until(lambda: running.ended or stage.state("public.orders") is TableState.COPYING, "the copy begins")
            for n in range(40):
                on_primary(
                    servers,
                    f"UPDATE orders SET item = 'u{n}' WHERE id % 50 = 7",
                    f"DELETE FROM orders WHERE id = {1000 + 10 * n + 1}",
                    f"INSERT INTO orders VALUES ({3000 + n}, 'new')",
                    "INSERT INTO notes VALUES ('n1')",
                )
            open_one.commit()
            wait_until(
                lambda: running.ended or stage.state("public.orders") is TableState.STREAMING, "the copy is whole"
            )
            wait_until(lambda: running.ended or stage.state("public.notes") is TableState.STREAMING, "and the other")
            caught_up(servers, standby)
            notes = stage.log.replay()["public.notes"]
            with standby.connect() as connection:
                there = sorted(row[0] for row in connection.execute("SELECT t FROM notes").fetchall())
            assert sorted(row["t"] for row in notes[None]) == there
        running.stop()
        on_primary(servers, "INSERT INTO orders VALUES (9000, 'while it was stopped')")
        wait_for_replay(servers.primary, standby)
        stage.catch_up()
        assert servers.same()


def test_a_stream_from_a_standby_that_is_promoted_goes_on_under_the_new_timeline(tmp_path: Path) -> None:
    with make_servers(18, tmp_path) as servers:
        stage, standby = servers.stage, servers.standby()
        on_primary(servers, PUBLISH)
        wait_for_replay(servers.primary, standby)
        servers.point_at(standby)
        with telling(servers.primary):
            running = stage.start()
            wait_until(lambda: running.ended or stage.state("public.orders") is TableState.STREAMING, "it is copied")
        on_primary(servers, "INSERT INTO orders VALUES (1000, 'on the old primary')")
        caught_up(servers, standby)
        servers.primary.stop("immediate")
        promote(standby)
        stage.sql("INSERT INTO orders VALUES (1001, 'on the promoted one')")
        wait_until(lambda: running.ended or servers.same(), "the log has the new row")
        assert servers.timelines() == [1, 2]
        found = [(op["source"], row["id"]) for _, op, row in stage.log.records() if int(row["id"]) >= 1000]
        assert found == [(1, "1000"), (2, "1001")], "what came after the promotion isn't taken for the old timeline's"
        running.stop()


def is_paused(connection: psycopg.Connection[tuple[object, ...]]) -> bool:
    row = connection.execute("SELECT pg_get_wal_replay_pause_state()").fetchone()
    return row == ("paused",)


def test_a_standby_that_lags_behind_the_log_is_waited_for(tmp_path: Path) -> None:
    with make_servers(18, tmp_path) as servers:
        stage, standby = servers.stage, servers.standby()
        on_primary(servers, PUBLISH)
        wait_for_replay(servers.primary, standby)
        servers.point_at(standby)
        with telling(servers.primary):
            stage.catch_up()
        with standby.connect() as connection:
            connection.execute("SELECT pg_wal_replay_pause()")
            wait_until(lambda: is_paused(connection), "the replay pauses")  # until then, arriving WAL is still replayed
            stream = stage.catalog.stream("shop").id
            current = stage.catalog.current_source(stream)
            assert current is not None
            on_primary(servers, "INSERT INTO orders VALUES (1000, 'x')")
            with servers.primary.connect() as old:
                row = old.execute("SELECT pg_current_wal_flush_lsn() - '0/0'").fetchone()
            assert row is not None
            stage.catalog.move_reached(current.id, int(row[0]) - 64)  # type: ignore[arg-type]
            with capture_logs() as said:
                running = stage.start()
                wait_until(
                    lambda: running.ended or any(line.get("code") == "source_behind" for line in said),
                    "it waits for the standby",
                )
            assert not running.ended
            assert not stage.slot_active()
            connection.execute("SELECT pg_wal_replay_resume()")
        wait_until(stage.slot_active, "it streams")
        running.stop()


def test_a_standby_that_cannot_decode_is_refused(tmp_path: Path) -> None:
    with make_servers(15, tmp_path) as servers:
        servers.point_at(servers.standby())
        error = servers.refused()
        assert isinstance(error, SourceError)
        assert error.code == "source_on_standby"
        assert "primary" in error.hint


def test_a_standbys_copy_of_the_slot_is_not_read_there(tmp_path: Path) -> None:
    with make_servers(18, tmp_path) as servers:
        standby = servers.standby()
        servers.stage.catch_up()
        copy_slot(servers, standby)
        wait_for_replay(servers.primary, standby)
        servers.point_at(standby)
        error = servers.refused()
        assert isinstance(error, SourceError)
        assert error.code == "source_on_standby"
        assert "slot" in error.hint


def test_publications_are_made_at_the_primary(tmp_path: Path) -> None:
    with make_servers(18, tmp_path) as servers:
        stage, standby = servers.stage, servers.standby()
        wait_for_replay(servers.primary, standby)
        servers.point_at(standby)
        error = servers.refused()
        assert error.code == "publication_missing"
        assert "at the primary" in error.hint
        on_primary(servers, error.details["sql"])
        wait_for_replay(servers.primary, standby)
        with telling(servers.primary):
            stage.catch_up()
            on_primary(servers, "CREATE TABLE late (id int PRIMARY KEY)")
            wait_for_replay(servers.primary, standby)
            outcome = stage.catch_up()
        assert "at the primary" in outcome.quarantined["public.late"]
        assert servers.same()


def test_a_slot_that_waits_on_an_idle_primary_ends_when_it_is_stopped(tmp_path: Path) -> None:
    with make_servers(18, tmp_path) as servers:
        stage = servers.stage
        with servers.primary.connect(autocommit=False) as open_one:
            open_one.execute("INSERT INTO orders VALUES (1000, 'open')")
            running = stage.start()
            wait_until(lambda: making(servers.primary), "the slot is being made")
            outcome = running.stop()
            assert not outcome.caught_up
        wait_until(lambda: not making(servers.primary), "no slot is left behind")


def making(server: EmbeddedPostgres) -> bool:
    with server.connect() as connection:
        row = connection.execute("SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'shop'").fetchone()
    return row == (1,)


def test_a_copy_asked_for_right_behind_another_sees_what_came_between(tmp_path: Path) -> None:
    """A snapshot serves many chunks, but none of a copy that began after it.

    Changes logged before the copy aren't remembered.
    """
    with make_servers(18, tmp_path) as servers:
        stage, standby = servers.stage, servers.standby()
        on_primary(servers, PUBLISH, "INSERT INTO orders SELECT n, 'many' FROM generate_series(1000, 1100) n")
        wait_for_replay(servers.primary, standby)
        servers.point_at(standby)
        with telling(servers.primary):
            running = stage.start()
            wait_until(lambda: running.ended or stage.state("public.orders") is TableState.STREAMING, "it is copied")
            on_primary(servers, "UPDATE orders SET item = 'newer'", "DELETE FROM orders WHERE id % 2 = 0")
            caught_up(servers, standby)
            copy_table(stage.catalog, stage.table("public.orders").stream, "public.orders")
            wait_until(
                lambda: running.ended or stage.state("public.orders") is TableState.STREAMING, "it is copied again"
            )
            caught_up(servers, standby)
        running.stop()


def test_a_partition_that_the_primary_attaches_is_copied_from_the_standby(tmp_path: Path) -> None:
    with make_servers(18, tmp_path) as servers:
        stage, standby = servers.stage, servers.standby()
        on_primary(
            servers,
            f"{PUBLISH} WITH (publish_via_partition_root = true)",
            "CREATE TABLE parts (id int PRIMARY KEY, item text) PARTITION BY RANGE (id)",
            "CREATE TABLE low PARTITION OF parts FOR VALUES FROM (0) TO (100)",
            "INSERT INTO parts SELECT n, 'x' FROM generate_series(1, 50) n",
            "ALTER PUBLICATION millstream_shop ADD TABLE parts",
            "CREATE TABLE more (LIKE parts INCLUDING ALL)",
            "INSERT INTO more SELECT n, 'm' FROM generate_series(100, 300) n",
        )
        wait_for_replay(servers.primary, standby)
        servers.point_at(standby)
        stage.config = replace(stage.config, chunk_rows=50, tables=("public.orders", "public.parts"))

        def parts() -> list[str]:
            found = [row for rows, _, row in stage.log.records() if rows.schema.name == "parts"]
            return [row["id"] or "" for row in found if chr(row["__op"]) in "rt"]

        with telling(servers.primary):
            running = stage.start()
            wait_until(lambda: running.ended or stage.state("public.parts") is TableState.STREAMING, "it is copied")
            on_primary(
                servers,
                "ALTER TABLE parts ATTACH PARTITION more FOR VALUES FROM (100) TO (1000)",
                "UPDATE parts SET item = 'later' WHERE id % 10 = 0",
                "DELETE FROM parts WHERE id = 100",
            )
            wait_until(lambda: running.ended or "300" in parts(), "the partition is copied")
            wait_until(lambda: running.ended or stage.state("public.parts") is TableState.STREAMING, "whole")
            caught_up(servers, standby)
        running.stop()
        assert stage.log.replay()["public.parts"] == stage.source_rows("parts", ["id"])
        assert "" not in parts(), "nothing was voided"
        assert max(map(parts().count, parts())) == 1
