"""Changes reach the log as they were, in order, once."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace

import numpy as np
import pytest
from structlog.testing import capture_logs
from tests.capture.beside import DEADLINE_S, Beside, until_done, wait_until
from tests.capture.capture_stage import Stage

from millstream.capture.config import CaptureOutcome, CaptureProgress
from millstream.capture.run import run_capture
from millstream.capture.stream.frames import Block
from millstream.capture.stream.replication_connection import SocketWire
from millstream.capture.stream.slot_confirmation import SlotConfirmation
from millstream.catalog import TableState
from millstream.codec.pgoutput import MessageRun
from millstream.errors import CatalogError, DiskFull, ProtocolViolation
from millstream.model.operations import OperationKind, SpilledOp
from millstream.model.positions import format_lsn, parse_lsn

ORDERS = "CREATE TABLE orders (id int PRIMARY KEY, item text, price numeric(10,2), at timestamptz)"


def stream_positions(stage: Stage) -> list[tuple[int, int]]:
    """Return (commit LSN, index) of every record that isn't a copied one, in the log's order."""
    return [
        (operation["commit_lsn"], row["__index"])
        for _, operation, row in stage.log.records()
        if operation["kind"] == OperationKind.TRANSACTION
    ]


def test_every_kind_of_change_replays_to_the_source(stage: Stage) -> None:
    stage.sql(ORDERS)
    stage.catch_up()
    stage.sql(
        "INSERT INTO orders SELECT i, 'item ' || i, i * 1.25, now() FROM generate_series(1, 100) i",
        "UPDATE orders SET item = NULL WHERE id % 3 = 0",
        "UPDATE orders SET id = id + 1000 WHERE id < 10",
        "DELETE FROM orders WHERE id BETWEEN 20 AND 30",
        "BEGIN; UPDATE orders SET price = 1; UPDATE orders SET price = 'NaN' WHERE id = 50; COMMIT",
        "BEGIN; INSERT INTO orders VALUES (5, 'rolled back'); ROLLBACK",
    )
    stage.catch_up()

    assert stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id"])
    positions = stream_positions(stage)
    assert positions == sorted(set(positions))
    for _, group in itertools.groupby(positions, key=lambda p: p[0]):
        assert [index for _, index in group] == list(range(len([p for p in positions if p[0] == _])))

    stage.sql("TRUNCATE orders; INSERT INTO orders VALUES (1, 'after', 0, now())")
    stage.catch_up()
    assert stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id"])


def test_a_running_capture_has_changes_durable_and_confirms_them(stage: Stage) -> None:
    stage.sql(ORDERS)
    running = stage.start()
    wait_until(stage.slot_confirmed, "the slot is made")
    with stage.connect() as connection:
        connection.execute("INSERT INTO orders VALUES (1, 'one', 1, now())")
        row = connection.execute("SELECT pg_current_wal_lsn()::text").fetchone()
    assert row is not None
    wait_until(lambda: stage.log.replay().get("public.orders"), "the row is in the log")
    wait_until(lambda: stage.slot_confirmed() >= parse_lsn(row[0]) - 64, "the slot is confirmed")
    outcome = running.stop()
    assert outcome.reached <= stage.slot_confirmed() + 8192
    assert outcome.slot_holds_bytes is not None


def test_nothing_is_confirmed_that_is_not_durable(stage: Stage) -> None:
    stage.sql(ORDERS)
    stage.catch_up()
    before = stage.slot_confirmed()
    stage.config = replace(stage.config, status_s=0.1)
    stage.log.delay_s = 1.0
    running = stage.start()
    stage.sql("INSERT INTO orders VALUES (1, 'one', 1, now())")
    wait_until(lambda: stage.log.entries or stage.slot_confirmed() > before, "something happens")
    assert stage.log.entries, "the slot moved before the log had the row"
    running.stop()


@pytest.mark.parametrize("is_shipped", [False, True])
def test_a_position_of_keepalives_is_confirmed_once_other_nodes_know_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, is_shipped: bool
) -> None:
    """The log doesn't carry such a position. A new leader would find the slot above everything that it knows."""
    monkeypatch.setattr("millstream.capture.stream.slot_confirmation.STORE_EVERY_S", 0.0)
    stage.sql(ORDERS)
    stage.catch_up()
    stage.config = replace(stage.config, shipped_within_s=3600.0 if is_shipped else 0.0, status_s=0.1)
    seen: list[CaptureProgress] = []
    running = stage.start(on_progress=seen.append)
    stage.sql("INSERT INTO orders VALUES (1, 'one', 1, now())")
    wait_until(lambda: stream_positions(stage), "the log has the row")
    stage.sql("SELECT pg_current_xact_id()")  # WAL without a change of ours
    wait_until(lambda: seen and seen[-1].durable > in_log(stage), "a keepalive moves the position")
    wait_until(lambda: known(stage) > in_log(stage), "it is stored")
    reached = running.stop().reached
    assert known(stage) == reached
    assert (stage.slot_confirmed() <= in_log(stage)) == is_shipped

    stage.config = replace(stage.config, shipped_within_s=0.1)
    again = stage.start()
    wait_until(lambda: stage.slot_confirmed() >= reached, "it is confirmed in the end")
    again.stop()


