"""A lake in PostgreSQL: events in order, rows as the source's, once each, whatever is replayed, killed or refused."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from typing import Any, cast
from uuid import UUID

import psycopg
import pyarrow as pa
import pytest
from tests.lake.test_fold import COLUMNS
from tests.lake.test_left_partitions import Partitioned

from millstream.errors import LakeError, LakeTableForeign
from millstream.lake.postgres.cuts import commit_cut, held_there, last_cut
from millstream.lake.postgres.events import in_order
from millstream.lake.postgres.land import LandedTable, Loaded, begin, land, look
from millstream.lake.postgres.target import PostgresTarget, TargetView
from millstream.lake.postgres.view_gaps import lacking
from millstream.model.ids import SchemaVersion, SourceId, StreamId, TableId
from millstream.model.positions import Seq
from millstream.model.schema import Column, PgType, ReplicaIdentity, TableSchema
from millstream.testing.errors import coded
from millstream.testing.pytest_plugin import Database

Records = Callable[..., pa.RecordBatch]
INT8, NUMERIC, TEXT = PgType(20, -1, "bigint"), PgType(1700, -1, "numeric"), PgType(25, -1, "text")


@pytest.fixture
def target(postgres: Database) -> PostgresTarget:
    made = PostgresTarget(postgres.dsn, "shop", StreamId(UUID(int=42)), views=("current", "changes"))
    begin(made, [])
    return made


@pytest.fixture
def table() -> TableSchema:
    return TableSchema(
        table_id=TableId(3),
        version=SchemaVersion(1),
        source=SourceId(1),
        namespace="sales",
        name="Orders",
        columns=(
            Column("id", pa.int64(), INT8),
            Column("total", pa.string(), NUMERIC),
            Column("note", pa.string(), TEXT),
        ),
        identity=("id",),
        key=("id",),
    )


@pytest.fixture
def asked(postgres: Database) -> Iterator[Callable[..., list[tuple[Any, ...]]]]:
    with postgres.connect() as connection:

        def ask(sql: str, *values: Any) -> list[tuple[Any, ...]]:
            cursor = connection.execute(sql, values or None)
            return [] if cursor.description is None else cursor.fetchall()

        yield ask


def landing(
    target: PostgresTarget, schema: TableSchema, upto: int, *batches: pa.RecordBatch, copying: bool = False
) -> LandedTable:
    loaded = Loaded(schema, [(TableSchema.from_arrow(batch.schema), batch) for batch in batches])
    ids = [schema.table_id] if copying else []
    return land(target, {schema.table_id: lambda: loaded}, Seq(upto), copying=ids, live=[schema.table_id])[
        schema.table_id
    ]


def landed(target: PostgresTarget, schema: TableSchema, upto: int, *batches: pa.RecordBatch, **more: Any) -> int:
    done = landing(target, schema, upto, *batches, **more)
    if done.error is not None:
        raise done.error
    assert done.commit is not None
    return done.commit.rows


EVENTS = 'sales_changes."Orders"'
ROWS = 'sales."Orders"'


def test_events_and_rows_are_there_once_whatever_is_landed_again(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    first = records(
        table,
        ("c", 1, {"id": 1, "total": "1.50", "__commit_lsn": 100, "__commit_index": 0, "__xid": 7}),
        ("c", 2, {"id": 2, "total": "NaN", "note": "a\tb\\\n", "__commit_lsn": 100, "__commit_index": 1, "__xid": 7}),
    )
    second = records(
        table,
        ("u", 3, {"id": 1, "total": "2", "note": None, "__commit_lsn": 200, "__commit_index": 0, "__xid": 8}),
        ("u", 4, {"id": 1, "total": "3", "note": "x", "__commit_lsn": 200, "__commit_index": 1, "__xid": 8}),
        ("d", 5, {"id": 2, "__commit_lsn": 200, "__commit_index": 2, "__xid": 8}),
    )
    assert landed(target, table, 2, first) == 2
    assert landed(target, table, 2, first) == 0
    assert landed(target, table, 5, first, second) == 3
    assert landed(target, table, 5, second) == 0
    rows = asked(
        f"SELECT seq, op, record_pk, commit_lsn::text, commit_index, row->>'total', row->>'note', log_seq FROM {EVENTS} ORDER BY seq"
    )
    assert rows == [
        (1, "c", "1", "0/64", 0, "1.50", None, 1),
        (2, "c", "2", "0/64", 1, "NaN", "a\tb\\\n", 2),
        (3, "u", "1", "0/C8", 0, "2", None, 3),
        (4, "u", "1", "0/C8", 1, "3", "x", 4),
        (5, "d", "2", "0/C8", 2, None, None, 5),
    ]
    assert asked(f"SELECT id, total::text, note FROM {ROWS}") == [(1, "3", "x")]


@pytest.mark.parametrize("view", ["current", "changes"])
def test_a_view_that_was_left_out_for_a_while_gets_nothing_until_it_can_be_complete(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any], view: TargetView
) -> None:
    """It went on as if nothing had landed without it: rows that a reader saw were old, and events were missing."""
    ids, other = [table.table_id], "changes" if view == "current" else "current"
    without = replace(target, views=(cast("TargetView", other),))
    landed(target, table, 2, records(table, ("c", 1, {"id": 1, "total": "1"}), ("c", 2, {"id": 2})))
    begin(without, [table])
    assert lacking(target, ids, without_rows=()) == {}, "nothing has landed without it so far"
    landed(without, table, 4, records(table, ("u", 3, {"id": 1, "total": "2"}), ("d", 4, {"id": 2})))
    assert lacking(without, ids, without_rows=()) == {}
    begin(target, [table])
    assert lacking(target, ids, without_rows=()) == {table.table_id: (4, view)}
    landed(target, table, 5, records(table, ("c", 5, {"id": 3})))
    assert lacking(target, ids, without_rows=()) == {table.table_id: (5, view)}
    rows, events = asked(f"SELECT count(*) FROM {ROWS}"), asked(f"SELECT count(*) FROM {EVENTS}")
    assert (rows, events) == (([(2,)], [(5,)]) if view == "current" else ([(2,)], [(2,)]))
    copied = [("t", 6, {}), ("r", 7, {"id": 1, "total": "2"}), ("r", 8, {"id": 3})]
    landed(target, table, 8, records(table, *copied))
    landed(target, table, 9, records(table, ("c", 9, {"id": 4})))
    assert lacking(target, ids, without_rows=()) == {}
    assert asked(f"SELECT id, total::text FROM {ROWS} ORDER BY id") == [(1, "2"), (3, None), (4, None)]
    assert asked(f"SELECT array_agg(log_seq ORDER BY seq) FROM {EVENTS} WHERE log_seq > 5") == [([6, 7, 8, 9],)]


def test_rows_that_are_asked_for_later_begin_with_a_copy(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    """They were those that changed since: a server that was too old for `current` was upgraded, for example."""
    ids, without = [table.table_id], replace(target, views=("changes",))
    for _ in range(2):
        begin(without, [table])
    landed(without, table, 1, records(table, ("c", 1, {"id": 1})))
    begin(target, [table])
    assert lacking(target, ids, without_rows=()) == {table.table_id: (1, "current")}
    assert lacking(target, ids, without_rows=ids) == lacking(target, [], without_rows=()) == {}
    landed(target, table, 2, records(table, ("c", 2, {"id": 2})))
    assert asked("SELECT to_regclass(%s) IS NULL", ROWS) == [(True,)]
    landed(target, table, 4, records(table, ("c", 3, {"id": 3}), ("t", 4, {})), records(table, ("r", 5, {"id": 2})))
    assert lacking(target, ids, without_rows=()) == {}
    landed(target, table, 5, records(table, ("r", 5, {"id": 2})))
    assert asked(f"SELECT id FROM {ROWS}") == [(2,)]


def test_a_row_of_json_is_a_row_of_the_table(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    landed(target, table, 1, records(table, ("c", 1, {"id": 9, "total": "1.50", "note": '{"a": "b"}'})))
    typed = asked(f"SELECT (jsonb_populate_record(NULL::{ROWS}, row)).* FROM {EVENTS}")
    assert typed == asked(f"SELECT * FROM {ROWS}")


def test_a_rename_that_another_lake_followed_is_refused_until_a_copy_comes(
    target: PostgresTarget, table: TableSchema, records: Records
) -> None:
    landed(target, table, 1, records(table, ("c", 1, {"id": 9, "note": "x"})))
    columns = tuple(replace(c, name="remark" if c.name == "note" else c.name) for c in table.columns)
    renamed = replace(table, version=SchemaVersion(table.version + 1), columns=columns)
    definition = records(renamed.as_definition(), ("s", 2, {"__before": [("note", "remark")]}))
    refused = landing(target, renamed, 2, definition).error
    assert isinstance(refused, LakeError)
    assert refused.code == "lake_schema_conflict"
    copied = records(renamed, ("t", 3, {}), ("r", 4, {"id": 9, "remark": "x"}))
    assert landed(target, renamed, 4, definition, copied) == 2


def test_rows_from_before_a_column_with_a_default_have_it(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    old = replace(table, columns=tuple(replace(c, number=at) for at, c in enumerate(table.columns, 1)))
    grade = Column("grade", pa.int32(), PgType(23, -1, "integer"), number=90, filled="5")
    said = Column("said", pa.string(), PgType(25, -1, "text"), number=91, filled="it's \\ so")
    new = replace(old, version=SchemaVersion(old.version + 1), columns=(*old.columns, grade))
    newer = replace(new, version=SchemaVersion(new.version + 1), columns=(*new.columns, said))
    landed(target, old, 2, records(old, ("c", 1, {"id": 1, "note": "x"}), ("c", 2, {"id": 2, "note": "y"})))
    definition = records(new.as_definition(), ("s", 3, {"__exact": [("grade", "5")]}))
    assert landed(target, new, 3, definition) == 0
    found = f"SELECT id, note, grade FROM {ROWS} ORDER BY id"
    assert asked(found) == [(1, "x", 5), (2, "y", 5)]
    late = [("u", 5, {"id": 1, "grade": None, "__unchanged": ["note"]}), ("c", 6, {"id": 4, "grade": 7})]
    landed(
        target,
        newer,
        7,
        records(new, *late),
        records(newer, ("u", 7, {"id": 2, "said": None, "__unchanged": ["note", "grade"]})),
    )
    assert asked(f"SELECT id, note, grade, said FROM {ROWS} ORDER BY id") == [
        (1, "x", None, "it's \\ so"),
        (2, "y", 5, None),
        (4, None, 7, "it's \\ so"),
    ]
    landed(target, new, 3, definition)
    assert "said" in str(asked(f"SELECT to_json(o) FROM {ROWS} o")), "a repeated batch changes nothing"


# --- lives: random records in random batches, replayed and broken off ----------------------------------------------


class Source:
    """A table that makes records as a source would, and remembers its rows after each."""

    def __init__(self, seed: int, *, keyed: bool) -> None:
        self.chance = random.Random(seed)
        self.keyed = keyed
        self.rows: list[dict[str, Any]] = []
        self.records: list[tuple[str, int, dict[str, Any]]] = []
        self.after: list[list[dict[str, Any]]] = [[]]

    def live(self, count: int) -> None:
        lsn = 100
        while len(self.records) < count:
            lsn += self.chance.randrange(1, 500)
            for index in range(self.chance.choice([1, 1, 2, 5])):
                op, facts = self.change()
                facts |= {"__commit_lsn": lsn, "__commit_index": index, "__xid": lsn}
                self.records.append((op, len(self.records) + 1, facts))
                self.after.append([dict(row) for row in self.rows])

    def change(self) -> tuple[str, dict[str, Any]]:
        what = self.chance.choices("cudkt", [6, 8, 3, 2, 0.3])[0]
        if what == "t":
            self.rows.clear()
            return "t", {}
        if what == "c" or not self.rows:
            row = self.row(self.free())
            self.rows.append(row)
            return "c", dict(row)
        row = self.chance.choice(self.rows)
        old = dict(row)
        before = {"__before": list(old.items())} if not self.keyed else {}
        if what == "d":
            self.rows.remove(row)
            return "d", {"id": old["id"]} if self.keyed else old
        new = self.row(self.free() if what == "k" else old["id"])
        if what == "k" and self.keyed:
            before = {"__before": [("id", old["id"])]}
        unchanged = self.chance.random() < 0.4
        if unchanged:
            new["note"] = old["note"]
        row.update(new)
        said = dict(new)
        if unchanged:
            said |= {"note": None, "__unchanged": ["note"]}
        return "u", said | before

    def free(self) -> str:
        taken = {row["id"] for row in self.rows} if self.keyed else set()
        few = [str(key) for key in range(12 if self.keyed else 3) if str(key) not in taken]
        return self.chance.choice(few or [next(str(key) for key in count(12) if str(key) not in taken)])

    def row(self, key: str) -> dict[str, Any]:
        return {
            "id": key,
            "total": self.chance.choice([None, "1.0", "1.00", "NaN", "-0.10"]),
            "note": self.chance.choice([None, "", "a", "\\N", "tab\there", "Ä\n", '"'] if self.keyed else ["a", None]),
        }


class Broken(Exception):
    """A process that died."""


@pytest.mark.sampled
@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "bag"])
@pytest.mark.parametrize("seed", range(6))
def test_rows_and_events_are_the_sources_after_every_batch(
    target: PostgresTarget,
    table: TableSchema,
    records: Records,
    asked: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    keyed: bool,
) -> None:
    columns = (Column("id", pa.string(), NUMERIC), *table.columns[1:])
    schema = replace(table, columns=columns)
    if not keyed:
        schema = replace(schema, key=(), identity=schema_names(schema), replica_identity=ReplicaIdentity.FULL)
    source = Source(seed, keyed=keyed)
    source.live(120)
    chance = random.Random(-seed)
    names = [record[:2] for record in source.records]
    reached = 0
    while reached < len(source.records):
        begin_at = max(0, reached - chance.choice([0, 0, 1, 20]))
        upto = min(len(source.records), max(begin_at, reached) + chance.choice([1, 3, 10, 40]))
        batches = [records(schema, *some) for some in pieces(source.records[begin_at:upto], chance)]
        if chance.random() < 0.3:
            with monkeypatch.context() as patch:
                patch.setattr("millstream.failpoints.hit", dies_at(chance.choice(["before", "after"])))
                with pytest.raises(Broken):
                    landing(target, schema, upto, *batches)
        landed(target, schema, upto, *batches)
        reached = upto
        there = asked(f"SELECT id::text, total::text, note FROM {ROWS}")
        was = [(row["id"], row["total"], row["note"]) for row in source.after[reached]]
        assert sorted(there, key=str) == sorted(was, key=str), f"seed {seed}, after {reached}"
        events = asked(f"SELECT op, log_seq FROM {EVENTS} ORDER BY seq")
        assert [(op, int(seq)) for op, seq in events] == names[:reached]


def schema_names(schema: TableSchema) -> tuple[str, ...]:
    return tuple(column.name for column in schema.columns)


def pieces(found: list[Any], chance: random.Random) -> list[list[Any]]:
    at = chance.randrange(len(found) + 1)
    return [some for some in (found[:at], found[at:]) if some]


def dies_at(moment: str) -> Callable[[str], None]:
    def hit(name: str) -> None:
        if name == f"lake.{moment}_postgres_commit":
            raise Broken(name)

    return hit


def test_records_of_several_shards_come_in_the_order_of_their_numbers(table: TableSchema, records: Records) -> None:
    one = records(table, *(("c", seq, {"id": seq}) for seq in (1, 2, 5, 6, 9)))
    other = records(table, *(("c", seq, {"id": seq}) for seq in (3, 4, 7)))
    found = [batch.column("__seq").to_pylist() for _, batch in in_order([(table, one), (table, other)], rows_max=2)]
    assert found == [[1, 2], [3, 4], [5, 6], [7], [9]]


# --- what the source can do to a table -----------------------------------------------------------------------------


def test_a_row_that_has_not_been_copied_yet_is_completed_by_its_copy(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    early = records(table, ("u", 1, {"id": 1, "total": "2", "__unchanged": ["note"]}))
    assert isinstance(landing(target, table, 1, early).error, LakeError)
    landed(target, table, 1, early, copying=True)
    assert asked(f"SELECT * FROM {ROWS}") == [(1, 2, None)]
    landed(target, table, 2, records(table, ("r", 2, {"id": 1, "total": "2", "note": "whole"})))
    assert asked(f"SELECT * FROM {ROWS}") == [(1, 2, "whole")]


def test_rows_of_a_bag_may_go_before_its_copy_brings_any(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    """Its copy begins by emptying it."""
    bag = replace(table, key=(), identity=schema_names(table), replica_identity=ReplicaIdentity.FULL)
    gone = records(bag, ("d", 1, {"id": 1, "note": "a"}))
    assert isinstance(landing(target, bag, 1, gone).error, LakeError)
    landed(target, bag, 1, gone, copying=True)
    landed(target, bag, 3, records(bag, ("t", 2, {}), ("r", 3, {"id": 2, "note": "b"})))
    assert asked(f"SELECT id, note FROM {ROWS}") == [(2, "b")]


def test_columns_may_have_names_like_those_that_we_use_ourselves(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    names = ("gone", "gone_", "number", "seq", "op", "row", "c", "s", "old", "__seq_", "__op__")
    odd = replace(table, columns=(table.columns[0], *(Column(name, pa.string(), TEXT) for name in names)))
    landed(target, odd, 1, records(odd, ("c", 1, {"id": 1} | dict.fromkeys(names, "x"))))
    landed(target, odd, 2, records(odd, ("u", 2, {"id": 1, "seq": "y", "__unchanged": ["gone", "op"]})))
    landed(target, odd, 4, records(odd, ("c", 3, {"id": 2}), ("d", 4, {"id": 2})))
    assert asked(f"SELECT gone, op, seq, row FROM {ROWS}") == [("x", "x", "y", None)]


def test_columns_come_go_and_change_their_types(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    landed(target, table, 1, records(table, ("c", 1, {"id": 1, "total": "12", "note": "n"})))
    asked(f"ALTER TABLE {ROWS} ADD mine text DEFAULT 'of somebody'")
    columns = (
        table.columns[0],
        Column("total", pa.int32(), PgType(23, -1, "integer")),
        Column("more", pa.string(), TEXT),
    )
    newer = replace(table, version=SchemaVersion(2), columns=columns)
    landed(target, newer, 2, records(newer, ("c", 2, {"id": 2, "total": 5, "more": "m"})))
    types = "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY 1"
    assert asked(types, ROWS) == [("id", "bigint"), ("mine", "text"), ("more", "text"), ("total", "integer")]
    assert asked(f"SELECT id, total, more, mine FROM {ROWS} ORDER BY 1") == [
        (1, 12, None, "of somebody"),
        (2, 5, "m", "of somebody"),
    ]


def test_a_type_that_old_values_do_not_fit_sets_the_table_aside_with_what_to_do(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    landed(target, table, 1, records(table, ("c", 1, {"id": 1, "note": "no number"})))
    columns = (*table.columns[:2], Column("note", pa.int32(), PgType(23, -1, "integer")))
    newer = replace(table, version=SchemaVersion(2), columns=columns)
    batch = records(newer, ("c", 2, {"id": 2, "note": 5}))
    error = landing(target, newer, 2, batch).error
    assert isinstance(error, LakeError)
    assert error.code == "lake_schema_conflict"
    assert "tables copy" in error.hint
    assert asked(f"SELECT count(*) FROM {EVENTS}") == [(1,)], "nothing of the batch is there by halves"
    asked(f"DROP TABLE {ROWS}; DELETE FROM millstream_lake.tables WHERE view = 'current'")
    landed(target, newer, 2, batch)
    assert asked(f"SELECT id, note FROM {ROWS}") == [(2, 5)]


def test_another_key_begins_the_rows_anew(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    """Capture copies such a table again."""
    landed(target, table, 2, records(table, ("c", 1, {"id": 1, "note": "a"}), ("c", 2, {"id": 2, "note": "a"})))
    newer = replace(table, version=SchemaVersion(2), key=("note",), identity=("note",))
    landed(target, newer, 3, records(newer, ("u", 3, {"id": 1, "note": "b"})), copying=True)
    landed(target, newer, 5, records(newer, ("r", 4, {"id": 1, "note": "b"}), ("r", 5, {"id": 2, "note": "a"})))
    assert asked(f"SELECT note, id FROM {ROWS} ORDER BY 1") == [("a", 2), ("b", 1)]
    with pytest.raises(psycopg.errors.UniqueViolation):
        asked(f"INSERT INTO {ROWS} (id, note) VALUES (7, 'a')")


def test_tables_that_trade_names_keep_their_rows_and_events_go_by_name(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    a, b = replace(table, name="a"), replace(table, name="b", table_id=TableId(4))
    tables = [a.table_id, b.table_id]

    def put(schema: TableSchema, seq: int, **row: Any) -> None:
        loaded = Loaded(schema, [(schema, records(schema, ("c", seq, {"id": seq, **row})))])
        done = land(target, {schema.table_id: lambda: loaded}, Seq(seq), live=tables)[schema.table_id]
        assert done.error is None

    put(a, 1, note="of the first")
    put(b, 2, note="of the second")
    put(replace(a, name="b", version=SchemaVersion(2)), 3, note="of the first")
    put(replace(b, name="a", version=SchemaVersion(2)), 4, note="of the second")
    assert asked("SELECT id, note FROM sales.b ORDER BY 1") == [(1, "of the first"), (3, "of the first")]
    assert asked("SELECT id, note FROM sales.a ORDER BY 1") == [(2, "of the second"), (4, "of the second")]
    assert asked("SELECT row->>'id' FROM sales_changes.b ORDER BY seq") == [("2",), ("3",)]
    assert asked("SELECT count(*) FROM pg_class WHERE relnamespace = 'sales'::regnamespace AND relkind = 'r'") == [(2,)]


def test_a_table_that_was_dropped_and_made_again_begins_anew_and_its_events_go_on(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    landed(target, table, 1, records(table, ("c", 1, {"id": 1})))
    again = replace(table, table_id=TableId(9))
    landed(target, again, 2, records(again, ("c", 2, {"id": 5})))
    assert asked(f"SELECT id FROM {ROWS}") == [(5,)]
    assert asked(f"SELECT seq, record_pk FROM {EVENTS} ORDER BY seq") == [(1, "1"), (2, "5")]


def test_keys_of_other_texts_that_are_equal_are_one_row(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    keyed = replace(table, columns=(Column("id", pa.string(), NUMERIC), *table.columns[1:]))
    landed(target, keyed, 1, records(keyed, ("c", 1, {"id": "1.0", "note": "a"})))
    landed(target, keyed, 2, records(keyed, ("u", 2, {"id": "1.00", "note": "b", "__before": [("id", "1.0")]})))
    assert asked(f"SELECT id::text, note FROM {ROWS}") == [("1.00", "b")]
    landed(target, keyed, 3, records(keyed, ("d", 3, {"id": "1.00"})))
    assert asked(f"SELECT * FROM {ROWS}") == []


def test_a_value_that_the_destination_does_not_take_back_is_kept_as_its_text(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    """A source may hold a timestamp that rounding to its precision put beyond the last that can be written."""
    stamp = Column("at", pa.string(), PgType(1114, 3, "timestamp without time zone"))
    timed = replace(table, columns=(*table.columns, stamp))
    landed(target, timed, 1, records(timed, ("c", 1, {"id": 1, "at": "2026-01-01 00:00:00"})))
    last = "294277-01-01 00:00:00"
    landed(
        target, timed, 3, records(timed, ("c", 2, {"id": 2, "at": last}), ("u", 3, {"id": 1, "at": last, "note": "n"}))
    )
    assert asked(f"SELECT id, at, __exact FROM {ROWS} ORDER BY 1") == [(1, None, {"at": last}), (2, None, {"at": last})]
    sparse = records(
        timed,
        ("u", 4, {"id": 1, "at": "2026-01-02 00:00:00", "__unchanged": ["note"]}),
        ("u", 5, {"id": 2, "note": "m", "__unchanged": ["at"]}),
    )
    landed(target, timed, 5, sparse)
    assert asked(f"SELECT id, at::text, note, __exact FROM {ROWS} ORDER BY 1") == [
        (1, "2026-01-02 00:00:00", "n", None),
        (2, None, "m", {"at": last}),
    ]


def test_a_bag_keeps_such_values_too(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    stamp = Column("at", pa.string(), PgType(1114, 3, "timestamp without time zone"))
    columns = (*table.columns, stamp)
    names = tuple(column.name for column in columns)
    bag = replace(table, columns=columns, key=(), identity=names, replica_identity=ReplicaIdentity.FULL)
    odd, even = {"id": 1, "at": "294277-01-01 00:00:00"}, {"id": 1, "at": "2026-01-01 00:00:00"}
    landed(target, bag, 3, records(bag, ("c", 1, dict(odd)), ("c", 2, dict(even)), ("c", 3, dict(odd))))
    landed(target, bag, 4, records(bag, ("d", 4, dict(odd))))
    landed(target, bag, 5, records(bag, ("d", 5, dict(even))))
    assert asked(f"SELECT id, at, __exact FROM {ROWS}") == [(1, None, {"at": odd["at"]})]


def test_a_writer_that_knows_fewer_columns_takes_none_away(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    old = replace(table, source=SourceId(0), columns=tuple(Column(c.name, c.arrow) for c in table.columns))
    new = replace(old, version=SchemaVersion(2), columns=(*old.columns, Column("raw", pa.binary())))
    landed(target, new, 1, records(new, ("c", 1, {"id": 1, "raw": b"\x00\xff"})))
    landed(target, old, 3, records(old, ("c", 2, {"id": 2, "note": "b"}), ("c", 3, {"id": 1, "note": "a"})))
    assert asked(f"SELECT id, note, raw FROM {ROWS} ORDER BY 1") == [(1, "a", None), (2, "b", None)]
    landed(target, new, 4, records(new, ("c", 4, {"id": 2, "raw": b"x"})))
    assert asked(f"SELECT id, note, raw FROM {ROWS} ORDER BY 1") == [(1, "a", None), (2, None, b"x")]


def test_equal_keys_that_all_go_in_one_batch_are_one_row(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    keyed = replace(table, columns=(Column("id", pa.string(), NUMERIC), *table.columns[1:]))
    landed(target, keyed, 1, records(keyed, ("c", 1, {"id": "1.0"})))
    batch = [("d", 2, {"id": "1.0"}), ("c", 3, {"id": "1.00"}), ("d", 4, {"id": "1.00"}), ("c", 5, {"id": "1.000"})]
    landed(target, keyed, 4, records(keyed, *batch[:3]))
    assert asked(f"SELECT * FROM {ROWS}") == []
    landed(target, keyed, 5, records(keyed, *batch))
    assert asked(f"SELECT id::text FROM {ROWS}") == [("1.000",)]


def test_a_key_that_changes_within_a_batch_begins_the_rows_anew(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    newer = replace(
        table,
        version=SchemaVersion(2),
        columns=(Column("number", pa.int64(), INT8), *table.columns[1:]),
        key=("number",),
        identity=("number",),
    )
    old, new = records(table, ("c", 1, {"id": 2})), records(newer, ("u", 2, {"number": 2, "__unchanged": ["note"]}))
    landed(target, newer, 2, old, new, copying=True)
    landed(target, newer, 4, records(newer, ("t", 3, {}), ("r", 4, {"number": 2, "note": "n"})))
    assert asked(f"SELECT number, note FROM {ROWS}") == [(2, "n")]
    assert asked(f"SELECT op FROM {EVENTS} ORDER BY seq") == [("c",), ("u",), ("t",), ("r",)]


def test_a_late_record_of_a_table_that_is_gone_leaves_the_rows_of_the_one_that_has_its_name(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    again = replace(table, table_id=TableId(9))
    landed(target, again, 2, records(again, ("c", 2, {"id": 5})))
    loaded = Loaded(table, [(table, records(table, ("c", 1, {"id": 1})))])
    done = land(target, {table.table_id: lambda: loaded}, Seq(2), live=[again.table_id])[table.table_id]
    assert done.error is None
    assert asked(f"SELECT id FROM {ROWS}") == [(5,)]


def test_a_table_whose_rows_were_not_copied_has_events_alone(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    bag = replace(table, key=(), identity=schema_names(table), replica_identity=ReplicaIdentity.FULL)
    loaded = Loaded(bag, [(bag, records(bag, ("d", 1, {"id": 1})))])
    done = land(target, {bag.table_id: lambda: loaded}, Seq(1), history_only=[bag.table_id])[bag.table_id]
    assert done.error is None
    assert asked(f"SELECT op FROM {EVENTS}") == [("d",)]
    assert asked("SELECT count(*) FROM millstream_lake.tables WHERE view = 'current'") == [(0,)]


@pytest.mark.parametrize("key", ["id", "note"])
def test_a_zero_character_lands_as_its_symbol(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any], key: str
) -> None:
    """Applications may write one, and PostgreSQL's texts hold none: the table isn't quarantined for it."""
    keyed = replace(table, key=(key,), identity=(key,))
    note, escaped = "a\0\0b", "\\u0000"
    rows = [("c", 1, {"id": 1, "note": note}), ("c", 2, {"id": 2, "note": escaped}), ("u", 3, {"id": 1, "note": note})]
    landed(target, keyed, 3, records(keyed, *rows))
    shown = [(1, "a\u2400\u2400b"), (2, escaped)]
    assert asked(f"SELECT id, note FROM {ROWS} ORDER BY 1") == shown
    assert asked(f"SELECT DISTINCT (row->>'id')::int, row->>'note' FROM {EVENTS} ORDER BY 1") == shown
    keys = asked(f"SELECT DISTINCT record_pk FROM {EVENTS} ORDER BY 1")
    assert keys == ([("1",), ("2",)] if key == "id" else [(escaped,), ("a\u2400\u2400b",)])
    landed(target, keyed, 4, records(keyed, ("d", 4, {"id": 1, "note": note})))
    assert asked(f"SELECT id, note FROM {ROWS}") == shown[1:]


def test_a_negative_zero_is_one_in_events_too(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    real = replace(table, columns=(*table.columns, Column("x", pa.float64(), PgType(701, -1, "double precision"))))
    landed(target, real, 1, records(real, ("c", 1, {"id": 1, "x": -0.0})))
    typed = f"SELECT (jsonb_populate_record(NULL::{ROWS}, row)).x::text FROM {EVENTS}"
    assert asked(typed) == asked(f"SELECT x::text FROM {ROWS}") == [("-0",)]


@pytest.mark.long
def test_a_table_of_as_many_columns_as_there_can_be(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    columns = (table.columns[0], *(Column(f"c{n}", pa.int32(), PgType(23, -1, "integer")) for n in range(1599)))
    wide = replace(table, columns=columns)
    landed(target, wide, 2, records(wide, ("c", 1, {"id": 1, "c1598": 7}), ("c", 2, {"id": 2})))
    landed(target, wide, 4, records(wide, ("u", 3, {"id": 1, "c1598": 8}), ("d", 4, {"id": 2})))
    assert asked(f"SELECT id, c1598 FROM {ROWS}") == [(1, 8)]


# --- what the destination can be -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [EVENTS, ROWS])
def test_a_table_of_somebody_elses_is_named_and_not_touched(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any], name: str
) -> None:
    schema = name.split(".", maxsplit=1)[0]
    asked(f"CREATE SCHEMA {schema}; CREATE TABLE {name} (id bigint, other text); INSERT INTO {name} VALUES (1, 'x')")
    other = replace(table, table_id=TableId(8), name="fine")
    batch = Loaded(table, [(table, records(table, ("c", 1, {"id": 1})))])
    fine = Loaded(other, [(other, records(other, ("c", 2, {"id": 1})))])
    done = land(target, {table.table_id: lambda: batch, other.table_id: lambda: fine}, Seq(2))
    error = done[table.table_id].error
    assert isinstance(error, LakeTableForeign)
    assert name in error.message
    assert """`millstream tables retry 'sales."Orders"'`""" in error.hint, "the source's name, as a shell takes it"
    assert "schema_prefix" in error.hint
    assert done[other.table_id].error is None, "one bad table never blocks another"
    assert asked(f"SELECT * FROM {name}") == [(1, "x")]
    assert asked("SELECT count(*) FROM sales.fine") == [(1,)]
    asked(f"DROP TABLE {name}")
    landed(target, table, 2, *[batch for _, batch in batch.batches])
    assert asked(f"SELECT id FROM {ROWS}") == [(1,)]


def test_a_table_that_somebody_dropped_is_not_begun_anew_unsaid(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    landed(target, table, 1, records(table, ("c", 1, {"id": 1})))
    asked(f"DROP TABLE {EVENTS}")
    error = landing(target, table, 2, records(table, ("c", 2, {"id": 2}))).error
    assert isinstance(error, LakeError)
    assert error.code == "lake_history_lost"
    assert """then `millstream tables copy 'sales."Orders"'`""" in error.hint
    asked(error.hint.removeprefix("Run ").split(", then")[0])
    landed(target, table, 2, records(table, ("c", 2, {"id": 2})))
    assert asked(f"SELECT record_pk FROM {EVENTS}") == [("2",)]


def test_an_event_table_whose_columns_somebody_changed_is_named(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    landed(target, table, 1, records(table, ("c", 1, {"id": 1})))
    asked(f"ALTER TABLE {EVENTS} ALTER commit_index TYPE text")
    error = landing(target, table, 2, records(table, ("c", 2, {"id": 2}))).error
    assert isinstance(error, LakeTableForeign)
    assert "commit_index" in error.message


def test_a_key_that_somebody_adds_or_drops_deletes_no_row(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    landed(target, table, 2, records(table, ("c", 1, {"id": 1}), ("c", 2, {"id": 2})))
    asked(f'ALTER TABLE {ROWS} DROP CONSTRAINT "Orders_pkey"')
    landed(target, table, 3, records(table, ("c", 3, {"id": 3})))
    assert asked(f"SELECT count(*) FROM {ROWS}") == [(3,)]
    with pytest.raises(psycopg.errors.UniqueViolation):
        asked(f"INSERT INTO {ROWS} (id) VALUES (3)")
    asked(f'ALTER TABLE {ROWS} DROP CONSTRAINT "Orders_pkey", ADD mine bigserial PRIMARY KEY')
    error = landing(target, table, 4, records(table, ("c", 4, {"id": 4}))).error
    assert isinstance(error, LakeTableForeign)
    assert "Drop that key" in error.hint
    bag = replace(
        table,
        name="bag",
        table_id=TableId(7),
        key=(),
        identity=schema_names(table),
        replica_identity=ReplicaIdentity.FULL,
    )
    landed(target, bag, 1, records(bag, ("c", 1, {"id": 1})))
    asked("ALTER TABLE sales.bag ADD mine bigserial PRIMARY KEY")
    landed(target, bag, 2, records(bag, ("c", 2, {"id": 2})))
    landed(target, bag, 3, records(bag, ("d", 3, {"id": 1})))
    assert asked("SELECT id FROM sales.bag") == [(2,)]


def test_a_published_destination_takes_changes_of_a_bag(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    asked("CREATE PUBLICATION everything FOR ALL TABLES")
    bag = replace(table, key=(), identity=schema_names(table), replica_identity=ReplicaIdentity.FULL)
    landed(target, bag, 1, records(bag, ("c", 1, {"id": 1})))
    landed(target, bag, 2, records(bag, ("d", 2, {"id": 1})))
    assert asked(f"SELECT * FROM {ROWS}") == []


def test_a_destination_that_lost_its_last_commits_ends_the_run(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    done = landing(target, table, 5, records(table, ("c", 5, {"id": 1}))).commit
    assert done is not None
    commit_cut(target, Seq(5), [done], committed_at=datetime.now(UTC))
    land(target, {}, Seq(6), cut=Seq(5))
    asked("UPDATE millstream_lake.cuts SET n = 3")
    with pytest.raises(LakeError, check=coded("destination_went_back"), match="only up to 3"):
        land(target, {}, Seq(6), cut=Seq(5))
    asked("DELETE FROM millstream_lake.cuts")
    with pytest.raises(LakeError, check=coded("destination_went_back"), match="only up to 0"):
        land(target, {}, Seq(6), cut=Seq(5))


def test_what_a_user_may_not_do_is_said_with_the_grant(
    target: PostgresTarget, table: TableSchema, postgres: Database, asked: Callable[..., Any]
) -> None:
    public = replace(table, namespace="public")
    assert "can be written" in look(target, [], [public])
    asked(
        f"REVOKE ALL ON DATABASE {postgres.name} FROM PUBLIC; REVOKE CREATE ON SCHEMA public FROM PUBLIC; CREATE ROLE loader_{postgres.name} LOGIN"
    )
    asked(f"GRANT CONNECT ON DATABASE {postgres.name} TO loader_{postgres.name}")
    try:
        other = replace(target, dsn=target.dsn.replace("postgres@", f"loader_{postgres.name}@"))
        with pytest.raises(LakeError) as caught:
            look(other, [], [public])
        for grant in ("CREATE, TEMP ON DATABASE", "USAGE, CREATE ON SCHEMA public", "CREATE ON SCHEMA millstream_lake"):
            assert grant in caught.value.hint
        asked(caught.value.hint)
        assert "can be written" in look(other, [], [public])
    finally:
        asked(f"DROP OWNED BY loader_{postgres.name}; DROP ROLE loader_{postgres.name}")


def test_two_streams_in_one_database_need_prefixes(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    landed(target, table, 1, records(table, ("c", 1, {"id": 1})))
    other = replace(target, stream_id=StreamId(UUID(int=43)))
    assert isinstance(landing(other, table, 1, records(table, ("c", 1, {"id": 2}))).error, LakeTableForeign)
    landed(replace(other, schema_prefix="b_"), table, 1, records(table, ("c", 1, {"id": 2})))
    assert asked('SELECT id FROM b_sales."Orders" UNION ALL SELECT id FROM sales."Orders"') == [(2,), (1,)]


def test_a_destination_that_takes_no_writes_is_tried_again(
    target: PostgresTarget, postgres: Database, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    batch = records(table, ("c", 1, {"id": 1}))
    asked(f"ALTER DATABASE {postgres.name} SET default_transaction_read_only = on")
    error = landing(target, table, 1, batch).error
    assert isinstance(error, LakeError)
    assert error.code == "destination_unavailable"
    assert "read-only" in error.message
    asked(f"ALTER DATABASE {postgres.name} RESET default_transaction_read_only")
    landed(target, table, 1, batch)


def test_an_address_that_leads_nowhere_says_so_without_its_secret(table: TableSchema, records: Records) -> None:
    target = PostgresTarget("postgresql://u:hush@127.0.0.1:1/nowhere", "shop", StreamId(UUID(int=1)))
    error = landing(target, table, 1, records(table, ("c", 1, {"id": 1}))).error
    assert isinstance(error, LakeError)
    assert error.code == "destination_unavailable"
    assert "hush" not in f"{error!r} {error.hint} {target!r}"


def test_a_value_that_the_destination_refuses_sets_its_table_aside_alone(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    stamp = Column("at", pa.string(), PgType(1114, 3, "timestamp without time zone"))
    timed = replace(table, source=SourceId(0), columns=(*table.columns, stamp), key=("at",), identity=("at",))
    error = landing(target, timed, 1, records(timed, ("c", 1, {"id": 1, "at": "294277-01-01 00:00:00"}))).error
    assert error is not None
    assert asked("SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'sales%'") == [(0,)]


# --- event tables of an older layout ---------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["UNIQUE", "PRIMARY KEY"])
def test_events_of_the_first_layout_stay_and_new_ones_are_numbered_above_them(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any], key: str
) -> None:
    """In that layout `seq` was the commit's LSN, and several changes of a row in one transaction were one event."""
    target = replace(target, views=("changes",))
    asked(
        "CREATE SCHEMA sales_changes; "
        f"CREATE TABLE {EVENTS} (seq bigint NOT NULL, record_pk text NOT NULL, op text NOT NULL, data text NOT NULL DEFAULT '', "
        f"stamp timestamptz NOT NULL, {key} (seq, record_pk)); "
        f"INSERT INTO {EVENTS} VALUES (100, '1', 'c', '', now()), (100, '2', 'c', '', now()), (300, '1', 'u', '', now())"
    )
    last, seen = 0, list[tuple[Any, ...]]()
    stop = threading.Event()

    def page() -> None:
        nonlocal last
        with psycopg.connect(target.dsn) as connection:
            while True:
                ending = stop.is_set()
                for row in connection.execute(
                    f"SELECT seq, op, record_pk FROM {EVENTS} WHERE seq > %s ORDER BY seq", [last]
                ):
                    seen.append(row)
                    last = row[0]
                connection.commit()
                if ending:
                    return

    reader = threading.Thread(target=page)
    reader.start()
    try:
        begin(target, [table])
        told = [
            ("c", 1, {"id": 1, "__commit_lsn": 100, "__commit_index": 0}),
            ("c", 2, {"id": 2, "__commit_lsn": 100, "__commit_index": 1}),
            ("u", 3, {"id": 1, "__commit_lsn": 300, "__commit_index": 0}),
            ("u", 4, {"id": 1, "note": "again", "__commit_lsn": 300, "__commit_index": 1}),
            ("u", 5, {"id": 2, "__commit_lsn": 400, "__commit_index": 0}),
            ("u", 6, {"id": 2, "__commit_lsn": 400, "__commit_index": 1}),
            ("t", 7, {"__commit_lsn": 500, "__commit_index": 0}),
        ]
        batch = records(table, *told)
        landed(target, table, 5, records(table, *told[:5]))
        landed(target, table, 7, batch)
        asked("DELETE FROM millstream_lake.positions")
        landed(target, table, 7, batch)
    finally:
        stop.set()
        reader.join()
    rows = asked(f"SELECT seq, op, record_pk, commit_index, commit_lsn::text FROM {EVENTS} ORDER BY seq, record_pk")
    assert rows == [
        (100, "c", "1", None, None),
        (100, "c", "2", None, None),
        (300, "u", "1", None, None),
        (301, "u", "2", 0, "0/190"),
        (302, "u", "2", 1, "0/190"),
        (303, "t", None, 0, "0/1F4"),
    ]
    assert sorted(seen, key=str) == sorted([(s, op, pk) for s, op, pk, *_ in rows], key=str)


