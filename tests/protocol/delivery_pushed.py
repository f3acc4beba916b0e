"""Worlds of a consumer with a push sink: deliveries are also repeated in place, buried, and taken from a lost receiver.

python -m tests.protocol.delivery_pushed FIRST COUNT
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import ClassVar

from tests.mutations import Mutation
from tests.protocol.delivery_reference import Item, Reference
from tests.protocol.delivery_world import World
from tests.seeds import main

from millstream.protocol.delivery import Consumer, DeliveryId, Died
from millstream.protocol.delivery.state_changes import Delivered


class PushedReference(Reference):
    """The same by brute force."""

    def redeliver(self, ids: Iterable[DeliveryId], deadline: int) -> bool:
        items: list[Item] = []
        for delivery in dict.fromkeys(ids):
            _, item = self.find(delivery)
            if item is None or item.flies_by is None:
                return False
            items.append(item)
        for item in items:
            item.failures += not item.has_failed
            item.deliveries += 1
            item.deadline, item.has_failed = deadline, False
            self.counts[item.deliveries > 1] += 1
        return True

    def bury(self, ids: Iterable[DeliveryId]) -> None:
        for delivery in ids:
            _, item = self.find(delivery)
            if item is not None:
                if item.flies_by is not None:
                    self._come_back(item)
                self.items.remove(item)
                self.dead.pop(item.message.id, None)
                self.dead[item.message.id] = item.message
                self.buried[item.position] = item.message.id

    def return_all(self) -> None:
        for item in self.items:
            item.flies_by = None


class PushedWorld(World):
    """A world with a pusher's steps, too."""

    reference_type: ClassVar[type[Reference]] = PushedReference
    reference: PushedReference

    def actions(self) -> list[tuple[str, Callable[[], None]]]:
        pushed = [("redeliver", self.redeliver)] * 4 + [("bury", self.bury), ("return all", self.return_all)]
        return super().actions() + pushed

    def redeliver(self) -> None:
        """Repeat some deliveries."""
        ids, wait = self.chosen(), 20 + self.pick(3) * 70
        if not self.pick(2):
            ids = [one for one in ids if self._flies(one)]
        is_done = self.consumer.redeliver(ids, self.now, wait)
        expected = self.reference.redeliver(ids, self.now + wait)
        self.counts[f"redelivered {is_done and bool(ids)}"] += 1
        if self.exact and is_done != expected:
            self.broken(f"a repetition returned {is_done}")

    def _flies(self, delivery: DeliveryId) -> bool:
        _, entry = self.consumer._find(delivery)
        return entry is not None and entry.answer is not None and entry.last == delivery[2:]

    def bury(self) -> None:
        """Bury some messages."""
        ids = self.chosen()[:2]
        self.consumer.bury(ids, self.now, error="400")
        self.reference.bury(ids)

    def return_all(self) -> None:
        """Return what a lost receiver had, as a new pusher does."""
        while not self.consumer.is_restored and self.offer():
            pass
        self.consumer.return_all()
        self.reference.return_all()


class RepetitionsAreForgotten(PushedWorld):
    """Repeated deliveries aren't stored."""

    found_by = 2

    class consumer_type(Consumer):  # noqa: N801 - the attribute's name
        def redeliver(self, ids: Iterable[DeliveryId], now: int, ack_wait_ms: int) -> bool:
            count = len(self._changes)
            is_done = super().redeliver(ids, now, ack_wait_ms)
            self._changes[count:] = [one for one in self._changes[count:] if not isinstance(one, Delivered)]
            return is_done


class APartIsRepeated(PushedWorld):
    """If some deliveries don't count any longer, the others are repeated all the same."""

    found_by = 5

    class consumer_type(Consumer):  # noqa: N801 - the attribute's name
        def redeliver(self, ids: Iterable[DeliveryId], now: int, ack_wait_ms: int) -> bool:
            done = [super(APartIsRepeated.consumer_type, self).redeliver([one], now, ack_wait_ms) for one in ids]
            return all(done)


class BurialsAreForgotten(PushedWorld):
    """Burials aren't stored."""

    found_by = 10

    class consumer_type(Consumer):  # noqa: N801 - the attribute's name
        def bury(self, ids: Iterable[DeliveryId], now: int, *, error: str) -> None:
            count = len(self._changes)
            super().bury(ids, now, error=error)
            self._changes[count:] = [one for one in self._changes[count:] if not isinstance(one, Died)]


class ALostReceiverKeepsItsMessages(PushedWorld):
    """Messages of a receiver that is gone stay in flight."""

    found_by = 5

    class consumer_type(Consumer):  # noqa: N801 - the attribute's name
        def return_all(self) -> None:
            self.take_changes()


PUSHED: tuple[type[Mutation], ...] = (
    RepetitionsAreForgotten, APartIsRepeated, BurialsAreForgotten, ALostReceiverKeepsItsMessages,
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(PushedWorld, sys.argv[1:]))
