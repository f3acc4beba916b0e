"""Decayed signals of tables that several regions write, as Spark's own expressions: `crdt.signals`, to the bit.

Each region's events of a key are collected, and folded in the order of its log by the same sums, products and quotients
in the same order. An executor holds all events of a key at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial, reduce
from typing import Final

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - as Spark's own pages write it

from millstream.crdt.declared import WINDOWS, MergeKind, TableMerge, window_columns
from millstream.crdt.row_merge import REGION, SEQ, WALL
from millstream.crdt.signals import DECAY_TERMS, HALVINGS_MAX, SUM_MAX

REPEATS: Final = "__repeats"
"""The column that marks repeats; see `spark.merged_rows.region_records`."""
_MICROSECONDS_MAX: Final = (2**63 - 1) // 1000


class SignalColumns:
    """The columns of a table that are signals."""

    def __init__(self, columns: pa.Schema, merge: TableMerge) -> None:
        self.names: Final = tuple(merge.named(columns.names, MergeKind.SIGNAL))
        self._columns = columns
        self._merge = merge

    def newest(self) -> Column:
        """Return the aggregate that gives the time of the newest event of all signals; null if there is none."""
        moments = [F.max(self._event(name, SEQ.name).getField("at")) for name in self.names]
        return F.greatest(*moments) if len(moments) > 1 else moments[0]

    def events(self, regions: Sequence[int]) -> Iterator[Column]:
        """Yield the aggregates for grouping records: each region's events, and those of repeats."""
        for number, name in enumerate(self.names):
            for region in regions:
                event = F.when(F.col(REGION.name) == region, self._event(name, SEQ.name))
                yield F.collect_set(event).alias(f"__events_{region}_{number}")
            twice = F.when(F.col(REPEATS).isNotNull(), self._event(name, REPEATS))
            yield F.collect_set(twice).alias(f"__twice_{number}")

    def sums(self, regions: Sequence[int]) -> Iterator[Column]:
        """Yield each region's sum as of its newest event, and that event's time; the time is -1 if there is none."""
        for number, name in enumerate(self.names):
            half_life_ns = self._merge.of(name).half_life_ns
            for region in regions:
                events = F.array_sort(F.col(f"__events_{region}_{number}"))
                nothing = F.struct(F.lit(0.0).alias("sum"), F.lit(-1).cast("bigint").alias("at"))
                folded = F.aggregate(events, nothing, partial(_added, half_life_ns))
                yield folded.alias(f"__sum_{region}_{number}")

    def merged(self, regions: Sequence[int], at_ns: int) -> Iterator[Column]:
        """Yield for each signal its sum over the regions, and the number of events in each window."""
        for number, name in enumerate(self.names):
            nodes = [F.col(f"__sum_{region}_{number}") for region in regions]
            at = F.greatest(F.lit(at_ns), *(node.getField("at") for node in nodes))
            half_life_ns = self._merge.of(name).half_life_ns
            has_events = reduce(lambda held, node: held | (node.getField("at") >= 0), nodes, F.lit(False))
            twice = F.col(f"__twice_{number}")
            total = F.aggregate(F.array_sort(twice), F.lit(0.0), partial(_without, half_life_ns, at))
            for node in nodes:
                left = decay(at - F.greatest(node.getField("at"), F.lit(0)), half_life_ns)
                total = total + node.getField("sum") * left
            yield F.when(has_events, F.least(total, F.lit(SUM_MAX))).alias(name)
            for window, (width_ns, count) in zip(window_columns(name), WINDOWS.values(), strict=True):
                is_within = partial(_is_since, _begin(at, width_ns) - F.lit((count - 1) * width_ns))
                counts = [F.size(F.filter(F.col(f"__events_{region}_{number}"), is_within)) for region in regions]
                repeated = F.size(F.filter(twice, is_within))
                yield reduce(lambda total, size: total + size, counts, -repeated).cast("bigint").alias(window)

    def _event(self, name: str, number: str) -> Column:
        """Return a record's event: a number that orders it, its time and its weight; null if it has no weight."""
        how, weight = self._merge.of(name), column_of(name).cast("double")
        event = F.struct(F.col(number).alias("seq"), self._moment(how.at).alias("at"), weight.alias("weight"))
        # NaN is above all numbers in Spark.
        return F.when((weight >= 0.0) & (weight < float("inf")), event)

    def _moment(self, name: str) -> Column:
        at = self._columns.get_field_index(name) if name else -1
        if at < 0:
            return F.col(WALL.name)
        of, column = self._columns.field(at).type, column_of(name)
        if pa.types.is_timestamp(of):
            # A time without a zone is UTC's here, whatever the session's zone.
            column = F.unix_micros(
                column if of.tz else F.concat(column.cast("string"), F.lit("+00:00")).cast("timestamp")
            )
        else:
            column = column.cast("bigint")
        within = F.when(column.isNotNull(), F.least(F.greatest(column, F.lit(0)), F.lit(_MICROSECONDS_MAX)))
        return F.coalesce(within * F.lit(1000), F.col(WALL.name))


def column_of(name: str) -> Column:
    """Return a column by its name, whatever characters the name has."""
    return F.col("`" + name.replace("`", "``") + "`")


def decay(age_ns: Column, half_life_ns: int) -> Column:
    """Return `crdt.signals.decays` of an age."""
    halvings = F.greatest(age_ns, F.lit(0)).cast("double") / F.lit(float(half_life_ns))
    full = F.floor(halvings)
    rest = halvings - full.cast("double")
    left = reduce(lambda held, term: held * rest + F.lit(term), DECAY_TERMS, F.lit(0.0))
    parts = F.call_function("shiftleft", F.lit(1).cast("bigint"), F.least(full, F.lit(HALVINGS_MAX)).cast("int"))
    return F.when(halvings >= HALVINGS_MAX, F.lit(0.0)).otherwise(left / parts.cast("double"))


def _added(half_life_ns: int, held: Column, event: Column) -> Column:
    """Return a sum and its time after one event more, as `crdt.signals.accumulated` computes them."""
    at, weight = event.getField("at"), event.getField("weight")
    is_first, before = held.getField("at") < 0, F.greatest(held.getField("at"), F.lit(0))
    left = decay(F.abs(at - before), half_life_ns)
    is_late = at < before
    kept = F.when(is_first, F.lit(0.0)).when(is_late, F.lit(1.0)).otherwise(left)
    total = held.getField("sum") * kept + F.when(is_late, weight * left).otherwise(weight)
    return F.struct(F.least(total, F.lit(SUM_MAX)).alias("sum"), F.greatest(at, before).alias("at"))


def _without(half_life_ns: int, at: Column, total: Column, event: Column) -> Column:
    """Return a sum as of a moment without one event, as merging subtracts a repeat's row."""
    return total - event.getField("weight") * decay(at - event.getField("at"), half_life_ns)


def _is_since(begin: Column, event: Column) -> Column:
    return event.getField("at") >= begin


def _begin(at: Column, width_ns: int) -> Column:
    """Return the beginning of the bucket that a moment lies in."""
    return at - at % F.lit(width_ns)
