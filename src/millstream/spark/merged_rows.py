"""Tables that several regions write, merged by Spark: the same rows as `crdt.row_merge` returns, to the bit.

The merge uses only Spark's own aggregates, which run where its other aggregates do: no row goes
through Python. Writes that two regions have are found as `regions` finds them (`wal.cross_region_duplicates`). Operations that round are done in one order, and only by sums and products, on both
sides (`crdt.signals`).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as Spark's own pages write it

from millstream.crdt.columns import whole_column
from millstream.crdt.declared import MergeKind, TableMerge, union_of
from millstream.crdt.row_merge import REGION, SEQ, STATE_PREFIX, WALL, lift, merged_schema, subtracting_region
from millstream.crdt.signals import signal_time
from millstream.errors import UnknownTable
from millstream.model.ids import RegionId, TableId
from millstream.model.names import parse_qualified_name
from millstream.model.positions import Seq, StreamToken
from millstream.model.schema_conversion import conform
from millstream.spark.signals import REPEATS, SignalColumns, column_of
from millstream.spark.spark_columns import arrow_schema, spark_schema
from millstream.wal.cross_region_duplicates import Repeat, RepeatedWrites, is_repeat
from millstream.wal.reader import StreamReader
from millstream.wal.reading.table_records import TableRecords

_SPAN_BYTES: Final = 16 << 20
_HINT: Final = "A column of this table has another type in some version of it."
_NEWEST: Final = (MergeKind.LWW, MergeKind.PN_COUNTER, MergeKind.OR_SET)
"""Kinds for which a region's newest record that names the column is sufficient."""
_UNCHANGED: Final = pa.field("__unchanged", pa.list_(pa.string()))
_REPEATS: Final = pa.field(REPEATS, pa.int64())
"""The number below 0 that stands in place of the region in the subtraction of a repeat; null for any other record."""


def region_records(spark: SparkSession, logs: Mapping[RegionId, str], table: str) -> DataFrame:
    """Return one table's records in the logs of several regions: `__region`, `__seq`, `__wall_ns`, the table's columns.

    `__repeats` marks the records of a write that an earlier one in another region repeats, so that it counts once.

    Args:
        logs: by region, the folder of its log: a home's `data/wal/S` for its own, `data/wal/S@N` for those that it
            follows.
        table: `schema.table`.

    Raises:
        UnknownTable: no region has records of it.
        ReplicationError (`merge_unsuitable`): a column has types that no one type holds.
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
    columns = [schema.to_arrow().remove_metadata() for region in sorted(schemas) for schema in schemas[region]]
    if not columns:
        raise UnknownTable(f"no region has records of {table}", table=table)
    own = union_of(table, columns)
    tasks = []
    readers = {region: reader for region, reader in readers.items() if schemas[region]}
    ends = {region: StreamToken.scalar(reader.stream_id, reader.persisted_upto()) for region, reader in readers.items()}
    repeats = RepeatedWrites().between(readers, {}, ends) if len(readers) > 1 else {}
    for region, reader in readers.items():
        tables = frozenset(schema.table_id for schema in schemas[region])
        if tables:
            spans = reader.spans(Seq(reader.first_seq() - 1), ends[region].linear(), bytes_target=_SPAN_BYTES)
            own_repeats = repeats.get(region, [])
            tasks += [(pickle.dumps((logs[region], span, int(region), tables, own_repeats)),) for span in spans]
    target = spark_schema(pa.schema([*STATE_PREFIX, _UNCHANGED, _REPEATS, *own]))
    if not tasks:
        return spark.createDataFrame([], target)
    shape = arrow_schema(target)

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for task in batch.column(0).to_pylist():
                yield from _read_span(task, own, shape, table)

    return spark.createDataFrame(tasks, "task binary").repartition(len(tasks)).mapInArrow(read, target)


def _read_span(task: bytes, own: pa.Schema, shape: pa.Schema, table: str) -> Iterator[pa.RecordBatch]:
    folder, span, region, tables, repeats = pickle.loads(task)  # noqa: S301 - made by the driver, a few lines above
    wanted: frozenset[TableId] = tables
    for part in StreamReader(folder).read_span(span, tables=wanted):
        rows = lift(part.batch, part.hybrid_ns, RegionId(region), own, TableMerge(), table=table)
        rows = rows.append_column(_UNCHANGED, _unnamed(part, own))
        rows = rows.append_column(_REPEATS, _repeats_in(rows, repeats))
        for batch in rows.to_batches():
            yield conform(batch, shape, hint=_HINT)


def _repeats_in(rows: pa.Table, repeats: list[Repeat]) -> pa.Array:
    """Return the values of `__repeats` for records of one region."""
    if not repeats:
        return pa.nulls(rows.num_rows, _REPEATS.type)
    regions, seqs = (whole_column(rows.column(one.name)).to_numpy() for one in (REGION, SEQ))
    return pa.array(subtracting_region(regions, seqs), mask=~is_repeat(repeats, seqs))


def _unnamed(part: TableRecords, own: pa.Schema) -> pa.Array:
    """Return the columns that each record doesn't name, with those that its version of the table lacks."""
    lists = part.batch.column(_UNCHANGED.name)
    lacks = [name for name in own.names if name not in part.batch.schema.names]
    if not lacks or not part.schema.accumulating:
        return lists
    return pa.array([[*(names or ()), *lacks] for names in lists.to_pylist()], _UNCHANGED.type)


