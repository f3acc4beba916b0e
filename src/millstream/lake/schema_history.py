"""Ownership and schemas of the records in a history folder.

A folder has a table's name, and at the source a name passes from table to table: dropped and made again,
renamed, swapped, given back. So one folder has the records of several tables. Records that a table
brought from an earlier folder lie between the others' by number. Two things tell them apart, both exactly:

- Each data file has the records of one table, and its name says of which (`new_name(table=…)`).
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

import pyarrow as pa

from millstream.errors import LakeTableForeign
from millstream.lake.delta import OpenTable
from millstream.lake.layout import folder_of
from millstream.model.ids import TableId
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema

SCHEMA_PROPERTY: Final = "millstream.schema"
"""The schema of the newest record of the folder's owner."""
SINCE_PROPERTY: Final = "millstream.since_seq"
"""Position from which the owner has had the name, without another table or another name in between."""
ERA_PROPERTY: Final = "millstream.schema.at."
"""Prefix of an era's property, followed by a `seq`: the schema of its table's records from there on."""


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
        """Return a history's eras; a history without records yet gets one, of its newest schema.

        Raises:
            LakeTableForeign: the table's properties don't hold its schema.
        """
        told = [(start, decode(encoded)) for start, encoded in eras_in(opened).items()]
        return cls(opened.path.rsplit("/", 1)[1], tuple(told) or ((Seq(0), newest_schema(opened)),))

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
        raise LakeTableForeign(f"{opened.path} doesn't record its columns at the source", path=opened.path)
    return decode(encoded)


def owned_since(opened: OpenTable, table: TableId) -> Seq:
    """Return the position from which a table has had a history's name; 0 if another table has it."""
    return Seq(int(opened.properties.get(SINCE_PROPERTY) or 0)) if newest_schema(opened).table_id == table else Seq(0)


def era_at(opened: OpenTable, n: Seq) -> Era | None:
    """Return the schema at `n` of the table that had the name; None if no record is that old.

    If no table had the name at `n`, take the handle's table.
    """
    eras = Eras.of(opened)
    owner = eras.owner_at(n) or table_of(opened)
    schema = eras.schema_at(owner, n)
    return None if schema is None else Era(schema, eras.of_table(owner)[0][0])


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
    packed = encoded.startswith("z")  # which no Arrow message begins with in base64
    raw = base64.b64decode(encoded[1:] if packed else encoded)
    return TableSchema.from_arrow(pa.ipc.read_schema(pa.py_buffer(zlib.decompress(raw) if packed else raw)))


def schema_property(schema: TableSchema) -> dict[str, str]:
    """Return the property that records the owner's newest schema."""
    return {SCHEMA_PROPERTY: base64.b64encode(schema.to_arrow().serialize().to_pybytes()).decode()}
