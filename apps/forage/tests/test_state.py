"""The fold of a long stretch at once, and record by record, gives the same state; a plain program agrees with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from millstream_forage import columns
from millstream_forage.folded_state import State
from millstream_forage.tables import HIDES, IMPRESSIONS, ITEMS, KINDS, SCHEMAS, SIGNALS

ITEM_COUNT = 6
POSITIONS = {"keys", "impressions.dwells"}
SIGNAL = st.fixed_dictionaries(
    {
        "table": st.just("signals"),
        "user": st.integers(1, 3),
        "kind": st.sampled_from(KINDS),
        "item": st.integers(1, ITEM_COUNT),
        "impression": st.none() | st.integers(1, 8),
        "duration_ms": st.integers(0, 4),
        "idempotency_key": st.none() | st.sampled_from(["a", "b"]),
    }
)
HIDE = st.fixed_dictionaries(
    {
        "table": st.just("hides"),
        "user": st.integers(1, 3),
        "target": st.sampled_from(["item", "source"]),
        "value": st.sampled_from(["1", "2"]),
        "hidden": st.booleans(),
    }
)
IMPRESSION = st.fixed_dictionaries(
    {"table": st.just("impressions"), "user": st.integers(1, 3), "item": st.integers(1, ITEM_COUNT)}
)
HISTORY = st.lists(SIGNAL | HIDE | IMPRESSION, max_size=40)
GROWING_DWELLS: list[dict[str, Any]] = [
    {"table": "impressions", "user": 1, "item": 1},
    *(
        {
            "table": "signals",
            "user": 1,
            "kind": "dwell",
            "item": 1,
            "impression": 1,
            "duration_ms": duration_ms,
            "idempotency_key": None,
        }
        for duration_ms in (1, 3, 2, 4)
    ),
]
"""Once the first of them stayed counted next to the longest if one batch had both: drawn histories hardly have that."""


def item(number: int) -> dict[str, Any]:
    return {
        "id": number,
        "url": f"https://forage.example/{number}",
        "title": f"Item {number}",
        "creator": f"creator {number % 2}",
        "category": "odd" if number % 2 else "even",
        "source": f"source {number % 3}",
        "tags": ["a", "b"],
        "entities": [],
        "embedding": [float(number == dimension) for dimension in range(64)],
        "added": 0,
    }


def records_of(history: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return whole records: each signal of an impression that is there, and of its item and user."""
    records = [("items", item(number) | {"__seq": number}) for number in range(1, ITEM_COUNT + 1)]
    shown: list[dict[str, Any]] = []
    signals = 0
    for seq, event in enumerate(history, ITEM_COUNT + 1):
        row = {name: value for name, value in event.items() if name != "table"} | {"__seq": seq, "now": seq}
        if event["table"] == "impressions":
            row |= {
                "id": len(shown) + 1,
                "feed": seq,
                "explore": False,
                "propensity": 0.5,
                "seed": 1,
                "limit": 7,
                "policy": "p",
                "token": f"abc.s{seq}",
            }
            shown.append(row)
        elif event["table"] == "signals":
            signals += 1
            if event["impression"] is not None and event["impression"] > len(shown):
                row["impression"] = None
            if row["impression"] is not None:
                on = shown[row["impression"] - 1]
                row |= {"user": on["user"], "item": on["item"]}
            if event["kind"] != "dwell":
                row["duration_ms"] = None
            row |= {"id": signals, "weight": 0.3 if event["kind"] == "view" else (row["duration_ms"] or 0) / 4}
        records.append((event["table"], row))
    return records


def batch_of(table: str, rows: Sequence[dict[str, Any]]) -> pa.RecordBatch:
    schema = SCHEMAS[table].append(pa.field("__seq", pa.int64()))
    return pa.RecordBatch.from_pylist(list(rows), schema=schema)


