"""Tables without a key are copied whole and exactly, of any size, however they are written to."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.capture.bag_history import BAG, TABLE, BagHistory, bag_at_source, bag_in_log, settle
from tests.capture.capture_stage import Stage, wait_until
from tests.capture.test_copying import copied_rows

from millstream.app.tables import copy_table, pause_table, resume_table
from millstream.capture import copy_whole
from millstream.capture.config import CaptureProgress
from millstream.catalog import TableState
from millstream.errors import SourceUnreachable

SLOWLY = 256 << 10
"""Bytes a second; pieces have an eighth of it."""


def streams(stage: Stage) -> bool:
    return stage.state(TABLE) is TableState.STREAMING


@pytest.mark.parametrize(("plain_turns", "seed"), [(2, 1), (0, 2), (0, 3)])
def test_every_prefix_shows_a_table_without_a_key_as_it_was(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, plain_turns: int, seed: int
) -> None:
    monkeypatch.setattr(copy_whole, "PLAIN_TURNS", plain_turns)
    history = BagHistory(random.Random(seed), rows=600, truncates=True)
    with stage.connect() as connection:
        history.begin(connection)
    stage.config = replace(stage.config, copy_workers=4, copy_rate=lambda: SLOWLY)
    with history.going_on(stage):
        running = stage.start()
        wait_until(lambda: streams(stage), "the copy is whole")
        for _ in range(2):
            copied = copied_rows(stage, "bag")
            copy_table(stage.catalog, stage.table(TABLE).stream, TABLE)
            wait_until(
                lambda copied=copied: copied_rows(stage, "bag") > copied and streams(stage), "it is copied again"
            )
    running.stop()
    assert settle(stage, history) >= 3
    assert len(history.states) > 100


def test_every_prefix_does_so_while_columns_come_and_go(stage: Stage) -> None:
    """Some of the definitions have the table copied anew."""
    history = BagHistory(random.Random(4), rows=400, definitions=True, truncates=True, pause_s=0.002)
    with stage.connect() as connection:
        history.begin(connection)
    stage.config = replace(stage.config, copy_workers=2, look_s=0.05)
    with history.going_on(stage):
        running = stage.start()
        wait_until(lambda: copied_rows(stage, "bag") > 2500, "it is copied again and again")
    running.stop()
    assert settle(stage, history) > 3


@pytest.mark.parametrize("seed", [5, 6])
def test_every_prefix_does_so_where_capture_breaks_down_at_any_moment(stage: Stage, seed: int) -> None:
    """Whatever was read is gone each time, and what waited comes again; what was in flight may or may not be in the log."""
    chance = random.Random(seed)
    history = BagHistory(chance, rows=400, truncates=True)
    with stage.connect() as connection:
        history.begin(connection)
    stage.config = replace(stage.config, copy_rate=lambda: SLOWLY)
    stage.log.fails_once = True
    with history.going_on(stage):
        running = stage.start()
        for _ in range(12):
            entries = len(stage.log.entries)
            least = entries + chance.randrange(1, 150)
            wait_until(lambda least=least: len(stage.log.entries) >= least or holds(stage), "changes enter")
            failures = stage.log.failures
            stage.log.fail_with = SourceUnreachable("cut")
            wait_until(lambda failures=failures: stage.log.failures > failures, "an append fails")
        wait_until(lambda: streams(stage), "the copy is whole")
    running.stop()
    settle(stage, history)


def holds(stage: Stage) -> bool:
    """Whether a table is read that nothing may touch: its file is there, and the log doesn't grow."""
    entries = len(stage.log.entries)
    if not files(stage):
        return False
    time.sleep(0.05)
    return len(stage.log.entries) == entries and bool(files(stage))


def files(stage: Stage) -> list[Path]:
    """Of rows that are being read, or were."""
    return list(Path(stage.config.spill_dir).glob("table-*"))


