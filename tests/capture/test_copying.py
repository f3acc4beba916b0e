"""Existing rows enter the log exactly, while changes flow."""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import psycopg
import pytest
from tests.capture.beside import DEADLINE_S, Beside, until_done, wait_until
from tests.capture.capture_stage import Stage

from millstream.app.table_requests import copy_table
from millstream.capture.copying.chunk_reader import ChunkBounds
from millstream.catalog import TableState
from millstream.errors import CatalogError
from millstream.model.operations import OperationKind, SpilledOp, WriteOps

ORDERS = "CREATE TABLE orders (id int PRIMARY KEY, item text, price numeric(10,2), at timestamptz)"


def copied_rows(stage: Stage, name: str) -> int:
    """Return how many copied rows of a table the log has. Values aren't looked at: tests ask a hundred times a second."""
    found = 0
    for entry in list(stage.log.entries):
        kinds = (entry.operations if isinstance(entry, WriteOps) else entry.operation).column("kind").to_pylist()
        if OperationKind.COPY_CHUNK not in kinds:
            continue
        for tables in [entry.tables] if isinstance(entry, WriteOps) else entry.chunks():
            for table in tables:
                if table.schema.name == name:
                    columns = (table.rows.column(column).to_pylist() for column in ("__operation", "__op"))
                    found += sum(
                        kinds[operation] == OperationKind.COPY_CHUNK and chr(op) == "r"
                        for operation, op in zip(*columns, strict=True)
                    )
    return found


def test_existing_rows_are_copied_with_every_odd_value_and_key(stage: Stage) -> None:
    stage.sql(
        ORDERS,
        r"""INSERT INTO orders SELECT i, CASE i % 4 WHEN 0 THEN NULL WHEN 1 THEN E'tab\there\nline \\N \\ back\b\f\v\r'
            WHEN 2 THEN '' ELSE 'ünïcødé' END, CASE WHEN i % 5 = 0 THEN 'NaN'::numeric ELSE i END, '2024-01-01Z'
            FROM generate_series(-200, 200) i""",
        "CREATE TABLE pairs (a text, b date, c int[], PRIMARY KEY (b, a))",
        r"""INSERT INTO pairs SELECT 'it''s \ ' || i, DATE '2024-01-01' + i % 7, ARRAY[i, NULL]
            FROM generate_series(1, 300) i""",
        "INSERT INTO pairs VALUES ('x', 'infinity', '[2:3]={1,2}')",
        "CREATE TABLE nothing (id int PRIMARY KEY)",
        "CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy')",
        "CREATE TABLE moods (m mood PRIMARY KEY, n numeric)",
        "INSERT INTO moods VALUES ('happy', 1e40), ('sad', 'Infinity')",
        'CREATE TABLE "Odd ""name""" ("a b" int PRIMARY KEY, "select" text, g int GENERATED ALWAYS AS (1) STORED)',
        'INSERT INTO "Odd ""name""" VALUES (1, \'x\')',
    )
    outcome = stage.catch_up()

    assert not outcome.quarantined
    replay = stage.log.replay()
    assert replay["public.orders"] == stage.source_rows("orders", ["id"])
    assert replay["public.pairs"] == stage.source_rows("pairs", ["a", "b"]) or replay[
        "public.pairs"
    ] == stage.source_rows("pairs", ["b", "a"])
    assert replay["public.moods"] == stage.source_rows("moods", ["m"])
    with stage.connect() as connection:
        generated = {"g": "1"} if connection.info.server_version >= 180000 else {}
    assert replay['public.Odd "name"'] == {("1",): {"a b": "1", "select": "x"} | generated}
    assert copied_rows(stage, "orders") == 401
    assert {stage.table(f"public.{n}").state for n in ("orders", "pairs", "nothing")} == {TableState.STREAMING}