def test_an_old_event_table_that_cannot_be_taken_over_stops_nobody(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    asked(
        f"CREATE SCHEMA sales_changes; CREATE TABLE {EVENTS} (seq bigserial, record_pk text, op text NOT NULL, UNIQUE (seq, record_pk))"
    )
    asked(f"INSERT INTO {EVENTS} VALUES (700, '1', 'c')")
    begin(replace(target, views=("current",)), [table])
    assert asked("SELECT count(*) FROM millstream_lake.tables") == [(0,)], "nobody asked for events"
    begin(target, [table])
    landed(target, table, 1, records(table, ("c", 1, {"id": 2, "__commit_lsn": 900, "__commit_index": 0})))
    assert asked(f"SELECT seq, record_pk FROM {EVENTS} ORDER BY seq") == [(700, "1"), (701, "2")]


def test_positions_that_were_lost_double_no_event(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any]
) -> None:
    told = [("c", n, {"id": n, "__commit_lsn": 100 * n, "__commit_index": 0}) for n in range(1, 6)]
    landed(target, table, 5, records(table, *told))
    asked("DELETE FROM millstream_lake.positions")
    told.append(("c", 6, {"id": 6, "__commit_lsn": 600, "__commit_index": 0}))
    landed(target, table, 6, records(table, *told[2:]))
    assert asked(f"SELECT array_agg(log_seq ORDER BY seq) FROM {EVENTS}") == [([1, 2, 3, 4, 5, 6],)]


