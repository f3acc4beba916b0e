"""Which records of a history folder are whose, and which columns they had.

A folder bears a name, and at the source a name goes from table to table: dropped and made again, renamed, swapped, given back. So one
folder has the records of several tables, and those that a table brought from a folder which it was in before lie between the others' by
number. Two things tell them apart, both exact:

- Each data file has the records of one table, and its name says of which (`new_name(table=…)`). In a lake of before these names, files
  without one have the records that were written under the folder's own name: they belong to the table that bore it at their number.
- *Eras*, kept in the table's properties by the number at which they begin: from there on, one table's records had this schema. An era whose
  schema has the folder's own name says also that its table bears the name from there on. The newest of these names the folder's
  owner. Numbers decide, never which table id or schema version is the greater: a table may take over a name from a younger one, and a name
  that comes back has its old version again.
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
"""From where on that table has borne the name, without another table and without another name between."""
FROM_SEQ_PROPERTY: Final = "millstream.from_seq"
"""Written before there were eras: the first `seq` of the table that bears this name, where one of that name was dropped before."""
ERA_PROPERTY: Final = "millstream.schema.at."
"""Followed by a `seq`: the schema of its table's records from there on."""

Span = tuple[int, int | None]
"""Numbers `[start, end)`; no end where the end is None."""
ALL: Final[tuple[Span, ...]] = ((0, None),)


@dataclass(frozen=True, slots=True)
class Era:
    """What a history table was at one position: whose records, and with which columns."""

    schema: TableSchema
    first: Seq
    """No record of this table lies below it; of another that bore the name before, one may."""


@dataclass(frozen=True)
class Eras:
    """What a folder's properties tell."""

    folder: str
    told: tuple[tuple[Seq, TableSchema], ...]
    """By the number at which each begins, ascending."""

    @classmethod
    def of(cls, opened: OpenTable) -> Eras:
        """A history's. One that was written before there were eras has one, of its newest schema.

        Raises:
            LakeTableForeign: the table's properties don't hold its schema.
        """
        told = [(start, decode(encoded)) for start, encoded in eras_in(opened).items()]
        return cls(opened.path.rsplit("/", 1)[1], tuple(told) or ((first_told(opened), newest_schema(opened)),))

    def having(self, start: Seq, schema: TableSchema) -> Eras:
        """These and one more."""
        return Eras(self.folder, tuple(sorted([*self.told, (start, schema)], key=itemgetter(0))))

    def is_native(self, schema: TableSchema) -> bool:
        """Whether a schema has the folder's own name."""
        return folder_of(schema) == self.folder

    @cached_property
    def native(self) -> tuple[tuple[Seq, TableSchema], ...]:
        """Those under the folder's own name."""
        return tuple((start, schema) for start, schema in self.told if self.is_native(schema))

    def of_table(self, table: TableId) -> list[tuple[Seq, TableSchema]]:
        """Those of one table, also from the time when it had another name."""
        return [(start, schema) for start, schema in self.told if schema.table_id == table]

    def schema_at(self, table: TableId, n: Seq) -> TableSchema | None:
        """The schema that a table had at a position; None before its first record."""
        return next((schema for start, schema in reversed(self.of_table(table)) if start <= n), None)

    def owner_at(self, n: Seq) -> TableId | None:
        """The table that bore the name at a position."""
        return next((schema.table_id for start, schema in reversed(self.native) if start <= n), None)

    @property
    def since(self) -> Seq:
        """From where on the owner has borne the name, without another table and without another name between."""
        if not self.native:
            return Seq(0)
        return self._since([(start, schema) for start, schema in self.told if self._counts(schema)])

    @property
    def taken_since(self) -> Seq:
        """From where on it has borne the name without another table between."""
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
        """Whether another table bore the name before the owner does."""
        return any(schema.table_id != self.native[-1][1].table_id for _, schema in self.native)

    def spans(self, table: TableId) -> tuple[Span, ...]:
        """The numbers under which a table bore the name."""
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
        """The numbers of the table's records in a data file: `ALL` where all of it is the table's; none where nothing is."""
        named = table_in(path)
        if named is not None:
            return ALL if named == self._table else ()
        return self._unnamed


