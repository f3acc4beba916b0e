"""The follower's side: what is taken from a leader, what is sent to it, and the age of what readers see here.

The leader pushes: which records come next, and how fast, is decided by `leader_machine`.

An event without a line for a phase changes nothing there. `Persist…`: documents and the role, if there are new ones.

    | phase              | event                            | effects -> next phase |
    |--------------------|----------------------------------|---|
    | apart              | Tick, when due                   | Connect -> connecting |
    | connecting         | Connected                        | Say(Hello) -> waiting |
    | waiting, following | Tick, the leader has long been silent | Tell, BreakLink -> apart |
    | waiting, following | Received, of a lower promise     | Say(Fenced), BreakLink -> apart |
    | waiting, following | Received, of another stream, or this node leads | Say(error), BreakLink, Stop -> stopped |
    | waiting, following | Received, of a higher promise    | PersistRole, then as below |
    | waiting, following | Received, another home under the leader's name | Tell, Say(NodeNameTaken), BreakLink -> apart |
    | waiting, following | Received, a greeting; the lineages part | SetAside -> cutting |
    | waiting, following | Received, a greeting; this log has more | Tell, BreakLink -> apart |
    | waiting, following | Received, any other greeting     | (Persist…,) Say(Acknowledgement) -> following |
    | following          | Received, no greeting            | Apply; bytes before it are missing: Say(Hello) -> waiting |
    | following          | Applied                          | (Persist…, ShowAll,) Say(Acknowledgement) |
    | following          | ApplyFailed                      | ReplicaGap: Say(Hello) -> waiting; else as LinkGone |
    | cutting            | WasSetAside                      | (PersistRole,) Say(Hello) -> waiting |
    | all but stopped    | LinkGone                         | Tell -> apart; if time doesn't mend it: Stop -> stopped |
    | all                | PromiseRequested, a higher one   | PersistRole; on a link: Say(Fenced), BreakLink -> apart |

Rules, each held by a test, or a seed of the simulator, that fails without it:

- A promise is durable before anything is sent under it; what is acknowledged is durable together with its promise.
- Before anything is taken from a leader, the groups of this log that the leader's lacks (those behind the term
  in which the two part) are set aside, never overwritten. The lineages alone decide which these are. Different
  bytes where the lineages agree are damage (`Diverged`), and stop everything.
- A term is noted once everything that its leader began with is here (`node_promises`).
- Readers see what the leader shows. If one follower is enough for the level, they see a group when it is acknowledged.
  They don't see it earlier, because a node that gets a higher promise first may lead without it. Nor do they
  while something is missing that the leader began with, because until then the acknowledgement doesn't count.

Lag: records and bytes are measured against the end that the leader reports, time by this machine's monotonic clock. The
leader's clock only shows how long a shipment took, compared with the shortest of the last ones. A clock that is
far off is reported. Like one that jumps, it shifts the age only while the last shipments are remembered, and never
below the true age.

Pure: no I/O, clock or randomness. Effects are carried out in order; if one fails, none of the later ones is, and
the caller begins again from what is durable. Not thread-safe.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from millstream.backoff import Backoff
from millstream.errors import (
    Diverged,
    Fenced,
    FollowerBehindRetention,
    MillstreamError,
    NodeNameTaken,
    ReplicaGap,
    ReplicationError,
    RoleUnreadable,
)
from millstream.model.ids import GroupNumber, StreamId
from millstream.model.positions import Offset, Seq
from millstream.model.replication import (
    Acknowledgement,
    ByteEnd,
    Document,
    Hello,
    NodeName,
    ReplicaPosition,
    Shipment,
)
from millstream.protocol.replication.leader_events import PersistRole, Tell
from millstream.protocol.replication.node_promises import (
    LINEAGE,
    NOBODY,
    SESSIONS,
    Greeting,
    Lineage,
    Promise,
    Role,
    RoleFact,
    fenced_error,
)

_DELAYS_KEPT: Final = 32
"""Number of shipments among which the quickest is looked for: half a minute of heartbeats."""
CLOCK_OFF_S: Final = 60.0
"""Difference from which a leader's clock is reported as off."""


