"""Looking at a log, whole or damaged, live or copied: `wal ls | inspect | verify | stats`.

Everything reads from the folder alone and goes on past damage: what can't be read is named by file, byte and offset range,
and what lies behind it is still shown. Nothing is changed. Without marks (a copied folder) every valid frame is shown, and
`Verification.has_marks` says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from millstream.codec.log_frame import FrameKind, RecordsFrame, SchemaFrame, SchemaSet, decode_frame
from millstream.codec.log_segment import SEGMENT_HEADER_SIZE, SEGMENT_TRAILER_SIZE, SegmentFooter, SegmentHeader
from millstream.errors import CorruptFrame, MillstreamError, UnexpectedFile, UnsupportedFormat
from millstream.model.ids import Epoch, GroupNumber, ShardId, TableId
from millstream.model.positions import Offset, Seq
from millstream.ports import Files
from millstream.wal.files import RealFiles
from millstream.wal.layout import SegmentFile, list_segments, list_shards, shard_folder
from millstream.wal.mark import DurableMark, read_dropped, read_mark
from millstream.wal.scan import ScannedFrame, Window, commit_times, reader_of
from millstream.wal.walk import Loss, footer_of, header_of, scan_like, walk_segment


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """One segment file."""

    shard: ShardId
    path: str
    state: str
    """`sealed`, `open` (no footer: being written, or left by a crash) or `damaged` (header or footer can't be read)."""
    base_offset: Offset
    end_offset: Offset | None
    """Exclusive; of an open one as far as whole frames go. None where damage hides it."""
    records: int | None
    frames: int | None
    size_bytes: int
    epoch: Epoch | None
    created_ns: int | None
    first_seq: Seq | None
    last_seq: Seq | None


@dataclass(frozen=True, slots=True)
class FrameInfo:
    """One frame."""

    shard: ShardId
    path: str
    position: int
    length: int
    kind: str
    """`schema` or `records`."""
    epoch: Epoch
    group: GroupNumber
    more: bool
    first_offset: Offset
    count: int
    first_seq: Seq
    last_seq: Seq
    commit_ts_us: tuple[int, int] | None
    """Least and greatest commit time in it."""
    tables: tuple[tuple[TableId, int, int, int], ...]
    """(table id, schema version, rows, bytes)"""
    durable: bool
    """Whether readers see it: it lies in front of the shard's mark."""


@dataclass(slots=True)
class Verification:
    """What `verify` found."""

    segments: int = 0
    frames: int = 0
    records: int = 0
    bytes_checked: int = 0
    losses: list[Loss] = field(default_factory=list)
    """Damage: records, or what is needed to trust them, can't be read."""
    unfinished: list[Loss] = field(default_factory=list)
    """Bytes behind the last whole frame, as a crash or a write that is going on leaves them: nothing durable is lost."""
    readable: dict[ShardId, list[tuple[Offset, Offset]]] = field(default_factory=dict)
    """What is not lost: by shard the ranges of offsets that were read and passed."""
    has_marks: bool = True

    @property
    def is_whole(self) -> bool:
        """Whether nothing is lost."""
        return not self.losses


@dataclass(slots=True)
class TableStats:
    """What the log holds of one table."""

    table_id: TableId
    name: str
    records: int = 0
    size_bytes: int = 0
    """Of its payload."""


@dataclass(slots=True)
class LogStats:
    """What the log holds."""

    segments: int = 0
    size_bytes: int = 0
    frames: int = 0
    records: int = 0
    groups: int = 0
    first_seq: Seq | None = None
    last_seq: Seq | None = None
    persisted_upto: Seq | None = None
    oldest_commit_us: int | None = None
    newest_commit_us: int | None = None
    dropped_upto: Seq = Seq(0)
    tables: dict[TableId, TableStats] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)


__all__ = [
    "FrameInfo", "LogStats", "Loss", "SegmentInfo", "TableStats", "Verification", "inspect", "ls", "stats", "verify",
]  # fmt: skip

_START: Final = Seq(0)


def ls(folder: str, *, files: Files | None = None) -> list[SegmentInfo]:
    """All segments, shard by shard, in order. Opens headers and footers only, and walks over open segments."""
    files = RealFiles() if files is None else files
    return [
        _segment_info(files, shard, segment)
        for shard in list_shards(files, folder)
        for segment in list_segments(files, shard_folder(folder, shard))
    ]


