"""The shards that a writer holds open, and how more of them are begun beside those that take records already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millstream.codec.log_directory import DIRECTORIES, Numbering
from millstream.codec.log_segment import SegmentHeader
from millstream.model.ids import Epoch, RegionId, ShardId, StreamId, WriterId
from millstream.model.marks import DurableMark
from millstream.model.positions import Offset
from millstream.ports import Clock, Files
from millstream.wal.layout import shard_folder
from millstream.wal.mark import MarkFile
from millstream.wal.shards import lock_shards
from millstream.wal.writing.recover import keep_spare
from millstream.wal.writing.segment import OpenSegment


@dataclass(frozen=True, slots=True)
class WriterIdentity:
    """Who writes what."""

    stream: StreamId
    region: RegionId
    writer: WriterId
    epoch: Epoch


@dataclass(slots=True)
class OwnShard:
    """One that is open: its folder, its mark with its lock, and the segment that takes records."""

    folder: str
    mark: MarkFile
    segment: OpenSegment


def next_header(
    identity: WriterIdentity, shard: ShardId, base: Offset, previous_hash: bytes, clock: Clock, numbering: Numbering
) -> SegmentHeader:
    """The header of a shard's next segment."""
    return SegmentHeader(
        identity.stream,
        identity.region,
        shard,
        identity.epoch,
        base,
        previous_hash,
        clock.now_ns(),
        DIRECTORIES[numbering],
    )


def begin_shards(
    files: Files,
    folder: str,
    shards: Sequence[ShardId],
    *,
    header: Callable[[ShardId], SegmentHeader],
    mark: Callable[[OwnShard], DurableMark],
    spare_bytes: int,
) -> tuple[dict[ShardId, OwnShard], bool]:
    """Make shards that aren't there, durable and empty. A crash in its midst leaves some of them, which the next open opens.

    Args:
        files: the file system.
        folder: the stream's.
        shards: which.
        header: of a shard's first segment.
        mark: of a new shard: of the group, and as far, as those of the others. A reader that meets them halfway is shown no less.
        spare_bytes: what to keep for each one's recovery.

    Returns:
        The shards, and whether there was space for all that their recovery may need.

    Raises:
        ShardLocked: another process has one.
        OSError: some of them may be there, empty.
    """
    made: dict[ShardId, OwnShard] = {}
    marks = lock_shards(files, folder, shards)
    try:
        for shard, own in marks.items():
            shard_dir = shard_folder(folder, shard)
            made[shard] = OwnShard(shard_dir, own, OpenSegment.create_first(files, shard_dir, header(shard)))
        whole = keep_spare(files, [shard.folder for shard in made.values()], spare_bytes)
        for begun in made.values():
            begun.mark.move(mark(begun), anchor=True)
    except BaseException:
        for own in marks.values():
            own.close()
        raise
    return made, whole
