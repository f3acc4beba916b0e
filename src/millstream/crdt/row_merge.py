"""Tables that merge: each region's records of each key, and their merged value.

*Region rows* are the state: one row a key and region. It has the number (`__seq`) and the time (`__wall_ns`, the
hybrid time of its frame) of the newest record, and that record's columns. Some columns keep more than the newest
record:

- `g_counter`: the greatest value, `union_set`: all values, in the column itself;
- `hide`: number and time of the newest record that hid, and of the newest that showed, in four columns next to it;
- `signal`: the sum and the counts of all events up to the row's number, in four columns next to it;
- a counter with increments: their sum, in the column itself. In a table with one a record says nothing about columns
  that it doesn't name: those of `lww`, `or_set` and `pn_counter` keep number and time of the newest record that named them.

A write that two regions have counts once. The rows of the repeated one stand among the region rows a second time, each as
a *subtraction*: a region row of its own, with a number below 0 in place of its region (`subtractions`). It takes away what
the record has added to columns that accumulate, and says nothing about others.

`fold` is the join: it makes region rows of any rows of the same table, states of any number of replicas, and of records
that follow on such states. It is commutative, associative and idempotent, row for row and byte for byte, because a
region's records are ordered by their numbers alone, and no two have the same. Columns that accumulate take each record
once, in the order of its log: one whose number is at or below a state's is in that state already. `merged` is the value.
Within a region the newest record is the last in the region's own log; across regions it is decided by hybrid time, then
number, then region (`registers.last_written`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.crdt.accumulating import unnamed
from millstream.crdt.columns import Codes, Grouped, codes_of, last_of_each, moments_of, whole_column
from millstream.crdt.counters import GCounter, PNCounter
from millstream.crdt.declared import MergeKind, TableMerge, window_columns
from millstream.crdt.registers import HideFlag, LWWRegister, last_written
from millstream.crdt.sets import ObservedSet, UnionSet
from millstream.crdt.signals import SignalState, signal_time
from millstream.errors import ReplicationError
from millstream.model.ids import RegionId

REGION: Final = pa.field("__region", pa.int64(), nullable=False)
SEQ: Final = pa.field("__seq", pa.int64(), nullable=False)
WALL: Final = pa.field("__wall_ns", pa.int64(), nullable=False)
UNITS_NS: Final = {"s": 10**9, "ms": 10**6, "us": 1000, "ns": 1}
"""Nanoseconds of each unit of Arrow's timestamps."""
STATE_PREFIX: Final = (REGION, SEQ, WALL)
# Not by `pa.array`: that looks for pandas, whose import takes longer than everything else that a node needs to begin.
_OPS: Final = pa.StringArray.from_buffers(3, pa.py_buffer(np.arange(4, dtype=np.int32)), pa.py_buffer(b"cur"))
"""The operations that add a row, or replace it."""
_REGION_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
"""Odd, and far from 0 in its multiples by the numbers of regions: the golden ratio of 2^64."""


class ColumnRule(Protocol):
    """The part of a kind that merging tables use: the same rule over whole columns."""

    def fold_column(self, rows: Grouped, name: str) -> dict[str, pa.Array]:
        """Return a column and its state columns, one row for each key and region: the join."""
        ...

    def merge_column(self, rows: Grouped, name: str) -> dict[str, pa.Array]:
        """Return the columns that readers see, one row a key: the value."""
        ...


RULES: Final[Mapping[MergeKind, ColumnRule]] = {
    MergeKind.LWW: LWWRegister,
    MergeKind.G_COUNTER: GCounter,
    MergeKind.PN_COUNTER: PNCounter,
    MergeKind.UNION_SET: UnionSet,
    MergeKind.OR_SET: ObservedSet,
    MergeKind.SIGNAL: SignalState,
    MergeKind.HIDE: HideFlag,
}


def state_schema(columns: pa.Schema, merge: TableMerge) -> pa.Schema:
    """Return the columns of region rows of a table with these columns."""
    flags = [pa.field(one, pa.int64(), nullable=False) for name in merge.named(columns.names, MergeKind.HIDE) for one in HideFlag.columns_of(name)]  # fmt: skip
    signals = [one for name in merge.named(columns.names, MergeKind.SIGNAL) for one in SignalState.fields_of(name)]
    moments = [pa.field(one, pa.int64(), nullable=False) for name in _moved(columns, merge) for one in moments_of(name)]
    return pa.schema([*STATE_PREFIX, *(pa.field(one.name, one.type) for one in columns), *flags, *signals, *moments])


def _moved(columns: pa.Schema, merge: TableMerge) -> list[str]:
    """Return the columns of which the newest row that names them counts, if not all rows do."""
    if not merge.is_partial:
        return []
    named = merge.named(columns.names, MergeKind.LWW, MergeKind.OR_SET, MergeKind.PN_COUNTER)
    return [name for name in named if not merge.of(name).increments]


def own_columns(state: pa.Schema) -> pa.Schema:
    """Return the table's own columns among those of region rows."""
    return pa.schema([one for one in state if not one.name.startswith("__")])


