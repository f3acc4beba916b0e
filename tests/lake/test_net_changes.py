"""The changes of a row between two positions as one line: a reader that applies them range by range has the table."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from millstream.errors import UsageError
from millstream.export.net_changes import latest_rows
from millstream.model.ids import SchemaVersion
from millstream.model.schema import Column, PgType, TableSchema

Records = Callable[..., pa.RecordBatch]


def told(schema: TableSchema, *batches: pa.RecordBatch) -> list[dict[str, Any]]:
    return latest_rows(schema, batches).rows.to_pylist()


def test_several_touches_are_one_and_a_delete_wins_over_what_came_before_and_loses_to_what_came_after(
    orders: TableSchema, records: Records
) -> None:
    batch = records(
        orders,
        ("c", 1, {"id": 1, "note": "a"}), ("u", 2, {"id": 1, "note": "b"}),
        ("u", 3, {"id": 2, "note": "c"}), ("d", 4, {"id": 2}),
        ("d", 5, {"id": 3}), ("c", 6, {"id": 3, "note": "d"}),
        ("c", 7, {"id": 4}), ("d", 8, {"id": 4}), ("c", 9, {"id": 4, "note": "e"}), ("d", 10, {"id": 4}),
    )  # fmt: skip
    found = {row["id"]: (row["__op"], row["note"]) for row in told(orders, batch)}
    assert found == {1: ("u", "b"), 2: ("d", None), 3: ("u", "d"), 4: ("d", None)}
    assert len(told(orders, batch)) == 4


def test_what_no_record_tells_stays_named_and_where_the_row_was_is_told(orders: TableSchema, records: Records) -> None:
    batch = records(
        orders,
        ("u", 1, {"id": 1, "total": None, "__unchanged": ["note"]}),
        ("u", 2, {"id": 2, "__unchanged": ["note", "total"], "__before": [("id", "7")]}),
        ("u", 3, {"id": 3, "note": "known"}),
        ("u", 4, {"id": 4, "__unchanged": ["note"], "__before": [("id", "3")]}),
    )
    found = {row["id"]: row for row in told(orders, batch)}
    assert {key: row["__op"] for key, row in found.items()} == {1: "u", 2: "u", 3: "d", 4: "u", 7: "d"}
    assert (found[1]["__unchanged"], found[1]["__before"]) == (["note"], None)
    assert (found[2]["__unchanged"], found[2]["__before"]) == (["note", "total"], [("id", "7")])
    assert (found[4]["__unchanged"], found[4]["note"]) == (None, "known")


def test_a_truncate_is_told_and_what_was_before_it_isnt(orders: TableSchema, records: Records) -> None:
    found = latest_rows(orders, [records(orders, ("c", 1, {"id": 1}), ("t", 2, {}), ("c", 3, {"id": 2}))])
    assert (found.emptied, found.rows.column("id").to_pylist()) == (True, [2])


def test_rows_without_a_key_cannot_be_told_apart(orders: TableSchema, records: Records) -> None:
    bag = replace(orders, key=())
    with pytest.raises(UsageError, match="no key"):
        latest_rows(bag, [records(bag, ("c", 1, {"id": 1}))])


def test_records_of_several_versions_are_of_the_newest(
    orders: TableSchema, records: Records, evolved: Callable[..., TableSchema]
) -> None:
    newer = evolved(more=pa.int64(), note=None)
    found = told(
        newer, records(orders, ("c", 1, {"id": 1, "note": "x"})), records(newer, ("c", 2, {"id": 2, "more": 5}))
    )
    assert [(row["id"], row["more"]) for row in found] == [(1, None), (2, 5)]
    assert "note" not in found[0]


def test_renamed_columns_are_the_same_columns(orders: TableSchema, records: Records) -> None:
    """Names are swapped, and the key has another name."""
    names = [("id", "note"), ("total", "total"), ("note", "id")]
    old = replace(orders, columns=tuple(replace(c, number=at) for at, c in enumerate(orders.columns, 1)))
    columns = tuple(replace(column, name=dict(names)[column.name]) for column in old.columns)
    new = replace(old, version=SchemaVersion(2), columns=columns, key=("note",), identity=("note",))
    found = latest_rows(
        new,
        [
            records(old, ("c", 1, {"id": 1, "note": "x"}), ("c", 2, {"id": 2, "note": "y"})),
            records(new, ("u", 3, {"note": 1, "total": None, "__unchanged": ["id"]}), ("d", 4, {"note": 2})),
        ],
    )
    assert not found.emptied
    assert {row["note"]: (row["__op"], row["id"]) for row in found.rows.to_pylist()} == {1: ("u", "x"), 2: ("d", None)}


def test_rows_from_before_a_column_with_a_default_have_it_unless_a_record_says_otherwise(
    orders: TableSchema, records: Records
) -> None:
    old = replace(orders, columns=tuple(replace(c, number=at) for at, c in enumerate(orders.columns, 1)))
    added = (
        Column("grade", pa.int32(), INT4, number=9, filled="5"),
        Column("at", pa.date32(), number=10, filled="infinity"),
    )
    new = replace(old, version=SchemaVersion(2), columns=(*old.columns, *added))
    found = latest_rows(
        new,
        [
            records(old, ("c", 1, {"id": 1, "note": "x"}), ("c", 2, {"id": 2}), ("c", 3, {"id": 3})),
            records(new, ("u", 4, {"id": 2, "grade": None}), ("c", 5, {"id": 4, "grade": 7}), ("d", 6, {"id": 3})),
        ],
    )
    rows = {row["id"]: (row["__op"], row["grade"], row["at"], row["__exact"]) for row in found.rows.to_pylist()}
    assert rows == {
        1: ("u", 5, None, [("at", "infinity")]),
        2: ("u", None, None, None),
        3: ("d", None, None, None),
        4: ("u", 7, None, None),
    }


def test_another_key_begins_the_copy_anew(orders: TableSchema, records: Records) -> None:
    newer = replace(orders, version=SchemaVersion(2), key=("note",), identity=("note",))
    found = latest_rows(newer, [records(orders, ("c", 1, {"id": 1})), records(newer, ("c", 2, {"id": 2, "note": "x"}))])
    assert (found.emptied, found.rows.column("id").to_pylist()) == (True, [2])


INT4, INT8, TEXT = PgType(23, -1, "integer"), PgType(20, -1, "bigint"), PgType(25, -1, "text")


def test_a_column_that_gets_another_type_begins_the_copy_anew(orders: TableSchema, records: Records) -> None:
    """As a name does that another column had in records without the columns' numbers."""
    columns = (Column("id", pa.int64(), INT8), Column("a", pa.int32(), INT4), Column("b", pa.string(), TEXT))
    old = replace(orders, columns=columns)
    columns = (Column("id", pa.int64(), INT8, number=1), Column("b", pa.int32(), INT4, number=4))
    new = replace(orders, version=SchemaVersion(2), columns=columns)
    batches = [records(old, ("c", 1, {"id": 1, "a": 5, "b": "text"})), records(new, ("c", 2, {"id": 2, "b": 6}))]
    found = latest_rows(new, batches)
    assert (found.emptied, found.rows.select(["id", "b"]).to_pylist()) == (True, [{"id": 2, "b": 6}])


