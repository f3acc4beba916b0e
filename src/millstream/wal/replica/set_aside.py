"""The end of a log is cut off at a commit group, and set aside.

That happens to an old leader's records beyond the new history, where the two logs of a stream part, and to a restored
log's records behind the token that it is restored at.

Their lineages name the last commit group that they share. Up to the end of that group, their bytes
are the same on each shard.

The rest is first copied into a folder that reads as a log of its own, from the first record that
differs. A copy is whole once all its marks are there. Then the marks are lowered, then the files
cut, the last ones first. After a crash at any point, the same call continues.

A shard with no remaining record keeps a mark that shows nothing: a reader there learns from it what
has become of the log. The mark's writer is `NOBODY`, so that no other shard waits for it: the new
leader may not have the shard at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Final

from millstream.codec.log_frame import FrameHeader
from millstream.codec.log_segment import SEGMENT_HEADER_SIZE, SegmentFooter
from millstream.errors import CorruptFrame, LogError
from millstream.model.ids import GroupNumber, ShardId
from millstream.model.marks import DroppedMark, DurableMark
from millstream.model.positions import Offset, Seq
from millstream.model.replication import ByteEnd
from millstream.ports import Files
from millstream.wal.durable_mark import MarkFile, read_dropped, read_mark
from millstream.wal.files import RealFiles
from millstream.wal.frame_index import read_header
from millstream.wal.layout import SegmentFile, list_segments, list_shards, segment_path, shard_folder
from millstream.wal.replica.follower_marks import NOBODY, placeholder
from millstream.wal.replica.visibility import lower_shown
from millstream.wal.segment_scan import ReadAhead, ScannedFrame, read_frame, reader_of, scan_frames
from millstream.wal.shard_locks import lock_shards

_COPY_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class SetAsideTail:
    """The part that `truncate_to` has taken out of a log."""

    folder: str
    """Folder that reads as a log of its own."""
    first_seq: Seq
    """First number in the folder that isn't in the common history."""
    size_bytes: int
    """Size in bytes of the segments there. The first segment of each shard includes its common part."""


def ends_behind(files: Files, folder: str, group: GroupNumber) -> dict[ShardId, ByteEnd]:
    """Return, for each shard, the end of its last frame of that group or an older one.

    If a segment's frames end there, its footer isn't included. A shard without such a frame ends
    where its first segment begins.

    Raises:
        CorruptWal: a segment's header is damaged.
    """
    return {
        shard: _end_behind(files, list_segments(files, shard_folder(folder, shard)), group)
        for shard in list_shards(files, folder)
    }


def last_group_upto(files: Files, folder: str, seq: Seq) -> GroupNumber:
    """Return a log's last commit group whose numbers are all at or below `seq`; 0 if there is none."""
    found = 0
    for shard in list_shards(files, folder):
        for segment in _with_frames(files, list_segments(files, shard_folder(folder, shard))):
            headers = (frame.header for frame in _frames(files, segment, payload=False))
            groups = [header.group for header in headers if header.group_last_seq <= seq]
            found = max(found, max(groups, default=0))
            if groups:
                break
    return GroupNumber(found)


def truncate_to(
    folder: str, common: Mapping[ShardId, ByteEnd], *, aside: str, files: Files | None = None
) -> SetAsideTail | None:
    """Cut a log back to what it has in common with a new leader's, and set aside the rest.

    Args:
        folder: the stream's; no process writes or follows there.
        common: the common end of each shard; a shard that isn't named has nothing in common.
        aside: the folder for the rest; the same one when this repeats a call that crashed.

    Returns:
        The part set aside; None if there was nothing to set aside, and nothing was changed.

    Raises:
        ShardLocked: another process writes or follows.
        LogError: a common end isn't where a frame ends; nothing was changed.
        OSError: the disk failed or is full; all records are still there, or whole in the folder
            aside.
    """
    files = RealFiles() if files is None else files
    with ExitStack() as held:
        marks = lock_shards(files, folder, list_shards(files, folder))
        for mark in marks.values():
            held.callback(mark.close)
        cuts = {shard: ShardCut.at(files, folder, shard, common.get(shard)) for shard in marks}
        beyond = sum(cut.beyond_bytes for cut in cuts.values())
        if not beyond:
            _forget_dropped(files, cuts, marks)
            return found_aside(files, aside)
        lowered, gone = _lowered(cuts), _gone(files, cuts)
        lasts = [cut.last for cut in cuts.values() if cut.last is not None]
        common_seq = max((header.group_last_seq for header in lasts), default=Seq(0))
        has_records = any(cut.has_frames_beyond for cut in cuts.values())
        if has_records and not _is_whole(files, aside, cuts):
            _copy(files, aside, cuts, common_seq)
        # No mark's writer becomes `NOBODY` before all marks are lowered: else the other marks would
        # pass for the whole log.
        for moved in (lowered, gone):
            for shard, to in moved.items():
                lower_shown(files, cuts[shard].folder, marks[shard], to)
            for shard, to in moved.items():
                marks[shard].move(to, anchor=True)
        for cut in cuts.values():
            cut.apply(files)
        _forget_dropped(files, cuts, marks)
    return found_aside(files, aside)


