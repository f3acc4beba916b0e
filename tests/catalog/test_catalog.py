from __future__ import annotations

import multiprocessing
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.catalog import Catalog, ChunkState, CopyChunk, TableState
from millstream.catalog.database import REVISION
from millstream.catalog.tables import metadata
from millstream.errors import (
    CatalogBusy,
    CatalogError,
    CatalogTooNew,
    CursorExpired,
    DiskFull,
    FollowerBehindRetention,
    StaleEpoch,
    UnknownStream,
    UnknownTable,
)
from millstream.model.ids import Epoch, SchemaVersion, SourceId, StreamId, TableId, WriterId
from millstream.model.positions import Lsn, Seq
from millstream.model.schema import Column, PgType, TableSchema
from millstream.protocol.retention import CutOff, HolderKind
from millstream.testing.catalog import back_to_the_first_schema


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with Catalog(tmp_path / "data" / "catalog.db") as catalog:
        yield catalog


@pytest.fixture
def stream(catalog: Catalog) -> StreamId:
    return catalog.resolve_stream("shop")


@pytest.fixture
def source(catalog: Catalog, stream: StreamId) -> SourceId:
    return catalog.resolve_source(stream, 2**64 - 1, "shop", 1)


def schema_of(table: TableId, source: SourceId, *names: str) -> TableSchema:
    columns = tuple(Column(name, pa.int64(), PgType(20, -1, "bigint")) for name in names)
    return TableSchema(table, SchemaVersion(0), source, "public", "orders", columns, names[:1], names[:1])


def test_a_stream_keeps_its_id_and_adopts_the_one_of_a_log_whose_catalog_was_lost(catalog: Catalog) -> None:
    first = catalog.resolve_stream("shop")
    assert catalog.resolve_stream("shop") == first == catalog.stream("shop").id
    of_log = StreamId(uuid4())
    assert catalog.resolve_stream("clicks", found=of_log) == of_log
    with pytest.raises(CatalogError, match="bears the id"):
        catalog.resolve_stream("shop", found=of_log)
    with pytest.raises(UnknownStream):
        catalog.stream("nobody")


def test_a_writer_keeps_its_id_and_gets_a_higher_epoch_each_time(catalog: Catalog, stream: StreamId) -> None:
    assert catalog.register_writer(stream, "a") == (WriterId(1), Epoch(1))
    assert catalog.register_writer(stream, "b") == (WriterId(2), Epoch(2))
    assert catalog.register_writer(stream, "a") == (WriterId(1), Epoch(3))
    assert [(w.name, w.epoch) for w in catalog.writers(stream)] == [("a", 3), ("b", 2)]
    assert catalog.register_writer(stream, "b", above=Epoch(9)) == (WriterId(2), Epoch(10))


def test_reservations_only_grow_and_a_fenced_writer_reserves_nothing(catalog: Catalog, stream: StreamId) -> None:
    _, old = catalog.register_writer(stream)
    reservations = catalog.reservations(stream)
    reservations.reserve_to(Seq(1000), epoch=old)
    reservations.reserve_to(Seq(10), epoch=old)
    assert reservations.reserved() == 1000
    _, new = catalog.register_writer(stream)
    with pytest.raises(StaleEpoch):
        reservations.reserve_to(Seq(2000), epoch=old)
    assert reservations.reserved() == 1000
    reservations.reserve_to(Seq(2000), epoch=new)
    assert reservations.reserved() == 2000


@given(moves=st.lists(st.integers(0, 2**62), min_size=1, max_size=8))
def test_a_position_is_the_greatest_it_was_moved_to(tmp_path_factory: pytest.TempPathFactory, moves: list[int]) -> None:
    with Catalog(tmp_path_factory.mktemp("home") / "catalog.db") as catalog:
        stream = catalog.resolve_stream("shop")
        source = catalog.resolve_source(stream, 7, "shop", 1)
        for count, lsn in enumerate(moves, 1):
            assert catalog.move_reached(source, Lsn(lsn)) == max(moves[:count]) == catalog.reached(source)
            catalog.set_needed_from(stream, "lake", Seq(lsn))
            catalog.set_landed(stream, "lake", Seq(lsn))
        assert catalog.needed_from(stream) == {"lake": max(moves)}
        assert catalog.landed(stream, "lake") == max(moves)


