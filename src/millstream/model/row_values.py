"""A record's row as values by column name: the new values or the old key, and the values before.

Every part that shows records as JSON uses it: lines of the log, and event tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import pyarrow as pa

from millstream.model.column_texts import JSON_INTEGER_MAX, json_column, render_column
from millstream.model.records import PARTITION_OID, Op
from millstream.model.schema import TableKind, TableSchema

Values = Literal["json", "text"]
"""Representation of values: numbers that JSON holds exactly as numbers and the rest as text, or
everything as PostgreSQL's text."""

_DELETE: Final = Op.DELETE.letter
_TRUNCATE: Final = Op.TRUNCATE.letter
_LEFT: Final = Op.PARTITION_LEFT.letter


@dataclass(frozen=True, slots=True)
class RowValues:
    """A batch's rows, each JSON-able."""

    rows: list[dict[str, Any] | None]
    """New values; for a `d` the old key, or the old row under FULL; None for a `t`; for an `x` the leaf
    partition's name (`partition`, as `schema.table`) and `oid`. Unchanged TOAST columns are left out."""
    befores: list[dict[str, Any] | None]
    """Old key or row of a `u`, if the source sent one."""


def row_values(schema: TableSchema, batch: pa.RecordBatch, values: Values = "json") -> RowValues:
    """Return the rows of records (with or without their offsets), in their order.

    Args:
        schema: the table's schema when the records were made.
        batch: records in `record_schema(schema)`.
    """
    ops, unchanged = batch.column("__op").to_pylist(), batch.column("__unchanged").to_pylist()
    exact, before = _maps(batch.column("__exact")), _maps(batch.column("__before"))
    columns = _columns(schema, batch, values)
    lists = list(columns.values())
    read = {column.name: _reads_as(column.arrow) for column in schema.columns} if values == "json" else {}
    identity = frozenset(schema.identity)
    is_raw = schema.kind is TableKind.RAW
    leaves = batch.column(PARTITION_OID.name) if schema.partitioned and _LEFT in ops else None
    rows: list[dict[str, Any] | None] = []
    for i in range(batch.num_rows):
        op = None if is_raw else ops[i]
        if op == _TRUNCATE:
            rows.append(None)
            continue
        if leaves is not None and op == _LEFT:
            rows.append({**(before[i] or {}), "oid": leaves[i].as_py()})
            before[i] = None
            continue
        whole, left_out = exact[i], unchanged[i] or ()
        if op != _DELETE and not whole and not left_out:
            rows.append(dict(zip(columns, [values[i] for values in lists], strict=True)))
            continue
        rows.append(
            {
                name: whole.get(name, column[i]) if whole else column[i]
                for name, column in columns.items()
                if name not in left_out and (op != _DELETE or name in identity)
            }
        )
    return RowValues(rows, [None if old is None else _typed(old, read) for old in before])


def _columns(schema: TableSchema, batch: pa.RecordBatch, values: Values) -> dict[str, list[Any]]:
    """Return the table's own columns by name, each value in its final representation."""
    columns: dict[str, list[Any]] = {}
    for number, column in enumerate(schema.columns):
        array = batch.column(batch.num_columns - len(schema.columns) + number)
        if schema.kind is TableKind.RAW:
            columns[column.name] = [None if v is None else "\\x" + v.hex() for v in array.to_pylist()]
        else:
            columns[column.name] = (json_column if values == "json" else render_column)(array, column)
    return columns


def _maps(array: pa.Array) -> list[dict[str, Any] | None]:
    return [None if pairs is None else dict(pairs) for pairs in array.to_pylist()]


def _reads_as(kind: pa.DataType) -> type | None:
    if pa.types.is_integer(kind):
        return int
    return float if pa.types.is_floating(kind) else None


def _typed(texts: dict[str, Any], read: Mapping[str, type | None]) -> dict[str, Any]:
    """Convert old values, which the log keeps as text, to the form of new values.

    They become numbers if JSON holds them exactly.
    """
    if not read:
        return texts
    return {name: _number(text, read.get(name)) for name, text in texts.items()}


def _number(text: str | None, kind: type | None) -> Any:
    if text is None or kind is None:
        return text
    try:
        number = kind(text)
    except (ValueError, OverflowError):
        return text
    if kind is int:
        return number if abs(number) <= JSON_INTEGER_MAX else text
    return number if math.isfinite(number) else text
