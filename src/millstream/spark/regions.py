"""Tables that several regions write, merged by Spark: the same rows as `crdt.tables` gives, to the bit.

All of it is Spark's own aggregates, which run where its other aggregates do: no row goes through Python. What rounds is done in one order,
and by sums and products alone, on both sides (`crdt.signals`).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as Spark's own pages write it

from millstream.crdt.declared import MergeKind, TableMerge, union_of
from millstream.crdt.signals import DECAY_TERMS, HALVINGS_MAX
from millstream.crdt.tables import REGION, SEQ, STATE_PREFIX, WALL, lift, merged_schema
from millstream.errors import UnknownTable
from millstream.model.conforming import conform
from millstream.model.ids import RegionId, TableId
from millstream.model.names import parse_qualified_name
from millstream.model.positions import Seq
from millstream.spark.columns import arrow_schema, spark_schema
from millstream.wal.reader import StreamReader

_SPAN_BYTES: Final = 16 << 20
_HINT: Final = "A column of this table has another type in some version of it."
_NEWEST: Final = (MergeKind.LWW, MergeKind.PN_COUNTER, MergeKind.OR_SET, MergeKind.SIGNAL)
"""Kinds of which a region's newest record says all."""


def region_records(spark: SparkSession, logs: Mapping[RegionId, str], table: str) -> DataFrame:
    """The records of one table in the logs of several regions: `__region`, `__seq`, `__wall_ns`, then the table's columns.

    Args:
        spark: the session.
        logs: by region, the folder of its log: a home's `data/wal/S` for its own, `data/wal/S@N` for those that it follows.
        table: `schema.table`.

    Raises:
        UnknownTable: no region has records of it.
        MergeUnsuitable: a column has types that no one type holds.
    """
    wanted = parse_qualified_name(table)
    readers = {region: StreamReader(folder) for region, folder in logs.items()}
    schemas = {
        region: [
            schema
            for schema in reader.schema_versions().values()
            if (schema.namespace, schema.name) == wanted and schema.source == 0
        ]
        for region, reader in readers.items()
    }
    columns = [schema.to_arrow().remove_metadata() for found in schemas.values() for schema in found]
    if not columns:
        raise UnknownTable(f"no region has records of {table}", table=table)
    own = union_of(table, columns)
    tasks = []
    for region, reader in readers.items():
        tables = frozenset(schema.table_id for schema in schemas[region])
        if tables:
            spans = reader.spans(Seq(reader.first_seq() - 1), reader.persisted_upto(), bytes_target=_SPAN_BYTES)
            tasks += [(pickle.dumps((logs[region], span, int(region), tables)),) for span in spans]
    target = spark_schema(pa.schema([*STATE_PREFIX, *own]))
    if not tasks:
        return spark.createDataFrame([], target)
    shape = arrow_schema(target)

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for task in batch.column(0).to_pylist():
                yield from _read_span(task, own, shape, table)

    return spark.createDataFrame(tasks, "task binary").repartition(len(tasks)).mapInArrow(read, target)


def _read_span(task: bytes, own: pa.Schema, shape: pa.Schema, table: str) -> Iterator[pa.RecordBatch]:
    folder, span, region, tables = pickle.loads(task)  # noqa: S301 - made by the driver, a few lines above
    wanted: frozenset[TableId] = tables
    for part in StreamReader(folder).read_span(span, tables=wanted):
        rows = lift(part.batch, part.hybrid_ns, RegionId(region), own, TableMerge(), table=table)
        for batch in rows.to_batches():
            yield conform(batch, shape, hint=_HINT)


def merged_regions(
    records: DataFrame, key: Sequence[str], merge: TableMerge, columns: pa.Schema, *, at_ns: int | None = None
) -> DataFrame:
    """What all regions say together: one row a key, as `crdt.tables.merged` of the same records.

    Args:
        records: as `region_records` gives them, in any order, each as often as it came.
        key: names of the columns that tell the table's rows apart.
        merge: how they merge.
        columns: the table's own, of `records`, as Arrow has them.
        at_ns: as of which moment signals have decayed; that of the newest record where None, which is looked for at once.

    Raises:
        MergeUnsuitable: a column can't merge so.
    """
    merge.check("the table", columns, key)
    names = [name for name in columns.names if name not in key]
    if at_ns is None and merge.named(names, MergeKind.SIGNAL):
        newest = records.agg(F.max(WALL.name)).first()
        at_ns = 0 if newest is None or newest[0] is None else int(newest[0])
    said = [_said(name, merge.of(name).kind) for name in names]
    by_region = records.groupBy(*map(_column, key), REGION.name).agg(
        F.max(SEQ.name).alias(SEQ.name),
        F.max_by(WALL.name, SEQ.name).alias(WALL.name),
        *(one for some in said for one in some),
    )
    winner = F.struct(WALL.name, SEQ.name, REGION.name)
    last_written = _named(names, merge, MergeKind.LWW)
    together = by_region.groupBy(*map(_column, key)).agg(
        F.max_by(F.struct(*map(_column, last_written), F.lit(0).alias("__none")), winner).alias("__newest"),
        *(_together(name, merge, columns.field(name).type, at_ns or 0) for name in names if name not in last_written),
    )
    target = spark_schema(merged_schema(columns, merge))
    shown = [
        (F.col("__newest").getField(field.name) if field.name in last_written else _column(field.name))
        .cast(field.dataType)
        .alias(field.name)
        for field in target.fields
    ]
    return together.select(*shown)