def in_log(stage: Stage) -> int:
    return max(stage.log.reached().values())


def known(stage: Stage) -> int:
    stream = stage.catalog.stream("shop").id
    return stage.catalog.reached(stage.catalog.sources(stream)[0].id)


def test_a_restart_goes_on_exactly_where_the_log_stands(stage: Stage) -> None:
    stage.sql(ORDERS)
    stage.catch_up()
    # A slot that stands far behind the log, as after a crash before the confirmation.
    with stage.connect() as connection:
        connection.execute(
            "SELECT pg_copy_logical_replication_slot(%s, %s)", [stage.config.slot, "behind_" + stage.config.slot]
        )
    stage.sql(
        "INSERT INTO orders SELECT i, 'x', 1, now() FROM generate_series(1, 50) i", "DELETE FROM orders WHERE id < 5"
    )
    stage.catch_up()
    count = len(stream_positions(stage))
    stage.config = replace(stage.config, slot="behind_" + stage.config.slot)
    stage.sql("INSERT INTO orders VALUES (100, 'new', 1, now())")
    stage.catch_up()

    positions = stream_positions(stage)
    assert len(positions) == count + 1
    assert positions == sorted(set(positions))
    assert stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id"])


def test_a_large_transaction_goes_through_files_and_leaves_none(stage: Stage) -> None:
    stage.sql(ORDERS, "ALTER DATABASE " + stage.config.slot + " SET logical_decoding_work_mem = '64kB'")
    stage.catch_up()
    with stage.connect() as connection, connection.transaction():
        connection.execute("INSERT INTO orders SELECT i, repeat('x', 100), 1, now() FROM generate_series(1, 3000) i")
        connection.execute("SAVEPOINT a")
        connection.execute("INSERT INTO orders SELECT i, 'gone', 1, now() FROM generate_series(5001, 8000) i")
        connection.execute("ROLLBACK TO a")
        connection.execute("UPDATE orders SET item = 'kept' WHERE id % 2 = 0")
        stage.sql("INSERT INTO orders VALUES (-1, 'between', 1, now())")
    stage.catch_up()

    assert any(isinstance(entry, SpilledOp) for entry in stage.log.entries)
    assert stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id"])
    assert list((stage.folder / "spill").iterdir()) == []


def test_an_ordinary_transaction_beyond_the_buffer_goes_through_a_file_too(stage: Stage) -> None:
    stage.sql(ORDERS)
    stage.config = replace(stage.config, buffer_bytes_max=100_000)
    stage.catch_up()
    stage.sql("INSERT INTO orders SELECT i, repeat('x', 100), 1, now() FROM generate_series(1, 3000) i")
    stage.sql("INSERT INTO orders VALUES (-1, 'after', 1, now())")
    stage.catch_up()

    assert any(isinstance(entry, SpilledOp) for entry in stage.log.entries)
    assert stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id"])


