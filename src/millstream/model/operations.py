"""Operations: what one transaction, one copy chunk or one request did, on its way into the log.

A hundred thousand one-row transactions a second leave no room for a Python object each, so operations travel in
columns: `WriteOps` holds many consecutive whole ones, `SpilledOp` holds one that is too large for memory. Both are
immutable and can be read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import pyarrow as pa

from millstream.errors import MillstreamError
from millstream.model.ids import ShardId, SourceId, TableId
from millstream.model.positions import Lsn, Offset, Seq, SeqRange, StreamToken
from millstream.model.records import INSTANT
from millstream.model.schema import TableSchema

if TYPE_CHECKING:
    from millstream.model.writes import WriteKeys

FIRST_SHARD: Final = ShardId(0)
_COLUMN_BYTES: Final = 1024
"""What a column of a batch holds beside its values, measured: small batches are little else."""


class OperationKind(IntEnum):
    """What an operation is."""

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
"""One row an operation. A copy chunk's `commit_lsn` is the insert LSN read right after its snapshot and its `commit_ts` that
moment; its records show the LSN and the date, and no commit time. An append's `commit_end_lsn`, where it has a session or a key, is the digest of
its rows."""


@dataclass(frozen=True, slots=True)
class TableRows:
    """Rows of one table and schema version for one shard, in `append_row_schema`, sorted by (`__operation`, `__index`)."""

    schema: TableSchema
    rows: pa.RecordBatch
    shard: ShardId = FIRST_SHARD
    partition: str | None = None
    """The partition of the table that all of the rows belong to; None where it has none."""
    era: int = 0
    """The hash ring by which they were placed, by its number in the stream's life; 0: by none that changes."""
    sink: str | None = None
    """What they go to beside the log, by its name, instead of a shard; the log's writer never gets such ones."""


@dataclass(frozen=True, slots=True)
class WriteOps:
    """Consecutive whole operations in columns.

    `operations` has one row an operation, in order; every operation has at least one row in `tables`; a table may
    stand there several times: with several schema versions, its later rows in later entries; with several shards or partitions, where a
    key's later rows stand in later entries too.
    `reached` says, for each source, the commit *end* LSN up to which all is in this or an earlier append. `behind` says what
    the log must have reached for this to follow it: where an append before it failed, this one is refused.
    """

    operations: pa.RecordBatch
    tables: tuple[TableRows, ...]
    reached: Mapping[SourceId, Lsn] = field(default_factory=dict)
    behind: Mapping[SourceId, Lsn] = field(default_factory=dict)
    keys: WriteKeys | None = None
    """What tells applications' writes apart, where they have something: those that the log has are left out, and answered again."""

    @property
    def size_bytes(self) -> int:
        """Memory that the columns hold; a slice holds all that it was cut from (and `nbytes` takes a hundred times as long)."""
        batches = [self.operations, *(table.rows for table in self.tables)]
        return int(sum(batch.get_total_buffer_size() + batch.num_columns * _COLUMN_BYTES for batch in batches))

    @property
    def row_count(self) -> int:
        """Records in all tables."""
        return int(sum(t.rows.num_rows for t in self.tables))


@dataclass(frozen=True, slots=True)
class SpilledOp:
    """One operation that is too large for memory; its rows lie elsewhere and can be read again and again.

    `chunks()` starts over at each call; it yields pieces of bounded size whose rows' `__index` continue where the piece
    before ended, `__operation` always 0. `counts` holds the exact number of rows of every (shard, table).
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


@dataclass(frozen=True, slots=True)
class Ack:
    """What a caller learns once its operations are durable on all their shards."""

    offsets: Mapping[ShardId, tuple[Offset, Offset]]
    """The half-open range of offsets on each shard touched."""
    seqs: SeqRange
    """The numbers given to the call's records, over all its tables."""
    placed: WriteOps | None = None
    """The operations as they were written, where their places had changed since they were submitted; None: as they were submitted."""
    each: tuple[Outcome, ...] = ()
    """Of operations with `WriteOps.keys`, what became of each; `offsets` and `seqs` are of those that were appended now."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """An operation that the log had already: nothing was appended."""

    given: Ack
    """What it was given then."""


Outcome: TypeAlias = Ack | Repeated | MillstreamError
"""What became of one operation among others."""


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A row that has no place in its table, where the others of its request were kept."""

    row: int
    """Its place in the request, from 0."""
    code: str
    """The error's, as in `millstream.errors`."""
    reason: str
    column: str | None = None
    """The column at fault, where one is."""

    def as_dict(self) -> dict[str, object]:
        """JSON-able facts."""
        return {"row": self.row, "code": self.code, "reason": self.reason, "column": self.column}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Self:
        """The value that `as_dict` told of."""
        return cls(int(facts["row"]), str(facts["code"]), str(facts["reason"]), facts.get("column"))


@dataclass(frozen=True, slots=True)
class Appended:
    """What an application learns once its rows are durable."""

    token: StreamToken
    """Who has read up to it has seen these rows. A vector token where other writers are behind."""
    seqs: SeqRange
    """The rows' numbers in the stream, in their order."""
    offsets: Mapping[ShardId, tuple[Offset, Offset]]
    """The half-open range of offsets on each shard touched."""
    duplicate: bool = False
    """Whether it was durable already, of an earlier call with the same `WriteId`: nothing was appended, and this is what that one got."""
    rejected: tuple[RejectedRow, ...] = ()
    """Rows that weren't appended, where that was asked for."""
    buffer: str | None = None
    """The write buffer that has the rows, at `offsets` of its own, until a stream takes them into its log. They have no numbers until then:
    `seqs` begins at 0, and the token is the stream's start."""

    @property
    def row_count(self) -> int:
        """How many rows were appended."""
        return self.seqs.count

    def as_dict(self) -> dict[str, object]:
        """JSON-able facts."""
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
        """The value that `as_dict` told of."""
        offsets = {ShardId(int(s)): (Offset(start), Offset(end)) for s, (start, end) in facts["offsets"].items()}
        rejected = tuple(RejectedRow.from_dict(row) for row in facts.get("rejected", ()))
        numbers = SeqRange(Seq(facts["first"]), facts["rows"])
        token, duplicate = StreamToken.parse(facts["token"]), bool(facts.get("duplicate"))
        return cls(token, numbers, offsets, duplicate, rejected, facts.get("buffer"))
