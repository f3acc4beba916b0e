"""Looking at the source's tables: a table dropped during a look is no error, and a look that fails is reported."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from tests.capture.beside import wait_until
from tests.capture.capture_stage import Stage

from millstream.capture.connection import connect
from millstream.capture.source_tables import list_tables, read_table
from millstream.capture.watcher import Watcher
from millstream.catalog import Catalog, TableRow, TableState
from millstream.model.ids import StreamId
from millstream.model.names import TablePatterns
from millstream.model.positions import Lsn


def test_a_table_that_is_dropped_while_it_is_looked_at_is_none(stage: Stage) -> None:
    """The look's snapshot still shows it, but it no longer has a size."""
    stage.sql("CREATE TABLE stays (id int PRIMARY KEY)", "CREATE TABLE goes (id int PRIMARY KEY)")
    with connect(stage.dsn, purpose="test") as connection:
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        row = connection.execute("SELECT 'goes'::text, oid::bigint FROM pg_class WHERE relname = 'goes'").fetchone()
        assert row is not None
        stage.sql("DROP TABLE goes")
        assert [table.name for table in list_tables(connection, TablePatterns.parse(("public.*",)))] == ["stays"]
        assert read_table(connection, row[1]) is None


def test_a_look_that_fails_by_a_bug_ends_capture_with_it(stage: Stage) -> None:
    stage.sql("CREATE TABLE orders (id int PRIMARY KEY)")
    fails = threading.Event()

    def look(moment: str, _details: Mapping[str, Any]) -> None:
        if moment == "look" and fails.is_set():
            raise ZeroDivisionError

    stage.config = replace(stage.config, on_moment=look)
    running = stage.start()
    wait_until(lambda: stage.state("public.orders") is TableState.STREAMING, "it runs")

    fails.set()
    wait_until(lambda: running.ended, "capture ends")
    assert isinstance(running.error, ZeroDivisionError)


class Refusing:
    """A connection on which every heartbeat fails."""

    broken = False

    def __init__(self, connection: Any, error: psycopg.Error) -> None:
        self._connection = connection
        self._error = error
        self.beats = 0

    def execute(self, query: str, *arguments: Any) -> Any:
        if "pg_logical_emit_message" in query:
            self.beats += 1
            raise self._error
        return self._connection.execute(query, *arguments)


@pytest.mark.parametrize(
    ("error", "beats"),
    [
        (psycopg.errors.QueryCanceled(), 3),
        (psycopg.errors.InsufficientPrivilege(), 1),
        (psycopg.errors.ReadOnlySqlTransaction(), 1),
    ],
)
def test_heartbeats_go_on_after_one_that_fails_unless_the_source_refuses_them(
    stage: Stage, error: psycopg.Error, beats: int
) -> None:
    beside: Any = SimpleNamespace()
    watcher = Watcher(
        stage.config, beside, beside, beside, passed=lambda: Lsn(0), on_look=lambda _: None, broken=lambda: None
    )
    with connect(stage.dsn, purpose="test") as connection:
        refusing: Any = Refusing(connection, error)
        for _ in range(3):
            watcher._beat_where_idle(refusing, asked=True)
    assert refusing.beats == beats


class CountingCatalog(Catalog):
    """A catalog that counts the calls that find or create a table, each a write transaction."""

    calls = 0

    def table_for(self, *args: Any, **kwargs: Any) -> TableRow:
        self.calls += 1
        return super().table_for(*args, **kwargs)


def test_a_look_at_tables_that_are_as_before_writes_nothing(stage: Stage) -> None:
    """Each look had a write transaction a table: with 1,000 idle tables 15 % of a core."""
    catalog = CountingCatalog(stage.folder / "catalog.db")
    stage.catalog = catalog
    stage.sql(*(f"CREATE TABLE idle{number} (id int PRIMARY KEY)" for number in range(5)))
    looks: list[str] = []
    stage.config = replace(stage.config, on_moment=lambda moment, _details: looks.append(moment))
    running = stage.start()
    wait_until(lambda: stage.state("public.idle4") is TableState.STREAMING, "it runs")
    before, begun = catalog.calls, looks.count("look")
    wait_until(lambda: looks.count("look") > begun + 3, "it looks")
    assert catalog.calls == before
    stage.sql("ALTER TABLE idle0 RENAME TO other")
    wait_until(lambda: stage.state("public.other") is TableState.STREAMING, "the table has its new name")
    running.stop()


