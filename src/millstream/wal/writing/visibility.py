"""The part of a log that readers are shown, if other machines must hold records before anyone may read them.

The writer makes group after group durable. Each waits here with the marks that would show it. Once
a group is held as the stream's level requires, the area *shown* of the marks moves to the newest
such group, on all shards. It moves like the marks of what is durable: first the positions, then
what is complete up to them. It never moves back, even if the machines that held a group lose it.

A writer that opens a log begins where readers were: with what was shown, or, if a level is asked
for the first time, with what was durable when the previous writer ended. Everything recovered after
that point waits as one group.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from millstream.codec.log_segment import SEGMENT_HEADER_SIZE, SegmentFooter
from millstream.model.ids import GroupNumber, ShardId
from millstream.model.marks import DroppedMark, DurableMark, ShownMark
from millstream.model.positions import Offset, Seq
from millstream.model.replication import LOCAL, AckLevel
from millstream.ports import Files
from millstream.protocol.sequencer.persisted_upto import common_cut
from millstream.wal.durable_mark import MarkFile, read_dropped, read_mark, read_shown
from millstream.wal.layout import list_segments, shard_folder
from millstream.wal.replica.follower_marks import NOBODY
from millstream.wal.segment_scan import reader_of
from millstream.wal.writing.recover import Recovered

HIDDEN_MAX: Final = 1024
"""Number of hidden groups up to which all are kept. Beyond it, as after hours without a follower,
every other group that no append waits for is dropped: the next group shows its records too.
"""


@dataclass(slots=True)
class _Hidden:
    """A group that is durable here and not shown to readers."""

    group: GroupNumber
    marks: Mapping[ShardId, DurableMark]


class _VisibleEnd(NamedTuple):
    """Where a shard's records up to a group end."""

    base_offset: Offset
    byte_end: int
    durable_offset: Offset
    last_seq: Seq


