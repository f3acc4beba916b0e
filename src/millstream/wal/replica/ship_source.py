"""The leader's side of shipping: bytes of its segments, up to its durable marks, from the follower's position on.

It reads files, and needs neither the writer nor its locks. It first reads all marks as of one
moment. Then it ships the bytes before them, in pieces as large as the caller has room for, shard by
shard; then the marks. Bytes that became durable since belong to the next round, so a follower that
catches up with a busy leader gets marks again and again.

Only durable bytes are shipped: the frames before a mark, and whole segments before the one that it
names, with their footers. A segment without frames isn't shipped: recovery removes it and makes it
again. Bytes that recovery seals, cuts or copies lie after the marks, or stay the same.

A source begins each shard a little before the follower's end. It does so again whenever the
follower isn't where the last piece ended. So a follower that has other bytes than this log finds
out before anything is appended to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from millstream.backoff import Backoff
from millstream.codec.log_segment import SEGMENT_HEADER_SIZE, SEGMENT_TRAILER_SIZE, SegmentFooter
from millstream.errors import CorruptFrame, Diverged, FollowerBehindRetention, UnreadableBytes
from millstream.model.ids import Epoch, RegionId, ShardId
from millstream.model.marks import DroppedMark, DurableMark
from millstream.model.positions import Offset, Seq
from millstream.model.replication import ByteEnd, ReplicaPosition, SegmentPart, Shipment
from millstream.ports import Clock, Files
from millstream.protocol.sequencer.persisted_upto import stream_cut
from millstream.wal.durable_mark import missing_shards, read_dropped, read_mark, read_marks
from millstream.wal.files import RealFiles, SystemClock
from millstream.wal.frame_index import damage, read_header, unreadable
from millstream.wal.layout import SegmentFile, list_segments, list_shards, segment_path, shard_folder
from millstream.wal.misplacement import REPLACED
from millstream.wal.segment_scan import reader_of

BYTES_MAX: Final = 4 << 20
_OVERLAP_BYTES: Final = 4096
_LEAST_BYTES: Final = SEGMENT_HEADER_SIZE
"""Bytes of room below which nothing more is added: a header isn't cut."""
_POLL_S: Final = (0.0005, 0.02)
"""Shortest and longest pause in seconds between reads of the marks; it doubles each time nothing has moved."""


class LogMarks(NamedTuple):
    """Marks of a log's writers, as of one moment."""

    durable: Mapping[ShardId, DurableMark] = {}
    shown: Mapping[ShardId, DurableMark] = {}
    """How far readers see each shard, never beyond what is durable; empty if they see all of it."""
    by_one: bool = False
    """Whether the acknowledgement of any single follower meets the level."""


def durable_marks(files: Files, folder: str) -> Mapping[ShardId, DurableMark]:
    """Return the durable marks of all shards that have one, as of one moment, whether or not readers may see as much.

    Raises:
        CorruptWal: shards are missing.
    """
    return log_marks(files, folder).durable


def log_marks(files: Files, folder: str) -> LogMarks:
    """Return the marks as `durable_marks`, and how far readers may read."""
    while True:
        shards = list_shards(files, folder)
        found = {shard: read_marks(files, shard_folder(folder, shard)) for shard in shards}
        marks = {shard: mark for shard, (mark, _) in found.items() if mark is not None}
        # A writer that joined after the first read may have numbers below those that the other
        # writers' marks show by now.
        if list_shards(files, folder) == shards and all(
            read_mark(files, shard_folder(folder, shard)) == marks.get(shard)
            for shard in shards
            if shard not in marks or marks[shard].is_settled
        ):
            missing = missing_shards(folder, shards, marks.values())
            if missing is not None:
                raise missing
            required = [seen for shard in marks if (seen := found[shard][1]) is not None and seen.required]
            if not required:
                return LogMarks(marks)
            shown = {
                # After a power cut, the durable mark may be older than the shown one, until the log
                # is recovered.
                shard: mark
                if (seen := found[shard][1]) is None or not seen.required
                else min(seen.mark, mark, key=_reach)
                for shard, mark in marks.items()
            }
            return LogMarks(marks, shown, all(seen.by_one for seen in required))


def _reach(mark: DurableMark) -> tuple[int, ...]:
    return mark.base_offset, mark.byte_end, mark.group, mark.persisted_upto


