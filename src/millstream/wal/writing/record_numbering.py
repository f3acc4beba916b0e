"""Numbers for a commit group: from appended rows to the plan of each shard's frames.

Everything is whole columns: a group may hold tens of thousands of one-row operations, and no Python
runs for each. Order:

- `seq`: operation by operation; within an operation, table entry by table entry; within an entry,
  row by row.
- `offset`, per shard: operation by operation; within an operation, by `__index` over all its
  tables.

A *run* is the rows of one operation in one entry (`TableRows`). It becomes one entry of a frame's
directory: an operation's batch of one table and partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.codec.log_directory import BATCH_SCHEMA
from millstream.codec.log_parts import BEFORE, LEFT_OUT, NUMBERS, VALUES, EntryNumbers
from millstream.model.ids import SchemaVersion, ShardId, TableId
from millstream.model.operations import OPERATION_SCHEMA, OperationKind, TableRows, WriteOps
from millstream.model.positions import Offset, Seq
from millstream.model.records import LOG_ROW_PREFIX, append_row_schema
from millstream.model.schema import TableSchema

_SCHEMAS_MAX: Final = 1000
_OFFSET: Final = LOG_ROW_PREFIX[0]
_ZERO: Final = np.zeros(1, dtype=np.int64)
_FIRST_SEQ: Final = BATCH_SCHEMA.get_field_index("first_seq")
_COUNT: Final = BATCH_SCHEMA.get_field_index("count")
_FIRST_INDEX: Final = BATCH_SCHEMA.get_field_index("first_index")
_PREFIX: Final = tuple(field.name for field in LOG_ROW_PREFIX)
_SPARSE: Final = {flag: tuple(map(_PREFIX.index, LEFT_OUT[flag])) for flag in (VALUES, BEFORE)}
"""The places of columns that are mostly null, by the flag of a part that leaves them out."""
_COUNT_KEPT_MAX: Final = 1024

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FramePlan:
    """Plan of one records frame; only the header fields of the whole group are missing."""

    first_offset: Offset
    count: int
    first_seq: Seq
    last_seq: Seq
    operations: pa.RecordBatch
    batches: pa.RecordBatch
    payload: tuple[tuple[TableSchema, pa.RecordBatch], ...]
    """The rows have the columns of `part_schema` of some flags."""
    commit_ts_us: tuple[int, int] | None
    """Least and greatest commit time among its operations."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of a group, in row order: parallel arrays."""

    operation: Ints
    entry: Ints
    count: Ints


@dataclass(frozen=True, slots=True)
class _Entry:
    """One `TableRows` of the group, with its runs numbered."""

    table: TableRows
    operations: Ints
    run_start: Ints
    """Row of the entry at which each run begins."""
    run_count: Ints
    run_operation: Ints
    run_seq: Ints
    order: int
    """Index among the group's entries: the order of numbers within an operation."""


def plan_group(
    group: Sequence[WriteOps],
    *,
    first_seq: Seq,
    base: Mapping[ShardId, Offset],
    frame_bytes_max: int,
    whole_rows: bool = False,
) -> dict[ShardId, list[FramePlan]]:
    """Plan the frames of a group of submissions, by shard.

    Args:
        group: in order; at least one row in all.
        first_seq: first of as many numbers as there are rows.
        base: the next offset of every shard that is touched.
        frame_bytes_max: bytes of rows after which a new frame begins (sizes are estimated by each
            table's mean row).
        whole_rows: leave no columns out of parts: batch header version 1 has no flags of parts.
    """
    tables, of_rows = _by_table(group)
    operations = _one_batch([ops.operations for ops in group], OPERATION_SCHEMA)
    if len(tables) == 1:
        (table,), (of_row,) = tables, of_rows
        small = table.rows.get_total_buffer_size() <= frame_bytes_max
        if small:
            plan = _plan_table(operations, table, of_row, first_seq, base[table.shard], whole_rows=whole_rows)
            if plan is not None:
                return {table.shard: [plan]}

    def number(runs: Runs) -> Ints:
        order = np.lexsort((runs.entry, runs.operation)) if len(tables) > 1 else slice(None)
        counts = runs.count[order]
        firsts = np.empty(len(counts), dtype=np.int64)
        firsts[order] = first_seq + np.cumsum(counts) - counts
        return firsts

    return _plan(operations, tables, of_rows, number, base, frame_bytes_max, whole_rows=whole_rows)


