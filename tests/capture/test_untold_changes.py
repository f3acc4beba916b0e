"""Changes to rows that no statement writes: by the parts of their columns' types, and by what a publication sends."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.capture.beside import wait_until
from tests.capture.capture_stage import Stage
from tests.capture.test_layouts import marks

from millstream.catalog import TableState

# Changes to a type's parts that decide the text of unchanged rows: the setup, the change, and how it
# is reported.
TYPES = {
    "an enum's value renamed": (
        ["CREATE TYPE mood AS ENUM ('sad', 'ok')", "CREATE TABLE t (id int PRIMARY KEY, v mood); INSERT INTO t VALUES (1, 'sad'), (2, 'ok')"],
        ["ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'", "UPDATE t SET v = 'blue' WHERE id = 2"],
        "value sad of column v was renamed to blue",
    ),
    "an enum's value renamed, in a key": (
        ["CREATE TYPE mood AS ENUM ('sad', 'ok')", "CREATE TABLE t (id mood PRIMARY KEY, v int); INSERT INTO t VALUES ('sad', 1), ('ok', 2)"],
        ["UPDATE t SET v = 3", "ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'", "UPDATE t SET v = 4 WHERE id = 'blue'"],
        "value sad of column id was renamed to blue",
    ),
    "deep in other types": (
        [
            "CREATE TYPE mood AS ENUM ('sad', 'ok'); CREATE TYPE moods AS RANGE (subtype = mood)",
            "CREATE TYPE felt AS (at int, m moods); CREATE DOMAIN feelings AS felt[]",
            "CREATE TABLE t (id int PRIMARY KEY, v feelings); INSERT INTO t VALUES (1, ARRAY[ROW(1, '[sad,ok]')::felt])",
        ],
        ["ALTER TYPE mood RENAME VALUE 'ok' TO 'fine'"],
        "value ok of column v was renamed to fine",
    ),
    "a row type gets a field": (
        ["CREATE TYPE spot AS (x int); CREATE TABLE t (id int PRIMARY KEY, v spot); INSERT INTO t VALUES (1, '(1)')"],
        ["ALTER TYPE spot ADD ATTRIBUTE y int", "INSERT INTO t VALUES (2, '(1,2)')"],
        "the row type of column v has other fields",
    ),
    "a row type loses a field": (
        ["CREATE TYPE spot AS (x int, y int); CREATE TABLE t (id int PRIMARY KEY, v spot[])", "INSERT INTO t VALUES (1, ARRAY[ROW(1,2)::spot])"],
        ["ALTER TYPE spot DROP ATTRIBUTE x"],
        "the row type of column v has other fields",
    ),
    "a table whose rows are values": (
        ["CREATE TABLE spot (x int, y int); CREATE TABLE t (id int PRIMARY KEY, v spot); INSERT INTO t VALUES (1, '(1,2)')"],
        ["ALTER TABLE spot DROP x"],
        "the row type of column v has other fields",
    ),
}  # fmt: skip
AS_THEY_WERE = {
    "an enum gets a value": (
        ["CREATE TYPE mood AS ENUM ('sad', 'ok')", "CREATE TABLE t (id int PRIMARY KEY, v mood); INSERT INTO t VALUES (1, 'sad')"],
        ["ALTER TYPE mood ADD VALUE 'blue' BEFORE 'ok'", "INSERT INTO t VALUES (2, 'blue')", "ALTER TYPE mood RENAME TO feeling"],
    ),
    "a field is called otherwise": (
        ["CREATE TYPE spot AS (x int, y int); CREATE TABLE t (id int PRIMARY KEY, v spot); INSERT INTO t VALUES (1, '(1,2)')"],
        ["ALTER TYPE spot RENAME ATTRIBUTE x TO z; ALTER TYPE spot RENAME TO place", "INSERT INTO t VALUES (2, '(3,4)')"],
    ),
    "a domain": (
        ["CREATE DOMAIN amount AS int CHECK (VALUE > 0); CREATE TABLE t (id int PRIMARY KEY, v amount); INSERT INTO t VALUES (1, 1)"],
        [
            "ALTER DOMAIN amount DROP CONSTRAINT amount_check; INSERT INTO t VALUES (2, -1)",
            "ALTER DOMAIN amount ADD CHECK (VALUE > 5) NOT VALID; ALTER DOMAIN amount SET DEFAULT 7; INSERT INTO t VALUES (3)",
            "ALTER DOMAIN amount RENAME TO amounts; INSERT INTO t VALUES (4, 8)",
        ],
    ),
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("change", TYPES)
def test_what_a_type_is_made_of_changes_rows(stage: Stage, change: str) -> None:
    made, happens, reason = TYPES[change]
    stage.sql(*made)
    stage.config = replace(stage.config, tables=("public.t",))
    stage.catch_up()
    stage.sql(*happens)
    stage.log.delay_s = 0.1
    capture = stage.start()
    wait_until(lambda: reason in stage.table("public.t").reason, "it is told")
    stage.log.delay_s = 0.0
    wait_until(lambda: stage.state("public.t") is TableState.STREAMING, "it is copied again")
    capture.stop()
    stage.catch_up()
    assert stage.log.replay()["public.t"] == stage.source_rows("t", ["id"])
    assert marks(stage) == 1, "and once only"


@pytest.mark.sampled
@pytest.mark.parametrize("change", AS_THEY_WERE)
def test_what_changes_no_text_copies_nothing(stage: Stage, change: str) -> None:
    made, happens = AS_THEY_WERE[change]
    stage.sql(*made)
    stage.catch_up()
    stage.sql(*happens)
    stage.catch_up()
    assert stage.log.replay()["public.t"] == stage.source_rows("t", ["id"])
    assert marks(stage) == 0


RESTRICTIONS = {
    "a column joins the list": ("t (id, a)", "t (id, a, b)", {"1", "2", "3"}, "id a b", 1),
    "the list goes": ("t (id, a)", "t", {"1", "2", "3"}, "id a b", 1),
    "a column leaves the list": ("t", "t (id, b)", {"1", "2", "3"}, "id b", 1),
    "the filter lets more through": ("t WHERE (id > 2)", "t WHERE (id > 1)", {"2", "3"}, "id a b", 1),
    "the filter lets less through": ("t", "t WHERE (id > 2)", {"3"}, "id a b", 1),
}


@pytest.mark.sampled
@pytest.mark.since_postgres(15)
@pytest.mark.parametrize("change", RESTRICTIONS)
def test_what_a_publication_lets_through(stage: Stage, change: str) -> None:
    before, after, keys, columns, copies = RESTRICTIONS[change]
    stage.sql(
        "CREATE TABLE t (id int PRIMARY KEY, a int, b int); INSERT INTO t SELECT i, i, i FROM generate_series(1, 3) i",
        f"CREATE PUBLICATION {stage.config.publication} FOR TABLE {before}",
    )
    stage.catch_up()
    stage.sql(f"ALTER PUBLICATION {stage.config.publication} SET TABLE {after}", "UPDATE t SET b = 7 WHERE id = 3")
    stage.catch_up()
    stage.catch_up()
    assert marks(stage) == copies
    shown = {
        key: {n: v for n, v in row.items() if n in columns.split()}
        for (key,), row in stage.log.replay()["public.t"].items()
    }
    source = {key: row for (key,), row in stage.source_rows("t", ["id"]).items()}
    wanted = {key: {n: source[key][n] for n in columns.split()} for key in keys}
    assert shown == wanted
