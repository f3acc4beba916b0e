"""Rows asked for by key are read again during running changes: existing rows arrive, absent ones go, the newer wins."""

from __future__ import annotations

import pyarrow as pa
import pytest
from tests.capture.beside import wait_until
from tests.capture.capture_stage import Stage
from tests.capture.test_column_rules import digest, holds, ruled
from tests.capture.test_copying import DOCS, ORDERS, workload

from millstream.capture.copying.repair_request import CHUNK_KEYS, SCANNED_KEYS, ask_repair, repair_chunks
from millstream.capture.copying.row_repair import deleted_rows
from millstream.model.column_rules import Rule
from millstream.model.ids import SchemaVersion, SourceId, TableId
from millstream.model.schema import Column, TableSchema


def ask(stage: Stage, table: str, columns: list[str], keys: list[tuple[str, ...]]) -> None:
    row = stage.table(table)
    ask_repair(stage.catalog, row.stream, row.id, columns, keys)


def left(stage: Stage) -> list[str]:
    return [chunk.failed or "to do" for chunk in repair_chunks(stage.catalog, stage.catalog.stream("shop").id)]


def out_of_sight(stage: Stage, *statements: str) -> None:
    """Make changes that no publication sends."""
    hide, show = (
        f"ALTER PUBLICATION {stage.config.publication} SET (publish = '{verbs}')"
        for verbs in ("", "insert, update, delete, truncate")
    )
    with stage.connect() as connection, connection.transaction():
        for statement in (hide, *statements, show):
            connection.execute(statement)


