"""Which of the stored objects are the log: where leaders have gone on from further below than the store had come before them.

A leader that was promoted without the store (`--accept-loss`) may lack what the store has, and a group of which the store has a part only is in
nobody's log. Its objects can't be put behind what lies there. So before its first shipment it writes a *branch*: by shard, the segment from
which on its own objects stand in the place of those of lower epochs. It stores these segments from their beginnings, and once a shipment with
marks is stored that covers them, it says that the branch is whole. Until then the log is what it was before.

Nothing is taken away for it: what stands outside the log stays under its names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from millstream.codec.shipment import encode_message
from millstream.errors import ShipmentUnreadable
from millstream.model.ids import Epoch, ShardId
from millstream.model.positions import Offset
from millstream.model.replication import ByteEnd, Hello, NodeName, ReplicaPosition
from millstream.replication.object_layout import Layout, listed_in, message_in
from millstream.replication.objects import Objects

_WHOLE: Final = ".whole"
_NOTHING: Final = ByteEnd(Offset(0), 0)


@dataclass(frozen=True, slots=True)
class Branch:
    """One leader's."""

    epoch: Epoch
    begins: ReplicaPosition
    """By shard, the segment from which on; of a shard that isn't named, from the first."""
    is_whole: bool

    def replaces(self, shard: ShardId, base: Offset) -> bool:
        """Whether a segment is one of those."""
        return base >= self.begins.get(shard, _NOTHING).base_offset


@dataclass(frozen=True, slots=True)
class History:
    """All branches, the first one first."""

    branches: tuple[Branch, ...] = ()
    upto: Epoch | None = None
    """As if no higher epoch had been: what was set aside since is the log then. None: as it is."""

    @property
    def epoch(self) -> Epoch:
        """Of the newest whole branch: marks and documents of lower epochs say nothing of the log. 0: there is none."""
        return max((branch.epoch for branch in self.branches if branch.is_whole), default=Epoch(0))

    @property
    def has_begun(self) -> bool:
        """Whether one isn't whole."""
        return any(not branch.is_whole for branch in self.branches)

    def tells(self, epoch: Epoch) -> bool:
        """Whether marks and documents of an epoch say what the log is."""
        return epoch >= self.epoch and not self._is_begun(epoch)

    def has(self, shard: ShardId, epoch: Epoch, base: Offset) -> bool:
        """Whether a segment, or bytes of one, that was stored in an epoch are the log's."""
        return not self._is_begun(epoch) and not any(
            branch.is_whole and branch.epoch > epoch and branch.replaces(shard, base) for branch in self.branches
        )

    @property
    def set_aside(self) -> tuple[Epoch, ...]:
        """Up to which epochs there is more than the log has."""
        claimed = [branch.epoch for branch in self.branches if branch.is_whole]
        return tuple(Epoch(epoch - 1) for epoch in claimed)

    def as_of(self, epoch: Epoch | None) -> History:
        """As the leader of an epoch sees it: its own branch is the log, whole or not."""
        return replace(
            self,
            branches=tuple(Branch(one.epoch, one.begins, one.is_whole or one.epoch == epoch) for one in self.branches),
        )

    def parts_below(self, position: ReplicaPosition, known: History) -> bool:
        """Whether somebody who has read up to a position, by an older history, has read what isn't the log any more."""
        new = [branch for branch in self.branches if branch.is_whole and branch.epoch > known.epoch]
        return any(
            end > branch.begins.get(shard, _NOTHING) for branch in new for shard, end in position.items()
        )  # fmt: skip

    def _is_begun(self, epoch: Epoch) -> bool:
        if self.upto is not None and epoch > self.upto:
            return True
        return any(branch.epoch == epoch and not branch.is_whole for branch in self.branches)


def history_of(objects: Objects, layout: Layout, upto: Epoch | None = None) -> History:
    """Read it, up to an epoch: after the names of shipments, since a branch is there before the first of its epoch. Raises `StoreUnavailable`, `ShipmentUnreadable`."""
    names = {listed.name for listed in listed_in(objects, layout.branches)}
    found = []
    for name in sorted(name for name in names if not name.endswith(_WHOLE)):
        message = message_in(name, objects.get(name) or memoryview(b""))
        if not isinstance(message, Hello):
            raise ShipmentUnreadable(f"{name} says nothing of a branch")
        if upto is None or message.promised <= upto:
            found.append(Branch(message.promised, dict(message.position), f"{name}{_WHOLE}" in names))
    return History(tuple(found), upto)


def begin_branch(
    objects: Objects,
    layout: Layout,
    epoch: Epoch,
    node: str,
    stored: ReplicaPosition,
    common: Callable[[], ReplicaPosition | None],
) -> None:
    """Note where the log of who has claimed an epoch parts from what is stored, where it does. Repeated, it changes nothing.

    Args:
        objects: the store.
        layout: the names of the log.
        epoch: that was claimed: nobody stores anything under a lower one any more.
        node: who did.
        stored: what is stored.
        common: where what the log has in common with the stored one ends; None: it is the same one, as far as that goes.
    """
    begun = any(True for _ in listed_in(objects, f"{layout.groups}/{epoch:020}"))
    if begun or objects.get(layout.branch(epoch)) is not None:
        return
    ends = common()
    if ends is None or all(end <= ends.get(shard, _NOTHING) for shard, end in stored.items()):
        return
    begins = {shard: ByteEnd(end.base_offset, 0) for shard, end in ends.items()}
    objects.put_new(layout.branch(epoch), encode_message(Hello(None, NodeName(node or "node"), epoch, begins)))


def note_whole(objects: Objects, layout: Layout, epoch: Epoch) -> None:
    """Have a branch be the log from now on."""
    objects.put_new(layout.branch_whole(epoch), [b"whole\n"])
