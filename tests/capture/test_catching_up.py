"""A backlog that is read in chunks gives the same log as the stream, and the slot never moves beyond the log."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from structlog.testing import capture_logs
from tests.capture import catching_up_process
from tests.capture.beside import Beside, until_done, wait_until
from tests.capture.capture_stage import CATCH_UP_S, MemoryLog, Stage, make_config
from tests.capture.test_streaming import ORDERS, stream_positions

from millstream.capture.config import CaptureProgress
from millstream.catalog import Catalog, TableState
from millstream.errors import SourceError
from millstream.model.operations import OperationKind, SpilledOp
from millstream.model.positions import Seq
from millstream.protocol.catch_up_mode import CatchUpMode, Mode
from millstream.testing.workloads.workload import Workload
from millstream.wal.reader import StreamReader

pytestmark = pytest.mark.siege

SMALL_CHUNKS: dict[str, Any] = {"catch_up_changes": 300, "catch_up_chunk_bytes": 300_000}
Said = list[MutableMapping[str, Any]]


def in_chunks(stage: Stage, **more: Any) -> None:
    """Let the stage's captures read small chunks, whatever the backlog, up to the end."""
    facts: dict[str, Any] = {"catch_up": CatchUpMode.ALWAYS, "catch_up_bytes": 4096} | SMALL_CHUNKS
    stage.config = replace(stage.config, **facts | more)


def orders(first: int, last: int, text: str = "x") -> str:
    return f"INSERT INTO orders SELECT i, '{text}', 1, now() FROM generate_series({first}, {last}) i"


def modes(said: Said) -> list[str]:
    """Return how the source was read, session by session."""
    return [line["event"] for line in said if line["event"] in set(Mode)]


def chunks_read(said: Said) -> int:
    return sum(line["event"] == "chunk read" for line in said)


def whole_once(stage: Stage, *tables: str) -> None:
    """Check that the log makes the source's tables, and has every record once, in order."""
    for table in tables:
        assert stage.log.replay().get(f"public.{table}", {}) == stage.source_rows(table, ["id"])
    positions = stream_positions(stage)
    assert positions == sorted(set(positions))
    made = [(t.schema.name, row["id"]) for t, _, row in stage.log.records() if chr(row["__op"]) == "c" and "id" in row]
    assert len(made) == len(set(made)), "a transaction has records twice"


@contextmanager
def twin(stage: Stage, folder: Path) -> Iterator[Stage]:
    """Yield a stage of the same source whose log, catalog and slot stand where the other's do."""
    slot = "twin_" + stage.config.slot
    with stage.connect() as connection:
        connection.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", [stage.config.slot, slot])
    folder.mkdir()
    with closing(sqlite3.connect(stage.folder / "catalog.db")) as database:
        database.execute("VACUUM INTO ?", [str(folder / "catalog.db")])
    log = MemoryLog()
    log.entries += stage.log.entries
    log._reached |= stage.log.reached()
    with closing(Catalog(folder / "catalog.db")) as catalog, closing(log):
        config = replace(stage.config, slot=slot, spill_dir=str(folder / "spill"))
        yield Stage(stage.dsn, folder, catalog, config, log)


def records(stage: Stage) -> list[tuple[Any, ...]]:
    """Return every record that isn't a copied one: schemas, operations, and the columns' values."""
    found: list[tuple[Any, ...]] = []
    for table, operation, row in stage.log.records():
        if operation["kind"] != OperationKind.COPY_CHUNK:
            # A record's operation in a run depends on how many came together.
            found.append((table.schema, operation, {name: row[name] for name in row if name != "__operation"}))
    return found


@pytest.mark.parametrize("way", ["socket", "libpq"])
@pytest.mark.parametrize("seed", [1, 2])
def test_both_modes_give_the_same_records(stage: Stage, seed: int, way: str) -> None:
    workload = Workload(seed, transaction_rows_max=3000, add_defaults=False)
    stage.config = replace(stage.config, tables=("*.*",), catch_up=CatchUpMode.NEVER)
    with stage.connect() as connection:
        workload.setup(connection)
        stage.catch_up()
        with twin(stage, stage.folder / "twin") as other:
            steps = [workload.step(connection) for _ in range(60)]
            connection.execute("SELECT pg_logical_emit_message(false, 'app', 'outside of any')")
            in_chunks(other, catch_up_changes=3000, catch_up_chunk_bytes=1 << 20, reads_socket=way == "socket")
            with capture_logs() as said:
                stage.catch_up()
            assert modes(said) == ["streaming"]
            with capture_logs() as said:
                other.catch_up()
            assert modes(said)[0] == "catching up"
            assert chunks_read(said) >= 3
            mine, theirs = records(stage), records(other)
    assert len({step.kind for step in steps}) >= 14
    assert any(isinstance(entry, SpilledOp) for entry in other.log.entries), "no transaction came in pieces"
    assert len(mine) > 1000
    assert len(theirs) == len(mine)
    for number, (here, there) in enumerate(zip(mine, theirs, strict=True)):
        assert there[1] == here[1], number
        assert there[2] == here[2], (number, here[0].name)
        assert there[0] == here[0], number


