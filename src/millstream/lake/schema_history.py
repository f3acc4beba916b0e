"""Ownership and schemas of the records in a history folder.

A folder has a table's name, and at the source a name passes from table to table: dropped and made again,
renamed, swapped, given back. So one folder has the records of several tables. Records that a table
brought from an earlier folder lie between the others' by number. Two things tell them apart, both exactly:

- Each data file has the records of one table, and its name says of which (`new_name(table=…)`). Older lakes
  have files without such a name. Their records were written under the folder's own name, and belong to the
  table that had it at their number.
- *Eras* are kept in the table's properties, by the number at which they begin. From that number on, one
  table's records had this schema. If an era's schema has the folder's own name, its table has the name from
  there on. The newest of these eras names the folder's owner. Numbers decide, never the greater table id or
  schema version: a table may take over a name from a younger one, and a name that comes back has its old
  version again.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Final

import numpy as np
import pyarrow as pa

from millstream.errors import LakeTableForeign
from millstream.lake.data_files import table_in
from millstream.lake.delta import OpenTable
from millstream.lake.layout import folder_of
from millstream.model.ids import TableId
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema

SCHEMA_PROPERTY: Final = "millstream.schema"
"""The schema of the newest record of the folder's owner."""
SINCE_PROPERTY: Final = "millstream.since_seq"
"""Position from which the owner has had the name, without another table or another name in between."""
FROM_SEQ_PROPERTY: Final = "millstream.from_seq"
"""Property of histories older than eras: the first `seq` of the table with this name, if a namesake was dropped."""
ERA_PROPERTY: Final = "millstream.schema.at."
"""Prefix of an era's property, followed by a `seq`: the schema of its table's records from there on."""

Span = tuple[int, int | None]
"""Numbers `[start, end)`; an end of None means no end."""
ALL: Final[tuple[Span, ...]] = ((0, None),)


@dataclass(frozen=True, slots=True)
class Era:
    """State of a history table at one position: the table that its records belong to, and their columns."""

    schema: TableSchema
    first: Seq
    """Lower bound of this table's records; records of an earlier table with the name may lie below."""


@dataclass(frozen=True)
class Eras:
    """The eras that a folder's properties record."""

    folder: str
    told: tuple[tuple[Seq, TableSchema], ...]
    """Schemas by the number at which each begins, ascending."""

    @classmethod
    def of(cls, opened: OpenTable) -> Eras:
        """Return a history's eras; a history older than eras gets one, of its newest schema.

        Raises:
            LakeTableForeign: the table's properties don't hold its schema.
        """
        told = [(start, decode(encoded)) for start, encoded in eras_in(opened).items()]
        return cls(opened.path.rsplit("/", 1)[1], tuple(told) or ((first_told(opened), newest_schema(opened)),))

    def having(self, start: Seq, schema: TableSchema) -> Eras:
        """Return these eras and one more."""
        return Eras(self.folder, tuple(sorted([*self.told, (start, schema)], key=itemgetter(0))))

    def is_native(self, schema: TableSchema) -> bool:
        """Return whether a schema has the folder's own name."""
        return folder_of(schema) == self.folder

    @cached_property
    def native(self) -> tuple[tuple[Seq, TableSchema], ...]:
        """The eras under the folder's own name."""
        return tuple((start, schema) for start, schema in self.told if self.is_native(schema))

    def of_table(self, table: TableId) -> list[tuple[Seq, TableSchema]]:
        """Return the eras of one table, including those under other names."""
        return [(start, schema) for start, schema in self.told if schema.table_id == table]

    def schema_at(self, table: TableId, n: Seq) -> TableSchema | None:
        """Return the schema that a table had at a position; None before its first record."""
        return next((schema for start, schema in reversed(self.of_table(table)) if start <= n), None)

    def owner_at(self, n: Seq) -> TableId | None:
        """Return the table that had the name at a position."""
        return next((schema.table_id for start, schema in reversed(self.native) if start <= n), None)

    @property
    def since(self) -> Seq:
        """Position from which the owner has had the name, without another table or another name in between."""
        if not self.native:
            return Seq(0)
        return self._since([(start, schema) for start, schema in self.told if self._counts(schema)])

    @property
    def taken_since(self) -> Seq:
        """Position from which the owner has had the name, without another table in between."""
        return self._since(self.native)

    def _counts(self, schema: TableSchema) -> bool:
        return self.is_native(schema) or schema.table_id == self.native[-1][1].table_id

    def _since(self, told: Sequence[tuple[Seq, TableSchema]]) -> Seq:
        since = Seq(0)
        for start, schema in reversed(told):
            if schema.table_id != self.native[-1][1].table_id or not self.is_native(schema):
                break
            since = start
        return since

    @property
    def taken_over(self) -> bool:
        """Whether another table had the name before the owner."""
        return any(schema.table_id != self.native[-1][1].table_id for _, schema in self.native)

    def spans(self, table: TableId) -> tuple[Span, ...]:
        """Return the numbers under which a table had the name."""
        if all(schema.table_id == table for _, schema in self.native):
            return ALL
        ends = [int(start) for start, _ in self.native[1:]]
        bounds = zip(self.native, [*ends, None], strict=True)
        return tuple((int(start), end) for (start, schema), end in bounds if schema.table_id == table)


