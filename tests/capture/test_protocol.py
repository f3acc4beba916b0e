"""Messages of PostgreSQL's stream, and their orders: transactions in pieces, wide rows, long values, lists, filters."""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import replace

import psycopg
import pytest
from tests.capture.beside import wait_until
from tests.capture.capture_stage import Stage
from tests.capture.test_streaming import ORDERS, stream_positions

from millstream.catalog import TableState
from millstream.errors import SourceError
from millstream.model.operations import SpilledOp
from millstream.testing.errors import coded


def streams_everything(stage: Stage) -> None:
    """Make transactions arrive in pieces from their first 64 KiB on, mixed with others'."""
    stage.sql(f"ALTER DATABASE {stage.config.slot} SET logical_decoding_work_mem = '64kB'")


def once_each(stage: Stage) -> None:
    positions = stream_positions(stage)
    assert positions == sorted(set(positions))


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(4))
def test_transactions_in_pieces_with_savepoints_given_back_at_any_depth(stage: Stage, seed: int) -> None:
    """Five sessions run at once, each with nested savepoints that are kept or rolled back.

    Some end prepared, some don't end at all.
    """
    rng = random.Random(seed)
    stage.sql("CREATE TABLE wide (id int PRIMARY KEY, session int, text text)")
    streams_everything(stage)
    stage.catch_up()
    running = stage.start()
    with ExitStack() as opened:
        sessions = [opened.enter_context(stage.connect()) for _ in range(5)]
        depths = [0] * len(sessions)
        tags = list(range(len(sessions)))  # one per transaction, which may hold its rows for long
        for session in sessions:
            session.execute("BEGIN")
        prepared: list[str] = []
        key = 0
        for _ in range(120):
            number = rng.randrange(len(sessions))
            session, depth = sessions[number], depths[number]
            match rng.choices(["write", "savepoint", "back", "keep", "end"], [10, 4, 3, 3, 1])[0]:
                case "write":
                    count = rng.choice([1, 5, 400])
                    session.execute(
                        "INSERT INTO wide SELECT i, %s, repeat(chr(97 + i %% 26), 300) FROM generate_series(%s::int, %s::int) i",
                        [tags[number], key, key + count - 1],
                    )
                    session.execute("UPDATE wide SET text = 'again' WHERE id %% 7 = 0 AND session = %s", [tags[number]])
                    session.execute("DELETE FROM wide WHERE id %% 11 = 0 AND session = %s", [tags[number]])
                    key += count
                case "savepoint":
                    session.execute(f"SAVEPOINT s{depth}")
                    depths[number] += 1
                case "back" if depth:
                    session.execute(f"ROLLBACK TO s{depth - 1}")
                case "keep" if depth:
                    session.execute(f"RELEASE s{depth - 1}")
                    depths[number] -= 1
                case "end":
                    how = rng.choice(["COMMIT", "ROLLBACK", "PREPARE"])
                    if how == "PREPARE":
                        prepared.append(f"{stage.config.slot}_{seed}_{key}_{len(prepared)}")
                        how = f"PREPARE TRANSACTION '{prepared[-1]}'"
                    session.execute(how)
                    session.execute("BEGIN")
                    depths[number], tags[number] = 0, max(tags) + 1
                case _:
                    continue
        for session in sessions:
            session.execute("COMMIT")
    running.stop()
    # Prepared before a restart, and ended after it.
    running = stage.start()
    wait_until(stage.slot_active, "it streams again")
    for number, name in enumerate(prepared):
        stage.sql(f"{'COMMIT' if number % 2 else 'ROLLBACK'} PREPARED '{name}'")
    running.stop()
    stage.catch_up()
    assert any(isinstance(entry, SpilledOp) for entry in stage.log.entries)
    assert stage.log.replay()["public.wide"] == stage.source_rows("wide", ["id"])
    once_each(stage)
    assert list((stage.folder / "spill").iterdir()) == []


@pytest.mark.long
def test_a_transaction_prepared_in_pieces_arrives_whole_behind_restarts(stage: Stage) -> None:
    stage.sql(ORDERS)
    streams_everything(stage)
    stage.catch_up()
    name = f"{stage.config.slot}_whole"
    with stage.connect() as session:
        session.execute("BEGIN")
        session.execute("INSERT INTO orders SELECT i, repeat('x', 100), 1, now() FROM generate_series(1, 5000) i")
        running = stage.start()
        wait_until(stage.slot_active, "it streams")
        session.execute("UPDATE orders SET item = 'y' WHERE id % 2 = 0")
        running.stop()
        session.execute(f"PREPARE TRANSACTION '{name}'")
    stage.catch_up()
    assert "public.orders" not in stage.log.replay()
    stage.sql("INSERT INTO orders VALUES (-1, 'after', 1, now())")
    stage.catch_up()
    stage.sql(f"COMMIT PREPARED '{name}'")
    stage.catch_up()
    assert stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id"])
    assert len(stage.log.replay()["public.orders"]) == 5001
    once_each(stage)


