"""A stream on several nodes, played from a seed.

The network, disks and clocks fail, nodes crash, and people promote nodes.

`python -m tests.replication.simulation FIRST COUNT` plays that many seeds and prints what it found; a
seed repeats its world exactly.

The machines are the real ones of `protocol.replication`; this module carries out their effects. The log
is `model_log`'s. Each invariant is checked when it could break, not at the end:

- a write acknowledged at a level is, at that moment, synced on as many nodes as the level asks; every
  later leader has it;
- no two nodes ever show different groups under one number; a node keeps showing what it has shown;
- readers of any node see at most what the stream's level allows, and all of it once nothing moves;
- the groups that a node reports as held are synced there, whole; a node keeps a promise that it gave;
- a write that a client sends repeatedly is in the log once;
- a follower isn't older, compared with the leader that it follows, than the age that it reports;
- when the faults end, all nodes get the same bytes, and all writes are acknowledged.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from uuid import UUID

from tests.replication.model_log import ModelLog, Write
from tests.replication.network import Wire
from tests.seeds import Violation, main

from millstream.backoff import Backoff
from millstream.errors import Diverged, Fenced, FollowerBehindRetention, LinkLost, MillstreamError, ReplicaGap
from millstream.model.ids import GroupNumber, RegionId, ShardId, StreamId
from millstream.model.marks import DurableMark
from millstream.model.positions import Seq
from millstream.model.replication import (
    LOCAL,
    AckKind,
    AckLevel,
    Acknowledgement,
    Document,
    Hello,
    NodeName,
    ReplicaPosition,
    Shipment,
)
from millstream.protocol.replication import follower_machine as following
from millstream.protocol.replication import leader_events
from millstream.protocol.replication import promotion_machine as promoting
from millstream.protocol.replication.follower_machine import Follower
from millstream.protocol.replication.leader_events import LinkId, ShipOptions
from millstream.protocol.replication.leader_machine import Leader
from millstream.protocol.replication.node_promises import LINEAGE, Greeting, Promise, Role, RoleFact
from millstream.protocol.replication.promotion_machine import NodeReport, Promotion

STREAM = StreamId(UUID(int=7))
NAMES = tuple(NodeName(name) for name in "abcd")
OPTIONS = ShipOptions(shipment_bytes=300, window_bytes=700, heartbeat_s=0.5, silence_s=3.0, cursor_every_s=0.2)
TICK_S = 0.25
FAULTS_S = 5.0
CALM_S = 60.0
MIXED = ("kill", "power", "cut", "cut", "clock", "wipe", "links")
ELECTIONS = ("kill", "power", "cut", "alone", "alone", "alone")
DISKS = ("power", "cut", "cut", "wipe", "wipe")
AGE_ERROR_S = 1.5
"""Seconds by which a follower's reported age may be too low: the time that the quickest shipment takes."""


class Crashed(Exception):
    """Raised in a node that crashes during a call."""


@dataclass(slots=True)
class Disk:
    """State that a node keeps through a crash."""

    log: ModelLog
    fact: bytes = b""
    documents: dict[str, int] = field(default_factory=dict)
    cursors: dict[NodeName, tuple[int, ReplicaPosition]] = field(default_factory=dict)
    shown: int = 0
    aside: list[Write] = field(default_factory=list)


@dataclass(slots=True)
class Request:
    """A client's write in flight."""

    client: Client
    write: Write


@dataclass(slots=True)
class Client:
    """A client that sends the numbers of its session, some at once and in any order, each until it is acknowledged."""

    session: int
    left: list[int]
    open: dict[int, float] = field(default_factory=dict)
    """Numbers in flight, and when to send them again."""
    to: int = 0


