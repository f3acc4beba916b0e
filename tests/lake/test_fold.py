"""Folding any history, however it is split, gives the source's rows; the source here is a plain Python model."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import pairwise
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.lake.landing import append_history
from tests.seeds import examples

from millstream.lake.column_conversion import EXACT, lake_columns, to_lake
from millstream.lake.commit_cuts import commit_cut
from millstream.lake.folded.current_rules import fold_records
from millstream.lake.folded.current_table import DEFAULT_SIZES, FoldSizes, fold_table
from millstream.lake.folded.leaf_rewriting import surviving
from millstream.lake.layout import LakeLayout
from millstream.lake.query.query_session import LakeSession
from millstream.model.ids import SchemaVersion, SourceId, StreamId, TableId
from millstream.model.positions import Seq
from millstream.model.records import record_schema
from millstream.model.schema import Column, ReplicaIdentity, TableSchema

COLUMNS = (
    Column("body", pa.string()),
    Column("a", pa.int32()),
    Column("k", pa.decimal128(6, 2)),
    Column("big", pa.string()),
    Column("at", pa.timestamp("us", tz="UTC")),
    Column("f", pa.float64()),
)
# Values as PostgreSQL prints them. NaN and infinity have no typed value in a decimal and a timestamp: they live
# in __exact.
TEXTS: dict[str, list[str | None]] = {
    "a": ["1", "2", "-7"],
    "k": ["0.00", "1.50", "NaN"],
    "body": [None, "", "é\n'\"", "x"],
    "big": ["toast one", "toast two", None],
    "at": ["2026-01-02 03:04:05.678+00", "infinity", "1999-12-31 23:59:59+00"],
    "f": ["0.1", "-0", "0", "NaN", None],
}
Row = dict[str, str | None]


def typed(column: Column, text: str | None) -> object:
    if text is None or text in {"NaN", "infinity"}:
        return float("nan") if text == "NaN" and column.name == "f" else None
    if column.name == "at":
        return datetime.fromisoformat(text)
    return {"a": int, "k": Decimal, "f": float}.get(column.name, str)(text)


def text_of(name: str, value: object, exact: dict[str, str]) -> str | None:
    if name in exact:
        assert value is None
        return exact[name]
    if value is None:
        return None
    if name == "at":
        assert isinstance(value, datetime)
        return value.strftime("%Y-%m-%d %H:%M:%S.%f").rstrip("0").rstrip(".") + "+00"
    if name == "f":
        return {"nan": "NaN", "-0.0": "-0", "0.0": "0"}.get(str(value), str(value))
    return str(value)


def texts_in(rows: pa.Table) -> list[Row]:
    return [
        {n: text_of(n, v, dict(row.get("__exact") or [])) for n, v in row.items() if n != "__exact"}
        for row in rows.to_pylist()
    ]


def canonical(rows: list[Row]) -> list[str]:
    return sorted(json.dumps(row, sort_keys=True) for row in rows)


@dataclass
class Source:
    """A table at the source, and the records that its changes send."""

    schema: TableSchema
    rows: list[Row] = field(default_factory=list)
    records: list[dict[str, object]] = field(default_factory=list)

    def play(self, steps: list[tuple[int, int, int, int]]) -> None:
        for action, one, two, mask in steps:
            self.step(action, one, two, mask)

    def pick(self, seed: int) -> Row:
        row: Row = {}
        for column in self.schema.columns:
            choices = TEXTS[column.name]
            row[column.name] = choices[seed % len(choices)]
            seed = seed // len(choices) + seed % 3
        return row

    def key(self, row: Row) -> tuple[str | None, ...]:
        return tuple(row[name] for name in self.schema.key)

    def step(self, action: int, one: int, two: int, mask: int) -> None:
        held = self.rows[one % len(self.rows)] if self.rows else None
        if action <= 2 or held is None:
            row = self.pick(two)
            if self.free(row):
                self.rows.append(row)
                self.send("r" if action == 0 else "c", row)
        elif action <= 5:
            self.update(held, {**self.pick(two), **{n: held[n] for n in self.schema.key}}, mask)
        elif action == 6:
            self.update(held, self.pick(two), mask)
        elif action <= 8:
            self.rows.remove(held)
            full = self.schema.replica_identity is ReplicaIdentity.FULL
            self.send("d", held if full else {n: held[n] for n in self.schema.key})
        elif mask == 0:
            self.rows.clear()
            self.send("t", {})

    def free(self, row: Row, besides: Row | None = None) -> bool:
        return not self.schema.key or all(self.key(r) != self.key(row) for r in self.rows if r is not besides)

    def update(self, held: Row, row: Row, mask: int) -> None:
        if not self.free(row, besides=held):
            return
        unchanged = [n for n in ("big", "body") if held[n] is not None and mask & (1 if n == "big" else 2)]
        row = {**row, **{n: held[n] for n in unchanged}}
        full = self.schema.replica_identity is ReplicaIdentity.FULL
        before = None
        if full:
            before = dict(held)
        elif self.key(held) != self.key(row) or mask & 4:
            before = {n: held[n] for n in self.schema.key}
        self.rows[next(i for i, r in enumerate(self.rows) if r is held)] = row
        self.send("u", {n: v for n, v in row.items() if n not in unchanged}, before, unchanged or None)

    def send(self, op: str, row: Row, before: Row | None = None, unchanged: list[str] | None = None) -> None:
        values = {c.name: typed(c, row.get(c.name)) for c in self.schema.columns}
        exact = [(n, text) for n, text in row.items() if text is not None and values[n] is None]
        self.records.append(
            {
                "__op": op,
                "__seq": 10 + 3 * len(self.records),
                "__source": 1,
                "__commit_date": date(2026, 1, 1 + len(self.records) % 3),
                "__unchanged": unchanged,
                "__exact": exact or None,
                "__before": None if before is None else list(before.items()),
                **values,
            }
        )

    def batch(self, first: int, end: int) -> pa.RecordBatch:
        shape = record_schema(self.schema)
        blank = dict.fromkeys(shape.names)
        return pa.RecordBatch.from_pylist([{**blank, **r} for r in self.records[first:end]], schema=shape)


def table_schema(key: tuple[str, ...], identity: ReplicaIdentity = ReplicaIdentity.DEFAULT) -> TableSchema:
    return TableSchema(
        table_id=TableId(4),
        version=SchemaVersion(1),
        source=SourceId(1),
        namespace="public",
        name="Odd Name",
        columns=COLUMNS,
        identity=key or tuple(c.name for c in COLUMNS),
        key=key,
        replica_identity=identity,
    )


SCHEMAS = {
    "one column": table_schema(("a",)),
    "two columns, one without a type for all its values": table_schema(("a", "k")),
    "a timestamp": table_schema(("a", "at")),
    "key under FULL": table_schema(("a", "k"), ReplicaIdentity.FULL),
    "no key, FULL": table_schema((), ReplicaIdentity.FULL),
}
STEPS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 5), st.integers(0, 10_000), st.integers(0, 7)), min_size=1, max_size=40
)
CUTS = st.lists(st.integers(0, 40), max_size=5)
schemas = pytest.mark.parametrize("schema", SCHEMAS.values(), ids=list(SCHEMAS))


def bounds(cuts: list[int], count: int) -> list[tuple[int, int]]:
    points = sorted({0, count, *(cut for cut in cuts if cut <= count)})
    return list(pairwise(points))


@pytest.mark.sampled
@schemas
@settings(max_examples=examples(100), deadline=None)
@given(steps=STEPS, cuts=CUTS)
def test_any_split_of_any_history_folds_to_the_sources_rows(
    schema: TableSchema, steps: list[tuple[int, int, int, int]], cuts: list[int]
):
    source = Source(schema)
    source.play(steps)
    columns = lake_columns(schema)
    current = pa.schema([*columns, EXACT]).empty_table()
    for first, end in bounds(cuts, len(source.records)):
        held = current
        folded = fold_records(to_lake(schema, source.batch(first, end)), schema, columns, lambda _keys, held=held: held)
        taken = None if schema.key else np.zeros(len(folded.gone), bool)
        left = held.slice(0, 0) if folded.truncated else surviving(held, folded.gone, taken)
        assert taken is None or folded.truncated or bool(taken.all()), "a row to take out was not there"
        current = pa.concat_tables([left, folded.rows])
    assert canonical(texts_in(current)) == canonical(source.rows)


@pytest.mark.sampled
@schemas
@pytest.mark.parametrize("large", [False, True], ids=["as a small table", "as a large table"])
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS, cuts=CUTS, again=st.integers(0, 3))
def test_delta_tables_and_queries_follow_the_source_whatever_the_batches_and_replays(
    schema: TableSchema, *, large: bool, steps: list[tuple[int, int, int, int]], cuts: list[int], again: int
):
    source = Source(schema)
    source.play(steps)
    if not source.records:
        return
    sizes = FoldSizes(2_000, 0, 2_000, rows_max=4, build_rows_min=0, build_bytes=40_000) if large else DEFAULT_SIZES
    with tempfile.TemporaryDirectory() as folder:
        layout = LakeLayout(folder, "shop", StreamId(UUID(int=7)))
        seqs = [int(str(r["__seq"])) for r in source.records]
        for place, (first, end) in enumerate(bounds(cuts, len(source.records))):
            n = Seq(seqs[end - 1])
            # A replay: the same rows and some before them, under other bounds.
            for start in {first, max(0, first - again * 5)}:
                commit = append_history(layout, schema, [source.batch(start, end)], n)
            commit_cut(layout, n, [commit], committed_at=datetime.now(UTC))
            if place % 2 == 0:
                fold_table(layout, schema, n, sizes=sizes)
        with LakeSession(layout) as session:
            asked = session.query('SELECT * FROM public."Odd Name"')
            assert canonical(texts_in(asked)) == canonical(source.rows)
            records = session.query('SELECT __seq FROM history."public.Odd Name" ORDER BY __seq')
            assert records.column(0).to_pylist() == seqs
        fold_table(layout, schema, n, sizes=sizes)
        fold_table(layout, schema, n, sizes=sizes)
        stored = DeltaTable(layout.table_path("current", schema)).to_pyarrow_table()
        assert canonical(texts_in(stored)) == canonical(source.rows)