def test_numbers_become_visible_in_their_order_whoever_writes(
    target: PostgresTarget, table: TableSchema, records: Records
) -> None:
    """A reader that asks for numbers above its last one misses nothing while two tasks land the same batches."""
    target = replace(target, views=("changes",))
    landed(target, table, 1, records(table, ("c", 1, {"id": 1})))
    batches = [
        (n * 10 + 11, records(table, *(("c", s, {"id": s}) for s in range(n * 10 + 2, n * 10 + 12)))) for n in range(20)
    ]
    seen: list[int] = []
    stop = threading.Event()

    def read() -> None:
        with psycopg.connect(target.dsn, autocommit=True) as connection:
            last = 0
            while True:
                ending = stop.is_set()
                for seq, log_seq in connection.execute(
                    f"SELECT seq, log_seq FROM {EVENTS} WHERE seq > %s ORDER BY seq", [last]
                ):
                    last = seq
                    seen.append(log_seq)
                if ending:
                    return

    def write() -> None:
        for upto, batch in batches:
            landed(target, table, upto, batch)

    threads = [threading.Thread(target=read), *(threading.Thread(target=write) for _ in range(3))]
    for thread in threads:
        thread.start()
    for thread in threads[1:]:
        thread.join()
    stop.set()
    threads[0].join()
    assert seen == list(range(1, 202))


