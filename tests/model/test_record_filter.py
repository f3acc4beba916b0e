"""A record passes a predicate unless the predicate is known to be false for its row."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from millstream.delivery.definition import Definition
from millstream.model.ids import SchemaVersion, SourceId, TableId
from millstream.model.pgtypes import NUMERIC_OID
from millstream.model.predicate import Predicate
from millstream.model.record_filter import passing
from millstream.model.records import TEXT_BY_COLUMN
from millstream.model.schema import Column, PgType, ReplicaIdentity, TableKind, TableSchema

SCHEMA = TableSchema(
    kind=TableKind.TABLE,
    table_id=TableId(1),
    version=SchemaVersion(1),
    source=SourceId(1),
    relation_oid=16384,
    namespace="public",
    name="orders",
    columns=(
        Column("id", pa.int64()),
        Column("status", pa.string()),
        Column("total", pa.string(), PgType(NUMERIC_OID, -1, "numeric")),
    ),
    replica_identity=ReplicaIdentity.DEFAULT,
    identity=("id",),
    key=("id",),
)


def records(*rows: dict[str, Any]) -> pa.RecordBatch:
    own = [
        {"__op": "u", "__unchanged": None, "__exact": None, "id": 1, "status": None, "total": None, **row}
        for row in rows
    ]
    fields = [("__op", pa.string()), ("__unchanged", pa.list_(pa.string())), ("__exact", TEXT_BY_COLUMN)]
    table = [(column.name, column.arrow) for column in SCHEMA.columns]
    return pa.RecordBatch.from_pylist(own, schema=pa.schema([*fields, *table]))


def passed(where: str, *rows: dict[str, Any]) -> list[bool]:
    return [bool(each) for each in passing(Predicate.parse(where), SCHEMA, records(*rows))]


def test_a_record_whose_row_matches_passes_and_one_whose_row_does_not_is_left_out() -> None:
    assert passed("status = 'open'", {"status": "open"}, {"status": "shut"}, {}) == [True, False, False]


def test_a_record_that_lacks_a_named_value_passes() -> None:
    lacking = [{"__unchanged": ["status"]}, {"__exact": [("status", "open")]}, {"__op": "d"}, {"__op": "t"}]
    assert passed("status = 'open'", *lacking) == [True, True, True, True]


def test_a_record_that_lacks_only_other_values_is_decided() -> None:
    lacking = [{"__unchanged": ["status"]}, {"__exact": [("status", "open")]}, {"__op": "d"}, {"__op": "t"}]
    assert passed("id = 2", *lacking) == [False, False, False, True]


def test_all_records_pass_if_their_column_is_of_another_type_than_the_literal() -> None:
    assert passed("status > 5", {"status": "open"}, {}) == [True, True]


def test_a_condition_on_a_column_that_the_table_lacks_is_decided_for_deletes() -> None:
    assert passed("colour = 'red'", {"__op": "d"}, {"__unchanged": ["status"]}) == [False, False]


EDGES = ["NaN", "Infinity", "-Infinity", "1" + "0" * 400, "0." + "1" * 60]


@pytest.mark.parametrize("more", [[], EDGES], ids=["plain", "edges"])
@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("total > 5", [False, True, True, False, True, True, False, True, False]),
        ("total <= 5", [True, False, False, False, False, False, True, False, True]),
        ("total = 7.1", [False, True, False, False, False, False, False, False, False]),
        ("total > 12345678901234567890", [False, False, True, False, True, True, False, True, False]),
        ("total in (4.9, 7)", [True, False, False, False, False, False, False, False, False]),
        ("not total != 4.9", [True, False, False, False, False, False, False, False, False]),
        ("total = '7.10'", [False, True, False, False, False, False, False, False, False]),
    ],
)
def test_a_numeric_that_is_kept_as_text_is_compared_with_numbers_as_postgresql_does(
    where: str, expected: list[bool], more: list[str]
) -> None:
    """Such a condition was refused, since the column is a text in the log."""
    texts = ["4.9", "7.10", "12345678901234567890.001", None, *more]
    assert passed(where, *({"total": text} for text in texts)) == expected[: len(texts)]
    Definition.parse({"name": "c", "where": where}).check([SCHEMA])
