"""The stored objects that are the log, after leaders have continued from below the store's end.

A leader that was promoted without the store (`--accept-loss`) may lack records that the store has.
A group that the store has only in part is in no log. The leader's objects can't follow those. So
before its first shipment it writes a *branch*: by shard, the segment from which on its own objects
replace those of lower epochs. It stores these segments from their beginnings. Once it has stored a
shipment with marks that cover them, it marks the branch as whole. Until then the log is what it was
before.

Nothing is deleted for it: objects outside the log keep their names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from millstream.codec.replication_messages import encode_message
from millstream.errors import ShipmentUnreadable
from millstream.model.ids import Epoch, ShardId
from millstream.model.positions import Offset
from millstream.model.replication import ByteEnd, Hello, NodeName, ReplicaPosition
from millstream.replication.object_store.object_names import Layout, listed_in, message_in
from millstream.replication.object_store.store_client import Objects

_WHOLE: Final = ".whole"
_NOTHING: Final = ByteEnd(Offset(0), 0)


@dataclass(frozen=True, slots=True)
class Branch:
    """Branch of one leader."""

    epoch: Epoch
    begins: ReplicaPosition
    """By shard, the first segment of the branch; a shard that isn't named is replaced from its first segment."""
    is_whole: bool

    def replaces(self, shard: ShardId, base: Offset) -> bool:
        """Return whether the branch replaces a segment."""
        return base >= self.begins.get(shard, _NOTHING).base_offset


@dataclass(frozen=True, slots=True)
class History:
    """All branches, in the order of their epochs."""

    branches: tuple[Branch, ...] = ()
    upto: Epoch | None = None
    """Epoch to view the log at, as if no higher epoch existed: the log then includes what was set
    aside since. None: the current log.
    """

    @property
    def epoch(self) -> Epoch:
        """Epoch of the newest whole branch: marks and documents of lower epochs don't describe the log. 0.

        There is none.
        """
        return max((branch.epoch for branch in self.branches if branch.is_whole), default=Epoch(0))

    @property
    def has_begun(self) -> bool:
        """Whether some branch isn't whole."""
        return any(not branch.is_whole for branch in self.branches)

    def tells(self, epoch: Epoch) -> bool:
        """Return whether marks and documents of an epoch describe the log."""
        return epoch >= self.epoch and not self._is_begun(epoch)

    def has(self, shard: ShardId, epoch: Epoch, base: Offset) -> bool:
        """Return whether a segment, or bytes of it, stored in an epoch belong to the log."""
        return not self._is_begun(epoch) and not any(
            branch.is_whole and branch.epoch > epoch and branch.replaces(shard, base) for branch in self.branches
        )

    @property
    def set_aside(self) -> tuple[Epoch, ...]:
        """Epochs at whose end the store has more than the log."""
        claimed = [branch.epoch for branch in self.branches if branch.is_whole]
        return tuple(Epoch(epoch - 1) for epoch in claimed)

    def as_of(self, epoch: Epoch | None) -> History:
        """Return the history as the leader of an epoch sees it: its own branch is the log, whole or not."""
        return replace(
            self,
            branches=tuple(Branch(one.epoch, one.begins, one.is_whole or one.epoch == epoch) for one in self.branches),
        )

    def parts_below(self, position: ReplicaPosition, known: History) -> bool:
        """Return whether a reader at a position, by an older history, has read records that the log no longer has."""
        new = [branch for branch in self.branches if branch.is_whole and branch.epoch > known.epoch]
        return any(
            end > branch.begins.get(shard, _NOTHING) for branch in new for shard, end in position.items()
        )  # fmt: skip

    def _is_begun(self, epoch: Epoch) -> bool:
        if self.upto is not None and epoch > self.upto:
            return True
        return any(branch.epoch == epoch and not branch.is_whole for branch in self.branches)


def history_of(objects: Objects, layout: Layout, upto: Epoch | None = None) -> History:
    """Read the history, up to an epoch.

    Read it after the names of shipments, because a branch exists before the first shipment of its
    epoch. Raises `StoreUnavailable`, `ShipmentUnreadable`.
    """
    names = {listed.name for listed in listed_in(objects, layout.branches)}
    found = []
    for name in sorted(name for name in names if not name.endswith(_WHOLE)):
        message = message_in(name, objects.get(name) or memoryview(b""))
        if not isinstance(message, Hello):
            raise ShipmentUnreadable(f"{name} has no branch")
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
    """Record where the log of the node that claimed an epoch diverges from what is stored, if it does. Idempotent.

    Args:
        epoch: the claimed epoch: nothing more is stored under a lower one.
        stored: the end of what is stored.
        common: returns the end of what the log has in common with the stored one; None: the logs
            don't diverge.
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
    """Mark a branch as whole: it is the log from now on."""
    objects.put_new(layout.branch_whole(epoch), [b"whole\n"])
