"""Iceberg commits under a clock that is set back: the moments of snapshots and metadata stay in order."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, tzinfo
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Self
from uuid import UUID

import pyarrow as pa
import pytest
from pyiceberg.table import Table
from tests.lake.landing import append_history

from millstream.lake.iceberg.catalog import catalog_of
from millstream.lake.iceberg.names import identifier_of
from millstream.lake.layout import LakeLayout
from millstream.model.addresses import IN_CATALOG
from millstream.model.ids import StreamId
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema
from millstream.testing.iceberg_rest import EmbeddedIcebergCatalog

Records = Callable[..., pa.RecordBatch]


class AnHourAgo(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return super().now(tz) - timedelta(hours=1)


@pytest.fixture
def set_clock_back(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that sets the clock that pyiceberg sees back."""

    def back() -> None:
        monkeypatch.setattr("pyiceberg.table.snapshots.time", SimpleNamespace(time=lambda: AnHourAgo.now().timestamp()))
        monkeypatch.setattr("pyiceberg.table.update.datetime", AnHourAgo)

    return back


def table_of(layout: LakeLayout, schema: TableSchema) -> Table:
    return catalog_of(layout).load_table(identifier_of(layout, layout.table_path("history", schema)))


def check_moments(table: Table) -> None:
    metadata = table.metadata
    for log in (metadata.snapshot_log, metadata.metadata_log):
        assert all(earlier.timestamp_ms <= later.timestamp_ms for earlier, later in pairwise(log))
    assert metadata.metadata_log[-1].timestamp_ms <= metadata.last_updated_ms
    assert {one.snapshot_id: one.timestamp_ms for one in metadata.snapshots} == {
        entry.snapshot_id: entry.timestamp_ms for entry in metadata.snapshot_log
    }


def test_an_sql_catalogs_tables_keep_their_moments_in_order(
    tmp_path: Path, orders: TableSchema, records: Records, set_clock_back: Callable[[], None]
) -> None:
    catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/iceberg.db"}
    lake = LakeLayout(str(tmp_path), "shop", StreamId(UUID(int=42)), format="iceberg", catalog=catalog)
    append_history(lake, orders, [records(orders, ("c", 1, {"id": 1}))], Seq(1))
    set_clock_back()
    append_history(lake, orders, [records(orders, ("c", 2, {"id": 2}))], Seq(2))
    table_of(lake, orders).transaction().set_properties(note="x").commit_transaction()
    append_history(lake, orders, [records(orders, ("c", 3, {"id": 3}))], Seq(3))
    check_moments(table_of(lake, orders))
    assert len(table_of(lake, orders).metadata.snapshot_log) == 3


@pytest.mark.long
def test_a_server_takes_commits_under_a_clock_that_was_set_back(
    iceberg_catalog: EmbeddedIcebergCatalog,
    orders: TableSchema,
    records: Records,
    set_clock_back: Callable[[], None],
) -> None:
    catalog = {"type": "rest", "uri": iceberg_catalog.uri}
    lake = LakeLayout(IN_CATALOG, "moments", StreamId(UUID(int=42)), format="iceberg", catalog=catalog)
    append_history(lake, orders, [records(orders, ("c", 1, {"id": 1}))], Seq(1))
    set_clock_back()
    append_history(lake, orders, [records(orders, ("c", 2, {"id": 2}))], Seq(2))
    table = table_of(lake, orders)
    check_moments(table)
    assert sorted(table.scan().to_arrow()["__seq"].to_pylist()) == [1, 2]
