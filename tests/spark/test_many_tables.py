"""A pipeline's work for a thousand tables is that for the tables that changed."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, cast

import pyarrow as pa
import pytest
from pyspark import SparkContext
from sqlalchemy import Engine, event
from tests.spark.hand_made import Home, insert
from tests.spark.lake_run import config_of
from tests.spark.test_folding import Folding, JobsHere

from millstream.lake import table_renames
from millstream.lake.commit_cuts import commit_cut
from millstream.lake.layout import TableCommit
from millstream.lake.table_renames import PackedPlaces, RecordFolder
from millstream.model.ids import TableId
from millstream.model.positions import Seq
from millstream.spark.complete_copies import CompleteCopies
from millstream.spark.fold_thread import FoldThread
from millstream.spark.session import SparkOptions


@contextmanager
def counted() -> Iterator[list[str]]:
    """The statements that the catalog executes."""
    statements: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        statements.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield statements
    finally:
        event.remove(Engine, "before_cursor_execute", note)


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_a_start_a_round_of_folds_and_a_batch_ask_the_catalog_as_often_as_for_one_table(home: Home, count: int) -> None:
    tables = [home.table(f"t{number}", id=pa.int64()) for number in range(count)]
    n = home.commit(insert(tables[0], id=1))
    config = config_of(home.path, home.stream, SparkOptions(home.path))
    commits = [
        TableCommit(table.table_id, table.full_name, f"public.{table.name}", view, 1, 1, n)
        for table in tables
        for view in ("history", "current")
    ]
    commit_cut(config.layout, n, commits, committed_at=datetime.now(UTC))
    for table in tables:
        (home.path / "lake" / "shop" / "current" / f"public.{table.name}").mkdir(parents=True)
    with counted() as at_the_start:
        folding = Folding.of(home)
    entries = folding.tables.tables
    assert len(entries) == count
    assert not [entry.name for entry in entries.values() if entry.waiting_since_s is not None], "a fold is repeated"

    copies = CompleteCopies(home.catalog, home.stream)
    jobs = cast("SparkContext", JobsHere())
    thread = FoldThread(config, home.catalog, folding.tables, jobs, lambda: None, threading.Lock(), copies)
    folding.tables.appended(
        [TableCommit(table.table_id, table.full_name, f"public.{table.name}", "history", 2, 1, n) for table in tables],
        {table.table_id: table.version for table in tables},
    )
    with counted() as in_a_round:
        assert len(thread._tasks(lambda _entry: True)) == count
    folding.tables.appended(
        [TableCommit(tables[0].table_id, "public.t0", "public.t0", "history", 3, 1, n)],
        {tables[0].table_id: home.add_column(tables[0], "more", pa.int64()).version},
    )
    with counted() as after_a_change:
        assert len(thread._tasks(lambda entry: entry.table_id == tables[0].table_id)) == 1
    with counted() as in_a_batch:
        copies.observe(home.log.persisted_upto)
    asked = [at_the_start, in_a_round, after_a_change, in_a_batch]
    assert [len(statements) <= 10 for statements in asked] == [True] * 4, asked
    read_whole = [statement for statement in after_a_change if "arrow" in statement]
    assert len(read_whole) == 1
    assert "version = ?" in read_whole[0], "one version of one table"


def test_a_batch_pickles_the_places_that_changed() -> None:
    places = {TableId(number): RecordFolder(f"public.t{number}", Seq(number)) for number in range(1000)}
    first = PackedPlaces().followed_by(places)
    assert (first.changed, first.unpacked()) == ({}, places)
    parsed = table_renames._parsed.cache_info().misses
    packed = first
    for batch in range(50):
        table = TableId(batch % 20)
        places |= {table: RecordFolder("public.renamed", Seq(2000 + batch))}
        places.pop(TableId(999), None)
        packed = packed.followed_by(places)
        assert packed.base is first.base
        sent: PackedPlaces = pickle.loads(pickle.dumps(packed))
        assert sent.unpacked() == places
    assert set(packed.changed) == {*map(TableId, range(20)), TableId(999)}
    assert table_renames._parsed.cache_info().misses == parsed, "parsed once a process"
    many = {table: RecordFolder("elsewhere", Seq(5000)) for table in places}
    assert packed.followed_by(many).changed == {}