class ShipSource:
    """One follower's view of a leader's log. One thread.

    Args:
        tells_shown: whether to include what readers see; not for a receiver that treats everything
            as final.
    """

    def __init__(
        self, folder: str, *, files: Files | None = None, clock: Clock | None = None, tells_shown: bool = True
    ) -> None:
        self._folder = folder
        self._files = RealFiles() if files is None else files
        self._clock = SystemClock() if clock is None else clock
        self._tells_shown = tells_shown
        self._moment = LogMarks()
        """Marks being shipped, as of the moment at which the last round began."""
        self._told: LogMarks | None = None
        """Marks that were shipped last."""
        self._expected: dict[ShardId, ByteEnd] = {}
        """Position of the follower once it has what was shipped."""
        self._region: RegionId | None = None
        self._checked: dict[ShardId, Offset] = {}
        """Last segment of each shard whose place in the log was checked."""

    def read(self, position: ReplicaPosition, bytes_max: int = BYTES_MAX) -> Shipment | None:
        """Return the next shipment after a follower's position; None if it has been given everything.

        Args:
            position: what the follower has, or will have once it has taken what was shipped before.
            bytes_max: bound of the parts together. A header or a footer that is larger exceeds it:
                those aren't cut.

        Returns:
            A shipment without `documents` and `sent_ns`; `epoch` is the greatest of the marks. The
            last of a round has marks.

        Raises:
            FollowerBehindRetention: the segment after a position was dropped.
            Diverged: the log never had such a position.
            CorruptWal: a segment, or a shard, is missing or damaged.
        """
        if not self._target or self._moment == self._told:
            self._moment = self.now()
        if not self._target:
            return None
        parts: list[SegmentPart] = []
        # For all shards: the receiver may keep only the first report of each.
        first_kept = {
            shard: dropped
            for shard in self._target
            if (dropped := read_dropped(self._files, shard_folder(self._folder, shard))) is not None
        }
        left = bytes_max = max(bytes_max, SEGMENT_HEADER_SIZE)
        for shard, mark in sorted(self._target.items()):
            if left < min(bytes_max, _LEAST_BYTES):
                return self._shipment(parts, {}, first_kept)
            given = _ShardReader(self._files, shard_folder(self._folder, shard), shard, mark, first_kept.get(shard))
            given.checked = self._checked.get(shard)
            end = given.start(position.get(shard))
            overlap = 0 if self._expected.get(shard) == end else _OVERLAP_BYTES
            try:
                end, found, is_done = given.parts(end, left, overlap=overlap)
            except UnreadableBytes as error:
                raise unreadable(error) from error
            if given.checked is not None:
                self._checked[shard] = given.checked
            self._expected[shard] = end
            parts += found
            left -= sum(len(part.data) for part in found)
            if not is_done:
                return self._shipment(parts, {}, first_kept)
        if not parts and self._told == self._moment:
            return None
        self._told = self._moment
        return self._shipment(parts, self._target, first_kept)

    def without_records(self) -> Shipment | None:
        """Return an empty shipment for documents, after `read` has returned None; None if there is no log."""
        return self._shipment([], {}, {}) if self._target else None

    def restart(self) -> None:
        """Ship the marks once more, and check that the follower has the same bytes: it asked for more."""
        self._told = None
        self._checked.clear()
        self._moment = LogMarks()  # what it covers may have been dropped since
        self._expected.clear()

    def wait_beyond(self, timeout_s: float, stop: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the marks have moved since they were last shipped.

        Return False on a timeout, or if `stop` returns True.
        """
        deadline = self._clock.monotonic_ns() + int(timeout_s * 1e9)
        pause = Backoff(*_POLL_S, jitter=0)
        while self._told is not None and self._moment == self._told:
            if self.now() != self._told:
                return True
            if stop() or self._clock.monotonic_ns() >= deadline:
                return False
            self._clock.sleep(pause.next_s())
        return True

    def leader_end(self) -> Seq:
        """Return how far the log is durable now."""
        return stream_cut(durable_marks(self._files, self._folder).values())

    def now(self) -> LogMarks:
        """Return what is durable now, and what readers see. Raises `CorruptWal` if shards are missing."""
        found = log_marks(self._files, self._folder)
        return found if self._tells_shown else LogMarks(found.durable)

    def position_after(self, position: ReplicaPosition) -> ReplicaPosition:
        """Return the position of a follower that was at `position`, once it has what the last `read` returned."""
        return {**position, **self._expected}

    def bytes_behind(self, position: ReplicaPosition, marks: Mapping[ShardId, DurableMark]) -> int:
        """Return the number of bytes between a position and marks; segments removed since count as none."""
        count = 0
        for shard, mark in marks.items():
            at = position.get(shard, ByteEnd(Offset(0), 0))
            # A segment without frames isn't shipped.
            in_last = 0 if mark.byte_end == SEGMENT_HEADER_SIZE else mark.byte_end
            if at.base_offset == mark.base_offset:
                count += max(0, in_last - at.position)
                continue
            shard_dir = shard_folder(self._folder, shard)
            for segment in list_segments(self._files, shard_dir):
                if at.base_offset <= segment.base_offset < mark.base_offset:
                    with suppress(FileNotFoundError):
                        count += self._files.size(segment.path)
            count += in_last - (at.position if at.base_offset < mark.base_offset else 0)
        return max(0, count)

    def region(self) -> RegionId:
        """Return the log's region.

        Raises `CorruptWal` if a header is damaged, `FileNotFoundError` if there is no segment.
        """
        if not self._target:
            self._moment = self.now()
        return self._region_of_log()

    @property
    def _target(self) -> Mapping[ShardId, DurableMark]:
        return self._moment.durable

    def _shipment(
        self,
        parts: list[SegmentPart],
        marks: Mapping[ShardId, DurableMark],
        first_kept: Mapping[ShardId, DroppedMark],
    ) -> Shipment:
        some = next(iter(self._target.values()))
        return Shipment(
            stream=some.stream,
            region=self._region_of_log(),
            epoch=max((mark.epoch for mark in self._target.values()), default=Epoch(0)),
            parts=tuple(parts),
            marks=marks,
            shown=self._moment.shown if marks and self._tells_shown else None,
            by_one=self._moment.by_one,
            first_kept=first_kept,
            leader_end=stream_cut(self._target.values()),
        )

    def _region_of_log(self) -> RegionId:
        """Return the region, which never changes; every segment names it."""
        if self._region is None:
            for shard in self._target:
                for segment in reversed(list_segments(self._files, shard_folder(self._folder, shard))):
                    try:
                        self._region = read_header(self._files, segment).region
                    except FileNotFoundError:  # recovery makes it again
                        continue
                    return self._region
            return RegionId(0)
        return self._region


class _ShardReader:
    """One shard's bytes before a mark."""

    def __init__(
        self, files: Files, folder: str, shard: ShardId, mark: DurableMark, dropped: DroppedMark | None
    ) -> None:
        self._files = files
        self._folder = folder
        self._shard = shard
        self._mark = mark
        self._first = Offset(0) if dropped is None else dropped.offset
        self.checked: Offset | None = None
        """Last segment whose place in the log was checked."""

    def start(self, position: ByteEnd | None) -> ByteEnd:
        """Return the position to continue from, after checking it."""
        if position is None:
            return ByteEnd(self._first, 0)
        if position.base_offset < self._first:
            raise self._behind(position.base_offset)
        target = ByteEnd(self._mark.base_offset, self._mark.byte_end)
        if position > target and not self._reaches(position):
            raise self._diverged(position, "the leader's log ends before it")
        return position

    def parts(self, start: ByteEnd, bytes_max: int, *, overlap: int) -> tuple[ByteEnd, list[SegmentPart], bool]:
        """Return the parts from there on, where they end, and whether that is at the mark."""
        found: list[SegmentPart] = []
        mark = self._mark
        at = start
        left = bytes_max
        is_own = not overlap
        """Whether this log's own bytes have led there."""
        while at.base_offset < mark.base_offset:
            if left < _LEAST_BYTES and found:
                return at, found, False
            path = segment_path(self._folder, at.base_offset)
            try:
                self._check_place(at.base_offset)
                size = self._files.size(path)
                footer = self._footer_size(path, size)
                if at.position > size - footer:
                    raise self._diverged(at, f"the frames of the leader's segment end at byte {size - footer}")
                begin = max(0, at.position - overlap)
                end = size if size - begin <= left else min(size - footer, begin + left)
                if end == begin:
                    if found:
                        return at, found, False
                    end = size  # only the footer is left
                data = self._files.read(path, begin, end - begin)
            except FileNotFoundError as error:
                raise self._gone(at, is_own=is_own) from error
            found.append(SegmentPart(self._shard, at.base_offset, begin, data, end == size))
            left -= len(data)
            overlap = 0
            if end < size:
                return ByteEnd(at.base_offset, end), found, False
            at = ByteEnd(self._end_of(path, size), 0)
            is_own = True
        if at.base_offset > mark.base_offset or mark.byte_end <= max(at.position, SEGMENT_HEADER_SIZE):
            if overlap and at.base_offset == mark.base_offset and at.position:
                found += self._part(at.base_offset, max(0, at.position - overlap), at.position)
            return at, found, True
        begin = max(0, at.position - overlap)
        end = min(mark.byte_end, begin + left)
        if found and left < _LEAST_BYTES:
            return at, found, False
        try:
            self._check_place(at.base_offset)
        except FileNotFoundError as error:
            raise self._gone(at) from error
        found += self._part(at.base_offset, begin, end)
        return ByteEnd(at.base_offset, max(end, at.position)), found, end == mark.byte_end

    def _check_place(self, base: Offset) -> None:
        """Raise `CorruptWal` unless a segment's header names its place, and the next header names its footer.

        A follower would take another segment's bytes for a history that diverges from its own.
        """
        if self.checked == base:
            return
        segment = SegmentFile(base, segment_path(self._folder, base))
        read_header(self._files, segment, shard=self._shard, stream=self._mark.stream)
        if base < self._mark.base_offset:
            footer = self._footer_of(segment.path, self._files.size(segment.path))
            following = SegmentFile(footer.end_offset, segment_path(self._folder, footer.end_offset))
            with suppress(FileNotFoundError):  # the next part reports that
                behind = read_header(self._files, following, shard=self._shard, stream=self._mark.stream)
                if behind.previous_hash != footer.footer_hash:
                    raise self._damaged(following.path, 0, REPLACED)
        self.checked = base

    def _part(self, base: Offset, begin: int, end: int) -> list[SegmentPart]:
        try:
            data = self._files.read(segment_path(self._folder, base), begin, end - begin)
        except FileNotFoundError as error:
            raise self._gone(ByteEnd(base, begin)) from error
        if len(data) < end - begin:
            raise self._diverged(ByteEnd(base, end), "the leader's segment is shorter")
        return [SegmentPart(self._shard, base, begin, data)]

    def _reaches(self, position: ByteEnd) -> bool:
        """Return whether the log has bytes up to a place after its mark: a power cut may leave an older mark."""
        segments = {segment.base_offset: segment for segment in list_segments(self._files, self._folder)}
        if position.base_offset in segments:
            return position.position <= self._files.size(segments[position.base_offset].path)
        before = [segment for base, segment in segments.items() if base < position.base_offset]
        if position.position or not before:
            return False
        last = max(before)
        try:
            footer = SegmentFooter.decode_tail(reader_of(self._files, last.path), self._files.size(last.path))
        except CorruptFrame:
            return False
        return footer is not None and footer.end_offset == position.base_offset

    def _footer_size(self, path: str, size: int) -> int:
        trailer = self._files.read(path, max(0, size - SEGMENT_TRAILER_SIZE), SEGMENT_TRAILER_SIZE)
        if not SegmentFooter.is_trailer(trailer):
            raise self._damaged(path, size, "it isn't sealed, though another segment follows")
        return min(SegmentFooter.size_in(trailer), size - SEGMENT_HEADER_SIZE)

    def _end_of(self, path: str, size: int) -> Offset:
        """Return where the segment after a sealed one begins."""
        return self._footer_of(path, size).end_offset

    def _footer_of(self, path: str, size: int) -> SegmentFooter:
        """Return a sealed segment's footer. Raises `CorruptWal`."""
        try:
            footer = SegmentFooter.decode_tail(reader_of(self._files, path), size)
        except CorruptFrame as error:
            raise self._damaged(path, size, error) from error
        if footer is None:
            raise self._damaged(path, size, "the segment's footer is missing")
        return footer

    def _damaged(self, path: str, byte: int, why: object) -> Exception:
        base = Offset(int(path.rsplit("/", 1)[-1].removesuffix(".wal")))
        return damage(why, file=path, byte=byte, offset_from=base, offset_to=base)

    def _gone(self, at: ByteEnd, *, is_own: bool = False) -> Exception:
        dropped = read_dropped(self._files, self._folder)
        if dropped is not None and at.base_offset < dropped.offset:
            self._first = dropped.offset
            return self._behind(at.base_offset)
        if is_own and not at.position:
            return self._damaged(segment_path(self._folder, at.base_offset), 0, "the segment is missing")
        return self._diverged(at, "the leader has no such segment")

    def _behind(self, base: Offset) -> FollowerBehindRetention:
        return FollowerBehindRetention(
            f"the follower needs segment {base} of shard {self._shard}, but the leader's log begins at segment {self._first}",
            hint="Rebuild the copy with `millstream follow --rebuild`, or raise `retention_bytes_max` to allow a larger "
            "lag.",
            shard=int(self._shard),
            needed_from=int(base),
            first=int(self._first),
        )

    def _diverged(self, at: ByteEnd, why: str) -> Diverged:
        return Diverged(
            f"the follower has shard {self._shard} up to byte {at.position} of segment {at.base_offset}: {why}",
            shard=int(self._shard),
            base_offset=int(at.base_offset),
            byte=at.position,
        )
