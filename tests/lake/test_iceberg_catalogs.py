"""Iceberg lakes whose catalog is a server: commits whose answer is lost, and a server that is gone for a while."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from uuid import UUID

import pyarrow as pa
import pytest
from tests.lake.landing import append_history
from tests.servers.store_proxy import Fault, FaultRule, StoreProxy

from millstream.errors import LakeUnavailable, UsageError
from millstream.lake.data_files import local_folder
from millstream.lake.iceberg.catalog import catalog_of
from millstream.lake.iceberg.names import identifier_of
from millstream.lake.layout import LakeLayout
from millstream.lake.table_format import format_of
from millstream.model.addresses import IN_CATALOG
from millstream.model.ids import StreamId
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema
from millstream.testing.errors import coded
from millstream.testing.iceberg_rest import EmbeddedIcebergCatalog

Records = Callable[..., pa.RecordBatch]

pytestmark = pytest.mark.long
numbers = itertools.count()


@pytest.fixture(scope="module")
def proxy(iceberg_catalog: EmbeddedIcebergCatalog, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProxy]:
    with StoreProxy(tmp_path_factory.mktemp("proxy"), iceberg_catalog.uri) as server:
        yield server


@pytest.fixture
def lake(proxy: StoreProxy) -> LakeLayout:
    proxy.set_rules([])
    catalog = {"type": "rest", "uri": proxy.url}
    return LakeLayout(IN_CATALOG, f"behind_{next(numbers)}", StreamId(UUID(int=42)), format="iceberg", catalog=catalog)


def seqs(layout: LakeLayout, schema: TableSchema) -> list[int]:
    table = catalog_of(layout).load_table(identifier_of(layout, layout.table_path("history", schema)))
    return sorted(table.scan().to_arrow()["__seq"].to_pylist())


@pytest.mark.parametrize("fault", Fault)
def test_a_commit_is_there_once_whatever_became_of_its_answer(
    lake: LakeLayout, proxy: StoreProxy, orders: TableSchema, records: Records, fault: Fault
) -> None:
    def land(seq: int) -> int:
        return append_history(lake, orders, [records(orders, ("c", seq, {"id": seq}))], Seq(seq)).rows

    land(1)
    proxy.set_rules([FaultRule(fault, "POST", r"tables/public__orders$", times=1)])
    if fault in {Fault.BUSY_AFTER, Fault.CUT_AFTER}:
        assert land(2) == 1
    else:
        code = "lake_forbidden" if fault is Fault.FORBIDDEN else "catalog_unreachable"
        with pytest.raises(LakeUnavailable, check=coded(code)):
            land(2)
        assert land(2) == 1
    assert land(2) == 0
    land(3)
    assert seqs(lake, orders) == [1, 2, 3]


def test_a_catalog_that_was_gone_is_used_again(
    lake: LakeLayout, proxy: StoreProxy, orders: TableSchema, records: Records
) -> None:
    append_history(lake, orders, [records(orders, ("c", 1, {"id": 1}))], Seq(1))
    proxy.kill()
    for step in (
        lambda: append_history(lake, orders, [records(orders, ("c", 2, {"id": 2}))], Seq(2)),
        lambda: format_of(lake).probe_catalog(lake),
    ):
        with pytest.raises(LakeUnavailable, check=coded("catalog_unreachable")):
            step()
    proxy.start()
    append_history(lake, orders, [records(orders, ("c", 2, {"id": 2}))], Seq(2))
    assert seqs(lake, orders) == [1, 2]


def test_tables_lie_in_the_places_of_their_namespaces(
    lake: LakeLayout, iceberg_catalog: EmbeddedIcebergCatalog, orders: TableSchema, records: Records
) -> None:
    append_history(lake, orders, [records(orders, ("c", 1, {"id": 1}))], Seq(1))
    name = f"{lake.stream_name}_history"
    table = catalog_of(lake).load_table((name, "public__orders"))
    assert table.location() == f"{iceberg_catalog.warehouse}/{name}/public.orders"
    assert local_folder(lake) == Path(f"{iceberg_catalog.warehouse.removeprefix('file://')}/{lake.stream_name}")
    (file,) = table.scan().plan_files()
    path = Path(file.file.file_path.removeprefix("file://"))
    assert path.is_file()
    assert path.is_relative_to(table.location().removeprefix("file://"))


@pytest.mark.parametrize("page", [b"<html>log in</html>", b"[]", b""])
def test_a_server_that_is_no_catalog_is_one_that_does_not_answer(page: bytes) -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            catalog = {"type": "rest", "uri": f"http://127.0.0.1:{server.server_port}"}
            lake = LakeLayout(IN_CATALOG, "shop", StreamId(UUID(int=42)), format="iceberg", catalog=catalog)
            with pytest.raises(LakeUnavailable, match="isn't a catalog", check=coded("catalog_unreachable")):
                format_of(lake).probe_catalog(lake)
        finally:
            server.shutdown()
            thread.join()


def test_a_database_whose_driver_is_missing_is_named(tmp_path: Path) -> None:
    catalog = {"type": "sql", "uri": "postgresql+pg8000://someone@127.0.0.1:1/shop"}
    lake = LakeLayout(str(tmp_path), "shop", StreamId(UUID(int=42)), format="iceberg", catalog=catalog)
    with pytest.raises(UsageError, match="needs a driver", check=coded("missing_extra")):
        format_of(lake).probe_catalog(lake)
