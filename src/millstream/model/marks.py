"""What a shard's mark says: how far its writer has made it durable, how far readers may read, and what retention has dropped. `wal.mark` writes and reads them."""

from __future__ import annotations

from dataclasses import dataclass

from millstream.model.ids import Epoch, GroupNumber, StreamId, WriterId
from millstream.model.positions import Offset, Seq


@dataclass(frozen=True, slots=True)
class DurableMark:
    """What a shard's writer says."""

    stream: StreamId
    writer: WriterId
    epoch: Epoch
    base_offset: Offset
    """The segment that is being written."""
    byte_end: int
    """Exclusive end of the durable bytes in it; all segments before it are durable whole."""
    durable_offset: Offset
    """Exclusive end of the durable offsets of the shard."""
    group: GroupNumber
    """The last group of the writer, durable on all its shards, that the position covers."""
    persisted_upto: Seq
    """Every number up to it, on all shards, is durable or will never be; never beyond the group."""
    reserved_to: Seq
    """Numbers up to it may have been given out."""
    shards: int = 0
    """How many the writer has: that many folders in the stream's are its own. 0 where an older Millstream moved the mark."""
    elsewhere: Seq | None = None
    """For a writer that shares its stream: the lowest position of those whose logs lie in other folders or that were joining, when this
    was written (`SEQ_MAX` where there are none). None: it is the only one."""
    is_settled: bool = False
    """Nothing of this writer is undecided, and it was given no number since."""


@dataclass(frozen=True, slots=True)
class ShownMark:
    """How far readers may read, where that isn't simply what is durable: a log that must be held elsewhere, too, before it is shown."""

    mark: DurableMark
    """As the writer moved it when that was its newest group."""
    required: bool
    """Whether readers go by it; else by what is durable."""
    by_one: bool = False
    """What any one follower has acknowledged is held as it has to be: it may show that at once."""


@dataclass(frozen=True, slots=True)
class DroppedMark:
    """What retention has dropped from a shard's front."""

    seq: Seq
    """Last number of the last commit group that was dropped; reading may begin behind it."""
    offset: Offset
    """The first offset that is still there."""