def lift(
    records: pa.Table | pa.RecordBatch,
    times_ns: pa.Array,
    region: RegionId,
    columns: pa.Schema,
    merge: TableMerge,
    *,
    table: str = "a table",
) -> pa.Table:
    """Return the records of one region as region rows, not folded so far.

    Args:
        records: records in `record_schema` of any version of the table.
        times_ns: hybrid time of each record.
        region: the records' region.
        columns: the table's columns, as all regions have them together; a column that a record lacks is null.
        merge: how they merge.
        table: the table's name, for the error.

    Raises:
        ReplicationError (`merge_unsuitable`): a record isn't a row that applications write: captured tables have such records.
    """
    ops = records.column("__op")
    if not pc.all(pc.is_in(ops, _OPS)).as_py() and len(ops):
        raise ReplicationError(
            f"{table} has records that take rows away: only tables that applications write merge",
            code="merge_unsuitable",
            table=table,
        )
    made: dict[str, pa.Array] = {
        REGION.name: pa.array(np.full(len(ops), int(region), np.int64)),
        SEQ.name: whole_column(records.column(SEQ.name)),
        WALL.name: times_ns,
    }
    for one in columns:
        has = one.name in records.schema.names
        column = whole_column(records.column(one.name)) if has else pa.nulls(len(ops), one.type)
        made[one.name] = column if column.type.equals(one.type) else column.cast(one.type)
    for name in merge.named(columns.names, MergeKind.HIDE):
        made |= HideFlag.lift_column(name, made[name], made[SEQ.name], made[WALL.name])
    for name in merge.named(columns.names, MergeKind.SIGNAL):
        at = made.get(merge.of(name).at)
        made |= SignalState.lift_column(name, made[name], times_ns if at is None else event_times(at, times_ns))
    moved = _moved(columns, merge)
    left_out = unnamed(whole_column(records.column("__unchanged"))) if moved else {}
    for name in moved:
        says = np.full(len(ops), name in records.schema.names)
        if name in left_out:
            says &= ~left_out[name]
        for one, of in zip(moments_of(name), (made[SEQ.name], times_ns), strict=True):
            made[one] = pc.if_else(pa.array(says), of, 0)
    return pa.table(list(made.values()), schema=state_schema(columns, merge))


def subtractions(rows: pa.Table, key: Sequence[str], merge: TableMerge) -> pa.Table:
    """Return the region rows that subtract some records, which are rows of `lift`.

    Each record gets a number below 0 as its region, the same in every state.
    """
    regions, seqs = (whole_column(rows.column(one.name)).to_numpy() for one in (REGION, SEQ))
    apart = rows.set_column(0, REGION, pa.array(subtracting_region(regions, seqs)))
    return fold(apart.slice(0, 0), key, merge, records=apart)


def subtracting_region(regions: Codes, seqs: Codes) -> Codes:
    """Return the number below 0 that stands in place of the region in the subtractions of records.

    Two records of a key don't share one: their numbers would differ by about 2^62 otherwise.
    """
    mixed = seqs.astype(np.uint64) + regions.astype(np.uint64) * _REGION_STEP
    return -1 - (mixed & np.uint64(2**63 - 1)).astype(np.int64)


def fold(rows: pa.Table, key: Sequence[str], merge: TableMerge, *, records: pa.Table | None = None) -> pa.Table:
    """Return one region row for each key and region, ordered by key, then region.

    Args:
        rows: rows in `state_schema`, each of which has everything that its region wrote up to its number. They may
            repeat: the one with the greatest number counts.
        key: names of the key columns.
        merge: how they merge.
        records: rows of `lift`, in any order, with any repetitions. If a column accumulates, everything that a region
            wrote between a row and the newest record has to be among them.
    """
    states = rows.num_rows
    if records is not None:
        rows = pa.concat_tables([rows, records])
    if not rows.num_rows:
        return rows.combine_chunks()

    def column(name: str) -> pa.Array:
        """Return one column in one piece: all of them at once would be a copy of everything."""
        return whole_column(rows.column(name))

    codes = codes_of([*(column(name) for name in key), column(REGION.name)])
    seqs = column(SEQ.name).to_numpy()
    newest = last_of_each(codes, seqs)
    has_records = merge.accumulates and states < rows.num_rows
    sequence = _sequence(codes, seqs, len(newest), states) if has_records else None
    groups = Grouped(column, codes, len(newest), pa.array(newest), merge, sequence=sequence, states=states)
    found = groups.newest_of(*(one.name for one in STATE_PREFIX))
    for name in own_columns(rows.schema).names:
        found |= RULES[merge.of(name).kind].fold_column(groups, name)
    return pa.table([found[name] for name in rows.schema.names], schema=rows.schema)


def _sequence(codes: Codes, seqs: Codes, groups: int, states: int) -> Codes:
    """Return what accumulates; see `Grouped.sequence`. A record at or below its group's newest state is in that."""
    held = last_of_each(codes[:states], seqs[:states])
    upto = np.full(groups, -1, np.int64)
    upto[codes[held]] = seqs[held]
    follows = states + np.flatnonzero(seqs[states:] > upto[codes[states:]])
    some = np.concatenate([held, follows])
    some = some[np.lexsort((seqs[some], codes[some]))]
    is_first = np.append(True, np.diff(codes[some]).astype(bool) | np.diff(seqs[some]).astype(bool))
    found: Codes = some[is_first[: len(some)]]
    return found


