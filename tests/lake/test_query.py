"""SQL over the lake: all tables at one token, whatever lands meanwhile; nothing can be harmed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from millstream.errors import InvalidQuery, TokenFromFuture
from millstream.lake.commits import commit_cut
from millstream.lake.current import fold_table
from millstream.lake.history import append_history
from millstream.lake.layout import LakeLayout
from millstream.lake.query import LakeSession
from millstream.model.ids import SchemaVersion, TableId
from millstream.model.positions import Seq
from millstream.model.schema import Column, ReplicaIdentity, TableKind, TableSchema

Records = Callable[..., pa.RecordBatch]


@pytest.fixture
def lines(orders: TableSchema) -> TableSchema:
    columns = (Column("Order", pa.int64()), Column("line no", pa.int32()), Column("price", pa.decimal128(10, 2)))
    return replace(
        orders,
        table_id=TableId(5),
        name='Order "Lines"',
        columns=columns,
        key=("Order", "line no"),
        identity=("Order", "line no"),
    )


def land(layout: LakeLayout, n: int, batches: dict[TableSchema, pa.RecordBatch], *, fold: bool = False) -> None:
    landed = [append_history(layout, schema, [batch], Seq(n)) for schema, batch in batches.items()]
    if fold:
        landed += [fold_table(layout, schema, Seq(n)) for schema in batches]
    commit_cut(layout, Seq(n), landed, committed_at=datetime.now(UTC))


JOIN = (
    'SELECT o.id, o.note, sum(l.price) AS total FROM public.orders o LEFT JOIN public."Order ""Lines""" l '
    'ON l."Order" = o.id GROUP BY ALL ORDER BY 1'
)


def test_all_tables_are_read_at_the_last_cut_however_far_each_was_folded(
    layout: LakeLayout, orders: TableSchema, lines: TableSchema, records: Records
):
    line = {"Order": 1, "line no": 1, "price": 5}
    land(
        layout,
        2,
        {orders: records(orders, ("c", 1, {"id": 1, "note": "a"})), lines: records(lines, ("c", 2, line))},
        fold=True,
    )
    with LakeSession(layout) as early:
        land(layout, 5, {orders: records(orders, ("c", 4, {"id": 2, "note": "b"}), ("d", 5, {"id": 1}))}, fold=True)
        # Half of a batch: its cut isn't committed.
        append_history(layout, lines, [records(lines, ("d", 7, {**line, "price": None}))], Seq(7))
        assert early.query(JOIN).to_pydict() == {"id": [1], "note": ["a"], "total": [5]}
        assert str(early.token).endswith(".s2")
    with LakeSession(layout) as late:
        assert late.query(JOIN).to_pydict() == {"id": [2], "note": ["b"], "total": [None]}
        assert late.query('SELECT count(*) n FROM public."Order ""Lines"""').to_pydict() == {"n": [1]}
        assert late.missing == {}


def test_a_truncated_table_a_keyless_one_and_messages(layout: LakeLayout, orders: TableSchema, records: Records):
    bag = replace(
        orders,
        table_id=TableId(6),
        name="bag",
        key=(),
        identity=("id", "total", "note"),
        replica_identity=ReplicaIdentity.FULL,
    )
    columns = (Column("prefix", pa.string()), Column("content", pa.binary()), Column("transactional", pa.bool_()))
    messages = replace(
        orders,
        table_id=TableId(7),
        kind=TableKind.MESSAGES,
        columns=columns,
        key=(),
        identity=(),
        namespace="",
        name="_messages",
    )
    first = {
        orders: records(orders, ("c", 1, {"id": 1})),
        bag: records(bag, ("c", 2, {"id": 1}), ("c", 3, {"id": 1}), ("c", 4, {"id": 2})),
    }
    land(layout, 4, first, fold=True)
    before = [("id", "1"), ("total", None), ("note", None)]
    land(
        layout,
        9,
        {
            orders: records(orders, ("t", 5, {}), ("c", 6, {"id": 7})),
            bag: records(bag, ("d", 7, {"id": 1}), ("u", 8, {"id": 3, "__before": before})),
            messages: records(messages, ("m", 9, {"prefix": "p", "content": b"\1"})),
        },
    )
    with LakeSession(layout) as session:
        assert session.query("SELECT id FROM public.orders").column(0).to_pylist() == [7]
        assert session.query("SELECT id FROM public.bag ORDER BY 1").column(0).to_pylist() == [2, 3]
        assert session.query("SELECT prefix, content FROM history._messages").to_pylist() == [
            {"prefix": "p", "content": b"\1"}
        ]
        assert session.query('SELECT __op FROM history."public.bag" ORDER BY __seq').num_rows == 5
    with LakeSession(layout, as_of=Seq(4)) as past:
        assert past.query("SELECT id FROM public.orders").column(0).to_pylist() == [1]
        assert past.query("SELECT id FROM public.bag ORDER BY 1").column(0).to_pylist() == [1, 1, 2]
    with pytest.raises(TokenFromFuture):
        LakeSession(layout, as_of=Seq(10))


def test_a_table_that_cannot_be_read_is_named_and_the_others_answer(
    layout: LakeLayout, orders: TableSchema, lines: TableSchema, records: Records
):
    batch = {orders: records(orders, ("c", 1, {"id": 1})), lines: records(lines, ("c", 2, {"Order": 1, "line no": 1}))}
    land(layout, 2, batch, fold=True)
    path = layout.table_path("current", lines)
    write_deltalake(path, DeltaTable(path).to_pyarrow_table(), mode="append")
    with LakeSession(layout) as session:
        assert session.query("SELECT count(*) FROM public.orders").num_rows == 1
        with pytest.raises(InvalidQuery) as caught:
            session.query('TABLE public."Order ""Lines"""')
        assert "somebody else" in caught.value.hint
        assert list(session.missing) == ['public."Order ""Lines"""']


