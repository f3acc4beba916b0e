"""Names that move between tables: each row stays with its table, in any order, fold, rebuild, past query or maintenance."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from tests.lake.landing import append_history

from millstream.errors import LakeError
from millstream.lake.commit_cuts import commit_cut, last_cut
from millstream.lake.damaged_tables import check_history, rebuild_view, restart_history
from millstream.lake.data_files import table_in
from millstream.lake.folded.current_table import FoldSizes, fold_table
from millstream.lake.folded.scd2_table import fold_into_versions
from millstream.lake.history import open_history
from millstream.lake.history_retention import HistoryBound, drop_history
from millstream.lake.known_tables import KnownTable
from millstream.lake.layout import LakeLayout, TableCommit
from millstream.lake.maintenance import MaintenanceRules, maintain_table
from millstream.lake.new_and_wider_columns import widened
from millstream.lake.query.query_session import LakeSession
from millstream.lake.replay import replay_range
from millstream.model.ids import SchemaVersion, SourceId, TableId
from millstream.model.positions import Seq
from millstream.model.records import record_schema
from millstream.model.schema import Column, TableSchema

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
STEPS = FoldSizes(leaf_bytes=2_000, small_bytes=0, rows_max=2)
Rows = dict[int, str]


@dataclass
class Table:
    """One table at the source."""

    id: int
    name: str
    names: list[str]
    """Name of each version, from 1: a name that returns has its old version again, as in the catalog."""
    rows: Rows = field(default_factory=dict)
    pending: list[tuple[TableSchema, dict[str, Any]]] = field(default_factory=list)
    landed: TableSchema | None = None
    """Schema of its last record in the lake."""

    def schema(self) -> TableSchema:
        return TableSchema(
            TableId(self.id),
            SchemaVersion(self.names.index(self.name) + 1),
            SourceId(1),
            "public",
            self.name,
            (Column("id", pa.int64()), Column("v", pa.string())),
            ("id",),
            ("id",),
        )


class Source:
    """Tables, their log, and the lake that follows it."""

    def __init__(self, layout: LakeLayout, *, late_first: bool = False) -> None:
        self.layout = layout
        self.seq = 0
        self.tables: dict[str, Table] = {}
        self.past: list[tuple[Seq, dict[str, Rows]]] = []
        """Rows of each table at each cut."""
        self.known: dict[str, Table] = {}
        """Table of each name by the landed records: the lake learns of a rename from the first record after it."""
        self._late_first = late_first

    def create(self, name: str, number: int, *keys: int) -> None:
        self.tables[name] = Table(number, name, [name])
        self.put(name, *keys)

    def drop(self, name: str) -> None:
        gone = self.tables.pop(name)
        self.tables[f"(dropped {gone.id})"] = gone

    def rename(self, *pairs: tuple[str, str]) -> None:
        """Rename tables one after another: each pair uses the names as they are by then."""
        for old, new in pairs:
            table = self.tables.pop(old)
            table.name = new
            table.names += [] if new in table.names else [new]
            self.tables[new] = table

    def put(self, name: str, *keys: int) -> None:
        """Insert or update rows, a record each."""
        for key in keys:
            table = self.tables[name]
            text = f"{table.id}.{key} at {self.seq + 1}"
            self._note(table, "u" if key in table.rows else "c", {"id": key, "v": text})
            table.rows[key] = text

    def delete(self, name: str, key: int) -> None:
        del self.tables[name].rows[key]
        self._note(self.tables[name], "d", {"id": key})

    def _note(self, table: Table, op: str, row: dict[str, Any]) -> None:
        self.seq += 1
        facts = {
            "__op": op,
            "__seq": self.seq,
            "__source": 1,
            "__commit_lsn": self.seq,
            "__commit_index": 0,
            "__commit_ts": self.at(Seq(self.seq)),
            "__commit_date": date(2026, 3, 1 + self.seq % 2),
        }
        table.pending.append((table.schema(), facts | row))

    def at(self, n: Seq) -> datetime:
        return NOON + timedelta(minutes=int(n))

    def land(self) -> None:
        """Append the pending records, in one batch."""
        commits = []
        for table in sorted(self.tables.values(), key=lambda table: table.id, reverse=self._late_first):
            if table.pending:
                table.landed = table.pending[-1][0]
                batches = [batch(schema, table.pending) for schema in dict.fromkeys(s for s, _ in table.pending)]
                commits.append(append_history(self.layout, table.landed, batches, Seq(self.seq)))
        told = [(row["__seq"], s.name, table) for table in self.tables.values() for s, row in table.pending]
        for _, name, table in sorted(told, key=lambda record: record[0]):
            self.known = {of: other for of, other in self.known.items() if other is not table} | {name: table}
            table.pending = []
        self.cut(commits)
        self.past.append((Seq(self.seq), {name: dict(table.rows) for name, table in self.known.items()}))

    def cut(self, commits: Iterable[TableCommit]) -> None:
        now = self.at(Seq(self.seq))
        commit_cut(self.layout, Seq(self.seq), commits, committed_at=now, commit_ts_max=now)

    def fold(self, sizes: FoldSizes = STEPS) -> None:
        for table in self.tables.values():
            schema, n = table.landed, Seq(self.seq)
            if schema is None:
                continue
            self.cut([fold_table(self.layout, schema, n, sizes=sizes)])
            self.cut([fold_into_versions(self.layout, schema, n, sizes=sizes).commit])

    def rebuild(self) -> None:
        for view in ("current", "scd2"):
            for name in self.past[-1][1]:
                schema = self.known[name].landed
                assert schema is not None
                check_history(self.layout, schema)
                self.cut([rebuild_view(self.layout, view, schema, Seq(self.seq), sizes=STEPS)])

    def maintain(self) -> None:
        for name in self.past[-1][1]:
            for view in ("history", "scd2"):
                now_ms = time.time_ns() // 1_000_000
                schema = self.known[name].landed
                assert schema is not None
                maintain_table(self.layout, view, schema, now_ms=now_ms, rules=MaintenanceRules(compact_files=2))

    def check_now(self) -> None:
        """Check the rows of the last cut, read by a tail over the folds so far."""
        with LakeSession(self.layout) as session:
            self._check(session, self.past[-1][1])

    def check(self) -> None:
        """Compare what the lake returns, by every way of reading, with the source's rows."""
        self.check_now()
        for n, shown in self.past:
            with LakeSession(self.layout, as_of=n) as session:
                self._check(session, shown)
        for name, rows in self.past[-1][1].items():
            assert rows_of(stored(self.layout, "current", name)) == rows, name
            versions = stored(self.layout, "scd2", name)
            assert rows_of(versions.filter(versions["is_current"])) == rows, name
            for n, shown in self.past:
                if name in shown:
                    told = duckdb.execute(
                        "SELECT id, v FROM versions WHERE valid_from <= $1 AND coalesce(valid_to > $1, true)",
                        [self.at(n)],
                    ).fetchall()
                    assert sorted(told) == sorted(shown[name].items()), (n, name)

    def _check(self, session: LakeSession, shown: dict[str, Rows]) -> None:
        assert session.tables == sorted(f"public.{name}" for name in shown)
        for name, rows in shown.items():
            assert rows_of(session.query(f"FROM public.{name}")) == rows, name


