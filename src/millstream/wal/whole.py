"""How far a log holds whole groups, judged by its frames alone: for folders that were copied without their marks.

Unlike recovery it changes nothing and needs no lock; like it, it shows a group only when all of its parts are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from millstream.codec.log_frame import FrameHeader
from millstream.codec.log_segment import SEGMENT_HEADER_SIZE, SegmentFooter, SegmentHeader
from millstream.errors import CorruptFrame, UnsupportedFormat
from millstream.model.ids import GroupNumber, ShardId, WriterId
from millstream.model.positions import Offset, Seq
from millstream.ports import Files
from millstream.wal.index import read_header
from millstream.wal.layout import SegmentFile, list_segments, shard_folder
from millstream.wal.mark import DurableMark
from millstream.wal.scan import ScannedFrame, Window, read_frame, reader_of, scan_frames


@dataclass(slots=True)
class _End:
    """The end of a shard as found."""

    segment: SegmentFile
    """The last one."""
    header: SegmentHeader
    sealed_last: ScannedFrame | None = None
    """The last frame of the last sealed segment."""
    is_sealed: bool = False
    """Whether that is the last segment."""
    frames: list[ScannedFrame] = field(default_factory=list)
    """The valid frames of the last segment, where it is open."""

    def found(self) -> list[ScannedFrame]:
        """All frames looked at."""
        return self.frames if self.sealed_last is None else [self.sealed_last, *self.frames]

    def has_whole(self, group: GroupNumber) -> bool:
        """Whether this shard's part of the group is there: a segment is sealed only when its groups are durable."""
        if self.sealed_last is not None and group <= self.sealed_last.header.group:
            return True
        return any(frame.header.group == group and not frame.header.more for frame in self.frames)


def marks_of_whole_groups(
    files: Files, folder: str, shards: Iterable[ShardId]
) -> tuple[Mapping[ShardId, DurableMark], Seq]:
    """Marks that show every valid whole group, and the last one's last number.

    Raises:
        CorruptWal: the header of a shard's last segment is damaged.
    """
    ends = {shard: end for shard in shards if (end := _end(files, shard_folder(folder, shard))) is not None}
    headers = sorted((frame.header for end in ends.values() for frame in end.found()), key=lambda header: header.group)
    cut_from = next((header.group for header in headers if not _is_whole(header, ends)), None)
    last = max(
        (header for header in headers if cut_from is None or header.group < cut_from),
        key=lambda header: header.group,
        default=None,
    )
    persisted = Seq(0) if last is None else last.group_last_seq
    marks = {}
    for shard, end in ends.items():
        kept = [frame for frame in end.frames if cut_from is None or frame.header.group < cut_from]
        if end.is_sealed and end.sealed_last is not None:
            kept = [end.sealed_last]
        offset = end.segment.base_offset
        if kept:
            offset = Offset(kept[-1].header.first_offset + kept[-1].header.count)
        marks[shard] = DurableMark(
            stream=end.header.stream,
            writer=WriterId(0 if last is None else last.writer),
            epoch=end.header.epoch,
            base_offset=end.segment.base_offset,
            byte_end=kept[-1].end if kept else SEGMENT_HEADER_SIZE,
            durable_offset=offset,
            group=GroupNumber(0) if last is None else last.group,
            persisted_upto=persisted,
            reserved_to=Seq(0) if last is None else last.reserved_to,
        )
    return marks, persisted


def _is_whole(header: FrameHeader, ends: Mapping[ShardId, _End]) -> bool:
    return all(s not in ends or ends[s].has_whole(header.group) for s in (header.shard, *header.other_shards))


def _end(files: Files, shard_dir: str) -> _End | None:
    segments = list_segments(files, shard_dir)
    if not segments:
        return None
    end = _End(segments[-1], read_header(files, segments[-1]))
    end.sealed_last = _last_of_sealed(files, segments[-1])
    end.is_sealed = end.sealed_last is not None
    if end.is_sealed:
        return end
    if len(segments) > 1:
        end.sealed_last = _last_of_sealed(files, segments[-2])
    with suppress(CorruptFrame, UnsupportedFormat):
        for frame in scan_frames(Window(reader_of(files, segments[-1].path)), end.header):
            end.frames.append(frame)
    return end


def _last_of_sealed(files: Files, segment: SegmentFile) -> ScannedFrame | None:
    """A sealed segment's last frame; None where the segment isn't sealed, or its end is damaged."""
    read = reader_of(files, segment.path)
    with suppress(CorruptFrame):
        footer = SegmentFooter.decode_tail(read, files.size(segment.path))
        if footer is not None and footer.frames:
            return read_frame(Window(read), footer.frames[-1].position, payload=False)
    return None
