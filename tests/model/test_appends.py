"""Small appends become columns with the values of each."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import InvalidValue
from millstream.model.appends import AppendOp, columns_of
from millstream.model.ids import SchemaVersion, ShardId, SourceId, TableId
from millstream.model.operations import OPERATION_SCHEMA, OperationKind
from millstream.model.records import Op, append_row_schema
from millstream.model.schema import Column, TableSchema


def table(table_id: int, version: int = 1) -> TableSchema:
    columns = [Column("id", pa.int64()), Column("note", pa.string()), Column("tags", pa.list_(pa.string()))]
    more = [Column(f"extra{number}", pa.float64()) for number in range(1, version)]
    return TableSchema(
        TableId(table_id), SchemaVersion(version), SourceId(0), "app", f"t{table_id}", (*columns, *more), ("id",), ("id",)
    )  # fmt: skip


TABLES = [table(1), table(1, version=2), table(2), table(1)]
"""The last one equals the first, and is another object."""
FACTS = ("commit_ts", "trace_id")


@st.composite
def appends(draw: st.DrawFn) -> AppendOp:
    schema = draw(st.sampled_from(TABLES))
    row = st.tuples(
        st.none() | st.integers(-(2**63), 2**63 - 1),
        st.none() | st.text(max_size=3),
        st.none() | st.lists(st.text(max_size=2), max_size=2),
        *[st.none() | st.floats(allow_nan=False)] * (schema.version - 1),
    )
    return AppendOp(
        schema,
        draw(st.lists(row, min_size=1, max_size=3)),
        ShardId(draw(st.integers(0, 1))),
        draw(st.sampled_from([None, "north"])),
        draw(st.none() | st.integers(0, 10**15)),
        draw(st.none() | st.sampled_from("xy")),
    )


@given(st.lists(appends(), min_size=1, max_size=12))
def test_columns_say_of_every_append_what_it_said(ops: list[AppendOp]):
    made = columns_of(ops)
    assert made.row_count == sum(op.row_count for op in ops)
    assert made.operations.schema.equals(OPERATION_SCHEMA)
    told = made.operations.cast(
        pa.schema([f if f.name != "commit_ts" else pa.field("commit_ts", pa.int64()) for f in OPERATION_SCHEMA])
    ).to_pylist()
    for op, said in zip(ops, told, strict=True):
        facts = dict(zip(FACTS, op[4:], strict=True))
        silent = dict.fromkeys(said)
        assert said == {**silent, "kind": int(OperationKind.APPEND), "source": 0, **facts}

    found: dict[int, list[tuple[int, tuple[object, ...]]]] = {}
    for entry in made.tables:
        assert entry.rows.schema.equals(append_row_schema(entry.schema), check_metadata=True)
        entry.rows.validate(full=True)
        places = list(zip(*(entry.rows.column(n).to_pylist() for n in ("__operation", "__index")), strict=True))
        assert places == sorted(places)
        for row in entry.rows.to_pylist():
            op = ops[row["__operation"]]
            assert (op.schema, op.shard, op.partition) == (entry.schema, entry.shard, entry.partition)
            assert row["__op"] == Op.CREATE
            assert row["__unchanged"] is row["__exact"] is row["__before"] is None
            values = tuple(row[column.name] for column in entry.schema.columns)
            found.setdefault(row["__operation"], []).append((row["__index"], values))
    assert found == {place: [(i, tuple(row)) for i, row in enumerate(op.rows)] for place, op in enumerate(ops)}
    keys = [(e.schema.table_id, e.schema.version, e.shard, e.partition) for e in made.tables]
    assert len(set(keys)) == len(keys)


def test_more_appends_than_are_remembered_are_columns_too():
    count = 3000
    made = columns_of([AppendOp(TABLES[0], ((n, str(n), None),)) for n in range(count)])
    (entry,) = made.tables
    assert entry.rows.column("id").to_pylist() == entry.rows.column("__operation").to_pylist() == list(range(count))
    assert made.operations.num_rows == count


@pytest.mark.parametrize(
    ("rows", "column"),
    [
        ((("one", "x", None),), "id"),
        (((2**70, "x", None),), "id"),
        (((1, 7, None),), "note"),
        (((1, "\ud800", None),), "note"),
        (((1, "x", [7]),), "tags"),
        (((1, "x"),), None),
        (((1, "x", None, 1.0),), None),
        (((1, "x", None), (1, "x")), None),
        ((5,), None),
        ((), None),
    ],
)
def test_what_is_no_row_of_its_table_is_refused_and_says_where(
    rows: tuple[tuple[object, ...], ...], column: str | None
):
    fine = AppendOp(TABLES[0], ((1, "fine", ["a"]),))
    with pytest.raises(InvalidValue) as caught:
        columns_of([fine, AppendOp(TABLES[0], rows), fine])
    assert caught.value.details.get("column") == column


def test_a_fact_of_the_wrong_type_is_refused_too():
    with pytest.raises(InvalidValue, match="trace_id"):
        columns_of([AppendOp(TABLES[0], ((1, "x", None),), trace_id=7)])  # type: ignore[arg-type]


def test_the_size_counts_what_lies_in_containers():
    flat = AppendOp(TABLES[0], ((1, "x" * 1000, None),)).size_bytes
    nested = AppendOp(TABLES[0], ((1, "x", ["y" * 500, "z" * 500]), (1, "x", None))).size_bytes
    deep = AppendOp(TABLES[0], ((1, {"k": ["y" * 1000]}, None),)).size_bytes
    assert min(flat, nested, deep) > 1000
