"""A sink's notes about tables that are quarantined: they outlive the home's own notes, and never the log."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime

import pytest
from pyspark import SparkContext
from tests.spark.hand_made import Home
from tests.spark.lake_run import config_of

from millstream.catalog.quarantined_tables import QuarantinedTable
from millstream.lake.commit_cuts import Cut
from millstream.lake.layout import TableCommit
from millstream.model.ids import TableId
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema
from millstream.spark.batch_parts import BatchPart
from millstream.spark.executor_tasks import Around, TableAnswer
from millstream.spark.pipeline_tables import PipelineTables
from millstream.spark.session import SparkOptions

ASIDE = TableId(7)


class SinkInMemory:
    """A sink that keeps its last cut, and the log's holders when the cut was committed."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self.cut: Cut | None = None
        self.told: dict[TableId, Seq] = {}
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
    return PipelineTables(config_of(home.path, home.stream, SparkOptions(home.path), sink=sink), home.catalog)


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


def test_a_sink_restored_from_a_backup_of_then_has_the_table_caught_up_again(home: Home, sink: SinkInMemory) -> None:
    pipeline_tables = tables_of(home, sink)
    pipeline_tables.quarantine.add(QuarantinedTable(ASIDE, "public.aside", Seq(3), "it doesn't fit", "lake", ""))
    pipeline_tables.commit(Seq(9), ())
    backup = sink.cut, sink.told
    pipeline_tables.release(ASIDE)
    sink.cut, sink.told = backup
    restored = tables_of(home, sink)
    assert [(table.table_id, table.after) for table in restored.quarantine.retries_due()] == [(ASIDE, 3)]
