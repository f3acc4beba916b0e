"""Defects of older designs, and some that this design nearly had. Each is a world that does one thing wrongly.

A seed of the simulator finds each of them: its `found_by`.

    python -m tests.replication.mutations [NAME…]
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from tests.mutations import Mutation, main
from tests.replication.model_log import ModelLog, Write
from tests.replication.simulation import Node, World

from millstream.model.ids import Epoch, GroupNumber
from millstream.model.replication import AckLevel, Acknowledgement
from millstream.protocol.replication import follower_machine as following
from millstream.protocol.replication import leader_events
from millstream.protocol.replication.ack_levels import Holding, Holdings
from millstream.protocol.replication.follower_machine import Follower
from millstream.protocol.replication.leader_machine import FollowerProgress as Followed
from millstream.protocol.replication.leader_machine import Leader
from millstream.protocol.replication.node_promises import NOBODY, Promise, Rank, RoleFact
from millstream.protocol.replication.promotion_machine import Promotion

SEEDS_MAX = 3000
SCRIPT_SEED = 17
"""Seed of a world with three nodes, for scripts."""


class SharedCursorLeader(Leader):
    """A leader with one cursor: one follower's acknowledgement also counts for followers whose link failed."""

    def _count(self, follower: Followed, group: GroupNumber | None) -> list[leader_events.Effect]:
        effects = super()._count(follower, group)
        if group is not None:
            epoch = self.holdings.promised
            self.holdings = Holdings(epoch, tuple(Holding(node, epoch, group) for node in self._nodes))
        return effects


class SharedCursor(World):
    """A shared cursor moves although a follower failed."""

    found_by = 4

    leader_type = SharedCursorLeader


class SharedPlaceLeader(Leader):
    """A leader that moves every follower's retention cursor when one follower acknowledges."""

    def _note(self, follower: Followed, ack: Acknowledgement) -> list[leader_events.Effect]:
        effects = super()._note(follower, ack)
        noted = [one for one in effects if isinstance(one, leader_events.PersistCursor)]
        return [*effects, *(replace(one, node=node) for one in noted for node in self._nodes)]


class SharedPlace(World):
    """Retention drops what an absent follower lacks, since another follower has it."""

    found_by = 22

    leader_type = SharedPlaceLeader


class IdleTail(World):
    """A durable group is sent only when the next one becomes durable, so the last group is never sent."""

    found_by = 2

    def tell_durable(self, node: Node) -> None:
        if node.disk.log.group % 2 == 0:
            super().tell_durable(node)


class PlainMark(World):
    """A session is known by its greatest number: number 6, which arrives after 5 and 7, counts as written."""

    found_by = 1

    def is_known_below_mark(self, log: ModelLog, write: Write) -> bool:
        return any(one.session == write.session and one.number > write.number for one in log.written)


class EarlyAcknowledgement(World):
    """A follower acknowledges before it has synced."""

    found_by = 1

    syncs = False


class ForgottenPromise(World):
    """A promise is sent before it is durable, and is forgotten in a crash."""

    found_by = 1

    keeps_promises = False


class Unfenced(Promotion):
    """A promotion that takes over without any other node's promise."""

    @property
    def _wanted(self) -> int:
        return 1


class NoFencing(World):
    """A node is promoted without asking any other node."""

    found_by = 5

    promotion_type = Unfenced


class Uncompared(Promotion):
    """A promotion that takes over although another node has more."""

    def _compare(self, *, may_fetch: bool) -> list[Any]:
        self._reports.clear()
        return super()._compare(may_fetch=may_fetch)


class NotCompared(World):
    """A node is promoted that lacks writes which others have acknowledged."""

    found_by = 20

    promotion_type = Uncompared


class GroupsOnlyFact(RoleFact):
    """A fact that ranks its log by the number of the last group alone."""

    def rank(self, group: GroupNumber) -> Rank:
        return Rank(Promise(Epoch(0), NOBODY), group)


