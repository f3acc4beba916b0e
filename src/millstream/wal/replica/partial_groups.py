"""Tracking of the commit groups that a follower has whole, on all their shards, beyond what its marks show.

A group's frames arrive separately on each shard, in any order of shards. Marks that cover the group
are trusted only if each shard that its frames name has its part.

Marks aren't fsynced, so a power cut may keep acknowledged bytes and lose the marks that came with
them. A log of one writer shows how far it is whole without marks: groups are numbered without a
gap, and each names its shards. So what was acknowledged is shown again without the leader. With
several writers, only their marks show what is whole; the follower then waits for the leader.

The same works for a log whose marks never came: the part before damage in an object store.
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
from millstream.wal.replica.verify_continuity import WholeFrame


@dataclass(slots=True)
class PartialGroups:
    """Groups that have arrived on some of their shards only. A group on a single shard takes no room."""

    _lacking: dict[WriterId, dict[GroupNumber, tuple[Seq, frozenset[ShardId]]]] = field(default_factory=dict)
    """By group: its last number, and the shards whose parts haven't come."""
    _lost: dict[ShardId, GroupNumber] = field(default_factory=dict)
    """By shard, the group up to which parts may have been accepted as lost: loss frames stand for them."""

    def note(self, frames: Iterable[WholeFrame]) -> None:
        """Note frames that have come whole."""
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
        """Return a group up to `upto`, and a shard that lacks its part of it.

        None if all are whole; those groups are then forgotten.

        Args:
            writer: the groups' writer.
            upto: the last group to check.
            shown: the current marks: what they show had come before.
            dropped: for each shard that doesn't begin at offset 0, what it begins after.
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


class _GroupEnd(NamedTuple):
    """End of a group on a shard."""

    group: GroupNumber
    end: ByteEnd
    end_offset: Offset
    epoch: Epoch
    last_seq: Seq
    reserved_to: Seq


@dataclass(slots=True)
class GroupEnds:
    """Ends of the groups beyond the marks: used at an open, and then discarded."""

    _writer: WriterId | None = None
    _several: bool = False
    _ends: dict[ShardId, list[_GroupEnd]] = field(default_factory=dict)

    def note(self, frames: Iterable[WholeFrame]) -> None:
        """Note frames that lie there whole."""
        for header, end, end_offset in frames:
            self._several |= self._writer not in (None, header.writer)
            self._writer = header.writer
            if not header.more:
                found = _GroupEnd(
                    header.group, end, end_offset, header.epoch, header.group_last_seq, header.reserved_to
                )
                self._ends.setdefault(header.shard, []).append(found)

    def marks(
        self,
        shown: Mapping[ShardId, DurableMark],
        partial: PartialGroups,
        dropped: Mapping[ShardId, DroppedMark],
        unmarked: frozenset[ShardId] = frozenset(),
    ) -> dict[ShardId, DurableMark]:
        """Return the marks that show all whole groups in a row after those shown; none if there are no such groups.

        Args:
            shown: the current marks.
            partial: of the same frames.
            dropped: what the log begins after.
            unmarked: the shards of the log, all of one writer, if no mark has ever come.
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
        """Return the group after which the log begins; None if the first remaining frames may be missing."""
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
