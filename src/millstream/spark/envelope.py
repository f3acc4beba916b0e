"""Records of all tables in one shape: the `__` columns, the table's name, and the row as JSON text.

Numbers that JSON holds exactly are JSON numbers; all else is text. Columns that a record doesn't have (unchanged TOAST)
are absent from its row and named in `__unchanged`; a value that its column can't hold exactly is null in the row and whole in
`__exact`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa

from millstream.model.records import RECORD_COLUMNS, RECORD_PREFIX
from millstream.model.schema import TableSchema

ENVELOPE_SCHEMA: Final = pa.schema(
    [
        *RECORD_PREFIX,
        pa.field("table_id", pa.int64(), nullable=False),
        pa.field("table", pa.string(), nullable=False),
        pa.field("row", pa.string(), nullable=False),
    ]
)
_JSON_INTEGER_MAX: Final = 2**53
"""Readers of JSON keep numbers as doubles, which hold integers up to here."""


def envelopes(schema: TableSchema, records: pa.RecordBatch, wanted: Sequence[str]) -> pa.RecordBatch:
    """The records as rows of `ENVELOPE_SCHEMA`; the row's text is made only where `wanted` names it."""
    count = records.num_rows
    columns = {name: records.column(name) for name in RECORD_PREFIX_NAMES}
    columns["table_id"] = pa.repeat(pa.scalar(int(schema.table_id), pa.int64()), count)
    columns["table"] = pa.repeat(f"{schema.namespace}.{schema.name}", count)
    if "row" in wanted:
        columns["row"] = pa.array(_rows(records), pa.string())
    return pa.RecordBatch.from_arrays([*columns.values()], names=[*columns])


RECORD_PREFIX_NAMES: Final = tuple(field.name for field in RECORD_PREFIX)


def _rows(records: pa.RecordBatch) -> list[str]:
    own = [index for index, name in enumerate(records.schema.names) if name not in RECORD_COLUMNS]
    names = [records.schema.names[index] for index in own]
    values = [[_plain(value) for value in records.column(index).to_pylist()] for index in own]
    unchanged = records.column("__unchanged").to_pylist()
    encode: Callable[[object], str] = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    if not values:
        return ["{}"] * records.num_rows
    return [
        encode(
            {n: v for n, v in zip(names, row, strict=True) if n not in absent}
            if absent
            else dict(zip(names, row, strict=True))
        )
        for row, absent in zip(zip(*values, strict=True), unchanged, strict=True)
    ]


def _plain(value: Any) -> Any:
    match value:
        case None | bool() | str():
            return value
        case int():
            return value if -_JSON_INTEGER_MAX <= value <= _JSON_INTEGER_MAX else str(value)
        case float():
            return value if value - value == 0 else str(value)  # JSON has neither NaN nor infinities
        case bytes():
            return "\\x" + value.hex()
        case datetime() | date():
            return value.isoformat()
        case Decimal():
            return str(value)
        case list():
            return [_plain(item) for item in value]
        case dict():
            return {name: _plain(item) for name, item in value.items()}
        case _:
            return str(value)