def test_the_database_that_is_captured_is_no_destination(target: PostgresTarget, asked: Callable[..., Any]) -> None:
    here = asked("SELECT system_identifier, current_database() FROM pg_control_system()")
    with pytest.raises(LakeError, match="captures"):
        begin(target, [], here)


def test_what_a_newer_version_made_is_refused(target: PostgresTarget, asked: Callable[..., Any]) -> None:
    asked("UPDATE millstream_lake.layout SET version = 99")
    with pytest.raises(LakeError, match="99"):
        begin(target, [])


def test_a_destination_knows_which_tables_were_quarantined(
    target: PostgresTarget, table: TableSchema, records: Records
) -> None:
    """A destination restored from an old backup lacks the records that have landed in them since."""
    now = datetime.now(UTC)
    done = landing(target, table, 1, records(table, ("c", 1, {"id": 1}))).commit
    assert done is not None
    commit_cut(target, Seq(5), [done], committed_at=now, held={TableId(9): Seq(2)})
    assert held_there(target) == {TableId(9): 2}
    commit_cut(target, Seq(5), [done], committed_at=now, held={})
    assert held_there(target) == {}
    commit_cut(target, Seq(6), [], committed_at=now, held={TableId(3): Seq(5)})
    assert held_there(target) == {TableId(3): 5}


