"""A home whose log a test writes by hand: transactions of chosen records, without PostgreSQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from millstream.catalog import Catalog, TableState
from millstream.model.ids import SchemaVersion, SourceId, StreamId, TableId
from millstream.model.operations import FIRST_SHARD, OPERATION_SCHEMA, OperationKind, TableRows, WriteOps
from millstream.model.positions import Lsn, Seq
from millstream.model.records import Op, append_row_schema
from millstream.model.schema import Column, ReplicaIdentity, TableSchema
from millstream.wal.reader import StreamReader
from millstream.wal.writing.writer import LogOptions, LogWriter


@dataclass(frozen=True)
class Change:
    """One record to append."""

    schema: TableSchema
    op: Op
    row: Mapping[str, Any] = field(default_factory=dict)
    before: Mapping[str, str | None] | None = None
    unchanged: Sequence[str] | None = None


def insert(schema: TableSchema, **row: Any) -> Change:
    return Change(schema, Op.CREATE, row)


def update(schema: TableSchema, **row: Any) -> Change:
    return Change(schema, Op.UPDATE, row)


def delete(schema: TableSchema, **key: Any) -> Change:
    return Change(schema, Op.DELETE, key)


class Home:
    """A home folder with a catalog and the writer of one stream, `shop`."""

    def __init__(self, path: Path, options: LogOptions | None = None) -> None:
        self.path = path
        self.catalog = Catalog(path / "data" / "catalog.db")
        self.stream: StreamId = self.catalog.resolve_stream("shop")
        self.source: SourceId = self.catalog.resolve_source(self.stream, 7, "shop", 1)
        self.wal = path / "data" / "wal" / "shop"
        _, epoch = self.catalog.register_writer(self.stream)
        self.writer = LogWriter.open(
            str(self.wal),
            stream=self.stream,
            shards=[FIRST_SHARD],
            epoch=epoch,
            reservations=self.catalog.reservations(self.stream),
            options=LogOptions() if options is None else options,
        )
        self._lsn = 1000
        self._oid = 16384

    def close(self) -> None:
        self.writer.close()
        self.catalog.close()

    @property
    def last_lsn(self) -> int:
        """LSN of the last transaction; the next ones follow in steps of a hundred."""
        return self._lsn

    @property
    def log(self) -> StreamReader:
        return StreamReader(str(self.wal))

    def table(
        self,
        name: str,
        /,
        *,
        key: Sequence[str] = ("id",),
        state: TableState = TableState.STREAMING,
        **columns: pa.DataType,
    ) -> TableSchema:
        """Make a table, its copy complete unless `state` says otherwise."""
        self._oid += 1
        namespace, _, short = name.rpartition(".")
        row = self.catalog.table_for(self.stream, self.source, self._oid, namespace or "public", short)
        self.catalog.set_state(row.id, state)
        return self._put(
            TableSchema(
                table_id=TableId(row.id),
                version=SchemaVersion(0),
                source=self.source,
                namespace=namespace or "public",
                name=short,
                columns=tuple(Column(column, type_) for column, type_ in columns.items()),
                identity=tuple(key),
                key=tuple(key),
                replica_identity=ReplicaIdentity.DEFAULT,
                relation_oid=self._oid,
            )
        )

    def add_column(self, schema: TableSchema, name: str, type_: pa.DataType) -> TableSchema:
        return self._put(replace(schema, columns=(*schema.columns, Column(name, type_))))

    def _put(self, schema: TableSchema) -> TableSchema:
        return self.catalog.put_schema(self.stream, schema)

    def commit(self, *changes: Change) -> Seq:
        """Append one transaction; return the log's end after it."""
        return self.commits([changes])

    def commits(self, transactions: Sequence[Sequence[Change]]) -> Seq:
        """Append many transactions at once."""
        self.writer.append(self.ops(transactions))
        return self.writer.persisted_upto()

    def ops(self, transactions: Sequence[Sequence[Change]]) -> WriteOps:
        operations = []
        by_schema: dict[tuple[int, int], tuple[TableSchema, list[dict[str, Any]]]] = {}
        for ordinal, changes in enumerate(transactions):
            self._lsn += 100
            operations.append(
                {
                    "kind": int(OperationKind.TRANSACTION),
                    "source": int(self.source),
                    "commit_lsn": self._lsn,
                    "commit_end_lsn": self._lsn + 50,
                    "xid": self._lsn,
                    "commit_ts": 1_700_000_000_000_000 + self._lsn,
                }
            )
            for index, change in enumerate(changes):
                _, rows = by_schema.setdefault((change.schema.table_id, change.schema.version), (change.schema, []))
                rows.append(
                    {
                        "__operation": ordinal,
                        "__index": index,
                        "__op": int(change.op),
                        "__unchanged": None if change.unchanged is None else list(change.unchanged),
                        "__before": None if change.before is None else list(change.before.items()),
                        **change.row,
                    }
                )
        tables = tuple(
            TableRows(schema, pa.RecordBatch.from_pylist(rows, append_row_schema(schema)), FIRST_SHARD)
            for schema, rows in by_schema.values()
        )
        batch = pa.RecordBatch.from_pylist(operations, OPERATION_SCHEMA)
        return WriteOps(batch, tables, {self.source: Lsn(self._lsn + 50)})