def test_a_large_backlog_is_read_in_chunks_and_a_small_one_is_not(stage: Stage) -> None:
    stage.sql(ORDERS)
    stage.config = replace(stage.config, catch_up_bytes=200_000)
    stage.catch_up()
    stage.sql(orders(1, 10))
    with capture_logs() as said:
        stage.catch_up()
    assert modes(said) == ["streaming"]
    stage.sql(orders(11, 5000))
    with capture_logs() as said:
        stage.catch_up()
    assert modes(said)[0] == "catching up"
    stage.config = replace(stage.config, catch_up=CatchUpMode.NEVER)
    stage.sql(orders(5001, 10000))
    with capture_logs() as said:
        stage.catch_up()
    assert modes(said) == ["streaming"]
    whole_once(stage, "orders")


def test_it_goes_over_to_the_stream_while_writes_go_on(stage: Stage) -> None:
    stage.sql(ORDERS)
    stage.catch_up()
    stage.sql(*(orders(n * 100 + 1, n * 100 + 100) for n in range(50)))
    in_chunks(stage, catch_up_bytes=200_000)

    def write(stop: threading.Event) -> None:
        with stage.connect() as connection:
            for number in itertools.count(10_000):
                connection.execute(orders(number, number))
                connection.execute(f"UPDATE orders SET item = 'changed' WHERE id = {number - 9990}")
                if stop.wait(0.001):
                    return

    with capture_logs() as said:
        with until_done(write):
            running = stage.start()
            wait_until(lambda: modes(said)[:2] == ["catching up", "streaming"], "it goes over")
            behind = len(stage.log.entries)
            wait_until(lambda: len(stage.log.entries) > behind + 20, "what is written meanwhile comes")
        running.stop()
    stage.catch_up()
    whole_once(stage, "orders")


def test_a_stream_that_falls_behind_goes_over_to_chunks(stage: Stage) -> None:
    stage.sql(ORDERS)
    stage.catch_up()
    stage.config = replace(stage.config, catch_up_bytes=500_000, buffer_bytes_max=20_000, run_bytes_max=50_000)
    stage.log.delay_s = 0.5
    with capture_logs() as said:
        running = stage.start()
        wait_until(stage.slot_active, "it streams")
        stage.sql(*(orders(n * 100 + 1, n * 100 + 100, "x" * 100) for n in range(400)))
        wait_until(lambda: "catching up" in modes(said), "it goes over")
        stage.log.delay_s = 0.0
        wait_until(lambda: len(stage.log.replay().get("public.orders", ())) == 40_000, "all rows come")
        running.stop()
    assert modes(said)[:2] == ["streaming", "catching up"]
    whole_once(stage, "orders")


def test_the_slot_is_advanced_to_what_is_durable_and_no_further(stage: Stage) -> None:
    stage.sql(ORDERS)
    stage.catch_up()
    begin = stage.slot_confirmed()
    stage.sql(*(orders(n * 100 + 1, n * 100 + 100) for n in range(30)))
    in_chunks(stage, status_s=0.05, slot_advance_s=0.0)
    told: list[CaptureProgress] = []
    stage.log.gate.clear()
    with capture_logs() as said:
        running = stage.start(on_progress=told.append)
        wait_until(lambda: chunks_read(said) >= 5 and stage.log.held(), "it reads on")
        told_before = len(told)
        wait_until(lambda: len(told) > told_before + 1, "it has reported to the source for a second, every 50 ms")
        assert stage.slot_confirmed() == begin
        stage.log.gate.set()
        wait_until(lambda: stage.slot_confirmed() > begin, "the slot moves")
        assert stage.slot_confirmed() <= max(
            *stage.log.reached().values(), *(stage.catalog.reached(s.id) for s in sources(stage))
        )
        wait_until(lambda: len(stage.log.replay().get("public.orders", ())) == 3000, "all rows come")
        running.stop()
    assert "catching up" in modes(said)
    whole_once(stage, "orders")


