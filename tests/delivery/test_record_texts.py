"""Records as JSON texts: the same objects as `record_facts`, whichever way they are made."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from tests.delivery.test_debezium import ORDERS, records

from millstream.delivery.records import record_texts as module
from millstream.delivery.records.record_messages import Origin, chosen, record_of
from millstream.delivery.records.record_texts import record_texts
from millstream.delivery.sinks import LoggedRow
from millstream.model.ids import Epoch, ShardId
from millstream.model.record_json import record_facts
from millstream.model.schema import Column, TableKind, TableSchema

WHOLE: list[dict[str, Any]] = [
    {"id": 1, "total": Decimal("1.50"), "50%": 'a "quote", a \\ and \u2028é漢🦫\x00'},
    {"id": 2**60, "total": None, "50%": None, "__op": "u"},
    {"id": -3, "total": Decimal("0.00"), "50%": "", "__op": "r", "__xid": None, "__commit_index": None},
]
OTHERS: list[dict[str, Any]] = [
    {"id": 4, "__op": "d"},
    {"__op": "t"},
    {"id": 5, "total": Decimal("1.00"), "__op": "u", "__before": [("id", "4")]},
    {"id": 6, "total": Decimal("1.00"), "__op": "u", "__unchanged": ["50%"]},
    {"id": 7, "50%": "x", "__exact": [("total", "NaN")]},
]
LEAFY = replace(ORDERS, partitioned=True)
PLACE: dict[str, Any] = {"stream": "shop", "shard": ShardId(2), "epoch": Epoch(3)}


def odd_names() -> TableSchema:
    """Columns whose names can't be fields of a struct: a quote, a backslash."""
    return replace(ORDERS, columns=(ORDERS.columns[0], Column('a"b', pa.string()), Column("c\\d", pa.float64())))


@pytest.mark.parametrize(
    "renamed", [None, {"50%": "half", "id": "id", "none": "n"}, {}], ids=["all", "renamed", "none"]
)
@pytest.mark.parametrize("rows", [WHOLE, OTHERS, WHOLE + OTHERS], ids=["whole", "others", "both"])
def test_texts_are_the_facts(rows: list[dict[str, Any]], renamed: dict[str, str] | None) -> None:
    batch = records(ORDERS, *rows)
    facts = record_facts(ORDERS, batch, **PLACE)
    expected = facts if renamed is None else [chosen(one, renamed) for one in facts]
    texts = record_texts(ORDERS, batch, **PLACE, renamed=renamed)
    assert [json.loads(text) for text in texts] == expected
    assert [list(json.loads(text)) for text in texts] == [list(one) for one in expected]


@pytest.mark.parametrize("kind", [TableKind.RAW, TableKind.TABLE])
def test_any_name_of_a_column_is_shown(kind: TableKind) -> None:
    schema = replace(odd_names(), kind=kind)
    if kind is TableKind.RAW:
        schema = replace(schema, columns=(Column('a"b', pa.binary()),), key=(), identity=())
        batch = records(schema, {'a"b': b"\x00\xff"})
    else:
        batch = records(schema, {"id": 1, 'a"b': "x", "c\\d": float("nan")})
    texts = record_texts(schema, batch, **PLACE)
    assert [json.loads(text) for text in texts] == record_facts(schema, batch, **PLACE)


@pytest.mark.parametrize("renamed", [None, {"50%": "partition"}])
def test_texts_of_a_partitioned_table_name_the_leaf_partition(renamed: dict[str, str] | None) -> None:
    left = {"__op": "x", "__partition_oid": 16_500, "__before": [("partition", "public.orders_1")]}
    for rows in (WHOLE, [*WHOLE, left]):
        batch = records(LEAFY, *({"__partition_oid": 16_500 + n, **one} for n, one in enumerate(rows)))
        facts = record_facts(LEAFY, batch, **PLACE)
        expected = facts if renamed is None else [chosen(one, renamed) for one in facts]
        texts = record_texts(LEAFY, batch, **PLACE, renamed=renamed)
        assert [json.loads(text) for text in texts] == expected
        assert [list(json.loads(text)) for text in texts] == [list(one) for one in expected]
    assert json.loads(texts[-1])["row"] == {"partition": "public.orders_1", "oid": 16_500}


@pytest.mark.parametrize("schema", [ORDERS, replace(ORDERS, partitioned=True)], ids=["plain", "partitioned"])
def test_whole_rows_take_the_way_without_dicts(schema: TableSchema, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(module, "record_facts")
    assert len(record_texts(schema, records(schema, *WHOLE), **PLACE)) == len(WHOLE)


def test_the_json_of_a_record_that_is_kept_in_the_logs_form_is_made_when_it_is_shown() -> None:
    batch = records(ORDERS, *WHOLE, *OTHERS)
    texts = record_texts(ORDERS, batch, **PLACE)
    for row, text in enumerate(texts):
        logged = LoggedRow(ORDERS, batch, row, lambda part: record_texts(ORDERS, part, **PLACE))
        assert record_of(Origin("g", None, logged=logged)) == text
        assert record_of(Origin("g", "{}", logged=logged)) == "{}"
