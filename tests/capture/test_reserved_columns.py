"""A column with one of Millstream's own names is captured under that name with a `_` after it; nothing is quarantined."""

from __future__ import annotations

import pytest
from tests.capture.capture_stage import Stage
from tests.codec.pgoutput_messages import relation

from millstream.capture.source_table_checks import check_source
from millstream.codec.pgoutput import Relation, parse_message, table_schema
from millstream.model.ids import SourceId
from millstream.model.records import LOG_ROW_PREFIX, OPERATION_ORDINAL, RECORD_PREFIX, log_names

NAMES = {field.name for field in (*LOG_ROW_PREFIX, *RECORD_PREFIX, OPERATION_ORDINAL)}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_column_of_a_reserved_name_gets_another(name: str) -> None:
    found = parse_message(relation(7, "public", "op", [(name, 23, -1, True), ("v", 25, -1, False)]))
    assert isinstance(found, Relation)
    schema = table_schema(found, source=SourceId(1))
    assert [column.name for column in schema.columns] == [f"{name}_", "v"]
    assert schema.key == schema.identity == (f"{name}_",)


def test_a_name_that_is_taken_gets_another_underscore() -> None:
    assert log_names(["id", "v"]) == ("id", "v")
    assert log_names(["__seq", "__seq_", "v"]) == ("__seq__", "__seq_", "v")
    assert log_names(["__SEQ", "__seq", "__Seq__"]) == ("__SEQ_", "__seq___", "__Seq__"), "a lake has no upper case"
    assert log_names(["__seq_", "seq"]) == ("__seq_", "seq"), "where nothing is reserved nothing is renamed"


def renamed(rows: dict[object, dict[str, str | None]], **names: str) -> dict[object, dict[str, str | None]]:
    return {key: {names.get(name, name): value for name, value in row.items()} for key, row in rows.items()}


@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
def test_copied_and_streamed_rows_of_such_a_table_are_the_sources(stage: Stage, identity: str) -> None:
    stage.sql(
        'CREATE TABLE t ("__seq" int PRIMARY KEY, "__op" text, "__op_" text, at date)',
        f"ALTER TABLE t REPLICA IDENTITY {identity}; ALTER TABLE t ALTER __op SET STORAGE EXTERNAL",
        "INSERT INTO t SELECT i, 'copied', 'x', '2020-01-01' FROM generate_series(1, 200) i",
    )
    assert not stage.catch_up().quarantined
    stage.sql(
        "INSERT INTO t VALUES (201, repeat('large', 2000), 'y', 'infinity')",
        "UPDATE t SET __op_ = 'changed' WHERE __seq IN (3, 201)",
        "UPDATE t SET __seq = 400 WHERE __seq = 4",
        "DELETE FROM t WHERE __seq = 5",
    )
    assert not stage.catch_up().quarantined
    expected = renamed(stage.source_rows("t", ["__seq"]), __seq="__seq_", __op="__op__")
    assert stage.log.replay()["public.t"] == expected
    keys = {tuple(table.schema.key) for table, _, _ in stage.log.records()}
    assert keys == {("__seq_",)}

    found = [f for f in check_source(stage.config) if f.code == "column_renamed"]
    assert [(f.blocks, f.table) for f in found] == [("nothing", "public.t")] * 2
    assert "captured as __seq_" in found[0].message
    assert "captured as __op__" in found[1].message


def test_a_column_whose_captured_name_goes_to_another_has_the_table_copied_again(stage: Stage) -> None:
    stage.sql('CREATE TABLE t (id int PRIMARY KEY, "__seq" int)', "INSERT INTO t VALUES (1, 10), (2, 20)")
    stage.catch_up()
    assert stage.log.replay()["public.t"][("1",)] == {"id": "1", "__seq_": "10"}
    stage.sql('ALTER TABLE t ADD "__seq_" int', "INSERT INTO t VALUES (3, 30, 31)")
    assert not stage.catch_up().quarantined
    expected = renamed(stage.source_rows("t", ["id"]), __seq="__seq__")
    assert stage.log.replay()["public.t"] == expected, "rows that nobody touched too"
    stage.sql("ALTER TABLE t DROP __seq_", "UPDATE t SET __seq = 32 WHERE id = 3")
    assert not stage.catch_up().quarantined
    assert stage.log.replay()["public.t"] == renamed(stage.source_rows("t", ["id"]), __seq="__seq_")