class Share:
    """One table's share of a history folder."""

    def __init__(self, opened: OpenTable, table: TableId) -> None:
        self._opened, self._table = opened, table

    @cached_property
    def _unnamed(self) -> tuple[Span, ...]:
        return Eras.of(self._opened).spans(self._table)

    def spans(self, path: str) -> tuple[Span, ...]:
        """Return the numbers of the table's records in a data file: `ALL` if it has the whole file."""
        named = table_in(path)
        if named is not None:
            return ALL if named == self._table else ()
        return self._unnamed


def within(seqs: pa.ChunkedArray | pa.Array, spans: Sequence[Span]) -> pa.Array:
    """Return a mask of the numbers that lie in one of the spans."""
    numbers = np.asarray(seqs)
    inside = np.zeros(len(numbers), bool)
    for start, end in spans:
        inside |= (numbers >= start) & (True if end is None else numbers < end)
    return pa.array(inside)


def table_of(opened: OpenTable) -> TableId:
    """Return the table of a handle, for which it makes commits."""
    return TableId(int(opened.app.rpartition("/")[2]))


def newest_schema(opened: OpenTable) -> TableSchema:
    """Return the newest schema of the table that has the folder's name.

    Raises:
        LakeTableForeign: the table's properties don't hold it.
    """
    encoded = opened.properties.get(SCHEMA_PROPERTY)
    if encoded is None:
        raise LakeTableForeign(f"{opened.path} doesn't say what its columns were at the source", path=opened.path)
    return decode(encoded)


def owned_since(opened: OpenTable, table: TableId) -> Seq:
    """Return the position from which a table has had a history's name.

    0 if another table has the name, or if an older lake doesn't record it.
    """
    return Seq(int(opened.properties.get(SINCE_PROPERTY) or 0)) if newest_schema(opened).table_id == table else Seq(0)


def holds(opened: OpenTable, history: OpenTable) -> bool:
    """Return whether a folded view's rows are its table's last, not those of a later table with the name."""
    if opened.n is None or opened.held is not None:
        return opened.n is not None and bool(opened.held)
    # In an older lake the table whose fold went furthest was the last.
    others = {schema.table_id for _, schema in Eras.of(history).native} - {table_of(opened)}
    return all((opened.committed(table) or -1) < opened.n for table in others)


def era_at(opened: OpenTable, n: Seq) -> Era | None:
    """Return the schema at `n` of the table that had the name; None if no record is that old.

    If no table had the name at `n`, take the handle's table. A history older than schemas by position
    returns its newest schema for every position.
    """
    if not eras_in(opened):
        return Era(newest_schema(opened), first_told(opened))
    eras = Eras.of(opened)
    owner = eras.owner_at(n) or table_of(opened)
    schema = eras.schema_at(owner, n)
    return None if schema is None else Era(schema, eras.of_table(owner)[0][0])


def first_told(opened: OpenTable) -> Seq:
    """Return the position at which a history older than eras begins."""
    return Seq(int(opened.properties.get(FROM_SEQ_PROPERTY) or 0))


def first_of(opened: OpenTable, table: TableId) -> Seq:
    """Return the lowest `seq` that a record of a table can have in a history."""
    mine = Eras.of(opened).of_table(table)
    return mine[0][0] if mine else Seq(0)


def eras_in(opened: OpenTable) -> dict[Seq, str]:
    """Return the encoded eras in the properties, by the position at which each begins, ascending."""
    found = {
        Seq(int(name.removeprefix(ERA_PROPERTY))): value
        for name, value in opened.properties.items()
        if name.startswith(ERA_PROPERTY) and value is not None
    }
    return dict(sorted(found.items()))


def told_properties(told: Iterable[tuple[Seq, TableSchema]]) -> dict[str, str]:
    """Return the properties that record eras."""
    return {f"{ERA_PROPERTY}{start}": _encode(schema) for start, schema in told}


def _encode(schema: TableSchema) -> str:
    """Return a schema as a property; compressed, because each change of columns adds one permanently."""
    return "z" + base64.b64encode(zlib.compress(schema.to_arrow().serialize().to_pybytes(), 9)).decode()


@lru_cache(maxsize=4096)
def decode(encoded: str) -> TableSchema:
    """Return the schema that a property holds."""
    # An Arrow message begins with 0xFFFFFFFF, which in base64 doesn't begin with z.
    packed = encoded.startswith("z")
    raw = base64.b64decode(encoded[1:] if packed else encoded)
    return TableSchema.from_arrow(pa.ipc.read_schema(pa.py_buffer(zlib.decompress(raw) if packed else raw)))


def schema_property(schema: TableSchema) -> dict[str, str]:
    """Return the property that records the owner's newest schema."""
    return {SCHEMA_PROPERTY: base64.b64encode(schema.to_arrow().serialize().to_pybytes()).decode()}
