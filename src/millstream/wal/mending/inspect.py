"""Inspection of a log, whole or damaged, live or copied: `wal ls | inspect | verify | stats`.

Everything reads from the folder alone and continues past damage. Unreadable bytes are reported by
file, byte and offset range, and what follows them is still shown. Nothing is changed. Without marks
(a copied folder) every valid frame is shown, and `has_marks` is False.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from millstream.codec.log_directory import decode_directory
from millstream.codec.log_frame import FrameKind, SchemaFrame, decode_frame
from millstream.codec.log_schemas import SchemaSet
from millstream.codec.log_segment import SEGMENT_HEADER_SIZE, SegmentFooter, SegmentHeader
from millstream.errors import CorruptFrame, CorruptWal, LogError, MillstreamError, UnsupportedFormat
from millstream.model.ids import GroupNumber, SchemaVersion, ShardId, StreamId, TableId
from millstream.model.marks import DurableMark
from millstream.model.operations import FIRST_SHARD
from millstream.model.positions import Offset, Seq
from millstream.ports import Files
from millstream.protocol.sequencer.persisted_upto import stream_cut
from millstream.wal.dropped_segments import skipping_dropped
from millstream.wal.durable_mark import is_mark_damaged, missing_shards, read_dropped, read_mark, read_readable
from millstream.wal.files import RealFiles
from millstream.wal.layout import (
    MARK_NAME,
    SegmentFile,
    list_segments,
    list_shards,
    segments_and_strays,
    shard_folder,
    shards_and_strays,
)
from millstream.wal.marks_from_frames import marks_of_whole_groups
from millstream.wal.mending.findings import FrameInfo, LogStats, PartitionStats, SegmentInfo, TableStats, Verification
from millstream.wal.mending.plan import footer_hash_of
from millstream.wal.misplacement import REPLACED, misplacement, split_misplaced, stream_of
from millstream.wal.salvage import CheckedFrame, KnownSchemas, accepted_loss, salvage_segment
from millstream.wal.segment_scan import (
    Loss,
    ReadAhead,
    ScannedFrame,
    commit_times,
    ends_of,
    footer_of,
    header_of,
    losses_around,
    reader_of,
    scan_like,
    scan_segment,
)

__all__ = [
    "FrameInfo", "LogStats", "Loss", "PartitionStats", "SegmentInfo", "TableStats", "Verification", "inspect", "ls", "stats", "verify",
]  # fmt: skip

_START: Final = Seq(0)
_STRAY: Final = "it isn't the log's: readers and writers stop here until it is moved elsewhere"


def ls(folder: str, *, files: Files | None = None) -> list[SegmentInfo]:
    """Return all segments, shard by shard, in order. Opens headers and footers only, and walks open segments."""
    files = RealFiles() if files is None else files
    stream = stream_of(files, folder)
    found: list[SegmentInfo] = []
    for shard in list_shards(files, folder):
        marks = _marks(files, shard_folder(folder, shard))
        for segment in list_segments(files, shard_folder(folder, shard)):
            with skipping_dropped(files):
                found.append(_segment_info(files, shard, segment, marks, stream))
    return found


def inspect(
    folder: str,
    *,
    after: Seq = _START,
    upto: Seq | None = None,
    table: TableId | None = None,
    files: Files | None = None,
) -> Iterator[FrameInfo | Loss]:
    """Yield the frames with numbers in `(after, upto]` and rows (or the schema) of a table, shard by shard.

    Losses in between.

    Schemas have no numbers. For a range, a segment's schema frames are included if the first frame
    that needs them is.
    """
    files = RealFiles() if files is None else files
    has_range = after > _START or upto is not None
    for shard, segment, mark, end, around in _segments(files, folder):
        yield from around
        if segment is None:
            continue
        with skipping_dropped(files):
            marks = mark, read_readable(files, shard_folder(folder, shard))
            header = header_of(files, segment)
            schemas: dict[tuple[TableId, SchemaVersion], ScannedFrame] = {}
            for found in scan_segment(files, shard, segment, end=end):
                if isinstance(found, Loss):
                    if not _is_beyond(found, segment, mark):
                        yield found
                    continue
                head = found.header
                brought = [(part.table_id, part.schema_version) for part in head.parts]
                if table is not None and all(its != table for its, _ in brought):
                    continue
                if has_range and head.kind is FrameKind.SCHEMA:
                    schemas |= dict.fromkeys(brought, found)
                    continue
                # A loss whose numbers are unknown may be in any range.
                if head.last_seq and (head.last_seq <= after or (upto is not None and head.first_seq > upto)):
                    continue
                needed = [schemas.pop(key) for key in brought if key in schemas]
                for schema in sorted(needed, key=lambda frame: frame.position):
                    yield _frame_info(shard, segment, schema, header, marks)
                yield _frame_info(shard, segment, found, header, marks)


def verify(folder: str, *, files: Files | None = None) -> Verification:
    """Read everything: every checksum, every row's decoding, the chain of segments, the marks.

    A folder that doesn't exist is a whole, empty log.
    """
    files = RealFiles() if files is None else files
    report = Verification()
    elsewhere = KnownSchemas(files, folder)
    shards, strays = shards_and_strays(files, folder)
    report.losses += [Loss(stray, 0, _STRAY, None, None) for stray in strays]
    torn: list[tuple[Loss, GroupNumber]] = []
    stream = stream_of(files, folder)
    for shard in shards:
        _verify_shard(files, folder, shard, stream, report, elsewhere, torn)
    report.losses += _missing_shards(files, folder, shards)
    if not report.unmarked:
        return report
    # A group that one shard lacks is torn if it is the last of all, and damage if another follows.
    try:
        marks, _ = marks_of_whole_groups(files, folder, shards, lambda error: _add_missing(report, error))
    except LogError as error:
        if error.code != "unexpected_file":
            raise
        return report  # the file is already reported
    newest = {shard: max(m.group for m in marks.values() if m.writer == mark.writer) for shard, mark in marks.items()}
    report.losses += [loss for loss, group in torn if loss.shard in newest and group <= newest[loss.shard]]
    return report


def stats(folder: str, *, files: Files | None = None, partitions: bool = False) -> LogStats:
    """Count the whole log, by table too, and by `partitions` if asked; reads heads of frames, not rows."""
    files = RealFiles() if files is None else files
    counted = LogStats()
    groups: set[Seq] = set()
    marks, shown = [], []
    for shard in list_shards(files, folder):
        shard_dir = shard_folder(folder, shard)
        with suppress(MillstreamError):
            mark, readable = read_mark(files, shard_dir), read_readable(files, shard_dir)
            counted.has_marks = counted.has_marks and (mark is not None or not list_segments(files, shard_dir))
            if mark is not None and readable is not None:
                marks.append(mark)
                shown.append(readable)
            dropped = read_dropped(files, shard_dir)
            if dropped is not None:
                counted.dropped_upto = max(counted.dropped_upto, dropped.seq)
    if marks:
        counted.persisted_upto, counted.high_water_mark = stream_cut(marks), stream_cut(shown)
    for shard, segment, mark, end, around in _segments(files, folder):
        counted.losses += around
        if segment is None:
            continue
        with skipping_dropped(files):
            counted.size_bytes += files.size(segment.path)
            counted.segments += 1
            header = header_of(files, segment)
            for found in scan_segment(files, shard, segment, end=end, payload=False):
                if isinstance(found, Loss):
                    if not _is_beyond(found, segment, mark):
                        counted.losses.append(found)
                else:
                    groups.add(found.header.group_last_seq)
                    _count(files, counted, segment, header, found)
                    if partitions and header is not None and found.header.kind is FrameKind.RECORDS:
                        with suppress(CorruptFrame):
                            _count_partitions(counted, header, found)
    counted.groups = len(groups)
    return counted


# --- walking over what may be damaged --------------------------------------------------------------------------------


def _segments(
    files: Files, folder: str
) -> Iterator[tuple[ShardId, SegmentFile | None, DurableMark | None, Offset | None, list[Loss]]]:
    """Yield every segment with its mark, the required end of its records, and damage to its header, footer and chain.

    The segment is None for damage that isn't one's: it is misplaced, or missing at the end, or a shard is missing.
    """
    stream = stream_of(files, folder)
    shards = list_shards(files, folder)
    for missing in _missing_shards(files, folder, shards):
        yield FIRST_SHARD, None, None, None, [missing]
    for shard in shards:
        shard_dir = shard_folder(folder, shard)
        mark = read_mark(files, shard_dir)  # before the list: a later one may lie in a segment that isn't listed
        segments, misplaced = split_misplaced(files, shard, list_segments(files, shard_dir), stream)
        for segment, _, why in misplaced:
            yield shard, None, mark, None, [Loss(segment.path, 0, why, None, None, shard)]
        chain = _Chain(files, shard, shard_dir, mark)
        for segment, end in zip(segments, ends_of(segments, mark), strict=True):
            around: list[Loss] | None = None
            with skipping_dropped(files):
                around = chain.losses_before(segment, end)
                around += losses_around(files, shard, segment, is_last=segment is segments[-1])
            if around is not None:
                yield shard, segment, mark, end, around
        if losses := chain.losses_at_end():
            yield shard, None, mark, None, losses


def _missing_shards(files: Files, folder: str, shards: Sequence[ShardId]) -> list[Loss]:
    marks = (read_mark(files, shard_folder(folder, shard)) for shard in shards)
    missing = missing_shards(folder, shards, filter(None, marks))
    return [] if missing is None else [Loss(folder, 0, missing.message, None, None)]


class _Chain:
    """The chain of a shard's segments: each begins where the one before it ends, and names its footer.

    Args:
        shard_dir: its folder.
        mark: its mark; None: there is none, so that nothing tells where the chain begins and ends.
    """

    def __init__(self, files: Files, shard: ShardId, shard_dir: str, mark: DurableMark | None) -> None:
        self._files = files
        self._shard = shard
        self._shard_dir = shard_dir
        self._mark = mark
        self.begin = self._dropped_upto()
        """The offset up to which retention has dropped segments when the walk begins."""
        self._end = None if mark is None else self.begin
        self._last: SegmentFile | None = None
        self._previous_hash: bytes | None = None

    def losses_before(self, segment: SegmentFile, end: Offset | None) -> list[Loss]:
        """Return the damage between the next segment and the one before it; `end` is as in `ends_of`."""
        if segment.base_offset < self.begin:
            return []
        losses = []
        header, footer = header_of(self._files, segment), footer_of(self._files, segment)
        footer_hash = footer_hash_of(self._files, segment)
        if self._end is not None and segment.base_offset > self._end:
            self._previous_hash = None
            self._end = max(self._end, self._dropped_upto())
            if segment.base_offset > self._end:
                why = "segments before it are missing"
                losses.append(Loss(segment.path, 0, why, self._end, segment.base_offset, self._shard))
        if header is not None and self._previous_hash is not None and header.previous_hash != self._previous_hash:
            losses.append(Loss(segment.path, 0, REPLACED, None, None, self._shard))
        # A walk through a segment without a footer reports what it lacks up to its required end.
        its_end = footer.end_offset if isinstance(footer, SegmentFooter) else end
        self._end = max(self._end or self.begin, segment.base_offset if its_end is None else its_end)
        self._previous_hash, self._last = footer_hash, segment
        return losses

    def _dropped_upto(self) -> Offset:
        dropped = read_dropped(self._files, self._shard_dir)
        return Offset(0) if dropped is None else dropped.offset

    def losses_at_end(self) -> list[Loss]:
        """Return the durable records that no segment has, behind the last one."""
        if self._mark is None or self._end is None or self._mark.durable_offset <= self._end:
            return []
        path, at = self._shard_dir, 0
        if self._last is not None:
            path, at = self._last.path, self._files.size(self._last.path)
        why = "durable records are missing at the end"
        return [Loss(path, at, why, self._end, self._mark.durable_offset, self._shard)]


def _is_beyond(loss: Loss, segment: SegmentFile, mark: DurableMark | None) -> bool:
    """Return whether a loss lies where nothing is durable yet: it is being written, or a crash left it."""
    return mark is not None and (segment.base_offset, loss.byte) >= (mark.base_offset, mark.byte_end)


# --- the four views --------------------------------------------------------------------------------------------------


_Marks: TypeAlias = tuple[DurableMark | None, DurableMark | None]
"""A shard's marks: what is durable, and what is shown."""


