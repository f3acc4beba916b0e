"""Versions of any history, however its folds are split, equal those seen at the source after each transaction."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lake.test_fold import SCHEMAS, Row, Source, texts_in
from tests.seeds import examples

from millstream.errors import LakeError
from millstream.lake.column_conversion import EXACT, lake_columns, to_lake
from millstream.lake.folded.scd2_rules import IS_CURRENT, VALID_TO, VERSION_COLUMNS, Versions, fold_versions
from millstream.lake.row_identity import Keys, key_codes
from millstream.model.records import PARTITION_OID
from millstream.model.schema import TableSchema

MIDNIGHT = datetime(2026, 1, 1, tzinfo=UTC)
Told = tuple[str, datetime, datetime | None, bool, int]


def version_of(row: Row, began: datetime, ended: datetime | None, seq: int) -> Told:
    return json.dumps(row, sort_keys=True), began, ended, ended is None, seq


@dataclass
class Watched(Source):
    """A source whose rows are compared after each transaction: its versions are found without reading a record."""

    clock: datetime = MIDNIGHT
    lsn: int = 100
    index: int | None = 0
    moment: datetime = MIDNIGHT
    live: dict[tuple[str | None, ...], tuple[Row, datetime, int]] = field(default_factory=dict)
    lost: bool = False
    told: list[Told] = field(default_factory=list)
    ends: list[int] = field(default_factory=lambda: [0])
    """Numbers of records at which a run may end."""
    copied: set[int] = field(default_factory=set)
    """Those of `ends` at which a run does end, since a copy is complete there."""
    put_by: dict[tuple[str | None, ...], int] = field(default_factory=dict)
    """By key, the number of the last record that wrote a row there."""

    def send(self, op: str, row: Row, before: Row | None = None, unchanged: list[str] | None = None) -> None:
        super().send(op, row, before, unchanged)
        copied = op == "r"
        self.records[-1] |= {
            "__commit_lsn": self.lsn,
            "__commit_index": None if copied else self.index,
            "__commit_ts": self.moment,
            "__commit_date": MIDNIGHT.date(),
        }
        if self.index is not None:
            self.index += 1
        if op in "cur":
            self.put_by[self.key(row)] = int(str(self.records[-1]["__seq"]))

    def begin(self, seconds: int) -> None:
        self.lsn += 1
        self.index = 0
        self.moment = MIDNIGHT + timedelta(seconds=seconds)

    def look(self) -> None:
        """Note what became of the rows since the last look."""
        if len(self.records) == self.ends[-1]:
            return
        if self.records[-1]["__op"] != "t" or self.index is not None:  # a marker's time is of another clock
            self.clock = max(self.clock, self.moment)
        now = {self.key(row): dict(row) for row in self.rows}
        for key, (row, began, seq) in list(self.live.items()):
            if now.get(key) != row:
                self.told.append(version_of(row, began, self.clock, seq))
                del self.live[key]
        for key, row in now.items():
            if key not in self.live:
                self.live[key] = (row, self.clock, self.put_by[key])
        self.ends.append(len(self.records))

    def transact(self, steps: list[tuple[int, int, int, int]], seconds: int) -> None:
        """Play one transaction. A copied row in it stands for a chunk of its own."""
        self.begin(seconds)
        for action, *rest in steps:
            # A copy after the first one begins with a marker: rows that are copied one by one belong to the
            # first.
            copied = action == 0 and not self.lost
            step = (action or int(self.lost), *rest)
            if copied:
                self.look()
                self.begin(seconds)
            self.step(*step)
            if copied:
                self.look()
                self.begin(seconds)
        self.look()

    def lose(self, steps: list[tuple[int, int, int, int]], seconds: int) -> None:
        """Make changes that no record describes, then copy the whole table."""
        self.lost = True
        records = list(self.records)
        self.play(steps)
        self.records = records
        self.begin(seconds)
        self.index = None
        self.send("t", {})
        kept = {self.key(row) for row in self.rows}
        for key, (row, began, seq) in list(self.live.items()):
            if key not in kept:
                self.told.append(version_of(row, began, self.clock, seq))
                del self.live[key]
        for row in self.rows:
            self.lsn += 1
            self.send("r", row)
        self.look()
        self.copied.add(len(self.records))

    def versions(self) -> list[Told]:
        return sorted(
            self.told + [version_of(row, began, None, seq) for row, began, seq in self.live.values()], key=str
        )


def columns_of(schema: TableSchema) -> pa.Schema:
    return pa.schema([*lake_columns(schema), *([PARTITION_OID] if schema.partitioned else [])])


@dataclass
class Store:
    """The versions of a table, kept as the lake keeps them."""

    schema: TableSchema
    open: pa.Table
    closed: list[pa.Table] = field(default_factory=list)
    clock_us: int | None = None

    @classmethod
    def of(cls, schema: TableSchema) -> Store:
        return cls(schema, pa.schema([*columns_of(schema), EXACT, *VERSION_COLUMNS]).empty_table())

    def fold(self, batch: pa.RecordBatch, **how: Any) -> Versions:
        found = fold_versions(
            to_lake(self.schema, batch),
            self.schema,
            columns_of(self.schema),
            lambda _keys: self.open,
            clock_us=self.clock_us,
            **how,
        )
        have, gone, kept = key_codes([Keys.of(self.open, self.schema.key), found.gone, found.kept])
        assert not set(gone) & set(kept)
        ends = found.ends_of(self.open)
        rest = ~np.isin(have, gone)
        closes = rest & ~np.isin(have, kept) & np.asarray(ends.is_valid())
        closed = self.open.set_column(self.open.schema.get_field_index("valid_to"), VALID_TO, ends)
        closed = closed.filter(pa.array(closes))
        not_now = pa.array([False] * closed.num_rows, pa.bool_())
        self.closed.append(closed.set_column(closed.schema.get_field_index("is_current"), IS_CURRENT, not_now))
        rest &= ~closes
        self.open = pa.concat_tables([self.open.filter(pa.array(rest)), found.opened.cast(self.open.schema)])
        self.closed.append(found.closed)
        self.clock_us = found.clock_us
        return found

    def versions(self) -> list[Told]:
        rows = pa.concat_tables([self.open, *(some.cast(self.open.schema) for some in self.closed)])
        rows = rows.drop_columns([name for name in [PARTITION_OID.name] if name in rows.column_names])
        names = [field.name for field in VERSION_COLUMNS]
        facts = rows.select(names).to_pylist()
        for fact in facts:
            assert fact["is_current"] == (fact["valid_to"] is None)
        return sorted(
            (
                version_of(row, fact["valid_from"], fact["valid_to"], fact["__seq"])
                for row, fact in zip(texts_in(rows.drop_columns(names)), facts, strict=True)
            ),
            key=str,
        )


STEP = st.tuples(st.integers(0, 9), st.integers(0, 5), st.integers(0, 10_000), st.integers(0, 7))
TRANSACTION = st.tuples(st.booleans() | st.just(False), st.lists(STEP, max_size=5), st.integers(0, 50))
STORIES = st.lists(TRANSACTION, min_size=1, max_size=14)
CUTS = st.lists(st.integers(0, 20), max_size=5)
schemas = pytest.mark.parametrize(
    "schema", [s for s in SCHEMAS.values() if s.key], ids=[name for name, s in SCHEMAS.items() if s.key]
)


def told_by(schema: TableSchema, story: list[tuple[bool, list[tuple[int, int, int, int]], int]]) -> Watched:
    source = Watched(schema)
    for lost, steps, seconds in story:
        if lost:
            source.lose(steps, seconds)
        else:
            source.transact(steps, seconds)
    return source


@pytest.mark.sampled
@schemas
@settings(max_examples=examples(100), deadline=None)
@given(story=STORIES, cuts=CUTS)
def test_any_split_of_any_history_gives_the_versions_that_a_look_after_each_transaction_tells(
    schema: TableSchema, story: list[tuple[bool, list[tuple[int, int, int, int]], int]], cuts: list[int]
):
    source = told_by(schema, story)
    ends = sorted(
        {0, len(source.records), *source.copied, *(source.ends[cut] for cut in cuts if cut < len(source.ends))}
    )
    store = Store.of(schema)
    for first, end in pairwise(ends):
        store.fold(source.batch(first, end))
    assert store.versions() == source.versions()


Records = Callable[..., pa.RecordBatch]


def at(second: int, index: int | None = 0, lsn: int | None = None) -> dict[str, Any]:
    """Return a record's position columns: by default those of a transaction of its own."""
    return {
        "__commit_ts": MIDNIGHT + timedelta(seconds=second),
        "__commit_date": MIDNIGHT.date(),
        "__commit_lsn": 1_000 + second if lsn is None else lsn,
        "__commit_index": index,
    }