def batch(schema: TableSchema, pending: list[tuple[TableSchema, dict[str, Any]]]) -> pa.RecordBatch:
    shape = record_schema(schema)
    rows = [dict.fromkeys(shape.names) | row for of, row in pending if of == schema]
    return pa.RecordBatch.from_pylist(rows, schema=shape)


def rows_of(table: pa.Table) -> Rows:
    found = list(zip(table.column("id").to_pylist(), table.column("v").to_pylist(), strict=True))
    assert len(dict(found)) == len(found), f"rows stand there twice: {found}"
    return dict(found)


def stored(layout: LakeLayout, view: str, name: str) -> pa.Table:
    return DeltaTable(f"{layout.root}/{view}/public.{name}").to_pyarrow_table()


def blue_green(source: Source, low: int, high: int) -> Iterable[None]:
    source.create("bg", low, 1, 2, 3)
    source.create("bg_new", high, 11, 12)
    source.put("bg", 1)
    yield
    source.put("bg_new", 12, 13)
    source.put("bg", 3)
    yield
    # Renames in one transaction, with records before and after.
    source.put("bg", 2)
    source.put("bg_new", 11)
    source.rename(("bg", "bg_old"), ("bg_new", "bg"))
    source.put("bg", 10)
    source.put("bg_old", 4)
    yield
    source.delete("bg", 12)
    source.put("bg_old", 1)
    yield
    source.rename(("bg", "bg_bad"), ("bg_old", "bg"))
    source.put("bg", 5, 1)
    source.put("bg_bad", 11)
    yield
    source.delete("bg", 2)
    source.put("bg_bad", 14)
    yield