def test_a_cut_is_the_last_one(target: PostgresTarget, table: TableSchema, records: Records) -> None:
    now = datetime.now(UTC)
    assert last_cut(target) is None
    done = landing(target, table, 1, records(table, ("c", 1, {"id": 1}))).commit
    assert done is not None
    assert commit_cut(target, Seq(1), [done], committed_at=now).number == 1
    assert commit_cut(target, Seq(5), [], committed_at=now).number == 2
    assert commit_cut(target, Seq(3), [], committed_at=now).n == 5
    found = last_cut(target)
    assert found is not None
    assert (found.n, [t.name for t in found.tables.values()]) == (5, ['sales."Orders"'])


@pytest.mark.sampled
@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "bag"])
@pytest.mark.parametrize("seed", range(4))
def test_rows_go_with_their_partition(
    target: PostgresTarget, table: TableSchema, asked: Callable[..., Any], seed: int, keyed: bool
) -> None:
    columns = tuple(column for column in COLUMNS if column.name in {"body", "a", "big", "f"})
    schema = replace(table, columns=columns, key=("a",), identity=("a",), partitioned=True)
    if not keyed:
        schema = replace(schema, key=(), identity=schema_names(schema), replica_identity=ReplicaIdentity.FULL)
    source, chance, reached = Partitioned(schema), random.Random(seed), 0
    while reached < 150:
        for _ in range(chance.choice([1, 3, 10, 40])):
            source.step(chance.randrange(10), chance.randrange(6), chance.randrange(10_000), chance.randrange(8))
        upto = len(source.records)
        if upto > reached:
            landed(target, schema, int(str(source.records[-1]["__seq"])), source.batch(max(0, reached - 3), upto))
            reached = upto
        there = asked(f"SELECT a::text, big, body, f::text, __partition_oid FROM {ROWS}") if reached else []
        was = [(*(row[name] for name in ("a", "big", "body", "f")), source.leaf[id(row)]) for row in source.rows]
        assert sorted(there, key=str) == sorted(was, key=str), f"seed {seed}, after {reached}"
    oids = [oid for (oid,) in asked(f"SELECT partition_oid FROM {EVENTS} ORDER BY seq")]
    assert oids == [record["__partition_oid"] for record in source.records]
    told = asked(f"SELECT record_pk, row, before FROM {EVENTS} WHERE op = 'x' ORDER BY seq LIMIT 1")
    first = next(record for record in source.records if record["__op"] == "x")
    assert told == [(None, dict(first["__before"]) | {"oid": first["__partition_oid"]}, None)]