def short(store: Store) -> list[tuple[int, str | None, int, int | None, int]]:
    """Return each version as key, note, seconds of its start and end, and number of the record that started it."""
    return [
        (
            int(json.loads(row)["id"]),
            json.loads(row)["note"],
            round((began - MIDNIGHT).total_seconds()),
            None if ended is None else round((ended - MIDNIGHT).total_seconds()),
            seq,
        )
        for row, began, ended, _, seq in store.versions()
    ]


def test_of_several_changes_in_one_transaction_the_last_one_counts(orders: TableSchema, records: Records):
    store = Store.of(orders)
    store.fold(
        records(
            orders,
            ("c", 1, {"id": 1, "note": "a", **at(1, 0)}),
            ("u", 2, {"id": 1, "note": "b", **at(1, 1)}),
            ("u", 3, {"id": 1, "note": "c", **at(2, 0)}),
            ("u", 4, {"id": 1, "note": "b", **at(2, 1)}),
            ("d", 5, {"id": 1, **at(3, 0)}),
            ("c", 6, {"id": 1, "note": "b", **at(3, 1)}),
            ("t", 7, at(4, 0)),
            ("c", 8, {"id": 1, "note": "b", **at(4, 1)}),
            ("u", 9, {"id": 1, "note": "z", **at(5)}),
        )
    )
    assert short(store) == [(1, "b", 1, 5, 2), (1, "z", 5, None, 9)]


