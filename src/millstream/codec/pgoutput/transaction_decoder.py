"""Runs of messages to operations in machine code: almost no Python for a transaction, a record or a value.

Three passes over the bytes: `_row_messages.scan` finds transactions and records, `_row_messages.arrange` numbers
them and groups them by table, `_row_messages.walk_rows` records the places of values. Then `_columns_to_arrow` reads
column by column. Values that machine code isn't sure about go through `model.exact_values`. The tests' oracle
(`tests/codec/reference_decoder.py`) decodes message by message in plain Python, and gives equal results.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.codec.pgoutput.rare_messages import LogicalMessage, Relation, Type, parse_message
from millstream.codec.pgoutput.relations import (
    HEARTBEAT_PREFIX,
    RelationCache,
    TableDirectory,
    column_order,
    encode_raw,
    leaf_oid,
    undecodable,
)
from millstream.codec.pgoutput.runs import MessageRun
from millstream.errors import ProtocolViolation
from millstream.model.ids import SourceId, TableId
from millstream.model.operations import OPERATION_SCHEMA, OperationKind, TableRows, WriteOps
from millstream.model.positions import Lsn
from millstream.model.records import PARTITION_OID, TEXT_BY_COLUMN, Op, append_row_schema, rows_with
from millstream.model.schema import TableKind, TableSchema

_HEARTBEAT: Final = np.frombuffer(HEARTBEAT_PREFIX.encode(), np.uint8)
_RELATION, _TYPE, _TRUNCATE = ord("R"), ord("Y"), ord("T")


def decode_transactions(
    run: MessageRun, directory: TableDirectory, relations: RelationCache, *, after: Lsn = Lsn(0)
) -> WriteOps:
    """Decode a run; see the package's docstring for the definition of a run.

    Raises:
        TableUndecodable: one table has to be quarantined; `relations` is unchanged.
        ProtocolViolation: the messages are no run.
    """
    draft = relations.draft()
    walk = _ScanResult.of(run, draft, streamed=False, whole=True, aborted=(), after=after)
    tables, operation_transactions = walk.tables(directory, first_index=0)
    relations.adopt(draft)
    reached = {} if walk.reached is None else {directory.source: walk.reached}
    return WriteOps(operations_batch(walk.transactions[:, operation_transactions], directory.source), tables, reached)


def decode_block(
    run: MessageRun,
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
        relations: the relations in force inside this transaction.
        streamed: whether messages carry the id of their subtransaction.

    Returns:
        The rows, `__operation` 0, and the index behind the last.
    """
    walk = _ScanResult.of(run, relations, streamed=streamed, whole=False, aborted=aborted, after=Lsn(0))
    tables, _ = walk.tables(directory, first_index=first_index)
    return tables, first_index + sum(table.rows.num_rows for table in tables)


Ints = npt.NDArray[np.int32]


