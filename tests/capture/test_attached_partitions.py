"""Partitions that are attached with rows: their rows are copied, and no others."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import psycopg
import pytest
from tests.capture.beside import Beside, wait_until
from tests.capture.capture_stage import Stage

from millstream.app.table_requests import pause_table, resume_table, retry_table
from millstream.catalog import TableState
from millstream.model.column_rules import Rule, SourceRules

PARTS = (
    "CREATE TABLE parts (id int PRIMARY KEY, item text) PARTITION BY RANGE (id)",
    "CREATE TABLE low PARTITION OF parts FOR VALUES FROM (0) TO (100)",
    "CREATE TABLE mid PARTITION OF parts FOR VALUES FROM (100) TO (200)",
    "INSERT INTO parts SELECT i, 'x' FROM generate_series(91, 110) i",
)
MORE = (
    "CREATE TABLE more (gone int, item text, id int NOT NULL PRIMARY KEY); ALTER TABLE more DROP gone",
    "INSERT INTO more SELECT repeat(md5(i::text), 150), i FROM generate_series(200, 399) i",
)
ATTACH = "ALTER TABLE parts ATTACH PARTITION more FOR VALUES FROM (200) TO (1000)"
DETACH = "ALTER TABLE parts DETACH PARTITION more"


def copied(stage: Stage) -> Counter[str]:
    """Return how often the log has a copied record of each id of `parts`, and under "" how many copies voided the rows."""
    found = Counter[str]()
    for rows, _, row in stage.log.records():
        if rows.schema.name == "parts" and chr(row["__op"]) in "rt":
            found[row["id"] or ""] += 1
    return found


def is_right(stage: Stage) -> bool:
    return stage.log.replay()["public.parts"] == stage.source_rows("parts", ["id"])


def made(stage: Stage) -> None:
    """Make the table and a loose one, and capture the first."""
    stage.sql(*PARTS, *MORE)
    stage.config = replace(stage.config, tables=("public.parts",))
    stage.catch_up()


@pytest.mark.sampled
@pytest.mark.parametrize("below", [False, True], ids=["a leaf", "a tree"])
def test_only_its_rows_are_copied(stage: Stage, *, below: bool) -> None:
    made(stage)
    before = copied(stage)
    if below:
        stage.sql(
            "CREATE TABLE tree (LIKE parts INCLUDING ALL) PARTITION BY RANGE (id)",
            "CREATE TABLE leaf_1 PARTITION OF tree FOR VALUES FROM (1000) TO (1100) PARTITION BY HASH (id)",
            "CREATE TABLE leaf_1a PARTITION OF leaf_1 FOR VALUES WITH (MODULUS 2, REMAINDER 0)",
            "CREATE TABLE leaf_1b PARTITION OF leaf_1 FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
            "CREATE TABLE leaf_2 PARTITION OF tree FOR VALUES FROM (1100) TO (1200)",
            "INSERT INTO tree SELECT i, 't' FROM generate_series(1090, 1110) i",
            "ALTER TABLE parts ATTACH PARTITION tree FOR VALUES FROM (1000) TO (2000)",
        )
        ids = range(1090, 1111)
    else:
        stage.sql(ATTACH)
        ids = range(200, 400)
    stage.catch_up()
    assert copied(stage) - before == Counter(map(str, ids))
    assert is_right(stage)
    stage.sql("UPDATE parts SET item = 'later' WHERE id % 7 = 0", "DELETE FROM parts WHERE id % 11 = 0")
    stage.catch_up()
    assert copied(stage) - before == Counter(map(str, ids)), "and once only"
    assert is_right(stage)


def test_partitions_attached_in_a_backlog_with_changes_of_their_rows(stage: Stage) -> None:
    made(stage)
    before = copied(stage)
    stage.sql(
        ATTACH,
        "UPDATE parts SET id = id + 500 WHERE id IN (210, 211)",  # their long values aren't sent
        "UPDATE parts SET id = 5 WHERE id = 212",  # to another partition
        "UPDATE parts SET id = 400 WHERE id = 95",  # from another partition
        "DELETE FROM parts WHERE id = 213",
        "CREATE TABLE other (LIKE parts INCLUDING ALL); INSERT INTO other VALUES (1000, 'o'), (1001, 'o')",
        "ALTER TABLE parts ATTACH PARTITION other FOR VALUES FROM (1000) TO (1010)",
        "CREATE TABLE born PARTITION OF parts FOR VALUES FROM (1010) TO (1020)",
        "INSERT INTO parts VALUES (1010, 'sent')",
        "DELETE FROM parts WHERE id = 1000",
    )
    stage.catch_up()
    assert is_right(stage)
    found = copied(stage) - before
    assert not found[""], "nothing was voided"
    assert not found.keys() & {str(n) for n in range(200)} - {"5"}, "no row of another partition was copied"
    assert stage.state("public.parts") is TableState.STREAMING


@pytest.mark.siege
def test_a_partition_attached_among_changes(stage: Stage) -> None:
    made(stage)
    stage.config = replace(stage.config, chunk_rows=7)
    running = stage.start()
    stop = threading.Event()

    def change() -> None:
        chance = random.Random(1)
        with stage.connect() as connection:
            while not stop.is_set():
                key, other = chance.randrange(90, 600), chance.randrange(200, 1000)
                for statement in (
                    f"UPDATE parts SET item = item || '!' WHERE id = {key}",
                    f"UPDATE parts SET id = {other} WHERE id = {key} AND NOT EXISTS (SELECT FROM parts WHERE id = {other})",
                    f"INSERT INTO parts VALUES ({key}, 'new') ON CONFLICT DO NOTHING",
                    f"DELETE FROM parts WHERE id = {other}",
                ):
                    connection.execute(statement)
                stage.breathe(connection, stop)

    stage.sql(ATTACH)
    writer = Beside(change)
    wait_until(lambda: copied(stage)["399"] or copied(stage)["398"] or copied(stage)["397"], "its last rows are copied")
    wait_until(lambda: stage.state("public.parts") is TableState.STREAMING, "the copy is whole")
    stop.set()
    writer.ended()
    running.stop()
    stage.catch_up()
    assert is_right(stage)
    assert not copied(stage)[""]


@pytest.mark.siege
def test_a_partition_attached_during_a_copy_is_copied_after_it(stage: Stage) -> None:
    stage.sql(*PARTS, *MORE, "INSERT INTO parts SELECT i, 'y' FROM generate_series(111, 199) i")
    stage.config = replace(stage.config, tables=("public.parts",), chunk_rows=10, copy_workers=1)
    stage.log.delay_s = 0.05
    running = stage.start()
    wait_until(lambda: copied(stage)["95"], "the copy runs")
    stage.sql(ATTACH, "UPDATE parts SET item = 'later' WHERE id = 250")
    wait_until(lambda: "more" in stage.table("public.parts").reason, "its copy follows")
    stage.log.delay_s = 0.0
    running.stop()
    stage.sql("DELETE FROM parts WHERE id = 251")
    stage.catch_up()
    assert is_right(stage)
    found = copied(stage)
    assert not found[""], "the first copy didn't begin again"
    assert found["95"] == 1


def test_capture_up_to_a_moment_takes_a_partition_attached_during_a_copy(stage: Stage) -> None:
    stage.sql(*PARTS, *MORE)
    attached = threading.Event()

    def attach(moment: str, _details: object) -> None:
        if moment == "copy.decode" and not attached.is_set():
            attached.set()
            stage.sql(ATTACH)

    stage.config = replace(stage.config, tables=("public.parts",), chunk_rows=10, copy_workers=1, on_moment=attach)
    stage.catch_up()
    stage.catch_up()
    assert is_right(stage)
    assert not copied(stage)[""]


@pytest.mark.siege
def test_a_copy_of_a_partition_goes_on_after_pauses_and_restarts(stage: Stage) -> None:
    made(stage)
    before, id_ = copied(stage), stage.catalog.stream("shop").id
    stage.config = replace(stage.config, chunk_rows=10, copy_workers=1)
    stage.log.delay_s = 0.05
    stage.sql(ATTACH)
    running = stage.start()
    wait_until(lambda: copied(stage)["230"], "the copy runs")
    pause_table(stage.catalog, id_, "public.parts")
    running.stop()
    stage.log.delay_s = 0.0
    stage.sql("UPDATE parts SET id = 900 WHERE id = 201", "UPDATE parts SET id = 901 WHERE id = 399")
    assert stage.catch_up().paused == ("public.parts",)
    resume_table(stage.catalog, id_, "public.parts")
    stage.catch_up()
    assert is_right(stage)
    found = copied(stage) - before
    assert not found[""]
    assert not found.keys() & {str(n) for n in range(200)}


TABLES = {
    "without a key": ("CREATE TABLE parts (id int, item text) PARTITION BY RANGE (id)", {}),
    "with a hashed key": (PARTS[0], {"id": Rule.HASH}),
}


@pytest.mark.parametrize("kind", TABLES)
def test_where_rows_have_no_key_to_be_read_by_the_whole_table_is_copied(stage: Stage, kind: str) -> None:
    create, rules = TABLES[kind]
    loose = "CREATE TABLE more (LIKE parts INCLUDING ALL); INSERT INTO more VALUES (200, 'm'), (201, 'm')"
    full = [f"ALTER TABLE {t} REPLICA IDENTITY FULL" for t in ("parts", "low", "mid", "more")]
    stage.sql(create, *PARTS[1:], loose, *(full if not rules else ()))
    if rules:
        named = SourceRules({("public", "parts"): rules}, b"0123456789abcdef")
        stage.config = replace(stage.config, rules=named)
    stage.config = replace(stage.config, tables=("public.parts",))
    stage.catch_up()
    voids = copied(stage)[""]
    stage.sql(ATTACH)
    stage.catch_up()
    assert copied(stage)[""] == voids + 1
    rows = stage.log.replay()["public.parts"]
    assert (len(rows) if rules else len(rows[None])) == 22


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("emptied", "voids"),
    [(["VACUUM more"], 1), (["TRUNCATE more"], 1), (["DROP TABLE more"], 0)],
    ids=["vacuumed", "truncated", "dropped"],
)
def test_changes_remove_rows_that_a_table_without_a_key_never_had(stage: Stage, emptied: list[str], voids: int) -> None:
    """Its copy began after they were gone. A fold counts rows, and took an equal one that came later."""
    stage.sql(
        TABLES["without a key"][0], *PARTS[1:], "CREATE TABLE more (LIKE parts); INSERT INTO more VALUES (200, 'm')"
    )
    stage.sql(*(f"ALTER TABLE {t} REPLICA IDENTITY FULL" for t in ("parts", "low", "mid", "more")))
    stage.config = replace(stage.config, tables=("public.parts",))
    stage.catch_up()
    before = copied(stage)[""]
    stage.sql(ATTACH, "UPDATE parts SET id = 1, item = 'moved' WHERE id = 200", *emptied)
    stage.catch_up()
    if "DROP" not in emptied[0]:
        stage.sql("INSERT INTO parts VALUES (200, 'm')")
        stage.catch_up()
    assert copied(stage)[""] == before + voids
    rows = stage.log.replay(brought={"public.more"})["public.parts"][None]
    assert sorted(map(str, rows)) == sorted(map(str, stage.source_rows("parts", ["id"]).values()))


def test_rules_hold_for_the_rows_of_an_attached_partition(stage: Stage) -> None:
    stage.sql(
        "CREATE TABLE parts (id int PRIMARY KEY, ssn text, name text, note text) PARTITION BY RANGE (id)",
        "CREATE TABLE low PARTITION OF parts FOR VALUES FROM (0) TO (100)",
        "INSERT INTO parts VALUES (1, 'secret', 'secret', 'n')",
        "CREATE TABLE more (note text, name text, ssn text, id int NOT NULL PRIMARY KEY)",
        "INSERT INTO more VALUES ('m', 'secret', 'secret', 200)",
    )
    rules = SourceRules({("public", "parts"): {"ssn": Rule.HASH, "name": Rule.REDACT}}, b"0123456789abcdef")
    stage.config = replace(stage.config, tables=("public.parts",), rules=rules)
    stage.catch_up()
    stage.sql(ATTACH)
    stage.catch_up()
    found = stage.log.replay()["public.parts"]
    assert found[("200",)] == found[("1",)] | {"id": "200", "note": "m"}
    assert copied(stage) == Counter({"1": 1, "200": 1})
    assert "secret" not in repr(list(stage.log.records()))


@pytest.fixture
def reader(stage: Stage) -> Iterator[str]:
    """Yield a role that may replicate, and read the table and no partition of it."""
    role = f"reader_{stage.config.slot}"
    made(stage)
    stage.sql(f"CREATE ROLE {role} LOGIN REPLICATION", f"GRANT SELECT ON parts TO {role}")
    stage.config = replace(stage.config, dsn=stage.dsn.replace("postgres@", f"{role}@"))
    yield role
    for running in stage.running:
        running.end()
    stage.sql(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


@pytest.mark.sampled
@pytest.mark.parametrize("grant", [None, "SELECT", "SELECT, behind a policy"])
def test_a_partition_that_only_its_root_shows_is_copied_with_the_whole_table(
    stage: Stage, reader: str, grant: str | None
) -> None:
    if grant:
        stage.sql(f"GRANT SELECT ON more TO {reader}")
    if grant and grant != "SELECT":
        stage.sql("ALTER TABLE more ENABLE ROW LEVEL SECURITY")
    stage.sql(ATTACH)
    stage.catch_up()
    assert copied(stage)[""] == int(grant != "SELECT")
    assert is_right(stage)


def test_a_quarantined_table_is_copied_whole_when_it_comes_back(stage: Stage) -> None:
    made(stage)
    stage.catalog.set_state(stage.table("public.parts").id, TableState.QUARANTINED, "for a test")
    stage.sql(ATTACH)
    stage.catch_up()
    assert stage.state("public.parts") is TableState.QUARANTINED
    retry_table(stage.catalog, stage.catalog.stream("shop").id, "public.parts")
    stage.catch_up()
    assert copied(stage)[""] == 1
    assert is_right(stage)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param([ATTACH, "UPDATE parts SET item = 'sent' WHERE id = 250", "TRUNCATE more"], id="attached"),
        pytest.param(
            [
                "CREATE TABLE born PARTITION OF parts FOR VALUES FROM (1000) TO (1100)",
                "INSERT INTO parts VALUES (1000, 'sent')",
                "TRUNCATE born",
            ],
            id="made",
        ),
    ],
)
def test_a_partition_that_was_truncated_before_a_look_showed_it(stage: Stage, changes: list[str]) -> None:
    made(stage)
    stage.sql(*changes)
    stage.catch_up()
    assert is_right(stage)


def test_a_partition_that_came_back_empty(stage: Stage) -> None:
    made(stage)
    stage.sql(ATTACH)
    stage.catch_up()
    stage.sql(DETACH, "DELETE FROM more", "VACUUM more", ATTACH)
    stage.catch_up()
    assert is_right(stage)


@pytest.mark.siege
@pytest.mark.parametrize("ends", ["finalized", "waits"])
def test_a_partition_that_is_half_detached(stage: Stage, ends: str) -> None:
    """`DETACH … CONCURRENTLY` leaves a partition at its first commit, and waits for transactions that still read it."""
    made(stage)
    stage.sql(ATTACH)
    stage.catch_up()
    running = stage.start()
    with stage.connect(autocommit=False) as reading, stage.connect() as detaching:
        reading.execute("SELECT * FROM parts")
        detaching.execute("SET statement_timeout = '2s'")
        with pytest.raises(psycopg.errors.QueryCanceled):
            detaching.execute("ALTER TABLE parts DETACH PARTITION more CONCURRENTLY")
        stage.sql("INSERT INTO more VALUES ('not sent', 700)", "UPDATE parts SET item = 'sent' WHERE id = 95")
        wait_until(lambda: any(chr(row["__op"]) == "x" for _, _, row in stage.log.records()), "its record comes")
    assert not copied(stage)[""]
    running.stop()  # FINALIZE waits for all who read the table, and a reader that then waits for it is a deadlock
    stage.sql("DELETE FROM more WHERE id = 201")
    if ends == "finalized":
        stage.sql("ALTER TABLE parts DETACH PARTITION more FINALIZE", "DELETE FROM more WHERE id = 202", ATTACH)
    stage.catch_up()
    assert is_right(stage)


@pytest.mark.since_postgres(15)
def test_a_publication_s_row_filter_and_column_list_hold_for_an_attached_partition(stage: Stage) -> None:
    stage.sql(
        *PARTS,
        "ALTER TABLE parts ADD other text",
        *MORE,
        "ALTER TABLE more ADD other text DEFAULT 'o'",
        f"CREATE PUBLICATION {stage.config.publication} FOR TABLE parts (item, id) WHERE (id % 2 = 0)"
        " WITH (publish_via_partition_root = true)",
    )
    stage.config = replace(stage.config, tables=("public.parts",))
    stage.catch_up()
    before = copied(stage)
    stage.sql(ATTACH)
    stage.catch_up()
    assert copied(stage) - before == Counter(map(str, range(200, 400, 2)))
    rows = stage.source_rows("(SELECT id, item FROM parts WHERE id % 2 = 0) parts", ["id"])
    assert stage.log.replay()["public.parts"] == rows


@pytest.mark.sampled
@pytest.mark.parametrize("change", ["attached", "attached empty", "detached"])
def test_what_capture_has_read_of_a_partition_as_a_table_of_its_own(stage: Stage, change: str) -> None:
    """PostgreSQL 14 kept to what it had decided when it first met the relation: changes of a partition were lost."""
    made(stage)
    if change == "detached":
        stage.sql(ATTACH)
    running = stage.start()
    stage.sql(
        "UPDATE parts SET item = 'a' WHERE id = 300",
        "INSERT INTO more VALUES ('b', 400)",
        "UPDATE parts SET item = 'c' WHERE id = 91",
    )
    wait_until(lambda: stage.log.replay()["public.parts"]["91",]["item"] == "c", "the changes come")
    if change == "attached empty":
        stage.sql("TRUNCATE more")
    stage.sql(DETACH if change == "detached" else ATTACH)
    wait_until(lambda: is_right(stage), "the change is noticed")
    wait_until(lambda: stage.state("public.parts") is TableState.STREAMING, "the copy is whole")
    stage.sql(
        "INSERT INTO more VALUES ('d', 401)",
        "DELETE FROM more WHERE id = 301",
        "UPDATE parts SET item = 'e' WHERE id = 91",
    )
    wait_until(lambda: is_right(stage), "the changes come")
    stage.sql("INSERT INTO more VALUES ('f', 402)", "UPDATE parts SET item = 'g' WHERE id = 91")
    wait_until(lambda: stage.log.replay()["public.parts"]["91",]["item"] == "g", "the changes come")
    running.stop()
    assert is_right(stage)
    stage.catch_up()
    assert is_right(stage)


def test_a_captured_table_that_becomes_a_partition(stage: Stage) -> None:
    stage.sql(*PARTS, *MORE)
    running = stage.start()
    wait_until(lambda: stage.state("public.more") is TableState.STREAMING, "the loose table is captured")
    wait_until(lambda: stage.state("public.parts") is TableState.STREAMING, "the other, too")
    stage.sql("UPDATE more SET item = 'a' WHERE id = 300", ATTACH, "INSERT INTO parts VALUES (500, 'b'), (6, 'c')")
    wait_until(lambda: is_right(stage), "its rows are copied")
    wait_until(lambda: stage.state("public.more") in {None, TableState.GONE}, "it is no table of its own")
    stage.sql("UPDATE parts SET item = 'd' WHERE id > 290", "DELETE FROM parts WHERE id = 210")
    wait_until(lambda: is_right(stage), "the changes come")
    stage.sql(DETACH, "INSERT INTO more VALUES ('e', 501)", "DELETE FROM parts WHERE id = 6")
    wait_until(lambda: is_right(stage), "its rows are gone")
    wait_until(lambda: stage.state("public.more") is TableState.STREAMING, "it is a table again")
    stage.sql("UPDATE more SET item = 'f' WHERE id > 350", "UPDATE parts SET item = 'g'")
    running.stop()
    stage.catch_up()
    assert is_right(stage)
    assert stage.log.replay(stage.table("public.more").id)[""] == stage.source_rows("more", ["id"])
