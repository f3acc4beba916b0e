"""Rows by hand, as the appender hands them to a router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from millstream.model.ids import SchemaVersion, ShardId, SourceId, TableId
from millstream.model.operations import OPERATION_SCHEMA, OperationKind, TableRows, WriteOps
from millstream.model.records import LOG_ROW_PREFIX, Op, append_row_schema
from millstream.model.schema import Column, TableSchema


def schema_of(
    columns: dict[str, pa.DataType],
    *,
    name: str = "clicks",
    key: tuple[str, ...] = (),
    source: int = 0,
    table_id: int = 1,
) -> TableSchema:
    return TableSchema(
        TableId(table_id), SchemaVersion(1), SourceId(source), "public", name,
        tuple(Column(column, kind) for column, kind in columns.items()), key, key,
    )  # fmt: skip


def batch_of(
    schema: TableSchema, columns: dict[str, Sequence[Any] | pa.Array], operations: Sequence[int] | None = None
) -> pa.RecordBatch:
    """Rows in `append_row_schema`; `operations` gives each row's operation, rising, from 0."""
    count = len(next(iter(columns.values())))
    operation = np.zeros(count, dtype=np.int32) if operations is None else np.array(operations, dtype=np.int32)
    first = np.flatnonzero(np.diff(operation, prepend=-1))
    index = np.arange(count, dtype=np.int64) - np.repeat(first, np.diff(first, append=count))
    facts = {
        "__operation": pa.array(operation),
        "__index": pa.array(index),
        "__op": pa.array(np.full(count, int(Op.CREATE), np.uint8)),
    }
    arrow = append_row_schema(schema)
    prefix = [facts[arrow[0].name], *(facts.get(f.name, pa.nulls(count, f.type)) for f in LOG_ROW_PREFIX[1:])]
    own = [pa.array(columns[c.name], c.arrow) for c in schema.columns]
    return pa.RecordBatch.from_arrays([*prefix, *own], schema=arrow)


def ops_of(entries: Sequence[TableRows], count: int = 1) -> WriteOps:
    facts = {"kind": [int(OperationKind.APPEND)] * count, "source": [0] * count, "commit_ts": list(range(count))}
    columns = [pa.array(facts.get(f.name, [None] * count), f.type) for f in OPERATION_SCHEMA]
    return WriteOps(pa.RecordBatch.from_arrays(columns, schema=OPERATION_SCHEMA), tuple(entries))


def shards(count: int) -> list[ShardId]:
    return [ShardId(n) for n in range(count)]
