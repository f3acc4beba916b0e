"""Tables that merge: each region's records of each key, and their merged value.

*Region rows* are the state: one row a key and region. It has the number (`__seq`) and the time (`__wall_ns`, the
hybrid time of its frame) of the newest record, and that record's columns. Some columns keep more than the newest
record:

- `g_counter`: the greatest value, `union_set`: all values, in the column itself;
- `hide`: number and time of the newest record that hid, and of the newest that showed, in four columns next to it.

`fold` is the join: it makes region rows of any rows of the same table, records or states of any number of replicas.
It is commutative, associative and idempotent, row for row and byte for byte, because a region's records are ordered
by their numbers alone, and no two have the same. `merged` is the value. Within a region the newest record is the last
in the region's own log; across regions it is decided by hybrid time, then number, then region.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.crdt.columns import Grouped, codes_of, last_of_each, whole_column
from millstream.crdt.counters import GCounter, PNCounter
from millstream.crdt.declared import MergeKind, TableMerge
from millstream.crdt.registers import HideFlag, LWWRegister
from millstream.crdt.sets import ObservedSet, UnionSet
from millstream.crdt.signals import SignalState
from millstream.errors import ReplicationError
from millstream.model.ids import RegionId

REGION: Final = pa.field("__region", pa.int64(), nullable=False)
SEQ: Final = pa.field("__seq", pa.int64(), nullable=False)
WALL: Final = pa.field("__wall_ns", pa.int64(), nullable=False)
STATE_PREFIX: Final = (REGION, SEQ, WALL)
# Not by `pa.array`: that looks for pandas, whose import takes longer than everything else that a node needs to begin.
_OPS: Final = pa.StringArray.from_buffers(3, pa.py_buffer(np.arange(4, dtype=np.int32)), pa.py_buffer(b"cur"))
"""The operations that add a row, or replace it."""


class ColumnRule(Protocol):
    """The part of a kind that merging tables use: the same rule over whole columns."""

    def fold_column(self, rows: Grouped, name: str) -> dict[str, pa.Array]:
        """Return a column and its state columns, one row for each key and region: the join."""
        ...

    def merge_column(self, rows: Grouped, name: str) -> pa.Array:
        """Return the column that readers see, one row a key: the value."""
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
    beside = [pa.field(one, pa.int64()) for name in merge.named(columns.names, MergeKind.HIDE) for one in HideFlag.columns_of(name)]  # fmt: skip
    return pa.schema([*STATE_PREFIX, *(pa.field(one.name, one.type) for one in columns), *beside])


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
    return pa.table(list(made.values()), schema=state_schema(columns, merge))


def fold(rows: pa.Table, key: Sequence[str], merge: TableMerge) -> pa.Table:
    """Return one region row for each key and region of rows that may repeat them; ordered by key, then region.

    Args:
        rows: rows in `state_schema`.
        key: names of the key columns.
        merge: how they merge.
    """
    if not rows.num_rows:
        return rows.combine_chunks()

    def column(name: str) -> pa.Array:
        """Return one column in one piece: all of them at once would be a copy of everything."""
        return whole_column(rows.column(name))

    codes = codes_of([*(column(name) for name in key), column(REGION.name)])
    newest = pa.array(last_of_each(codes, column(SEQ.name).to_numpy()))
    groups = Grouped(column, codes, len(newest), newest, merge)
    found = groups.newest_of(*(one.name for one in STATE_PREFIX))
    for name in own_columns(rows.schema).names:
        found |= RULES[merge.of(name).kind].fold_column(groups, name)
    found = {name: found[name] for name in rows.schema.names}
    return pa.table(list(found.values()), schema=rows.schema)


def merged(rows: pa.Table, key: Sequence[str], merge: TableMerge, *, at_ns: int | None = None) -> pa.Table:
    """Return the table that readers see: one row a key, the table's own columns, in order of the key.

    Args:
        rows: region rows as `fold` returns them.
        key: names of the key columns.
        merge: how they merge.
        at_ns: the moment at which signals have decayed. None: that of the newest row, so that the same rows give the
            same table.

    Raises:
        InvalidValue: a counter's sum is beyond its type.
    """
    target = merged_schema(own_columns(rows.schema), merge)
    if not rows.num_rows:
        return target.empty_table()
    columns = {name: whole_column(rows.column(name)) for name in rows.schema.names}
    codes = codes_of([columns[name] for name in key])
    regions, seqs, walls = (columns[one.name].to_numpy() for one in STATE_PREFIX)
    newest = pa.array(last_of_each(codes, walls, seqs, regions))
    at = int(walls.max()) if at_ns is None else at_ns
    groups = Grouped(columns.__getitem__, codes, len(newest), newest, merge, at)
    found = {one.name: RULES[merge.of(one.name).kind].merge_column(groups, one.name) for one in target}
    return pa.table([found[one.name].cast(one.type) for one in target], schema=target)


def merged_schema(columns: pa.Schema, merge: TableMerge) -> pa.Schema:
    """Return the columns of `merged`: sums of integers have 64 bits, of decimals 38 digits.

    Decayed signals are doubles.
    """
    return pa.schema([pa.field(one.name, _merged_type(one.type, merge.of(one.name).kind)) for one in columns])


def _merged_type(column: pa.DataType, kind: MergeKind) -> pa.DataType:
    if kind in {MergeKind.G_COUNTER, MergeKind.PN_COUNTER}:
        if pa.types.is_decimal(column):
            return pa.decimal128(38, column.scale)
        return pa.int64() if pa.types.is_integer(column) else pa.float64()
    return pa.float64() if kind is MergeKind.SIGNAL else column
