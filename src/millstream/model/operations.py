"""Operations: the writes of one transaction, one copy chunk or one request, on their way into the log.

A hundred thousand one-row transactions a second leave no room for a Python object each, so
operations travel in columns. `WriteOps` holds many consecutive whole operations; `SpilledOp` holds
one that is too large for memory. Both are immutable and can be read again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Final, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import MillstreamError, error_of
from millstream.model.ids import ShardId, SourceId, TableId
from millstream.model.positions import Lsn, Offset, Seq, SeqRange, StreamToken
from millstream.model.records import INSTANT, Op, append_row_schema, log_row_prefix
from millstream.model.schema import TableSchema
from millstream.model.writes import NO_DIGEST, WriteId

FIRST_SHARD: Final = ShardId(0)
_COLUMN_BYTES: Final = 1024
"""Bytes that a column of a batch holds in addition to its values, measured: most of a small batch."""


class OperationKind(IntEnum):
    """The kind of an operation."""

    TRANSACTION = 1
    COPY_CHUNK = 2
    APPEND = 3
    MESSAGE = 4
    """A logical message outside of any transaction."""


OPERATION_SCHEMA: Final = pa.schema(
    [
        pa.field("kind", pa.uint8(), nullable=False),
        pa.field("source", pa.int32(), nullable=False),
        pa.field("commit_lsn", pa.int64()),
        pa.field("commit_end_lsn", pa.int64()),
        pa.field("xid", pa.int64()),
        pa.field("commit_ts", INSTANT),
        pa.field("chunk_id", pa.string()),
        pa.field("session", pa.string()),
        pa.field("session_number", pa.int64()),
        pa.field("idempotency_key", pa.string()),
        pa.field("trace_id", pa.string()),
    ]
)
"""One row an operation.

A copy chunk's `commit_lsn` is the insert LSN read right after its snapshot, and its `commit_ts`
that moment. Its records show the LSN and the date, and no commit time.
"""

ROWS_DIGEST: Final = "commit_end_lsn"
"""The column that holds the digest of an append's rows, if the append has a session or a key.

An append has no commit, and a column of its own would cost every frame 64 bytes (`docs/decisions`, 43).
"""


@dataclass(frozen=True, slots=True)
class TableRows:
    """Rows of one table and schema version for one shard, in `append_row_schema`.

    They are sorted by (`__operation`, `__index`).
    """

    schema: TableSchema
    rows: pa.RecordBatch
    shard: ShardId = FIRST_SHARD
    partition: str | None = None
    """The partition of the table that all rows belong to; None if the table has none."""
    era: int = 0
    """Number, within the stream's life, of the hash ring that placed the rows; 0 if none that changes did."""
    sink: str | None = None
    """Name of the sink that takes the rows instead of a shard; the log's writer never gets such rows."""


