"""Merging of tables: whole columns give what one value at a time gives, and differing replicas converge."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.crdt.model_regions import Group, ModelLog, ModelTable
from tests.crdt.region_logs import COLUMNS, KEY, MERGE, Said, folded, plainly_merged, region_logs, region_rows, token_of

from millstream.crdt.columns import ranked, unions
from millstream.crdt.declared import ColumnMerge, MergeKind, TableMerge, union_of
from millstream.crdt.lattice import StateKind, opened, seal
from millstream.crdt.region_state import HeardEnd, MergePlan, ReconciliationEngine, RegionState
from millstream.crdt.row_merge import fold, lift, merged, state_schema
from millstream.crdt.signals import SUM_MAX
from millstream.errors import InvalidValue, MergeStateUnreadable, ReplicationError, UsageError
from millstream.model.ids import Epoch, GroupNumber, RegionId
from millstream.model.positions import Seq
from millstream.testing.errors import coded

ENGINE = ReconciliationEngine(KEY, MERGE, "public.posts")
LOGS = region_logs()
FEWER = settings(max_examples=settings().max_examples // 3)
"""Settings for tests over tables with ten columns."""


def same(one: pa.Table, other: pa.Table) -> bool:
    """Return whether two tables are the same to the bit, -0.0 and NaN included."""
    return ENGINE.encode(RegionState(one)) == ENGINE.encode(RegionState(other))


@FEWER
@given(LOGS)
def test_columns_merge_as_the_plain_kinds_do_value_by_value(logs: dict[int, list[Said]]) -> None:
    said = [one for log in logs.values() for one in log]
    found = merged(folded(said), KEY, MERGE)
    expected = plainly_merged(said)
    assert json.dumps(found.to_pylist(), default=repr) == json.dumps(expected, default=repr)


@FEWER
@given(LOGS, st.integers(0, 10**7))
def test_signals_are_read_as_of_a_moment_or_a_rows_newest_event(logs: dict[int, list[Said]], at_s: int) -> None:
    said = [one for log in logs.values() for one in log]
    found = merged(folded(said), KEY, MERGE, at_ns=at_s * 10**8)
    assert json.dumps(found.to_pylist(), default=repr) == json.dumps(plainly_merged(said, at_s * 10**8), default=repr)


@FEWER
@given(LOGS, st.data())
def test_any_order_duplication_and_batching_of_records_folds_to_the_same_rows(
    logs: dict[int, list[Said]], data: st.DataObject
) -> None:
    said = [one for log in logs.values() for one in log]
    whole = folded(said)
    # A batch follows on a state that has everything before it, and may have a part of the batch already.
    cuts = {region: sorted(data.draw(st.integers(0, len(log))) for _ in range(2)) for region, log in logs.items()}
    known = folded([one for region, log in logs.items() for one in log[: cuts[region][1]]])
    rest = [one for region, log in logs.items() for one in log[cuts[region][0] :]]
    delivered = data.draw(st.permutations(rest + data.draw(st.lists(st.sampled_from(said), max_size=3))))
    joined = fold(known, KEY, MERGE, records=region_rows(delivered))
    assert same(joined, whole)
    states = data.draw(st.permutations([whole, known, joined, whole]))
    assert same(fold(pa.concat_tables(states), KEY, MERGE), whole)


def heard(logs: dict[int, list[Said]], upto: dict[int, int]) -> RegionState:
    """Return the state of a site that has received the first records of each region, `upto` many."""
    said = [one for region, count in upto.items() for one in logs[region][:count]]
    vector = {RegionId(region): token_of(region, count) for region, count in upto.items()}
    return RegionState(folded(said), vector)


@FEWER
@given(LOGS, st.data())
def test_two_replicas_that_heard_different_things_hold_the_same_after_one_exchange(
    logs: dict[int, list[Said]], data: st.DataObject
) -> None:
    sides = [
        {r: data.draw(st.integers(0, len(log))) for r, log in logs.items() if data.draw(st.booleans())}
        for _ in range(2)
    ]
    local, remote = (heard(logs, upto) for upto in sides)
    plan = ENGINE.plan(local, remote)
    turned = ENGINE.plan(remote, local).turned()
    assert same(plan.to_local.rows, turned.to_local.rows)
    assert same(plan.to_remote.rows, turned.to_remote.rows)
    here, there = ENGINE.apply(local, plan.to_local), ENGINE.apply(remote, plan.to_remote)
    together = heard(logs, {r: max(side.get(r, 0) for side in sides) for r in sides[0].keys() | sides[1].keys()})
    for state in (here, there, ENGINE.apply(here, plan.to_local), ENGINE.apply(here, plan.to_remote)):
        assert same(state.rows, together.rows)
        assert state.vector == together.vector
    assert ENGINE.plan(here, there).is_empty
    # Only missing rows go: none that the other side's vector has.
    for missing, other in ((plan.to_local, sides[0]), (plan.to_remote, sides[1])):
        rows = missing.rows.to_pylist()
        assert all(row["__seq"] > other.get(row["__region"], 0) for row in rows)


@FEWER
@given(LOGS, st.data())
def test_a_log_that_is_read_again_after_retention_counts_no_event_twice(
    logs: dict[int, list[Said]], data: st.DataObject
) -> None:
    region, log = data.draw(st.sampled_from(sorted(logs.items())))
    upto, dropped = (data.draw(st.integers(1, len(log))) for _ in range(2))
    groups = [Group(GroupNumber(n), Epoch(1), one.wall_ns, (one,), one.seq) for n, one in enumerate(log, 1)]
    # Without the group at which it ended, a kept state may be of another log: the log is read from its beginning.
    kept = ENGINE.encode(heard({region: log}, {region: upto}))
    logs_here = {region: ModelLog(region, groups, min(upto, dropped))}
    table = ModelTable(logs_here, region, kept, lambda: None, ENGINE)
    assert same(table.merged_state().rows, folded(log))


NUMBERS = st.lists(st.integers(-3, 3) | st.integers(-(2**63), 2**63 - 1), max_size=8)


@given(NUMBERS, st.sampled_from([pa.int64(), pa.uint64(), pa.int8()]))
def test_numbers_are_ranked_as_they_compare_however_far_apart_they_lie(numbers: list[int], of: pa.DataType) -> None:
    width = 2 ** (8 if of == pa.int8() else 64)
    low = 0 if of == pa.uint64() else -width // 2
    numbers = [(number - low) % width + low for number in numbers]
    places, values = ranked(pa.array(numbers, of))
    distinct = sorted(set(numbers))
    assert (places.tolist(), values.to_pylist()) == ([distinct.index(number) for number in numbers], distinct)


IDS = st.none() | st.integers(-9, 9)
KEYS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "numbers": (pa.int64(), IDS),
    "texts": (pa.string(), st.none() | st.text("aé", max_size=2)),
    "floats": (pa.float64(), IDS.map(lambda number: number and number / 2) | st.sampled_from([float("nan"), -0.0])),
}


@FEWER
@given(st.sampled_from(sorted(KEYS)), st.integers(1, 5), st.data())
def test_joined_in_ranges_of_keys_states_are_the_same_as_joined_at_once(
    of: str, range_rows: int, data: st.DataObject
) -> None:
    column, drawn = KEYS[of]
    columns, merge = (
        pa.schema([("id", column), ("tags", pa.list_(pa.string()))]),
        TableMerge.parse({"tags": "union_set"}),
    )
    tags = st.none() | st.lists(st.sampled_from("xyz"), max_size=2)
    states = []
    for region in (1, 2):
        rows = data.draw(st.lists(st.fixed_dictionaries({"id": drawn, "tags": tags}), max_size=12))
        records = pa.Table.from_pylist(
            [{"__op": "c", "__seq": seq, **row} for seq, row in enumerate(rows, 1)],
            pa.schema([("__op", pa.string()), ("__seq", pa.int64()), *columns]),
        )
        times = pa.array(range(len(rows)), pa.int64())
        lifted = lift(records, times, RegionId(region), columns, merge)
        states.append(
            RegionState(
                fold(lifted.slice(0, 0), ("id",), merge, records=lifted),
                {RegionId(region): token_of(region, len(rows))},
            )
        )
    whole, parted = (ReconciliationEngine(("id",), merge, range_rows=many) for many in (1 << 20, range_rows))
    local, remote = states
    lacking = whole.missing(remote, local.vector)
    found = [one.apply(local, lacking) for one in (whole, parted)]
    assert same(*(one.rows for one in found))
    assert same(parted.apply(found[1], lacking).rows, found[0].rows)
    assert parted.keys_in(found[1]) == whole.value(found[0]).num_rows


def test_sets_of_many_rows_are_those_of_each_row() -> None:
    count = 69_999
    codes = np.arange(count)[::-1] // 3
    lists = pa.array([[str(number % 7), "x"] if number % 5 else None for number in range(count)])
    found = unions(lists, codes, count // 3)
    expected = [set[str]() for _ in range(count // 3)]
    for code, items in zip(codes.tolist(), lists.to_pylist(), strict=True):
        expected[code].update(items or ())
    assert found.to_pylist() == [sorted(items) or None for items in expected]


def posts(region: int, *rows: dict[str, Any], at: int = 1) -> RegionState:
    said = [
        Said(region, seq, (at + seq) * 10**9, dict.fromkeys(COLUMNS.names) | row) for seq, row in enumerate(rows, 1)
    ]
    return RegionState(folded(said), {RegionId(region): token_of(region, len(said))} if said else {})


def test_a_dry_run_tells_people_what_changes_and_who_knows_a_row() -> None:
    local = posts(
        1, {"id": 1, "part": "a", "likes": 3, "title": "old", "tags": ["x"]}, {"id": 2, "part": "a", "views": 1}
    )
    remote = posts(2, {"id": 1, "part": "a", "likes": 2, "title": "new", "hidden": True}, at=9)
    found = ENGINE.dry_run(local, remote).to_pylist()
    lines = {(line["key"], line["column"]): tuple(line.values())[2:] for line in found}
    assert lines["id=1, part=a", "likes"] == ("3", "2", "5", "both")
    assert lines["id=1, part=a", "title"] == ("old", "new", "new", "both")
    assert lines["id=1, part=a", "tags"] == ("['x']", None, "['x']", "both")
    assert lines["id=1, part=a", "hidden"] == ("False", "True", "True", "both")
    assert lines["id=2, part=a", "views"] == ("1", None, "1", "local")
    assert ("id=1, part=a", "ratio") not in lines
    assert ("id=2, part=a", "title") not in lines, "nobody has said anything of it"
    bare = ENGINE.dry_run(posts(1), posts(2, {"id": 3, "part": "b"})).to_pylist()
    assert {(line["key"], line["known_to"]) for line in bare} == {("id=3, part=b", "remote")}
    assert ENGINE.dry_run(local, remote, rows_max=2).num_rows == 2
    assert ENGINE.dry_run(local, local).num_rows == 0
    assert ENGINE.dry_run(posts(1), posts(2)).num_rows == 0


def test_across_regions_the_later_wins_whatever_its_number_and_at_one_moment_whoever_hides() -> None:
    def said(region: int, seq: int, wall_ns: int, **row: Any) -> Said:
        return Said(region, seq, wall_ns, dict.fromkeys(COLUMNS.names) | {"id": 1, "part": ""} | row)

    def seen(*records: Said) -> dict[str, Any]:
        (row,) = merged(folded(list(records)), KEY, MERGE).to_pylist()
        return dict(row)

    assert seen(said(1, 9, 5, title="early"), said(2, 1, 6, title="late"))["title"] == "late"
    assert seen(said(1, 9, 5, title="one"), said(2, 9, 5, title="two"))["title"] == "two"
    assert seen(said(1, 9, 5, hidden=True), said(2, 9, 5, hidden=False))["hidden"]
    assert not seen(said(1, 9, 5, hidden=True), said(2, 10, 5, hidden=False))["hidden"]
    assert seen(said(1, 9, 6, hidden=True), said(2, 10, 5, hidden=False))["hidden"]


def test_a_state_comes_back_from_its_bytes_and_damaged_ones_or_those_of_other_rules_do_not() -> None:
    state = posts(1, {"id": 1, "part": "a", "likes": 3, "tags": ["x"]})
    data = ENGINE.encode(state)
    again = ENGINE.decode(data)
    assert again is not None
    assert again.vector == state.vector
    assert same(again.rows, state.rows)
    for at in range(0, len(data), 97):
        with pytest.raises(MergeStateUnreadable):
            ENGINE.decode(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    assert ReconciliationEngine(KEY, TableMerge(), "t").decode(data) is None


def test_a_state_of_before_ends_were_noted_is_read_and_ends_that_make_no_sense_are_not() -> None:
    state = posts(1, {"id": 1, "part": "a", "likes": 3})
    end = HeardEnd(Seq(1), GroupNumber(1), Epoch(2), 7)
    data = ENGINE.encode(RegionState(state.rows, state.vector, {RegionId(1): end}))
    again = ENGINE.decode(data)
    assert again is not None
    assert again.ends == {RegionId(1): end}
    body = bytes(opened(StateKind.TABLE, data))
    size = int.from_bytes(body[:4], "big")
    head, rows = json.loads(body[4 : 4 + size]), body[4 + size :]

    def with_ends(**ends: Any) -> bytes:
        text = json.dumps({name: value for name, value in head.items() if name != "ends"} | ends).encode()
        return seal(StateKind.TABLE, len(text).to_bytes(4, "big") + text + rows)

    older = ENGINE.decode(with_ends())
    assert older is not None
    assert (older.ends, older.vector) == ({}, state.vector)
    for wrong in ([], {"1": [1, 2]}, {"1": [1, 2, 3, float("inf")]}, {"x": [1, 2, 3, 4]}, {"1": None}):
        with pytest.raises(MergeStateUnreadable):
            ENGINE.decode(with_ends(ends=wrong))


def test_a_region_whose_log_was_made_anew_is_told_from_the_one_before() -> None:
    state = posts(1, {"id": 1, "part": "a"})
    other = RegionState(state.rows, {RegionId(1): token_of(7, 3)})
    with pytest.raises(ReplicationError, check=coded("other_stream"), match="region 1"):
        ENGINE.plan(state, other)


def test_sums_beyond_their_type_are_refused_and_those_near_its_end_are_not() -> None:
    near = 2**63 - 1
    for values, fits in (((near, -near), True), ((near, 0), True), ((near, 1), False)):
        rows = pa.concat_tables([posts(r, {"id": 1, "part": "", "likes": v}).rows for r, v in enumerate(values, 1)])
        if fits:
            assert merged(fold(rows, KEY, MERGE), KEY, MERGE).column("likes").to_pylist() == [sum(values)]
        else:
            with pytest.raises(InvalidValue, match="64 bits"):
                merged(fold(rows, KEY, MERGE), KEY, MERGE)


def test_a_signal_is_read_as_of_any_moment_and_its_sum_stays_within_doubles() -> None:
    event = {"id": 1, "part": "", "heat": 1.7e308, "happened": 10**6}
    none = {"id": 2, "part": ""}
    rows = fold(pa.concat_tables([posts(1, event, none).rows, posts(2, event).rows]), KEY, MERGE)
    for at_ns, heat, events in ((-(2**64), SUM_MAX, 2), (None, SUM_MAX, 2), (2**63 - 1, 0.0, 0), (2**64, 0.0, 0)):
        found = merged(rows, KEY, MERGE, at_ns=at_ns)
        assert found.column("heat").to_pylist() == [heat, None]
        assert found.column("heat__1h").to_pylist() == [events, 0]


def test_regions_with_other_columns_and_types_meet_in_those_that_hold_both() -> None:
    narrow = pa.schema([("id", pa.int64()), ("n", pa.int32()), ("d", pa.decimal128(5, 2))])
    wide = pa.schema([("id", pa.int64()), ("n", pa.int64()), ("d", pa.decimal128(6, 1)), ("hide", pa.bool_())])
    merge = TableMerge.parse({"n": "pn_counter", "hide": "hide"})
    both = union_of("t", [narrow, wide])
    assert both.types == [pa.int64(), pa.int64(), pa.decimal128(7, 2), pa.bool_()]
    engine = ReconciliationEngine(("id",), merge)
    states = []
    for region, columns in ((1, narrow), (2, wide)):
        records = pa.table({"__op": ["c"], "__seq": [1], "id": [5], "n": pa.array([region], columns.field("n").type)})
        rows = lift(records, pa.array([region]), RegionId(region), columns, merge)
        states.append(
            RegionState(fold(rows.slice(0, 0), ("id",), merge, records=rows), {RegionId(region): token_of(region, 1)})
        )
    plan: MergePlan = engine.plan(*states)
    assert engine.value(engine.apply(states[0], plan.to_local)).column("n").to_pylist() == [3]
    assert engine.dry_run(*states).num_rows == 1
    with pytest.raises(
        ReplicationError, check=coded("merge_unsuitable"), match=r"t\.n is int32 in one region and string in another"
    ):
        union_of("t", [narrow, pa.schema([("n", pa.string())])])


def test_what_can_not_merge_is_refused_by_name() -> None:
    columns = pa.schema(
        [("id", pa.int64()), ("at", pa.float64()), ("name", pa.string()), ("tags", pa.list_(pa.string()))]
    )
    for words, key, said in (
        ({}, (), "has no key"),
        ({}, ("at",), r"t\.at is of the key, and double"),
        ({"id": "lww"}, ("id",), r"t\.id is of the key"),
        ({"name": "pn_counter"}, ("id",), r"t\.name is string, which can't merge by pn_counter"),
        ({"at": "g_counter"}, ("id",), "double, which can't merge by g_counter"),
        ({"name": "union_set"}, ("id",), "can't merge by union_set"),
        ({"tags": "hide"}, ("id",), "can't merge by hide"),
        ({"gone": "lww"}, ("id",), r"t\.gone isn't there; t has id, at"),
    ):
        with pytest.raises(ReplicationError, check=coded("merge_unsuitable"), match=said):
            TableMerge.parse(words).check("t", columns, key)
    TableMerge.parse({"gone": "hide", "tags": "or_set", "at": "signal(7d)"}).check("t", columns, ("id",), whole=False)
    for word in ("sum", "signal", "signal(0s)", "signal(999999999d)", "hide "):
        with pytest.raises(UsageError, match="no column merges by"):
            ColumnMerge.parse(word)
    assert ColumnMerge.parse("signal(90m)") == ColumnMerge(MergeKind.SIGNAL, 5400 * 10**9)


def test_records_that_take_rows_away_are_no_merging_tables() -> None:
    records = pa.table({"__op": ["c", "d"], "__seq": [1, 2], "id": [5, 5]})
    with pytest.raises(ReplicationError, check=coded("merge_unsuitable"), match="take rows away"):
        lift(records, pa.array([1, 2]), RegionId(1), pa.schema([("id", pa.int64())]), TableMerge())
    empty = state_schema(COLUMNS, MERGE).empty_table()
    assert merged(fold(empty, KEY, MERGE), KEY, MERGE).num_rows == 0
