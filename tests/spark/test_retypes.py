"""A column gets any other type, and the error's advice is followed: Delta's readers open every resulting table."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from tests.lake.landing import append_history
from tests.spark.test_other_readers import DELTA, JARS

from millstream.errors import LakeError
from millstream.lake.commit_cuts import commit_cut
from millstream.lake.damaged_tables import make_way
from millstream.lake.folded.current_table import fold_table
from millstream.lake.folded.scd2_table import fold_into_versions
from millstream.lake.layout import LakeLayout, View
from millstream.lake.new_and_wider_columns import widest
from millstream.lake.query.query_session import LakeSession
from millstream.model.ids import SchemaVersion, SourceId, StreamId, TableId
from millstream.model.positions import Seq
from millstream.model.records import record_schema
from millstream.model.schema import Column, TableSchema
from millstream.testing._servers.maven import fetch
from millstream.testing.errors import coded

VIEWS: tuple[View, ...] = ("history", "current", "scd2")
MOMENT = datetime(2026, 2, 3, 4, 5, 6, 7, tzinfo=UTC)
KINDS: dict[str, tuple[pa.DataType, Any]] = {
    "bool": (pa.bool_(), True),
    "binary": (pa.binary(), b"\0\xff"),
    "int16": (pa.int16(), 7),
    "int32": (pa.int32(), 7),
    "int64": (pa.int64(), 7),
    "float32": (pa.float32(), 0.5),
    "float64": (pa.float64(), 0.5),
    "decimal": (pa.decimal128(10, 2), Decimal("1.50")),
    "decimal_wide": (pa.decimal128(38, 9), Decimal("1.500000000")),
    "date": (pa.date32(), date(2026, 2, 3)),
    "timestamp": (pa.timestamp("us"), MOMENT.replace(tzinfo=None)),
    "timestamptz": (pa.timestamp("us", tz="UTC"), MOMENT),
    "text": (pa.string(), "text"),
    "texts": (pa.list_(pa.string()), ["a", None]),
    "dates": (pa.list_(pa.date32()), [date(2026, 2, 3), None]),
    "timestamps": (pa.list_(pa.timestamp("us")), [MOMENT.replace(tzinfo=None), None]),
}
READ = """
import json, sys
from pathlib import Path
from pyspark.sql import SparkSession
from millstream.spark.session import SparkOptions, open_context
work, jars, paths = sys.argv[1:]
open_context(SparkOptions(Path(work), master="local[1]", conf={
    "spark.jars": jars,
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.sql.shuffle.partitions": "1",
}))
spark = SparkSession.builder.getOrCreate()
found = {}
for path in json.loads(Path(paths).read_text()):
    try:
        found[path] = sum(1 for _ in spark.read.format("delta").load(path).toLocalIterator())
    except Exception as error:
        found[path] = str(error)[:500]
print(json.dumps(found))
spark.stop()
"""


def batch(schema: TableSchema, *rows: tuple[str, int, dict[str, Any]]) -> pa.RecordBatch:
    shape = record_schema(schema)
    facts: list[dict[str, Any]] = [
        {
            **dict.fromkeys(shape.names),
            "__op": op,
            "__seq": seq,
            "__source": 1,
            "__commit_ts": MOMENT,
            "__commit_date": MOMENT.date(),
            **row,
        }
        for op, seq, row in rows
    ]
    return pa.RecordBatch.from_pylist(facts, schema=shape)


def land(layout: LakeLayout, schema: TableSchema, records: pa.RecordBatch, n: int) -> None:
    landed = [
        append_history(layout, schema, [records], Seq(n)),
        fold_table(layout, schema, Seq(n)),
        fold_into_versions(layout, schema, Seq(n)).commit,
    ]
    commit_cut(layout, Seq(n), landed, committed_at=datetime.now(UTC))


def table_of(number: int, name: str, kinds: list[str], version: int) -> TableSchema:
    columns = [Column(f"c{place}", KINDS[kind][0]) for place, kind in enumerate(kinds)]
    return TableSchema(
        table_id=TableId(number),
        version=SchemaVersion(version),
        source=SourceId(1),
        namespace="public",
        name=name,
        columns=(Column("id", pa.int64()), *columns),
        identity=("id",),
        key=("id",),
    )


def row_of(number: int, kinds: list[str]) -> dict[str, Any]:
    return {"id": number} | {f"c{place}": KINDS[kind][1] for place, kind in enumerate(kinds)}


def pairs() -> Iterator[tuple[str, list[str], list[str], bool]]:
    """Tables whose columns all had one type and get others: those that widen, and those that can't."""
    for old, (kind, _) in KINDS.items():
        for follows in (True, False):
            new = [k for k, (other, _) in KINDS.items() if k != old and (widest(kind, other) is not None) is follows]
            # Dates widen to timestamps, but a column of timestamps that becomes one of dates doesn't take
            # dates.
            fixed = [k for k in new if (old, k) == ("timestamp", "date")]
            new = [k for k in new if k not in fixed] if follows else new
            # Arrays of local times need their feature also if they are the only columns.
            alone = [k for k in new if k in {"timestamp", "timestamps"}]
            for some in ([k for k in new if k not in alone], *([k] for k in alone), *([k] for k in fixed)):
                if some:
                    yield f"{old}_to_{some[0]}_{follows}", [old] * len(some), some, follows and some != fixed


