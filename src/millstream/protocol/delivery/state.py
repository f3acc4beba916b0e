"""A consumer's durable state, from which a restart begins. `delivery.consumer_store` stores it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from millstream.protocol.delivery.dead_letter_index import bury_again
from millstream.protocol.delivery.messages import DeadLetter, Phase, position_of
from millstream.protocol.delivery.state_changes import (
    Change,
    Delayed,
    Delivered,
    Died,
    Dropped,
    Extended,
    Moved,
    Overtaken,
    Relied,
    Retried,
    Returned,
    Rewound,
    Settled,
    Started,
    Steered,
    Timed,
    letter_from_json,
    letter_to_json,
)


@dataclass(slots=True)
class Fact:
    """The deliveries of one message that isn't settled."""

    deliveries: int = 0
    failures: int = 0
    """Number of failed deliveries."""
    run: int = 0
    answer: int = 0
    """The last delivery: the answer and its run."""
    deadline: int = 0
    """When the last delivery expires, if it is in flight; else 0."""
    not_before: int = 0
    """When it may be delivered again; 0: at once."""
    has_failed: bool = False
    """Whether the last delivery was counted as failed."""

    def to_json(self) -> list[Any]:
        """Return a value that JSON can hold."""
        last = [self.run, self.answer, self.deadline, self.not_before, int(self.has_failed)]
        return [self.deliveries, self.failures, *last]

    @classmethod
    def from_json(cls, value: list[Any]) -> Self:
        """Return the fact of `to_json`'s value."""
        deliveries, failures, run, answer, deadline, not_before, has_failed = value
        return cls(deliveries, failures, run, answer, deadline, not_before, bool(has_failed))


@dataclass(slots=True)
class Counters:
    """Counts since the consumer was created."""

    delivered: int = 0
    """First deliveries."""
    redelivered: int = 0
    """Further deliveries."""
    acked: int = 0


