"""A sink's notes about tables that are quarantined: they outlive the home's own notes, and never the log."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pytest
from pyspark import SparkContext
from tests.spark.hand_made import Home, insert
from tests.spark.lake_run import config_of

from millstream.catalog import TableState
from millstream.catalog.pipeline_tables import FoldFailures, LastFigures, QuarantinedTable, TableFigures
from millstream.errors import CatalogError, LakeError, LakeUnavailable, Retry, TokenFromFuture
from millstream.lake.commit_cuts import Cut, CutTable
from millstream.lake.layout import LakeLayout, TableCommit
from millstream.lake.maintenance import MaintenanceResult
from millstream.model.ids import SchemaVersion, TableId
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema
from millstream.spark.batch_parts import BatchPart
from millstream.spark.batch_targets import LakeOfFiles
from millstream.spark.driver import take_up
from millstream.spark.executor_tasks import Around, MaintenanceAnswer, TableAnswer, TableError
from millstream.spark.fold_schedule import FoldHistory
from millstream.spark.pipeline_tables import PipelineTables, written_us
from millstream.spark.session import SparkOptions
from millstream.testing.errors import coded

ASIDE = TableId(7)


class SinkInMemory:
    """A sink that keeps its last cut, and the log's holders when the cut was committed."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self.cut: Cut | None = None
        self.told: dict[TableId, Seq] = {}
        self.lacks: dict[TableId, Seq] = {}
        self.holders: set[str] = set()

    @property
    def pipeline(self) -> str:
        return "lake"

    def begin(self, schemas: Iterable[TableSchema], sources: Collection[tuple[int, str]]) -> None:
        raise NotImplementedError

    def last_cut(self) -> Cut | None:
        return self.cut

    def held(self) -> dict[TableId, Seq]:
        return self.told

    def lacking(
        self, tables: Collection[TableId], *, without_rows: Collection[TableId]
    ) -> dict[TableId, tuple[Seq, str]]:
        return {table: (n, "current") for table, n in self.lacks.items() if table in {*tables} - {*without_rows}}

    def commit_cut(
        self,
        n: Seq,
        table_commits: Iterable[TableCommit],  # noqa: ARG002 - none is asked for here
        *,
        committed_at: datetime,
        commit_ts_max: datetime | None,
        held: Mapping[TableId, Seq],
    ) -> Cut:
        self.cut = Cut(1, n, committed_at, commit_ts_max)
        self.told = dict(held)
        self.holders = {position.name for position in self._home.catalog.pipelines(self._home.stream)}
        return self.cut

    def land(self, context: SparkContext, batch: BatchPart, upto: Seq, around: Around) -> list[TableAnswer]:
        raise NotImplementedError


@pytest.fixture
def sink(home: Home) -> SinkInMemory:
    return SinkInMemory(home)


def tables_of(home: Home, sink: SinkInMemory) -> PipelineTables:
    return PipelineTables(config_of(home.path, home.stream, SparkOptions(home.path), target=sink), home.catalog)


