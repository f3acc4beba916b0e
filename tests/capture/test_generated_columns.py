"""Stored generated columns of PostgreSQL 18: copied, streamed and followed like others, if they are published."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.capture.beside import wait_until
from tests.capture.capture_stage import Stage
from tests.capture.test_copying import DOCS, workload
from tests.capture.test_layouts import bag, marks, source_bag

from millstream.capture.source_table_checks import check_source
from millstream.catalog import TableState

pytestmark = pytest.mark.since_postgres(18)

G = "g int GENERATED ALWAYS AS (n * 2) STORED"
IDENTITIES = {
    "a primary key": "ALTER TABLE t ADD PRIMARY KEY (id)",
    "full": "ALTER TABLE t ADD PRIMARY KEY (id); ALTER TABLE t REPLICA IDENTITY FULL",
    "an index": "ALTER TABLE t ALTER g SET NOT NULL, ADD UNIQUE (g); ALTER TABLE t REPLICA IDENTITY USING INDEX t_g_key",
    "a primary key of it": "ALTER TABLE t ADD PRIMARY KEY (g, id)",
    "full, keyed by it": "ALTER TABLE t ADD PRIMARY KEY (g); ALTER TABLE t REPLICA IDENTITY FULL",
}
CHANGES = (
    "INSERT INTO t VALUES (201, 201, 'new'), (202, 202, 'new'), (203, 203, 'new')",
    "UPDATE t SET note = 'changed' WHERE id = 7",
    "UPDATE t SET n = n + 1000 WHERE id IN (8, 202)",
    "UPDATE t SET id = 900 WHERE id = 9",
    "DELETE FROM t WHERE id IN (3, 201)",
)


def make(stage: Stage, identity: str = "a primary key", columns: str = f"id int, n int, note text, {G}") -> None:
    stage.sql(
        f"CREATE TABLE t ({columns}); {IDENTITIES[identity]}",
        "INSERT INTO t (id, n, note) SELECT i, i, 'x' || i FROM generate_series(1, 200) i",
    )


def publication(stage: Stage, targets: str = "FOR TABLE t", options: str = "publish_generated_columns = none") -> str:
    return f"CREATE PUBLICATION {stage.config.publication} {targets} WITH ({options})"


def setting(stage: Stage, suffix: str = "") -> str:
    with stage.connect() as connection:
        row = connection.execute(
            "SELECT pubgencols FROM pg_publication WHERE pubname = %s", [stage.config.publication + suffix]
        ).fetchone()
    assert row is not None
    return str(row[0])


def as_source(stage: Stage, name: str = "t", without: str = "") -> bool:
    """Return whether a table's rows in the log are the source's."""

    def told(rows: dict[Any, dict[str, str | None]]) -> list[list[tuple[str, str]]]:
        return sorted(sorted((c, str(v)) for c, v in row.items() if c != without) for row in rows.values())

    found = stage.log.replay().get(f"public.{name}", {})
    assert None not in found
    assert not without or all(without not in row for row in found.values())
    return told(found) == told(stage.source_rows(name, ["id"]))


def copied_again(stage: Stage, times: int = 1, name: str = "public.t") -> bool:
    return marks(stage) == times and stage.state(name) is TableState.STREAMING


@pytest.fixture
def stranger(stage: Stage) -> Iterator[None]:
    """Yield while `stage` runs under a role that owns nothing and may read everything."""
    role = f"stranger_{stage.config.slot}"
    stage.sql(f"CREATE ROLE {role} LOGIN REPLICATION; GRANT pg_read_all_data TO {role}")
    stage.config = replace(stage.config, dsn=stage.dsn.replace("postgres@", f"{role}@"))
    yield
    stage.end()
    stage.sql(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


@pytest.mark.sampled
@pytest.mark.parametrize("identity", IDENTITIES)
def test_copied_rows_and_changes_have_its_values(stage: Stage, identity: str) -> None:
    make(stage, identity)
    stage.catch_up()
    assert stage.state("public.t") is TableState.STREAMING
    assert setting(stage) == "s"
    assert as_source(stage)
    stage.sql(*CHANGES, *(["UPDATE t SET n = null WHERE id = 21"] if identity == "a primary key" else []))
    stage.catch_up()
    assert as_source(stage)
    assert not marks(stage)
    assert not [f for f in check_source(stage.config) if f.code in {"column_generated", "replica_identity_unusable"}]


def test_a_bag_of_rows_and_a_table_in_history_only_have_it_too(stage: Stage) -> None:
    columns = f"id int, n int, note text, {G}"
    stage.sql(
        f"CREATE TABLE bag ({columns}); ALTER TABLE bag REPLICA IDENTITY FULL; INSERT INTO bag VALUES (1, 1), (1, 1)",
        f"CREATE TABLE seen ({columns})",
    )
    stage.catch_up()
    assert setting(stage, "_inserts") == "s"
    stage.sql("UPDATE bag SET n = 7", "INSERT INTO bag VALUES (1, 7), (2, 2)", "DELETE FROM bag WHERE id = 2")
    stage.sql("INSERT INTO seen VALUES (1, 21)")
    stage.catch_up()
    replayed = stage.log.replay()
    assert bag(replayed["public.bag"]) == source_bag(stage, "bag")
    assert bag(replayed["public.seen"]) == source_bag(stage, "seen")


def test_partitions_send_it_by_their_root(stage: Stage) -> None:
    stage.sql(
        f"CREATE TABLE t (id int PRIMARY KEY, n int, note text, {G}) PARTITION BY RANGE (id)",
        "CREATE TABLE low PARTITION OF t FOR VALUES FROM (0) TO (100)",
        "CREATE TABLE high (g int GENERATED ALWAYS AS (n * 2) STORED, note text, n int, id int PRIMARY KEY)",
        "ALTER TABLE t ATTACH PARTITION high FOR VALUES FROM (100) TO (1000)",
        "ALTER TABLE low REPLICA IDENTITY FULL",
        "INSERT INTO t SELECT i, i, 'x' || i FROM generate_series(1, 200) i",
    )
    stage.catch_up()
    stage.sql(*CHANGES)
    stage.catch_up()
    assert stage.state("public.t") is TableState.STREAMING
    assert as_source(stage)


@pytest.mark.sampled
@pytest.mark.parametrize("running", [True, False])
def test_one_that_is_added_has_the_table_copied_again(stage: Stage, running: bool) -> None:
    make(stage, columns="id int, n int, note text")
    stage.catch_up()
    capture = stage.start() if running else None
    stage.sql("UPDATE t SET n = 5 WHERE id = 5", f"ALTER TABLE t ADD {G}", *CHANGES)
    if capture is not None:
        wait_until(lambda: copied_again(stage), "it is copied again")
        capture.stop()
    stage.catch_up()
    assert as_source(stage)
    assert marks(stage) == 1


def test_another_expression_has_the_table_copied_again(stage: Stage) -> None:
    make(stage)
    stage.catch_up()
    stage.sql("ALTER TABLE t ALTER g SET EXPRESSION AS (n * 3)", *CHANGES)
    stage.catch_up()
    assert as_source(stage)
    assert marks(stage) == 1


def test_one_that_becomes_one_like_others_goes_on(stage: Stage) -> None:
    make(stage)
    stage.catch_up()
    capture = stage.start()
    wait_until(stage.slot_active, "it streams")
    stage.sql("ALTER TABLE t ALTER g DROP EXPRESSION", *CHANGES, "UPDATE t SET g = 5 WHERE id = 10")
    wait_until(lambda: as_source(stage), "changes are captured")
    capture.stop()
    stage.catch_up()
    assert not marks(stage)


@pytest.mark.long
@pytest.mark.parametrize("running", [True, False])
def test_a_publication_that_an_older_version_made_is_altered_and_its_tables_are_copied_again(
    stage: Stage, running: bool
) -> None:
    make(stage)
    stage.sql(
        f"CREATE TABLE whole (id int PRIMARY KEY, n int, {G}); ALTER TABLE whole REPLICA IDENTITY FULL",
        "INSERT INTO whole VALUES (1, 1), (2, 2); CREATE TABLE other (id int PRIMARY KEY); INSERT INTO other VALUES (1)",
        publication(stage, "FOR TABLE t, other"),
        f"CREATE PUBLICATION {stage.config.publication}_inserts FOR TABLE whole WITH (publish = 'insert, truncate')",
    )
    stage.catch_up()
    stage.sql(*CHANGES)
    stage.catch_up()
    assert stage.state("public.whole") is TableState.HISTORY_ONLY
    assert as_source(stage, without="g")
    stage.sql("UPDATE t SET note = 'seen without' WHERE id = 11", "INSERT INTO whole VALUES (3, 3)")
    capture = stage.start() if running else None
    # By this option the publications look like those that Millstream makes.
    stage.sql(
        f"ALTER PUBLICATION {stage.config.publication} SET (publish_via_partition_root = true)",
        f"ALTER PUBLICATION {stage.config.publication}_inserts SET (publish_via_partition_root = true)",
        "UPDATE t SET note = 'in between' WHERE id = 12",
    )
    if capture is not None:
        wait_until(
            lambda: (
                as_source(stage)
                and as_source(stage, "whole")
                and {stage.state("public.t"), stage.state("public.whole")} == {TableState.STREAMING}
            ),
            "both are copied again",
        )
        capture.stop()
    stage.sql("UPDATE t SET n = -1 WHERE id = 13", "UPDATE whole SET n = -1 WHERE id = 1")
    stage.catch_up()
    stage.sql("UPDATE t SET n = -2 WHERE id = 14", "DELETE FROM whole WHERE id = 2")
    stage.catch_up()
    assert (setting(stage), setting(stage, "_inserts")) == ("s", "s")
    assert stage.state("public.whole") is TableState.STREAMING
    assert as_source(stage)
    assert as_source(stage, "whole")
    assert marks(stage) == 1, "once, and nothing of the one that has none"


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("comes", ["by the publication", "as a new column"])
def test_it_comes_beside_a_live_workload_and_no_row_lacks_it(stage: Stage, comes: str) -> None:
    columns = (
        "g bigint GENERATED ALWAYS AS (n * 2) STORED",
        "h text STORAGE EXTERNAL GENERATED ALWAYS AS (body || '!') STORED",
    )
    add = "; ".join(f"ALTER TABLE docs ADD {column}" for column in columns)
    alter = f"ALTER PUBLICATION {stage.config.publication} SET (publish_via_partition_root = true)"
    before, then = ([add], alter) if comes == "by the publication" else ([alter], f"BEGIN; {add}; COMMIT")
    stage.sql(DOCS, publication(stage, "FOR TABLE docs"), *before)
    stage.sql("INSERT INTO docs SELECT i, repeat('old', 900), 0 FROM generate_series(0, 799) i", "ANALYZE docs")
    stage.config = replace(stage.config, chunk_rows=40)
    stage.catch_up()
    capture = stage.start()
    with workload(stage, 1000):
        wait_until(stage.slot_active, "it streams")
        stage.sql(then)
        wait_until(lambda: bool(marks(stage)), "it is copied again")
        wait_until(lambda: stage.state("public.docs") is TableState.STREAMING, "it is copied again")
    capture.stop()
    stage.catch_up()
    rows = stage.log.replay()["public.docs"]
    assert all(row["g"] is not None and row["h"] is not None for row in rows.values())
    assert rows == stage.source_rows("docs", ["id"])


@pytest.mark.sampled
@pytest.mark.usefixtures("stranger")
@pytest.mark.parametrize("targets", ["FOR TABLE t", "FOR ALL TABLES", "FOR TABLE t (id, n, note)"])
def test_a_publication_of_somebody_else_is_used_as_it_is(stage: Stage, targets: str) -> None:
    make(stage)
    stage.sql(publication(stage, targets, "publish_via_partition_root = true"))
    (told,) = (f for f in check_source(stage.config) if f.code == "column_generated")
    assert told.message == "public.t: g is generated and won't be captured"
    assert "Set publish_generated_columns of the publication to stored" in told.fix
    stage.catch_up()
    stage.sql(*CHANGES)
    stage.catch_up()
    assert setting(stage) == "n"
    assert as_source(stage, without="g")
    assert "g" not in {
        c.name
        for c in stage.catalog.latest_schemas(stage.catalog.stream("shop").id)[stage.table("public.t").id].columns
    }
    capture = stage.start()
    wait_until(stage.slot_active, "it streams")
    stage.sql(
        f"ALTER PUBLICATION {stage.config.publication} SET TABLE t (id, n, note, g)"
        if "(" in targets
        else f"ALTER PUBLICATION {stage.config.publication} SET (publish_generated_columns = stored)",
        "UPDATE t SET n = -1 WHERE id = 13",
    )
    wait_until(lambda: copied_again(stage) and as_source(stage), "it is copied again")
    capture.stop()
    assert not [f for f in check_source(stage.config) if f.code == "column_generated"]


@pytest.mark.usefixtures("stranger")
def test_a_copy_asked_for_has_what_the_publication_sends(stage: Stage) -> None:
    make(stage)
    stage.sql(publication(stage))
    stage.catch_up()
    stage.catalog.set_state(stage.table("public.t").id, TableState.COPY_REQUESTED, "asked for")
    stage.sql("UPDATE t SET n = -1 WHERE id = 13")
    stage.catch_up()
    assert marks(stage) == 1
    assert as_source(stage, without="g")
    stream = stage.catalog.stream("shop").id
    (schema,) = (s for s in stage.catalog.latest_schemas(stream).values() if s.name == "t")
    assert [c.name for c in schema.columns] == ["id", "n", "note"], "nor does the record with which it begins"


def test_an_identity_with_it_that_a_publication_does_not_send_is_none(stage: Stage) -> None:
    make(stage, "full")
    stage.sql(publication(stage, "FOR ALL TABLES", "publish = 'insert, truncate'"))
    (told,) = (f for f in check_source(stage.config) if f.code == "replica_identity_unusable")
    assert "publish_generated_columns" in told.fix
    stage.catch_up()
    assert stage.state("public.t") is TableState.HISTORY_ONLY
    stage.sql("UPDATE t SET note = 'the application goes on'")


def test_publications_that_differ_about_a_table_never_end_the_stream(stage: Stage) -> None:
    """A table without an identity is in a publication of all tables.

    PostgreSQL ends a stream in which two publications differ about a table.
    """
    stage.sql(
        f"CREATE TABLE seen (id int, n int, {G}); CREATE TABLE other (id int PRIMARY KEY); INSERT INTO other VALUES (1)",
        "CREATE TABLE plain (id int)",
        publication(stage, "FOR ALL TABLES"),
    )
    capture = stage.start()
    wait_until(lambda: stage.state("public.other") is TableState.STREAMING, "it streams")
    wait_until(lambda: stage.state("public.plain") is TableState.HISTORY_ONLY, "it streams")
    stage.sql(
        "INSERT INTO seen VALUES (1, 1)",
        f"ALTER PUBLICATION {stage.config.publication} SET (publish_generated_columns = stored)",
        "INSERT INTO seen VALUES (2, 2)",
        "INSERT INTO other VALUES (2)",
    )
    wait_until(lambda: len(stage.log.replay()["public.other"]) == 2, "what came behind it is captured")
    wait_until(lambda: setting(stage, "_inserts") == "s", "the other one follows")
    capture.stop()
    rows: Any = stage.log.replay()["public.seen"]
    assert [row.get("g") for row in rows[None]] == [None, "4"]


def test_virtual_ones_are_never_captured(stage: Stage) -> None:
    virtual = "v int GENERATED ALWAYS AS (n + 1) VIRTUAL"
    make(stage, columns=f"id int, n int, note text, {G}, {virtual}")
    stage.sql(f"CREATE TABLE whole (id int PRIMARY KEY, n int, {virtual}); ALTER TABLE whole REPLICA IDENTITY FULL")
    found = check_source(stage.config)
    told = {f.table: (f.message, f.fix) for f in found if f.code == "column_generated"}
    assert told["public.t"] == (
        "public.t: v is generated and won't be captured",
        "Nothing has to be done; a query can compute them from the columns that they are made of.",
    )
    assert [f.table for f in found if f.code == "replica_identity_unusable"] == ["public.whole"]
    stage.catch_up()
    stage.sql(*CHANGES, "INSERT INTO whole VALUES (1, 1)", "UPDATE whole SET n = 2")
    stage.sql(f"ALTER TABLE t ADD w {virtual[2:]}")
    stage.sql("UPDATE t SET n = -1 WHERE id = 13")
    stage.catch_up()
    assert stage.state("public.whole") is TableState.HISTORY_ONLY
    source = {key: {c: row[c] for c in ("id", "n", "note", "g")} for key, row in stage.source_rows("t", ["id"]).items()}
    assert stage.log.replay()["public.t"] == source
    assert not marks(stage)
