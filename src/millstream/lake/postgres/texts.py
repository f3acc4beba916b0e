"""Records with every value as PostgreSQL's text: exact whatever the type, and in the form that PostgreSQL accepts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from millstream.lake.column_conversion import texts_of
from millstream.lake.folded.accumulating import lacking_named
from millstream.model.column_renames import Filled, filled_in
from millstream.model.column_texts import render_column
from millstream.model.records import PARTITION_OID, RECORD_PREFIX, TEXT_BY_COLUMN
from millstream.model.schema import Column, PgType, TableSchema

_BYTEA: Final = PgType(17, -1, "bytea")
_SLICE_ROWS: Final = 1 << 15
_KEPT: Final = ("__op", "__seq", "__unchanged", "__before")

ZERO_STAND_IN: Final = "\N{SYMBOL FOR NULL}"
"""Stands for a zero character, of which PostgreSQL's texts and jsonb hold none; applications may write one."""

Versioned = tuple[TableSchema, pa.RecordBatch]
"""A version's schema, and records in its `record_schema`."""


def column_texts(schema: TableSchema, batch: pa.RecordBatch, name: str) -> pa.Array:
    """Return PostgreSQL's text of a column's values; null for NULL, and if a record doesn't have the value."""
    column, array = schema.column(name), batch.column(name)
    if column.pg is None and pa.types.is_binary(column.arrow):
        column = Column(name, column.arrow, _BYTEA)
    texts = pa.array(render_column(array, column), pa.string())
    exact = batch.column("__exact")
    return texts if exact.null_count == len(exact) else pc.coalesce(texts_of(exact, name), texts)


def without_zeros(texts: pa.Array) -> pa.Array:
    """Return texts with `ZERO_STAND_IN` for each zero character; arrays of other types as they are."""
    if not (pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)):
        return texts
    return pc.replace_substring(texts, "\0", ZERO_STAND_IN)


def text_records(schema: TableSchema, batches: Sequence[Versioned]) -> pa.Table:
    """Return records as a fold takes them, with the columns of `schema` as text.

    If a version lacked a column, it is null, or has the default with which the column was added after it.

    Args:
        schema: the newest.
        batches: of any versions of the table.
    """
    shape = text_schema(schema)
    tables = []
    for version, some in _slices(batches):
        batch = lacking_named(some, schema)
        has = {column.name for column in version.columns}
        names = filled_in(version, schema)
        own = [
            column_texts(version, batch, name) if name in has else _filled(names.get(name), batch.num_rows)
            for name in schema.column_names
        ]
        kept = [batch.column(name) for name in _KEPT]
        exact = pa.nulls(batch.num_rows, TEXT_BY_COLUMN)
        tables.append(pa.table([*kept, exact, *own, *_partitions(schema, version, batch)], schema=shape))
    return pa.concat_tables(tables) if tables else shape.empty_table()


def _partitions(schema: TableSchema, version: TableSchema, batch: pa.RecordBatch) -> list[pa.Array]:
    if not schema.partitioned:
        return []
    if not version.partitioned:
        return [pa.nulls(batch.num_rows, pa.string())]
    return [batch.column(PARTITION_OID.name).cast(pa.string())]


def _filled(value: str | Filled | None, count: int) -> pa.Array:
    return pa.array([value.text if isinstance(value, Filled) else None] * count, pa.string())


def _slices(batches: Sequence[Versioned]) -> Iterator[Versioned]:
    """Yield some ten thousand records at a time: their texts are Python objects for a moment."""
    for version, batch in batches:
        for start in range(0, batch.num_rows, _SLICE_ROWS):
            yield version, batch.slice(start, _SLICE_ROWS)


def text_schema(schema: TableSchema) -> pa.Schema:
    """Return the schema of `text_records`.

    It has a fold's record columns, `__exact` (null: texts are exact), and the table's own, with `__partition_oid` behind
    them if the table is partitioned.
    """
    kept = [field for field in RECORD_PREFIX if field.name in _KEPT]
    exact = pa.field("__exact", TEXT_BY_COLUMN)
    return pa.schema([*kept, exact, *text_columns(schema)])


def text_columns(schema: TableSchema) -> pa.Schema:
    """Return the columns of a table's rows, each as text: the table's own, and `__partition_oid` if it is partitioned."""
    names = [*schema.column_names, *([PARTITION_OID.name] if schema.partitioned else [])]
    return pa.schema([pa.field(name, pa.string()) for name in names])
