"""Appends rows of applications to a stream: tables and columns are made as they are needed, and each call is one operation."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from millstream.errors import InvalidValue
from millstream.ingest.schemas import WriteRules, fitted, grown
from millstream.ingest.undisturbed import undisturbed
from millstream.model.ids import ShardId, SourceId, StreamId, WriterId
from millstream.model.names import parse_qualified_name
from millstream.model.operations import OPERATION_SCHEMA, Ack, Appended, OperationKind, TableRows, WriteOps
from millstream.model.positions import Seq, StreamToken, short_stream_id
from millstream.model.records import LOG_ROW_PREFIX, Op, append_row_schema
from millstream.model.schema import TableSchema

if TYPE_CHECKING:
    from millstream.catalog import Catalog
    from millstream.wal.writer import LogWriter


class Appender:
    """Takes applications' rows into one stream.

    Args:
        catalog: knows the tables.
        stream: the stream.
        log: its writer, or this process's one of several.
        writer: that one's number.
        rules_of: what is configured for a table, by its schema and name.
        place: where a table's rows go: the entries of their operations, by shard and partition.
        home_shard: the shard that the catalog notes for a table that is new, by `schema.name`.

    Concurrency: any number of threads and event loops.
    """

    def __init__(
        self,
        catalog: Catalog,
        stream: StreamId,
        log: LogWriter,
        *,
        writer: WriterId,
        rules_of: Callable[[str, str], WriteRules],
        place: Callable[[TableSchema, pa.RecordBatch], tuple[TableRows, ...]],
        home_shard: Callable[[str], ShardId],
    ) -> None:
        self._catalog = catalog
        self._stream = stream
        self._log = log
        self._writer = writer
        self._rules_of = rules_of
        self._place = place
        self._home_shard = home_shard
        self._schemas: dict[tuple[str, str], TableSchema] = {}
        """The newest that this process has seen."""

    def append(self, table: str, rows: pa.Table, *, deadline_s: float | None) -> Appended:
        """Append one operation: rows of one table, each created anew. Returns once it is durable.

        Args:
            table: `schema.table`, quoted where it must be; without a schema it is of `public`.
            rows: as `table_of` gives them.
            deadline_s: how long to wait for room in the writer's queue.

        Raises:
            UsageError: the text is no table's name.
            InvalidValue, UnknownTable, UnknownColumn, KeyChanged, TableCaptured, RowsTooLarge: nothing was appended.
            Overloaded, DiskFull, AppendOutcomeUnknown, WriterClosed, StaleEpoch: as `ports.LogAppender`.
        """
        ops = self.operation(table, rows)
        return self._appended(self._log.append(ops, deadline_s=deadline_s))

    async def append_async(self, ops: WriteOps, *, deadline_s: float | None) -> Appended:
        """Append what `operation` has made, as `append` does, for a task."""
        return self._appended(await self._log.append_async(ops, deadline_s=deadline_s))

    def knows(self, table: str, rows: pa.Table) -> bool:
        """Whether `operation` needs nothing of the catalog: it is computing alone then."""
        name = parse_qualified_name(table)
        known = self._schemas.get(name)
        return known is not None and grown(known, rows.schema, self._rules_of(*name)) is known

    def operation(self, table: str, rows: pa.Table) -> WriteOps:
        """The operation of an append; tables and columns that are new are durable in the catalog when it returns. Raises as `append`."""
        if not rows.num_rows:
            raise InvalidValue("an append needs at least one row", hint="Don't call it where there is none.")
        namespace, name = parse_qualified_name(table)
        rules = self._rules_of(namespace, name)
        shard = self._home_shard(f"{namespace}.{name}")
        known = self._schemas.get((namespace, name))
        if known is None or grown(known, rows.schema, rules) is not known:

            def grow(newest: TableSchema) -> TableSchema:
                wanted = grown(newest, rows.schema, rules)
                fitted(wanted, rows)  # what doesn't fit makes no table and no column
                return wanted

            known = undisturbed(
                lambda: self._catalog.application_table(self._stream, namespace, name, shard=shard, grow=grow)
            )
            self._schemas[namespace, name] = known
        count = rows.num_rows
        facts: dict[str, pa.Array] = {
            "__operation": pa.array(np.zeros(count, dtype=np.int32)),
            "__index": pa.array(np.arange(count, dtype=np.int64)),
            "__op": pa.array(np.full(count, int(Op.CREATE), dtype=np.uint8)),
        }
        prefix = [facts["__operation"], *(facts.get(f.name, pa.nulls(count, f.type)) for f in LOG_ROW_PREFIX[1:])]
        batch = pa.RecordBatch.from_arrays([*prefix, *fitted(known, rows)], schema=append_row_schema(known))
        return WriteOps(_operation(), self._place(known, batch))

    def _appended(self, ack: Ack) -> Appended:
        last, shown = ack.seqs.last, self._log.persisted_upto()
        if shown >= last:
            token = StreamToken.scalar(self._stream, last)
        else:
            # Others are behind: who reads by vectors needn't wait for them.
            token = StreamToken(short_stream_id(self._stream), Seq(shown), {self._writer: last})
        return Appended(token, ack.seqs, dict(ack.offsets))


def _operation() -> pa.RecordBatch:
    facts: dict[str, Any] = {
        "kind": int(OperationKind.APPEND),
        "source": int(SourceId(0)),
        "commit_ts": time.time_ns() // 1000,
    }
    columns = [pa.array([facts.get(field.name)], field.type) for field in OPERATION_SCHEMA]
    return pa.RecordBatch.from_arrays(columns, schema=OPERATION_SCHEMA)
