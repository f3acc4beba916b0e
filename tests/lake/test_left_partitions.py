"""Partitions that leave: every view of any history, however it is split, has the rows whose partitions are left."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.lake.landing import append_history
from tests.lake.test_fold import SCHEMAS, TEXTS, Row, Source, bounds, canonical, texts_in
from tests.lake.test_log_tail import MemoryLog
from tests.lake.test_scd2 import MIDNIGHT, Store, Told, Watched, at, columns_of, version_of
from tests.lake.test_table_formats import FORMATS, iceberg, rows_of
from tests.seeds import examples

from millstream.errors import LakeConflict, LakeError
from millstream.lake.column_conversion import EXACT, to_lake
from millstream.lake.commit_cuts import commit_cut
from millstream.lake.folded.current_rules import fold_records, match_unknown
from millstream.lake.folded.current_table import DEFAULT_SIZES, FoldSizes, fold_table
from millstream.lake.folded.leaf_rewriting import in_their_partitions, surviving
from millstream.lake.folded.left_partitions import partitions_of, without_left
from millstream.lake.folded.scd2_rules import VERSION_COLUMNS
from millstream.lake.folded.scd2_table import fold_into_versions, rebuild_versions
from millstream.lake.history_retention import HistoryBound, drop_history
from millstream.lake.layout import LakeLayout
from millstream.lake.maintenance import MaintenanceRules, maintain_table
from millstream.lake.query.query_session import LakeSession
from millstream.lake.row_identity import Keys
from millstream.model.ids import SchemaVersion, StreamId, TableId
from millstream.model.positions import Seq
from millstream.model.records import PARTITION_OID
from millstream.model.schema import Column, TableSchema

Records = Callable[..., pa.RecordBatch]
PARTITIONED = {name: replace(schema, partitioned=True) for name, schema in SCHEMAS.items()}
TINY = FoldSizes(2_000, 0, 2_000, rows_max=4, build_rows_min=0, build_bytes=40_000)


@dataclass
class Partitioned(Source):
    """A partitioned table at the source; its rows' column `f` tells their leaf partition."""

    oids: list[int | None] = field(default_factory=lambda: [1000, 1001, None])
    """The OIDs of the leaf partitions. Rows of the last one come via the root: their leaf isn't known."""
    leaf: dict[int, int | None] = field(default_factory=dict)
    """Each row's OID, by the row's identity in memory."""
    kept: list[Row] = field(default_factory=list)
    """All rows ever, so that identities are never used twice."""
    sent_oid: int | None = None
    seen: dict[int, list[Row]] = field(default_factory=dict)
    """The rows by the number of records, behind each step."""

    def play(self, steps: list[tuple[int, int, int, int]]) -> None:
        for step in steps:
            self.step(*step)
            self.seen[len(self.records)] = list(self.rows)

    def oid_of(self, row: Row) -> int | None:
        return self.oids[TEXTS["f"].index(row["f"]) % len(self.oids)]

    def put(self, op: str, row: Row) -> None:
        self.rows.append(row)
        self.note(row)
        self.sent_oid = self.leaf[id(row)]
        self.send(op, row)

    def note(self, row: Row) -> None:
        self.kept.append(row)
        self.leaf[id(row)] = self.oid_of(row)

    def take(self, held: Row) -> None:
        self.rows = [row for row in self.rows if row is not held]

    def step(self, action: int, one: int, two: int, mask: int) -> None:
        held = self.rows[one % len(self.rows)] if self.rows else None
        if action <= 2 or held is None:
            row = self.pick(two)
            if self.free(row):
                self.put("r" if action == 0 else "c", row)
        elif action <= 6:
            kept = {} if action == 6 else {n: held[n] for n in self.schema.key}
            self.update(held, {**self.pick(two), **kept}, mask)
        elif action == 7:
            self.delete(held)
        elif action == 8:
            self.leave(two % (len(self.oids) - 1), by_look=bool(mask & 1))
        elif mask == 0:
            self.rows.clear()
            self.sent_oid = None
            self.send("t", {})

    def delete(self, held: Row) -> None:
        self.take(held)
        self.sent_oid = self.leaf[id(held)]
        names = [n for n in held if n in self.schema.key or not self.schema.key or self.is_full]
        self.send("d", {n: held[n] for n in names})

    @property
    def is_full(self) -> bool:
        return self.schema.replica_identity.value == "f"

    def update(self, held: Row, row: Row, mask: int) -> None:
        if not self.free(row, besides=held):
            return
        if self.oid_of(row) != self.leaf[id(held)]:
            # PostgreSQL moves a row between leaves as a deletion and an insertion. Also a row of unknown leaf
            # may become known so.
            self.delete(held)
            self.put("c", row)
            return
        unchanged = [n for n in ("big", "body") if held[n] is not None and mask & (1 if n == "big" else 2)]
        row = {**row, **{n: held[n] for n in unchanged}}
        before = None
        if self.is_full:
            before = dict(held)
        elif self.key(held) != self.key(row) or mask & 4:
            before = {n: held[n] for n in self.schema.key}
        self.rows = [row if r is held else r for r in self.rows]
        self.note(row)
        self.sent_oid = self.leaf[id(row)]
        self.send("u", {n: v for n, v in row.items() if n not in unchanged}, before, unchanged or None)

    def leave(self, slot: int, *, by_look: bool) -> None:
        oid = self.oids[slot]
        assert oid is not None
        self.rows = [row for row in self.rows if self.leaf[id(row)] != oid]
        self.sent_oid = oid
        self.send("x", {})
        if by_look:
            self.oids[slot] = oid + 2  # dropped, and made again
        self.records[-1]["__before"] = [("partition", f"public.odd_{slot}")]

    def send(self, op: str, row: Row, before: Row | None = None, unchanged: list[str] | None = None) -> None:
        if op == "r" and id(row) in self.leaf:
            self.sent_oid = self.leaf[id(row)]
        super().send(op, row, before, unchanged)
        self.records[-1][PARTITION_OID.name] = self.sent_oid

    def labelled(self) -> list[str]:
        return sorted(json.dumps([row, self.leaf[id(row)]], sort_keys=True) for row in self.rows)