def _by_table(group: Sequence[WriteOps]) -> tuple[list[TableRows], list[Ints]]:
    """Return the group's entries, and for each row the index of its operation in the group.

    Rows of one table, version, shard and partition from several submissions become one entry: the
    next steps cost per entry, and small submissions come by the hundred. A table's entries then
    stand in the order of `_place`. If a submission has its own entries in another order (a key's
    rows went from one partition to another and back), or an application's operation its tables in another
    order than one before, nothing in the group is merged.
    """
    if len(group) == 1:
        tables = [table for table in group[0].tables if table.rows.num_rows]
        return tables, [table.rows.column("__operation").to_numpy().astype(np.int64) for table in tables]
    keys = [[_place(table) for table in ops.tables] for ops in group]
    rank = {table: n for n, table in enumerate(dict.fromkeys(key[0] for of_ops in keys for key in of_ops))}
    apart = not all(
        _rises(of_ops) and (not _is_append(ops) or _in_order_of(rank, of_ops))
        for ops, of_ops in zip(group, keys, strict=True)
        if len(of_ops) > 1
    )
    found: dict[object, list[tuple[TableRows, int]]] = {}
    known = 0
    for ops, of_ops in zip(group, keys, strict=True):
        for key, table in zip(of_ops, ops.tables, strict=True):
            found.setdefault((len(found), key) if apart else key, []).append((table, known))
        known += ops.operations.num_rows
    if not apart and any(len(of_ops) > 1 for of_ops in keys):
        found = dict(sorted(found.items(), key=lambda item: (rank[item[0][0]], item[0][1:])))  # type: ignore[index]
    tables, of_rows = [], []
    for entries in found.values():
        first = entries[0][0]
        rows = [table.rows for table, _ in entries]
        counts = [batch.num_rows for batch in rows]
        whole = rows[0] if len(rows) == 1 else pa.concat_batches(rows)
        tables.append(TableRows(first.schema, whole, first.shard, first.partition))
        shift = np.repeat(np.array([known for _, known in entries], np.int64), counts)
        of_rows.append(whole.column("__operation").to_numpy().astype(np.int64) + shift)
    return tables, of_rows


def _place(table: TableRows) -> tuple[TableId, SchemaVersion, ShardId, str]:
    """Return the key of entries that become one.

    Within a table, operations number their entries in the order of this key.
    """
    partition = "" if table.partition is None else f"={table.partition}"
    return table.schema.table_id, table.schema.version, table.shard, partition


def _rises(places: Sequence[tuple[TableId, SchemaVersion, ShardId, str]]) -> bool:
    """Return whether each table's entries are in ascending order of their keys, each key once."""
    newest: dict[TableId, tuple[TableId, SchemaVersion, ShardId, str]] = {}
    for place in places:
        if newest.get(place[0], (place[0],)) >= place:
            return False
        newest[place[0]] = place
    return True


def _is_append(ops: WriteOps) -> bool:
    """Return whether operations are applications', whose tables keep the order that they were given in."""
    return bool(ops.operations.column("kind")[0].as_py() == OperationKind.APPEND)


def _in_order_of(rank: Mapping[TableId, int], places: Sequence[tuple[TableId, SchemaVersion, ShardId, str]]) -> bool:
    """Return whether entries stand in the tables' order."""
    return all(rank[one[0]] <= rank[other[0]] for one, other in pairwise(places))