@contextmanager
def workload(stage: Stage, keys: int) -> Iterator[None]:
    """Two connections that change `orders` in every way, until the block ends."""

    def work(seed: int, stop: threading.Event) -> None:
        chance = random.Random(seed)
        with stage.connect() as connection:
            while not stop.is_set():
                try:
                    with connection.transaction():
                        for _ in range(chance.randrange(1, 6)):
                            change(connection, chance, keys)
                        if chance.randrange(5) == 0:
                            raise psycopg.Rollback
                except (psycopg.errors.UniqueViolation, psycopg.errors.DeadlockDetected):
                    continue
                stage.breathe(connection, stop)

    with until_done(*(partial(work, seed) for seed in range(2))):
        yield


def change(connection: psycopg.Connection[object], chance: random.Random, keys: int) -> None:
    key = chance.randrange(keys)
    what = chance.randrange(8)
    if what <= 1:
        connection.execute("INSERT INTO docs VALUES (%s, repeat(%s, 700), 0) ON CONFLICT DO NOTHING", [key, str(key)])
    elif what <= 4:
        connection.execute("UPDATE docs SET n = n + 1 WHERE id = %s", [key])
    elif what == 5:
        connection.execute("UPDATE docs SET body = repeat('new', 900), n = n + 1 WHERE id = %s", [key])
    elif what == 6:
        connection.execute("UPDATE docs SET id = %s WHERE id = %s", [chance.randrange(keys), key])
    else:
        connection.execute("DELETE FROM docs WHERE id = %s", [key])


DOCS = "CREATE TABLE docs (id int PRIMARY KEY, body text, n int); ALTER TABLE docs ALTER body SET STORAGE EXTERNAL"


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 3])
def test_a_copy_beside_a_live_workload_ends_equal_to_the_source(stage: Stage, workers: int) -> None:
    stage.sql(DOCS, "INSERT INTO docs SELECT i, repeat('old', 900), 0 FROM generate_series(0, 799) i", "ANALYZE docs")
    stage.config = replace(stage.config, copy_workers=workers, chunk_rows=40)
    with workload(stage, 1000):
        running = stage.start()
        wait_until(lambda: stage.log.entries, "capture runs")
        wait_until(lambda: stage.state("public.docs") is TableState.STREAMING, "the copy is whole")
    running.stop()
    stage.catch_up()

    assert stage.log.replay()["public.docs"] == stage.source_rows("docs", ["id"])
    assert copied_rows(stage, "docs") > 100


@pytest.mark.long
def test_a_copy_that_was_stopped_goes_on_with_the_next_chunk(stage: Stage) -> None:
    stage.sql(DOCS, "INSERT INTO docs SELECT i, 'x', 0 FROM generate_series(1, 2000) i")
    stage.config = replace(stage.config, copy_workers=1, chunk_rows=20)
    stage.log.delay_s = 0.1  # ten seconds' worth, of which the test waits for one
    running = stage.start()
    wait_until(lambda: copied_rows(stage, "docs") > 200, "some chunks are copied")
    running.stop()
    first = copied_rows(stage, "docs")
    assert first < 2000
    stage.log.delay_s = 0.0
    stage.catch_up()

    assert stage.log.replay()["public.docs"] == stage.source_rows("docs", ["id"])
    # Chunks that were read ahead and weren't durable are read again.
    assert copied_rows(stage, "docs") <= 2000 + 4 * 20, "chunks that were durable were not read again"