def _marks(files: Files, shard_dir: str) -> _Marks:
    with suppress(MillstreamError):
        return read_mark(files, shard_dir), read_readable(files, shard_dir)
    return None, None


def _within(mark: DurableMark | None, base: Offset, end: Offset | None) -> Offset | None:
    """Return how far a segment's records count by a mark."""
    if mark is None or end is None:
        return None
    return max(base, min(end, mark.durable_offset))


def _segment_info(
    files: Files, shard: ShardId, segment: SegmentFile, marks: _Marks, stream: StreamId | None
) -> SegmentInfo:
    header = header_of(files, segment)
    is_misplaced = header is not None and misplacement(header, segment, shard, stream) is not None
    footer = footer_of(files, segment)
    size = files.size(segment.path)
    entries: list[tuple[Seq, Seq, int]] = []
    end: Offset | None = None
    if isinstance(footer, SegmentFooter):
        state, end = "sealed", footer.end_offset
        entries = [(e.first_seq, e.last_seq, e.count) for e in footer.frames]
    else:
        state = "open" if footer is None else "damaged"
        with suppress(CorruptFrame, UnsupportedFormat):
            window = ReadAhead(reader_of(files, segment.path))
            for frame in scan_like(window, header, shard, SEGMENT_HEADER_SIZE, segment.base_offset, payload=False):
                entries.append((frame.header.first_seq, frame.header.last_seq, frame.header.count))
        end = Offset(segment.base_offset + sum(count for _, _, count in entries))
    if header is None:
        state = "damaged"
    if is_misplaced:
        state, end, entries = "damaged", None, []
    numbered = [(first, last) for first, last, count in entries if count and first]
    return SegmentInfo(
        shard=shard,
        path=segment.path,
        state=state,
        base_offset=segment.base_offset,
        end_offset=end if state != "damaged" or isinstance(footer, SegmentFooter) else None,
        records=sum(count for _, _, count in entries) if state != "damaged" else None,
        frames=len(entries) if state != "damaged" else None,
        size_bytes=size,
        epoch=None if header is None else header.epoch,
        created_ns=None if header is None else header.created_ns,
        first_seq=min((first for first, _ in numbered), default=None),
        last_seq=max((last for _, last in numbered), default=None),
        durable_to=_within(marks[0], segment.base_offset, end),
        shown_to=_within(marks[1], segment.base_offset, end),
    )