@dataclass(slots=True)
class _ScanResult:
    """The results of `scan` for a run."""

    run: MessageRun
    buffer: npt.NDArray[np.uint8]
    streamed: bool
    slots: list[Relation]
    """One for each Relation message, known before or in the run; logical messages have the slot behind the last."""
    records: int
    record_op: npt.NDArray[np.uint8]
    record_slot: Ints
    record_at: Ints
    record_message: Ints
    record_transaction: Ints
    transactions: npt.NDArray[np.int64]
    reached: Lsn | None

    @classmethod
    def of(
        cls,
        run: MessageRun,
        relations: RelationCache,
        *,
        streamed: bool,
        whole: bool,
        aborted: Collection[int],
        after: Lsn,
    ) -> _ScanResult:
        """Scan a run, and put its Relation and Type messages into force."""
        from millstream.codec.pgoutput import _row_messages as machine

        buffer = run.buffer.view()
        buffer.flags.writeable = False  # one version of machine code for all buffers
        if len(run) and (run.starts >= run.ends).any():
            raise ProtocolViolation("an empty message")
        slots = relations.all()
        oids = relations.oids()
        kinds = buffer[run.starts] if len(run) else np.empty(0, np.uint8)
        for number in np.flatnonzero((kinds == _RELATION) | (kinds == _TYPE)).tolist():
            message = parse_message(run[number], streamed=streamed)
            assert isinstance(message, Relation | Type)
            relations.add(message)
            if isinstance(message, Relation):
                slots.append(relations.get(message.oid))
        capacity = len(run) + _more_records(run, kinds, streamed=streamed)
        places = 1 << (2 * len(slots) + 2).bit_length()
        mode = machine.RUN if whole else (machine.STREAMED_BLOCK if streamed else machine.BLOCK)
        walk = cls(
            run=run,
            buffer=buffer,
            streamed=streamed,
            slots=slots,
            records=0,
            record_op=np.empty(capacity, np.uint8),
            record_slot=np.empty(capacity, np.int32),
            record_at=np.empty(capacity, np.int32),
            record_message=np.empty(capacity, np.int32),
            record_transaction=np.empty(capacity, np.int32),
            transactions=np.empty((5, len(run)), np.int64),
            reached=None,
        )
        walk.records, _, reached, fault, number = machine.scan(
            buffer,
            run.starts,
            run.ends,
            mode,
            np.array(sorted(aborted), np.int64),
            oids,
            np.full(places, -1, np.int64),
            np.zeros(places, np.int32),
            len(slots),
            after,
            _HEARTBEAT,
            walk.record_op,
            walk.record_slot,
            walk.record_at,
            walk.record_message,
            walk.record_transaction,
            walk.transactions,
        )
        if fault != machine.FINE:
            raise _violation(fault, run[number][:1].decode("latin-1"))
        walk.reached = None if reached < 0 else Lsn(reached)
        return walk

    def tables(self, directory: TableDirectory, *, first_index: int) -> tuple[tuple[TableRows, ...], Ints]:
        """Return the rows of all captured tables, and the transaction of each operation."""
        from millstream.codec.pgoutput import _row_messages as machine

        entry_of_slot, entries = self._entries(directory)
        departures = self._settle_truncates(directory, entry_of_slot, entries)
        start = np.zeros(len(entries) + 1, np.int64)
        row_record = np.empty(self.records, np.int32)
        row_operation = np.empty(self.records, np.int32)
        row_index = np.empty(self.records, np.int64)
        operation_transaction = np.empty(self.records, np.int32)
        operations = machine.arrange(
            self.record_slot,
            self.record_transaction,
            self.records,
            entry_of_slot,
            first_index,
            start,
            row_record,
            row_operation,
            row_index,
            operation_transaction,
        )
        tables = []
        for number, (relation, schema) in enumerate(entries):
            piece = slice(int(start[number]), int(start[number + 1]))
            if piece.start < piece.stop:  # else a `t` of another version stands for its truncates
                rows = _EntryRows(self, relation, schema, row_record[piece], row_operation[piece], row_index[piece])
                rows.departures = departures
                tables.append(rows.finish())
        return tuple(tables), operation_transaction[:operations]

    def _entries(self, directory: TableDirectory) -> tuple[Ints, list[tuple[Relation | None, TableSchema]]]:
        """Return the result entry of each slot's records (-1: not captured), in order of first records.

        The last slot is of records that are dropped.
        """
        from millstream.codec.pgoutput import _row_messages as machine

        first = np.full(len(self.slots) + 1, self.records, np.int64)
        machine.first_uses(self.record_slot, self.records, first)
        used = np.flatnonzero(first < self.records)
        entry_of_slot = np.full(len(self.slots) + 2, -1, np.int32)
        entries: list[tuple[Relation | None, TableSchema]] = []
        current: dict[TableId, int] = {}
        for slot in used[np.argsort(first[used])].tolist():
            relation = None if slot == len(self.slots) else self.slots[slot]
            schema = directory.messages_schema() if relation is None else directory.schema_for(relation)
            if schema is None:
                continue
            if relation is not None and schema.kind is TableKind.TABLE:
                column_order(relation, schema)  # checks the directory's promise
            entry = current.get(schema.table_id)
            if entry is None or entries[entry][1].version != schema.version:
                entry = len(entries)
                entries.append((relation, schema))
                current[schema.table_id] = entry
            entry_of_slot[slot] = entry
        return entry_of_slot, entries

    def _settle_truncates(
        self, directory: TableDirectory, entry_of_slot: Ints, entries: list[tuple[Relation | None, TableSchema]]
    ) -> Ints:
        """Settle truncates of leaf partitions: one `t` if they are all of their table, else an `x` for each.

        Return the records that become an `x`; those for which the one `t` stands are dropped.
        """
        leaves: dict[tuple[int, TableId], list[int]] = {}
        schemas: dict[TableId, TableSchema] = {}
        for record in np.flatnonzero(self.record_op[: self.records] == int(Op.TRUNCATE)).tolist():
            slot = int(self.record_slot[record])
            entry = int(entry_of_slot[slot])
            if entry >= 0:
                schema = entries[entry][1]
                if leaf_oid(self.slots[slot], schema) is not None:
                    key = int(self.record_message[record]), schema.table_id
                    leaves.setdefault(key, []).append(record)
                    schemas.setdefault(schema.table_id, schema)
        departures: list[int] = []
        for (_, table_id), records in leaves.items():
            oids = frozenset(self.slots[int(self.record_slot[record])].oid for record in records)
            if directory.truncates_all(schemas[table_id], oids):
                self.record_slot[records[1:]] = len(entry_of_slot) - 1
            else:
                departures += records
        return np.array(departures, np.int32)