def test_progress_is_told_while_a_cut_waits_for_the_lake_and_an_end_is_not_held_back(
    home: Home, sink: SinkInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both waited for five minutes if the store failed between a batch's tables and its cut."""
    asked, ending = threading.Event(), threading.Event()

    def fail(*_: object, **__: object) -> Cut:
        asked.set()
        raise LakeUnavailable("the store doesn't answer")

    tables = tables_of(home, sink)
    monkeypatch.setattr(sink, "commit_cut", fail)
    tables.wait = ending.wait
    with ThreadPoolExecutor() as pool:
        cut = pool.submit(tables.commit, Seq(1), [])
        assert asked.wait(30)
        try:
            assert pool.submit(tables.progress).result(30) == ()
        finally:
            ending.set()
        with pytest.raises(LakeUnavailable):
            cut.result(30)


def test_a_sink_knows_of_a_table_until_it_has_caught_up_and_no_longer_than_the_log_is_held(
    home: Home, sink: SinkInMemory
) -> None:
    pipeline_tables = tables_of(home, sink)
    pipeline_tables.quarantine.add(QuarantinedTable(ASIDE, "public.aside", Seq(3), "it doesn't fit", "lake", ""))
    pipeline_tables.commit(Seq(9), ())
    assert sink.told == {ASIDE: 3}
    pipeline_tables.release(ASIDE)
    assert sink.told == {}
    assert f"lake/{ASIDE}" in sink.holders, "the log might have dropped by then what the sink asks for again"
    assert f"lake/{ASIDE}" not in {p.name for p in home.catalog.pipelines(home.stream)}
    assert tables_of(home, sink).quarantine.tables == {}


def test_a_fold_that_fails_is_kept_in_the_catalog_until_it_succeeds(home: Home, sink: SinkInMemory) -> None:
    posts, failures = TableId(7), FoldFailures(home.catalog, home.stream, "lake")
    table = CutTable(posts, "public.posts", 1, history_n=Seq(4))
    sink.cut = Cut(1, Seq(4), datetime.now(UTC), None, tables={"public.posts": table})
    error = TableError("invalid_value", "a total has more than 64 bits", "Append an increment.", Retry.NEVER)
    first = tables_of(home, sink)
    for _ in range(2):
        first.folded(posts, (), FoldHistory(), 0.0, error)
    fact = {"code": "invalid_value", "reason": error.message, "hint": error.hint}
    assert failures.all() == {posts: fact}
    assert first.fold_errors() == {"public.posts": error}
    second = tables_of(home, sink)
    assert failures.all() == {posts: fact}
    second.folded(
        posts, [TableCommit(posts, "public.posts", "public.posts", "current", 1, 1, Seq(4))], FoldHistory(), 0.0
    )
    assert failures.all() == {}
    failures.put(TableId(8), **fact)
    tables_of(home, sink)
    assert failures.all() == {}, "the table is gone from the lake"


def test_a_catalog_that_is_away_for_a_while_ends_no_fold(
    home: Home, sink: SinkInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folds' thread ended with the first one, or never recorded the failure."""
    posts, failures, is_away, puts = TableId(7), FoldFailures(home.catalog, home.stream, "lake"), [True], [0]
    sink.cut = Cut(1, Seq(4), datetime.now(UTC), None, tables={"public.posts": CutTable(posts, "public.posts", 1)})
    pipeline_tables = tables_of(home, sink)

    def reached(call: Callable[..., None]) -> Callable[..., None]:
        def catalog_call(*arguments: object) -> None:
            if is_away[0]:
                raise CatalogError("the catalog's server doesn't answer", code="catalog_unreachable")
            puts[0] += 1
            call(*arguments)

        return catalog_call

    monkeypatch.setattr(home.catalog, "put_fact", reached(home.catalog.put_fact))
    monkeypatch.setattr(home.catalog, "drop_fact", reached(home.catalog.drop_fact))
    for n in range(5):
        is_away[0] = n == 0
        error = TableError("unexpected", f"OSError: /tmp/part-{n} is full", "", Retry.BACKOFF)
        pipeline_tables.folded(posts, (), FoldHistory(), 0.0, error)
    assert failures.all() == {posts: {"code": "unexpected", "reason": "OSError: /tmp/part-1 is full", "hint": ""}}
    assert puts == [1], "its message changes at each try"
    is_away[0] = True
    folded = [TableCommit(posts, "public.posts", "public.posts", "current", 1, 1, Seq(4))]
    pipeline_tables.folded(posts, folded, FoldHistory(), 0.0)
    is_away[0] = False
    pipeline_tables.keep_changes()
    assert failures.all() == {}


def test_the_last_change_of_a_table_is_known_to_the_next_run(home: Home, sink: SinkInMemory) -> None:
    posts = TableId(7)
    sink.cut = Cut(1, Seq(4), datetime.now(UTC), None, tables={"public.posts": CutTable(posts, "public.posts", 1)})
    landed = [TableCommit(posts, "public.posts", "public.posts", "history", 2, 1, Seq(5))]
    first = tables_of(home, sink)
    assert first.progress()[0].changed_us is None
    first.appended(landed, {posts: SchemaVersion(1)}, {posts: 1000})
    first.appended(landed, {posts: SchemaVersion(1)}, {posts: 900, TableId(8): 2000})
    assert first.progress()[0].changed_us == 1000
    first.keep_changes()
    assert tables_of(home, sink).progress()[0].changed_us == 1000
    assert LastFigures(home.catalog, home.stream, "lake").all()[1] == {posts: TableFigures(2, None, None, 1000)}


def test_the_figures_of_a_table_are_known_to_the_next_run_and_to_a_status_without_one(
    home: Home, sink: SinkInMemory
) -> None:
    posts = TableId(7)
    sink.cut = Cut(1, Seq(4), datetime.now(UTC), None, tables={"public.posts": CutTable(posts, "public.posts", 1)})
    first = tables_of(home, sink)
    assert first.progress()[0].live_bytes is None
    first.appended(
        [TableCommit(posts, "public.posts", "public.posts", "history", 2, 9, Seq(5))], {posts: SchemaVersion(1)}
    )
    first.maintained(MaintenanceAnswer(posts, {"current": MaintenanceResult(live_bytes=100, disk_bytes=250)}))
    first.keep_changes()
    recorded_us, figures = LastFigures(home.catalog, home.stream, "lake").all()
    assert figures == {posts: TableFigures(9, 100, 250)}
    assert 0 <= time.time() - recorded_us / 1e6 < 600
    again = tables_of(home, sink)
    assert (again.progress()[0].live_bytes, again.progress()[0].disk_bytes) == (100, 250)
    again.keep_changes()
    assert LastFigures(home.catalog, home.stream, "lake").all()[1] == {posts: TableFigures(0, 100, 250)}


def test_a_sink_restored_from_a_backup_of_then_has_the_table_caught_up_again(home: Home, sink: SinkInMemory) -> None:
    pipeline_tables = tables_of(home, sink)
    pipeline_tables.quarantine.add(QuarantinedTable(ASIDE, "public.aside", Seq(3), "it doesn't fit", "lake", ""))
    pipeline_tables.commit(Seq(9), ())
    backup = sink.cut, sink.told
    pipeline_tables.release(ASIDE)
    sink.cut, sink.told = backup
    restored = tables_of(home, sink)
    assert [(table.table_id, table.after) for table in restored.quarantine.retries_due()] == [(ASIDE, 3)]


def test_a_table_with_a_view_that_lacks_records_is_quarantined_unless_a_copy_is_under_way(
    home: Home, sink: SinkInMemory
) -> None:
    names = ["asked", "copying", "alike"]
    tables = {name: home.table(name, id=pa.int32()).table_id for name in names}
    sink.cut = Cut(1, Seq(9), datetime.now(UTC), None)
    sink.lacks = {tables["asked"]: Seq(4), tables["copying"]: Seq(9)}
    home.catalog.set_state(tables["copying"], TableState.COPY_REQUESTED)
    (held,) = tables_of(home, sink).quarantine.retries_due()
    assert (held.table_id, held.after, held.code) == (tables["asked"], 4, "lake_view_incomplete")
    assert held.hint == "Run `millstream tables copy public.asked`."


def opened_again(home: Home) -> Home:
    home.close()
    return Home(home.path)


def test_a_log_that_was_put_back_is_refused_once_it_has_records_that_its_newer_lake_never_got(tmp_path: Path) -> None:
    """Its numbers had grown past the lake's position, and the records below that never landed."""
    home = Home(tmp_path / "shop")
    table = home.table("orders", id=pa.int32())
    sink = SinkInMemory(home)

    def take(up: Home, cut: Cut | None) -> None:
        sink.cut = cut
        take_up(config_of(up.path, up.stream, SparkOptions(up.path), target=sink), up.log, tables_of(up, sink))

    def landed(n: Seq) -> Cut | None:
        return tables_of(home, sink).commit(n, (), written_us=written_us(home.log, n))

    late = early = landed(home.commit(insert(table, id=1)))
    home.close()
    shutil.copytree(home.path, tmp_path / "copy")
    home = Home(home.path)
    for number in range(5):
        late = landed(home.commit(insert(table, id=number)))
    copy = Home(tmp_path / "copy")
    copy.commit(insert(table, id=7))
    with pytest.raises(TokenFromFuture):
        take(copy, late)
    copy = opened_again(copy)
    copy.commit(insert(table, id=8))
    assert late is not None
    assert copy.log.persisted_upto() > late.n
    take(copy, late)  # not known within a minute: clocks may be that far apart
    with pytest.raises(LakeError, check=coded("lake_of_another_log")):
        take(copy, replace(late, committed_at=late.committed_at - timedelta(seconds=61)))
    take(copy, early)
    home = opened_again(home)
    home.commit(insert(table, id=9))
    of_a_slow_clock = replace(late, committed_at=late.committed_at - timedelta(seconds=59))
    for cut in (early, late, of_a_slow_clock, None):
        take(home, cut)
    home.close()
    copy.close()


@pytest.mark.parametrize(
    ("format_", "words"),
    [("delta", "move the lake's folder away"), ("iceberg", "data/iceberg.db"), (None, "another database")],
)
def test_a_refused_lake_is_told_what_gives_its_format_an_empty_one(
    home: Home, sink: SinkInMemory, format_: Literal["delta", "iceberg"] | None, words: str
) -> None:
    """A folder was named to a lake in a database, and one whose catalog would have led back to the old folder."""
    n = home.commit(insert(home.table("orders", id=pa.int32()), id=1))
    files = None if format_ is None else LakeOfFiles(LakeLayout(str(home.path), "shop", home.stream, format=format_))
    config = config_of(home.path, home.stream, SparkOptions(home.path), target=files or sink)
    pipeline_tables = tables_of(home, sink)
    pipeline_tables.cut = Cut(1, n, datetime.fromtimestamp(0, UTC), None)
    with pytest.raises(LakeError, check=coded("lake_of_another_log")) as refused:
        take_up(config, home.log, pipeline_tables)
    assert words in refused.value.hint


def test_a_cut_is_never_older_than_the_log_that_it_has(home: Home, sink: SinkInMemory) -> None:
    """The clock may have been set back since, or the log's may be ahead: its lake must not pass for another log's."""
    ahead = time.time_ns() // 1000 + 3_600_000_000
    cut = tables_of(home, sink).commit(Seq(5), (), written_us=ahead)
    assert cut is not None
    assert cut.committed_at == datetime.fromtimestamp(0, UTC) + timedelta(microseconds=ahead)
