"""A shard's marks: how far it is durable, how far readers may read, and what retention has dropped.

`wal.durable_mark` writes and reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from millstream.model.ids import Epoch, GroupNumber, StreamId, WriterId
from millstream.model.positions import Offset, Seq


@dataclass(frozen=True, slots=True)
class DurableMark:
    """The mark of a shard's writer."""

    stream: StreamId
    writer: WriterId
    epoch: Epoch
    base_offset: Offset
    """Base offset of the segment that is being written."""
    byte_end: int
    """Exclusive end of the durable bytes in that segment; all earlier segments are wholly durable."""
    durable_offset: Offset
    """Exclusive end of the durable offsets of the shard."""
    group: GroupNumber
    """The writer's last group that the position covers; it is durable on all its shards."""
    persisted_upto: Seq
    """Every number up to it, on all shards, is durable or will never be; never beyond the group."""
    reserved_to: Seq
    """Numbers up to it may have been given out."""
    shards: int = 0
    """Number of the writer's shards, which is the number of its folders in the stream's."""
    elsewhere: Seq | None = None
    """In a shared stream, the lowest position at that moment of the writers whose logs lie in other
    folders or that were joining. `SEQ_MAX` if there are none; None if the stream has only this
    writer."""
    is_settled: bool = False
    """Whether nothing of this writer is undecided, and it has been given no number since."""


@dataclass(frozen=True, slots=True)
class ShownMark:
    """How far readers may read, if the log must also be held elsewhere before it is shown."""

    mark: DurableMark
    """The mark, as the writer moved it when that was its newest group."""
    required: bool
    """Whether readers are bound by it; otherwise they read what is durable."""
    by_one: bool = False
    """Whether one follower's acknowledgement suffices, so that this follower may show it at once."""


@dataclass(frozen=True, slots=True)
class DroppedMark:
    """The part that retention has dropped from the front of a shard."""

    seq: Seq
    """Last number of the last commit group that was dropped; reading may begin behind it."""
    offset: Offset
    """The first offset that is still there."""
