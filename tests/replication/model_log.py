"""A log small enough to be played a hundred thousand times: segments of bytes on shards, and a disk.

The disk keeps what was synced and tears the rest. The log does what replication sees of a real log:
groups on several shards, sealed segments with footers, and a group whose parts arrive one by one.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import crc32

from millstream.errors import Diverged, FollowerBehindRetention, ReplicaGap
from millstream.model.ids import Epoch, GroupNumber, ShardId, StreamId, WriterId
from millstream.model.marks import DurableMark
from millstream.model.positions import Offset, Seq
from millstream.model.replication import ByteEnd, ReplicaPosition, SegmentPart
from millstream.protocol.replication.follower_machine import OwnHolding

HEADER = b"SEGMENT."
_FOOTER = struct.Struct("<4sI")
_FRAME = struct.Struct("<4sIHHII")
"""Magic, group, bit set of the group's shards, size of the writes in bytes, epoch, checksum of the writes."""
_WRITE = struct.Struct("<HH")
SEGMENT_BYTES = 160


class Write(NamedTuple):
    """A write that an application sent, identified by its session and its number in the session."""

    session: int
    number: int


class Frame(NamedTuple):
    """A group's part on one shard."""

    group: int
    shards: int
    epoch: int
    writes: tuple[Write, ...]
    start: int
    end: int


@dataclass(slots=True)
class Segment:
    """One segment file. The bytes below `synced` survive a power cut."""

    base: int
    data: bytearray = field(default_factory=lambda: bytearray(HEADER))
    synced: int = 0
    sealed: bool = False


def frames_of(data: bytes | bytearray, start: int = len(HEADER)) -> Iterator[Frame]:
    """Yield whole frames from a position on; stop at a footer or a torn frame."""
    while start + _FRAME.size <= len(data):
        magic, group, shards, size, epoch, checksum = _FRAME.unpack_from(data, start)
        end = start + _FRAME.size + size
        if magic != b"FRAM" or end > len(data):
            return
        body = data[start + _FRAME.size : end]
        if crc32(body) != checksum:
            return
        yield Frame(group, shards, epoch, tuple(Write(*one) for one in _WRITE.iter_unpack(body)), start, end)
        start = end