def test_a_table_survives_rename_and_a_new_timeline_but_not_drop_and_recreate(
    catalog: Catalog, stream: StreamId, source: SourceId
) -> None:
    first = catalog.table_for(stream, source, 16400, "public", "orders")
    promoted = catalog.resolve_source(stream, 2**64 - 1, "shop", 2)
    assert promoted != source
    renamed = catalog.table_for(stream, promoted, 16400, "sales", "order")
    assert (renamed.id, renamed.namespace, renamed.name) == (first.id, "sales", "order")
    other_database = catalog.resolve_source(stream, 2**64 - 1, "other", 1)
    assert catalog.table_for(stream, other_database, 16400, "public", "orders").id != first.id
    catalog.set_state(first.id, TableState.GONE, "dropped")
    again = catalog.table_for(stream, source, 16400, "sales", "order")
    assert again.id not in {first.id, renamed.id}
    assert first.id not in {t.id for t in catalog.tables(stream)}
    assert first.id in {t.id for t in catalog.tables(stream, gone=True)}


def test_a_state_is_compared_and_set(catalog: Catalog, stream: StreamId, source: SourceId) -> None:
    table = catalog.table_for(stream, source, 16400, "public", "orders")
    assert table.state is TableState.COPY_REQUESTED
    assert catalog.set_state(table.id, "copying", copy_id="c1", only_from=[TableState.COPY_REQUESTED])
    assert not catalog.set_state(table.id, "streaming", only_from=[TableState.SET_ASIDE])
    assert catalog.set_state(table.id, "set_aside", "bad value", details={"column": "total"})
    found = catalog.find_table(stream, "public", "orders")
    assert (found.state, found.reason, found.details, found.copy_id) == (
        TableState.SET_ASIDE,
        "bad value",
        {"column": "total"},
        "c1",
    )
    with pytest.raises(UnknownTable):
        catalog.find_table(stream, "public", "nothing")


def test_the_same_facts_are_the_same_schema_version(catalog: Catalog, stream: StreamId, source: SourceId) -> None:
    table = catalog.table_for(stream, source, 16400, "public", "orders").id
    one = catalog.put_schema(stream, schema_of(table, source, "id"))
    two = catalog.put_schema(stream, schema_of(table, source, "id", "total"))
    assert (one.version, two.version) == (1, 2)
    assert catalog.latest_schemas(stream) == {table: two}
    assert catalog.put_schema(stream, schema_of(table, source, "id")) == one
    assert catalog.latest_schemas(stream) == {table: one}
    assert catalog.schemas(stream) == {(table, 1): one, (table, 2): two}
    with pytest.raises(UnknownTable):
        catalog.put_schema(StreamId(uuid4()), schema_of(table, source, "id"))


def test_chunks_are_written_all_or_none_and_come_back_as_they_were(
    catalog: Catalog, stream: StreamId, source: SourceId
) -> None:
    table = catalog.table_for(stream, source, 16400, "public", "orders").id
    chunks = [CopyChunk(table, "c1", 1, None, "[5]"), CopyChunk(table, "c1", 2, "[5]", None, facts={"x": [1]})]
    catalog.put_chunks(chunks)
    assert catalog.chunks(table, "c1") == chunks
    read = CopyChunk(table, "c1", 1, None, "[5]", ChunkState.READ, "10:20:", Lsn(99), 5, 500)
    catalog.put_chunks([read])
    assert catalog.chunks(table, "c1") == [read, chunks[1]]
    with pytest.raises(CatalogError):
        catalog.put_chunks([CopyChunk(table, "c1", 1), CopyChunk(TableId(999), "c1", 1)])
    assert catalog.chunks(table, "c1") == [read, chunks[1]]
    catalog.drop_chunks(table)
    assert catalog.chunks(table, "c1") == []


def test_a_holder_that_is_released_holds_nothing(catalog: Catalog, stream: StreamId) -> None:
    catalog.set_needed_from(stream, "lake", Seq(5))
    catalog.set_needed_from(stream, "table:1", Seq(3))
    catalog.release(stream, "table:1")
    assert catalog.needed_from(stream) == {"lake": 5}


def test_who_was_cut_off_holds_nothing_and_is_told_so_until_it_is_released(catalog: Catalog, stream: StreamId) -> None:
    catalog.set_needed_from(stream, "lake", Seq(50))
    for name, kind in (("mail", HolderKind.CONSUMER), ("copy", HolderKind.FOLLOWER)):
        catalog.set_needed_from(stream, name, Seq(5), kind=kind)
        assert catalog.cut_off(stream, CutOff(name, kind, Seq(5), Seq(31)))
    assert catalog.needed_from(stream) == {"lake": 50}
    for _ in range(2):
        with pytest.raises(CursorExpired, match="consumer mail") as caught:
            catalog.set_needed_from(stream, "mail", Seq(40), kind=HolderKind.CONSUMER)
        assert caught.value.details == {"holder": "mail", "needed_from": 5, "first": 31}
        with pytest.raises(FollowerBehindRetention, match="follower copy"):
            catalog.set_needed_from(stream, "copy", Seq(40), kind=HolderKind.FOLLOWER)
    assert {p.name: (p.kind, p.cut_off_at) for p in catalog.pipelines(stream)} == {
        "lake": (HolderKind.PIPELINE, None),
        "mail": (HolderKind.CONSUMER, 31),
        "copy": (HolderKind.FOLLOWER, 31),
    }
    catalog.release(stream, "mail")
    catalog.set_needed_from(stream, "mail", Seq(31), kind=HolderKind.CONSUMER)
    assert catalog.needed_from(stream) == {"lake": 50, "mail": 31}