class Node:
    """One machine: its disk, and what runs on it while it is up."""

    def __init__(self, world: World, name: NodeName, fact: RoleFact) -> None:
        self.world, self.name = world, name
        self.disk = Disk(ModelLog(STREAM, world.shards), fact.to_json())
        self.up = False
        self.life = 0
        self.wall_off_s = world.chance.choice([0.0, 0.0, 3600.0, -86_400.0, 5e6])
        self.fact = fact
        self.leader: Leader | None = None
        self.giver: Leader | None = None
        """After a promise, the leader machine that gives this node's log to the node that holds the promise."""
        self.follower: Follower | None = None
        self.promotion: Promotion | None = None
        self.catching_up: promoting.CatchUp | None = None
        self.wires: dict[LinkId, Wire] = {}
        """Links to followers, while it leads."""
        self.wire: Wire | None = None
        """The link to the leader, while it follows."""
        self.pending: list[Request] = []
        self.waiting: list[tuple[int, Request]] = []
        self.is_writing = False
        self.documents: dict[str, int] = {}
        self.is_wiped = False
        """Whether its disk was replaced and still lacks something: a promotion now would lose what the disk had."""
        self.ghost = 0
        """The last group that it had before the wipe, until a leader can know that the group is gone."""

    # --- its life --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Come up from what is on the disk."""
        self.up, self.life = True, self.life + 1
        self.fact = self.world.fact_type.from_json(self.disk.fact)
        self.disk.log.recover(leads=self.fact.role is Role.LEADS)
        if self.disk.log.group < self.disk.shown:
            self.world.broken(
                f"{self.name} has shown group {self.disk.shown}, and has {self.disk.log.group} after a crash"
            )
        self.documents = dict(self.disk.documents)
        if self.fact.role is Role.LEADS:
            self.lead()
        elif self.fact.role is Role.FOLLOWS:
            self.follow(self.fact)
        self.later(TICK_S * self.world.chance.random(), self.tick)

    def lead(self) -> None:
        others = frozenset(self.world.nodes) - {self.name}
        self.follower = None
        self.leader = self.world.leader_type(STREAM, self.fact, others, OPTIONS)
        self.documents = {"catalog": self.documents.get("catalog", 0) + 1}
        self.disk.documents = dict(self.documents)
        self.world.tell_durable(self)

    def follow(self, fact: RoleFact) -> None:
        self.follower = self.world.follower_type(
            self.name, fact, STREAM if self.disk.log.group else None, self.disk.log.holding(), self.disk.documents,
            backoff=Backoff(0.05, 1.0), silence_s=3.0,
        )  # fmt: skip

    def crash(self, *, power: bool) -> None:
        self.up, self.life = False, self.life + 1
        self.leader = self.giver = self.follower = self.promotion = self.catching_up = None
        for wire in [*self.wires.values(), *([self.wire] if self.wire else [])]:
            wire.cut()
        self.wires, self.wire = {}, None
        self.pending, self.waiting, self.is_writing = [], [], False
        if power:
            self.disk.log.lose_power(self.world.chance)
        self.world.count("power cut" if power else "kill")

    def later(self, delay_s: float, what: Callable[[], None]) -> None:
        """Call it later, unless the node is down then or was down in between."""
        life = self.life

        def run() -> None:
            if self.life == life:
                self.guarded(what)

        self.world.at(delay_s, run)

    def guarded(self, what: Callable[[], None]) -> None:
        try:
            what()
        except Crashed:
            self.crash(power=self.world.chance.random() < 0.5)
            self.world.at(self.world.chance.uniform(0.05, 1.5), self.world.restart(self))

    def may_crash(self) -> None:
        if self.world.is_faulty and self.world.chance.random() < self.world.crash_rate:
            raise Crashed

    def persist(self, fact: RoleFact) -> None:
        self.may_crash()
        if self.world.keeps_promises or fact.role is Role.LEADS:
            self.disk.fact = fact.to_json()
        self.fact = fact
        self.may_crash()

    def wall_ns(self) -> int:
        return int((self.world.now + self.wall_off_s + 1e9) * 1e9)

    def tick(self) -> None:
        if self.leader is not None:
            self.lead_step(leader_events.Tick())
        if self.giver is not None:
            self.lead_step(leader_events.Tick(), self.giver)
        if self.follower is not None:
            self.follow_step(following.Tick())
        if self.promotion is not None:
            self.promote_step(promoting.Tick())
        self.later(TICK_S, self.tick)

    # --- leading ---------------------------------------------------------------------------------------------------

    def lead_step(self, event: leader_events.Event, machine: Leader | None = None) -> None:
        leader = machine or self.leader
        if leader is None:
            return
        for effect in leader.step(event, self.world.now):
            match effect:
                case leader_events.PersistRole(fact):
                    self.step_down(fact)
                case leader_events.PersistCursor(node, needed_from, position, anew):
                    if not anew and needed_from < self.disk.cursors.get(node, (0, {}))[0]:
                        continue
                    self.disk.cursors[node] = needed_from, position
                case leader_events.Greet(link, documents):
                    self.later(
                        self.world.delay(),
                        lambda leader=leader, link=link, docs=documents: self.greet(leader, link, docs),
                    )
                case leader_events.ReadAndSend():
                    self.later(
                        self.world.delay(), lambda leader=leader, effect=effect: self.read_and_send(leader, effect)
                    )
                case leader_events.DropLink(link, why):
                    wire = self.wires.pop(link, None)
                    if wire is not None:
                        wire.end(why)
                case _:
                    pass
        if leader is self.leader:
            self.resolve()

    def step_down(self, fact: RoleFact) -> None:
        """Finish the group that is being written first: it may be the only copy."""
        if self.is_writing:
            self.disk.log.sync()
            self.is_writing = False
        self.persist(fact)
        self.pending, self.waiting = [], []

    def shipment(self, leader: Leader, **more: object) -> Shipment:
        promise = leader.fact.promise
        return Shipment(
            STREAM, RegionId(0), promise.epoch, leader=promise.node, sent_ns=self.wall_ns(),
            leader_end=Seq(self.disk.log.group), **more,  # type: ignore[arg-type]
        )  # fmt: skip

    def shown(self) -> dict[ShardId, DurableMark]:
        """Return how far readers see the log."""
        return {
            shard: replace(mark, group=GroupNumber(min(self.disk.shown, mark.group)))
            for shard, mark in self.disk.log.marks().items()
        }

    def newer(self, known: dict[str, int]) -> tuple[Document, ...]:
        return tuple(
            Document(name, version, b"") for name, version in self.documents.items() if known.get(name) != version
        )

    def greet(self, leader: Leader, link: LinkId, known: dict[str, int]) -> None:
        wire = self.wires.get(link)
        if wire is None:
            return
        data = Greeting(leader.lineage, GroupNumber(self.disk.log.group)).to_json()
        documents = (Document(LINEAGE, 0, data), *self.newer(known))
        left = 1 << 30
        position = wire.asked_from
        wire.send(self.shipment(leader, documents=documents, bytes_left=left))
        self.lead_step(leader_events.Sent(link, position, 0, is_all=False), leader)

    def read_and_send(self, leader: Leader, effect: leader_events.ReadAndSend) -> None:
        wire = self.wires.get(effect.link)
        if wire is None:
            return
        chance = self.world.chance
        if self.world.is_faulty and chance.random() < 0.01:
            self.lead_step(leader_events.ReadFailed(effect.link, LinkLost("the disk"), chance.random()), leader)
            return
        try:
            parts, end, is_all = self.disk.log.read(effect.after, effect.bytes_max)
        except FollowerBehindRetention as error:
            self.lead_step(leader_events.ReadFailed(effect.link, error, chance.random()), leader)
            return
        shipment = self.shipment(
            leader,
            parts=tuple(parts),
            marks=self.disk.log.marks() if is_all else {},
            shown=self.shown() if is_all and (parts or self.world.tells_shown) else None,
            by_one=self.world.level.by_one and leader is self.leader,
            documents=self.newer(dict(effect.documents)),
            bytes_left=0 if is_all else 1,
        )
        wire.send(shipment)
        self.lead_step(leader_events.Sent(effect.link, end, shipment.size_bytes, is_all=is_all), leader)

    def word(self, wire: Wire, word: object) -> None:
        """Handle a follower's message."""
        machine = wire.machine
        link = wire.link
        if machine is None or link not in self.wires:
            return
        match word:
            case Hello():
                wire.asked_from = dict(word.position)
                wire.follower.ghost = 0
                event = leader_events.Joined(link, word) if not wire.has_joined else leader_events.Rejoined(link, word)
                wire.has_joined = True
                self.lead_step(event, machine)
            case Acknowledgement():
                self.lead_step(leader_events.Acked(link, word), machine)
            case MillstreamError():
                self.wires.pop(link)
                self.lead_step(leader_events.LinkGone(link, word), machine)
                wire.cut()

    # --- writes ----------------------------------------------------------------------------------------------------

    def request(self, request: Request) -> None:
        """A client's write arrives."""
        if self.leader is None or self.leader.is_fenced:
            self.world.answer(request, None)
            return
        log, write = self.disk.log, request.write
        if write in log.written:
            self.waiting.append((log.written[write], request))
            self.resolve()
        elif self.world.is_known_below_mark(log, write):
            self.world.answer(request, True)
        else:
            self.pending.append(request)
            if not self.is_writing and len(self.pending) == 1:
                self.later(self.world.delay() * 0.2, self.write)

    def write(self) -> None:
        if self.leader is None or self.leader.is_fenced or self.is_writing or not self.pending:
            return
        taken, self.pending = self.pending, []
        fresh = list(dict.fromkeys(one.write for one in taken if one.write not in self.disk.log.written))
        group = self.disk.log.append(fresh, self.life * 8 + NAMES.index(self.name)) if fresh else 0
        self.waiting += [(self.disk.log.written.get(one.write, group), one) for one in taken]
        self.is_writing = True
        self.may_crash()
        self.later(self.world.delay() * 0.3, self.synced)

    def synced(self) -> None:
        if not self.is_writing:
            return
        log = self.disk.log
        log.sync()
        self.is_writing = False
        if log.twice:
            self.world.broken(f"{log.twice[0]} is in the log twice")
        self.world.written_at.setdefault((self.name, log.group), self.world.now)
        if self.leader is not None:
            if self.world.chance.random() < 0.1:
                self.documents = {"catalog": self.documents["catalog"] + 1}
                self.disk.documents = dict(self.documents)
            self.world.tell_durable(self)
            if self.pending:
                self.write()
            if self.world.drops_segments and self.leader is not None:
                others = frozenset(self.world.nodes) - {self.name}
                log.drop([self.disk.cursors.get(node, (0, {})) for node in others])

    def resolve(self) -> None:
        """Answer the writes that the level holds for, and move what is shown."""
        leader = self.leader
        if leader is None or leader.is_fenced:
            return
        log = self.disk.log
        reached = min(leader.holdings.group_reached(self.world.level), leader.group, log.group)
        if self.world.show(self, reached if self.world.shows_by_level else log.group) and self.world.tells_shown:
            self.world.tell_durable(self)
        still = []
        for group, request in self.waiting:
            if group <= reached:
                self.world.acknowledge(self, group, request)
            else:
                still.append((group, request))
        self.waiting = still

    # --- following -------------------------------------------------------------------------------------------------

    def follow_step(self, event: following.Event) -> None:  # noqa: C901, PLR0912 - one branch an effect
        machine = self.follower
        if machine is None:
            return
        chance = self.world.chance
        for effect in machine.step(event, self.world.now):
            match effect:
                case following.Connect(leader):
                    self.later(self.world.delay(), lambda leader=leader: self.world.connect(self, leader))
                case leader_events.PersistRole(fact):
                    self.persist(fact)
                case following.PersistDocuments(documents):
                    self.may_crash()
                    self.disk.documents.update({one.name: one.version for one in documents})
                    self.documents = dict(self.disk.documents)
                case following.Say(word):
                    self.say(word)
                case following.ShowAll():
                    self.world.show(self, self.disk.log.group)
                case following.SetAside(behind):
                    gone = self.disk.log.set_aside(behind)
                    self.disk.aside += gone
                    if gone:
                        self.world.count("set aside")
                    if self.disk.log.group < self.disk.shown and not self.world.accepts_loss:
                        self.world.broken(
                            f"{self.name} has shown group {self.disk.shown}, and sets aside what is behind {behind}"
                        )
                    self.disk.shown = min(self.disk.shown, self.disk.log.group)
                    self.may_crash()
                    self.later(0.0, lambda: self.follow_step(following.WasSetAside(self.disk.log.holding())))
                case following.Apply(shipment):
                    self.apply(shipment)
                case following.BreakLink():
                    if self.wire is not None:
                        self.wire.end(None)
                        self.wire = None
                case following.Stop(error):
                    self.world.count(f"stop by {type(error).__name__}")
                    if isinstance(error, Diverged):
                        self.world.broken(f"{self.name}: {error}")
                case leader_events.Tell(error=Diverged() as error):
                    self.world.broken(f"{self.name}: {error}")
                case _:
                    pass
        if self.follower is machine and chance.random() < 0.05:
            self.look_at_age(machine)

    def say(self, word: object) -> None:
        if isinstance(word, Acknowledgement):
            if word.group > self.disk.log.synced_group:
                self.world.broken(
                    f"{self.name} acknowledges group {word.group}, and has {self.disk.log.synced_group} synced"
                )
            if word.promised > self.world.fact_type.from_json(self.disk.fact).promise.epoch:
                self.world.broken(f"{self.name} speaks under a promise that isn't durable")
            self.is_wiped = self.is_wiped and word.group < self.world.highest_acked
        if self.wire is not None:
            self.wire.reply(word)

    def apply(self, shipment: Shipment) -> None:
        chance = self.world.chance
        log = self.disk.log
        try:
            if self.world.is_faulty and chance.random() < self.world.crash_rate:
                log.apply(shipment.parts, is_synced=False)
                raise Crashed
            if self.world.is_faulty and chance.random() < 0.003:
                raise LinkLost("a full disk")
            log.apply(shipment.parts, is_synced=self.world.syncs)
        except (ReplicaGap, Diverged, LinkLost) as error:
            self.follow_step(following.ApplyFailed(error, chance.random()))
            return
        if shipment.shown is not None:
            told = min(mark.group for mark in shipment.shown.values())
            self.world.show(self, min(log.group, told) if self.world.followers_wait else log.group)
        self.follow_step(following.Applied(log.holding(), self.wall_ns()))
        if self.catching_up is not None and self.follower is not None:
            self.caught_up()

    def look_at_age(self, machine: Follower) -> None:
        """Compare the age that the follower reports with its real age."""
        age_s = machine.lag(self.world.now).age_s
        newer = self.world.written_at.get((self.fact.leader, self.disk.log.group + 1))
        if newer is not None and not self.fact.promise.epoch and age_s < self.world.now - newer - AGE_ERROR_S:
            self.world.broken(
                f"{self.name} says it is {age_s:.2f} s old, and lacks what came {self.world.now - newer:.2f} s ago"
            )

    def received(self, wire: Wire, shipment: Shipment) -> None:
        if wire is not self.wire:
            return
        self.follow_step(following.Received(shipment, self.wall_ns()))

    def lost(self, wire: Wire, error: MillstreamError | None) -> None:
        """A link broke, at this end."""
        if wire is self.wire:
            self.wire = None
            if self.catching_up is not None:
                self.end_catching_up(LinkLost("gone"))
                return
            self.follow_step(following.LinkGone(error or LinkLost("gone"), self.world.chance.random()))
        elif wire.link in self.wires and wire.machine is not None:
            self.wires.pop(wire.link)
            self.lead_step(leader_events.LinkGone(wire.link, error), wire.machine)

    # --- promotion -------------------------------------------------------------------------------------------------

    def promote(self, *, accept_loss: bool) -> None:
        if not self.up or self.promotion is not None or (self.leader is not None and not self.leader.is_fenced):
            return
        self.promotion = self.world.promotion_type(
            self.name, frozenset(self.world.nodes), self.fact, self.world.level,
            accept_loss=accept_loss, answer_s=1.0,
        )  # fmt: skip
        self.world.count("promotions begun")
        self.promote_step(promoting.BeginPromotion())

    def promote_step(self, event: promoting.Event) -> None:
        promotion = self.promotion
        if promotion is None:
            return
        for effect in promotion.step(event, self.world.now):
            match effect:
                case promoting.Survey(node):
                    self.world.ask(self, node, None)
                case promoting.AskPromise(node, promise):
                    self.world.ask(self, node, promise)
                case leader_events.PersistRole(fact):
                    self.persist(fact)
                case promoting.BecomeCandidate(promise):
                    self.stand(promise)
                case promoting.CatchUp():
                    self.catching_up = effect
                    self.follow(self.fact)
                    self.world.count("catching up")
                    self.later(3.0, lambda effect=effect: self.end_catching_up(LinkLost("too slow"), effect))
                    self.world.connect(self, effect.node)
                case promoting.TakeOverLog():
                    if self.world.forgets_cursors:
                        self.disk.cursors.clear()
                    self.disk.log.recover(leads=True)
                    self.may_crash()
                    self.later(
                        self.world.delay(),
                        lambda: self.promote_step(promoting.LogTakenOver(GroupNumber(self.disk.log.group))),
                    )
                case promoting.Lead(fact, losses):
                    self.promotion = None
                    self.world.promoted(self, fact, losses)
                    self.lead()
                case promoting.Failed(error):
                    self.world.count(f"promotion failed by {error.code}")
                    self.promotion = None
                    self.resume()

    def stand(self, promise: Promise) -> None:
        """Accept nothing more from the old leader, and answer only under the node's own promise."""
        if promise <= self.fact.promise:
            self.promote_step(promoting.Superseded(self.fact.promise))
            return
        for wire in [*self.wires.values(), *([self.wire] if self.wire else [])]:
            wire.cut()
        self.wires, self.wire = {}, None
        self.leader = self.giver = self.follower = None
        self.persist(self.fact.candidate_for(promise))
        self.promote_step(promoting.BecameCandidate(self.fact, GroupNumber(self.disk.log.group)))

    def resume(self) -> None:
        if self.fact.role is Role.FOLLOWS and self.follower is None:
            self.follow(self.fact)

    def caught_up(self) -> None:
        wanted = self.catching_up
        assert wanted is not None, "it catches up"
        assert self.follower is not None, "as a follower"
        if self.follower.fact.rank(GroupNumber(self.disk.log.group)) >= wanted.rank:
            fact, self.catching_up = self.follower.fact, None
            self.follower = None
            if self.wire is not None:
                self.wire.cut()
                self.wire = None
            self.promote_step(promoting.CaughtUp(fact, GroupNumber(self.disk.log.group)))

    def end_catching_up(self, error: MillstreamError, which: promoting.CatchUp | None = None) -> None:
        if self.catching_up is None or which not in (None, self.catching_up):
            return
        self.catching_up = self.follower = None
        if self.wire is not None:
            self.wire.cut()
            self.wire = None
        self.promote_step(promoting.CatchUpFailed(error))

    def asked(self, promise: Promise | None) -> promoting.Event:
        """Answer another node's question for this one's report, or for its promise."""
        if promise is not None:
            try:
                self.give(promise)
            except Fenced:
                return promoting.Superseded(self.fact.promise)
        log = self.disk.log
        report = NodeReport(self.fact.promise, self.fact.role, self.fact.rank(GroupNumber(log.group)), Seq(log.group))
        return promoting.Answered(self.name, report)

    def give(self, promise: Promise) -> None:
        if promise > self.fact.promise and self.promotion is not None:
            self.end_catching_up(LinkLost("overtaken"))
            self.promote_step(promoting.Superseded(promise))
        if self.leader is not None and not self.leader.is_fenced:
            if promise > self.fact.promise:
                self.lead_step(leader_events.Heard(promise))
            self.fact.asked(promise)
        elif self.follower is not None:
            self.follow_step(following.PromiseRequested(promise))
        else:
            fact = self.fact.asked(promise)
            if fact != self.fact:
                self.persist(fact)
        if self.fact.promise == promise:
            for link in [link for link, wire in self.wires.items() if wire.machine is not self.leader]:
                self.wires.pop(link).cut()
            self.giver = Leader(STREAM, self.fact, frozenset({promise.node}), OPTIONS, only=promise.node)
            self.giver.step(leader_events.Durable(self.disk.log.marks(), self.documents, self.shown()), self.world.now)


