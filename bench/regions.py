"""Tables that several regions write: reconciling two, and merging in Spark (the peer there is a plain max)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as Spark's own pages write it

from bench.figures import Figure, asked, compared, measures, repeated, reported
from bench.places import folder
from bench.spark_sessions import session
from millstream.crdt.declared import TableMerge
from millstream.crdt.region_state import ReconciliationEngine, RegionState
from millstream.crdt.row_merge import fold, lift, own_columns
from millstream.model.ids import RegionId, StreamId
from millstream.model.positions import Seq, StreamToken
from millstream.spark.merged_rows import merged_regions
from millstream.spark.session import SparkOptions

ENTITIES = 100_000
SPARK_ROWS = 4_000_000
RECORDS_A_KEY = 8
COLUMNS = pa.schema(
    [
        ("id", pa.int64()),
        ("likes", pa.int64()),
        ("title", pa.string()),
        ("tags", pa.list_(pa.string())),
        ("hidden", pa.bool_()),
        ("heat", pa.float64()),
    ]
)
MERGE = TableMerge.parse({"likes": "pn_counter", "tags": "union_set", "hidden": "hide", "heat": "signal(1d)"})


def said(region: int, first: int, count: int) -> pa.Table:
    """Return rows of one region, with keys from `first` on, as lifted from its log."""
    chance = np.random.default_rng(region)
    ids = np.arange(first, first + count)
    tags = pa.ListArray.from_arrays(
        pa.array(np.arange(0, 2 * count + 1, 2, dtype=np.int32)), pa.array([f"tag{n % 97}" for n in range(2 * count)])
    )
    records = pa.table(
        {
            "__op": pa.array(["c"] * count),
            "__seq": np.arange(1, count + 1),
            "id": ids,
            "likes": chance.integers(0, 99, count),
            "title": [f"title {region} of {n}" for n in ids],
            "tags": tags,
            "hidden": chance.random(count) < 0.5,
            "heat": chance.random(count),
        }
    )
    return lift(records, pa.array(np.arange(count) * 1000 + region), RegionId(region), COLUMNS, MERGE)


@measures("reconcile_100k_ms")
def reconciled() -> Iterator[Figure]:
    """Measure both sides, from two states to two equal ones."""
    count = asked.rows or ENTITIES
    engine = ReconciliationEngine(("id",), MERGE, "public.posts")
    states = []
    for region, first in ((1, 0), (2, count // 2)):
        stream = StreamId(UUID(int=region << 96))
        vector = {RegionId(region): StreamToken.scalar(stream, Seq(count))}
        records = said(region, first, count)
        states.append(RegionState(fold(records.slice(0, 0), ("id",), MERGE, records=records), vector))
    local, remote = states

    def run() -> float:
        began = time.perf_counter()
        plan = engine.plan(local, remote)
        here, there = engine.apply(local, plan.to_local), engine.apply(remote, plan.to_remote)
        took_ms = (time.perf_counter() - began) * 1000
        assert here.rows.num_rows == there.rows.num_rows == 2 * count
        return took_ms

    yield reported(
        "reconcile_100k_ms",
        repeated(run),
        unit="ms",
        goal="< 200",
        rows=count,
        size_bytes=local.rows.nbytes,
        note=f"{count:,} rows on each of two sides, half of the keys on both, six columns (PN counter, text by the last write, union set, signal, hiding): plan, and"
        " apply on both sides",
    )


@measures("crdt_merge_rows_per_s")
def merged_in_spark() -> Iterator[Figure]:
    """Read the same Parquet files on both sides, and write nothing."""
    rows = asked.rows or SPARK_ROWS
    with folder("regions") as path:
        columns = _write(path / "records", rows)
        merge = TableMerge.parse({"likes": "pn_counter", "views": "g_counter"})
        with session(SparkOptions(path / "work", conf={"spark.driver.memory": "2g"})) as spark:
            records = spark.read.parquet(str(path / "records"))
            plain = records.groupBy("id").agg(
                *(F.max(name).alias(name) for name in ("likes", "views", "score", "title"))
            )
            yield compared(
                "crdt_merge_rows_per_s",
                _timed(rows, lambda: merged_regions(records, ("id",), merge, columns, regions=(1, 2))),
                _timed(rows, lambda: plain),
                unit="rows/s",
                goal=">= 0.5",
                rows=rows,
                size_bytes=rows * 50,
                note=f"records of two regions, {RECORDS_A_KEY} a key, in Parquet; a PN counter, a grow-only one, a double and a text of about 15 B by the last write; the peer is a plain"
                " max of the same four columns by key; both into the noop sink, in one session of local[*]",
            )


def _write(path: Path, rows: int) -> pa.Schema:
    path.mkdir()
    chance = np.random.default_rng(1)
    parts, columns = 4, pa.schema([])
    for part in range(parts):
        count = rows // parts
        number = np.arange(part * count, (part + 1) * count)
        table = pa.table(
            {
                "__region": number % 2 + 1,
                "__seq": number + 1,
                "__wall_ns": number * 1000,
                "id": chance.integers(0, rows // RECORDS_A_KEY, count),
                "likes": chance.integers(0, 99, count),
                "views": chance.integers(0, 99, count),
                "score": chance.random(count),
                "title": pa.array([f"title {n}" for n in number]),
            }
        )
        columns = own_columns(table.schema)
        pq.write_table(table, path / f"{part}.parquet")
    return columns


def _timed(rows: int, frame: Callable[[], DataFrame]) -> Callable[[], float]:
    def run() -> float:
        began = time.perf_counter()
        frame().write.format("noop").mode("overwrite").save()
        return rows / (time.perf_counter() - began)

    return run
