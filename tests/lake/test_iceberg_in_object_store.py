"""Iceberg lakes in an object store: with the catalog in the home, and with a server that says where the tables lie."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import pyarrow as pa
import pyarrow.fs as pafs
import pytest
from tests.lake.landing import append_history
from tests.servers.store_proxy import Fault, FaultRule, StoreProxy

from millstream.errors import LakeError, LakeUnavailable, PositionError
from millstream.lake.commit_cuts import commit_cut, last_cut
from millstream.lake.damaged_tables import erase_view
from millstream.lake.data_files import TableFiles, probe_storage, storage_of
from millstream.lake.folded.current_table import fold_table
from millstream.lake.iceberg.catalog import catalog_of
from millstream.lake.iceberg.names import identifier_of
from millstream.lake.layout import LakeLayout, View
from millstream.lake.maintenance import MaintenanceRules, maintain_cuts, maintain_table
from millstream.lake.query.query_session import LakeSession
from millstream.model.addresses import IN_CATALOG
from millstream.model.ids import StreamId
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema
from millstream.testing.errors import coded
from millstream.testing.iceberg_rest import EmbeddedIcebergCatalog
from millstream.testing.s3 import EmbeddedS3

Records = Callable[..., pa.RecordBatch]

pytestmark = pytest.mark.long
numbers = itertools.count()


@pytest.fixture(scope="module")
def server(store: EmbeddedS3, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedIcebergCatalog]:
    folder = tmp_path_factory.mktemp("stored")
    with EmbeddedIcebergCatalog(folder, store.options, f"{store.url}/warehouse") as catalog:
        yield catalog


def with_sql_catalog(store: EmbeddedS3, folder: Path, endpoint: str = "") -> LakeLayout:
    """Return a new lake in the store, whose catalog is a file."""
    return LakeLayout(
        f"{store.url}/lake-{next(numbers)}",
        "shop",
        StreamId(UUID(int=42)),
        storage_options=store.lake_options | ({"AWS_ENDPOINT_URL": endpoint} if endpoint else {}),
        format="iceberg",
        catalog={"type": "sql", "uri": f"sqlite:///{folder}/iceberg.db"},
    )


@pytest.fixture(params=["sql", "rest"])
def lake(request: pytest.FixtureRequest, store: EmbeddedS3, tmp_path: Path) -> LakeLayout:
    layout = with_sql_catalog(store, tmp_path)
    if request.param == "sql":
        return layout
    uri = request.getfixturevalue("server").uri
    name = f"shop_{next(numbers)}"
    return replace(layout, location=IN_CATALOG, stream_name=name, catalog={"type": "rest", "uri": uri})


def land(layout: LakeLayout, schema: TableSchema, batch: pa.RecordBatch, n: int) -> None:
    landed = [append_history(layout, schema, [batch], Seq(n)), fold_table(layout, schema, Seq(n))]
    commit_cut(layout, Seq(n), landed, committed_at=datetime.now(UTC))


def test_a_table_in_a_store_is_erased_with_all_files(lake: LakeLayout, orders: TableSchema, records: Records) -> None:
    views: tuple[View, ...] = ("history", "current", "scd2")
    for n in (1, 2):
        land(lake, orders, records(orders, ("c", n, {"id": n, "note": f"n{n}"})), n)
    for view in views:
        erase_view(lake, view, orders, Seq(3), earlier=[orders])
    for view in ("history", "current"):
        path = lake.table_path(view, orders)
        assert TableFiles(lake, path).all() == {}
        found = storage_of(lake, path).get_file_info(pafs.FileSelector("metadata"))
        assert [info.path for info in found if "-m" in info.base_name and info.base_name.endswith(".avro")] == []
    land(lake, orders, records(orders, ("t", 4, {}), ("r", 5, {"id": 9, "note": "copied"})), 5)
    with LakeSession(lake) as session:
        assert session.query("SELECT id FROM public.orders").to_pylist() == [{"id": 9}]
    with LakeSession(lake, as_of=Seq(2)) as session, pytest.raises(PositionError, check=coded("beyond_retention")):
        session.query("FROM public.orders")


def test_a_lake_in_a_store_has_what_one_in_a_folder_has(
    lake: LakeLayout, store: EmbeddedS3, orders: TableSchema, records: Records
) -> None:
    probe_storage(lake)
    for n in range(1, 7):
        land(lake, orders, records(orders, ("c" if n < 6 else "u", n, {"id": min(n, 5), "note": f"n{n}"})), n)
    everything = "SELECT id, note FROM public.orders ORDER BY id"
    expected = [{"id": n, "note": f"n{n}" if n < 5 else "n6"} for n in range(1, 6)]
    with LakeSession(lake) as session:
        assert session.query(everything).to_pylist() == expected
    with LakeSession(lake, as_of=Seq(2)) as session:
        assert session.query(everything).to_pylist() == expected[:2]
    now_ms = time.time_ns() // 1_000_000
    assert (
        maintain_table(lake, "history", orders, now_ms=now_ms, rules=MaintenanceRules(compact_files=3)).files_compacted
        == 6
    )
    for view in ("history", "current"):
        maintain_table(lake, view, orders, now_ms=now_ms + 10_000_000)  # type: ignore[arg-type]
    maintain_cuts(lake, now_ms=now_ms + 10_000_000)
    cut = last_cut(lake)
    assert cut is not None
    assert cut.n == 6
    table = catalog_of(lake).load_table(identifier_of(lake, lake.table_path("current", orders)))
    assert table.location().startswith(store.url)
    found = table.scan().to_arrow().sort_by("id").select(["id", "note"])
    assert found.to_pylist() == expected
    with LakeSession(lake) as session:
        assert session.query('SELECT count(*) n FROM history."public.orders"').to_pylist() == [{"n": 6}]


@pytest.mark.parametrize("first", ["delta", "iceberg"])
def test_a_lake_in_a_store_keeps_its_format(
    store: EmbeddedS3, tmp_path: Path, orders: TableSchema, records: Records, first: str
) -> None:
    """Folders of this machine alone were looked at: the lake counted as empty, and was landed again."""
    iceberg = with_sql_catalog(store, tmp_path)
    layouts = {"iceberg": iceberg, "delta": replace(iceberg, format="delta", catalog={})}
    land(layouts.pop(first), orders, records(orders, ("c", 1, {"id": 1})), 1)
    (other,) = layouts.values()
    with pytest.raises(LakeError, check=coded("lake_of_another_format")):
        last_cut(other)
    with pytest.raises(LakeError, check=coded("lake_of_another_format")):
        land(other, orders, records(orders, ("c", 2, {"id": 2})), 2)


def test_a_store_that_stumbles_is_tried_again_and_one_that_refuses_is_not(
    store: EmbeddedS3, proxy: StoreProxy, tmp_path: Path, orders: TableSchema, records: Records
) -> None:
    layout = with_sql_catalog(store, tmp_path, proxy.url)
    land(layout, orders, records(orders, ("c", 1, {"id": 1})), 1)
    proxy.set_rules(
        [FaultRule(Fault.BUSY, "PUT", times=2), FaultRule(Fault.CUT_AFTER, "PUT", r"metadata\.json", times=1)]
    )
    land(layout, orders, records(orders, ("c", 2, {"id": 2})), 2)
    proxy.set_rules([FaultRule(Fault.FORBIDDEN, "PUT")])
    began = len(proxy.requests())
    with pytest.raises(LakeUnavailable, check=coded("lake_forbidden")):
        land(layout, orders, records(orders, ("c", 3, {"id": 3})), 3)
    assert sum(one.fault is not None for one in proxy.requests()[began:]) == 1, "a refused request was sent again"
    proxy.set_rules([])
    land(layout, orders, records(orders, ("c", 3, {"id": 3})), 3)
    with LakeSession(layout) as session:
        assert session.query("SELECT count(*) n FROM public.orders").to_pylist() == [{"n": 3}]


def test_a_batch_takes_few_requests(
    store: EmbeddedS3, proxy: StoreProxy, tmp_path: Path, orders: TableSchema, records: Records
) -> None:
    """A batch without a fold, as the pipeline lands it: the history and the table of cuts, two tables with a commit."""
    layout = with_sql_catalog(store, tmp_path, proxy.url)

    def step(n: int) -> None:
        landed = append_history(layout, orders, [records(orders, ("c", n, {"id": n}))], Seq(n), places={})
        commit_cut(layout, Seq(n), [landed], committed_at=datetime.now(UTC))

    for n in range(1, 4):
        step(n)
    began = len(proxy.requests())
    for n in range(4, 9):
        step(n)
    assert (len(proxy.requests()) - began) / 5 / 2 <= 12


def test_errors_of_a_store_have_codes(store: EmbeddedS3, tmp_path: Path, orders: TableSchema, records: Records) -> None:
    layout = with_sql_catalog(store, tmp_path)
    missing = replace(layout, location="s3://no-such-bucket/lake")
    with pytest.raises(LakeUnavailable, check=coded("lake_bucket_missing")):
        probe_storage(missing)
    with pytest.raises(LakeUnavailable, check=coded("lake_bucket_missing")):
        land(missing, orders, records(orders, ("c", 1, {"id": 1})), 1)
    plain = {name: value for name, value in layout.storage_options.items() if name != "AWS_ALLOW_HTTP"}
    with pytest.raises(LakeUnavailable, match="without TLS"):
        probe_storage(replace(layout, storage_options=plain))
