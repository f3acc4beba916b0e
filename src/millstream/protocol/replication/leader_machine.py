"""The leader's side: what is sent to which follower next, and how far each of them has the log.

Each follower has its own state here, and none waits for another:

    | event            | apart                  | greeting                | shipping                           |
    |------------------|------------------------|-------------------------|------------------------------------|
    | Joined           | Greet -> greeting      | the older link goes; Greet -> greeting (a follower that reconnects has lost the old link) |
    | Joined, of another home of that name | the same | it is refused: NodeNameTaken; the first home stays | the same |
    | Sent             | -                      | the next shipment may be sent | the same                     |
    | Rejoined            | -                      | Greet -> greeting       | Greet -> greeting                  |
    | Acked            | -                      | -> shipping, at its position; it counts for no level         | cursor up, window opens |
    | ReadFailed       | -                      | read again after a while, longer each time                   | the same |
    | LinkGone         | -                      | -> apart                | -> apart; its cursor is noted      |
    | Durable, Tick    | -                      | -                       | ReadAndSend, if there is anything  |
    | ReadFailed: what it lacks was dropped | -  | the link is broken with FollowerBehindRetention. It may have it from elsewhere when it comes again |

Rules, each held by a test, or a seed of the simulator, that fails without it:

- A cursor moves by that follower's acknowledgement only: not by sending, nor by another's. A follower that comes
  back with less than it had acknowledged counts for nothing until it has acknowledged again.
- An acknowledgement counts for levels only once the follower has everything that the leader began with.
  Otherwise a group that a later leader lacks might count.
- The answer to a greeting counts for nothing. The first shipment after it repeats the end of the follower's log, so
  that the follower compares it. A copy of this home may have led it, and written other groups under the same numbers.
- Every change is sent, however small: bytes, or marks alone, or what readers see alone, or a document alone. If nothing
  is new for a while, an empty shipment shows the follower that it is up to date.
- Each follower has one read and send at a time, and no more bytes in flight than the window allows.
- A message with a higher promise ends leadership: that is noted durably first, then every link is dropped. A follower
  that has another stream of that name is refused before its promise counts.

The component that accepts links numbers them; events of a link that is gone change nothing. Pure: no I/O, clock
or randomness. Effects are carried out in order; if one fails, none of the later ones is. Not thread-safe.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from millstream.backoff import Backoff
from millstream.errors import Fenced, FollowerBehindRetention, MillstreamError, NodeNameTaken, ReplicationError
from millstream.model.ids import Epoch, GroupNumber, ShardId, StreamId
from millstream.model.marks import DurableMark
from millstream.model.positions import Offset, Seq
from millstream.model.replication import OBJECT_STORE, Acknowledgement, ByteEnd, Hello, NodeName, ReplicaPosition
from millstream.protocol.replication import leader_events as events
from millstream.protocol.replication.ack_levels import Holding, Holdings
from millstream.protocol.replication.node_promises import NOBODY, Lineage, Promise, RoleFact, fenced_error


class LinkPhase(StrEnum):
    """The state of a follower."""

    APART = "apart"
    GREETING = "greeting"
    SHIPPING = "shipping"


@dataclass(slots=True)
class FollowerProgress:
    """The leader's state of one follower."""

    node: NodeName
    link: events.LinkId | None = None
    home: str = ""
    """The home of that name that connected last."""
    phase: LinkPhase = LinkPhase.APART
    acked: Acknowledgement | None = None
    """Its newest acknowledgement; None: none since it connected, or it came back with less."""
    counted: GroupNumber | None = None
    """The last group that counts for levels."""
    sent: ReplicaPosition = field(default_factory=dict)
    documents: Mapping[str, int] = field(default_factory=dict)
    under_way: deque[tuple[ReplicaPosition, int]] = field(default_factory=deque)
    """Ends of what was sent and isn't acknowledged, with the bytes of each."""
    is_busy: bool = False
    """Whether an effect is being carried out for it."""
    shipped: int = -1
    """The count of changes up to which it was sent everything."""
    reading: int = 0
    """The count of changes when the last effect was made."""
    offered: Mapping[str, int] = field(default_factory=dict)
    """Versions of documents when the last effect was made."""
    sent_at: float = 0.0
    heard_at: float = 0.0
    not_before: float = 0.0
    noted: tuple[Seq, ReplicaPosition] = field(default_factory=lambda: (Seq(0), {}))
    noted_at: float | None = None
    backoff: Backoff = field(default_factory=Backoff)
    cut_off: FollowerBehindRetention | None = None

    @property
    def under_way_bytes(self) -> int:
        """Bytes sent and not acknowledged."""
        return sum(size for _, size in self.under_way)