def _plan_table(
    operations: pa.RecordBatch, table: TableRows, of_row: Ints, first_seq: Seq, base: Offset, *, whole_rows: bool
) -> FramePlan | None:
    """As `_plan`, for rows of one table in one frame: the commonest group, planned with a fifth of the calls.

    None if an operation has no rows: frames leave such operations out.
    """
    count = len(of_row)
    runs = operations.num_rows
    starts = _ZERO if runs == 1 else np.concatenate((_ZERO, np.flatnonzero(of_row[1:] != of_row[:-1]) + 1))
    if len(starts) != runs:
        return None
    schema, rows = table.schema, table.rows
    firsts = _first_indexes(rows.column("__index").to_numpy(), starts)
    if runs == count <= _COUNT_KEPT_MAX or runs == 1:
        batches = _entries_of_one_row(schema.table_id, schema.version, table.partition, runs)
        batches = batches.set_column(_FIRST_SEQ, BATCH_SCHEMA.field(_FIRST_SEQ), _ints(starts + first_seq))
        if runs != count:
            batches = batches.set_column(_COUNT, BATCH_SCHEMA.field(_COUNT), _ints(np.array([count], np.int64)))
        if firsts.any():
            batches = batches.set_column(_FIRST_INDEX, BATCH_SCHEMA.field(_FIRST_INDEX), _indexes(firsts))
    else:
        seqs = starts + first_seq
        batches = _entries_of(schema.table_id, schema.version, table.partition, seqs, starts, count, firsts)
    is_numbered = not whole_rows and int(firsts.min()) >= 0
    offsets = None if is_numbered else np.arange(base, base + count, dtype=np.int64)
    return FramePlan(
        first_offset=base,
        count=count,
        first_seq=first_seq,
        last_seq=Seq(first_seq + count - 1),
        operations=operations,
        batches=batches,
        payload=((schema, _part_rows(schema, rows, offsets, whole_rows=whole_rows)),),
        commit_ts_us=_time_range(operations),
    )


def _first_indexes(index: Ints, starts: Ints) -> Ints:
    """Return the first index of each run of rows; -1 if a run's indexes aren't consecutive."""
    firsts = index[starts]
    if len(firsts) == len(index):
        return firsts
    follows = np.empty(len(index), np.bool_)
    np.equal(index[1:], index[:-1] + 1, out=follows[1:])
    follows[starts] = True
    return firsts if follows.all() else np.where(np.logical_and.reduceat(follows, starts), firsts, -1)


def _entries_of(
    table_id: TableId,
    version: SchemaVersion,
    partition: str | None,
    seqs: Ints,
    starts: Ints,
    count: int,
    first_indexes: Ints,
) -> pa.RecordBatch:
    """Return the directory's entries for one table's runs, one per operation, that begin at `starts`."""
    runs = len(starts)
    counts = np.empty(runs, dtype=np.int64)
    counts[:-1] = starts[1:] - starts[:-1]
    counts[-1] = count - starts[-1]
    columns = [
        _ints(np.arange(runs, dtype=np.int32)),
        _ints(np.full(runs, table_id, dtype=np.int64)),
        _ints(np.full(runs, version, dtype=np.int32)),
        pa.nulls(runs, pa.string()) if partition is None else pa.repeat(partition, runs),
        _ints(seqs),
        _ints(counts),
        _indexes(first_indexes),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=BATCH_SCHEMA)


@lru_cache(maxsize=64)  # small groups come in few sizes: filling in the numbers costs a tenth of making it
def _entries_of_one_row(table_id: TableId, version: SchemaVersion, partition: str | None, runs: int) -> pa.RecordBatch:
    """As `_entries_of`, with one row each; the caller fills in their numbers."""
    rows = np.arange(runs, dtype=np.int64)
    return _entries_of(table_id, version, partition, rows, rows, runs, np.zeros(runs, np.int64))


def _ints(values: Ints | npt.NDArray[np.int32]) -> pa.Array:
    """Return an Arrow array without a copy, at half the cost of `pa.array`."""
    kind = pa.int64() if values.dtype == np.int64 else pa.int32()
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _indexes(firsts: Ints) -> pa.Array:
    """Return first indexes for a directory; -1 becomes null."""
    is_none = firsts < 0
    return pa.array(firsts, mask=is_none) if is_none.any() else _ints(firsts)


