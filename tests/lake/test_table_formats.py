"""Promises of every table format of the lake, over all formats: rows once, rows right, earlier versions, maintenance."""

from __future__ import annotations

import itertools
import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from tests.lake.landing import append_history

from millstream import failpoints
from millstream.errors import LakeConflict, LakeError, LakeTableForeign, LakeUnavailable
from millstream.lake import history
from millstream.lake.commit_cuts import CUT_BOUNDS, commit_cut, last_cut
from millstream.lake.data_files import TableFiles, probe_storage
from millstream.lake.folded.current_table import begin_fold, fold_table
from millstream.lake.folded.scd2_table import fold_into_versions, rebuild_versions
from millstream.lake.history import commit_records, open_history, write_records
from millstream.lake.iceberg.catalog import catalog_of
from millstream.lake.iceberg.files import address_of
from millstream.lake.iceberg.names import identifier_of, table_name
from millstream.lake.layout import LakeLayout, TableCommit, folder_name
from millstream.lake.maintenance import MaintenanceRules, maintain_cuts, maintain_table
from millstream.lake.new_and_wider_columns import widened
from millstream.lake.query.query_session import LakeSession
from millstream.lake.schema_history import Eras
from millstream.lake.table_format import Commit, OpenTable, open_table
from millstream.model.addresses import IN_CATALOG
from millstream.model.ids import SchemaVersion, StreamId, TableId
from millstream.model.positions import Seq
from millstream.model.schema import Column, TableSchema
from millstream.testing.errors import coded
from millstream.testing.iceberg_rest import EmbeddedIcebergCatalog

Records = Callable[..., pa.RecordBatch]
numbers = itertools.count()
FORMATS: tuple[Literal["delta", "iceberg"], ...] = ("delta", "iceberg")


def iceberg(folder: Path, stream: int = 42) -> LakeLayout:
    catalog = {"type": "sql", "uri": f"sqlite:///{folder}/iceberg.db"}
    return LakeLayout(str(folder / "lake"), "shop", StreamId(UUID(int=stream)), format="iceberg", catalog=catalog)


def in_rest_catalog(server: EmbeddedIcebergCatalog) -> LakeLayout:
    """Return a new lake whose catalog is a server, which says where tables lie."""
    catalog = {"type": "rest", "uri": server.uri}
    return LakeLayout(IN_CATALOG, f"shop_{next(numbers)}", StreamId(UUID(int=42)), format="iceberg", catalog=catalog)


@pytest.fixture(params=[*FORMATS, pytest.param("rest", marks=pytest.mark.long)])
def lake(request: pytest.FixtureRequest, tmp_path: Path, layout: LakeLayout) -> LakeLayout:
    match request.param:
        case "delta":
            return layout
        case "iceberg":
            return iceberg(tmp_path)
        case _:
            return in_rest_catalog(request.getfixturevalue("iceberg_catalog"))


def rows_of(
    layout: LakeLayout, view: Literal["current", "history", "scd2"], schema: TableSchema
) -> list[dict[str, object]]:
    """Return a table's rows as another program reads them."""
    path = layout.table_path(view, schema)
    if layout.format == "delta":
        rows = DeltaTable(path).to_pyarrow_table()
    else:
        rows = catalog_of(layout).load_table(identifier_of(layout, path)).scan().to_arrow()
    by = "__seq" if view == "history" else (*schema.key, schema.columns[0].name)[0]
    return rows.sort_by(by).to_pylist()  # type: ignore[no-any-return]


