"""Names in SQL: one without a schema is of `public`, and words that SQL reserves have to be quoted."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from tests.lake.test_query import land

from millstream.errors import InvalidQuery, LakeUnavailable, UnknownTable
from millstream.lake.commit_cuts import commit_cut, last_cut
from millstream.lake.folded.scd2_rules import VERSION_COLUMNS
from millstream.lake.folded.scd2_table import fold_into_versions
from millstream.lake.known_tables import KnownTable
from millstream.lake.layout import LakeLayout
from millstream.lake.query.query_session import LakeSession
from millstream.lake.replay import table_named
from millstream.model.ids import SourceId, TableId
from millstream.model.positions import Seq
from millstream.model.query_reasons import Reason
from millstream.model.schema import Column, ReplicaIdentity, TableKind, TableSchema

Records = Callable[..., pa.RecordBatch]


def test_a_name_without_a_schema_is_of_public(layout: LakeLayout, orders: TableSchema, records: Records) -> None:
    sold = replace(orders, table_id=TableId(9), namespace="sales")
    land(layout, 2, {orders: records(orders, ("c", 1, {"id": 1})), sold: records(sold, ("c", 2, {"id": 2}))}, fold=True)
    with LakeSession(layout) as session:
        assert session.query("SELECT orders.id FROM orders").to_pydict() == {"id": [1]}
        assert session.query("SELECT id FROM Orders o JOIN sales.orders s USING (id)").num_rows == 0
        assert session.columns("orders") == session.columns("public.orders")
        assert session.query("WITH orders AS (SELECT 7 AS id) FROM orders").to_pydict() == {"id": [7]}
    with LakeSession(layout, as_of=session.token.linear()) as past:
        assert past.query("SELECT id FROM orders").to_pydict() == {"id": [1]}


def test_a_name_of_other_schemas_alone_is_answered_with_all_it_may_mean(
    layout: LakeLayout, orders: TableSchema, records: Records
) -> None:
    sold, old = (
        replace(orders, table_id=TableId(n), namespace=namespace) for n, namespace in ((9, "sales"), (10, "Old"))
    )
    land(layout, 2, {sold: records(sold, ("c", 1, {"id": 1})), old: records(old, ("c", 2, {"id": 2}))}, fold=True)
    with LakeSession(layout) as session, pytest.raises(InvalidQuery, match=r"no table public\.orders") as caught:
        session.query("FROM orders")
    assert caught.value.hint == 'Name its schema too: "Old".orders or sales.orders.'


@pytest.mark.parametrize("namespace", ["memory", "system", "temp", "Memory"])
def test_a_schema_named_like_a_database_of_duckdb_hides_no_other_table(
    layout: LakeLayout, orders: TableSchema, records: Records, namespace: str
) -> None:
    odd = replace(orders, table_id=TableId(9), namespace=namespace)
    land(layout, 2, {orders: records(orders, ("c", 1, {"id": 1})), odd: records(odd, ("c", 2, {"id": 2}))}, fold=True)
    with LakeSession(layout) as session:
        assert session.query("SELECT id FROM orders").to_pydict() == {"id": [1]}
        assert session.query(f'SELECT id FROM __millstream."{namespace}".orders').to_pydict() == {"id": [2]}
        assert session.query(f'SELECT id FROM history."{namespace}.orders"').to_pydict() == {"id": [2]}
        if namespace.lower() == "memory":
            assert session.query(f'SELECT id FROM "{namespace}".orders').to_pydict() == {"id": [2]}
        else:
            with pytest.raises(InvalidQuery, match=r"__millstream\."):
                session.query(f'SELECT id FROM "{namespace}".orders')


@pytest.mark.parametrize(("source", "hint"), [(0, "with a key in [streams.shop.keys]"), (3, "Give it a primary key")])
@pytest.mark.parametrize("table", ["public.orders", 'scd2."public.orders"'])
def test_a_table_without_a_key_is_answered_with_the_way_to_rows(
    layout: LakeLayout, orders: TableSchema, records: Records, table: str, source: int, hint: str
) -> None:
    loose = replace(orders, source=SourceId(source), key=(), replica_identity=ReplicaIdentity.NOTHING)
    land(layout, 1, {loose: records(loose, ("c", 1, {"id": 1}))}, fold=False)
    with LakeSession(layout) as session, pytest.raises(InvalidQuery, match=r"^public\.orders has no key: ") as caught:
        session.query(f"FROM {table}")
    assert hint in caught.value.hint


def test_a_table_without_versions_so_far_is_answered_with_where_the_reason_is(
    layout: LakeLayout, orders: TableSchema, records: Records
) -> None:
    land(layout, 1, {orders: records(orders, ("c", 1, {"id": 1}))}, fold=True)
    with LakeSession(layout) as session, pytest.raises(InvalidQuery, match=r"no table scd2\.public\.orders") as caught:
        session.query('FROM scd2."public.orders"')
    assert "`millstream tables` names the reason" in caught.value.hint


def test_a_views_table_without_quotes_is_answered_with_the_name_in_quotes(
    layout: LakeLayout, orders: TableSchema, records: Records
) -> None:
    land(layout, 1, {orders: records(orders, ("c", 1, {"id": 1}))}, fold=True)
    with LakeSession(layout) as session, pytest.raises(InvalidQuery, match=r"no table merged\.orders") as caught:
        session.query("FROM merged.orders")
    assert caught.value.hint == 'Name its schema too: merged."public.orders".'


def test_a_table_that_has_had_no_record_has_versions_where_others_have(
    layout: LakeLayout, orders: TableSchema, records: Records
) -> None:
    keyless = replace(orders, table_id=TableId(8), name="bag", key=(), replica_identity=ReplicaIdentity.FULL)
    items = replace(orders, table_id=TableId(9), name="items")
    columns = (Column("id", pa.int64(), number=1), Column("valid_from", pa.date32(), number=2))
    prices = replace(orders, table_id=TableId(10), name="prices", columns=columns, key=("id", "valid_from"))
    known = [KnownTable(one.table_id, "public", one.name, one) for one in (keyless, items, prices)]
    land(layout, 1, {orders: records(orders, ("c", 1, {"id": 1}))}, fold=True)
    with LakeSession(layout, known=lambda: known) as session, pytest.raises(InvalidQuery, match="no table scd2"):
        session.query('FROM scd2."public.items"')
    commit_cut(layout, Seq(1), [fold_into_versions(layout, orders, Seq(1)).commit], committed_at=datetime.now(UTC))
    with LakeSession(layout, known=lambda: known) as session:
        assert session.query('FROM scd2."public.items"').num_rows == 0
        versions = session.query('FROM scd2."public.orders"')
        assert session.query('FROM scd2."public.items"').schema.names == versions.schema.names
        names = session.query('FROM scd2."public.prices"').schema.names
        assert names == ["id", "valid_from__2", *(column.name for column in VERSION_COLUMNS)]
        assert session.query("FROM public.prices").schema.names == ["id", "valid_from"]
        with pytest.raises(InvalidQuery, match=r"no table scd2\.public\.bag") as caught:
            session.query('FROM scd2."public.bag"')
    assert caught.value.hint == "Only tables with a key have versions."


def test_a_view_that_two_tables_have_is_refused_and_their_rows_are_not(
    layout: LakeLayout, orders: TableSchema, records: Records
) -> None:
    one = replace(orders, namespace="a.b", name="c")
    other = replace(orders, table_id=TableId(8), namespace="a", name="b.c")
    land(layout, 2, {one: records(one, ("c", 1, {"id": 1})), other: records(other, ("c", 2, {"id": 2}))}, fold=True)
    with LakeSession(layout) as session:
        assert session.query('SELECT id FROM "a.b".c').to_pylist() == [{"id": 1}]
        assert session.query('SELECT id FROM a."b.c"').to_pylist() == [{"id": 2}]
        with pytest.raises(InvalidQuery, match=r'^"a\.b"\.c and a\."b\.c" have one name in views: a\.b\.c'):
            session.query('FROM history."a.b.c"')


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ('history."public.""Odd.Name"""', 'Write history."public.Odd.Name".'),
        ('scd2."public.""Odd.Name"""', 'Write scd2."public.Odd.Name".'),
        ('history."Odd.Name"', 'Name its schema too: history."public.Odd.Name".'),
        ('scd2."public.Odd.Name"', "Only tables with a key have versions."),
    ],
)
def test_a_view_of_an_odd_name_is_answered_with_how_it_is_written(
    layout: LakeLayout, orders: TableSchema, records: Records, asked: str, hint: str
) -> None:
    odd = replace(orders, name="Odd.Name", key=(), replica_identity=ReplicaIdentity.FULL)
    land(layout, 1, {odd: records(odd, ("c", 1, {"id": 1}))}, fold=False)
    known = KnownTable(odd.table_id, "public", "Odd.Name", odd, waits="the pipeline hasn't landed it")
    with LakeSession(layout, known=lambda: [known]) as session:
        assert session.query('FROM history."public.Odd.Name"').num_rows == 1
        with pytest.raises(InvalidQuery, match="there is no table ") as caught:
            session.query(f"FROM {asked}")
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("asked", "named", "hint"),
    [
        ("history.orders", "history.orders", 'Name its schema too: history."public.orders".'),
        ("HISTORY._messages m", "history._messages", "Tables: public.items, public.orders."),
        ("main.orders", "main.orders", "Name its schema too: public.orders."),
        ("items o JOIN nothing USING (id)", "public.nothing", "Tables: public.items, public.orders."),
    ],
)
def test_an_unknown_table_keeps_its_schema_and_empty_tables_are_listed(
    layout: LakeLayout, orders: TableSchema, records: Records, asked: str, named: str, hint: str
) -> None:
    items = KnownTable(TableId(9), "public", "items", replace(orders, table_id=TableId(9), name="items"))
    copied = KnownTable(TableId(10), "public", "copied", items.schema, waits="it is copying")
    land(layout, 1, {orders: records(orders, ("c", 1, {"id": 1}))}, fold=True)
    with LakeSession(layout, known=lambda: [items, copied]) as session:
        assert session.query('FROM history."public.orders"').num_rows == 1  # DuckDB leaves out a schema that it has
        assert session.query("FROM items").schema.names == [column.name for column in orders.columns]
        assert session.tables == ["public.items", "public.orders"]
        with pytest.raises(InvalidQuery, match=f"no table {re.escape(named)} in the lake") as caught:
            session.query(f"FROM {asked}")
    assert caught.value.hint.startswith(hint)


