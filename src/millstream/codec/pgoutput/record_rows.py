"""Common parts of both decoders: records to rows, operations to columns, and errors that name their table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from millstream.codec.pgoutput.message_parser import UNCHANGED, Relation, Row
from millstream.codec.pgoutput.relations import column_order, encode_raw, leaf_oid
from millstream.errors import TableUndecodable
from millstream.model.ids import SourceId
from millstream.model.operations import OPERATION_SCHEMA, OperationKind, TableRows
from millstream.model.pgtext import INEXACT, array_of, text_parser
from millstream.model.positions import Lsn
from millstream.model.records import Op, append_row_schema
from millstream.model.schema import TableKind, TableSchema


@dataclass(frozen=True, slots=True)
class Record:
    """One record, decoded as far as messages go.

    `values` are the row's (None for a truncate, or a leaf partition that left), `old` the old key's or row's of an update. With
    `key_only`, the values are a deleted row's old key; values sent for other columns are
    meaningless. `message` is the change as it came (a raw row's); `content` the three columns of a
    logical message.
    """

    op: Op
    relation: Relation | None
    values: Row | None = None
    old: Row | None = None
    message: bytes = b""
    content: tuple[str, bytes, bool] | None = None
    key_only: bool = False
    truncated: tuple[Relation, ...] = ()
    """The relations that a truncate names; `relation` is None then, until they are told apart."""


@dataclass(frozen=True, slots=True)
class OperationFacts:
    """One row of `OPERATION_SCHEMA`."""

    kind: OperationKind
    source: SourceId
    commit_lsn: Lsn
    commit_end_lsn: Lsn
    xid: int | None
    commit_ts_us: int | None


def operations_batch(facts: Sequence[OperationFacts]) -> pa.RecordBatch:
    """Return operations in columns; columns that only applications set are null."""
    columns: dict[str, list[Any]] = {
        "kind": [int(f.kind) for f in facts],
        "source": [f.source for f in facts],
        "commit_lsn": [f.commit_lsn for f in facts],
        "commit_end_lsn": [f.commit_end_lsn for f in facts],
        "xid": [f.xid for f in facts],
        "commit_ts": [f.commit_ts_us for f in facts],
    }
    nothing = [None] * len(facts)
    arrays = [pa.array(columns.get(f.name, nothing), type=f.type) for f in OPERATION_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=OPERATION_SCHEMA)


def undecodable(relation: Relation, reason: str) -> TableUndecodable:
    """Return the error that sets a relation's table aside."""
    return TableUndecodable(
        f"a change of {relation.qualified_name} can't be decoded: {reason}",
        table=relation.qualified_name,
        relation_oid=relation.oid,
        reason=reason,
    )


def departed(relation: Relation) -> list[tuple[str, str | None]]:
    """Return the `__before` of an `x`: the name of the leaf partition that is gone."""
    return [("partition", relation.qualified_name)]


def parse_column(texts: Sequence[str | None], kind: pa.DataType) -> tuple[pa.Array, dict[int, str]]:
    """Return a column of PostgreSQL's texts as an array of its type in the log.

    Also returns the texts that the type can't hold, by row.
    """
    parse = text_parser(kind)
    exact: dict[int, str] = {}
    values: list[Any] = []
    for row, text in enumerate(texts):
        value = None if text is None else parse(text)
        if value is INEXACT:
            assert text is not None
            exact[row] = text
            value = None
        values.append(value)
    return array_of(values, kind), exact


@dataclass(slots=True)
class RowsBuilder:
    """A builder of rows of one table and schema version, added one by one."""

    schema: TableSchema
    operation: list[int] = field(default_factory=list)
    index: list[int] = field(default_factory=list)
    op: list[int] = field(default_factory=list)
    unchanged: list[list[str] | None] = field(default_factory=list)
    before: list[list[tuple[str, str | None]] | None] = field(default_factory=list)
    leaves: list[int | None] = field(default_factory=list)
    texts: list[list[Any]] = field(default_factory=list)

    def append(self, record: Record, *, operation: int, index: int) -> None:
        """Add a record; raises `TableUndecodable` if it can't be a row of this table."""
        if not self.texts:
            self.texts = [[] for _ in self.schema.columns]
        self.operation.append(operation)
        self.index.append(index)
        self.op.append(int(record.op))
        unchanged: list[str] = []
        before: list[tuple[str, str | None]] | None = None
        leaf: int | None = None
        if self.schema.kind is TableKind.RAW:
            assert record.relation is not None
            self.texts[0].append((record.relation, record.message))
        elif record.content is not None:
            for column, value in zip(self.texts, record.content, strict=True):
                column.append(value)
        else:
            assert record.relation is not None
            leaf = None if record.op is Op.TRUNCATE else leaf_oid(record.relation, self.schema)
            if record.op is Op.PARTITION_LEFT:
                before = departed(record.relation)
            elif record.op is not Op.TRUNCATE:
                record = in_order(record, self.schema)
            relation, values = record.relation, record.values
            assert relation is not None
            if values is not None and record.key_only:
                values = key_only(relation, values)
            if record.old is not None:
                before = self._old_values(relation, record.old)
                assert values is not None
                values = unchanged_from_old(relation, values, record.old)
            unchanged = self._append_values(relation, values)
        self.unchanged.append(unchanged or None)
        self.before.append(before)
        self.leaves.append(leaf)

    def _append_values(self, relation: Relation, values: Row | None) -> list[str]:
        unchanged = []
        for number, column in enumerate(self.texts):
            value = None if values is None else values[number]
            if value is UNCHANGED:
                unchanged.append(self.schema.columns[number].name)
                column.append(None)
            else:
                assert value is None or isinstance(value, bytes)
                column.append(decode_text(relation, value))
        return unchanged

    def _old_values(self, relation: Relation, old: Row) -> list[tuple[str, str | None]]:
        found = []
        for sent, column, value in zip(relation.columns, self.schema.columns, old, strict=True):
            if value is UNCHANGED or not sent.in_identity:
                continue
            assert value is None or isinstance(value, bytes)
            found.append((column.name, decode_text(relation, value)))
        return found

    def finish(self) -> TableRows:
        """Return the rows in `append_row_schema`."""
        arrow_schema = append_row_schema(self.schema)
        exact: list[list[tuple[str, str]] | None] = [None] * len(self.op)
        columns = []
        for column, texts in zip(self.schema.columns, self.texts, strict=True):
            if self.schema.kind is TableKind.RAW:
                columns.append(pa.array([encode_raw(relation, message) for relation, message in texts], pa.binary()))
            elif self.schema.kind is TableKind.MESSAGES:
                columns.append(pa.array(texts, type=column.arrow))
            else:
                array, inexact = parse_column(texts, column.arrow)
                columns.append(array)
                for row, text in inexact.items():
                    exact[row] = [*(exact[row] or []), (column.name, text)]
        prefix: list[list[Any]] = [self.operation, self.index, self.op, self.unchanged, exact, self.before]
        if self.schema.partitioned:
            prefix.append(self.leaves)
        arrays = [pa.array(values, type=arrow_schema.field(number).type) for number, values in enumerate(prefix)]
        return TableRows(self.schema, pa.RecordBatch.from_arrays([*arrays, *columns], schema=arrow_schema))


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


def check_width(relation: Relation, row: Row) -> Row:
    """Return the row itself.

    Raises `TableUndecodable` if its number of values isn't its relation's number of columns.
    """
    if len(row) != len(relation.columns):
        raise undecodable(relation, f"a row has {len(row)} values for {len(relation.columns)} columns")
    return row


def in_order(record: Record, schema: TableSchema) -> Record:
    """Return the record of a row with the relation and values in the schema's order.

    Raises `TableUndecodable` if a number of values isn't the relation's number of columns.
    """
    relation = record.relation
    assert relation is not None
    rows = [None if row is None else check_width(relation, row) for row in (record.values, record.old)]
    order = column_order(relation, schema)
    if order is None:
        return record
    values, old = (None if row is None else tuple(row[place] for place in order) for row in rows)
    columns = tuple(relation.columns[place] for place in order)
    return replace(record, relation=replace(relation, columns=columns), values=values, old=old)


def key_only(relation: Relation, row: Row) -> Row:
    """Return an old key with nulls outside of the identity, whatever was sent there."""
    pairs = zip(relation.columns, row, strict=True)
    return tuple(value if column.in_identity else None for column, value in pairs)


def unchanged_from_old(relation: Relation, row: Row, old: Row) -> Row:
    """Return an update's row with its unchanged values taken from the old key or row, if that has them.

    PostgreSQL sends a key that is stored out of line in the old key alone, although the update didn't change it.
    """
    triples = zip(relation.columns, row, old, strict=True)
    return tuple(before if value is UNCHANGED and column.in_identity else value for column, value, before in triples)
