"""Walking a segment that may be damaged anywhere: valid frames, and the losses between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeAlias
from uuid import UUID

from millstream.codec.log_directory import DIRECTORIES
from millstream.codec.log_frame import FrameHeader
from millstream.codec.log_segment import SEGMENT_HEADER_SIZE, SegmentFooter, SegmentHeader
from millstream.errors import CorruptFrame, UnsupportedFormat
from millstream.model.ids import ShardId, StreamId, TableId
from millstream.model.marks import DurableMark
from millstream.model.positions import Offset, Seq
from millstream.ports import Files
from millstream.wal.layout import SegmentFile
from millstream.wal.scan import ScannedFrame, Window, frames_behind, read_frame, reader_of, scan_frames

NO_STREAM: Final = StreamId(UUID(int=0))
UNREADABLE_HEADER: Final = "the segment header can't be read"


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


Found: TypeAlias = ScannedFrame | Loss


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
    for found in walk_segment(files, shard, segment, end=None, payload=False):
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


def walk_segment(
    files: Files, shard: ShardId, segment: SegmentFile, *, end: Offset | None, payload: bool = True
) -> Iterator[Found]:
    """Yield a segment's valid frames and, between them, what can't be read.

    With a footer, its index finds what follows damage; without one, a frame is looked for at every
    possible position. Bytes after the last frame are no damage if the records are complete without
    them: they aren't reported.

    Args:
        files: the file system.
        shard: the segment's shard.
        segment: the segment to walk.
        end: the required end of its records; see `ends_of`.
        payload: whether to verify payloads too, or heads only.
    """
    header = header_of(files, segment)
    footer = footer_of(files, segment)
    if isinstance(footer, SegmentFooter):
        yield from _walk_by_footer(files, shard, segment, footer, payload=payload)
        return
    read = reader_of(files, segment.path)
    size = files.size(segment.path)
    position, offset = SEGMENT_HEADER_SIZE, segment.base_offset
    while True:
        try:
            for frame in scan_like(Window(read), header, shard, position, offset, payload=payload):
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
    window: Window, header: SegmentHeader | None, shard: ShardId, position: int, offset: Offset, *, payload: bool
) -> Iterator[ScannedFrame]:
    """Yield consecutive frames; if the header is lost, the first frame shows what the others must be like."""
    if header is None:
        first = read_frame(window, position, payload=payload)
        if first.header.shard != shard:
            raise CorruptFrame("a frame of another shard lies here")
        header = header_like(first.header)
    yield from scan_frames(window, header, position=position, offset=offset, payload=payload)


def header_like(frame: FrameHeader) -> SegmentHeader:
    """Return what a lost header must have had, except the stream, which frames don't name."""
    directory = DIRECTORIES[frame.numbering]
    return SegmentHeader(NO_STREAM, frame.region, frame.shard, frame.epoch, frame.first_offset, directory=directory)


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