def test_a_column_whose_type_gets_wider_keeps_its_values(orders: TableSchema, records: Records) -> None:
    old = replace(orders, columns=(Column("id", pa.int64(), INT8), Column("a", pa.int32(), INT4)))
    columns = (Column("id", pa.int64(), INT8), Column("a", pa.int64(), INT8))
    new = replace(orders, version=SchemaVersion(2), columns=columns)
    found = latest_rows(new, [records(old, ("c", 1, {"id": 1, "a": 5})), records(new, ("c", 2, {"id": 2, "a": 6}))])
    assert (found.emptied, found.rows.column("a").to_pylist()) == (False, [5, 6])


@pytest.mark.parametrize("seed", range(20))
def test_whoever_applies_it_stretch_by_stretch_has_the_table(orders: TableSchema, records: Records, seed: int) -> None:
    """Rows that move, leave columns out, go and come back; ranges of any length."""
    chance = random.Random(seed)
    schema = replace(orders, columns=(Column("id", pa.int64()), Column("a", pa.string()), Column("b", pa.string())))
    source: dict[int, dict[str, Any]] = {}
    copy: dict[int, dict[str, Any]] = {}
    for start in range(0, 300, 30):
        length = chance.randrange(1, 30)
        some = [change(source, chance, start + at + 1) for at in range(length)]
        latest = latest_rows(schema, [records(schema, *some)])
        apply(latest.rows.to_pylist(), copy, emptied=latest.emptied)
        assert copy == source, f"seed {seed}, from {start}: {some}"