@dataclass(frozen=True, slots=True)
class WriteOps:
    """Consecutive whole operations in columns.

    `operations` has one row an operation, in order; every operation has at least one row in
    `tables`. A table may have several entries, one for each schema version, shard or partition: a
    key's later rows stand in later entries.

    `reached` is, for each source, the commit *end* LSN up to which everything is in this or an
    earlier append. `behind` is what the log must have reached before this append. If an earlier
    append failed, this one is rejected.
    """

    operations: pa.RecordBatch
    tables: tuple[TableRows, ...]
    reached: Mapping[SourceId, Lsn] = field(default_factory=dict)
    behind: Mapping[SourceId, Lsn] = field(default_factory=dict)
    is_keyed: bool = False
    """Whether the log's writer looks up the operations' write ids (`writes_in`). A write already in the
    log is then left out, and gets its first answer again."""

    @property
    def size_bytes(self) -> int:
        """Memory in bytes that the columns hold.

        A slice counts everything it was cut from, and `nbytes` takes a hundred times as long.
        """
        batches = [self.operations, *(table.rows for table in self.tables)]
        return int(sum(batch.get_total_buffer_size() + batch.num_columns * _COLUMN_BYTES for batch in batches))

    @property
    def row_count(self) -> int:
        """Records in all tables."""
        return int(sum(t.rows.num_rows for t in self.tables))

    def rows_by_operation(self, *, shard: ShardId | None = None, sink: str | None = None) -> list[int]:
        """Return how many rows each operation has in the log, on one of the log's shards, or for a sink."""
        count = self.operations.num_rows
        found = np.zeros(count, dtype=np.int64)
        for table in self.tables:
            if table.sink == sink and shard in {None, table.shard}:
                found += np.bincount(table.rows.column(0).to_numpy(), minlength=count)
        counts: list[int] = found.tolist()
        return counts

    def select(self, numbers: Sequence[int]) -> WriteOps:
        """Return some of the operations; `numbers` are their indexes, ascending."""
        count = self.operations.num_rows
        if len(numbers) == count:
            return self
        keep = np.zeros(count, dtype=bool)
        keep[list(numbers)] = True
        renumbered = pa.array((np.cumsum(keep) - 1).astype(np.int32))
        tables = []
        for table in self.tables:
            rows = table.rows.filter(pc.take(pa.array(keep), table.rows.column(0)))
            if rows.num_rows:
                rows = rows.set_column(0, rows.schema.field(0), pc.take(renumbered, rows.column(0)))
                tables.append(replace(table, rows=rows))
        return replace(self, operations=self.operations.filter(pa.array(keep)), tables=tuple(tables))

    def split(self) -> list[WriteOps]:
        """Return each operation alone; the sources' positions that several share are given to none of them."""
        count = self.operations.num_rows
        if count == 1:
            return [self]
        tables: list[list[TableRows]] = [[] for _ in range(count)]
        for table in self.tables:
            starts = np.searchsorted(table.rows.column(0).to_numpy(), np.arange(count + 1)).tolist()
            for number, (start, end) in enumerate(pairwise(starts)):
                if start < end:
                    rows = table.rows.slice(start, end - start)
                    first = pa.array(np.zeros(end - start, dtype=np.int32))
                    tables[number].append(replace(table, rows=rows.set_column(0, rows.schema.field(0), first)))
        return [WriteOps(self.operations.slice(number, 1), tuple(tables[number])) for number in range(count)]

    def by_shard(self) -> dict[ShardId, WriteOps]:
        """Return the part of the operations on each shard, in order of the shards' first rows."""
        tables: dict[ShardId, list[TableRows]] = {}
        for table in self.tables:
            if table.rows.num_rows:
                tables.setdefault(table.shard, []).append(table)
        return {shard: replace(self, tables=tuple(own)) for shard, own in tables.items()}

    def split_ack(self, ack: Ack) -> list[Ack]:
        """Return each operation's part of the ack of all of them.

        Numbers and, on every shard, offsets go operation by operation; each operation has as many as
        it has rows.
        """
        if self.operations.num_rows == 1:
            return [ack]
        counts = self.rows_by_operation()
        firsts = accumulate(counts, initial=int(ack.seqs.first))
        seqs = [SeqRange(Seq(first), count) for first, count in zip(firsts, counts, strict=False)]
        spans: list[dict[ShardId, tuple[Offset, Offset]]] = [{} for _ in counts]
        for shard, (first, _) in ack.offsets.items():
            on_shard = counts if len(ack.offsets) == 1 else self.rows_by_operation(shard=shard)
            for number, (start, end) in enumerate(pairwise(accumulate(on_shard, initial=int(first)))):
                if start < end:
                    spans[number][shard] = Offset(start), Offset(end)
        return [Ack(offsets, numbers) for offsets, numbers in zip(spans, seqs, strict=True)]


@dataclass(frozen=True, slots=True)
class SpilledOp:
    """One operation that is too large for memory; its rows lie elsewhere and can be read repeatedly.

    `chunks()` starts over at each call and yields pieces of bounded size. The rows' `__index`
    continues from the previous piece, and `__operation` is always 0. `counts` holds the exact
    number of rows of every (shard, table).
    """

    operation: pa.RecordBatch
    counts: Mapping[tuple[ShardId, TableId], int]
    chunks: Callable[[], Iterator[tuple[TableRows, ...]]]
    reached: Mapping[SourceId, Lsn] = field(default_factory=dict)
    size_bytes: int = 0
    behind: Mapping[SourceId, Lsn] = field(default_factory=dict)

    @property
    def row_count(self) -> int:
        """Records in all tables."""
        return sum(self.counts.values())