def taken_silently(source: Source, low: int, high: int) -> Iterable[None]:
    """A table that lost its name gets no writes until it has that name again, or another one."""
    source.create("bg", low, 1, 2, 3)
    source.create("bg_new", high, 11, 12)
    yield
    source.put("bg", 2)
    yield
    source.rename(("bg", "bg_old"), ("bg_new", "bg"))
    source.put("bg", 10)
    yield
    source.rename(("bg", "bg_bad"))
    source.put("bg_bad", 10)
    yield
    source.rename(("bg_old", "bg_older"))
    source.put("bg_older", 3)
    yield
    source.rename(("bg_bad", "bg"))
    source.put("bg", 12)
    yield


def swap(source: Source, low: int, high: int) -> Iterable[None]:
    source.create("a", low, 1, 2, 3, 4)
    source.create("b", high, 1, 2)
    yield
    for _ in range(3):
        source.put("a", 1, 7)
        source.put("b", 2)
        source.rename(("a", "t"), ("b", "a"), ("t", "b"))
        source.put("b", 3)
        source.put("a", 2)
        yield
        source.delete("b", 7)
        source.delete("a", 7) if 7 in source.tables["a"].rows else source.put("a", 1)
        yield


def dropped(source: Source, low: int, high: int) -> Iterable[None]:
    source.create("lo", low, 1, 2, 3)
    source.create("hi", high, 21, 22)
    yield
    source.put("hi", 23)
    source.put("lo", 2, 5)
    yield
    source.drop("hi")
    source.rename(("lo", "hi"))
    source.put("hi", 6)
    yield
    source.put("hi", 1)
    source.delete("hi", 2)
    yield


def within_one_batch(source: Source, low: int, high: int) -> Iterable[None]:
    """A name moves to a short-lived table and back before any of that table's records are in the lake."""
    source.create("a", low, 1, 2, 3)
    yield
    source.put("a", 2)
    source.rename(("a", "away"))
    source.create("a", high, 31, 32)
    source.drop("a")
    source.rename(("away", "a"))
    source.put("a", 4)
    yield
    source.delete("a", 1)
    yield


Story = Callable[[Source, int, int], Iterable[None]]
STORIES: list[Story] = [dropped, blue_green, taken_silently, swap, within_one_batch]
"""The first has the fewest steps: `make test` plays it."""


@pytest.mark.sampled
@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize(
    ("low", "high", "late_first"),
    [(3, 9, False), *(pytest.param(*case, marks=pytest.mark.siege) for case in [(9, 3, False), (3, 9, True)])],
)
def test_each_row_stays_its_tables_whatever_names_do(
    layout: LakeLayout, story: Story, low: int, high: int, *, late_first: bool
):
    source = Source(layout, late_first=late_first)
    for _ in story(source, low, high):
        source.land()
        source.check_now()
        source.fold()
        source.maintain()
    source.check()
    source.rebuild()
    source.check()
    for name in [name for name in source.tables if "dropped" not in name]:
        source.put(name, 1)
    source.land()
    source.fold()
    source.check_now()


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("story", [blue_green, swap])
def test_names_that_moved_between_two_folds_move_all_the_same(layout: LakeLayout, story: Story):
    source = Source(layout)
    for _ in story(source, 3, 9):
        source.land()
    source.fold()
    source.check_now()
    for name, rows in source.past[-1][1].items():
        for view in ("current", "scd2"):
            found = stored(layout, view, name)
            assert rows_of(found if view == "current" else found.filter(found["is_current"])) == rows
    source.rebuild()
    source.check_now()