def sources(stage: Stage) -> list[Any]:
    return list(stage.catalog.sources(stage.catalog.stream("shop").id))


def test_a_stop_in_the_middle_leaves_slot_and_log_at_one_place(stage: Stage) -> None:
    stage.sql(ORDERS)
    stage.catch_up()
    stage.sql(*(orders(n * 100 + 1, n * 100 + 100) for n in range(60)))
    in_chunks(stage)
    stage.log.delay_s = 0.2
    running = stage.start()
    wait_until(lambda: len(stage.log.entries) >= 3, "some of it is there")
    outcome = running.stop()
    assert stage.slot_confirmed() == outcome.reached
    assert len(stage.log.replay()["public.orders"]) < 6000, "it had ended before it was stopped"
    wait_until(lambda: copies_gone(stage), "the copy of the slot goes with its connection")
    stage.log.delay_s = 0.0
    stage.catch_up()
    whole_once(stage, "orders")


def copies_gone(stage: Stage) -> bool:
    with stage.connect() as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_replication_slots WHERE temporary AND database = current_database()"
        ).fetchone()
    return row == (0,)


def test_a_broken_connection_is_taken_up_again_in_chunks(stage: Stage) -> None:
    stage.sql(ORDERS)
    stage.catch_up()
    stage.sql(*(orders(n * 100 + 1, n * 100 + 100) for n in range(60)))
    in_chunks(stage, buffer_bytes_max=16 << 10)  # so that reading waits for the log
    stage.log.delay_s = 0.2
    with capture_logs() as said:
        running = stage.start()

        def comes_and_breaks(times: int) -> None:
            seen = len(stage.log.entries)
            wait_until(lambda: len(stage.log.entries) > seen, "some of it comes")
            stage.sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'millstream catch-up'"
                " AND datname = current_database()"
            )
            wait_until(lambda: modes(said).count("catching up") > times, "it begins again")

        comes_and_breaks(1)
        comes_and_breaks(2)
        stage.log.delay_s = 0.0
        wait_until(lambda: len(stage.log.replay().get("public.orders", ())) == 6000, "all rows come")
        running.stop()
    whole_once(stage, "orders")


def test_tables_are_copied_beside_it(stage: Stage) -> None:
    stage.sql(ORDERS)
    stage.catch_up()
    stage.sql(*(orders(n * 100 + 1, n * 100 + 100) for n in range(100)))
    stage.sql(
        "CREATE TABLE more (id int PRIMARY KEY, n int)", "INSERT INTO more SELECT i, 0 FROM generate_series(1, 2000) i"
    )
    in_chunks(stage, catch_up_bytes=100_000, catch_up_changes=2000, catch_up_chunk_bytes=1 << 20)

    def write(stop: threading.Event) -> None:
        with stage.connect() as connection:
            for number in itertools.count(1):
                connection.execute(f"UPDATE more SET n = {number} WHERE id % 50 = {number % 50}")
                connection.execute(f"UPDATE more SET id = id + 100000 WHERE id = {number}")
                if stop.wait(0.005):
                    return

    with capture_logs() as said:
        with until_done(write):
            running = stage.start()
            wait_until(lambda: stage.state("public.more") is TableState.STREAMING, "it is copied")
        running.stop()
    assert modes(said)[0] == "catching up"
    stage.catch_up()
    whole_once(stage, "orders", "more")


def test_a_transaction_across_many_chunks_is_left_to_the_stream(stage: Stage) -> None:
    stage.sql(ORDERS, f"ALTER DATABASE {stage.config.slot} SET logical_decoding_work_mem = '64kB'")
    stage.catch_up()
    with stage.connect() as connection, connection.transaction():
        for n in range(20):
            connection.execute(orders(n * 500 + 1, n * 500 + 500))
            stage.sql(orders(100_000 + n, 100_000 + n))
    in_chunks(stage, catch_up_changes=1000, catch_up_chunk_bytes=1 << 20)
    with capture_logs() as said:
        stage.catch_up()
    assert modes(said) == ["catching up", "streaming"]
    assert [line["why"] for line in said if "why" in line] == ["a large transaction is read again with every chunk"]
    whole_once(stage, "orders")
    assert list((stage.folder / "spill").iterdir()) == []


