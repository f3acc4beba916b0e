"""A query through the log answers as it will once the log's records have landed, whatever the records are."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.lake.landing import append_history
from tests.lake.test_scd2 import STORIES, schemas, told_by

from millstream.errors import CorruptWal, InvalidQuery, LakeBehind, OffsetExpired, PositionError, TokenFromFuture
from millstream.lake.commit_cuts import commit_cut
from millstream.lake.folded.current_table import fold_table
from millstream.lake.folded.scd2_table import fold_into_versions, has_versions
from millstream.lake.layout import LakeLayout, TableCommit, has_current
from millstream.lake.query.query_session import LakeSession
from millstream.lake.query.time_travel import TailPart
from millstream.model.ids import SchemaVersion, SourceId, StreamId, TableId
from millstream.model.positions import Seq
from millstream.model.records import record_schema
from millstream.model.schema import Column, ReplicaIdentity, TableSchema
from millstream.testing.errors import coded

Records = Callable[..., pa.RecordBatch]
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


@dataclass
class MemoryLog:
    """A log whose records are batches in memory, each of one table and schema."""

    batches: list[pa.RecordBatch]
    whole: Sequence[int] | None = None
    """Positions that split no operation; None if none does."""
    rows_max: int = 1 << 30
    first: int = 0
    """Records at or below it were deleted."""
    read: list[int] = field(default_factory=list)
    """Tables whose records were read."""

    def end(self) -> Seq:
        return Seq(max((pc.max(batch.column("__seq")).as_py() for batch in self.batches), default=0))

    def whole_upto(self, n: Seq) -> Seq:
        return n if self.whole is None else Seq(max(end for end in self.whole if end <= n))

    def upto_moment(self, after: Seq, moment: datetime) -> Seq:
        later = [
            row["__seq"]
            for batch in self._within(after, self.end())
            for row in batch.select(["__seq", "__commit_ts"]).to_pylist()
            if row["__commit_ts"] is not None and row["__commit_ts"] > moment
        ]
        return self.whole_upto(Seq(min(later) - 1)) if later else self.end()

    def parts(self, after: Seq, upto: Seq) -> list[TailPart]:
        found = self._within(after, upto)
        if sum(batch.num_rows for batch in found) > self.rows_max:
            raise LakeBehind(f"the log has more than {self.rows_max} rows")
        bounds = [pc.min_max(batch.column("__seq")).as_py() for batch in found]
        return [
            TailPart(TableSchema.from_arrow(batch.schema), Seq(ends["min"]), Seq(ends["max"]))
            for batch, ends in zip(found, bounds, strict=True)
        ]

    def records(self, after: Seq, upto: Seq, table: TableId) -> list[pa.RecordBatch]:
        self.read.append(int(table))
        found = self._within(after, upto)
        return [batch for batch in found if TableSchema.from_arrow(batch.schema).table_id == table]

    def _within(self, after: Seq, upto: Seq) -> list[pa.RecordBatch]:
        if after < self.first:
            raise OffsetExpired("retention has dropped it", first=self.first + 1)
        kept = [
            batch.filter((pc.field("__seq") > int(after)) & (pc.field("__seq") <= int(upto))) for batch in self.batches
        ]
        return [batch for batch in kept if batch.num_rows]


def land(
    layout: LakeLayout, batches: Sequence[pa.RecordBatch], n: int, *, fold: bool = False, versions: bool = False
) -> None:
    """Land everything up to a position, as one batch of the pipeline."""
    within = [batch.filter(pc.field("__seq") <= n) for batch in batches]
    newest: dict[TableId, tuple[int, TableSchema, list[pa.RecordBatch]]] = {}
    for batch in within:
        if batch.num_rows:
            schema, last = TableSchema.from_arrow(batch.schema), pc.max(batch.column("__seq")).as_py()
            before = newest.get(schema.table_id, (0, schema, []))
            newest[schema.table_id] = (*max(before[:2], (last, schema), key=lambda one: one[0]), [*before[2], batch])
    commits: list[TableCommit] = []
    for _, schema, some in sorted(newest.values(), key=lambda one: one[0]):
        commits.append(append_history(layout, schema, some, Seq(n)))
        if fold and has_current(schema):
            commits.append(fold_table(layout, schema, Seq(n)))
        if versions and has_versions(schema):
            commits.append(fold_into_versions(layout, schema, Seq(n)).commit)
    times = [pc.max(batch.column("__commit_ts")).as_py() for batch in within if batch.num_rows]
    newest_time = max((time for time in times if time is not None), default=None)
    commit_cut(layout, Seq(n), commits, committed_at=datetime.now(UTC), commit_ts_max=newest_time)


def answers(session: LakeSession, *, versions: bool) -> dict[str, object]:
    """Return everything that a session shows: its position, its tables, and each one's rows, records and versions."""
    found: dict[str, object] = {"at": str(session.token)}
    listed = session.query("SHOW TABLES").column("name").to_pylist()
    for name in listed:
        if not versions and name.startswith("scd2"):
            continue
        try:
            rows = session.query(f"FROM {name}")
        except InvalidQuery as error:
            found[name] = error.message
            continue
        texts = rows.select(sorted(rows.column_names)).to_pylist()
        found[name] = sorted(repr({k: v for k, v in row.items() if k != "__exact" or v}) for row in texts)
    return found