def _more_records(run: MessageRun, kinds: npt.NDArray[np.uint8], *, streamed: bool) -> int:
    """Return the maximum excess of records over messages: a truncate makes one record for each of its tables."""
    more = 0
    for number in np.flatnonzero(kinds == _TRUNCATE).tolist():
        at = int(run.starts[number]) + (5 if streamed else 1)
        size = int(run.ends[number]) - at
        more += max(size, 0) // 4
    return more


def _violation(fault: int, kind: str) -> ProtocolViolation:
    from millstream.codec.pgoutput import _row_messages as machine

    said = {
        machine.TOO_SHORT: "is shorter or longer than it says",
        machine.UNKNOWN_KIND: "is of an unknown kind",
        machine.NESTED_BEGIN: "begins a transaction inside another",
        machine.NO_BEGIN: "stands outside of a transaction",
        machine.UNKNOWN_RELATION: "changes a relation that the source never described",
        machine.MISPLACED_MESSAGE: "stands on the wrong side of a transaction's border",
        machine.NO_COMMIT: "ends the run inside a transaction",
        machine.BAD_VALUE_KIND: "holds a part of an unknown kind",
        machine.BEYOND_BOUNDS: "names a position or a time that no source gets to",
    }
    return ProtocolViolation(f"a message of kind {kind!r} {said[fault]}", kind=kind)