def writes_in(operations: pa.RecordBatch) -> list[tuple[WriteId, int] | None]:
    """Return the write id of each operation, with the digest of its rows; None for an operation without one."""
    sessions, keys = operations.column("session"), operations.column("idempotency_key")
    if sessions.null_count + keys.null_count == 2 * operations.num_rows:
        return [None] * operations.num_rows
    names = ("kind", "session", "session_number", "idempotency_key", ROWS_DIGEST)
    writes: list[tuple[WriteId, int] | None] = []
    for kind, session, number, key, digest in zip(*(operations.column(n).to_pylist() for n in names), strict=True):
        if kind != OperationKind.APPEND or (key is None and (session is None or number is None)):
            writes.append(None)
        else:
            write_id = WriteId(session, number) if key is None else WriteId(key=key)
            writes.append((write_id, NO_DIGEST if digest is None else digest))
    return writes


Submitted: TypeAlias = WriteOps | SpilledOp
"""The forms of operations that the log's writer takes."""


def append_operations(count: int, **columns: pa.Array) -> pa.RecordBatch:
    """Return operations of kind `APPEND`, with the given columns of `OPERATION_SCHEMA`; the others are null."""
    operations = list(_append_columns(count))
    for name, values in columns.items():
        operations[OPERATION_SCHEMA.get_field_index(name)] = values
    return pa.RecordBatch.from_arrays(operations, schema=OPERATION_SCHEMA)


@lru_cache(maxsize=64)  # batches have few sizes, and some thousand requests at most
def _append_columns(count: int) -> tuple[pa.Array, ...]:
    facts = {
        "kind": pa.array(np.full(count, int(OperationKind.APPEND), dtype=np.uint8)),
        "source": pa.array(np.full(count, int(SourceId(0)), dtype=np.int32)),
    }
    return tuple(facts[f.name] if f.name in facts else pa.nulls(count, f.type) for f in OPERATION_SCHEMA)


def append_rows(
    schema: TableSchema, columns: Sequence[pa.Array], counts: Sequence[int], *, unchanged: pa.Array | None = None
) -> pa.RecordBatch:
    """Return new rows of a table in `append_row_schema`.

    Args:
        unchanged: each row's columns that it says nothing about; None: none.
    """
    sizes = np.array(counts, dtype=np.int64)
    total = int(sizes.sum())
    facts = {
        "__index": pa.array(np.arange(total, dtype=np.int64) - np.repeat(np.cumsum(sizes) - sizes, sizes)),
        "__op": pa.array(np.full(total, int(Op.CREATE), dtype=np.uint8)),
    }
    if unchanged is not None:
        facts["__unchanged"] = unchanged
    prefix = [facts[f.name] if f.name in facts else pa.nulls(total, f.type) for f in log_row_prefix(schema)[1:]]
    operations = pa.array(np.repeat(np.arange(len(counts), dtype=np.int32), sizes))
    return pa.RecordBatch.from_arrays([operations, *prefix, *columns], schema=append_row_schema(schema))


