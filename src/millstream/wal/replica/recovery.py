"""Recovery of a follower's folder after any crash: how far each shard's bytes are the leader's, verified.

Segments before the one that a shard's mark names are durable whole: only their chain of headers and
footers is read, as in a writer's recovery. The others are verified frame by frame, as when they
came. Invalid bytes lie after the mark (else they are damage): they are cut off, and come again.
Valid bytes after the mark are rewritten in place and fsynced, because after a failed fsync they may
exist in the page cache only. A segment with only a header is removed: its leader may replace it.
Each step leaves a folder that recovers to the same state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from millstream.codec.log_segment import NO_HASH, SEGMENT_HEADER_SIZE, SEGMENT_TRAILER_SIZE, SegmentFooter
from millstream.errors import CorruptFrame, Diverged, ShipmentUnreadable
from millstream.model.ids import GroupNumber, ShardId, StreamId
from millstream.model.marks import DroppedMark, DurableMark
from millstream.model.positions import Offset
from millstream.model.replication import ByteEnd
from millstream.ports import Files
from millstream.wal.frame_index import damage, read_header
from millstream.wal.layout import SegmentFile, list_segments
from millstream.wal.misplacement import REPLACED
from millstream.wal.replica.verify_continuity import ArrivingShard, WholeFrame
from millstream.wal.segment_scan import ReadAhead, read_frame, reader_of

_COPY_BYTES: Final = 1 << 20


def recover_replica(
    files: Files,
    shard_dir: str,
    shard: ShardId,
    *,
    stream: StreamId | None,
    mark: DurableMark | None,
    dropped: DroppedMark | None,
    note: Callable[[Sequence[WholeFrame]], None],
) -> ArrivingShard | None:
    """Make durable what a shard's folder holds of the leader's bytes, and cut off the rest.

    Args:
        shard_dir: the shard's folder, whose lock the caller holds.
        stream: the stream that it must be of; None if that isn't known yet.
        mark: the shard's, if any.
        dropped: what retention has dropped of it, if anything.
        note: called with the valid frames after the mark.

    Returns:
        How far the shard has come; None if nothing there names its stream.

    Raises:
        CorruptWal: what the mark covers isn't there, or is damaged.
        ReplicationError (`other_stream`): a segment is of another stream.
    """
    begin = Offset(0) if dropped is None else dropped.offset
    segments = [segment for segment in list_segments(files, shard_dir) if segment.base_offset >= begin]
    if stream is None and segments:
        stream = read_header(files, segments[0]).stream
    if stream is None:
        return None
    arriving = fresh_shard(stream, shard, segments[0].base_offset if segments else begin)
    shown = (Offset(-1), 0) if mark is None else (mark.base_offset, mark.byte_end)
    sealed = [segment for segment in segments if segment.base_offset < shown[0]]
    _follow_sealed(files, arriving, sealed)
    for place, segment in enumerate(segments[len(sealed) :], len(sealed)):
        if arriving.end != ByteEnd(segment.base_offset, 0):
            _remove(files, segments[place:])  # the one before it isn't sealed
            break
        epoch = arriving.epoch
        if not _verify(files, arriving, segment, shown, note):
            _remove(files, segments[place + 1 :])
            if arriving.verified <= SEGMENT_HEADER_SIZE:
                _remove(files, [segment])
                arriving.position = arriving.verified = 0
                arriving.header, arriving.epoch, arriving.is_new = None, epoch, not place
                break
            _cut(files, segment, arriving.verified)
        start = shown[1] if segment.base_offset == shown[0] else 0
        _write_again(files, segment, start)
    if segments:
        files.sync_dir(shard_dir)
    if mark is not None and mark.durable_offset > arriving.end_offset:
        raise damage(
            f"offsets up to {mark.durable_offset} were durable, but the log ends at {arriving.end_offset}",
            file=shard_dir, byte=arriving.position, offset_from=arriving.end_offset, offset_to=mark.durable_offset,
        )  # fmt: skip
    return arriving


def note_sealed(
    files: Files,
    shard_dir: str,
    mark: DurableMark,
    covered: GroupNumber,
    note: Callable[[Sequence[WholeFrame]], None],
) -> None:
    """Note frames of groups after `group` in sealed segments before a mark: another shard's mark may be older."""
    for segment in reversed(list_segments(files, shard_dir)):
        if segment.base_offset >= mark.base_offset:
            continue
        read = reader_of(files, segment.path)
        footer = SegmentFooter.decode_tail(read, files.size(segment.path))
        found = () if footer is None else footer.frames
        for entry in found:
            if entry.group > covered:
                header = read_frame(ReadAhead(read), entry.position, payload=False).header
                end = ByteEnd(segment.base_offset, entry.position + entry.length)
                note([WholeFrame(header, end, Offset(entry.offset + entry.count))])
        if not found or found[0].group <= covered:
            return


