"""Records: the columns that Millstream adds to a table's own, in the log and as readers see them.

A table's rows exist in two shapes only:

- *log rows* (`log_row_schema`): what an appender submits and what a frame's payload holds. They
  carry only what the frame's directory can't hold for a whole operation: offset, index, op, the
  three sparse columns and, in a partitioned table, the row's leaf partition.
- *records* (`record_schema`): what every reader gets. The directory's facts (seq, source, LSN,
  times) are copied to each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Final

import pyarrow as pa

from millstream.model.schema import TableSchema


class Op(IntEnum):
    """The operation of a record; the value is its letter's ASCII code (Debezium's letters if it has one)."""

    CREATE = ord("c")
    UPDATE = ord("u")
    DELETE = ord("d")
    COPY = ord("r")
    TRUNCATE = ord("t")
    MESSAGE = ord("m")
    DEFINITION = ord("s")
    PARTITION_LEFT = ord("x")
    """A leaf partition was dropped, detached or truncated. Rows whose newest record names it are gone."""

    @property
    def letter(self) -> str:
        """The letter that readers see."""
        return chr(self)


TEXT_BY_COLUMN: Final = pa.map_(pa.string(), pa.string())
"""Map from a column's name to PostgreSQL's text of a value; a null item is SQL's NULL."""
INSTANT: Final = pa.timestamp("us", tz="UTC")
TIME_MIN_US: Final = -62_135_596_800_000_000
TIME_MAX_US: Final = 253_402_300_799_999_999
"""The end of the year 9999, in microseconds since 1970. Commit times lie in the years 1 to 9999, so
that every reader can show them."""

LOG_ROW_PREFIX: Final = (
    pa.field("__offset", pa.int64(), nullable=False),
    pa.field("__index", pa.int64(), nullable=False),
    pa.field("__op", pa.uint8(), nullable=False),
    pa.field("__unchanged", pa.list_(pa.string())),
    pa.field("__exact", TEXT_BY_COLUMN),
    pa.field("__before", TEXT_BY_COLUMN),
)
"""`__index` is the record's index in its operation over all tables, from 0: a transaction's
`commit_index`. The three sparse columns are null if they hold nothing. Appenders leave `__offset`
out and put `__operation` in its place."""

OPERATION_ORDINAL: Final = pa.field("__operation", pa.int32(), nullable=False)
"""In rows being appended, the index of a row's operation in its `WriteOps`. Rows are sorted by it,
then by `__index`."""

RECORD_PREFIX: Final = (
    pa.field("__op", pa.string(), nullable=False),
    pa.field("__seq", pa.int64(), nullable=False),
    pa.field("__source", pa.int32(), nullable=False),
    pa.field("__commit_lsn", pa.int64()),
    pa.field("__commit_index", pa.int64()),
    pa.field("__commit_ts", INSTANT),
    pa.field("__commit_date", pa.date32()),
    pa.field("__xid", pa.int64()),
    pa.field("__unchanged", pa.list_(pa.string())),
    pa.field("__exact", TEXT_BY_COLUMN),
    pa.field("__before", TEXT_BY_COLUMN),
)
"""The columns that readers get before the table's own (a log reader may also ask for `__offset`, which
then comes first). Records of a partitioned table have one more; see `record_prefix`."""

PARTITION_OID: Final = pa.field("__partition_oid", pa.int64())
"""OID of the leaf partition that a row is in, at its source; null if it isn't known. Log rows and records of tables
with `TableSchema.partitioned` have it, directly behind `__before`. In an `x`, it is the OID of the leaf that is gone."""

RECORD_COLUMNS: Final = frozenset(field.name for field in (*RECORD_PREFIX, PARTITION_OID))
MONTH_COLUMN: Final = "__commit_month"
"""Partition column of history in a lake of files: the month of `__commit_date`, as `2026-03`. The log has none."""
RESERVED_COLUMNS: Final = (
    RECORD_COLUMNS
    | {MONTH_COLUMN, OPERATION_ORDINAL.name, PARTITION_OID.name}
    | {field.name for field in LOG_ROW_PREFIX}
)
"""Names that a table's own column can't have in any case, because they would collide with these
columns. See `log_names`."""
RECORD_OFFSET: Final = pa.field("__offset", pa.int64(), nullable=False)


def log_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names under which columns of a source's table stand in the log and the lake, in the same order.

    They are the source's own, except reserved names (in any case). Such a name gets one `_`
    appended, or as many as make it unique among the columns.
    """
    taken = {name.lower() for name in names}
    if taken.isdisjoint(RESERVED_COLUMNS):
        return tuple(names)
    found = []
    for name in names:
        kept = name
        if name.lower() in RESERVED_COLUMNS:
            while kept.lower() in taken:
                kept += "_"
            taken.add(kept.lower())
        found.append(kept)
    return tuple(found)


def log_row_prefix(table: TableSchema) -> tuple[pa.Field, ...]:
    """Return the columns before a table's own in log rows."""
    return (*LOG_ROW_PREFIX, PARTITION_OID) if table.partitioned else LOG_ROW_PREFIX


def record_prefix(table: TableSchema) -> tuple[pa.Field, ...]:
    """Return the columns before a table's own in records."""
    return (*RECORD_PREFIX, PARTITION_OID) if table.partitioned else RECORD_PREFIX


def rows_with(schema: pa.Schema, columns: Mapping[str, pa.Array], count: int) -> pa.RecordBatch:
    """Return rows that have these columns of a schema; its others are null."""
    arrays = [columns[f.name] if f.name in columns else pa.nulls(count, f.type) for f in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


@lru_cache(maxsize=4096)  # called for every batch; the metadata is JSON
def append_row_schema(table: TableSchema) -> pa.Schema:
    """Return the schema of rows on their way into the log: `__operation` stands in the place of `__offset`."""
    return table.to_arrow((OPERATION_ORDINAL, *log_row_prefix(table)[1:]))


@lru_cache(maxsize=4096)  # called for every batch; the metadata is JSON
def log_row_schema(table: TableSchema) -> pa.Schema:
    """Return the schema of a frame's payload for one table and schema version."""
    return table.to_arrow(log_row_prefix(table))


@lru_cache(maxsize=4096)  # called for every batch; the metadata is JSON
def record_schema(table: TableSchema, *, offsets: bool = False) -> pa.Schema:
    """Return the schema of the records that readers get, with `__offset` first if asked."""
    prefix = record_prefix(table)
    return table.to_arrow((RECORD_OFFSET, *prefix) if offsets else prefix)
