"""Rows under other names of their columns: a column keeps its number in the source when it is renamed.

If the numbers aren't known, a name is a column.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeAlias

import pyarrow as pa

from millstream.model.schema import TableSchema

Names: TypeAlias = Mapping[str, str | None]
"""By a column's name in the wanted schema, its name in the rows, if that is another one; None if the rows lack the column,
and have another one of its name."""

_MAPS = ("__exact", "__before")
_LIST = "__unchanged"


def names_in(rows: TableSchema, wanted: TableSchema) -> Names:
    """Return how rows of one version of a table name the columns of another version; nothing if they have its names."""
    if not rows.is_numbered or not wanted.is_numbered:
        return {}
    return named_by_number({column.name: column.number for column in rows.columns}, wanted, rows.column_names)


def named_by_number(numbers: Mapping[str, int], wanted: TableSchema, had: Collection[str]) -> Names:
    """Return how rows name the columns of a schema.

    Args:
        numbers: the numbers of the rows' columns, by name.
        wanted: the schema. A negative number stands for a column that is found by its name.
        had: the names that the rows have.
    """
    by_number = {number: name for name, number in numbers.items() if name in had}
    names: dict[str, str | None] = {}
    for column in wanted.columns:
        by_name = column.number < 0 and column.name not in numbers and column.name in had
        name = column.name if by_name else by_number.get(column.number)
        if name != column.name and (name is not None or column.name in had):
            names[column.name] = name
    return names


def renamed_rows(rows: pa.Table, names: Names, shape: pa.Schema) -> pa.Table:
    """Return rows with the columns of `shape`, which `names` finds; a column that they lack is null."""
    rows = under_names(rows, names)
    columns = []
    for field in shape:
        index = rows.schema.get_field_index(field.name)
        if index < 0:
            columns.append(pa.chunked_array([pa.nulls(rows.num_rows, field.type)], field.type))
            continue
        column = rows.column(index)
        columns.append(column if column.type.equals(field.type) else column.cast(field.type))
    return pa.table(columns, schema=shape)


def under_names(rows: pa.Table, names: Names) -> pa.Table:
    """Return rows under the wanted names of their columns; a column whose name another has is left out."""
    if not names:
        return rows
    wanted = {physical: name for name, physical in names.items() if physical is not None}
    dropped = {name for name in names if name not in wanted}
    columns, fields = [], []
    for field, column in zip(rows.schema, rows.columns, strict=True):
        if field.name in names and field.name not in wanted:
            continue
        name, values = wanted.get(field.name, field.name), column
        if name in _MAPS:
            values = pa.chunked_array([_map_keys(column, wanted, dropped)], field.type)
        elif name == _LIST:
            values = pa.chunked_array([_list_items(column, wanted, dropped)], field.type)
        columns.append(values)
        fields.append(field.with_name(name))
    return pa.table(columns, schema=pa.schema(fields))


def _map_keys(maps: pa.ChunkedArray, wanted: Mapping[str, str], dropped: set[str]) -> pa.Array:
    if maps.null_count == len(maps):
        return maps.combine_chunks()
    rows = [
        None
        if entries is None
        else [(wanted.get(name, name), text) for name, text in entries if name in wanted or name not in dropped]
        for entries in maps.to_pylist()
    ]
    return pa.array([entries or None for entries in rows], maps.type)


def _list_items(lists: pa.ChunkedArray, wanted: Mapping[str, str], dropped: set[str]) -> pa.Array:
    if lists.null_count == len(lists):
        return lists.combine_chunks()
    rows = [
        None if items is None else [wanted.get(name, name) for name in items if name in wanted or name not in dropped]
        for items in lists.to_pylist()
    ]
    return pa.array([items or None for items in rows], lists.type)
