"""Records as JSON objects: the one form that `wal cat`, exports and consumers show. `column_texts` has the form of each value."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import pyarrow as pa

from millstream.model.ids import Epoch, ShardId
from millstream.model.names import qualified_name
from millstream.model.positions import Lsn, format_lsn
from millstream.model.records import PARTITION_OID
from millstream.model.row_values import Values, row_values
from millstream.model.schema import TableKind, TableSchema


def record_facts(
    schema: TableSchema, batch: pa.RecordBatch, *, stream: str, shard: ShardId, epoch: Epoch, values: Values = "json"
) -> list[dict[str, Any]]:
    """Return one table's records as objects, in their order.

    `row` has the new values; for a `d` the old key, or the old row under FULL. Unchanged TOAST columns
    aren't in it. For an `x` it names the leaf partition. Records of partitioned tables have `partition_oid`.

    Args:
        schema: the table's schema when the records were made.
        batch: records in `record_schema(schema, offsets=True)`.
        epoch: the one in the header of their segment.
    """
    table = None if schema.kind is TableKind.MESSAGES else qualified_name(schema.namespace, schema.name)
    own = row_values(schema, batch, values)
    names = ("__offset", "__op", "__seq", "__source", "__commit_index", "__xid")
    offsets, ops, seqs, sources, indexes, xids = (batch.column(name).to_pylist() for name in names)
    lsns = texts_of(batch.column("__commit_lsn"), lambda lsn: format_lsn(Lsn(lsn)))
    times = texts_of(batch.column("__commit_ts"), datetime.isoformat)
    unchanged, exact = batch.column("__unchanged").to_pylist(), batch.column("__exact").to_pylist()
    leaves = batch.column(PARTITION_OID.name).to_pylist() if schema.partitioned else None
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
            "commit_lsn": lsns[i],
            "commit_index": indexes[i],
            "commit_ts": times[i],
            "xid": xids[i],
            "row": own.rows[i],
            "before": own.befores[i],
            "unchanged": unchanged[i] or [],
            "exact": dict(exact[i] or ()),
            **({} if leaves is None else {"partition_oid": leaves[i]}),
            **(_definition(schema, exact[i], own.befores[i]) if schema.kind is TableKind.DEFINITION else {}),
        }
        for i in range(batch.num_rows)
    ]


def _definition(schema: TableSchema, filled: Any, renamed: Any) -> dict[str, Any]:
    """Return the row of a definition."""
    columns = [
        {"name": column.name, "number": column.number, "type": None if column.pg is None else column.pg.name}
        for column in schema.columns
    ]
    return {
        "row": {"columns": columns, "renamed": dict(renamed or ()), "filled": dict(filled or ())},
        "before": None,
        "exact": {},
    }


def texts_of(column: pa.Array, text: Callable[[Any], str]) -> list[str | None]:
    """Return the text of each value of a column in which few values differ; None for null."""
    coded = column.dictionary_encode()
    texts = [text(value) for value in coded.dictionary.to_pylist()]
    return [None if place is None else texts[place] for place in coded.indices.to_pylist()]


def to_json(facts: Mapping[str, Any]) -> str:
    """Return one record as JSON on one line, without its end."""
    return json.dumps(facts, ensure_ascii=False, separators=(",", ":"))
