"""Logs of regions drawn by hypothesis, and their records as region rows.

Also the merge of those rows by the plain kinds, one value at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any
from uuid import UUID

import pyarrow as pa
from hypothesis import strategies as st

from millstream.crdt import HLC, Actor, GCounter, HideFlag, LWWRegister, SignalState, UnionSet
from millstream.crdt.declared import TableMerge
from millstream.crdt.row_merge import fold, lift, merged_schema, state_schema
from millstream.model.ids import RegionId, StreamId
from millstream.model.positions import Seq, StreamToken

KEY = ("id", "part")
COLUMNS = pa.schema(
    [
        ("id", pa.int64()),
        ("part", pa.string()),
        ("title", pa.string()),
        ("ratio", pa.float64()),
        ("views", pa.int32()),
        ("likes", pa.int64()),
        ("paid", pa.decimal128(12, 2)),
        ("weight", pa.float64()),
        ("tags", pa.list_(pa.string())),
        ("seen", pa.list_(pa.int64())),
        ("heat", pa.float64()),
        ("happened", pa.int64()),
        ("hidden", pa.bool_()),
    ]
)
MERGE = TableMerge.parse(
    {
        "views": "g_counter",
        "likes": "pn_counter",
        "paid": "pn_counter",
        "weight": "pn_counter",
        "tags": "union_set",
        "seen": "or_set",
        "heat": "signal(4s, at=happened)",
        "hidden": "hide",
    }
)
PLAIN_MERGE = TableMerge({name: how for name, how in MERGE.columns.items() if name != "heat"})
"""The same without a column that accumulates."""
SECOND_NS = 10**9
HAPPENED = (None, None, 0, 2_500_000, 70_000_000, 4_000 * 10**6, 700_000 * 10**6)
"""Times of events, in microseconds: the commit's, then from the first second to after a week."""


@dataclass(frozen=True)
class Said:
    """A record."""

    region: int
    seq: int
    wall_ns: int
    row: dict[str, Any]

    @property
    def happened_ns(self) -> int:
        return self.wall_ns if self.row["happened"] is None else int(self.row["happened"]) * 1000

    @property
    def time(self) -> HLC:
        return HLC(self.wall_ns, self.seq, self.region)


_ROWS = st.fixed_dictionaries(
    {
        "id": st.sampled_from([0, 0, 0, None]),
        "part": st.sampled_from(["", "", "a"]),
        "title": st.none() | st.text("aé", max_size=2),
        "ratio": st.sampled_from([None, 0.5, -0.0, float("inf")]),
        "views": st.none() | st.integers(0, 9),
        "likes": st.none() | st.integers(-(2**40), 2**40),
        "paid": st.none() | st.decimals(-99, 99, places=2),
        "weight": st.none() | st.sampled_from([0.1, 0.2, 0.3, 1e16, -1e16]),
        "tags": st.none() | st.lists(st.sampled_from(["x", "y", None]), max_size=2),
        "seen": st.none() | st.lists(st.integers(-1, 1), max_size=2),
        "heat": st.none() | st.floats(0, 8),
        "happened": st.sampled_from(HAPPENED),
        "hidden": st.none() | st.booleans(),
    }
)


@st.composite
def region_logs(draw: st.DrawFn) -> dict[int, list[Said]]:
    """Draw the writes of one to three regions, in order; a region's times rise."""
    logs: dict[int, list[Said]] = {}
    for region in draw(st.sets(st.integers(0, 3), min_size=1, max_size=3)):
        wall, log = 0, []
        for seq, row in enumerate(draw(st.lists(_ROWS, min_size=1, max_size=5)), 1):
            wall += draw(st.integers(1, 2)) * SECOND_NS
            log.append(Said(region, seq, wall, row))
        logs[region] = log
    return logs


def stream_of(region: int) -> StreamId:
    return StreamId(UUID(int=(region + 1) << 96))


def token_of(region: int, seq: int) -> StreamToken:
    return StreamToken.scalar(stream_of(region), Seq(seq))


def region_rows(said: list[Said], merge: TableMerge = MERGE) -> pa.Table:
    """Return records as region rows, not folded, each region's in the order given."""
    parts = [state_schema(COLUMNS, merge).empty_table()]
    for region in dict.fromkeys(one.region for one in said):
        own = [one for one in said if one.region == region]
        records = pa.Table.from_pylist([{"__op": "c", "__seq": one.seq, **one.row} for one in own], schema=_RECORDS)
        times = pa.array([one.wall_ns for one in own])
        parts.append(lift(records, times, RegionId(region), COLUMNS, merge))
    return pa.concat_tables(parts)


_RECORDS = pa.schema([("__op", pa.string()), ("__seq", pa.int64()), *COLUMNS])


def folded(said: list[Said], merge: TableMerge = MERGE) -> pa.Table:
    """Return the region rows of all records of some regions."""
    return fold(region_rows([], merge), KEY, merge, records=region_rows(said, merge))


def _heat(said: list[Said], at_ns: int) -> dict[str, Any]:
    """Return the columns of the signal, by a state that takes one event after the other."""
    state = SignalState(4 * SECOND_NS)
    for one in sorted(said, key=lambda one: one.seq):
        if one.row["heat"] is not None:
            state = state.add(Actor(one.region), one.row["heat"], one.happened_ns)
    counts = {f"heat__{window}": state.count(window, at_ns) for window in ("1h", "24h", "7d")}
    return {"heat": state.score(at_ns) if state.nodes else None, **counts}


def plainly_merged(said: list[Said], at_ns: int | None = None, merge: TableMerge = MERGE) -> list[dict[str, Any]]:
    """Return one row a key, merged by the plain kinds."""
    newest_ns = max((one.happened_ns for one in said if one.row["heat"] is not None), default=0)
    by_key: dict[tuple[Any, ...], list[Said]] = {}
    for one in said:
        by_key.setdefault(tuple(one.row[name] for name in KEY), []).append(one)
    found = []
    for key in sorted(by_key, key=lambda key: [(value is None, value) for value in key]):
        row: dict[str, Any] = dict(zip(KEY, key, strict=True))
        newest: dict[int, Said] = {}
        for one in sorted(by_key[key], key=lambda one: one.seq):
            newest[one.region] = one
        regions = [newest[region] for region in sorted(newest)]
        for name in ("title", "ratio", "happened", "heat"):
            row[name] = reduce(LWWRegister.join, (LWWRegister(one.row[name], one.time) for one in by_key[key])).value
        views = [one for one in by_key[key] if one.row["views"] is not None]
        counted = reduce(GCounter.join, (GCounter({Actor(one.region): one.row["views"]}) for one in views), GCounter())
        row["views"] = counted.value if views else None
        for name, nothing in (("likes", 0), ("paid", 0), ("weight", 0.0)):
            values = [one.row[name] for one in regions if one.row[name] is not None]
            row[name] = sum(values, nothing) if values else None
        for name, of in (("tags", by_key[key]), ("seen", regions)):
            lists = [one.row[name] for one in of if one.row[name] is not None]
            sets = (UnionSet(value for value in values if value is not None) for values in lists)
            row[name] = list(reduce(UnionSet.join, sets).value) if lists else None
        if merge.accumulates:
            row |= _heat(by_key[key], newest_ns if at_ns is None else at_ns)
        flags = [
            HideFlag(hidden=one.time) if one.row["hidden"] else HideFlag(shown=one.time)
            for one in by_key[key]
            if one.row["hidden"] is not None
        ]
        row["hidden"] = reduce(HideFlag.join, flags, HideFlag()).value
        found.append({name: row[name] for name in merged_schema(COLUMNS, merge).names})
    return found