def inspect(
    folder: str,
    *,
    after: Seq = _START,
    upto: Seq | None = None,
    table: TableId | None = None,
    files: Files | None = None,
) -> Iterator[FrameInfo | Loss]:
    """The frames with numbers in `(after, upto]` and rows (or the schema) of a table, shard by shard; losses in between."""
    files = RealFiles() if files is None else files
    for shard, segment, mark, is_last in _segments(files, folder):
        header = header_of(files, segment)
        for found in walk_segment(files, shard, segment, is_last=is_last):
            if isinstance(found, Loss):
                yield found
                continue
            head = found.header
            if head.group_last_seq <= after or (
                upto is not None and head.kind is FrameKind.RECORDS and head.first_seq > upto
            ):
                continue
            if table is not None and all(part.table_id != table for part in head.parts):
                continue
            yield _frame_info(shard, segment, found, header, mark)


def verify(folder: str, *, files: Files | None = None) -> Verification:
    """Read everything: every checksum, every row's decoding, the chain of segments, the marks.

    A folder that isn't there is a whole, empty log.
    """
    files = RealFiles() if files is None else files
    report = Verification()
    for shard in list_shards(files, folder):
        _verify_shard(files, folder, shard, report)
    return report


def stats(folder: str, *, files: Files | None = None) -> LogStats:
    """Counts over the whole log, by table too; reads heads of frames, not rows."""
    files = RealFiles() if files is None else files
    counted = LogStats()
    groups: set[GroupNumber] = set()
    for shard in list_shards(files, folder):
        shard_dir = shard_folder(folder, shard)
        with suppress(MillstreamError):
            mark = read_mark(files, shard_dir)
            if mark is not None:
                counted.persisted_upto = Seq(max(mark.persisted_upto, counted.persisted_upto or 0))
            dropped = read_dropped(files, shard_dir)
            if dropped is not None:
                counted.dropped_upto = max(counted.dropped_upto, dropped.seq)
    for shard, segment, _, is_last in _segments(files, folder):
        counted.segments += 1
        counted.size_bytes += files.size(segment.path)
        header = header_of(files, segment)
        for found in walk_segment(files, shard, segment, is_last=is_last, payload=False):
            if isinstance(found, Loss):
                counted.losses.append(found)
            else:
                groups.add(found.header.group)
                _count(files, counted, segment, header, found)
    counted.groups = len(groups)
    return counted


# --- walking over what may be damaged --------------------------------------------------------------------------------


def _segments(files: Files, folder: str) -> Iterator[tuple[ShardId, SegmentFile, DurableMark | None, bool]]:
    """Every segment with its shard's mark and whether it is the shard's last."""
    for shard in list_shards(files, folder):
        shard_dir = shard_folder(folder, shard)
        segments = list_segments(files, shard_dir)
        mark = read_mark(files, shard_dir)
        for place, segment in enumerate(segments):
            yield shard, segment, mark, place + 1 == len(segments)


# --- the four views --------------------------------------------------------------------------------------------------


def _segment_info(files: Files, shard: ShardId, segment: SegmentFile) -> SegmentInfo:
    header = header_of(files, segment)
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
            window = Window(reader_of(files, segment.path))
            for frame in scan_like(window, header, shard, SEGMENT_HEADER_SIZE, segment.base_offset, payload=False):
                entries.append((frame.header.first_seq, frame.header.last_seq, frame.header.count))
        end = Offset(segment.base_offset + sum(count for _, _, count in entries))
    if header is None:
        state = "damaged"
    numbered = [(first, last) for first, last, count in entries if count]
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
    )


def _frame_info(
    shard: ShardId, segment: SegmentFile, found: ScannedFrame, header: SegmentHeader | None, mark: DurableMark | None
) -> FrameInfo:
    head = found.header
    times = None
    with suppress(CorruptFrame):
        times = None if header is None else commit_times(found.head, header)
    durable = mark is None or (segment.base_offset, found.end) <= (mark.base_offset, mark.byte_end)
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
        durable=durable,
    )


def _verify_shard(files: Files, folder: str, shard: ShardId, report: Verification) -> None:
    shard_dir = shard_folder(folder, shard)
    try:
        segments = list_segments(files, shard_dir)
    except UnexpectedFile as error:
        report.losses.append(Loss(str(error.details["file"]), 0, error.message, None, None, shard))
        return
    mark = read_mark(files, shard_dir)
    dropped = read_dropped(files, shard_dir)
    if mark is None:
        report.has_marks = False
    if dropped is not None:
        segments = [segment for segment in segments if segment.base_offset >= dropped.offset]
    readable = report.readable.setdefault(shard, [])
    expected = Offset(0) if dropped is None else dropped.offset
    if mark is None and segments:
        expected = segments[0].base_offset
    previous_hash: bytes | None = None
    for place, segment in enumerate(segments):
        is_last = place + 1 == len(segments)
        if segment.base_offset > expected and not _is_lost(report, shard, expected):
            report.losses.append(
                Loss(segment.path, 0, "segments before it are missing", expected, segment.base_offset, shard)
            )
        expected = max(expected, _verify_segment(files, shard, segment, report, readable, is_last=is_last))
        header = header_of(files, segment)
        if header is not None and previous_hash is not None and header.previous_hash != previous_hash:
            why = "it doesn't follow on the segment before it: one of them was replaced"
            report.losses.append(Loss(segment.path, 0, why, None, None, shard))
        previous_hash = _footer_hash(files, segment)
    if mark is not None and mark.durable_offset > expected and not _is_lost(report, shard, expected):
        path = segments[-1].path if segments else shard_dir
        at = files.size(path) if segments else 0
        report.losses.append(
            Loss(path, at, "durable records are missing at the end", expected, mark.durable_offset, shard)
        )