def test_unchanged_toast_is_marked_and_kept(stage: Stage) -> None:
    stage.sql(
        "CREATE TABLE docs (id int PRIMARY KEY, body text, n int); ALTER TABLE docs ALTER body SET STORAGE EXTERNAL"
    )
    stage.catch_up()
    stage.sql(
        "INSERT INTO docs VALUES (1, repeat('long ', 2000), 1)", "UPDATE docs SET n = 2", "UPDATE docs SET id = 7"
    )
    stage.catch_up()

    marks = [row["__unchanged"] for _, _, row in stage.log.records()]
    assert marks == [None, ["body"], ["body"]]
    assert stage.log.replay()["public.docs"] == stage.source_rows("docs", ["id"])


def test_messages_of_the_application_are_records_and_heartbeats_are_not(stage: Stage) -> None:
    stage.sql(ORDERS)
    stage.catch_up()
    stage.sql(
        "SELECT pg_logical_emit_message(true, 'app', 'inside')",
        "SELECT pg_logical_emit_message(false, 'app', 'outside')",
        "SELECT pg_logical_emit_message(false, 'millstream/heartbeat', '')",
    )
    stage.catch_up()

    found = [(row["prefix"], row["content"], row["transactional"]) for _, _, row in stage.log.records()]
    assert found == [("app", b"inside", True), ("app", b"outside", False)]


def test_a_busy_neighbour_database_does_not_hold_the_slot(stage: Stage) -> None:
    stage.sql(ORDERS)
    stage.config = replace(stage.config, heartbeat_s=0.2)
    stage.catch_up()
    before = stage.slot_confirmed()
    with stage.connect(dbname="postgres") as neighbour:
        neighbour.execute("CREATE TABLE IF NOT EXISTS noise (x text)")
        neighbour.execute("INSERT INTO noise SELECT repeat('x', 500) FROM generate_series(1, 40000)")
        neighbour.execute("DROP TABLE noise")
    running = stage.start()
    wait_until(lambda: stage.slot_confirmed() > before + 16_000_000, "the slot moves without a change of ours")
    running.stop()
    assert stage.log.entries == []
    stream = stage.catalog.stream("shop").id
    assert stage.catalog.reached(stage.catalog.sources(stream)[0].id) >= stage.slot_confirmed()


def test_the_source_waits_for_a_slow_log_and_does_not_give_up(stage: Stage) -> None:
    stage.sql(ORDERS)
    stage.catch_up()
    stage.sql("INSERT INTO orders SELECT i, repeat('x', 500), 1, now() FROM generate_series(1, 4000) i")
    stage.sql(*(f"INSERT INTO orders VALUES (-{i}, repeat('y', 1000), 1, now())" for i in range(1, 60)))
    stage.sql(f"ALTER DATABASE {stage.config.slot} SET wal_sender_timeout = '1s'")
    stage.log.delay_s = 0.5
    stage.config = replace(stage.config, buffer_bytes_max=4000)
    stage.catch_up()

    assert stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id"])
    positions = stream_positions(stage)
    assert positions == sorted(set(positions))


def test_a_broken_connection_is_taken_up_again_without_loss_or_repetition(stage: Stage) -> None:
    stage.sql(ORDERS)
    stage.log.delay_s = 0.02
    running = stage.start()
    wait_until(stage.slot_confirmed, "the slot is made")
    for number in range(60):
        stage.sql(f"INSERT INTO orders VALUES ({number}, 'x', 1, now())")
        if number % 20 == 10:
            stage.sql(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE database = current_database()"
            )
    wait_until(lambda: len(stage.log.replay().get("public.orders", ())) == 60, "all rows are there")
    assert not running.ended
    running.stop()
    positions = stream_positions(stage)
    assert positions == sorted(set(positions))


def test_a_source_that_breaks_each_session_at_its_start_is_asked_less_and_less_often(stage: Stage) -> None:
    """It connects each time: that was taken for a success, and the next attempt followed within 0.2 seconds."""
    stage.sql(ORDERS)
    stage.catch_up()

    def break_sessions(stop: threading.Event) -> None:
        reader = "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active AND slot_name = %s"
        with stage.connect() as connection:
            while not stop.wait(0.002):
                connection.execute(reader, [stage.config.slot])

    begun = threading.Event()
    running = stage.start(on_progress=lambda _progress: begun.set())
    assert begun.wait(DEADLINE_S), "the first connection is made"
    with capture_logs() as said, until_done(break_sessions):
        wait_until(
            lambda: [line for line in said if line["event"] == "capture begins again" and line["in_s"] > 1.6],
            "it waits for longer than a second",
        )
    stage.sql("INSERT INTO orders VALUES (1, 'x', 1, now())")
    wait_until(lambda: stage.log.replay().get("public.orders"), "the row comes once a session lasts")
    running.stop()