@dataclass
class WatchedPartitions(Partitioned, Watched):
    """Such a table whose versions are known."""

    seconds: int = 0
    losing: bool = False

    def lose(self, steps: list[tuple[int, int, int, int]], seconds: int) -> None:
        self.losing = True
        super().lose(steps, seconds)

    def play(self, steps: list[tuple[int, int, int, int]]) -> None:
        super().play(steps)
        self.losing = False

    def run_ends(self, cuts: list[int]) -> list[int]:
        """Return numbers of records at which runs end: some of those at which they may, and those at which they must."""
        return sorted({*self.copied, *(self.ends[cut] for cut in cuts if cut < len(self.ends))})

    def transact(self, steps: list[tuple[int, int, int, int]], seconds: int) -> None:
        self.seconds = seconds
        super().transact(steps, seconds)

    def leave(self, slot: int, *, by_look: bool) -> None:
        alone = by_look and not self.losing
        if alone:
            self.look()
            self.begin(self.seconds + 7)
            self.index = None
        super().leave(slot, by_look=by_look)
        if alone:
            self.look()
            self.begin(self.seconds)


STEP = st.tuples(st.integers(0, 9), st.integers(0, 5), st.integers(0, 10_000), st.integers(0, 7))
STEPS = st.lists(STEP, min_size=1, max_size=40)
CUTS = st.lists(st.integers(0, 40), max_size=5)
TRANSACTION = st.tuples(st.booleans() | st.just(False), st.lists(STEP, max_size=5), st.integers(0, 50))
STORIES = st.lists(TRANSACTION, min_size=1, max_size=14)
schemas = pytest.mark.parametrize("schema", PARTITIONED.values(), ids=list(PARTITIONED))
keyed = pytest.mark.parametrize(
    "schema", [s for s in PARTITIONED.values() if s.key], ids=[n for n, s in PARTITIONED.items() if s.key]
)


def watched(schema: TableSchema, story: list[tuple[bool, list[tuple[int, int, int, int]], int]]) -> WatchedPartitions:
    source = WatchedPartitions(schema)
    for lost, steps, seconds in story:
        if lost:
            source.lose(steps, seconds)
        else:
            source.transact(steps, seconds)
    return source