def of_keys(rows: pa.Table, others: pa.Table, key: Sequence[str]) -> pa.Table:
    """Return those rows whose keys some other rows have."""
    columns = [
        whole_column(pa.concat_tables([part.select([name]) for part in (rows, others)]).column(0)) for name in key
    ]
    codes = codes_of(columns)
    is_there = np.zeros(int(codes.max()) + 1 if len(codes) else 0, bool)
    is_there[codes[rows.num_rows :]] = True
    return rows.filter(pa.array(is_there[codes[: rows.num_rows]]))


def merged(rows: pa.Table, key: Sequence[str], merge: TableMerge, *, at_ns: int | None = None) -> pa.Table:
    """Return the table that readers see: one row a key, the table's own columns, in order of the key.

    Args:
        rows: region rows as `fold` returns them.
        key: names of the key columns.
        merge: how they merge.
        at_ns: the moment as of which signals are read, from any year. Before a row's newest event it counts as that
            event's time, and after 2262 as the end of `signal_time`. None: the newest event's time in the table, so
            that the same rows give the same table.

    Raises:
        InvalidValue: a counter's sum is beyond its type.
    """
    target = merged_schema(own_columns(rows.schema), merge)
    if not rows.num_rows:
        return target.empty_table()
    at = newest_event_ns(rows, merge) if at_ns is None else signal_time(at_ns)
    written = pc.greater_equal(rows.column(REGION.name), 0)
    if pc.all(written).as_py():
        said = added = _by_key(rows, key, merge, at)
    else:
        said = _by_key(rows.filter(written), key, merge, at)
        added = _by_key(of_keys(rows, rows.filter(written), key), key, merge, at)
    found: dict[str, pa.Array] = {}
    for name in own_columns(rows.schema).names:
        how = merge.of(name)
        found |= RULES[how.kind].merge_column(added if how.accumulates else said, name)
    return pa.table([found[one.name].cast(one.type) for one in target], schema=target)


def _by_key(rows: pa.Table, key: Sequence[str], merge: TableMerge, at_ns: int) -> Grouped:
    """Return region rows in groups of a key."""
    columns = {name: whole_column(rows.column(name)) for name in rows.schema.names}
    codes = codes_of([columns[name] for name in key])
    regions, seqs, walls = (columns[one.name].to_numpy() for one in STATE_PREFIX)
    newest = pa.array(last_written(codes, walls, seqs, regions))
    return Grouped(columns.__getitem__, codes, len(newest), newest, merge, at_ns)


def newest_event_ns(rows: pa.Table, merge: TableMerge) -> int:
    """Return the time of the newest event of all signals in region rows; 0 if there is none."""
    names = [SignalState.fields_of(one)[1].name for one in merge.named(rows.schema.names, MergeKind.SIGNAL)]
    return max((pc.max(rows.column(name)).as_py() or 0 for name in names), default=0)


def event_times(column: pa.Array, times_ns: pa.Array) -> pa.Array:
    """Return the times of events in nanoseconds, from a column of timestamps or of whole microseconds since 1970.

    A record without one has its commit's time. Times before 1970 and after 2262, from before the column was declared,
    count as those limits.
    """
    unit_ns = 1000
    if pa.types.is_timestamp(column.type):
        unit_ns = UNITS_NS[column.type.unit]
        column = column.cast(pa.int64())
    signed = pa.types.is_signed_integer(column.type)
    latest = min((2**63 - 1) // unit_ns, 2 ** (column.type.bit_width - signed) - 1)
    earliest, latest = (pa.scalar(limit, column.type) for limit in (0, latest))
    within = pc.max_element_wise(pc.min_element_wise(column, latest, skip_nulls=False), earliest, skip_nulls=False)
    return pc.coalesce(pc.multiply(within.cast(pa.int64()), unit_ns), times_ns)


def merged_schema(columns: pa.Schema, merge: TableMerge) -> pa.Schema:
    """Return the columns of `merged`: sums of integers have 64 bits, of decimals 38 digits.

    A signal is a double, and the numbers of its events in the windows follow it.
    """
    fields = []
    for one in columns:
        kind = merge.of(one.name).kind
        fields.append(pa.field(one.name, _merged_type(one.type, kind)))
        if kind is MergeKind.SIGNAL:
            fields += [pa.field(name, pa.int64()) for name in window_columns(one.name)]
    return pa.schema(fields)


def _merged_type(column: pa.DataType, kind: MergeKind) -> pa.DataType:
    if kind in {MergeKind.G_COUNTER, MergeKind.PN_COUNTER}:
        if pa.types.is_decimal(column):
            return pa.decimal128(38, column.scale)
        return pa.int64() if pa.types.is_integer(column) else pa.float64()
    return pa.float64() if kind is MergeKind.SIGNAL else column