@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "bag"])
def test_a_table_from_before_its_partitions_were_known_goes_on(
    target: PostgresTarget, table: TableSchema, records: Records, asked: Callable[..., Any], keyed: bool
) -> None:
    if not keyed:
        table = replace(table, key=(), identity=schema_names(table), replica_identity=ReplicaIdentity.FULL)
    now = replace(table, version=SchemaVersion(2), partitioned=True)
    landed(target, table, 3, records(table, *(("c", n, {"id": n, "note": "old"}) for n in (1, 2, 3))))
    known = (
        ("d", 4, {"id": 2, "note": "old", "__partition_oid": 70}),
        ("c", 5, {"id": 2, "note": "new", "__partition_oid": 70}),
        ("d", 6, {"id": 3, "note": "old", "__partition_oid": 70}),
        ("c", 7, {"id": 5, "note": "new", "__partition_oid": 71}),
    )
    landed(target, now, 7, records(now, *known))
    assert sorted(asked(f"SELECT id, __partition_oid FROM {ROWS}")) == [(1, None), (2, 70), (5, 71)]
    landed(target, now, 8, records(now, ("x", 8, {"__partition_oid": 70, "__before": [("partition", "sales.o1")]})))
    assert sorted(asked(f"SELECT id, __partition_oid FROM {ROWS}")) == [(1, None), (5, 71)]
    landed(target, now, 9, records(now, ("d", 9, {"id": 5, "note": "new"})))
    assert asked(f"SELECT id FROM {ROWS}") == [(1,)]
