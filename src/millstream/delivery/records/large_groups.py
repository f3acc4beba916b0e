"""Commit groups that take several frames: a large transaction, for example, whose rows go from table to table.

Numbers go from table to table over all of an operation's frames, so a later frame has numbers below those of an earlier
one, and no frame shows where its operation began. If the shard is the log's only one, the group's numbers are as dense as
its offsets: the offset gives a number that follows the order of the commit, without the group's other frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from millstream.errors import CorruptWal
from millstream.model.positions import Offset, Seq
from millstream.wal.reader import StreamReader


class LargeGroup(NamedTuple):
    """A group of several frames."""

    begin: Offset
    """The first offset of the frames that are read."""
    end: Offset
    """The end of its offsets."""
    last_seq: Seq
    frames: int

    @property
    def shift(self) -> int:
        """The difference between a record's number in the order of the commit, and its offset."""
        return self.last_seq + 1 - self.end

    @property
    def first_seq(self) -> Seq:
        """The number of the first record."""
        return Seq(self.begin + self.shift)


class LargeGroups:
    """The large groups of a log of one shard, in order.

    Args:
        reader: the log.
        after, upto: the numbers `(after, upto]` that are read.

    Raises:
        OffsetExpired, CorruptWal, LogTruncated: as `StreamReader`, also from `within`.
    """

    def __init__(self, reader: StreamReader, after: Seq, upto: Seq) -> None:
        self._groups = _groups(reader, after, upto)
        self._next = next(self._groups, None)

    @property
    def begin(self) -> Offset | None:
        """The first offset of the frames that are left; None if there are none."""
        return None if self._next is None else self._next.begin

    def within(self, begin: Offset, end: Offset) -> Iterator[LargeGroup]:
        """Yield those with records at offsets `[begin, end)`, at or behind those of the last call."""
        while (group := self._next) is not None and group.begin < end:
            if group.frames > 1 and group.end > begin:
                yield group
            if group.end > end:
                return
            self._next = next(self._groups, None)


def _groups(reader: StreamReader, after: Seq, upto: Seq) -> Iterator[LargeGroup]:
    number = group = None
    try:
        for _, _, entry in reader.frames_between(after, upto):
            end = Offset(entry.offset + entry.count)
            if group is not None and entry.group == number:
                group = group._replace(end=end, frames=group.frames + 1)
                continue
            if group is not None:
                yield group
            number, group = entry.group, LargeGroup(entry.offset, end, entry.group_last_seq, 1)
    except CorruptWal:
        if group is None:
            raise
        # Reading on reports it.
    if group is not None:
        yield group