class ShownMarks:
    """The areas *shown* of one writer's marks. Made by `begin`.

    Concurrency: `add` and `hide` by the thread that writes, `show` by any other one, `close` by any.
    """

    def __init__(
        self, files: dict[ShardId, MarkFile], marks: dict[ShardId, DurableMark], *, by_one: bool = False
    ) -> None:
        self._lock = threading.Lock()
        self._by_one = by_one
        self._files = files
        self._marks = marks
        """Marks that readers are shown."""
        self._hidden: list[_Hidden] = []
        self._closed = False
        self.group = min((mark.group for mark in marks.values()), default=GroupNumber(0))
        """Last group that readers see."""
        self.persisted_upto = common_cut(marks.values())
        """Number up to which readers see everything."""

    @classmethod
    def begin(
        cls, files: Files, folder: str, marks: Mapping[ShardId, MarkFile], empty: Mapping[ShardId, DurableMark],
        recovered: Recovered, *, acks: AckLevel = LOCAL,
    ) -> ShownMarks:  # fmt: skip
        """Make readers go by what is shown, beginning at their present end.

        For a writer that has recovered, before it moves a mark.

        Args:
            marks: the writer's, locked.
            empty: a mark of each shard, for its stream, its writer, and the number of shards.
            acks: the stream's level.

        Raises:
            OSError: the disk is full, or fails.
        """
        known: dict[ShardId, DurableMark | None] = {}
        for shard in marks:
            shard_dir = shard_folder(folder, shard)
            shown = read_shown(files, shard_dir)
            mark = shown.mark if shown is not None and shown.required else read_mark(files, shard_dir)
            known[shard] = mark if mark is not None and mark.stream == empty[shard].stream else None
        # A placeholder mark shows nothing: it stands for a shard that the leader had not begun.
        seen = [mark for mark in known.values() if mark is not None and mark.writer != NOBODY]
        # If the mark of a shard with records is lost, there is no start to begin from: nothing is
        # shown until the level is reached.
        if any(mark is None and recovered.shards[shard].end_offset > 0 for shard, mark in known.items()):
            seen = []
        # A kill may have come between the moves of two marks. The newest group that any of them
        # shows is held elsewhere and whole, so its move is finished on every shard.
        newest = max(seen, key=lambda mark: (mark.group, mark.persisted_upto), default=None)
        group = GroupNumber(0) if newest is None else newest.group
        ends = {shard: _end_of(group, files, shard_folder(folder, shard)) for shard in marks}
        upto = Seq(max(0 if newest is None else newest.persisted_upto, *(end.last_seq for end in ends.values())))
        begun: dict[ShardId, DurableMark] = {}
        for shard, end in ends.items():
            mark = known[shard]
            place = mark if newest is not None and mark in seen and mark.group == group else end
            begun[shard] = replace(
                newest or empty[shard], base_offset=place.base_offset, byte_end=place.byte_end, durable_offset=place.durable_offset,
                group=group, persisted_upto=upto, shards=empty[shard].shards,
            )  # fmt: skip
        own = cls(dict(marks), begun, by_one=acks.by_one)
        for shard, mark_file in marks.items():
            mark_file.move_shown(own._said(begun[shard]), anchor=True)
        return own

    def add(self, shard: ShardId, mark_file: MarkFile, mark: DurableMark) -> None:
        """Add a shard that was begun: empty, and shown as empty."""
        with self._lock:
            mark = replace(mark, group=self.group, persisted_upto=self.persisted_upto)
            mark_file.move_shown(self._said(mark), anchor=True)
            self._files[shard], self._marks[shard] = mark_file, mark

    def hide(self, marks: Mapping[ShardId, DurableMark]) -> None:
        """Take marks of what is durable, moved to a new group, or to another segment for the newest group.

        Raises `OSError` if the disk fails.
        """
        group = next(iter(marks.values())).group
        with self._lock:
            if self._hidden and self._hidden[-1].group == group:
                self._hidden.pop()
            elif not self._hidden and group <= self.group:
                self._move(marks)
                return
            self._hidden.append(_Hidden(group, marks))

    def show(self, group: GroupNumber) -> bool:
        """Show what is hidden up to a group; return whether there was any.

        Raises `OSError` if the disk fails: nothing more can be shown.
        """
        with self._lock:
            count = next((i for i, one in enumerate(self._hidden) if one.group > group), len(self._hidden))
            if not count or self._closed:
                return False
            last = self._hidden[count - 1]
            self._move(last.marks)
            del self._hidden[:count]
            return True

    @property
    def hides(self) -> bool:
        """Whether anything is durable here and not shown."""
        return bool(self._hidden)

    def thin(self, below: GroupNumber) -> None:
        """Drop every other of many hidden groups below `below`, the first that an append waits for."""
        with self._lock:
            if len(self._hidden) > HIDDEN_MAX:
                last = len(self._hidden) - 1
                self._hidden = [one for i, one in enumerate(self._hidden) if i % 2 or i == last or one.group >= below]

    def close(self) -> None:
        """Show nothing more: the marks are closed, or another writer's."""
        with self._lock:
            self._closed = True

    def _said(self, mark: DurableMark) -> ShownMark:
        return ShownMark(mark, required=True, by_one=self._by_one)

    def _move(self, marks: Mapping[ShardId, DurableMark]) -> None:
        if self._closed:
            return
        newest = next(iter(marks.values()))
        # A shard begun later than the group moves with it, unchanged.
        all_of_them = {
            shard: marks.get(shard) or replace(mark, group=newest.group, persisted_upto=newest.persisted_upto)
            for shard, mark in self._marks.items()
        }
        if len(all_of_them) > 1:
            for shard, mark in all_of_them.items():
                between = replace(mark, persisted_upto=self.persisted_upto)
                self._files[shard].move_shown(self._said(between))
        for shard, mark in all_of_them.items():
            self._files[shard].move_shown(self._said(mark))
        self._marks = all_of_them
        self.group, self.persisted_upto = newest.group, newest.persisted_upto


def _end_of(group: GroupNumber, files: Files, shard_dir: str) -> _VisibleEnd:
    """Return where a recovered shard's records up to a group end; if there are none, where the shard begins."""
    for segment in reversed(list_segments(files, shard_dir)):
        footer = SegmentFooter.decode_tail(reader_of(files, segment.path), files.size(segment.path))
        for frame in reversed(() if footer is None else footer.frames):
            if frame.group <= group:
                end = Offset(frame.offset + frame.count)
                return _VisibleEnd(segment.base_offset, frame.position + frame.length, end, frame.group_last_seq)
    dropped = read_dropped(files, shard_dir) or DroppedMark(Seq(0), Offset(0))
    return _VisibleEnd(dropped.offset, SEGMENT_HEADER_SIZE, dropped.offset, dropped.seq)


def show_all(files: Files, folder: str, marks: Mapping[ShardId, MarkFile]) -> None:
    """Make readers go by what is durable, if they went by what is shown. For a writer that has moved its marks.

    Raises `OSError` if the disk fails.
    """
    for shard, mark_file in marks.items():
        shown = read_shown(files, shard_folder(folder, shard))
        if shown is not None and shown.required:
            mark_file.move_shown(replace(shown, required=False), anchor=True)
