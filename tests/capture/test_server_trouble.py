"""Trouble of a server under a capture: restarts, a slot that loses its WAL, a log that stalls.

Also the warnings that `doctor` gives ahead of time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.capture.beside import wait_until
from tests.capture.test_standby import on_primary, telling
from tests.capture.test_timelines import Servers, make_servers
from tests.servers.standby import wait_for_replay

from millstream.capture.connection import connect_replication
from millstream.capture.source_table_checks import check_source, doctor_sql, drop_slot
from millstream.catalog import TableState
from millstream.errors import SourceError
from millstream.testing.postgres import EmbeddedPostgres

pytestmark = pytest.mark.siege


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with make_servers(18, tmp_path, max_slot_wal_keep_size="16MB", max_wal_size="64MB", wal_keep_size="0") as made:
        yield made


def fill_wal(server: EmbeddedPostgres) -> None:
    """Write more WAL than the server keeps for a slot, and run a checkpoint, which drops it."""
    with server.connect() as connection:
        for _ in range(4):
            connection.execute("SELECT pg_logical_emit_message(false, 'filler', repeat('x', 1000000))")
            connection.execute("SELECT pg_switch_wal()")
        connection.execute("CHECKPOINT")


def is_lost(server: EmbeddedPostgres) -> bool:
    with server.connect() as connection:
        row = connection.execute("SELECT wal_status FROM pg_replication_slots WHERE slot_name = 'shop'").fetchone()
    return row == ("lost",)


def test_a_slot_that_lost_its_wal_is_a_stop_and_its_way_on_works(servers: Servers) -> None:
    stage = servers.stage
    stage.catch_up()
    stage.sql("DELETE FROM orders WHERE id < 50", "INSERT INTO orders VALUES (1000, 'never sent')")
    wait_until(lambda: fill_wal(servers.primary) or is_lost(servers.primary), "the slot is invalidated")
    error = servers.refused()
    assert isinstance(error, SourceError)
    assert error.code == "slot_lost"
    assert "millstream slot drop" in error.hint
    assert "slot_lost" in {finding.code for finding in check_source(stage.config) if finding.blocks == "source"}

    assert drop_slot(stage.config, stage.catalog) is not None
    stage.catch_up()
    assert servers.same()
    assert check_codes(servers).isdisjoint({"slot_lost"})


def test_a_slot_that_loses_its_wal_under_a_stalled_log_ends_capture_with_the_reason(servers: Servers) -> None:
    stage = servers.stage
    running = stage.start()
    wait_until(lambda: stage.state("public.orders") is TableState.STREAMING, "the table is copied")
    stage.log.gate.clear()
    stage.sql("INSERT INTO orders VALUES (1000, 'stalls')")
    wait_until(lambda: stage.log.held() or fill_wal(servers.primary) or is_lost(servers.primary), "it stalls")
    wait_until(lambda: fill_wal(servers.primary) or is_lost(servers.primary), "the slot is invalidated")
    stage.log.gate.set()
    wait_until(lambda: running.ended, "capture gives up")
    assert isinstance(running.error, SourceError)
    assert running.error.code == "slot_lost"


@pytest.mark.parametrize("mode", ["fast", "immediate", "kill"])
def test_a_server_that_restarts_in_the_midst_of_a_stream_costs_no_record_and_brings_none_twice(
    servers: Servers, mode: str
) -> None:
    stage = servers.stage
    running = stage.start()
    wait_until(lambda: stage.state("public.orders") is TableState.STREAMING, "the table is copied")
    for turn in range(2):
        stage.sql(
            f"INSERT INTO orders SELECT n, 'turn' FROM generate_series({1000 * (turn + 1)}, {1000 * (turn + 1) + 300}) n",
            f"INSERT INTO orders VALUES ({10_000 + turn}, 'alone')",
        )
        servers.primary.restart(mode)  # type: ignore[arg-type]
        stage.sql(f"INSERT INTO orders VALUES ({20_000 + turn}, 'after')")
    wait_until(lambda: running.ended or servers.same(), "the log has all of it")
    running.stop()
    inserted = [row["id"] for _, _, row in stage.log.records() if chr(row["__op"]) == "c"]
    assert len(inserted) == len(set(inserted)) == 2 * 303


def test_a_log_that_stalls_for_longer_than_the_senders_patience_keeps_its_connection(tmp_path: Path) -> None:
    with make_servers(18, tmp_path) as servers:
        stage = servers.stage
        on_primary(servers, "ALTER SYSTEM SET wal_sender_timeout = '2s'", "SELECT pg_reload_conf()")
        assert "wal_sender_timeout_short" in check_codes(servers)
        running = stage.start()
        wait_until(lambda: stage.state("public.orders") is TableState.STREAMING, "the table is copied")
        stage.log.gate.clear()
        with servers.primary.connect() as connection:
            query = "SELECT pid FROM pg_stat_replication WHERE application_name = 'millstream stream'"
            before = connection.execute(query).fetchone()
            stage.sql("INSERT INTO orders SELECT n, repeat('x', 1000) FROM generate_series(1000, 60000) n")
            began = connection.execute("SELECT clock_timestamp()").fetchone()
            assert began is not None
            later = "SELECT clock_timestamp() > %s + interval '6 s'"
            wait_until(
                lambda: connection.execute(later, [began[0]]).fetchone() == (True,), "three times as long passes"
            )
            assert connection.execute(query).fetchone() == before
        stage.log.gate.set()
        wait_until(lambda: running.ended or servers.same(), "the log has all of it")
        running.stop()


def check_codes(servers: Servers) -> set[str]:
    return {finding.code for finding in check_source(servers.stage.config)}


def test_a_doctor_says_ahead_of_time_what_a_failover_would_cost(servers: Servers) -> None:
    stage = servers.stage
    stage.config = replace(stage.config, failover=False)
    stage.catch_up()
    stage.config = replace(stage.config, failover=True)
    ahead = {"slot_without_failover", "log_ahead_of_standbys", "standby_without_feedback", "slot_times_out"}
    assert check_codes(servers).isdisjoint(ahead), "a server without standbys is asked for nothing"
    standby = servers.standby(settings={"hot_standby_feedback": "off"})
    (found,) = [finding for finding in check_source(stage.config) if finding.code == "slot_without_failover"]
    assert found.blocks == "nothing"
    command = found.fix[found.fix.index("ALTER_REPLICATION_SLOT") : found.fix.index(";")]
    with connect_replication(stage.dsn) as replication:
        replication.execute(command.encode())
    (found,) = [finding for finding in check_source(stage.config) if finding.code == "log_ahead_of_standbys"]
    assert "'standby'" in found.sql
    for statement in found.sql.split("; "):
        on_primary(servers, statement)
    wait_until(lambda: check_codes(servers).isdisjoint(ahead), "nothing is left to say")
    on_primary(servers, "ALTER SYSTEM SET idle_replication_slot_timeout = '60s'", "SELECT pg_reload_conf()")
    wait_until(lambda: "slot_times_out" in check_codes(servers), "the slot would time out")
    wait_for_replay(servers.primary, standby)
    servers.point_at(standby)
    assert "standby_without_feedback" in check_codes(servers)
    assert {f.code for f in check_source(stage.config) if f.blocks == "source"} == set()


def test_a_slot_waits_for_the_standbys_that_the_server_names(servers: Servers) -> None:
    """`synchronized_standby_slots`: the standby that may be promoted has everything in the log."""
    stage, standby = servers.stage, servers.standby()
    on_primary(servers, "ALTER SYSTEM SET synchronized_standby_slots = 'standby'", "SELECT pg_reload_conf()")
    running = stage.start()
    wait_until(lambda: stage.state("public.orders") is TableState.STREAMING, "the table is copied")
    standby.stop()
    stage.sql("INSERT INTO orders VALUES (1000, 'the standby lacks it')")
    with servers.primary.connect() as connection:
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'WaitForStandbyConfirmation'"
        wait_until(lambda: connection.execute(waits).fetchone() == (1,), "the stream waits for the standby")
    assert not servers.same()
    standby.start()
    wait_until(lambda: running.ended or servers.same(), "the log has it once the standby has")
    running.stop()


def test_a_doctor_on_a_standby_finds_what_stops_it_and_says_where_to_run_what(tmp_path: Path) -> None:
    with make_servers(15, tmp_path) as servers:
        assert "slot_not_on_standbys" not in check_codes(servers)
        standby = servers.standby()
        assert "slot_not_on_standbys" in check_codes(servers)
        servers.point_at(standby)
        blocking = {finding.code for finding in check_source(servers.stage.config) if finding.blocks == "source"}
        assert "source_on_standby" in blocking
    with make_servers(18, tmp_path / "later") as servers:
        standby = servers.standby()
        wait_for_replay(servers.primary, standby)
        servers.point_at(standby)
        (found,) = [f for f in check_source(servers.stage.config) if f.code == "publication_missing"]
        assert "at the primary" in found.fix
        on_primary(
            servers, *[line for line in doctor_sql(servers.stage.config).splitlines() if line.startswith("CREATE")]
        )
        wait_for_replay(servers.primary, standby)
        with telling(servers.primary):
            servers.stage.catch_up()
        assert servers.same()