def test_a_transaction_that_no_snapshot_sees_yet_is_newer_than_any_chunk(stage: Stage) -> None:
    """A commit that waits for a synchronous standby is in the WAL, and in the log, before snapshots see its rows."""
    stage.sql(DOCS, "INSERT INTO docs SELECT i, 'old', 0 FROM generate_series(1, 120) i")
    stage.config = replace(stage.config, tables=("public.orders",))
    stage.sql(ORDERS)
    stage.catch_up()
    stage.sql(f"ALTER SYSTEM SET synchronous_standby_names = 'nobody_{stage.config.slot}'", "SELECT pg_reload_conf()")
    blocked = stage.connect()
    try:
        stage.config = replace(stage.config, tables=("public.*",))
        with stage.connect() as local:
            local.execute("SET synchronous_commit = local")
            local.execute(f"ALTER PUBLICATION {stage.config.publication} ADD TABLE docs")
        thread = waiting_update(stage, blocked)
        running = stage.start()
        wait_until(
            lambda: stage.state("public.docs") is TableState.COPYING and waiting_for_standby(stage),
            "the copy begins",
        )
    finally:
        with stage.connect() as local:
            local.execute("SET synchronous_commit = local")
            local.execute("ALTER SYSTEM RESET synchronous_standby_names")
            local.execute("SELECT pg_reload_conf()")
    thread.ended(180)
    blocked.close()
    wait_until(lambda: stage.state("public.docs") is TableState.STREAMING, "the copy is whole")
    running.stop()
    stage.catch_up()
    assert stage.log.replay()["public.docs"] == stage.source_rows("docs", ["id"])


def waiting_update(stage: Stage, blocked: psycopg.Connection[Any]) -> Beside:
    """Return an update that waits for the standby: one that comes before the server has taken the setting in doesn't."""
    end = time.monotonic() + DEADLINE_S
    thread = Beside(blocked.execute, "UPDATE docs SET n = 9 WHERE id <= 60")
    while not waiting_for_standby(stage):
        assert time.monotonic() < end, "never: the update waits"
        if not thread.is_alive():
            thread.ended()
            thread = Beside(blocked.execute, "UPDATE docs SET n = 9 WHERE id <= 60")
    return thread


def waiting_for_standby(stage: Stage) -> bool:
    with stage.connect() as connection:
        row = connection.execute("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'").fetchone()
    assert row is not None
    return bool(row[0])


def test_a_table_made_while_capture_runs_joins_it(stage: Stage) -> None:
    stage.sql(ORDERS)
    running = stage.start()
    wait_until(stage.slot_confirmed, "the slot is made")
    stage.sql(DOCS, "INSERT INTO docs VALUES (1, 'x', 1)")
    wait_until(lambda: stage.log.replay().get("public.docs"), "its first row comes")
    stage.sql("INSERT INTO docs VALUES (2, 'y', 1)", "UPDATE docs SET n = 5 WHERE id = 1")
    wait_until(
        lambda: stage.log.replay().get("public.docs") == stage.source_rows("docs", ["id"]), "its changes come as well"
    )
    stage.sql("DROP TABLE docs")
    wait_until(
        lambda: not any(r.name == "docs" for r in stage.catalog.tables(stage.catalog.stream("shop").id)), "it goes"
    )
    running.stop()


def test_a_table_that_left_the_publication_is_copied_again_when_it_rejoins(stage: Stage) -> None:
    stage.sql(ORDERS, DOCS, "INSERT INTO docs SELECT i, 'x', 0 FROM generate_series(1, 10) i")
    stage.catch_up()
    stage.sql(
        f"ALTER PUBLICATION {stage.config.publication} DROP TABLE docs",
        "DELETE FROM docs WHERE id < 4",
        "UPDATE docs SET n = 7 WHERE id = 8",
    )
    stage.catch_up()

    assert stage.log.replay()["public.docs"] == stage.source_rows("docs", ["id"])
    assert "t" in {chr(row["__op"]) for t, _, row in stage.log.records() if t.schema.name == "docs"}


def test_the_copy_of_a_table_without_a_key_voids_only_what_the_log_had(stage: Stage) -> None:
    def ops(name: str) -> str:
        return "".join(chr(row["__op"]) for t, _, row in stage.log.records() if t.schema.name == name)

    for name in ("bag", "empty", "late"):
        stage.sql(f"CREATE TABLE {name} (a int)", f"ALTER TABLE {name} REPLICA IDENTITY FULL")
    stage.sql("INSERT INTO bag VALUES (1), (1)", "ALTER TABLE late RENAME TO unknown")
    stage.config = replace(stage.config, tables=("public.bag", "public.empty", "public.late"))
    stage.catch_up()
    assert (ops("bag"), ops("empty")) == ("rr", "")
    assert {stage.state("public.bag"), stage.state("public.empty")} == {TableState.STREAMING}
    # The stream sends changes of this table before capture has met it.
    stage.sql(
        "ALTER TABLE unknown RENAME TO late",
        f"ALTER PUBLICATION {stage.config.publication} ADD TABLE late",
        "INSERT INTO late VALUES (1), (2)",
        "INSERT INTO empty VALUES (1)",
    )
    stage.catch_up()
    assert (ops("empty"), ops("late")) == ("c", "cctrr")
    for name in ("bag", "empty"):
        copy_table(stage.catalog, stage.table(f"public.{name}").stream, f"public.{name}")
    stage.catch_up()
    assert (ops("bag"), ops("empty")) == ("rrtrr", "ctr")


