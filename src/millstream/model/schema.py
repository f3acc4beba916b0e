"""Table schemas: one version of a table's columns, as the source's own stream described it.

A schema travels with the rows. Each segment holds the schemas that its rows need, so that a log can
be read without the catalog. `arrow` types are those of the log; the lake's may differ (see
`millstream.model.pgtypes`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, Self, cast

import pyarrow as pa

from millstream.model.ids import SchemaVersion, SourceId, TableId
from millstream.model.names import parse_qualified_name, qualified_name


class ReplicaIdentity(StrEnum):
    """Which old values of a row the source sends; PostgreSQL's own letters (`pg_class.relreplident`)."""

    DEFAULT = "d"
    NOTHING = "n"
    FULL = "f"
    INDEX = "i"


class TableKind(StrEnum):
    """Kind of a table's rows."""

    TABLE = "table"
    """Rows of a relation."""
    MESSAGES = "messages"
    """A source's logical messages: columns `prefix`, `content`, `transactional`; its history is `_messages`."""
    DEFINITION = "definition"
    """One record that names the columns from its place on. Its rows' values are null; only readers that ask get it."""
    RAW = "raw"
    """Changes of a table that is quarantined, as they came: one column `message`, bytes of the protocol."""


_DEFINITION: Final = 1 << 30
"""Added to the version of a schema for its definition: so a part of a frame shows its kind without its schema."""


def is_definition(version: int) -> bool:
    """Return whether a schema version in the log is a definition's."""
    return version >= _DEFINITION


@dataclass(frozen=True, slots=True)
class PgType:
    """A column's type in PostgreSQL."""

    oid: int
    modifier: int
    """`atttypmod`; -1 if the type has none."""
    name: str
    """`format_type(oid, NULL)` if known (`integer`, `public.mood`), else `?`."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its name, its type in the log and, if captured, its type in PostgreSQL."""

    name: str
    arrow: pa.DataType
    pg: PgType | None = None
    accumulates: str = ""
    """How rows add to the column's value, as the merge is declared (`pn_counter(increments)`); empty if they replace it."""
    number: int = 0
    """The column's number in the source (`attnum`), which a rename doesn't change; 0 if it has none, or isn't known."""
    apart: str = ""
    """The column of history that has its values, if that isn't the one of its name; only the lake sets it."""
    filled: str | None = None
    """PostgreSQL's text of the value that rows have which were written before the column was added; None if it is null.

    Rows were written before if their schema has numbers, and not the column's."""

    @property
    def in_history(self) -> str:
        """The column of history that has its values."""
        return self.apart or self.name


