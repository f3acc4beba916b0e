"""Each fault of a source has its own error, and a hint; a fault that can't be repaired loses nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace

import psycopg
import pytest
from tests.capture.beside import wait_until
from tests.capture.capture_stage import MemoryLog, Stage, make_config

from millstream.capture.config import CaptureConfig
from millstream.capture.connection import check_version
from millstream.capture.source_table_checks import check_slot_of_log, check_source, doctor_sql, drop_slot, sql_comment
from millstream.catalog import TableState
from millstream.errors import MillstreamError, Retry, SourceError
from millstream.model.column_rules import Rule, SourceRules
from millstream.model.ids import SourceId
from millstream.model.names import quote_ident
from millstream.model.positions import Lsn, format_lsn
from millstream.testing.errors import code_of, coded
from millstream.testing.postgres import EmbeddedPostgres

ORDERS = "CREATE TABLE orders (id int PRIMARY KEY, item text)"


@pytest.fixture(scope="module")
def poor_server() -> Iterator[EmbeddedPostgres]:
    """A server without logical WAL, with one slot, that asks `app` for a password."""
    settings = {"wal_level": "replica", "max_replication_slots": "1"}
    hba = ("local all app scram-sha-256", "local all nobody reject")
    with EmbeddedPostgres(18, fsync=False, settings=settings, hba=hba) as server:
        with server.connect() as connection:
            connection.execute("CREATE ROLE app LOGIN PASSWORD 'right' REPLICATION")
            connection.execute("CREATE ROLE nobody LOGIN")
            connection.execute("GRANT CREATE ON DATABASE postgres TO app")
            connection.execute(ORDERS)
        yield server


def failing(config: CaptureConfig, stage: Stage) -> MillstreamError:
    with pytest.raises(MillstreamError) as found:
        replace(stage, config=config).catch_up()
    assert found.value.hint
    assert "secret" not in str(found.value)
    return found.value


def test_a_dsn_that_is_none(stage: Stage) -> None:
    for dsn in ("postgresql://u:secret@h:port/x", "nonsense secret", "service=that_is_not_there"):
        assert code_of(failing(replace(stage.config, dsn=dsn), stage)) == "source_dsn_invalid"
    assert "secret" not in repr(replace(stage.config, dsn="postgresql://u:secret@h/x"))


def test_a_wrong_password_and_a_role_that_is_refused(stage: Stage, poor_server: EmbeddedPostgres) -> None:
    for dsn in (
        poor_server.dsn(user="app", password="secret"),
        poor_server.dsn(user="app"),
        poor_server.dsn(user="nobody"),
        poor_server.dsn(user="unheard_of"),
    ):
        error = failing(replace(stage.config, dsn=dsn), stage)
        assert isinstance(error, SourceError)
        assert error.code == "source_authentication_failed"
        assert error.retry is Retry.OPERATOR


def test_a_database_that_is_not_there(stage: Stage, poor_server: EmbeddedPostgres) -> None:
    assert code_of(failing(replace(stage.config, dsn=poor_server.dsn("nowhere")), stage)) == "source_database_missing"


def test_a_server_that_does_not_answer(stage: Stage) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]  # reserved, and without a listener
        error = failing(replace(stage.config, dsn=f"postgresql://u:secret@127.0.0.1:{port}/x"), stage)
    assert isinstance(error, SourceError)
    assert error.code == "source_unreachable"
    assert error.retry is Retry.BACKOFF


def test_wal_that_is_not_logical(stage: Stage, poor_server: EmbeddedPostgres) -> None:
    config = replace(stage.config, dsn=poor_server.dsn())
    assert code_of(failing(config, stage)) == "wal_level_not_logical"
    findings = {finding.code: finding for finding in check_source(config)}
    assert findings["wal_level_not_logical"].blocks == "source"
    assert "ALTER SYSTEM SET wal_level" in doctor_sql(config)


def test_no_free_slot(stage: Stage, poor_server: EmbeddedPostgres) -> None:
    poor_server.restart(settings={"wal_level": "logical"})
    with poor_server.connect() as connection:
        connection.execute("SELECT pg_create_physical_replication_slot('taken')")
    config = replace(stage.config, dsn=poor_server.dsn())
    assert failing(config, stage).code == "no_free_slot"
    assert {f.code for f in check_source(config) if f.blocks == "source"} == {"no_free_slot"}


def test_a_server_that_is_too_old() -> None:
    check_version(140000)
    with pytest.raises(SourceError, check=coded("source_version_unsupported"), match="PostgreSQL 13; 14 is the oldest"):
        check_version(130022)


def test_patterns_that_match_nothing(stage: Stage) -> None:
    stage.sql(ORDERS)
    config = replace(stage.config, tables=("nowhere.*",))
    error = failing(config, stage)
    assert (error.code, error.exit_code) == ("no_tables_match", 2)
    assert [f.code for f in check_source(config) if f.blocks == "source"] == ["no_tables_match"]


@pytest.fixture
def reader(stage: Stage) -> Iterator[str]:
    """Yield the DSN of a role that may only replicate."""
    name = f"reader_{stage.config.slot}"
    stage.sql(ORDERS, "INSERT INTO orders VALUES (1, 'x')", f"CREATE ROLE {name} LOGIN REPLICATION")
    yield stage.dsn.replace("postgres@", f"{name}@")
    stage.sql(f"DROP OWNED BY {name}", f"DROP ROLE {name}")


def test_a_role_that_may_not_replicate(stage: Stage, reader: str) -> None:
    role = f"reader_{stage.config.slot}"
    stage.sql(f"ALTER ROLE {role} NOREPLICATION")
    config = replace(stage.config, dsn=reader)
    assert code_of(failing(config, stage)) == "source_privilege_missing"
    (found,) = [f for f in check_source(config) if "REPLICATION" in f.sql]
    assert (found.code, found.sql) == ("source_privilege_missing", f'ALTER ROLE "{role}" REPLICATION;')
    assert "ALTER" not in found.fix, "the statement is there once"


def test_publications_that_may_not_be_made_come_with_the_sql_that_makes_them(stage: Stage, reader: str) -> None:
    config = replace(stage.config, dsn=reader)
    error = failing(config, stage)
    assert error.code == "publication_missing"
    script = doctor_sql(config)
    assert error.details["sql"] in script
    with stage.connect() as connection:
        connection.execute(script.replace("ALTER SYSTEM", "--").encode())
    outcome = replace(stage, config=config).catch_up()
    assert outcome.caught_up
    assert stage.log.replay()["public.orders"] == {("1",): {"id": "1", "item": "x"}}


def test_a_name_with_line_ends_adds_no_statement_to_the_script(stage: Stage, reader: str) -> None:
    role = f"reader_{stage.config.slot}"
    attack = f"ALTER ROLE {role} SUPERUSER; --"
    names = [f"x{end}{attack}" for end in ("\n", "\r", "\r\n", "\u2028", "\x85")]
    stage.sql(*(f"CREATE TABLE {quote_ident(name)} (id int PRIMARY KEY)" for name in names))
    script = doctor_sql(replace(stage.config, dsn=reader))
    assert script.count("GRANT SELECT") >= len(names)
    comments = [line for line in script.splitlines() if line.startswith("-- ")]
    assert sum(attack in line for line in comments) >= len(names)
    with stage.connect() as connection:
        connection.execute(script.encode())
        found = connection.execute("SELECT rolsuper FROM pg_roles WHERE rolname = %s", [role]).fetchone()
    assert found == (False,)


@pytest.mark.parametrize(
    ("text", "comment"),
    [("one", "-- one\n"), ("a\nb\rc\r\nd", "-- a\n-- b\n-- c\n-- d\n"), ("a\n\n\\! rm", "-- a\n-- \n-- \\! rm\n")],
)
def test_each_line_of_a_comment_is_one(text: str, comment: str) -> None:
    assert sql_comment(text) == comment


def test_no_script_is_made_for_a_source_that_does_not_answer(stage: Stage) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        with pytest.raises(SourceError, check=coded("source_unreachable")):
            doctor_sql(replace(stage.config, dsn=f"postgresql://u:secret@127.0.0.1:{port}/x"))


def test_a_table_that_may_not_be_read_is_quarantined_and_the_others_go_on(stage: Stage, reader: str) -> None:
    stage.sql(
        f"GRANT SELECT ON orders TO reader_{stage.config.slot}",
        "CREATE TABLE hidden (id int PRIMARY KEY); INSERT INTO hidden VALUES (1)",
        f"CREATE PUBLICATION {stage.config.publication} FOR TABLE orders, hidden",
    )
    stage.config = replace(stage.config, dsn=reader)
    outcome = stage.catch_up()

    assert "permission denied" in outcome.quarantined["public.hidden"]
    assert stage.log.replay()["public.orders"] == {("1",): {"id": "1", "item": "x"}}
    with psycopg.connect(stage.dsn, autocommit=True) as connection:
        connection.execute("INSERT INTO hidden VALUES (2)")
        connection.execute("INSERT INTO orders VALUES (2, 'y')")
        connection.execute(f"GRANT SELECT ON hidden TO reader_{stage.config.slot}")
    stage.catch_up()
    raw = [t for t, _, row in stage.log.records() if t.schema.kind.value == "raw"]
    assert len(raw) == 1, "its changes went on, undecoded"
    stage.catalog.set_state(stage.table("public.hidden").id, TableState.COPY_REQUESTED, "retried")
    stage.catch_up()
    assert set(stage.log.replay()["public.hidden"]) == {("1",), ("2",)}


def test_a_table_without_an_identity_does_not_break_the_application(stage: Stage) -> None:
    stage.sql("CREATE TABLE plain (x int)", ORDERS)
    stage.catch_up()
    stage.sql(
        "INSERT INTO plain VALUES (1), (2)", "UPDATE plain SET x = 5 WHERE x = 1", "DELETE FROM plain WHERE x = 2"
    )
    stage.catch_up()

    row = stage.table("public.plain")
    assert row.state is TableState.HISTORY_ONLY
    assert row.reason
    assert [chr(r["__op"]) for t, _, r in stage.log.records() if t.schema.name == "plain"] == ["c", "c"]
    stage.sql("ALTER TABLE plain ADD PRIMARY KEY (x)")
    stage.catch_up()
    stage.sql("UPDATE plain SET x = 6")
    stage.catch_up()
    assert stage.table("public.plain").state is TableState.STREAMING
    assert stage.log.replay()["public.plain"][("6",)] == {"x": "6"}


def test_a_value_that_is_no_text_sets_its_table_aside_alone(postgres_server: EmbeddedPostgres, stage: Stage) -> None:
    name = f"ascii_{stage.config.slot}"
    with postgres_server.connect() as connection:
        connection.execute(f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' TEMPLATE template0 LOCALE 'C'")
    try:
        stage.dsn = postgres_server.dsn(name)
        stage.config = make_config(stage.dsn, stage.folder, name)
        stage.sql(ORDERS, "CREATE TABLE odd (id int PRIMARY KEY, v text)")
        stage.catch_up()
        stage.sql(r"INSERT INTO odd VALUES (1, E'\xff\xfe')", "INSERT INTO orders VALUES (1, 'x')")
        outcome = stage.catch_up()
        assert "UTF-8" in outcome.quarantined["public.odd"]
        assert stage.log.replay()["public.orders"] == {("1",): {"id": "1", "item": "x"}}
    finally:
        postgres_server.drop_database(name)


def test_a_slot_that_is_gone_invalidated_or_recreated_is_never_a_silent_gap(stage: Stage) -> None:
    stage.sql(ORDERS, "INSERT INTO orders VALUES (1, 'x')")
    stage.catch_up()
    slot = stage.config.slot

    def found() -> list[tuple[str, str]]:
        return [(f.code, f.blocks) for f in check_slot_of_log(stage.config, stage.catalog, stage.log.reached)]

    assert found() == []
    stage.sql(f"SELECT pg_drop_replication_slot('{slot}')", "INSERT INTO orders VALUES (2, 'missed')")
    assert found() == [("slot_lost", "source")]
    lost = failing(stage.config, stage)
    assert isinstance(lost, SourceError)
    assert lost.code == "slot_lost"
    assert "slot drop" in lost.hint

    stage.sql(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    assert code_of(failing(stage.config, stage)) == "slot_ahead"
    assert found() == [("slot_ahead", "source")]

    stage.sql("DELETE FROM orders WHERE id = 1")
    assert drop_slot(stage.config, stage.catalog) is not None
    assert found() == []
    stage.catch_up()
    assert stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id"])
    assert stage.catch_up().caught_up


def back_to(stage: Stage, entries: int, reached: Mapping[SourceId, Lsn]) -> None:
    """Put the log back to an earlier state; the catalog and the slot stay."""
    log = MemoryLog()
    log.entries += stage.log.entries[:entries]
    log._reached |= reached
    stage.log.close()
    stage.log = log


def test_a_log_that_was_put_back_under_its_catalog_is_never_a_silent_gap(stage: Stage) -> None:
    """The catalog's position was above the log's end, and capture went on there."""
    stage.sql(
        ORDERS, "INSERT INTO orders VALUES (1, 'x')", "CREATE SCHEMA elsewhere", "CREATE TABLE elsewhere.t (x int)"
    )
    stage.catch_up()
    noise = "INSERT INTO elsewhere.t SELECT generate_series(1, 1000)"
    stage.sql(noise)
    stage.catch_up()
    entries, reached = len(stage.log.entries), stage.log.reached()
    back_to(stage, entries, reached)
    assert stage.catch_up().caught_up, "the log has all that the catalog counts on"
    stage.sql("INSERT INTO orders VALUES (2, 'lost')")
    stage.catch_up()
    stage.sql(noise)
    stage.catch_up()
    for less in ((entries, reached), (0, {})):
        back_to(stage, *less)
        assert code_of(failing(stage.config, stage)) == "slot_ahead"
    assert drop_slot(stage.config, stage.catalog) is not None
    stage.catch_up()
    assert stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id"])
    assert stage.catch_up().caught_up


def test_what_a_log_that_was_put_back_lacks_is_captured_again_if_the_slot_still_has_it(stage: Stage) -> None:
    stage.sql(ORDERS, "INSERT INTO orders VALUES (1, 'x')")
    stage.catch_up()
    slot = f"{stage.config.slot}_kept"
    stage.sql(f"SELECT pg_copy_logical_replication_slot('{stage.config.slot}', '{slot}')")
    stage.sql("INSERT INTO orders VALUES (2, 'x')")
    stage.catch_up()
    entries, reached = len(stage.log.entries), stage.log.reached()
    stage.sql("CREATE TABLE more (id int PRIMARY KEY)", "INSERT INTO more VALUES (7)")
    stage.catch_up()
    stage.sql("INSERT INTO orders VALUES (3, 'lost')")
    stage.catch_up()
    back_to(stage, entries, reached)
    stage.config = replace(stage.config, slot=slot)
    for _ in range(2):
        stage.catch_up()
        for table in ("orders", "more"):
            assert stage.log.replay()[f"public.{table}"] == stage.source_rows(table, ["id"])
    assert len(stage.log.entries) < 20, "nothing is copied twice"


def test_a_source_that_was_set_back_is_refused_when_its_wal_is_long_again(stage: Stage) -> None:
    stage.sql(ORDERS, "INSERT INTO orders VALUES (1, 'x')")
    stage.catch_up()
    source = stage.catalog.current_source(stage.catalog.stream("shop").id)
    assert source is not None
    grow = f"SELECT pg_logical_emit_message(false, 'filler', repeat('x', {3 << 20}))"
    # The log as it is when an older copy of the source's disk has been put back.
    stage.catalog.move_reached(source.id, Lsn(stage.slot_confirmed() + (2 << 20)))
    assert "set back" in failing(stage.config, stage).message
    stage.sql("UPDATE orders SET item = 'lost'", grow)
    again = failing(stage.config, stage)
    assert (again.code, "set back" in again.message) == ("source_replaced", True)
    assert drop_slot(stage.config, stage.catalog) is not None
    stage.catch_up()
    assert stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id"])
    stage.sql("INSERT INTO orders VALUES (2, 'y')")
    assert stage.catch_up().caught_up
    assert stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id"])


def test_the_server_that_the_log_followed_is_known_by_its_slot(stage: Stage) -> None:
    stage.sql(ORDERS)
    stage.catch_up()
    source = stage.catalog.current_source(stage.catalog.stream("shop").id)
    assert source is not None
    reached = Lsn(stage.slot_confirmed() + (2 << 20))
    stage.catalog.move_reached(source.id, reached)
    assert "set back" in failing(stage.config, stage).message
    # The DSN leads back to that server: its WAL is longer, and its slot is where capture has confirmed it.
    stage.sql(
        f"SELECT pg_logical_emit_message(false, 'filler', repeat('x', {1 << 16})) FROM generate_series(1, 48)",
        "INSERT INTO orders VALUES (1, 'x')",  # its commit flushes the WAL: a slot isn't advanced past that
        f"SELECT pg_replication_slot_advance('{stage.config.slot}', '{format_lsn(reached)}')",
    )
    assert stage.catch_up().caught_up
    assert stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id"])


def test_a_start_after_slot_drop_that_was_killed_behind_the_new_slot_is_gone_on_with(stage: Stage) -> None:
    stage.sql(ORDERS, "INSERT INTO orders VALUES (1, 'x')")
    stage.catch_up()
    assert drop_slot(stage.config, stage.catalog) is not None
    stage.sql(
        "UPDATE orders SET item = 'between the slots'",
        f"SELECT pg_create_logical_replication_slot('{stage.config.slot}', 'pgoutput')",
        "INSERT INTO orders VALUES (2, 'y')",
    )
    for _ in range(2):
        assert stage.catch_up().caught_up
        assert stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id"])
    assert not stage.catalog.fact(f"capture/{stage.catalog.stream('shop').id}", "slot_dropped", default=False)


def test_a_slot_that_is_still_there_after_slot_drop_is_gone_on_with(stage: Stage) -> None:
    """The drop went to another server of the name: the slot lags behind the log, as it does after a SIGKILL."""
    stage.sql(ORDERS, "INSERT INTO orders VALUES (1, 'x')")
    stage.catch_up()
    slot, kept = stage.config.slot, f"{stage.config.slot}_kept"
    stage.sql(f"SELECT pg_copy_logical_replication_slot('{slot}', '{kept}')")
    stage.sql("INSERT INTO orders VALUES (2, 'y')")
    stage.catch_up()
    stage.sql(f"SELECT pg_drop_replication_slot('{slot}')")
    stage.sql(
        f"SELECT pg_copy_logical_replication_slot('{kept}', '{slot}')", f"SELECT pg_drop_replication_slot('{kept}')"
    )
    stream = stage.catalog.stream("shop").id
    stage.catalog.put_fact(f"capture/{stream}", "slot_dropped", value=True)
    stage.sql("INSERT INTO orders VALUES (3, 'z')")
    assert stage.catch_up().caught_up
    assert [row["id"] for _, _, row in stage.log.records()] == ["1", "2", "3"]
    assert not stage.catalog.fact(f"capture/{stream}", "slot_dropped", default=False)


def test_a_slot_of_something_else_is_left_alone(stage: Stage) -> None:
    stage.sql(ORDERS, f"SELECT pg_create_physical_replication_slot('{stage.config.slot}')")
    assert isinstance(failing(stage.config, stage), SourceError)
    stage.sql(f"SELECT pg_drop_replication_slot('{stage.config.slot}')")


def test_another_system_or_database_under_the_same_dsn(stage: Stage, poor_server: EmbeddedPostgres) -> None:
    stage.sql(ORDERS)
    stage.catch_up()
    assert code_of(failing(replace(stage.config, dsn=poor_server.dsn()), stage)) == "source_replaced"
    other = stage.dsn.replace(f"/{stage.config.slot}?", "/postgres?")
    assert code_of(failing(replace(stage.config, dsn=other), stage)) == "source_replaced"


def test_a_slot_in_use_cannot_be_dropped(stage: Stage) -> None:
    stage.sql(ORDERS)
    running = stage.start()
    wait_until(lambda: stage.state("public.orders") is TableState.STREAMING, "the slot is in use")
    with pytest.raises(SourceError, check=coded("slot_active")):
        drop_slot(stage.config)
    running.stop()
    assert drop_slot(stage.config) is not None
    assert drop_slot(stage.config) is None


def test_a_slot_that_is_dropped_before_the_first_run_is_no_news(stage: Stage) -> None:
    stage.sql(ORDERS)

    def is_noted() -> bool:
        stream = stage.catalog.stream(stage.config.stream).id
        return bool(stage.catalog.fact(f"capture/{stream}", "slot_dropped", default=False))

    stage.catalog.resolve_stream(stage.config.stream)
    assert drop_slot(stage.config, stage.catalog) is None
    assert not is_noted()
    stage.catch_up()
    assert drop_slot(stage.config, stage.catalog) is not None
    assert is_noted()


def test_a_doctor_that_finds_nothing_wrong_says_only_what_is_worth_knowing(stage: Stage) -> None:
    stage.sql("CREATE TABLE t (id int PRIMARY KEY, span int4range, anything numeric)")
    findings = check_source(stage.config)
    assert {f.blocks for f in findings} <= {"nothing"}
    assert {"public.t.span", "public.t.anything"} <= {f.message.split(" ")[0] for f in findings}
    advice = {f.message.split(" ")[0]: f.fix for f in findings if f.code == "column_is_text"}
    assert "can give it a precision" in advice["public.t.anything"]
    assert "precision" not in advice["public.t.span"], "only numeric can have one"
    typed = replace(stage.config, lake_types={"public.t.anything": "decimal(38,9)"})
    assert [f.message for f in check_source(typed) if f.code == "column_is_text"] == [
        "public.t.span (int4range) will be text in the lake"
    ], "what was advised is done"
    with stage.connect() as connection:
        publishes_generated = connection.info.server_version >= 180000
    kind = "VIRTUAL" if publishes_generated else "STORED"
    stage.sql(
        f"CREATE TABLE made (id int PRIMARY KEY, a int, b int GENERATED ALWAYS AS (a * 2) {kind},"
        f" c int GENERATED ALWAYS AS (a + 1) {kind})"
    )
    (told,) = (f for f in check_source(stage.config) if f.code == "column_generated")
    assert (told.blocks, told.table) == ("nothing", "public.made")
    assert told.message == "public.made: b, c are generated and won't be captured"
    if publishes_generated:
        stage.sql(
            "ALTER TABLE made ADD d int GENERATED ALWAYS AS (a + 2) STORED",
            f"CREATE PUBLICATION {stage.config.publication} FOR TABLE made, t",
        )
        (told,) = (f for f in check_source(stage.config) if f.code == "column_generated")
        assert told.message == "public.made: b, c, d are generated and won't be captured"
        assert told.fix == (
            "Set publish_generated_columns of the publication to stored, or add d to its column list; a query can compute b, c."
        )
    stage.sql("CREATE TABLE plain (x int)")
    found = next(f for f in check_source(stage.config) if f.code == "replica_identity_unusable")
    assert (found.blocks, found.table) == ("current", "public.plain")
    assert "REPLICA IDENTITY FULL" in found.sql


def test_a_configured_type_that_no_column_can_have_is_found_before_the_lake_meets_it(stage: Stage) -> None:
    """A misspelt name changed nothing, and a clash quarantined the table during the first run."""
    stage.sql('CREATE TABLE t (id int PRIMARY KEY, total numeric, "Note" text, secret inet)')
    types = {"public.t.total": "text", "public.t.totl": "decimal(38,9)", "public.t.Note": "decimal(38,9)"}
    rules = SourceRules({("public", "t"): {"secret": Rule.EXCLUDE}})
    findings = check_source(replace(stage.config, lake_types=types, rules=rules))
    found = [(f.code, f.blocks, f.message) for f in findings if f.code in {"type_unused", "config", "column_is_text"}]
    assert found == [
        ("config", "table", "public.t: column Note can't be decimal(38,9) in the lake: it is text"),
        ("type_unused", "nothing", "[streams.S.types] has public.t.totl, but no captured table has this column"),
    ]
    assert all(f.fix for f in findings)


def test_a_pattern_that_matches_no_table_is_a_note(stage: Stage) -> None:
    """A misspelt name left its table out, and a misspelt exclusion captured its table: neither was reported."""
    stage.sql("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE audit (id int PRIMARY KEY)")
    patterns = ("public.t", "public.itmes", "public.*", "!public.adit", "!public.audit")
    findings = check_source(replace(stage.config, tables=patterns))
    found = [(f.message, f.blocks) for f in findings if f.code == "pattern_unused"]
    assert found == [
        ("public.itmes in `tables` matches no table", "nothing"),
        ("!public.adit in `tables` matches no table", "nothing"),
    ]
