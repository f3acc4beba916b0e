"""Which commit groups a follower has whole, on all their shards, of those that its marks don't show yet.

A group's frames come on each shard by themselves, in any order of shards. Marks that say that they cover it are believed only where each
shard that its frames name has its part.

Marks aren't fsynced, so a power cut may keep bytes that were acknowledged and lose the marks that came with them. A log of one writer tells
by itself how far it is whole: groups are numbered without a gap, and each names its shards. So what was acknowledged is shown again
without the leader. Of several writers only their marks say what is whole; there it waits for the leader.

So it can be told, too, of a log whose marks never came: what lies in front of damage in an object store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from millstream.codec.log_frame import FrameKind
from millstream.model.ids import Epoch, GroupNumber, ShardId, WriterId
from millstream.model.marks import DroppedMark, DurableMark
from millstream.model.positions import Offset, Seq
from millstream.model.replication import ByteEnd
from millstream.wal.replica.verify import WholeFrame


@dataclass(slots=True)
class PartialGroups:
    """Groups of which some shard's part has come, and another's hasn't. One that lies on one shard alone takes no room."""

    _lacking: dict[WriterId, dict[GroupNumber, tuple[Seq, frozenset[ShardId]]]] = field(default_factory=dict)
    """Its last number, and the shards whose parts haven't come."""
    _lost: dict[ShardId, GroupNumber] = field(default_factory=dict)
    """Up to there, parts on a shard may have been lost by somebody's word: loss frames stand for them."""

    def note(self, frames: Iterable[WholeFrame]) -> None:
        """Frames have come whole."""
        for frame in frames:
            header = frame.header
            if header.kind is FrameKind.LOSS:
                self._lost[header.shard] = max(header.group, self._lost.get(header.shard, GroupNumber(0)))
            if header.more or not header.other_shards:
                continue
            of_writer = self._lacking.setdefault(header.writer, {})
            _, lacking = of_writer.get(
                header.group, (header.group_last_seq, frozenset((header.shard, *header.other_shards)))
            )
            lacking -= {header.shard}
            if lacking:
                of_writer[header.group] = header.group_last_seq, lacking
            else:
                of_writer.pop(header.group, None)

    def missing(
        self,
        writer: WriterId,
        upto: GroupNumber,
        shown: Mapping[ShardId, DurableMark],
        dropped: Mapping[ShardId, DroppedMark],
    ) -> tuple[GroupNumber, ShardId] | None:
        """A group up to that one, and a shard that lacks its part of it; None where all are whole, which are forgotten then.

        Args:
            writer: whose groups.
            upto: the last group that is asked for.
            shown: the marks as they are: what they show had come before.
            dropped: what the log begins behind, of each shard where it isn't its beginning.
        """
        of_writer = self._lacking.get(writer, {})
        asked = [group for group in of_writer if group <= upto]
        for group in asked:
            last_seq, lacking = of_writer[group]
            for shard in lacking:
                mark, gone = shown.get(shard), dropped.get(shard)
                has = (
                    (mark is not None and mark.writer == writer and mark.group >= group)
                    or (gone is not None and last_seq <= gone.seq)
                    or group <= self._lost.get(shard, 0)
                )
                if not has:
                    return group, shard
        for group in asked:
            del of_writer[group]
        return None


class _End(NamedTuple):
    """Where a group ends on a shard."""

    group: GroupNumber
    end: ByteEnd
    end_offset: Offset
    epoch: Epoch
    last_seq: Seq
    reserved_to: Seq


@dataclass(slots=True)
class GroupEnds:
    """Where the groups end that lie behind the marks: for an open, which forgets it all then."""

    _writer: WriterId | None = None
    _several: bool = False
    _ends: dict[ShardId, list[_End]] = field(default_factory=dict)

    def note(self, frames: Iterable[WholeFrame]) -> None:
        """Frames lie there whole."""
        for header, end, end_offset in frames:
            self._several |= self._writer not in (None, header.writer)
            self._writer = header.writer
            if not header.more:
                found = _End(header.group, end, end_offset, header.epoch, header.group_last_seq, header.reserved_to)
                self._ends.setdefault(header.shard, []).append(found)

    def marks(
        self,
        shown: Mapping[ShardId, DurableMark],
        partial: PartialGroups,
        dropped: Mapping[ShardId, DroppedMark],
        unmarked: frozenset[ShardId] = frozenset(),
    ) -> dict[ShardId, DurableMark]:
        """The marks that show all whole groups in a row behind those that are shown; none where there are no such.

        Args:
            shown: the marks as they are.
            partial: of the same frames.
            dropped: what the log begins behind.
            unmarked: the shards that the log has, all of one writer, where it is asked though no mark has ever come.
        """
        own = {shard: mark for shard, mark in shown.items() if mark.writer}
        writer = self._writer
        if writer is None or self._several or any(mark.elsewhere is not None for mark in own.values()):
            return {}
        if own:
            if {mark.writer for mark in own.values()} != {writer}:
                return {}
            covered = min(mark.group for mark in own.values())
        else:
            begins = self._begins_behind(unmarked, dropped) if unmarked else None
            if begins is None:
                return {}
            covered = begins
        there = {end.group: end for ends in self._ends.values() for end in ends}
        upto = covered
        while (following := GroupNumber(upto + 1)) in there and partial.missing(
            writer, following, shown, dropped
        ) is None:
            upto = following
        if upto == covered:
            return {}
        last = there[upto]
        some = next(iter(own.values()), None)
        if some is None:
            some = replace(next(iter(shown.values())), writer=writer, elsewhere=None, is_settled=False)
        reserved = max([last.reserved_to, *(mark.reserved_to for mark in own.values())])
        made = {}
        for shard in shown:
            ends = [end for end in self._ends.get(shard, []) if end.group <= upto]
            end = max(ends, key=lambda end: end.end, default=None)
            mark = own.get(shard)
            if end is not None and (mark is None or end.end > ByteEnd(mark.base_offset, mark.byte_end)):
                mark = replace(
                    mark or some, base_offset=end.end.base_offset, byte_end=end.end.position, durable_offset=end.end_offset,
                    epoch=max(end.epoch, Epoch(0) if mark is None else mark.epoch),
                )  # fmt: skip
            if mark is not None:
                made[shard] = replace(
                    mark,
                    group=max(upto, mark.group),
                    persisted_upto=max(last.last_seq, mark.persisted_upto),
                    reserved_to=reserved,
                )
        return made

    def _begins_behind(self, shards: frozenset[ShardId], dropped: Mapping[ShardId, DroppedMark]) -> GroupNumber | None:
        """The group behind which the log begins, where that is known: of what retention has left of each shard the beginning may not have come."""
        gone = max((mark.seq for mark in dropped.values()), default=Seq(0))
        if not gone:
            return GroupNumber(0)
        kept = {
            shard: [end.group for end in self._ends.get(shard, ()) if end.last_seq > gone] for shard in shards
        }  # fmt: skip
        if all(kept.values()):
            return GroupNumber(min(min(groups) for groups in kept.values()) - 1)
        older = [end.group for ends in self._ends.values() for end in ends if end.last_seq <= gone]
        return max(older, default=None)
