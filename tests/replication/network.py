"""Links between nodes that lose, double, reorder, damage and delay messages, and detect it, as a transport has to.

A message carries its number and a checksum. A receiver takes each message once, in order and whole, or
breaks the link. Links break silently, too: then each end detects it on its own some time later, or
because nothing arrives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millstream.errors import LinkLost, MillstreamError
from millstream.model.replication import ReplicaPosition
from millstream.protocol.replication.leader_events import LinkId
from millstream.protocol.replication.leader_machine import Leader

if TYPE_CHECKING:
    from tests.replication.simulation import Node


class Pipe:
    """One direction of a link."""

    def __init__(self, wire: Wire, to: Node, *, to_leader: bool) -> None:
        self.wire, self.to, self.to_leader = wire, to, to_leader
        self.sent = self.taken = 0
        self.last_at = 0.0

    def put(self, message: Any) -> None:
        """Send a message; chance decides what happens to it."""
        world = self.wire.world
        number, self.sent = self.sent, self.sent + 1
        if self.wire.is_cut or not world.can_reach(self.wire.leader.name, self.wire.follower.name):
            return
        chance, rate = world.chance, world.network_rate if world.is_faulty else 0.0
        at = max(self.last_at, world.now + world.delay())
        fate = chance.random() if rate else 1.0
        if fate < rate:
            world.count("lost")
            return
        if fate < 2 * rate:
            world.count("reordered")
            at += chance.uniform(0.0, 0.3)
        else:
            self.last_at = at
        is_damaged = 2 * rate <= fate < 3 * rate
        if 3 * rate <= fate < 4 * rate:
            world.count("doubled")
            world.at(at - world.now + chance.uniform(0.0, 0.2), lambda: self._take(number, message, is_damaged=False))
        world.at(at - world.now, lambda: self._take(number, message, is_damaged=is_damaged))

    def _take(self, number: int, message: Any, *, is_damaged: bool) -> None:
        wire = self.wire
        if wire.is_cut or number < self.taken:
            return
        if is_damaged or number > self.taken:
            wire.world.count("damaged" if is_damaged else "missing")
            wire.cut()
            return
        self.taken += 1
        if not self.to.up:
            return
        if self.to_leader:
            self.to.guarded(lambda: self.to.word(wire, message))
        elif isinstance(message, MillstreamError) or message is None:
            wire.is_cut = True
            self.to.guarded(lambda: self.to.lost(wire, message))
        else:
            self.to.guarded(lambda: self.to.received(wire, message))


class Wire:
    """One link, which exists once the follower has reached the leader."""

    def __init__(self, leader: Node, follower: Node, link: LinkId, machine: Leader) -> None:
        self.world = leader.world
        self.leader, self.follower, self.link, self.machine = leader, follower, link, machine
        self.has_joined = False
        self.asked_from: ReplicaPosition = {}
        self.is_cut = False
        self._down = Pipe(self, follower, to_leader=False)
        self._up = Pipe(self, leader, to_leader=True)

    def send(self, message: Any) -> None:
        """Send a message from the leader."""
        self._down.put(message)

    def reply(self, word: Any) -> None:
        """Send a message from the follower."""
        self._up.put(word)

    def end(self, why: MillstreamError | None) -> None:
        """Send the reason, and break the link."""
        if self.wire_is_of_leader():
            self.send(why)
        else:
            self.cut()

    def wire_is_of_leader(self) -> bool:
        """Return whether the leader has let go of the link, and the follower hasn't."""
        return self.link not in self.leader.wires

    def cut(self) -> None:
        """Break the link; both ends detect it sooner or later."""
        if self.is_cut:
            return
        self.is_cut = True
        for node in (self.leader, self.follower):
            life, delay = node.life, self.world.chance.choice([0.01, 0.1, 1.0])

            def tell(node: Node = node, life: int = life) -> None:
                if node.life == life and node.up:
                    node.guarded(lambda: node.lost(self, LinkLost("cut")))

            self.world.at(delay, tell)
