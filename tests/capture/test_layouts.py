"""Changes of columns that change rows without a message in the stream: the table is copied again, with the reason."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from psycopg.sql import SQL, Identifier
from tests.capture.beside import wait_until
from tests.capture.capture_stage import Stage

from millstream.capture.source_table_checks import check_source
from millstream.catalog import TableState
from millstream.model.operations import OperationKind

pytestmark = pytest.mark.siege

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
    "the same type, other values": ["ALTER TABLE orders ALTER item TYPE text USING upper(item)", UPDATE],
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
    """Return the number of copies that began with a record that voids the earlier rows."""
    chunk = OperationKind.COPY_CHUNK
    return sum(chr(row["__op"]) == "t" and op["kind"] == chunk for _, op, row in stage.log.records())


@pytest.mark.parametrize(
    ("change", "running"), [*((change, False) for change in CHANGES), ("a default", True), ("names that swap", True)]
)
def test_rows_end_as_the_source_has_them(stage: Stage, change: str, running: bool) -> None:
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
    reason = re.compile(
        r"column note was added with a value for existing rows: its .*rows \(\S+ KiB\) are copied again"
    )
    wait_until(
        lambda: (row := stage.table("public.orders")).state is TableState.COPYING and reason.fullmatch(row.reason),
        "it is told",
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
        "CLUSTER orders USING orders_pkey",
        "TRUNCATE orders; INSERT INTO orders VALUES (7, 'anew', 1)",
        "ALTER TABLE orders ALTER item TYPE text; ALTER TABLE orders ALTER item SET STATISTICS 7",
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


KEYED = (
    "CREATE TABLE orders (id int PRIMARY KEY, code int NOT NULL UNIQUE, item text)",
    "INSERT INTO orders SELECT i, 100 + i, 'x' || i FROM generate_series(1, 200) i",
)
BEFORE = (
    "DELETE FROM orders WHERE id = 3",
    "UPDATE orders SET code = 999 WHERE id = 4",
    "UPDATE orders SET id = 998 WHERE id = 5",
    "INSERT INTO orders VALUES (300, 400, 'short-lived'); DELETE FROM orders WHERE id = 300",
)
BY_CODE = "ALTER TABLE orders DROP CONSTRAINT orders_pkey; ALTER TABLE orders ADD PRIMARY KEY (code)"
AFTER = (
    "UPDATE orders SET item = 'y' WHERE code = 108",
    "UPDATE orders SET code = 997 WHERE code = 109",
    "DELETE FROM orders WHERE code = 110",
)
KEYS = {
    "another primary key": [*BEFORE, f"BEGIN; {BY_CODE}; COMMIT", *AFTER],
    "one more column": [*BEFORE, BY_CODE.replace("(code)", "(id, code)"), *AFTER],
    "in one transaction": [f"BEGIN; {'; '.join(BEFORE)}; {BY_CODE}; {'; '.join(AFTER)}; COMMIT"],
    "an index": [*BEFORE, "ALTER TABLE orders REPLICA IDENTITY USING INDEX orders_code_key", *AFTER],
    "and back again": [*BEFORE, BY_CODE, *AFTER, BY_CODE.replace("(code)", "(id)"), "DELETE FROM orders WHERE id = 12"],
    "without changes behind it": [*BEFORE, f"BEGIN; {BY_CODE}; COMMIT"],
}


def assert_one_key_since_the_last_copy(stage: Stage) -> None:
    """Check that no record after the copy's first one has an older key, which a fold would read as the new one."""
    keys: list[tuple[str, ...]] = []
    for table, _, row in stage.log.records():
        keys = [] if chr(row["__op"]) == "t" else keys
        keys.append(table.schema.key)
    assert len(set(keys)) == 1


def assert_as_the_source(stage: Stage, key: tuple[str, ...] = ("id",), table: str = "orders") -> None:
    found = stage.log.replay()[f"public.{table}"]
    assert None not in found
    assert sorted(map(dict_items, found.values())) == sorted(map(dict_items, stage.source_rows(table, key).values()))


def dict_items(row: dict[str, Any]) -> list[tuple[str, str]]:
    return sorted((name, str(value)) for name, value in row.items())


@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize("change", KEYS)
def test_another_key_copies_the_table_again(stage: Stage, change: str, running: bool) -> None:
    stage.sql(*KEYED)
    stage.catch_up()
    if running:
        capture = stage.start()
        stage.sql(*KEYS[change])
        wait_until(lambda: marks(stage) and stage.state("public.orders") is TableState.STREAMING, "it is copied again")
        capture.stop()
    else:
        stage.sql(*KEYS[change])
    stage.catch_up()
    assert_one_key_since_the_last_copy(stage)
    assert_as_the_source(stage)
    copies = marks(stage)
    assert copies
    stage.sql("UPDATE orders SET item = 'z' WHERE id = 20")
    stage.catch_up()
    assert marks(stage) == copies, "and once only"
    assert_as_the_source(stage)