class World:
    """The whole simulation, from one seed.

    The behaviour that a mutation changes, so that a seed finds it, is an attribute or a type here.
    """

    found_by = 0
    """A seed that finds the mutation."""
    leader_type: type[Leader] = Leader
    follower_type: type[Follower] = Follower
    promotion_type: type[Promotion] = Promotion
    fact_type: type[RoleFact] = RoleFact
    syncs = True
    """Whether a follower syncs before it acknowledges."""
    keeps_promises = True
    """Whether a promise is written before it is sent."""
    shows_by_level = True
    """Whether readers of a leader see only what the stream's level holds for."""
    followers_wait = True
    """Whether readers of a follower see only as far as its leader reports."""
    tells_shown = True
    """Whether a new readable end is sent even if nothing else is new."""
    forgets_cursors = True
    """Whether a promoted node holds its log for each follower until that has acknowledged to it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = chance = random.Random(seed)
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self.links = 0
        self.theme = chance.choice(["mixed", "mixed", "elections", "disks"])
        """The kind of event that happens more often than others."""
        count = chance.choice([2, 3, 3, 4])
        self.shards = chance.choice([1, 1, 2])
        self.level = AckLevel(AckKind.DURABLE, chance.randint(1, count - 1)) if chance.random() < 0.8 else LOCAL
        self.accepts_loss = chance.random() < 0.1
        self.drops_segments = self.theme != "disks" and chance.random() < 0.4
        self.wipes = (not self.drops_segments and chance.random() < 0.4) or self.theme == "disks"
        self.network_rate = chance.choice([0.0, 0.0, 0.005, 0.03])
        self.crash_rate = chance.choice([0.0, 0.001, 0.01])
        self.delay_s = chance.choice([0.005, 0.02, 0.1])
        self.is_faulty = True
        self.cuts: dict[frozenset[NodeName], float] = {}
        self.promotions = 0
        self.written_at: dict[tuple[NodeName, int], float] = {}
        self.acked: dict[Write, int] = {}
        self.highest_acked = 0
        self.shown: dict[int, tuple[Write, ...]] = {}
        names = NAMES[:count]
        self.nodes: dict[NodeName, Node] = {}
        for name in names:
            fact = self.fact_type() if name == names[0] else self.fact_type(Role.FOLLOWS, leader=names[0])
            self.nodes[name] = Node(self, name, fact)
        self.clients = [Client(session, list(range(1, 1 + chance.randint(3, 12)))) for session in range(1, 4)]

    # --- time ------------------------------------------------------------------------------------------------------

    def at(self, delay_s: float, what: Callable[[], None]) -> None:
        """Schedule a call."""
        self._number += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._number, what))

    def run_until(self, end: float, *, is_done: Callable[[], bool] | None = None) -> bool:
        """Run scheduled calls until a time, or until `is_done`."""
        look_at = self.now
        while self._queue and self._queue[0][0] <= end:
            self.now, _, what = heapq.heappop(self._queue)
            what()
            if is_done is not None and self.now >= look_at:
                if is_done():
                    return True
                look_at = self.now + TICK_S
        self.now = end
        return False

    def delay(self) -> float:
        """Draw a delay, in seconds, for any event."""
        return self.chance.random() * self.delay_s

    def count(self, what: str) -> None:
        """Count an event."""
        self.counts[what] += 1

    def broken(self, what: str) -> None:
        """Report a broken promise."""
        raise Violation(f"at {self.now:.3f} s: {what}")

    # --- what happens ----------------------------------------------------------------------------------------------

    def play(self) -> None:
        """Play the whole world; raise `Violation` if a promise is broken."""
        chance = self.chance
        for node in self.nodes.values():
            node.start()
        for client in self.clients:
            self.at(self.delay(), lambda client=client: self.send(client))
        for _ in range(chance.randint(0, 14)):
            self.at(chance.uniform(0.1, FAULTS_S), self.trouble)
        promotions = {"mixed": 3, "elections": 8, "disks": 1}[self.theme]
        for _ in range(chance.randint(0, promotions)):
            self.at(chance.uniform(0.5, FAULTS_S), self.somebody_promotes)
        self.run_until(FAULTS_S)
        self.is_faulty = False
        self.cuts.clear()
        for node in self.nodes.values():
            self.restart(node)()
        self.at(0.3, self.put_right)
        if not self.run_until(self.now + CALM_S, is_done=self.has_converged):
            self.broken(f"it doesn't come to rest: {self.unrest()}")

    def trouble(self) -> None:
        """Let something fail."""
        chance = self.chance
        node = self.nodes[chance.choice(list(self.nodes))]
        kinds = {"mixed": MIXED, "elections": ELECTIONS, "disks": DISKS}
        kind = chance.choice(kinds[self.theme])
        if kind in {"kill", "power"} and node.up:
            node.crash(power=kind == "power")
            self.at(chance.uniform(0.05, 3.0), self.restart(node))
        elif kind == "cut":
            other = chance.choice([name for name in self.nodes if name != node.name])
            self.cuts[frozenset({node.name, other})] = self.now + chance.uniform(0.2, 4.0)
            self.count("cut off")
        elif kind == "alone":
            for other in self.nodes:
                self.cuts[frozenset({node.name, other})] = self.now + chance.uniform(0.5, 3.0)
            self.count("left alone")
        elif kind == "clock":
            node.wall_off_s += chance.choice([-7200.0, -5.0, 5.0, 7200.0])
            self.count("clock jumps")
        elif kind == "links":
            for wire in [*node.wires.values(), *([node.wire] if node.wire else [])]:
                wire.cut()
        elif kind == "wipe" and self.wipes:
            self.wipe(node)

    def wipe(self, node: Node) -> None:
        """Replace a follower's disk.

        As long as it lacks acknowledged writes, no node is promoted, and no other disk goes.
        """
        if node.fact.role is not Role.FOLLOWS or any(one.is_wiped or one.promotion for one in self.nodes.values()):
            return
        if node.up:
            node.crash(power=False)
        fact = self.fact_type(Role.FOLLOWS, leader=node.fact.leader)
        node.ghost = node.disk.log.synced_group
        node.disk = Disk(ModelLog(STREAM, self.shards), fact.to_json())
        node.is_wiped = True
        self.count("wiped")
        self.at(self.chance.uniform(0.05, 1.0), self.restart(node))

    def restart(self, node: Node) -> Callable[[], None]:
        """Return a callback that starts a node if it is down."""

        def run() -> None:
            if not node.up:
                node.start()

        return run

    def somebody_promotes(self) -> None:
        """Let a person promote a node, or two persons two nodes."""
        chance = self.chance
        for name in chance.sample(list(self.nodes), chance.choice([1, 1, min(2, len(self.nodes))])):
            self.promote(self.nodes[name], accept_loss=self.accepts_loss and chance.random() < 0.7)
        if self.theme != "elections" or chance.random() < 0.3:
            self.at(chance.uniform(0.5, 2.0), self.put_right)

    def promote(self, node: Node, *, accept_loss: bool) -> None:
        """TakeOverLog a node, unless a disk lacks acknowledged writes.

        In the end all nodes answer, and what one lacks another has.
        """
        is_missing = self.is_faulty and any(one.is_wiped for one in self.nodes.values())
        if node.up and not is_missing:
            node.guarded(lambda: node.promote(accept_loss=accept_loss))

    def put_right(self) -> None:
        """Act as an operator: point every node at the leader, or promote a node if there is none."""
        leaders = [
            node for node in self.nodes.values() if node.up and node.leader is not None and not node.leader.is_fenced
        ]
        if not self.is_faulty:
            self.at(2.0, self.put_right)
            if not leaders:
                node = self.chance.choice(list(self.nodes.values()))
                self.promote(node, accept_loss=self.accepts_loss)
                return
        if not leaders:
            return
        newest = max(leaders, key=lambda node: node.fact.promise)
        for node in self.nodes.values():
            if node is newest or not node.up or node.promotion is not None:
                continue
            if node.leader is not None and not node.leader.is_fenced:
                if not self.is_faulty:
                    node.guarded(lambda node=node: node.give(newest.fact.promise))
                continue
            if node.follower is None or node.fact.leader != newest.name:
                node.guarded(lambda node=node: self.make_follow(node, newest.name))

    def make_follow(self, node: Node, leader: NodeName) -> None:
        """Do what `millstream follow` does."""
        if node.wire is not None:
            node.wire.cut()
            node.wire = None
        node.leader = None
        node.persist(node.fact.following(leader))
        node.disk.log.recover(leads=False)
        node.follow(node.fact)

    def connect(self, node: Node, leader: NodeName) -> None:
        """Connect a follower to its leader."""
        follower = node.follower
        if follower is None:
            return
        there = self.nodes.get(leader)
        machine = None
        if there is not None and there.up and there is not node and self.can_reach(node.name, leader):
            wanted = there.giver if node.catching_up is not None else there.leader
            machine = wanted
        if there is None or machine is None:
            why: MillstreamError = LinkLost(f"{leader} isn't there")
            if node.catching_up is not None:
                node.end_catching_up(why)
                return
            node.follow_step(following.LinkGone(why, self.chance.random()))
            return
        self.links += 1
        if node.wire is not None:
            node.wire.cut()
        wire = Wire(there, node, LinkId(self.links), machine)
        there.wires[wire.link], node.wire = wire, wire
        node.follow_step(following.Connected())

    def can_reach(self, one: NodeName, other: NodeName) -> bool:
        """Return whether no cut is between them."""
        return self.cuts.get(frozenset({one, other}), 0.0) <= self.now

    def ask(self, candidate: Node, name: NodeName, promise: Promise | None) -> None:
        """Send a candidate's question to a node. The question and its answer may each be lost or late."""
        node, chance = self.nodes[name], self.chance

        def lost() -> bool:
            faulty = self.is_faulty and chance.random() < self.network_rate
            return faulty or not self.can_reach(candidate.name, name)

        def ask() -> None:
            if not node.up or lost():
                if chance.random() < 0.5:
                    candidate.later(self.delay(), lambda: candidate.promote_step(promoting.Unanswered(name)))
                return
            node.guarded(answer)

        def answer() -> None:
            event = node.asked(promise)
            if not lost():
                candidate.later(self.delay(), lambda: candidate.promote_step(event))

        self.at(self.delay(), ask)

    # --- clients ---------------------------------------------------------------------------------------------------

    def send(self, client: Client) -> None:
        """Send what isn't in flight, up to three at a time in any order, and repeat what wasn't answered."""
        chance = self.chance
        while client.left and len(client.open) < 3:
            number = client.left.pop(chance.randrange(min(3, len(client.left))))
            client.open[number] = 0.0
        for number in [number for number, again_at in client.open.items() if again_at <= self.now]:
            if client.open[number] and chance.random() < 0.4:
                client.to += 1  # a leader that doesn't answer in time may lead no longer
            client.open[number] = self.now + 0.7
            names = list(self.nodes)
            node = self.nodes[names[client.to % len(names)]]
            if node.up and node.leader is not None and chance.random() > 0.02:
                request = Request(client, Write(client.session, number))
                node.later(self.delay(), lambda node=node, request=request: node.request(request))
            else:
                client.to += 1
        if client.left or client.open:
            self.at(0.15, lambda: self.send(client))

    def answer(self, request: Request, is_taken: bool | None) -> None:
        """Deliver an answer to a client, or lose it."""
        if self.is_faulty and self.chance.random() < 0.1:
            return
        if is_taken:
            request.client.open.pop(request.write.number, None)
            self.acked.setdefault(request.write, 0)
        else:
            request.client.to += 1

    # --- what must hold --------------------------------------------------------------------------------------------

    def is_known_below_mark(self, log: ModelLog, write: Write) -> bool:
        """Return whether a write that isn't in the log counts as one that is."""
        del log, write
        return False

    def tell_durable(self, node: Node) -> None:
        """Let the shipper see what its log has."""
        node.lead_step(leader_events.Durable(node.disk.log.marks(), node.documents, node.shown()))

    def acknowledge(self, leader: Node, group: int, request: Request) -> None:
        """Check a write for which the leader reports that its level holds."""
        content = leader.disk.log.groups.get(group)
        if leader.disk.log.written.get(request.write) != group or leader.disk.log.synced_group < group:
            self.broken(f"{request.write} is acknowledged, and isn't in group {group} of {leader.name}")
        have = [
            node
            for node in self.nodes.values()
            if node is not leader
            and max(node.ghost, node.disk.log.synced_group) >= group
            and node.disk.log.groups.get(group, content) == content
        ]
        if self.level.kind is AckKind.DURABLE and len(have) < self.level.followers:
            self.broken(
                f"{request.write} is acknowledged at {self.level}, and {len(have)} followers of {leader.name} have group {group}"
            )
        self.acked[request.write] = group
        self.highest_acked = max(self.highest_acked, group)
        self.answer(request, is_taken=True)

    def show(self, node: Node, group: int) -> bool:
        """Show a node's readers everything up to a group; return whether that is more than before."""
        disk = node.disk
        if group <= disk.shown:
            return False
        content = disk.log.groups.get(group)
        have = [
            one
            for one in self.nodes.values()
            if max(one.ghost, one.disk.log.synced_group) >= group and one.disk.log.groups.get(group, content) == content
        ]
        # A group that a node has shown was held then, whatever happened to a disk since.
        is_held = len(have) > self.level.followers or (content is not None and self.shown.get(group) == content)
        if self.shows_by_level and not is_held and not self.accepts_loss:
            self.broken(f"{node.name} shows group {group} at {self.level}, and {len(have)} nodes have it")
        for number in range(disk.shown + 1, group + 1):
            content = disk.log.groups.get(number)
            if content is not None and self.shown.setdefault(number, content) != content and not self.accepts_loss:
                self.broken(f"{node.name} shows another group {number} than was shown before")
        disk.shown = group
        return True

    def promoted(self, node: Node, fact: RoleFact, losses: tuple[str, ...]) -> None:
        """Check a node that has just become leader."""
        self.promotions += 1
        self.count("promotions")
        if losses:
            self.count("promotions with losses")
        del fact
        lost = [write for write in self.acked if write not in node.disk.log.written]
        if lost and not losses and not self.accepts_loss:
            self.broken(f"{node.name} is promoted, and lacks {lost[0]}, which was acknowledged at {self.level}")
        for write in lost:
            del self.acked[write]

    def has_converged(self) -> bool:
        """Return whether every node has everything."""
        return not self.unrest()

    def unrest(self) -> str:
        """Return what still keeps the world from being at rest."""
        if any(client.left or client.open for client in self.clients):
            return "writes aren't acknowledged"
        leaders = [node for node in self.nodes.values() if node.leader is not None and not node.leader.is_fenced]
        if len(leaders) != 1:
            return f"{len(leaders)} nodes lead"
        (leader,) = leaders
        if not leader.up:
            return "the leader is down"
        log = leader.disk.log
        for node in self.nodes.values():
            if node is leader:
                continue
            if node.fact.role is not Role.FOLLOWS:
                return f"{node.name} doesn't follow"
            its = node.disk.log
            if its.group != log.group or its.position() != log.position():
                return f"{node.name} has {its.group} of {log.group} groups"
            if its.group != node.disk.shown:
                return f"{node.name} shows {node.disk.shown} of {its.group} groups"
            if node.fact.lineage != leader.fact.lineage:
                return f"{node.name} hasn't met {leader.name}"
            if not self.drops_segments and its.image() != log.image():
                self.broken(f"{node.name} has other bytes than {leader.name}")
            if node.disk.documents != leader.disk.documents:
                return f"{node.name} has documents {node.disk.documents}, and {leader.name} {leader.disk.documents}"
        lost = [write for write in self.acked if write not in log.written]
        if lost and not self.accepts_loss:
            self.broken(f"{lost[0]} was acknowledged, and isn't there in the end")
        return ""


if __name__ == "__main__":
    sys.exit(main(World, sys.argv[1:]))