def _frame_info(
    shard: ShardId, segment: SegmentFile, found: ScannedFrame, header: SegmentHeader | None, marks: _Marks
) -> FrameInfo:
    mark, shown = marks
    head = found.header
    times = None
    with suppress(CorruptFrame):
        times = None if header is None else commit_times(found.head, header)
    place = (segment.base_offset, found.end)
    return FrameInfo(
        shard=shard,
        path=segment.path,
        position=found.position,
        length=found.length,
        kind=head.kind.name.lower(),
        epoch=head.epoch,
        group=head.group,
        more=head.more,
        first_offset=head.first_offset,
        count=head.count,
        first_seq=head.first_seq,
        last_seq=head.last_seq,
        commit_ts_us=times,
        tables=tuple((p.table_id, int(p.schema_version), p.rows, p.length) for p in head.parts),
        durable=mark is None or place <= (mark.base_offset, mark.byte_end),
        shown=shown is None or place <= (shown.base_offset, shown.byte_end),
    )


def _add_missing(report: Verification, error: CorruptWal) -> None:
    if error.details["offset_from"] == error.details["offset_to"]:
        return  # a misplaced segment, which was reported with its shard
    file, byte = str(error.details["file"]), int(error.details["byte"])
    shard = ShardId(int(file.split("/")[-2]))
    loss = Loss(file, byte, error.message, Offset(error.details["offset_from"]), None, shard)
    if loss not in report.losses:
        report.losses.append(loss)


