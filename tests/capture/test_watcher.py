"""Looking at the source's tables: a table dropped during a look is no error, and a look that fails is reported."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.capture.beside import wait_until
from tests.capture.capture_stage import Stage

from millstream.capture.connection import connect
from millstream.capture.schema_registry import SchemaRegistry
from millstream.capture.source import Connection, list_tables, read_table
from millstream.capture.watcher import WatchedTables
from millstream.catalog import TableRow, TableState
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


def test_a_look_that_fails_by_a_bug_ends_capture_with_it(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.sql("CREATE TABLE orders (id int PRIMARY KEY)")
    running = stage.start()
    wait_until(lambda: stage.state("public.orders") is TableState.STREAMING, "it runs")

    def look(_tables: WatchedTables, _connection: Connection, _passed: Lsn) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(WatchedTables, "look", look)
    wait_until(lambda: running.ended, "capture ends")
    assert isinstance(running.error, ZeroDivisionError)


def test_a_copy_that_ended_since_the_states_were_read_is_not_begun_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.sql("CREATE TABLE orders (id int PRIMARY KEY)", "INSERT INTO orders VALUES (1), (2)")
    running = stage.start()
    wait_until(lambda: stage.state("public.orders") is TableState.STREAMING, "it is copied")
    refresh, looks = SchemaRegistry.refresh, 0

    def late(directory: SchemaRegistry) -> list[TableRow]:
        nonlocal looks
        looks += 1
        return [replace(row, state=TableState.COPY_REQUESTED) for row in refresh(directory)]

    with monkeypatch.context() as patch:
        patch.setattr(SchemaRegistry, "refresh", late)
        wait_until(lambda: looks > 4, "such states are looked at")
    running.stop()
    stage.catch_up()
    assert [row["id"] for _, _, row in stage.log.records()] == ["1", "2"]