def test_a_transaction_that_is_open_when_a_chunk_ends_comes_once(stage: Stage) -> None:
    """The transaction's first pieces arrive with several chunks.

    In a later chunk it commits, rolls a part back, or aborts as a whole.
    """
    stage.sql(ORDERS, f"ALTER DATABASE {stage.config.slot} SET logical_decoding_work_mem = '64kB'")
    stage.catch_up()
    with stage.connect() as kept, stage.connect() as gone:
        for session in (kept, gone):
            session.execute("BEGIN")
        kept.execute(orders(1, 800))
        gone.execute(orders(1001, 1800))
        stage.sql(*(orders(10_000 + n * 100, 10_099 + n * 100) for n in range(20)))
        kept.execute("SAVEPOINT a")
        kept.execute(orders(2001, 2800))
        kept.execute("ROLLBACK TO a")
        gone.execute("ROLLBACK")
        stage.sql(*(orders(20_000 + n * 100, 20_099 + n * 100) for n in range(20)))
        kept.execute(orders(3001, 4200))  # so that all of it is streamed again
        kept.execute("COMMIT")
    stage.sql(*(orders(30_000 + n * 100, 30_099 + n * 100) for n in range(5)))
    in_chunks(stage, catch_up_changes=3000, catch_up_chunk_bytes=1 << 20)
    with capture_logs() as said:
        stage.catch_up()
    assert chunks_read(said) >= 3
    assert "a large transaction is read again with every chunk" not in [line.get("why") for line in said]
    whole_once(stage, "orders")
    assert list((stage.folder / "spill").iterdir()) == []


@pytest.mark.parametrize("why", ["slots", "temporary files"])
def test_what_the_source_refuses_is_left_to_the_stream(stage: Stage, why: str) -> None:
    stage.sql(ORDERS)
    stage.catch_up()
    made: list[str] = []
    try:
        with stage.connect() as connection:
            if why == "slots":
                for n in range(100):
                    name = f"full_{n}_{stage.config.slot}"[:60]
                    try:
                        connection.execute("SELECT pg_create_physical_replication_slot(%s)", [name])
                    except psycopg.errors.ConfigurationLimitExceeded:
                        break
                    made.append(name)
            else:
                connection.execute(f"ALTER DATABASE {stage.config.slot} SET temp_file_limit = '1MB'")
                connection.execute(f"ALTER DATABASE {stage.config.slot} SET work_mem = '1MB'")
        stage.sql(*(orders(n * 1000 + 1, n * 1000 + 1000, "x" * 200) for n in range(20)))
        in_chunks(stage, catch_up_changes=100_000, catch_up_chunk_bytes=1 << 30)
        with capture_logs() as said:
            stage.catch_up()
        told = [line["event"] for line in said if line["log_level"] == "warning"]
        expected = "the backlog isn't read in chunks" if why == "slots" else "no more chunks: the stream is read"
        assert expected in told
        assert modes(said)[-1] == "streaming"
        whole_once(stage, "orders")
    finally:
        with stage.connect() as connection:
            for name in made:
                connection.execute("SELECT pg_drop_replication_slot(%s)", [name])


def test_somebody_elses_reading_of_the_slot_is_noticed(stage: Stage) -> None:
    stage.sql(ORDERS)
    stage.catch_up()
    stage.sql(*(orders(n * 100 + 1, n * 100 + 100) for n in range(20)))
    in_chunks(stage)
    stage.log.gate.clear()
    running = stage.start()
    wait_until(stage.log.held, "it reads")
    stage.sql(f"SELECT pg_replication_slot_advance('{stage.config.slot}', pg_current_wal_lsn())")
    stage.sql(orders(9001, 9001))
    stage.log.gate.set()
    wait_until(lambda: running.ended or len(stage.log.replay().get("public.orders", ())) == 2001, "it ends, or has all")
    if running.ended:
        assert isinstance(running.error, SourceError)
        assert running.error.code == "slot_ahead"
    else:
        running.stop()
        whole_once(stage, "orders")


def test_a_new_publication_is_taken_up(stage: Stage) -> None:
    """A table without an identity needs its own publication, which the chunks weren't begun with."""
    stage.sql(ORDERS)
    stage.catch_up()
    stage.sql(*(orders(n * 100 + 1, n * 100 + 100) for n in range(20)))
    in_chunks(stage)
    stage.log.delay_s = 0.05
    running = stage.start()
    wait_until(lambda: stage.log.entries, "it reads")
    stage.sql("CREATE TABLE notes (note text)")
    wait_until(lambda: stage.state("public.notes") is TableState.HISTORY_ONLY, "it is noticed")
    stage.sql("INSERT INTO notes VALUES ('a')")
    stage.log.delay_s = 0.0
    wait_until(lambda: stage.log.replay().get("public.notes"), "its rows come")
    running.stop()
    stage.catch_up()
    whole_once(stage, "orders")