def folded_at_once(records: Sequence[tuple[str, dict[str, Any]]]) -> State:
    state = State()
    for table in SCHEMAS:
        state.apply(table, batch_of(table, [row for name, row in records if name == table]))
    return state


def folded_one_by_one(records: Sequence[tuple[str, dict[str, Any]]]) -> State:
    state = State()
    for table, row in records:
        state.apply(table, batch_of(table, [row]))
    return state


def facts(state: State) -> dict[str, Any]:
    """Return everything that a state holds, as plain values."""
    found: dict[str, Any] = {"hides": {user: hidden.by_target for user, hidden in state.hides.by_user.items()}}
    for name in ("items", "impressions", "signals"):
        part = getattr(state, name)
        for column, value in vars(part).items():
            if isinstance(value, columns.Column):
                found[f"{name}.{column}"] = value.values.tolist()
    found["arms"] = state.items.arm_names
    found["keys"] = state.signals.by_key
    return found


@example(GROWING_DWELLS)
@given(HISTORY)
def test_a_history_folds_to_the_same_state_at_once_and_record_by_record(history: list[dict[str, Any]]):
    records = records_of(history)
    assert facts(folded_at_once(records)) == facts(folded_one_by_one(records))


@example(GROWING_DWELLS)
@given(HISTORY)
def test_an_impression_counts_one_signal_of_a_kind_and_its_longest_dwell_and_a_key_one_alike(
    history: list[dict[str, Any]],
):
    records = records_of(history)
    state = folded_at_once(records)
    signals = [row for table, row in records if table == "signals"]
    counting = set()
    best: dict[int, float] = {}
    by_pair: dict[tuple[int, str], dict[str, Any]] = {}
    sent: set[tuple[Any, ...]] = set()
    for row in signals:
        if row["impression"] is None:
            said = tuple(row[name] for name in ("user", "idempotency_key", "item", "kind", "duration_ms"))
            if row["idempotency_key"] is None or said not in sent:
                counting.add(row["id"])
            sent.add(said)
            continue
        pair = (row["impression"], row["kind"])
        first = by_pair.get(pair)
        if first is None or (row["kind"] == "dwell" and row["duration_ms"] > first["duration_ms"]):
            by_pair[pair] = row
        best[row["impression"]] = max(best.get(row["impression"], 0), row["weight"])
    counting |= {row["id"] for row in by_pair.values()}
    assert {row["id"] for row, counts in zip(signals, state.signals.counts.values, strict=True) if counts} == counting
    assert state.items.signals.values.sum() == len(counting)
    rewards = state.impressions.rewards.values
    assert {int(row) + 1: rewards[row] for row in np.flatnonzero(state.impressions.kinds.values)} == best


@given(HISTORY)
def test_a_signal_or_impression_that_comes_before_what_it_names_waits_for_it(history: list[dict[str, Any]]):
    records = records_of(history)
    late = State()
    for table in ("signals", "impressions", "hides", "items"):
        late.apply(table, batch_of(table, [row for name, row in records if name == table]))
    expected = facts(folded_at_once(records))
    order = np.argsort(late.signals.ids.values)
    found = facts(late) | {
        name: np.array(column)[order].tolist() for name, column in facts(late).items() if name.startswith("signals.")
    }
    # Rows stand in the order in which they could be taken; everything else is the same.
    assert not {name for name in expected if name not in POSITIONS and found[name] != expected[name]}


def test_records_that_wait_are_looked_at_together(monkeypatch: pytest.MonkeyPatch):
    """Each cost every later answer 80 µs, so some thousands of signals of unknown items made feeds slow."""
    signals = [{"table": "signals", "user": 1, "kind": "save", "item": 1, "impression": None, "duration_ms": 0,
                "idempotency_key": None}] * 300  # fmt: skip
    shown = {"table": "impressions", "user": 1, "item": 1}
    state, looks = State(), []
    for table, row in records_of(signals):
        state.apply(table, batch_of(table, [row | ({"item": 99} if table == "signals" else {})]))
    taken = State._apply_ready
    monkeypatch.setattr(State, "_apply_ready", lambda state, *of: looks.append(of) or taken(state, *of))
    for table, row in records_of([shown, shown])[ITEM_COUNT:]:
        state.apply(table, batch_of(table, [row]))
    assert len(looks) == 4
    state.apply("items", batch_of("items", [item(99) | {"__seq": 999}]))
    assert len(state.signals) == 300


