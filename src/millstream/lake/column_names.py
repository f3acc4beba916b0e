"""Names of a table's columns over time: rows that were written under other names, under those of one schema.

A column keeps its number when it is renamed at the source, and each era of a history says which number a name meant from
a position on (`schema_history`). So old records, and rows of `current` from before a rename, are read under the names
of a later schema, or of an earlier one. If the numbers aren't known, a name is a column, as it is if nothing was renamed.

A column that was added with a constant default has it in rows of earlier eras. The eras say so from the column's first one
on, also if the newest schema doesn't.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from millstream.lake.column_conversion import lake_columns
from millstream.lake.filled_columns import renamed_rows
from millstream.lake.new_and_wider_columns import widest
from millstream.lake.schema_history import Eras
from millstream.lake.table_format import OpenTable
from millstream.model.column_renames import Filled, FilledNames, Names, filled_by_number
from millstream.model.ids import TableId
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema


@dataclass(frozen=True, slots=True)
class Renames:
    """The names of a table's columns in its records, by the position from which they hold."""

    starts: tuple[Seq, ...]
    names: tuple[FilledNames, ...]
    """As many as there are positions. Records before the first position have its names, too."""
    had: tuple[frozenset[str], ...]
    """Names of the columns of the records from each position on."""

    def physical(self, columns: Sequence[str]) -> list[str]:
        """Return the columns of history that some wanted columns are made of."""
        return list(dict.fromkeys(["__seq", *(name for column in columns for name in self._names_of(column))]))

    def shape(self, columns: Sequence[str], have: pa.Schema, own: pa.Schema) -> pa.Schema:
        """Return wanted columns, each in its own type if it is in `own`; columns that no record has are left out.

        The columns of history that have a column's values may be wider, each for the values of another column. So no
        type is derived from theirs: through a text, a number that lay in a decimal couldn't become a number again.
        """
        return pa.schema(
            [
                own.field(column) if column in own.names else have.field(column)
                for column in columns
                if self.names_of(column, have) or (column in own.names and self.fills(column))
            ]
        )

    def renamed(self, rows: pa.Table, shape: pa.Schema) -> pa.Table:
        """Return records with the columns of `shape`, by era: not in the order of their numbers."""
        if not rows.num_rows:
            return shape.empty_table()
        places = np.searchsorted([int(start) for start in self.starts], rows.column("__seq").to_numpy(), "right") - 1
        places = np.maximum(places, 0)
        pieces = []
        for place in np.unique(places).tolist():
            some = rows.filter(pa.array(places == place))
            pieces.append(renamed_rows(some, self.names[place], shape))
        return pa.concat_tables(pieces)

    def names_of(self, column: str, have: pa.Schema) -> list[str]:
        """Return those columns of a history that have a wanted column's values."""
        return [name for name in self._names_of(column) if have.get_field_index(name) >= 0]

    def _names_of(self, column: str) -> list[str]:
        found = (names.get(column, column) for names in self.names)
        return list(dict.fromkeys(name for name in found if isinstance(name, str)))

    def fills(self, column: str) -> bool:
        """Return whether a wanted column was added after some records, with a default."""
        return any(isinstance(names.get(column), Filled) for names in self.names)

    def spans(self) -> Iterator[tuple[Seq, Names, frozenset[str]]]:
        """Yield the names with their positions, and the columns of the records, the newest first; not what is filled in."""
        for start, names, had in zip(reversed(self.starts), reversed(self.names), reversed(self.had), strict=True):
            yield start, {name: was for name, was in names.items() if not isinstance(was, Filled)}, had


def renames_in(
    history: OpenTable,
    table: TableId,
    schema: TableSchema,
    *,
    after: Seq = Seq(0),
    upto: Seq | None = None,
    fills: bool = True,
) -> Renames | None:
    """Return how records in `(after, upto]` name the columns of a schema; None if all have its names.

    Args:
        schema: the wanted names.
        upto: inclusive; None: up to the last record.
        fills: whether records have the defaults of columns that were added after them; otherwise they lack these columns.
    """
    if not schema.is_numbered:
        return None
    eras = Eras.of(history).of_table(table)
    starts, found, had = list[Seq](), list[FilledNames](), list[frozenset[str]]()
    schema = with_fills(eras, schema) if fills else without_fills(schema)
    shared = _shared(eras, schema)
    for place, (start, era) in enumerate(eras):
        ends = eras[place + 1][0] if place + 1 < len(eras) else None
        if (ends is not None and ends <= after + 1) or (upto is not None and start > upto and found):
            continue
        starts.append(start)
        had.append(frozenset(column.in_history for column in era.columns))
        missing = dict.fromkeys(shared - had[-1])
        found.append({**missing, **_names(eras, place, schema, in_history=True)})
    if not any(found):
        return None
    return Renames(tuple(starts), tuple(found), tuple(had))


