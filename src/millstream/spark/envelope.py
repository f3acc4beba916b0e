"""Records of all tables in one shape: the `__` columns, the table's name, and the row as JSON text.

Values stand as `millstream wal cat` prints them: as numbers if JSON holds them exactly, else as
PostgreSQL's text. Columns that a record doesn't have (unchanged TOAST) are absent from its row and
named in `__unchanged`. A value that its column can't hold exactly is null in the row and whole in
`__exact`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Final

import pyarrow as pa

from millstream.model.column_texts import json_column
from millstream.model.records import RECORD_PREFIX
from millstream.model.schema import TableSchema

ENVELOPE_SCHEMA: Final = pa.schema(
    [
        *RECORD_PREFIX,
        pa.field("table_id", pa.int64(), nullable=False),
        pa.field("table", pa.string(), nullable=False),
        pa.field("row", pa.string(), nullable=False),
    ]
)


def envelopes(schema: TableSchema, records: pa.RecordBatch, wanted: Sequence[str]) -> pa.RecordBatch:
    """Return the records as rows of `ENVELOPE_SCHEMA`; the row's text is made only if `wanted` names it."""
    count = records.num_rows
    columns = {name: records.column(name) for name in RECORD_PREFIX_NAMES}
    columns["table_id"] = pa.repeat(pa.scalar(int(schema.table_id), pa.int64()), count)
    columns["table"] = pa.repeat(schema.full_name, count)
    if "row" in wanted:
        columns["row"] = pa.array(_rows(schema, records), pa.string())
    return pa.RecordBatch.from_arrays([*columns.values()], names=[*columns])


RECORD_PREFIX_NAMES: Final = tuple(field.name for field in RECORD_PREFIX)


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
    return rows