class ModelLog:
    """One node's log of the stream."""

    def __init__(self, stream: StreamId, shards: int) -> None:
        self.stream = stream
        self.shards: list[list[Segment]] = [[] for _ in range(shards)]
        self.durable: list[tuple[int, int]] = [(0, 0)] * shards
        """Content of the marks: for each shard the segment, and the end of its frames that belong to
        durable whole groups.
        """
        self.group = 0
        self.first_group = 1
        """The first group that retention hasn't dropped."""
        self.groups: dict[int, tuple[Write, ...]] = {}
        """The writes of each whole group."""
        self.written: dict[Write, int] = {}
        """The group that each write is in."""
        self.twice: list[Write] = []
        """Writes that are in more than one group."""
        self.synced_group = 0
        """The last group that a power cut would keep, with all groups before it."""
        self._parts: dict[int, tuple[int, tuple[Write, ...]]] = {}
        self._scanned: list[tuple[int, int]] = [(0, len(HEADER))] * shards

    # --- the leader's ----------------------------------------------------------------------------------------------

    def append(self, writes: Sequence[Write], epoch: int) -> int:
        """Write a group, which is durable after `sync`. Each write goes to the shard of its session."""
        group = self.group + 1
        by_shard: dict[int, list[Write]] = {}
        for write in writes:
            by_shard.setdefault(write.session % len(self.shards), []).append(write)
        mask = sum(1 << shard for shard in by_shard)
        for shard, parts in by_shard.items():
            segment = self._open(shard)
            body = b"".join(_WRITE.pack(*write) for write in parts)
            segment.data += _FRAME.pack(b"FRAM", group, mask, len(body), epoch, crc32(body)) + body
        return group

    def _open(self, shard: int) -> Segment:
        segments = self.shards[shard]
        if segments and segments[-1].sealed:
            segments.append(Segment(segments[-1].base + len(segments[-1].data)))
        elif not segments:
            segments.append(Segment(1))
        return segments[-1]

    def sync(self) -> None:
        """Make everything that was written durable, move the marks, and seal full segments."""
        for segments in self.shards:
            for segment in segments:
                segment.synced = len(segment.data)
        self._scan()
        self._move_marks()
        self.synced_group = self.group
        for segments in self.shards:
            if segments and not segments[-1].sealed and len(segments[-1].data) >= SEGMENT_BYTES:
                last = segments[-1]
                last.data += _FOOTER.pack(b"FOOT", len(last.data))
                last.synced, last.sealed = len(last.data), True

    def _move_marks(self) -> None:
        self.durable = [(segments[-1].base, segments[-1].synced) if segments else (0, 0) for segments in self.shards]

    def marks(self) -> dict[ShardId, DurableMark]:
        """Return the marks as a leader ships them."""
        return {
            ShardId(shard): DurableMark(
                self.stream,
                WriterId(1),
                Epoch(0),
                Offset(base),
                end,
                Offset(0),
                GroupNumber(self.group),
                Seq(self.group),
                Seq(0),
            )
            for shard, (base, end) in enumerate(self.durable)
        }

    def read(self, after: ReplicaPosition, size_max: int) -> tuple[list[SegmentPart], ReplicaPosition, bool]:
        """Return the durable bytes after a position, where they end, and whether these are all.

        Raises:
            FollowerBehindRetention: the bytes were dropped.
        """
        parts: list[SegmentPart] = []
        ends = dict(after)
        for number, segments in enumerate(self.shards):
            shard = ShardId(number)
            base, place = ends.get(shard, ByteEnd(Offset(0), 0)), 0
            if base.base_offset and segments and base.base_offset < segments[0].base:
                raise FollowerBehindRetention(f"shard {number} begins at {segments[0].base}")
            for segment in segments:
                if segment.base < base.base_offset or not self._has_frames(segment):
                    continue
                place = base.position if segment.base == base.base_offset else 0
                end = self._shippable(number, segment)
                if end <= place:
                    continue
                if size_max <= 0:
                    return parts, ends, False
                data = bytes(segment.data[place : min(end, place + size_max)])
                size_max -= len(data)
                is_end = segment.sealed and place + len(data) == len(segment.data)
                part = SegmentPart(shard, Offset(segment.base), place, data, is_end)
                parts.append(part)
                ends[shard] = part.end
                if place + len(data) < end:
                    return parts, ends, False
        return parts, ends, True

    def _has_frames(self, segment: Segment) -> bool:
        return segment.synced > len(HEADER)

    def _shippable(self, shard: int, segment: Segment) -> int:
        base, end = self.durable[shard]
        if segment.base < base:
            return len(segment.data)
        return 0 if segment.base > base else (segment.synced if segment.sealed else min(end, segment.synced))

    def drop(self, cursors: Sequence[tuple[int, ReplicaPosition]]) -> None:
        """Drop sealed segments that no cursor needs, by numbers and by positions."""
        needed_from = min(group for group, _ in cursors)
        for shard, segments in enumerate(self.shards):
            needed = min(position.get(ShardId(shard), ByteEnd(Offset(0), 0)) for _, position in cursors)
            while (
                len(segments) > 1
                and segments[0].base < needed.base_offset
                and all(frame.group < needed_from for frame in frames_of(segments[0].data))
            ):
                first = segments.pop(0)
                self.first_group = max(
                    self.first_group, 1 + max((frame.group for frame in frames_of(first.data)), default=0)
                )

    # --- the follower's --------------------------------------------------------------------------------------------

    def apply(self, parts: Sequence[SegmentPart], *, is_synced: bool = True) -> None:
        """Verify, write and sync. Raises `Diverged` or `ReplicaGap`; the parts before the failing one are written."""
        touched = []
        for part in parts:
            segments = self.shards[part.shard]
            segment = next((one for one in segments if one.base == part.base_offset), None)
            if segment is None:
                if part.position or (segments and (part.base_offset < segments[-1].base or not segments[-1].sealed)):
                    raise ReplicaGap(f"{part.base_offset} at {part.position} is beyond")
                segment = Segment(part.base_offset, bytearray())
                segments.append(segment)
            have = len(segment.data)
            if part.position > have:
                raise ReplicaGap(f"{part.position} is beyond {have}")
            known = bytes(segment.data[part.position : part.position + len(part.data)])
            if known != part.data[: len(known)]:
                raise Diverged(f"other bytes at {part.base_offset}, {part.position}")
            segment.data += part.data[len(known) :]
            segment.sealed = segment.sealed or part.is_end
            touched.append(segment)
        if is_synced:
            for segment in touched:
                segment.synced = len(segment.data)
        self._scan()
        self._move_marks()
        if is_synced:
            self.synced_group = self.group

    def holding(self) -> OwnHolding:
        """Return what a follower reports as held."""
        return OwnHolding(self.position(), GroupNumber(self.group), Seq(self.group))

    def position(self) -> ReplicaPosition:
        """Return the end of every shard."""
        return {
            ShardId(shard): ByteEnd(Offset(segments[-1].base), len(segments[-1].data))
            for shard, segments in enumerate(self.shards)
            if segments
        }

    def set_aside(self, behind: int) -> list[Write]:
        """Cut everything after a group, and return the writes that were in it."""
        gone: list[Write] = []
        for segments in self.shards:
            for segment in list(segments):
                frames = list(frames_of(segment.data))
                later = [frame for frame in frames if frame.group > behind]
                gone += [write for frame in later for write in frame.writes]
                if later and later[0].start == len(HEADER) and segment is not segments[0]:
                    segments.remove(segment)
                    continue
                if later or segment is segments[-1]:
                    end = later[0].start if later else (frames[-1].end if frames else len(HEADER))
                    self._cut(segment, end)
            while len(segments) > 1 and len(segments[-1].data) <= len(HEADER):
                segments.pop()
            if segments and segments[-1].sealed:
                # The bytes after it are gone; the leader decides whether it ended there.
                frames = list(frames_of(segments[-1].data))
                self._cut(segments[-1], frames[-1].end if frames else len(HEADER))
            if len(segments) == 1 and len(segments[0].data) <= len(HEADER):
                segments.clear()
        self._rescan()
        self.synced_group = min(self.synced_group, self.group)
        return gone

    def _cut(self, segment: Segment, end: int) -> None:
        del segment.data[end:]
        segment.synced, segment.sealed = len(segment.data), False

    # --- crashes ---------------------------------------------------------------------------------------------------

    def lose_power(self, chance: random.Random) -> None:
        """Keep some prefix of the bytes that weren't synced; its last byte may be damaged."""
        for segments in self.shards:
            for segment in segments:
                left = chance.randint(segment.synced, len(segment.data))
                if left > segment.synced and chance.random() < 0.5:
                    segment.data[left - 1] ^= 0x55
                del segment.data[left:]
                segment.sealed = segment.sealed and segment.synced == len(segment.data)
            while segments and not segments[-1].synced and chance.random() < 0.5:
                segments.pop()

    def recover(self, *, leads: bool) -> None:
        """Read everything again, and sync what is kept.

        A leader cuts what isn't a whole group; a follower keeps whole frames.
        """
        for segments in self.shards:
            for index, segment in enumerate(segments):
                if len(segment.data) < len(HEADER) or segment.data[: len(HEADER)] != HEADER:
                    del segments[index:]
                    break
                ends = [frame.end for frame in frames_of(segment.data)]
                end = ends[-1] if ends else len(HEADER)
                if segment.sealed and len(segment.data) == end + _FOOTER.size:
                    continue
                self._cut(segment, end)
                del segments[index + 1 :]
                break
        self._rescan()
        if leads:
            whole = self.group
            if any(
                frame.group > whole
                for shard in self.shards
                for segment in shard[-1:]
                for frame in frames_of(segment.data)
            ):
                self.set_aside(whole)
        for segments in self.shards:
            for segment in segments:
                segment.synced = len(segment.data)
        self._move_marks()
        self.synced_group = self.group

    def _rescan(self) -> None:
        # Dropped groups are still known; a real log knows them from the copy of its sessions.
        self.group, self._parts = self.first_group - 1, {}
        self.groups = {group: writes for group, writes in self.groups.items() if group < self.first_group}
        self.written = {write: group for write, group in self.written.items() if group < self.first_group}
        self._scanned = [(0, len(HEADER))] * len(self.shards)
        self._scan()
        self._move_marks()

    def _scan(self) -> None:
        for shard, segments in enumerate(self.shards):
            base, place = self._scanned[shard]
            index = len(segments)
            while index and segments[index - 1].base > base:
                index -= 1
            for segment in segments[max(0, index - 1) :]:
                start = place if segment.base == base else len(HEADER)
                if start + _FRAME.size <= len(segment.data):
                    for frame in frames_of(segment.data, start):
                        mask, writes = self._parts.get(frame.group, (frame.shards, ()))
                        self._parts[frame.group] = mask & ~(1 << shard), writes + frame.writes
                        start = frame.end
                base, place = segment.base, start
            self._scanned[shard] = base, place
        while (found := self._parts.get(self.group + 1)) is not None and found[0] == 0:
            del self._parts[self.group + 1]
            self.group += 1
            self.groups[self.group] = tuple(sorted(found[1]))
            for write in found[1]:
                if write in self.written:
                    self.twice.append(write)
                self.written[write] = self.group

    def image(self) -> list[list[tuple[int, bytes]]]:
        """Return all bytes of the log."""
        return [[(segment.base, bytes(segment.data)) for segment in segments] for segments in self.shards]