def _verify_shard(
    files: Files,
    folder: str,
    shard: ShardId,
    stream: StreamId | None,
    report: Verification,
    elsewhere: KnownSchemas,
    torn: list[tuple[Loss, GroupNumber]],
) -> None:
    """Check one shard; add frames that lack rows at an unmarked end to `torn`, with their groups."""
    shard_dir = shard_folder(folder, shard)
    mark, shown = read_mark(files, shard_dir), read_readable(files, shard_dir)
    # Listed after the mark: a later mark may lie in a segment that isn't listed.
    segments, strays = segments_and_strays(files, shard_dir, looks=True)
    report.losses += [Loss(stray, 0, _STRAY, None, None, shard) for stray in strays]
    segments, misplaced = split_misplaced(files, shard, segments, stream)
    report.losses += [Loss(segment.path, 0, why, None, None, shard) for segment, _, why in misplaced]
    if mark is not None and shown is not None and shown.durable_offset < mark.durable_offset:
        report.hidden[shard] = mark.durable_offset - shown.durable_offset
    if mark is None and is_mark_damaged(files, shard_dir):
        why = "the mark can't be read; the stream's next writer makes it again"
        report.losses.append(Loss(f"{shard_dir}/{MARK_NAME}", 0, why, None, None, shard))
    chain = _Chain(files, shard, shard_dir, mark)
    segments = [segment for segment in segments if segment.base_offset >= chain.begin]
    frames = report.frames
    group = GroupNumber(0)
    for segment, end in zip(segments, ends_of(segments, mark), strict=True):
        checking = _SegmentCheck(shard, segment, mark, end, segment is segments[-1], torn)
        with skipping_dropped(files):
            report.losses += chain.losses_before(segment, end)
            group = _verify_segment(files, checking, report, elsewhere, group)
    if mark is None and report.frames > frames:
        report.unmarked.append(shard)
    report.losses += chain.losses_at_end()


