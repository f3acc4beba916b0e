"""The end of a log's whole groups, judged by its frames alone: for folders that were copied without their marks.

Unlike recovery it changes nothing and needs no lock. Like recovery, it shows a group only if all of
its parts are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from millstream.codec.log_frame import FrameHeader
from millstream.codec.log_segment import SEGMENT_HEADER_SIZE, FrameEntry, SegmentFooter, SegmentHeader
from millstream.errors import CorruptFrame, CorruptWal, UnsupportedFormat
from millstream.model.ids import Epoch, GroupNumber, RegionId, ShardId, StreamId, WriterId
from millstream.model.marks import DurableMark
from millstream.model.positions import Offset, Seq
from millstream.ports import Files
from millstream.protocol.sequencer.persisted_upto import stream_cut
from millstream.wal.frame_index import OnDamage, damage
from millstream.wal.layout import SegmentFile, list_segments, shard_folder
from millstream.wal.misplacement import split_misplaced, stream_of
from millstream.wal.segment_scan import (
    NO_STREAM,
    Loss,
    ReadAhead,
    ScannedFrame,
    header_of,
    lost_groups,
    read_frame,
    reader_of,
    scan_segment,
)


@dataclass(slots=True)
class _ShardEnd:
    """The end of a shard as found."""

    segment: SegmentFile
    """The last segment."""
    header: SegmentHeader
    sealed_last: ScannedFrame | None = None
    """The last frame of the last sealed segment."""
    is_sealed: bool = False
    """Whether that is the last segment."""
    frames: list[ScannedFrame] = field(default_factory=list)
    """The valid frames of the last segment, if it is open."""
    holes: list[range] = field(default_factory=list)
    """Groups that may have had a part in unreadable bytes between frames."""

    def found(self) -> list[ScannedFrame]:
        """Return all frames read."""
        return self.frames if self.sealed_last is None else [self.sealed_last, *self.frames]

    @property
    def writer(self) -> WriterId:
        """Writer of the last frame; 0 if there is none."""
        frames = self.frames or self.found()
        return frames[-1].header.writer if frames else WriterId(0)

    def damaged(self, why: str) -> CorruptWal:
        """Return the error for records that are missing after what was found."""
        last = self.frames[-1] if self.frames else None
        offset = self.segment.base_offset if last is None else Offset(last.header.first_offset + last.header.count)
        byte = SEGMENT_HEADER_SIZE if last is None else last.end
        return damage(why, file=self.segment.path, byte=byte, offset_from=offset, offset_to=None)

    def has_whole(self, group: GroupNumber) -> bool:
        """Return whether this shard has its part of the group: a segment is sealed only when its groups are durable."""
        if self.sealed_last is not None and group <= self.sealed_last.header.group:
            return True
        if any(frame.header.group == group and not frame.header.more for frame in self.frames):
            return True
        if self.sealed_last is None and self.segment.base_offset > 0:
            # Only the first frame that exists shows what retention dropped: everything below it.
            first = next(iter(self.frames), None)
            if first is not None and group < first.header.group:
                return True
        before = GroupNumber(0) if self.sealed_last is None else self.sealed_last.header.group
        return any(group in lost for lost in (*lost_groups(self.frames, before), *self.holes))


def marks_of_whole_groups(
    files: Files, folder: str, shards: Iterable[ShardId], on_damage: OnDamage | None = None
) -> tuple[Mapping[ShardId, DurableMark], Seq]:
    """Return marks that show every valid whole group, and the last group's last number. Every mark has that group.

    The reader reports unreadable bytes between groups. If a group lacks a part at a shard's end, it
    was being written if it is the last group, and is damaged if another follows.

    Raises:
        CorruptWal: a group is damaged, and there is no `on_damage`.
    """
    stream = stream_of(files, folder)
    found = {shard: _end(files, shard, shard_folder(folder, shard), stream, on_damage) for shard in shards}
    ends = {shard: end for shard, end in found.items() if end is not None}
    marks: dict[ShardId, DurableMark] = {}
    writers = {shard: end.writer or _writer_beside(shard, ends) for shard, end in ends.items()}
    for writer in sorted(set(writers.values())):
        marks |= _marks_of_writer({shard: ends[shard] for shard, of in writers.items() if of == writer}, on_damage)
    # The folder has no writer, so what is whole is all there will ever be.
    return marks, stream_cut(marks.values())


def _writer_beside(shard: ShardId, ends: Mapping[ShardId, _ShardEnd]) -> WriterId:
    """Return the writer of a shard whose own last frame can't be read.

    It is the writer whose groups have parts there, else the first writer of all.
    """
    others = [end for end in ends.values() if end.writer]
    partners = [end for end in others if any(shard in frame.header.other_shards for frame in end.found())]
    return min((end.writer for end in partners or others), default=WriterId(0))


def _marks_of_writer(ends: Mapping[ShardId, _ShardEnd], on_damage: OnDamage | None) -> dict[ShardId, DurableMark]:
    """Return marks for the shards of one writer: they share commit groups, numbered for that writer alone."""
    headers = sorted((frame.header for end in ends.values() for frame in end.found()), key=lambda header: header.group)
    newest = headers[-1].group if headers else GroupNumber(0)
    cut_from: GroupNumber | None = None
    for header in headers:
        missing = _missing(header, ends)
        if missing is None:
            continue
        if header.group == newest:
            cut_from = header.group
            break
        error = ends[missing].damaged(f"group {header.group} isn't whole, though group {newest} follows")
        if on_damage is None:
            raise error
        on_damage(error)
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
            is_settled=True,
        )
    return marks


def _missing(header: FrameHeader, ends: Mapping[ShardId, _ShardEnd]) -> ShardId | None:
    """Return a shard that lacks its part of a frame's group; None if the group is whole."""
    shards = (header.shard, *header.other_shards)
    return next((s for s in shards if s in ends and not ends[s].has_whole(header.group)), None)