@pytest.mark.parametrize("seed", range(20))
def test_whoever_forgets_the_rows_of_partitions_that_left_has_the_table(
    orders: TableSchema, records: Records, seed: int
) -> None:
    """Rows also move between partitions, each of which may leave and come back."""
    chance = random.Random(seed)
    columns = (Column("id", pa.int64()), Column("a", pa.string()), Column("b", pa.string()))
    schema = replace(orders, columns=columns, partitioned=True)
    source: dict[int, dict[str, Any]] = {}
    leaves: dict[int, int] = {}
    copy: dict[int, dict[str, Any]] = {}
    copied: dict[int, int | None] = {}
    seq = 0
    for _ in range(15):
        some: list[tuple[str, int, dict[str, Any]]] = []
        for _ in range(chance.randrange(1, 20)):
            seq += 1
            if not chance.randrange(6):
                leaf = chance.randrange(100, 103)
                gone = {key for key in source if leaves[key] == leaf}
                source = {key: row for key, row in source.items() if key not in gone}
                some.append(("x", seq, {"__partition_oid": leaf, "__before": [("partition", "public.p")]}))
                continue
            op, _, facts = change(source, chance, seq)
            old = int(dict(facts.get("__before") or {}).get("id", facts.get("id", 0)))
            leaf = chance.randrange(100, 103) if op == "c" else leaves.get(old, 0)
            leaves |= {facts["id"]: leaf} if op != "t" else {}
            some.append((op, seq, facts | ({"__partition_oid": leaf} if op != "t" else {})))
            if op == "d" and chance.randrange(2):
                seq += 1
                row = {"id": old, "a": f"a{seq}", "b": f"b{seq}"}
                source[old], leaves[old] = dict(row), chance.randrange(100, 103)
                some.append(("c", seq, row | {"__partition_oid": leaves[old]}))
        latest = latest_rows(schema, [records(schema, *some)])
        lines = latest.rows.to_pylist()
        kept = {key: row for key, row in copy.items() if copied.get(key) not in latest.left}
        before, copy = copy, {} if latest.emptied else kept
        apply(lines, copy, emptied=False, known=before)
        copied |= {line["id"]: line["__partition_oid"] for line in lines}
        assert copy == source, f"seed {seed}, up to {seq}: {some}"
        assert {key: copied[key] for key in copy} == {key: leaves[key] for key in source}


def change(source: dict[int, dict[str, Any]], chance: random.Random, seq: int) -> tuple[str, int, dict[str, Any]]:
    free = [key for key in range(8) if key not in source]
    what = chance.choices("cudkt", [5, 6, 3, 4, 0.3])[0]
    if what == "t":
        source.clear()
        return "t", seq, {}
    if (what == "c" and free) or not source:
        row = {"id": chance.choice(free), "a": f"a{seq}", "b": f"b{seq}"}
        source[row["id"]] = row
        return "c", seq, dict(row)
    key = chance.choice(list(source))
    if what == "d":
        del source[key]
        return "d", seq, {"id": key}
    old = source.pop(key)
    moves = what == "k" and free
    new = {"id": chance.choice(free) if moves else key, "a": f"a{seq}", "b": f"b{seq}"}
    unchanged = chance.choice([[], [], ["a"], ["a", "b"]])
    new |= {name: old[name] for name in unchanged}
    source[new["id"]] = new
    facts: dict[str, Any] = {name: None if name in unchanged else value for name, value in new.items()}
    facts |= {"__unchanged": unchanged or None}
    return "u", seq, facts | ({"__before": [("id", str(key))]} if moves else {})


def apply(
    lines: list[dict[str, Any]],
    copy: dict[int, dict[str, Any]],
    *,
    emptied: bool,
    known: dict[int, dict[str, Any]] | None = None,
) -> None:
    """Apply lines as the documentation describes: look up unchanged values first, in the rows that were known."""
    if emptied:
        copy.clear()
    known = copy if known is None else known
    rows = []
    for line in lines:
        if line["__op"] != "u":
            continue
        row = {name: value for name, value in line.items() if not name.startswith("__")}
        origin = int(dict(line["__before"])["id"]) if line["__before"] else line["id"]
        rows.append(row | {name: known[origin][name] for name in line["__unchanged"] or ()})
    for line in lines:
        copy.pop(line["id"], None)
    copy.update({row["id"]: row for row in rows})