@dataclass(frozen=True, slots=True)
class _SegmentCheck:
    """A segment to check."""

    shard: ShardId
    segment: SegmentFile
    mark: DurableMark | None
    end: Offset | None
    """Required end of its records."""
    is_last: bool
    torn: list[tuple[Loss, GroupNumber]]
    """Filled in: see `_verify_shard`."""


def _verify_segment(
    files: Files, checking: _SegmentCheck, report: Verification, elsewhere: KnownSchemas, group: GroupNumber
) -> GroupNumber:
    """Check one segment, which should begin after `group`; return the group after its last frame."""
    shard, segment, mark, is_last = checking.shard, checking.segment, checking.mark, checking.is_last
    report.segments += 1
    readable = report.readable.setdefault(shard, [])
    report.losses += losses_around(files, shard, segment, is_last=is_last)
    footer = footer_of(files, segment)
    byte_end = SEGMENT_HEADER_SIZE
    is_open = is_last and not isinstance(footer, SegmentFooter)
    torn: list[Loss] = []
    """In an open segment: what a crash may have left, unless a later group follows it …"""
    with_heads: list[tuple[Loss, GroupNumber]] = []
    torn_group = GroupNumber(0)
    behind: list[ScannedFrame] = []
    """… and the frames after that."""
    for found in salvage_segment(files, shard, segment, elsewhere, end=checking.end):
        loss = found if isinstance(found, Loss) else None if found.is_whole else found.loss(segment)
        if isinstance(found, CheckedFrame):
            header = found.frame.header
            group = GroupNumber(header.group + (0 if header.more or loss is not None else 1))
            if torn and mark is None and header.group > torn_group:
                report.losses += torn
                for frame in behind:
                    _add(files, segment, frame, report, readable)
                    byte_end = frame.end
                torn, behind, with_heads = [], [], []
            if loss is None and torn:
                behind.append(found.frame)
                continue
        if loss is None:
            assert isinstance(found, CheckedFrame)
            _add(files, segment, found.frame, report, readable)
            byte_end = found.frame.end
        elif is_open and (mark is None or _is_beyond(loss, segment, mark)):
            torn_group = torn_group if torn else group
            torn.append(loss)
            if isinstance(found, CheckedFrame):
                with_heads.append((loss, found.frame.header.group))
        else:
            report.losses.append(loss)
            if isinstance(found, CheckedFrame) and loss.tables is not None:
                assert loss.offset_from is not None
                assert loss.offset_to is not None
                report.readable_in_part.setdefault(shard, []).append((loss.offset_from, loss.offset_to))
                report.records += _rows(found.frame, but=loss.tables)
    if mark is None:
        checking.torn.extend(with_heads)
    size = files.size(segment.path)
    if is_open and size > byte_end and (torn or not any(loss.file == segment.path for loss in report.losses)):
        report.unfinished.append(
            Loss(segment.path, byte_end, f"{size - byte_end} bytes behind the last whole frame", None, None, shard)
        )
    return group