def found_aside(files: Files, aside: str) -> SetAsideTail | None:
    """Return what lies in a folder that `truncate_to` was given.

    None if there is nothing, or its copy was cut short.
    """
    shards = [shard_folder(aside, shard) for shard in list_shards(files, aside)]
    dropped = [mark for shard_dir in shards if (mark := read_dropped(files, shard_dir)) is not None]
    if not dropped:
        return None
    size = sum(files.size(segment.path) for shard_dir in shards for segment in list_segments(files, shard_dir))
    return SetAsideTail(aside, Seq(max(mark.seq for mark in dropped) + 1), size)


# --- walking --------------------------------------------------------------------------------------------------------


def _end_behind(files: Files, segments: Sequence[SegmentFile], group: GroupNumber) -> ByteEnd:
    for segment in _with_frames(files, segments):
        older = takewhile(lambda frame: frame.header.group <= group, _frames(files, segment, payload=False))
        end = max((frame.end for frame in older), default=0)
        if end:
            return ByteEnd(segment.base_offset, end)
    return ByteEnd(segments[0].base_offset if segments else Offset(0), 0)


def _with_frames(files: Files, segments: Sequence[SegmentFile]) -> Iterator[SegmentFile]:
    """Yield the segments that have more than a header, the last first."""
    return (segment for segment in reversed(segments) if files.size(segment.path) > SEGMENT_HEADER_SIZE)


def _frames(files: Files, segment: SegmentFile, *, payload: bool = True) -> Iterator[ScannedFrame]:
    """Yield a segment's frames, up to the first that isn't whole."""
    header = read_header(files, segment)
    with suppress(CorruptFrame):
        yield from scan_frames(ReadAhead(reader_of(files, segment.path)), header, payload=payload)


# --- cutting --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShardCut:
    """The end that a shard is cut to."""

    shard: ShardId
    folder: str
    mark: DurableMark | None
    segments: tuple[SegmentFile, ...]
    end: ByteEnd
    end_offset: Offset
    last: FrameHeader | None
    """Last frame that stays."""
    has_frames_beyond: bool
    beyond_bytes: int

    @classmethod
    def at(cls, files: Files, folder: str, shard: ShardId, end: ByteEnd | None) -> ShardCut:
        """Read a shard on both sides of an end; None: nothing stays. Raises `LogError` if no frame ends there."""
        shard_dir = shard_folder(folder, shard)
        segments = tuple(list_segments(files, shard_dir))
        if end is None:
            end = ByteEnd(segments[0].base_offset if segments else Offset(0), 0)
        beyond = [segment for segment in segments if segment.base_offset >= end.base_offset]
        size, has_frames, reached = 0, False, 0
        last: FrameHeader | None = None
        for segment in beyond:
            begin = end.position if segment.base_offset == end.base_offset else 0
            size += files.size(segment.path) - begin
            if begin:
                reached = SEGMENT_HEADER_SIZE
            for frame in _frames(files, segment):
                if frame.end <= begin:
                    last, reached = frame.header, frame.end
                else:
                    has_frames = True
                    break
        if reached != end.position:
            raise LogError(f"no frame ends at byte {end.position} of segment {end.base_offset} of shard {shard}")
        if not end.position:
            last = _last_sealed(files, [segment for segment in segments if segment.base_offset < end.base_offset])
        offset = end.base_offset if last is None else Offset(last.first_offset + last.count)
        return cls(shard, shard_dir, read_mark(files, shard_dir), segments, end, offset, last, has_frames, max(size, 0))

    @property
    def is_below_mark(self) -> bool:
        """Whether anything that is shown lies beyond the end."""
        mark = self.mark
        if mark is None:
            return False
        shown = 0 if mark.byte_end == SEGMENT_HEADER_SIZE else mark.byte_end
        return ByteEnd(mark.base_offset, shown) > self.end

    def apply(self, files: Files) -> None:
        """Remove what lies beyond, the last first."""
        for segment in reversed(self.segments):
            if ByteEnd(segment.base_offset, 0) >= self.end or segment.base_offset > self.end.base_offset:
                files.remove(segment.path)
            elif segment.base_offset == self.end.base_offset:
                file = files.open_write(segment.path)
                try:
                    file.truncate(self.end.position)
                    file.sync()
                finally:
                    file.close()
        files.sync_dir(self.folder)