def test_messages_in_the_lake_are_named_in_no_answer_but_by_their_table(
    layout: LakeLayout, orders: TableSchema, records: Records
) -> None:
    kind = {"kind": TableKind.MESSAGES, "namespace": "", "name": "_messages", "key": (), "identity": ()}
    columns = (Column("prefix", pa.string()), Column("content", pa.binary()), Column("transactional", pa.bool_()))
    messages = replace(orders, table_id=TableId(7), columns=columns, **kind)
    land(layout, 1, {messages: records(messages, ("m", 1, {"prefix": "p", "content": b"1"}))})
    for asked, hint in (
        ("nothing", "No table has landed"),
        ("_messages", "Logical messages are in history._messages."),
    ):
        with LakeSession(layout) as session, pytest.raises(InvalidQuery, match=f"no table public.{asked} in") as caught:
            session.query(f"FROM {asked}")
        assert caught.value.hint.startswith(hint)
    shutil.rmtree(layout.table_path("history", messages))
    with LakeSession(layout) as session, pytest.raises(LakeUnavailable, match="is gone"):
        session.query("FROM history._messages")


@pytest.mark.parametrize(
    "sql", ["SELECT max(at) FROM {}", "SELECT {}.id, AT from {}", "FROM {} WHERE at > 3 AND 'end' <> ''"]
)
def test_a_column_that_is_a_word_of_sqls_is_said_to_need_quotes(
    layout: LakeLayout, orders: TableSchema, records: Records, sql: str
) -> None:
    odd = replace(orders, columns=(*orders.columns, Column("at", pa.int64()), Column("end", pa.int64())))
    land(layout, 1, {odd: records(odd, ("c", 1, {"id": 1, "at": 5, "end": 6}))}, fold=True)
    with LakeSession(layout) as session:
        assert session.query('SELECT max("at") AS at, orders."end" AS e FROM orders GROUP BY e').num_rows == 1
        with pytest.raises(InvalidQuery, match="syntax error") as caught:
            session.query(sql.replace("{}", "orders"))
        assert caught.value.hint == 'Write "at" in double quotes if you mean the column.'
        with pytest.raises(InvalidQuery) as plain:
            session.query("SELEC 1 FROM orders")
        assert plain.value.hint == ""


