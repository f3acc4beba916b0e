"""Columns whose values rows add to: records become whole rows, with the running totals.

A record of such a table has what is added, and lists the columns that it doesn't name in `__unchanged`. `accumulated`
turns it into the row as it stands behind the record. After that, every fold works as if the application had appended
whole rows with the totals.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from millstream.crdt.accumulating import LogRuns, unnamed
from millstream.crdt.columns import whole_column
from millstream.lake.column_conversion import EXACT, conform, text_maps, texts_of
from millstream.lake.row_identity import Keys, first_of_each, key_codes

if TYPE_CHECKING:
    from millstream.lake.folded.current_rules import RecordRun
    from millstream.lake.folded.unchanged_values import Lookup
    from millstream.model.schema import TableSchema

_UNCHANGED = pa.list_(pa.string())


def accumulated_by(run: RecordRun, lookup: Lookup) -> RecordRun:
    """Return as `accumulated`, with the rows of `current` looked up; as it is if no column accumulates."""
    if not run.schema.accumulating or not run.values.num_rows:
        return run
    keys = Keys.of(run.values, run.schema.key)
    distinct = keys.take(first_of_each(key_codes([keys])[0]))
    return accumulated(run, run.values.slice(0, 0) if run.truncated else lookup(distinct))


def accumulated(run: RecordRun, before: pa.Table) -> RecordRun:
    """Return records as whole rows, which leave nothing unchanged; as they are if no column accumulates.

    A total that is beyond its type in between is null, and later increments may bring it back.

    Args:
        before: the rows before the first of them, at least those with one of their keys.

    Raises:
        InvalidValue: a total is beyond its type behind the last record of its row.
    """
    schema, shape = run.schema, run.values.schema
    if not schema.accumulating or not run.values.num_rows:
        return run
    before = conform(before, shape)
    count = before.num_rows
    codes = np.concatenate(key_codes([Keys.of(before, schema.key), Keys.of(run.values, schema.key)]))
    runs = LogRuns.of(codes)
    both = pa.concat_tables([before, run.values])
    left_out = unnamed(whole_column(run.tail.column("__unchanged")))
    records = np.arange(count, len(codes))
    maps = whole_column(both.column(EXACT.name))
    any_exact = maps.null_count < len(maps)
    columns: list[pa.Array] = []
    texts: list[pa.Array] = []
    names = [name for name in shape.names if name != EXACT.name]
    for name in names:
        column = whole_column(both.column(name))
        named = np.ones(len(codes), bool)
        if name in left_out:
            named[count:] = ~left_out[name]
        sources = pa.array(runs.newest(named)[records], mask=runs.newest(named)[records] < 0)
        if name in schema.accumulating:
            # In a lake in a database every value is text.
            totals = runs.totals(column.cast(schema.column(name).arrow))
            totals.check(runs.last(), table=schema.full_name, column=name)
            columns.append(totals.values.slice(count).cast(shape.field(name).type))
        else:
            columns.append(column.take(sources))
        if any_exact:
            texts.append(texts_of(maps, name).take(sources))
    exact = text_maps(names, texts, len(records)) if any_exact else pa.nulls(len(records), EXACT.type)
    made = {**dict(zip(names, columns, strict=True)), EXACT.name: exact}
    tail = run.tail
    place = tail.schema.get_field_index("__unchanged")
    if place >= 0:
        tail = tail.set_column(place, "__unchanged", pa.nulls(tail.num_rows, _UNCHANGED))
    return replace(run, tail=tail, values=pa.table([made[name] for name in shape.names], schema=shape))


def lacking_named(batch: pa.RecordBatch, newest: TableSchema) -> pa.RecordBatch:
    """Return records of an earlier version, which say nothing about the columns that it lacks.

    Rows of a table in which no column accumulates name all columns, so that these are null.
    """
    lacks = [column.name for column in newest.columns if column.name not in batch.schema.names]
    if not lacks or not newest.accumulating:
        return batch
    place = batch.schema.get_field_index("__unchanged")
    lists = [[*(names or ()), *lacks] for names in batch.column(place).to_pylist()]
    return batch.set_column(place, batch.schema.field(place), pa.array(lists, _UNCHANGED))