def test_transactions_of_one_moment_and_clocks_that_step_back_leave_versions_that_do_not_overlap(
    orders: TableSchema, records: Records
):
    store = Store.of(orders)
    store.fold(records(orders, ("c", 1, {"id": 1, "note": "a", **at(9)})))
    store.fold(records(orders, ("u", 2, {"id": 1, "note": "b", **at(3)}), ("d", 3, {"id": 1, **at(4)})))
    store.fold(records(orders, ("c", 4, {"id": 1, "note": "c", **at(5)})))
    assert short(store) == [(1, "a", 9, 9, 1), (1, "b", 9, 9, 2), (1, "c", 9, None, 4)]


def test_a_copy_begun_again_and_again_makes_no_false_versions(orders: TableSchema, records: Records):
    store = Store.of(orders)
    store.fold(records(orders, *(("c", n, {"id": n, "note": "a", **at(n)}) for n in range(1, 5))))
    found = store.fold(
        records(
            orders,
            ("t", 10, at(10, None)),
            ("r", 11, {"id": 1, "note": "a", **at(11, None)}),
            ("t", 12, at(12, None)),
            ("r", 13, {"id": 1, "note": "a", **at(13, None)}),
            ("r", 14, {"id": 2, "note": "b", **at(13, None)}),
            ("u", 15, {"id": 4, "note": "a", **at(14)}),
        )
    )
    assert short(store) == [
        (1, "a", 1, None, 1),
        (2, "a", 2, 13, 2),
        (2, "b", 13, None, 14),
        (3, "a", 3, 4, 3),  # deleted at an unknown time: at the latest when the copy that lacks it began
        (4, "a", 4, None, 4),
    ]
    assert len(found.kept) == 2, "equal rows are left where they are"


def test_an_insert_behind_a_copys_marker_tells_that_the_row_had_gone(orders: TableSchema, records: Records):
    store = Store.of(orders)
    store.fold(records(orders, ("c", 1, {"id": 1, "note": "a", **at(1)})))
    store.fold(records(orders, ("t", 2, at(2, None)), ("c", 3, {"id": 1, "note": "a", **at(3)})))
    assert short(store) == [(1, "a", 1, 1, 1), (1, "a", 3, None, 3)]


def test_a_truncate_behind_a_copys_marker_ends_what_the_copy_had_confirmed_and_the_marker_ends_the_rest(
    orders: TableSchema, records: Records
):
    changes = (
        ("t", 10, at(10, None)),
        ("r", 11, {"id": 1, "note": "a", **at(11, None)}),
        ("t", 12, at(12)),
        ("c", 13, {"id": 2, "note": "a", **at(13)}),
    )
    store = Store.of(orders)
    store.fold(records(orders, *(("c", n, {"id": n, "note": "a", **at(n)}) for n in range(1, 4))))
    store.fold(records(orders, *changes))
    assert sorted(short(store)) == [(1, "a", 1, 12, 1), (2, "a", 2, 3, 2), (2, "a", 13, None, 13), (3, "a", 3, 3, 3)]


def test_a_table_made_again_under_its_name_closes_what_was_open(orders: TableSchema, records: Records):
    store = Store.of(orders)
    store.fold(records(orders, ("c", 1, {"id": 1, "note": "a", **at(1)}), ("c", 2, {"id": 2, "note": "a", **at(1)})))
    store.fold(records(orders, ("r", 3, {"id": 1, "note": "a", **at(5, None)})), anew=True)
    assert short(store) == [(1, "a", 1, 5, 1), (1, "a", 5, None, 3), (2, "a", 1, 5, 2)]


def test_an_update_before_the_copy_of_its_row_waits_for_it(orders: TableSchema, records: Records):
    update = ("u", 1, {"id": 1, "total": None, "__unchanged": ["note"], **at(1)})
    copied = ("r", 2, {"id": 1, "note": "a", **at(2, None)})
    store = Store.of(orders)
    store.fold(records(orders, update, copied))
    assert short(store) == [(1, "a", 2, None, 2)]
    parted = Store.of(orders)
    parted.fold(records(orders, update), whole=False)
    parted.fold(records(orders, copied))
    assert parted.versions() == store.versions()
    with pytest.raises(LakeError, match="'id': 1"):
        Store.of(orders).fold(records(orders, update))
    Store.of(orders).fold(records(orders, update, ("d", 2, {"id": 1, **at(3)})))


def test_a_truncate_asks_for_no_more_than_the_keys_that_are_met(orders: TableSchema, records: Records):
    store = Store.of(orders)
    store.fold(records(orders, *(("c", n, {"id": n, "note": "a", **at(1, n)}) for n in range(1, 9))))
    found = store.fold(records(orders, ("t", 20, at(2)), ("c", 21, {"id": 3, "note": "b", **at(3)})))
    assert found.closed.column("id").to_pylist() == [3]
    assert found.rest_closed_us == pc.cast(pa.scalar(MIDNIGHT + timedelta(seconds=2)), pa.int64()).as_py()
    assert {row[3] for row in short(store) if row[0] != 3} == {2}