def _end(
    files: Files, shard: ShardId, shard_dir: str, stream: StreamId | None, on_damage: OnDamage | None
) -> _ShardEnd | None:
    segments, misplaced = split_misplaced(files, shard, list_segments(files, shard_dir), stream)
    for segment, _, why in misplaced:
        if not segments or segment > segments[-1]:  # the reader reports any other one
            error = damage(
                why, file=segment.path, byte=0, offset_from=segment.base_offset, offset_to=segment.base_offset
            )
            if on_damage is None:
                raise error
            on_damage(error)
    if not segments:
        return None
    header = header_of(files, segments[-1])
    end = _ShardEnd(segments[-1], header or _header_like(files, shard, segments))
    end.sealed_last = _last_of_sealed(files, segments[-1])
    end.is_sealed = end.sealed_last is not None
    if end.is_sealed:
        return end
    if len(segments) > 1:
        end.sealed_last = _last_of_sealed(files, segments[-2])
    bad: GroupNumber | None = None
    """The group of the first unreadable bytes."""
    whole: list[ScannedFrame] = []
    for found in scan_segment(files, shard, segments[-1], end=None):
        if isinstance(found, Loss):
            before = whole[-1] if whole else end.sealed_last
            if bad is None:
                more = before is not None and before.header.more
                bad = GroupNumber((0 if before is None else before.header.group) + (0 if more else 1))
            continue
        whole.append(found)
        if bad is None:
            end.frames.append(found)
        elif found.header.group > bad:
            # A later group after bad bytes is damage, which the reader reports, and not a torn
            # tail.
            end.holes.append(range(bad, found.header.group + 1))
            end.frames, bad = list(whole), None
    return end


def _header_like(files: Files, shard: ShardId, segments: Sequence[SegmentFile]) -> SegmentHeader:
    """Return what a lost header of a shard's last segment must have had. The segment's reader reports the loss."""
    known = next((header for segment in segments if (header := header_of(files, segment)) is not None), None)
    stream = NO_STREAM if known is None else known.stream
    epoch = Epoch(0) if known is None else known.epoch
    return SegmentHeader(stream, RegionId(0), shard, epoch, segments[-1].base_offset)


def _last_of_sealed(files: Files, segment: SegmentFile) -> ScannedFrame | None:
    """Return a sealed segment's last frame; None if the segment isn't sealed, or its footer is damaged."""
    read = reader_of(files, segment.path)
    with suppress(CorruptFrame):
        footer = SegmentFooter.decode_tail(read, files.size(segment.path))
        if footer is not None and footer.frames:
            try:
                return read_frame(ReadAhead(read), footer.frames[-1].position, payload=False)
            except (CorruptFrame, UnsupportedFormat):
                return _frame_of(footer.frames[-1])
    return None


def _frame_of(entry: FrameEntry) -> ScannedFrame:
    """Rebuild from the footer a frame that can't be read: it was durable, or the segment wouldn't have been sealed."""
    header = FrameHeader(
        kind=entry.kind,
        first_offset=entry.offset,
        count=entry.count,
        first_seq=entry.first_seq,
        last_seq=entry.last_seq,
        group_last_seq=entry.group_last_seq,
        group=entry.group,
        epoch=Epoch(0),
        region=RegionId(0),
        shard=ShardId(0),
        writer=WriterId(0),
        reserved_to=entry.group_last_seq,
    )
    return ScannedFrame(header, b"", entry.position, entry.length)