def land(layout: LakeLayout, schema: TableSchema, batch: pa.RecordBatch, n: int, *, fold: bool = True) -> None:
    landed = [append_history(layout, schema, [batch], Seq(n))]
    landed += [fold_table(layout, schema, Seq(n))] if fold else []
    commit_cut(layout, Seq(n), landed, committed_at=datetime.now(UTC))


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def test_records_land_once_whoever_repeats_them(lake: LakeLayout, orders: TableSchema, records: Records) -> None:
    batch = records(orders, ("c", 1, {"id": 1, "note": "a"}), ("c", 2, {"id": 2, "total": Decimal("1.50")}))
    assert append_history(lake, orders, [batch], Seq(2)).rows == 2
    assert append_history(lake, orders, [batch], Seq(2)).rows == 0
    late = write_records(lake, orders, [records(orders, ("u", 3, {"id": 1, "note": "b"}))], Seq(3))
    append_history(lake, orders, [records(orders, ("u", 3, {"id": 1, "note": "b"}))], Seq(3))
    assert commit_records(lake, [late], Seq(3)).rows == 0, "a driver that was thought dead"
    assert [row["__seq"] for row in rows_of(lake, "history", orders)] == [1, 2, 3]


def test_a_driver_that_was_thought_dead_overwrites_no_newer_schemas(
    lake: LakeLayout,
    orders: TableSchema,
    evolved: Callable[..., TableSchema],
    records: Records,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Iceberg took properties from any handle: folds didn't know the newest columns then, and left out their values."""
    land(lake, orders, records(orders, ("c", 1, {"id": 1})), 1)
    more = evolved(a=pa.string())
    most = replace(more, version=more.version + 1, columns=(*more.columns, Column("b", pa.string())))  # type: ignore[arg-type]
    second = records(more, ("u", 2, {"id": 1, "a": "x"}))
    late = write_records(lake, more, [second], Seq(2))
    widened = history.widened
    path, app = lake.table_path("history", orders), lake.app_id("history", orders.table_id)
    stale = list[OpenTable | None]()

    def overtaken(*arguments: Any) -> OpenTable:
        found = widened(*arguments)
        with monkeypatch.context() as undone:
            undone.setattr(history, "widened", widened)
            append_history(lake, more, [second], Seq(2))
            stale.append(open_table(lake, path, app))
            append_history(lake, most, [records(most, ("u", 3, {"id": 1, "a": "x", "b": "y"}))], Seq(3))
        return found

    with monkeypatch.context() as changed:
        changed.setattr(history, "widened", overtaken)
        with pytest.raises(LakeConflict):
            commit_records(lake, [late], Seq(2))
    (found,) = stale
    assert found is not None
    told = found.properties["millstream.schemas"]
    with pytest.raises(LakeConflict):
        found.swap(Commit(Seq(4)), add=[], properties={"millstream.schemas": str(told)})
    if lake.format == "iceberg":
        again = open_table(lake, path, app, version=None)
        assert again is not None
        append_history(lake, most, [records(most, ("u", 4, {"id": 1, "b": "y"}))], Seq(4))
        with pytest.raises(LakeConflict):
            again.set_properties({"millstream.schemas": str(told)})
    newest = open_table(lake, path, app)
    assert newest is not None
    assert [(start, schema.version) for start, schema in Eras.of(newest).told] == [(1, 1), (2, 2), (3, 3)]


@pytest.mark.long
def test_a_stale_commit_is_refused(lake: LakeLayout, orders: TableSchema, records: Records) -> None:
    land(lake, orders, records(orders, ("c", 1, {"id": 1})), 1)
    path, app = lake.table_path("history", orders), lake.app_id("history", orders.table_id)
    stale = open_table(lake, path, app)
    assert stale is not None
    append_history(lake, orders, [records(orders, ("c", 2, {"id": 2}), ("c", 3, {"id": 3}))], Seq(3))
    append_history(lake, orders, [records(orders, ("c", 4, {"id": 4}))], Seq(4))
    fold = begin_fold(lake, orders, Seq(4))
    assert not hasattr(fold, "commit") or fold_table(lake, orders, Seq(4)).n == 4
    written = [fold.write(part) for part in range(fold.plan.part_count)]  # type: ignore[union-attr]
    with pytest.raises(LakeConflict):
        fold.commit([file for files in written for file in files])  # type: ignore[union-attr, arg-type]
    assert [row["id"] for row in rows_of(lake, "current", orders)] == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", [pa.int64(), pa.bool_()], ids=["widened", "another"])
def test_maintenance_leaves_the_files_of_a_rewrite_that_takes_hours(
    lake: LakeLayout, orders: TableSchema, records: Records, monkeypatch: pytest.MonkeyPatch, kind: pa.DataType
) -> None:
    """A new type has all of history written again; its files were taken for abandoned ones before their commit."""
    columns = (Column("id", pa.int64(), number=1), Column("a", pa.int32(), number=2))
    before = replace(orders, columns=columns)
    after = replace(before, version=SchemaVersion(2), columns=(columns[0], replace(columns[1], arrow=kind)))
    land(lake, before, records(before, ("c", 1, {"id": 1, "a": 5})), 1)
    looks = []

    def hit(name: str) -> None:
        if name == "lake.before_rewrite_commit":
            looks.append(maintain_table(lake, "history", before, now_ms=now_ms() + 7_200_000).files_deleted)

    monkeypatch.setattr(failpoints, "hit", hit)
    if kind == pa.int64():
        opened = open_history(lake, before)
        wider = [field.with_type(kind) if field.name == "a" else field for field in opened.schema()]
        widened(lake, opened, "public.orders", pa.schema(wider))
    else:
        land(lake, after, records(after, ("c", 2, {"id": 2, "a": True})), 2)
    assert looks == ([] if lake.format == "delta" and kind == pa.bool_() else [0])
    assert rows_of(lake, "history", after)[0]["id"] == 1


def test_a_stale_cut_is_refused_at_the_position_of_the_one_before(lake: LakeLayout, orders: TableSchema) -> None:
    """A driver that was thought dead made a second cut of one number, after a fold: its n was right."""
    landed = TableCommit(orders.table_id, "public.orders", "public.orders", "history", 1, 1, Seq(1))
    commit_cut(lake, Seq(1), [landed], committed_at=datetime.now(UTC))
    stale = open_table(lake, lake.commits_path, lake.commits_app_id)
    assert stale is not None
    files = TableFiles(lake, lake.commits_path, CUT_BOUNDS)
    (first,) = stale.files().column("path").to_pylist()
    rows = files.read(first)
    again = files.write(rows, rows.schema, "part-again.parquet")
    maintain_cuts(lake, now_ms=now_ms())
    commit_cut(lake, Seq(1), [replace(landed, view="current", version=2)], committed_at=datetime.now(UTC))
    with pytest.raises(LakeConflict):
        stale.swap(Commit(Seq(1)), add=[again])
    found = last_cut(lake)
    assert found is not None
    assert (found.number, found.tables["public.orders"].current) == (2, 2)


@pytest.mark.long
def test_current_follows_changes_of_rows_and_columns(
    lake: LakeLayout, orders: TableSchema, evolved: Callable[..., TableSchema], records: Records
) -> None:
    land(lake, orders, records(orders, *(("c", n, {"id": n, "note": f"n{n}"}) for n in range(1, 6))), 5)
    land(lake, orders, records(orders, ("u", 6, {"id": 1, "note": "x"}), ("d", 7, {"id": 2})), 7)
    more = evolved(extra=pa.list_(pa.int16()), total=pa.decimal128(12, 2))
    land(lake, more, records(more, ("u", 8, {"id": 3, "note": "y", "extra": [1, None], "total": Decimal(7)})), 8)
    less = replace(more, version=more.version + 1, columns=tuple(c for c in more.columns if c.name != "note"))  # type: ignore[arg-type]
    land(lake, less, records(less, ("c", 9, {"id": 9, "extra": []})), 9)
    assert rows_of(lake, "current", less) == [
        {"id": 1, "total": None, "extra": None},
        {"id": 3, "total": Decimal("7.00"), "extra": [1, None]},
        {"id": 4, "total": None, "extra": None},
        {"id": 5, "total": None, "extra": None},
        {"id": 9, "total": None, "extra": []},
    ]
    wide = replace(
        less,
        version=less.version + 1,  # type: ignore[arg-type]
        columns=(Column("id", pa.string()), *less.columns[1:]),
    )
    land(lake, wide, records(wide, ("c", 10, {"id": "10"})), 10)
    assert [row["id"] for row in rows_of(lake, "current", wide)] == ["1", "10", "3", "4", "5", "9"]
    assert len(rows_of(lake, "history", wide)) == 10
    with LakeSession(lake) as session:
        assert session.query("SELECT count(*) n, count(extra) e FROM public.orders").to_pylist() == [{"n": 6, "e": 2}]
        assert session.query('SELECT count(note) n FROM history."public.orders"').to_pylist() == [{"n": 7}]


def test_every_type_comes_back_as_it_was(lake: LakeLayout, orders: TableSchema, records: Records) -> None:
    moment = datetime(2026, 3, 1, 12, 30, 15, 123456, UTC)
    kinds: dict[str, tuple[pa.DataType, list[object]]] = {
        "small": (pa.int16(), [-32768, 32767, None]),
        "whole": (pa.int32(), [-(2**31), 2**31 - 1, None]),
        "yes": (pa.bool_(), [True, False, None]),
        "near": (pa.float32(), [1.5, -0.0, None]),
        "far": (pa.float64(), [1e300, float("inf"), None]),
        "exact": (pa.decimal128(38, 10), [Decimal("1234567890123456789012345678.0123456789"), Decimal(0), None]),
        "raw": (pa.binary(), [b"\0\xff", b"", None]),
        "day": (pa.date32(), [date(1, 1, 1), date(9999, 12, 31), None]),
        "at": (pa.timestamp("us", tz="UTC"), [moment, moment.replace(year=1), None]),
        "here": (pa.timestamp("us"), [moment.replace(tzinfo=None), moment.replace(tzinfo=None, year=9999), None]),
        "many": (pa.list_(pa.int32()), [[1, None], [], None]),
        "say": (pa.string(), ["\U0010ffff" * 300, "", None]),
    }
    schema = replace(orders, columns=(Column("id", pa.int64()), *(Column(n, k) for n, (k, _) in kinds.items())))
    rows = [{"id": i + 1, **{name: values[i] for name, (_, values) in kinds.items()}} for i in range(3)]
    land(lake, schema, records(schema, *(("c", row["id"], row) for row in rows)), 3)
    assert rows_of(lake, "current", schema) == rows
    with LakeSession(lake) as session:
        assert session.query("FROM public.orders ORDER BY id").to_pylist() == rows


@pytest.mark.long
def test_versions_are_folded_and_rebuilt(lake: LakeLayout, orders: TableSchema, records: Records) -> None:
    for n in range(1, 5):
        batch = records(orders, ("u" if n > 2 else "c", n, {"id": 2 - n % 2, "note": f"n{n}"}))
        landed = [append_history(lake, orders, [batch], Seq(n))]
        landed += [fold_table(lake, orders, Seq(n)), fold_into_versions(lake, orders, Seq(n)).commit]
        commit_cut(lake, Seq(n), landed, committed_at=datetime.now(UTC))
    wanted = [{"id": 2 - n % 2, "note": f"n{n}", "is_current": n > 2} for n in range(1, 5)]

    def found() -> list[dict[str, object]]:
        rows = [{name: row[name] for name in wanted[0]} for row in rows_of(lake, "scd2", orders)]
        return sorted(rows, key=lambda row: str(row["note"]))

    assert found() == wanted
    assert rebuild_versions(lake, orders, Seq(4)).commit.n == 4
    assert found() == wanted
    with LakeSession(lake) as session:
        sql = 'SELECT id, note, is_current FROM scd2."public.orders" ORDER BY note'
        assert session.query(sql).to_pylist() == wanted
    if lake.format == "iceberg":
        catalog = catalog_of(lake)
        scd2 = catalog.load_table(identifier_of(lake, lake.table_path("scd2", orders)))
        assert scd2.name() == (f"{lake.stream_name}_scd2", "public__orders")
        assert (f"{lake.stream_name}_building",) not in catalog.list_namespaces()


@pytest.mark.long
def test_an_earlier_position_is_read(lake: LakeLayout, orders: TableSchema, records: Records) -> None:
    for n in range(1, 6):
        land(lake, orders, records(orders, ("c", n, {"id": n})), n, fold=n in {2, 4})
    for n in range(1, 6):
        with LakeSession(lake, as_of=Seq(n)) as session:
            assert session.query("SELECT count(*) n FROM public.orders").to_pylist() == [{"n": n}]
    cut = last_cut(lake)
    assert cut is not None
    (table,) = cut.tables.values()
    opened = open_table(
        lake, lake.table_path("current", orders), lake.app_id("current", orders.table_id), version=table.current
    )
    assert opened is not None
    assert (opened.n, opened.held) == (4, True)


@pytest.mark.long
def test_maintenance_leaves_few_files_and_every_row(lake: LakeLayout, orders: TableSchema, records: Records) -> None:
    for n in range(1, 9):
        land(lake, orders, records(orders, ("c", n, {"id": n})), n)
    folder = Path(address_of(lake, lake.table_path("history", orders)).removeprefix("file://"))
    assert (
        maintain_table(
            lake, "history", orders, now_ms=now_ms(), rules=MaintenanceRules(compact_files=3)
        ).files_compacted
        == 8
    )
    later = now_ms() + 10_000_000
    for view in ("history", "current"):
        assert maintain_table(lake, view, orders, now_ms=later).files_deleted > 0  # type: ignore[arg-type]
    maintain_cuts(lake, now_ms=later)
    assert (
        len([path for path in folder.rglob("*.parquet") if "_delta_log" not in path.parts])
        == {
            "delta": 1,
            "iceberg": 2,  # one for each day
        }[lake.format]
    )
    land(lake, orders, records(orders, ("c", 9, {"id": 9})), 9)
    assert [row["__seq"] for row in rows_of(lake, "history", orders)] == list(range(1, 10))
    assert [row["id"] for row in rows_of(lake, "current", orders)] == list(range(1, 10))


def test_a_version_can_be_opened_for_the_retention_after_the_commit_that_replaced_it(
    lake: LakeLayout, orders: TableSchema, records: Records
) -> None:
    """Iceberg's snapshots expired by when they were made: that of a quiet table did as soon as the next one came."""
    before = append_history(lake, orders, [records(orders, ("c", 1, {"id": 1}))], Seq(1)).version
    between = now_ms()
    while now_ms() == between:  # a later millisecond: commits are stamped in them
        continue
    newest = append_history(lake, orders, [records(orders, ("c", 2, {"id": 2}))], Seq(2)).version
    path, app = lake.table_path("history", orders), lake.app_id("history", orders.table_id)

    def opens(present_ms: int) -> bool:
        opened = open_table(lake, path, app)
        assert opened is not None
        opened.trim(now_ms=present_ms, keep_s=300, retention_s=900, spared=newest)
        return open_table(lake, path, app, version=before) is not None

    assert opens(between + 900_000)
    if lake.format == "iceberg":
        assert not opens(now_ms() + 900_000), "it isn't kept for ever"


@pytest.mark.long
def test_another_programs_rows_stop_the_table(lake: LakeLayout, orders: TableSchema, records: Records) -> None:
    land(lake, orders, records(orders, ("c", 1, {"id": 1})), 1)
    path = lake.table_path("current", orders)
    if lake.format == "delta":
        from deltalake import write_deltalake

        write_deltalake(path, DeltaTable(path).to_pyarrow_table(), mode="append")
    else:
        table = catalog_of(lake).load_table(identifier_of(lake, path))
        table.append(table.scan().to_arrow())
    with pytest.raises(LakeTableForeign):
        open_table(lake, path, lake.app_id("current", orders.table_id))


@pytest.mark.parametrize("is_rewritten", [False, True])
def test_a_numeric_key_may_be_not_a_number(
    lake: LakeLayout, orders: TableSchema, records: Records, *, is_rewritten: bool
) -> None:
    """Its decimal is null, which the column of an Iceberg table's identifier can't be: the table was never folded."""
    columns = (Column("k", pa.decimal128(10, 2)), Column("part", pa.int64()), Column("note", pa.string()))
    dropped = (Column("dropped", pa.int64()),) if is_rewritten else ()
    table = replace(orders, columns=(*columns, *dropped), key=("k", "part"), identity=("k", "part"))
    nan = {"k": None, "part": 1, "__exact": [("k", "NaN")]}
    land(lake, table, records(table, ("c", 1, {"k": Decimal("1.50"), "part": 1, "note": "a"})), 1)
    now = replace(table, version=SchemaVersion(2), columns=columns)
    land(lake, now, records(now, ("c", 2, nan | {"note": "b"})), 2)
    land(lake, now, records(now, ("u", 3, nan | {"note": "c"}), ("c", 4, {"k": Decimal(2), "part": 1})), 4)
    rows = {(row["k"], row["note"]) for row in rows_of(lake, "current", now)}
    assert rows == {(Decimal("1.50"), "a"), (None, "c"), (Decimal("2.00"), None)}
    if lake.format == "iceberg":
        current = catalog_of(lake).load_table(identifier_of(lake, lake.table_path("current", now)))
        assert current.schema().identifier_field_names() == set()
        assert not any(field.required for field in current.schema().fields)
    with LakeSession(lake) as session:
        found = session.query("SELECT note FROM public.orders ORDER BY note NULLS LAST").to_pylist()
        assert [row["note"] for row in found] == ["a", "c", None]
    land(lake, now, records(now, ("d", 5, nan)), 5)
    assert {row["note"] for row in rows_of(lake, "current", now)} == {"a", None}
    fold_into_versions(lake, now, Seq(5))


def test_iceberg_has_keys_days_ids_and_properties(tmp_path: Path, orders: TableSchema, records: Records) -> None:
    layout = iceberg(tmp_path)
    land(layout, orders, records(orders, ("c", 1, {"id": 1}), ("c", 2, {"id": 2})), 2)
    catalog = catalog_of(layout)
    current, history = (catalog.load_table((f"shop_{view}", "public__orders")) for view in ("current", "history"))
    assert current.metadata.format_version == 2
    assert current.schema().identifier_field_names() == {"id"}
    assert [str(field.transform) for field in history.spec().fields] == ["day"]
    assert current.properties["millstream.n"] == "2"
    assert current.properties["millstream.table-id"] == str(orders.table_id)
    assert (current.properties["millstream.view"], current.properties["millstream.layout"]) == ("current", "1")
    assert len(list(history.scan().plan_files())) == 2, "a file for each day"
    (cut,) = catalog.load_table(("shop", "_commits")).scan().to_arrow().to_pylist()
    tables = (("shop_history.public__orders", history), ("shop_current.public__orders", current))
    newest = {name: table.current_snapshot() for name, table in tables}
    assert dict(cut["tables"]) == {name: found and found.snapshot_id for name, found in newest.items()}
    (file,) = current.scan().plan_files()
    ids = {field.name: field.field_id for field in current.schema().fields}
    footer = pq.read_schema(file.file.file_path.removeprefix("file://"))
    assert {field.name: int(field.metadata[b"PARQUET:field_id"]) for field in footer} == ids
    assert pl.scan_iceberg(current).select("id").collect().to_series().sort().to_list() == [1, 2]
    assert current.scan().to_duckdb("found").sql("SELECT sum(id) FROM found").fetchall() == [(3,)]


def test_a_column_with_the_name_of_a_lists_elements_is_refused_by_name(
    tmp_path: Path, orders: TableSchema, records: Records
) -> None:
    lake = iceberg(tmp_path)
    tags, part = Column("tags", pa.list_(pa.int64())), Column("tags.element", pa.int64())
    for number, (old, new) in enumerate([((), (tags, part)), ((part,), (part, tags)), ((tags,), (tags, part))], 1):
        table = replace(orders, table_id=TableId(number), name=f"t{number}", columns=(*orders.columns, *old))
        changed = replace(table, columns=(*orders.columns, *new))
        if old:
            append_history(lake, table, [records(table, ("c", 1, {"id": 1}))], Seq(1))
        with pytest.raises(LakeError, check=coded("lake_schema_conflict")) as refused:
            append_history(lake, changed, [records(changed, ("c", 2, {"id": 2}))], Seq(2))
        assert refused.value.details["column"] == "tags.element"


@pytest.mark.parametrize("format_", FORMATS)
def test_a_store_without_tls_needs_a_permission_that_the_error_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format_: Literal["delta", "iceberg"]
) -> None:
    """delta-rs and obstore said `builder error`, followed by a dump of their own values."""
    catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/iceberg.db"} if format_ == "iceberg" else {}
    options = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}
    stream = StreamId(UUID(int=42))
    layout = LakeLayout("s3://bucket/lake", "shop", stream, storage_options=options, format=format_, catalog=catalog)
    for call in (last_cut, probe_storage):
        with pytest.raises(LakeUnavailable, match=r"requests to http://127.0.0.1:1 would go without TLS") as refused:
            call(layout)
        assert "AWS_ALLOW_HTTP" in refused.value.hint
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert last_cut(replace(layout, location=str(tmp_path / "lake"), storage_options={})) is None


