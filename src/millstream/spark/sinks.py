"""Targets of a pipeline's batches: a lake of files, or a database. Both land the same way, in two kinds of jobs.

Executors commit each table's data and its position together; then the driver commits the cut that
covers all tables.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Protocol

from pyspark.sql import DataFrame, Row
from pyspark.sql.functions import lit

from millstream.lake import commit_cuts
from millstream.lake.commit_cuts import Cut
from millstream.lake.layout import LakeLayout, TableCommit
from millstream.lake.postgres import cuts
from millstream.lake.postgres.land import begin
from millstream.lake.postgres.target import PostgresTarget
from millstream.model.ids import TableId
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema
from millstream.private_files import make_folder
from millstream.spark.landing import ANSWER_COLUMNS, Around, database_writer, table_writer


class Sink(Protocol):
    """The target in which a pipeline lands."""

    @property
    def pipeline(self) -> str:
        """The pipeline's name, under which positions are kept."""

    def begin(self, schemas: Iterable[TableSchema], sources: Collection[tuple[int, str]]) -> None:
        """Prepare the target for the first batch of a run.

        Args:
            schemas: the schemas of the stream's tables.
            sources: system identifier and database of each source of the stream.

        Raises:
            LakeError: nothing can land there.
        """

    def last_cut(self) -> Cut | None:
        """Return the last cut; None before the first."""

    def held(self) -> dict[TableId, Seq]:
        """Return the tables that the target recorded as quarantined at the last cut, with each one's landed position."""

    def commit_cut(
        self,
        n: Seq,
        table_commits: Iterable[TableCommit],
        *,
        committed_at: datetime,
        commit_ts_max: datetime | None,
        held: Mapping[TableId, Seq],
    ) -> Cut:
        """Commit that every table has everything up to `n`, except those held: `lake.commit_cuts.commit_cut`."""

    def land(self, batch: DataFrame, around: Around) -> list[Row]:
        """Run the job that lands a batch; return a row of `ANSWER_COLUMNS` for each table, and for each marker."""


@dataclass(frozen=True, slots=True)
class LakeOfFiles:
    """A lake of Delta tables: a task a table, each with a transaction of its own."""

    layout: LakeLayout

    @property
    def pipeline(self) -> str:
        """See `Sink`."""
        return self.layout.pipeline

    def begin(self, schemas: Iterable[TableSchema], sources: Collection[tuple[int, str]]) -> None:  # noqa: ARG002 - a lake of files has no source
        """See `Sink`: make its folder. Tables are made when they are written to."""
        if "://" not in self.layout.location:
            make_folder(Path(self.layout.location))

    def last_cut(self) -> Cut | None:
        """See `Sink`."""
        return commit_cuts.last_cut(self.layout)

    def held(self) -> dict[TableId, Seq]:
        """See `Sink`: a lake of files doesn't record these."""
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
        return commit_cuts.commit_cut(
            self.layout, n, table_commits, committed_at=committed_at, commit_ts_max=commit_ts_max
        )

    def land(self, batch: DataFrame, around: Around) -> list[Row]:
        """See `Sink`."""
        writer = table_writer(self.layout, around.held, around.places)
        return batch.groupBy("table_id").applyInArrow(writer, ANSWER_COLUMNS).collect()


@dataclass(frozen=True, slots=True)
class LakeDatabase:
    """Tables of a PostgreSQL database: one task, because they all share one transaction, by one writer at a time."""

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