@pytest.mark.long
def test_a_table_of_as_many_columns_as_there_can_be(stage: Stage) -> None:
    names = [f'"Column {n} é"' for n in range(1599)]
    stage.sql("CREATE TABLE wide (id int PRIMARY KEY, " + ", ".join(f"{name} smallint" for name in names) + ")")
    values = ", ".join(str(n % 300) if n % 3 else "NULL" for n in range(1599))
    stage.sql(f"INSERT INTO wide SELECT i, {values} FROM generate_series(1, 20) i")
    stage.catch_up()
    stage.sql(
        f"INSERT INTO wide SELECT i, {values} FROM generate_series(21, 60) i",
        f"UPDATE wide SET {names[7]} = id, {names[1598]} = NULL",
        f"ALTER TABLE wide DROP COLUMN {names[3]}",
        "UPDATE wide SET id = id + 100 WHERE id < 5",
    )
    stage.catch_up()
    found = stage.log.replay()["public.wide"]
    assert found == {
        key: row | ({"Column 3 é": found[key]["Column 3 é"]} if "Column 3 é" in found[key] else {})
        for key, row in stage.source_rows("wide", ["id"]).items()
    }
    once_each(stage)


@pytest.mark.since_postgres(15)
def test_column_lists_and_row_filters_of_a_publication_are_what_is_captured(stage: Stage) -> None:
    stage.sql(
        ORDERS,
        "INSERT INTO orders SELECT i, 'item ' || i, i, now() FROM generate_series(1, 40) i",
        f"CREATE PUBLICATION {stage.config.publication} FOR TABLE orders (id, item) WHERE (id > 10)",
    )
    stage.catch_up()
    rows = {
        key: {n: row[n] for n in ("id", "item")}
        for key, row in stage.source_rows("orders", ["id"]).items()
        if int(key[0]) > 10
    }
    assert stage.log.replay()["public.orders"] == rows
    stage.sql(
        "INSERT INTO orders VALUES (-5, 'out', 1, now()), (50, 'in', 1, now())",
        "UPDATE orders SET item = 'changed', price = 7 WHERE id IN (1, 20, 50)",
        "UPDATE orders SET price = 8",
        "UPDATE orders SET id = 100 WHERE id = 3",  # enters the filter
        "UPDATE orders SET id = -30 WHERE id = 30",  # leaves the filter
        "DELETE FROM orders WHERE id IN (2, 21)",
    )
    stage.catch_up()
    rows = {
        key: {n: row[n] for n in ("id", "item")}
        for key, row in stage.source_rows("orders", ["id"]).items()
        if int(key[0]) > 10
    }
    assert stage.log.replay()["public.orders"] == rows
    # Altered while capture runs: another filter, and all columns.
    running = stage.start()
    wait_until(stage.slot_active, "it streams")
    stage.sql(
        f"ALTER PUBLICATION {stage.config.publication} SET TABLE orders WHERE (id > 10)",
        "UPDATE orders SET price = 9 WHERE id > 30",
        "INSERT INTO orders VALUES (60, 'all of it', 60, now())",
    )
    wait_until(lambda: ("60",) in stage.log.replay()["public.orders"], "the row comes")
    running.stop()
    found = stage.log.replay()["public.orders"]
    source = stage.source_rows("orders", ["id"])
    assert found[("60",)] == source[("60",)]
    once_each(stage)


