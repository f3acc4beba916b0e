"""Columns of history that had one name at different times, kept apart where one type can't hold the values of all.

Several columns of a table may have had one name: a text may be renamed, and a timestamp added under its name. A column of
history has the values of all of them if one type holds them all. Otherwise the later one gets a column of its own, with
its number appended (`price__4`). Names that differ only by case are one name here, because a lake's readers ignore case:
a column that is renamed from `a` to `A` goes on in `a`. The eras of the history say where each column lies, so that
readers find it.

A column that gets a type which can't hold its earlier values is another column from there on, as if it had been dropped and
added: in the eras it has a number of its own (`LIVES`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import pyarrow as pa

from millstream.lake.column_conversion import lake_columns
from millstream.lake.new_and_wider_columns import holds, widest
from millstream.lake.schema_history import Eras
from millstream.model.ids import TableId
from millstream.model.schema import Column, TableSchema

LIVES: Final = 1 << 16
"""Added to a column's number in the source each time that it gets a type which holds no earlier values."""


class ColumnPlaces:
    """The columns of a history in which one table's columns lie; records have to be shown in their order."""

    def __init__(self, table: TableId, have: pa.Schema, eras: Eras | None, types: Mapping[str, str]) -> None:
        self._table = table
        self._types = types
        self._kinds: dict[str, pa.DataType] = {field.name: field.type for field in have}
        self._known: dict[tuple[int, str], str] = {}
        """Columns of history, by a column's number and name."""
        self._numbers: dict[str, set[int]] = {}
        """Numbers of the columns whose values a column of history has."""
        self._lives: dict[int, int] = {}
        """The last number that the eras give to a column of the source, by its number there."""
        self._numbers_max: dict[int, int] = {}
        """The greatest of these numbers."""
        self._places: dict[int, str] = {}
        """The last column of history of each column, by its number in the eras."""
        self._versions: dict[int, Mapping[str, Column]] = {}
        """The columns of each version of the table's schema by name, as the eras have them."""
        for _, era in () if eras is None else eras.of_table(table):
            self._versions[era.version] = {column.name: column for column in era.columns}
            for column in era.columns:
                if column.number:
                    self._note(column)

    def of_batches(self, batches: Sequence[pa.RecordBatch]) -> list[pa.RecordBatch]:
        """Return records whose schemas say where their columns lie."""
        found = []
        for batch in batches:
            schema = TableSchema.from_arrow(batch.schema)
            placed = self.of(schema)
            found.append(batch if placed is schema else batch.replace_schema_metadata(placed.to_arrow().metadata))
        return found

    def of(self, schema: TableSchema) -> TableSchema:
        """Return a schema with the places of its columns; the schema itself if they lie under their names."""
        if not schema.is_numbered or schema.table_id != self._table:
            return schema
        fields = lake_columns(schema, self._types)
        asked, schema = schema, self._alive(schema, fields)
        taken = {place for c in schema.columns if (place := self._known.get((c.number, c.name)))}
        columns = []
        for column, field in zip(schema.columns, fields, strict=True):
            others = {name.lower() for name in (*taken, *schema.column_names) if name != column.name or name in taken}
            place = self._known.get((column.number, column.name)) or self._free(column, field.type, others)
            taken.add(place)
            placed = replace(column, apart="" if place == column.name else place)
            self._note(placed)
            kind = self._kinds.get(place, field.type)
            self._kinds[place] = widest(kind, field.type) or kind
            columns.append(placed)
        self._versions[schema.defined().version] = {column.name: column for column in columns}
        return asked if tuple(columns) == asked.columns else replace(schema, columns=tuple(columns))

    def _alive(self, schema: TableSchema, fields: pa.Schema) -> TableSchema:
        """Return a schema with the numbers that the eras give to its columns: another one for each type that holds no earlier values.

        A key keeps its numbers: without its values no row of before could be told from another.
        """
        # Records of an earlier version may come behind a copy's first one, or again after a crash.
        known, columns = self._versions.get(schema.defined().version, {}), list[Column]()
        for column, field in zip(schema.columns, fields, strict=True):
            if (before := known.get(column.name)) is not None and before.number % LIVES == column.number:
                columns.append(replace(column, number=before.number, filled=before.filled))
                continue
            number = self._lives.get(column.number, column.number)
            place = self._known.get((number, column.name)) or self._places.get(number)
            have = None if place is None else self._kinds.get(place)
            if have is not None and column.name not in schema.key and not holds(have, field.type):
                columns.append(replace(column, number=self._numbers_max[column.number] + LIVES, filled=None))
            else:
                columns.append(replace(column, number=number))
        return replace(schema, columns=tuple(columns))

    def _free(self, column: Column, kind: pa.DataType, taken: set[str]) -> str:
        """Return the column of history for a column that is new under its name; `taken` is in lower case."""
        spelled = {name.lower(): name for name in self._kinds}
        place = spelled.get(column.name.lower(), column.name)
        if place.lower() not in taken and not self._is_full(place, column, kind):
            return place
        place = f"{column.name}__{column.number % LIVES}"
        while place.lower() in taken or self._is_full(spelled.get(place.lower(), place), column, kind):
            place += "_"
        return spelled.get(place.lower(), place)

    def _is_full(self, place: str, column: Column, kind: pa.DataType) -> bool:
        """Return whether a column of history has values of other columns alone, and can't hold this one's as well."""
        numbers = self._numbers.get(place, set())
        return bool(numbers) and column.number not in numbers and not holds(self._kinds.get(place, kind), kind)

    def _note(self, column: Column) -> None:
        number = column.number % LIVES
        self._lives[number] = column.number
        self._numbers_max[number] = max(column.number, self._numbers_max.get(number, 0))
        self._places[column.number] = column.in_history
        self._known[column.number, column.name] = column.in_history
        self._numbers.setdefault(column.in_history, set()).add(column.number)


def columns_in_history(schema: TableSchema, types: Mapping[str, str]) -> pa.Schema:
    """Return the columns of history that a version's records need, in the lake's types."""
    fields = lake_columns(schema, types)
    return pa.schema([field.with_name(column.in_history) for column, field in zip(schema.columns, fields, strict=True)])