@given(HISTORY)
def test_a_record_that_comes_again_changes_nothing(history: list[dict[str, Any]]):
    records = [record for record in records_of(history) if record[0] != "hides"]
    assert facts(folded_one_by_one([*records, *records])) == facts(folded_at_once(records))


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 20))
def test_an_index_finds_the_rows_of_each_value_however_they_came(values: list[int], step: int):
    column = columns.Column(np.int64)
    index = columns.Index(column)
    for begin in range(0, len(values), step):
        column.extend(values[begin : begin + step])
        if begin % 2:
            index.rows(0)
        if begin % 3 == 2:
            sort_now(index)
    for value in range(11):
        expected = [row for row, other in enumerate(values) if other == value]
        assert index.rows(value).tolist() == expected
        assert index.first(value) == (expected[0] if expected else None)
    wanted = np.arange(11)
    assert index.first_rows(wanted).tolist() == [values.index(value) if value in values else -1 for value in range(11)]


@given(st.lists(st.lists(st.integers(1, 1 << 42), unique=True), max_size=5), st.integers(0, 1 << 42), st.integers(1, 9))
def test_ids_are_paged_in_order_however_regions_took_turns(parts: list[list[int]], key: int, count: int):
    ids = columns.Ids()
    for part in parts:
        ids.extend(sorted(part) if len(part) % 2 else part)
    expected = sorted(value for part in parts for value in part if value > key)[:count]
    assert ids.values[ids.after(key, count)].tolist() == expected
    for region in range(4):
        last = region << 40
        for value in sorted(value for part in parts for value in part if value >> 40 == region):
            last = value if value - last <= 1 << 32 else last
        assert ids.next_of(region) == last + 1


def test_an_id_far_above_all_others_leaves_the_region_its_ids() -> None:
    """After the last id of a region came the first of another, which gave it again."""
    ids = columns.Ids()
    ids.extend([1, 2, (1 << 40) - 1, (5 << 40) + 1])
    assert (ids.next_of(0), ids.next_of(5)) == (3, (5 << 40) + 2)
    ids.extend([3, (1 << 40) - 2])
    assert ids.next_of(0) == 4
    assert ids.next_of(1) == (1 << 40) + 1


def sort_now(index: columns.Index) -> None:
    """Sort all rows in, as an index does for a long stretch."""
    index._order = np.argsort(index._column.values, kind="stable")
    index._keys = index._column.values[index._order]
    index._recent.clear()
    index._indexed = len(index._column)


def test_kept_records_are_read_by_row_after_many_small_batches():
    kept = columns.Records()
    for number in range(1500):
        kept.extend(pa.RecordBatch.from_pylist([{"n": number}]))
    assert [kept.row(row)["n"] for row in (0, 255, 256, 700, 1499)] == [0, 255, 256, 700, 1499]
    assert len(kept) == 1500


def test_the_tables_have_the_columns_that_readers_of_the_log_rely_on():
    assert IMPRESSIONS.names == [
        *("id", "feed", "user", "item", "slot", "arm", "label", "explore"),
        *("propensity", "policy", "seed", "limit", "token", "now"),
    ]
    assert HIDES.names == ["user", "target", "value", "hidden", "kind"]
    assert {"user", "item", "kind", "weight", "duration_ms", "impression"} <= set(SIGNALS.names)
    assert {"id", "url", "entities", "embedding", "added"} <= set(ITEMS.names)