def test_progress_says_the_mode_and_what_the_slot_holds(stage: Stage) -> None:
    stage.sql(ORDERS)
    stage.catch_up()
    stage.sql(*(orders(n * 100 + 1, n * 100 + 100) for n in range(40)))
    in_chunks(stage)
    stage.log.delay_s = 0.05
    heard: list[CaptureProgress] = []
    stage.catch_up(on_progress=heard.append)
    assert {one.mode for one in heard} >= {Mode.CATCHING_UP}
    assert any(one.slot_holds_bytes for one in heard)
    first = next(one for one in heard if one.mode is Mode.CATCHING_UP)
    assert dataclasses.asdict(first)["mode"] == "catching up"


# --- in its own process -----------------------------------------------------------------------------------------------


def facts_of(stage: Stage, more: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that the process is given, for a capture into its own log: those that JSON can hold."""
    config = make_config(stage.dsn, stage.folder, stage.config.slot)
    assert not config.rules
    left_out = {"rules", *(name for name, value in dataclasses.asdict(config).items() if callable(value))}
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in left_out} | more


def run_here(stage: Stage, **more: Any) -> None:
    """Run in this process what the other process does: everything is loaded here.

    For runs that are neither measured nor killed.
    """
    Beside(catching_up_process.main, stage.folder / "home", facts_of(stage, more)).ended(CATCH_UP_S)


def run_process(stage: Stage, failpoints: str = "", **more: Any) -> tuple[int, str]:
    """Run the process; return its exit code, and what it printed."""
    facts = facts_of(stage, more)
    command = [sys.executable, "-m", "tests.capture.catching_up_process", str(stage.folder / "home"), json.dumps(facts)]
    done = subprocess.run(
        command,
        env={**os.environ, "MILLSTREAM_FAILPOINTS": failpoints},
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=False,
    )
    return done.returncode, done.stdout


def rows_in_log(stage: Stage) -> list[tuple[int, int, int]]:
    """Return positions (commit LSN, index) and ids of all records, in the log's order."""
    reader = StreamReader(str(stage.folder / "home" / "wal"))
    found: list[tuple[int, int, int]] = []
    for some in reader.read_between(Seq(0), reader.persisted_upto()):
        rows = some.batch.select(["__commit_lsn", "__commit_index", "id"]).to_pydict()
        found += zip(rows["__commit_lsn"], rows["__commit_index"], rows["id"], strict=True)
    return found


SMALL: dict[str, Any] = {"catch_up": "always", "catch_up_bytes": 4096} | SMALL_CHUNKS


@pytest.mark.parametrize(
    "point",
    [
        "capture.after_chunk:3",
        "capture.before_advance",
        "capture.before_confirm:4",
        "wal.before_fsync:4",
        "capture.after_chunk:9",
    ],
)
def test_what_is_killed_repeats_nothing_and_loses_nothing(stage: Stage, point: str) -> None:
    stage.sql(ORDERS)
    (stage.folder / "home").mkdir()
    run_here(stage)  # the slot is created
    stage.sql(*(orders(n * 100 + 1, n * 100 + 100) for n in range(40)))
    begin = stage.slot_confirmed()
    assert run_process(stage, failpoints=point, **SMALL)[0] == -9
    wait_until(lambda: not stage.slot_active() and copies_gone(stage), "its server processes end")
    if point == "capture.before_advance":
        assert stage.slot_confirmed() == begin
        assert rows_in_log(stage), "it was killed before anything was durable"
    run_here(stage, **SMALL)
    found = rows_in_log(stage)
    assert [row[2] for row in found] == list(range(1, 4001))
    assert [row[:2] for row in found] == sorted({row[:2] for row in found})


def test_memory_is_bounded_whatever_the_backlog(stage: Stage) -> None:
    stage.sql(ORDERS)
    (stage.folder / "home").mkdir()
    run_here(stage)
    peaks = []
    for rounds in (10, 80):
        stage.sql(*(orders(n * 10_000 + 1, n * 10_000 + 10_000, "x" * 200) for n in range(rounds)), "TRUNCATE orders")
        code, printed = run_process(stage, catch_up="always", buffer_bytes_max=4 << 20)
        assert code == 0
        peaks.append(int(printed.split()[-1]) / 1024)
    assert peaks[1] < 512
    assert peaks[1] - peaks[0] < 100, "it holds what it should have handed on"  # with 190 MB more in one chunk
