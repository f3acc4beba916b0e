"""Which records of a batch a consumer receives: `where` is evaluated on Arrow columns, before a record is a text."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.delivery.definition import Definition
from millstream.delivery.records.latest import gone
from millstream.errors import RoutingError
from millstream.model.predicate import Predicate
from millstream.model.records import Op
from millstream.model.schema import TableKind, TableSchema
from millstream.protocol.delivery.messages import Kind

Bools = npt.NDArray[np.bool_]
_TRUNCATE: Final = Op.TRUNCATE.letter
_DELETE: Final = Op.DELETE.letter


def selected(definition: Definition, schema: TableSchema, batch: pa.RecordBatch) -> tuple[Bools, Bools | None]:
    """Return two masks: the records to deliver, and those of them whose row has left `where` (sent as `d`)."""
    if not definition.takes(schema):
        return np.zeros(batch.num_rows, dtype=bool), None
    if definition.predicate is None or schema.kind is TableKind.RAW:
        return np.ones(batch.num_rows, dtype=bool), None
    matches = matching(definition.predicate, schema, batch)
    if definition.kind is not Kind.LATEST:
        return matches, None
    is_gone = gone(definition.predicate, schema, batch, matches)
    return matches | is_gone, is_gone


def matching(predicate: Predicate, schema: TableSchema, batch: pa.RecordBatch) -> Bools:
    """Return for each record whether a consumer's `where` lets it through.

    A record on which it can't be evaluated passes, and so does a TRUNCATE: a delete that lacks a column, an unchanged
    TOAST value, a value that stands in `__exact`, a column of another type than the literal.
    """
    first = batch.num_columns - len(schema.columns)
    fields = [pa.field(column.name, column.arrow) for column in schema.columns]
    own = pa.RecordBatch.from_arrays(batch.columns[first:], schema=pa.schema(fields))
    try:
        found = np.array(predicate.matches(own).to_numpy(zero_copy_only=False), dtype=bool)
    except RoutingError:
        return np.ones(batch.num_rows, dtype=bool)
    ops = batch.column("__op")
    found |= pc.equal(ops, _TRUNCATE).to_numpy(zero_copy_only=False)
    named = [column.name for column in schema.columns if column.name in predicate.columns]
    if any(name not in schema.identity for name in named):
        found |= pc.equal(ops, _DELETE).to_numpy(zero_copy_only=False)
    for name in ("__unchanged", "__exact"):
        column = batch.column(name)
        if named and column.null_count < len(column):
            for i, values in enumerate(column.to_pylist()):
                said = values if name == "__unchanged" else dict(values or ())
                if said and any(each in said for each in named):
                    found[i] = True
    return found