def _lowered(cuts: Mapping[ShardId, ShardCut]) -> dict[ShardId, DurableMark]:
    """Return the marks of what stays, if shown records go: a new leader's history ends with a whole group."""
    if not any(cut.is_below_mark for cut in cuts.values()):
        return {}
    newest = _newest_that_stays(cuts)
    group, upto = (GroupNumber(0), Seq(0)) if newest is None else (newest.group, newest.group_last_seq)
    lowered = {}
    for shard, cut in cuts.items():
        mark = cut.mark
        if mark is None or mark.writer == NOBODY:
            continue
        if cut.is_below_mark:
            mark = replace(
                mark, base_offset=cut.end.base_offset, byte_end=cut.end.position or SEGMENT_HEADER_SIZE,
                durable_offset=cut.end_offset,
            )  # fmt: skip
        lowered[shard] = replace(
            mark, group=min(mark.group, group), persisted_upto=min(mark.persisted_upto, upto), is_settled=False
        )
    return lowered


def _gone(files: Files, cuts: Mapping[ShardId, ShardCut]) -> dict[ShardId, DurableMark]:
    """Return the marks of shards with no remaining record."""
    newest = _newest_that_stays(cuts)
    gone = {}
    for shard, cut in cuts.items():
        if cut.mark is None or cut.mark.writer == NOBODY or cut.last is not None:
            continue
        dropped = read_dropped(files, cut.folder)
        if cut.is_below_mark and dropped is not None and (newest is None or dropped.seq > newest.group_last_seq):
            dropped = None  # it is unknown whether that was common; see `_forget_dropped`
        gone[shard] = placeholder(cut.mark.stream, dropped)
    return gone


def _newest_that_stays(cuts: Mapping[ShardId, ShardCut]) -> FrameHeader | None:
    lasts = [cut.last for cut in cuts.values() if cut.last is not None]
    return max(lasts, key=lambda header: header.group, default=None)


def _forget_dropped(files: Files, cuts: Mapping[ShardId, ShardCut], marks: Mapping[ShardId, MarkFile]) -> None:
    """Reset empty shards to begin as on the new leader: it is unknown whether the records dropped here were common."""
    for shard, cut in cuts.items():
        mark, dropped = read_mark(files, cut.folder), read_dropped(files, cut.folder)
        if mark is None or dropped is None or mark.writer != NOBODY or list_segments(files, cut.folder):
            continue
        if mark.base_offset < dropped.offset:
            marks[shard].move_dropped(DroppedMark(Seq(0), Offset(0)))


def _last_sealed(files: Files, segments: Sequence[SegmentFile]) -> FrameHeader | None:
    for segment in reversed(segments):
        read = reader_of(files, segment.path)
        footer = SegmentFooter.decode_tail(read, files.size(segment.path))
        if footer is not None and footer.frames:
            return read_frame(ReadAhead(read), footer.frames[-1].position, payload=False).header
    return None


# --- setting aside --------------------------------------------------------------------------------------------------


def _is_whole(files: Files, aside: str, cuts: Mapping[ShardId, ShardCut]) -> bool:
    return all(read_mark(files, shard_folder(aside, shard)) for shard, cut in cuts.items() if cut.has_frames_beyond)


def _copy(files: Files, aside: str, cuts: Mapping[ShardId, ShardCut], common: Seq) -> None:
    files.makedirs(aside)
    copied = [cut for cut in cuts.values() if cut.has_frames_beyond]
    for cut in copied:
        shard_dir = shard_folder(aside, cut.shard)
        files.makedirs(shard_dir)
        for name in files.listdir(shard_dir):
            files.remove(f"{shard_dir}/{name}")
        for segment in cut.segments:
            if segment.base_offset >= cut.end.base_offset:
                _copy_file(files, segment.path, segment_path(shard_dir, segment.base_offset))
        files.sync_dir(shard_dir)
    files.sync_dir(aside)
    for cut in copied:
        mark = MarkFile.open(files, shard_folder(aside, cut.shard))
        try:
            mark.move_dropped(DroppedMark(common, cut.end.base_offset))
            if cut.mark is not None:
                mark.move(replace(cut.mark, shards=0, is_settled=True), anchor=True)
        finally:
            mark.close()


def _copy_file(files: Files, old: str, new: str) -> None:
    file = files.create(new)
    try:
        for position in range(0, files.size(old), _COPY_BYTES):
            file.pwrite(files.read(old, position, _COPY_BYTES), position)
        file.sync()
    finally:
        file.close()