@pytest.mark.timeout(600)
@pytest.mark.siege
def test_a_column_may_get_any_type_and_every_reader_opens_the_table(tmp_path: Path) -> None:
    layout = LakeLayout(str(tmp_path / "lake"), "shop", StreamId(UUID(int=42)))
    paths = []
    for number, (name, old, new, follows) in enumerate(pairs(), 1):
        before, after = (table_of(number, name, kinds, version) for version, kinds in ((1, old), (2, new)))
        first = 10 * number
        land(layout, before, batch(before, ("c", first, row_of(1, old))), first)
        update = batch(after, ("u", first + 1, row_of(1, new)))
        if follows:
            land(layout, after, update, first + 1)
        else:
            with pytest.raises(LakeError, check=coded("lake_schema_conflict")) as refused:
                land(layout, after, update, first + 1)
            assert "--from source" in refused.value.hint
            for view in VIEWS:
                make_way(layout, view, after, Seq(first + 1), forget=True)
        # A type for which PostgreSQL rewrites the table has it copied again in either case.
        copy = batch(after, ("t", first + 2, {}), ("r", first + 3, row_of(1, new)), ("c", first + 4, row_of(2, new)))
        land(layout, after, copy, first + 4)
        paths += [layout.table_path(view, after) for view in VIEWS]
        with LakeSession(layout) as session:
            assert session.query(f'SELECT count(*) AS n FROM public."{name}"').to_pylist() == [{"n": 2}]
            values = session.query(f'SELECT * FROM public."{name}" WHERE id = 2').to_pylist()[0]
            assert set(values) >= {column.name for column in after.columns}, name

    counts = {path: DeltaTable(path).to_pyarrow_table().num_rows for path in paths}
    for path in paths:
        assert pl.read_delta(path).height == counts[path] > 1, path
    jars = ",".join(str(fetch("io.delta", name, DELTA, sha256=digest)) for name, digest in JARS.items())
    listed = tmp_path / "paths.json"
    # Spark takes a second a table: check those with columns that need a feature, and a few others.
    asked = [path for path in paths if "timestamp" in path]
    asked = [*asked[::5], *[path for path in paths if path not in asked][::11]]
    listed.write_text(json.dumps(asked))
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path / "spark"), jars, str(listed)],
        capture_output=True, text=True, timeout=500, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found == {path: counts[path] for path in asked}


def test_dates_become_midnights_where_a_column_of_dates_becomes_one_of_timestamps(tmp_path: Path) -> None:
    """The key too: an update that names the old row by its date finds it."""
    layout = LakeLayout(str(tmp_path / "lake"), "shop", StreamId(UUID(int=42)))
    kinds = {"day": pa.date32(), "note": pa.string()}
    columns = tuple(Column(name, kind) for name, kind in kinds.items())
    days = replace(table_of(1, "days", [], 1), columns=columns, key=("day",), identity=("day",))
    times = replace(days, version=SchemaVersion(2), columns=(Column("day", pa.timestamp("us")), columns[1]))
    append_history(layout, days, [batch(days, ("c", 1, {"day": date(2026, 2, 3), "note": "a"}))], Seq(1))
    moved = {"day": date(2026, 2, 4), "note": "b", "__before": [("day", "2026-02-03")]}
    append_history(layout, days, [batch(days, ("u", 2, moved))], Seq(2))
    later = {"day": MOMENT.replace(tzinfo=None), "note": "c"}
    append_history(layout, times, [batch(times, ("c", 3, later))], Seq(3))
    fold_table(layout, times, Seq(3))

    found = DeltaTable(layout.table_path("current", times)).to_pyarrow_table().sort_by("day").to_pylist()
    assert [(row["day"], row["note"]) for row in found] == [
        (MOMENT.replace(tzinfo=None), "c"),
        (datetime(2026, 2, 4), "b"),  # noqa: DTZ001 - it has no time zone
    ]