def labelled(rows: pa.Table) -> list[str]:
    oids = [None if oid == 0 else oid for oid in partitions_of(rows).tolist()]
    own = texts_in(rows.drop_columns([PARTITION_OID.name]))
    return sorted(json.dumps([row, oid], sort_keys=True) for row, oid in zip(own, oids, strict=True))


@pytest.mark.sampled
@schemas
@settings(max_examples=examples(200), deadline=None)
@given(steps=STEPS, cuts=CUTS)
def test_any_split_of_any_history_folds_to_the_rows_of_the_partitions_that_are_left(
    schema: TableSchema, steps: list[tuple[int, int, int, int]], cuts: list[int]
):
    source = Partitioned(schema)
    source.play(steps)
    columns = columns_of(schema)
    current = pa.schema([*columns, EXACT]).empty_table()
    for first, end in bounds(cuts, len(source.records)):
        held = current
        folded = fold_records(to_lake(schema, source.batch(first, end)), schema, columns, lambda _keys, held=held: held)
        stays = held.slice(0, 0) if folded.truncated else without_left(held, folded.left)
        taken = None if schema.key else np.zeros(len(folded.gone), bool)
        gone = folded.gone if schema.key else in_their_partitions(folded.gone, [stays])
        stays = surviving(stays, gone, taken)
        assert taken is None or folded.truncated or bool(taken.all()), "a row to take out was not there"
        current = pa.concat_tables([stays, folded.rows])
    assert labelled(current) == source.labelled()


@pytest.mark.sampled
@keyed
@settings(max_examples=examples(200), deadline=None)
@given(story=STORIES, cuts=CUTS)
def test_any_split_of_any_history_gives_the_versions_that_partitions_end_when_they_leave(
    schema: TableSchema, story: list[tuple[bool, list[tuple[int, int, int, int]], int]], cuts: list[int]
):
    source = watched(schema, story)
    store = Store.of(schema)
    for first, end in bounds(source.run_ends(cuts), len(source.records)):
        store.fold(source.batch(first, end))
    assert store.versions() == source.versions()
    still = store.open.select([*columns_of(schema).names, EXACT.name])
    assert labelled(still) == source.labelled(), "an open version has its row's partition"


@pytest.mark.sampled
@schemas
@pytest.mark.parametrize("large", [False, True], ids=["as a small table", "as a large table"])
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS, cuts=CUTS, again=st.integers(0, 3))
def test_delta_tables_and_queries_follow_the_partitions(
    schema: TableSchema, *, large: bool, steps: list[tuple[int, int, int, int]], cuts: list[int], again: int
):
    source = Partitioned(schema)
    source.play(steps)
    if not source.records:
        return
    sizes = TINY if large else DEFAULT_SIZES
    with tempfile.TemporaryDirectory() as folder:
        layout = LakeLayout(folder, "shop", StreamId(UUID(int=7)))
        seqs = [int(str(r["__seq"])) for r in source.records]
        for place, (first, end) in enumerate(bounds(cuts, len(source.records))):
            n = Seq(seqs[end - 1])
            for start in {first, max(0, first - again * 5)}:
                commit = append_history(layout, schema, [source.batch(start, end)], n)
            commit_cut(layout, n, [commit], committed_at=datetime.now(UTC))
            if place % 2 == 0:
                fold_table(layout, schema, n, sizes=sizes)
            with LakeSession(layout, log=MemoryLog([source.batch(0, len(source.records))])) as session:
                assert canonical(texts_in(session.query('SELECT * FROM public."Odd Name"'))) == canonical(source.rows)
        for end in {end for _, end in bounds(cuts, len(seqs))} & source.seen.keys():
            with LakeSession(layout, as_of=Seq(seqs[end - 1])) as session:
                asked = session.query('SELECT * FROM public."Odd Name"')
                assert canonical(texts_in(asked)) == canonical(source.seen[end])
        with LakeSession(layout) as session:
            asked = session.query('SELECT * FROM public."Odd Name"')
            assert PARTITION_OID.name not in asked.column_names
            assert canonical(texts_in(asked)) == canonical(source.rows)
            records = session.query('SELECT __seq, __op, __partition_oid FROM history."public.Odd Name" ORDER BY __seq')
            told = [(r["__seq"], r["__op"], r["__partition_oid"]) for r in source.records]
            assert [tuple(row.values()) for row in records.to_pylist()] == told
        for anew in (False, False, True):
            fold_table(layout, schema, n, sizes=sizes, anew=anew)
            stored = DeltaTable(layout.table_path("current", schema)).to_pyarrow_table()
            assert labelled(stored) == source.labelled()


