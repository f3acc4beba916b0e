"""A copy that a person pauses: reading stops, changes go on, and the copy ends exact whenever it is resumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.capture.beside import wait_until
from tests.capture.capture_stage import Stage
from tests.capture.test_copying import DOCS, copied_rows, workload

from millstream.app.status import tables_of
from millstream.app.table_requests import copy_table, pause_table, resume_table
from millstream.catalog import TableState
from millstream.errors import UsageError
from millstream.model.ids import StreamId

pytestmark = pytest.mark.siege


def shop(stage: Stage) -> StreamId:
    return stage.catalog.stream("shop").id


def fill(stage: Stage, rows: int, body: str = "'x'") -> None:
    stage.sql(DOCS, f"INSERT INTO docs SELECT i, {body}, 0 FROM generate_series(1, {rows}) i", "ANALYZE docs")


def stands_still(stage: Stage, count: Callable[[], int]) -> None:
    """Return when nothing of the copy is in flight: two heartbeats went through without a row of it."""
    before = -1
    while before != count():
        before = count()
        for _ in range(2):
            entries = stage.slot_confirmed()
            stage.sql("SELECT pg_logical_emit_message(true, 'here', 'x')")
            wait_until(lambda entries=entries: stage.slot_confirmed() > entries, "a message goes through")


def test_a_paused_copy_reads_nothing_more_while_changes_go_on_and_survives_restarts(stage: Stage) -> None:
    fill(stage, 2000)
    stage.config = replace(stage.config, copy_workers=2, chunk_rows=20)
    stage.log.delay_s = 0.01
    running = stage.start()
    wait_until(lambda: copied_rows(stage, "docs") > 100, "the copy runs")
    pause_table(stage.catalog, shop(stage), "public.docs")
    stands_still(stage, lambda: copied_rows(stage, "docs"))
    first = copied_rows(stage, "docs")
    assert 100 < first < 1500
    assert [(t["name"], t["state"]) for t in tables_of(stage.catalog, shop(stage), {}, {})] == [
        ("public.docs", "paused")
    ]
    stage.log.delay_s = 0.0
    stage.sql("UPDATE docs SET n = 1 WHERE id % 3 = 0", "DELETE FROM docs WHERE id % 7 = 0")
    wait_until(lambda: any(chr(r["__op"]) == "d" for _, _, r in stage.log.records()), "changes enter the log")
    running.stop()
    outcome = stage.catch_up()
    assert (outcome.paused, outcome.caught_up) == (("public.docs",), True)
    assert copied_rows(stage, "docs") == first, "another session reads nothing either"

    running = stage.start()
    resume_table(stage.catalog, shop(stage), "public.docs")
    wait_until(lambda: stage.state("public.docs") is TableState.STREAMING, "the copy is whole")
    running.stop()
    assert stage.catch_up().paused == ()
    assert stage.log.replay()["public.docs"] == stage.source_rows("docs", ["id"])
    assert copied_rows(stage, "docs") < 2000 + first, "what was copied before the pause wasn't copied again"


def test_rows_that_move_incomplete_into_what_was_copied_before_a_pause_come_whole(stage: Stage) -> None:
    """The rows' unsent TOAST values were never in the log.

    If capture didn't remember such rows, the values would be missing for good.
    """
    fill(stage, 1000, "repeat(i::text || ' ', 700)")
    stage.config = replace(stage.config, copy_workers=1, chunk_rows=20)
    stage.log.delay_s = 0.01
    running = stage.start()
    wait_until(lambda: copied_rows(stage, "docs") > 60, "the copy runs")
    pause_table(stage.catalog, shop(stage), "public.docs")
    stands_still(stage, lambda: copied_rows(stage, "docs"))
    stage.log.delay_s = 0.0
    # While it waits in this session, while no session runs, and while it waits in another session.
    stage.sql("UPDATE docs SET id = -1 WHERE id = 998")
    wait_until(lambda: any(r.get("id") == "-1" for _, _, r in stage.log.records()), "the row moves")
    running.stop()
    stage.sql("UPDATE docs SET id = -2 WHERE id = 999")
    stage.catch_up()
    stage.sql("UPDATE docs SET id = -3 WHERE id = 1000")
    stage.catch_up()
    resume_table(stage.catalog, shop(stage), "public.docs")
    stage.catch_up()

    assert stage.log.replay()["public.docs"] == stage.source_rows("docs", ["id"])


def test_rows_that_move_incomplete_before_a_copy_is_taken_up_again_come_whole(stage: Stage) -> None:
    """After a restart, changes that the source sends at once are decoded before capture has read the tables' states."""
    fill(stage, 1000, "repeat(i::text || ' ', 700)")
    stage.config = replace(stage.config, copy_workers=1, chunk_rows=20)
    stage.log.delay_s = 0.01
    running = stage.start()
    wait_until(lambda: copied_rows(stage, "docs") > 60, "the copy runs")
    running.stop()
    assert stage.state("public.docs") is TableState.COPYING
    stage.log.delay_s = 0.0
    stage.sql(*(f"UPDATE docs SET id = -id WHERE id = {n}" for n in range(900, 1001)))
    stage.catch_up()

    assert stage.log.replay()["public.docs"] == stage.source_rows("docs", ["id"])