def test_a_copy_that_is_asked_for_voids_what_was_there(stage: Stage) -> None:
    stage.sql(DOCS, "INSERT INTO docs SELECT i, 'x', 0 FROM generate_series(1, 10) i")
    stage.catch_up()
    stage.catalog.set_state(stage.table("public.docs").id, TableState.COPY_REQUESTED, "asked for")
    running = stage.start()
    wait_until(lambda: copied_rows(stage, "docs") == 20, "all is copied again")
    wait_until(lambda: stage.state("public.docs") is TableState.STREAMING, "it streams")
    running.stop()
    assert stage.log.replay()["public.docs"] == stage.source_rows("docs", ["id"])


def test_a_table_without_a_key_under_full_is_an_equal_bag(stage: Stage) -> None:
    stage.sql(
        "CREATE TABLE bag (x text, n int); ALTER TABLE bag REPLICA IDENTITY FULL",
        "INSERT INTO bag VALUES ('a', 1), ('a', 1), ('b', NULL)",
    )
    stage.catch_up()
    stage.sql("DELETE FROM bag WHERE ctid IN (SELECT ctid FROM bag WHERE x = 'a' LIMIT 1)", "UPDATE bag SET n = 5")
    stage.catch_up()

    rows = sorted((r["x"], r["n"]) for r in stage.log.replay()["public.bag"][None])
    assert rows == [("a", "5"), ("b", "5")]


def test_a_partitioned_table_is_one_table(stage: Stage) -> None:
    stage.sql(
        "CREATE TABLE events (id int, day date, PRIMARY KEY (id, day)) PARTITION BY RANGE (day)",
        "CREATE TABLE events_1 PARTITION OF events FOR VALUES FROM ('2024-01-01') TO ('2024-02-01')",
        "CREATE TABLE events_2 PARTITION OF events FOR VALUES FROM ('2024-02-01') TO ('2024-03-01')",
        "INSERT INTO events VALUES (1, '2024-01-05'), (2, '2024-02-05')",
    )
    stage.catch_up()
    stage.sql("UPDATE events SET day = '2024-02-20' WHERE id = 1", "INSERT INTO events VALUES (3, '2024-01-06')")
    outcome = stage.catch_up()

    assert outcome.tables == ("public.events",)
    assert stage.log.replay()["public.events"] == stage.source_rows("events", ["id", "day"])


def test_truncate_during_a_copy_voids_the_chunks_that_do_not_see_it(stage: Stage) -> None:
    stage.sql(DOCS, "INSERT INTO docs SELECT i, 'x', 0 FROM generate_series(1, 1000) i")
    stage.config = replace(stage.config, copy_workers=1, chunk_rows=20)
    stage.log.delay_s = 0.02
    running = stage.start()
    wait_until(lambda: copied_rows(stage, "docs") > 100, "the copy runs")
    stage.sql("TRUNCATE docs", "INSERT INTO docs VALUES (500, 'new', 1), (5000, 'new', 1)")
    wait_until(lambda: stage.state("public.docs") is TableState.STREAMING, "the copy is whole")
    running.stop()
    stage.catch_up()
    assert stage.log.replay()["public.docs"] == stage.source_rows("docs", ["id"])