@contextmanager
def written_without_a_pause(stage: Stage, table: str, writers: int = 3) -> Iterator[None]:
    """Insert into a table, and delete from it, on some connections, until the block ends."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def write(own: int) -> None:
        try:
            with stage.connect() as connection:
                while not stop.is_set():
                    connection.execute(f"INSERT INTO {table} (a, version) VALUES ({own}, 1), ({own}, 1)")
                    some = f"SELECT ctid FROM {table} WHERE a = {own} AND version = 1 LIMIT 1"
                    connection.execute(f"DELETE FROM {table} WHERE ctid IN ({some})")
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            failures.append(error)

    threads = [threading.Thread(target=write, args=(-1 - own,)) for own in range(writers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures, failures


def filled(stage: Stage, rows: int, wide: int = 1000) -> None:
    stage.sql(
        BAG,
        f"INSERT INTO bag SELECT i % 1000, 0, repeat('x', {wide}) FROM generate_series(1, {rows}) i",
        "CREATE INDEX ON bag (a) WHERE a < 0",
        "ANALYZE bag",
        "CREATE TABLE others (id int PRIMARY KEY)",
    )


def test_a_table_that_is_written_without_a_pause_is_finished_and_the_stream_waits_for_it(stage: Stage) -> None:
    filled(stage, 2000)
    told: list[CaptureProgress] = []
    stage.config = replace(stage.config, copy_rate=lambda: 1 << 19)
    with written_without_a_pause(stage, "bag"):
        running = stage.start(on_progress=told.append)
        wait_until(lambda: any(p.copies.get(TABLE, {}).get("holds_stream") for p in told), "the stream is held")
        stage.sql("INSERT INTO others VALUES (1)")
        wait_until(lambda: streams(stage), "the copy is whole")
        wait_until(lambda: stage.log.replay().get("public.others"), "what waited has come")
    running.stop()
    stage.catch_up()
    assert bag_in_log(stage) == bag_at_source(stage)
    rows = [copy["rows"] for p in told for name, copy in p.copies.items() if name == TABLE and copy["holds_stream"]]
    assert any(0 < count < 2000 for count in rows), f"how far it is is told: {rows}"
    assert not files(stage)
    order = [table.schema.name for table, _, row in stage.log.records() if chr(row["__op"]) == "r" or "id" in row]
    assert order.index("others") > order.index("bag"), "nothing was reordered"


def test_a_pause_ends_the_reading_and_lets_the_stream_go_on(stage: Stage) -> None:
    filled(stage, 2000)
    stream = stage.catalog.resolve_stream("shop")
    stage.config = replace(stage.config, copy_rate=lambda: 1 << 17, look_s=0.02)
    with written_without_a_pause(stage, "bag"):
        running = stage.start()
        wait_until(lambda: holds(stage), "the stream is held")
        pause_table(stage.catalog, stream, TABLE)
        entries = len(stage.log.entries)
        wait_until(lambda: len(stage.log.entries) > entries + 50, "changes go on")
        wait_until(lambda: not files(stage), "what was read is gone")
        assert copied_rows(stage, "bag") == 0
        stage.config = replace(stage.config, copy_rate=lambda: None)
        running.stop()
        running = stage.start()
        entries = len(stage.log.entries)
        wait_until(lambda: len(stage.log.entries) > entries + 50, "changes go on in another session")
        assert copied_rows(stage, "bag") == 0
        resume_table(stage.catalog, stream, TABLE)
        wait_until(lambda: streams(stage), "the copy is whole")
    running.stop()
    assert stage.catch_up().paused == ()
    assert bag_in_log(stage) == bag_at_source(stage)


def test_stops_in_the_midst_cost_nothing_and_are_quick(stage: Stage) -> None:
    filled(stage, 2000)
    stage.config = replace(stage.config, copy_rate=lambda: 1 << 17)
    with written_without_a_pause(stage, "bag"):
        for _ in range(3):
            running = stage.start()
            wait_until(lambda: holds(stage), "the stream is held")
            began = time.monotonic()
            running.stop()
            assert time.monotonic() - began < 5
            assert not files(stage)
    stage.config = replace(stage.config, copy_rate=lambda: None)
    stage.catch_up()
    assert bag_in_log(stage) == bag_at_source(stage)


def test_a_rate_is_kept(stage: Stage) -> None:
    filled(stage, 3000)
    stage.config = replace(stage.config, copy_rate=lambda: 1 << 20)
    began = time.monotonic()
    stage.catch_up()
    assert time.monotonic() - began > 2, "3 MB at 1 MiB/s"
    assert bag_in_log(stage) == bag_at_source(stage)


def test_two_tables_that_are_written_without_a_pause_take_turns(stage: Stage) -> None:
    filled(stage, 500)
    stage.sql("CREATE TABLE bog (LIKE bag)", "ALTER TABLE bog REPLICA IDENTITY FULL", "INSERT INTO bog TABLE bag")
    stage.config = replace(stage.config, copy_rate=lambda: 1 << 20)
    with written_without_a_pause(stage, "bag", 2), written_without_a_pause(stage, "bog", 2):
        running = stage.start()
        wait_until(lambda: streams(stage) and stage.state("public.bog") is TableState.STREAMING, "both are whole")
    running.stop()
    stage.catch_up()
    for name in ("bag", "bog"):
        assert bag_in_log(stage, name) == bag_at_source(stage, name)


def test_the_stream_is_not_held_for_as_long_as_a_transaction_lasts(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot waits for those that run. The stream goes on meanwhile, and the copy is whole once they have ended."""
    monkeypatch.setattr(copy_whole, "PLAIN_TURNS", 0)
    monkeypatch.setattr(copy_whole, "FREE_PATIENCE_S", 1.0)
    filled(stage, 100)
    with stage.connect() as opened, written_without_a_pause(stage, "bag"):
        running = stage.start()
        wait_until(lambda: stage.state(TABLE) is TableState.COPYING, "the copy begins")
        copy_table(stage.catalog, stage.table(TABLE).stream, TABLE)
        with opened.transaction():
            opened.execute("INSERT INTO others VALUES (1)")
            for _ in range(3):
                entries = len(stage.log.entries)
                wait_until(lambda entries=entries: len(stage.log.entries) > entries + 200, "changes go on")
        wait_until(lambda: streams(stage), "the copy is whole")
    running.stop()
    stage.catch_up()
    assert bag_in_log(stage) == bag_at_source(stage)
