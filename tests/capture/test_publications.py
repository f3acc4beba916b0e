"""Changes that a publication doesn't send are never missed silently, whoever made the publication."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import psycopg
import pytest
from tests.capture.beside import until_done, wait_until
from tests.capture.capture_stage import Stage

from millstream.capture.leaves.sent_by_leaves import MARK
from millstream.capture.source_table_checks import check_source, doctor_sql, drop_slot
from millstream.capture.streamed_publications import publications_known
from millstream.catalog import TableState
from millstream.errors import SourceError
from millstream.testing.errors import coded

TABLES = (
    "CREATE TABLE orders (id int PRIMARY KEY, item text); INSERT INTO orders VALUES (1, 'x')",
    "CREATE TABLE audit_log (at int, what text); INSERT INTO audit_log VALUES (1, 'begun')",
    "CREATE TABLE parts (at int, what text) PARTITION BY RANGE (at)",
    "CREATE TABLE parts_low PARTITION OF parts FOR VALUES FROM (0) TO (10); INSERT INTO parts VALUES (1, 'p')",
)


@pytest.fixture
def stranger(stage: Stage) -> Iterator[None]:
    """Yield while `stage` runs under a role that owns nothing and may read everything."""
    role = f"stranger_{stage.config.slot}"
    stage.sql(*TABLES, f"CREATE ROLE {role} LOGIN REPLICATION; GRANT pg_read_all_data TO {role}")
    stage.config = replace(stage.config, dsn=stage.dsn.replace("postgres@", f"{role}@"))
    yield
    for running in stage.running:
        running.end()
    stage.sql(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def bag(stage: Stage, name: str) -> list[tuple[str | None, ...]]:
    rows: list[dict[str, str | None]] = stage.log.replay()[f"public.{name}"][None]  # type: ignore[assignment]
    return sorted(tuple(row.values()) for row in rows)


@pytest.mark.usefixtures("stranger")
def test_after_the_doctors_script_nothing_blocks_and_every_change_is_captured(stage: Stage) -> None:
    (missing,) = [f.sql for f in check_source(stage.config) if f.code == "publication_missing" and f.blocks == "source"]
    before, _, _ = missing.partition("CREATE PUBLICATION")
    assert 'ALTER TABLE "public"."audit_log" REPLICA IDENTITY FULL;' in before, "else PostgreSQL refuses its updates"
    with stage.connect() as connection, connection.transaction():
        connection.execute(doctor_sql(stage.config).encode())

    assert [f for f in check_source(stage.config) if f.blocks != "nothing"] == []
    assert all(line.startswith("--") for line in doctor_sql(stage.config).splitlines())
    stage.catch_up()
    stage.sql("UPDATE audit_log SET what = 'changed'", "UPDATE parts SET what = 'q'", "DELETE FROM orders")
    assert not stage.catch_up().quarantined
    assert bag(stage, "audit_log") == [("1", "changed")]
    assert bag(stage, "parts") == [("1", "q")]
    assert stage.log.replay()["public.orders"] == {}


@pytest.mark.usefixtures("stranger")
def test_at_the_first_start_tables_of_other_owners_alone_are_quarantined(stage: Stage) -> None:
    """The publication couldn't be created with them, and the whole start ended until it was made by hand."""
    role = f"stranger_{stage.config.slot}"
    with stage.connect() as connection:
        connection.execute(f"GRANT CREATE ON DATABASE {connection.info.dbname} TO {role}".encode())
    assert [(f.blocks, f.table) for f in check_source(stage.config) if f.code == "publication_missing"] == [
        ("source", "")
    ]
    stage.sql(f"ALTER TABLE orders OWNER TO {role}", "CREATE TABLE theirs (id int PRIMARY KEY)")
    others = {"public.audit_log", "public.parts", "public.theirs"}
    found = [f for f in check_source(stage.config) if f.code == "publication_missing"]
    assert {(f.blocks, f.table) for f in found} == {("table", name) for name in others}
    assert doctor_sql(stage.config).count("CREATE PUBLICATION") == 1

    quarantined = stage.catch_up().quarantined
    assert quarantined.keys() == others
    publication = stage.config.publication
    scripts = {
        "theirs": f'ALTER PUBLICATION "{publication}" ADD TABLE ONLY "public"."theirs";',
        "audit_log": f'ALTER PUBLICATION "{publication}_inserts" ADD TABLE ONLY "public"."audit_log";',
    }
    assert all(script in quarantined[f"public.{name}"] for name, script in scripts.items())
    assert stage.log.replay() == {"public.orders": stage.source_rows("orders", ["id"])}
    stage.sql("INSERT INTO theirs VALUES (1)", *scripts.values(), "INSERT INTO audit_log VALUES (2, 'later')")
    assert stage.catch_up().quarantined.keys() == {"public.parts"}
    assert stage.log.replay()["public.theirs"] == stage.source_rows("theirs", ["id"])
    assert bag(stage, "audit_log") == [("2", "later")]


