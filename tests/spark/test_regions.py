"""From the same logs, Spark's aggregates merge regions exactly as the pure functions do, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import millstream
from millstream.errors import UnknownTable
from millstream.home.home import Home
from millstream.model.ids import RegionId
from millstream.regions.merged_table import RegionTable
from millstream.spark.merged_rows import merged_regions, region_records
from millstream.spark.spark_columns import spark_schema

MERGES = """
views = "g_counter"
likes = "pn_counter"
weight = "pn_counter"
paid = "pn_counter"
tags = "union_set"
seen = "or_set"
heat = "signal(1m, at=happened)"
glow = "signal(2s)"
rank = "signal(1h, at=moment)"
hidden = "hide"
"""


def rows_of(region: int, count: int) -> list[dict[str, Any]]:
    """Rows that hit few keys often, with values that round, and nulls everywhere."""
    chance = np.random.default_rng(region)

    def sometimes(value: Any) -> Any:
        return value if chance.random() < 0.8 else None

    return [
        {
            "id": int(chance.integers(0, 12)),
            "part": "é" if chance.random() < 0.5 else "",
            "title": sometimes(f"{region}.{number}"),
            "ratio": sometimes(float(chance.choice([-0.0, 0.0, np.inf, 0.1]))),
            "views": sometimes(int(chance.integers(0, 99))),
            "likes": sometimes(int(chance.integers(-(2**50), 2**50))),
            "weight": sometimes(float(chance.choice([0.1, 0.2, 0.3, 1e16, -1e16, -0.0]))),
            "paid": sometimes(int(chance.integers(-9, 9))),
            "tags": sometimes([str(tag) for tag in chance.choice(["x", "y", "é", "Z"], 2)]),
            "seen": sometimes([int(one) for one in chance.integers(-2, 3, 2)]),
            "heat": sometimes(float(abs(chance.standard_normal()))),
            "happened": sometimes(int(chance.integers(0, 10**9))),
            "glow": sometimes(float(abs(chance.standard_normal()))),
            "rank": sometimes(int(chance.integers(0, 9))),
            "moment": sometimes(int(chance.integers(0, 10**12))),
            "hidden": sometimes(bool(chance.random() < 0.5)),
        }
        for number in range(count)
    ]


@pytest.mark.long
def test_spark_merges_the_logs_of_regions_as_the_pure_functions_do_to_the_bit(
    tmp_path: Path, spark: SparkSession
) -> None:
    schema = pa.schema(
        [("id", pa.int64()), ("part", pa.string()), ("title", pa.string()), ("ratio", pa.float64()), ("views", pa.int32()),
         ("likes", pa.int64()), ("weight", pa.float64()), ("paid", pa.decimal128(9, 2)), ("tags", pa.list_(pa.string())),
         ("seen", pa.list_(pa.int64())), ("heat", pa.float64()), ("happened", pa.int64()),
         ("glow", pa.float64()), ("rank", pa.int32()), ("moment", pa.timestamp("us")), ("hidden", pa.bool_())]
    )  # fmt: skip
    homes = {region: tmp_path / str(region) for region in (1, 2, 5)}
    for region, folder in homes.items():
        folder.mkdir()
        (folder / "millstream.toml").write_text(
            f'[streams.shop]\nregion = {region}\n[streams.shop.log]\ndisk_used_max = 1.0\n[streams.shop.keys]\n"public.posts" = ["id", "part"]\n'
            f'[streams.shop.merge."public.posts"]\n{MERGES}'
        )
        beyond = {"id": 99, "part": "", "heat": 1.7e308, "happened": 5}
        rows = [*rows_of(region, 39), beyond]
        with millstream.open(folder) as home:
            for start in range(0, 40, 8):
                home.append("shop", "posts", pa.Table.from_pylist(rows[start : start + 8], schema=schema))
    here = homes[1] / "data" / "wal"
    for region in (2, 5):
        shutil.copytree(homes[region] / "data" / "wal" / "shop", here / f"shop@{region}")
    table = RegionTable(Home(homes[1]), "shop", "public.posts")
    state = table.merged_state()

    logs = {RegionId(1): str(here / "shop"), **{RegionId(n): str(here / f"shop@{n}") for n in (2, 5)}}
    records = region_records(spark, logs, "public.posts")
    key, order = ("id", "part"), [("id", "ascending"), ("part", "ascending")]
    for at_ns in (None, -(2**64), 2**64):
        expected = table.engine.value(state, at_ns=at_ns)
        merge = merged_regions(records.union(records), key, table.engine.merge, table.columns, at_ns=at_ns)
        found = merge.toArrow()
        assert [(one.name, one.dataType) for one in merge.schema] == [
            (one.name, one.dataType) for one in spark_schema(expected.schema)
        ]
        for name in expected.column_names:
            ours, theirs = (side.sort_by(order).column(name).to_pylist() for side in (expected, found))
            assert list(map(repr, ours)) == list(map(repr, theirs)), name
    with pytest.raises(UnknownTable):
        region_records(spark, logs, "public.nothing")


@pytest.mark.long
def test_spark_sums_increments_of_regions_and_keeps_what_rows_do_not_name(tmp_path: Path, spark: SparkSession) -> None:
    merges = (
        'likes = "pn_counter(increments)"\nscore = "pn_counter(increments)"\ntotal = "pn_counter"\ntags = "or_set"\n'
    )
    homes = {region: tmp_path / str(region) for region in (1, 2)}
    for region, folder in homes.items():
        folder.mkdir()
        (folder / "millstream.toml").write_text(
            f'[streams.shop]\nregion = {region}\n[streams.shop.log]\ndisk_used_max = 1.0\n[streams.shop.keys]\n"public.posts" = ["id"]\n'
            f'[streams.shop.merge."public.posts"]\n{merges}'
        )
        chance = np.random.default_rng(region)
        values: dict[str, Any] = {"likes": 3, "score": 0.1, "total": 5, "tags": ["a"], "title": "x"}
        rows = [{"id": 0} | values]
        for number in range(60):
            named = {
                "likes": number - 20,
                "score": 1e16 / 3**number,
                "total": number,
                "tags": [str(number)],
                "title": str(number),
            }
            rows.append({"id": int(chance.integers(0, 5))} | {n: v for n, v in named.items() if chance.random() < 0.4})
        with millstream.open(folder) as home:
            for row in rows:
                home.append("shop", "posts", row)
    shutil.copytree(homes[2] / "data/wal/shop", homes[1] / "data/wal/shop@2")
    table = RegionTable(Home(homes[1]), "shop", "posts")
    expected = table.engine.value(table.merged_state())
    records = region_records(
        spark,
        {RegionId(1): str(homes[1] / "data/wal/shop"), RegionId(2): str(homes[1] / "data/wal/shop@2")},
        "public.posts",
    )
    found = merged_regions(records, ["id"], table.engine.merge, table.columns).orderBy("id")
    assert [row.asDict() for row in found.collect()] == expected.to_pylist()


@pytest.mark.long
def test_spark_counts_writes_once_that_two_regions_have(tmp_path: Path, spark: SparkSession) -> None:
    merges = (
        'likes = "pn_counter(increments)"\nscore = "pn_counter(increments)"\nheat = "signal(1h)"\nviews = "g_counter"\n'
    )
    homes = {region: tmp_path / str(region) for region in (1, 2)}
    chance = np.random.default_rng(3)
    rows = [
        {"id": int(chance.integers(0, 4)), "likes": number - 9, "score": float(chance.random()), "heat": 1 + float(chance.random()),
         "views": number}
        for number in range(30)
    ]  # fmt: skip
    for region, folder in homes.items():
        folder.mkdir()
        (folder / "millstream.toml").write_text(
            f'[streams.shop]\nregion = {region}\n[streams.shop.log]\ndisk_used_max = 1.0\n[streams.shop.keys]\n"public.posts" = ["id"]\n'
            f'[streams.shop.merge."public.posts"]\n{merges}'
        )
        with millstream.open(folder) as home:
            for number, row in enumerate(rows):
                if number % 3 != region:  # every third row is in both
                    home.append("shop", "posts", row, idempotency_key=f"row {number}")
    shutil.copytree(homes[2] / "data/wal/shop", homes[1] / "data/wal/shop@2")
    table = RegionTable(Home(homes[1]), "shop", "posts")
    expected = table.engine.value(table.merged_state())
    assert sum(expected.column("likes").to_pylist()) == sum(row["likes"] for row in rows)
    records = region_records(spark, table.folders, "public.posts")
    found = merged_regions(records, ["id"], table.engine.merge, table.columns).orderBy("id").toArrow()
    for name in expected.column_names:
        assert list(map(repr, found.column(name).to_pylist())) == list(map(repr, expected.column(name).to_pylist())), (
            name
        )
    without = merged_regions(records.drop("__repeats"), ["id"], table.engine.merge, table.columns)
    assert sum(row["likes"] for row in without.collect()) > sum(row["likes"] for row in rows), "the rows repeat"
