"""Retention: old segments are dropped from a shard's front, whole, as `millstream.protocol.retention` decides.

This module lists segments, reports them to that state machine, and unlinks files. The machine
decides which holder needs what, and what is dropped when.

The mark durably records what is dropped before the first file goes. So readers can tell
`OffsetExpired` from an empty log, and recovery can tell dropped segments from lost ones. Files that
a crash left behind are removed the next time. Retention needs no free space.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from millstream.codec.log_segment import SEGMENT_HEADER_SIZE, SegmentFooter
from millstream.errors import CorruptFrame
from millstream.model.ids import ShardId, StreamId, TableId
from millstream.model.marks import DroppedMark
from millstream.model.positions import Seq
from millstream.ports import Clock, Files
from millstream.protocol.retention import (
    CutOff,
    HolderKind,
    Keep,
    Retention,
    RetentionBounds,
    SealedSegment,
    SegmentTable,
    oldest_of,
)
from millstream.wal.durable_mark import MarkFile, read_dropped, read_mark, read_readable
from millstream.wal.files import RealFiles, SystemClock
from millstream.wal.frame_index import damage, read_header
from millstream.wal.layout import SegmentFile, list_segments, list_shards, shard_folder
from millstream.wal.misplacement import REPLACED
from millstream.wal.segment_scan import reader_of
from millstream.wal.shard_locks import folder_lock
from millstream.wal.writing.session_file import covered_upto

SESSIONS_HOLDER: Final = "log/sessions"


@dataclass(slots=True)
class _Front:
    """A shard's segments before the one being written, oldest first."""

    shard: ShardId
    folder: str
    sealed: list[SegmentFile]
    size_bytes: int
    """Size in bytes of all its segments."""
    stream: StreamId | None = None
    """The log's stream; None without a mark."""
    current: SegmentFile | None = None
    """The segment after the last of `sealed`."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Result of one round of retention."""

    dropped: tuple[SealedSegment, ...]
    """Dropped segments, oldest first."""
    kept: Keep
    """The oldest remaining segment, and the holder that needs it."""


def drop_segments(
    folder: str,
    tracker: Retention,
    bounds: RetentionBounds,
    *,
    cut_off: Callable[[CutOff], bool] = lambda _gone: True,
    files: Files | None = None,
    clock: Clock | None = None,
) -> Sweep:
    """Drop the segments that the tracker releases.

    Args:
        tracker: has the holders and their positions.
        bounds: how much is kept.
        cut_off: durably records that a holder is cut off; False if the holder has advanced since:
            then this round ends.
        clock: for ages.

    Raises:
        CorruptWal: a footer or header that must be read is damaged; what was dropped before stays
            dropped.
        ShardLocked: in a folder with several writers, one of them hangs while it holds the folder's
            lock.

    Concurrency: one caller at a time (several writers' processes take turns), in parallel with the
    writers and any readers.
    """
    files = RealFiles() if files is None else files
    clock = SystemClock() if clock is None else clock
    with folder_lock(files, folder, clock):
        return _drop_segments(folder, tracker, bounds, cut_off, files, clock.now_ns())


def _drop_segments(
    folder: str,
    tracker: Retention,
    bounds: RetentionBounds,
    cut_off: Callable[[CutOff], bool],
    files: Files,
    now_ns: int,
) -> Sweep:
    fronts = {shard: _front(files, folder, shard) for shard in list_shards(files, folder)}
    hold_for_sessions(folder, tracker, files=files)
    log_bytes = sum(front.size_bytes for front in fronts.values())
    oldest = {shard: _oldest(files, front, now_ns) for shard, front in fronts.items() if front.sealed}
    dropped: list[SealedSegment] = []
    while not isinstance(
        effect := tracker.step(oldest.values(), now_ns=now_ns, log_bytes=log_bytes, bounds=bounds), Keep
    ):
        if isinstance(effect, CutOff):
            if cut_off(effect):
                continue
            tracker.released(effect.name)  # it may report again
            effect = Keep(oldest_of(oldest.values()), (effect.name,))
            break
        dropped.append(effect.segment)
        log_bytes -= effect.segment.size_bytes
        front = fronts[effect.segment.shard]
        front.sealed.pop(0)
        if front.sealed:
            oldest[front.shard] = _oldest(files, front, now_ns)
        else:
            del oldest[front.shard]
    for front in fronts.values():
        _remove(files, front, [segment for segment in dropped if segment.shard == front.shard])
    gone = [read_dropped(files, front.folder) for front in fronts.values()]
    # Below the shard that has dropped least, no holder has any position.
    tracker.forget_below(Seq(min((Seq(0) if mark is None else mark.seq for mark in gone), default=Seq(0)) + 1))
    return Sweep(tuple(dropped), effect)