def _is_lost(report: Verification, shard: ShardId, offset: Offset) -> bool:
    """Whether a loss has been reported already that goes on at the offset."""
    return any(
        loss.shard == shard and loss.offset_from is not None and loss.offset_from <= offset and loss.offset_to is None
        for loss in report.losses
    )


def _footer_hash(files: Files, segment: SegmentFile) -> bytes | None:
    if not isinstance(footer_of(files, segment), SegmentFooter):
        return None
    size = files.size(segment.path)
    length = SegmentFooter.size_in(files.read(segment.path, size - SEGMENT_TRAILER_SIZE, SEGMENT_TRAILER_SIZE))
    return SegmentFooter.encoded_hash(files.read(segment.path, size - length, length))


def _verify_segment(
    files: Files,
    shard: ShardId,
    segment: SegmentFile,
    report: Verification,
    readable: list[tuple[Offset, Offset]],
    *,
    is_last: bool,
) -> Offset:
    """Check one segment; returns the offset behind what it tells of."""
    report.segments += 1
    header = header_of(files, segment)
    if header is None:
        report.losses.append(Loss(segment.path, 0, "the segment header can't be read", None, None, shard))
    footer = footer_of(files, segment)
    if isinstance(footer, CorruptFrame) and not is_last:
        report.losses.append(Loss(segment.path, files.size(segment.path), str(footer), None, None, shard))
    schemas = SchemaSet() if header is None else SchemaSet(header.directory)
    end = segment.base_offset
    byte_end = SEGMENT_HEADER_SIZE
    for found in walk_segment(files, shard, segment, is_last=is_last):
        loss = found if isinstance(found, Loss) else _decode(files, shard, segment, found, schemas)
        if loss is not None:
            report.losses.append(loss)
            end = end if loss.offset_to is None else max(end, loss.offset_to)
            continue
        assert isinstance(found, ScannedFrame)
        report.frames += 1
        report.records += found.header.count
        report.bytes_checked += found.length
        byte_end = found.end
        first, end = found.header.first_offset, Offset(found.header.first_offset + found.header.count)
        if readable and readable[-1][1] == first:
            readable[-1] = (readable[-1][0], end)
        elif found.header.count:
            readable.append((first, end))
    size = files.size(segment.path)
    if is_last and not isinstance(footer, SegmentFooter) and size > byte_end:
        report.unfinished.append(
            Loss(segment.path, byte_end, f"{size - byte_end} bytes behind the last whole frame", None, None, shard)
        )
    return end


def _decode(files: Files, shard: ShardId, segment: SegmentFile, found: ScannedFrame, schemas: SchemaSet) -> Loss | None:
    """Decode a frame with all its rows: a checksum may hold over what makes no sense."""
    try:
        frame = decode_frame(files.read(segment.path, found.position, found.length), schemas)
        if isinstance(frame, SchemaFrame):
            return None
        assert isinstance(frame, RecordsFrame)
        for table_id in frame.table_ids():
            for _ in frame.records(table_id):
                continue
    except CorruptFrame as error:
        head = found.header
        end = Offset(head.first_offset + head.count)
        return Loss(segment.path, found.position, str(error), head.first_offset, end, shard)
    return None


def _count(
    files: Files, counted: LogStats, segment: SegmentFile, header: SegmentHeader | None, found: ScannedFrame
) -> None:
    head = found.header
    counted.frames += 1
    counted.records += head.count
    if head.kind is FrameKind.SCHEMA:
        with suppress(CorruptFrame):
            frame = decode_frame(files.read(segment.path, found.position, found.length), SchemaSet())
            if isinstance(frame, SchemaFrame):
                schema = frame.schema
                name = f"{schema.namespace}.{schema.name}"
                counted.tables.setdefault(schema.table_id, TableStats(schema.table_id, name)).name = name
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
