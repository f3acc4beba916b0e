"""A chunk of existing rows: from COPY's text to the columns that enter the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.capture.copying import _text_scan as machine
from millstream.capture.copying.copy_output import CopyText
from millstream.codec.pgoutput import Relation
from millstream.codec.pgoutput._columns_to_arrow import Texts, exact_map, read_column
from millstream.errors import ProtocolViolation
from millstream.model.ids import SourceId
from millstream.model.operations import OPERATION_SCHEMA, OperationKind
from millstream.model.positions import Lsn
from millstream.model.records import (
    INSTANT,
    OPERATION_ORDINAL,
    PARTITION_OID,
    TEXT_BY_COLUMN,
    Op,
    append_row_schema,
    rows_with,
)
from millstream.model.schema import TableSchema
from millstream.protocol.copy_conflicts import Key


@dataclass(slots=True)
class CopiedRows:
    """Rows of one chunk, decoded; the texts of their keys are kept."""

    schema: TableSchema
    """The schema as it was read; with its version, once the catalog has assigned one."""
    columns: tuple[pa.Array, ...]
    exact: pa.Array
    leaves: pa.Array | None
    """OID of each row's leaf partition; None if the table isn't partitioned."""
    keys: tuple[Texts, ...]
    row_count: int
    size_bytes: int

    def key_list(self) -> list[Key]:
        """Return every row's key, in order."""
        columns = [texts.strings().to_pylist() for texts in self.keys]
        return list(zip(*columns, strict=True)) if columns else []

    def rows(self, mask: Sequence[bool] | None = None) -> pa.RecordBatch:
        """Return the rows (those selected by the mask) as rows of one operation, in `append_row_schema`."""
        columns = self.arrays()
        count = self.row_count
        if mask is not None:
            chosen = pa.array(mask, pa.bool_())
            columns = [column.filter(chosen) for column in columns]
            count = len(columns[0])
        return copied_records(self.schema, columns, count)

    def arrays(self) -> list[pa.Array]:
        """Return the columns of `copied_records`."""
        return [self.exact, *([] if self.leaves is None else [self.leaves]), *self.columns]


def copied_records(
    schema: TableSchema, arrays: Sequence[pa.Array], count: int, *, first_index: int = 0
) -> pa.RecordBatch:
    """Return `r` records of rows, in `append_row_schema`; their `__index` begins at `first_index`.

    Args:
        schema: the table's.
        arrays: `__exact`, then the leaf partitions' OIDs if the table is partitioned, then the table's own columns.
    """
    own = ("__exact", *([PARTITION_OID.name] if schema.partitioned else []), *schema.column_names)
    index = np.arange(first_index, first_index + count, dtype=np.int64)
    return rows_of_one_operation(schema, Op.COPY, index, dict(zip(own, arrays, strict=True)))


def rows_of_one_operation(
    schema: TableSchema, op: Op, index: npt.NDArray[np.int64], columns: Mapping[str, pa.Array]
) -> pa.RecordBatch:
    """Return rows of one kind in `append_row_schema`; columns that aren't given are null."""
    own = {
        OPERATION_ORDINAL.name: pa.array(np.zeros(len(index), np.int32)),
        "__index": pa.array(index),
        "__op": pa.array(np.full(len(index), int(op), np.uint8)),
    }
    return rows_with(append_row_schema(schema), {**own, **columns}, len(index))


def single_row(schema: TableSchema, op: Op, **columns: Any) -> pa.RecordBatch:
    """Return one row in `append_row_schema` with the given values of its columns."""
    arrow = append_row_schema(schema)
    values = {name: pa.array([value], arrow.field(name).type) for name, value in columns.items()}
    return rows_of_one_operation(schema, op, np.zeros(1, np.int64), values)


def last_key(copied: CopyText, relation: Relation, order: Sequence[str], *, partitioned: bool = False) -> Key:
    """Return the key of the last of some rows, its columns in the order given. The rows aren't changed.

    Args:
        relation: names their columns; those of a `partitioned` table have one more.

    Raises:
        TableUndecodable: a value isn't UTF-8.
    """
    messages = copied.messages
    *_, begin = machine.walk_rows(messages, 0, len(messages))
    row = messages[begin:].copy()
    width = len(relation.columns) + partitioned
    value_at, size = np.empty((width, 1), np.int32), np.empty((width, 1), np.int32)
    fault, found = machine.scan_rows(row, width, value_at, size)
    if fault != machine.FINE or found != 1:
        raise ProtocolViolation(f"COPY of {relation.qualified_name}: its last row isn't one of {width} columns")
    places = {column.name: number for number, column in enumerate(relation.columns)}
    texts = [Texts(row, value_at[places[name]], size[places[name]], relation).text(0) for name in order]
    assert all(text is not None for text in texts), "a key has no nulls"
    return tuple(text for text in texts if text is not None)


def read_copied(copied: CopyText, relation: Relation, schema: TableSchema) -> CopiedRows:
    """Decode rows whose columns are the relation's, in its order.

    Behind them, rows of a partitioned table have the OID of their leaf partition.

    Args:
        copied: the rows, less than 2 GiB. They are changed: escapes are removed in place.
        schema: the table's schema under that relation.

    Raises:
        TableUndecodable: a value isn't UTF-8.
        ProtocolViolation: the text isn't what COPY writes.
    """
    messages, row_count = copied.messages, copied.row_count
    width = len(relation.columns) + schema.partitioned
    value_at, size = np.empty((width, row_count), np.int32), np.empty((width, row_count), np.int32)
    fault, found = machine.scan_rows(messages, width, value_at, size)
    if fault != machine.FINE or found != row_count:
        raise ProtocolViolation(f"COPY of {relation.qualified_name}: row {found + 1} isn't one of {width} columns")
    buffer = messages.view()
    buffer.flags.writeable = False
    texts = [Texts(buffer, value_at[number], size[number], relation) for number in range(width)]
    columns: list[pa.Array] = []
    exact: list[tuple[int, int, str]] = []
    for number, column in enumerate(schema.columns):
        array, inexact = read_column(texts[number], column.arrow)
        columns.append(array)
        exact.extend((row, number, text) for row, text in inexact.items())
    names = [column.name for column in schema.columns]
    leaves = read_column(texts[-1], PARTITION_OID.type)[0] if schema.partitioned else None
    return CopiedRows(
        schema=schema,
        columns=tuple(columns),
        exact=exact_map(row_count, exact, names) if exact else pa.nulls(row_count, TEXT_BY_COLUMN),
        leaves=leaves,
        keys=tuple(texts[names.index(name)] for name in schema.key),
        row_count=row_count,
        size_bytes=copied.size_bytes,
    )


def chunk_operation(source: SourceId, chunk_id: str, lsn: Lsn, at_us: int) -> pa.RecordBatch:
    """Return the operation of a chunk: the LSN and time of its snapshot."""
    columns: dict[str, Any] = {
        "kind": pa.array([int(OperationKind.COPY_CHUNK)], pa.uint8()),
        "source": pa.array([source], pa.int32()),
        "commit_lsn": pa.array([lsn], pa.int64()),
        "commit_ts": pa.array([at_us], pa.int64()).cast(INSTANT),
        "chunk_id": pa.array([chunk_id], pa.string()),
    }
    return rows_with(OPERATION_SCHEMA, columns, 1)