def hold_for_sessions(folder: str, tracker: Retention, *, files: Files | None = None) -> None:
    """Register with a tracker what an opening writer reads of the log: everything after the copy of its sessions."""
    covered = covered_upto(RealFiles() if files is None else files, folder)
    if covered is not None:
        tracker.needs(SESSIONS_HOLDER, HolderKind.SESSIONS, Seq(covered + 1))


def oldest_sealed(folder: str, *, files: Files | None = None) -> SealedSegment | None:
    """Return the segment that retention would drop first, over all shards; None if none is sealed.

    Raises:
        CorruptWal: a footer or header that must be read is damaged.
    """
    files = RealFiles() if files is None else files
    fronts = [_front(files, folder, shard) for shard in list_shards(files, folder)]
    now_ns = SystemClock().now_ns()
    return oldest_of(_oldest(files, front, now_ns) for front in fronts if front.sealed)


def oldest_created_ns(folder: str, shard: ShardId) -> int | None:
    """Return when a shard's oldest segment was created, ns since 1970; None if the log has none.

    Raises:
        CorruptWal: its header is damaged.
    """
    files = RealFiles()
    if shard not in list_shards(files, folder):
        return None
    front = _front(files, folder, shard)
    oldest = front.sealed[0] if front.sealed else front.current
    return None if oldest is None else read_header(files, oldest, shard=shard, stream=front.stream).created_ns


def oldest_due(folder: str, bounds: RetentionBounds) -> SealedSegment | None:
    """Return the segment that retention would drop first, if it would be dropped now unless a holder needs it.

    Raises:
        CorruptWal: a footer or header that must be read is damaged.
    """
    files = RealFiles()
    segment = oldest_sealed(folder, files=files)
    if segment is None:
        return None
    log_bytes = sum(_front(files, folder, shard).size_bytes for shard in list_shards(files, folder))
    return segment if bounds.is_due(segment, now_ns=SystemClock().now_ns(), log_bytes=log_bytes) else None


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
    # No log drops records that no reader has been shown yet, however long its followers are away.
    shown = read_readable(files, shard_dir) or mark
    last = min(mark.base_offset, shown.base_offset)
    sealed = [segment for segment in segments if segment.base_offset < last]
    current = next((segment for segment in segments if segment.base_offset >= last), None)
    if current is None:
        return _Front(shard, shard_dir, [], size)
    if mark.byte_end == SEGMENT_HEADER_SIZE and sealed:
        # The last frame shows a new writer how far the log goes. While the current segment has no
        # frame, it is in this one.
        current = sealed.pop()
    return _Front(shard, shard_dir, sealed, size, mark.stream, current)


def _oldest(files: Files, front: _Front, now_ns: int) -> SealedSegment:
    segment = front.sealed[0]
    size = files.size(segment.path)
    # Its size and its log message come from its footer: so it has to be the segment that its name
    # names.
    read_header(files, segment, shard=front.shard, stream=front.stream)
    try:
        footer = SegmentFooter.decode_tail(reader_of(files, segment.path), size)
        if footer is None or not footer.frames:
            raise CorruptFrame("the segment's footer is missing")
    except CorruptFrame as error:
        raise damage(error, file=segment.path, byte=size, offset_from=segment.base_offset, offset_to=None) from error
    following = front.sealed[1] if len(front.sealed) > 1 else front.current
    assert following is not None
    behind = read_header(files, following, shard=front.shard, stream=front.stream)
    if behind.base_offset != footer.end_offset or behind.previous_hash != footer.footer_hash:
        base = following.base_offset
        raise damage(REPLACED, file=following.path, byte=0, offset_from=base, offset_to=base)
    sealed_ns = behind.created_ns
    if sealed_ns > now_ns:
        # The wall clock was set back since. The segment was sealed before any later one began.
        rest = [one for one in (*front.sealed[2:], front.current) if one is not None]
        began = (read_header(files, one, shard=front.shard, stream=front.stream).created_ns for one in rest)
        sealed_ns = next((ns for ns in began if ns <= now_ns), sealed_ns)
    return SealedSegment(
        shard=front.shard,
        base_offset=segment.base_offset,
        end_offset=footer.end_offset,
        last_seq=footer.frames[-1].group_last_seq,
        size_bytes=size,
        sealed_ns=sealed_ns,
        batches=_batches(footer),
    )


def _batches(footer: SegmentFooter) -> tuple[SegmentTable, ...]:
    """Return one batch per table.

    The footer has numbers per frame, not per table, and no partitions: the range covers all frames
    with the table.
    """
    found: dict[TableId, tuple[Seq, Seq]] = {}
    for frame in footer.frames:
        if not frame.count:
            continue
        for table in frame.tables:
            first, last = found.get(table.table_id, (frame.first_seq, frame.last_seq))
            found[table.table_id] = min(first, frame.first_seq), max(last, frame.last_seq)
    return tuple(SegmentTable(table, first, last) for table, (first, last) in found.items())


def _remove(files: Files, front: _Front, dropped: Sequence[SealedSegment]) -> None:
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
