"""A capture that catches up ends only once no copy is asked for, in whatever order its threads come to that."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from tests.capture.beside import until_done
from tests.capture.capture_stage import Stage
from tests.capture.test_definitions import MAKE

from millstream.capture.column_rules.binding import ColumnRules
from millstream.capture.table_directory import TableDirectory
from millstream.catalog import Catalog, TableRow, TableState
from millstream.model.ids import StreamId, TableId


def test_columns_shown_during_a_copy_are_explained_before_the_end(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that ended between the two questions at the end hid from the first that a look was wanted."""
    stage.sql(*MAKE)
    stage.catch_up()
    stage.sql(
        "ALTER TABLE t RENAME b TO e",
        "INSERT INTO t (id, e) VALUES (21, 'x')",
        "ALTER TABLE t RENAME e TO b",
    )
    table = stage.table("public.t")
    stage.catalog.set_state(table.id, TableState.COPY_REQUESTED, "asked for")
    ask = Catalog.paused_copies

    def ask_slowly(catalog: Catalog, stream: StreamId) -> frozenset[TableId]:
        until = time.monotonic() + 0.5
        if not threading.current_thread().name.startswith("millstream-"):
            while catalog.table(table.id).state is TableState.COPYING and time.monotonic() < until:
                time.sleep(0.005)
        return ask(catalog, stream)

    monkeypatch.setattr(Catalog, "paused_copies", ask_slowly)
    stage.catch_up()
    assert stage.catalog.facts(f"capture/{stage.catalog.stream('shop').id}/shown") == {}
    assert stage.state("public.t") is TableState.STREAMING


def test_an_older_state_of_the_tables_never_replaces_a_newer_one(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads refresh: the end of a copy, and a look that asks for the next."""
    stage.sql(*MAKE)
    stage.catch_up()
    stream = stage.catalog.stream("shop").id
    source = stage.catalog.current_source(stream)
    assert source is not None
    rules = ColumnRules(stage.catalog, stream, stage.config.rules)
    directory = TableDirectory(stage.catalog, stream, source.id, stage.config, rules)
    read = Catalog.tables
    has_read, goes_on = threading.Event(), threading.Event()

    def read_slowly(catalog: Catalog, *args: Any, **more: Any) -> list[TableRow]:
        rows = read(catalog, *args, **more)
        if threading.current_thread() is slow:
            has_read.set()
            goes_on.wait(10)
        return rows

    monkeypatch.setattr(Catalog, "tables", read_slowly)
    slow, fast = threading.Thread(target=directory.refresh), threading.Thread(target=directory.refresh)
    slow.start()
    assert has_read.wait(10)
    stage.catalog.set_state(directory.rows()[0].id, TableState.COPY_REQUESTED, "asked for")
    fast.start()
    fast.join(1)
    goes_on.set()
    for thread in (slow, fast):
        thread.join(10)
    assert [row.state for row in directory.rows()] == [TableState.COPY_REQUESTED]


def test_a_job_ends_though_its_source_writes_on(stage: Stage) -> None:
    """It waited for a moment in which nothing was on its way into the log, and on a busy source there is none."""
    stage.sql(*MAKE)
    stage.catch_up()
    stage.log.delay_s = 0.05

    def write(stop: threading.Event) -> None:
        with stage.connect() as connection:
            for number in itertools.count(1000):
                if stop.wait(0.01):
                    return
                connection.execute("INSERT INTO t (id, b) VALUES (%s, 'x')", [number])

    with until_done(write):
        running = stage.start(until_caught_up=True)
        running.wait(20)
        assert running.ended
    assert running.stop().caught_up


@pytest.mark.parametrize("how", ["dropped", "left out"])
def test_a_job_gives_up_a_table_that_has_left(stage: Stage, how: str) -> None:
    """Each job ended before its second look, so the table stayed captured for as long as only jobs ran."""
    stage.sql(*MAKE, "CREATE TABLE other (id int PRIMARY KEY)")
    stage.catch_up()
    stage.config = replace(stage.config, look_s=3600.0)
    if how == "dropped":
        stage.sql("DROP TABLE other")
    else:
        stage.config = replace(stage.config, tables=("public.t",))
    stage.catch_up()
    assert stage.state("public.other") is None
    assert stage.state("public.t") is TableState.STREAMING
