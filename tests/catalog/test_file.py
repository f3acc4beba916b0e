"""A catalog in a file: its promises beyond those of every catalog (test_backends)."""

from __future__ import annotations

import itertools
import multiprocessing
import shutil
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.catalog import Catalog
from millstream.errors import CatalogError, DiskFull
from millstream.model.positions import Lsn, Seq
from millstream.testing.errors import coded


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    """Yield one catalog for many streams: creating one takes longer than using it."""
    with Catalog(tmp_path_factory.mktemp("home") / "catalog.db") as catalog:
        yield catalog


_streams = itertools.count(1)


@given(moves=st.lists(st.integers(0, 2**62), min_size=1, max_size=8))
def test_a_position_is_the_greatest_it_was_moved_to(shared: Catalog, moves: list[int]) -> None:
    stream = shared.resolve_stream(f"shop{next(_streams)}")
    source = shared.resolve_source(stream, 7, "shop", 1)
    for count, lsn in enumerate(moves, 1):
        assert shared.move_reached(source, Lsn(lsn)) == max(moves[:count]) == shared.reached(source)
        shared.set_needed_from(stream, "lake", Seq(lsn))
        shared.set_landed(stream, "lake", Seq(lsn))
    assert shared.needed_from(stream) == {"lake": max(moves)}
    assert shared.landed(stream, "lake") == max(moves)


def test_a_name_means_the_newest_table_that_was_captured_under_it(shared: Catalog) -> None:
    stream = shared.resolve_stream(f"shop{next(_streams)}")
    source = shared.resolve_source(stream, 7, "shop", 1)
    shared.table_for(stream, source, 16400, "public", "orders")  # dropped at the source, which capture hasn't noticed
    new = shared.table_for(stream, source, 16500, "public", "orders")
    assert shared.find_table(stream, "public", "orders").id == new.id


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
    with pytest.raises(CatalogError, check=coded("catalog_busy")):
        catalog.resolve_stream("shop")
    holder.execute("ROLLBACK")
    assert catalog.resolve_stream("shop")
    holder.close()
    catalog.close()


def test_a_full_disk_is_said_as_such_and_changes_nothing(tmp_path: Path) -> None:
    with Catalog(tmp_path / "catalog.db") as catalog:
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


@pytest.mark.siege
def test_several_processes_open_a_new_catalog_at_once_and_no_epoch_is_given_twice(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[list[int]] = context.Queue()
    path = str(tmp_path / "catalog.db")
    processes = [context.Process(target=_open_and_register, args=(path, 10, results)) for _ in range(3)]
    for process in processes:
        process.start()
    epochs = [epoch for _ in processes for epoch in results.get(timeout=300)]
    for process in processes:
        process.join(180)
        assert process.exitcode == 0
    assert sorted(epochs) == list(range(1, 31))


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
@pytest.mark.parametrize("is_replaced", [False, True])
def test_files_that_are_removed_or_replaced_under_an_open_catalog_are_noticed(
    tmp_path: Path, suffix: str, is_replaced: bool
) -> None:
    path = tmp_path / "catalog.db"
    with Catalog(path) as catalog:
        stream = catalog.resolve_stream("shop")
        file = path.with_name(f"catalog.db{suffix}")
        kept = file.read_bytes()
        file.rename(tmp_path / "elsewhere")
        if is_replaced:
            file.write_bytes(kept)
        for call in (lambda: catalog.resolve_stream("web"), catalog.streams, catalog.database.check_files):
            with pytest.raises(
                CatalogError, check=coded("catalog_replaced"), match="replaced by another" if is_replaced else "removed"
            ) as caught:
                call()
            assert caught.value.details["file"] == str(file)
        (tmp_path / "elsewhere").rename(file)
        assert catalog.resolve_stream("shop") == stream


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_home_that_was_moved_is_started_at_its_new_place_and_one_that_was_deleted_restored(
    tmp_path: Path, is_made_again: bool
) -> None:
    """The hint for a moved folder was to restore the catalog from a copy."""
    old, new = tmp_path / "home" / "data", tmp_path / "moved" / "data"
    with Catalog(old / "catalog.db") as catalog:
        catalog.resolve_stream("shop")
        old.parent.rename(new.parent)
        if is_made_again:
            old.mkdir(parents=True)
        with pytest.raises(CatalogError, check=coded("catalog_replaced"), match=f"{old} was moved to {new}") as caught:
            catalog.streams()
        assert "`--home` at the folder's new place" in caught.value.hint
        shutil.rmtree(new.parent)
        with pytest.raises(CatalogError, check=coded("catalog_replaced"), match="removed") as caught:
            catalog.streams()
        assert "restore" in caught.value.hint


def test_a_commit_to_a_file_that_was_removed_meanwhile_is_not_acknowledged(tmp_path: Path) -> None:
    with Catalog(tmp_path / "catalog.db") as catalog:
        catalog.resolve_stream("shop")

        def commit() -> None:
            with catalog.database.write() as connection:
                connection.exec_driver_sql("UPDATE streams SET epoch = 7")
                (tmp_path / "catalog.db-wal").unlink()

        with pytest.raises(CatalogError, check=coded("catalog_replaced"), match="-wal was removed"):
            commit()


def test_files_that_the_last_connection_removed_are_not_missed(tmp_path: Path) -> None:
    """SQLite removes `-wal` and `-shm` when they are no longer used; the next call creates them again."""
    catalog = Catalog(tmp_path / "catalog.db")
    stream = catalog.resolve_stream("shop")
    for _ in range(3):
        catalog.close()
        assert not (tmp_path / "catalog.db-wal").exists()
        catalog.database.check_files()
        assert catalog.resolve_stream("shop") == stream
    catalog.close()


def test_many_threads_that_open_and_close_connections_miss_no_file(tmp_path: Path) -> None:
    with Catalog(tmp_path / "catalog.db") as catalog, ThreadPoolExecutor(24) as threads:
        catalog.resolve_stream("shop")
        # More than the pool keeps, so connections come and go.
        assert all(threads.map(lambda _: [row.name for row in catalog.streams()] == ["shop"], range(500)))