@pytest.mark.sampled
@schemas
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(story=STORIES, landed=st.integers(0, 20), asked=st.integers(0, 20), folds=st.booleans())
def test_any_records_answer_through_the_log_as_they_do_once_they_have_landed(
    schema: TableSchema,
    *,
    story: list[tuple[bool, list[tuple[int, int, int, int]], int]],
    landed: int,
    asked: int,
    folds: bool,
):
    source = told_by(schema, story)
    if not source.records:
        return
    log = MemoryLog([source.batch(0, len(source.records))])
    numbers = [0, *(int(str(source.records[end - 1]["__seq"])) for end in source.ends if end)]
    log.whole = numbers
    stands = numbers[landed % len(numbers)]
    at = Seq(max(stands, numbers[asked % len(numbers)]))
    with tempfile.TemporaryDirectory() as folder:
        layout = LakeLayout(folder, "shop", StreamId(UUID(int=7)))
        if stands:
            land(layout, log.batches, stands, fold=folds, versions=folds)
        with LakeSession(layout, log=log) as session:
            newest = answers(session, versions=True)
        with LakeSession(layout, as_of=at, log=log) as session:
            past = answers(session, versions=False)
        land(layout, log.batches, int(log.end()))
        with LakeSession(layout) as session:
            assert answers(session, versions=True) == newest
        with LakeSession(layout, as_of=at) as session:
            assert answers(session, versions=False) == past


@dataclass
class Relation:
    """A table at the source while a story goes on."""

    schema: TableSchema
    rows: dict[int, str] = field(default_factory=dict)


class Story:
    """Tables whose rows, columns and names change, with the records that this makes."""

    def __init__(self) -> None:
        self.tables: list[Relation] = []
        self.batches: list[pa.RecordBatch] = []
        self.seq = 0
        self.made = 0
        self.create("a")
        self.create("b")

    def create(self, name: str) -> None:
        self.made += 1
        schema = TableSchema(
            table_id=TableId(10 + self.made),
            version=SchemaVersion(1),
            source=SourceId(1),
            namespace="public",
            name=name,
            columns=(Column("id", pa.int32()), Column("note", pa.string())),
            identity=("id",) if self.made % 3 else ("id", "note"),
            key=("id",) if self.made % 3 else (),
            replica_identity=ReplicaIdentity.DEFAULT if self.made % 3 else ReplicaIdentity.FULL,
        )
        self.tables.append(Relation(schema))

    def send(self, table: Relation, op: str, row: dict[str, object]) -> None:
        self.seq += 1
        shape = record_schema(table.schema)
        facts = {
            **dict.fromkeys(shape.names),
            "__op": op,
            "__seq": self.seq,
            "__source": 1,
            "__commit_lsn": 100 + self.seq,
            "__commit_index": 0,
            "__commit_ts": NOON + timedelta(seconds=self.seq),
            "__commit_date": NOON.date() + timedelta(days=self.seq % 2),
        }
        self.batches.append(pa.RecordBatch.from_pylist([facts | row], schema=shape))

    def step(self, action: int, which: int, value: int) -> None:
        table = self.tables[which % len(self.tables)]
        name = "abc"[value % 3]
        taken = any(other.schema.name == name for other in self.tables)
        columns = table.schema.columns
        if action < 5 or not table.rows:
            key = value % 4
            op = "d" if key in table.rows and action < 2 else "u" if key in table.rows else "c"
            before = None if table.schema.key or op == "c" else [("id", str(key)), ("note", table.rows[key])]
            note = table.rows.pop(key) if op == "d" else f"note {self.seq}"
            if op != "d":
                table.rows[key] = note
            row: dict[str, object] = {"id": key, "note": note}
            if len(columns) > 2 and op != "d" and table.schema.key:
                row[columns[2].name] = 1 << 40 if columns[2].arrow == pa.int64() else 7
            self.send(table, op, row | ({"__before": before} if before and op == "u" else {}))
        elif action == 5 and not taken:
            table.schema = replace(table.schema, name=name, version=SchemaVersion(table.schema.version + 1))
        elif action == 6:  # swapped
            other = self.tables[(which + 1) % len(self.tables)]
            if other is not table:
                mine, theirs = table.schema.name, other.schema.name
                for one, new in ((table, theirs), (other, mine)):
                    one.schema = replace(one.schema, name=new, version=SchemaVersion(one.schema.version + 1))
        elif action == 7:  # dropped, and made again
            self.tables.remove(table)
            self.create(table.schema.name)
        elif action == 8:  # copied again
            self.send(table, "t", {})
            for key, note in table.rows.items():
                self.send(table, "r", {"id": key, "note": note, "__commit_index": None})
        elif table.schema.key:
            kind = pa.int32() if len(columns) == 2 else pa.int64()
            table.schema = replace(
                table.schema,
                version=SchemaVersion(table.schema.version + 1),
                columns=(*columns[:2], Column("more", kind)),
            )


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 11)), min_size=2, max_size=30),
    landed=st.integers(0, 30),
    folds=st.booleans(),
)
@pytest.mark.siege
def test_tables_that_change_their_columns_and_names_answer_through_the_log_as_once_they_have_landed(
    steps: list[tuple[int, int, int]], landed: int, *, folds: bool
):
    story = Story()
    for step in steps:
        story.step(*step)
    if not story.batches:
        return
    log = MemoryLog(story.batches)
    stands = landed % (story.seq + 1)
    with tempfile.TemporaryDirectory() as folder:
        layout = LakeLayout(folder, "shop", StreamId(UUID(int=7)))
        if stands:
            land(layout, log.batches, stands, fold=folds, versions=folds)
        with LakeSession(layout, log=log) as session:
            newest = answers(session, versions=True)
        land(layout, log.batches, story.seq)
        with LakeSession(layout) as session:
            assert answers(session, versions=True) == newest


