"""Verification of a shard's bytes as they arrive, wherever they are cut, and without keeping them.

These are verified:

- The segment's header (magic, checksum, stream, region, shard, start), and that it names the
  previous footer.
- Each frame's head and each part of its payload, by their checksums; and that the frame follows on
  (shard, region, epoch, offset, group).
- The footer, by its checksum, its hash of the heads, and every entry against its frame. Only an
  entry's times aren't checked: they are in the directory, which isn't decoded here.

A frame's payload is checked part by part as it passes, so memory is bounded by one head. Bytes
count (`verified`) once their frame is whole.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeVar

from millstream.codec.checksums import Bytes, crc32c_on
from millstream.codec.log_frame import FRAME_HEADER_MIN, FrameHeader, FrameKind, decode_frame_head, frame_extent
from millstream.codec.log_segment import (
    NO_HASH,
    SEGMENT_HEADER_SIZE,
    SEGMENT_TRAILER_SIZE,
    FrameEntry,
    SegmentFooter,
    SegmentHeader,
)
from millstream.errors import CorruptFrame, Diverged, ReplicationError, ShipmentUnreadable, UnsupportedFormat
from millstream.model.ids import Epoch, GroupNumber, RegionId, ShardId, StreamId
from millstream.model.positions import Offset
from millstream.model.replication import ByteEnd

_Error = TypeVar("_Error", bound=ReplicationError)
_HEAD_BYTES_MAX: Final = 1 << 28
_ENTRY: Final = struct.Struct("<B?qqqqqqqq")
_TABLE: Final = struct.Struct("<qiqq")


class WholeFrame(NamedTuple):
    """A frame that has come whole, and is verified."""

    header: FrameHeader
    end: ByteEnd
    end_offset: Offset
    """End of its records."""


@dataclass(slots=True)
class _Frame:
    """A frame whose head has come, and whose payload is arriving."""

    header: FrameHeader
    head: bytes
    length: int
    part: int = 0
    """Index of the arriving part; those before it are verified."""
    left: int = 0
    """Bytes of this part that haven't come yet."""
    crc: int = 0
    """CRC of the bytes that have come."""


