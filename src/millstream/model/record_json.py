"""Records as JSON objects: the one form that `wal cat`, exports and consumers show."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from millstream.model.ids import Epoch, ShardId
from millstream.model.names import qualified_name
from millstream.model.positions import Lsn, format_lsn
from millstream.model.row_values import Values, row_values
from millstream.model.schema import TableKind, TableSchema


def record_facts(
    schema: TableSchema, batch: pa.RecordBatch, *, stream: str, shard: ShardId, epoch: Epoch, values: Values = "json"
) -> list[dict[str, Any]]:
    """Return one table's records as objects, in their order.

    `row` has the new values; for a `d` the old key, or the old row under FULL. Unchanged TOAST columns
    aren't in it.

    Args:
        schema: the table's schema when the records were made.
        batch: records in `record_schema(schema, offsets=True)`.
        stream: the stream's name.
        shard: the shard of the records.
        epoch: the one in the header of their segment.
        values: the representation of values.
    """
    table = None if schema.kind is TableKind.MESSAGES else qualified_name(schema.namespace, schema.name)
    own = row_values(schema, batch, values)
    names = ("__offset", "__op", "__seq", "__source", "__commit_lsn", "__commit_index", "__commit_ts", "__xid")
    offsets, ops, seqs, sources, lsns, indexes, times, xids = (batch.column(name).to_pylist() for name in names)
    unchanged, exact = batch.column("__unchanged").to_pylist(), batch.column("__exact").to_pylist()
    return [
        {
            "stream": stream,
            "shard": int(shard),
            "epoch": int(epoch),
            "offset": offsets[i],
            "seq": seqs[i],
            "op": "raw" if schema.kind is TableKind.RAW else ops[i],
            "table": table,
            "source": sources[i],
            "commit_lsn": None if lsns[i] is None else format_lsn(Lsn(lsns[i])),
            "commit_index": indexes[i],
            "commit_ts": None if times[i] is None else times[i].isoformat(),
            "xid": xids[i],
            "row": own.rows[i],
            "before": own.befores[i],
            "unchanged": unchanged[i] or [],
            "exact": dict(exact[i] or ()),
        }
        for i in range(batch.num_rows)
    ]


def to_json(facts: Mapping[str, Any]) -> str:
    """Return one record as JSON on one line, without its end."""
    return json.dumps(facts, ensure_ascii=False, separators=(",", ":"))
