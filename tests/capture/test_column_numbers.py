"""Schemas in the log have the numbers of their columns in the source, by which a renamed column is the same column."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
from psycopg import Connection
from tests.capture.beside import wait_until
from tests.capture.capture_stage import Stage

from millstream.capture import watched_tables
from millstream.capture.publication import Restriction
from millstream.catalog import TableState
from millstream.model.schema import TableKind


@pytest.fixture
def following(stage: Stage) -> Stage:
    stage.config = replace(stage.config, follows_names=True)
    return stage


def numbered(stage: Stage) -> list[tuple[str, dict[str, int]]]:
    """Return the op of each record in the log, and the numbers of its columns."""
    return [
        (chr(row["__op"]), {column.name: column.number for column in table.schema.columns})
        for table, _, row in stage.log.records()
        if row["__op"] != ord("t")
    ]


def test_columns_keep_their_numbers_in_a_backlog(following: Stage) -> None:
    stage = following
    stage.sql("CREATE TABLE t (id int PRIMARY KEY, gone int, a int, b int)", "ALTER TABLE t DROP gone")
    stage.sql("INSERT INTO t VALUES (1, 1, 1)")
    stage.catch_up()
    stage.sql("INSERT INTO t VALUES (2, 2, 2)")
    stage.sql("ALTER TABLE t RENAME a TO c", "INSERT INTO t VALUES (3, 3, 3)")
    stage.sql("BEGIN; ALTER TABLE t RENAME b TO a; ALTER TABLE t RENAME c TO b; INSERT INTO t VALUES (4, 4, 4); COMMIT")
    stage.sql("ALTER TABLE t RENAME b TO d", "ALTER TABLE t ADD b int", "INSERT INTO t VALUES (5, 5, 5, 5)")
    stage.catch_up()
    first = {"id": 1, "a": 3, "b": 4}
    assert [found for found in numbered(stage) if found[0] == "c"] == [
        ("c", first),
        ("c", {"id": 1, "c": 3, "b": 4}),
        ("c", {"id": 1, "b": 3, "a": 4}),
        ("c", {"id": 1, "d": 3, "a": 4, "b": 5}),
    ]
    assert numbered(stage)[0] == ("r", first)


def test_a_renamed_column_has_its_number_while_capture_runs(following: Stage) -> None:
    stage = following
    stage.sql("CREATE TABLE t (id int PRIMARY KEY, a int)", "INSERT INTO t VALUES (1, 1)")
    stage.catch_up()
    capture = stage.start()
    wait_until(stage.slot_active, "it streams")
    stage.sql("ALTER TABLE t RENAME a TO b", "INSERT INTO t VALUES (2, 2)")
    wait_until(lambda: any(op == "c" for op, _ in numbered(stage)), "the row is in the log")
    assert [columns for op, columns in numbered(stage) if op == "c"] == [{"id": 1, "b": 2}]
    capture.stop()


@pytest.mark.long
def test_columns_that_cannot_be_told_apart_have_no_numbers(following: Stage) -> None:
    stage = following
    stage.sql("CREATE TABLE t (id int PRIMARY KEY, a int)", "INSERT INTO t VALUES (1, 1)")
    stage.catch_up()
    stage.sql("ALTER TABLE t ADD b int", "INSERT INTO t VALUES (2, 2, 2)", "ALTER TABLE t DROP b")
    stage.sql("ALTER TABLE t ADD c int", "INSERT INTO t VALUES (3, 3, 3)")
    stage.catch_up()
    found = [columns for op, columns in numbered(stage) if op == "c"]
    assert found == [{"id": 0, "a": 0, "b": 0}, {"id": 0, "a": 0, "c": 0}]


def test_a_column_dropped_and_added_again_while_its_table_is_idle_has_its_new_number(following: Stage) -> None:
    """The Relation message behind it is the same as before."""
    stage = following
    stage.sql("CREATE TABLE t (id int PRIMARY KEY, a int)", "INSERT INTO t VALUES (1, 1)")
    stage.catch_up()
    capture = stage.start()
    wait_until(stage.slot_active, "it streams")
    stage.sql("INSERT INTO t VALUES (2, 2)")
    wait_until(lambda: ("c", {"id": 1, "a": 2}) in numbered(stage), "the row is in the log")
    stage.sql("ALTER TABLE t DROP a", "ALTER TABLE t ADD a int")
    wait_until(lambda: numbered(stage).count(("r", {"id": 1, "a": 3})) == 2, "it is copied again")
    wait_until(lambda: stage.state("public.t") is TableState.STREAMING, "the copy is complete")
    stage.sql("INSERT INTO t VALUES (3, 3)")
    wait_until(lambda: numbered(stage)[-1][0] == "c", "the row is in the log")
    assert numbered(stage)[-1][1]["a"] in {0, 3}
    capture.stop()


def ops(stage: Stage) -> list[str]:
    """Return the op of each record in the log; of definitions in a row the first, for a rename may cause several."""
    found = [chr(row["__op"]) for _, _, row in stage.log.records()]
    return [op for place, op in enumerate(found) if op != "s" or found[place - 1] != "s"]


def test_a_rename_of_an_idle_table_copies_nothing_and_enters_as_a_definition(following: Stage) -> None:
    stage = following
    stage.sql("CREATE TABLE t (id int PRIMARY KEY, a int)", "INSERT INTO t VALUES (1, 1)")
    stage.catch_up()
    stage.sql("ALTER TABLE t RENAME a TO b", "ALTER TABLE t RENAME id TO key")
    stage.catch_up()
    assert ops(stage) == ["r", "s"]
    table, _, row = list(stage.log.records())[-1]
    assert table.schema.kind is TableKind.DEFINITION
    assert {column.name: column.number for column in table.schema.columns} == {"key": 1, "b": 2}
    assert dict(row["__before"]) == {"a": "b", "id": "key"}
    assert stage.state("public.t") is TableState.STREAMING
    stage.catch_up()
    assert ops(stage) == ["r", "s"]


@pytest.mark.long
def test_renames_in_a_backlog_copy_nothing(following: Stage) -> None:
    stage = following
    stage.sql("CREATE TABLE t (id int PRIMARY KEY, a int)", "INSERT INTO t VALUES (1, 1)")
    stage.catch_up()
    stage.sql("INSERT INTO t VALUES (2, 2)", "ALTER TABLE t RENAME a TO b", "INSERT INTO t VALUES (3, 3)")
    stage.sql("ALTER TABLE t RENAME b TO c", "INSERT INTO t VALUES (4, 4)", "ALTER TABLE t RENAME c TO d")
    stage.catch_up()
    assert ops(stage) == ["r", "c", "c", "c", "s"]
    names = [[*columns] for op, columns in numbered(stage) if op != "r"]
    assert names[:4] == [["id", "a"], ["id", "b"], ["id", "c"], ["id", "d"]]


@pytest.mark.long
def test_a_name_that_came_and_went_while_its_table_was_written_is_defined(following: Stage) -> None:
    stage = following
    stage.sql("CREATE TABLE t (id int PRIMARY KEY, a int)", "INSERT INTO t VALUES (1, 1)")
    stage.catch_up()
    stage.sql("ALTER TABLE t RENAME a TO b", "INSERT INTO t VALUES (2, 2)", "ALTER TABLE t RENAME b TO a")
    stage.catch_up()
    assert ops(stage) == ["r", "c", "s"]
    assert [*numbered(stage)[-1][1]] == ["id", "a"]


@pytest.mark.long
def test_a_name_that_another_column_had_copies_nothing(following: Stage) -> None:
    stage = following
    stage.sql("CREATE TABLE t (id int PRIMARY KEY, a int, b int)", "INSERT INTO t VALUES (1, 1, 1)")
    stage.catch_up()
    stage.sql("BEGIN; ALTER TABLE t RENAME a TO x; ALTER TABLE t RENAME b TO a; ALTER TABLE t RENAME x TO b; COMMIT")
    stage.catch_up()
    assert ops(stage) == ["r", "s"]
    assert numbered(stage)[-1] == ("s", {"id": 1, "b": 2, "a": 3})
    assert dict(list(stage.log.records())[-1][2]["__before"]) == {"a": "b", "b": "a"}
    stage.sql("ALTER TABLE t RENAME b TO c", "ALTER TABLE t ADD b int")
    stage.catch_up()
    assert ops(stage) == ["r", "s"]
    assert numbered(stage)[-1] == ("s", {"id": 1, "c": 2, "a": 3, "b": 4})


def test_a_look_that_a_change_comes_into_begins_again(following: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its statements showed a column under the number of a dropped one, whose name it had got in between."""
    following.sql("CREATE TABLE t (id int PRIMARY KEY, a varchar(9), b text); INSERT INTO t VALUES (1, 'a', 'b')")
    following.catch_up()
    restrictions, is_changed = watched_tables.restrictions, threading.Event()

    def late(connection: Connection, publications: Sequence[str]) -> dict[tuple[str, str], Restriction]:
        if not is_changed.is_set():
            is_changed.set()
            following.sql("BEGIN; ALTER TABLE t DROP b; ALTER TABLE t RENAME a TO b; COMMIT")
        return restrictions(connection, publications)

    monkeypatch.setattr(watched_tables, "restrictions", late)
    following.catch_up()
    (facts,) = following.catalog.facts(f"capture/{following.catalog.stream('shop').id}/layout").values()
    shapes = [[(number, name) for number, name, _ in columns] for _, _, columns in facts["shapes"]]
    assert shapes[-1] == [(1, "id"), (2, "b")]
    assert [(1, "id"), (3, "b")] not in shapes
