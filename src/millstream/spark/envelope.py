"""Records of all tables in one shape: the `__` columns, the table's name, and the row as JSON text.

Values stand as `millstream wal cat` prints them: as numbers if JSON holds them exactly, else as
PostgreSQL's text. Columns that a record doesn't have (unchanged TOAST) are absent from its row and
named in `__unchanged`. A value that its column can't hold exactly is null in the row and whole in
`__exact`. The row of an `x` has the name and the OID of the partition that left.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import pyarrow as pa

from millstream.model.column_texts import json_column
from millstream.model.records import PARTITION_OID, RECORD_PREFIX, Op, record_prefix
from millstream.model.schema import TableSchema

_OWN: Final = (
    pa.field("table_id", pa.int64(), nullable=False),
    pa.field("table", pa.string(), nullable=False),
    pa.field("row", pa.string(), nullable=False),
)


def envelope_schema(schemas: Iterable[TableSchema]) -> pa.Schema:
    """Return the shape of records of these tables; if one of them is partitioned, it has `__partition_oid`."""
    leaf = [PARTITION_OID] if any(schema.partitioned for schema in schemas) else []
    return pa.schema([*RECORD_PREFIX, *leaf, *_OWN])


def envelopes(schema: TableSchema, records: pa.RecordBatch, wanted: Sequence[str]) -> pa.RecordBatch:
    """Return the records as rows of `envelope_schema`; the row's text is made only if `wanted` names it."""
    count = records.num_rows
    columns = {field.name: records.column(field.name) for field in record_prefix(schema)}
    columns["table_id"] = pa.repeat(pa.scalar(int(schema.table_id), pa.int64()), count)
    columns["table"] = pa.repeat(schema.full_name, count)
    if "row" in wanted:
        columns["row"] = pa.array(_rows(schema, records), pa.string())
    return pa.RecordBatch.from_arrays([*columns.values()], names=[*columns])


def _rows(schema: TableSchema, records: pa.RecordBatch) -> list[str]:
    names = [column.name for column in schema.columns]
    offset = records.num_columns - len(names)
    values = [json_column(records.column(offset + place), column) for place, column in enumerate(schema.columns)]
    if not values:
        return ["{}"] * records.num_rows
    encode: Callable[[object], str] = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    rows = []
    for row, absent in zip(zip(*values, strict=True), records.column("__unchanged").to_pylist(), strict=True):
        pairs = zip(names, row, strict=True)
        rows.append(encode({name: value for name, value in pairs if name not in absent} if absent else dict(pairs)))
    if schema.partitioned:
        ops = records.column("__op").to_pylist()
        for at in (at for at, op in enumerate(ops) if op == Op.PARTITION_LEFT.letter):
            left = dict(records.column("__before")[at].as_py() or ())
            rows[at] = encode({**left, "oid": records.column(PARTITION_OID.name)[at].as_py()})
    return rows
