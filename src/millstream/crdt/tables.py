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

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.crdt.columns import codes_of, decays, greatest, last_of_each, sums, unions, whole_column
from millstream.crdt.declared import MergeKind, TableMerge
from millstream.errors import ReplicationError
from millstream.model.ids import RegionId

REGION: Final = pa.field("__region", pa.int64(), nullable=False)
SEQ: Final = pa.field("__seq", pa.int64(), nullable=False)
WALL: Final = pa.field("__wall_ns", pa.int64(), nullable=False)
STATE_PREFIX: Final = (REGION, SEQ, WALL)
# Not by `pa.array`: that looks for pandas, whose import takes longer than everything else that a node needs to begin.
_OPS: Final = pa.StringArray.from_buffers(3, pa.py_buffer(np.arange(4, dtype=np.int32)), pa.py_buffer(b"cur"))
"""The operations that add a row, or replace it."""


def hide_columns(name: str) -> tuple[str, str, str, str]:
    """Return the state columns of a `hide` column: number and time of the newest hiding, then of the newest showing.

    0: none.
    """
    return f"__hidden_seq.{name}", f"__hidden_ns.{name}", f"__shown_seq.{name}", f"__shown_ns.{name}"


def state_schema(columns: pa.Schema, merge: TableMerge) -> pa.Schema:
    """Return the columns of region rows of a table with these columns."""
    beside = [pa.field(one, pa.int64()) for name in merge.named(columns.names, MergeKind.HIDE) for one in hide_columns(name)]  # fmt: skip
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
        said = made[name]
        for place, (beside, of) in enumerate(zip(hide_columns(name), (SEQ, WALL, SEQ, WALL), strict=True)):
            here = pc.fill_null(said if place < 2 else pc.invert(said), False)
            made[beside] = pc.if_else(here, made[of.name], 0)
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
    groups = int(codes.max()) + 1
    newest = last_of_each(codes, column(SEQ.name).to_numpy())
    at = pa.array(newest)
    found = {name: column(name).take(at) for name in rows.schema.names}
    own = own_columns(rows.schema).names
    if groups < rows.num_rows:
        for name in merge.named(own, MergeKind.G_COUNTER):
            found[name] = greatest(column(name), codes, groups)
        for name in merge.named(own, MergeKind.HIDE):
            names = hide_columns(name)
            for seq, wall in (names[:2], names[2:]):
                last = pa.array(last_of_each(codes, column(seq).to_numpy()))
                found[seq], found[wall] = column(seq).take(last), column(wall).take(last)
    for name in merge.named(own, MergeKind.UNION_SET):
        found[name] = unions(column(name), codes, groups)
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
    groups = int(codes.max()) + 1
    regions, seqs, walls = (columns[one.name].to_numpy() for one in STATE_PREFIX)
    winners = pa.array(last_of_each(codes, walls, seqs, regions))
    at = int(walls.max()) if at_ns is None else at_ns
    found = {}
    for one in target:
        how, column = merge.of(one.name), columns[one.name]
        if one.name in key or how.kind is MergeKind.LWW:
            found[one.name] = column.take(winners)
        elif how.kind in {MergeKind.G_COUNTER, MergeKind.PN_COUNTER}:
            found[one.name] = sums(column, codes, groups)
        elif how.kind in {MergeKind.UNION_SET, MergeKind.OR_SET}:
            found[one.name] = unions(column, codes, groups)
        elif how.kind is MergeKind.SIGNAL:
            left = pa.array(decays(at - walls, how.half_life_ns))
            found[one.name] = sums(pc.multiply(column.cast(pa.float64()), left), codes, groups)
        else:
            found[one.name] = pa.array(_hidden(columns, one.name, codes))
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


def _hidden(columns: dict[str, pa.Array], name: str, codes: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return whether each group's newest hiding is no earlier than its newest showing. Regions don't break ties."""
    hidden_seq, hidden_ns, shown_seq, shown_ns = (
        column.to_numpy() for column in (columns[one] for one in hide_columns(name))
    )
    hiding, showing = last_of_each(codes, hidden_ns, hidden_seq), last_of_each(codes, shown_ns, shown_seq)
    moments = hidden_ns[hiding], hidden_seq[hiding]
    later = (shown_ns[showing] > moments[0]) | ((shown_ns[showing] == moments[0]) & (shown_seq[showing] > moments[1]))
    found: npt.NDArray[np.bool_] = (moments[1] > 0) & ~later
    return found