def test_a_full_disk_is_waited_for(stage: Stage) -> None:
    stage.sql(ORDERS)
    stage.catch_up()
    stage.log.fail_with = DiskFull("no space left")
    running = stage.start()
    stage.sql("INSERT INTO orders VALUES (1, 'x', 1, now())")
    wait_until(lambda: stage.log.failures >= 2, "it fails, and is tried again")
    stage.log.fail_with = None
    wait_until(lambda: stage.log.replay().get("public.orders"), "the row comes once there is space")
    assert not running.ended
    running.stop()
    positions = stream_positions(stage)
    assert positions == sorted(set(positions))


def test_what_waited_behind_an_append_that_failed_does_not_enter_without_it(stage: Stage) -> None:
    """Space returns between two groups: if the second alone entered, the log would claim to have the first."""
    stage.sql(ORDERS)
    stage.catch_up()
    running = stage.start()
    wait_until(stage.slot_active, "it streams")
    stage.log.gate.clear()
    for key in range(3):
        stage.sql(f"INSERT INTO orders VALUES ({key}, 'x', 1, now())")
        wait_until(lambda key=key: stage.log.held() > key, "the log has it, behind those before it")
    stage.log.fail_with, stage.log.fails_once = DiskFull("no space left"), True
    stage.log.gate.set()
    wait_until(lambda: stage.log.failures == 1, "one append fails")
    stage.sql("INSERT INTO orders VALUES (3, 'x', 1, now())")
    wait_until(lambda: len(stage.log.replay().get("public.orders", ())) == 4, "all rows are there in the end")
    running.stop()
    positions = stream_positions(stage)
    assert positions == sorted(set(positions))


@pytest.mark.long
@pytest.mark.parametrize("file", ["messages", "bounds"])
def test_a_disk_that_is_full_for_a_large_transaction_is_waited_for(stage: Stage, file: str) -> None:
    stage.sql(ORDERS, "ALTER DATABASE " + stage.config.slot + " SET logical_decoding_work_mem = '64kB'")
    stage.catch_up()
    running = stage.start()
    wait_until(stage.slot_active, "it streams")
    with stage.connect() as connection, connection.transaction(), capture_logs() as said:
        row = connection.execute("SELECT pg_current_xact_id()::text").fetchone()
        assert row is not None
        spilled = stage.folder / "spill" / f"{row[0]}-1.{file}"
        spilled.symlink_to("/dev/full")  # the next session removes it
        connection.execute("INSERT INTO orders SELECT i, repeat('x', 100), 1, now() FROM generate_series(1, 20000) i")
        wait_until(lambda: [line for line in said if line.get("code") == "disk_full"], "it tells of the disk")
        assert str(spilled.with_suffix(".messages")) in next(line["error"] for line in said if "code" in line)
    wait_until(lambda: len(stage.log.replay().get("public.orders", ())) == 20000, "the rows come once there is space")
    running.stop()
    assert list((stage.folder / "spill").iterdir()) == []


def test_a_job_gives_up_on_a_disk_that_stays_full(stage: Stage) -> None:
    stage.sql(ORDERS)
    stage.catch_up()
    stage.config = replace(stage.config, give_up_s=1.0)
    stage.sql("INSERT INTO orders VALUES (1, 'x', 1, now())")
    stage.log.fail_with = DiskFull("no space left")
    with pytest.raises(DiskFull):
        stage.catch_up()
    tried = stage.log.failures
    assert 2 <= tried <= 5, "each try waits twice as long as the one before it"
    stage.log.fail_with = None
    stage.catch_up()
    assert len(stage.log.replay()["public.orders"]) == 1


def test_two_captures_of_one_slot_wait_for_each_other(stage: Stage) -> None:
    stage.sql(ORDERS)
    first = stage.start()
    wait_until(stage.slot_confirmed, "the slot is made")
    second = stage.start()
    stage.sql("INSERT INTO orders VALUES (1, 'x', 1, now())")
    wait_until(lambda: stage.log.replay().get("public.orders"), "the row comes")
    assert not second.ended
    first.stop()
    stage.sql("INSERT INTO orders VALUES (2, 'x', 1, now())")
    wait_until(lambda: len(stage.log.replay()["public.orders"]) == 2, "the second takes over")
    second.stop()
    positions = stream_positions(stage)
    assert positions == sorted(set(positions))


