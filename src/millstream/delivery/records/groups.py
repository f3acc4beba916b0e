"""The group of a record: a text that is equal for two records if and only if their table and key are equal.

A group is a JSON list: the table's id, then each key column's value as PostgreSQL prints it, in the order of the key.
The id stays when a table is renamed. Numbers that compare equal have one text (`1.0` and `1.00`). A text of more than
`TEXT_MAX` characters is replaced by its SHA-256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from json.encoder import encode_basestring
from typing import Any, Final

import pyarrow as pa

from millstream.delivery.definition import KEY, NO_GROUPS, GroupBy
from millstream.model.column_texts import render_column
from millstream.model.records import Op
from millstream.model.schema import Column, TableKind, TableSchema

TEXT_MAX: Final = 200
_NUMERIC_OID: Final = 1700
_WITHOUT: Final = frozenset({Op.TRUNCATE.letter, Op.PARTITION_LEFT.letter, Op.MESSAGE.letter})


def groups_of(
    schema: TableSchema, batch: pa.RecordBatch, group_by: GroupBy, ids: Sequence[str]
) -> list[tuple[str, ...]]:
    """Return the groups of records: the new key's, and behind it the old key's, if that is another one.

    Args:
        schema: the table's schema when the records were made.
        batch: records in `record_schema(schema)`.
        group_by: the consumer's.
        ids: the records' ids: their groups if each is a group of its own.

    Returns:
        For each record its groups; none for a TRUNCATE, a partition that left, and a logical message.
    """
    if schema.kind is TableKind.MESSAGES:
        return [()] * batch.num_rows
    ops = batch.column("__op").to_pylist()
    if group_by == NO_GROUPS:
        return [() if op in _WITHOUT else (id_,) for op, id_ in zip(ops, ids, strict=True)]
    known = {column.name: (number, column) for number, column in enumerate(schema.columns)}
    names = schema.key if group_by == KEY else [name for name in group_by if name in known]
    if schema.kind is TableKind.RAW:
        names = ()
    first = batch.num_columns - len(schema.columns)
    keyed = [(name, *known[name]) for name in names]
    values = [render_column(batch.column(first + number), column) for _, number, column in keyed]
    columns = [column if _has_forms(column) else None for _, _, column in keyed]
    changing = ("__exact", "__before", "__unchanged")
    if _WITHOUT.isdisjoint(ops) and all(batch.column(name).null_count == batch.num_rows for name in changing):
        table = int(schema.table_id)
        if not values:
            return [(_text(table, ()),)] * batch.num_rows
        keys = zip(*map(_quoted, values, columns), strict=True)
        return [(_text(table, key),) for key in keys]
    exact, before = (batch.column(name).to_pylist() for name in ("__exact", "__before"))
    unchanged = batch.column("__unchanged").to_pylist()
    found: list[tuple[str, ...]] = []
    for i, op in enumerate(ops):
        if op in _WITHOUT:
            found.append(())
            continue
        new: list[Any] = [column_values[i] for column_values in values]
        if not (before[i] or exact[i] or unchanged[i]):
            found.append((_text_of(int(schema.table_id), columns, new),))
            continue
        old_values = dict(before[i] or ())
        _replace(new, names, dict(exact[i] or ()))
        left_out = unchanged[i] or ()
        _replace(new, names, {name: value for name, value in old_values.items() if name in left_out})
        own = _text_of(int(schema.table_id), columns, new)
        if not old_values:
            found.append((own,))
            continue
        _replace(new, names, old_values)
        other = _text_of(int(schema.table_id), columns, new)
        found.append((own,) if own == other else (own, other))
    return found


def _replace(values: list[Any], names: Sequence[str], others: Mapping[str, Any]) -> None:
    """Replace the values of the columns that `others` has."""
    for number, name in enumerate(names):
        if name in others:
            values[number] = others[name]


def _text_of(table: int, columns: Sequence[Column | None], values: Sequence[Any]) -> str:
    """Return the text of a key; its columns are those whose values have several forms, and None for the others."""
    return _text(
        table, [text for value, column in zip(values, columns, strict=True) for text in _quoted((value,), column)]
    )


def _text(table: int, key: Sequence[str]) -> str:
    """Return the text of a key of values that are JSON."""
    text = f"[{','.join((str(table), *key))}]"
    if len(text) <= TEXT_MAX:
        return text
    return f"{table}#{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()}"


def _quoted(values: Sequence[Any], column: Column | None) -> Iterable[str]:
    """Return a column's values as JSON; the column is None unless its values have several forms."""
    if column is None and None not in values:
        return map(encode_basestring, values)
    forms = values if column is None else [value if value is None else _equal_form(value, column) for value in values]
    return ["null" if value is None else encode_basestring(value) for value in forms]


def _has_forms(column: Column) -> bool:
    """Whether different texts of the column's values may be equal values."""
    is_decimal = pa.types.is_decimal(column.arrow) or (column.pg is not None and column.pg.oid == _NUMERIC_OID)
    return is_decimal or pa.types.is_floating(column.arrow)


def _equal_form(value: str, column: Column) -> str:
    """Return the one text of all values that compare equal to this one."""
    if pa.types.is_floating(column.arrow):
        return "0" if value == "-0" else value
    try:
        number = Decimal(value)
    except InvalidOperation:
        return value
    if not number.is_finite():
        return value
    text = format(number, "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text
