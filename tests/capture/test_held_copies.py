"""Another copy of a large table, which a change of its definition requires, waits until an operator asks for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from structlog.testing import capture_logs
from tests.capture.capture_stage import Stage

from millstream.app.status import tables_of
from millstream.app.table_requests import copy_table, pause_table, resume_table, retry_table
from millstream.capture.config import CaptureProgress
from millstream.catalog import TableState
from millstream.errors import UsageError
from millstream.model.ids import StreamId

TABLES = (
    "CREATE TABLE orders (id int PRIMARY KEY, item text)",
    "INSERT INTO orders SELECT i, repeat('x', 100) FROM generate_series(1, 200) i",
    "CREATE TABLE small (id int PRIMARY KEY)",
    "INSERT INTO small VALUES (1)",
    "ANALYZE",
)


def shop(stage: Stage) -> StreamId:
    return stage.catalog.stream("shop").id


def copied(stage: Stage) -> int:
    return sum(chr(row["__op"]) == "r" for _, _, row in stage.log.records())


def begun(stage: Stage) -> None:
    stage.sql(*TABLES)
    stage.config = replace(stage.config, copy_again_above=10_000)
    outcome = stage.catch_up()
    assert (copied(stage), dict(outcome.copies_held)) == (201, {}), "the first copy of a table never waits"


def test_the_copy_of_a_large_table_waits_while_its_changes_enter(stage: Stage) -> None:
    begun(stage)
    stage.sql("ALTER TABLE orders ADD note text DEFAULT 'none'", "ALTER TABLE small ADD note text DEFAULT 'none'")
    stage.sql("UPDATE orders SET note = 'changed' WHERE id = 7", "DELETE FROM orders WHERE id = 8")
    told = list[CaptureProgress]()
    for is_news in (True, False):
        with capture_logs() as lines:
            outcome = stage.catch_up(on_progress=told.append)
        assert [line["table"] for line in lines if line.get("code") == "copy_held"] == ["public.orders"] * is_news
        reason = outcome.copies_held["public.orders"]
        assert outcome.caught_up
        assert outcome.paused == ()
        assert reason.startswith("column note was added with a value for existing rows: its about 200 rows (")
        assert reason.endswith("KiB) wait for `millstream tables copy public.orders`")
    assert {facts["state"] for one in told if (facts := one.copies.get("public.orders"))} == {"copy_held"}
    assert copied(stage) == 202, "the small table is copied again at once"
    assert {chr(row["__op"]) for _, _, row in stage.log.records()} >= {"u", "d"}
    found = {
        table["name"]: (table["state"], table["reason"]) for table in tables_of(stage.catalog, shop(stage), {}, {})
    }
    assert found == {"public.orders": ("copy_held", reason), "public.small": ("streaming", "")}
    for ask in (resume_table, pause_table):
        with pytest.raises(UsageError, match="is held, not paused") as refused:
            ask(stage.catalog, shop(stage), "public.orders")
        assert refused.value.hint is not None
        assert "`millstream tables copy public.orders`" in refused.value.hint
    with pytest.raises(UsageError, match="is not quarantined; it is copy_held"):
        retry_table(stage.catalog, shop(stage), "public.orders")

    copy_table(stage.catalog, shop(stage), "public.orders")
    assert dict(stage.catch_up().copies_held) == {}
    assert stage.state("public.orders") is TableState.STREAMING
    assert stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id"])


@pytest.mark.long
def test_so_does_that_of_a_table_with_another_key_and_one_that_changes_while_it_waits(stage: Stage) -> None:
    begun(stage)
    stage.sql(
        "ALTER TABLE orders DROP CONSTRAINT orders_pkey, ALTER item SET NOT NULL, ADD PRIMARY KEY (id, item)",
        "INSERT INTO orders VALUES (1, 'y')",
    )
    first = stage.catch_up().copies_held["public.orders"]
    assert "key" in first
    stage.sql("ALTER TABLE orders ADD note text DEFAULT 'none'")
    assert stage.catch_up().copies_held["public.orders"] == first
    assert copied(stage) == 201
    copy_table(stage.catalog, shop(stage), "public.orders")
    stage.catch_up()
    assert stage.log.replay()["public.orders"] == stage.source_rows("orders", ["id", "item"])