@pytest.mark.long
def test_a_table_without_a_key_that_is_written_to_all_the_time_is_copied(stage: Stage) -> None:
    """A change that the snapshot doesn't see concerns the table as a whole, which has no key.

    The copied rows enter the log before such a change, or are read again.
    """
    stage.sql(
        "CREATE TABLE bag (x text, n int); ALTER TABLE bag REPLICA IDENTITY FULL",
        "INSERT INTO bag SELECT 'old', i % 50 FROM generate_series(1, 500) i",
    )

    def write(own: int, stop: threading.Event) -> None:
        """Write its own rows: two writers of the same rows could wait for each other."""
        with stage.connect() as connection:
            while not stop.is_set():
                some = f"ctid IN (SELECT ctid FROM bag WHERE n = {own} LIMIT 3)"
                connection.execute(f"UPDATE bag SET n = n + 1 WHERE {some}")
                connection.execute(f"INSERT INTO bag VALUES ('new', {own})")
                connection.execute(f"DELETE FROM bag WHERE ctid IN (SELECT ctid FROM bag WHERE n = {own + 1} LIMIT 1)")

    with until_done(*(partial(write, own) for own in (7, 17, 27, 37))):
        running = stage.start()
        wait_until(lambda: stage.state("public.bag") is TableState.STREAMING, "the copy is whole")
    running.stop()
    stage.catch_up()
    with stage.connect() as connection:
        rows = sorted(connection.execute("SELECT x, n::text FROM bag").fetchall())
    assert sorted((r["x"], r["n"]) for r in stage.log.replay()["public.bag"][None]) == rows


@pytest.mark.long
@pytest.mark.parametrize("chunk_rows", [7, 1000])
def test_partitions_whose_columns_stand_in_another_order_are_copied_as_one_table(stage: Stage, chunk_rows: int) -> None:
    stage.sql(
        "CREATE TABLE events (id int, day date, words text, PRIMARY KEY (day, id)) PARTITION BY RANGE (day)",
        "CREATE TABLE events_1 PARTITION OF events FOR VALUES FROM ('2024-01-01') TO ('2024-02-01')",
        "CREATE TABLE events_2 (gone int, words text, day date NOT NULL, also_gone int, id int NOT NULL)",
        "ALTER TABLE events_2 DROP COLUMN gone, DROP COLUMN also_gone",
        "ALTER TABLE events ATTACH PARTITION events_2 FOR VALUES FROM ('2024-02-01') TO ('2024-03-01')",
        "CREATE TABLE events_3 PARTITION OF events FOR VALUES FROM ('2024-03-01') TO ('2024-04-01') PARTITION BY HASH (id)",
        "CREATE TABLE events_3a PARTITION OF events_3 FOR VALUES WITH (MODULUS 2, REMAINDER 0)",
        "CREATE TABLE events_3b (words text, id int NOT NULL, day date NOT NULL)",
        "ALTER TABLE events_3 ATTACH PARTITION events_3b FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
        "INSERT INTO events SELECT i, DATE '2024-01-01' + i % 90, 'event ' || i FROM generate_series(1, 400) i",
        "ANALYZE events",
    )
    stage.config = replace(stage.config, copy_workers=2, chunk_rows=chunk_rows)
    running = stage.start()
    stage.sql(
        "UPDATE events SET words = 'new' WHERE id % 5 = 0", "UPDATE events SET day = '2024-02-15' WHERE id % 31 = 0"
    )
    wait_until(lambda: stage.state("public.events") is TableState.STREAMING, "the copy is whole")
    running.stop()
    stage.catch_up()
    assert stage.log.replay()["public.events"] == stage.source_rows("events", ["id", "day"])


