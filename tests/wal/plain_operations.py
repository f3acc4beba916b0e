"""Operations for tests of the log, from plain values, and reservations in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import pyarrow as pa

from millstream.errors import StaleEpoch
from millstream.model.ids import Epoch, SchemaVersion, ShardId, SourceId, TableId
from millstream.model.operations import OPERATION_SCHEMA, OperationKind, SpilledOp, TableRows, WriteOps
from millstream.model.positions import Lsn, Seq
from millstream.model.records import Op, append_row_schema
from millstream.model.schema import Column, TableSchema

SOURCE: Final = SourceId(1)


class MemoryReservations:
    """`ports.SeqReservations` that outlive a writer, not the process."""

    def __init__(self) -> None:
        self._reserved = Seq(0)
        self.epoch = Epoch(0)
        """The newest writer's; older ones are refused."""

    def reserved(self) -> Seq:
        """Return the greatest number ever reserved."""
        return self._reserved

    def reserve_to(self, seq: Seq, *, epoch: Epoch) -> None:
        """Reserve, only upward."""
        if epoch < self.epoch:
            raise StaleEpoch(f"epoch {epoch} is older than {self.epoch}")
        self._reserved = max(self._reserved, seq)


def plain_table(table_id: int, name: str | None = None, *, version: int = 1) -> TableSchema:
    """Return a table `(id bigint, text text)` with a key; each version has one column more."""
    more = [Column(f"extra{number}", pa.int64()) for number in range(1, version)]
    return TableSchema(
        TableId(table_id),
        SchemaVersion(version),
        SOURCE,
        "public",
        name or f"table{table_id}",
        (Column("id", pa.int64()), Column("text", pa.string()), *more),
        ("id",),
        ("id",),
    )


def plain_rows(schema: TableSchema, rows: Sequence[tuple[int, int, str]]) -> pa.RecordBatch:
    """Return rows to append from (operation, index, text); `id` is the index."""
    target = append_row_schema(schema)
    columns: dict[str, Sequence[object]] = {
        "__operation": [operation for operation, _, _ in rows],
        "__index": [index for _, index, _ in rows],
        "__op": [int(Op.CREATE)] * len(rows),
        "id": [index for _, index, _ in rows],
        "text": [text for _, _, text in rows],
    }
    nothing = [None] * len(rows)
    return pa.record_batch(
        [pa.array(columns.get(field.name, nothing), type=field.type) for field in target], schema=target
    )


def plain_operations(xids: Sequence[int]) -> pa.RecordBatch:
    """Return transactions with these xids; LSN and time follow from them."""
    moments = [1_700_000_000_000_000 + xid for xid in xids]
    columns: dict[str, Sequence[object]] = {
        "kind": [int(OperationKind.TRANSACTION)] * len(xids),
        "source": [int(SOURCE)] * len(xids),
        "commit_lsn": [10 * xid for xid in xids],
        "commit_end_lsn": [10 * xid + 8 for xid in xids],
        "xid": list(xids),
        "commit_ts": moments,
    }
    nothing = [None] * len(xids)
    return pa.record_batch(
        [pa.array(columns.get(field.name, nothing), type=field.type) for field in OPERATION_SCHEMA],
        schema=OPERATION_SCHEMA,
    )


def plain_ops(
    operations: Mapping[int, Sequence[tuple[TableSchema, int, str]]], *, shard_of: Mapping[int, int] | None = None
) -> WriteOps:
    """Return transactions of rows.

    Args:
        operations: by xid, in order, the transaction's rows as (table, count, text): that many
            consecutive rows.
        shard_of: the shard of each table id; 0 for others.
    """
    rows: dict[tuple[TableId, SchemaVersion], list[tuple[int, int, str]]] = {}
    schemas: dict[tuple[TableId, SchemaVersion], TableSchema] = {}
    for ordinal, pieces in enumerate(operations.values()):
        index = 0
        for schema, count, text in pieces:
            key = (schema.table_id, schema.version)
            schemas[key] = schema
            rows.setdefault(key, []).extend((ordinal, index + step, text) for step in range(count))
            index += count
    shards = shard_of or {}
    tables = tuple(
        TableRows(schemas[key], plain_rows(schemas[key], found), ShardId(shards.get(key[0], 0)))
        for key, found in rows.items()
    )
    xids = list(operations)
    return WriteOps(plain_operations(xids), tables, {SOURCE: Lsn(10 * xids[-1] + 8)})


def plain_spilled(
    xid: int, chunks: Sequence[Sequence[tuple[TableSchema, int, str]]], *, shard_of: Mapping[int, int] | None = None
) -> SpilledOp:
    """Return one large transaction: chunks of (table, count, text)."""
    shards = shard_of or {}
    counts: dict[tuple[ShardId, TableId], int] = {}
    made: list[tuple[TableRows, ...]] = []
    index = 0
    for chunk in chunks:
        tables = []
        for schema, count, text in chunk:
            shard = ShardId(shards.get(schema.table_id, 0))
            counts[shard, schema.table_id] = counts.get((shard, schema.table_id), 0) + count
            rows = plain_rows(schema, [(0, index + step, text) for step in range(count)])
            tables.append(TableRows(schema, rows, shard))
            index += count
        made.append(tuple(tables))

    def read_chunks() -> Iterator[tuple[TableRows, ...]]:
        return iter(made)

    return SpilledOp(plain_operations([xid]), counts, read_chunks, {SOURCE: Lsn(10 * xid + 8)})
