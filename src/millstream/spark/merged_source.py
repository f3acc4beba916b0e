"""`spark.read.format("millstream").option("merged", "true")`: the rows of a table that several regions write.

One task reads them, as `OpenHome.merged` does, so it holds a row for each key and region. `millstream.spark.merged_rows`
merges larger tables by Spark's own aggregates.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Self

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

import millstream
from millstream.errors import UsageError
from millstream.model.as_of_parsing import moment_of
from millstream.model.region_ages import as_line, regions_in
from millstream.model.schema_conversion import conform
from millstream.spark.executor_flight import OPTIONS
from millstream.spark.python_worker_setup import spare_the_collector
from millstream.spark.spark_columns import arrow_schema

_ROWS: Final = 16_384
_ONLY_RECORDS: Final = (
    "starting",
    "ending",
    "wal",
    "max_rows_per_trigger",
    "max_bytes_per_trigger",
    *OPTIONS,
)
_BOOLEANS: Final = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class MergedTable:
    """The table to read."""

    home: Path
    stream: str
    table: str
    at: datetime | None = None

    @classmethod
    def parse(cls, given: Mapping[str, str], home: Path | None, stream: str) -> Self | None:
        """Return the table that options name, in lower case; None if they don't ask for merged rows.

        Args:
            given: the options.
            home: the home that they name; None if they name a log's folder.

        Raises:
            UsageError: an option is malformed or missing, or doesn't go with merged rows.
            PositionError (`invalid_time`): the moment is no time.
        """
        asked = _BOOLEANS.get(given.get("merged", "false").lower())
        if asked is None:
            raise UsageError(f"merged is {given['merged']!r}", hint="It is `true` or `false`.")
        if not asked:
            if "at" in given:
                raise UsageError("at goes with merged rows only", hint='Add .option("merged", "true").')
            return None
        for name in _ONLY_RECORDS:
            if name in given:
                raise UsageError(f"merged rows take no option {name!r}", hint="Records do: leave `merged` out.")
        if "table" not in given:
            raise UsageError("merged rows need the option table", hint='Name one: .option("table", "public.posts").')
        at = moment_of(given["at"], now=datetime.now(UTC)) if "at" in given else None
        assert home is not None, "wal was refused"
        return cls(home, stream, given["table"], at)

    def schema(self) -> pa.Schema:
        """Return the columns; raises as `OpenHome.merged`."""
        with millstream.open(self.home) as home:
            return home.merged_schema(self.stream, self.table)

    def rows(self) -> pa.Table:
        """Return the rows, and list their regions on stderr; raises as `OpenHome.merged`."""
        with millstream.open(self.home) as home:
            rows = home.merged(self.stream, self.table, at=self.at)
        sys.stderr.write(f"{self.table}: {as_line(regions_in(rows.schema.metadata))}\n")
        return rows


class MergedReader(DataSourceReader):
    """One batch of merged rows, of what is durable when its task begins."""

    def __init__(self, table: MergedTable, declared: StructType) -> None:
        self._table = table
        self._declared = declared

    def partitions(self) -> Sequence[InputPartition]:
        """Return one partition: each key's rows are in several logs."""
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows, in the columns that were declared."""
        del partition
        target = arrow_schema(self._declared)
        for batch in self._table.rows().to_batches(max_chunksize=_ROWS):
            yield conform(batch, target, hint="A column has changed since the table was loaded: load it again.")
        spare_the_collector("read")