def test_a_key_that_changes_while_the_source_is_not_looked_at_is_told_by_the_stream(stage: Stage) -> None:
    stage.sql(*KEYED)
    stage.catch_up()
    stage.config = replace(stage.config, look_s=3600)
    capture = stage.start()
    wait_until(stage.slot_active, "it streams")
    stage.sql(*KEYS["another primary key"])
    wait_until(lambda: marks(stage) and stage.state("public.orders") is TableState.STREAMING, "it is copied again")
    capture.stop()
    assert_one_key_since_the_last_copy(stage)
    assert_as_the_source(stage)


def bag(rows: dict[Any, Any]) -> Counter[tuple[tuple[str, str], ...]]:
    return Counter(tuple(dict_items(row)) for row in rows[None])


def source_bag(stage: Stage, name: str) -> Counter[tuple[tuple[str, str], ...]]:
    with stage.connect() as connection:
        rows = connection.execute(SQL("SELECT * FROM {}").format(Identifier(name)))
        assert rows.description is not None
        names = [column.name for column in rows.description]
        return Counter(tuple(dict_items(dict(zip(names, map(str, row), strict=True)))) for row in rows.fetchall())


@pytest.mark.parametrize("running", [True, False])
def test_a_primary_key_that_goes_leaves_every_row_of_the_bag(stage: Stage, running: bool) -> None:
    stage.sql(*KEYED)
    stage.catch_up()
    capture = stage.start() if running else None
    stage.sql(
        "DELETE FROM orders WHERE id = 1",
        "BEGIN; ALTER TABLE orders DROP CONSTRAINT orders_pkey; ALTER TABLE orders REPLICA IDENTITY FULL; COMMIT",
        "ALTER TABLE orders DROP CONSTRAINT orders_code_key",
        "DELETE FROM orders WHERE id = 2",
        "INSERT INTO orders VALUES (7, 107, 'x7')",
        "UPDATE orders SET item = 'z' WHERE id = 8",
    )
    if capture is not None:
        wait_until(lambda: marks(stage) and stage.state("public.orders") is TableState.STREAMING, "it is copied again")
        capture.stop()
    stage.catch_up()
    assert bag(stage.log.replay()["public.orders"]) == source_bag(stage, "orders")


@pytest.mark.parametrize(
    "key",
    [
        "ADD PRIMARY KEY (id) INCLUDE (code)",
        "ADD CONSTRAINT by_id UNIQUE (id) INCLUDE (code), REPLICA IDENTITY USING INDEX by_id",
    ],
)
def test_columns_that_an_index_includes_are_no_part_of_the_key(stage: Stage, key: str) -> None:
    stage.sql(
        "CREATE TABLE orders (id int NOT NULL, code int, item text)",
        *[f"ALTER TABLE orders {part}" for part in key.split(", ")],
        "INSERT INTO orders SELECT i, 100 + i, 'x' || i FROM generate_series(1, 200) i",
    )
    stage.catch_up()
    stage.sql("UPDATE orders SET code = 999 WHERE id = 7", "DELETE FROM orders WHERE id = 8")
    stage.catch_up()
    assert {table.schema.key for table, _, _ in stage.log.records()} == {("id",)}
    assert stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id"])
    assert marks(stage) == 0


def test_a_primary_key_under_full_that_went_between_two_looks(stage: Stage) -> None:
    stage.sql(*KEYED, "ALTER TABLE orders REPLICA IDENTITY FULL")
    stage.catch_up()
    stage.sql(
        "ALTER TABLE orders DROP CONSTRAINT orders_pkey; ALTER TABLE orders DROP CONSTRAINT orders_code_key",
        "INSERT INTO orders VALUES (7, 107, 'once more')",
        "DELETE FROM orders WHERE item = 'once more'",
        "ALTER TABLE orders ADD CONSTRAINT orders_pkey PRIMARY KEY (id)",
    )
    stage.catch_up()
    assert_as_the_source(stage)
    assert marks(stage) == 1
    stage.sql("REINDEX TABLE CONCURRENTLY orders")
    stage.catch_up()
    assert marks(stage) == 1