@dataclass(slots=True)
class State:
    """The durable facts of a consumer: a snapshot, with the changes after it applied.

    Make the first one with `State.begin`. Applying a prefix of the machine's changes gives a state from which
    nothing is lost: messages settled after the prefix are delivered again.
    """

    cursor: int = 0
    """The `seq` of a token before which every message is settled."""
    generation: int = 0
    """Number of rewinds."""
    run: int = 0
    """The last run that began."""
    phase: Phase = Phase.ACTIVE
    phase_reason: str | None = None
    """The reason why the consumer was paused, if no operator did it."""
    counters: Counters = field(default_factory=Counters)
    upto: int = 0
    """A position up to which every message is settled, except those in `open`."""
    open: set[int] = field(default_factory=set)
    """Positions at or below `upto` that aren't settled."""
    settled: set[int] = field(default_factory=set)
    """Positions above `upto` that are settled."""
    unread: set[int] = field(default_factory=set)
    """Positions that were settled before they were offered again."""
    facts: dict[int, Fact] = field(default_factory=dict)
    """Deliveries of messages that aren't settled, by position."""
    dead: dict[str, DeadLetter] = field(default_factory=dict)
    """Dead letters by id, the oldest first."""
    retried: dict[str, DeadLetter] = field(default_factory=dict)
    """Messages that were dead and wait for delivery, or are in flight, by id."""
    relied: int = 0
    """The `seq` up to which the log has newer messages than some that were dropped; 0: none was. See `latest`."""
    time: int = 0
    """The last time that was noted; 0: none was."""
    _pruned_at: int = 0

    @classmethod
    def begin(cls, cursor: int) -> Self:
        """Return the state of a new consumer.

        Args:
            cursor: the `seq` behind which it receives messages.
        """
        return cls(cursor=cursor, upto=position_of(cursor, 1))

    def apply(self, change: Change) -> None:  # noqa: C901, PLR0912 - one case for each kind of change
        """Apply a change that the machine made."""
        match change:
            case Delivered(run, answer, deadline, positions):
                self._deliver(run, answer, deadline, positions)
            case Settled(positions, acked, is_unread):
                self.counters.acked += acked
                self._settle(positions)
                if is_unread:
                    self.unread.update(positions)
            case Returned(positions, failed, until):
                self._return(positions, failed, until)
            case Delayed(positions, until):
                for position in positions:
                    self._fact(position).not_before = until
            case Extended(run, answer, deadline, positions):
                for position in positions:
                    fact = self._fact(position)
                    fact.run, fact.answer, fact.deadline, fact.not_before = run, answer, deadline, 0
            case Moved(cursor):
                self.cursor = cursor
                self._prune()
            case Relied(upto):
                self.relied = upto
            case Died(letter):
                self._settle((letter.message.position,))
                self.retried.pop(letter.message.id, None)
                self.dead.pop(letter.message.id, None)
                self.dead[letter.message.id] = letter
            case Overtaken(ids):
                for id_ in ids:
                    self.dead[id_] = self.dead[id_]._replace(is_overtaken=True)
            case Retried(ids):
                for id_ in ids:
                    letter = self.dead.pop(id_)
                    self.facts.pop(letter.message.position, None)
                    self.retried[id_] = letter
            case Dropped(ids, acked):
                self.counters.acked += acked
                for id_ in ids:
                    if id_ in self.dead:
                        del self.dead[id_]
                    elif id_ in self.retried:
                        self.facts.pop(self.retried.pop(id_).message.position, None)
            case Rewound(generation, cursor, end):
                self.generation, self.cursor, self.upto = generation, cursor, position_of(cursor, 1)
                self.open, self.settled, self.unread, self.facts, self.relied = set(), set(), set(), {}, 0
                bury_again(self.dead, self.retried, generation, end)
            case Steered(phase, reason):
                self.phase, self.phase_reason = phase, reason
            case Started(run):
                self.run = run
            case Timed(now):
                self._set_time(now)

    def _fact(self, position: int) -> Fact:
        fact = self.facts.get(position)
        if fact is None:
            fact = self.facts[position] = Fact()
        return fact

    def _deliver(self, run: int, answer: int, deadline: int, positions: Any) -> None:
        for position in positions:
            fact = self._fact(position)
            fact.deliveries += 1
            if fact.deliveries == 1:
                self.counters.delivered += 1
            else:
                self.counters.redelivered += 1
            fact.run, fact.answer, fact.deadline, fact.not_before, fact.has_failed = run, answer, deadline, 0, False

    def _return(self, positions: Iterable[int], failed: Iterable[int], until: int) -> None:
        for position in positions:
            self._fact(position).deadline = 0
        for position in failed:
            fact = self._fact(position)
            fact.failures += not fact.has_failed
            fact.has_failed, fact.deadline, fact.not_before = True, 0, until

    def _set_time(self, now: int) -> None:
        """Note the time. If the clock was set back, move all times with it: what was left of each wait is left of it now."""
        by, self.time = self.time - now, now
        if by > 0:
            for fact in self.facts.values():
                fact.deadline = max(1, fact.deadline - by) if fact.deadline else 0
                fact.not_before = max(1, fact.not_before - by) if fact.not_before else 0

    def _settle(self, positions: Any) -> None:
        for position in positions:
            self.facts.pop(position, None)
            if position > self.upto:
                self.settled.add(position)
            else:
                self.open.discard(position)

    def _prune(self) -> None:
        """Forget positions before the cursor, if they may be half of all."""
        if len(self.settled) + len(self.open) < 2 * self._pruned_at + 1024:
            return
        covered = position_of(self.cursor, 1)
        self.settled = {position for position in self.settled if position > covered}
        self.open = {position for position in self.open if position > covered}
        self.unread = {position for position in self.unread if position > covered}
        self._pruned_at = len(self.settled) + len(self.open)

    def to_json(self) -> dict[str, Any]:
        """Return a value that JSON can hold."""
        return {
            "cursor": self.cursor,
            "generation": self.generation,
            "run": self.run,
            "phase": str(self.phase),
            "phase_reason": self.phase_reason,
            "counters": [self.counters.delivered, self.counters.redelivered, self.counters.acked],
            "upto": self.upto,
            "open": sorted(self.open),
            "settled": sorted(self.settled),
            "unread": sorted(self.unread),
            "facts": [[position, *fact.to_json()] for position, fact in self.facts.items()],
            "dead": [letter_to_json(letter) for letter in self.dead.values()],
            "retried": [letter_to_json(letter) for letter in self.retried.values()],
            "relied": self.relied,
            "time": self.time,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Return the state of `to_json`'s value. Raises `KeyError`, `TypeError` or `ValueError` for other values."""
        dead = [letter_from_json(letter) for letter in value["dead"]]
        retried = [letter_from_json(letter) for letter in value["retried"]]
        return cls(
            cursor=value["cursor"],
            generation=value["generation"],
            run=value["run"],
            phase=Phase(value["phase"]),
            phase_reason=value.get("phase_reason"),
            counters=Counters(*value["counters"]),
            upto=value["upto"],
            open=set(value["open"]),
            settled=set(value["settled"]),
            unread=set(value["unread"]),
            facts={position: Fact.from_json(fact) for position, *fact in value["facts"]},
            dead={letter.message.id: letter for letter in dead},
            retried={letter.message.id: letter for letter in retried},
            relied=value["relied"],
            time=value.get("time", 0),
        )