def test_a_renamed_table_keeps_its_rows_even_where_another_takes_its_name(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    land(layout, 2, {orders: records(orders, ("c", 1, {"id": 1, "note": "a"}), ("c", 2, {"id": 2}))}, fold=True)
    old = replace(orders, name="orders_old", version=SchemaVersion(2))
    new = replace(orders, table_id=TableId(9))
    unchanged = ("u", 4, {"id": 1, "total": 5, "__unchanged": ["note"]})
    land(layout, 4, {new: records(new, ("c", 3, {"id": 7})), old: records(old, unchanged)})
    for folded in (False, True):
        if folded:
            land(layout, 5, {new: records(new, ("c", 5, {"id": 8})), old: records(old)}, fold=True)
        with LakeSession(layout) as session:
            rows = session.query("SELECT id, total, note FROM public.orders_old ORDER BY id").to_pylist()
            assert [tuple(row.values()) for row in rows] == [(1, 5, "a"), (2, None, None)]
            assert session.query("FROM public.orders").column("id").to_pylist() == [7, 8][: 1 + folded]
            assert session.query('FROM history."public.orders_old"').num_rows == 3


def test_types_and_times_come_out_as_they_went_in(layout: LakeLayout, orders: TableSchema, records: Records):
    kinds = {
        "at": pa.timestamp("us", tz="UTC"),
        "local": pa.timestamp("us"),
        "day": pa.date32(),
        "bytes": pa.binary(),
        "list": pa.list_(pa.int32()),
        "small": pa.int16(),
        "real": pa.float32(),
        "yes": pa.bool_(),
    }
    wide = replace(orders, columns=(*orders.columns, *(Column(n, k) for n, k in kinds.items())))
    at = datetime(2026, 2, 3, 4, 5, 6, 7, tzinfo=UTC)
    row = {"id": 1, "at": at, "local": at.replace(tzinfo=None), "day": at.date(), "bytes": b"\0", "list": [1, None]}
    land(
        layout,
        1,
        {wide: records(wide, ("c", 1, {**row, "small": 2, "real": 0.5, "yes": True, "__exact": [("total", "NaN")]}))},
    )
    with LakeSession(layout) as session:
        found = session.query("SELECT * FROM public.orders")
        assert found.to_pylist() == [
            {**row, "total": None, "note": None, "small": 2, "real": 0.5, "yes": True, "__exact": [("total", "NaN")]}
        ]
        assert found.schema.field("at").type == pa.timestamp("us", tz="UTC")
        assert session.query(
            'SELECT "at"::text t, date_trunc(\'day\', "at")::text d FROM public.orders'
        ).to_pylist() == [{"t": "2026-02-03 04:05:06.000007+00", "d": "2026-02-03 00:00:00+00"}]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM nowhere",
        "SELEC 1",
        "COPY (SELECT 1) TO '{folder}/x.csv'",
        "SELECT * FROM read_text('{folder}/secret')",
        "SELECT * FROM '{folder}/secret.parquet'",
        "ATTACH '{folder}/x.db'",
        "INSTALL httpfs",
        "SET enable_external_access = true",
        "DELETE FROM public.orders",
        "DROP TABLE public.orders",
        "INSERT INTO public.orders SELECT * FROM public.orders",
        "SELECT * FROM sys_path_of_python",
    ],
)
def test_bad_or_harmful_sql_is_an_error_and_touches_nothing(
    layout: LakeLayout, orders: TableSchema, records: Records, tmp_path: Path, sql: str
):
    sys_path_of_python = pa.table({"x": [1]})
    assert sys_path_of_python.num_rows == 1
    (tmp_path / "secret").write_text("secret")
    land(layout, 1, {orders: records(orders, ("c", 1, {"id": 1}))}, fold=True)
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    with LakeSession(layout) as session, pytest.raises(InvalidQuery) as caught:
        session.query(sql.format(folder=tmp_path))
    assert caught.value.exit_code == 2
    assert "public.orders" in caught.value.hint
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before


def test_an_empty_lake_says_so(layout: LakeLayout):
    with LakeSession(layout) as session:
        assert session.cut is None
        assert session.query("SELECT 1 AS one").to_pydict() == {"one": [1]}
        with pytest.raises(InvalidQuery) as caught:
            session.query("SELECT * FROM public.orders")
        assert "No table has landed" in caught.value.hint


def test_the_catalog_lists_every_table(layout: LakeLayout, orders: TableSchema, lines: TableSchema, records: Records):
    land(
        layout,
        2,
        {orders: records(orders, ("c", 1, {"id": 1})), lines: records(lines, ("c", 2, {"Order": 1, "line no": 1}))},
    )
    with LakeSession(layout) as session:
        names = session.query(
            "SELECT table_schema, table_name FROM information_schema.tables WHERE table_schema <> 'main' ORDER BY ALL"
        )
        assert [tuple(row.values()) for row in names.to_pylist()] == [
            ("history", 'public.Order "Lines"'),
            ("history", "public.orders"),
            ("public", 'Order "Lines"'),
            ("public", "orders"),
        ]


def test_the_executors_part_imports_neither_duckdb_nor_the_catalog():
    names = "duckdb", "sqlalchemy", "numba", "pyspark", "pydantic"
    code = (
        "import sys, millstream.lake.history, millstream.lake.current, millstream.lake.commits, millstream.lake.query\n"
        f"print([n for n in {names!r} if n in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.strip() == "[]"