def test_a_copy_that_follows_another_begins_behind_what_was_there_before_it(stage: Stage) -> None:
    """A column's old name is in a backlog: the record that voids it must come after it."""
    stage.sql(*ORDERS)
    stage.catch_up()
    stage.sql(
        "INSERT INTO orders SELECT i, 'short-lived', 1 FROM generate_series(1001, 60000) i",
        "DELETE FROM orders WHERE id > 1000",
        "ALTER TABLE orders RENAME id TO number",
        "DELETE FROM orders WHERE number = 3",
    )
    stage.catch_up()
    assert_one_key_since_the_last_copy(stage)
    assert stage.log.replay()["public.orders"] == stage.source_rows("orders", ["number"])


def test_a_generated_column_that_comes_and_becomes_one_like_others(stage: Stage) -> None:
    """The log has its values from version 18 on; before that, a copy brings them once it is an ordinary column."""
    with stage.connect() as connection:
        sent = connection.info.server_version >= 180000
    stage.sql(
        "CREATE TABLE orders (id int PRIMARY KEY)",
        "INSERT INTO orders SELECT generate_series(1, 20)",
    )
    stage.catch_up()
    stage.sql("ALTER TABLE orders ADD g int GENERATED ALWAYS AS (id * 2) STORED")
    stage.catch_up()
    assert marks(stage) == sent
    stage.sql("ALTER TABLE orders ALTER g DROP EXPRESSION", "INSERT INTO orders VALUES (21, 5)")
    stage.catch_up()
    assert stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id"])
    stage.catch_up()
    assert marks(stage) == 1


DEFERRABLE = (
    "CREATE TABLE orders (id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED, big text, n int)",
    "ALTER TABLE orders ALTER big SET STORAGE EXTERNAL; ALTER TABLE orders REPLICA IDENTITY FULL",
    "INSERT INTO orders SELECT i, repeat(i::text, 4000), i FROM generate_series(1, 4) i",
)
SWAPS = (
    "UPDATE orders SET id = CASE id WHEN 1 THEN 2 ELSE 1 END WHERE id IN (1, 2)",
    "UPDATE orders SET id = id + 1",
)


def test_rows_that_swap_deferrable_keys_stay(stage: Stage) -> None:
    stage.sql(*DEFERRABLE)
    stage.catch_up()
    stage.sql(*SWAPS)
    stage.catch_up()
    found = stage.log.replay()["public.orders"]
    assert len(found[None]) == 4
    assert all(row["big"] != "(never came)" for row in found[None])
    assert {row["id"] for row in found[None]} == {"2", "3", "4", "5"}


def test_a_deferrable_key_alone_does_not_break_the_application(stage: Stage) -> None:
    """PostgreSQL accepts no deferrable key as identity.

    In a publication of updates the application's own updates would fail.
    """
    stage.sql(DEFERRABLE[0], DEFERRABLE[2])
    stage.catch_up()
    stage.sql(*SWAPS)
    stage.catch_up()
    assert stage.state("public.orders") is TableState.HISTORY_ONLY


PARTS = (
    "CREATE TABLE parts (id int PRIMARY KEY, item text) PARTITION BY RANGE (id)",
    "CREATE TABLE low PARTITION OF parts FOR VALUES FROM (0) TO (100)",
    "CREATE TABLE mid PARTITION OF parts FOR VALUES FROM (100) TO (200)",
    "INSERT INTO parts SELECT i, 'x' FROM generate_series(91, 110) i",
)
LOOSE = "CREATE TABLE more (LIKE parts INCLUDING ALL); INSERT INTO more VALUES (201, 'm'), (202, 'm')"
ATTACH = "ALTER TABLE parts ATTACH PARTITION more FOR VALUES FROM (200) TO (300)"
PARTITIONS = {
    "attached": [LOOSE, ATTACH],
    "made, filled and attached in one transaction": [f"BEGIN; {LOOSE}; {ATTACH}; COMMIT"],
    "attached below another": [
        "CREATE TABLE more (LIKE parts INCLUDING ALL) PARTITION BY RANGE (id)",
        "CREATE TABLE most PARTITION OF more FOR VALUES FROM (200) TO (250); INSERT INTO more VALUES (201, 'm')",
        ATTACH,
    ],
    "detached": ["ALTER TABLE parts DETACH PARTITION mid", "INSERT INTO parts VALUES (1, 'y')"],
    "dropped": ["DROP TABLE mid", "INSERT INTO parts VALUES (1, 'y')"],
    "truncated by itself": ["TRUNCATE mid", "INSERT INTO parts VALUES (101, 'y')"],
    "away for a while": [
        "ALTER TABLE parts DETACH PARTITION mid",
        "DELETE FROM mid WHERE id = 101",
        "ALTER TABLE parts ATTACH PARTITION mid FOR VALUES FROM (100) TO (200)",
    ],
}