def one_after_another(tables: Sequence[Sequence[TableRows]], count: int) -> tuple[TableRows, ...]:
    """Return the entries of several tables as those of the same operations, each table's rows after the last one's.

    Args:
        tables: each table's entries, with indexes from 0 in each operation, in the log and in each sink.
    """
    if len(tables) == 1:
        return tuple(tables[0])
    done: dict[str | None, npt.NDArray[np.int64]] = {}
    """For the log (None) and each sink, the number of each operation's rows in the tables before."""
    joined: list[TableRows] = []
    for entries in tables:
        own: dict[str | None, npt.NDArray[np.int64]] = {}
        for entry in entries:
            operation = entry.rows.column(0).to_numpy()
            before = done.get(entry.sink)
            rows = entry.rows
            if before is not None:
                at = rows.schema.get_field_index("__index")
                index = rows.column(at).to_numpy() + before[operation]
                rows = rows.set_column(at, rows.schema.field(at), pa.array(index))
            joined.append(replace(entry, rows=rows))
            counts = np.bincount(operation, minlength=count)
            own[entry.sink] = own[entry.sink] + counts if entry.sink in own else counts
        for sink, counts in own.items():
            done[sink] = done[sink] + counts if sink in done else counts
    return tuple(joined)


@dataclass(frozen=True, slots=True)
class Ack:
    """The result for a caller whose operations are durable on all their shards."""

    offsets: Mapping[ShardId, tuple[Offset, Offset]]
    """The half-open range of offsets on each shard touched."""
    seqs: SeqRange
    """The numbers given to the call's records, over all its tables."""
    placed: WriteOps | None = None
    """The operations as they were written, if their shards had changed since they were submitted; None if not."""
    each: tuple[Outcome, ...] = ()
    """For `WriteOps.is_keyed`, the outcome of each operation; `offsets` and `seqs` cover those appended now."""
    duplicate: bool = False
    """Whether the log already had the operation: nothing was appended, and this is the first append's ack."""

    @property
    def is_elsewhere(self) -> bool:
        """Whether another region's log has the operation: then it has no numbers here."""
        return self.duplicate and not self.offsets and self.seqs.count > 0


Outcome: TypeAlias = Ack | MillstreamError
"""The outcome of one operation among others."""


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A row that doesn't fit its table, while the other rows of its request were kept."""

    row: int
    """Its index in the request, from 0."""
    code: str
    """The error's code, as in `millstream.errors`."""
    reason: str
    column: str | None = None
    """The column at fault, if there is one."""

    def as_dict(self) -> dict[str, object]:
        """Return JSON-able facts."""
        return {"row": self.row, "code": self.code, "reason": self.reason, "column": self.column}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Self:
        """Return the value that `as_dict` was called on."""
        return cls(int(facts["row"]), str(facts["code"]), str(facts["reason"]), facts.get("column"))


def all_rejected(before: Sequence[RejectedRow], later: Sequence[RejectedRow]) -> tuple[RejectedRow, ...]:
    """Return all rejected rows of a request, by their places in it.

    Args:
        before: the rows left out before the others were appended, by their places, ascending.
        later: rows rejected by the writer, by their places among those others.
    """
    if not before:
        return tuple(later)
    kept_before = [row.row - number for number, row in enumerate(before)]
    named = (replace(row, row=row.row + bisect_right(kept_before, row.row)) for row in later)
    return tuple(sorted((*before, *named), key=lambda row: row.row))


@dataclass(frozen=True, slots=True)
class TableAppended:
    """One table's part of an append."""

    first: Seq | None
    """Number of its first row in the stream; the table's others follow it. None if no row was kept."""
    rows: int
    """Number of rows that were kept."""
    rejected: tuple[RejectedRow, ...] = ()
    """Rows that weren't appended, by their places among the table's rows."""
    refused: MillstreamError | None = None
    """Why the table took no row at all, if the caller asked to keep the other tables' rows."""

    def as_dict(self) -> dict[str, object]:
        """Return JSON-able facts."""
        return {
            "first": None if self.first is None else int(self.first),
            "rows": self.rows,
            "rejected": [row.as_dict() for row in self.rejected],
            **({} if self.refused is None else {"refused": self.refused.as_dict()}),
        }

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Self:
        """Return the value that `as_dict` was called on."""
        first, refused = facts["first"], facts.get("refused")
        rejected = tuple(RejectedRow.from_dict(row) for row in facts["rejected"])
        number = None if first is None else Seq(int(first))
        return cls(number, int(facts["rows"]), rejected, None if refused is None else error_of(refused))


