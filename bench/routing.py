"""Routing: rows that rules and a hash ring assign to shards and partitions and split, a second and core."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from bench.figures import Figure, asked, measures, repeated, reported
from millstream.model.ids import SchemaVersion, ShardId, SourceId, TableId
from millstream.model.records import LOG_ROW_PREFIX, Op, append_row_schema
from millstream.model.schema import Column, TableSchema
from millstream.routing.partitions import PartitionTemplate
from millstream.routing.router import Router
from millstream.routing.rules import HashRing, Matcher, RuleTarget, ShardConfig, SpecificTarget
from millstream.routing.shard_map import ShardMap

ROWS = 2_000_000
CALL_ROWS = 100_000
SHARDS = 16
_INSTANT = pa.timestamp("us", "UTC")
_COLUMNS = {
    "id": pa.int64(),
    "user": pa.string(),
    "kind": pa.string(),
    "at": _INSTANT,
    "a": pa.int64(),
    "b": pa.float64(),
}
SCHEMA = TableSchema(
    TableId(1), SchemaVersion(1), SourceId(0), "public", "clicks", tuple(Column(*c) for c in _COLUMNS.items()), ("id",), ("id",)
)  # fmt: skip


@measures("route_rows_per_s")
def routed() -> Iterator[Figure]:
    """Measure calls of 100,000 rows: a rule that doesn't match, the ring over the key, a partition a day."""
    rows = asked.rows or ROWS
    shards = [ShardId(n) for n in range(SHARDS)]
    rules = ShardConfig(
        (SpecificTarget(Matcher.parse(r"public\.bots"), RuleTarget.parse("devnull")),), HashRing(), tuple(shards)
    )
    router = Router(
        rules,
        shard_of_table=lambda _: None,
        partitions={"public.clicks": PartitionTemplate.parse("{at:%Y-%m-%d}")},
        ring=ShardMap.ring(shards),
        era=1,
    )
    calls = [_call(number, min(CALL_ROWS, rows)) for number in range(max(1, rows // CALL_ROWS))]
    router.place(SCHEMA, calls[0])
    total: int = sum(call.num_rows for call in calls)

    def run() -> float:
        started = time.perf_counter()
        for call in calls:
            router.place(SCHEMA, call)
        return total / (time.perf_counter() - started)

    yield reported(
        "route_rows_per_s",
        repeated(run),
        unit="rows/s",
        goal=">= 5000000",
        rows=total,
        size_bytes=sum(call.nbytes for call in calls),
        note=f"{SHARDS} shards, a day's partition, calls of {min(CALL_ROWS, rows):,} rows of 6 columns, one thread",
    )


def _call(number: int, count: int) -> pa.RecordBatch:
    chance = np.random.default_rng(number)
    ids = chance.integers(0, 1 << 40, count)
    day_us = 86_400_000_000
    facts = {
        "__index": pa.array(np.arange(count, dtype=np.int64)),
        "__op": pa.array(np.full(count, int(Op.CREATE), dtype=np.uint8)),
    }
    prefix = [pa.array(np.zeros(count, dtype=np.int32))]
    prefix += [facts.get(field.name, pa.nulls(count, field.type)) for field in LOG_ROW_PREFIX[1:]]
    own = [
        pa.array(ids),
        pa.array([f"user-{n}" for n in (ids % 100_000).tolist()]),
        pa.array(np.where(ids % 7 == 0, "bot", "man")),
        pa.array(number * day_us + chance.integers(0, day_us, count)).cast(_INSTANT),
        pa.array(ids * 3),
        pa.array(chance.random(count)),
    ]
    return pa.RecordBatch.from_arrays([*prefix, *own], schema=append_row_schema(SCHEMA))
