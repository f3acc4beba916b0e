"""Counters with increments in merging tables: sums over all regions, in any order and split, and of named columns alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from tests.crdt.region_logs import stream_of

from millstream.crdt.declared import TableMerge
from millstream.crdt.region_state import ReconciliationEngine, RegionState
from millstream.crdt.row_merge import fold, lift, merged, of_keys, state_schema
from millstream.errors import InvalidValue
from millstream.model.ids import RegionId
from millstream.model.positions import Seq, StreamToken

COLUMNS = pa.schema(
    [
        ("id", pa.int64()),
        ("title", pa.string()),
        ("likes", pa.int64()),
        ("score", pa.float64()),
        ("total", pa.int64()),
        ("tags", pa.list_(pa.string())),
        ("hidden", pa.bool_()),
    ]
)
MERGE = TableMerge.parse(
    {"likes": "pn_counter(increments)", "score": "g_counter(increments)", "total": "pn_counter", "tags": "or_set", "hidden": "hide"}
)  # fmt: skip
KEY = ("id",)
_RECORDS = pa.schema([("__op", pa.string()), ("__seq", pa.int64()), ("__unchanged", pa.list_(pa.string())), *COLUMNS])
Record = tuple[int, int, dict[str, Any]]


def log_of(chance: random.Random, length: int) -> list[Record]:
    """Return a region's records: number, time and the columns that each names."""
    found, wall = [], 0
    for seq in range(1, length + 1):
        wall += chance.randrange(1, 4)
        values = {
            "title": chance.choice([None, f"t{seq}-{chance.random()}"]),
            "likes": chance.choice([None, 1, -2, 5]),
            "score": chance.choice([None, 0.1, 0.25]),
            "total": chance.choice([None, seq]),
            "tags": chance.choice([None, ["a"], ["b", "c"]]),
            "hidden": chance.choice([None, True, False]),
        }
        named = {name: value for name, value in values.items() if chance.random() < 0.5}
        found.append((seq, wall, {"id": chance.randrange(3), **named}))
    return found


def lifted(region: int, records: list[Record]) -> pa.Table:
    rows = [
        {"__op": "c", "__seq": seq, "__unchanged": [name for name in COLUMNS.names if name not in row] or None, **row}
        for seq, _, row in records
    ]
    times = pa.array([wall for _, wall, _ in records], pa.int64())
    return lift(pa.Table.from_pylist(rows, schema=_RECORDS), times, RegionId(region), COLUMNS, MERGE)


def expected(logs: dict[int, list[Record]]) -> list[dict[str, Any]]:
    """Return the merged rows, by a plain walk over the records."""
    rows: dict[int, dict[str, Any]] = {}
    for key in sorted({row["id"] for log in logs.values() for _, _, row in log}):
        own = {region: [(wall, seq, row) for seq, wall, row in log if row["id"] == key] for region, log in logs.items()}
        out: dict[str, Any] = dict.fromkeys(COLUMNS.names) | {"id": key}
        named = [
            (wall, seq, region, row["title"]) for region, log in own.items() for wall, seq, row in log if "title" in row
        ]
        out["title"] = max(named)[3] if named else None
        for name in ("likes", "score"):
            totals = []
            for _, log in sorted(own.items()):
                values = [row[name] for _, _, row in log if row.get(name) is not None]
                totals += [sum(values[1:], values[0])] if values else []
            out[name] = sum(totals[1:], totals[0]) if totals else None
        newest = [[row for _, _, row in log if "total" in row][-1:] for _, log in sorted(own.items())]
        totals = [row["total"] for rows_of in newest for row in rows_of if row["total"] is not None]
        out["total"] = sum(totals) if totals else None
        newest = [[row for _, _, row in log if "tags" in row][-1:] for _, log in sorted(own.items())]
        tags = [row["tags"] for rows_of in newest for row in rows_of if row["tags"] is not None]
        out["tags"] = sorted({one for some in tags for one in some}) if tags else None
        flags = [(wall, seq, row.get("hidden")) for log in own.values() for wall, seq, row in log]
        hidden = max(((wall, seq) for wall, seq, flag in flags if flag is True), default=(0, 0))
        shown = max(((wall, seq) for wall, seq, flag in flags if flag is False), default=(0, 0))
        out["hidden"] = hidden != (0, 0) and shown <= hidden
        rows[key] = out
    return list(rows.values())


def pieces(chance: random.Random, log: list[Record]) -> Iterator[list[Record]]:
    while log:
        size = chance.randrange(1, 6)
        yield log[:size]
        log = log[size:]


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(12))
def test_regions_agree_however_their_logs_are_split_and_joined(seed: int) -> None:
    chance = random.Random(seed)
    logs = {region: log_of(chance, chance.randrange(0, 25)) for region in (1, 2, 3)}
    engine = ReconciliationEngine(KEY, MERGE)
    empty = state_schema(COLUMNS, MERGE).empty_table()
    replicas = []
    for _ in range(2):
        state = RegionState(empty)
        for region, log in logs.items():
            token = StreamToken.scalar(stream_of(region), Seq(len(log)))
            rows = empty
            for piece in pieces(chance, log):
                new = lifted(region, piece)
                # Records that come again change nothing.
                again = lifted(region, [record for record in log if record[0] < piece[0][0]][-2:])
                rows = fold(rows, KEY, MERGE, records=pa.concat_tables([new, again]))
            state = engine.apply(state, engine.missing(RegionState(rows, {RegionId(region): token}), state.vector))
        replicas.append(state)
    one, two = replicas
    assert one.rows.equals(two.rows)
    assert engine.apply(one, engine.missing(two, {})).rows.equals(one.rows)
    assert merged(one.rows, KEY, MERGE).to_pylist() == expected(logs)


def test_a_log_goes_on_from_the_known_rows() -> None:
    first = fold(lifted(1, []), KEY, MERGE, records=lifted(1, [(1, 1, {"id": 1, "likes": 3, "title": "a"})]))
    new = lifted(1, [(2, 2, {"id": 1, "likes": 4})])
    rows = fold(of_keys(first, new, KEY), KEY, MERGE, records=new)
    assert rows.select(["likes", "title", "__seq"]).to_pylist() == [{"likes": 7, "title": "a", "__seq": 2}]


def test_an_increment_does_not_renew_the_columns_that_it_does_not_name() -> None:
    logs = {
        1: [(1, 10, {"id": 1, "title": "old"}), (2, 30, {"id": 1, "likes": 1})],
        2: [(1, 20, {"id": 1, "title": "new"})],
    }
    rows = pa.concat_tables([fold(lifted(1, []), KEY, MERGE, records=lifted(*one)) for one in logs.items()])
    (row,) = merged(rows, KEY, MERGE).to_pylist()
    assert (row["title"], row["likes"]) == ("new", 1)


def test_totals_beyond_64_bits_fail_the_read() -> None:
    some = [(seq, seq, {"id": 1, "likes": 2**62}) for seq in (1, 2)]
    with pytest.raises(InvalidValue, match="64 bits"):
        fold(lifted(1, []), KEY, MERGE, records=lifted(1, some))
    halves = [fold(lifted(region, []), KEY, MERGE, records=lifted(region, some[:1])) for region in (1, 2)]
    with pytest.raises(InvalidValue, match="64 bits"):
        merged(pa.concat_tables(halves), KEY, MERGE)