@dataclass(frozen=True, slots=True)
class OwnHolding:
    """The part of the log that a follower has, durable and verified, as its log reports it."""

    position: ReplicaPosition = field(default_factory=dict)
    group: GroupNumber = GroupNumber(0)
    """The last whole group, of all shards."""
    persisted_upto: Seq = Seq(0)


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connected:
    """A link to the leader that `Connect` named is up."""


@dataclass(frozen=True, slots=True)
class Received:
    """A shipment arrived on the link."""

    shipment: Shipment
    wall_ns: int
    """This machine's wall clock, nanoseconds since 1970."""


@dataclass(frozen=True, slots=True)
class Applied:
    """`Apply` was carried out."""

    holding: OwnHolding
    wall_ns: int


@dataclass(frozen=True, slots=True)
class ApplyFailed:
    """`Apply` failed."""

    error: MillstreamError
    chance: float


@dataclass(frozen=True, slots=True)
class WasSetAside:
    """`SetAside` was carried out, even if there was nothing to set aside."""

    holding: OwnHolding


@dataclass(frozen=True, slots=True)
class LinkGone:
    """The link broke, or couldn't be made, or the leader ended it with an error."""

    error: MillstreamError
    chance: float
    """Random, in [0, 1), drawn by the caller."""


@dataclass(frozen=True, slots=True)
class PromiseRequested:
    """A candidate asks this node for its promise."""

    promise: Promise


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Connected | Received | Applied | ApplyFailed | WasSetAside | LinkGone | PromiseRequested | Tick

# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect to the leader; then `Connected` or `LinkGone`."""

    leader: NodeName


@dataclass(frozen=True, slots=True)
class Say:
    """Send a message on the link. An error is the last message."""

    word: Hello | Acknowledgement | MillstreamError


@dataclass(frozen=True, slots=True)
class Apply:
    """Verify, write and sync the shipment, and move the marks; then `Applied` or `ApplyFailed`."""

    shipment: Shipment


@dataclass(frozen=True, slots=True)
class ShowAll:
    """Show readers everything that is here: like the next acknowledgement, it is held as the stream's level asks.

    First check that no other node has got a higher promise since: that node may lead without this.
    """


@dataclass(frozen=True, slots=True)
class SetAside:
    """Keep for operators what lies behind a group, and remove it from the log, durably; then `WasSetAside`.

    These are frames of later groups, whatever stands behind them, and the footer of the segment that ends there.
    """

    behind: GroupNumber


@dataclass(frozen=True, slots=True)
class PersistDocuments:
    """Keep the documents durably in place of the older ones."""

    documents: tuple[Document, ...]


@dataclass(frozen=True, slots=True)
class BreakLink:
    """Break the link: nothing more is sent on it."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Take nothing more until an operator has intervened."""

    error: MillstreamError


Effect = Connect | Say | Apply | ShowAll | SetAside | PersistDocuments | PersistRole | BreakLink | Stop | Tell


class FollowerPhase(StrEnum):
    """The state of a follower."""

    APART = "apart"
    CONNECTING = "connecting"
    WAITING = "waiting"
    CUTTING = "cutting"
    """Groups that the leader lacks are being set aside."""
    FOLLOWING = "following"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Lag:
    """Distance behind the leader at present."""

    records: int
    size_bytes: int
    age_s: float
    """Greatest possible age of what is shown; infinite if it was never everything that the leader had."""