def merged_regions(
    records: DataFrame,
    key: Sequence[str],
    merge: TableMerge,
    columns: pa.Schema,
    *,
    regions: Sequence[int] | None = None,
    at_ns: int | None = None,
) -> DataFrame:
    """Return the merge of all regions: one row a key, as `crdt.row_merge.merged` of the same records.

    Args:
        records: as `region_records` returns them, in any order, with any repetitions. Without the column `__repeats`, no
            write counts as a repeat.
        key: names of the columns that identify the table's rows.
        columns: the table's own, of `records`, as Arrow has them.
        regions: all regions in `records`; if None, they are looked up at once.
        at_ns: the moment as of which signals are read; if None, that of the newest event, which is looked up at once.

    Raises:
        ReplicationError (`merge_unsuitable`): a column can't merge so.
    """
    merge.check("the table", columns, key)
    if REPEATS not in records.columns:
        records = records.withColumn(REPEATS, F.lit(None).cast("bigint"))
    names = [name for name in columns.names if name not in key]
    signals = SignalColumns(columns, merge)
    if at_ns is None and signals.names:
        latest = records.agg(signals.newest()).first()
        at_ns = 0 if latest is None or latest[0] is None else int(latest[0])
    if regions is None:
        regions = [int(row[0]) for row in records.select(REGION.name).distinct().collect()]
    # Each region's part of a key is a separate aggregate, so that rows are grouped and shuffled once.
    numbers = tuple(sorted(regions)) or (0,)
    places = _RegionColumns(numbers, tuple(name for name in names if name not in signals.names), merge)
    grouped = records.groupBy(*map(column_of, key)).agg(*places.aggregates(), *signals.events(numbers))
    grouped = grouped.select("*", *signals.sums(numbers))
    shown = grouped.select(
        *map(column_of, key),
        places.winner().alias("__winner"),
        *(places.together(name, columns.field(name).type).alias(name) for name in places.summed),
        *signals.merged(numbers, signal_time(at_ns or 0)),
    )
    target = spark_schema(merged_schema(columns, merge))
    return shown.select(
        *(
            (
                F.col("__winner").getField("said").getField(one.name)
                if one.name in places.last_written
                else column_of(one.name)
            )
            .cast(one.dataType)
            .alias(one.name)
            for one in target.fields
        )
    )


