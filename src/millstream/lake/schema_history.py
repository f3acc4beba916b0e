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

The number of eras is bounded. From `ERAS_MAX` on, the oldest go, except the first and the last of each time that
a table had a name, and those that rename columns, or add some that have values in older rows. They are the ones that
decide ownership, beginnings, and which column a name meant.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Final

import pyarrow as pa

from millstream.errors import LakeTableForeign, PositionError
from millstream.lake.layout import folder_of
from millstream.lake.table_format import OpenTable
from millstream.model.ids import TableId
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema

SCHEMA_PROPERTY: Final = "millstream.schema"
"""The schema of the newest record of the folder's owner."""
SINCE_PROPERTY: Final = "millstream.since_seq"
"""Position from which the owner has had the name, without another table or another name in between."""
_ERAS_PROPERTY: Final = "millstream.schemas"
"""All eras of a folder, compressed together, because they differ little."""
ERAS_MAX: Final = 200
"""A folder keeps at least as many of its newest eras."""
_FROM: Final = struct.Struct("<q")
_ERA: Final = struct.Struct("<qI")


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
    complete_from: Seq = Seq(0)
    """Position below which some schemas are no longer recorded."""

    @classmethod
    def of(cls, opened: OpenTable) -> Eras:
        """Return a history's eras; a history without records yet gets one, of its newest schema.

        Raises:
            LakeTableForeign: the table's properties don't hold its schema.
        """
        encoded = opened.properties.get(_ERAS_PROPERTY)
        if encoded is None:
            return cls(opened.folder, ((Seq(0), newest_schema(opened)),))
        complete_from, told = _unpacked(encoded)
        return cls(opened.folder, told, complete_from)

    def having(self, start: Seq, schema: TableSchema) -> Eras:
        """Return these eras and one more."""
        told = {**dict(self.told), start: schema}
        return replace(self, told=tuple(sorted(told.items(), key=itemgetter(0))))

    def bounded(self) -> Eras:
        """Return the eras without the oldest ones above the bound."""
        owners = [(schema.table_id, folder_of(schema)) for _, schema in self.told]
        kept, complete_from = list(self.told[:1]), self.complete_from
        names = self._names()
        for place, era in enumerate(self.told[1:], 1):
            is_old = place < len(self.told) - ERAS_MAX
            if is_old and owners[place - 1] == owners[place] == owners[place + 1] and names[place - 1] == names[place]:
                complete_from = self.told[place + 1][0]
            else:
                kept.append(era)
        return replace(self, told=tuple(kept), complete_from=complete_from)

    def _names(self) -> list[dict[int, str]]:
        """Return, for each era, the names of those columns by number that have had another one, or whose name another had.

        Those of columns that have values in rows from before them are among them. A name is the same in whatever case: two columns may lie in one column of history then.
        """
        pairs = {
            (schema.table_id, column.number, column.name)
            for _, schema in self.told
            for column in schema.columns
            if column.number
        }
        numbers = Counter((table, number) for table, number, _ in pairs)
        names = Counter((table, name.lower()) for table, _, name in pairs)
        return [
            {
                column.number: column.name
                for column in schema.columns
                if numbers[schema.table_id, column.number] > 1
                or names[schema.table_id, column.name.lower()] > 1
                or column.filled is not None
            }
            for _, schema in self.told
        ]

    def properties(self) -> dict[str, str]:
        """Return the property that records the eras."""
        packed = [_FROM.pack(self.complete_from)]
        for start, schema in self.told:
            raw = schema.to_arrow().serialize().to_pybytes()
            packed += [_ERA.pack(start, len(raw)), raw]
        return {_ERAS_PROPERTY: base64.b64encode(zlib.compress(b"".join(packed), 9)).decode()} if self.told else {}

    def all_properties(self) -> dict[str, str]:
        """Return the properties that record the eras, within their bound, and the owner's newest schema."""
        properties = self.bounded().properties()
        if self.native:
            properties |= schema_property(self.native[-1][1]) | {SINCE_PROPERTY: str(int(self.since))}
        return properties

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

    Raises:
        PositionError (`beyond_retention`): the schema at `n` is no longer recorded.
    """
    return era_of(opened, Eras.of(opened).owner_at(n) or table_of(opened), n)


def era_of(opened: OpenTable, owner: TableId, n: Seq) -> Era | None:
    """Return the schema at `n` of a table whose records a history has; raises as `era_at`."""
    eras = Eras.of(opened)
    schema = eras.schema_at(owner, n)
    if schema is not None and n < eras.complete_from:
        raise PositionError(
            f"the columns of {schema.full_name} changed more than {ERAS_MAX} times since then, and are no longer recorded",
            code="beyond_retention",
            hint="Query a later time.",
            first=int(eras.complete_from),
        )
    return None if schema is None else Era(schema, eras.of_table(owner)[0][0])


def first_of(opened: OpenTable, table: TableId) -> Seq:
    """Return the lowest `seq` that a record of a table can have in a history."""
    mine = Eras.of(opened).of_table(table)
    return mine[0][0] if mine else Seq(0)


def has_eras(opened: OpenTable) -> bool:
    """Return whether a history's properties record eras; not before its first record."""
    return opened.properties.get(_ERAS_PROPERTY) is not None


@lru_cache(maxsize=1024)
def _unpacked(encoded: str) -> tuple[Seq, tuple[tuple[Seq, TableSchema], ...]]:
    packed = zlib.decompress(base64.b64decode(encoded))
    told, place = list[tuple[Seq, TableSchema]](), _FROM.size
    while place < len(packed):
        start, size = _ERA.unpack_from(packed, place)
        place += _ERA.size + size
        told.append((Seq(start), _schema_in(packed[place - size : place])))
    return Seq(_FROM.unpack_from(packed)[0]), tuple(told)


@lru_cache(maxsize=4096)
def decode(encoded: str) -> TableSchema:
    """Return the schema that the owner's property holds."""
    return _schema_in(base64.b64decode(encoded))


def _schema_in(raw: bytes) -> TableSchema:
    return TableSchema.from_arrow(pa.ipc.read_schema(pa.py_buffer(raw)))


def schema_property(schema: TableSchema) -> dict[str, str]:
    """Return the property that records the owner's newest schema."""
    return {SCHEMA_PROPERTY: base64.b64encode(schema.to_arrow().serialize().to_pybytes()).decode()}