@pytest.mark.usefixtures("stranger")
def test_settings_of_the_server_come_last_and_as_comments(stage: Stage) -> None:
    lines = doctor_sql(stage.config).splitlines()
    settings = [number for number, line in enumerate(lines) if "ALTER SYSTEM" in line]
    assert settings == [len(lines) - 1]
    assert lines[-1].startswith("-- ALTER SYSTEM")


@pytest.mark.usefixtures("stranger")
def test_a_table_with_an_identity_among_inserts_only_is_quarantined_with_what_to_run(stage: Stage) -> None:
    publication = stage.config.publication
    stage.sql(
        "DROP TABLE parts",
        "ALTER TABLE audit_log REPLICA IDENTITY FULL",
        f"CREATE PUBLICATION {publication} FOR TABLE orders",
        f"CREATE PUBLICATION {publication}_inserts FOR TABLE audit_log WITH (publish = 'insert, truncate')",
    )
    found = {f.table: f for f in check_source(stage.config) if f.code == "publication_missing"}
    assert {name: f.blocks for name, f in found.items()} == {"public.audit_log": "table"}

    reason = stage.catch_up().quarantined["public.audit_log"]
    assert "permission denied" in reason or "must be owner" in reason
    script = f'ALTER PUBLICATION "{publication}" ADD TABLE ONLY "public"."audit_log";'
    assert script in reason
    assert found["public.audit_log"].sql == script
    stage.sql("UPDATE audit_log SET what = 'changed'", script)
    assert not stage.catch_up().quarantined
    stage.sql("UPDATE audit_log SET what = 'again'")
    stage.catch_up()
    assert stage.state("public.audit_log") is TableState.STREAMING
    assert bag(stage, "audit_log") == [("1", "again")]


@pytest.mark.sampled
@pytest.mark.usefixtures("stranger")
@pytest.mark.parametrize("targets", ["FOR ALL TABLES", "FOR TABLE orders"])
def test_a_publication_of_inserts_alone_captures_nothing_by_halves(stage: Stage, targets: str) -> None:
    publication = stage.config.publication
    stage.sql("DROP TABLE parts, audit_log", f"CREATE PUBLICATION {publication} {targets} WITH (publish = 'insert')")
    running = stage.start()
    wait_until(lambda: stage.state("public.orders") is TableState.QUARANTINED, "it is quarantined")
    script = f"ALTER PUBLICATION \"{publication}\" SET (publish = 'insert, update, delete, truncate');"
    row = stage.table("public.orders")
    assert row.reason == f"the publication {publication} doesn't publish updates and deletes; run: {script}"
    assert [(f.blocks, f.sql) for f in check_source(stage.config) if f.code == "publication_missing"] == [
        ("table", script)
    ]
    stage.sql("UPDATE orders SET item = 'unseen'", script)
    wait_until(lambda: stage.state("public.orders") is TableState.STREAMING, "it is copied")
    running.stop()
    assert stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id"])


def test_a_publication_that_loses_its_updates_and_gets_them_back(stage: Stage) -> None:
    stage.sql(TABLES[0])
    stage.catch_up()
    publication = stage.config.publication
    stage.sql(
        f"ALTER PUBLICATION {publication} SET (publish = 'insert, truncate')", "UPDATE orders SET item = 'unseen'"
    )
    assert "doesn't publish updates and deletes" in stage.catch_up().quarantined["public.orders"]
    stage.sql(f"ALTER PUBLICATION {publication} SET (publish = 'insert, update, delete, truncate')")
    stage.catch_up()
    assert stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id"])