class Follower:
    """A follower's state machine; see the module.

    Args:
        node: this one.
        fact: its noted role.
        stream: the stream of its log; None if it has no log so far.
        holding: the part of the log that it has.
        documents: the versions of the documents that it keeps.
        home: identifies this home among those of that node name.
        backoff: its waits between attempts.
        silence_s: a leader that is silent for longer is given up: it sends every second, even if there is nothing new.
    """

    def __init__(
        self,
        node: NodeName,
        fact: RoleFact,
        stream: StreamId | None,
        holding: OwnHolding | None = None,
        documents: Mapping[str, int] | None = None,
        *,
        home: str = "",
        backoff: Backoff | None = None,
        silence_s: float = 30.0,
    ) -> None:
        self._node: Final = node
        self._home: Final = home
        self._backoff: Final = Backoff() if backoff is None else backoff
        self._silence_s: Final = silence_s
        self._heard_at = -math.inf
        self.fact = fact
        self.stream = stream
        self.holding = OwnHolding() if holding is None else holding
        self.phase = FollowerPhase.APART
        self.stopped_by: MillstreamError | None = None
        self.trouble: MillstreamError | None = None
        """The error by which it last lost its leader, or couldn't take a shipment; None once it follows again."""
        self.clock_off_s = 0.0
        """Seconds by which the leader's clock is ahead of this one; negative: behind it."""
        self._documents = {} if documents is None else dict(documents)
        self._ahead: list[tuple[Seq, Document]] = []
        """Sessions ahead of this log, each with the number that the log has to reach: the first and the newest."""
        self._connect_at = -math.inf
        self._greeting: Greeting | None = None
        self._taken: Shipment | None = None
        self._delays: deque[float] = deque(maxlen=_DELAYS_KEPT)
        self._sent_at = 0.0
        """Earliest time at which the newest shipment was sent, on this machine's clock."""
        self._hint = NOBODY
        self._aligned_with: Lineage | None = None
        """Lineage of a leader: the groups of this log that it lacks were set aside."""
        self._fresh_at: float | None = None
        self._was_all = False
        """Whether the last shipment left nothing behind it."""
        self._leader_end = Seq(0)
        self._bytes_left = 0
        self._clock_told = False

    # --- what readers and writers are shown ------------------------------------------------------------------------

    @property
    def has_heard(self) -> bool:
        """Whether a leader has reported how much it has."""
        return bool(self._delays)

    def lag(self, now_s: float) -> Lag:
        """Return the lag at a moment of the clock that `step` is given."""
        age_s = math.inf if self._fresh_at is None else max(0.0, now_s - self._fresh_at)
        return Lag(max(0, self._leader_end - self.holding.persisted_upto), self._bytes_left, age_s)

    @property
    def has_all(self) -> bool:
        """Whether the node that it follows had no more at its last report; if it isn't the leader, others may have."""
        return self._was_all and self._greeting is not None and self.holding.group >= self._greeting.group

    # --- events ----------------------------------------------------------------------------------------------------

    def step(self, event: Event, now_s: float) -> list[Effect]:
        """Return the effects of an event, at a moment of a clock that never goes back."""
        if isinstance(event, PromiseRequested):
            return self._asked(event.promise)
        if self.phase is FollowerPhase.STOPPED:
            return []
        match event:
            case Tick():
                return self._tick(now_s)
            case Connected():
                self._heard_at = now_s
                return self._say_hello()
            case Received(shipment, wall_ns):
                self._heard_at = now_s
                return self._received(shipment, now_s, wall_ns)
            case Applied(holding, wall_ns):
                return self._applied(holding, now_s, wall_ns)
            case ApplyFailed(error, chance):
                return self._apply_failed(error, chance, now_s)
            case WasSetAside(holding):
                return self._was_set_aside(holding)
            case LinkGone(error, chance):
                return self._link_gone(error, chance, now_s)
            case _:
                raise AssertionError(f"{event} is none of a follower's")

    def _tick(self, now_s: float) -> list[Effect]:
        if self.phase is FollowerPhase.APART and now_s >= self._connect_at and self.fact.leader != self._node:
            self.phase = FollowerPhase.CONNECTING
            leader, self._hint = self._hint or self.fact.leader, NOBODY
            return [Connect(leader)]
        if self.phase in {FollowerPhase.WAITING, FollowerPhase.FOLLOWING} and now_s >= self._heard_at + self._silence_s:
            self._later(0.5, now_s)
            return [Tell(self._node, f"its leader sent nothing for {self._silence_s:g} s"), BreakLink()]
        return []

    def _say_hello(self) -> list[Effect]:
        self.phase, self._greeting, self._taken = FollowerPhase.WAITING, None, None
        self._ahead = []
        promise = self.fact.promise
        hello = Hello(
            self.stream,
            self._node,
            promise.epoch,
            self.holding.position,
            dict(self._documents),
            promise.node,
            self._home,
        )
        return [Say(hello)]

    def _asked(self, promise: Promise) -> list[Effect]:
        """Give a promise or raise `Fenced`: the caller answers with `fact` and `holding` after the effects."""
        fact = self.fact.asked(promise)
        if fact == self.fact:
            return []
        self.fact = fact
        effects: list[Effect] = [PersistRole(fact)]
        if self.phase not in {FollowerPhase.APART, FollowerPhase.STOPPED}:
            self.phase, self._taken, self._greeting = FollowerPhase.APART, None, None
            effects += [Say(fenced_error(promise)), BreakLink()]
        return effects

    def _received(self, shipment: Shipment, now_s: float, wall_ns: int) -> list[Effect]:
        if self.phase not in {FollowerPhase.WAITING, FollowerPhase.FOLLOWING}:
            return []
        promise = _promise_of(shipment, self.fact.promise)
        if (refusal := self.fact.refusal_of_old_leader(promise)) is not None:
            self._later(0.5, now_s)
            return [Say(refusal), BreakLink()]
        if self.stream is not None and shipment.stream != self.stream:
            return self._stop(_other_stream(shipment.stream, self.stream))
        if promise == self.fact.promise and self.fact.role is Role.LEADS:
            return self._stop(
                ReplicationError(
                    f"{self._node} leads this stream itself",
                    hint="Promote the node that is to lead; then this one can follow it.",
                )
            )
        effects: list[Effect] = []
        if promise > self.fact.promise or self.fact.role is not Role.FOLLOWS:
            fact = self.fact.heard_of(promise)
            self.fact = fact.following(promise.node or fact.leader)
            effects.append(PersistRole(self.fact))
        self.stream = shipment.stream
        effects += self._note_time(shipment, now_s, wall_ns)
        document = next((one for one in shipment.documents if one.name == LINEAGE), None)
        if document is not None:
            try:
                greeting = Greeting.from_json(document.data)
            except RoleUnreadable as error:
                return [*effects, *self._apply_failed(error, 0.5, now_s)]
            return [*effects, *self._greeted(greeting, shipment, now_s, wall_ns)]
        if self.phase is FollowerPhase.WAITING:
            return effects  # it was sent before the leader received the Hello
        if self._is_beyond(shipment):
            return [*effects, *self._say_hello()]
        self._taken = shipment
        return [*effects, Apply(shipment)]

    def _greeted(self, greeting: Greeting, shipment: Shipment, now_s: float, wall_ns: int) -> list[Effect]:
        try:
            fact = self.fact.led_by(greeting.claimant)
        except NodeNameTaken as error:
            self._later(0.5, now_s)
            self.trouble = error
            return [Tell(self._node, "is led by another home of that name", error), Say(error), BreakLink()]
        noted: list[Effect] = [] if fact == self.fact else [PersistRole(fact)]
        self.fact, self._greeting = fact, greeting
        return noted + self._aligned(greeting, shipment, now_s, wall_ns)

    def _aligned(self, greeting: Greeting, shipment: Shipment, now_s: float, wall_ns: int) -> list[Effect]:
        mine = self.fact.lineage.covered_by(self.holding.group)
        parted_behind = mine.common_with(greeting.lineage)[1]
        if parted_behind is not None and self._aligned_with != greeting.lineage:
            self.phase, self._taken = FollowerPhase.CUTTING, shipment
            return [SetAside(parted_behind)]
        if mine == greeting.lineage and self.holding.group > greeting.group:
            # Not final: after a power cut a leader's marks are older than its log until its writer has opened it.
            error = Diverged(
                f"this node has group {self.holding.group}, and its leader ends at {greeting.group}: it has lost what it had",
                hint="Promote this node, or another with all records, if the leader stays unable; the leader then follows.",
            )
            return self._apply_failed_for_now(error, 0.5, now_s)
        self.phase = FollowerPhase.FOLLOWING
        self._backoff.reset()
        kept = self._keep(shipment)
        return [*kept, *self._note_lineage(), *self._acknowledge(shipment, now_s, wall_ns)]

    def _was_set_aside(self, holding: OwnHolding) -> list[Effect]:
        self.holding = holding
        if self.phase is not FollowerPhase.CUTTING or self._greeting is None:
            return []  # the link has gone
        self._aligned_with = self._greeting.lineage
        # Noted durably after the cut: until then the older lineage claims only what is true of the rest.
        return [*self._note_lineage(), *self._say_hello()]

    def _applied(self, holding: OwnHolding, now_s: float, wall_ns: int) -> list[Effect]:
        shipment, self._taken, self.holding = self._taken, None, holding
        if self.phase is not FollowerPhase.FOLLOWING or shipment is None:
            return []  # the link has gone
        self.trouble = None
        return [*self._keep(shipment), *self._show_all(shipment), *self._acknowledge(shipment, now_s, wall_ns)]

    def _show_all(self, shipment: Shipment) -> list[Effect]:
        """Show readers what was applied before the leader does, if this node's acknowledgement is enough."""
        assert self._greeting is not None, "a term is known from a greeting"
        counts = self.holding.group >= self._greeting.lineage.last.behind and self.fact.promise.node != self._node
        return [ShowAll()] if shipment.by_one and counts else []

    def _note_lineage(self) -> list[Effect]:
        """Note the leader's terms, before anything of its log is taken."""
        assert self._greeting is not None, "a term is known from a greeting"
        if self._greeting.lineage == self.fact.lineage:
            return []
        self.fact = replace(self.fact, lineage=self._greeting.lineage)
        return [PersistRole(self.fact)]

    def _keep(self, shipment: Shipment) -> list[Effect]:
        newer = [
            one for one in shipment.documents if one.name != LINEAGE and one.version != self._documents.get(one.name)
        ]
        sessions = next((one for one in newer if one.name == SESSIONS), None)
        if sessions is not None:
            # Else a node whose log ends before these sessions would have to forget what only older segments show.
            newer.remove(sessions)
            self._ahead = [*self._ahead[:1], (shipment.leader_end, sessions)]
        reached = [one for upto, one in self._ahead if upto <= self.holding.persisted_upto]
        self._ahead = self._ahead[len(reached) :]
        newer += reached[-1:]
        self._documents |= {one.name: one.version for one in newer}
        return [PersistDocuments(tuple(newer))] if newer else []

    def _acknowledge(self, shipment: Shipment, now_s: float, wall_ns: int) -> list[Effect]:
        is_all = shipment.bytes_left == 0 and self.holding.persisted_upto >= shipment.leader_end
        self._was_all = is_all
        # Under its own promise it gets what another node had: no node leads, and another may have more.
        if is_all and self.fact.promise.node != self._node:
            self._fresh_at = self._sent_at if self._fresh_at is None else max(self._fresh_at, self._sent_at)
        lag = self.lag(now_s)
        ack = Acknowledgement(
            self._node,
            self.fact.promise.epoch,
            self.holding.position,
            self.holding.group,
            self.holding.persisted_upto,
            wall_ns,
            lag.records,
            lag.size_bytes,
            -1.0 if math.isinf(lag.age_s) else lag.age_s,
        )
        return [Say(ack)]

    def _is_beyond(self, shipment: Shipment) -> bool:
        """Return whether bytes before the shipment are surely missing; only the log knows where a segment ends."""
        ends = dict(self.holding.position)
        for part in shipment.parts:
            end = ends.get(part.shard, _NOTHING)
            begins_at = end.position if part.base_offset == end.base_offset else 0
            if part.base_offset >= end.base_offset and part.position > begins_at:
                return True
            ends[part.shard] = max(end, part.end)
        return False

    def _apply_failed(self, error: MillstreamError, chance: float, now_s: float) -> list[Effect]:
        self._taken = None
        if isinstance(error, ReplicaGap):
            return self._say_hello()
        return self._stop(error) if error.code in _LASTING else self._apply_failed_for_now(error, chance, now_s)

    def _apply_failed_for_now(self, error: MillstreamError, chance: float, now_s: float) -> list[Effect]:
        self._later(chance, now_s)
        self.trouble = error
        return [Tell(self._node, "could not take what came", error), BreakLink()]

    def _link_gone(self, error: MillstreamError, chance: float, now_s: float) -> list[Effect]:
        if error.code in _LASTING:
            self.phase, self.stopped_by = FollowerPhase.STOPPED, error
            return [Stop(error)]
        if isinstance(error, Fenced) and error.details.get("leader") not in {None, NOBODY, self._node}:
            # The old leader names the node that may lead now. Try that one once: a promise isn't a promotion.
            self._hint = NodeName(str(error.details["leader"]))
        self._later(chance, now_s)
        self.trouble = error
        if isinstance(error, NodeNameTaken):
            # The other home keeps its connection until it goes: this node can't know which of them is right.
            self._connect_at = now_s + _TURN_S * (0.5 + 0.5 * chance)
        return [Tell(self._node, "has no leader now, and tries again", error)]

    def _later(self, chance: float, now_s: float) -> None:
        self.phase, self._taken, self._greeting = FollowerPhase.APART, None, None
        self._connect_at = now_s + self._backoff.next_s(chance)

    def _stop(self, error: MillstreamError) -> list[Effect]:
        self.phase, self.stopped_by = FollowerPhase.STOPPED, error
        return [Say(error), BreakLink(), Stop(error)]

    def _note_time(self, shipment: Shipment, now_s: float, wall_ns: int) -> list[Effect]:
        delay_s = (wall_ns - shipment.sent_ns) / 1e9
        self._delays.append(delay_s)
        quickest_s = min(self._delays)
        self._sent_at = now_s - (delay_s - quickest_s)
        self._leader_end, self._bytes_left = shipment.leader_end, shipment.bytes_left
        self.clock_off_s = -quickest_s
        was_told, self._clock_told = self._clock_told, abs(quickest_s) > CLOCK_OFF_S
        if self._clock_told and not was_told:
            return [Tell(self._node, f"the leader's clock is {self.clock_off_s:+.0f} s off this node's")]
        return []


_TURN_S: Final = 5.0
"""Longest time for which a home stays away while another home of its name is connected."""
_LASTING: Final = frozenset({Diverged.code, FollowerBehindRetention.code, "other_stream"})
"""Codes of errors that time doesn't mend."""
_NOTHING: Final = ByteEnd(Offset(0), 0)


def _promise_of(shipment: Shipment, mine: Promise) -> Promise:
    """Return the promise under which it was sent. A leader that doesn't name the promise's node has only its number."""
    if shipment.leader == NOBODY and shipment.epoch == mine.epoch:
        return mine
    return Promise(shipment.epoch, shipment.leader)


def _other_stream(theirs: StreamId, mine: StreamId) -> ReplicationError:
    return ReplicationError(
        f"the leader has stream {theirs} under this name, and this node {mine}", code="other_stream", stream=str(mine)
    )
