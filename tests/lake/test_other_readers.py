"""The lake's tables are ordinary Delta tables: other engines read the same rows that `query` returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from tests.lake.landing import append_history

from millstream.lake.commit_cuts import commit_cut
from millstream.lake.folded.current_table import fold_table
from millstream.lake.layout import LakeLayout, View
from millstream.lake.query.query_session import LakeSession
from millstream.model.ids import SchemaVersion
from millstream.model.positions import Seq
from millstream.model.schema import Column, TableSchema

Records = Callable[..., pa.RecordBatch]
KINDS = {
    "at": pa.timestamp("us", tz="UTC"),
    "local": pa.timestamp("us"),
    "day": pa.date32(),
    "raw": pa.binary(),
    "list": pa.list_(pa.int32()),
    "small": pa.int16(),
    "real": pa.float64(),
    "yes": pa.bool_(),
}


@pytest.fixture
def written(layout: LakeLayout, orders: TableSchema, records: Records) -> TableSchema:
    """A table with a column added later, a value beyond its type, deletes and a key that moved; folded twice."""
    at = datetime(2026, 2, 3, 4, 5, 6, 7, tzinfo=UTC)
    row = {
        "id": 1, "total": Decimal("1.50"), "note": "", "at": at, "local": at.replace(tzinfo=None), "day": date(2026, 2, 3),
        "raw": b"\0\xff", "list": [1, None], "small": 2, "real": 0.5, "yes": True,
    }  # fmt: skip
    wide = replace(orders, columns=(*orders.columns, *(Column(name, kind) for name, kind in KINDS.items())))
    later = replace(wide, version=SchemaVersion(2), columns=(*wide.columns, Column("added", pa.string())))
    first = records(wide, ("c", 1, row), ("c", 2, {"id": 2}), ("c", 3, {"id": 3, "__exact": [("total", "NaN")]}))
    second = records(
        later, ("d", 4, {"id": 2}), ("u", 5, {**row, "id": 7, "added": "x", "__before": [("id", "1")]})
    )  # fmt: skip
    for schema, batch, n in ((wide, first, 3), (later, second, 5)):
        landed = [append_history(layout, schema, [batch], Seq(n)), fold_table(layout, schema, Seq(n))]
        commit_cut(layout, Seq(n), landed, committed_at=datetime.now(UTC))
    return later


def by_duckdb(path: str) -> list[dict[str, Any]]:
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("t", DeltaTable(path).to_pyarrow_dataset())
        return plain(connection.sql("FROM t").to_arrow_table())


def by_polars(path: str) -> list[dict[str, Any]]:
    read = pl.read_delta(path)
    assert pl.scan_delta(path).collect().equals(read)
    return plain(read.to_arrow())


def plain(table: pa.Table) -> list[dict[str, Any]]:
    """Return rows regardless of their order and of how an engine has maps (Polars: lists of pairs)."""
    rows = [
        {
            name: [tuple(e.values()) if isinstance(e, dict) else e for e in value] if isinstance(value, list) else value
            for name, value in row.items()
        }
        for row in table.to_pylist()
    ]
    return sorted(rows, key=lambda row: (row.get("__seq") or 0, row["id"]))


@pytest.mark.parametrize("view", ["current", "history"])
@pytest.mark.parametrize("reader", [by_duckdb, by_polars])
def test_another_engine_reads_the_rows_that_query_gives(
    layout: LakeLayout, written: TableSchema, reader: Callable[[str], list[dict[str, Any]]], view: View
):
    named = "public.orders" if view == "current" else 'history."public.orders"'
    with LakeSession(layout) as session:
        expected = plain(session.query(f"FROM {named}"))
    assert len(expected) == (2 if view == "current" else 5)
    assert {row["id"] for row in expected} >= {3, 7}
    found = reader(layout.table_path(view, written))
    assert [dict(sorted(row.items())) for row in found] == [dict(sorted(row.items())) for row in expected]


@pytest.mark.parametrize("view", ["current", "history"])
def test_a_table_says_of_itself_what_it_is(layout: LakeLayout, written: TableSchema, view: View):
    said = DeltaTable(layout.table_path(view, written)).metadata().description
    assert "public.orders" in said
    assert "Millstream" in said
    assert "n't write here" in said
