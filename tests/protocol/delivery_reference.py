"""A consumer by brute force: every step looks at every message. The machine has to answer as it does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from millstream.protocol.delivery import DeliveryId, Limits, Message, Status


@dataclass(slots=True)
class Item:
    """A message that was offered."""

    message: Message
    deliveries: int = 0
    failures: int = 0
    last: tuple[int, int] | None = None
    flies_by: tuple[int, int] | None = None
    deadline: int = 0
    not_before: int = 0
    has_failed: bool = False
    is_retried: bool = False
    replaced: dict[int, tuple[int, int] | None] = field(default_factory=dict)
    """Delivered messages that it replaced, by position."""
    leaves: frozenset[int | None] = frozenset()
    """The partitions of the records that it stands for; see `delivery_latest`."""
    leaves_of_retried: frozenset[int | None] = frozenset()
    """Those of dead letters that were retried and that it replaced: a restart doesn't know them."""

    def __post_init__(self) -> None:
        self.leaves = self.leaves or frozenset({self.message.leaf})

    @property
    def position(self) -> int:
        return self.message.position


class Reference:
    """All messages that aren't settled, in a list by position; and the ids of dead ones."""

    def __init__(self, limits: Limits, cursor: int) -> None:
        self.limits = limits
        self.items: list[Item] = []
        self.offered_upto = self.read_upto = cursor
        """The last position, and the end of the last operation."""
        self.dead: dict[str, Message] = {}
        self.buried: dict[int, str] = {}
        """Ids of dead messages by the position at which they died in this generation."""
        self.overtaken: set[str] = set()
        """Ids of dead messages whose group has a newer one; see `delivery_latest`."""
        self.generation = 0
        self.is_active = True
        self.counts = [0, 0, 0]

    def copy(self) -> Reference:
        """Return the reference as a restart finds it."""
        made = type(self)(self.limits, 0)
        for name in ("offered_upto", "read_upto", "generation", "is_active"):
            setattr(made, name, getattr(self, name))
        made.items = [replace(item, replaced=dict(item.replaced), leaves_of_retried=frozenset()) for item in self.items]
        made.overtaken = set(self.overtaken)
        made.dead, made.buried, made.counts = dict(self.dead), dict(self.buried), list(self.counts)
        return made

    @property
    def cursor(self) -> int:
        befores = [item.message.before for item in self.items if not item.is_retried]
        return min(befores, default=self.read_upto)

    def offer(self, messages: Iterable[Message], upto: int) -> None:
        for message in messages:
            if message.position > self.offered_upto:
                self.offered_upto = message.position
                self.items.append(Item(message))
        self.items.sort(key=lambda item: item.position)
        self.read_upto = max(self.read_upto, upto)

    def receive(self, now: int, count: int, answer: tuple[int, int]) -> list[tuple[str, int]]:
        self.expire(now)
        taken: list[Item] = []
        size = 0
        count = min(count, self.limits.max_ack_pending - sum(item.flies_by is not None for item in self.items))
        for item in self.items if self.is_active else []:
            if len(taken) >= count:
                break
            if self._can_go(item, taken):
                size += item.message.size
                if taken and size > self.limits.answer_bytes:
                    break
                taken.append(item)
        for item in taken:
            item.deliveries += 1
            self.counts[item.deliveries > 1] += 1
            item.last = item.flies_by = answer
            item.deadline, item.not_before, item.has_failed = now + self.limits.ack_wait_ms, 0, False
        return [(item.message.id, item.deliveries) for item in taken]

    def _can_go(self, item: Item, taken: list[Item]) -> bool:
        if item.flies_by is not None or item.not_before:
            return False
        for other in self.items:
            if other is item:
                continue
            if _is_held(item, other):
                return False
            shares = set(item.message.groups) & set(other.message.groups)
            if shares and (other.position < item.position or other.flies_by is not None) and other not in taken:
                return False
        return True

    def expire(self, now: int) -> None:
        for item in self.items:
            if item.not_before and item.not_before <= now and item.flies_by is None:
                item.not_before = 0
        while True:
            due = [item for item in self.items if item.flies_by is not None and item.deadline <= now]
            if not due:
                return
            item = min(due, key=lambda item: (item.deadline, item.position))
            groups = set(item.message.groups)
            is_first = all(
                all(other.position >= item.position for other in self.items if group in other.message.groups)
                for group in groups
            )
            self._come_back(item)
            if is_first:
                self._fail(item)

    def _come_back(self, item: Item) -> None:
        item.flies_by = None
        for other in list(self.items):
            is_later = other.flies_by is not None and other.position > item.position
            if is_later and set(other.message.groups) & set(item.message.groups):
                self._come_back(other)

    def _fail(self, item: Item) -> None:
        if item.has_failed:
            return
        item.has_failed = True
        item.failures += 1
        if self.limits.max_deliver and item.failures >= self.limits.max_deliver:
            self.items.remove(item)
            self.dead.pop(item.message.id, None)
            self.dead[item.message.id] = item.message
            self.buried[item.position] = item.message.id

    def find(self, delivery: DeliveryId) -> tuple[Status, Item | None]:
        if delivery.generation < self.generation:
            return Status.REWOUND, None
        for item in self.items:
            if item.position == delivery.position:
                if item.last is not None and item.last > (delivery.run, delivery.answer):
                    return Status.SUPERSEDED, None
                return Status.ACKED, item
        if delivery.position in self.buried:
            return Status.DEAD, None
        return Status.ALREADY_ACKED, None

    def ack(self, ids: Iterable[DeliveryId]) -> list[Status]:
        statuses = []
        for delivery in ids:
            status, item = self.find(delivery)
            if status is Status.DEAD:
                del self.dead[self.buried.pop(delivery.position)]
                status = Status.ACKED
            elif item is not None:
                self.items.remove(item)
            self.counts[2] += status is Status.ACKED
            statuses.append(status)
        return statuses

    def nack(self, ids: Iterable[DeliveryId], until: int) -> list[Status]:
        statuses = []
        for delivery in ids:
            status, item = self.find(delivery)
            if item is not None:
                status = Status.NACKED
                if item.flies_by is not None:
                    self._come_back(item)
                item.not_before = until
                self._fail(item)
            statuses.append(status)
        return statuses

    def extend(self, ids: Iterable[DeliveryId], deadline: int) -> list[Status]:
        statuses = []
        for delivery in ids:
            status, item = self.find(delivery)
            if item is not None:
                status = Status.EXTENDED
                if item.flies_by is None:
                    item.last = (delivery.run, delivery.answer)
                    if any(_is_held(item, other) for other in self.items if other is not item):
                        item.not_before = deadline
                    else:
                        item.not_before, item.flies_by = 0, (delivery.run, delivery.answer)
                item.deadline = deadline
            statuses.append(status)
        return statuses

    def begin_generation(self, cursor: int, position: int) -> None:
        for item in self.items:
            if item.is_retried:
                self.dead[item.message.id] = item.message
        self.items, self.buried = [], {}
        self.generation += 1
        self.read_upto, self.offered_upto = cursor, position

    def retry(self, ids: Iterable[str]) -> None:
        for id_ in ids:
            message = self.dead.pop(id_)
            self.buried.pop(message.position, None)
            if message.position <= self.offered_upto and all(item.position != message.position for item in self.items):
                self.items.append(Item(message, is_retried=True))
        self.items.sort(key=lambda item: item.position)


def _is_held(item: Item, other: Item) -> bool:
    """Whether a barrier keeps a message behind another one."""
    if item.message.table is None or item.message.table != other.message.table or other.position > item.position:
        return False
    return other.message.barrier or item.message.barrier