def test_of_tables_that_capitals_alone_tell_apart_a_statement_is_shown_the_one_that_it_names(
    layout: LakeLayout, orders: TableSchema, records: Records
) -> None:
    upper, sold = (
        replace(orders, table_id=TableId(n), namespace=namespace, name="Orders")
        for n, namespace in ((9, "public"), (10, "Sales"))
    )
    rows = {
        orders: records(orders, ("c", 1, {"id": 1})),
        upper: records(upper, ("c", 2, {"id": 2})),
        sold: records(sold, ("c", 3, {"id": 3})),
    }
    land(layout, 3, rows, fold=True)
    asked = {
        "FROM orders": 1,
        'FROM "Orders"': 2,
        "FROM ORDERS": 1,
        'FROM public."Orders" -- orders': 2,
        'FROM "Sales"."Orders"': 3,
        'FROM history."public.Orders"': 2,
        "FROM history.\"public.orders\" WHERE note IS DISTINCT FROM 'Orders'": 1,
        'SELECT id, 1 AS "count" FROM "Orders" AS o': 2,
    }
    with LakeSession(layout) as session:
        for sql, found in asked.items():
            assert session.query(sql).column("id").to_pylist() == [found], sql
        assert session.query("SHOW TABLES").num_rows == 4
        for sql, found in asked.items():
            assert session.query(sql).column("id").to_pylist() == [found], sql
        with pytest.raises(InvalidQuery, match=r'public\."Orders" and public\.orders differ only by case'):
            session.query('FROM "Orders" JOIN orders USING (id)')
        with pytest.raises(InvalidQuery, match=r"no table public\.ORDERS"):
            session.query('FROM "ORDERS"')
        assert session.query("FROM orders").column("id").to_pylist() == [1]


