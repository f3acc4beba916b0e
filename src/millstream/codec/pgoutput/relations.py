"""A decoder's state of tables: the Relation messages in force, and the catalog's answer to each.

A Relation message holds for the changes that follow it *in the stream*, until the next one of the
same table. Blocks of streamed transactions lie in the stream long before their commit. So their
Relation messages come into force only at the commit, and only if no newer one of the same table has
come since. pgoutput itself counts the same way: `schema_sent` and `streamed_txns` in its
RelationSyncEntry.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.codec.pgoutput.rare_messages import Relation, Type
from millstream.errors import ProtocolViolation, TableUndecodable
from millstream.model.ids import SchemaVersion, SourceId, TableId
from millstream.model.names import qualified_name
from millstream.model.pgtypes import log_type
from millstream.model.records import log_names
from millstream.model.schema import Column, PgType, TableKind, TableSchema

HEARTBEAT_PREFIX: Final = "millstream/heartbeat"
"""Logical messages of this prefix move the slot on; they never become records."""

MESSAGES_COLUMNS: Final = (
    Column("prefix", pa.string()),
    Column("content", pa.binary()),
    Column("transactional", pa.bool_()),
)
"""The columns of a source's messages table (`TableKind.MESSAGES`)."""

RAW_COLUMNS: Final = (Column("message", pa.binary()),)
"""The column of a table that is quarantined (`TableKind.RAW`): see `encode_raw`."""


_UNKNOWN_TABLE: Final = TableId(0)
_UNKNOWN_VERSION: Final = SchemaVersion(0)


class TableDirectory(Protocol):
    """The catalog's side of decoding: table ids, schema versions, and which tables are captured.

    Called once a run for each relation that the run uses: answer from memory. Equal relations get
    equal answers within a run.
    """

    @property
    def source(self) -> SourceId:
        """The source whose stream is decoded."""

    def schema_for(self, relation: Relation) -> TableSchema | None:
        """Return the table's schema under this relation, of kind TABLE or RAW (quarantined); None if not captured.

        A TABLE schema has the relation's columns, in its order: `table_schema` makes one. A relation may be a leaf
        partition of the table (`leaf_oid`): then the order of its columns may be another one.
        """

    def truncates_all(self, schema: TableSchema, leaves: frozenset[int]) -> bool:
        """Return whether a truncate of these leaf partitions, by OID, leaves no row of their table that the log has."""

    def messages_schema(self) -> TableSchema | None:
        """Return the schema of the source's logical messages (kind MESSAGES); None if they aren't captured."""


def leaf_oid(relation: Relation, schema: TableSchema) -> int | None:
    """Return the OID of the leaf partition of the schema's table that a relation is; None if it is the table itself."""
    return relation.oid if schema.partitioned and relation.oid != schema.relation_oid else None


def column_order(relation: Relation, schema: TableSchema) -> tuple[int, ...] | None:
    """Return the place in the relation of each of the schema's columns; None if both have the same order.

    Only a leaf partition may have another order than the schema of its table.
    """
    names = log_names([column.name for column in relation.columns])
    wanted = tuple(column.name for column in schema.columns)
    if names == wanted:
        return None
    assert leaf_oid(relation, schema) is not None, relation.qualified_name
    assert sorted(names) == sorted(wanted), relation.qualified_name
    places = {name: place for place, name in enumerate(names)}
    return tuple(places[name] for name in wanted)


def undecodable(relation: Relation, reason: str) -> TableUndecodable:
    """Return the error that has a relation's table quarantined."""
    return TableUndecodable(
        f"a change of {relation.qualified_name} can't be decoded: {reason}",
        table=relation.qualified_name,
        relation_oid=relation.oid,
        reason=reason,
    )


def decode_text(relation: Relation, value: bytes | None) -> str | None:
    """Return a value's text; raises `TableUndecodable` if it isn't UTF-8.

    A database of the encoding SQL_ASCII may hold any bytes.
    """
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise undecodable(relation, "a value isn't UTF-8") from error