@pytest.mark.usefixtures("stranger")
def test_while_the_publication_is_missing_its_tables_are_quarantined_and_not_copied_again_and_again(
    stage: Stage,
) -> None:
    publication = stage.config.publication
    script = f"CREATE PUBLICATION {publication} FOR TABLE orders"
    stage.sql("DROP TABLE parts, audit_log", script)
    running = stage.start()
    wait_until(lambda: stage.state("public.orders") is TableState.STREAMING, "it is copied")
    before = copied(stage)
    stage.sql(f"DROP PUBLICATION {publication}", "UPDATE orders SET item = 'unseen'")
    with stage.connect() as connection:
        goes_on = connection.info.server_version >= 180000
    if goes_on:  # otherwise the server itself ends the stream
        wait_until(lambda: stage.state("public.orders") is TableState.QUARANTINED, "it is quarantined")
    time.sleep(4 * stage.config.look_s)
    assert copied(stage) == before
    if not goes_on:
        return
    row = stage.table("public.orders")
    assert row.state is TableState.QUARANTINED
    assert row.reason.startswith(f"the publication {publication} doesn't exist")
    assert "CREATE PUBLICATION" in row.details["hint"]
    running.end()

    stage.sql(script)
    stage.catch_up()
    assert stage.state("public.orders") is TableState.STREAMING
    assert stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id"])


REJOINS = {
    "the table": ("TABLE orders", "ALTER PUBLICATION {} DROP TABLE orders", "ALTER PUBLICATION {} ADD TABLE orders"),
    "its root": ("TABLE orders", "ALTER PUBLICATION {} DROP TABLE orders", "ALTER PUBLICATION {} ADD TABLE orders"),
    "its schema": (
        "TABLES IN SCHEMA public",
        "ALTER PUBLICATION {} DROP TABLES IN SCHEMA public",
        "ALTER PUBLICATION {} ADD TABLES IN SCHEMA public",
    ),
}


@pytest.mark.sampled
@pytest.mark.since_postgres(15)
@pytest.mark.parametrize("what", REJOINS)
def test_a_table_that_leaves_and_rejoins_its_publication_while_capture_is_stopped(stage: Stage, what: str) -> None:
    """Nothing at the start showed that it had been out: its rows of that time never came."""
    target, leave, rejoin = (text.format(stage.config.publication) for text in REJOINS[what])
    parts = ("PARTITION BY RANGE (id)", "") if what == "its root" else ("", "")
    stage.sql(
        f"CREATE TABLE orders (id int PRIMARY KEY, item text) {parts[0]}",
        "CREATE TABLE part PARTITION OF orders DEFAULT" if parts[0] else "SELECT 1",
        "INSERT INTO orders VALUES (1, 'a')",
        f"CREATE PUBLICATION {stage.config.publication} FOR {target}",
    )
    if what == "its root":
        stage.config = replace(stage.config, tables=("public.part",))
    name = "part" if what == "its root" else "orders"
    stage.catch_up()
    assert copied(stage) == 1
    stage.sql(leave, "INSERT INTO orders VALUES (2, 'unseen')", rejoin, "INSERT INTO orders VALUES (3, 'c')")
    stage.catch_up()
    assert stage.log.replay()[f"public.{name}"] == stage.source_rows(name, ["id"])
    assert copied(stage) == 4
    stage.catch_up()
    assert copied(stage) == 4