def _shared(eras: Sequence[tuple[Seq, TableSchema]], schema: TableSchema) -> set[str]:
    """Return a schema's columns whose names another column had in history."""
    had = {(column.in_history, column.number) for _, era in eras for column in era.columns}
    others = {
        name for name, number in had if number and (name, number) not in {(c.name, c.number) for c in schema.columns}
    }
    return others.intersection(schema.column_names)


def own_types(history: OpenTable, schema: TableSchema, types: Mapping[str, str]) -> pa.Schema | None:
    """Return a schema's columns in types that hold all values that each has had; None if no name was another column's.

    A column of history may have a wider type, because it also has the values of another column that had its name.
    """
    if renames_in(history, schema.table_id, schema, fills=False) is None:
        return None
    found = {column.number: field for column, field in zip(schema.columns, lake_columns(schema, types), strict=True)}
    for _, era in Eras.of(history).of_table(schema.table_id):
        for column, field in zip(era.columns, lake_columns(era, types), strict=True):
            if (now := found.get(column.number)) is not None:
                found[column.number] = pa.field(now.name, widest(now.type, field.type) or now.type)
    return pa.schema(list(found.values()))


def names_at(history: OpenTable, schema: TableSchema, n: Seq) -> FilledNames | None:
    """Return how rows that were folded up to a position name the columns of a schema; None if they have its names."""
    eras = Eras.of(history).of_table(schema.table_id)
    place = max((at for at, (start, _) in enumerate(eras) if start <= n), default=None)
    if place is None or not schema.is_numbered:
        return None
    return _names(eras, place, with_fills(eras, schema)) or None


def with_fills(eras: Sequence[tuple[Seq, TableSchema]], schema: TableSchema) -> TableSchema:
    """Return a schema with the values that rows from before each column have, as the first era says that has one.

    A rebuild then finds what folds found that passed that era, whatever became of the column since.
    """
    first = dict[int, str]()
    for _, era in eras:
        for column in era.columns:
            if column.filled is not None:
                first.setdefault(column.number, column.filled)
    filled = (replace(column, filled=first.get(column.number, column.filled)) for column in schema.columns)
    return replace(schema, columns=tuple(filled))


def without_fills(schema: TableSchema) -> TableSchema:
    """Return a schema whose columns are null in rows from before them."""
    return replace(schema, columns=tuple(replace(column, filled=None) for column in schema.columns))


def schema_at(history: OpenTable, newest: TableSchema, n: Seq) -> TableSchema:
    """Return the schema of rows that are folded up to a position: the newest, or an earlier one with other columns."""
    found = Eras.of(history).schema_at(newest.table_id, n)
    if found is None or not found.is_numbered or not newest.is_numbered:
        return newest
    if [(c.number, c.name) for c in found.columns] == [(c.number, c.name) for c in newest.columns]:
        return newest
    return replace(found, namespace=newest.namespace, name=newest.name, folder_id=newest.folder_id)


def numbered(eras: Sequence[tuple[Seq, TableSchema]], place: int, *, in_history: bool = False) -> dict[str, int] | None:
    """Return the numbers of an era's columns by name: its own, or those of the next era that has some.

    None if none has. With `in_history`, the names are those of history's columns.
    """
    for _, era in eras[place:]:
        if era.is_numbered:
            return {column.in_history if in_history else column.name: column.number for column in era.columns}
    return None


def _names(
    eras: Sequence[tuple[Seq, TableSchema]], place: int, schema: TableSchema, *, in_history: bool = False
) -> FilledNames:
    """Return how an era's records name the columns of a schema: in the log, or in history."""
    numbers = numbered(eras, place, in_history=in_history)
    had = [column.in_history if in_history else column.name for column in eras[place][1].columns]
    return {} if numbers is None else filled_by_number(numbers, schema, had)
