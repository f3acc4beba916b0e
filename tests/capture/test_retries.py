"""`tables retry` while the cause remains: the table is quarantined again, by name, and other tables don't notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from tests.capture.beside import wait_until
from tests.capture.capture_stage import Stage

from millstream.app.table_requests import retry_table
from millstream.catalog import TableState
from millstream.errors import TableUndecodable, UsageError
from millstream.model.ids import ShardId
from millstream.model.schema import Column

ORDERS = "CREATE TABLE orders (id int PRIMARY KEY, item text); INSERT INTO orders VALUES (1, 'x')"


def retry(stage: Stage) -> None:
    assert "copy" in retry_table(stage.catalog, stage.catalog.stream("shop").id, "public.bad")


@pytest.fixture
def role(stage: Stage) -> Iterator[str]:
    """Yield a role that may replicate, and may read one of the two tables."""
    name = f"reader_{stage.config.slot}"
    stage.sql(ORDERS, f"CREATE ROLE {name} LOGIN REPLICATION", f"GRANT SELECT ON orders TO {name}")
    yield name
    stage.sql(f"DROP OWNED BY {name}", f"DROP ROLE {name}")


def unreadable(stage: Stage, role: str, *extra: str) -> None:
    """Create a table that the role may not read, publish it, and let the stage connect as the role."""
    stage.sql(
        "CREATE TABLE bad (id int PRIMARY KEY); INSERT INTO bad VALUES (1)",
        *extra,
        f"CREATE PUBLICATION {stage.config.publication} FOR TABLE orders, bad",
    )
    stage.config = replace(stage.config, dsn=stage.dsn.replace("postgres@", f"{role}@"))


def fails_again(stage: Stage, change: Callable[[int], str], reason: str) -> None:
    """Retry while idle, with changes after it, and while a capture runs.

    Each time the table is quarantined, `orders` goes on, and both stay so after a restart.
    """
    before = stage.catch_up().quarantined
    assert list(before) == ["public.bad"]
    assert reason in before["public.bad"]
    for number in (10, 20):
        retry(stage)
        if number == 20:
            stage.sql(change(number))
        stage.sql(f"INSERT INTO orders VALUES ({number}, 'y')")
        assert reason in stage.catch_up().quarantined["public.bad"], "a retry that fails"
        assert stage.state("public.orders") is TableState.STREAMING
    running = stage.start()
    wait_until(stage.slot_active, "it streams")
    retry(stage)
    stage.sql(change(30), "INSERT INTO orders VALUES (30, 'y')")
    wait_until(lambda: stage.state("public.bad") is TableState.QUARANTINED, "it is quarantined again")
    wait_until(lambda: ("30",) in stage.log.replay()["public.orders"], "the other goes on")
    assert running.error is None
    running.stop()
    found = stage.catch_up().quarantined
    assert list(found) == ["public.bad"], "the request is used up: a restart knows of none"
    assert reason in found["public.bad"]
    assert stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id"])


@pytest.mark.long
def test_a_copy_that_can_not_be_begun(stage: Stage) -> None:
    """The thread that submits changes makes the record with which a copy begins; the copy's own workers don't."""

    def refuse(moment: str, details: Mapping[str, Any]) -> None:
        if moment == "copy.begin" and (table := details["table"]).name == "bad":
            raise TableUndecodable("it has no schema", table=table.full_name, relation_oid=table.oid, reason="none")

    stage.sql(ORDERS, "CREATE TABLE bad (id int PRIMARY KEY)", "INSERT INTO bad VALUES (1)")
    stage.catch_up()
    stage.config = replace(stage.config, on_moment=refuse)
    stage.catalog.set_state(stage.table("public.bad").id, TableState.QUARANTINED, "it has no schema")
    fails_again(stage, lambda n: f"INSERT INTO bad VALUES ({n})", "it has no schema")


@pytest.mark.long
def test_rows_that_may_not_be_read(stage: Stage, role: str) -> None:
    unreadable(stage, role)
    fails_again(stage, lambda n: f"INSERT INTO bad VALUES ({n})", "permission denied")


@pytest.mark.long
def test_rows_that_row_security_hides(stage: Stage, role: str) -> None:
    unreadable(stage, role, f"GRANT SELECT ON bad TO {role}", "ALTER TABLE bad ENABLE ROW LEVEL SECURITY")
    fails_again(stage, lambda n: f"INSERT INTO bad VALUES ({n})", "row-level security")


def test_a_table_that_no_publication_sends(stage: Stage, role: str) -> None:
    stage.sql(
        f"CREATE TABLE bad (id int PRIMARY KEY); GRANT SELECT ON bad TO {role}",
        f"CREATE PUBLICATION {stage.config.publication} FOR TABLE orders",
    )
    stage.config = replace(stage.config, dsn=stage.dsn.replace("postgres@", f"{role}@"))
    fails_again(stage, lambda n: f"INSERT INTO bad VALUES ({n})", "must be owner")


@pytest.mark.long
@pytest.mark.parametrize("keyed", [True, False])
def test_rows_that_are_no_text(ascii_stage: Stage, keyed: bool) -> None:
    key = "id int PRIMARY KEY" if keyed else "id int"
    full = "" if keyed else "; ALTER TABLE bad REPLICA IDENTITY FULL"
    ascii_stage.sql(ORDERS, f"CREATE TABLE bad ({key}, v text){full}", r"INSERT INTO bad VALUES (1, E'\xff\xfe')")
    fails_again(ascii_stage, lambda n: f"INSERT INTO bad VALUES ({n}, E'\\xff')", "UTF-8")


def test_a_change_that_is_no_text(ascii_stage: Stage) -> None:
    """The table's rows can be copied again; the next such change sets the table aside again."""
    ascii_stage.sql(ORDERS, "CREATE TABLE bad (id int PRIMARY KEY, v text)")
    ascii_stage.catch_up()
    for number in range(2):
        ascii_stage.sql(rf"INSERT INTO bad VALUES ({number}, E'\xff\xfe')")
        assert "UTF-8" in ascii_stage.catch_up().quarantined["public.bad"]
        ascii_stage.sql("DELETE FROM bad")
        retry(ascii_stage)
        assert not ascii_stage.catch_up().quarantined
    assert ascii_stage.log.replay().get("public.bad", {}) == {}


def test_a_name_that_applications_write(stage: Stage) -> None:
    stage.sql(ORDERS)
    stage.catch_up()
    stream = stage.catalog.stream("shop").id
    text = (Column("x", pa.string()),)
    stage.catalog.application_table(
        stream, "public", "bad", shard=ShardId(0), grow=lambda found: replace(found, columns=text)
    )
    stage.sql("CREATE TABLE bad (id int PRIMARY KEY); INSERT INTO bad VALUES (1)")
    for number in range(2, 4):
        assert "applications write" in stage.catch_up().quarantined["public.bad"]
        with pytest.raises(UsageError, match="both would have one name in the lake"):
            retry_table(stage.catalog, stream, "public.bad")
        stage.sql(f"INSERT INTO orders VALUES ({number}, 'y')")
    assert stage.log.replay()["public.orders"].keys() == {("1",), ("2",)}