class RelationCache:
    """The relations in force on one replication connection. A new connection starts with a new cache.

    Decoders work on a `draft` and `adopt` it once a run is decoded, so that a failed run can be
    decoded again. One thread.
    """

    def __init__(self) -> None:
        self._relations: dict[int, Relation] = {}
        self._arrivals: dict[int, int] = {}
        self._streamed: dict[int, dict[int, tuple[int, Relation]]] = {}
        self._type_names: dict[int, str] = {}
        self._arrival = 0
        self._shared = False
        """Whether a draft (or its original) shares the dicts, so that they must be copied before writing."""
        self._oids: npt.NDArray[np.int64] | None = None

    def get(self, oid: int) -> Relation:
        """Return the relation in force; raises `ProtocolViolation` if the source never sent one."""
        found = self._relations.get(oid)
        if found is None:
            raise ProtocolViolation(
                f"a change of the relation {oid}, which the source never described", relation_oid=oid
            )
        return found

    def all(self) -> list[Relation]:
        """Return all relations in force."""
        return list(self._relations.values())

    def oids(self) -> npt.NDArray[np.int64]:
        """Return the oids of `all()`, in its order."""
        if self._oids is None:
            self._oids = np.fromiter(self._relations, np.int64, len(self._relations))
        return self._oids

    def add(self, message: Relation | Type) -> None:
        """Put a Relation or Type message of an ordinary transaction into force."""
        self._own()
        self._arrival += 1
        if isinstance(message, Type):
            self._type_names[message.oid] = qualified_name(message.namespace, message.name)
        else:
            self._relations[message.oid] = self.named(message)
            self._arrivals[message.oid] = self._arrival

    def note_streamed(self, xid: int, message: Relation | Type) -> None:
        """Remember a Relation or Type message of a streamed block (of the top transaction `xid`) as it arrives."""
        self._own()
        self._arrival += 1
        if isinstance(message, Type):
            self._type_names[message.oid] = qualified_name(message.namespace, message.name)
        else:
            self._streamed.setdefault(xid, {})[message.oid] = (self._arrival, self.named(message))

    def commit_streamed(self, xid: int) -> None:
        """Put a streamed transaction's relations into force, except those that a newer one has replaced since."""
        self._own()
        for oid, (arrival, relation) in self._streamed.pop(xid, {}).items():
            if arrival > self._arrivals.get(oid, 0):
                self._relations[oid] = relation
                self._arrivals[oid] = arrival

    def abort_streamed(self, xid: int) -> None:
        """Forget a streamed transaction's relations.

        This is also right if only a subtransaction of it aborted: pgoutput then sends again what is
        still needed.
        """
        self._streamed.pop(xid, None)

    def named(self, relation: Relation) -> Relation:
        """Return the relation with its columns' type names as far as Type messages have brought them."""
        return with_type_names(relation, self._type_names)

    def draft(self) -> RelationCache:
        """Return a copy to work on; it costs nothing until it is changed (a run seldom brings a relation)."""
        copy = RelationCache()
        copy._streamed = self._streamed  # decoders of runs never touch it
        copy.adopt(self)
        self._shared = copy._shared = True
        return copy

    def _own(self) -> None:
        """Copy the shared dicts before a change."""
        self._oids = None
        if self._shared:
            self._relations = dict(self._relations)
            self._arrivals = dict(self._arrivals)
            self._type_names = dict(self._type_names)
            self._shared = False

    def adopt_type_names(self, other: RelationCache) -> None:
        """Take over another cache's names of types, not its relations."""
        self._type_names = dict(other._type_names)

    def adopt(self, draft: RelationCache) -> None:
        """Take over the changes of a draft."""
        self._relations = draft._relations
        self._arrivals = draft._arrivals
        self._type_names = draft._type_names
        self._arrival = draft._arrival
        self._oids = draft._oids
        self._shared = draft._shared


def with_type_names(relation: Relation, names: Mapping[int, str]) -> Relation:
    """Return the relation with the names of types that weren't known so far, by oid."""
    if all(column.type_name != "?" for column in relation.columns):
        return relation
    columns = tuple(
        replace(c, type_name=names.get(c.type_oid, "?")) if c.type_name == "?" else c for c in relation.columns
    )
    return replace(relation, columns=columns)


def relation_columns(relation: Relation) -> tuple[Column, ...]:
    """Return the log's columns for a relation, in its order, by docs/reference/types.md.

    Names may differ as in `log_names`.
    """
    names = log_names([c.name for c in relation.columns])
    return tuple(
        Column(name, log_type(c.type_oid, c.type_modifier), PgType(c.type_oid, c.type_modifier, c.type_name))
        for name, c in zip(names, relation.columns, strict=True)
    )


def table_schema(
    relation: Relation,
    *,
    source: SourceId,
    key: tuple[str, ...] | None = None,
    table_id: TableId = _UNKNOWN_TABLE,
    version: SchemaVersion = _UNKNOWN_VERSION,
) -> TableSchema:
    """Return the schema of a captured table under this relation.

    Args:
        key: the columns that identify a row, by the source's names; None: the identity's columns (none under FULL:
            pass the primary key if there is one).
        table_id: the catalog's number; 0 if it isn't known yet.
    """
    columns = relation_columns(relation)
    named = {c.name: column.name for c, column in zip(relation.columns, columns, strict=True)}
    identity = tuple(named[c.name] for c in relation.columns if c.in_identity)
    if key is None:
        key = () if relation.replica_identity == "f" else identity
    else:
        key = tuple(named.get(name, name) for name in key)
    return TableSchema(
        table_id=table_id,
        version=version,
        source=source,
        namespace=relation.namespace,
        name=relation.name,
        columns=columns,
        identity=identity,
        key=key,
        replica_identity=relation.replica_identity,
        relation_oid=relation.oid,
    )


def raw_schema(relation: Relation, *, source: SourceId, table_id: TableId, version: SchemaVersion) -> TableSchema:
    """Return the schema under which a table that is quarantined enters the log."""
    return TableSchema(
        table_id=table_id,
        version=version,
        source=source,
        namespace=relation.namespace,
        name=relation.name,
        columns=RAW_COLUMNS,
        replica_identity=relation.replica_identity,
        kind=TableKind.RAW,
        relation_oid=relation.oid,
    )


_LENGTH: Final = struct.Struct(">I")


def encode_raw(relation: Relation, change: bytes) -> bytes:
    """Encode a change as it came, with its relation: the content of a RAW row's `message`.

    Layout: length of the Relation message (4 bytes, big endian), the Relation message, the change
    (without a streamed one's xid). Every row repeats the relation, so that a row can be decoded
    years later from the log alone; LZ4 removes the repetition.
    """
    return _LENGTH.pack(len(relation.encoded)) + relation.encoded + change
