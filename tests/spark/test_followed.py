"""Spark reads a node that follows as it reads the one that leads."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from tests.app.nodes import STREAM, Node, eventually, nodes

import millstream


def test_spark_reads_a_follower_as_its_leader(tmp_path: Path, spark: SparkSession) -> None:
    def records(node: Node, table: str) -> DataFrame:
        return spark.read.format("millstream").options(path=str(node.home), stream=STREAM, table=table).load()

    with nodes(tmp_path) as (a, b):
        a.start("owner")
        a.start("serve")
        b.start("follow", "a")
        with millstream.open(a.home) as home:
            for one in range(20):
                home.append(STREAM, "orders", [{"id": one, "text": "é" * one}], deadline_s=100)
        eventually(lambda: b.rows() == list(range(20)), "all of it is there", a, b)
        ours, theirs = (
            sorted(records(node, "public.orders").select("__seq", "id", "text").collect()) for node in (b, a)
        )
        assert ours == theirs
        assert [row["id"] for row in ours] == list(range(20))
