"""Where a pipeline lands its batches: a lake of files, or a database. One way of landing for both, in two kinds of jobs.

Each table's data and its position are committed together by executors; then the driver commits the cut that says that all have them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Protocol

from pyspark.sql import DataFrame, Row
from pyspark.sql.functions import lit

from millstream.lake import snapshots as commits
from millstream.lake.layout import LakeLayout, TableCommit
from millstream.lake.postgres import cuts
from millstream.lake.postgres.land import begin
from millstream.lake.postgres.target import PostgresTarget
from millstream.lake.renames import places_of
from millstream.lake.snapshots import Cut
from millstream.model.ids import TableId
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema
from millstream.private_files import make_folder
from millstream.spark.landing import ANSWER_COLUMNS, Around, database_writer, table_writer


class Sink(Protocol):
    """Where a pipeline lands."""

    @property
    def pipeline(self) -> str:
        """The pipeline's name: positions are kept by it."""

    def begin(self, schemas: Iterable[TableSchema], sources: Collection[tuple[int, str]]) -> None:
        """What has to be so before the first batch of a run.

        Args:
            schemas: of the stream's tables.
            sources: system identifier and database of what the stream captures.

        Raises:
            LakeError: nothing can land there.
        """

    def last_cut(self) -> Cut | None:
        """The last cut; None before the first."""

    def held(self) -> dict[TableId, Seq]:
        """Tables that it knows to have been set aside at the last cut, with how far each was landed."""

    def commit_cut(
        self,
        n: Seq,
        table_commits: Iterable[TableCommit],
        *,
        committed_at: datetime,
        commit_ts_max: datetime | None,
        held: Mapping[TableId, Seq],
    ) -> Cut:
        """Commit that every table has everything up to `n`, but for those held: `millstream.lake.snapshots.commit_cut`."""

    def land(self, batch: DataFrame, around: Around) -> list[Row]:
        """Run the job that lands a batch; a row of `ANSWER_COLUMNS` a table, markers' among them."""


@dataclass(frozen=True, slots=True)
class LakeOfFiles:
    """A lake of Delta tables: a task a table, each with a transaction of its own."""

    layout: LakeLayout

    @property
    def pipeline(self) -> str:
        """See `Sink`."""
        return self.layout.pipeline

    def begin(self, schemas: Iterable[TableSchema], sources: Collection[tuple[int, str]]) -> None:  # noqa: ARG002 - files lie beside any source
        """See `Sink`: its folder. Tables are made when they are written to."""
        if "://" not in self.layout.location:
            make_folder(Path(self.layout.location))

    def last_cut(self) -> Cut | None:
        """See `Sink`."""
        return commits.last_cut(self.layout)

    def held(self) -> dict[TableId, Seq]:
        """See `Sink`: a lake of files doesn't tell."""
        return {}

    def commit_cut(
        self,
        n: Seq,
        table_commits: Iterable[TableCommit],
        *,
        committed_at: datetime,
        commit_ts_max: datetime | None,
        held: Mapping[TableId, Seq],  # noqa: ARG002 - the catalog has it
    ) -> Cut:
        """See `Sink`."""
        return commits.commit_cut(self.layout, n, table_commits, committed_at=committed_at, commit_ts_max=commit_ts_max)

    def land(self, batch: DataFrame, around: Around) -> list[Row]:
        """See `Sink`."""
        writer = table_writer(self.layout, around.held, places_of(around.cut))
        return batch.groupBy("table_id").applyInArrow(writer, ANSWER_COLUMNS).collect()


@dataclass(frozen=True, slots=True)
class Database:
    """Tables of a PostgreSQL database: one task, for all tables are one transaction there, by one writer at a time."""

    target: PostgresTarget = field(repr=False)

    @property
    def pipeline(self) -> str:
        """See `Sink`."""
        return self.target.pipeline

    def begin(self, schemas: Iterable[TableSchema], sources: Collection[tuple[int, str]]) -> None:
        """See `Sink`."""
        begin(self.target, schemas, sources)

    def last_cut(self) -> Cut | None:
        """See `Sink`."""
        return cuts.last_cut(self.target)

    def held(self) -> dict[TableId, Seq]:
        """See `Sink`."""
        return cuts.held_there(self.target)

    def commit_cut(
        self,
        n: Seq,
        table_commits: Iterable[TableCommit],
        *,
        committed_at: datetime,
        commit_ts_max: datetime | None,
        held: Mapping[TableId, Seq],
    ) -> Cut:
        """See `Sink`."""
        return cuts.commit_cut(
            self.target, n, table_commits, committed_at=committed_at, commit_ts_max=commit_ts_max, held=held
        )

    def land(self, batch: DataFrame, around: Around) -> list[Row]:
        """See `Sink`."""
        writer = database_writer(self.target, around)
        return batch.withColumn("database", lit(0)).groupBy("database").applyInArrow(writer, ANSWER_COLUMNS).collect()
