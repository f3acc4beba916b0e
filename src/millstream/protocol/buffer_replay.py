"""The offset from which a write buffer is read again after a restart, and which of its rows are in the log already.

This is exact to the row, also if the crash came in the midst of an operation.

Premises
--------
1. Operations of a shard are taken in order. The log's note of a shard (`place`) is durable with the rows themselves:
   all operations below it are in the log, except partitions of tables that are *held*. Operations without rows in the
   log move it by a note of their own, which holds for a log that has reached as much as it had then.
2. A partition of a table is held from the first operation that couldn't be taken, while others go on. Below its
   checkpoint's `minimum` all of its rows are in the log; from there on none is.
3. A checkpoint is made when everything below it is durable. A repeated or late note claims less than is true, never
   more. So folding takes the greater one.

The rows that an operation has of one partition, at an offset:

    | offset                | partition is held            | it isn't |
    |-----------------------|------------------------------|----------|
    | below its minimum     | in the log: skip             | -        |
    | below the shard's     | take                         | in the log: skip |
    | from there on         | take                         | take     |

A shard is read from the least of its minima; each has its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from millstream.model.buffered_operations import BUFFER_START, BufferOffset
from millstream.model.ids import ShardId


class PartitionRows(NamedTuple):
    """Rows that are taken or held together: the rows of one partition of one table on one shard of a buffer."""

    shard: ShardId
    table: str
    """`schema.table`, as it is quoted."""
    partition: str | None


WHOLE_SHARD: Final = ""
"""Table name in the checkpoint of all parts of a shard that have no checkpoint of their own."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """How far a part is in the log."""

    part: PartitionRows
    minimum: BufferOffset
    """Offset below which all of it is in the log."""
    maximum: BufferOffset
    """Offset up to which it was seen; exclusive."""

    @classmethod
    def of_shard(cls, shard: ShardId, place: BufferOffset) -> Checkpoint:
        """Return the checkpoint of a shard that is in the log below a place.

        Parts with checkpoints of their own are excepted.
        """
        return cls(PartitionRows(shard, WHOLE_SHARD, None), place, place)


@dataclass(frozen=True, slots=True)
class BufferReplay:
    """The plan of what is read again."""

    places: Mapping[ShardId, BufferOffset]
    """The shards' own checkpoints."""
    held: Mapping[PartitionRows, Checkpoint]

    def start(self, shard: ShardId) -> BufferOffset:
        """Return the offset from which a shard is read."""
        held = [found.minimum for part, found in self.held.items() if part.shard == shard]
        return min([self.place(shard), *held])

    def place(self, shard: ShardId) -> BufferOffset:
        """Return the offset from which nothing of a shard is in the log, except parts that are ahead."""
        return self.places.get(shard, BUFFER_START)

    def end(self, shard: ShardId) -> BufferOffset:
        """Return the greatest offset that was seen; exclusive. A buffer that ends before it has lost data."""
        seen = [found.maximum for part, found in self.held.items() if part.shard == shard]
        return max([self.place(shard), *seen])

    def is_persisted(self, part: PartitionRows, offset: BufferOffset) -> bool:
        """Return whether the rows of a part at an offset are in the log."""
        held = self.held.get(part)
        return offset < (self.place(part.shard) if held is None else held.minimum)


def fold(checkpoints: Iterable[Checkpoint]) -> BufferReplay:
    """Return one plan of all checkpoints ever noted, in any order."""
    places: dict[ShardId, BufferOffset] = {}
    held: dict[PartitionRows, Checkpoint] = {}
    for told in checkpoints:
        part = told.part
        if part.table == WHOLE_SHARD:
            places[part.shard] = max(told.minimum, places.get(part.shard, BUFFER_START))
            continue
        before = held.get(part, told)
        held[part] = Checkpoint(
            part, max(told.minimum, before.minimum), max(told.maximum, before.maximum, told.minimum)
        )
    return BufferReplay(places, held)
