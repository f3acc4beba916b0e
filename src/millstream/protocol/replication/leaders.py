"""Who leads what, and since when: the map that routing asks, of versions that never go back.

A version is a promotion's promise, a number and a node, so two entries of one version name one leader, and what is put together of several
nodes' words can't contradict itself: it is the union, and the greatest version counts. Who leads a stream leads all its shards: a commit group
lies on several of them, and is one leader's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from millstream.model.ids import GroupNumber, ShardId
from millstream.model.replication import NodeName
from millstream.protocol.replication.roles import UNPROMISED, Promise, Role, RoleFact


@dataclass(frozen=True, slots=True, order=True)
class Leadership:
    """One leader's time."""

    since: Promise
    """The version; `UNPROMISED`: it was set up so."""
    node: NodeName
    behind: GroupNumber = GroupNumber(0)
    """The last commit group that was there when it began."""


@dataclass(frozen=True, slots=True)
class LeaderMap:
    """Who has led a stream, and who does. Made by `of` and `joined`."""

    leaderships: tuple[Leadership, ...] = ()
    """In the order of their versions, one each."""

    @classmethod
    def of(cls, known: Iterable[Leadership]) -> LeaderMap:
        """Of entries in any order, also the same ones again. Of two of the set-up's version, which alone names no node, the lower name counts."""
        found: dict[Promise, Leadership] = {}
        for one in sorted(known):
            found.setdefault(one.since, one)
        return cls(tuple(found.values()))

    @property
    def newest(self) -> Leadership | None:
        """Who leads; None where nothing is known."""
        return self.leaderships[-1] if self.leaderships else None

    def joined(self, other: LeaderMap) -> LeaderMap:
        """What both know."""
        return LeaderMap.of((*self.leaderships, *other.leaderships))

    def leader_of(self, _shard: ShardId) -> Leadership | None:
        """Who leads a shard: whoever leads the stream."""
        return self.newest


def leaders_known(fact: RoleFact, me: NodeName) -> LeaderMap:
    """What a node knows for sure by its own role: the promotions of its lineage, and itself where it leads as it was set up.

    Whom it follows without a promotion it has been told by a person, and a promise isn't a promotion yet: neither is among them.
    """
    found = [Leadership(reign.promise, reign.promise.node, reign.behind) for reign in fact.lineage.reigns[1:]]
    if not found and fact.role is Role.LEADS and fact.promise == UNPROMISED:
        found = [Leadership(UNPROMISED, me)]
    return LeaderMap.of(found)


def leader_by(fact: RoleFact, me: NodeName, elsewhere: LeaderMap) -> Leadership | None:
    """Whom to write to: by a node's own role, or by what is known elsewhere where that is of a higher version.

    A node's role is the truth about itself. What it hasn't heard of yet can only be newer.
    """
    newest = elsewhere.newest
    if newest is not None and newest.since > fact.promise:
        return newest
    node = me if fact.role is Role.LEADS else fact.leader
    return Leadership(fact.promise, node, fact.lineage.last.behind) if node else None
