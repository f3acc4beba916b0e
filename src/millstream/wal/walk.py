"""Walking over a segment that may be damaged anywhere: what is valid, and between it what can't be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeAlias
from uuid import UUID

from millstream.codec.log_frame import FrameHeader
from millstream.codec.log_segment import SEGMENT_HEADER_SIZE, SEGMENT_TRAILER_SIZE, SegmentFooter, SegmentHeader
from millstream.errors import CorruptFrame, UnsupportedFormat
from millstream.model.ids import ShardId, StreamId
from millstream.model.positions import Offset
from millstream.ports import Files
from millstream.wal.layout import SegmentFile
from millstream.wal.scan import ScannedFrame, Window, frames_behind, read_frame, reader_of, scan_frames

_NO_STREAM: Final = StreamId(UUID(int=0))


@dataclass(frozen=True, slots=True)
class Loss:
    """Something that can't be read."""

    file: str
    byte: int
    why: str
    offset_from: Offset | None
    offset_to: Offset | None
    """Offsets `[from, to)` can't be read; None where no records are lost, or their end isn't known."""
    shard: ShardId | None = None


Found: TypeAlias = ScannedFrame | Loss


def header_of(files: Files, segment: SegmentFile) -> SegmentHeader | None:
    """The segment's header; None where it can't be read."""
    with suppress(CorruptFrame, UnsupportedFormat):
        return SegmentHeader.decode(files.read(segment.path, 0, SEGMENT_HEADER_SIZE))
    return None


def footer_of(files: Files, segment: SegmentFile) -> SegmentFooter | CorruptFrame | None:
    """The footer, what is wrong with it, or None where there is none."""
    try:
        return SegmentFooter.decode_tail(reader_of(files, segment.path), files.size(segment.path))
    except CorruptFrame as error:
        return error


def walk_segment(
    files: Files,
    shard: ShardId,
    segment: SegmentFile,
    *,
    is_last: bool,
    payload: bool = True,
) -> Iterator[Found]:
    """A segment's valid frames and, between them, what can't be read.

    With a footer its index finds what follows on damage; without one, a frame is looked for at every place where one may
    stand. Bytes behind the last frame of a shard's last segment are no damage: they aren't reported here.
    """
    header = header_of(files, segment)
    footer = footer_of(files, segment)
    if isinstance(footer, SegmentFooter):
        yield from _walk_by_footer(files, shard, segment, footer, payload=payload)
        return
    read = reader_of(files, segment.path)
    size = files.size(segment.path)
    position, offset = SEGMENT_HEADER_SIZE, segment.base_offset
    while position < size:
        try:
            for frame in scan_like(Window(read), header, shard, position, offset, payload=payload):
                yield frame
                position, offset = frame.end, Offset(frame.header.first_offset + frame.header.count)
            return
        except (CorruptFrame, UnsupportedFormat) as error:
            following = next(
                (
                    frame
                    for frame in frames_behind(read, position + 8, size)
                    if frame.header.shard == shard
                    and frame.header.first_offset >= offset
                    and (header is None or frame.header.epoch == header.epoch)
                ),
                None,
            )
            if following is None:
                if not (is_last or _ends_with_footer(read, size, position)):
                    yield Loss(segment.path, position, str(error), offset, None, shard)
                return
            yield Loss(segment.path, position, str(error), offset, following.header.first_offset, shard)
            position, offset = following.position, following.header.first_offset


def scan_like(
    window: Window, header: SegmentHeader | None, shard: ShardId, position: int, offset: Offset, *, payload: bool
) -> Iterator[ScannedFrame]:
    """Frames that follow on; where the header is lost, the first frame says what the others must be like."""
    if header is None:
        first = read_frame(window, position, payload=payload)
        if first.header.shard != shard:
            raise CorruptFrame("a frame of another shard lies here")
        header = _header_like(first.header)
    yield from scan_frames(window, header, position=position, offset=offset, payload=payload)


def _header_like(frame: FrameHeader) -> SegmentHeader:
    """What a lost header must have said, but for the stream, which frames don't name."""
    return SegmentHeader(_NO_STREAM, frame.region, frame.shard, frame.epoch, frame.first_offset)


def _walk_by_footer(
    files: Files, shard: ShardId, segment: SegmentFile, footer: SegmentFooter, *, payload: bool
) -> Iterator[Found]:
    window = Window(reader_of(files, segment.path))
    for entry in footer.frames:
        try:
            frame = read_frame(window, entry.position, payload=payload)
            if (frame.header.shard, frame.header.first_offset, frame.length) != (shard, entry.offset, entry.length):
                raise CorruptFrame("another frame lies here than the footer says")
            yield frame
        except (CorruptFrame, UnsupportedFormat) as error:
            end = Offset(entry.offset + entry.count)
            yield Loss(segment.path, entry.position, str(error), entry.offset, end, shard)


def _ends_with_footer(read: Callable[[int, int], bytes], size: int, position: int) -> bool:
    """Whether what lies behind the last frame is just a (damaged) footer."""
    return position < size and SegmentFooter.is_trailer(read(size - SEGMENT_TRAILER_SIZE, SEGMENT_TRAILER_SIZE))
