"""Walking a segment's frames, in files that may end or be damaged anywhere.

A frame counts only if its head and every part of its payload pass their checksums *and* it follows
on: its epoch, region, shard and offset are the expected ones. Old frames, zeros or garbage after
the last one don't matter.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

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
from millstream.codec.log_segment import SEGMENT_HEADER_SIZE, SegmentHeader
from millstream.errors import CorruptFrame, TruncatedFrame, UnreadableBytes, UnsupportedFormat
from millstream.model.ids import GroupNumber
from millstream.model.positions import Offset
from millstream.ports import Files

_PAGE = 4096
_HEAD_BYTES_MAX = 1 << 28
_WINDOW = 4 << 20
"""Bytes read at once: small against any memory bound, large against a system call's cost."""


class Window:
    """Read-ahead view of a file's bytes."""

    def __init__(self, read: Callable[[int, int], bytes], ahead_bytes: int = _WINDOW) -> None:
        self._read = read
        self._ahead_bytes = ahead_bytes
        self._start = 0
        self._data = memoryview(b"")

    def at(self, position: int, length: int) -> memoryview:
        """Return bytes `[position, position + length)`; fewer if the file ends."""
        inside = position - self._start
        if inside < 0 or inside + length > len(self._data):
            try:
                self._data = memoryview(self._read(position, max(length, self._ahead_bytes)))
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
    window: Window,
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
        CorruptFrame, TruncatedFrame, UnsupportedFormat: the bytes at the position reached aren't
            the next frame.
    """
    expected = segment.base_offset if offset is None else offset
    while end is None or position < end:
        frame = read_frame(window, position, payload=payload)
        header = frame.header
        if (header.shard, header.region, header.epoch) != (segment.shard, segment.region, segment.epoch):
            raise CorruptFrame("a frame of another shard, region or epoch lies here")
        if header.first_offset != expected:
            raise CorruptFrame(f"a frame begins with offset {header.first_offset}, {expected} was to follow")
        yield frame
        expected = Offset(expected + header.count)
        position = frame.end


def read_frame(window: Window, position: int, *, payload: bool = True) -> ScannedFrame:
    """Return the frame at a position, verified without its neighbours."""
    try:
        extent = frame_extent(window.at(position, FRAME_HEADER_MIN))
    except UnsupportedFormat:
        _check_newer_head(window, position)
        raise
    if extent.head_length > _HEAD_BYTES_MAX:
        raise CorruptFrame("a frame's head can't be that long")
    head = bytes(window.at(position, extent.head_length))
    header, extent, operations, batches = decode_frame_head(head)
    if payload:
        verify_payload(header, window.at(position + extent.head_length, extent.length - extent.head_length))
    return ScannedFrame(header, head, position, extent.length, operations, batches)


def _check_newer_head(window: Window, position: int) -> None:
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
    window = Window(read)
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
            except (CorruptFrame, TruncatedFrame, UnsupportedFormat):
                continue
        if len(data) <= overlap:
            return
        position += (len(data) - overlap) // 8 * 8 or 8