def _add(
    files: Files,
    segment: SegmentFile,
    frame: ScannedFrame,
    report: Verification,
    readable: list[tuple[Offset, Offset]],
) -> None:
    """Count a whole frame."""
    report.frames += 1
    report.bytes_checked += frame.length
    first, end = frame.header.first_offset, Offset(frame.header.first_offset + frame.header.count)
    if frame.header.kind is FrameKind.LOSS:
        loss = accepted_loss(files, segment, frame)
        report.accepted += [loss] if loss.offset_from != loss.offset_to else []
        return
    report.records += _rows(frame)
    if readable and readable[-1][1] == first:
        readable[-1] = (readable[-1][0], end)
    elif frame.header.count:
        readable.append((first, end))


def _rows(frame: ScannedFrame, *, but: Sequence[TableId] = ()) -> int:
    """Return the number of rows in a frame; a repaired frame has fewer rows than offsets."""
    return sum(part.rows for part in frame.header.parts if part.table_id not in but)


def _count(
    files: Files, counted: LogStats, segment: SegmentFile, header: SegmentHeader | None, found: ScannedFrame
) -> None:
    head = found.header
    counted.frames += 1
    if head.kind is FrameKind.LOSS:
        loss = accepted_loss(files, segment, found)
        counted.accepted += [loss] if loss.offset_from != loss.offset_to else []
        return
    counted.records += _rows(found)
    if head.kind is FrameKind.SCHEMA:
        with suppress(CorruptFrame):
            frame = decode_frame(files.read(segment.path, found.position, found.length), SchemaSet())
            if isinstance(frame, SchemaFrame):
                name = frame.schema.full_name
                counted.tables.setdefault(frame.schema.table_id, TableStats(frame.schema.table_id, name)).name = name
        return
    counted.first_seq = head.first_seq if counted.first_seq is None else min(counted.first_seq, head.first_seq)
    counted.last_seq = head.last_seq if counted.last_seq is None else max(counted.last_seq, head.last_seq)
    for part in head.parts:
        table = counted.tables.setdefault(part.table_id, TableStats(part.table_id, f"table {part.table_id}"))
        table.records += part.rows
        table.size_bytes += part.length
    with suppress(CorruptFrame):
        times = None if header is None else commit_times(found.head, header)
        if times is not None:
            oldest, newest = counted.oldest_commit_us, counted.newest_commit_us
            counted.oldest_commit_us = times[0] if oldest is None else min(oldest, times[0])
            counted.newest_commit_us = times[1] if newest is None else max(newest, times[1])


def _count_partitions(counted: LogStats, header: SegmentHeader, found: ScannedFrame) -> None:
    """Count the numbers of each table and partition of a frame, from its directory. Raises `CorruptFrame`."""
    _, batches = decode_directory(header.directory, found.operations, found.batches)
    spans = pa.table(
        {
            "table": batches.column("table_id"),
            "partition": batches.column("partition"),
            "first": batches.column("first_seq"),
            "last": pc.add(batches.column("first_seq"), batches.column("count")),
            "count": batches.column("count"),
        }
    ).group_by(["table", "partition"], use_threads=False)  # Arrow's threads may outlive the process, which then aborts
    for row in spans.aggregate([("first", "min"), ("last", "max"), ("count", "sum")]).to_pylist():
        key = (TableId(row["table"]), row["partition"])
        own = counted.partitions.setdefault(key, PartitionStats(*key))
        own.records += row["count_sum"]
        own.first_seq = min(own.first_seq, Seq(row["first_min"]))
        own.last_seq = max(own.last_seq, Seq(row["last_max"] - 1))
