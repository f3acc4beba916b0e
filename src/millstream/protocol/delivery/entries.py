"""Messages that aren't settled, and what holds them back: their groups and the barriers of their tables."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from enum import IntEnum

from millstream.protocol.delivery.messages import Message
from millstream.protocol.delivery.state import Fact


class EntryState(IntEnum):
    """The states of a message that was offered."""

    WAITING = 0
    IN_FLIGHT = 1
    GONE = 2
    """Settled, dead, or forgotten by a rewind."""


class Answer:
    """An answer that has unsettled deliveries."""

    __slots__ = ("flying", "number", "run")

    def __init__(self, run: int, number: int) -> None:
        self.run = run
        self.number = number
        self.flying: dict[int, Entry] = {}
        """Messages in flight by this answer, by position."""


class Entry:
    """A message that isn't settled, with its deliveries."""

    __slots__ = (
        "answer",
        "before",
        "deadline",
        "deliveries",
        "failures",
        "groups",
        "has_failed",
        "is_queued",
        "is_released",
        "is_retried",
        "last",
        "message",
        "not_before",
        "older",
        "position",
        "replaced",
        "state",
    )

    def __init__(self, message: Message) -> None:
        self.message = message
        self.position = message.position
        self.before = message.before
        """The cursor, while this is the first message that isn't settled."""
        self.older: Entry | None = None
        """The unsettled message of its key before it, if that couldn't be replaced when this one came; see `latest`."""
        self.replaced: list[int] | tuple[()] = ()
        """Positions of older messages of its key, which are settled with it; see `latest`."""
        self.groups: tuple[Group, ...] = ()
        """Its groups, from when it is released."""
        self.state = EntryState.WAITING
        self.deliveries = 0
        self.failures = 0
        self.has_failed = False
        """Whether the last delivery was counted as failed."""
        self.last: tuple[int, int] | None = None
        """Run and number of the answer that delivered it last."""
        self.answer: Answer | None = None
        """The answer by which it is in flight."""
        self.deadline = 0
        """When its delivery expires, if it is in flight."""
        self.not_before = 0
        """When it may be delivered again; 0: at once."""
        self.is_queued = False
        """Whether it is in the queue of deliverable messages."""
        self.is_released = False
        """Whether no barrier of its table holds it; then it is in its groups."""
        self.is_retried = False
        """Whether it was dead; then its record lies with the caller, and it doesn't hold the cursor."""


class Back:
    """Messages that came back and aren't noted so far.

    Args:
        until: when those that failed may be delivered again; 0: at once.
    """

    def __init__(self, until: int) -> None:
        self.until = until
        self.returned: list[int] = []
        self.failed: list[int] = []


class Group:
    """The unsettled messages of one group that no barrier holds, in order."""

    __slots__ = ("_head", "_waiting", "flying", "name", "owner")

    def __init__(self, name: str) -> None:
        self.name = name
        self.flying: dict[int, Entry] = {}
        """Messages in flight, by position."""
        self.owner: Answer | None = None
        """The answer that made the first of `flying` fly."""
        self._waiting: list[Entry] = []
        self._head = 0
        """Number of leading items of `_waiting` that have left."""

    @property
    def first(self) -> Entry | None:
        """The first waiting message."""
        return self._waiting[self._head] if self._head < len(self._waiting) else None

    @property
    def is_empty(self) -> bool:
        """Whether the group has no unsettled message."""
        return not self.flying and self._head >= len(self._waiting)

    def insert(self, entry: Entry) -> None:
        """Add a waiting message at its place."""
        waiting, head = self._waiting, self._head
        if head == len(waiting) or waiting[-1].position < entry.position:
            waiting.append(entry)
            return
        place = bisect_left(waiting, entry.position, lo=head, key=_position)
        if place == head and head:
            self._head -= 1
            waiting[head - 1] = entry
        else:
            waiting.insert(place, entry)

    def remove(self, entry: Entry) -> None:
        """Remove a waiting message."""
        waiting, head = self._waiting, self._head
        if waiting[head] is not entry:
            place = bisect_left(waiting, entry.position, lo=head, key=_position)
            if waiting[place] is not entry:
                raise AssertionError(f"{entry.message.id} isn't waiting in its group")
            del waiting[place]
            return
        head += 1
        if head == len(waiting):
            waiting.clear()
            head = 0
        elif head > 64 and 2 * head > len(waiting):
            del waiting[:head]
            head = 0
        self._head = head

    def is_first(self, entry: Entry) -> bool:
        """Whether no unsettled message of the group is earlier than this one."""
        first, position = self.first, entry.position
        return (first is None or first.position >= position) and all(other >= position for other in self.flying)


def _position(entry: Entry) -> int:
    return entry.position


class Table:
    """The barriers of a table: `t` and `x` wait for all earlier messages and hold all later ones."""

    __slots__ = ("barriers", "live")

    def __init__(self) -> None:
        self.live = 0
        """Number of unsettled messages that no barrier holds."""
        self.barriers: deque[tuple[Entry, list[Entry]]] = deque()
        """Unsettled barriers in order, each with the messages that it holds and that no later barrier holds."""

    @property
    def next_barrier(self) -> Entry | None:
        """The barrier that is deliverable, if any: no unsettled message is before it."""
        return self.barriers[0][0] if self.barriers and not self.live else None


def fact_of(entry: Entry) -> Fact:
    """Return the durable facts of a message's deliveries."""
    run, answer = entry.last or (0, 0)
    return Fact(
        deliveries=entry.deliveries,
        failures=entry.failures,
        run=run,
        answer=answer,
        deadline=entry.deadline if entry.state is EntryState.IN_FLIGHT else 0,
        not_before=entry.not_before,
        has_failed=entry.has_failed,
    )