class Leader:
    """A leader's state machine; see the module.

    Args:
        stream: the stream of its log.
        fact: this node's noted role; it leads, or ships its log to `only`.
        nodes: nodes that may follow: all except this one.
        options: limits on what is sent at once.
        only: the node that got this one's promise: what this node has is shipped to it, under that promise. No
            acknowledgement counts.
        observers: nodes that may follow as well, and never lead or promise: their acknowledgements count for no level.
    """

    def __init__(
        self,
        stream: StreamId,
        fact: RoleFact,
        nodes: frozenset[NodeName],
        options: events.ShipOptions | None = None,
        *,
        only: NodeName | None = None,
        observers: frozenset[NodeName] = frozenset(),
    ) -> None:
        self._stream: Final = stream
        self._observers: Final = observers
        self._nodes: Final = nodes
        self._options: Final = events.ShipOptions() if options is None else options
        self._only: Final = only
        self.fact = fact
        self.followers: dict[NodeName, FollowerProgress] = {}
        self.holdings = Holdings(fact.promise.epoch)
        """The holdings that count for levels, without times."""
        self._stored = GroupNumber(0)
        self.is_fenced = False
        self.is_stopped = False
        self._marks: Mapping[ShardId, DurableMark] = {}
        self._documents: Mapping[str, int] = {}
        self._shown: Mapping[ShardId, DurableMark] = {}
        self._changes = 0
        self._stop_at: float | None = None
        self._store_has: tuple[Seq, ReplicaPosition] = (Seq(0), {})
        self._store_noted: tuple[Seq, ReplicaPosition] = self._store_has
        self._store_noted_at = -math.inf
        self._lacking: set[NodeName] = set()

    @property
    def lineage(self) -> Lineage:
        """The lineage of its greeting."""
        return self.fact.lineage_of_log(self.group)

    @property
    def marks(self) -> Mapping[ShardId, DurableMark]:
        """The durable marks of the leader's own log, as last reported; never changed in place."""
        return self._marks

    @property
    def group(self) -> GroupNumber:
        """The last durable group here."""
        return max((mark.group for mark in self._marks.values()), default=GroupNumber(0))

    def step(self, event: events.Event, now_s: float) -> list[events.Effect]:
        """Return the effects of an event, at a moment of a clock that never goes back."""
        if self.is_stopped:
            return [events.DropLink(event.link, None)] if isinstance(event, events.Joined) else []
        effects: list[events.Effect] = []
        match event:
            case events.Joined(link, hello):
                effects += self._joined(link, hello, now_s)
            case events.Durable(marks, documents, shown):
                now = dict(marks), dict(documents), dict(shown)
                if now != (self._marks, self._documents, self._shown):
                    self._marks, self._documents, self._shown = now
                    self._changes += 1
            case events.StoredUpto(group, persisted_upto, position):
                self._store_has = max(self._store_has[0], persisted_upto), position
                if group > self._stored:
                    self._stored = group
                    effects += self._held()
            case events.Heard(promise):
                effects += self._fenced_by(promise)
            case events.Stopping(deadline_s):
                self._stop_at = deadline_s
                self._lacking = set(self._nodes)
            case events.Tick():
                pass
            case _:
                follower = self._of(event.link)
                if follower is not None:
                    effects += self._of_link(follower, event, now_s)
        if not self.is_fenced:
            for follower in self.followers.values():
                effects += self._go_on(follower, now_s)
            effects += self._note_store(now_s)
            effects += self._stop(now_s)
        return effects

    # --- followers come and go -------------------------------------------------------------------------------------

    def _joined(self, link: events.LinkId, hello: Hello, now_s: float) -> list[events.Effect]:
        node = hello.node
        other = self._other_stream(hello)
        if other is not None:
            return [events.DropLink(link, other), events.Tell(node, "is refused", other)]
        promise = Promise(hello.promised, hello.promised_to)
        effects = self._fenced_by(promise)
        if self.is_fenced:
            return [*effects, events.DropLink(link, fenced_error(self.fact.promise))]
        refusal = self._refusal(hello)
        if refusal is not None:
            return [events.DropLink(link, refusal), events.Tell(node, "is refused", refusal)]
        follower = self.followers.setdefault(node, FollowerProgress(node))
        if follower.link is not None:
            # All nodes of a region follow under its name: they take turns.
            if node not in self._observers and hello.home and follower.home and hello.home != follower.home:
                taken = _taken(node)
                return [
                    *effects,
                    events.DropLink(link, taken),
                    events.Tell(node, "is there: another home of that name is refused", taken),
                ]
            # The follower that reconnected no longer reads its old link.
            effects.append(events.DropLink(follower.link, _taken(node)))
        follower.link, follower.home = link, hello.home
        effects.append(events.Tell(node, "came"))
        is_anew, follower.cut_off = follower.cut_off is not None, None
        return effects + self._greeting(follower, hello, now_s, is_anew=is_anew)

    def _other_stream(self, hello: Hello) -> MillstreamError | None:
        """Return an error if a follower has another stream of that name: its promises aren't about this one."""
        if hello.stream in (None, self._stream):
            return None
        return ReplicationError(
            f"{hello.node} has stream {hello.stream} under this name, not {self._stream}",
            code="other_stream",
            stream=str(self._stream),
            node=str(hello.node),
        )

    def _refusal(self, hello: Hello) -> MillstreamError | None:
        if hello.node not in self._nodes | self._observers or (self._only is not None and hello.node != self._only):
            return _unknown_node(hello.node, self._nodes)
        return None

    def _greeting(
        self, follower: FollowerProgress, hello: Hello, now_s: float, *, is_anew: bool = False
    ) -> list[events.Effect]:
        effects: list[events.Effect] = []
        is_lost = follower.acked is not None and not is_covered(follower.acked.position, hello.position)
        if is_anew or is_lost or (self._only is None and _is_nothing(hello.position)):
            # The follower has lost what it had acknowledged: a disk was replaced, its log was set aside, or it
            # was cut off. One that comes with nothing also holds the log again if it is new to this leader: it
            # may have been cut off before.
            effects.append(events.PersistCursor(follower.node, Seq(0), {}, anew=True))
            follower.noted, follower.noted_at = (Seq(0), {}), now_s
        if is_anew or is_lost:
            follower.acked = None
            effects += self._count(follower, None)
        follower.phase = LinkPhase.GREETING
        follower.sent, follower.documents = hello.position, hello.documents
        follower.under_way.clear()
        follower.is_busy, follower.shipped, follower.reading = True, -1, -1
        follower.offered = {**hello.documents, **self._documents}
        follower.sent_at = follower.heard_at = now_s
        assert follower.link is not None, "who is greeted is there"
        effects.append(events.Greet(follower.link, hello.documents))
        return effects

    def _apart(self, follower: FollowerProgress) -> list[events.Effect]:
        follower.link, follower.phase, follower.is_busy = None, LinkPhase.APART, False
        follower.under_way.clear()
        acked = follower.acked
        return [] if acked is None else self._note(follower, acked)

    def _cut_off(self, node: NodeName, error: FollowerBehindRetention) -> list[events.Effect]:
        follower = self.followers.setdefault(node, FollowerProgress(node))
        follower.cut_off = error
        effects: list[events.Effect] = [events.Tell(node, "was cut off", error)]
        if follower.link is not None:
            effects += [events.DropLink(follower.link, error), *self._apart(follower)]
        return effects

    def _note_store(self, now_s: float) -> list[events.Effect]:
        """Keep segments for the object store as for a follower."""
        if self._store_has == self._store_noted or now_s < self._store_noted_at + self._options.cursor_every_s:
            return []
        self._store_noted, self._store_noted_at = self._store_has, now_s
        return [events.PersistCursor(OBJECT_STORE, *self._store_has)]

    # --- messages on a link ----------------------------------------------------------------------------------------

    def _of_link(self, follower: FollowerProgress, event: events.Event, now_s: float) -> list[events.Effect]:
        match event:
            case events.Rejoined(link, hello):
                other = self._other_stream(hello)
                if other is not None:
                    return [
                        events.DropLink(link, other),
                        events.Tell(follower.node, "is refused", other),
                        *self._apart(follower),
                    ]
                fenced = self._fenced_by(Promise(hello.promised, hello.promised_to))
                return fenced or self._greeting(follower, hello, now_s)
            case events.Acked(_, ack):
                return self._acked(follower, ack, now_s)
            case events.Sent(_, position, size_bytes, is_all):
                follower.is_busy, follower.sent, follower.sent_at = False, position, now_s
                follower.documents = follower.offered
                if not follower.under_way:
                    follower.heard_at = now_s
                follower.under_way.append((position, size_bytes))
                if is_all:
                    follower.shipped = follower.reading
                return []
            case events.ReadFailed(link, error, chance):
                if isinstance(error, FollowerBehindRetention):
                    return self._cut_off(follower.node, error)
                follower.is_busy = False
                follower.not_before = now_s + follower.backoff.next_s(chance)
                tell = events.Tell(follower.node, "could not be sent what it lacks", error)
                if follower.phase is LinkPhase.GREETING:
                    # It connects again, and is greeted then.
                    return [tell, events.DropLink(link, error), *self._apart(follower)]
                return [tell]
            case events.LinkGone(_, error):
                told: list[events.Effect] = [events.Tell(follower.node, "is gone", error)]
                if isinstance(error, Fenced):
                    told += self._fenced_by(_promise_in(error))
                return told + self._apart(follower)
            case _:
                raise AssertionError(f"{event} is of no link")

    def _acked(self, follower: FollowerProgress, ack: Acknowledgement, now_s: float) -> list[events.Effect]:
        if ack.promised != self.fact.promise.epoch:
            # Sent before it had promised this leader anything, or under a later promise: its Hello names the node.
            return []
        is_of_greeting = follower.phase is LinkPhase.GREETING
        follower.phase, follower.heard_at = LinkPhase.SHIPPING, now_s
        follower.backoff.reset()
        while follower.under_way and is_covered(follower.under_way[0][0], ack.position):
            follower.under_way.popleft()
        if follower.acked is not None and (is_of_greeting or ack.group < follower.acked.group):
            return []
        follower.acked = ack
        effects: list[events.Effect] = []
        if not is_of_greeting:
            effects += self._count(follower, ack.group if ack.group >= self.lineage.last.behind else None)
        if follower.noted_at is None or now_s >= follower.noted_at + self._options.cursor_every_s:
            effects += self._note(follower, ack)
            follower.noted_at = now_s
        return effects

    def _note(self, follower: FollowerProgress, ack: Acknowledgement) -> list[events.Effect]:
        if self._only is not None or (ack.persisted_upto, ack.position) == follower.noted:
            return []
        follower.noted = ack.persisted_upto, ack.position
        return [events.PersistCursor(follower.node, ack.persisted_upto, ack.position)]

    def _count(self, follower: FollowerProgress, group: GroupNumber | None) -> list[events.Effect]:
        if self._only is not None or follower.node in self._observers or group == follower.counted:
            return []
        follower.counted = group
        return self._held()

    def _held(self) -> list[events.Effect]:
        """Publish what each node holds now."""
        epoch = self.holdings.promised
        places = [
            Holding(node, epoch, one.counted, one.acked.persisted_upto)
            for node, one in self.followers.items()
            if one.counted is not None and one.acked is not None
        ]
        if self._stored:
            places.append(Holding(OBJECT_STORE, epoch, self._stored, is_store=True))
        self.holdings = Holdings(epoch, tuple(places))
        return [events.PersistAcks(self.holdings)]

    # --- what goes next --------------------------------------------------------------------------------------------

    def _go_on(self, follower: FollowerProgress, now_s: float) -> list[events.Effect]:
        if follower.link is None:
            return []
        options = self._options
        if (follower.is_busy or follower.under_way) and now_s >= max(
            follower.heard_at, follower.sent_at
        ) + options.silence_s:
            return [
                events.DropLink(follower.link, None),
                events.Tell(follower.node, f"sent nothing for {options.silence_s:g} s"),
                *self._apart(follower),
            ]
        if follower.is_busy or follower.phase is not LinkPhase.SHIPPING or now_s < follower.not_before:
            return []
        room = options.window_bytes - follower.under_way_bytes
        is_due = follower.shipped != self._changes or now_s >= follower.sent_at + options.heartbeat_s
        if not is_due or room <= 0:
            return []
        follower.is_busy, follower.reading, follower.sent_at = True, self._changes, now_s
        follower.offered = {**follower.documents, **self._documents}
        size = min(room, options.shipment_bytes)
        return [events.ReadAndSend(follower.link, follower.sent, size, follower.documents)]

    def _stop(self, now_s: float) -> list[events.Effect]:
        if self._stop_at is None:
            return []
        effects: list[events.Effect] = []
        for follower in self.followers.values():
            is_done = follower.shipped == self._changes and not follower.under_way and not follower.is_busy
            if follower.link is not None and is_done:
                self._lacking.discard(follower.node)
                effects += [events.DropLink(follower.link, None), *self._apart(follower)]
        if now_s < self._stop_at and any(one.link is not None for one in self.followers.values()):
            return effects
        for follower in self.followers.values():
            if follower.link is not None:
                effects += [events.DropLink(follower.link, None), *self._apart(follower)]
        self.is_stopped = True
        return [*effects, events.Stopped(tuple(sorted(self._lacking)))]

    def _fenced_by(self, promise: Promise) -> list[events.Effect]:
        if promise <= self.fact.promise or self.is_fenced:
            return []
        self.fact, self.is_fenced = self.fact.heard_of(promise), True
        error = fenced_error(promise)
        # Note it before any follower learns of it: a follower may promote another node, and this one must know
        # that after a crash.
        effects: list[events.Effect] = [events.PersistRole(self.fact)]
        for follower in self.followers.values():
            if follower.link is not None:
                effects += [events.DropLink(follower.link, error), *self._apart(follower)]
        return [*effects, events.Tell(promise.node, "leads now", error)]

    def _of(self, link: events.LinkId) -> FollowerProgress | None:
        return next((one for one in self.followers.values() if one.link == link), None)


def is_covered(position: ReplicaPosition, by: ReplicaPosition) -> bool:
    """Return whether everything below one position is also below the other."""
    return all(end <= by.get(shard, _NOTHING) for shard, end in position.items())


def _is_nothing(position: ReplicaPosition) -> bool:
    return not any(end.position or end.base_offset for end in position.values())


_NOTHING: Final = ByteEnd(Offset(0), 0)


def _unknown_node(node: NodeName, nodes: frozenset[NodeName]) -> ReplicationError:
    return ReplicationError(
        f"{node} is not among the nodes that may follow: {', '.join(sorted(nodes)) or 'none'}",
        code="unknown_node",
        node=str(node),
    )


def _taken(node: NodeName) -> NodeNameTaken:
    return NodeNameTaken(f"another home follows the leader as node {node}", node=str(node))


def _promise_in(error: Fenced) -> Promise:
    """Return the promise that another node's `Fenced` names; an empty one if it names none."""
    return Promise(Epoch(int(error.details.get("epoch", 0))), NodeName(str(error.details.get("leader", NOBODY))))