def test_a_table_that_has_not_landed_is_not_answered_by_one_of_other_capitals(
    layout: LakeLayout, orders: TableSchema, records: Records
) -> None:
    upper, waits = (replace(orders, table_id=TableId(n), name=name) for n, name in ((9, "Orders"), (10, "ORDERS")))
    known = [
        KnownTable(TableId(3), "public", "orders", orders),
        KnownTable(TableId(9), "public", "Orders", upper),
        KnownTable(TableId(10), "public", "ORDERS", waits, waits="its copy is under way"),
    ]
    land(layout, 1, {orders: records(orders, ("c", 1, {"id": 1}))}, fold=True)
    with LakeSession(layout, known=lambda: known[:2]) as session:
        for _ in range(2):
            assert session.query("FROM orders").column("id").to_pylist() == [1]
            assert session.query('FROM "Orders"').num_rows == 0
        assert session.query('SELECT id AS "Total" FROM orders').column("Total").to_pylist() == [1]
        assert session.query('FROM "orderS"').num_rows == 1
    with (
        LakeSession(layout, known=lambda: known[::2]) as session,
        pytest.raises(InvalidQuery, match=r'public\."ORDERS" has nothing in the lake yet: its copy is under way'),
    ):
        session.query('FROM "ORDERS"')


def test_tables_whose_copy_is_held_are_told_once_a_query_may_have_named_them(
    layout: LakeLayout, orders: TableSchema, records: Records
) -> None:
    other = replace(orders, table_id=TableId(9), name="items")
    land(
        layout, 2, {orders: records(orders, ("c", 1, {"id": 1})), other: records(other, ("c", 2, {"id": 2}))}, fold=True
    )
    known = [
        KnownTable(TableId(3), "public", "orders", orders),
        KnownTable(TableId(9), "public", "items", other),
    ]
    reason = Reason("copy_held", "public.orders", "its key is another one")
    with LakeSession(layout, known=lambda: known, copies=lambda: {TableId(3): reason}) as session:
        assert session.query("FROM items").schema.metadata is None
        assert session.reasons == ()
        told = session.query("FROM orders").schema.metadata[b"millstream.reasons"]
        assert session.reasons == (reason,)
    assert json.loads(told) == [{"code": "copy_held", "table": "public.orders", "detail": "its key is another one"}]
    with LakeSession(layout) as session:
        session.query("FROM orders")
        assert session.reasons == ()


def test_of_two_names_that_differ_by_case_each_has_its_own_folder_and_rows(
    layout: LakeLayout, orders: TableSchema, records: Records
) -> None:
    other = replace(orders, table_id=TableId(9), name="Orders", folder_id=TableId(9))
    land(
        layout, 2, {orders: records(orders, ("c", 1, {"id": 1})), other: records(other, ("c", 2, {"id": 2}))}, fold=True
    )
    cut = last_cut(layout)
    assert cut is not None
    assert {folder: table.name for folder, table in cut.tables.items()} == {
        "public.orders": "public.orders",
        "public.Orders~t9": 'public."Orders"',
    }
    assert table_named(cut, "public.orders")[0] == "public.orders"
    assert table_named(cut, 'public."Orders"')[0] == "public.Orders~t9"
    with LakeSession(layout) as session:
        assert session.query('SELECT id FROM "Orders"').to_pydict() == {"id": [2]}
        assert session.query("SELECT id FROM orders").to_pydict() == {"id": [1]}
        with pytest.raises(UnknownTable):
            table_named(cut, 'public."ORDERS"')
