"""The shards that a writer holds open, and how it begins new shards while others already take records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from millstream.codec.log_segment import SegmentHeader
from millstream.errors import UsageError
from millstream.model.ids import Epoch, RegionId, ShardId, StreamId, WriterId
from millstream.model.marks import DurableMark
from millstream.model.positions import Offset
from millstream.ports import Clock, Files
from millstream.protocol.sequencer.persisted_upto import left_behind
from millstream.wal.disk_space import keep_spare
from millstream.wal.durable_mark import MarkFile
from millstream.wal.layout import shard_folder
from millstream.wal.shard_locks import lock_shards
from millstream.wal.writing.recover import Recovered
from millstream.wal.writing.segment import OpenSegment


@dataclass(frozen=True, slots=True)
class WriterIdentity:
    """Identity of a writer, with its stream, region and epoch."""

    stream: StreamId
    region: RegionId
    writer: WriterId
    epoch: Epoch


@dataclass(slots=True)
class OwnShard:
    """One open shard: its folder, its mark with its lock, and the segment that takes records."""

    folder: str
    mark: MarkFile
    segment: OpenSegment


def next_header(
    identity: WriterIdentity, shard: ShardId, base: Offset, previous_hash: bytes, clock: Clock, frame_version: int
) -> SegmentHeader:
    """Return the header of a shard's next segment.

    Raises `UsageError` if the segment's frames can't have headers of that version.
    """
    if frame_version == 1 and (identity.region or shard):
        raise UsageError(
            f"frames of region {identity.region}, shard {shard} can't have headers of version 1, which have no fields for region and shard",
            hint="Write frame_version 2, or a log of region 0 with one shard.",
        )
    return SegmentHeader(identity.stream, identity.region, shard, identity.epoch, base, previous_hash, clock.now_ns())


def continue_shards(
    opened: dict[ShardId, OwnShard], identity: WriterIdentity, files: Files, folder: str, recovered: Recovered,
    marks: Mapping[ShardId, MarkFile], clock: Clock, frame_version: int,
) -> None:  # fmt: skip
    """Begin a new segment behind each recovered shard, and make marks agree that a kill left behind.

    Fills `opened`, also if it raises, as it may: `DiskFull`, `OSError`. The caller closes the files then.
    """
    for shard, end in recovered.shards.items():
        shard_dir = shard_folder(folder, shard)
        header = next_header(identity, shard, end.end_offset, end.last_footer_hash, clock, frame_version)
        opened[shard] = OwnShard(shard_dir, marks[shard], OpenSegment.create_first(files, shard_dir, header))
    for shard, mark in left_behind(recovered.marks):
        marks[shard].move(mark)


def begin_shards(
    files: Files,
    folder: str,
    shards: Sequence[ShardId],
    *,
    header: Callable[[ShardId], SegmentHeader],
    mark: Callable[[OwnShard], DurableMark],
    spare_bytes: int,
) -> tuple[dict[ShardId, OwnShard], bool]:
    """Make shards that don't exist yet, durable and empty.

    A crash on the way leaves some of them, which the next open opens.

    Args:
        header: makes the header of a shard's first segment.
        mark: makes a new shard's mark, with the group and the position of the other shards' marks.
            A reader that sees only some of the new shards is therefore shown no less.
        spare_bytes: bytes to reserve for each shard's recovery.

    Returns:
        The shards, and whether there was space for everything that their recovery may need.

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
