"""At no prefix of the log does replay show a row older than its copy, twice or resurrected.

This holds whatever interrupts the copy.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.capture.beside import wait_until
from tests.capture.capture_stage import Stage
from tests.capture.serial_history import History
from tests.capture.test_copying import copied_rows

from millstream.app.table_requests import copy_table
from millstream.catalog import TableState
from millstream.errors import SourceError

TABLE = "public.rows_"


def streams(stage: Stage) -> bool:
    return stage.state(TABLE) is TableState.STREAMING


def settle(stage: Stage, history: History) -> dict[str, int]:
    """Catch up, and check every prefix against the history."""
    stage.catch_up()
    looked = history.check(stage.log)
    assert stage.log.replay()[TABLE] == stage.source_rows("rows_", ["a", "b"])
    return looked


@pytest.mark.sampled
@pytest.mark.parametrize(("workers", "seed"), [(1, 1), (3, 2), (4, 3)])
def test_every_prefix_shows_rows_as_the_source_had_them(stage: Stage, workers: int, seed: int) -> None:
    history = History(random.Random(seed), keys=700)
    with stage.connect() as connection:
        history.begin(connection, 600)
    stage.config = replace(stage.config, copy_workers=workers, chunk_rows=15)
    with history.going_on(stage):
        running = stage.start()
        wait_until(lambda: streams(stage), "the copy is whole")
    running.stop()
    looked = settle(stage, history)
    assert looked["COPY_CHUNK"] > 30
    assert looked["TRANSACTION"] > 50


@pytest.mark.parametrize("seed", [4, 5])
@pytest.mark.siege
def test_every_prefix_does_so_where_capture_breaks_down_at_any_chunk(stage: Stage, seed: int) -> None:
    """Each time, everything in memory is lost; what was in flight may or may not be in the log."""
    chance = random.Random(seed)
    history = History(chance, keys=700)
    with stage.connect() as connection:
        history.begin(connection, 600)
    stage.config = replace(stage.config, copy_workers=2, chunk_rows=15)
    stage.log.fails_once = True
    breaks = 0
    with history.going_on(stage):
        running = stage.start()
        while not streams(stage):
            assert not running.ended
            chunks = copied_rows(stage, "rows_")
            wait_until(lambda chunks=chunks: copied_rows(stage, "rows_") > chunks or streams(stage), "a chunk enters")
            failures = stage.log.failures
            stage.log.fail_with = SourceError("cut", code="source_unreachable")
            wait_until(lambda failures=failures: stage.log.failures > failures, "an append fails")
            breaks += 1
    running.end()
    assert breaks > 5
    settle(stage, history)


@pytest.mark.siege
def test_every_prefix_does_so_where_transactions_are_too_large_to_remember_their_keys(stage: Stage) -> None:
    history = History(random.Random(6), keys=700, wide=3000, many=200)
    with stage.connect() as connection:
        history.begin(connection, 600)
    stage.config = replace(stage.config, copy_workers=2, chunk_rows=15, buffer_bytes_max=20_000)
    with history.going_on(stage):
        running = stage.start()
        wait_until(lambda: streams(stage), "the copy is whole")
    running.stop()
    settle(stage, history)


@pytest.mark.long
def test_every_prefix_does_so_where_a_copy_is_asked_for_again_and_again_and_paused(stage: Stage) -> None:
    history = History(random.Random(7), keys=500, truncates=True)
    with stage.connect() as connection:
        history.begin(connection, 400)
    stage.config = replace(stage.config, copy_workers=2, chunk_rows=15, look_s=0.02)
    with history.going_on(stage):
        running = stage.start()
        wait_until(lambda: streams(stage), "the copy is whole")
        for again in range(6):
            copied = copied_rows(stage, "rows_")
            copy_table(stage.catalog, stage.table(TABLE).stream, TABLE)
            # … or all rows of the table, which may just have been emptied.
            wait_until(
                lambda copied=copied: copied_rows(stage, "rows_") > copied + 20 or streams(stage),
                "some rows are copied again",
            )
            if again % 2 and stage.catalog.pause_copy(stage.table(TABLE).stream, stage.table(TABLE).id):
                entries = len(stage.log.entries)
                wait_until(lambda entries=entries: len(stage.log.entries) > entries + 20, "changes go on")
                stage.catalog.resume_copy(stage.table(TABLE).stream, stage.table(TABLE).id)
        wait_until(lambda: streams(stage), "the last copy is whole")
    running.stop()
    settle(stage, history)


@pytest.mark.long
def test_every_prefix_does_so_where_the_table_is_truncated_now_and_then(stage: Stage) -> None:
    history = History(random.Random(8), keys=700, truncates=True)
    with stage.connect() as connection:
        history.begin(connection, 600)
    stage.config = replace(stage.config, copy_workers=2, chunk_rows=15)
    stage.log.delay_s = 0.005
    with history.going_on(stage):
        running = stage.start()
        # … or is whole: the table may have been emptied before it had copied as many.
        wait_until(lambda: copied_rows(stage, "rows_") > 60 or streams(stage), "the copy runs")
        stage.log.delay_s = 0.0
        wait_until(lambda: streams(stage), "the copy is whole")
    running.stop()
    settle(stage, history)
