"""Tables and records for the lake's tests, made by hand: no part of the log or of capture is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from tests.servers.store_proxy import StoreProxy

from millstream.lake.layout import LakeLayout
from millstream.model.ids import SchemaVersion, SourceId, StreamId, TableId
from millstream.model.records import record_schema
from millstream.model.schema import Column, TableSchema
from millstream.testing.s3 import EmbeddedS3


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedS3]:
    with EmbeddedS3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="module")
def proxies(store: EmbeddedS3, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProxy]:
    with StoreProxy(tmp_path_factory.mktemp("proxy"), store.endpoint) as proxy:
        yield proxy


@pytest.fixture
def proxy(proxies: StoreProxy) -> StoreProxy:
    """A proxy in front of `store` that lets everything pass, until a test sets its rules."""
    proxies.set_rules([])
    return proxies


@pytest.fixture
def layout(tmp_path: Path) -> LakeLayout:
    return LakeLayout(str(tmp_path / "lake"), "shop", StreamId(UUID(int=42)))


@pytest.fixture
def orders() -> TableSchema:
    return TableSchema(
        table_id=TableId(3),
        version=SchemaVersion(1),
        source=SourceId(1),
        namespace="public",
        name="orders",
        columns=(Column("id", pa.int64()), Column("total", pa.decimal128(10, 2)), Column("note", pa.string())),
        identity=("id",),
        key=("id",),
    )


@pytest.fixture
def evolved(orders: TableSchema) -> Callable[..., TableSchema]:
    """The next version of the orders table, with other columns."""

    def change(**columns: pa.DataType | None) -> TableSchema:
        kept = [Column(c.name, columns.pop(c.name, c.arrow)) for c in orders.columns]
        added = [Column(name, kind) for name, kind in columns.items()]
        live = tuple(c for c in (*kept, *added) if c.arrow is not None)
        return replace(orders, version=SchemaVersion(orders.version + 1), columns=live)

    return change


@pytest.fixture
def records() -> Callable[..., pa.RecordBatch]:
    """Make a batch: `records(schema, ("c", 1, {"id": 1}), …)`; a row may hold the records' own columns too."""

    def make(schema: TableSchema, *rows: tuple[str, int, dict[str, Any]]) -> pa.RecordBatch:
        shape = record_schema(schema)
        facts = [
            {
                **dict.fromkeys(shape.names),
                "__op": op,
                "__seq": seq,
                "__source": 1,
                "__commit_date": date(2026, 3, 1 + seq % 2),
                **row,
            }
            for op, seq, row in rows
        ]
        return pa.RecordBatch.from_pylist(facts, schema=shape)

    return make
