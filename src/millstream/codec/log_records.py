"""Conversion of a frame's rows and directory to the records that readers see.

Everything here works on whole columns: a frame may hold ten thousand one-row transactions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.codec.log_directory import spread
from millstream.codec.log_parts import EntryNumbers, LeftOut
from millstream.errors import CorruptFrame
from millstream.model.operations import OperationKind
from millstream.model.records import RECORD_OFFSET, Op, log_row_schema, record_schema
from millstream.model.schema import TableSchema

_IS_OP: Final = np.isin(np.arange(256), [int(op) for op in Op])
"""Whether a code is an op's."""


@lru_cache(maxsize=4096)  # called for every part of a frame
def log_columns(table: TableSchema, columns: frozenset[str] | None, *, offsets: bool) -> frozenset[str]:
    """Return the columns of `log_row_schema(table)` that records of these columns are made of; all of them with None.

    `__op` is always among them, because its values are verified.
    """
    wanted = set(record_schema(table, offsets=offsets).names)
    if columns is not None:
        wanted &= columns | {RECORD_OFFSET.name}
    if "__commit_index" in wanted:
        wanted.add("__index")
    return frozenset(wanted & set(log_row_schema(table).names) | {"__op"})


def records_of(
    table: TableSchema,
    rows: pa.RecordBatch,
    operations: pa.RecordBatch,
    batches: pa.RecordBatch,
    numbers: Callable[[], EntryNumbers],
    *,
    columns: frozenset[str] | None = None,
    offsets: bool = False,
    moments: bool = False,
) -> pa.RecordBatch:
    """Return one part's log rows as records.

    Args:
        rows: `log_row_schema(table)`, or `log_columns` of it, in the order of the directory's entries for this
            table and version; columns that its part left out may be missing.
        batches: the frame's batch entries, of all tables.
        numbers: returns the entries' numbers; called if a number is asked for that the part left out.
        columns: only these and `__seq`; names that the table lacks are ignored. None: all.
        offsets: put `__offset` first.
        moments: give copied rows the moment at which they were read as `__commit_ts`, instead of null. A copy's
            marker (`t`) has none, because its time is of another clock than the source's.

    Raises:
        CorruptFrame: directory and rows disagree.
    """
    mine = of_part(batches, table)
    counts = batches.column("count").to_numpy()[mine]
    if int(counts.sum()) != rows.num_rows:
        raise CorruptFrame(f"the directory and the rows of table {table.table_id} disagree")
    firsts = batches.column("first_seq").to_numpy()[mine]
    codes = rows.column("__op").to_numpy()
    if not _IS_OP[codes].all():
        raise CorruptFrame(f"a record of table {table.table_id} has an unknown op")
    ordinals = batches.column("operation").to_numpy()[mine]
    kinds = operations.column("kind").to_numpy()
    there = frozenset(rows.schema.names)
    left_out = LeftOut(table, counts, mine, numbers)
    of_row: pa.Array | None = None

    def own(name: str, kind: pa.DataType) -> pa.Array:
        return rows.column(name) if name in there else left_out.column(name, kind)

    def of_rows(values: pa.Array) -> pa.Array:
        """Give each row its operation's value."""
        nonlocal of_row
        if values.null_count == len(values):
            return pa.nulls(rows.num_rows, values.type)
        if of_row is None:
            of_row = pa.array(np.repeat(ordinals, counts))
        return values.take(of_row)

    def fact(name: str) -> pa.Array:
        return of_rows(operations.column(name))

    def of_kind(*some: OperationKind) -> npt.NDArray[np.bool_] | None:
        """Return which rows are of operations of some kinds; None if none is."""
        found: npt.NDArray[np.bool_] = np.logical_or.reduce([kinds == kind for kind in some])
        return np.repeat(found[ordinals], counts) if found.any() else None

    def commit_index() -> pa.Array:
        return _null_where(own("__index", pa.int64()), of_kind(OperationKind.COPY_CHUNK, OperationKind.MESSAGE))

    def commit_ts() -> pa.Array:
        copied = of_kind(OperationKind.COPY_CHUNK)
        if copied is not None and moments:
            copied &= codes == Op.TRUNCATE
        return _null_where(fact("commit_ts"), copied)

    def seq() -> pa.Array:
        return pa.array(spread(firsts, counts), type=pa.int64())

    made: dict[str, Callable[[], pa.Array]] = {
        "__op": lambda: _letters(codes),
        "__seq": seq,
        "__source": lambda: fact("source"),
        "__commit_lsn": lambda: fact("commit_lsn"),
        "__commit_index": commit_index,
        "__commit_ts": commit_ts,
        "__commit_date": lambda: of_rows(pc.cast(operations.column("commit_ts"), pa.date32())),
        "__xid": lambda: fact("xid"),
    }
    schema = _schema_of(table, columns, offsets=offsets)
    found = [made[field.name]() if field.name in made else own(field.name, field.type) for field in schema]
    return pa.RecordBatch.from_arrays(found, schema=schema)


def of_part(batches: pa.RecordBatch, table: TableSchema) -> npt.NDArray[np.bool_]:
    """Return which of a directory's batches are of a table under a schema version."""
    found: npt.NDArray[np.bool_] = (batches.column("table_id").to_numpy() == table.table_id) & (
        batches.column("schema_version").to_numpy() == table.version
    )
    return found


def first_seqs(operations: pa.RecordBatch, batches: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """Return the first number of each operation of a directory."""
    first = np.full(operations.num_rows, np.iinfo(np.int64).max, dtype=np.int64)
    np.minimum.at(first, batches.column("operation").to_numpy(), batches.column("first_seq").to_numpy())
    return first


@lru_cache(maxsize=4096)  # called for every part of a frame; the metadata is JSON
def _schema_of(table: TableSchema, columns: frozenset[str] | None, *, offsets: bool) -> pa.Schema:
    """Return `record_schema` with some columns."""
    schema = record_schema(table, offsets=offsets)
    if columns is None:
        return schema
    kept = columns | {"__seq", RECORD_OFFSET.name}
    return pa.schema([field for field in schema if field.name in kept], schema.metadata)


def _letters(codes: npt.NDArray[np.uint8]) -> pa.Array:
    """Return ASCII codes as texts of one letter."""
    ends = np.arange(len(codes) + 1, dtype=np.int32)
    return pa.StringArray.from_buffers(len(codes), pa.py_buffer(ends), pa.py_buffer(codes))


def _null_where(values: pa.Array, mask: npt.NDArray[np.bool_] | None) -> pa.Array:
    if mask is None or not mask.any():
        return values
    return pc.if_else(pa.array(mask), pa.scalar(None, values.type), values)