@dataclass(slots=True)
class _EntryRows:
    """The rows of one entry: one table and schema version."""

    walk: _ScanResult
    relation: Relation | None
    schema: TableSchema
    records: Ints
    operation: Ints
    index: npt.NDArray[np.int64]
    departures: Ints | None = None
    """The run's records of leaf partitions that left."""

    def finish(self) -> TableRows:
        if self.schema.kind is not TableKind.TABLE:
            return self._rows(self._contents(), {"__op": pa.array(self.walk.record_op[self.records])})
        if not self.schema.partitioned:
            return self._of_relation(None)
        slots = self.walk.record_slot[self.records]
        used, inverse = np.unique(slots, return_inverse=True)
        relations = [self.walk.slots[slot] for slot in used.tolist()]
        leaves = np.array([leaf_oid(relation, self.schema) or -1 for relation in relations], np.int64)[inverse]
        alike: dict[tuple[tuple[int, ...] | None, tuple[bool, ...]], list[int]] = {}
        for slot, relation in zip(used.tolist(), relations, strict=True):
            identity = tuple(column.in_identity for column in relation.columns)
            alike.setdefault((column_order(relation, self.schema), identity), []).append(slot)
        if len(alike) == 1:
            self.relation = self.walk.slots[int(slots[0])]
            return self._of_relation(leaves)
        places = [np.flatnonzero(np.isin(slots, group)) for group in alike.values()]
        batches = []
        for group, place in zip(alike.values(), places, strict=True):
            records, operation, index = self.records[place], self.operation[place], self.index[place]
            part = _EntryRows(self.walk, self.walk.slots[group[0]], self.schema, records, operation, index)
            part.departures = self.departures
            batches.append(part._of_relation(leaves[place]).rows)
        rows = pa.Table.from_batches(batches).take(np.argsort(np.concatenate(places))).combine_chunks()
        return TableRows(self.schema, rows.to_batches()[0])

    def _of_relation(self, leaves: npt.NDArray[np.int64] | None) -> TableRows:
        """Return the rows; their relations have columns of one order and one identity.

        Args:
            leaves: each row's leaf partition, -1 if it isn't known, of a partitioned table.
        """
        assert self.relation is not None
        rows = len(self.records)
        ops = self.walk.record_op[self.records]
        width = len(self.relation.columns)
        value_at, size = np.empty((width, rows), np.int32), np.empty((width, rows), np.int32)
        order = column_order(self.relation, self.schema)
        before, unchanged = self._walk(ops, value_at, size, order)
        if order is not None:
            value_at, size = value_at[list(order)], size[list(order)]
        if leaves is not None:
            ops, leaves, before = self._departed(ops, leaves, before)
        names = pa.array([column.name for column in self.schema.columns], pa.string())
        columns, exact = self._columns(value_at, size)
        prefix = {
            "__op": pa.array(ops),
            "__unchanged": self._unchanged(size, unchanged, names),
            "__exact": exact,
            "__before": before,
            PARTITION_OID.name: None if leaves is None else pa.array(leaves, PARTITION_OID.type, mask=leaves < 0),
        }
        return self._rows(columns, {name: column for name, column in prefix.items() if column is not None})

    def _rows(self, columns: list[pa.Array], prefix: dict[str, pa.Array]) -> TableRows:
        """Return the rows with these own columns; columns of the prefix that aren't given are null."""
        named = dict(zip(self.schema.column_names, columns, strict=True))
        named |= {"__operation": pa.array(self.operation), "__index": pa.array(self.index), **prefix}
        return TableRows(self.schema, rows_with(append_row_schema(self.schema), named, len(self.records)))

    def _departed(
        self, ops: npt.NDArray[np.uint8], leaves: npt.NDArray[np.int64], before: pa.Array | None
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], pa.Array | None]:
        """Return the ops, leaf partitions and `__before` of rows, with those of leaf partitions that left."""
        leaves = np.where(ops == int(Op.TRUNCATE), -1, leaves)
        if self.departures is None or not len(self.departures):
            return ops, leaves, before
        gone = np.flatnonzero(np.isin(self.records, self.departures))
        ops = ops.copy()
        befores = [None] * len(ops) if before is None else before.to_pylist()
        for row in gone.tolist():
            relation = self.walk.slots[int(self.walk.record_slot[self.records[row]])]
            ops[row], leaves[row] = int(Op.PARTITION_LEFT), relation.oid
            befores[row] = [("partition", relation.qualified_name)]
        return ops, leaves, pa.array(befores, TEXT_BY_COLUMN)

    def _walk(
        self, ops: npt.NDArray[np.uint8], value_at: Ints, size: Ints, order: tuple[int, ...] | None
    ) -> tuple[pa.Array | None, int]:
        """Find the places of values, in the relation's order, which differs from the schema's if `order` isn't None.

        Returns the `__before` column if there are old values, and the number of unchanged values.
        """
        from millstream.codec.pgoutput import _row_messages as machine
        from millstream.codec.pgoutput._columns_to_arrow import Texts, text_map

        assert self.relation is not None
        walk, (width, rows) = self.walk, size.shape
        identity = np.fromiter((column.in_identity for column in self.relation.columns), np.uint8, width)
        updates = int(np.count_nonzero(ops == int(Op.UPDATE)))
        old_at, old_size = np.empty((width, updates), np.int32), np.empty((width, updates), np.int32)
        old_row = np.empty(updates, np.int32)
        olds, unchanged, fault, row = machine.walk_rows(
            walk.buffer,
            walk.run.ends,
            walk.record_op,
            walk.record_at,
            walk.record_message,
            self.records,
            identity,
            value_at,
            size,
            old_at,
            old_size,
            old_row,
        )
        if fault == machine.WRONG_WIDTH:
            raise undecodable(self.relation, f"a row has more or fewer values than its {width} columns")
        if fault != machine.FINE:
            raise _violation(fault, chr(ops[row]))
        if olds == 0:
            return None, unchanged
        offsets = np.empty(rows + 1, np.int32)
        name, at, length = (np.empty(width * olds, np.int32) for _ in range(3))
        if order is not None:
            old_at, old_size = old_at[list(order)], old_size[list(order)]
        found = machine.list_old(old_at, old_size, old_row, olds, rows, offsets, name, at, length)
        names = pa.array([column.name for column in self.schema.columns], pa.string())
        there = np.zeros(rows, np.bool_)
        there[old_row[:olds]] = True
        items = Texts(walk.buffer, at[:found], length[:found], self.relation).strings()
        return text_map(rows, offsets, there, names.take(pa.array(name[:found])), items), unchanged

    def _columns(self, value_at: Ints, size: Ints) -> tuple[list[pa.Array], pa.Array | None]:
        """Return the table's own columns, and `__exact`."""
        from millstream.codec.pgoutput._columns_to_arrow import Texts, exact_map, read_column

        assert self.relation is not None
        columns = []
        exact: list[tuple[int, int, str]] = []
        for number, column in enumerate(self.schema.columns):
            texts = Texts(self.walk.buffer, value_at[number], size[number], self.relation)
            array, inexact = read_column(texts, column.arrow)
            columns.append(array)
            exact.extend((row, number, text) for row, text in inexact.items())
        rows = len(self.records)
        names = [column.name for column in self.schema.columns]
        return columns, exact_map(rows, exact, names) if exact else None

    def _unchanged(self, size: Ints, count: int, names: pa.Array) -> pa.Array | None:
        """Return the `__unchanged` column; None if all values are there."""
        from millstream.codec.pgoutput import _row_messages as machine
        from millstream.codec.pgoutput._columns_to_arrow import validity

        if count == 0:
            return None
        kind, rows = pa.list_(pa.string()), size.shape[1]
        offsets, columns = np.empty(rows + 1, np.int32), np.empty(count, np.int32)
        machine.list_unchanged(size, offsets, columns)
        there = validity(offsets[1:] > offsets[:-1])
        return pa.Array.from_buffers(
            kind, rows, [there, pa.py_buffer(offsets)], children=[names.take(pa.array(columns))]
        )

    def _contents(self) -> list[pa.Array]:
        """Return the own columns of raw rows and logical messages, which are few and have few columns."""
        walk = self.walk
        messages = [walk.run[number] for number in walk.record_message[self.records].tolist()]
        values: list[list[Any]]
        if self.schema.kind is TableKind.MESSAGES:
            values = [[], [], []]
            for data in messages:
                message = parse_message(data, streamed=walk.streamed)
                assert isinstance(message, LogicalMessage)
                for column, value in zip(values, (message.prefix, message.content, message.transactional), strict=True):
                    column.append(value)
        else:
            relations = [walk.slots[slot] for slot in walk.record_slot[self.records].tolist()]
            changes = [data[:1] + data[5:] if walk.streamed else data for data in messages]
            values = [[encode_raw(*pair) for pair in zip(relations, changes, strict=True)]]
        return [pa.array(texts, column.arrow) for texts, column in zip(values, self.schema.columns, strict=True)]