class _RegionColumns:
    """The regions' values of a key, in separate columns."""

    def __init__(self, regions: tuple[int, ...], names: tuple[str, ...], merge: TableMerge) -> None:
        self._regions = regions
        self._merge = merge
        newest = [name for name in names if merge.of(name).kind in _NEWEST and not merge.of(name).increments]
        self._newest = [] if merge.is_partial else newest
        self._apart = newest if merge.is_partial else []
        """Columns whose newest record is another than that of others, because records don't name all columns."""
        self.last_written: Final = [] if merge.is_partial else _named(names, merge, MergeKind.LWW)
        self.summed: Final = [name for name in names if name not in self.last_written]
        self._number = {name: number for number, name in enumerate(names)}

    def aggregates(self) -> Iterator[Column]:
        """Yield the aggregates for grouping records."""
        for region in self._regions:
            here = F.col(REGION.name) == region
            newest = F.struct(SEQ.name, WALL.name, *map(column_of, self._newest))
            yield F.max(F.when(here, newest)).alias(f"__said_{region}")
            for name in self._apart:
                is_named = ~F.array_contains(F.coalesce(F.col(_UNCHANGED.name), F.array()), name)
                said = F.struct(SEQ.name, WALL.name, column_of(name).alias("value"))
                yield F.max(F.when(here & is_named, said)).alias(self._own(name, region, "said"))
            for name in self.summed:
                column, kind = column_of(name), self._merge.of(name).kind
                if self._merge.of(name).increments:
                    added = F.struct(F.col(SEQ.name).alias("at"), column.alias("value"))
                    yield F.collect_set(F.when(here & column.isNotNull(), added)).alias(
                        self._own(name, region, "added")
                    )
                elif kind is MergeKind.G_COUNTER:
                    yield F.max(F.when(here, column)).alias(self._own(name, region))
                elif kind is MergeKind.HIDE:
                    moment = F.struct(SEQ.name, WALL.name)
                    yield F.max(F.when(here & column, moment)).alias(self._own(name, region, "hidden"))
                    yield F.max(F.when(here & ~column, moment)).alias(self._own(name, region, "shown"))
        for name in self.summed:
            if self._merge.of(name).increments:
                column = column_of(name)
                twice = F.struct(F.col(REPEATS).alias("at"), column.alias("value"))
                is_twice = F.col(REPEATS).isNotNull() & column.isNotNull()
                yield F.collect_set(F.when(is_twice, twice)).alias(self._own(name, "all", "twice"))
            if self._merge.of(name).kind is MergeKind.UNION_SET:
                yield F.collect_set(column_of(name)).alias(self._own(name, "all"))

    def winner(self) -> Column:
        """Return the record that was written last: its time and number, its region, and its values."""
        return _greatest(
            F.when(
                said.isNotNull(),
                F.struct(said.getField(WALL.name), said.getField(SEQ.name), F.lit(region), said.alias("said")),
            )
            for region, said in self._said()
        )

    def together(self, name: str, arrow: pa.DataType) -> Column:
        """Return the regions' merged value of a column that isn't simply the last writer's."""
        how = self._merge.of(name)
        if how.increments:
            added = [F.col(self._own(name, region, "added")) for region in self._regions]
            sums = [F.when(F.size(one) > 0, F.aggregate(F.array_sort(one), _zero(arrow), partial(_added, arrow))) for one in added]  # fmt: skip
            return _sum(sums, arrow, twice=F.col(self._own(name, "all", "twice")))
        if how.kind is MergeKind.LWW:
            return _greatest(
                F.when(
                    said.isNotNull(),
                    F.struct(
                        said.getField(WALL.name),
                        said.getField(SEQ.name),
                        F.lit(region),
                        said.getField("value").alias("value"),
                    ),
                )
                for region, said in self._said_of(name)
            ).getField("value")
        if how.kind is MergeKind.UNION_SET:
            return _union(F.col(self._own(name, "all")))
        if how.kind is MergeKind.OR_SET:
            return _union(F.array_compact(F.array(*self._values(name))))
        if how.kind is MergeKind.HIDE:
            hidden, shown = (
                _greatest(
                    F.when(said.isNotNull(), F.struct(said.getField(WALL.name), said.getField(SEQ.name)))
                    for said in (F.col(self._own(name, region, what)) for region in self._regions)
                )
                for what in ("hidden", "shown")
            )
            return F.coalesce(hidden.isNotNull() & (shown.isNull() | (shown <= hidden)), F.lit(False))
        if how.kind is MergeKind.G_COUNTER:
            return _sum([F.col(self._own(name, region)) for region in self._regions], arrow)
        return _sum(self._values(name), arrow)

    def _values(self, name: str) -> list[Column]:
        """Return each region's newest value of a column."""
        if name in self._apart:
            return [said.getField("value") for _, said in self._said_of(name)]
        return [said.getField(name) for _, said in self._said()]

    def _said_of(self, name: str) -> Iterator[tuple[int, Column]]:
        return ((region, F.col(self._own(name, region, "said"))) for region in self._regions)

    def _said(self) -> Iterator[tuple[int, Column]]:
        return ((region, F.col(f"__said_{region}")) for region in self._regions)

    def _own(self, name: str, region: int | str, what: str = "of") -> str:
        return f"__{what}_{region}_{self._number[name]}"


def _named(names: Sequence[str], merge: TableMerge, kind: MergeKind) -> list[str]:
    """Return the columns among `names` that merge by a kind."""
    return [name for name in names if merge.of(name).kind is kind]


def _greatest(columns: Iterable[Column]) -> Column:
    """Return the greatest value that isn't null."""
    held = list(columns)
    return F.greatest(*held) if len(held) > 1 else held[0]


def _union(lists: Column) -> Column:
    """Return the distinct values of lists, in their order; null if there is no list."""
    values = F.array_sort(F.array_distinct(F.array_compact(F.flatten(lists))))
    return F.when(F.size(lists) > 0, values)


def _wide(arrow: pa.DataType) -> str:
    """Return the type in which values of a column are added."""
    wide = f"decimal(37,{arrow.scale})" if pa.types.is_decimal(arrow) else "bigint"
    return "double" if pa.types.is_floating(arrow) else wide


def _zero(arrow: pa.DataType) -> Column:
    return F.lit(0).cast(_wide(arrow))


def _added(arrow: pa.DataType, total: Column, added: Column) -> Column:
    return (total + added.getField("value").cast(_wide(arrow))).cast(_wide(arrow))


def _subtracted(arrow: pa.DataType, total: Column, twice: Column) -> Column:
    return (total - twice.getField("value").cast(_wide(arrow))).cast(_wide(arrow))


def _sum(values: Sequence[Column], arrow: pa.DataType, *, twice: Column | None = None) -> Column:
    """Return the sum in the order of the regions, from 0, because rounding depends on it.

    Null if no region has a value. Values of repeats come first, and are subtracted.
    """
    wide, nothing = _wide(arrow), _zero(arrow)
    begin = nothing if twice is None else F.aggregate(F.array_sort(twice), nothing, partial(_subtracted, arrow))
    # Cast back at each step: a sum of decimals would gain a digit, and finally lose one behind the point.
    total = reduce(lambda total, value: (total + F.coalesce(value.cast(wide), nothing)).cast(wide), values, begin)
    return F.when(reduce(lambda held, value: held | value, [value.isNotNull() for value in values]), total)