def within(seqs: pa.ChunkedArray | pa.Array, spans: Sequence[Span]) -> pa.Array:
    """Which numbers lie in one of some spans."""
    numbers = np.asarray(seqs)
    inside = np.zeros(len(numbers), bool)
    for start, end in spans:
        inside |= (numbers >= start) & (True if end is None else numbers < end)
    return pa.array(inside)


def table_of(opened: OpenTable) -> TableId:
    """The table whose handle it is: whose commits it makes."""
    return TableId(int(opened.app.rpartition("/")[2]))


def newest_schema(opened: OpenTable) -> TableSchema:
    """The schema that the newest records had of the table that bears the folder's name.

    Raises:
        LakeTableForeign: the table's properties don't hold it.
    """
    encoded = opened.properties.get(SCHEMA_PROPERTY)
    if encoded is None:
        raise LakeTableForeign(f"{opened.path} doesn't say what its columns were at the source", path=opened.path)
    return decode(encoded)


def owned_since(opened: OpenTable, table: TableId) -> Seq:
    """From where on a table has borne a history's name; 0 where another one bears it, and where a lake of before doesn't tell."""
    return Seq(int(opened.properties.get(SINCE_PROPERTY) or 0)) if newest_schema(opened).table_id == table else Seq(0)


def holds(opened: OpenTable, history: OpenTable) -> bool:
    """Whether the rows of a folded view are those that its table wrote last, and not another's that has borne the name since."""
    if opened.n is None or opened.held is not None:
        return opened.n is not None and bool(opened.held)
    # A lake of before: whose fold went furthest was the last.
    others = {schema.table_id for _, schema in Eras.of(history).native} - {table_of(opened)}
    return all((opened.committed(table) or -1) < opened.n for table in others)


def era_at(opened: OpenTable, n: Seq) -> Era | None:
    """What the table that bore the name was at `n`; None where no record is so old.

    Where none bore it yet, the table whose handle it is. A history that was written before schemas were kept by position
    gives its newest schema for every one.
    """
    if not eras_in(opened):
        return Era(newest_schema(opened), first_told(opened))
    eras = Eras.of(opened)
    owner = eras.owner_at(n) or table_of(opened)
    schema = eras.schema_at(owner, n)
    return None if schema is None else Era(schema, eras.of_table(owner)[0][0])


def first_told(opened: OpenTable) -> Seq:
    """Where a history begins that was written before there were eras."""
    return Seq(int(opened.properties.get(FROM_SEQ_PROPERTY) or 0))


def first_of(opened: OpenTable, table: TableId) -> Seq:
    """The lowest `seq` that a record of a table can have in a history."""
    mine = Eras.of(opened).of_table(table)
    return mine[0][0] if mine else Seq(0)


def eras_in(opened: OpenTable) -> dict[Seq, str]:
    """The properties that tell eras, encoded, by the position from which on; ascending."""
    found = {
        Seq(int(name.removeprefix(ERA_PROPERTY))): value
        for name, value in opened.properties.items()
        if name.startswith(ERA_PROPERTY) and value is not None
    }
    return dict(sorted(found.items()))


def told_properties(told: Iterable[tuple[Seq, TableSchema]]) -> dict[str, str]:
    """The properties that tell eras."""
    return {f"{ERA_PROPERTY}{start}": _encode(schema) for start, schema in told}


def _encode(schema: TableSchema) -> str:
    """A schema as a property: packed, for each change of columns adds one, for ever."""
    return "z" + base64.b64encode(zlib.compress(schema.to_arrow().serialize().to_pybytes(), 9)).decode()


@lru_cache(maxsize=4096)
def decode(encoded: str) -> TableSchema:
    """The schema that a property holds."""
    # A message of Arrow's begins with 0xFFFFFFFF, which in base64 is no z.
    packed = encoded.startswith("z")
    raw = base64.b64decode(encoded[1:] if packed else encoded)
    return TableSchema.from_arrow(pa.ipc.read_schema(pa.py_buffer(zlib.decompress(raw) if packed else raw)))


def schema_property(schema: TableSchema) -> dict[str, str]:
    """The property that tells the owner's newest schema."""
    return {SCHEMA_PROPERTY: base64.b64encode(schema.to_arrow().serialize().to_pybytes()).decode()}