def plan_chunk(
    operation: pa.RecordBatch,
    tables: Sequence[TableRows],
    *,
    next_seq: dict[tuple[ShardId, TableId], Seq],
    base: Mapping[ShardId, Offset],
    frame_bytes_max: int,
    whole_rows: bool = False,
) -> dict[ShardId, list[FramePlan]]:
    """Plan the frames of one chunk of a spilled operation.

    `next_seq` advances by the chunk's rows of each (shard, table).
    """
    tables = [table for table in tables if table.rows.num_rows]
    if not tables:
        return {}

    def number(runs: Runs) -> Ints:
        firsts = np.empty(len(runs.count), dtype=np.int64)
        for run, (entry, count) in enumerate(zip(runs.entry.tolist(), runs.count.tolist(), strict=True)):
            key = (tables[entry].shard, tables[entry].schema.table_id)
            firsts[run] = next_seq[key]
            next_seq[key] = Seq(next_seq[key] + count)
        return firsts

    of_rows = [table.rows.column("__operation").to_numpy().astype(np.int64) for table in tables]
    return _plan(operation, tables, of_rows, number, base, frame_bytes_max, whole_rows=whole_rows)


def _plan(
    operations: pa.RecordBatch,
    tables: Sequence[TableRows],
    of_rows: Sequence[Ints],
    number: Callable[[Runs], Ints],
    base: Mapping[ShardId, Offset],
    frame_bytes_max: int,
    *,
    whole_rows: bool,
) -> dict[ShardId, list[FramePlan]]:
    by_shard: dict[ShardId, list[_Entry]] = {}
    for entry in _entries(tables, of_rows, number):
        by_shard.setdefault(entry.table.shard, []).append(entry)
    plans: dict[ShardId, list[FramePlan]] = {}
    for shard, entries in by_shard.items():
        offsets = _offsets(entries, base[shard])
        cuts = _frame_cuts(entries, offsets, base[shard], frame_bytes_max)
        plans[shard] = [
            _plan_frame(operations, entries, offsets, low, high, whole_rows=whole_rows) for low, high in pairwise(cuts)
        ]
    return plans


def _entries(tables: Sequence[TableRows], of_rows: Sequence[Ints], number: Callable[[Runs], Ints]) -> Iterable[_Entry]:
    """Cut every entry's rows into runs and number them."""
    found = []
    for of_row in of_rows:
        starts = np.flatnonzero(np.diff(of_row, prepend=-1)) if len(of_row) else np.empty(0, dtype=np.int64)
        found.append((of_row, starts, np.diff(starts, append=len(of_row))))
    runs = Runs(
        operation=np.concatenate([of_row[starts] for of_row, starts, _ in found]),
        entry=np.repeat(np.arange(len(found)), [len(starts) for _, starts, _ in found]),
        count=np.concatenate([counts for _, _, counts in found]),
    )
    seqs = number(runs)
    done = 0
    for order, (table, (of_row, starts, counts)) in enumerate(zip(tables, found, strict=True)):
        end = done + len(starts)
        if len(starts):
            yield _Entry(table, of_row, starts, counts, runs.operation[done:end], seqs[done:end], order)
        done = end


def _offsets(entries: Sequence[_Entry], base: Offset) -> list[Ints]:
    """Return the offsets of each entry's rows: dense over the entries by (operation, index)."""
    sizes = [len(entry.operations) for entry in entries]
    if len(entries) == 1:
        return [np.arange(base, base + sizes[0], dtype=np.int64)]
    index = np.concatenate([entry.table.rows.column("__index").to_numpy() for entry in entries])
    operation = np.concatenate([entry.operations for entry in entries])
    offsets = np.empty(len(index), dtype=np.int64)
    offsets[np.lexsort((index, operation))] = np.arange(base, base + len(index), dtype=np.int64)
    return np.split(offsets, np.cumsum(sizes)[:-1])


