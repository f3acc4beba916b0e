"""Columns that change rows without a word in the stream: the table is copied again, and says why."""

from __future__ import annotations

import pytest
from tests.capture.capture_stage import Stage, wait_until

from millstream.catalog import TableState

ORDERS = (
    "CREATE TABLE orders (id int PRIMARY KEY, item text, price numeric(10,2))",
    "INSERT INTO orders SELECT i, 'x' || i, i FROM generate_series(1, 200) i",
)
UPDATE = "UPDATE orders SET item = 'changed' WHERE id = 7"

CHANGES = {
    "a default": ["ALTER TABLE orders ADD note text DEFAULT 'none'", UPDATE],
    "a default that went": [
        "ALTER TABLE orders ADD note text DEFAULT 'none'",
        "ALTER TABLE orders ALTER note DROP DEFAULT",
    ],
    "a default that writes rows": ["ALTER TABLE orders ADD n float DEFAULT random()", UPDATE],
    "an identity": ["ALTER TABLE orders ADD n bigint GENERATED ALWAYS AS IDENTITY"],
    "another name": ["ALTER TABLE orders RENAME item TO thing", "UPDATE orders SET thing = 'changed' WHERE id = 7"],
    "a key's other name": ["ALTER TABLE orders RENAME id TO number", "DELETE FROM orders WHERE number = 3"],
    "names that swap": [
        "ALTER TABLE orders ADD other text DEFAULT 'o'; ALTER TABLE orders RENAME item TO t",
        "ALTER TABLE orders RENAME other TO item; ALTER TABLE orders RENAME t TO other",
        UPDATE,
    ],
    "a column dropped and added again": ["ALTER TABLE orders DROP item; ALTER TABLE orders ADD item text", UPDATE],
    "another type": ["ALTER TABLE orders ALTER id TYPE bigint, ALTER item TYPE varchar(3) USING left(item, 3)"],
    "another scale": [
        "ALTER TABLE orders ALTER price TYPE numeric(12,4)",
        "UPDATE orders SET price = 1.2345 WHERE id = 7",
    ],
}


def key_of(stage: Stage) -> str:
    with stage.connect() as connection:
        row = connection.execute("SELECT attname FROM pg_attribute WHERE attrelid = 'orders'::regclass AND attnum = 1")
        return str(row.fetchall()[0][0])


def marks(stage: Stage) -> int:
    return sum(chr(row["__op"]) == "t" for _, _, row in stage.log.records())


@pytest.mark.parametrize(
    ("change", "running"), [*((change, False) for change in CHANGES), ("a default", True), ("names that swap", True)]
)
def test_rows_end_as_the_source_has_them(stage: Stage, change: str, running: bool) -> None:  # noqa: FBT001 - a parameter
    stage.sql(*ORDERS)
    stage.catch_up()
    if running:
        capture = stage.start()
        stage.sql(*CHANGES[change])
        wait_until(lambda: marks(stage) and stage.state("public.orders") is TableState.STREAMING, "it is copied again")
        capture.stop()
    else:
        stage.sql(*CHANGES[change])
    stage.catch_up()
    assert stage.log.replay()["public.orders"] == stage.source_rows("orders", [key_of(stage)])
    copies = marks(stage)
    stage.catch_up()
    assert marks(stage) == copies, "and once only"


def test_a_column_that_was_seen_to_go_has_nothing_of_its_values_when_its_name_comes_back(stage: Stage) -> None:
    stage.sql(*ORDERS)
    stage.catch_up()
    stage.sql("ALTER TABLE orders DROP item", "UPDATE orders SET price = 1 WHERE id = 7")
    stage.catch_up()
    stage.sql("ALTER TABLE orders ADD other text")
    stage.catch_up()
    assert marks(stage) == 0
    stage.sql("ALTER TABLE orders ADD item text", UPDATE)
    stage.catch_up()
    assert stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id"])
    assert marks(stage) == 1
    stage.sql("ALTER TABLE orders ADD price2 int")
    stage.catch_up()
    assert marks(stage) == 1, "and once only"


def test_the_reason_is_told_while_the_table_is_copied(stage: Stage) -> None:
    stage.sql(*ORDERS)
    stage.catch_up()
    stage.log.delay_s = 0.2
    stage.sql("ALTER TABLE orders ADD note text DEFAULT 'none'")
    capture = stage.start()
    reason = "column note was added with a value for existing rows: its rows are copied again"
    wait_until(
        lambda: (row := stage.table("public.orders")).state is TableState.COPYING and row.reason == reason, "it is told"
    )
    stage.log.delay_s = 0.0
    wait_until(lambda: stage.state("public.orders") is TableState.STREAMING, "it is copied again")
    assert not stage.table("public.orders").reason
    capture.stop()


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE orders ADD note text",
        "ALTER TABLE orders DROP item",
        "VACUUM FULL orders",
        "ALTER TABLE orders ADD g int GENERATED ALWAYS AS (id + 1) STORED",
        "ALTER TABLE orders RENAME TO bills; ALTER TABLE bills RENAME TO orders",
    ],
)
def test_what_leaves_rows_as_they_were_copies_nothing(stage: Stage, change: str) -> None:
    stage.sql(*ORDERS)
    stage.catch_up()
    stage.sql(change, "UPDATE orders SET price = 5 WHERE id = 7")
    stage.catch_up()
    assert marks(stage) == 0
    assert stage.state("public.orders") is TableState.STREAMING


def test_a_column_of_partitions(stage: Stage) -> None:
    stage.sql(
        "CREATE TABLE orders (id int PRIMARY KEY, item text) PARTITION BY RANGE (id)",
        "CREATE TABLE low PARTITION OF orders FOR VALUES FROM (0) TO (100)",
        "INSERT INTO orders VALUES (1, 'x'), (2, 'y')",
    )
    stage.catch_up()
    stage.sql(
        "ALTER TABLE orders ADD note text DEFAULT 'n'; ALTER TABLE orders ALTER note DROP DEFAULT",
        "DELETE FROM low WHERE id = 2",
    )
    stage.catch_up()
    assert stage.log.replay()["public.orders"] == {("1",): {"id": "1", "item": "x", "note": "n"}}