IDENTITIES = (
    "DEFAULT", "FULL", "NOTHING", "USING INDEX other",
)  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(3))
def test_a_replica_identity_that_changes_in_mid_stream(stage: Stage, seed: int) -> None:
    rng = random.Random(seed)
    stage.sql(
        "CREATE TABLE moods (id int PRIMARY KEY, code int NOT NULL, text text)",
        "CREATE UNIQUE INDEX other ON moods (code)",
        "INSERT INTO moods SELECT i, i + 1000, repeat('t', 3000) FROM generate_series(1, 20) i",
    )
    stage.catch_up()
    running = stage.start()
    wait_until(stage.slot_active, "it streams")
    for _ in range(12):
        identity = rng.choice(IDENTITIES)
        stage.sql(f"ALTER TABLE moods REPLICA IDENTITY {identity}")
        for _ in range(rng.randrange(3)):
            key = rng.randrange(1, 30)
            statement = rng.choice(
                [
                    f"INSERT INTO moods VALUES ({key}, {key} + 1000, 'new') ON CONFLICT (id) DO NOTHING",
                    f"UPDATE moods SET text = 'x' WHERE id = {key}",
                    f"UPDATE moods SET code = code + 5000 WHERE id = {key}",
                    f"DELETE FROM moods WHERE id = {key}",
                ]
            )
            try:
                stage.sql(statement)
            except psycopg.errors.ObjectNotInPrerequisiteState:
                # Published without an identity for a moment: the server itself refuses it.
                assert identity == "NOTHING"
    stage.sql("ALTER TABLE moods REPLICA IDENTITY DEFAULT", "UPDATE moods SET code = code + 100000")
    running.stop()
    for _ in range(3):
        stage.catch_up()
    assert stage.state("public.moods") is TableState.STREAMING
    assert stage.log.replay()["public.moods"] == stage.source_rows("moods", ["id"])


def test_rows_that_move_between_partitions_are_rows_of_their_root(stage: Stage) -> None:
    stage.sql(
        "CREATE TABLE days (id int, day int, text text, PRIMARY KEY (id, day)) PARTITION BY RANGE (day)",
        "CREATE TABLE days_1 PARTITION OF days FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE days_2 (text text, day int NOT NULL, id int NOT NULL, PRIMARY KEY (id, day))",
        "ALTER TABLE days ATTACH PARTITION days_2 FOR VALUES FROM (10) TO (20)",
        "CREATE TABLE days_rest PARTITION OF days DEFAULT PARTITION BY HASH (id)",
        "CREATE TABLE days_rest_0 PARTITION OF days_rest FOR VALUES WITH (MODULUS 2, REMAINDER 0)",
        "CREATE TABLE days_rest_1 PARTITION OF days_rest FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
        "INSERT INTO days SELECT i, i, 'x' FROM generate_series(0, 39) i",
    )
    stage.catch_up()
    stage.sql(
        "UPDATE days SET day = (day + 10) % 40",
        "UPDATE days SET text = 'y' WHERE day < 20",
        "DELETE FROM days WHERE id % 5 = 0",
        "INSERT INTO days_2 VALUES ('straight', 11, 500)",
    )
    stage.catch_up()
    assert set(stage.log.replay()) == {"public.days"}
    assert stage.log.replay()["public.days"] == stage.source_rows("days", ["id", "day"])
    once_each(stage)


def test_what_another_system_wrote_here_is_captured_too(stage: Stage) -> None:
    """Rows that a subscription applied have an origin; their transactions begin with one more message."""
    stage.sql(ORDERS)
    stage.catch_up()
    origin = f"{stage.config.slot}_origin"
    stage.sql(
        f"SELECT pg_replication_origin_create('{origin}')",
        f"SELECT pg_replication_origin_session_setup('{origin}'); "
        "BEGIN; SELECT pg_replication_origin_xact_setup('0/1234', now()); INSERT INTO orders VALUES (1, 'theirs', 1, now()); COMMIT",
        "INSERT INTO orders VALUES (2, 'ours', 1, now())",
    )
    try:
        stage.catch_up()
        assert stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id"])
        assert len(stage.log.replay()["public.orders"]) == 2
        stage.config = replace(stage.config, origin="none")
        with stage.connect() as connection:
            version = connection.info.server_version
        stage.sql(
            f"SELECT pg_replication_origin_session_setup('{origin}'); "
            "BEGIN; SELECT pg_replication_origin_xact_setup('0/1235', now()); INSERT INTO orders VALUES (3, 'theirs', 1, now()); COMMIT",
        )
        stage.sql("INSERT INTO orders VALUES (4, 'ours', 1, now())")  # in a session without that origin
        if version < 160000:
            with pytest.raises(SourceError, check=coded("source_version_unsupported"), match="16 and newer"):
                stage.catch_up()
            return
        stage.catch_up()
        assert sorted(row["item"] for row in stage.log.replay()["public.orders"].values()) == ["ours", "ours", "theirs"]
    finally:
        stage.sql(f"SELECT pg_replication_origin_drop('{origin}')")