@pytest.mark.long
def test_tables_made_while_another_is_copied_join_and_end_exact(stage: Stage) -> None:
    stage.sql(DOCS, "INSERT INTO docs SELECT i, repeat('old', 900), 0 FROM generate_series(0, 799) i", "ANALYZE docs")
    stage.config = replace(stage.config, copy_workers=2, chunk_rows=20)
    names = [f"late_{n}" for n in range(6)]
    with workload(stage, 1000):
        running = stage.start()
        wait_until(lambda: copied_rows(stage, "docs") > 40, "the copy runs")
        for name in names:
            stage.sql(
                f"CREATE TABLE {name} (id int PRIMARY KEY, n int)",
                f"INSERT INTO {name} SELECT i, 0 FROM generate_series(1, 100) i",
                f"UPDATE {name} SET n = 1 WHERE id % 3 = 0",
                f"DELETE FROM {name} WHERE id % 7 = 0",
            )
        for name in (*names, "docs"):
            wait_until(lambda name=name: stage.state(f"public.{name}") is TableState.STREAMING, f"{name} is whole")
    running.stop()
    stage.catch_up()
    for name in (*names, "docs"):
        assert stage.log.replay()[f"public.{name}"] == stage.source_rows(name, ["id"]), name


def test_more_keys_than_a_chunk_has_rows_are_read_again_by_name(stage: Stage) -> None:
    """Rows that move incomplete into the part that was read already, all in one transaction."""
    stage.sql(
        DOCS, "INSERT INTO docs SELECT i, repeat(i || ' ', 900), 0 FROM generate_series(1, 1500) i", "ANALYZE docs"
    )
    stage.config = replace(stage.config, copy_workers=1, chunk_rows=20)
    stage.log.delay_s = 0.02
    running = stage.start()
    wait_until(lambda: copied_rows(stage, "docs") > 60, "the copy runs")
    stage.sql("UPDATE docs SET id = -id WHERE id > 300")
    stage.log.delay_s = 0.0
    wait_until(lambda: stage.state("public.docs") is TableState.STREAMING, "the copy is whole")
    running.stop()
    stage.catch_up()
    assert stage.log.replay()["public.docs"] == stage.source_rows("docs", ["id"])


def test_a_chunk_that_is_given_up_while_the_next_is_read_leaves_no_hole(stage: Stage) -> None:
    """A transaction too large to remember its keys is logged after a chunk that doesn't see it.

    The next chunk is being read at that moment.
    """
    stage.sql(
        DOCS,
        "INSERT INTO docs SELECT i, 'x', 0 FROM generate_series(1, 400) i",
        f"ALTER DATABASE {stage.config.slot} SET logical_decoding_work_mem = '64kB'",
    )
    given_up = threading.Event()
    fetched: list[ChunkBounds] = []

    def delay(moment: str, details: Mapping[str, Any]) -> None:
        if moment == "copy.fetch":
            fetched.append(details["bounds"])
            if len(fetched) == 3:
                stage.sql("UPDATE docs SET body = repeat('y', 3000) WHERE id > 300")
                given_up.wait(DEADLINE_S)
        elif moment == "copy.again":
            given_up.set()
        elif moment == "copy.decode" and details["bounds"].after == ("50",):
            wait_until(lambda: any(isinstance(e, SpilledOp) for e in stage.log.entries), "the update is logged")

    stage.config = replace(stage.config, copy_workers=1, chunk_rows=50, on_moment=delay)
    stage.catch_up()
    assert given_up.is_set(), "no chunk was given up"
    assert stage.log.replay()["public.docs"] == stage.source_rows("docs", ["id"])


def test_a_catalog_that_fails_under_a_copy_ends_capture_and_sets_no_table_aside(stage: Stage) -> None:
    stage.sql(DOCS, "INSERT INTO docs SELECT i, 'x', 0 FROM generate_series(1, 400) i")
    refusal = "BEFORE INSERT ON copy_chunks BEGIN SELECT RAISE(ABORT, 'it refuses chunks'); END"
    with closing(sqlite3.connect(stage.folder / "catalog.db")) as database:
        database.execute(f"CREATE TRIGGER refuses {refusal}")
        with pytest.raises(CatalogError, match="it refuses chunks"):
            stage.catch_up()
        database.execute("DROP TRIGGER refuses")
    assert stage.state("public.docs") is TableState.COPYING
    stage.catch_up()
    assert stage.log.replay()["public.docs"] == stage.source_rows("docs", ["id"])