def _named(names: Sequence[str], merge: TableMerge, kind: MergeKind) -> list[str]:
    """Those of some columns that merge by a kind."""
    return [name for name in names if merge.of(name).kind is kind]


def _column(name: str) -> Column:
    """A column by its name, whatever characters that has."""
    return F.col("`" + name.replace("`", "``") + "`")


def _said(name: str, kind: MergeKind) -> list[Column]:
    """What one region says of a key."""
    column = _column(name)
    if kind in _NEWEST:
        return [F.max_by(column, SEQ.name).alias(name)]
    if kind is MergeKind.G_COUNTER:
        return [F.max(column).alias(name)]
    if kind is MergeKind.UNION_SET:
        return [_union(column).alias(name)]
    pairs = []
    for of, here in (("__hidden.", column), ("__shown.", ~column)):
        number = F.when(here, F.col(SEQ.name))
        pairs += [F.struct(F.max_by(F.col(WALL.name), number).alias("ns"), F.max(number).alias("seq")).alias(of + name)]
    return pairs


def _together(name: str, merge: TableMerge, arrow: pa.DataType, at_ns: int) -> Column:
    """What the regions say together."""
    how, column = merge.of(name), _column(name)
    if how.kind is MergeKind.SIGNAL:
        return _ordered_sum(column.cast("double") * _decay(at_ns, how.half_life_ns)).alias(name)
    if how.kind in {MergeKind.G_COUNTER, MergeKind.PN_COUNTER}:
        if pa.types.is_floating(arrow):
            return _ordered_sum(column.cast("double")).alias(name)
        wide = f"decimal(38,{arrow.scale})" if pa.types.is_decimal(arrow) else "bigint"
        return F.sum(column.cast(wide)).alias(name)
    if how.kind in {MergeKind.UNION_SET, MergeKind.OR_SET}:
        return _union(column).alias(name)
    moments = []
    for of in ("__hidden.", "__shown."):
        pair = _column(of + name)
        moments.append(F.max(F.when(pair.getField("seq").isNotNull(), pair)))
    hidden, shown = moments
    return F.coalesce(hidden.isNotNull() & (shown.isNull() | (shown <= hidden)), F.lit(False)).alias(name)


def _union(lists: Column) -> Column:
    """The distinct values of lists, in their order; null where there is no list."""
    values = F.array_sort(F.array_distinct(F.array_compact(F.flatten(F.collect_set(lists)))))
    return F.when(F.count(lists) > 0, values)


def _ordered_sum(value: Column) -> Column:
    """The sum over regions in their order, from 0.0: rounding depends on the order. Null where no region has a value."""
    held = F.array_sort(F.collect_list(F.when(value.isNotNull(), F.struct(F.col(REGION.name), value.alias("value")))))
    total = F.aggregate(held, F.lit(0.0), lambda total, one: total + one.getField("value"))
    return F.when(F.count(value) > 0, total)


def _decay(at_ns: int, half_life_ns: int) -> Column:
    """`crdt.signals.decay` of a row's age."""
    halvings = F.greatest(F.lit(at_ns) - F.col(WALL.name), F.lit(0)).cast("double") / F.lit(float(half_life_ns))
    full = F.floor(halvings)
    rest = halvings - full.cast("double")
    left = reduce(lambda held, term: held * rest + F.lit(term), DECAY_TERMS, F.lit(0.0))
    parts = F.call_function("shiftleft", F.lit(1).cast("bigint"), F.least(full, F.lit(HALVINGS_MAX)).cast("int"))
    return F.when(halvings >= HALVINGS_MAX, F.lit(0.0)).otherwise(left / parts.cast("double"))