def test_keys_asked_for_come_go_and_change_as_the_source_has_them(stage: Stage) -> None:
    stage.sql(ORDERS, "INSERT INTO orders SELECT i, 'old', i, NULL FROM generate_series(1, 20) i")
    stage.catch_up()
    out_of_sight(
        stage, "DELETE FROM orders WHERE id = 1", "UPDATE orders SET item = 'new' WHERE id = 2",
        "INSERT INTO orders VALUES (21, 'born', 1, NULL)", "UPDATE orders SET id = 22 WHERE id = 3",
    )  # fmt: skip
    stage.catch_up()
    assert stage.log.replay()["public.orders"] != stage.source_rows("orders", ["id"])
    before = len(list(stage.log.records()))
    ask(stage, "public.orders", ["id"], [(str(i),) for i in (1, 2, 3, 4, 21, 22, 99)])
    stage.catch_up()
    assert stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id"])
    assert [(chr(row["__op"]), row["id"]) for _, _, row in list(stage.log.records())[before:]] == [
        ("d", "1"), ("d", "3"), ("d", "99"), ("r", "2"), ("r", "4"), ("r", "21"), ("r", "22"),
    ]  # fmt: skip
    assert left(stage) == []


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.siege
def test_damage_is_repaired_exactly_beside_a_live_workload(stage: Stage, *, restarts: bool) -> None:
    keys = 800
    stage.sql(DOCS, f"INSERT INTO docs SELECT i, repeat('old', 900), 0 FROM generate_series(0, {keys - 1}) i")
    stage.catch_up()
    out_of_sight(
        stage, "DELETE FROM docs WHERE id < 200", "UPDATE docs SET body = 'unseen' WHERE id BETWEEN 200 AND 400",
        "UPDATE docs SET id = id + 1000 WHERE id > 600",
    )  # fmt: skip
    everything = [(str(i),) for i in range(2000)]
    assert len(everything) > CHUNK_KEYS, "more than one chunk"
    with workload(stage, keys):
        running = stage.start()
        wait_until(lambda: len(stage.log.entries) > 10, "capture runs")
        for _ in range(3):
            ask(stage, "public.docs", ["id"], everything)
            if restarts:
                wait_until(lambda: 0 < len(left(stage)) < len(everything) // CHUNK_KEYS, "a part of the repair is done")
                running.end()
                running = stage.start()
            wait_until(lambda: not left(stage), "the repair is done")
        running.stop()
    stage.catch_up()
    assert stage.log.replay()["public.docs"] == stage.source_rows("docs", ["id"])


@pytest.mark.parametrize("key", [["id"], ["part", "id"]])
@pytest.mark.siege
def test_rows_with_hashed_keys_are_repaired_exactly_beside_a_live_workload(stage: Stage, key: list[str]) -> None:
    keys = 300
    stage.sql(
        f"CREATE TABLE docs (id int, body text, n int, part numeric DEFAULT 1.50, PRIMARY KEY ({', '.join(key)}))",
        "ALTER TABLE docs ALTER body SET STORAGE EXTERNAL",
        f"INSERT INTO docs SELECT i, repeat('old', 900), 0 FROM generate_series(0, {keys - 1}) i",
    )
    ruled(stage, {"id": Rule.HASH, "body": Rule.HASH}, "docs")
    stage.catch_up()
    out_of_sight(
        stage, "DELETE FROM docs WHERE id < 70", "UPDATE docs SET body = 'unseen' WHERE id BETWEEN 70 AND 140",
        "UPDATE docs SET id = id + 1000 WHERE id > 220",
    )  # fmt: skip
    everything = [tuple("1.50" if name == "part" else digest(str(i)) for name in key) for i in range(1400)]
    with workload(stage, keys):
        running = stage.start()
        wait_until(lambda: len(stage.log.entries) > 10, "capture runs")
        for _ in range(2):
            row = stage.table("public.docs")
            ask_repair(stage.catalog, row.stream, row.id, key, everything, keys_each=SCANNED_KEYS)
            wait_until(lambda: not left(stage), "the repair is done")
        running.stop()
    stage.catch_up()
    rows = [
        row | {name: digest(str(row[name])) for name in ("id", "body")}
        for row in stage.source_rows("docs", ["id"]).values()
    ]
    found = stage.log.replay()["public.docs"]
    assert sorted(found.values(), key=str) == sorted(rows, key=str)
    assert not holds(stage.folder, "oldold", "newnew", "unseen")


def test_composite_keys_may_be_asked_for_in_any_order_of_columns(stage: Stage) -> None:
    stage.sql(
        "CREATE TABLE pairs (a text, b date, c int, PRIMARY KEY (b, a))",
        "INSERT INTO pairs VALUES ('it''s, \"', '2024-01-01', 1), ('', 'infinity', 2)",
    )
    stage.catch_up()
    before = len(list(stage.log.records()))
    ask(stage, "public.pairs", ["b", "a"], [("infinity", ""), ("2024-01-01", "it's, \""), ("-infinity", "gone")])
    stage.catch_up()
    found = [(chr(row["__op"]), row["a"], row["b"]) for _, _, row in list(stage.log.records())[before:]]
    assert sorted(found) == [("d", "gone", "-infinity"), ("r", "", "infinity"), ("r", "it's, \"", "2024-01-01")]


def test_a_key_that_makes_no_sense_fails_its_request_alone(stage: Stage) -> None:
    stage.sql(ORDERS, "INSERT INTO orders VALUES (1)", "CREATE TABLE other (id int PRIMARY KEY)")
    stage.catch_up()
    ask(stage, "public.orders", ["id"], [("one",)])
    ask(stage, "public.other", ["id"], [("1",)])
    stage.sql("INSERT INTO other VALUES (1)")
    stage.catch_up()
    assert len(left(stage)) == 1
    assert "22P02" in left(stage)[0]
    assert stage.log.replay()["public.other"] == stage.source_rows("other", ["id"])
    ask(stage, "public.orders", ["id"], [("1",)])
    stage.catch_up()
    assert left(stage) == []


def test_deletions_keep_keys_that_their_columns_cannot_hold() -> None:
    schema = TableSchema(
        TableId(1), SchemaVersion(1), SourceId(1), "public", "t",
        (Column("v", pa.string()), Column("d", pa.date32()), Column("n", pa.decimal128(5, 2))), ("d", "n"), ("d", "n"),
    )  # fmt: skip
    rows = deleted_rows(schema, [("infinity", "1.50"), ("2024-02-29", "NaN")]).to_pylist()
    assert [dict(row["__exact"] or ()) for row in rows] == [{"d": "infinity"}, {"n": "NaN"}]
    assert [(str(row["d"]), str(row["n"]), row["v"]) for row in rows] == [
        ("None", "1.50", None),
        ("2024-02-29", "None", None),
    ]
    assert deleted_rows(schema, []).num_rows == 0