@dataclass(slots=True)
class ArrivingShard:
    """How far a shard has come. `copy` it before feeding bytes that may be refused."""

    stream: StreamId
    region: RegionId | None
    """Region; None: not known yet."""
    shard: ShardId
    base: Offset = Offset(0)
    """Base offset of the arriving segment; with `position` 0, of the next one."""
    position: int = 0
    """Bytes of it that have passed."""
    verified: int = 0
    """Bytes of it that count."""
    end_offset: Offset = Offset(0)
    """Exclusive end of the records that count."""
    group: GroupNumber = GroupNumber(0)
    """Group of the last frame."""
    more: bool = False
    """Whether the group continues after it."""
    previous_hash: bytes | None = NO_HASH
    """Hash of the last footer; None if the previous segment isn't kept, so that it is unknown."""
    header: SegmentHeader | None = None
    is_new: bool = True
    """Whether nothing was ever kept of the shard."""
    epoch: Epoch = Epoch(0)
    """Greatest epoch seen."""
    _heads: Any = field(default_factory=hashlib.sha256)
    _entries: Any = field(default_factory=hashlib.sha256)
    """Hash of everything that the footer must have about the frames: it takes the room of one entry, not of all."""
    _head: bytearray = field(default_factory=bytearray)
    """The beginning of a head that was cut."""
    _frame: _Frame | None = None

    def copy(self) -> ArrivingShard:
        """Return an independent copy."""
        frame = None if self._frame is None else replace(self._frame)
        return replace(
            self, _heads=self._heads.copy(), _entries=self._entries.copy(), _head=bytearray(self._head), _frame=frame
        )

    @property
    def end(self) -> ByteEnd:
        """Position of the next byte."""
        return ByteEnd(self.base, self.position)

    def begin(self, data: memoryview) -> None:
        """Take a segment's header, which is never cut. Raises `ShipmentUnreadable`, `ReplicationError` (`other_stream`), `Diverged`."""
        try:
            header = SegmentHeader.decode(data)
        except (CorruptFrame, UnsupportedFormat) as error:
            raise self.unreadable(error) from error
        if header.stream != self.stream or self.region not in (None, header.region):
            raise ReplicationError(
                f"the segment belongs to stream {header.stream} in region {header.region}; this log holds stream {self.stream} in region {self.region}",
                code="other_stream",
            )
        if (header.shard, header.base_offset) != (self.shard, self.base):
            raise self.unreadable("its header belongs to another segment")
        if self.previous_hash is not None and header.previous_hash != self.previous_hash:
            raise self.diverged("it doesn't continue the segment before it in this log")
        if header.epoch < self.epoch:
            raise self.diverged(
                f"its epoch {header.epoch} is lower than {self.epoch}, the epoch of the segment before it"
            )
        self.header, self.epoch, self.region = header, header.epoch, header.region
        self.is_new = False
        self.position = self.verified = SEGMENT_HEADER_SIZE
        self._heads, self._entries = hashlib.sha256(), hashlib.sha256()

    def feed(self, data: memoryview, whole: list[WholeFrame]) -> None:
        """Take bytes of frames.

        Args:
            data: the bytes after those that came.
            whole: receives the frames that are whole with them, even if a later one is invalid.

        Raises:
            ShipmentUnreadable: a checksum fails, or no frame begins where one should.
            Diverged: a valid frame doesn't follow on.
        """
        at = 0
        while at < len(data):
            if self._frame is None and not self._head:
                end = self._take_whole(data, at, whole)
                if end:
                    at = end
                    continue
            if self._frame is None:
                head, at = self._take_head(data, at)
                if head is None:
                    break
                self._frame = self._begin_frame(head)
            if self._frame is not None:
                at = self._take_payload(self._frame, data, at)
                if self._frame.part == len(self._frame.header.parts):
                    whole.append(self._count(self._frame.header, self._frame.head, self._frame.length))
                    self._frame = None

    def finish(self, footer: memoryview) -> None:
        """Take a segment's footer: the next one may come. Raises as `feed`."""
        at = self.position

        def read(position: int, length: int) -> bytes:
            return bytes(footer[position - at : position - at + length])

        if self.position != self.verified or self.more:
            raise self.unreadable("it ends inside of a commit group")
        try:
            found = SegmentFooter.decode_tail(read, at + len(footer))
        except CorruptFrame as error:
            raise self.unreadable(error) from error
        if found is None:
            raise self.unreadable("it ends without a footer")
        entries = hashlib.sha256()
        for entry in found.frames:
            _add_entry(entries, entry)
        said = (found.end_offset, found.frames_hash, entries.digest())
        if said != (self.end_offset, self._heads.digest(), self._entries.digest()):
            raise self.diverged("its footer lists other frames than it holds")
        self.previous_hash = SegmentFooter.encoded_hash(bytes(footer))
        self.base, self.position, self.verified, self.header = self.end_offset, 0, 0, None

    def forget_partial(self) -> None:
        """Go back to the last whole frame."""
        self._frame = None
        self._head.clear()
        self.position = self.verified

    def _take_whole(self, data: memoryview, at: int, whole: list[WholeFrame]) -> int:
        """Take a frame that lies there from head to end, and is valid, as nearly all do; return where it ends.

        Return 0 if it isn't, with nothing taken. The error comes when the frame is taken piece by
        piece.
        """
        try:
            header, extent, _, _ = decode_frame_head(data[at:])
        except (CorruptFrame, UnsupportedFormat):
            return 0
        end = at + extent.length
        if end > len(data) or extent.head_length > _HEAD_BYTES_MAX or self._misfit(header) is not None:
            return 0
        part_end = head_end = at + extent.head_length
        for part in header.parts:
            part_begin, part_end = part_end, part_end + part.length
            if part.length and crc32c_on(0, data[part_begin:part_end]) != part.crc:
                return 0
        self.position += extent.length
        whole.append(self._count(header, data[at:head_end], extent.length))
        return end

    def _take_head(self, data: memoryview, at: int) -> tuple[bytes | memoryview | None, int]:
        """Return the next frame's head, and where its payload begins; None if it is cut."""
        try:
            if not self._head and len(data) - at >= FRAME_HEADER_MIN:
                end = at + self._head_length(data[at : at + FRAME_HEADER_MIN])
                if end <= len(data):
                    self.position += end - at
                    return data[at:end], end
            while True:
                wanted = (
                    FRAME_HEADER_MIN if len(self._head) < FRAME_HEADER_MIN else self._head_length(bytes(self._head))
                )
                taken = data[at : at + wanted - len(self._head)]
                self._head += taken
                self.position += len(taken)
                at += len(taken)
                if len(self._head) < wanted:
                    return None, at
                if wanted > FRAME_HEADER_MIN:
                    head = bytes(self._head)
                    self._head.clear()
                    return head, at
        except (CorruptFrame, UnsupportedFormat) as error:
            raise self.unreadable(error) from error

    def _head_length(self, start: bytes | memoryview) -> int:
        length = frame_extent(start[:FRAME_HEADER_MIN]).head_length
        if length > _HEAD_BYTES_MAX:
            raise CorruptFrame("the length of a frame's head is invalid")
        return length

    def _begin_frame(self, head: bytes | memoryview) -> _Frame:
        try:
            header, extent, _, _ = decode_frame_head(head)
        except (CorruptFrame, UnsupportedFormat) as error:
            raise self.unreadable(error) from error
        misfit = self._misfit(header)
        if misfit is not None:
            raise self.diverged(misfit)
        frame = _Frame(header, bytes(head), extent.length)
        self._skip_empty(frame)
        return frame

    def _misfit(self, header: FrameHeader) -> str | None:
        """Return why a frame doesn't follow on; None if it does."""
        of = self.header
        assert of is not None
        if header.shard != self.shard or header.region != of.region or header.epoch != of.epoch:
            return "a frame of another shard, region or epoch lies in it"
        if header.first_offset != self.end_offset:
            return f"a frame begins with offset {header.first_offset}, {self.end_offset} was to follow"
        # A loss frame stands for groups whose ends are no longer known.
        follows = header.group == self.group if self.more and header.kind is not FrameKind.LOSS else True
        if header.group < self.group or not follows:
            return f"a frame of group {header.group} follows on group {self.group}"
        return None

    def _take_payload(self, frame: _Frame, data: memoryview, at: int) -> int:
        parts = frame.header.parts
        while frame.part < len(parts) and at < len(data):
            piece = data[at : at + frame.left]
            frame.crc = crc32c_on(frame.crc, piece)
            frame.left -= len(piece)
            at += len(piece)
            self.position += len(piece)
            if frame.left:
                break
            if frame.crc != parts[frame.part].crc:
                raise self.unreadable(f"the rows of table {parts[frame.part].table_id} fail their checksum")
            frame.part += 1
            self._skip_empty(frame)
        return at

    def _skip_empty(self, frame: _Frame) -> None:
        """Make the next part that has bytes the current one."""
        parts = frame.header.parts
        while frame.part < len(parts) and not parts[frame.part].length:
            frame.part += 1
        frame.crc = 0
        frame.left = parts[frame.part].length if frame.part < len(parts) else 0

    def _count(self, header: FrameHeader, head: Bytes, length: int) -> WholeFrame:
        """Count a whole frame: all of it has passed, and is valid."""
        self._heads.update(head)
        facts = _ENTRY.pack(
            header.kind, header.more, header.first_offset, header.count, self.verified, length, header.first_seq,
            header.last_seq, header.group_last_seq, header.group,
        )  # fmt: skip
        parts = [_TABLE.pack(part.table_id, part.schema_version, part.rows, part.length) for part in header.parts]
        self._entries.update(b"".join((facts, *parts)))
        self.end_offset = Offset(self.end_offset + header.count)
        self.group, self.more = header.group, header.more
        self.verified = self.position
        return WholeFrame(header, ByteEnd(self.base, self.position), self.end_offset)

    def unreadable(self, why: object) -> ShipmentUnreadable:
        """Return the error for bytes that are invalid in themselves."""
        return self._error(ShipmentUnreadable, why)

    def diverged(self, why: object) -> Diverged:
        """Return the error for bytes that are valid, but don't follow on from what lies here."""
        return self._error(Diverged, why)

    def _error(self, kind: type[_Error], why: object) -> _Error:
        return kind(
            f"segment {self.base} of shard {self.shard}, which came from the leader, at byte {self.position}: {why}",
            shard=int(self.shard),
            base_offset=int(self.base),
            byte=self.position,
            verified=self.verified,
        )


def footer_start(data: memoryview, position: int) -> int | None:
    """Return where in the file the footer begins that a file's last bytes end with.

    None if they don't hold a whole one.

    Args:
        data: the last bytes.
        position: where they begin in the file.
    """
    trailer = bytes(data[-SEGMENT_TRAILER_SIZE:])
    if not SegmentFooter.is_trailer(trailer):
        return None
    size = SegmentFooter.size_in(trailer)
    return position + len(data) - size if size <= len(data) else None


def _add_entry(to: Any, entry: FrameEntry) -> None:
    """Hash a footer's entry as `ArrivingShard` hashes the frame."""
    facts = _ENTRY.pack(
        entry.kind, entry.more, entry.offset, entry.count, entry.position, entry.length, entry.first_seq,
        entry.last_seq, entry.group_last_seq, entry.group,
    )  # fmt: skip
    to.update(b"".join((facts, *(_TABLE.pack(*table) for table in entry.tables))))
