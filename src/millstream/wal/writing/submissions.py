"""Operations on the submissions of a commit group, whatever their kind: shards and acks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millstream.model.ids import ShardId, SourceId
from millstream.model.operations import Ack, SpilledOp, Submitted
from millstream.model.positions import Lsn, Offset, Seq, SeqRange


def shards_of(ops: Submitted) -> set[ShardId]:
    """Return the shards on which a submission has rows."""
    return {shard for shard, count in _rows_by_shard(ops).items() if count}


def follow(submitted: Sequence[Submitted], reached: Mapping[SourceId, Lsn]) -> list[bool]:
    """Return, for each submission, whether it may be written: not if something is missing that it follows.

    A caller sends a failed append again, together with those after it. If a later one were written
    alone, the log would claim to have the failed one.
    """
    reached = dict(reached)
    verdicts = []
    for ops in submitted:
        fits = all(reached.get(s, Lsn(0)) >= lsn for s, lsn in ops.behind.items())
        verdicts.append(fits)
        if fits:
            for source, lsn in ops.reached.items():
                reached[source] = max(lsn, reached.get(source, lsn))
    return verdicts


def acks_of(submitted: Sequence[Submitted], first_seq: Seq, starts: Mapping[ShardId, Offset]) -> list[Ack]:
    """Return each submission's ack: submissions follow one another in numbers and, on every shard, in offsets."""
    next_offset = dict(starts)
    acks = []
    number = first_seq
    for ops in submitted:
        counts = _rows_by_shard(ops)
        offsets = {}
        for shard, count in counts.items():
            if count:
                offsets[shard] = (next_offset[shard], Offset(next_offset[shard] + count))
                next_offset[shard] = offsets[shard][1]
        rows = sum(counts.values())
        acks.append(Ack(offsets, SeqRange(number, rows)))
        number = Seq(number + rows)
    return acks


def _rows_by_shard(ops: Submitted) -> dict[ShardId, int]:
    counts: dict[ShardId, int] = {}
    if isinstance(ops, SpilledOp):
        for (shard, _), count in ops.counts.items():
            counts[shard] = counts.get(shard, 0) + count
    else:
        for table in ops.tables:
            counts[table.shard] = counts.get(table.shard, 0) + table.rows.num_rows
    return counts