@pytest.mark.sampled
@keyed
@pytest.mark.parametrize("sizes", [FoldSizes(), TINY], ids=["one file", "many leaves"])
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(story=STORIES, cuts=CUTS)
def test_delta_tables_of_versions_and_queries_follow_the_partitions(
    schema: TableSchema,
    sizes: FoldSizes,
    story: list[tuple[bool, list[tuple[int, int, int, int]], int]],
    cuts: list[int],
):
    source = watched(schema, story)
    if not source.records:
        return
    ends = source.run_ends(cuts)
    with tempfile.TemporaryDirectory() as folder:
        layout = LakeLayout(folder, "shop", StreamId(UUID(int=7)))
        for place, (first, end) in enumerate(bounds(ends, len(source.records))):
            n = Seq(int(str(source.records[end - 1]["__seq"])))
            landed = [append_history(layout, schema, [source.batch(first, end)], n)]
            if place == 0 or (place % 2 == 0 and end not in source.copied):
                landed.append(fold_into_versions(layout, schema, n, sizes=sizes).commit)
            commit_cut(layout, n, landed, committed_at=datetime.now(UTC))
        with LakeSession(layout) as session:
            asked = session.query('SELECT * FROM scd2."public.Odd Name"')
            assert PARTITION_OID.name not in asked.column_names
            if not source.copied:  # a query leaves out what a copy changed that isn't folded
                assert versions_in(asked) == source.versions()
        for fold in (fold_into_versions, rebuild_versions):
            fold(layout, schema, n, sizes=sizes)
            stored = DeltaTable(layout.table_path("scd2", schema)).to_pyarrow_table()
            assert versions_in(stored.drop_columns([PARTITION_OID.name])) == source.versions()


def versions_in(rows: pa.Table) -> list[Told]:
    names = [column.name for column in VERSION_COLUMNS]
    facts = rows.select(names).to_pylist()
    own = texts_in(rows.drop_columns(names))
    told = (version_of(row, f["valid_from"], f["valid_to"], f["__seq"]) for row, f in zip(own, facts, strict=True))
    return sorted(told, key=str)


def land(layout: LakeLayout, schema: TableSchema, batch: pa.RecordBatch, n: int, *, fold: bool = True) -> None:
    landed = [append_history(layout, schema, [batch], Seq(n))]
    if fold:
        landed.append(fold_table(layout, schema, Seq(n)))
        landed += [fold_into_versions(layout, schema, Seq(n)).commit] if schema.key else []
    commit_cut(layout, Seq(n), landed, committed_at=datetime.now(UTC))


def left(oid: int, seq: int, index: int | None = None) -> tuple[str, int, dict[str, object]]:
    return "x", seq, {"__partition_oid": oid, "__before": [("partition", "public.orders_1")], **at(seq, index)}