def fresh_shard(stream: StreamId, shard: ShardId, base: Offset) -> ArrivingShard:
    """Return a shard that has nothing, and begins at an offset."""
    return ArrivingShard(stream, None, shard, base, end_offset=base, previous_hash=None if base else NO_HASH)


def _follow_sealed(files: Files, arriving: ArrivingShard, sealed: Sequence[SegmentFile]) -> None:
    """Follow the headers and footers of whole segments."""
    footer: bytes | None = None
    for segment in sealed:
        header = read_header(files, segment, shard=arriving.shard, stream=arriving.stream)
        expected = None if footer is None else SegmentFooter.encoded_hash(footer)
        if expected is not None and header.previous_hash != expected:
            raise damage(
                REPLACED,
                file=segment.path, byte=0, offset_from=segment.base_offset, offset_to=segment.base_offset,
            )  # fmt: skip
        footer = _footer(files, segment)
        if footer is None:
            raise damage(
                "it isn't sealed, though another segment follows", file=segment.path, byte=files.size(segment.path),
                offset_from=segment.base_offset, offset_to=None,
            )  # fmt: skip
        arriving.region, arriving.epoch = header.region, header.epoch
        arriving.is_new = False
    if footer is None:
        return
    last = sealed[-1]
    found = SegmentFooter.decode_tail(reader_of(files, last.path), files.size(last.path))
    assert found is not None
    arriving.previous_hash = SegmentFooter.encoded_hash(footer)
    arriving.base = arriving.end_offset = found.end_offset
    arriving.group = found.frames[-1].group if found.frames else GroupNumber(0)


def _footer(files: Files, segment: SegmentFile) -> bytes | None:
    """Return the encoded footer, if it is valid."""
    size = files.size(segment.path)
    if size < SEGMENT_HEADER_SIZE + SEGMENT_TRAILER_SIZE:
        return None
    trailer = files.read(segment.path, size - SEGMENT_TRAILER_SIZE, SEGMENT_TRAILER_SIZE)
    if not SegmentFooter.is_trailer(trailer):
        return None
    try:
        if SegmentFooter.decode_tail(reader_of(files, segment.path), size) is None:
            return None
    except CorruptFrame:
        return None
    length = SegmentFooter.size_in(trailer)
    return files.read(segment.path, size - length, length)


def _verify(
    files: Files,
    arriving: ArrivingShard,
    segment: SegmentFile,
    shown: tuple[Offset, int],
    note: Callable[[Sequence[WholeFrame]], None],
) -> bool:
    """Take in a segment as if it came; return whether it is valid to its end and has any frame."""
    size = files.size(segment.path)
    footer = _footer(files, segment)
    end = size - (0 if footer is None else len(footer))
    whole: list[WholeFrame] = []
    try:
        arriving.begin(memoryview(files.read(segment.path, 0, SEGMENT_HEADER_SIZE)))
        for position in range(SEGMENT_HEADER_SIZE, end, _COPY_BYTES):
            piece = files.read(segment.path, position, min(_COPY_BYTES, end - position))
            try:
                arriving.feed(memoryview(piece), whole)
            finally:
                # Some of these may be shown already. They aren't missed on other shards, whose
                # marks cover them.
                note(whole)
                whole.clear()
        if footer is not None:
            arriving.finish(memoryview(footer))
            return True
    except (ShipmentUnreadable, Diverged) as error:
        arriving.forget_partial()
        if (segment.base_offset, arriving.verified) < shown:
            raise damage(
                error, file=segment.path, byte=arriving.verified, offset_from=arriving.end_offset, offset_to=None
            ) from error
        return False
    is_whole = arriving.position == arriving.verified
    arriving.forget_partial()
    return is_whole and arriving.verified > SEGMENT_HEADER_SIZE


def _remove(files: Files, segments: Sequence[SegmentFile]) -> None:
    """Remove segments, the last ones first."""
    for segment in reversed(segments):
        files.remove(segment.path)


def _cut(files: Files, segment: SegmentFile, size: int) -> None:
    file = files.open_write(segment.path)
    try:
        file.truncate(size)
    finally:
        file.close()


def _write_again(files: Files, segment: SegmentFile, start: int) -> None:
    file = files.open_write(segment.path)
    try:
        size = file.size()
        for position in range(start, size, _COPY_BYTES):
            file.pwrite(files.read(segment.path, position, min(_COPY_BYTES, size - position)), position)
        file.sync()
    finally:
        file.close()
