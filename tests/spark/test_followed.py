"""Spark reads a following node as it reads the leader, and within the same bound of age as other readers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from tests.app.homes import wait_for
from tests.nodes.nodes import STREAM, Node, eventually, nodes
from tests.spark.hand_made import Home, insert

import millstream
from millstream.errors import ReplicationError
from millstream.home.home import Home as Folder
from millstream.leadership.node_roles import Roles, replication_folder
from millstream.model.replication import NodeName
from millstream.nodes.staleness import note_age
from millstream.protocol.replication.node_promises import Role, RoleFact
from millstream.testing.errors import coded


@pytest.mark.long
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


@pytest.mark.long
def test_spark_reads_nothing_that_is_older_than_a_follower_may_show(
    spark: SparkSession, home: Home, tmp_path: Path
) -> None:
    orders = home.table("public.orders", id=pa.int64())
    (home.path / "millstream.toml").write_text('[streams.shop]\n[replication]\nnode = "b"\nmax_staleness = "1h"\n')
    folder = Folder(home.path)
    with Roles(folder).changing("shop") as changing:
        changing.put(replace(RoleFact(role=Role.FENCED), leader=NodeName("a")).following(NodeName("a")))
    ages = replication_folder(folder, "shop")
    seen: list[int] = []
    of_home = {"path": str(home.path), "table": "public.orders"}

    def batch(**options: str) -> list[int]:
        return sorted(row["id"] for row in spark.read.format("millstream").options(**options).load().collect())

    def note(found: DataFrame, _number: int) -> None:
        seen.extend(sorted(row["id"] for row in found.collect()))

    def stream(*, is_all: bool = False) -> StreamingQuery:
        frame = spark.readStream.format("millstream").options(**of_home).load()
        writer = frame.writeStream.foreachBatch(note).option("checkpointLocation", str(tmp_path / "notes"))
        return (
            writer.trigger(availableNow=True) if is_all else writer.trigger(processingTime="50 milliseconds")
        ).start()

    home.commit(insert(orders, id=1))
    note_age(ages, 0.0)
    assert batch(**of_home) == [1]
    query = stream()
    try:
        wait_for(lambda: seen == [1], what=lambda: str(query.exception() or seen))
        note_age(ages, None)
        with (
            millstream.open(home.path) as opened,
            pytest.raises(ReplicationError, check=coded("replica_too_stale")) as told,
        ):
            opened.token("shop")
        with pytest.raises(PySparkException) as failed:
            query.awaitTermination(300)
    finally:
        query.stop()
    for found in (
        failed,
        *map(_failure_of, (lambda: batch(**of_home), lambda: stream(is_all=True).awaitTermination(300))),
    ):
        assert f"ReplicationError: {told.value.message}" in str(found.value)
        assert told.value.hint in str(found.value)
    assert batch(wal=str(home.wal), table="public.orders") == [1], "a folder is read as it lies there"

    home.commit(insert(orders, id=2))
    note_age(ages, 0.0)
    stream(is_all=True).awaitTermination(300)
    assert seen == [1, 2], "the query goes on where it was, once what is shown is new enough"


def _failure_of(read: Callable[[], object]) -> pytest.ExceptionInfo[PySparkException]:
    with pytest.raises(PySparkException) as failed:
        read()
    return failed
