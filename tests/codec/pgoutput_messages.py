"""Messages of pgoutput as a source would send them, made by hand, and a catalog's side of decoding in memory.

Each function returns one message, without the XLogData header. `xid` is the (sub)transaction's id that
messages inside a streamed block carry. A value of a row is its text, None for NULL, or `UNCHANGED`.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from tests.codec.reference_messages import UNCHANGED, Unchanged

from millstream.codec.pgoutput.rare_messages import (
    POSTGRES_EPOCH_US,
    Relation,
)
from millstream.codec.pgoutput.relations import (
    MESSAGES_COLUMNS,
    raw_schema,
    table_schema,
)
from millstream.model.ids import SchemaVersion, SourceId, TableId
from millstream.model.schema import TableKind, TableSchema

RowValues = Sequence[str | bytes | Unchanged | None]
ColumnFacts = tuple[str, int, int, bool]
"""Name, type oid, modifier, and whether it is part of the replica identity."""

START_TS_US: Final = 1_700_000_000_000_000


def begin(commit_lsn: int, xid: int, *, ts_us: int = START_TS_US) -> bytes:
    """Return a Begin message."""
    return b"B" + struct.pack(">QqI", commit_lsn, ts_us - POSTGRES_EPOCH_US, xid)


def commit(commit_lsn: int, end_lsn: int, *, ts_us: int = START_TS_US) -> bytes:
    """Return a Commit message."""
    return b"C" + struct.pack(">BQQq", 0, commit_lsn, end_lsn, ts_us - POSTGRES_EPOCH_US)


def relation(
    oid: int, namespace: str, name: str, columns: Sequence[ColumnFacts], *, identity: str = "d", xid: int | None = None
) -> bytes:
    """Return a Relation message."""
    parts = [b"R", _xid(xid), struct.pack(">I", oid), _text(namespace), _text(name), identity.encode()]
    parts.append(struct.pack(">H", len(columns)))
    for column, type_oid, modifier, in_identity in columns:
        parts.append(bytes([in_identity]) + _text(column) + struct.pack(">Ii", type_oid, modifier))
    return b"".join(parts)


def type_(oid: int, namespace: str, name: str, *, xid: int | None = None) -> bytes:
    """Return a Type message."""
    return b"Y" + _xid(xid) + struct.pack(">I", oid) + _text(namespace) + _text(name)


def origin(commit_lsn: int, name: str) -> bytes:
    """Return an Origin message."""
    return b"O" + struct.pack(">Q", commit_lsn) + _text(name)


def insert(oid: int, values: RowValues, *, xid: int | None = None) -> bytes:
    """Return an Insert message."""
    return b"I" + _xid(xid) + struct.pack(">I", oid) + b"N" + row(values)


def update(
    oid: int,
    values: RowValues,
    *,
    old_key: RowValues | None = None,
    old_row: RowValues | None = None,
    xid: int | None = None,
) -> bytes:
    """Return an Update message."""
    old = b"" if old_key is None else b"K" + row(old_key)
    old = old if old_row is None else b"O" + row(old_row)
    return b"U" + _xid(xid) + struct.pack(">I", oid) + old + b"N" + row(values)


def delete(
    oid: int, *, old_key: RowValues | None = None, old_row: RowValues | None = None, xid: int | None = None
) -> bytes:
    """Return a Delete message."""
    old = b"K" + row(old_key) if old_key is not None else b"O" + row(old_row or ())
    return b"D" + _xid(xid) + struct.pack(">I", oid) + old


def truncate(oids: Sequence[int], *, flags: int = 0, xid: int | None = None) -> bytes:
    """Return a Truncate message."""
    return b"T" + _xid(xid) + struct.pack(">IB", len(oids), flags) + b"".join(struct.pack(">I", oid) for oid in oids)


def logical_message(
    lsn: int, prefix: str, content: bytes, *, transactional: bool = True, xid: int | None = None
) -> bytes:
    """Return the message of pg_logical_emit_message."""
    head = struct.pack(">BQ", transactional, lsn)
    return b"M" + _xid(xid) + head + _text(prefix) + struct.pack(">I", len(content)) + content


def row(values: RowValues) -> bytes:
    """Return a TupleData."""
    parts = [struct.pack(">H", len(values))]
    for value in values:
        if value is None:
            parts.append(b"n")
        elif isinstance(value, Unchanged):
            assert value is UNCHANGED
            parts.append(b"u")
        else:
            data = value.encode() if isinstance(value, str) else value
            parts.append(b"t" + struct.pack(">I", len(data)) + data)
    return b"".join(parts)


def _text(text: str) -> bytes:
    return text.encode() + b"\0"


def _xid(xid: int | None) -> bytes:
    return b"" if xid is None else struct.pack(">I", xid)


class TablesByOid:
    """A `TableDirectory` in memory: a table's id is its oid, its versions count the relations that differ.

    Args:
        ignored: oids of tables that aren't captured.
        aside: oids of tables that are quarantined.
        messages: whether logical messages are captured (as table 1).
        roots: by OIDs of leaf partitions, the tables that their changes belong to.
    """

    def __init__(
        self,
        *,
        ignored: Collection[int] = (),
        aside: Collection[int] = (),
        messages: bool = True,
        roots: Mapping[int, Relation] | None = None,
    ) -> None:
        self.source = SourceId(3)
        self.ignored = set(ignored)
        self.aside = set(aside)
        self._messages = messages
        self.roots = dict(roots or {})
        self._versions: dict[int, list[object]] = {}

    def schema_for(self, relation: Relation) -> TableSchema | None:
        """Return the table's schema, numbered."""
        if relation.oid in self.ignored:
            return None
        relation = self.roots.get(relation.oid, relation)
        known = self._versions.setdefault(relation.oid, [])
        facts = (relation.name, relation.columns, relation.replica_identity, relation.oid in self.aside)
        if facts not in known:
            known.append(facts)
        table, version = TableId(relation.oid), SchemaVersion(known.index(facts) + 1)
        if relation.oid in self.aside:
            return raw_schema(relation, source=self.source, table_id=table, version=version)
        schema = table_schema(relation, source=self.source, table_id=table, version=version)
        partitioned = any(root.oid == relation.oid for root in self.roots.values())
        return replace(schema, partitioned=partitioned)

    def truncates_all(self, schema: TableSchema, leaves: frozenset[int]) -> bool:
        """Return whether these are all leaf partitions of the table."""
        return leaves >= {oid for oid, root in self.roots.items() if root.oid == schema.table_id}

    def messages_schema(self) -> TableSchema | None:
        """Return the schema of logical messages."""
        if not self._messages:
            return None
        table, version = TableId(1), SchemaVersion(1)
        return TableSchema(table, version, self.source, "", "_messages", MESSAGES_COLUMNS, kind=TableKind.MESSAGES)
