"""The range of a stream's log that readers may read: from what retention has left to what the marks show.

Without marks, it is every valid whole group. If segments are missing that retention didn't drop,
that is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

from millstream.codec.log_frame import FrameHeader, FrameKind
from millstream.codec.log_segment import SEGMENT_HEADER_SIZE
from millstream.errors import CorruptWal, LogError, OffsetExpired, TokenFromFuture
from millstream.model.ids import ShardId
from millstream.model.marks import DurableMark
from millstream.model.positions import Offset, Seq, StreamToken
from millstream.ports import Files
from millstream.protocol.sequencer.persisted_upto import stream_cut
from millstream.wal.durable_mark import is_mark_damaged, missing_shards, read_dropped, read_mark, read_readable
from millstream.wal.frame_index import OnDamage
from millstream.wal.layout import MARK_NAME, SegmentFile, list_segments, list_shards, shard_folder
from millstream.wal.marks_from_frames import marks_of_whole_groups
from millstream.wal.segment_scan import ScannedFrame, scan_segment


class ReadableRange:
    """The bounds of one stream's log. The arguments are `StreamReader`'s.

    Raises:
        CorruptWal: from every method, if segments are missing and there is no `on_damage`.
    """

    def __init__(
        self, files: Files, folder: str, *, without_mark: bool, on_damage: OnDamage | None, durable: bool = False
    ) -> None:
        self.files: Final = files
        self._folder = folder
        self._read_mark = read_mark if durable else read_readable
        self._without_mark, self._on_damage = without_mark, on_damage

    @property
    def goes_by_marks(self) -> bool:
        """Whether marks set the end, and not the frames that exist."""
        return not self._without_mark

    def shards(self) -> tuple[ShardId, ...]:
        """Return the shards that the folder has."""
        return tuple(list_shards(self.files, self._folder))

    def lacks_marks(self) -> bool:
        """Return whether a shard has frames but no mark that shows how far they are durable."""
        folders = [shard_folder(self._folder, shard) for shard in self.shards()]
        return any(
            read_mark(self.files, folder) is None
            and self._has_frames(folder)
            and read_mark(self.files, folder) is None  # its mark may have moved for the first time in between
            for folder in folders
        )

    def first_seq(self) -> Seq:
        """Return the lowest number that can still be read."""
        dropped = [self.dropped(shard)[0] for shard in self.shards()]
        return Seq(max(dropped, default=0) + 1)

    def marks(self) -> tuple[Mapping[ShardId, DurableMark], Seq]:
        """Return the marks of all shards, and a number up to which each of them shows everything."""
        if self._without_mark:
            return marks_of_whole_groups(self.files, self._folder, self.shards(), self._on_damage)
        while True:
            shards = self.shards()
            marks = self._read_marks(shards)
            missing = missing_shards(self._folder, shards, marks.values())
            # A writer that joined after the first read may have numbers below those that the other
            # writers' marks show by now.
            if self.shards() == shards and all(
                self._read_mark(self.files, shard_folder(self._folder, shard)) == marks.get(shard)
                for shard in shards
                if shard not in marks or marks[shard].is_settled
            ):
                if missing is not None:
                    self._tell(missing)
                return marks, stream_cut(marks.values())

    def _read_marks(self, shards: Iterable[ShardId]) -> dict[ShardId, DurableMark]:
        marks = {}
        for shard in shards:
            shard_dir = shard_folder(self._folder, shard)
            mark = self._read_mark(self.files, shard_dir)
            if mark is None and self._has_frames(shard_dir):
                # The mark moves before the first frame is written, so this one can only have
                # appeared since the first read.
                mark = self._read_mark(self.files, shard_dir)
                if mark is None:
                    raise self._lacks_mark(shard)
            if mark is not None:
                marks[shard] = mark
        return marks

    def _lacks_mark(self, shard: ShardId) -> LogError:
        shard_dir = shard_folder(self._folder, shard)
        if is_mark_damaged(self.files, shard_dir):
            file = f"{shard_dir}/{MARK_NAME}"
            return CorruptWal(
                f"{file} is damaged at byte 0: the mark can't be read",
                hint="Start the writer once to write the mark again, or read the folder without marks.",
                file=file,
                byte=0,
            )
        return LogError(
            f"shard {shard} has segments but no durable mark",
            hint="Start the writer once, or read the folder without marks.",
            shard=int(shard),
        )

    def _has_frames(self, shard_dir: str) -> bool:
        return any(self._holds_frames(segment) for segment in list_segments(self.files, shard_dir))

    def _holds_frames(self, segment: SegmentFile) -> bool:
        """Return whether there is more than a header: a shard's very first segment exists before its mark has moved."""
        with suppress(FileNotFoundError):
            return segment.base_offset > 0 or self.files.size(segment.path) > SEGMENT_HEADER_SIZE
        return False

    def dropped(self, shard: ShardId) -> tuple[Seq, Offset]:
        """Return the last number dropped, and the first offset left, of a shard."""
        shard_dir = shard_folder(self._folder, shard)
        dropped = read_dropped(self.files, shard_dir)
        segments = list_segments(self.files, shard_dir)
        first = segments[0].base_offset if segments else Offset(0)
        if first > (0 if dropped is None else dropped.offset):
            dropped = read_dropped(self.files, shard_dir)  # retention moves its mark first, so a second read has it
        if dropped is not None and dropped.offset >= first:
            return dropped.seq, dropped.offset
        if first == 0:
            return Seq(0), Offset(0)
        if not self._without_mark and read_mark(self.files, shard_dir) is not None:
            begin = Offset(0) if dropped is None else dropped.offset
            error = CorruptWal(
                f"segments are missing in {shard_dir}: records at offsets [{begin}, {first}) can't be read, and retention didn't drop them",
                file=shard_dir,
                offset_from=int(begin),
                offset_to=int(first),
            )
            self._tell(error)
            return Seq(0) if dropped is None else dropped.seq, first
        # A copy without the mark: the dropped part ends below the first frame that exists.
        return Seq(self._first_number(shard, segments) - 1), first

    def _tell(self, error: CorruptWal) -> None:
        if self._on_damage is None:
            raise error
        self._on_damage(error)

    def _first_number(self, shard: ShardId, segments: Sequence[SegmentFile]) -> Seq:
        """Return the lowest number of the group of the first readable frame.

        On other shards the group may begin lower.
        """
        frames = self._frames(shard, segments)
        first = next((frame for frame in frames if frame.kind is not FrameKind.SCHEMA), None)
        if first is None:
            return Seq(1)
        numbers = [first.first_seq or first.group_last_seq]
        for other in first.other_shards:
            there = self._frames(other, list_segments(self.files, shard_folder(self._folder, other)))
            of_group = (f for f in there if f.kind is FrameKind.RECORDS and f.group >= first.group)
            found = next(of_group, None)
            if found is not None and found.group == first.group:
                numbers.append(found.first_seq)
        return min(numbers)

    def _frames(self, shard: ShardId, segments: Iterable[SegmentFile]) -> Iterator[FrameHeader]:
        """Yield the heads of a shard's readable frames, in order."""
        for segment in segments:
            for found in scan_segment(self.files, shard, segment, end=None, payload=False):
                if isinstance(found, ScannedFrame):
                    yield found.header

    def check_range(self, after: Seq, upto: Seq, persisted: Seq) -> None:
        """Raise `OffsetExpired` or `TokenFromFuture` if `(after, upto]` isn't there."""
        first = self.first_seq()
        if after < first - 1:
            raise OffsetExpired(
                f"can't read after number {after}: retention has dropped numbers up to {first - 1}",
                first=int(first),
            )
        if max(after, upto) > persisted:
            raise from_future(str(max(after, upto)), persisted)

    def check_end(self, upto: Seq) -> None:
        """Raise `OffsetExpired` if a read from the log's beginning would end before what retention has left."""
        first = self.first_seq()
        if upto < first - 1:
            raise OffsetExpired(
                f"can't read up to number {upto}: retention has dropped numbers up to {first - 1}", first=int(first)
            )

    def check_offset(self, shard: ShardId, offset: Offset) -> None:
        """Raise `OffsetExpired` if retention has dropped an offset of a shard."""
        first = self.dropped(shard)[1]
        if offset < first:
            raise OffsetExpired(
                f"retention has dropped shard {shard} up to offset {first}", first=int(first), shard=int(shard)
            )

    def check_front(self, shard: ShardId, after: Seq) -> None:
        """Raise `OffsetExpired` if retention has dropped numbers of a shard after `after`."""
        dropped, _ = self.dropped(shard)
        if dropped > after:
            raise OffsetExpired(
                f"can't read after number {after}: retention has dropped numbers up to {dropped}",
                first=int(dropped) + 1,
            )


def from_future(asked: str, persisted: Seq, newest: StreamToken | None = None) -> TokenFromFuture:
    """Return the error for a request beyond what the log shows: all up to `persisted`, or up to the token `newest`."""
    end = persisted if newest is None else newest
    return TokenFromFuture(
        f"{asked} is beyond the end of the readable log, {end}",
        hint=f"Ask for {end} or an earlier one, or wait until the log has it.",
        persisted_upto=int(persisted),
    )
