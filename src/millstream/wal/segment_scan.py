"""Iterating over a segment's frames, in files that may end or be damaged anywhere.

A frame counts only if its head and every part of its payload pass their checksums *and* it follows
on: its epoch, region, shard and offset are the expected ones. Old frames, zeros or garbage after
the last one don't matter. `scan_frames` ends at the first bad byte; `scan_segment` yields the loss
and goes on behind it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeAlias
from uuid import UUID

import numpy as np

from millstream.codec.checksums import Bytes, crc32c
from millstream.codec.log_frame import (
    BATCH_HEADER_VERSIONS,
    FRAME_HEADER_MIN,
    FrameHeader,
    FrameKind,
    RecordsFrame,
    decode_frame,
    decode_frame_head,
    decode_frame_header,
    frame_extent,
    verify_payload,
)
from millstream.codec.log_schemas import SchemaSet
from millstream.codec.log_segment import SEGMENT_HEADER_SIZE, SegmentFooter, SegmentHeader
from millstream.errors import CorruptFrame, UnreadableBytes, UnsupportedFormat
from millstream.model.ids import GroupNumber, ShardId, StreamId, TableId
from millstream.model.marks import DurableMark
from millstream.model.positions import Offset, Seq
from millstream.ports import Files
from millstream.wal.layout import SegmentFile

_PAGE = 4096
_HEAD_BYTES_MAX = 1 << 28
_WINDOW = 4 << 20
"""Bytes read at once: small against any memory bound, large against a system call's cost."""
_ALONE_BYTES = 4 << 10
"""Bytes read at a place far from what was read last: most likely the next place is as far."""
_NEAR_BYTES = 16 << 10
"""Up to this distance, reading ahead costs less than the system calls that it saves."""
NO_STREAM: Final = StreamId(UUID(int=0))
UNREADABLE_HEADER: Final = "the segment header can't be read"


class ReadAhead:
    """Read-ahead view of a file's bytes; it reads ahead once a place follows on the last."""

    def __init__(self, read: Callable[[int, int], bytes], ahead_bytes: int = _WINDOW) -> None:
        self._read = read
        self._ahead_bytes = ahead_bytes
        self._start = 0
        self._data = memoryview(b"")

    def at(self, position: int, length: int) -> memoryview:
        """Return bytes `[position, position + length)`; fewer if the file ends."""
        inside = position - self._start
        if inside < 0 or inside + length > len(self._data):
            is_near = self._data and 0 < inside <= max(len(self._data), _NEAR_BYTES)
            ahead = self._ahead_bytes if is_near else _ALONE_BYTES
            try:
                self._data = memoryview(self._read(position, max(length, ahead)))
            except UnreadableBytes:
                # Only the read-ahead may touch an unreadable page.
                self._data = memoryview(self._read(position, length))
            self._start, inside = position, 0
        return self._data[inside : inside + length]


@dataclass(frozen=True, slots=True)
class ScannedFrame:
    """A frame at its position in the file."""

    header: FrameHeader
    head: bytes
    position: int
    length: int
    operations: Bytes = b""
    batches: Bytes = b""
    """The encoded directory, from the head."""
    payload: memoryview | None = None
    """The bytes behind the head, if they were read along with it."""

    @property
    def end(self) -> int:
        """Position of the next frame."""
        return self.position + self.length