@pytest.mark.long
def test_wider_columns_leave_each_record_with_its_table(layout: LakeLayout):
    source = Source(layout)
    for _ in blue_green(source, 3, 9):
        source.land()
    source.fold()
    of = source.known["bg"].landed
    assert of is not None
    assert {table_in(uri) for uri in DeltaTable(layout.table_path("history", of)).file_uris()} == {3, 9}
    history = open_history(layout, of)
    widened(layout, history, "public.bg", pa.schema([pa.field("id", pa.decimal128(20, 0))]))
    assert open_history(layout, of).schema().field("id").type == pa.decimal128(20, 0)
    source.rebuild()
    source.check_now()


def test_a_replay_has_one_tables_records(layout: LakeLayout):
    source = Source(layout)
    for _ in blue_green(source, 3, 9):
        source.land()
    cut = last_cut(layout)
    assert cut is not None
    made = {
        name: replay_range(layout, cut, f"public.{name}", after=Seq(0), upto=cut.n, into=name)
        for name in ("bg", "bg_bad")
    }
    texts = {name: DeltaTable(replay.path).to_pyarrow_table().column("v").to_pylist() for name, replay in made.items()}
    assert {text[0] for text in texts["bg"] if text} == {"3"}
    assert {text[0] for text in texts["bg_bad"] if text} == {"9"}
    assert sum(replay.rows for replay in made.values()) == source.seq


def test_what_one_table_has_folded_lets_no_other_tables_records_go(layout: LakeLayout):
    source = Source(layout)
    source.create("bg", 3, 1, 2, 3)
    source.create("bg_new", 9, 11, 12)
    source.land()
    source.rename(("bg", "bg_old"), ("bg_new", "bg"))
    source.put("bg", 10)
    source.land()
    source.fold()
    green = source.known["bg"].landed
    assert green is not None
    assert drop_history(layout, green, HistoryBound(Seq(source.seq))) > 0
    source.rename(("bg", "bg_bad"), ("bg_old", "bg"))
    source.put("bg", 5)
    source.land()
    source.fold()
    source.check_now()
    # The old table's records moved with it, without those that were dropped: a fold reports that.
    source.put("bg_bad", 11)
    source.land()
    bad = source.known["bg_bad"].landed
    assert bad is not None
    with pytest.raises(LakeError, match="which was dropped up to"):
        fold_table(layout, bad, Seq(source.seq))


def test_records_that_lie_in_a_folder_that_was_moved_aside_are_found(layout: LakeLayout):
    """Another table took over the name with other types, and its history was restarted."""
    source = Source(layout)
    for step, _ in enumerate(taken_silently(source, 3, 9)):
        source.land()
        if step == 2:
            green = source.known["bg"].landed
            assert green is not None
            assert restart_history(layout, green, Seq(source.seq), forget=True) is not None
        if step == 4:
            break
    older = source.known["bg_older"].landed
    assert older is not None
    fold_table(layout, older, Seq(source.seq))
    assert rows_of(stored(layout, "current", "bg_older")) == source.tables["bg_older"].rows


def test_a_table_that_lost_its_name_is_asked_by_the_new_one_before_its_next_change(layout: LakeLayout):
    source = Source(layout)
    for step, _ in enumerate(taken_silently(source, 3, 9)):
        source.land()
        source.fold()
        if step == 2:
            break
    blue = source.tables["bg_old"]
    with LakeSession(layout, known=lambda: [KnownTable(TableId(blue.id), "public", "bg_old", blue.landed)]) as session:
        assert rows_of(session.query("FROM public.bg_old")) == blue.rows
        assert rows_of(session.query("FROM public.bg")) == source.tables["bg"].rows