@pytest.mark.parametrize("change", PARTITIONS)
def test_rows_of_partitions_come_and_go_with_them(stage: Stage, change: str) -> None:
    stage.sql(*PARTS)
    stage.config = replace(stage.config, tables=("public.parts",))
    stage.catch_up()
    stage.sql(*PARTITIONS[change])
    stage.catch_up()
    assert stage.log.replay()["public.parts"] == stage.source_rows("parts", ["id"])
    stage.sql("INSERT INTO parts VALUES (2, 'z')")
    stage.catch_up()
    assert marks(stage) == int(change == "away for a while"), "only a leaf that comes back is copied with the table"


@pytest.mark.parametrize(
    "changes",
    [
        [
            "CREATE TABLE more PARTITION OF parts FOR VALUES FROM (200) TO (300)",
            "INSERT INTO parts SELECT i, 'm' FROM generate_series(200, 210) i; ALTER TABLE parts ADD other int",
        ],
        [LOOSE, "TRUNCATE more", ATTACH],
        ["DELETE FROM parts WHERE id = 101"],
    ],
)
def test_partitions_that_bring_no_rows_copy_nothing(stage: Stage, changes: list[str]) -> None:
    stage.sql(*PARTS)
    stage.config = replace(stage.config, tables=("public.parts",))
    stage.catch_up()
    stage.sql(*changes)
    stage.catch_up()
    assert marks(stage) == 0
    stage.sql("UPDATE parts SET item = 'y'")
    stage.catch_up()
    assert stage.log.replay()["public.parts"] == stage.source_rows("parts", ["id"])
    assert marks(stage) == 0


@pytest.mark.parametrize("change", ["VACUUM FULL parts", "TRUNCATE parts", "TRUNCATE mid"])
def test_a_partition_with_another_file_copies_once(stage: Stage, change: str) -> None:
    stage.sql(*PARTS)
    stage.config = replace(stage.config, tables=("public.parts",))
    stage.catch_up()
    stage.sql(change, "INSERT INTO parts VALUES (1, 'y')")
    stage.catch_up()
    stage.catch_up()
    copies = marks(stage)
    stage.sql("INSERT INTO parts VALUES (2, 'y')")
    stage.catch_up()
    assert marks(stage) == copies
    assert stage.log.replay()["public.parts"] == stage.source_rows("parts", ["id"])


def test_a_retyped_column_of_partitions(stage: Stage) -> None:
    stage.sql(*PARTS)
    stage.catch_up()
    stage.sql("ALTER TABLE parts ALTER item TYPE text USING item || '!'")
    stage.catch_up()
    assert stage.log.replay()["public.parts"] == stage.source_rows("parts", ["id"])
    assert marks(stage) == 1


def test_a_table_that_gets_a_key_later_is_rid_of_what_was_deleted_before(stage: Stage) -> None:
    stage.sql("CREATE TABLE orders (id int, item text)", "INSERT INTO orders VALUES (1, 'x')")
    stage.catch_up()
    assert stage.state("public.orders") is TableState.HISTORY_ONLY
    stage.sql("INSERT INTO orders VALUES (2, 'y'), (3, 'z')")
    stage.catch_up()
    stage.sql("DELETE FROM orders WHERE id = 2", "ALTER TABLE orders ADD PRIMARY KEY (id)")
    stage.catch_up()
    assert stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id"])


def test_a_generated_column_in_the_identity_does_not_break_the_application(stage: Stage) -> None:
    """From 18 on PostgreSQL refuses updates of a table whose identity has an unpublished column.

    Virtual columns are never published.
    """
    with stage.connect() as connection:
        refused = connection.info.server_version >= 180000
    kind = "VIRTUAL" if refused else "STORED"
    stage.sql(
        f"CREATE TABLE orders (id int PRIMARY KEY, item text, g int GENERATED ALWAYS AS (id * 2) {kind})",
        f"CREATE TABLE keyed (id int PRIMARY KEY, item text, g int GENERATED ALWAYS AS (id * 2) {kind})",
        "ALTER TABLE orders REPLICA IDENTITY FULL; INSERT INTO orders VALUES (1, 'x'); INSERT INTO keyed VALUES (1, 'x')",
    )
    stage.catch_up()
    stage.sql("UPDATE orders SET item = 'y'", "UPDATE keyed SET item = 'y'")
    stage.catch_up()
    assert stage.state("public.keyed") is TableState.STREAMING
    assert stage.state("public.orders") is (TableState.HISTORY_ONLY if refused else TableState.STREAMING)
    found = [f for f in check_source(stage.config) if f.code == "replica_identity_unusable"]
    assert [(f.table, f.sql) for f in found] == ([("public.orders", "")] if refused else [])
