"""Rows under other names of their columns: a column keeps its number in the source when it is renamed.

If the numbers aren't known, a name is a column. A column that rows lack by its number was added after them. If it was
added with a default, that is their value (`Filled`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from millstream.model.records import PARTITION_OID, Op
from millstream.model.schema import TableSchema

Names: TypeAlias = Mapping[str, str | None]
"""By a column's name in the wanted schema, its name in the rows, if that is another one; None if the rows lack the column,
and have another one of its name."""


@dataclass(frozen=True, slots=True)
class Filled:
    """The value of a column that was added after some rows with a constant default."""

    text: str
    """PostgreSQL's text of it."""


FilledNames: TypeAlias = Mapping[str, str | Filled | None]
"""As `Names`, with the values that rows have in columns that were added after them."""

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


def filled_by_number(numbers: Mapping[str, int], wanted: TableSchema, had: Collection[str]) -> FilledNames:
    """Return how rows name the columns of a schema, and their values in those that were added after them.

    The arguments are those of `named_by_number`.
    """
    has = {number for name, number in numbers.items() if name in had}
    added = {
        column.name: Filled(column.filled)
        for column in wanted.columns
        if column.filled is not None and column.number > 0 and column.number not in has
    }
    return {**named_by_number(numbers, wanted, had), **added}


def filled_in(rows: TableSchema, wanted: TableSchema) -> FilledNames:
    """Return how rows of one version name the columns of another, and their values in those that were added after them."""
    if not rows.is_numbered or not wanted.is_numbered:
        return {}
    return filled_by_number({column.name: column.number for column in rows.columns}, wanted, rows.column_names)


def name_in_rows(names: FilledNames, column: str) -> str:
    """Return the name that rows have for a column, such as one of their key; its own name if they lack it."""
    name = names.get(column)
    return name if isinstance(name, str) else column


def under_names(rows: pa.Table, names: FilledNames) -> pa.Table:
    """Return rows under the wanted names of their columns; a column whose name another has is left out.

    Columns that were added after the rows aren't filled in, as their types aren't known here.
    """
    if not names:
        return rows
    wanted = {physical: name for name, physical in names.items() if isinstance(physical, str)}
    dropped = {name for name in names if name not in wanted}
    columns, fields = [], []
    for field, column in zip(rows.schema, rows.columns, strict=True):
        if field.name in names and field.name not in wanted:
            continue
        name, values = wanted.get(field.name, field.name), column
        if name in _MAPS:
            values = pa.chunked_array([_map_keys(column, wanted, dropped)], field.type)
            if name == "__before" and PARTITION_OID.name in rows.column_names and "__op" in rows.column_names:
                # A partition that leaves has its own name there, under no column's.
                values = pc.if_else(pc.equal(rows.column("__op"), Op.PARTITION_LEFT.letter), column, values)
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