def plain(layout: LakeLayout, log: MemoryLog | None = None, **options: object) -> tuple[str, list[int]]:
    """Return where a session stands, and the ids of its orders."""
    with LakeSession(layout, log=log, **options) as session:
        found = session.query("SELECT id FROM public.orders ORDER BY id").column("id").to_pylist()
        return str(session.token).rpartition("s")[2], found


def inserts(records: Records, schema: TableSchema, *seqs: int) -> pa.RecordBatch:
    rows = [("c", n, {"id": n, "__commit_lsn": n, "__commit_ts": NOON + timedelta(seconds=n)}) for n in seqs]
    return records(schema, *rows)


def test_every_token_up_to_the_readable_end_is_answered_at_once(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    log = MemoryLog([inserts(records, orders, 1, 2, 3, 4, 5, 6)], whole=(0, 1, 2, 3, 5, 6))
    assert plain(layout, log) == ("6", [1, 2, 3, 4, 5, 6]), "nothing has landed"
    land(layout, log.batches, 2)
    assert [plain(layout, log, as_of=Seq(n))[0] for n in range(1, 7)] == ["1", "2", "3", "3", "5", "6"]
    assert plain(layout, log, as_of=Seq(4)) == ("3", [1, 2, 3]), "no part of an operation"
    with pytest.raises(TokenFromFuture, match=r"only up to [0-9a-f]{8}\.s6, not [0-9a-f]{8}\.s7"):
        LakeSession(layout, as_of=Seq(7), log=log)
    assert plain(layout) == ("2", [1, 2]), "the lake alone"
    with pytest.raises(TokenFromFuture):
        LakeSession(layout, as_of=Seq(3))


@pytest.mark.long
def test_a_moment_is_the_last_operation_before_the_first_later_one_in_the_lake_and_in_the_log(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    log = MemoryLog([inserts(records, orders, 1, 2, 3, 4, 5, 6)])
    # The commit times of two sources aren't monotone: the greatest one so far counts.
    late = records(orders, ("c", 7, {"id": 7, "__commit_ts": NOON + timedelta(seconds=2)}))
    log.batches.append(late)

    def seen(second: float, log: MemoryLog | None) -> str:
        return plain(layout, log, as_of=NOON + timedelta(seconds=second))[0]

    through_log = {second: seen(second, log) for second in (1, 2.5, 4, 5.9, 6, 9)}
    land(layout, log.batches, 4)
    assert {second: seen(second, log) for second in through_log} == through_log
    assert through_log == {1: "1", 2.5: "2", 4: "4", 5.9: "5", 6: "7", 9: "7"}
    assert (seen(3, None), seen(9, None)) == ("3", "4")
    with pytest.raises(PositionError, check=coded("beyond_retention")):
        seen(0.5, log)
    land(layout, log.batches, 7)
    assert {second: seen(second, None) for second in through_log} == through_log


def test_a_tail_above_the_bound_is_left_out_and_no_earlier_answer_given_for_a_token(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    log = MemoryLog([inserts(records, orders, 1, 2, 3, 4, 5, 6)], rows_max=3)
    land(layout, log.batches, 2)
    with LakeSession(layout, log=log) as session:
        assert session.left_out == "the log has more than 3 rows"
        assert session.query("SELECT count(*) AS n FROM public.orders").to_pylist() == [{"n": 2}]
        assert str(session.token).endswith(".s2")
        assert session.is_newest()
    assert plain(layout, log, as_of=Seq(5)) == ("5", [1, 2, 3, 4, 5])
    for as_of in (Seq(6), NOON + timedelta(minutes=1)):
        with pytest.raises(LakeBehind):
            LakeSession(layout, as_of=as_of, log=log)


def test_a_session_reads_from_the_lake_what_retention_deletes_while_it_is_open(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    log = MemoryLog([inserts(records, orders, 1, 2, 3, 4, 5, 6)])
    land(layout, log.batches, 2)
    with LakeSession(layout, log=log) as session, LakeSession(layout, log=log) as later:
        land(layout, log.batches, 4, fold=True)
        log.first = 4
        assert session.query("SELECT count(*) AS n FROM public.orders").to_pylist() == [{"n": 6}]
        log.batches.append(inserts(records, orders, 7))
        land(layout, log.batches, 7)
        log.first = 7
        assert later.query('SELECT max(__seq) AS n FROM history."public.orders"').to_pylist() == [{"n": 6}]
        assert later.query("SELECT max(id) AS n FROM public.orders").to_pylist() == [{"n": 6}]
        assert not session.is_newest()
    log.first = 8  # a copy of the log that begins behind the lake's end
    log.batches.append(inserts(records, orders, 8, 9))
    with LakeSession(layout, log=log) as session:
        assert "no longer has all records" in session.left_out
        assert str(session.token).endswith(".s7")
    with pytest.raises(LakeBehind):
        LakeSession(layout, as_of=Seq(9), log=log)


def test_a_damaged_log_leaves_the_answer_to_the_lake(layout: LakeLayout, orders: TableSchema, records: Records):
    class Damaged(MemoryLog):
        def parts(self, after: Seq, upto: Seq) -> list[TailPart]:
            raise CorruptWal(f"a frame between {after} and {upto} is damaged")

    log = Damaged([inserts(records, orders, 1, 2, 3)])
    land(layout, log.batches, 2)
    with LakeSession(layout, log=log) as session:
        assert session.left_out == "a frame between 2 and 3 is damaged"
        assert session.query("SELECT count(*) AS n FROM public.orders").to_pylist() == [{"n": 2}]
    with pytest.raises(CorruptWal):
        LakeSession(layout, as_of=Seq(3), log=log)


def test_a_log_behind_the_lake_adds_nothing(layout: LakeLayout, orders: TableSchema, records: Records):
    log = MemoryLog([inserts(records, orders, 1, 2, 3, 4)])
    land(layout, log.batches, 4)
    behind = MemoryLog([inserts(records, orders, 1, 2)])
    assert plain(layout, behind) == ("4", [1, 2, 3, 4])
    assert plain(layout, behind, as_of=Seq(3)) == ("3", [1, 2, 3])
    with pytest.raises(TokenFromFuture):
        LakeSession(layout, as_of=Seq(5), log=behind)


def test_only_the_named_tables_are_read_and_none_that_is_quarantined(
    layout: LakeLayout, orders: TableSchema, records: Records
):
    others = [replace(orders, table_id=TableId(20 + n), name=f"other{n}") for n in range(3)]
    log = MemoryLog([inserts(records, orders, 1, 6), *(inserts(records, t, 2 + n) for n, t in enumerate(others))])
    with LakeSession(layout, log=log) as session:
        assert session.query("SELECT count(*) AS n FROM public.other1").to_pylist() == [{"n": 1}]
        assert log.read == [21]
        assert len(session.tables) == 4
    land(layout, log.batches, 5)
    with LakeSession(layout, log=log, held=lambda: {"public.orders": "a type changed"}) as session:
        assert session.query("SELECT id FROM public.orders").column("id").to_pylist() == [1]
        assert session.missing == {}
        assert re.fullmatch(r"a type changed; .*\.s5", session.held_back["public.orders"])


def test_records_that_the_lake_could_not_take_leave_their_table_as_it_stands(
    layout: LakeLayout, orders: TableSchema, evolved: Callable[..., TableSchema], records: Records
):
    land(layout, [inserts(records, orders, 1)], 1)
    clash = evolved(note=pa.date32())
    log = MemoryLog([inserts(records, orders, 1), records(clash, ("c", 2, {"id": 2, "note": NOON.date()}))])
    with LakeSession(layout, log=log) as session:
        assert session.query("SELECT id FROM public.orders").column("id").to_pylist() == [1]
        assert "note" in session.held_back["public.orders"]