@pytest.mark.parametrize("lake", FORMATS)
@pytest.mark.parametrize("is_keyed", [True, False])
def test_tables_from_before_partitions_were_known_go_on_and_keep_rows_of_unknown_partitions(
    tmp_path: Path, layout: LakeLayout, orders: TableSchema, records: Records, lake: str, *, is_keyed: bool
):
    layout = iceberg(tmp_path) if lake == "iceberg" else layout
    before = orders if is_keyed else SCHEMAS["no key, FULL"]
    before = before if is_keyed else replace(orders, key=(), replica_identity=before.replica_identity)
    now = replace(before, version=SchemaVersion(2), partitioned=True)
    land(layout, before, records(before, *(("c", n, {"id": n, "note": "old", **at(1, n)}) for n in (1, 2, 3))), 3)
    changes = (
        ("u", 4, {"id": 2, "note": "new", "__before": [("id", "2"), ("note", "old"), ("total", None)], **at(4)}),
        ("c", 5, {"id": 4, "note": "new", **at(5)}),
        ("d", 6, {"id": 3, "note": "old", **at(6)}),
        ("c", 7, {"id": 5, "note": "new", **at(7)}),
    )
    oids = {4: 70, 5: 70, 6: 70, 7: 71}
    told = [(op, seq, {**row, "__partition_oid": oids[seq]}) for op, seq, row in changes]
    land(layout, now, records(now, *told), 7, fold=False)
    with LakeSession(layout) as session:
        assert ids(session) == [1, 2, 4, 5]
    if not is_keyed:  # without a key, a fold that has an `x` doesn't find rows of unknown partitions
        land(layout, now, records(now), 7)
    land(layout, now, records(now, left(70, 8)), 8, fold=False)
    with LakeSession(layout) as session:
        assert ids(session) == [1, 5]
    land(layout, now, records(now), 8)
    assert [(row["id"], row["__partition_oid"]) for row in rows_of(layout, "current", now)] == [(1, None), (5, 71)]
    if is_keyed:
        still = [(r["id"], r["__partition_oid"]) for r in rows_of(layout, "scd2", now) if r["is_current"]]
        assert still == [(1, None), (5, 71)]
    land(layout, now, records(now, left(71, 9, 0)), 9)
    with LakeSession(layout) as session:
        assert ids(session) == [1]
        assert session.query('SELECT * FROM public."orders"').column_names == ["id", "total", "note"]


def ids(session: LakeSession) -> list[int]:
    found: list[int] = session.query("SELECT id FROM public.orders ORDER BY id").column(0).to_pylist()
    return found