class OldTail(World):
    """A script: an old leader that went on alone has the longest log, and stands while the promoted node is away."""

    def play(self) -> None:
        old, new, other = self.nodes.values()
        self.level, self.is_faulty, self.drops_segments = AckLevel.parse("durable(1)"), False, False
        for node in self.nodes.values():
            node.start()
        for client in self.clients:
            client.left = list(range(1, 40))
            self.send(client)
        self.run_until(0.3)
        self.cuts = {frozenset({old.name, node.name}): 4.0 for node in (new, other)}
        self.run_until(1.5)
        self.promote(new, accept_loss=False)
        self.run_until(2.9)
        assert self.counts["promotions"] == 1
        self.make_follow(other, new.name)
        self.run_until(3.5)
        assert new.disk.shown > other.fact.lineage.last.behind > 0, "something was acknowledged under the new leader"
        new.crash(power=False)
        self.cuts.clear()
        self.clients.clear()
        assert old.disk.log.group > other.disk.log.group, "the old leader has the longest log"
        self.promote(old, accept_loss=False)
        self.run_until(4.0)
        old.give(Promise(Epoch(1), new.name))
        self.promote(old, accept_loss=False)
        self.run_until(9.0)
        assert self.counts["promotions"] == 2
        assert old.disk.aside, "what only the old leader had is kept for people"


class RankByGroup(OldTail):
    """The log with the greater group number counts as the better one, whichever leader wrote it."""

    found_by = SCRIPT_SEED

    fact_type = GroupsOnlyFact


class NothingSetAside(Follower):
    """A follower that appends its new leader's groups to those of the old one."""

    def _greeted(self, greeting: Any, *others: Any) -> list[following.Effect]:
        self._aligned_with = greeting.lineage
        return super()._greeted(greeting, *others)


class NotSetAside(World):
    """Groups that only the old leader's followers have stay in their logs."""

    found_by = 23

    follower_type = NothingSetAside


class TrustingLeader(Leader):
    """A leader that counts a follower's old acknowledgements for ever."""

    def _greeting(self, follower: Followed, *others: Any, **more: Any) -> list[leader_events.Effect]:
        acked, follower.acked = follower.acked, None
        effects = super()._greeting(follower, *others, **more)
        follower.acked = acked
        return effects


class WipedDiskCounts(World):
    """A follower whose disk was replaced still counts for what was on the old disk."""

    found_by = 775

    leader_type = TrustingLeader


class ShownAtOnce(World):
    """Readers of the leader see groups that no other node has."""

    found_by = 23

    shows_by_level = False


class FollowersShowAtOnce(World):
    """Readers of a follower see everything it has, even if fewer nodes have it than the level asks."""

    found_by = 4

    followers_wait = False


class ShownWithBytesAlone(World):
    """The readable end is sent only with further bytes, so the last one is never sent."""

    found_by = 4

    tells_shown = False


class NumbersOnlyFact(RoleFact):
    """A fact whose promise is its number alone: a second candidate that asks with the same number gets it too."""

    def asked(self, promise: Promise) -> RoleFact:
        if promise.epoch == self.promise.epoch:
            return replace(self, promise=promise)
        return super().asked(promise)


class NumbersOnly(World):
    """Two candidates with one number both get every node's promise."""

    found_by = 1641

    fact_type = NumbersOnlyFact


class OldCursors(World):
    """A promoted node's retention goes by what followers acknowledged to an earlier leader, and set aside since."""

    found_by = 3169712294

    forgets_cursors = False


MUTATIONS: tuple[type[Mutation], ...] = (
    SharedCursor, SharedPlace, IdleTail, PlainMark, EarlyAcknowledgement, ForgottenPromise, NoFencing, NotCompared, RankByGroup, NumbersOnly, NotSetAside,
    WipedDiskCounts, ShownAtOnce, FollowersShowAtOnce, ShownWithBytesAlone, OldCursors,
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(MUTATIONS, SEEDS_MAX, sys.argv[1:]))
