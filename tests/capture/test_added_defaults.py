"""A column that is added with a constant default copies nothing: schemas say which value rows have from before it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.capture.beside import wait_until
from tests.capture.capture_stage import Stage
from tests.capture.test_column_rules import digest, holds, ruled

from millstream.model.column_rules import Rule
from millstream.model.schema import TableKind


@pytest.fixture
def following(stage: Stage) -> Stage:
    stage.config = replace(stage.config, follows_names=True)
    stage.sql("CREATE TABLE t (id int PRIMARY KEY, a int)", "INSERT INTO t VALUES (1, 1), (2, 2)")
    return stage


def told(stage: Stage) -> list[tuple[str, Any, dict[str, str | None]]]:
    """Return the op of each record, its value of `e` or what it fills in, and what its schema says of older rows."""
    found = []
    for table, _, row in stage.log.records():
        values = dict(row["__exact"] or ()) if table.schema.kind is TableKind.DEFINITION else row
        filled = {column.name: column.filled for column in table.schema.columns if column.filled is not None}
        found.append((chr(row["__op"]), values.get("e"), filled))
    return found


COPIED = [("t", None, {}), ("r", None, {}), ("r", None, {})]


def test_an_idle_table_gets_a_definition_and_no_row(following: Stage) -> None:
    stage = following
    stage.catch_up()
    assert told(stage)[-2:] == COPIED[1:]
    before = told(stage)
    stage.sql("ALTER TABLE t ADD e int NOT NULL DEFAULT 5")
    stage.catch_up()
    assert told(stage) == [*before, ("s", "5", {"e": "5"})]
    stage.sql("ALTER TABLE t ALTER e DROP DEFAULT, ALTER e DROP NOT NULL", "UPDATE t SET e = NULL WHERE id = 1")
    stage.catch_up()
    assert told(stage)[-1] == ("u", None, {"e": "5"})
    assert "r" not in {op for op, *_ in told(stage)[len(before) :]}


def test_the_first_record_with_the_column_says_it_already(following: Stage) -> None:
    """No look but that which this record waits for."""
    stage = following
    stage.catch_up()
    before = len(told(stage))
    stage.config = replace(stage.config, look_s=3600.0)
    capture = stage.start()
    wait_until(stage.slot_active, "it streams")
    stage.sql("INSERT INTO t VALUES (3, 3); ALTER TABLE t ADD e text DEFAULT 'x'; INSERT INTO t VALUES (4, 4, NULL)")
    wait_until(lambda: len(told(stage)) >= before + 2, "its records")
    capture.stop()
    assert told(stage)[before : before + 2] == [("c", None, {}), ("c", None, {"e": "x"})]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "other", "value"), [("varchar(3)", "text", "abc"), ("cidr", "inet", "10.0.0.0/8"), ("int", "oid", "5")]
)
def test_records_from_before_a_new_type_without_a_rewrite_say_it_too(
    following: Stage, kind: str, other: str, value: str
) -> None:
    stage = following
    stage.catch_up()
    before = len(told(stage))
    stage.sql(
        f"ALTER TABLE t ADD e {kind} DEFAULT '{value}'",
        "INSERT INTO t (id, a) VALUES (3, 3)",
        f"ALTER TABLE t ALTER e DROP DEFAULT, ALTER e TYPE {other}",
        "INSERT INTO t (id, a) VALUES (4, 4)",
    )
    stage.catch_up()
    records = [(op, None if found is None else str(found), filled) for op, found, filled in told(stage)[before:]]
    assert records == [("c", value, {"e": value}), ("c", None, {"e": value}), ("s", value, {"e": value})]
    stage.sql("ALTER TABLE t ALTER e TYPE text USING 'other'")  # rewrites the rows
    stage.catch_up()
    assert {op for op, *_ in told(stage)[before + 3 :]} == {"t", "r"}
    assert all(found == "other" and not filled for op, found, filled in told(stage)[before + 3 :] if op == "r")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("rule", "there"), [(Rule.HASH, digest("secret")), (Rule.REDACT, "[redacted]"), (Rule.EXCLUDE, None)]
)
def test_a_rule_holds_for_the_default(following: Stage, rule: Rule, there: str | None) -> None:
    stage = following
    stage.sql("ALTER TABLE t ADD e text")  # a rule is for a column that was there
    ruled(stage, {"e": rule}, table="t")
    stage.catch_up()
    stage.sql("ALTER TABLE t RENAME e TO f")
    stage.catch_up()
    before = told(stage)
    stage.sql("ALTER TABLE t ADD e text DEFAULT 'secret'")
    stage.catch_up()
    assert told(stage)[len(before) :] == ([] if there is None else [("s", there, {"e": there})])
    stage.sql("INSERT INTO t (id, e) VALUES (3, 'secret')")
    stage.catch_up()
    assert told(stage)[-1] == ("c", there, {} if there is None else {"e": there})
    assert not holds(stage.folder, "secret")


def test_a_lake_that_reads_by_names_has_defaults_too_and_renamed_columns_copied(following: Stage) -> None:
    stage = following
    stage.config = replace(stage.config, copies_renamed=True)
    stage.catch_up()
    before = told(stage)
    stage.sql("ALTER TABLE t ADD e int DEFAULT 5")
    stage.catch_up()
    assert told(stage)[len(before) :] == [("s", "5", {"e": "5"})]
    stage.sql("ALTER TABLE t RENAME a TO b", "INSERT INTO t VALUES (3, 3, 3)")
    stage.catch_up()
    assert sorted(op for op, *_ in told(stage)[len(before) + 1 :] if op != "c") == ["r", "r", "r", "t"]


def test_a_partitioned_table_is_copied_again(stage: Stage) -> None:
    stage.config = replace(stage.config, follows_names=True)
    stage.sql(
        "CREATE TABLE t (id int PRIMARY KEY, a int) PARTITION BY RANGE (id)",
        "CREATE TABLE t_low PARTITION OF t FOR VALUES FROM (0) TO (9)",
        "INSERT INTO t VALUES (1, 1), (2, 2)",
    )
    stage.catch_up()
    before = len(told(stage))
    stage.sql("ALTER TABLE t ADD e int DEFAULT 5")
    stage.catch_up()
    assert sorted(told(stage)[before:]) == [("r", "5", {}), ("r", "5", {}), ("t", None, {})]


def test_a_table_whose_records_lack_numbers_is_copied_again(following: Stage) -> None:
    stage = following
    stage.catch_up()
    before = len(told(stage))
    stage.config = replace(stage.config, follows_names=False)
    stage.sql("ALTER TABLE t ADD e int DEFAULT 5")
    stage.catch_up()
    assert sorted(told(stage)[before:]) == [("r", "5", {}), ("r", "5", {}), ("t", None, {})]