def test_who_came_on_in_time_is_not_cut_off(catalog: Catalog, stream: StreamId) -> None:
    gone = CutOff("mail", HolderKind.CONSUMER, Seq(5), Seq(31))
    assert not catalog.cut_off(stream, gone)
    catalog.set_needed_from(stream, "mail", Seq(5), kind=HolderKind.CONSUMER)
    catalog.set_needed_from(stream, "mail", Seq(6), kind=HolderKind.CONSUMER)
    assert not catalog.cut_off(stream, gone)
    assert catalog.needed_from(stream) == {"mail": 6}


def test_a_catalog_of_the_first_schema_is_brought_up(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    with Catalog(path) as catalog:
        stream = catalog.resolve_stream("shop")
        catalog.set_needed_from(stream, "lake", Seq(5))
        catalog.set_needed_from(stream, "lake/7", Seq(3))
        with catalog.database.write() as connection:
            back_to_the_first_schema(connection)
    with Catalog(path) as catalog:
        assert catalog.needed_from(stream) == {"lake": 5, "lake/7": 3}
        kinds = {p.name: p.kind for p in catalog.pipelines(stream)}
    assert kinds == {"lake": HolderKind.PIPELINE, "lake/7": HolderKind.BACKLOG}


def test_facts_are_kept_by_scope(catalog: Catalog) -> None:
    catalog.put_fact("a", "x", {"n": 1})
    catalog.put_fact("a", "x", [1, None])
    catalog.put_fact("b", "x", "other")
    assert catalog.fact("a", "x") == [1, None]
    assert catalog.facts("b") == {"x": "other"}
    catalog.drop_fact("a", "x")
    assert catalog.fact("a", "x", "none") == "none"


def test_the_migrations_make_the_tables_that_the_code_expects(tmp_path: Path) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory
    from sqlalchemy import create_engine

    from millstream.catalog import migrations

    Catalog(tmp_path / "catalog.db").close()
    engine = create_engine(f"sqlite:///{tmp_path / 'catalog.db'}")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    engine.dispose()
    assert ScriptDirectory(str(Path(migrations.__file__).parent)).get_current_head() == REVISION


def test_a_newer_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    Catalog(path).close()
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE alembic_version SET version_num = '9999'")
    raw.close()
    with pytest.raises(CatalogTooNew) as caught:
        Catalog(path)
    assert caught.value.details["found"] == "9999"


def test_a_file_that_is_no_catalog_is_a_typed_error(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    path.write_bytes(b"not a database at all, but long enough to be looked at" * 30)
    with pytest.raises(CatalogError, match=r"catalog\.db"):
        Catalog(path)


def test_a_lock_that_is_held_too_long_is_catalog_busy(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    catalog = Catalog(path, busy_timeout_s=0.05)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(CatalogBusy):
        catalog.resolve_stream("shop")
    holder.execute("ROLLBACK")
    assert catalog.resolve_stream("shop")
    holder.close()
    catalog.close()


def test_a_full_disk_is_said_as_such_and_changes_nothing(catalog: Catalog) -> None:
    raw = catalog._database._engine.raw_connection()
    pages = raw.cursor().execute("PRAGMA page_count").fetchone()[0]
    raw.cursor().execute(f"PRAGMA max_page_count = {pages}")
    raw.close()
    with pytest.raises(DiskFull):
        catalog.put_fact("a", "x", "y" * 100_000)
    assert catalog.fact("a", "x") is None
    catalog.put_fact("a", "x", "small")


def _open_and_register(path: str, times: int, results: multiprocessing.Queue[list[int]]) -> None:
    with Catalog(path) as catalog:
        stream = catalog.resolve_stream("shop")
        results.put([catalog.register_writer(stream, "w")[1] for _ in range(times)])


def test_several_processes_open_a_new_catalog_at_once_and_no_epoch_is_given_twice(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[list[int]] = context.Queue()
    path = str(tmp_path / "catalog.db")
    processes = [context.Process(target=_open_and_register, args=(path, 10, results)) for _ in range(3)]
    for process in processes:
        process.start()
    epochs = [epoch for _ in processes for epoch in results.get(timeout=60)]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert sorted(epochs) == list(range(1, 31))
