"""A consumer's definition: its defaults, its equality, and what is refused, with the reason."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from millstream.delivery.definition import Definition
from millstream.errors import DeliveryError
from millstream.model.ids import SchemaVersion, SourceId, TableId
from millstream.model.schema import Column, TableSchema
from millstream.testing.errors import coded

ORDERS = TableSchema(
    TableId(1),
    SchemaVersion(1),
    SourceId(1),
    "public",
    "orders",
    (Column("id", pa.int64()), Column("total", pa.decimal128(10, 2)), Column("note", pa.string())),
    ("id",),
    ("id",),
)
EVENTS = TableSchema(TableId(2), SchemaVersion(1), SourceId(0), "public", "events", (Column("kind", pa.string()),))
DEFAULTS: dict[str, Any] = {
    "name": "search",
    "tables": None,
    "where": None,
    "columns": None,
    "kind": "changes",
    "group_by": "key",
    "start": "latest",
    "ack_wait_ms": 30_000,
    "max_deliver": 10,
    "max_ack_pending": 1000,
    "backfill": False,
}


def test_a_name_alone_has_every_default() -> None:
    found = Definition.parse({"name": "search"})
    assert found.as_dict() == DEFAULTS
    assert Definition.parse(DEFAULTS) == found


def test_null_is_every_fields_default() -> None:
    assert Definition.parse(dict.fromkeys(DEFAULTS) | {"name": "search"}).as_dict() == DEFAULTS


def test_no_column_takes_the_name_of_a_key_that_kafka_always_gets() -> None:
    sink = {"kafka": {"location": "localhost:9092"}}
    chosen = Definition.parse({"name": "search", "columns": ["total", "note as text"]} | sink)
    chosen.check([ORDERS])
    assert chosen.names_of(ORDERS.key) == {"id": "id", "total": "total", "note": "text"}
    wrong = Definition.parse({"name": "search", "columns": ["note as id"]} | sink)
    with pytest.raises(DeliveryError, check=coded("invalid_consumer")):
        wrong.check([ORDERS])
    Definition.parse({"name": "search", "columns": ["note as id"]}).check([ORDERS])


def test_every_field_is_shown_as_it_was_written() -> None:
    body = DEFAULTS | {
        "tables": ["public.*", "!public.audit_*"],
        "where": "total > 5 and note is not null",
        "columns": ["id", "total as amount"],
        "group_by": ["id"],
        "start": "10m ago",
        "ack_wait_ms": 100,
        "max_deliver": 0,
        "max_ack_pending": 1,
    }
    found = Definition.parse(body)
    assert found.as_dict() == body
    assert found.renamed == {"id": "id", "total": "amount"}
    found.check([ORDERS])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": None}, "name"),
        ({"name": "Search"}, "name"),
        ({"name": "s" * 64}, "name"),
        ({"name": "a\n"}, "name"),
        ({"tables": []}, "tables"),
        ({"tables": "public.*"}, "tables"),
        ({"tables": ["a.b.c"]}, "tables"),
        ({"where": "total >"}, "where"),
        ({"where": 5}, "where"),
        ({"columns": ["id as"]}, "columns"),
        ({"columns": ["id", "id"]}, "columns"),
        ({"columns": ["id", "total as id"]}, "columns"),
        ({"kind": "newest"}, "kind"),
        ({"kind": "latest", "group_by": "none"}, "group_by"),
        ({"kind": "latest", "group_by": ["id"]}, "group_by"),
        ({"kind": "all"}, "kind"),
        ({"group_by": []}, "group_by"),
        ({"group_by": "id"}, "group_by"),
        ({"group_by": ["id", "id"]}, "group_by"),
        ({"start": 5}, "start"),
        ({"start": "never"}, "start"),
        ({"start": "2026-13-01"}, "start"),
        ({"ack_wait_ms": 99}, "ack_wait_ms"),
        ({"ack_wait_ms": 43_200_001}, "ack_wait_ms"),
        ({"ack_wait_ms": True}, "ack_wait_ms"),
        ({"ack_wait_ms": 100.0}, "ack_wait_ms"),
        ({"max_deliver": 1001}, "max_deliver"),
        ({"max_deliver": -1}, "max_deliver"),
        ({"max_ack_pending": 0}, "max_ack_pending"),
        ({"max_ack_pending": 100_001}, "max_ack_pending"),
        ({"backfill": True, "start": "earliest"}, "backfill"),
        ({"backfill": 1}, "backfill"),
        ({"webhook": {"url": "https://example.com"}}, "webhook.secret"),
        ({"command": {"argv": ["cat"]}}, "command"),
        ({"allow_private": True}, "allow_private"),
        ({"batch": 5}, "batch"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(DeliveryError, check=coded("invalid_consumer")) as caught:
        Definition.parse({"name": "search"} | change)
    assert caught.value.details["field"] == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"where": "missing = 1"}, "where"),
        ({"where": "id = 'x'"}, "where"),
        ({"where": "note = 5"}, "where"),
        ({"columns": ["id", "missing"]}, "columns"),
        ({"group_by": ["missing"]}, "group_by"),
        ({"group_by": ["note"]}, "group_by"),
    ],
)
def test_columns_are_checked_against_the_tables_that_match(change: dict[str, Any], field: str) -> None:
    wrong = Definition.parse({"name": "search"} | change)
    with pytest.raises(DeliveryError, check=coded("invalid_consumer")) as caught:
        wrong.check([ORDERS])
    assert caught.value.details["field"] == field
    Definition.parse({"name": "search", "tables": ["public.later"]} | change).check([ORDERS])


def test_a_column_of_one_matching_table_is_enough() -> None:
    Definition.parse({"name": "search", "where": "kind = 'a' and id = 5", "columns": ["id", "kind"]}).check(
        [ORDERS, EVENTS]
    )
    Definition.parse({"name": "search", "group_by": ["kind"]}).check([ORDERS, EVENTS])


def test_tables_match_as_in_a_source() -> None:
    some = Definition.parse({"name": "a", "tables": ["public.*", "!public.events"]})
    assert (some.takes(ORDERS), some.takes(EVENTS)) == (True, False)
    every = Definition.parse({"name": "a"})
    assert (every.takes(ORDERS), every.takes(EVENTS)) == (True, True)