def operations_batch(transactions: npt.NDArray[np.int64], source: SourceId) -> pa.RecordBatch:
    """Return operations in columns; columns that only applications set are null.

    The rows of `transactions` are kind, commit LSN, end LSN, xid, and time since 1970 in µs.
    """
    kind, commit_lsn, end_lsn, xid, time = transactions
    count = len(kind)
    alone = kind == int(OperationKind.MESSAGE)
    columns: dict[str, Any] = {
        "kind": pa.array(kind.astype(np.uint8)),
        "source": pa.array(np.full(count, source, np.int32)),
        "commit_lsn": pa.array(commit_lsn),
        "commit_end_lsn": pa.array(end_lsn),
        "xid": pa.array(xid, mask=alone),
        "commit_ts": pa.array(time, mask=alone).view(OPERATION_SCHEMA.field("commit_ts").type),
    }
    return rows_with(OPERATION_SCHEMA, columns, count)


def warm() -> None:
    """Compile all machine code, or load it: several seconds the first time, 0.3 s later."""
    from millstream.codec.pgoutput._framing import split_copy_data, split_copy_rows

    types = (
        (20, -1, b"1"),
        (25, -1, b"a"),
        (1700, ((3 << 16) | 1) + 4, b"1.5"),
        (1184, -1, b"2024-01-01 00:00:00+00"),
        (1082, -1, b"2024-01-01"),
        (16, -1, b"t"),
        (17, -1, b"\\x00"),
        (701, -1, b"1.5"),
        (25, -1, None),
    )
    names = (bytes([ord("a") + number, 0]) for number in range(len(types)))
    columns = b"".join(
        struct.pack(">B2sIi", 1, name, oid, modifier) for name, (oid, modifier, _) in zip(names, types, strict=True)
    )
    relation = b"R" + struct.pack(">I", 1) + b"s\0t\0d" + struct.pack(">H", len(types)) + columns
    values = b"".join(b"u" if text is None else struct.pack(">cI", b"t", len(text)) + text for _, _, text in types)
    row = struct.pack(">H", len(types)) + values
    messages = [
        b"B" + struct.pack(">QqI", 1, 0, 1),
        relation,
        b"U" + struct.pack(">I", 1) + b"K" + row + b"N" + row,
        b"C" + struct.pack(">BQQq", 0, 1, 2, 0),
    ]
    decode_transactions(MessageRun.of(messages), _WarmDirectory(), RelationCache())
    places = np.empty(1, np.int64)
    for split in (split_copy_data, split_copy_rows):
        split(MessageRun.of([b"d"]).buffer, 0, 1, places, places.copy(), np.empty(1, np.uint8))


class _WarmDirectory:
    """A directory that captures every table."""

    source = SourceId(0)

    def schema_for(self, relation: Relation) -> TableSchema:
        from millstream.codec.pgoutput.relations import table_schema

        return table_schema(relation, source=self.source)

    def truncates_all(self, schema: TableSchema, leaves: frozenset[int]) -> bool:
        del schema, leaves
        return False

    def messages_schema(self) -> None:
        return None
