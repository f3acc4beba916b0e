"""Which records of a batch a consumer receives: of its tables, and those that `model.record_filter` lets through."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.delivery.definition import Definition
from millstream.delivery.records.latest import gone
from millstream.model.record_filter import passing
from millstream.model.schema import TableKind, TableSchema
from millstream.protocol.delivery.messages import Kind

Bools = npt.NDArray[np.bool_]


def selected(definition: Definition, schema: TableSchema, batch: pa.RecordBatch) -> tuple[Bools, Bools | None]:
    """Return two masks: the records to deliver, and those of them whose row has left `where` (sent as `d`)."""
    if not definition.takes(schema):
        return np.zeros(batch.num_rows, dtype=bool), None
    if definition.predicate is None or schema.kind is TableKind.RAW:
        return np.ones(batch.num_rows, dtype=bool), None
    matches = passing(definition.predicate, schema, batch)
    if definition.kind is not Kind.LATEST:
        return matches, None
    is_gone = gone(definition.predicate, schema, batch, matches)
    return matches | is_gone, is_gone
