"""The part of a follower's log that its readers see, if other machines must hold a write before anyone reads it.

With its marks, the leader ships how far its own readers see the log. The follower keeps that in its
marks' areas *shown*, as a writer does. It is required there before the first durable mark moves,
and follows after those marks. So nothing is shown here before the level is met, and what was shown
stays shown, whichever node leads next. If the leader has no such level, readers go by what is
durable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from millstream.codec.log_segment import SEGMENT_HEADER_SIZE, SegmentHeader
from millstream.errors import CorruptFrame, ShipmentUnreadable
from millstream.model.ids import ShardId
from millstream.model.marks import DurableMark, ShownMark
from millstream.model.positions import Offset
from millstream.ports import Files
from millstream.wal.durable_mark import MarkFile, read_shown
from millstream.wal.layout import segment_path
from millstream.wal.replica.follower_marks import NOBODY, is_newer, moves
from millstream.wal.segment_scan import ReadAhead, reader_of, scan_frames

_AHEAD_BYTES: Final = 1 << 16
"""Read-ahead in bytes for heads of frames; one read per shipment suffices."""


@dataclass(slots=True)
class _ShownShard:
    folder: str
    file: MarkFile
    mark: DurableMark


@dataclass(slots=True)
class ReplicaShown:
    """The areas *shown* of a follower's marks. Used by the thread that moves the marks."""

    files: Files
    _seen: dict[ShardId, _ShownShard] = field(default_factory=dict)
    """Shards whose readers go by what is shown."""

    def found(self, shard: ShardId, shard_dir: str, file: MarkFile) -> None:
        """Take in a shard that exists when the log is opened."""
        shown = read_shown(self.files, shard_dir)
        if shown is not None and shown.required:
            self._seen[shard] = _ShownShard(shard_dir, file, shown.mark)

    @property
    def is_required(self) -> bool:
        """Whether readers of some shard go by what is shown."""
        return bool(self._seen)

    def require(self, shards: Iterable[tuple[ShardId, str, MarkFile, DurableMark]]) -> None:
        """Make readers of shards go by what is shown, durably, beginning at their present position.

        Call it before marks move.

        Args:
            shards: each with its folder, its mark's file, and the current mark.
        """
        for shard, shard_dir, file, mark in shards:
            if shard not in self._seen:
                file.move_shown(ShownMark(mark, required=True), anchor=True)
                self._seen[shard] = _ShownShard(shard_dir, file, mark)

    def allow_all(self, durable: Mapping[ShardId, DurableMark]) -> None:
        """Make readers go by what is durable, after marks were moved."""
        for shard, seen in self._seen.items():
            seen.file.move_shown(ShownMark(durable.get(shard, seen.mark), required=False), anchor=True)
        self._seen.clear()

    def move(self, told: Mapping[ShardId, DurableMark], durable: Mapping[ShardId, DurableMark]) -> None:
        """Show what the leader shows, as far as it is durable here; after marks were moved.

        Args:
            told: how far the leader's readers see each shard.
            durable: the marks here.

        Raises:
            ShipmentUnreadable: it shows a place where no frame ends.
        """
        shown = {shard: seen.mark for shard, seen in self._seen.items()}
        newer: dict[ShardId, DurableMark] = {}
        for shard, mark in sorted(told.items()):
            here = durable.get(shard)
            if shard not in shown or here is None:
                continue
            upto = mark if _is_covered(mark, here) else min(here, mark, key=_place)
            if is_newer(upto, shown[shard]) and (upto is here or self._ends_there(shard, upto)):
                newer[shard] = upto
        for shard, mark in moves(shown, newer):
            seen = self._seen[shard]
            seen.file.move_shown(ShownMark(mark, required=True))
            seen.mark = mark

    def _ends_there(self, shard: ShardId, mark: DurableMark) -> bool:
        """Return whether the records up to a place are there, and whole; False if they were dropped.

        A position shown before isn't read again.
        """
        seen = self._seen[shard]
        if mark.byte_end == SEGMENT_HEADER_SIZE:
            end, group, more = mark.base_offset, mark.group, False
        elif _place(mark) == _place(seen.mark):
            end, group, more = seen.mark.durable_offset, seen.mark.group, False
        else:
            read = reader_of(self.files, segment_path(seen.folder, mark.base_offset))
            position, end, group, more = SEGMENT_HEADER_SIZE, mark.base_offset, seen.mark.group, False
            if seen.mark.base_offset == mark.base_offset and seen.mark.byte_end > SEGMENT_HEADER_SIZE:
                position, end = seen.mark.byte_end, seen.mark.durable_offset
            try:
                header = SegmentHeader.decode(read(0, SEGMENT_HEADER_SIZE))
                frames = scan_frames(
                    ReadAhead(read, _AHEAD_BYTES),
                    header,
                    position=position,
                    offset=end,
                    end=mark.byte_end,
                    payload=False,
                )
                for frame in frames:
                    position, group, more = frame.end, frame.header.group, frame.header.more
                    end = Offset(frame.header.first_offset + frame.header.count)
            except FileNotFoundError:
                return False
            except CorruptFrame as error:
                raise ShipmentUnreadable(f"the leader shows readers an invalid position: {error}") from error
            more = more or position != mark.byte_end
        if (end, more) != (mark.durable_offset, False) or group > mark.group:
            raise ShipmentUnreadable(
                f"the leader shows shard {shard} up to offset {mark.durable_offset} and group {mark.group}, but the frames there end with {end} and {group}",
                shard=int(shard),
            )
        return True


def _is_covered(mark: DurableMark, by: DurableMark) -> bool:
    return _place(mark) <= _place(by) and mark.group <= by.group and mark.persisted_upto <= by.persisted_upto


def _place(mark: DurableMark) -> tuple[int, int]:
    return mark.base_offset, mark.byte_end


def lower_shown(files: Files, shard_dir: str, file: MarkFile, mark: DurableMark) -> None:
    """Show, durably, no more than a mark that is about to be lowered."""
    shown = read_shown(files, shard_dir)
    if shown is None or not shown.required or _is_covered(shown.mark, mark):
        return
    seen = shown.mark
    if mark.writer == NOBODY:  # with any other mark's group, those of other shards would wait for it
        file.move_shown(ShownMark(mark, required=True), anchor=True)
        return
    if _place(seen) > _place(mark):
        seen = replace(seen, base_offset=mark.base_offset, byte_end=mark.byte_end, durable_offset=mark.durable_offset)
    lowered = replace(
        seen, group=min(seen.group, mark.group), persisted_upto=min(seen.persisted_upto, mark.persisted_upto)
    )
    file.move_shown(ShownMark(lowered, required=True), anchor=True)
