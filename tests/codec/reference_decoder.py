"""Runs of messages to operations, message by message: the oracle of `transaction_decoder`.

Kept as plain as possible. Both give equal results for every run, down to the order of tables.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
from tests.codec import reference_messages as parser
from tests.codec.reference_messages import UNCHANGED, Row

from millstream.codec.pgoutput.rare_messages import Relation
from millstream.codec.pgoutput.relations import (
    HEARTBEAT_PREFIX,
    RelationCache,
    TableDirectory,
    column_order,
    decode_text,
    encode_raw,
    leaf_oid,
    undecodable,
)
from millstream.errors import ProtocolViolation
from millstream.model.exact_values import parse_texts
from millstream.model.ids import SourceId, TableId
from millstream.model.operations import OPERATION_SCHEMA, OperationKind, TableRows, WriteOps
from millstream.model.positions import Lsn
from millstream.model.records import Op, append_row_schema
from millstream.model.schema import TableKind, TableSchema


def decode_plain(
    messages: Iterable[bytes], directory: TableDirectory, relations: RelationCache, *, after: Lsn = Lsn(0)
) -> WriteOps:
    """Decode a run; see the package's docstring for what a run is.

    Raises:
        TableUndecodable: one table has to be quarantined; `relations` is unchanged.
        ProtocolViolation: the messages are no run.
    """
    draft = relations.draft()
    rows = TableBuilders(directory)
    operations: list[OperationFacts] = []
    reached: Lsn | None = None
    begin: parser.Begin | None = None
    records: list[Record] = []
    for data in messages:
        message = parser.parse_message(data)
        match message:
            case parser.Begin():
                if begin is not None:
                    raise ProtocolViolation("a transaction begins inside another", lsn=message.commit_lsn)
                begin = message
            case parser.Commit():
                if begin is None:
                    raise ProtocolViolation("a commit without a begin", lsn=message.commit_lsn)
                reached = message.end_lsn
                if reached > after and rows.append_all(records, operation=len(operations)):
                    operations.append(_transaction(directory.source, begin, message))
                begin, records = None, []
            case parser.LogicalMessage(transactional=False):
                if begin is not None:
                    raise ProtocolViolation("a message outside of transactions inside one", lsn=message.lsn)
                reached = message.lsn  # the end of its record
                found = list(records_of(message, data, draft))
                if reached > after and rows.append_all(found, operation=len(operations)):
                    kind = OperationKind.MESSAGE
                    operations.append(OperationFacts(kind, directory.source, message.lsn, reached, None, None))
            case parser.Relation() | parser.Type():
                draft.add(message)
            case parser.Origin():
                continue
            case _:
                if begin is None:
                    raise ProtocolViolation(f"a change outside of a transaction: {type(message).__name__}")
                records.extend(records_of(message, data, draft))
    if begin is not None:
        raise ProtocolViolation("the run ends inside a transaction", lsn=begin.commit_lsn)
    tables = rows.finish()
    relations.adopt(draft)
    return WriteOps(operations_batch(operations), tables, {} if reached is None else {directory.source: reached})


def decode_block_plain(
    messages: Iterable[bytes],
    directory: TableDirectory,
    relations: RelationCache,
    *,
    streamed: bool,
    aborted: Collection[int],
    first_index: int,
) -> tuple[tuple[TableRows, ...], int]:
    """Decode a part of one transaction: changes, Relation, Type and Origin messages, no Begin and no Commit.

    The messages change `relations`.

    Args:
        messages: the part.
        directory: the catalog's answers.
        relations: the relations in force inside this transaction.
        streamed: whether messages carry the id of their subtransaction.
        aborted: the subtransactions whose messages are dropped.
        first_index: the `__index` of the first record.

    Returns:
        The rows, `__operation` 0, and the index behind the last.
    """
    rows = TableBuilders(directory)
    index = first_index
    for data in messages:
        message = parser.parse_message(data, streamed=streamed)
        if isinstance(message, parser.Relation | parser.Type):
            relations.add(message)
        elif isinstance(
            message, parser.Insert | parser.Update | parser.Delete | parser.Truncate | parser.LogicalMessage
        ):
            if isinstance(message, parser.LogicalMessage) and not message.transactional:
                raise ProtocolViolation("a message outside of transactions inside one", lsn=message.lsn)
            if message.xid is None or message.xid not in aborted:
                change = data[:1] + data[5:] if streamed else data
                index += rows.append_all(list(records_of(message, change, relations)), operation=0, first_index=index)
        elif not isinstance(message, parser.Origin):
            raise ProtocolViolation(f"{type(message).__name__} inside of a spilled transaction")
    return rows.finish(), index


def records_of(message: parser.Message, data: bytes, relations: RelationCache) -> Iterator[Record]:
    """Yield the records that a change makes, of tables captured or not."""
    match message:
        case parser.Insert():
            relation = relations.get(message.relation_oid)
            yield Record(Op.CREATE, relation, message.row, message=data)
        case parser.Update():
            relation = relations.get(message.relation_oid)
            old = message.old_row if message.old_key is None else message.old_key
            yield Record(Op.UPDATE, relation, message.row, old, message=data)
        case parser.Delete():
            relation = relations.get(message.relation_oid)
            if message.old_row is not None:
                yield Record(Op.DELETE, relation, message.old_row, message=data)
            else:
                yield Record(Op.DELETE, relation, message.old_key, message=data, key_only=True)
        case parser.Truncate():
            named = tuple(relations.get(oid) for oid in message.relation_oids)
            yield Record(Op.TRUNCATE, None, message=data, truncated=named)
        case parser.LogicalMessage():
            if message.prefix != HEARTBEAT_PREFIX:
                yield Record(Op.MESSAGE, None, content=(message.prefix, message.content, message.transactional))
        case _:
            raise ProtocolViolation(f"{type(message).__name__} is no change")


def _transaction(source: SourceId, begin: parser.Begin, commit: parser.Commit) -> OperationFacts:
    kind = OperationKind.TRANSACTION
    return OperationFacts(kind, source, commit.commit_lsn, commit.end_lsn, begin.xid, commit.commit_ts_us)


@dataclass(slots=True)
class TableBuilders:
    """The builders of a run, in the order in which tables and their versions first appeared."""

    directory: TableDirectory
    builders: list[RowsBuilder] = field(default_factory=list)
    current: dict[TableId, RowsBuilder] = field(default_factory=dict)
    answers: dict[int, tuple[Relation, TableSchema | None]] = field(default_factory=dict)

    def append_all(self, records: Sequence[Record], *, operation: int, first_index: int = 0) -> int:
        """Add the captured records of an operation; return their number."""
        index = first_index
        for record, schema in self._captured(records):
            builder = self.current.get(schema.table_id)
            if builder is None or builder.schema.version != schema.version:
                builder = RowsBuilder(schema)
                self.builders.append(builder)
                self.current[schema.table_id] = builder
            builder.append(record, operation=operation, index=index)
            index += 1
        return index - first_index

    def _captured(self, records: Sequence[Record]) -> Iterator[tuple[Record, TableSchema]]:
        """Yield the captured records with their schemas."""
        for record in records:
            if record.op is Op.TRUNCATE:
                yield from self._truncates(record)
            elif (schema := self._schema(record.relation)) is not None:
                yield record, schema

    def _truncates(self, record: Record) -> Iterator[tuple[Record, TableSchema]]:
        """Yield the records of a truncate: of a table's leaf partitions one `t`, if they are all, else an `x` for each."""
        found = [(one, schema) for one in record.truncated if (schema := self._schema(one)) is not None]
        leaves: dict[TableId, set[int]] = {}
        for relation, schema in found:
            if (oid := leaf_oid(relation, schema)) is not None:
                leaves.setdefault(schema.table_id, set()).add(oid)
        whole: dict[TableId, bool] = {}
        for relation, schema in found:
            one = replace(record, relation=relation, truncated=())
            if leaf_oid(relation, schema) is None:
                yield one, schema
                continue
            is_first = schema.table_id not in whole
            if is_first:
                oids = frozenset(leaves[schema.table_id])
                whole[schema.table_id] = self.directory.truncates_all(schema, oids)
            if not whole[schema.table_id]:
                yield replace(one, op=Op.PARTITION_LEFT), schema
            elif is_first:
                yield one, schema

    def _schema(self, relation: Relation | None) -> TableSchema | None:
        if relation is None:
            return self.directory.messages_schema()
        known = self.answers.get(relation.oid)
        if known is not None and known[0] is relation:
            return known[1]
        schema = self.directory.schema_for(relation)
        if schema is not None and schema.kind is TableKind.TABLE:
            column_order(relation, schema)  # checks the directory's promise
        self.answers[relation.oid] = (relation, schema)
        return schema

    def finish(self) -> tuple[TableRows, ...]:
        """Return all rows."""
        return tuple(builder.finish() for builder in self.builders)


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
                before = [("partition", record.relation.qualified_name)]
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
                array, inexact = parse_texts(texts, column.arrow)
                columns.append(array)
                for row, text in inexact.items():
                    exact[row] = [*(exact[row] or []), (column.name, text)]
        prefix: list[list[Any]] = [self.operation, self.index, self.op, self.unchanged, exact, self.before]
        if self.schema.partitioned:
            prefix.append(self.leaves)
        arrays = [pa.array(values, type=arrow_schema.field(number).type) for number, values in enumerate(prefix)]
        return TableRows(self.schema, pa.RecordBatch.from_arrays([*arrays, *columns], schema=arrow_schema))


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
