"""A promoted standby is followed if it branched off above the whole log. Otherwise it is refused, with a hint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from tests.capture.beside import Beside, wait_until
from tests.capture.capture_stage import MemoryLog, Stage, make_config
from tests.servers.standby import archiving, back_up, make_standby, promote, recover_to, wait_for_replay

from millstream.capture.source_table_checks import drop_slot
from millstream.capture.timeline import parse_history, shared_upto
from millstream.catalog import Catalog, TableState
from millstream.codec.pgoutput import HEARTBEAT_PREFIX
from millstream.errors import MillstreamError, SourceError
from millstream.model.positions import Lsn
from millstream.testing.errors import code_of
from millstream.testing.postgres import EmbeddedPostgres

pytestmark = pytest.mark.siege

ORDERS = "CREATE TABLE orders (id int PRIMARY KEY, item text)"


class Servers:
    """A primary, servers made from it, and a stage that captures from the current one."""

    def __init__(self, primary: EmbeddedPostgres, stage: Stage) -> None:
        self.primary = primary
        self.stage = stage
        self.others: list[EmbeddedPostgres] = []

    def standby(self, **more: object) -> EmbeddedPostgres:
        made = make_standby(self.primary, **more)  # type: ignore[arg-type]
        self.others.append(made)
        return made

    def close(self) -> None:
        """Stop the servers that were made from the primary."""
        for server in self.others:
            server.close()

    def point_at(self, server: EmbeddedPostgres) -> None:
        self.stage.dsn = server.dsn()
        self.stage.config = replace(self.stage.config, dsn=server.dsn())

    def refused(self) -> MillstreamError:
        """Return the error that capture ends with."""
        stage = self.stage
        with pytest.raises(MillstreamError) as found:
            stage.catch_up()
        assert found.value.hint
        return found.value

    def timelines(self) -> list[int]:
        return [row.timeline for row in self.stage.catalog.sources(self.stage.catalog.stream("shop").id)]

    def same(self) -> bool:
        return self.stage.log.replay().get("public.orders", {}) == self.stage.source_rows("orders", ["id"])


@contextlib.contextmanager
def make_servers(version: int, folder: Path, **settings: str) -> Iterator[Servers]:
    folder.mkdir(exist_ok=True)
    catalog = Catalog(folder / "catalog.db")
    catalog.resolve_stream("shop")
    with EmbeddedPostgres(version, fsync=False, settings=settings) as primary:
        stage = Stage(primary.dsn(), folder, catalog, make_config(primary.dsn(), folder, "shop"), MemoryLog())
        made = Servers(primary, stage)
        stage.sql(ORDERS, "INSERT INTO orders SELECT n, 'before' FROM generate_series(1, 120) n")
        with contextlib.ExitStack() as stack:
            stack.callback(catalog.close)
            stack.callback(stage.log.close)
            stack.callback(made.close)
            stack.callback(stage.end)
            yield made


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with make_servers(18, tmp_path) as made:
        yield made


def copy_slot(servers: Servers, standby: EmbeddedPostgres) -> None:
    """Copy the slot to a standby.

    The copy lasts once the slot has moved beyond the position from which the standby keeps WAL.
    """
    stage = servers.stage
    running = None if any(not one.ended for one in stage.running) else stage.start()
    with servers.primary.connect() as old, standby.connect() as new:

        def copied() -> bool:
            # Not in a transaction: the copy needs rows of the catalogs as old as the slot does, and
            # no older.
            old.execute(f"SELECT pg_log_standby_snapshot(), pg_logical_emit_message(false, '{HEARTBEAT_PREFIX}', '')")
            try:
                new.execute("SELECT pg_sync_replication_slots()")
            except psycopg.errors.ObjectNotInPrerequisiteState:
                return False  # the standby hasn't replayed as far as the slot has moved
            found = new.execute(
                "SELECT count(*) FROM pg_replication_slots WHERE synced AND NOT temporary AND slot_name = 'shop'"
            ).fetchone()
            return found == (1,)

        wait_until(stage.slot_active, "capture reads the slot")
        wait_until(copied, "the standby has a copy of the slot that lasts", 30)
    if running is not None:
        running.stop()


@pytest.mark.parametrize("version", [17, 18])
def test_a_promoted_standby_with_the_synced_slot_is_followed_without_a_gap(version: int, tmp_path: Path) -> None:
    with make_servers(version, tmp_path) as servers:
        stage, standby = servers.stage, servers.standby()
        running = stage.start()
        wait_until(lambda: stage.state("public.orders") is TableState.STREAMING, "the table is copied")
        stage.sql("INSERT INTO orders VALUES (1000, 'on the old primary')")
        wait_until(servers.same, "the log has the row")
        copy_slot(servers, standby)
        running.stop()
        table = stage.table("public.orders").id
        stage.sql("INSERT INTO orders VALUES (1001, 'not yet in the log')", "DELETE FROM orders WHERE id = 1")
        wait_for_replay(servers.primary, standby)
        servers.primary.stop("immediate")
        promote(standby)
        servers.point_at(standby)
        stage.sql("INSERT INTO orders VALUES (1002, 'on the new one')")
        stage.catch_up()

        assert servers.same()
        assert servers.timelines() == [1, 2]
        assert stage.table("public.orders").id == table
        records = [(op["source"], row["id"]) for _, op, row in stage.log.records() if int(row.get("id", 0)) >= 1000]
        assert records == [(1, "1000"), (2, "1001"), (2, "1002")], "each once, under the branch that it came from"
        stage.sql("INSERT INTO orders VALUES (1003, 'after a restart')")
        stage.catch_up()
        assert servers.same()
        assert servers.timelines() == [1, 2]


def test_a_stream_that_runs_goes_over_to_the_promoted_standby_by_itself(servers: Servers) -> None:
    stage, standby = servers.stage, servers.standby()
    hosts = f"{servers.primary.socket_dir},{standby.socket_dir}"
    dsn = f"postgresql://postgres@/postgres?host={hosts}&port=5432,5432&target_session_attrs=read-write"
    stage.config = replace(stage.config, dsn=dsn)
    running = stage.start()
    wait_until(lambda: stage.state("public.orders") is TableState.STREAMING, "the table is copied")
    copy_slot(servers, standby)
    stage.sql("INSERT INTO orders VALUES (1000, 'x')")
    wait_for_replay(servers.primary, standby)
    servers.primary.stop("immediate")
    promote(standby)
    stage.dsn = standby.dsn()
    stage.sql("INSERT INTO orders VALUES (1001, 'y')")
    wait_until(servers.same, "the log follows the new primary")
    assert not running.ended
    assert servers.timelines() == [1, 2]


def test_a_standby_that_lacks_what_the_log_has_is_refused_and_can_be_begun_anew(servers: Servers) -> None:
    stage, standby = servers.stage, servers.standby()
    stage.catch_up()
    copy_slot(servers, standby)
    wait_for_replay(servers.primary, standby)
    standby.restart(settings={"primary_conninfo": ""})
    stage.sql("INSERT INTO orders VALUES (1000, 'in the log alone')")
    stage.catch_up()
    servers.primary.stop("immediate")
    promote(standby)
    servers.point_at(standby)
    stage.sql("INSERT INTO orders VALUES (1000, 'the other')", "INSERT INTO orders VALUES (1001, 'x')")
    error = servers.refused()
    assert isinstance(error, SourceError)
    assert error.code == "source_replaced"
    assert "branched off at" in error.message
    assert "slot drop" in error.hint
    assert servers.timelines() == [1], "nothing is noted down of what isn't followed"
    assert code_of(servers.refused()) == "source_replaced"

    assert drop_slot(stage.config, stage.catalog) is not None
    stage.catch_up()
    assert servers.same()
    assert servers.timelines() == [1, 2]
    stage.sql("UPDATE orders SET item = 'later'")
    stage.catch_up()
    assert servers.same()


def test_a_promoted_standby_without_the_slot_is_refused_and_the_old_primary_may_be_gone_back_to(
    servers: Servers,
) -> None:
    stage, standby = servers.stage, servers.standby()
    stage.catch_up()
    wait_for_replay(servers.primary, standby)
    promote(standby)
    servers.point_at(standby)
    error = servers.refused()
    assert isinstance(error, SourceError)
    assert error.code == "slot_lost"
    assert "slot drop" in error.hint
    servers.point_at(servers.primary)
    stage.sql("INSERT INTO orders VALUES (1000, 'x')")
    stage.catch_up()
    assert servers.same()
    assert servers.timelines() == [1]


def test_after_a_new_timeline_the_old_primary_is_no_source_any_more(servers: Servers) -> None:
    stage, standby = servers.stage, servers.standby()
    stage.catch_up()
    copy_slot(servers, standby)
    wait_for_replay(servers.primary, standby)
    promote(standby)
    servers.point_at(standby)
    stage.sql("INSERT INTO orders VALUES (1000, 'new')")
    stage.catch_up()
    servers.point_at(servers.primary)
    stage.sql("INSERT INTO orders VALUES (1000, 'split')")
    assert code_of(servers.refused()) == "source_replaced"
    servers.point_at(standby)
    stage.catch_up()
    assert servers.same()


def test_a_slot_made_by_hand_on_the_standby_counts_by_where_it_stands(servers: Servers) -> None:
    stage, standby = servers.stage, servers.standby()
    stage.catch_up()
    wait_for_replay(servers.primary, standby)
    with standby.connect() as connection, servers.primary.connect() as old:
        making = Beside(connection.execute, "SELECT pg_create_logical_replication_slot('shop', 'pgoutput')")
        wait_until(
            lambda: old.execute("SELECT pg_log_standby_snapshot()").rowcount and not making.is_alive(),
            "the slot is made",
        )
        making.ended()
    promote(standby)
    old_source = stage.dsn
    servers.point_at(standby)
    assert code_of(servers.refused()) == "slot_ahead", "it begins above what the log has"
    servers.point_at(servers.primary)
    assert stage.dsn == old_source
    with standby.connect() as connection:
        connection.execute("SELECT pg_drop_replication_slot('shop')")


def test_a_missing_history_file_is_a_stop_that_names_it(servers: Servers) -> None:
    stage, standby = servers.stage, servers.standby()
    stage.catch_up()
    copy_slot(servers, standby)
    wait_for_replay(servers.primary, standby)
    promote(standby)
    servers.point_at(standby)
    history = standby.data_dir / "pg_wal" / "00000002.history"
    kept = history.read_bytes()
    history.unlink()
    error = servers.refused()
    assert isinstance(error, SourceError)
    assert error.code == "source_replaced"
    assert "00000002.history" in error.message
    history.write_text("1\tnonsense\n")
    assert type(servers.refused()) is SourceError
    history.write_bytes(kept)
    stage.sql("INSERT INTO orders VALUES (1000, 'x')")
    stage.catch_up()
    assert servers.same()


def test_a_copy_that_was_open_goes_on_after_a_promotion(servers: Servers) -> None:
    stage, standby = servers.stage, servers.standby()
    stage.config = replace(stage.config, chunk_rows=10, copy_workers=1)
    running = stage.start()
    wait_until(lambda: len(stage.log.entries) >= 2, "some chunks are in the log")
    stage.log.gate.clear()
    running_slot = stage.slot_confirmed
    wait_until(lambda: running_slot() > 0, "the slot is there")
    stage.log.gate.set()
    running.stop()
    stage.catalog.set_state(stage.table("public.orders").id, TableState.COPY_REQUESTED, "again")
    stage.sql("UPDATE orders SET item = 'changed' WHERE id % 3 = 0", "DELETE FROM orders WHERE id % 7 = 0")
    copy_slot(servers, standby)
    wait_for_replay(servers.primary, standby)
    servers.primary.stop("immediate")
    promote(standby)
    servers.point_at(standby)
    stage.sql("INSERT INTO orders SELECT n, 'new' FROM generate_series(500, 600) n", "DELETE FROM orders WHERE id = 2")
    stage.catch_up()
    assert servers.same()


def test_what_a_chunk_sees_is_below_what_the_log_has_reached(servers: Servers) -> None:
    stage = servers.stage
    stage.catch_up()
    (source,) = stage.log.reached()
    chunks = [op["commit_lsn"] for _, op, _ in stage.log.records() if op["chunk_id"]]
    assert chunks
    assert max(chunks) <= stage.log.reached()[source]


def test_a_restored_backup_is_refused_and_can_be_begun_anew(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    archive.mkdir()
    archive.chmod(0o777)
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.stat().st_uid == tmp_path.stat().st_uid and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    with make_servers(18, tmp_path, **archiving(archive)) as servers:
        stage = servers.stage
        stage.catch_up()
        backup = back_up(servers.primary)
        servers.others.append(backup)
        stage.sql("INSERT INTO orders VALUES (1000, 'kept')", "SELECT pg_create_restore_point('here')")
        stage.sql("DELETE FROM orders WHERE id < 100", "INSERT INTO orders VALUES (1001, 'undone')")
        stage.sql("SELECT pg_switch_wal()")
        stage.catch_up()
        servers.primary.stop()
        recover_to(backup, archive, recovery_target_name="here")
        servers.point_at(backup)
        error = servers.refused()
        assert isinstance(error, SourceError)
        assert error.code == "source_replaced"
        assert "slot drop" in error.hint
        assert drop_slot(stage.config, stage.catalog) is None
        stage.catch_up()
        assert servers.same()
        assert len(stage.source_rows("orders", ["id"])) == 121
        stage.sql("DELETE FROM orders WHERE id = 1000")
        stage.catch_up()
        assert servers.same()


def test_a_disk_put_back_is_never_followed_in_silence_and_can_be_given_a_timeline(tmp_path: Path) -> None:
    with make_servers(18, tmp_path) as servers:
        stage = servers.stage
        stage.catch_up()
        backup = back_up(servers.primary, slots=True)
        servers.others.append(backup)
        stage.sql("INSERT INTO orders SELECT n, repeat('x', 999) FROM generate_series(1000, 3000) n")
        stage.catch_up()
        servers.primary.stop()
        backup.start()
        servers.point_at(backup)
        error = servers.refused()
        assert isinstance(error, SourceError)
        assert error.code == "source_replaced"
        assert "set back" in error.message
        stage.sql("INSERT INTO orders SELECT n, repeat('y', 999) FROM generate_series(5000, 8000) n")
        assert "set back" in servers.refused().message, "its WAL is longer than the log's now"
        backup.stop()
        (backup.data_dir / "recovery.signal").touch()
        backup.restart(settings={"restore_command": "false"})
        wait_until(lambda: not in_recovery(backup), "it is on a timeline of its own")
        assert code_of(servers.refused()) == "source_replaced"
        assert drop_slot(stage.config, stage.catalog) is not None
        stage.catch_up()
        assert servers.same()
        assert servers.timelines() == [1, 2]


def in_recovery(server: EmbeddedPostgres) -> bool:
    with server.connect() as connection:
        return connection.execute("SELECT pg_is_in_recovery()").fetchone() == (True,)


def test_histories_are_the_same_up_to_where_they_part() -> None:
    second, third = ((1, Lsn(100)),), ((1, Lsn(100)), (2, Lsn(200)))
    assert parse_history("1\t0/64\treason\n\n# a comment\n2\t0/C8\tno recovery target specified\n") == third
    assert shared_upto((1, ()), (2, second)) == 100
    assert shared_upto((1, ()), (3, third)) == 100
    assert shared_upto((2, second), (3, third)) == 200
    assert shared_upto((2, None), (3, third)) == 200
    assert shared_upto((2, None), (1, ())) == 0
    assert shared_upto((2, second), (2, second)) is None
    assert shared_upto((2, second), (2, ((1, Lsn(50)),))) == 50, "two that were promoted apart, under one number"
    assert shared_upto((2, second), (1, ())) == 100, "back to the old one"
    assert shared_upto((2, second), (3, ((1, Lsn(80)),))) == 80
    assert shared_upto((4, ()), (2, second)) == 0
    for text in ("1", "x\t0/1", "2\t0/5\n1\t0/6", "1\t0/9\n2\t0/5", "1 0/G"):
        with pytest.raises(SourceError):
            parse_history(text)