def test_a_table_that_rejoins_its_publication_between_two_looks_is_copied_again(stage: Stage) -> None:
    stage.sql(TABLES[0])
    publication = stage.config.publication
    running = stage.start()
    wait_until(lambda: stage.state("public.orders") is TableState.STREAMING, "it is copied")
    with stage.connect() as connection:
        connection.execute(f"ALTER PUBLICATION {publication} DROP TABLE orders")
        connection.execute("INSERT INTO orders VALUES (7, 'unseen')")
        connection.execute(f"ALTER PUBLICATION {publication} ADD TABLE orders")
    wait_until(lambda: stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id"]), "it is copied again")
    running.stop()


def copied(stage: Stage) -> int:
    return sum(chr(row["__op"]) == "r" for _, _, row in stage.log.records())


def test_missing_truncates_are_told_and_mended(stage: Stage) -> None:
    publication = stage.config.publication
    stage.sql(TABLES[0], f"CREATE PUBLICATION {publication} FOR TABLE orders WITH (publish = 'insert, update, delete')")
    running = stage.start()
    wait_until(lambda: stage.state("public.orders") is TableState.STREAMING, "it is copied")
    wait_until(lambda: "doesn't publish truncates" in stage.table("public.orders").reason, "it is told")
    assert [f.blocks for f in check_source(stage.config) if f.code == "publication_missing"] == ["nothing"]
    stage.sql("TRUNCATE orders", f"ALTER PUBLICATION {publication} SET (publish = 'insert, update, delete, truncate')")
    wait_until(
        lambda: stage.state("public.orders") is TableState.STREAMING and not stage.table("public.orders").reason,
        "mended",
    )
    running.stop()
    stage.catch_up()
    assert stage.log.replay()["public.orders"] == {}


@pytest.mark.sampled
@pytest.mark.parametrize("targets", ["FOR TABLE events", "FOR ALL TABLES"])
def test_while_a_publication_of_others_sends_partitions_as_tables_their_table_is_quarantined(
    stage: Stage, targets: str
) -> None:
    """A partitioned table counted as sent, and every change was lost; or its partitions were captured as tables."""
    publication = stage.config.publication
    stage.sql(
        "CREATE TABLE events (id int PRIMARY KEY, what text) PARTITION BY RANGE (id)",
        "CREATE TABLE events_low PARTITION OF events FOR VALUES FROM (0) TO (10)",
        "INSERT INTO events VALUES (1, 'copied')",
        f"CREATE PUBLICATION {publication} {targets}",
    )
    script = f'ALTER PUBLICATION "{publication}" SET (publish_via_partition_root = true);'
    assert script in stage.catch_up().quarantined["public.events"]
    assert [(f.blocks, f.sql) for f in check_source(stage.config) if f.code == "publication_missing"] == [
        ("table", script)
    ]
    stage.sql("UPDATE events SET what = 'changed'")
    stage.sql("CREATE TABLE events_high PARTITION OF events FOR VALUES FROM (10) TO (20)")
    stage.sql("INSERT INTO events VALUES (11, 'new')")
    stage.catch_up()
    assert {table.schema.name for table, _, _ in stage.log.records()} <= {"events"}

    stage.sql(script)
    assert not stage.catch_up().quarantined
    stage.sql("INSERT INTO events VALUES (2, 'later')")
    stage.catch_up()
    assert stage.log.replay() == {"public.events": stage.source_rows("events", ["id"])}
    assert "publication_missing" not in {f.code for f in check_source(stage.config)}


def test_our_publication_may_send_partitions_either_way(stage: Stage) -> None:
    publication = stage.config.publication
    stage.sql(
        "CREATE TABLE events (id int PRIMARY KEY, what text) PARTITION BY RANGE (id)",
        "CREATE TABLE events_low PARTITION OF events FOR VALUES FROM (0) TO (10)",
        "INSERT INTO events VALUES (1, 'copied')",
    )
    running = stage.start()
    wait_until(lambda: stage.state("public.events") is TableState.STREAMING, "it is copied")
    for number, way in enumerate(["true", "false", "true"]):
        stage.sql(
            "UPDATE events SET what = what || '!'",
            f"ALTER PUBLICATION {publication} SET (publish_via_partition_root = {way})",
            f"INSERT INTO events VALUES ({2 + number}, 'new')",
            "UPDATE events SET what = what || '?'",
        )
    running.stop()
    assert not stage.catch_up().quarantined
    assert stage.log.replay() == {"public.events": stage.source_rows("events", ["id"])}
    assert "publication_missing" not in {f.code for f in check_source(stage.config)}


@pytest.mark.sampled
@pytest.mark.parametrize("patterns", [("public.parent",), ("public.*",)])
def test_tables_that_inherit_from_a_captured_one_are_published_only_if_they_are_captured(
    stage: Stage, patterns: tuple[str, ...]
) -> None:
    """They joined the publication along with their parent, and the application's UPDATE failed for want of an identity."""
    publication = stage.config.publication
    stage.config = replace(stage.config, tables=patterns)
    tables = (
        "CREATE TABLE {0} (id int PRIMARY KEY, t text); CREATE TABLE {0}_child () INHERITS ({0})",
        "CREATE TABLE {0}_grandchild () INHERITS ({0}_child); INSERT INTO {0}_grandchild VALUES (1, 'x')",
    )
    stage.sql(*(command.format("parent") for command in tables))
    running = stage.start()
    wait_until(lambda: stage.state("public.parent") is TableState.STREAMING, "it is copied")
    if patterns == ("public.*",):
        stage.sql("BEGIN; " + "; ".join(command.format("later") for command in tables) + "; COMMIT")
        wait_until(lambda: stage.state("public.later") is TableState.STREAMING, "it is copied")
        stage.sql("UPDATE later SET t = 'y'")
    stage.sql("UPDATE parent SET t = 'y'")
    stage.sql(f"ALTER PUBLICATION {publication} ADD TABLE parent_grandchild", "INSERT INTO parent VALUES (2, 'x')")

    def updated() -> bool:
        with stage.connect() as connection, suppress(psycopg.Error):
            connection.execute("UPDATE parent SET t = 'z'")
            return True
        return False

    wait_until(updated, "a look drops the table that inherits")
    running.stop()
    stage.catch_up()
    assert stage.log.replay()["public.parent"] == {("2",): {"id": "2", "t": "z"}}


@pytest.mark.sampled
@pytest.mark.parametrize("alone", [False, True])
def test_a_table_without_identity_that_comes_while_capture_runs(stage: Stage, alone: bool) -> None:
    publication = stage.config.publication
    stage.sql(TABLES[0], *([f"CREATE PUBLICATION {publication} FOR TABLE orders"] if alone else []))
    running = stage.start()
    wait_until(lambda: stage.state("public.orders") is TableState.STREAMING, "it runs")
    stage.sql("CREATE TABLE plain (x int)")
    wait_until(lambda: stage.state("public.plain") is TableState.HISTORY_ONLY, "it is seen")
    wait_until(lambda: streams(stage, f"{publication}_inserts"), "it is streamed")
    stage.sql("INSERT INTO plain VALUES (1)", "INSERT INTO orders VALUES (2, 'y')")
    wait_until(lambda: len(stage.log.replay()["public.orders"]) == 2, "what came behind it is captured")
    running.stop()
    assert bag(stage, "plain") == [("1",)]


def test_streams_that_share_a_publication_may_make_it_at_once(stage: Stage) -> None:
    """The slower one of two first starts ended with PostgreSQL's `duplicate key value`."""
    name = stage.config.publication
    stage.sql("CREATE TABLE orders (id int PRIMARY KEY); CREATE TABLE theirs (id int PRIMARY KEY)")
    stage.config = replace(stage.config, tables=("public.orders",))
    waits = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'CREATE PUBLICATION%'"
    with stage.connect() as watching, stage.connect() as other:
        with other.transaction():
            for publication, tables in ((name, "FOR TABLE theirs"), (f"{name}_inserts", "")):
                other.execute(
                    f"CREATE PUBLICATION {publication} {tables}; COMMENT ON PUBLICATION {publication} IS '{MARK}'".encode()
                )
            running = stage.start()
            wait_until(lambda: running.ended or watching.execute(waits).fetchone() is not None, "it is slower")
        stage.sql("INSERT INTO orders VALUES (1)", "INSERT INTO theirs VALUES (1)")
        wait_until(lambda: running.ended or ("1",) in stage.log.replay().get("public.orders", ()), "it goes on")
        running.stop()
        members = watching.execute("SELECT tablename FROM pg_publication_tables WHERE pubname = %s", [name]).fetchall()
    assert sorted(members) == [("orders",), ("theirs",)]
    assert "public.theirs" not in stage.log.replay()


def test_a_publication_is_streamed_though_the_source_writes_on(stage: Stage) -> None:
    """It waited for a moment in which nothing was on its way into the log, and on a busy source there is none."""
    stage.sql(TABLES[0], f"CREATE PUBLICATION {stage.config.publication} FOR TABLE orders")
    stage.log.delay_s = 0.05
    running = stage.start()
    wait_until(lambda: stage.state("public.orders") is TableState.STREAMING, "it runs")

    def write(stop: threading.Event) -> None:
        with stage.connect() as connection:
            for number in itertools.count(1000):
                if stop.wait(0.01):
                    return
                connection.execute("INSERT INTO orders VALUES (%s, 'x')", [number])

    with until_done(write):
        stage.sql("CREATE TABLE plain (x int)")
        wait_until(lambda: streams(stage, f"{stage.config.publication}_inserts"), "it is streamed", 20)
    running.stop()


def test_a_publication_is_streamed_once_no_change_from_before_it_can_come(stage: Stage) -> None:
    """PostgreSQL 14 to 17 end a stream at a change that is older than one of its publications."""
    publication = stage.config.publication
    stage.sql(TABLES[0], f"CREATE PUBLICATION {publication} FOR TABLE orders")
    running = stage.start()
    wait_until(lambda: stage.state("public.orders") is TableState.STREAMING, "it runs")
    with stage.connect(autocommit=False) as connection:
        connection.execute("INSERT INTO orders VALUES (7, 'older than the publication')")
        stage.sql("CREATE TABLE plain (x int)")
        wait_until(lambda: stage.state("public.plain") is TableState.QUARANTINED, "its rows aren't sent")
        assert "is streamed once" in stage.table("public.plain").reason
        stage.sql("INSERT INTO orders VALUES (8, 'y')", "INSERT INTO plain VALUES (0)")
        wait_until(lambda: ("8",) in stage.log.replay()["public.orders"], "the stream goes on")
        assert not streams(stage, f"{publication}_inserts")
        connection.commit()
    wait_until(lambda: streams(stage, f"{publication}_inserts"), "it is streamed")
    assert stage.state("public.plain") is TableState.HISTORY_ONLY
    stage.sql("INSERT INTO plain VALUES (1)")
    running.stop()
    assert stage.catch_up().caught_up
    assert bag(stage, "plain") == [("1",)]
    assert stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id"])


def test_a_publication_that_a_start_creates_is_not_asked_about_the_backlog(stage: Stage) -> None:
    stage.sql(TABLES[0], f"CREATE PUBLICATION {stage.config.publication} FOR TABLE orders")
    stage.catch_up()
    stage.sql("CREATE TABLE plain (x int)", "INSERT INTO orders VALUES (2, 'backlog')")
    assert not stage.catch_up().quarantined
    assert stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id"])
    stage.sql("INSERT INTO plain VALUES (1)")
    stage.catch_up()
    assert bag(stage, "plain") == [("1",)]


def test_a_publication_that_was_renamed_and_is_back_is_passed_or_named_with_what_to_do(stage: Stage) -> None:
    """PostgreSQL 18 passes over the changes between; an older one never gets past them."""
    publication = stage.config.publication
    stage.sql(TABLES[0])
    stage.catch_up()
    stage.sql(
        f"ALTER PUBLICATION {publication} RENAME TO aside",
        "INSERT INTO orders VALUES (2, 'y')",
        f"ALTER PUBLICATION aside RENAME TO {publication}",
    )
    with stage.connect() as connection:
        passes = connection.info.server_version >= 180000
    if not passes:
        with pytest.raises(SourceError, check=coded("publication_replaced")) as found:
            stage.catch_up()
        assert "slot drop" in found.value.hint
        drop_slot(stage.config, stage.catalog)
    assert stage.catch_up().caught_up
    assert passes or stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id"])


def test_a_change_without_its_publication_is_an_error_of_its_own_that_lasts() -> None:
    with pytest.raises(SourceError, check=coded("publication_replaced")) as found, publications_known():
        raise SourceError('publication "millstream_shop" does not exist', sqlstate="42704")
    assert "slot drop" in found.value.hint
    assert not found.value.mends_at_source
    with pytest.raises(SourceError, check=coded("source")), publications_known():
        raise SourceError("PostgreSQL can't compute a value", sqlstate="22012")


def streams(stage: Stage, publication: str) -> bool:
    """Return whether a stream of the slot was begun with the publication."""
    with stage.connect() as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity a JOIN pg_replication_slots s ON s.active_pid = a.pid"
            " WHERE s.slot_name = %s AND a.query LIKE %s",
            [stage.config.slot, f'%"{publication}"%'],
        ).fetchone()
    return bool(row and row[0])
