"""Rows in the columns of a later schema: under its names, with the values of columns that were added after the rows.

A value that a column's type can't hold is null there, and its text is added to `__exact`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa

from millstream.lake.column_conversion import EXACT, conform, from_text, text_maps, texts_of
from millstream.model.column_renames import Filled, FilledNames, filled_in, under_names
from millstream.model.records import TEXT_BY_COLUMN
from millstream.model.schema import TableSchema


def renamed_rows(rows: pa.Table, names: FilledNames, shape: pa.Schema) -> pa.Table:
    """Return rows with the columns of `shape`, which `names` finds; a column that they lack is null."""
    return conform(filled_rows(under_names(rows, names), names, shape), shape)


def filled_rows(rows: pa.Table, names: FilledNames, shape: pa.Schema) -> pa.Table:
    """Return rows with those columns of `shape` that were added after them."""
    texts = dict[str, str]()
    for name, filled in names.items():
        if not isinstance(filled, Filled) or name not in shape.names:
            continue
        field = shape.field(name)
        value, text = from_text(field.type, pa.array([filled.text]))
        values = value.take(pa.array(np.zeros(rows.num_rows, np.int64)))
        at = rows.schema.get_field_index(name)
        rows = rows.append_column(field, values) if at < 0 else rows.set_column(at, field, values)
        if text[0].is_valid:
            texts[name] = filled.text
    return _with_texts(rows, texts) if texts and rows.num_rows else rows


def filled_records(
    schema: TableSchema, batch: pa.RecordBatch, newest: TableSchema
) -> tuple[TableSchema, pa.RecordBatch]:
    """Return records of the log with those columns of the newest schema that were added after them with a default.

    A column whose name another one has in the records is left out.
    """
    names = filled_in(schema, newest)
    added = [c for c in newest.columns if isinstance(names.get(c.name), Filled) and c.name not in schema.column_names]
    if not added:
        return schema, batch
    schema = replace(schema, columns=(*schema.columns, *added))
    shape = pa.schema([pa.field(column.name, column.arrow) for column in added])
    rows = filled_rows(pa.Table.from_batches([batch]), names, shape)
    arrays = [rows.column(name).combine_chunks() for name in [*batch.schema.names, *shape.names]]
    own = schema.to_arrow(tuple(batch.schema)[: batch.num_columns - len(schema.columns) + len(added)])
    return schema, pa.RecordBatch.from_arrays(arrays, schema=own)


def inexact_texts(names: FilledNames, shape: pa.Schema) -> Mapping[str, str]:
    """Return the texts of those columns of `shape`, added after rows, whose types can't hold their value."""
    return {
        name: filled.text
        for name, filled in names.items()
        if isinstance(filled, Filled)
        and name in shape.names
        and from_text(shape.field(name).type, pa.array([filled.text]))[1][0].is_valid
    }


def _with_texts(rows: pa.Table, texts: Mapping[str, str]) -> pa.Table:
    at = rows.schema.get_field_index(EXACT.name)
    had = pa.nulls(rows.num_rows, TEXT_BY_COLUMN) if at < 0 else rows.column(at)
    kept = sorted({name for entries in had.to_pylist() for name, _ in entries or ()} - texts.keys())
    columns = [texts_of(had, name) for name in kept]
    columns += [pa.array([text] * rows.num_rows, pa.string()) for text in texts.values()]
    maps = text_maps([*kept, *texts], columns, rows.num_rows)
    return rows.append_column(EXACT, maps) if at < 0 else rows.set_column(at, EXACT, maps)
