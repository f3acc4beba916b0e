"""Messages that are alike: they were offered together, nothing holds them back, and nothing is known of them.

A message needs an entry of its own (`Pending`) only if it shares a group with an unsettled message outside its run, if
its table has a barrier, or if it fails. All others are delivered and settled by the run. As soon as a step tells a
message apart, the caller makes entries of all of them: see `Consumer._open`. So all messages here are later than those
that have entries, except for retried ones, and no group is in both.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, islice, repeat
from operator import attrgetter
from typing import Any, Final

from millstream.protocol.delivery.messages import Delivery, DeliveryId, Message
from millstream.protocol.delivery.state import Fact, State

_is_barrier = attrgetter("barrier")
_as_id: Final[Callable[[Iterable[Any]], DeliveryId]] = partial(tuple.__new__, DeliveryId)
_as_delivery: Final[Callable[[Iterable[Any]], Delivery]] = partial(tuple.__new__, Delivery)
"""Return a tuple of all its fields; the class takes twice the time."""


class Flight:
    """The messages of one answer. Those before `done` are settled; at most as many as those in flight are kept."""

    __slots__ = ("deadline", "done", "ids", "messages")

    def __init__(self, messages: list[Message], ids: list[DeliveryId], deadline: int) -> None:
        self.messages = messages
        self.ids = ids
        self.deadline = deadline
        self.done = 0

    @property
    def unsettled(self) -> list[Message]:
        """The messages in flight."""
        return self.messages[self.done :]

    def forget(self) -> None:
        """Drop the settled messages."""
        del self.messages[: self.done], self.ids[: self.done]
        self.done = 0


class _Waiting:
    """Messages that were offered together and aren't delivered. A step costs the same however many there are."""

    __slots__ = ("_numbers", "free", "messages", "size")

    def __init__(self, messages: list[Message]) -> None:
        self.messages = deque(messages)
        self.size = sum([message.size for message in messages])
        self.free = _free(messages)
        """Number of messages that are the first ones of their groups."""
        self._numbers = _numbers(messages) if self.free < len(messages) else Counter()
        """Number of messages of each group; none if there is one of each."""

    def part(self, count: int) -> list[Message] | None:
        """Remove and return the first messages; None if one of their groups has later ones, which can't be delivered then."""
        head = list(islice(self.messages, count))
        if self._numbers:
            numbers = _numbers(head)
            if any(self._numbers[group] > number for group, number in numbers.items()):
                return None
            for group in numbers:
                del self._numbers[group]
        for _ in head:
            self.messages.popleft()
        self.free -= _free(head)
        self.size -= sum([message.size for message in head])
        return head


class Runs:
    """The messages without entries, in order: those in flight come before those that wait."""

    def __init__(self) -> None:
        self.flying: dict[tuple[int, int], Flight] = {}
        """Messages in flight, by run and number of their answer."""
        self.waiting: deque[_Waiting] = deque()
        self.groups: set[str] = set()
        """The groups of all messages, at least."""
        self.count = self.in_flight = self.free = 0
        """Numbers of messages that aren't settled, that are in flight, and that can be delivered."""

    @property
    def first(self) -> Message | None:
        """The first message that isn't settled."""
        flight = next(iter(self.flying.values()), None)
        if flight is not None:
            return flight.messages[flight.done]
        return self.waiting[0].messages[0] if self.waiting else None

    @property
    def waiting_bytes(self) -> int:
        """Size of the records of the messages that aren't delivered."""
        return sum([waiting.size for waiting in self.waiting])

    def offer(self, messages: list[Message], others: Mapping[str, object]) -> bool:
        """Take messages that are later than all others, unless one of them has to have an entry; return whether they are taken.

        Args:
            messages: at least one; no barrier holds them.
            others: the groups of the messages that have entries.
        """
        groups = _groups(messages)
        known = not (groups.isdisjoint(self.groups) and others.keys().isdisjoint(groups))
        if known or any(map(_is_barrier, messages)):
            return False
        waiting = _Waiting(messages)
        self.waiting.append(waiting)
        self.groups |= groups
        self.count += len(messages)
        self.free += waiting.free
        return True

    def deliver(self, answer: DeliveryId, count: int, size: int, deadline: int) -> list[Delivery] | None:
        """Deliver the first waiting messages; None if they have to have entries.

        Args:
            answer: the answer, with any position.
            count: most messages, at least one.
            size: most bytes of their records; the first one may be larger.
            deadline: when the deliveries expire.
        """
        taken: list[Message] = []
        wholes = free = 0
        for waiting in self.waiting:
            messages, room = waiting.messages, count - len(taken)
            fits = len(messages)
            if fits > room or waiting.size > size:
                sizes = accumulate([message.size for message in islice(messages, room)])
                fits = bisect_right(list(sizes), size) or (0 if taken else 1)
            if not fits:
                break
            if fits < len(messages):
                before, part = waiting.free, waiting.part(fits)
                if part is None:
                    return None
                taken += part
                free += before - waiting.free
                break
            taken += messages
            size -= waiting.size
            free += waiting.free
            wholes += 1
        for _ in range(wholes):
            self.waiting.popleft()
        generation, _, run, number = answer
        positions = [message.position for message in taken]
        ids = list(map(_as_id, zip(repeat(generation), positions, repeat(run), repeat(number), strict=False)))
        self.flying[run, number] = Flight(taken, ids, deadline)
        self.in_flight += len(taken)
        self.free -= free
        return list(map(_as_delivery, zip(taken, repeat(1), ids, repeat(0), strict=False)))

    def settle(self, ids: Sequence[DeliveryId]) -> int:
        """Settle the messages of these deliveries that are the first ones of their flights; return the number of leading ids."""
        settled = 0
        while settled < len(ids) and (flight := self.flying.get(ids[settled][2:])) is not None:
            own = flight.ids[flight.done : flight.done + len(ids) - settled]
            if own != ids[settled : settled + len(own)]:
                break
            settled += len(own)
            flight.done += len(own)
            if 2 * flight.done >= len(flight.ids):
                self.groups -= _groups(flight.messages)
                flight.forget()
                self.groups |= _groups(flight.messages)
                if not flight.ids:
                    del self.flying[ids[settled - 1][2:]]
        self.count -= settled
        self.in_flight -= settled
        return settled

    def note(self, state: State) -> None:
        """Note the messages in a consumer's state."""
        for (run, number), flight in self.flying.items():
            for message in flight.unsettled:
                state.open.add(message.position)
                state.facts[message.position] = Fact(deliveries=1, run=run, answer=number, deadline=flight.deadline)
        for waiting in self.waiting:
            state.open.update([message.position for message in waiting.messages])


def _groups(messages: Iterable[Message]) -> set[str]:
    return {group for message in messages for group in message.groups}


def _numbers(messages: Iterable[Message]) -> Counter[str]:
    return Counter([group for message in messages for group in message.groups])


def _free(messages: list[Message]) -> int:
    """Return the number of messages that are the first ones of their groups."""
    seen: set[str] = set()
    if len(_groups(messages)) == sum([len(message.groups) for message in messages]):
        return len(messages)
    free = 0
    for message in messages:
        free += seen.isdisjoint(message.groups)
        seen.update(message.groups)
    return free
