"""Defects of merging and following. Each is a world of regions that does one thing wrongly, with a seed that finds it.

python -m tests.crdt.region_mutations [NAME…]
"""

from __future__ import annotations

import sys

import pyarrow as pa
from tests.crdt.model_regions import ModelTable
from tests.crdt.region_simulation import World
from tests.mutations import Mutation, main

from millstream.crdt.region_state import Missing, ReconciliationEngine, RegionState
from millstream.model.ids import RegionId
from millstream.model.positions import Seq, StreamToken
from millstream.regions.merged_table import Known

SEEDS_MAX = 300


class ForgetfulEngine(ReconciliationEngine):
    """An engine that adds rows without replacing those already there."""

    def apply(self, state: RegionState, missing: Missing) -> RegionState:
        found = super().apply(state, missing)
        return RegionState(pa.concat_tables([state.rows, missing.rows]), found.vector, found.ends)


class ForgottenDuplicates(World):
    """A record that arrives twice is there twice."""

    found_by = 1

    engine_type = ForgetfulEngine


class OverwritingEngine(ReconciliationEngine):
    """An engine that replaces a region's row by the newest record, as a whole.

    It forgets what columns remember of older records.
    """

    def apply(self, state: RegionState, missing: Missing) -> RegionState:
        new = {tuple(row[name] for name in ("__region", *self.key)) for row in missing.rows.to_pylist()}
        keys = [tuple(row[name] for name in ("__region", *self.key)) for row in state.rows.to_pylist()]
        left = state.rows.filter(pa.array([key not in new for key in keys], pa.bool_()))
        return super().apply(RegionState(left, state.vector, state.ends), missing)


class LastCameWins(World):
    """An arriving row replaces the one that is there."""

    found_by = 3

    engine_type = OverwritingEngine


class EarlyVectorTable(ModelTable):
    """A table that reports the log's end as of after the read.

    Rows written between the two weren't read.
    """

    def _read(self, region: RegionId, after: Seq, known: Known | None) -> RegionState:
        found = super()._read(region, after, known)
        reader = self._readers[region]
        return RegionState(
            found.rows, {region: StreamToken.scalar(reader.stream_id, reader.persisted_upto())}, found.ends
        )


class VectorBeforeItsRows(World):
    """A vector is taken over without its rows."""

    found_by = 220

    table_type = EarlyVectorTable


class UnknowingTable(ModelTable):
    """A table that adds new records to nothing, instead of to what it knows."""

    def _folded(self, rows: pa.Table, records: list[pa.Table], known: Known | None) -> pa.Table:  # noqa: ARG002 - that is the defect
        return super()._folded(rows, records, None)


class AddedToNothing(World):
    """The events before the last reading are forgotten."""

    found_by = 1

    table_type = UnknowingTable


class NumbersOnlyTable(ModelTable):
    """A table that identifies a log's content by its numbers alone."""

    def _still_says(self, state: RegionState, region: RegionId) -> bool:  # noqa: ARG002 - that is the defect
        self._readers[region] = self._open(region)
        return True


class LostTailStays(World):
    """Rows that were merged from a lost tail stay merged."""

    found_by = 7

    table_type = NumbersOnlyTable


class LateAnswers(World):
    """A mirror that was killed accepts an answer to a request from before the kill."""

    found_by = 194

    checks_asked = False


class DeafClocks(World):
    """A leader writes by its own clock alone."""

    found_by = 1

    hears = False


MUTATIONS: tuple[type[Mutation], ...] = (
    ForgottenDuplicates, LastCameWins, VectorBeforeItsRows, AddedToNothing, LostTailStays, LateAnswers, DeafClocks,
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(MUTATIONS, SEEDS_MAX, sys.argv[1:]))
