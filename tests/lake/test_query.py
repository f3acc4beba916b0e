"""SQL over the lake: all tables at one token, whatever lands during the query; no statement changes anything."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.lake.landing import append_history

from millstream.errors import InvalidQuery, LakeTableForeign, LakeUnavailable, PositionError, TokenFromFuture
from millstream.lake.commit_cuts import commit_cut
from millstream.lake.folded.current_table import fold_table
from millstream.lake.history_retention import HistoryBound, drop_history
from millstream.lake.layout import LakeLayout
from millstream.lake.maintenance import MaintenanceRules, maintain_table
from millstream.lake.query.query_session import LakeSession
from millstream.model.ids import SchemaVersion, StreamId, TableId
from millstream.model.positions import Seq
from millstream.model.schema import Column, ReplicaIdentity, TableKind, TableSchema
from millstream.testing.errors import coded
from millstream.testing.s3 import EmbeddedS3

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


def test_what_is_no_sql_is_refused_by_name(layout: LakeLayout):
    not_sql: Any = 5
    with LakeSession(layout) as session, pytest.raises(InvalidQuery, match="sql must be text, not int"):
        session.query(not_sql)


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
        with pytest.raises(LakeTableForeign) as caught:
            session.query('TABLE public."Order ""Lines"""')
        assert "another program" in caught.value.message
        assert 'pipeline rebuild \'public."Order ""Lines"""\'' in caught.value.hint
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
        "WITH x AS (COPY (SELECT 1) TO '{folder}/lake/shop/x.csv') FROM x",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{folder}/lake/shop/x.csv'",
        # Hidden in text that looks like a string to a parser that doesn't know all of DuckDB's.
        "WITH z AS (SELECT E'\\'' AS x), y AS (COPY (SELECT 1 AS q) TO '{folder}/lake/shop/x.csv') FROM y",
        "WITH z AS (SELECT 1 AS a$$), y AS (COPY (SELECT 1 AS q) TO '{folder}/lake/shop/x.csv'), x AS (SELECT 1 AS b$$) FROM y",
        "EXPLAIN ANALYZE WITH z AS (SELECT E'\\'' AS x), y AS (COPY (SELECT 1 AS q) TO '{folder}/lake/shop/x.csv') FROM y",
        "WITH y AS (\u2003CoPy/**/(SELECT 1 AS q) TO '{folder}/lake/shop/x.csv') FROM y",
        "SELECT 1; SELECT 2",
        "CHECKPOINT",
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
    # The hint lists the tables only if one wasn't found.
    assert ("public.orders" in caught.value.hint) == ("no table" in caught.value.message)
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT '(copy x' AS copy",
        "EXPLAIN SELECT '(copy (x'",
        "SUMMARIZE SELECT 1 AS copy",
        "SELECT copy FROM (SELECT 1 AS copy) WHERE (copy) = 1",
    ],
)
def test_the_word_copy_alone_writes_nothing(layout: LakeLayout, sql: str):
    with LakeSession(layout) as session:
        assert session.query(sql).num_rows


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
    with LakeSession(layout) as session:
        assert session.query("SELECT count(*) AS n FROM public.orders").to_pylist() == [{"n": 1}]
        shown = session.query("show tables;").column("name").to_pylist()
        assert shown == [
            'history."public.Order ""Lines"""',
            'history."public.orders"',
            'public."Order ""Lines"""',
            "public.orders",
        ]
        for name in shown:
            assert session.query(f"SELECT count(*) AS n FROM {name}").to_pylist() == [{"n": 1}]
        assert session.query("DESCRIBE public.orders").column("column_name").to_pylist()[:2] == ["id", "total"]