def test_prepared_transactions_arrive_at_their_commit_and_hold_nothing_up(stage: Stage) -> None:
    stage.sql(ORDERS)
    stage.catch_up()
    stage.sql("BEGIN; INSERT INTO orders VALUES (1, 'prepared', 1, now()); PREPARE TRANSACTION 'p1'")
    stage.sql("INSERT INTO orders VALUES (2, 'x', 1, now())")
    stage.catch_up()
    assert list(stage.log.replay()["public.orders"]) == [("2",)]
    stage.sql("COMMIT PREPARED 'p1'")
    stage.catch_up()
    assert stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id"])


@pytest.mark.parametrize("how", ["plain", "prepared"])
def test_a_transaction_whose_commit_comes_right_behind_a_message_is_not_left_out(stage: Stage, how: str) -> None:
    """The server skips transactions that commit before the position that it is asked to start from."""
    role = f"quiet_{stage.config.slot}"
    stage.sql(
        ORDERS,
        f"CREATE ROLE {role} LOGIN REPLICATION",
        f"GRANT SELECT ON orders TO {role}",
        f"CREATE PUBLICATION {stage.config.publication} FOR TABLE orders",
        "DO $$ DECLARE emits regprocedure; BEGIN"
        " FOR emits IN SELECT oid FROM pg_proc WHERE proname = 'pg_logical_emit_message' LOOP"
        " EXECUTE 'REVOKE EXECUTE ON FUNCTION ' || emits || ' FROM PUBLIC'; END LOOP; END $$",
    )
    # Otherwise a heartbeat would come between the two, as it always does on a slow machine.
    stage.config = replace(stage.config, dsn=stage.dsn.replace("postgres@", f"{role}@"))
    stage.catch_up()
    adjacent = 0
    ends = []
    for n in range(1, 41):
        with stage.connect() as writer, stage.connect() as other:
            writer.execute("BEGIN")
            writer.execute(f"INSERT INTO orders VALUES ({n}, 'x', 1, now())")
            if how == "prepared":
                writer.execute(f"PREPARE TRANSACTION 'p{n}'")
            ends += other.execute("SELECT pg_logical_emit_message(false, 'app', 'x')::text").fetchall()
            reached = stage.catch_up().reached
            row = other.execute("SELECT pg_current_wal_insert_lsn() - %s::pg_lsn", [format_lsn(reached)]).fetchone()
            assert row is not None
            adjacent += row[0] == 0
            writer.execute("COMMIT" if how == "plain" else f"COMMIT PREPARED 'p{n}'")
        if adjacent == 3:
            break
    assert adjacent, "no commit came right behind a message"
    stage.catch_up()
    messages = [operation["commit_lsn"] for _, operation, row in stage.log.records() if chr(row["__op"]) == "m"]
    assert messages == [parse_lsn(end) for (end,) in ends], "a message's position isn't where its record ends"
    assert stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id"])
    stage.sql(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_schema_changes_are_followed_by_the_stream_itself(stage: Stage) -> None:
    stage.sql(ORDERS)
    stage.catch_up()
    stage.sql(
        "INSERT INTO orders VALUES (1, 'before', 1, now())",
        "ALTER TABLE orders ADD note text",
        "INSERT INTO orders VALUES (2, 'with', 1, now(), 'a note')",
        "ALTER TABLE orders RENAME TO purchases",
        "UPDATE purchases SET note = 'renamed' WHERE id = 2",
        "ALTER TABLE purchases DROP item",
        "INSERT INTO purchases VALUES (3, 2, now(), 'without')",
    )
    stage.catch_up()

    versions = [(t.schema.name, t.schema.version, len(t.schema.columns)) for t, *_ in stage.log.records()]
    assert [v[0] for v in versions] == ["orders", "orders", "purchases", "purchases"]
    assert [v[2] for v in versions] == [4, 5, 5, 4]
    assert len({t.schema.table_id for t, *_ in stage.log.records()}) == 1
    assert stage.table("public.purchases").state is TableState.STREAMING


def test_a_capture_that_ends_before_its_slot_is_there_speaks_of_none(stage: Stage) -> None:
    """The error named a slot for which the source keeps WAL, and how to drop it, though there was none."""
    stage.sql(ORDERS)
    stop, outcomes = threading.Event(), list[CaptureOutcome]()

    def capture() -> None:
        outcomes.append(run_capture(stage.config, stage.catalog, stage.log, stop=stop))

    with stage.connect() as others, others.transaction():
        others.execute("INSERT INTO orders (id) VALUES (1000)")  # the creation of the slot waits for it
        running = Beside(capture)
        wait_until(lambda: slot_is_asked_for(stage), "it waits for its slot")
        stop.set()
        running.ended()
    (outcome,) = outcomes
    assert (outcome.slot, outcome.slot_holds_bytes) == ("", None)


def slot_is_asked_for(stage: Stage) -> bool:
    with stage.connect() as connection:
        return (
            connection.execute(
                "SELECT FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'CREATE_REPLICATION_SLOT%'"
            ).fetchone()
            is not None
        )


def test_a_capture_that_is_told_to_stop_at_once_stops(stage: Stage) -> None:
    stage.sql(ORDERS)
    stop = threading.Event()
    stop.set()
    outcome = run_capture(stage.config, stage.catalog, stage.log, stop=stop, until_caught_up=True)
    assert not outcome.caught_up


def test_a_capture_stops_when_told_though_the_log_has_no_room(stage: Stage) -> None:
    """The log's queue was full of what other machines lacked, and a capture that waited for room heard no stop."""
    stage.sql("CREATE TABLE orders (id int PRIMARY KEY)")
    running = stage.start()
    wait_until(lambda: stage.state("public.orders") is TableState.STREAMING, "it runs")
    stage.log.room.clear()
    stage.sql("INSERT INTO orders VALUES (1)")
    wait_until(lambda: stage.log.asked, "it waits for room")
    running.ask_to_end()
    running.wait(20)
    stopped = running.ended
    stage.log.room.set()
    assert stopped
    assert not running.stop().caught_up
    stage.catch_up()
    assert [row["id"] for _, _, row in stage.log.records()] == ["1"]


def test_an_end_that_the_catalog_refuses_leaves_no_reader(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader's thread went on over a connection that was closed under it."""
    stage.sql(ORDERS)
    running = stage.start()
    wait_until(lambda: stage.state("public.orders") is TableState.STREAMING, "it runs")

    def refuse(_: SlotConfirmation) -> None:
        raise CatalogError("the catalog is away")

    monkeypatch.setattr(SlotConfirmation, "store_now", refuse)
    with pytest.raises(CatalogError):
        running.stop()
    assert "millstream-receiver" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("damage", ["kind", "cut"])
def test_a_damaged_message_ends_capture_with_its_place_and_moves_no_slot(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    stage.sql(ORDERS)
    stage.catch_up()
    confirmed, entries = stage.slot_confirmed(), len(stage.log.entries)
    read = SocketWire.read

    def damaged(wire: SocketWire, gather_s: float = 0.0) -> Block | None:
        block = read(wire, gather_s)
        at = np.flatnonzero(block.kinds == ord("I")) if block is not None else []
        if block is None or not len(at):
            return block
        run = block.messages
        buffer, ends = run.buffer.copy(), run.ends.copy()
        if damage == "kind":
            buffer[run.starts[at[0]] + 5] = ord("?")  # the start of the new row
        else:
            ends[at[0]] -= 1
        return Block(MessageRun(buffer, run.starts, ends), block.kinds)

    with monkeypatch.context() as patch:
        patch.setattr(SocketWire, "read", damaged)
        stage.sql("INSERT INTO orders VALUES (1, 'a', 1, now())")
        with pytest.raises(ProtocolViolation, match=r"after [0-9A-F]+/[0-9A-F]+") as caught:
            stage.catch_up()
    assert "/" in caught.value.details["lsn"]
    assert (stage.slot_confirmed(), len(stage.log.entries)) == (confirmed, entries)
    stage.catch_up()
    assert stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id"])
