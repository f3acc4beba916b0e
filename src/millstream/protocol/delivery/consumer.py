"""The machine of one consumer: which message is delivered when, and what an acknowledgement does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import attrgetter
from types import MappingProxyType
from typing import ClassVar

from millstream.protocol.delivery.cursor_holds import Order
from millstream.protocol.delivery.dead_letter_index import DeadLetters
from millstream.protocol.delivery.dead_letter_retries import Lettered
from millstream.protocol.delivery.delivery_order import Pending
from millstream.protocol.delivery.entries import Answer, Back, Entry, EntryState, fact_of
from millstream.protocol.delivery.messages import (
    DeadLetter,
    Delivery,
    DeliveryId,
    Limits,
    Message,
    Phase,
    Status,
    position_of,
)
from millstream.protocol.delivery.runs import Runs
from millstream.protocol.delivery.state import Fact, State
from millstream.protocol.delivery.state_changes import (
    Delayed,
    Delivered,
    Died,
    Dropped,
    Extended,
    Returned,
    Rewound,
    Settled,
    Steered,
)
from millstream.protocol.delivery.timer_heap import Timer, Timers
from millstream.protocol.delivery.unread_after_restart import Unread

_WAITING, _IN_FLIGHT, _GONE = EntryState.WAITING, EntryState.IN_FLIGHT, EntryState.GONE


class Consumer(Lettered):
    """The machine; the package's documentation has its rules.

    Args:
        limits: the consumer's numbers; the attribute `limits` may be replaced at any time.
        state: a new consumer's state, or a restart's. It belongs to the machine from now on.
        run: number of this run, greater than those of all earlier runs, including runs that the state has lost. The
            greater of `state.run + 1` and the clock in ms is one.
        now: the time. If the clock was set back since the state's, what is left of each wait stays the same.

    Times are in ms since 1970, by a clock that doesn't go back during a run. Concurrency: none; the caller serialises.
    """

    _replaces: ClassVar[bool] = False
    """Whether a newer message of a group may replace an older one."""

    def __init__(self, limits: Limits, state: State, *, run: int, now: int = 0) -> None:
        if run <= state.run:
            raise AssertionError(f"run {run} isn't greater than the last one, {state.run}")
        self.limits = limits
        self.counters = state.counters
        self._run = run
        self._generation = state.generation
        self._phase = state.phase
        self.phase_reason = state.phase_reason
        """The reason why the consumer was paused, if no operator did it."""
        self._answer_number = 0
        self._read_upto = self._noted_cursor = state.cursor
        self._last = position_of(state.cursor, 1)
        """The greatest position that was offered or read past."""
        self._pending = Pending()
        self._runs = Runs()
        self._order = Order()
        self._timers = Timers(self._is_void)
        self._letters = DeadLetters(state.dead, state.retried)
        self._begin_changes(state, run, now)
        for letter in state.retried.values():
            self._restore(self._add_retried(letter), state.facts.pop(letter.message.position, None))
        self._unread = Unread(state)

    # --- what it shows -----------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """Whether messages are delivered."""
        return self._phase

    @property
    def generation(self) -> int:
        """Number of rewinds."""
        return self._generation

    @property
    def in_flight(self) -> int:
        """Number of messages in flight."""
        return self._pending.in_flight + self._runs.in_flight

    @property
    def unsettled(self) -> int:
        """Number of messages that were offered and aren't settled."""
        return len(self._pending.entries) + self._runs.count

    @property
    def is_stopped(self) -> bool:
        """Whether nothing more is read or delivered: too many messages wait behind failed ones, or are of held tables."""
        pending, has_room = self._pending, self.unsettled < self.limits.unsettled_max
        if has_room or pending.free + self._runs.free or self._replaces:
            return False
        return bool(pending.held) or any(entry.failures for entry in pending.entries.values())

    @property
    def dead(self) -> Mapping[str, DeadLetter]:
        """Dead letters by id, the oldest first."""
        return MappingProxyType(self._letters.dead)

    @property
    def retried(self) -> Mapping[str, DeadLetter]:
        """Messages that were dead and aren't settled, by id: the caller keeps their records."""
        return MappingProxyType(self._letters.retried)

    @property
    def cursor(self) -> int:
        """The `seq` of the token before which every message is settled. Retention goes by the durable one."""
        first = self._order.first() or self._runs.first
        return self._read_upto if first is None else first.before

    # --- reading the log ---------------------------------------------------------------------------------------------

    @property
    def read_upto(self) -> int:
        """The `seq` behind which the caller reads on, to offer what follows."""
        return self._read_upto

    @property
    def is_restored(self) -> bool:
        """Whether all messages in flight before a restart were offered again. Nothing is delivered earlier."""
        return self._last >= self._unread.restore_upto

    @property
    def is_at_cursor(self) -> bool:
        """Whether nothing is known of messages behind the cursor: none of them was delivered."""
        return max(self._last, self._unread.upto) <= position_of(self.cursor, 1)

    def wants(self, count: int) -> bool:
        """Whether an answer of this size needs more messages than are there now."""
        if self._phase is not Phase.ACTIVE:
            return False
        if not self.is_restored:  # however many wait: nothing is delivered before
            return True
        has_room = self.unsettled < self.limits.unsettled_max and self.in_flight < self.limits.max_ack_pending
        free = self._pending.free + self._runs.free
        return has_room and free < (1 if self._has_many_bytes else count)

    @property
    def _has_many_bytes(self) -> bool:
        size, size_max = self._pending.records_bytes + self._runs.waiting_bytes, self.limits.records_bytes_max
        return size_max is not None and size > size_max

    def offer(self, messages: Iterable[Message], upto: int) -> None:
        """Take the log's next messages, in the order of their positions. Those offered before are ignored.

        Args:
            messages: messages behind `read_upto` that the consumer is to receive, by its tables and its `where`.
            upto: the `seq` at the end of the last operation that was read whole: no message up to there will follow.
        """
        messages, last, known_upto = list(messages), self._last, self._unread.upto
        if messages and self._is_run(messages):
            last = messages[-1].position
        elif messages:
            self._open()
            for message in messages:
                if message.position > last:
                    self._last = last = message.position
                    if last > known_upto and not self._replaces:
                        self._pending.bound_records(self._append(message), self.limits.records_bytes_max)
                    else:
                        self._offer(message)
        self._read_upto = max(upto, self._read_upto)
        self._last = max(last, position_of(upto, 1))
        self._unread.read(self._last)

    def _is_run(self, messages: list[Message]) -> bool:
        """Take messages as a run, if none of them needs an entry; return whether they are one."""
        pending = self._pending
        is_new = messages[0].position > max(self._last, self._unread.upto)
        is_plain = is_new and not (self._replaces or pending.barriers or pending.held or self._has_many_bytes)
        return is_plain and self._runs.offer(messages, pending.groups)

    def _open(self) -> None:
        """Give each message of a run its entry, as if it had had one from its offer on."""
        runs, self._runs = self._runs, Runs()
        for answer, flight in runs.flying.items():
            for message in flight.unsettled:
                entry = self._append(message)
                entry.deliveries, entry.last = 1, answer
                self._pending.revive(entry, *answer, flight.deadline)
        for waiting in runs.waiting:
            for message in waiting.messages:
                self._append(message)

    def _append(self, message: Message) -> Entry:
        """Take a message that the state doesn't know."""
        entry = self._pending.add(message)
        self._order.append(entry)
        return entry

    def _offer(self, message: Message) -> None:
        """Take a message that the state may know."""
        if not self._unread.is_settled(message.position):
            entry = self._append(message)
            self._restore(entry, self._unread.take(message.position))
            self._pending.bound_records(entry, self.limits.records_bytes_max)

    def _restore(self, entry: Entry, fact: Fact | None) -> None:
        """Give a message the deliveries that it had before a restart."""
        if fact is None:
            return
        entry.deliveries, entry.failures, entry.has_failed = fact.deliveries, fact.failures, fact.has_failed
        entry.last = (fact.run, fact.answer) if fact.run else None
        if fact.deadline:
            self._revive(entry, (fact.run, fact.answer), fact.deadline)
            self._timers.set(fact.deadline, fact.run, fact.answer)
        elif fact.not_before > entry.not_before:
            self._delay(entry, fact.not_before)

    def _revive(self, entry: Entry, answer: tuple[int, int], deadline: int) -> None:
        """Put a waiting message in flight again; or let it wait until the deadline, if a barrier holds it."""
        self._pending.revive(entry, *answer, deadline)
        if entry.state is _WAITING:
            self._timers.set(deadline, -1, entry.position)

    # --- receiving ---------------------------------------------------------------------------------------------------

    def receive(self, now: int, count: int) -> list[Delivery]:
        """Deliver messages; an empty list if none can be delivered now.

        Args:
            now: the time. Deliveries that have expired by then come back first.
            count: most messages of the answer.
        """
        self.expire(now)
        pending, limits = self._pending, self.limits
        count, free = min(count, limits.max_ack_pending - self.in_flight), pending.free + self._runs.free
        if count <= 0 or not free or self._phase is not Phase.ACTIVE or not self.is_restored:
            return []
        run, number, generation = self._run, self._answer_number, self._generation
        self._answer_number += 1
        deadline, left, last = now + limits.ack_wait_ms, limits.answer_bytes, (run, number)
        answer, counters = Answer(run, number), self.counters
        if not pending.free:
            alike = self._runs.deliver(DeliveryId(generation, 0, run, number), count, left, deadline)
            if alike is not None:
                counters.delivered += len(alike)
                self._timers.set(deadline, run, number)
                self._changes.append(Delivered(run, number, deadline, [one.message.position for one in alike]))
                return alike
        self._open()
        delivered: list[Delivery] = []
        while len(delivered) < count:
            entry = pending.next_free()
            if entry is None:
                break
            message = entry.message
            if message.size > left and delivered:
                pending.put_back(entry)
                break
            left -= message.size
            pending.take(entry, answer)
            entry.deliveries += 1
            if entry.deliveries == 1:
                counters.delivered += 1
            else:
                counters.redelivered += 1
            entry.last, entry.deadline, entry.has_failed = last, deadline, False
            delivery = DeliveryId(generation, entry.position, run, number)
            delivered.append(Delivery(message, entry.deliveries, delivery, entry.failures))
        pending.end_answer(answer)
        self._timers.set(deadline, run, number)
        self._changes.append(Delivered(run, number, deadline, list(answer.flying)))
        return delivered

    # --- settling ----------------------------------------------------------------------------------------------------

    def ack(self, ids: Iterable[DeliveryId]) -> list[Status]:
        """Settle messages; return the status of each."""
        ids = list(ids)
        count = self._runs.settle(ids)
        statuses = [Status.ACKED] * count
        settled = [delivery.position for delivery in ids[:count]]
        for delivery in ids[count:]:
            entry = self._pending.entries.get(delivery.position)
            if entry is not None and entry.last == delivery[2:] and delivery.generation == self._generation:
                status = Status.ACKED
            else:
                status, entry = self._find(delivery)
                if status is Status.DEAD:
                    self._drop_acked(delivery.position)
                    status = Status.ACKED
                elif status is Status.ACKED and entry is None:  # it isn't offered again so far
                    self._note_unread(Settled((delivery.position,), 1, is_unread=True))
            if entry is not None and self._settle(entry):
                count += 1
                settled.append(entry.position)
                if entry.replaced:
                    settled += entry.replaced
            statuses.append(status)
        if settled:
            self.counters.acked += count
            self._changes.append(Settled(settled, count))
        return statuses

    def nack(
        self,
        ids: Iterable[DeliveryId],
        now: int,
        *,
        delay_ms: int = 0,
        error: str = "it was nacked",
        counts: bool = True,
    ) -> list[Status]:
        """Return messages, and the later ones in flight of their groups; return the status of each.

        Args:
            ids: the deliveries that failed.
            now: the time.
            delay_ms: how long the messages wait, and their groups with them.
            error: the reason, which a dead letter keeps.
            counts: whether this is a failure of the messages.
        """
        statuses: list[Status] = []
        until = now + delay_ms if delay_ms else 0
        back = Back(until)
        for delivery in ids:
            status, entry = self._find(delivery)
            if status is Status.ACKED:
                status = Status.NACKED
                if entry is None:
                    failed = (delivery.position,) if counts else ()
                    self._note_unread(Returned((delivery.position,), failed, until))
                elif not counts:
                    if entry.state is _IN_FLIGHT:
                        back.returned += self._come_back(entry)
                else:
                    self._fail(entry, back, now, error)
                    if entry.state is _WAITING:
                        if entry.position != delivery.position and (until or entry.not_before):  # replaced
                            self._changes.append(Delayed((entry.position,), until))
                        self._delay(entry, until)
            statuses.append(status)
        self._note_back(back)
        return statuses

    def give_back(self, ids: Iterable[DeliveryId]) -> list[Status]:
        """Return messages as `nack`, at once, and without counting a failure: the client hasn't looked at them."""
        return self.nack(ids, 0, counts=False)

    def extend(self, ids: Iterable[DeliveryId], now: int, ack_wait_ms: int | None = None) -> list[Status]:
        """Let deliveries expire at another time, counted from now; return the status of each."""
        statuses: list[Status] = []
        deadline = now + (self.limits.ack_wait_ms if ack_wait_ms is None else ack_wait_ms)
        extended: dict[tuple[int, int], list[int]] = {}
        held: list[int] = []
        for delivery in ids:
            status, entry = self._find(delivery)
            if status is Status.ACKED:
                status = Status.EXTENDED
                if entry is None:
                    self._note_unread(Extended(delivery.run, delivery.answer, deadline, (delivery.position,)))
                else:
                    answer = delivery[2:]
                    if entry.answer is not None:
                        answer = entry.answer.run, entry.answer.number
                        entry.deadline = deadline
                    else:
                        entry.last = answer
                        self._revive(entry, answer, deadline)
                    extended.setdefault(answer, []).append(entry.position)
                    if entry.state is _WAITING:
                        held.append(entry.position)
            statuses.append(status)
        for (run, number), positions in extended.items():
            if (run, number) in self._pending.answers:
                self._timers.set(deadline, run, number)
            self._changes.append(Extended(run, number, deadline, positions))
        if held:
            self._changes += [Returned(held, ()), Delayed(held, deadline)]
        return statuses

    def _find(self, delivery: DeliveryId) -> tuple[Status, Entry | None]:
        """Return `ACKED` if the delivery counts, else why not, and its message if it was offered."""
        generation, position, run, number = delivery
        if generation != self._generation:
            return (Status.REWOUND if generation < self._generation else Status.UNKNOWN), None
        first = self._runs.first
        if first is not None and first.position <= position <= self._last:
            self._open()
        entry = self._pending.entries.get(position)
        if entry is not None:
            if entry.last is not None and (run, number) < entry.last:
                return Status.SUPERSEDED, None
            return Status.ACKED, entry
        if self._letters.at(position, generation) is not None:
            return Status.DEAD, None
        return (Status.ALREADY_ACKED if position <= self._last else self._unread.find(delivery)), None

    def _note_unread(self, change: Settled | Returned | Extended) -> None:
        """Note what happened to a message that the log wasn't read for so far."""
        self._unread.apply(change)
        self._changes.append(change)

    def _settle(self, entry: Entry) -> bool:
        """Settle a message that was acknowledged; return whether it holds the cursor and so is to be noted."""
        self._pending.remove(entry)
        if entry.is_retried:
            del self._letters.retried[entry.message.id]
            self.counters.acked += 1
            self._changes.append(Dropped((entry.message.id,), 1))
            return False
        self._order.note_gone()
        return True

    # --- failing -----------------------------------------------------------------------------------------------------

    def expire(self, now: int) -> int:
        """Return the deliveries that have expired by a time, and end the waits that are over.

        Returns:
            The number of messages that came back.
        """
        self._newest_time = max(self._newest_time, now)
        pending, back, count = self._pending, Back(0), 0
        while (timer := self._timers.pop_due(now)) is not None:
            _, run, number = timer
            if run < 0:
                entry = pending.entries.get(number)
                if entry is not None and 0 < entry.not_before <= now:
                    pending.delay(entry, 0)
                continue
            if (run, number) in self._runs.flying:
                self._open()
            answer = pending.answers.get((run, number))
            if answer is None:
                continue
            for entry in sorted(answer.flying.values(), key=attrgetter("position")):
                if entry.answer is not answer or entry.deadline > now:
                    continue  # it came back with an earlier one of its group, or was extended
                if all(group.is_first(entry) for group in entry.groups):
                    count += self._fail(entry, back, now, "it wasn't acknowledged in time")
                else:
                    came = self._come_back(entry)
                    back.returned += came
                    count += len(came)
        self._note_back(back)
        return count

    def _fail(self, entry: Entry, back: Back, now: int, error: str) -> int:
        """Count a failed delivery; return the message and the later ones of its groups, or bury it.

        Returns:
            The number of messages that came back.
        """
        came, position = [], entry.position
        if entry.state is _IN_FLIGHT:
            came = self._come_back(entry)
            back.returned += came
            if entry.position != position or entry.state is _GONE:
                return len(came)  # a newer one replaced it
        back.failed.append(position)
        if not entry.has_failed:
            entry.has_failed = True
            entry.failures += 1
            if 0 < self.limits.max_deliver <= entry.failures:
                self._note_back(back)
                self._bury(entry, DeadLetter(entry.message, entry.deliveries, error, now, self._generation))
        return len(came)

    def _come_back(self, entry: Entry) -> list[int]:
        """Return a message in flight, and the later ones of its groups; return their positions."""
        return [one.position for one in self._pending.come_back(entry)]

    def _bury(self, entry: Entry, letter: DeadLetter) -> None:
        """Make a message a dead letter: its group goes on."""
        self._pending.remove(entry)
        if not entry.is_retried:
            self._order.note_gone()
        if entry.replaced:
            self._changes.append(Settled(entry.replaced, 0))
        self._letters.add(letter)
        self._changes.append(Died(letter))

    def _note_back(self, back: Back) -> None:
        if back.returned or back.failed:
            self._changes.append(Returned(back.returned, back.failed, back.until))
            back.returned, back.failed = [], []

    # --- waking ------------------------------------------------------------------------------------------------------

    def next_wake(self) -> int | None:
        """Return the time at which `expire` has something to do; None if there is none."""
        return self._timers.next_time()

    def _delay(self, entry: Entry, until: int) -> None:
        self._pending.delay(entry, until)
        if until:
            self._timers.set(until, -1, entry.position)

    def _is_void(self, timer: Timer) -> bool:
        time, run, number = timer
        if run >= 0:
            return (run, number) not in self._pending.answers and (run, number) not in self._runs.flying
        entry = self._pending.entries.get(number)
        return entry is None or entry.not_before != time

    # --- steering ----------------------------------------------------------------------------------------------------

    def pause(self, reason: str | None = None) -> None:
        """Deliver nothing until `resume`. Acks count and deliveries expire. `phase_reason` has the reason until then."""
        if self._phase is Phase.ACTIVE:
            self._steer(Phase.PAUSED, reason)

    def resume(self) -> None:
        """Deliver again. A consumer that was cut off needs `rewind`."""
        if self._phase is Phase.PAUSED:
            self._steer(Phase.ACTIVE)

    def cut_off(self) -> None:
        """Note that retention passed the cursor: nothing is delivered until `rewind`, and no earlier delivery counts."""
        if self._phase is not Phase.CUT_OFF:
            self._begin_generation(self.cursor)
            self._steer(Phase.CUT_OFF)

    def rewind(self, cursor: int) -> None:
        """Begin behind another token, earlier or later. No earlier delivery counts, and `deliveries` begins at 1.

        Dead letters and counters stay. A retried message that isn't settled is a dead letter again.
        """
        self._begin_generation(cursor)
        if self._phase is Phase.CUT_OFF:
            self._steer(Phase.ACTIVE)

    def cut_back(self, end: int) -> bool:
        """Note where the log ends, after a promotion; return whether anything was known of records behind it.

        Then the cursor is at most there, and no earlier delivery counts.

        Args:
            end: the `seq` of the log's last operation.
        """
        if max(self._last, self._unread.upto, self._letters.last) <= position_of(end, 1):
            return False
        self._begin_generation(min(self.cursor, end), end)
        return True

    def hold(self, tables: Iterable[int]) -> None:
        """Deliver nothing of these tables, and of every other table again. It isn't part of the durable state."""
        if (held := frozenset(tables)) != self._pending.held:
            self._open()
            self._pending.hold(held)

    def _steer(self, phase: Phase, reason: str | None = None) -> None:
        self._phase, self.phase_reason = phase, reason
        self._changes.append(Steered(phase, reason))

    def _begin_generation(self, cursor: int, end: int | None = None) -> None:
        held = self._pending.held
        self._generation += 1
        self._runs = Runs()
        self._pending = Pending()
        self._pending.hold(held)
        self._order = Order()
        self._timers.clear()
        self._letters.begin_generation(self._generation, end)
        self._read_upto = self._noted_cursor = cursor
        self._last = position_of(cursor, 1)
        known = State.begin(cursor)
        known.counters = self.counters
        self._unread = Unread(known)
        self._changes.append(Rewound(self._generation, cursor, end))

    # --- durable state -----------------------------------------------------------------------------------------------

    def snapshot(self) -> State:
        """Return the state after all changes, taken or not: call `take_changes` first."""
        state = self._unread.behind(self._last)
        self._runs.note(state)
        for position, entry in self._pending.entries.items():
            if not entry.is_retried:
                state.open.add(position)
                state.open.update(entry.replaced)
            if entry.last is not None or entry.failures or entry.not_before:
                state.facts[position] = fact_of(entry)
        state.cursor, state.generation, state.run = self.cursor, self._generation, self._run
        state.phase, state.phase_reason = self._phase, self.phase_reason
        state.counters, state.time = replace(self.counters), self._noted_time
        state.dead, state.retried = dict(self._letters.dead), dict(self._letters.retried)
        return state