def test_the_executors_part_imports_neither_duckdb_nor_the_catalog():
    names = "duckdb", "sqlalchemy", "numba", "pyspark", "pydantic"
    code = (
        "import sys, millstream.lake.history, millstream.lake.folded.current_table, millstream.lake.commit_cuts, millstream.lake.query.query_session\n"
        f"print([n for n in {names!r} if n in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert shown.stdout.strip() == "[]"


NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def at(layout: LakeLayout, sql: str, as_of: int | datetime) -> list[dict[str, object]]:
    moment = Seq(as_of) if isinstance(as_of, int) else as_of
    with LakeSession(layout, as_of=moment) as session:
        return session.query(sql).to_pylist()


def land_at(
    layout: LakeLayout, n: int, minutes: int, *pairs: tuple[TableSchema, pa.RecordBatch], fold: bool = False
) -> None:
    landed = [append_history(layout, schema, [batch], Seq(n)) for schema, batch in pairs]
    if fold:
        landed += [fold_table(layout, schema, Seq(n)) for schema, _ in pairs]
    time = NOON + timedelta(minutes=minutes)
    commit_cut(layout, Seq(n), landed, committed_at=time + timedelta(seconds=1), commit_ts_max=time)


@pytest.mark.sampled
@pytest.mark.parametrize("folded", [False, True])
def test_the_past_is_shown_with_the_columns_and_the_name_that_the_table_had(
    layout: LakeLayout, orders: TableSchema, records: Records, evolved: Callable[..., TableSchema], *, folded: bool
):
    paid = evolved(paid=pa.bool_(), note=None)
    renamed = replace(paid, version=SchemaVersion(3), name="sales")
    remade = replace(orders, table_id=TableId(8), columns=orders.columns[:1])
    land_at(layout, 2, 0, (orders, records(orders, ("c", 1, {"id": 1, "note": "a"}), ("c", 2, {"id": 2}))), fold=folded)
    land_at(layout, 4, 1, (paid, records(paid, ("u", 3, {"id": 1, "paid": True}))), fold=folded)
    land_at(layout, 6, 2, (renamed, records(renamed, ("d", 5, {"id": 2}))), fold=folded)
    land_at(layout, 8, 3, (remade, records(remade, ("c", 7, {"id": 70}))), fold=folded)
    first = [{"id": 1, "total": None, "note": "a"}, {"id": 2, "total": None, "note": None}]
    second = [{"id": 1, "total": None, "paid": True}, {"id": 2, "total": None, "paid": None}]
    rows = "FROM public.orders ORDER BY id"
    for n, minutes in ((2, 0), (2, 0.9), (3, None), (4, 1)):
        expected = first if n == 2 else second
        assert at(layout, rows, n) == expected
        if minutes is not None:
            assert at(layout, rows, NOON + timedelta(minutes=minutes)) == expected
    assert at(layout, "FROM public.sales", 6) == second[:1]
    for name, n in (("orders", 6), ("sales", 4), ("nothing", 8)):
        with LakeSession(layout, as_of=Seq(n)) as session, pytest.raises(InvalidQuery) as caught:
            session.query(f"FROM public.{name}")
        assert f"no table public.{name}" in caught.value.message
    assert at(layout, "FROM public.orders", 8) == [{"id": 70}]
    assert at(layout, "FROM public.sales", 8) == second[:1]
    assert at(layout, 'SELECT count(*) AS n FROM history."public.orders"', 4) == [{"n": 3}]


@pytest.mark.parametrize("folded", [False, True])
def test_a_table_that_is_renamed_within_a_batch_has_the_records_from_before_the_rename(
    layout: LakeLayout, orders: TableSchema, records: Records, *, folded: bool
):
    """They lie in the folder of the new name. The old name had none of them at a token in between."""
    renamed = replace(orders, version=SchemaVersion(2), name="sales")
    land_at(layout, 2, 0, (orders, records(orders, ("c", 1, {"id": 1}), ("c", 2, {"id": 2}))), fold=folded)
    batches = [records(orders, ("c", 3, {"id": 3}), ("d", 4, {"id": 2})), records(renamed, ("c", 6, {"id": 6}))]
    landed = [append_history(layout, renamed, batches, Seq(6))]
    landed += [fold_table(layout, renamed, Seq(6))] if folded else []
    commit_cut(layout, Seq(6), landed, committed_at=datetime.now(UTC))
    ids = {2: [1, 2], 3: [1, 2, 3], 4: [1, 3], 5: [1, 3]}
    for n, expected in ids.items():
        assert at(layout, "SELECT id FROM public.orders ORDER BY id", n) == [{"id": id_} for id_ in expected]
        assert at(layout, 'SELECT max(__seq) AS n FROM history."public.orders"', n) == [{"n": min(n, 4)}]
    assert at(layout, "SELECT id FROM public.sales ORDER BY id", 6) == [{"id": 1}, {"id": 3}, {"id": 6}]
    with LakeSession(layout, as_of=Seq(4)) as session, pytest.raises(InvalidQuery, match=r"called public\.orders then"):
        session.query("FROM public.sales")


@pytest.mark.parametrize("folded", [False, True])
def test_tables_that_swap_names_within_a_batch_have_their_records_from_before(
    layout: LakeLayout, orders: TableSchema, records: Records, *, folded: bool
):
    one, two = orders, replace(orders, table_id=TableId(9), name="sales")
    land_at(
        layout, 2, 0, (one, records(one, ("c", 1, {"id": 1}))), (two, records(two, ("c", 2, {"id": 20}))), fold=folded
    )
    landed = []
    for schema, name, first in ((one, "sales", 3), (two, "orders", 4)):
        later = replace(schema, version=SchemaVersion(2), name=name)
        batches = [records(schema, ("c", first, {"id": first})), records(later, ("c", first + 3, {"id": first + 3}))]
        landed.append(append_history(layout, later, batches, Seq(8)))
        landed += [fold_table(layout, later, Seq(8))] if folded else []
    commit_cut(layout, Seq(8), landed, committed_at=datetime.now(UTC))
    for n, orders_ids, sales_ids in ((2, [1], [20]), (4, [1, 3], [4, 20]), (8, [4, 7, 20], [1, 3, 6])):
        for name, expected in (("orders", orders_ids), ("sales", sales_ids)):
            assert at(layout, f"SELECT id FROM public.{name} ORDER BY id", n) == [{"id": id_} for id_ in expected]
    assert at(layout, 'SELECT id FROM history."public.orders" ORDER BY __seq', 5) == [{"id": 1}, {"id": 3}]


def test_times_and_tokens_outside_of_the_lake_are_told_apart(layout: LakeLayout, orders: TableSchema, records: Records):
    with pytest.raises(PositionError, check=coded("beyond_retention")):
        LakeSession(layout, as_of=NOON)
    land_at(layout, 5, 0, (orders, records(orders, ("c", 5, {"id": 1}))))
    land_at(layout, 9, 5, (orders, records(orders, ("c", 9, {"id": 2}))))
    count = "SELECT count(*) AS n FROM public.orders"
    assert at(layout, count, NOON + timedelta(days=30)) == [{"n": 2}]
    with pytest.raises(PositionError, check=coded("time_from_future")):
        LakeSession(layout, as_of=datetime.now(UTC) + timedelta(minutes=1))
    with pytest.raises(PositionError, check=coded("beyond_retention")) as caught:
        LakeSession(layout, as_of=NOON - timedelta(seconds=1))
    assert NOON.isoformat() in caught.value.hint
    with pytest.raises(TokenFromFuture, match=r"up to [0-9a-f]{8}\.s9, not [0-9a-f]{8}\.s10") as future:
        LakeSession(layout, as_of=Seq(10))
    assert ".s9 or earlier" in future.value.hint
    with LakeSession(layout, as_of=Seq(4)) as before, pytest.raises(InvalidQuery):
        before.query(count)  # the log had no record of it so far


def test_the_hint_of_a_moment_before_the_lake_names_moments_that_answer(
    layout: LakeLayout, orders: TableSchema, lines: TableSchema, records: Records
):
    line = {"Order": 1, "line no": 1}
    two_rows = [("c", 3, line), ("c", 4, {**line, "line no": 2})]
    land_at(layout, 2, 0, (orders, records(orders, ("c", 1, {"id": 1}), ("c", 2, {"id": 2}))))
    land_at(layout, 4, 1, (lines, records(lines, *two_rows)))
    count = 'SELECT count(*) AS n FROM public."Order ""Lines"""'
    with pytest.raises(PositionError, check=coded("beyond_retention")) as caught:
        LakeSession(layout, as_of=NOON - timedelta(hours=1))
    begins, whole = _moments(caught.value.hint)
    assert at(layout, "SELECT count(*) AS n FROM public.orders", begins) == [{"n": 2}]
    assert at(layout, count, whole) == [{"n": 2}]
    # A table that began later names the moment from which it answers, too.
    with (
        LakeSession(layout, as_of=begins) as session,
        pytest.raises(InvalidQuery, match="it had no record yet") as later,
    ):
        session.query(count)
    assert _moments(later.value.hint) == [whole]
    (token,) = re.findall(r"\.s(\d+)\)", later.value.hint)
    assert at(layout, count, int(token)) == [{"n": 2}]


def _moments(hint: str) -> list[datetime]:
    return [datetime.fromisoformat(text) for text in re.findall(r"\d{4}-\S+", hint)]


def test_what_retention_dropped_is_neither_guessed_nor_needed(
    layout: LakeLayout, orders: TableSchema, lines: TableSchema, records: Records
):
    line = {"Order": 1, "line no": 1}
    land_at(layout, 3, 0, (orders, records(orders, *(("c", n, {"id": n}) for n in (1, 2, 3)))), fold=True)
    land_at(layout, 5, 1, (orders, records(orders, ("d", 4, {"id": 2}))), (lines, records(lines, ("c", 5, line))))
    land_at(layout, 7, 2, (orders, records(orders, ("c", 7, {"id": 7}))), fold=True)
    land_at(layout, 9, 3, (orders, records(orders, ("u", 9, {"id": 7, "note": "x"}))))
    path = layout.table_path("history", orders)
    stamp = CommitProperties(custom_metadata={"millstream": '{"on": 99}'})
    DeltaTable(path).alter.set_table_properties(
        {f"millstream.history_from_seq.{orders.table_id}": "6"}, raise_if_not_exists=False, commit_properties=stamp
    )
    DeltaTable(path).delete("__seq <= 6", commit_properties=stamp)
    ids = "SELECT id, note FROM public.orders ORDER BY id"
    rows = [(1, None), (3, None), (7, "x")]
    with LakeSession(layout) as session:
        assert [tuple(row.values()) for row in session.query(ids).to_pylist()] == rows
    assert [tuple(row.values()) for row in at(layout, ids, 7)] == [*rows[:2], (7, None)]
    # If a fold ended exactly at that number, it suffices.
    assert [row["id"] for row in at(layout, ids, 3)] == [1, 2, 3]
    with LakeSession(layout, as_of=Seq(5)) as session:
        with pytest.raises(PositionError, check=coded("beyond_retention")) as caught:
            session.query(ids)
        assert caught.value.details["first"] == 6
        assert re.search(r"as of [0-9a-f]{8}\.s5: .* after [0-9a-f]{8}\.s6 \(2026-03-01T12:02", caught.value.message)
        assert "history_retention" in caught.value.hint
        assert session.query('SELECT count(*) AS n FROM public."Order ""Lines"""').to_pylist() == [{"n": 1}]


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_past_answer_survives_the_maintenance_that_deletes_its_files(
    layout: LakeLayout, orders: TableSchema, records: Records, request: pytest.FixtureRequest, *, is_stored: bool
):
    if is_stored:
        store: EmbeddedS3 = request.getfixturevalue("store")
        layout = replace(layout, location=f"{store.url}/survives", storage_options=store.lake_options)
    land_at(layout, 2, 0, (orders, records(orders, ("c", 1, {"id": 1}), ("c", 2, {"id": 2}))), fold=True)
    # To make its row, a query reads the earlier one.
    land_at(layout, 3, 0, (orders, records(orders, ("u", 3, {"id": 2, "__unchanged": ["note"]}))))
    land_at(layout, 4, 1, (orders, records(orders, ("d", 4, {"id": 1}))), fold=True)
    # The versions can still be opened after their files are gone.
    rules = MaintenanceRules(log_retention_s=4e9)
    ids = "SELECT id FROM public.orders ORDER BY id"
    with LakeSession(layout, as_of=Seq(3)) as session:
        assert session.query(ids).column(0).to_pylist() == [1, 2]
        assert maintain_table(layout, "current", orders, now_ms=4 * 10**12, rules=rules).files_deleted > 0
        assert session.query(ids).column(0).to_pylist() == [1, 2]
    with LakeSession(layout) as session:
        assert session.query(ids).column(0).to_pylist() == [2]
        land_at(layout, 5, 2, (orders, records(orders, ("c", 5, {"id": 5}))), fold=True)
        maintain_table(layout, "current", orders, now_ms=4 * 10**12, rules=rules)
        with pytest.raises(LakeUnavailable):
            session.query(ids)
    assert at(layout, ids, 3) == [{"id": 1}, {"id": 2}]


def test_an_older_session_reads_a_table_for_the_first_time_after_its_history_was_dropped(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    land_at(layout, 2, 0, (orders, records(orders, ("c", 1, {"id": 1}), ("c", 2, {"id": 2}))), fold=True)
    land_at(layout, 4, 1, (orders, records(orders, ("d", 3, {"id": 1}), ("c", 4, {"id": 4}))))
    with LakeSession(layout) as session, LakeSession(layout) as late:
        land_at(layout, 6, 2, (orders, records(orders, ("c", 6, {"id": 6}))), fold=True)
        assert drop_history(layout, orders, HistoryBound(Seq(6)))
        assert sorted(session.query("SELECT id FROM public.orders").column(0).to_pylist()) == [2, 4]
        maintain_table(layout, "current", orders, now_ms=4 * 10**12)
        maintain_table(layout, "history", orders, now_ms=4 * 10**12)
        with pytest.raises(PositionError, check=coded("beyond_retention")):
            late.query("FROM public.orders")


def test_a_table_that_is_held_back_is_named_with_its_reason_and_where_it_stands(
    layout: LakeLayout, orders: TableSchema, lines: TableSchema, records: Records
):
    batch = {orders: records(orders, ("c", 1, {"id": 1})), lines: records(lines, ("c", 2, {"Order": 1, "line no": 1}))}
    land(layout, 2, batch, fold=True)
    land(layout, 4, {lines: records(lines, ("c", 4, {"Order": 1, "line no": 2}))})
    asked = []

    def held() -> dict[str, str]:
        asked.append(1)
        return {"public.orders": "a type changed", 'public."Order ""Lines"""': "another"}

    with LakeSession(layout, held=held) as session:
        session.query('FROM public."Order ""Lines"""')
        assert (session.held_back, asked) == ({}, [])
        session.query("FROM public.orders")
        token = str(session.token).replace(".s4", ".s2")
        assert session.held_back == {"public.orders": f"a type changed; its rows stand at {token}"}
        assert session.held_back
        assert asked == [1]


OPS = st.lists(
    st.tuples(st.sampled_from("ccuumdt"), st.integers(0, 5), st.integers(0, 5), st.booleans()), min_size=1, max_size=24
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ops=OPS, folds=st.sets(st.integers(1, 24), max_size=3))
@pytest.mark.siege
def test_any_moment_shows_what_a_plain_replay_of_the_records_gives(
    tmp_path: Path, orders: TableSchema, records: Records, ops: list[tuple[str, int, int, bool]], folds: set[int]
):
    layout = LakeLayout(tempfile.mkdtemp(dir=tmp_path), "shop", StreamId(UUID(int=42)))
    rows: dict[int, dict[str, object]] = {}
    states: dict[int, list[dict[str, object]]] = {}
    for seq, (op, key, other, sparse) in enumerate(ops, 1):
        row = {"id": key, "total": Decimal(seq), "note": f"note {seq}"}
        if op == "t":
            record = ("t", seq, {})
            rows.clear()
        elif op == "d" and key in rows:
            record = ("d", seq, {"id": key})
            del rows[key]
        elif op in "um" and key in rows:
            facts: dict[str, object] = dict(row)
            old = rows.pop(key)
            if sparse:
                facts |= {"note": None, "__unchanged": ["note"]}
                row["note"] = old["note"]
            if op == "m" and other not in rows:
                facts |= {"id": other, "__before": [("id", str(key))]}
                row["id"] = other
            record = ("u", seq, facts)
            rows[int(str(row["id"]))] = row
        else:
            record = ("c", seq, row)
            rows[key] = row
        land(layout, seq, {orders: records(orders, record)}, fold=seq in folds)
        states[seq] = sorted(rows.values(), key=lambda row: int(str(row["id"])))
    for seq, expected in states.items():
        if seq in {1, len(states)} or seq % 5 == 0 or seq in folds or seq + 1 in folds:
            assert at(layout, "FROM public.orders ORDER BY id", seq) == expected
    with LakeSession(layout) as session:
        assert session.query("FROM public.orders ORDER BY id").to_pylist() == states[len(states)]
        some = session.query("SELECT note FROM public.orders WHERE id = 2").to_pylist()
        assert some == [{"note": row["note"]} for row in states[len(states)] if row["id"] == 2]