@dataclass(frozen=True, slots=True)
class TableSchema:
    """One version of one table's schema.

    `identity` names the columns whose old values the source sends (all of them under FULL, none
    under NOTHING). `key` names those that identify a row of `current` (empty: the table has no
    key).
    """

    table_id: TableId
    version: SchemaVersion
    source: SourceId
    namespace: str
    name: str
    columns: tuple[Column, ...]
    identity: tuple[str, ...] = ()
    key: tuple[str, ...] = ()
    replica_identity: ReplicaIdentity = ReplicaIdentity.DEFAULT
    kind: TableKind = TableKind.TABLE
    relation_oid: int = 0
    folder_id: TableId = TableId(0)
    """The table id at the end of the lake folder's name; 0 if the folder bears the name alone.

    The catalog sets it, when it numbers the schema, for a name that differs by case alone from another table's.
    """
    partitioned: bool = False
    """Whether the table is partitioned at its source: its rows then carry the OID of their leaf partition."""

    @property
    def column_names(self) -> list[str]:
        """Names of the columns, in order."""
        return [column.name for column in self.columns]

    @property
    def accumulating(self) -> tuple[str, ...]:
        """Names of the columns to whose value rows add."""
        return tuple(column.name for column in self.columns if column.accumulates)

    @property
    def full_name(self) -> str:
        """`schema.table` as PostgreSQL quotes it; `_messages` for logical messages."""
        return self.name if self.kind is TableKind.MESSAGES else qualified_name(self.namespace, self.name)

    def with_numbers(self, numbers: Sequence[int]) -> Self:
        """Return the schema with its columns' numbers in the source, in order; as it is if there are none."""
        if not numbers:
            return self
        columns = (replace(column, number=number) for column, number in zip(self.columns, numbers, strict=True))
        return replace(self, columns=tuple(columns))

    def as_definition(self) -> Self:
        """Return the schema of the definition that names these columns."""
        return replace(self, kind=TableKind.DEFINITION, version=SchemaVersion(self.version + _DEFINITION))

    def defined(self) -> Self:
        """Return the schema that a definition names; another schema as it is."""
        if self.kind is not TableKind.DEFINITION:
            return self
        return replace(self, kind=TableKind.TABLE, version=SchemaVersion(self.version - _DEFINITION))

    @property
    def is_numbered(self) -> bool:
        """Whether the numbers of all columns are known."""
        return bool(self.columns) and all(column.number for column in self.columns)

    def has_key_of(self, other: TableSchema) -> bool:
        """Return whether the key has the same columns as that of another version; a renamed column is the same one."""
        if self.is_numbered and other.is_numbered:
            return [self.column(name).number for name in self.key] == [other.column(n).number for n in other.key]
        return self.key == other.key

    def column(self, name: str) -> Column:
        """Return the column of that name; raises `KeyError` if there is none."""
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(name)

    def to_arrow(self, prefix: tuple[pa.Field, ...] = ()) -> pa.Schema:
        """Return `prefix` and the table's own columns as an Arrow schema; its metadata holds the rest of this value."""
        fields = [*prefix, *(pa.field(c.name, c.arrow, nullable=True) for c in self.columns)]
        return pa.schema(fields, metadata={_METADATA_KEY: json.dumps(self._facts(), separators=(",", ":")).encode()})

    @classmethod
    def from_arrow(cls, schema: pa.Schema) -> Self:
        """Return the value that `to_arrow` put into a schema.

        Raises `KeyError`, `TypeError` or `ValueError` if the schema has none.
        """
        facts = _read_facts((schema.metadata or {})[_METADATA_KEY])
        own = list(schema)[max(len(schema) - len(facts["columns"]), 0) :]
        columns = tuple(
            Column(
                field.name,
                field.type,
                None if c["pg"] is None else PgType(*c["pg"]),
                c.get("accumulates", ""),
                c.get("number", 0),
                c.get("apart", ""),
                c.get("filled"),
            )
            for field, c in zip(own, facts["columns"], strict=True)
        )
        if [column.name for column in columns] != [c["name"] for c in facts["columns"]]:
            raise ValueError("its columns bear other names than it says")
        return cls(
            table_id=TableId(facts["table_id"]),
            version=SchemaVersion(facts["version"]),
            source=SourceId(facts["source"]),
            namespace=facts["namespace"],
            name=facts["name"],
            columns=columns,
            identity=tuple(facts["identity"]),
            key=tuple(facts["key"]),
            replica_identity=ReplicaIdentity(facts["replica_identity"]),
            kind=TableKind(facts["kind"]),
            relation_oid=facts["relation_oid"],
            folder_id=TableId(facts.get("folder_id", 0)),
            partitioned=facts.get("partitioned", False),
        )

    def _facts(self) -> dict[str, Any]:
        return {
            "table_id": self.table_id,
            "version": self.version,
            "source": self.source,
            "namespace": self.namespace,
            "name": self.name,
            "columns": [
                {
                    "name": c.name,
                    "pg": None if c.pg is None else [c.pg.oid, c.pg.modifier, c.pg.name],
                    **({"accumulates": c.accumulates} if c.accumulates else {}),
                    **({"number": c.number} if c.number else {}),
                    **({"apart": c.apart} if c.apart else {}),
                    **({} if c.filled is None else {"filled": c.filled}),
                }
                for c in self.columns
            ],
            "identity": list(self.identity),
            "key": list(self.key),
            "replica_identity": self.replica_identity.value,
            "kind": self.kind.value,
            "relation_oid": self.relation_oid,
            **({"folder_id": self.folder_id} if self.folder_id else {}),
            **({"partitioned": True} if self.partitioned else {}),
        }


_METADATA_KEY: Final = b"millstream.table"
_FACTS: Final[Mapping[str, type]] = {
    **dict.fromkeys(("table_id", "version", "source", "relation_oid"), int),
    **dict.fromkeys(("namespace", "name", "replica_identity", "kind"), str),
    **dict.fromkeys(("columns", "identity", "key"), list),
}


def _read_facts(text: bytes) -> Mapping[str, Any]:
    """Return what `_facts` made, with its types checked."""
    try:
        facts = json.loads(text)
    except RecursionError as error:
        raise ValueError("its metadata is nested too deeply") from error
    for name, kind in _FACTS.items():
        if type(facts[name]) is not kind:
            raise TypeError(f"{name} is no {kind.__name__}")
    if type(facts.get("folder_id", 0)) is not int:
        raise TypeError("folder_id is no int")
    if type(facts.get("partitioned", False)) is not bool:
        raise TypeError("partitioned is no bool")
    for column in facts["columns"]:
        if column["pg"] is not None and [type(fact) for fact in column["pg"]] != [int, int, str]:
            raise TypeError(f"the type of column {column['name']} is none")
        if type(column.get("accumulates", "")) is not str:
            raise TypeError(f"the way in which column {column['name']} accumulates is no text")
        if type(column.get("apart", "")) is not str:
            raise TypeError(f"the place of column {column['name']} in history is no text")
        if type(column.get("filled", "")) is not str:
            raise TypeError(f"the value of column {column['name']} in older rows is no text")
        if type(column.get("number", 0)) is not int or column.get("number", 0) < 0:
            raise TypeError(f"the number of column {column['name']} is none")
    names = [column["name"] for column in facts["columns"]]
    if len(set(names)) != len(names):
        raise ValueError("a column is named twice")
    numbers = [column["number"] for column in facts["columns"] if column.get("number")]
    if len(set(numbers)) != len(numbers):
        raise ValueError("two columns have one number")
    return cast("Mapping[str, Any]", facts)


def names_table(text: str) -> Callable[[TableSchema], bool]:
    """Return whether a text names a table, by the rule of `parse_qualified_name`; `_messages` names that of logical messages.

    Raises `UsageError` if the text is no name.
    """
    wanted = parse_qualified_name(text)

    def is_meant(schema: TableSchema) -> bool:
        if schema.kind is TableKind.MESSAGES:
            return text == schema.full_name
        return (schema.namespace, schema.name) == wanted

    return is_meant
