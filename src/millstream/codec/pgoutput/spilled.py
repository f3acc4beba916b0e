"""One huge transaction whose messages are stored elsewhere: decoded piece by piece, repeatably, in bounded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from copy import copy

import numpy as np

from millstream.codec.pgoutput.rare_messages import Relation, StreamCommit
from millstream.codec.pgoutput.relations import RelationCache, TableDirectory
from millstream.codec.pgoutput.runs import MessageRun
from millstream.codec.pgoutput.transaction_decoder import decode_block, operations_batch
from millstream.model.ids import ShardId, SourceId, TableId
from millstream.model.operations import OperationKind, SpilledOp, TableRows
from millstream.model.schema import TableSchema


def decode_spilled(
    read: Callable[[], Iterable[MessageRun]],
    directory: TableDirectory,
    relations: RelationCache,
    commit: StreamCommit,
    *,
    aborted: Collection[int] = frozenset(),
    streamed: bool = True,
) -> SpilledOp | None:
    """Return the operation of a spilled transaction; None if it has no captured records.

    Everything is decoded once here, to count and to check. So the operation's `chunks()` (one for
    each run of `read` that holds records) don't fail later. The directory's answers are kept: later
    answers change nothing.

    Args:
        read: the transaction's messages from the start, at every call the same: changes, Relation, Type, Origin; no
            Begin, Commit or StreamStart.
        relations: the relations in force on the connection. A streamed transaction brings all its relations itself and
            changes nothing here; an ordinary one (`streamed=False`) leaves its relations in force.
        aborted: xids of rolled back subtransactions.

    Raises:
        TableUndecodable: one table has to be quarantined; call again after that. `relations` is unchanged.
        ProtocolViolation: the messages are no transaction's.
    """
    kept = _KeptAnswers(directory)
    dropped = frozenset(aborted)
    start = RelationCache() if streamed else relations.draft()
    if streamed:
        start.adopt_type_names(relations)

    def pieces(cache: RelationCache) -> Iterator[tuple[TableRows, ...]]:
        index, answers = 0, kept.from_start()
        for run in read():
            tables, index = decode_block(run, answers, cache, streamed=streamed, aborted=dropped, first_index=index)
            if tables:
                yield tables

    counts: Counter[tuple[ShardId, TableId]] = Counter()
    size_bytes = 0
    last = start.draft()
    for tables in pieces(last):
        for table in tables:
            counts[table.shard, table.schema.table_id] += table.rows.num_rows
            size_bytes += table.rows.nbytes
    if not streamed:
        relations.adopt(last)
    if not counts:
        return None
    row = [int(OperationKind.TRANSACTION), commit.commit_lsn, commit.end_lsn, commit.xid, commit.commit_ts_us]
    return SpilledOp(
        operation=operations_batch(np.array([row], np.int64).T, directory.source),
        counts=dict(counts),
        chunks=lambda: pieces(start.draft()),
        reached={directory.source: commit.end_lsn},
        size_bytes=size_bytes,
    )


class _KeptAnswers:
    """A directory with permanent answers, even if tables change later."""

    def __init__(self, directory: TableDirectory) -> None:
        self._directory = directory
        self._schemas: dict[Relation, TableSchema | None] = {}
        self._messages: list[TableSchema | None] = []
        self._truncates: list[bool] = []
        """The answers to the transaction's truncates, in order: the same leaf partitions may not be all of them later."""
        self.truncate = 0

    def from_start(self) -> _KeptAnswers:
        """Return the same answers, for decoding the transaction from its start."""
        same = copy(self)
        same.truncate = 0
        return same

    @property
    def source(self) -> SourceId:
        return self._directory.source

    def schema_for(self, relation: Relation) -> TableSchema | None:
        if relation not in self._schemas:
            self._schemas[relation] = self._directory.schema_for(relation)
        return self._schemas[relation]

    def truncates_all(self, schema: TableSchema, leaves: frozenset[int]) -> bool:
        if self.truncate == len(self._truncates):
            self._truncates.append(self._directory.truncates_all(schema, leaves))
        self.truncate += 1
        return self._truncates[self.truncate - 1]

    def messages_schema(self) -> TableSchema | None:
        if not self._messages:
            self._messages.append(self._directory.messages_schema())
        return self._messages[0]
