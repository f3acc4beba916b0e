"""Which records pass a predicate (`where` of consumers and tails), evaluated on Arrow columns.

A record passes unless the predicate is known to be false for its row. It may be unknown: a delete has only the key, an
unchanged TOAST value isn't in the record, a value that stands in `__exact` isn't in its column, and the column may have
had another type. A TRUNCATE concerns every row, and an `x` all rows of a partition, so they pass too.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import RoutingError
from millstream.model.pgtypes import is_numeric_text
from millstream.model.predicate import NUMERIC_TEXT, Predicate
from millstream.model.records import Op
from millstream.model.schema import Column, TableSchema


def passing(predicate: Predicate, schema: TableSchema, batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
    """Return a mask of the records that pass.

    Args:
        batch: the records: columns of the record, `__op`, `__unchanged` and `__exact` among them, then the table's own.
    """
    first = batch.num_columns - len(schema.columns)
    rows = pa.RecordBatch.from_arrays(batch.columns[first:], schema=row_schema(schema.columns))
    try:
        matched = np.array(predicate.matches(rows).to_numpy(zero_copy_only=False), dtype=bool)
    except RoutingError:  # a column had another type than the literal
        return np.ones(batch.num_rows, dtype=bool)
    return matched | _undecided(predicate, schema, batch)


def row_schema(columns: Iterable[Column]) -> pa.Schema:
    """Return the Arrow schema of rows that a predicate is evaluated on."""
    return pa.schema(
        pa.field(column.name, column.arrow, metadata=NUMERIC_TEXT if is_numeric_text(column) else None)
        for column in columns
    )


def _undecided(predicate: Predicate, schema: TableSchema, batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
    """Return which records may lack the value of a column that the predicate names and the table has."""
    ops = batch.column("__op")
    of_many_rows = pc.or_(pc.equal(ops, Op.TRUNCATE.letter), pc.equal(ops, Op.PARTITION_LEFT.letter))
    undecided = of_many_rows.to_numpy(zero_copy_only=False)
    named = {column.name for column in schema.columns}.intersection(predicate.columns)
    if not named.issubset(schema.identity):
        undecided = undecided | pc.equal(ops, Op.DELETE.letter).to_numpy(zero_copy_only=False)
    for name in ("__unchanged", "__exact"):
        column = batch.column(name)
        if named and column.null_count < len(column):
            listed = (value if name == "__unchanged" else dict(value or ()) for value in column.to_pylist())
            undecided = undecided | np.array([not named.isdisjoint(names or ()) for names in listed], dtype=bool)
    mask: npt.NDArray[np.bool_] = undecided
    return mask
