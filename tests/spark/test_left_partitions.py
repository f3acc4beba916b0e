"""Partitions that leave, in a real pipeline: a record `x` takes away the rows of its leaf in every view."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest
from tests.spark.hand_made import Change, Home, insert
from tests.spark.lake_run import config_of, drain, rows_in

from millstream.lake.layout import LakeLayout
from millstream.lake.query.query_session import LakeSession
from millstream.model.records import Op
from millstream.spark.session import SparkOptions

pytestmark = pytest.mark.usefixtures("spark")


def test_a_pipeline_lands_a_partition_that_leaves(home: Home) -> None:
    before = home.table("public.events", id=pa.int64(), note=pa.string())
    home.commit(insert(before, id=1, note="of an unknown partition"))
    config = config_of(home.path, home.stream, SparkOptions(home.path), views=("current", "history", "scd2"))
    assert drain(config, home.catalog) is not None
    events = home.catalog.put_schema(home.stream, replace(before, partitioned=True))
    home.commit(*(insert(events, id=n, note="a", __partition_oid=70 + n % 2) for n in range(2, 8)))
    drain(config, home.catalog)
    left = Change(events, Op.PARTITION_LEFT, {"__partition_oid": 71}, {"partition": "public.events_1"})
    home.commit(left, insert(events, id=3, note="b", __partition_oid=71))
    drain(config, home.catalog)
    told = sorted((row["id"], row["note"]) for row in rows_in(home.path, "current", "public.events"))
    assert told == [(1, "of an unknown partition"), (2, "a"), (3, "b"), (4, "a"), (6, "a")]
    versions = rows_in(home.path, "scd2", "public.events")
    assert sorted(row["id"] for row in versions if row["is_current"]) == [1, 2, 3, 4, 6]
    assert sorted(row["id"] for row in versions if not row["is_current"]) == [3, 5, 7]
    history = sorted(rows_in(home.path, "history", "public.events"), key=lambda row: int(row["__seq"]))
    assert [(row["__op"], row["__partition_oid"]) for row in history[-2:]] == [("x", 71), ("c", 71)]
    assert [row["__partition_oid"] for row in history[:2]] == [None, 70]
    with LakeSession(LakeLayout(str(home.path / "lake"), "shop", home.stream)) as session:
        assert session.query("SELECT * FROM public.events").column_names == ["id", "note"]
