"""Where two logs of one stream part: what an old leader has that the new one's history doesn't, set aside and cut off.

Two nodes compare what their segments' footers say, and of the open one a hash of its frames' heads. Up to where they agree their bytes are
the same, for a head holds the checksums of all that its frame holds.

What lies beyond is copied first, into a folder that reads as a log by itself, from the first record that parts on; a copy is whole once all
its marks are there. Then the marks are lowered, then the files cut, the last ones first. A crash anywhere leaves what the same call
goes on from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

from millstream.codec.log_frame import FrameHeader
from millstream.codec.log_segment import SEGMENT_HEADER_SIZE, SEGMENT_TRAILER_SIZE, SegmentFooter
from millstream.errors import CorruptFrame, LogError, TruncatedFrame
from millstream.model.ids import ShardId
from millstream.model.marks import DroppedMark, DurableMark
from millstream.model.positions import Offset, Seq
from millstream.model.replication import ByteEnd, LogHistory, SegmentHistory
from millstream.ports import Files
from millstream.wal.files import RealFiles
from millstream.wal.index import read_header
from millstream.wal.layout import MARK_NAME, SegmentFile, list_segments, list_shards, segment_path, shard_folder
from millstream.wal.mark import MarkFile, read_dropped, read_mark
from millstream.wal.scan import Window, read_frame, reader_of, scan_frames
from millstream.wal.shards import lock_shards

_COPY_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class SetAside:
    """What `truncate_to` has taken out of a log."""

    folder: str
    """Reads as a log by itself."""
    first_seq: Seq
    """The first number that lies there and not in the common history."""
    size_bytes: int
    """Of the segments that lie there: what is common in the first of each shard lies there too."""


def history_of(folder: str, *, files: Files | None = None) -> LogHistory:
    """What a log says of itself to another node. Frames count up to the first that isn't whole, also behind the marks.

    Raises:
        CorruptWal: a segment's header is damaged.
    """
    files = RealFiles() if files is None else files
    return {shard: tuple(_segments_of(files, folder, shard)) for shard in list_shards(files, folder)}


def common_prefix(folder: str, other: LogHistory, *, files: Files | None = None) -> dict[ShardId, ByteEnd]:
    """Up to where a log has the same bytes as another one, of each shard: as a follower of that one would say its position.

    Where this log has less of a segment than the other, its own end is taken, and shipping compares what lies in front of it once more. Of
    segments that the other one has dropped nothing can be said: they count as common.
    """
    files = RealFiles() if files is None else files
    return {shard: _common(files, folder, shard, other.get(shard, ())) for shard in list_shards(files, folder)}


def truncate_to(
    folder: str, common: Mapping[ShardId, ByteEnd], *, aside: str, files: Files | None = None
) -> SetAside | None:
    """Cut a log back to what it has in common with a new leader's, and set aside what it has beyond.

    Args:
        folder: the stream's; nobody writes or follows there.
        common: of each shard; one that isn't named has nothing in common.
        aside: the folder for what is beyond; the same one where a crash makes this a repetition.
        files: the file system.

    Returns:
        What was set aside; None where there was nothing beyond, and nothing was changed.

    Raises:
        ShardLocked: somebody writes or follows.
        LogError: a common end isn't where a frame ends; nothing was changed.
        OSError: the disk failed or is full; what was there is there, or in the folder aside, whole.
    """
    files = RealFiles() if files is None else files
    with ExitStack() as held:
        marks = lock_shards(files, folder, list_shards(files, folder))
        for mark in marks.values():
            held.callback(mark.close)
        cuts = {shard: Cut.at(files, folder, shard, common.get(shard)) for shard in marks}
        beyond = sum(cut.beyond_bytes for cut in cuts.values())
        if not beyond:
            return _found(files, aside)
        lowered = _lowered(cuts)
        lasts = [cut.last for cut in cuts.values() if cut.last is not None]
        common_seq = max((header.group_last_seq for header in lasts), default=Seq(0))
        has_records = any(cut.has_frames_beyond for cut in cuts.values())
        if has_records and not _is_whole(files, aside, cuts):
            _copy(files, aside, cuts, common_seq)
        for shard, moved in lowered.items():
            marks[shard].move(moved, anchor=True)
        for shard, cut in cuts.items():
            if cut.is_below_mark and shard not in lowered:
                forget_mark(files, cut.folder)
            cut.apply(files)
    return _found(files, aside)


def _found(files: Files, aside: str) -> SetAside | None:
    """What lies aside; None where nothing does."""
    shards = [shard_folder(aside, shard) for shard in list_shards(files, aside)]
    dropped = [mark for shard_dir in shards if (mark := read_dropped(files, shard_dir)) is not None]
    if not dropped:
        return None
    size = sum(files.size(segment.path) for shard_dir in shards for segment in list_segments(files, shard_dir))
    return SetAside(aside, Seq(max(mark.seq for mark in dropped) + 1), size)


# --- comparing ------------------------------------------------------------------------------------------------------


def _segments_of(files: Files, folder: str, shard: ShardId) -> Iterator[SegmentHistory]:
    segments = list_segments(files, shard_folder(folder, shard))
    for segment in segments:
        size = files.size(segment.path)
        read = reader_of(files, segment.path)
        trailer = read(max(0, size - SEGMENT_TRAILER_SIZE), SEGMENT_TRAILER_SIZE)
        if SegmentFooter.is_trailer(trailer):
            length = SegmentFooter.size_in(trailer)
            try:
                footer = SegmentFooter.decode_tail(read, size)
            except CorruptFrame:
                footer = None
            if footer is not None:
                encoded = SegmentFooter.encoded_hash(read(size - length, length))
                header = _header_hash(files, segment)
                yield SegmentHistory(
                    segment.base_offset, header, size - length, footer.end_offset, footer.frames_hash, encoded
                )
                continue
        yield _by_frames(files, segment, None)


def _by_frames(files: Files, segment: SegmentFile, end: int | None) -> SegmentHistory:
    """One by its frames: all that are whole, or those in front of a byte."""
    heads, position, offset = hashlib.sha256(), SEGMENT_HEADER_SIZE, segment.base_offset
    for frame_end, head, header in _frames(files, segment, end):
        heads.update(head)
        position, offset = frame_end, Offset(header.first_offset + header.count)
    return SegmentHistory(segment.base_offset, _header_hash(files, segment), position, offset, heads.digest())


def _header_hash(files: Files, segment: SegmentFile) -> bytes:
    return hashlib.sha256(files.read(segment.path, 0, SEGMENT_HEADER_SIZE)).digest()


def _frames(files: Files, segment: SegmentFile, end: int | None) -> Iterator[tuple[int, bytes, FrameHeader]]:
    header = read_header(files, segment)
    try:
        for frame in scan_frames(Window(reader_of(files, segment.path)), header, end=end):
            yield frame.end, frame.head, frame.header
    except (CorruptFrame, TruncatedFrame):
        return


def _common(files: Files, folder: str, shard: ShardId, other: Sequence[SegmentHistory]) -> ByteEnd:
    theirs = {segment.base_offset: segment for segment in other}
    first = min(theirs, default=Offset(0))
    own = list(_segments_of(files, folder, shard))
    end = ByteEnd(own[0].base_offset if own else Offset(0), 0)
    for place, mine in enumerate(own):
        following = own[place + 1].base_offset if place + 1 < len(own) else None
        found = theirs.get(mine.base_offset)
        dropped = following is not None and following <= first
        if dropped or (found is not None and mine.footer_hash and mine.footer_hash == found.footer_hash):
            end = ByteEnd(mine.end_offset, 0)
            continue
        if found is None or mine.header_hash != found.header_hash or mine.frames_end <= SEGMENT_HEADER_SIZE:
            return end
        if mine.frames_end < found.frames_end:
            return ByteEnd(mine.base_offset, mine.frames_end)
        path = segment_path(shard_folder(folder, shard), mine.base_offset)
        upto = _by_frames(files, SegmentFile(mine.base_offset, path), found.frames_end)
        same = (upto.frames_end, upto.frames_hash) == (found.frames_end, found.frames_hash)
        return ByteEnd(mine.base_offset, found.frames_end) if same else end
    return end


# --- cutting --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a shard is to end."""

    shard: ShardId
    folder: str
    mark: DurableMark | None
    segments: tuple[SegmentFile, ...]
    end: ByteEnd
    end_offset: Offset
    last: FrameHeader | None
    """The last frame that stays."""
    has_frames_beyond: bool
    beyond_bytes: int

    @classmethod
    def at(cls, files: Files, folder: str, shard: ShardId, end: ByteEnd | None) -> Cut:
        """Look what a shard has on both sides of an end; None: nothing stays. `LogError` where no frame ends there."""
        shard_dir = shard_folder(folder, shard)
        segments = tuple(list_segments(files, shard_dir))
        if end is None:
            end = ByteEnd(segments[0].base_offset if segments else Offset(0), 0)
        beyond = [segment for segment in segments if segment.base_offset >= end.base_offset]
        size, has_frames = 0, False
        last: FrameHeader | None = None
        for segment in beyond:
            begin = end.position if segment.base_offset == end.base_offset else 0
            size += files.size(segment.path) - begin
            for frame_end, _, header in _frames(files, segment, None):
                if frame_end <= begin:
                    last = header
                else:
                    has_frames = True
                    break
        if end.position:
            found = (
                _by_frames(files, beyond[0], end.position)
                if beyond and beyond[0].base_offset == end.base_offset
                else None
            )
            if found is None or found.frames_end != end.position:
                raise LogError(f"no frame ends at byte {end.position} of segment {end.base_offset} of shard {shard}")
        else:
            last = _last_sealed(files, [segment for segment in segments if segment.base_offset < end.base_offset])
        offset = end.base_offset if last is None else Offset(last.first_offset + last.count)
        return cls(shard, shard_dir, read_mark(files, shard_dir), segments, end, offset, last, has_frames, max(size, 0))

    @property
    def is_below_mark(self) -> bool:
        """Whether something that is shown lies beyond."""
        mark = self.mark
        if mark is None:
            return False
        shown = 0 if mark.byte_end == SEGMENT_HEADER_SIZE else mark.byte_end
        return ByteEnd(mark.base_offset, shown) > self.end

    def apply(self, files: Files) -> None:
        """Take away what lies beyond, the last first."""
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