def test_a_dropped_table_leaves_no_layout_and_no_chunks_in_the_catalog(stage: Stage) -> None:
    """The facts of tables that come and go, such as temporary copies, stayed for ever."""
    stage.sql("CREATE TABLE stays (id int PRIMARY KEY)", "CREATE TABLE goes (id int PRIMARY KEY)")
    stage.sql("INSERT INTO goes VALUES (1)")
    running = stage.start()
    wait_until(lambda: stage.state("public.goes") is TableState.STREAMING, "it runs")
    scope = f"capture/{stage.catalog.stream(stage.config.stream).id}/layout"
    wait_until(lambda: len(stage.catalog.facts(scope)) == 2, "both are known")
    goes = stage.table("public.goes")
    assert stage.catalog.chunks(goes.id, goes.copy_id)
    stage.sql("DROP TABLE goes")
    wait_until(lambda: stage.catalog.table(goes.id).state is TableState.GONE, "the dropped one is forgotten")
    assert stage.catalog.chunks(goes.id, goes.copy_id) == []
    running.stop()
    assert list(stage.catalog.facts(scope)) == [str(stage.table("public.stays").id)]


class LateCatalog(Catalog):
    """A catalog whose captured tables have an older state, while `late` is set."""

    late = False
    looks = 0

    def tables(self, stream: StreamId, *, gone: bool = False) -> list[TableRow]:
        rows = super().tables(stream, gone=gone)
        if not self.late:
            return rows
        self.looks += 1
        return [replace(row, state=TableState.COPY_REQUESTED) if row.is_captured else row for row in rows]


def test_a_copy_that_ended_since_the_states_were_read_is_not_begun_again(stage: Stage) -> None:
    catalog = LateCatalog(stage.folder / "catalog.db")
    stage.catalog = catalog
    stage.sql("CREATE TABLE orders (id int PRIMARY KEY)", "INSERT INTO orders VALUES (1), (2)")
    running = stage.start()
    wait_until(lambda: stage.state("public.orders") is TableState.STREAMING, "it is copied")
    catalog.late = True
    wait_until(lambda: catalog.looks > 4, "such states are looked at")
    catalog.late = False
    running.stop()
    stage.catch_up()
    assert [row["id"] for _, _, row in stage.log.records()] == ["1", "2"]


def test_limits_of_a_database_end_no_session_of_captures(stage: Stage) -> None:
    """The limit of idle sessions ended the watcher's before each look: a new table wasn't captured."""
    limits = ["idle_session_timeout"]
    with stage.connect() as connection:
        if connection.info.server_version >= 170000:
            limits.append("transaction_timeout")
        for limit in limits:
            connection.execute(
                f"DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET {limit} = 500', current_database()); END $$"
            )
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    with connect(stage.dsn, purpose="test") as pinned:
        for limit in limits:
            assert pinned.execute(f"SHOW {limit}").fetchone() == ("0",)
    stage.config = replace(stage.config, look_s=1.5)
    running = stage.start()
    wait_until(lambda: stage.state("public.orders") is TableState.STREAMING, "it runs")
    with stage.connect() as connection:
        connection.execute("CREATE TABLE later (id int PRIMARY KEY)")
    wait_until(lambda: stage.state("public.later") is TableState.STREAMING, "a look finds the new table", 60)
    running.stop()


def test_looks_go_on_over_connections_that_live_shorter_than_the_time_between_two(stage: Stage) -> None:
    """The time to the next look began again with each connection, so that none came."""
    stage.sql("CREATE TABLE orders (id int PRIMARY KEY)")
    stage.config = replace(stage.config, look_s=2.0)
    running = stage.start()
    wait_until(lambda: stage.state("public.orders") is TableState.STREAMING, "it runs")
    stage.sql("CREATE TABLE later (id int PRIMARY KEY)")

    def is_found() -> bool:
        stage.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name = 'millstream watch' AND backend_start < clock_timestamp() - interval '1.5 s'"
        )
        return stage.state("public.later") is TableState.STREAMING

    wait_until(is_found, "a look finds the new table", 60)
    running.stop()
