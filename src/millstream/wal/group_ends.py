"""Where a commit group ends on each shard of a log: up to there two logs agree whose lineages part behind that group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

from millstream.codec.log_frame import FrameHeader
from millstream.codec.log_segment import SEGMENT_HEADER_SIZE
from millstream.errors import CorruptFrame, TruncatedFrame
from millstream.model.ids import GroupNumber, ShardId
from millstream.model.positions import Offset, Seq
from millstream.model.replication import ByteEnd
from millstream.ports import Files
from millstream.wal.index import read_header
from millstream.wal.layout import SegmentFile, list_segments, list_shards, shard_folder
from millstream.wal.scan import Window, reader_of, scan_frames


def ends_behind(files: Files, folder: str, group: GroupNumber) -> Mapping[ShardId, ByteEnd]:
    """For each shard, the end of its last frame of that group or an older one; of a segment whose frames end there, without its footer.

    A shard that has no such frame any more (or never had one) ends where its first segment begins.

    Raises:
        CorruptWal: a segment's header is damaged.
    """
    return {
        shard: _end(files, list_segments(files, shard_folder(folder, shard)), group)
        for shard in list_shards(files, folder)
    }


def last_group_upto(files: Files, folder: str, seq: Seq) -> GroupNumber:
    """The last commit group of a log whose numbers all lie at or below one; 0 where there is none."""
    found = 0
    for shard in list_shards(files, folder):
        for segment in reversed(list_segments(files, shard_folder(folder, shard))):
            groups = [header.group for header in _headers(files, segment) if header.group_last_seq <= seq]
            found = max(found, max(groups, default=0))
            if groups:
                break
    return GroupNumber(found)


def _headers(files: Files, segment: SegmentFile) -> Iterator[FrameHeader]:
    if files.size(segment.path) > SEGMENT_HEADER_SIZE:
        with suppress(CorruptFrame, TruncatedFrame):
            for frame in scan_frames(
                Window(reader_of(files, segment.path)), read_header(files, segment), payload=False
            ):
                yield frame.header


def _end(files: Files, segments: list[SegmentFile], group: GroupNumber) -> ByteEnd:
    for segment in reversed(segments):
        if files.size(segment.path) <= SEGMENT_HEADER_SIZE:
            continue
        end = 0
        with suppress(CorruptFrame, TruncatedFrame):
            header = read_header(files, segment)
            for frame in scan_frames(Window(reader_of(files, segment.path)), header, payload=False):
                if frame.header.group > group:
                    break
                end = frame.end
        if end:
            return ByteEnd(segment.base_offset, end)
    return ByteEnd(segments[0].base_offset if segments else Offset(0), 0)