def test_an_iceberg_lake_in_a_store_without_keys_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow's client sends requests unsigned then; the store's refusal was an unknown error, after retries."""
    for name in [*os.environ]:
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    options = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_ALLOW_HTTP": "true"}
    layout = replace(iceberg(tmp_path), location="s3://bucket/lake", storage_options=options)
    for call in (last_cut, probe_storage):
        with pytest.raises(LakeUnavailable, check=coded("lake_credentials"), match="there are no keys") as refused:
            call(layout)
        assert "storage_options" in refused.value.hint
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    with pytest.raises(LakeUnavailable, check=coded("lake_unavailable")):
        probe_storage(layout)


def test_an_iceberg_lake_that_was_moved_is_refused(tmp_path: Path, orders: TableSchema, records: Records) -> None:
    layout = iceberg(tmp_path)
    land(layout, orders, records(orders, ("c", 1, {"id": 1})), 1, fold=False)
    elsewhere = replace(layout, location=str(tmp_path / "elsewhere"))
    with pytest.raises(LakeError, check=coded("lake_moved")):
        last_cut(elsewhere)


def test_tables_of_a_new_iceberg_lake_are_made_at_once(tmp_path: Path, orders: TableSchema, records: Records) -> None:
    layout = iceberg(tmp_path)
    tables = [replace(orders, table_id=TableId(3 + n), name=f"orders_{n}") for n in range(6)]

    def landed(schema: TableSchema) -> int:
        return append_history(layout, schema, [records(schema, ("c", 1, {"id": 1}))], Seq(1)).rows

    with ThreadPoolExecutor(len(tables)) as threads:
        assert list(threads.map(landed, tables)) == [1] * len(tables)


def test_iceberg_refuses_the_tables_of_another_stream(tmp_path: Path, orders: TableSchema, records: Records) -> None:
    land(iceberg(tmp_path), orders, records(orders, ("c", 1, {"id": 1})), 1)
    other = iceberg(tmp_path, stream=7)
    for layout in (other, replace(other, location=str(tmp_path / "elsewhere"))):  # in the same catalog
        with pytest.raises(LakeTableForeign, check=coded("lake_of_another_stream")):
            open_table(layout, layout.table_path("current", orders), layout.app_id("current", TableId(3)))


@pytest.mark.parametrize(
    ("namespace", "name", "expected"),
    [
        ("public", "orders", "public__orders"),
        ("public", "Orders", "public___rders_43fd82f7"),
        ("a_", "b", "a___b_34e8dac7"),
        ("a", "_b", "a___b_dd1c251a"),
        ("a__b", "c", "a__b__c_57a76311"),
    ],
)
def test_iceberg_names_tell_tables_apart(namespace: str, name: str, expected: str) -> None:
    assert table_name(folder_name(namespace, name, TableId(4))) == expected


def test_a_catalog_without_the_tables_is_no_new_lake(tmp_path: Path, orders: TableSchema, records: Records) -> None:
    """The tables were made again next to the old ones, without what the log no longer had."""
    layout = iceberg(tmp_path)
    land(layout, orders, records(orders, ("c", 1, {"id": 1})), 1)
    commit_cut(layout, Seq(1), [], committed_at=datetime.now(UTC))
    lost = replace(layout, catalog={"type": "sql", "uri": f"sqlite:///{tmp_path}/new.db"})
    with pytest.raises(LakeError, check=coded("lake_catalog_lost")):
        last_cut(lost)
    with pytest.raises(LakeError, check=coded("lake_catalog_lost")):
        land(lost, orders, records(orders, ("c", 2, {"id": 2})), 2)
    land(layout, orders, records(orders, ("c", 2, {"id": 2})), 2)
    assert [row["id"] for row in rows_of(layout, "current", orders)] == [1, 2]


@pytest.mark.parametrize("first", FORMATS)
def test_a_lake_keeps_its_format(tmp_path: Path, orders: TableSchema, records: Records, first: str) -> None:
    """With another `format`, the lake counted as empty, and the log was landed again from what it still had."""
    layouts = {"delta": replace(iceberg(tmp_path), format="delta", catalog={}), "iceberg": iceberg(tmp_path)}
    land(layouts[first], orders, records(orders, ("c", 1, {"id": 1})), 1)
    commit_cut(layouts[first], Seq(1), [], committed_at=datetime.now(UTC))
    other = layouts["iceberg" if first == "delta" else "delta"]
    with pytest.raises(LakeError, check=coded("lake_of_another_format")):
        last_cut(other)
    with pytest.raises(LakeError, check=coded("lake_of_another_format")):
        land(other, orders, records(orders, ("c", 2, {"id": 2})), 2)
    assert [row["id"] for row in rows_of(layouts[first], "current", orders)] == [1]


def test_a_catalog_file_that_is_put_back_is_read_at_once(tmp_path: Path) -> None:
    """A kept connection went on with the file that was moved away: it read old rows, and wrote nothing."""
    file, moved = tmp_path / "iceberg.db", tmp_path / "moved.db"
    catalog = {"type": "sql", "uri": f"sqlite:///{file}"}
    layout = LakeLayout(str(tmp_path / "lake"), "shop", StreamId(UUID(int=42)), format="iceberg", catalog=catalog)
    opened = catalog_of(layout)
    opened.create_namespace("before")
    file.rename(moved)
    shutil.copy(moved, file)
    with closing(sqlite3.connect(file)) as other, other:
        other.execute("UPDATE iceberg_namespace_properties SET namespace = 'another'")
    assert opened.list_namespaces() == [("another",)]
    opened.create_namespace("after")
    assert len(opened.list_namespaces()) == 2