@pytest.mark.parametrize("workers", [1, 3])
def test_pauses_at_any_moment_beside_a_live_workload_cost_nothing(stage: Stage, workers: int) -> None:
    stage.sql(DOCS, "INSERT INTO docs SELECT i, repeat('old', 900), 0 FROM generate_series(0, 799) i", "ANALYZE docs")
    stage.config = replace(stage.config, copy_workers=workers, chunk_rows=20, look_s=0.02)
    with workload(stage, 1000):
        running = stage.start()
        wait_until(lambda: copied_rows(stage, "docs") > 20, "the copy runs")
        for _ in range(8):
            before = len(stage.log.entries)
            if not stage.catalog.pause_copy(shop(stage), stage.table("public.docs").id):
                break
            wait_until(lambda before=before: len(stage.log.entries) > before + 20, "changes go on")
            stage.catalog.resume_copy(shop(stage), stage.table("public.docs").id)
            before = copied_rows(stage, "docs")
            wait_until(
                lambda before=before: (
                    copied_rows(stage, "docs") > before or stage.state("public.docs") is TableState.STREAMING
                ),
                "the copy goes on",
            )
        wait_until(lambda: stage.state("public.docs") is TableState.STREAMING, "the copy is whole")
    running.stop()
    stage.catch_up()
    assert stage.log.replay()["public.docs"] == stage.source_rows("docs", ["id"])


def test_a_copy_can_be_paused_before_it_begins_and_only_where_there_is_one(stage: Stage) -> None:
    fill(stage, 50)
    stage.sql("CREATE TABLE bag (x text); ALTER TABLE bag REPLICA IDENTITY FULL", "INSERT INTO bag VALUES ('a'), ('a')")
    stage.catch_up()
    for table in ("public.docs", "public.bag"):
        with pytest.raises(UsageError, match="no copy to pause"):
            pause_table(stage.catalog, shop(stage), table)
        with pytest.raises(UsageError, match="not paused"):
            resume_table(stage.catalog, shop(stage), table)
        copy_table(stage.catalog, shop(stage), table)
        pause_table(stage.catalog, shop(stage), table)
    before = len(stage.log.entries)
    assert stage.catch_up().paused == ("public.bag", "public.docs")
    assert len(stage.log.entries) == before, "what the log had isn't void while nothing takes its place"
    stage.sql("INSERT INTO bag VALUES ('b')", "DELETE FROM docs WHERE id < 5")
    stage.catch_up()
    resume_table(stage.catalog, shop(stage), "public.bag")
    copy_table(stage.catalog, shop(stage), "public.docs")
    assert stage.catch_up().paused == (), "asked for anew, a copy isn't paused"
    assert stage.log.replay()["public.docs"] == stage.source_rows("docs", ["id"])
    assert sorted(r["x"] for r in stage.log.replay()["public.bag"][None]) == ["a", "a", "b"]
