"""The map of leaders that routing asks: which node leads, and since when. Its versions never go back.

A version is a promotion's promise, a number and a node, so two entries of one version name one leader. Maps of
several nodes therefore can't conflict: the merged map is their union, and the greatest version counts. The
leader of a stream leads all its shards, because a commit group lies on several of them, and belongs to one leader.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from millstream.model.ids import GroupNumber, ShardId
from millstream.model.replication import NodeName
from millstream.protocol.replication.node_promises import UNPROMISED, Promise, Role, RoleFact


@dataclass(frozen=True, slots=True, order=True)
class Leadership:
    """The time of one leader."""

    since: Promise
    """The version; `UNPROMISED`: it was set up as the leader."""
    node: NodeName
    behind: GroupNumber = GroupNumber(0)
    """The last commit group that was there when it began."""


@dataclass(frozen=True, slots=True)
class LeaderMap:
    """The leaders of a stream, past and present. Made by `of` and `joined`."""

    leaderships: tuple[Leadership, ...] = ()
    """In the order of their versions, one entry each."""

    @classmethod
    def of(cls, known: Iterable[Leadership]) -> LeaderMap:
        """Return the map of entries in any order, repeated ones included.

        The set-up's version is the only one that names no node; if two entries have it, the lower name counts.
        """
        found: dict[Promise, Leadership] = {}
        for one in sorted(known):
            found.setdefault(one.since, one)
        return cls(tuple(found.values()))

    @property
    def newest(self) -> Leadership | None:
        """The present leader; None if nothing is known."""
        return self.leaderships[-1] if self.leaderships else None

    def joined(self, other: LeaderMap) -> LeaderMap:
        """Return the union of both maps."""
        return LeaderMap.of((*self.leaderships, *other.leaderships))

    def leader_of(self, _shard: ShardId) -> Leadership | None:
        """Return the leader of a shard, which is the leader of the stream."""
        return self.newest


def leaders_known(fact: RoleFact, me: NodeName) -> LeaderMap:
    """Return what a node knows for sure from its own role.

    That is the promotions of its lineage, and the node itself if it leads as it was set up. A leader that it
    follows without a promotion isn't included: an operator named it. Nor is a promise, which isn't a promotion yet.
    """
    found = [Leadership(term.promise, term.promise.node, term.behind) for term in fact.lineage.terms[1:]]
    if not found and fact.role is Role.LEADS and fact.promise == UNPROMISED:
        found = [Leadership(UNPROMISED, me)]
    return LeaderMap.of(found)


def leader_by(fact: RoleFact, me: NodeName, elsewhere: LeaderMap) -> Leadership | None:
    """Return the leader to write to: from the node's own role, or from elsewhere if that has a higher version.

    A node's role is the truth about itself. Promotions that it hasn't learned of can only be newer.
    """
    newest = elsewhere.newest
    if newest is not None and newest.since > fact.promise:
        return newest
    node = me if fact.role is Role.LEADS else fact.leader
    return Leadership(fact.promise, node, fact.lineage.last.behind) if node else None
