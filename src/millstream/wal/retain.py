"""Retention: old segments go from a shard's front, whole, and never before they aren't needed.

What is dropped is said in the mark, durably, before the first file goes: readers then tell `OffsetExpired` from an empty
log, recovery tells dropped segments from lost ones, and files that a crash left behind are finished off the next time.
Retention needs no free space.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millstream.codec.log_segment import SEGMENT_HEADER_SIZE, SegmentFooter
from millstream.errors import CorruptFrame
from millstream.model.ids import ShardId
from millstream.model.positions import Offset, Seq
from millstream.ports import Clock, Files
from millstream.wal.files import RealFiles, SystemClock
from millstream.wal.index import damage, read_header
from millstream.wal.layout import SegmentFile, list_segments, list_shards, shard_folder
from millstream.wal.mark import DroppedMark, MarkFile, read_dropped, read_mark
from millstream.wal.scan import reader_of


@dataclass(frozen=True, slots=True)
class DroppedSegment:
    """A segment that is gone."""

    shard: ShardId
    path: str
    base_offset: Offset
    end_offset: Offset
    last_seq: Seq
    """Last number of its last commit group."""
    size_bytes: int


@dataclass(slots=True)
class _Front:
    """A shard's segments before the one being written, oldest first."""

    shard: ShardId
    folder: str
    sealed: list[SegmentFile]
    size_bytes: int
    """Of all its segments."""
    current: SegmentFile | None = None
    """The segment behind the last of `sealed`."""


def drop_segments(
    folder: str,
    needed_from: Seq,
    *,
    age_s: float,
    bytes_max: int,
    files: Files | None = None,
    clock: Clock | None = None,
) -> list[DroppedSegment]:
    """Drop what nobody needs and is too old, or too much.

    Args:
        folder: the stream's.
        needed_from: the lowest number that anybody may still ask for; segments with it, or behind it, stay.
        age_s: a segment goes when it was sealed that long ago …
        bytes_max: … or, oldest first, while all segments of the stream take more than this.
        files: the file system.
        clock: for ages.

    Returns:
        What was dropped, oldest first.

    Raises:
        CorruptWal: a footer or header that must be read is damaged; what was dropped before stays so.

    Concurrency: one caller at a time; beside the writer and any readers.
    """
    files = RealFiles() if files is None else files
    now = (SystemClock() if clock is None else clock).now_ns()
    fronts = [_front(files, folder, shard) for shard in list_shards(files, folder)]
    total = sum(front.size_bytes for front in fronts)
    dropped: list[DroppedSegment] = []
    waiting = {front.shard: _oldest(files, front) for front in fronts if front.sealed}
    by_shard = {front.shard: front for front in fronts}
    while waiting:
        # The oldest of all shards first, so that the shards' fronts stay close to each other.
        shard, oldest = min(waiting.items(), key=lambda item: item[1].last_seq)
        front = by_shard[shard]
        following = front.sealed[1] if len(front.sealed) > 1 else front.current
        assert following is not None
        is_old = now - read_header(files, following).created_ns >= age_s * 1e9
        if oldest.last_seq >= needed_from or not (is_old or total > bytes_max):
            break
        dropped.append(oldest)
        total -= oldest.size_bytes
        front.sealed.pop(0)
        if front.sealed:
            waiting[shard] = _oldest(files, front)
        else:
            del waiting[shard]
    for front in fronts:
        _remove(files, front, [segment for segment in dropped if segment.shard == front.shard])
    return dropped


def _front(files: Files, folder: str, shard: ShardId) -> _Front:
    shard_dir = shard_folder(folder, shard)
    mark = read_mark(files, shard_dir)
    segments = list_segments(files, shard_dir)
    gone = read_dropped(files, shard_dir)
    size = sum(files.size(segment.path) for segment in segments)
    if gone is not None:
        segments = [segment for segment in segments if segment.base_offset >= gone.offset]
    if mark is None:
        return _Front(shard, shard_dir, [], size)
    sealed = [segment for segment in segments if segment.base_offset < mark.base_offset]
    current = next((segment for segment in segments if segment.base_offset >= mark.base_offset), None)
    if current is None:
        return _Front(shard, shard_dir, [], size)
    if mark.byte_end == SEGMENT_HEADER_SIZE and sealed:
        # The last frame tells a new writer how far the log has got; while the current segment has none, it's there.
        current = sealed.pop()
    return _Front(shard, shard_dir, sealed, size, current)


def _oldest(files: Files, front: _Front) -> DroppedSegment:
    segment = front.sealed[0]
    size = files.size(segment.path)
    try:
        footer = SegmentFooter.decode_tail(reader_of(files, segment.path), size)
        if footer is None or not footer.frames:
            raise CorruptFrame("the segment's footer is missing")
    except CorruptFrame as error:
        raise damage(error, file=segment.path, byte=size, offset_from=segment.base_offset, offset_to=None) from error
    last = footer.frames[-1].group_last_seq
    return DroppedSegment(front.shard, segment.path, segment.base_offset, footer.end_offset, last, size)


def _remove(files: Files, front: _Front, dropped: Sequence[DroppedSegment]) -> None:
    before = read_dropped(files, front.folder)
    if dropped:
        seq = max(dropped[-1].last_seq, Seq(0) if before is None else before.seq)
        before = DroppedMark(Seq(seq), dropped[-1].end_offset)
        mark = MarkFile.open(files, front.folder)
        try:
            mark.move_dropped(before)
        finally:
            mark.close()
    if before is None:
        return
    leftovers = [s for s in list_segments(files, front.folder) if s.base_offset < before.offset]
    for segment in leftovers:
        files.remove(segment.path)
    if leftovers:
        files.sync_dir(front.folder)