def forget_mark(files: Files, shard_dir: str) -> None:
    """Take away the mark of a shard that has nothing any more."""
    files.remove(f"{shard_dir}/{MARK_NAME}")
    files.sync_dir(shard_dir)


def _lowered(cuts: Mapping[ShardId, Cut]) -> dict[ShardId, DurableMark]:
    """The marks of what stays, where something that was shown goes: a new leader's history ends with a whole group."""
    if not any(cut.is_below_mark for cut in cuts.values()):
        return {}
    lasts = [cut.last for cut in cuts.values() if cut.last is not None]
    newest = max(lasts, key=lambda header: header.group, default=None)
    lowered = {}
    for shard, cut in cuts.items():
        if cut.mark is None or newest is None or (cut.last is None and cut.is_below_mark):
            continue
        mark = cut.mark
        if cut.is_below_mark:
            mark = replace(
                mark, base_offset=cut.end.base_offset, byte_end=cut.end.position or SEGMENT_HEADER_SIZE,
                durable_offset=cut.end_offset,
            )  # fmt: skip
        lowered[shard] = replace(
            mark,
            group=min(mark.group, newest.group),
            persisted_upto=min(mark.persisted_upto, newest.group_last_seq),
            is_settled=False,
        )
    return lowered


def _last_sealed(files: Files, segments: Sequence[SegmentFile]) -> FrameHeader | None:
    for segment in reversed(segments):
        read = reader_of(files, segment.path)
        footer = SegmentFooter.decode_tail(read, files.size(segment.path))
        if footer is not None and footer.frames:
            return read_frame(Window(read), footer.frames[-1].position, payload=False).header
    return None


# --- setting aside --------------------------------------------------------------------------------------------------


def _is_whole(files: Files, aside: str, cuts: Mapping[ShardId, Cut]) -> bool:
    return all(read_mark(files, shard_folder(aside, shard)) for shard, cut in cuts.items() if cut.has_frames_beyond)


def _copy(files: Files, aside: str, cuts: Mapping[ShardId, Cut], common: Seq) -> None:
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
