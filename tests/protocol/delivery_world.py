"""Worlds of one consumer: a log that grows, clients that do anything, and a process that is killed at any step.

The world keeps the truth: which messages are in the log, and which were acknowledged, died, or were skipped. A kill
keeps any prefix of the changes that isn't shorter than the durable one. In an *exact* world kills cut between steps,
and each answer, status and cursor has to be the reference's.

    python -m tests.protocol.delivery_world FIRST COUNT
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import ClassVar

from tests.protocol.delivery_reference import Reference
from tests.seeds import Violation, main

from millstream.protocol.delivery import (
    Consumer,
    Delivery,
    DeliveryId,
    Limits,
    Message,
    Phase,
    State,
    Status,
    decode,
    encode,
    position_of,
    seq_of,
)

BARRIER_TABLE, TABLE, FREE_TABLE = 1, 2, 3
STEPS = 120
WAIT_MAX = 160
"""Longest wait of a message in ms. The noted time may be a second old when the clock is set back."""


class World:
    """A world drawn from a seed. Mutations change `consumer_type` or `state_type`."""

    found_by: ClassVar[int] = 0
    consumer_type: ClassVar[type[Consumer]] = Consumer
    state_type: ClassVar[type[State]] = State
    reference_type: ClassVar[type[Reference]] = Reference

    def __init__(self, seed: int, *, pick: Callable[[int], int] | None = None) -> None:
        chance = random.Random(seed)
        self.pick = chance.randrange if pick is None else pick
        """Return a number below the given one."""
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self.exact = bool(self.pick(2))
        self.has_barriers = bool(self.pick(2))
        self.limits = Limits(
            ack_wait_ms=100,
            max_deliver=self.pick(4),
            max_ack_pending=1 + self.pick(12),
            answer_bytes=60 + 60 * self.pick(5),
        )
        self.keys = 1 + self.pick(4)
        self.now = 1_000
        self.run = 0
        self.operations: list[list[Message]] = []
        self.end = 0
        """The log's last number."""
        self.epoch = 1
        self.done: set[str] = set()
        """Ids acknowledged, skipped by a rewind, or dropped."""
        self.died: set[str] = set()
        self.noted: dict[str, int] = {}
        """Number of changes after which an acknowledged message's settling is known, by id."""
        self.clients: list[Delivery] = []
        """Deliveries that clients have, however old."""
        self.given: set[DeliveryId] = set()
        """Ids of all deliveries."""
        self.poison: set[str] = set()
        self.log: list[str] = []
        """Changes as they are stored."""
        self.durable = 0
        self.snapshot = self.stored(self.state_type.begin(0))
        self.reference = self.reference_type(self.limits, 0)
        self.references: list[tuple[int, Reference]] = []
        """References by the number of changes, in an exact world."""
        self.consumer = self.started()

    # --- playing -----------------------------------------------------------------------------------------------------

    def play(self) -> None:
        """Play the whole world; raise `Violation` if a promise is broken."""
        for _ in range(STEPS):
            self.step()
        self.drain()

    def step(self) -> None:
        """Do one thing, drawn by `pick`."""
        actions = self.actions()
        name, action = actions[self.pick(len(actions))]
        self.counts[name] += 1
        action()
        self.keep()
        self.check()

    def actions(self) -> list[tuple[str, Callable[[], None]]]:
        """Return the steps that may be taken, the frequent ones several times."""
        return [
            *[("append", self.append)] * 5,
            *[("receive", self.receive)] * 8,
            *[("ack", self.ack)] * 6,
            *[("nack", self.nack)] * 3,
            *[("extend", self.extend)] * 2,
            *[("wait", self.wait)] * 3,
            *[("sync", self.sync)] * 2,
            ("kill", self.kill),
            ("kill", self.kill),
            ("compact", self.compact),
            ("steer", self.steer),
            *([("rewind", self.rewind)] if not self.pick(4) else []),
            *([("promote", self.promote)] if not self.pick(4) else []),
            ("letters", self.letters),
        ]

    def broken(self, what: str) -> None:
        """Report a broken promise."""
        raise Violation(f"seed {self.seed}: {what}")

    # --- the log -----------------------------------------------------------------------------------------------------

    def append(self) -> None:
        """Append an operation."""
        before, operation = self.end, []
        self.end += self.pick(3)  # numbers have gaps
        for _ in range(1 + self.pick(4)):
            self.end += 1
            operation.append(self.message(position_of(self.end), before))
        self.operations.append(operation)

    def message(self, position: int, before: int) -> Message:
        """Return a new message."""
        table = BARRIER_TABLE + self.pick(3)
        groups = (f"{table}:{self.pick(self.keys)}",)
        kind = self.pick(12)
        barrier = kind == 0 and table == BARRIER_TABLE and self.has_barriers
        if kind == 1:
            groups = (f"{table}:a", f"{table}:{self.pick(self.keys)}")
        if barrier or kind == 2 or table == FREE_TABLE:
            groups = ()
        id_ = f"shop-0-{self.epoch}-{position}"
        if not self.pick(9):
            self.poison.add(id_)
        return Message(position, before, id_, groups, None if kind == 2 else table, barrier, 10 + self.pick(40))

    def messages(self) -> list[Message]:
        """Return all messages of the log."""
        return [message for operation in self.operations for message in operation]

    def offer(self) -> bool:
        """Offer the next operation, at times in two parts; return whether there was one."""
        for operation in self.operations:
            if operation[0].before >= self.consumer.read_upto:
                if len(operation) > 1 and not self.pick(3):
                    self.offer_part(operation[:1], operation[0].before)
                self.offer_part(operation, seq_of(operation[-1].position))
                return True
        return False

    def offer_part(self, messages: list[Message], upto: int) -> None:
        """Offer messages to the machine and to the reference."""
        self.consumer.offer(messages, upto)
        self.reference.offer(messages, upto)

    # --- the process -------------------------------------------------------------------------------------------------

    @staticmethod
    def stored(state: State) -> str:
        """Return a state as it is stored."""
        return json.dumps(state.to_json())

    def started(self) -> Consumer:
        """Start a process from what is stored."""
        state = self.state_type.from_json(json.loads(self.snapshot))
        for change in self.log:
            state.apply(decode(json.loads(change)))
        self.run = max(self.run, state.run) + 1
        self.answer = 0
        consumer = self.consumer_type(self.limits, state, run=self.run, now=self.now)
        self.consumer = consumer
        self.keep()
        self.durable = len(self.log)
        return consumer

    def keep(self) -> None:
        """Store the changes of a step."""
        self.log += [json.dumps(encode(change)) for change in self.consumer.take_changes()]
        if self.exact:
            self.references.append((len(self.log), self.reference.copy()))

    def sync(self) -> None:
        """Make all changes durable."""
        self.durable = len(self.log)

    def compact(self) -> None:
        """Replace the changes by a snapshot."""
        self.snapshot = self.stored(self.consumer.snapshot())
        self.log, self.durable, self.references = [], 0, []
        self.noted = dict.fromkeys(self.noted, 0)

    def kill(self) -> None:
        """Kill the process, and start another one from a prefix of the changes."""
        kept = self.durable + self.pick(len(self.log) - self.durable + 1)
        if self.exact:
            kept, self.reference = next(
                item for item in reversed(self.references) if item[0] <= kept or item is self.references[0]
            )
            self.reference = self.reference.copy()
        last = self.consumer._last
        del self.log[kept:]
        self.references = [item for item in self.references if item[0] <= kept]
        self.noted = {id_: at for id_, at in self.noted.items() if at <= kept}
        if not self.exact and not self.pick(3):  # the reference doesn't know how much time passed unnoted
            self.now = max(1, self.now - 2_000)
        self.consumer = self.started()
        if self.exact:
            while self.consumer._last < last and self.offer():
                pass
            if self.reference.items and not self.consumer.is_restored:
                self.broken("the log was read again, and the machine waits for more")

    # --- clients -----------------------------------------------------------------------------------------------------

    def receive(self) -> None:
        """Read what is wanted, and receive an answer."""
        count = 1 + self.pick(6)
        while self.consumer.wants(count) and self.offer():
            pass
        self.answered(count)

    def answered(self, count: int) -> list[Delivery]:
        """Receive an answer, and check it."""
        answer = self.consumer.receive(self.now, count)
        expected = self.reference.receive(self.now, count, (self.run, answer[0].delivery_id.answer if answer else 0))
        if self.exact and [(one.message.id, one.deliveries) for one in answer] != expected:
            self.broken(f"an answer has {[(one.message.id, one.deliveries) for one in answer]}, instead of {expected}")
        self.check_answer(answer)
        self.clients += answer
        ids = {one.delivery_id for one in answer}
        if ids & self.given:
            self.broken(f"{ids & self.given} names two deliveries")
        self.given |= ids
        self.counts["delivered"] += len(answer)
        return answer

    def chosen(self) -> list[DeliveryId]:
        """Return some deliveries that clients have: mostly of the newest answers."""
        if not self.clients:
            return []
        newest = 1 + self.pick(min(len(self.clients), 12 if self.pick(3) else len(self.clients)))
        chosen = [one for one in self.clients[-newest:] if self.pick(2)]
        return [one.delivery_id for one in chosen if one.message.id not in self.poison]

    def ack(self) -> None:
        """Acknowledge some deliveries."""
        self.acked(self.chosen())

    def acked(self, ids: list[DeliveryId]) -> None:
        """Acknowledge deliveries, and check the statuses."""
        statuses = self.consumer.ack(ids)
        self.compare("ack", statuses, self.reference.ack(ids))
        by_delivery = {one.delivery_id: one.message.id for one in self.clients}
        for delivery, status in zip(ids, statuses, strict=True):
            self.counts[f"ack {status}"] += 1
            if status is Status.ACKED:
                self.done.add(by_delivery[delivery])
                self.noted[by_delivery[delivery]] = len(self.log) + 10**9  # until the step's changes are stored
        self.keep()
        for delivery in ids:
            if self.noted.get(by_delivery[delivery], 0) >= 10**9:
                self.noted[by_delivery[delivery]] = len(self.log)

    def nack(self) -> None:
        """Return some deliveries, poison among them."""
        ids = self.chosen() + [one.delivery_id for one in self.clients[-8:] if one.message.id in self.poison]
        delay = self.pick(3) * 60
        statuses = self.consumer.nack(ids, self.now, delay_ms=delay)
        self.compare("nack", statuses, self.reference.nack(ids, self.now + delay if delay else 0))
        self.counts.update(f"nack {status}" for status in statuses)

    def extend(self) -> None:
        """Extend some deliveries."""
        ids = self.chosen()
        wait = 20 + self.pick(3) * 70
        statuses = self.consumer.extend(ids, self.now, wait)
        self.compare("extend", statuses, self.reference.extend(ids, self.now + wait))
        self.counts.update(f"extend {status}" for status in statuses)

    def compare(self, what: str, statuses: list[Status], expected: list[Status]) -> None:
        """Check statuses."""
        if self.exact and statuses != expected:
            wrong = [
                (at, str(is_), str(should))
                for at, (is_, should) in enumerate(zip(statuses, expected, strict=True))
                if is_ != should
            ]
            self.broken(f"{what} returned other statuses than expected: {wrong}")

    def wait(self) -> None:
        """Let time pass: to the machine's next wake-up, or past it."""
        wake = self.consumer.next_wake()
        self.now += 1 + self.pick(80)
        if wake is not None and self.pick(2):
            self.now = max(self.now, wake)
        self.consumer.expire(self.now)
        self.reference.expire(self.now)

    # --- steering ----------------------------------------------------------------------------------------------------

    def steer(self) -> None:
        """Pause or resume."""
        if self.pick(3):
            self.consumer.resume()
        else:
            self.consumer.pause("the receiver wants no more")
        self.reference.is_active = self.consumer.phase is Phase.ACTIVE

    def rewind(self) -> None:
        """Rewind to the end of any operation, or be cut off."""
        if not self.pick(4):
            self.consumer.cut_off()
            cursor = self.consumer.cursor
            if self.pick(2):
                self.reference.begin_generation(cursor, position_of(cursor, 1))
                self.reference.is_active = False
                self.keep()
                self.acked(self.chosen())
        ends = [0, *(seq_of(operation[-1].position) for operation in self.operations)]
        cursor = ends[self.pick(len(ends))]
        was_cut_off = self.consumer.phase is Phase.CUT_OFF
        self.consumer.rewind(cursor)
        if was_cut_off:
            self.reference.is_active = True
        self.reference.begin_generation(cursor, position_of(cursor, 1))
        self.reference.generation = self.consumer.generation
        self.redelivered_from(cursor)
        self.keep()
        self.durable = len(self.log)

    def redelivered_from(self, cursor: int) -> None:
        """Note that the messages behind a cursor are due again, and those before it no longer."""
        for message in self.messages():
            if message.position > position_of(cursor, 1):
                self.done.discard(message.id)
                self.noted.pop(message.id, None)
                self.died.discard(message.id)
            else:
                self.done.add(message.id)

    def promote(self) -> None:
        """Lose the log's end, as a promotion with losses does."""
        cut = len(self.operations) - self.pick(3)
        end = seq_of(self.operations[cut - 1][-1].position) if cut > 0 else 0
        if not self.consumer.cut_back(end):
            return
        cursor = self.consumer.cursor
        self.operations, self.end, self.epoch = self.operations[: max(cut, 0)], end, self.epoch + 1
        self.reference.begin_generation(cursor, position_of(cursor, 1))
        self.reference.dead = {id_: letter.message for id_, letter in self.consumer.dead.items()}  # at other places
        for message in self.messages():
            if message.position > position_of(cursor, 1):
                self.done.discard(message.id)
                self.noted.pop(message.id, None)
                self.died.discard(message.id)
        self.keep()
        self.durable = len(self.log)

    def letters(self) -> None:
        """Retry or drop dead letters."""
        ids = [id_ for id_ in self.consumer.dead if self.pick(2)]
        if self.exact:  # the place of a retried message among barriers isn't the reference's
            barred = {m.table for m in self.messages() if m.barrier} | {
                m.table for m in self.reference.dead.values() if m.barrier
            }
            ids = [id_ for id_ in ids if self.reference.dead[id_].table not in barred]
        if self.pick(2):
            for id_, is_dead in self.consumer.retry(ids):
                self.counts["retried"] += 1
                if not is_dead:
                    self.broken(f"{id_} was dead and can't be retried")
                self.died.discard(id_)
            if self.exact:
                self.reference.retry(ids)
        else:
            self.consumer.drop(ids)
            for id_ in ids:
                message = self.reference.dead.pop(id_, None)
                if message is not None and self.reference.buried.get(message.position) == id_:
                    del self.reference.buried[message.position]
                self.done.add(id_)

    # --- promises ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check what holds after each step."""
        consumer = self.consumer
        for message in self.messages():
            if message.before < consumer.cursor and not self.is_over(message.id):
                self.broken(f"the cursor {consumer.cursor} passed {message.id}, which isn't settled")
        for group in consumer._pending.groups.values():
            if group.is_empty:
                self.broken(f"group {group.name} is kept, and has no message")
        free = sum(consumer._pending._is_free(entry, None) for entry in consumer._pending.entries.values())
        if free != consumer._pending.free:
            self.broken(f"{free} messages can be delivered, and {consumer._pending.free} are queued")
        wake = consumer.next_wake()
        if wake is not None and wake > self.now + WAIT_MAX + 1_000:
            self.broken(f"it sleeps for {wake - self.now} ms")
        self.check_runs(consumer)
        self.check_stored()
        if not self.exact:
            return
        reference = self.reference
        facts = {
            "cursor": (consumer.cursor, reference.cursor),
            "in flight": (consumer.in_flight, sum(item.flies_by is not None for item in reference.items)),
            "dead": (sorted(consumer.dead), sorted(reference.dead)),
            "generation": (consumer.generation, reference.generation),
            "counts": (
                [consumer.counters.delivered, consumer.counters.redelivered, consumer.counters.acked],
                reference.counts,
            ),
        }
        for what, (is_, should) in facts.items():
            if is_ != should:
                self.broken(f"{what}: {is_} instead of {should}")

    def check_runs(self, consumer: Consumer) -> None:
        """Check that the messages without entries are later than the others, and share no group with them."""
        runs = consumer._runs
        flying = [message for flight in runs.flying.values() for message in flight.unsettled]
        waiting = [message for some in runs.waiting for message in some.messages]
        messages = [*flying, *waiting]
        self.counts["delivered by the run"] += len(flying)
        positions = [message.position for message in messages]
        entries = [entry for entry in consumer._pending.entries.values() if not entry.is_retried]
        groups = {group for message in messages for group in message.groups}
        free = sum(
            not any(set(other.groups) & set(message.groups) for other in messages[: messages.index(message)])
            for message in waiting
        )
        found = {
            "count": (runs.count, len(messages)),
            "in flight": (runs.in_flight, len(flying)),
            "free": (runs.free, free),
            "order": (positions, sorted(positions)),
            "first": (runs.first, messages[0] if messages else None),
            "mixed": (bool(messages) and any(entry.position > positions[0] for entry in entries), False),
            "shared": (groups & consumer._pending.groups.keys(), set()),
            "unnoted": (groups - runs.groups, set()),
            "left": (runs.groups if not messages else set(), set()),
        }
        for what, (is_, should) in found.items():
            if is_ != should:
                self.broken(f"the runs' {what} is {is_} instead of {should}")

    def is_over(self, id_: str) -> bool:
        """Return whether no delivery of a message is to come."""
        return id_ in self.done or id_ in self.consumer.dead or id_ in self.consumer.retried

    def check_stored(self) -> None:
        """Check that the changes and a snapshot give one state."""
        if self.pick(6):
            return
        state = self.state_type.from_json(json.loads(self.snapshot))
        for change in self.log:
            state.apply(decode(json.loads(change)))
        seen = self.consumer.snapshot()
        for message in self.messages():
            position = message.position
            known = [
                position > position_of(one.cursor, 1)
                and (position not in one.open if position <= one.upto else position in one.settled)
                for one in (state, seen)
            ]
            if known[0] != known[1] and position > position_of(seen.cursor, 1) and message.id not in seen.retried:
                self.broken(f"{message.id} is settled by the {'changes' if known[0] else 'snapshot'} alone")
        for what in ("cursor", "generation", "run", "phase", "phase_reason", "counters", "dead", "retried"):
            if getattr(state, what) != getattr(seen, what):
                self.broken(f"the changes' {what} is {getattr(state, what)}, the snapshot's {getattr(seen, what)}")
        for position, fact in seen.facts.items():
            if position in getattr(self.consumer, "_heirs", ()):
                continue  # replaced: only its last delivery matters
            stored = state.facts.get(position)
            until = fact.deadline or fact.not_before  # a barrier may hold what was extended
            was = stored and (stored.deadline or stored.not_before)
            if stored is None or stored.deliveries != fact.deliveries or (was != until and (until or was > self.now)):
                self.broken(f"position {position} is {fact} in the snapshot, and {stored} by the changes")

    def check_answer(self, answer: list[Delivery]) -> None:
        """Check an answer's order, and that each message is due."""
        if len({one.message.id for one in answer}) < len(answer):
            self.broken("a message stands twice in an answer")
        everything = self.messages()
        inside: list[Message] = []
        live = [
            entry.message
            for entry in self.consumer._pending.in_flight_entries()
            if entry.answer is not None
            and answer
            and (entry.answer.run, entry.answer.number) != (self.run, answer[0].delivery_id.answer)
        ]
        live += [
            message
            for key, flight in self.consumer._runs.flying.items()
            if answer and key != (self.run, answer[0].delivery_id.answer)
            for message in flight.unsettled
        ]
        for delivery in answer:
            message = delivery.message
            if self.noted.get(message.id, 10**9) <= len(self.log) and message.id not in self.consumer.retried:
                self.broken(f"{message.id} was acknowledged, which was stored, and it is delivered again")
            for other in live:
                if set(other.groups) & set(message.groups):
                    self.broken(f"{message.id} is delivered while {other.id} of its group is in flight")
            for other in everything:
                if other.position >= message.position or other.id == message.id or self.is_over(other.id):
                    continue
                if set(other.groups) & set(message.groups) and other not in inside:
                    self.broken(f"{message.id} is delivered before {other.id} of its group")
                if other.table == message.table is not None and (other.barrier or message.barrier):
                    self.broken(f"{message.id} is delivered before {other.id}, and one of them is a barrier")
            inside.append(message)

    def drain(self) -> None:
        """Receive and acknowledge until nothing is left, and check that nothing was lost."""
        self.consumer.resume()
        if self.consumer.phase is Phase.CUT_OFF:
            return
        self.reference.is_active = True
        for _ in range(400):
            wake = self.consumer.next_wake()
            if wake is not None:
                self.now = max(self.now, wake)
            self.consumer.expire(self.now)
            self.reference.expire(self.now)
            while self.consumer.wants(50) and self.offer():
                pass
            answer = self.answered(50)
            self.acked([one.delivery_id for one in answer if one.message.id not in self.poison])
            bad = [one.delivery_id for one in answer if one.message.id in self.poison]
            self.compare("nack", self.consumer.nack(bad, self.now), self.reference.nack(bad, 0))
            self.keep()
            if not self.limits.max_deliver:
                self.poison.clear()
            if not answer and not self.consumer.unsettled and not self.offer():
                break
        else:
            self.broken(f"it doesn't come to an end: {self.consumer.unsettled} messages are unsettled")
        self.check()
        for message in self.messages():
            if not self.is_over(message.id):
                self.broken(f"{message.id} is lost")
        if self.consumer.cursor != max(self.consumer.read_upto, 0):
            self.broken(f"all is settled, and the cursor stays at {self.consumer.cursor}")


if __name__ == "__main__":
    sys.exit(main(World, sys.argv[1:]))
