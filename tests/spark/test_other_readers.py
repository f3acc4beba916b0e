"""Spark with Delta's own connector, and nothing of Millstream's, reads the lake's tables as they are."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import pyarrow as pa
import pytest
from tests.lake.landing import append_history

from millstream.lake.commit_cuts import commit_cut
from millstream.lake.folded.current_table import fold_table
from millstream.lake.layout import LakeLayout
from millstream.lake.query.query_session import LakeSession
from millstream.model.ids import SchemaVersion, SourceId, StreamId, TableId
from millstream.model.positions import Seq
from millstream.model.records import record_schema
from millstream.model.schema import Column, TableSchema
from millstream.testing._servers.maven import fetch

DELTA = "4.4.0"
JARS = {
    "delta-spark_4.2_2.13": "27d4fd8b1f879535c573ed1c718177d6a27f24d3e626ba02e216369725721ead",
    "delta-storage": "c46735481fa8e326b0957be02b4420cbcab4b325bb08009b7f2045a95133f1cc",
}
# A process of its own: a JVM loads its jars once, and the other tests' JVM has none.
READ = """
import json, sys
from pathlib import Path
from pyspark.sql import SparkSession
from millstream.spark.session import SparkOptions, open_context
work, jars, *paths = sys.argv[1:]
open_context(SparkOptions(Path(work), master="local[1]", conf={
    "spark.jars": jars,
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # It puts a table's log together in 50 tasks a look otherwise, of which here all but one find nothing.
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.sql.shuffle.partitions": "1",
}))
spark = SparkSession.builder.getOrCreate()
found = []
for path in paths:
    rows = spark.read.format("delta").load(path)
    said = spark.sql(f"DESCRIBE DETAIL delta.`{path}`").collect()[0].description
    found.append([said, sorted(str(row) for row in rows.selectExpr("id", "total", "note", "unix_micros(at) at").toLocalIterator())])
print(json.dumps(found))
spark.stop()
"""


@pytest.mark.siege
def test_spark_with_deltas_jars_reads_what_query_gives(tmp_path: Path) -> None:
    layout = LakeLayout(str(tmp_path / "lake"), "shop", StreamId(UUID(int=42)))
    kinds = {"id": pa.int64(), "total": pa.decimal128(10, 2), "note": pa.string(), "at": pa.timestamp("us", tz="UTC")}
    orders = TableSchema(
        table_id=TableId(3),
        version=SchemaVersion(1),
        source=SourceId(1),
        namespace="public",
        name="Orders",
        columns=tuple(Column(name, kind) for name, kind in kinds.items()),
        identity=("id",),
        key=("id",),
    )
    at = datetime(2026, 2, 3, 4, 5, 6, 7, tzinfo=UTC)
    records = [
        ("c", {"id": 1, "total": Decimal("1.50"), "note": "", "at": at}),
        ("c", {"id": 2}),
        ("c", {"id": 3, "note": "gone"}),
        ("d", {"id": 3}),
    ]
    shape = record_schema(orders)
    for seq, (op, row) in enumerate(records, 1):
        facts = {
            **dict.fromkeys(shape.names),
            "__op": op,
            "__seq": seq,
            "__source": 1,
            "__commit_date": at.date(),
            **row,
        }
        batch = pa.RecordBatch.from_pylist([facts], schema=shape)
        landed = [append_history(layout, orders, [batch], Seq(seq)), fold_table(layout, orders, Seq(seq))]
        commit_cut(layout, Seq(seq), landed, committed_at=at)
    jars = ",".join(str(fetch("io.delta", name, DELTA, sha256=digest)) for name, digest in JARS.items())
    paths = [layout.table_path("current", orders), layout.table_path("history", orders)]
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path / "spark"), jars, *paths],
        capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    with LakeSession(layout) as session:
        for (said, rows), table in zip(
            json.loads(done.stdout), ('public."Orders"', 'history."public.Orders"'), strict=True
        ):
            assert "public.Orders" in said
            expected = session.query(f'SELECT id, total, note, epoch_us("at") AS "at" FROM {table}').to_pylist()
            assert len(rows) == len(expected) > 1
            shown = [f"Row({', '.join(f'{name}={value!r}' for name, value in row.items())})" for row in expected]
            assert rows == sorted(shown)