def read_filled(read: Callable[[int, int], bytes], position: int, length: int) -> bytes:
    """Return bytes of a file, with zeros in place of those that the disk can't return."""
    try:
        return read(position, length)
    except UnreadableBytes:
        pieces = []
        end = position + length
        while position < end:
            page_end = min(end, (position // _PAGE + 1) * _PAGE)
            try:
                pieces.append(read(position, page_end - position))
            except UnreadableBytes:
                pieces.append(bytes(page_end - position))
            position = page_end
        return b"".join(pieces)


def reader_of(files: Files, path: str) -> Callable[[int, int], bytes]:
    """Return a function (position, length) → bytes of one file."""
    return lambda position, length: files.read(path, position, length)


def scan_frames(
    window: ReadAhead,
    segment: SegmentHeader,
    *,
    position: int = SEGMENT_HEADER_SIZE,
    offset: Offset | None = None,
    end: int | None = None,
    payload: bool = True,
) -> Iterator[ScannedFrame]:
    """Yield the frames from a position on, in order, each verified first.

    Args:
        window: the segment's file.
        segment: its header.
        position: where a frame begins.
        offset: the offset that this frame begins with; by default the segment's base.
        end: where to stop; without it the walk ends with an error, at the file's end or the first
            bad byte.
        payload: whether to verify payloads too, or heads only.

    Raises:
        CorruptFrame, UnsupportedFormat: the bytes at the position reached aren't
            the next frame.
    """
    expected = segment.base_offset if offset is None else offset
    while end is None or position < end:
        frame = read_frame(window, position, payload=payload)
        header = frame.header
        if (header.shard, header.region, header.epoch) != (segment.shard, segment.region, segment.epoch):
            raise CorruptFrame("the frame here belongs to another shard, region or epoch")
        if header.first_offset != expected:
            raise CorruptFrame(f"a frame begins with offset {header.first_offset} instead of {expected}")
        yield frame
        expected = Offset(expected + header.count)
        position = frame.end


def read_frame(window: ReadAhead, position: int, *, payload: bool | None = True) -> ScannedFrame:
    """Return the frame at a position, verified without its neighbours.

    `payload` is as in `scan_frames`; with None it is read and not verified.
    """
    try:
        extent = frame_extent(window.at(position, FRAME_HEADER_MIN))
    except UnsupportedFormat:
        _check_newer_head(window, position)
        raise
    if extent.head_length > _HEAD_BYTES_MAX:
        raise CorruptFrame("the length of a frame's head is invalid")
    head = bytes(window.at(position, extent.head_length))
    header, extent, operations, batches = decode_frame_head(head, extent)
    rows = None
    if payload is not False:
        rows = window.at(position + extent.head_length, extent.length - extent.head_length)
    if payload and rows is not None:
        verify_payload(header, rows)
    return ScannedFrame(header, head, position, extent.length, operations, batches, rows if payload is None else None)


def _check_newer_head(window: ReadAhead, position: int) -> None:
    """Distinguish a newer version's frame from garbage: 12 bytes and the CRC are the same in every version."""
    length, crc, head_length = struct.unpack("<III", window.at(position, 12))
    if not FRAME_HEADER_MIN <= head_length <= length or head_length > _HEAD_BYTES_MAX:
        raise CorruptFrame("no frame begins here")
    head = bytes(window.at(position, head_length))
    if len(head) < head_length or crc != crc32c(head[:4], head[8:]):
        raise CorruptFrame("no frame begins here")


def lost_groups(frames: Iterable[ScannedFrame], before: GroupNumber) -> list[range]:
    """Return the numbers of groups that may have had a part where loss frames stand now.

    Args:
        frames: in order.
        before: the group before the first of them.
    """
    found = []
    first = before + 1
    for frame in frames:
        header = frame.header
        if header.kind is FrameKind.LOSS:
            found.append(range(first, header.group + (0 if header.more else 1)))
        first = header.group + (0 if header.more else 1)
    return found


def commit_times(head: bytes, segment: SegmentHeader) -> tuple[int, int] | None:
    """Return the least and greatest commit time, µs, of a frame's operations, from its verified head."""
    header, _ = decode_frame_header(head)
    if header.kind is not FrameKind.RECORDS:
        return None
    frame = decode_frame(head, SchemaSet(segment.directory), read_payload=lambda _position, _length: b"")
    if not isinstance(frame, RecordsFrame):
        return None
    times = [t.value for t in frame.operations.column("commit_ts") if t.is_valid]
    return (min(times), max(times)) if times else None


def frames_behind(read: Callable[[int, int], bytes], position: int, size: int) -> Iterator[ScannedFrame]:
    """Yield frames with a valid head anywhere in `[position, size)`: they distinguish a torn tail from damage.

    Frames stand at multiples of 8, and their third word has version, kind and flags, so candidates
    are found by a vector comparison.
    """
    position += -position % 8
    window = ReadAhead(read)
    overlap = FRAME_HEADER_MIN
    while position + overlap <= size:
        data = read_filled(read, position, min(_WINDOW, size - position))
        words = np.frombuffer(data, dtype="<u4", count=len(data) // 8 * 2)
        kinds = words[3::2] if len(words) > 3 else words[:0]
        # Word 3 of a frame: version, kind, flags. Words 1, 3, 5 … are those at +4, +12, +20 of each multiple of 8.
        known = np.isin(
            kinds & 0xFFFF, [version | kind << 8 for version in BATCH_HEADER_VERSIONS for kind in FrameKind]
        )
        for candidate in np.flatnonzero(known).tolist():
            at = position + 8 * candidate
            try:
                if frame_extent(window.at(at, FRAME_HEADER_MIN)).length <= size - at:
                    yield read_frame(window, at, payload=False)
            except (CorruptFrame, UnsupportedFormat):
                continue
        if len(data) <= overlap:
            return
        position += (len(data) - overlap) // 8 * 8 or 8


@dataclass(frozen=True, slots=True)
class Loss:
    """Something that can't be read."""

    file: str
    byte: int
    why: str
    offset_from: Offset | None
    offset_to: Offset | None
    """Offsets `[from, to)` can't be read; None if no records are lost, or their end isn't known."""
    shard: ShardId | None = None
    byte_to: int | None = None
    """Exclusive end of the bytes; None if it isn't known."""
    first_seq: Seq | None = None
    last_seq: Seq | None = None
    """Bounds of the lost records' numbers, if known."""
    tables: tuple[TableId, ...] | None = None
    """Tables whose records are lost in the range; None for all."""


FrameOrLoss: TypeAlias = ScannedFrame | Loss


def header_of(files: Files, segment: SegmentFile) -> SegmentHeader | None:
    """Return the segment's header; None if it can't be read."""
    with suppress(CorruptFrame, UnsupportedFormat):
        return SegmentHeader.decode(files.read(segment.path, 0, SEGMENT_HEADER_SIZE))
    return None


def footer_of(files: Files, segment: SegmentFile) -> SegmentFooter | CorruptFrame | None:
    """Return the footer, or the error in it, or None if there is none."""
    try:
        return SegmentFooter.decode_tail(reader_of(files, segment.path), files.size(segment.path))
    except CorruptFrame as error:
        return error


def losses_around(files: Files, shard: ShardId, segment: SegmentFile, *, is_last: bool) -> list[Loss]:
    """Return the damage to a segment's header and footer: no records are lost with them."""
    losses = []
    if header_of(files, segment) is None:
        losses.append(Loss(segment.path, 0, UNREADABLE_HEADER, None, None, shard))
    footer = footer_of(files, segment)
    if not isinstance(footer, SegmentFooter) and not is_last:
        why = "the segment's footer is missing" if footer is None else str(footer)
        losses.append(Loss(segment.path, files.size(segment.path), why, None, None, shard))
    return losses


def loss_at(files: Files, shard: ShardId, segment: SegmentFile, byte: int) -> Loss | None:
    """Return the loss at a byte where no frame can be read; None if only the end of the log could show it."""
    for found in scan_segment(files, shard, segment, end=None, payload=False):
        if isinstance(found, Loss) and found.byte <= byte and (found.byte_to is None or byte < found.byte_to):
            return found
    return None


def ends_of(segments: Sequence[SegmentFile], mark: DurableMark | None) -> list[Offset | None]:
    """Return the required end of each segment's records; None if nothing gives it (the last one, without a mark)."""
    ends: list[Offset | None] = [following.base_offset for following in segments[1:]]
    if segments:
        holds = mark is not None and mark.durable_offset >= segments[-1].base_offset
        ends.append(mark.durable_offset if mark is not None and holds else None)
    return ends


def scan_segment(
    files: Files, shard: ShardId, segment: SegmentFile, *, end: Offset | None, payload: bool = True
) -> Iterator[FrameOrLoss]:
    """Yield a segment's valid frames and, between them, what can't be read.

    With a footer, its index finds what follows damage; without one, a frame is looked for at every
    possible position. Bytes after the last frame are no damage if the records are complete without
    them: they aren't reported.

    Args:
        shard: the segment's shard.
        end: the required end of its records; see `ends_of`.
        payload: whether to verify payloads too, or heads only.
    """
    header = header_of(files, segment)
    footer = footer_of(files, segment)
    if isinstance(footer, SegmentFooter):
        yield from _scan_by_footer(files, shard, segment, footer, payload=payload)
        return
    read = reader_of(files, segment.path)
    size = files.size(segment.path)
    position, offset = SEGMENT_HEADER_SIZE, segment.base_offset
    while True:
        try:
            for frame in scan_like(ReadAhead(read), header, shard, position, offset, payload=payload):
                if frame.end > size:
                    raise CorruptFrame("the file ends within a frame")
                yield frame
                position, offset = frame.end, Offset(frame.header.first_offset + frame.header.count)
            return  # pragma: no cover - a walk without an end is ended by an error
        except (CorruptFrame, UnsupportedFormat) as error:
            following = _behind(read, header, shard, position, offset, size)
            if following is None:
                if end is not None and offset < end:
                    yield Loss(segment.path, position, str(error), offset, end, shard)
                return
            upto = following.header.first_offset
            yield Loss(segment.path, position, str(error), offset, upto, shard, following.position)
            position, offset = following.position, upto


def _behind(
    read: Callable[[int, int], bytes],
    header: SegmentHeader | None,
    shard: ShardId,
    position: int,
    offset: Offset,
    size: int,
) -> ScannedFrame | None:
    """Return the next frame after a bad place that may belong to this segment."""
    for frame in frames_behind(read, position + 8, size):
        fits = frame.header.shard == shard and frame.header.first_offset >= offset
        if fits and (header is None or frame.header.epoch == header.epoch):
            return frame
    return None


def scan_like(
    window: ReadAhead, header: SegmentHeader | None, shard: ShardId, position: int, offset: Offset, *, payload: bool
) -> Iterator[ScannedFrame]:
    """Yield consecutive frames; if the header is lost, the first frame shows what the others must be like."""
    if header is None:
        first = read_frame(window, position, payload=payload)
        if first.header.shard != shard:
            raise CorruptFrame("the frame here belongs to another shard")
        header = header_like(first.header)
    yield from scan_frames(window, header, position=position, offset=offset, payload=payload)


def header_like(frame: FrameHeader) -> SegmentHeader:
    """Return what a lost header must have had, except the stream, which frames don't name."""
    return SegmentHeader(NO_STREAM, frame.region, frame.shard, frame.epoch, frame.first_offset)


def _scan_by_footer(
    files: Files, shard: ShardId, segment: SegmentFile, footer: SegmentFooter, *, payload: bool
) -> Iterator[FrameOrLoss]:
    window = ReadAhead(reader_of(files, segment.path))
    for entry in footer.frames:
        try:
            frame = read_frame(window, entry.position, payload=payload)
            if (frame.header.shard, frame.header.first_offset, frame.length) != (shard, entry.offset, entry.length):
                raise CorruptFrame("the frame here differs from the one in the footer")
            yield frame
        except (CorruptFrame, UnsupportedFormat) as error:
            yield Loss(
                segment.path,
                entry.position,
                str(error),
                entry.offset,
                Offset(entry.offset + entry.count),
                shard,
                entry.position + entry.length,
                entry.first_seq if entry.count else None,
                entry.last_seq if entry.count else None,
            )