def _frame_cuts(entries: Sequence[_Entry], offsets: Sequence[Ints], base: Offset, frame_bytes_max: int) -> list[int]:
    """Return the offsets at which frames begin, and the end."""
    sizes = [entry.table.rows.nbytes for entry in entries]
    end = base + sum(len(of_entry) for of_entry in offsets)
    if sum(sizes) <= frame_bytes_max:
        return [base, end]
    row_bytes = np.empty(end - base)
    for size, of_entry in zip(sizes, offsets, strict=True):
        row_bytes[of_entry - base] = size / len(of_entry)
    frame_of_row = ((np.cumsum(row_bytes) - row_bytes) // frame_bytes_max).astype(np.int64)
    return [base, *(int(cut) + 1 + base for cut in np.flatnonzero(np.diff(frame_of_row))), end]


def _plan_frame(
    operations: pa.RecordBatch,
    entries: Sequence[_Entry],
    offsets: Sequence[Ints],
    low: int,
    high: int,
    *,
    whole_rows: bool,
) -> FramePlan:
    """Plan the frame of the rows with offsets `[low, high)`."""
    parts: dict[tuple[TableId, SchemaVersion], list[_Piece]] = {}
    columns: list[tuple[Ints, ...]] = []
    for place, (entry, of_entry) in enumerate(zip(entries, offsets, strict=True)):
        start, end = (int(at) for at in np.searchsorted(of_entry, (low, high)))
        if start == end:
            continue
        schema = entry.table.schema
        first_run = int(np.searchsorted(entry.run_start, start, side="right")) - 1
        end_run = int(np.searchsorted(entry.run_start, end, side="left"))
        starts = np.maximum(entry.run_start[first_run:end_run], start)
        ends = np.minimum(entry.run_start[first_run:end_run] + entry.run_count[first_run:end_run], end)
        shift = starts - entry.run_start[first_run:end_run]
        seqs: Ints = (entry.run_seq[first_run:end_run] + shift).astype(np.int64)
        counts: Ints = ends - starts
        places: Ints = np.full(len(starts), place, dtype=np.int64)
        rows = entry.table.rows.slice(start, end - start)
        firsts = _first_indexes(rows.column("__index").to_numpy(), starts - start)
        columns.append((entry.run_operation[first_run:end_run], places, seqs, counts, firsts))
        piece = _Piece(schema, rows, entry.operations[start:end], of_entry[start:end])
        parts.setdefault((schema.table_id, schema.version), []).append(piece)

    operation, place_of, seq, count, first = (
        np.concatenate(column) if len(columns) > 1 else column[0] for column in zip(*columns, strict=True)
    )
    if len(columns) > 1:
        order = np.lexsort((place_of, operation))
        operation, place_of, seq, count, first = (column[order] for column in (operation, place_of, seq, count, first))
    used, ordinal = np.unique(operation, return_inverse=True)
    own = operations if len(used) == operations.num_rows else operations.take(pa.array(used))
    table_ids = np.array([entry.table.schema.table_id for entry in entries], dtype=np.int64)
    versions = np.array([entry.table.schema.version for entry in entries], dtype=np.int32)
    partitions = [entry.table.partition for entry in entries]
    nowhere = not any(partition is not None for partition in partitions)
    batches = pa.record_batch(
        [
            pa.array(ordinal.astype(np.int32)),
            pa.array(table_ids[place_of]),
            pa.array(versions[place_of]),
            pa.nulls(len(seq), pa.string()) if nowhere else pa.array(partitions, pa.string()).take(pa.array(place_of)),
            pa.array(seq),
            pa.array(count.astype(np.int64)),
            _indexes(first),
        ],
        schema=BATCH_SCHEMA,
    )
    numbers = EntryNumbers(batches, np.zeros(len(seq), np.int64), np.full(1, low, np.int64))
    explicit = operation[numbers.index < 0]
    return FramePlan(
        first_offset=Offset(low),
        count=high - low,
        first_seq=Seq(int(seq.min())),
        last_seq=Seq(int((seq + count).max()) - 1),
        operations=own,
        batches=batches,
        payload=tuple(
            (pieces[0].schema, _in_order(pieces, explicit, whole_rows=whole_rows)) for pieces in parts.values()
        ),
        commit_ts_us=_time_range(own),
    )


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of one entry in one frame, with the operation and the offset of each."""

    schema: TableSchema
    rows: pa.RecordBatch
    operations: Ints
    offsets: Ints


def _in_order(pieces: Sequence[_Piece], explicit: Ints, *, whole_rows: bool) -> pa.RecordBatch:
    """Return the rows of one part in directory order: operation by operation, and within one, entry by entry.

    The directory doesn't number the operations `explicit`: a part with rows of one has its own numbers.
    """
    schema = pieces[0].schema
    rows = [_as_schema(piece.rows, _schema_of(schema)) for piece in pieces]
    whole = _one_batch(rows, rows[0].schema)
    has_numbers = whole_rows or (
        len(explicit) > 0 and any(np.isin(piece.operations, explicit).any() for piece in pieces)
    )
    offsets = np.concatenate([piece.offsets for piece in pieces]) if has_numbers else None
    if not all(before.operations[-1] <= after.operations[0] for before, after in pairwise(pieces)):
        order = np.argsort(np.concatenate([piece.operations for piece in pieces]), kind="stable")
        whole = whole.take(pa.array(order))
        offsets = None if offsets is None else offsets[order]
    return _part_rows(schema, whole, offsets, whole_rows=whole_rows)


def _part_rows(schema: TableSchema, rows: pa.RecordBatch, offsets: Ints | None, *, whole_rows: bool) -> pa.RecordBatch:
    """Return appended rows as those of a part. Without `offsets` the directory numbers them."""
    rows = _as_schema(rows, _schema_of(schema))
    if offsets is not None:
        rows = rows.set_column(0, _OFFSET, _ints(offsets))  # a tenth of the cost of a new batch
        if whole_rows:
            return rows
    flags = 0 if offsets is not None else NUMBERS
    for flag, places in _SPARSE.items():
        if all(rows.column(place).null_count == rows.num_rows for place in places):
            flags |= flag
    return rows.select(_kept_columns(flags, rows.num_columns)) if flags else rows


@lru_cache(maxsize=1024)
def _kept_columns(flags: int, columns: int) -> list[int]:
    """Return the places of the columns that a part with these flags has."""
    left_out = {name for flag, names in LEFT_OUT.items() if flags & flag for name in names}
    prefix = [place for place, field in enumerate(LOG_ROW_PREFIX) if field.name not in left_out]
    return [*prefix, *range(len(LOG_ROW_PREFIX), columns)]


def _as_schema(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    return rows if rows.schema.equals(schema) else pa.RecordBatch.from_arrays(rows.columns, schema=schema)


_schemas: dict[int, tuple[TableSchema, pa.Schema]] = {}
"""Schemas of appended rows by the `id` of a table's schema. That schema is kept too, so that its `id` isn't reused."""


def _schema_of(schema: TableSchema) -> pa.Schema:
    """Return `append_row_schema`, cached. Appenders use one object for all rows of a schema version."""
    known = _schemas.get(id(schema))
    if known is not None and known[0] is schema:
        return known[1]
    made = append_row_schema(schema)
    if len(_schemas) >= _SCHEMAS_MAX:
        _schemas.clear()
    _schemas[id(schema)] = (schema, made)
    return made


def _one_batch(batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    whole = pa.Table.from_batches(batches, schema=schema).combine_chunks().to_batches()
    if len(whole) != 1:
        raise AssertionError("a group's rows of one table exceed what one Arrow array holds")
    return whole[0]


def _time_range(operations: pa.RecordBatch) -> tuple[int, int] | None:
    times = operations.column("commit_ts")
    if times.null_count == len(times):
        return None
    found = pc.min_max(times)
    return found["min"].value, found["max"].value
