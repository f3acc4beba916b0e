"""Which commit groups a follower has whole, on all their shards, of those that its marks don't show yet.

A group's frames come on each shard by themselves, in any order of shards. Marks that say that they cover it are believed only where each
shard that its frames name has its part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from millstream.codec.log_frame import FrameHeader, FrameKind
from millstream.model.ids import GroupNumber, ShardId, WriterId
from millstream.model.marks import DroppedMark, DurableMark
from millstream.model.positions import Seq


@dataclass(slots=True)
class PartialGroups:
    """Groups of which some shard's part has come, and another's hasn't. One that lies on one shard alone takes no room."""

    _lacking: dict[WriterId, dict[GroupNumber, tuple[Seq, frozenset[ShardId]]]] = field(default_factory=dict)
    """Its last number, and the shards whose parts haven't come."""
    _lost: dict[ShardId, GroupNumber] = field(default_factory=dict)
    """Up to there, parts on a shard may have been lost by somebody's word: loss frames stand for them."""

    def note(self, headers: Iterable[FrameHeader]) -> None:
        """Frames have come whole."""
        for header in headers:
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
