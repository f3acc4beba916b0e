"""Runs of messages to operations, message by message: the oracle of the vectorised decoder, and its fallback.

Kept as plain as possible. It and `vectorised_decoder` give equal results for every run, down to the order
of tables.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import millstream.codec.pgoutput.message_parser as parser
from millstream.codec.pgoutput.record_rows import (
    OperationFacts,
    Record,
    RowsBuilder,
    operations_batch,
)
from millstream.codec.pgoutput.relations import (
    HEARTBEAT_PREFIX,
    RelationCache,
    TableDirectory,
    TransactionFacts,
    column_order,
    leaf_oid,
)
from millstream.errors import ProtocolViolation
from millstream.model.ids import SourceId, TableId
from millstream.model.operations import OperationKind, TableRows, WriteOps
from millstream.model.positions import Lsn
from millstream.model.records import Op
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
                facts = TransactionFacts.of(begin, message)
                reached = facts.commit_end_lsn
                if reached > after and rows.append_all(records, operation=len(operations)):
                    operations.append(_transaction(directory.source, facts))
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


def _transaction(source: SourceId, facts: TransactionFacts) -> OperationFacts:
    kind = OperationKind.TRANSACTION
    return OperationFacts(kind, source, facts.commit_lsn, facts.commit_end_lsn, facts.xid, facts.commit_ts_us)


@dataclass(slots=True)
class TableBuilders:
    """The builders of a run, in the order in which tables and their versions first appeared."""

    directory: TableDirectory
    builders: list[RowsBuilder] = field(default_factory=list)
    current: dict[TableId, RowsBuilder] = field(default_factory=dict)
    answers: dict[int, tuple[parser.Relation, TableSchema | None]] = field(default_factory=dict)

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

    def _schema(self, relation: parser.Relation | None) -> TableSchema | None:
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