def test_a_partition_that_leaves_rewrites_the_files_that_have_its_rows_alone(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    schema, sizes = replace(orders, partitioned=True), FoldSizes(leaf_bytes=4_000, small_bytes=0)
    rows = [
        ("c", n, {"id": n, "note": f"{n * 7919 % 1000:03d}" * 30, "__partition_oid": 70 + n // 500, **at(1, n)})
        for n in range(1, 1_000)
    ]
    land(layout, schema, records(schema, *rows), 1_000, fold=False)
    before = dict[str, set[str]]()
    for n in (1_000, 1_001):
        fold_table(layout, schema, Seq(n), sizes=sizes)
        fold_into_versions(layout, schema, Seq(n), sizes=sizes)
        for view in ("current", "scd2"):
            stored = DeltaTable(layout.table_path(view, schema))  # type: ignore[arg-type]
            if n == 1_000:
                before[view] = set(stored.file_uris())
                continue
            rows = stored.to_pyarrow_table(filters=[("is_current", "=", True)] if view == "scd2" else None)
            assert sorted(rows.column("id").to_pylist()) == list(range(1, 500))
            kept = before[view] & set(stored.file_uris())
            assert len(before[view]) / 2 - 1 <= len(kept) < len(before[view])
        if n == 1_000:
            land(layout, schema, records(schema, left(71, 1_001)), 1_001, fold=False)


def test_an_update_without_a_value_that_left_with_its_partition_is_an_error(orders: TableSchema, records: Records):
    schema = replace(orders, partitioned=True)
    columns = columns_of(schema)
    update = ("u", 3, {"id": 1, "__unchanged": ["note"], "__partition_oid": 71, **at(3)})
    row = {"id": 1, "note": "a", "__partition_oid": 70}
    held = pa.Table.from_pylist([{**dict.fromkeys([*columns.names, EXACT.name]), **row}], pa.schema([*columns, EXACT]))
    for batch in (records(schema, left(70, 2), update), records(schema, ("c", 1, row), left(70, 2), update)):
        with pytest.raises(LakeError, match="unchanged"):
            fold_records(to_lake(schema, batch), schema, columns, lambda _keys: held)
    kept = fold_records(to_lake(schema, records(schema, update, left(70, 4))), schema, columns, lambda _keys: held)
    assert kept.rows.column("note").to_pylist() == ["a"], "the update put the row into another partition"


def test_equal_rows_without_a_key_go_by_partition_and_then_from_the_unknown_one():
    shape = pa.schema([pa.field("note", pa.string()), PARTITION_OID])
    standing = pa.table({"note": ["a"] * 4 + ["b"], PARTITION_OID.name: [70, 71, None, 71, 72]}, schema=shape)
    gone = pa.table({"note": ["a", "a", "a", "a", "b"], PARTITION_OID.name: [71, 69, None, 70, None]}, schema=shape)
    found = in_their_partitions(Keys.of(gone, shape.names), [standing.slice(0, 2), standing.slice(2)])
    assert partitions_of(found.to_table()).tolist() == [71, 0, 71, 70, 72]


def test_a_column_called_partition_leaves_the_name_of_a_partition_alone(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    columns = (
        *(replace(c, number=n) for n, c in enumerate(orders.columns, 1)),
        Column("partition", pa.string(), number=9),
    )
    schema = replace(orders, columns=columns, partitioned=True)
    land(layout, schema, records(schema, ("c", 1, {"id": 1, "__partition_oid": 70, **at(1)}), left(70, 2)), 2)
    renamed = replace(schema, version=SchemaVersion(2), columns=(*columns[:3], replace(columns[3], name="part")))
    land(layout, renamed, records(renamed, ("c", 3, {"id": 2, "part": "p", "__partition_oid": 71, **at(3)})), 3)
    with LakeSession(layout) as session:
        told = session.query("SELECT __before FROM history.\"public.orders\" WHERE __op = 'x'").column(0).to_pylist()
    assert told == [[("partition", "public.orders_1")]]


@pytest.mark.parametrize("lake", FORMATS)
def test_renamed_columns_renamed_tables_and_merged_files_keep_the_partitions(
    tmp_path: Path, layout: LakeLayout, orders: TableSchema, records: Records, lake: str
):
    layout = iceberg(tmp_path) if lake == "iceberg" else layout
    before = replace(orders, columns=tuple(replace(c, number=n) for n, c in enumerate(orders.columns, 1)))
    land(layout, before, records(before, *(("c", n, {"id": n, "note": "a", **at(1, n)}) for n in (1, 2))), 2)
    schema = replace(before, version=SchemaVersion(2), partitioned=True)
    rows = [("c", n, {"id": n, "note": "a", "__partition_oid": 70 + n % 2, **at(2, n)}) for n in range(3, 7)]
    land(layout, schema, records(schema, *rows), 6)
    columns = tuple(replace(c, name="remark" if c.name == "note" else c.name) for c in schema.columns)
    renamed = replace(schema, version=SchemaVersion(3), columns=columns)
    moved = replace(renamed, name="sales", version=SchemaVersion(4))
    changes = [
        ("u", 7, {"id": 3, "__unchanged": ["remark"], "__partition_oid": 70, **at(3)}),
        left(71, 8),
        ("c", 9, {"id": 9, "remark": "b", "__partition_oid": 71, **at(9)}),
    ]
    land(layout, renamed, records(renamed, *changes), 9, fold=False)
    expected = [(1, "a"), (2, "a"), (3, "a"), (4, "a"), (6, "a"), (9, "b")]
    sql = "SELECT id, remark FROM public.{} ORDER BY id"
    with LakeSession(layout) as session:
        assert [tuple(row.values()) for row in session.query(sql.format("orders")).to_pylist()] == expected
    batch = records(moved, ("d", 10, {"id": 9, "__partition_oid": 71, **at(10)}), left(70, 11))
    with suppress(LakeConflict):  # in Iceberg, the columns of the other folder get their ids first
        append_history(layout, moved, [batch], Seq(11))
    land(layout, moved, batch, 11)
    assert maintain_table(
        layout, "history", moved, now_ms=time.time_ns() // 10**6, rules=MaintenanceRules(compact_files=2)
    ).files_compacted
    for anew in (False, True):
        fold_table(layout, moved, Seq(11), anew=anew)
        with LakeSession(layout) as session:
            assert session.query(sql.format("sales")).column(0).to_pylist() == [1, 2]
            told = session.query('SELECT __partition_oid AS oid FROM history."public.sales" ORDER BY __seq')
            assert told.column(0).to_pylist() == [None, None, 71, 70, 71, 70, 70, 71, 71, 71, 70]


@pytest.mark.parametrize("lake", FORMATS)
def test_versions_that_go_on_or_begin_from_current_keep_their_partitions(
    tmp_path: Path, layout: LakeLayout, orders: TableSchema, records: Records, lake: str
):
    layout = iceberg(tmp_path) if lake == "iceberg" else layout
    schema = replace(orders, partitioned=True)
    rows = [("c", n, {"id": n, "note": "a", "__partition_oid": 70 + n % 2, **at(1, n)}) for n in range(1, 5)]
    for begins in (False, True):
        schema = replace(schema, table_id=TableId(3 + begins), name=f"orders_{begins}")
        land(layout, schema, records(schema, *rows[:2]), 2, fold=not begins)
        commits = [
            append_history(layout, schema, [records(schema, *rows[2:])], Seq(4)),
            fold_table(layout, schema, Seq(4)),
        ]
        commit_cut(layout, Seq(4), commits, committed_at=MIDNIGHT, commit_ts_max=MIDNIGHT)
        assert drop_history(layout, schema, HistoryBound(Seq(4)))
        land(layout, schema, records(schema, left(71, 5)), 5)
        still = [(r["id"], r["__partition_oid"]) for r in rows_of(layout, "scd2", schema) if r["is_current"]]
        assert still == [(2, 70), (4, 70)]
        assert [row["id"] for row in rows_of(layout, "current", schema)] == [2, 4]


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(2))
def test_iceberg_tables_follow_the_partitions(tmp_path: Path, seed: int):
    for name, kind in (("keyed", "one column"), ("bag", "no key, FULL")):
        schema = replace(PARTITIONED[kind], name=name)
        source, chance, layout = Partitioned(schema), random.Random(seed), iceberg(tmp_path / name)
        (tmp_path / name).mkdir()
        reached = 0
        for place in range(5):
            while len(source.records) < reached + 8:
                source.play(
                    [(chance.randrange(10), chance.randrange(6), chance.randrange(10_000), chance.randrange(8))]
                )
            n = Seq(int(str(source.records[-1]["__seq"])))
            landed = [append_history(layout, schema, [source.batch(reached, len(source.records))], n)]
            landed += [fold_table(layout, schema, n, sizes=TINY)] if place % 2 == 0 else []
            commit_cut(layout, n, landed, committed_at=datetime.now(UTC))
            reached = len(source.records)
            with LakeSession(layout) as session:
                asked = session.query(f"SELECT * FROM public.{schema.name}")
                assert canonical(texts_in(asked)) == canonical(source.rows)
        for anew in (False, True):
            fold_table(layout, schema, n, sizes=TINY, anew=anew)
            with LakeSession(layout) as session:
                assert canonical(texts_in(session.query(f"SELECT * FROM public.{schema.name}"))) == canonical(
                    source.rows
                )


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([None, 70, 71, 72]), st.integers(-3, 3)),
        unique_by=lambda row: row[:2],
    )
)
@settings(max_examples=examples(200))
def test_rows_of_unknown_partitions_match_the_others_in_order(rows: list[tuple[int, int | None, int]]):
    net = [count for _, _, count in rows]
    for one, (note, oid, _) in enumerate(rows):
        for other, (its, _, _) in enumerate(rows):
            if oid is None and its == note and net[one] * net[other] < 0:
                count = min(abs(net[one]), abs(net[other]))
                net[other] += count if net[other] < 0 else -count
                net[one] += count if net[one] < 0 else -count
    assert matched(rows) == net


def test_many_rows_of_unknown_partitions_are_matched():
    """Each took a look at all rows: minutes in a fold of a million."""
    count = 60_000
    rows = [(note, oid, put) for note in range(count) for oid, put in ((70, 1), (None, -1))]
    assert not any(matched(rows))


def matched(rows: list[tuple[int, int | None, int]]) -> list[int]:
    shape = pa.schema([pa.field("note", pa.string()), PARTITION_OID])
    columns = [pa.array([str(note) for note, _, _ in rows]), pa.array([oid for _, oid, _ in rows], pa.int64())]
    net = np.array([put for _, _, put in rows], np.int64)
    match_unknown(net, Keys.of(pa.table(columns, schema=shape), shape.names))
    return net.tolist()