@dataclass(frozen=True, slots=True)
class AppendedTables:
    """The result for an application whose rows of several tables are durable, as one operation."""

    token: StreamToken
    """A reader that has read up to it has seen all these rows. A vector token if other writers are behind."""
    duplicate: bool
    """Whether an earlier call with the same `WriteId` made it durable: nothing was appended, and this
    is that call's result."""
    tables: Mapping[str, TableAppended]
    """Each table's part, by its full name, in the order of the call."""

    @classmethod
    def of(cls, appended: Appended | AppendedTables, rejected: Mapping[str, Sequence[RejectedRow]]) -> Self:
        """Return the result of a call over several tables.

        Args:
            appended: the result of appending its valid rows.
            rejected: each table's rows left out before, by its full name, in the order of the call.
        """
        tables = {}
        for name, before in rejected.items():
            part = appended.tables.get(name) or TableAppended(None, 0)
            tables[name] = TableAppended(part.first, part.rows, all_rejected(before, part.rejected))
        return cls(appended.token, appended.duplicate, tables)

    @property
    def row_count(self) -> int:
        """Number of rows appended."""
        return sum(table.rows for table in self.tables.values())

    def as_dict(self) -> dict[str, object]:
        """Return JSON-able facts."""
        tables = {name: table.as_dict() for name, table in self.tables.items()}
        return {"token": str(self.token), "duplicate": self.duplicate, "tables": tables}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Self:
        """Return the value that `as_dict` was called on."""
        tables = {str(name): TableAppended.from_dict(table) for name, table in facts["tables"].items()}
        return cls(StreamToken.parse(facts["token"]), bool(facts["duplicate"]), tables)


@dataclass(frozen=True, slots=True)
class Appended:
    """The result for an application whose rows are durable."""

    token: StreamToken
    """A reader that has read up to it has seen these rows. A vector token if other writers are behind."""
    seqs: SeqRange
    """The rows' numbers in the stream, in order."""
    offsets: Mapping[ShardId, tuple[Offset, Offset]]
    """The half-open range of offsets on each shard touched."""
    duplicate: bool = False
    """Whether an earlier call with the same `WriteId` made it durable: nothing was appended, and this
    is that call's result."""
    rejected: tuple[RejectedRow, ...] = ()
    """Rows that weren't appended, if the caller asked to keep the valid ones."""
    buffer: str | None = None
    """The write buffer that holds the rows, at its own `offsets`, until a stream takes them into its
    log. Until then they have no numbers: `seqs` begins at 0, and the token is the stream's start."""
    tables: Mapping[str, TableAppended] = field(default_factory=dict, compare=False)
    """Each table's part, by its full name, in the order of the call."""

    @property
    def row_count(self) -> int:
        """Number of rows appended."""
        return self.seqs.count

    def with_rejected(self, before: Sequence[RejectedRow]) -> Appended:
        """Return the result for a caller some of whose rows were left out before the others were appended."""
        return replace(self, rejected=all_rejected(before, self.rejected)) if before else self

    def as_dict(self) -> dict[str, object]:
        """Return JSON-able facts."""
        return {
            "token": str(self.token),
            "first": int(self.seqs.first),
            "rows": self.seqs.count,
            "offsets": {str(int(shard)): [int(start), int(end)] for shard, (start, end) in self.offsets.items()},
            "duplicate": self.duplicate,
            "rejected": [row.as_dict() for row in self.rejected],
            "buffer": self.buffer,
        }

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Self:
        """Return the value that `as_dict` was called on."""
        offsets = {ShardId(int(s)): (Offset(start), Offset(end)) for s, (start, end) in facts["offsets"].items()}
        rejected = tuple(RejectedRow.from_dict(row) for row in facts.get("rejected", ()))
        numbers = SeqRange(Seq(facts["first"]), facts["rows"])
        token, duplicate = StreamToken.parse(facts["token"]), bool(facts.get("duplicate"))
        tables = {name: TableAppended.from_dict(table) for name, table in facts.get("tables", {}).items()}
        return cls(token, numbers, offsets, duplicate, rejected, facts.get("buffer"), tables)
