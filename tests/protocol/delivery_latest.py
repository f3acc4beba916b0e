"""Worlds of a consumer of kind `latest`, and its reference by brute force.

python -m tests.protocol.delivery_latest FIRST COUNT
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import ClassVar

from tests.protocol.delivery_reference import Item, Reference
from tests.protocol.delivery_world import BARRIER_TABLE, World
from tests.seeds import main

from millstream.protocol.delivery import (
    Consumer,
    Delivery,
    DeliveryId,
    LatestConsumer,
    Message,
    Status,
    position_of,
    seq_of,
)
from millstream.protocol.delivery.latest import ENTRY_BYTES


class LatestReference(Reference):
    """The reference."""

    relied = floor = 0
    """As the machine has them."""

    def copy(self) -> Reference:
        made = super().copy()
        assert isinstance(made, LatestReference)
        made.relied, made.floor = self.relied, self.floor
        return made

    @property
    def cursor(self) -> int:
        cursor = super().cursor
        return self.floor if cursor < self.relied else cursor

    def begin_generation(self, cursor: int, position: int) -> None:
        super().begin_generation(cursor, position)
        self.relied = 0

    def drop_older(self, newer: list[Message], upto: int) -> list[Message]:
        """Drop what was never delivered and has a newer message, or a truncate; return it."""
        dropped = []
        for item in self.items:
            message = item.message
            is_known = item.last or item.not_before or item.failures or any(item.replaced.values())
            if message.barrier or item.is_retried or is_known:
                continue
            if any(one.groups == message.groups != () and one.position < item.position for one in self.items_()):
                continue
            if any(
                (one.groups == message.groups != () and _leaf(item) == one.leaf) or _takes(one, item) for one in newer
            ):
                dropped.append(item)
        if dropped:
            self.rely_on(upto)
            self.items = [item for item in self.items if item not in dropped]
        return [item.message for item in dropped]

    def rely_on(self, upto: int) -> None:
        """Let the cursor stay until everything up to there is settled: messages are dropped for newer ones."""
        self.floor = self.cursor if self.cursor >= self.relied else self.floor
        self.relied = max(self.relied, upto)

    def items_(self) -> list[Message]:
        """Return the messages that aren't settled."""
        return [item.message for item in self.items]

    def offer(self, messages: Iterable[Message], upto: int) -> None:
        for message in messages:
            if message.position <= self.offered_upto:
                continue
            if message.truncates:
                kept = [item for item in self.items if not self._is_dropped(item, message)]
                if len(kept) < len(self.items):
                    self.rely_on(seq_of(message.position))
                self.items = kept
                self._join()
            super().offer([message], 0)
            for item in list(self.items):
                self._replaced(item, by=message)
            self.overtaken |= {
                id_
                for id_, dead in self.dead.items()
                if dead.groups == message.groups != () and dead.position < message.position
            }
        self.read_upto = max(self.read_upto, upto)

    @staticmethod
    def _is_dropped(item: Item, truncate: Message) -> bool:
        return item.position < truncate.position and item.flies_by is None and _takes(truncate, item)

    def _replaced(self, older: Item, by: Message | None = None) -> Item:
        """Replace a waiting message by the newest one, or by a given one, that waits in the same stretch of its table."""
        if older.flies_by is not None or not older.message.groups:
            return older
        barriers = [
            item.position for item in self.items if item.message.barrier and item.message.table == older.message.table
        ]
        for item in list(self.items):
            if by is not None and item.position != by.position:
                continue
            if (
                item.flies_by is not None
                or item.message.groups != older.message.groups
                or item.position <= older.position
            ):
                continue
            if any(older.position < barrier < item.position for barrier in barriers):
                continue
            self.items.remove(older)
            if older.is_retried:
                item.leaves_of_retried |= older.leaves
            else:
                item.leaves |= older.leaves
            item.leaves_of_retried |= older.leaves_of_retried
            if not older.is_retried:
                item.message = item.message._replace(before=older.message.before)
                item.replaced |= older.replaced | ({older.position: older.last} if older.last else {})
            item.not_before = item.not_before if older.is_retried else max(item.not_before, older.not_before)
            return item
        return older

    def _come_back(self, item: Item) -> None:
        super()._come_back(item)
        for other in self.items:
            if other.message.truncates and other is not item and self._is_dropped(item, other.message):
                self.rely_on(seq_of(other.position))
                self.items.remove(item)
                return
        self._replaced(item)

    def ack(self, ids: Iterable[DeliveryId]) -> list[Status]:
        statuses = []
        for delivery in ids:
            acked = next((item for item in self.items if item.position == delivery.position), None)
            dead = self.dead.get(self.buried.get(delivery.position, ""))
            statuses += super().ack([delivery])
            if statuses[-1] is Status.ACKED and (ended := acked or (dead and Item(dead))):
                is_barrier = ended.message.barrier or any(item.message.barrier for item in self.items)
                self._void_before(ended)
                if is_barrier:
                    self._join()
        return statuses

    def _join(self) -> None:
        """Replace what waits and no barrier parts from a newer message."""
        for item in list(self.items):
            if item in self.items:
                self._replaced(item)

    def _void_before(self, ended: Item, *, is_acked: bool = True) -> None:
        """Drop what is older than a message that ended.

        If it was acknowledged, so are truncates of its row before it, and what they take.
        """
        self.items = [item for item in self.items if not self._is_void(item, ended)]
        if not is_acked:
            return
        older = [
            item
            for item in self.items
            if item.message.truncates and item.message.table == ended.message.table and item.position < ended.position
        ]
        for truncate in older:
            leaf = truncate.message.leaf
            may_take = leaf is None or _leaf(ended) in {None, leaf}
            if may_take and not ended.message.truncates:
                self.items = [item for item in self.items if not self._is_void(item, truncate)]

    @staticmethod
    def _is_void(item: Item, acked: Item) -> bool:
        """Whether a message is older than one that was acknowledged, of its key or a truncate that takes it."""
        if item.position > acked.position:
            return False
        if acked.message.truncates:
            return _takes(acked.message, item)
        return item.message.groups == acked.message.groups != ()

    def _fail(self, item: Item) -> None:
        if item not in self.items:
            return
        super()._fail(item)
        if item not in self.items:
            self.dead[item.message.id] = item.message._replace(leaf=_leaf(item))
            self.overtaken.discard(item.message.id)
            self._void_before(item, is_acked=False)
            if item.message.barrier:
                self._join()

    def nack(self, ids: Iterable[DeliveryId], until: int) -> list[Status]:
        statuses = []
        for delivery in ids:
            group = next((item.message.groups for item in self.items if item.position == delivery.position), ())
            statuses += super().nack([delivery], until)
            is_there = any(item.position == delivery.position for item in self.items)
            if statuses[-1] is Status.NACKED and not is_there and group and delivery.position not in self.buried:
                for item in self.items:
                    if item.message.groups == group and delivery.position in item.replaced:
                        item.not_before = until
        return statuses

    def find(self, delivery: DeliveryId) -> tuple[Status, Item | None]:
        status, item = super().find(delivery)
        if status is Status.ALREADY_ACKED and any(delivery.position in item.replaced for item in self.items):
            status = Status.SUPERSEDED
        return status, item

    def retry(self, ids: Iterable[str]) -> None:
        newer: set[tuple[str, ...]] = set()
        """Groups of which a newer message is delivered again, now or once it is read again."""
        for id_ in sorted(ids, key=lambda id_: -self.dead[id_].position):
            groups = self.dead[id_].groups
            if (
                id_ in self.overtaken
                or groups in newer
                or any(item.message.groups == groups != () for item in self.items)
            ):
                self.buried.pop(self.dead.pop(id_).position, None)
            else:
                if groups:
                    newer.add(groups)
                super().retry([id_])


def _leaf(item: Item) -> int | None:
    """Return the one partition of a message's records; None if there are several, or it isn't known."""
    leaves = item.leaves | item.leaves_of_retried
    return next(iter(leaves)) if len(leaves) == 1 else None


def _takes(truncate: Message, item: Item) -> bool:
    """Whether a truncate, or an `x`, makes a message void if it is older."""
    if not truncate.truncates or truncate.table != item.message.table:
        return False
    if item.message.barrier and not item.message.truncates:
        return False
    return truncate.leaf is None or _leaf(item) == truncate.leaf


class LatestWorld(World):
    """A world drawn from a seed."""

    consumer_type: ClassVar[type[Consumer]] = LatestConsumer
    reference_type: ClassVar[type[Reference]] = LatestReference
    read_to = 0
    """The greatest position that was read, or looked at."""
    dropped: list[Message]
    """Messages that were dropped since the log had newer ones."""
    shown: list[Message]
    """Messages that clients were given."""

    def __init__(self, seed: int, *, pick: Callable[[int], int] | None = None) -> None:
        super().__init__(seed, pick=pick)
        self.has_leaves = bool(self.pick(2))
        """Whether a table is partitioned: its rows have partitions, and some of its barriers are an `x`."""

    def actions(self) -> list[tuple[str, Callable[[], None]]]:
        return [*super().actions(), ("look", self.look)]

    def look(self) -> None:
        """Look for newer messages in the rest of the log, and drop what was never delivered."""
        newer = [message for message in self.messages() if message.position > self.consumer._last]
        if not newer or not self.consumer.is_restored:
            return
        groups = {(message.groups[0], message.leaf) for message in newer if message.groups}
        tables = {(message.table, message.leaf) for message in newer if message.truncates and message.table is not None}
        self.consumer.expire(self.now)
        self.reference.expire(self.now)
        before = set(self.consumer._pending.entries)
        self.consumer.drop_older(groups, tables, self.end)
        self.reference.drop_older(newer, self.end)
        self.note_dropped(before)
        self.read_to = max(self.read_to, position_of(self.end, 1))

    def offer_part(self, messages: list[Message], upto: int) -> None:
        before = set(self.consumer._pending.entries)
        super().offer_part(messages, upto)
        self.read_to = max(self.read_to, self.consumer._last)
        self.note_dropped(before)

    def note_dropped(self, before: set[int]) -> None:
        """Note the messages that were there before and aren't any longer."""
        gone = before - self.consumer._pending.entries.keys()
        self.counts["dropped"] += len(gone)
        self.dropped = [*getattr(self, "dropped", []), *(one for one in self.messages() if one.position in gone)]

    def promote(self) -> None:
        super().promote()
        for message in getattr(self, "dropped", []):
            is_there = message in self.messages()
            if is_there and message.position <= position_of(self.consumer.cursor, 1) and not self.is_seen(message):
                self.broken(f"{message.id} was dropped, the log has lost the newer ones, and it isn't read again")
        # The consumer may have newer states of keys than the log: it isn't given the older ones again.
        self.done |= {one.id for one in self.messages() if one.position <= position_of(self.consumer.cursor, 1)}
        self.read_to = min(self.read_to, position_of(self.end, 1))

    def is_seen(self, message: Message) -> bool:
        """Whether the log has a newer message of a message's key, or a client was given one, or a rewind skipped it.

        It may also have been read again since it was dropped, and be a dead letter now.
        """
        newer = [*self.messages(), *getattr(self, "shown", [])]
        return message.id in self.done | self.consumer.dead.keys() or any(
            other.position > message.position and (other.groups == message.groups or _takes(other, Item(message)))
            for other in newer
        )

    def message(self, position: int, before: int) -> Message:
        message = super().message(position, before)
        groups = message.groups[:1] or ((f"{message.table}:0",) if not message.barrier and message.table else ())
        truncates = message.barrier and bool(self.pick(2))
        table = message.table or BARRIER_TABLE
        has_leaf = self.has_leaves and table == BARRIER_TABLE and (truncates or not message.barrier)
        leaf = (None, 11, 12)[self.pick(3)] if has_leaf else None
        return message._replace(groups=groups, truncates=truncates, table=table, leaf=leaf)

    def is_over(self, id_: str) -> bool:
        return super().is_over(id_) or self.is_replaced(id_)

    def is_replaced(self, id_: str) -> bool:
        """Whether a newer message of the key, or a truncate, stands for a message.

        A row that was acknowledged stands for a truncate before it, too. It was delivered once the truncate was settled
        or dead, which a kill may have forgotten: delivered again, the truncate would take the row away.
        """
        if not hasattr(self, "consumer"):
            return False
        message = next(message for message in self.messages() if message.id == id_)
        if message.barrier and not message.truncates:
            return False
        last = self.read_to = max(self.read_to, self.consumer._last)
        return any(
            message.position < other.position <= last
            and other.table == message.table
            and (
                _takes(other, Item(message))
                or (other.groups == message.groups and not message.barrier)
                or (message.truncates and other.id in self.noted)
            )
            for other in self.messages()
        )

    def check(self) -> None:
        """Check also that memory is counted right."""
        super().check()
        size = sum(ENTRY_BYTES + entry.message.size for entry in self.consumer._pending.entries.values())
        if self.consumer.waiting_bytes != size:
            self.broken(f"{self.consumer.waiting_bytes} bytes are counted, and {size} wait")

    def check_answer(self, answer: list[Delivery]) -> None:
        """Check an answer, and that no key goes back: a newer one that was acknowledged is the last.

        A truncate takes the rows of all keys away, and an `x` those of its partition, so it isn't delivered after an
        acknowledged row behind it.
        """
        super().check_answer(answer)
        keys = [one.message.groups for one in answer if one.message.groups]
        if len(set(keys)) < len(keys):
            self.broken(f"a key stands twice in an answer: {keys}")
        self.shown = [*getattr(self, "shown", []), *(delivery.message for delivery in answer)]
        for delivery in answer:
            message = delivery.message
            if message.id in self.consumer.retried:
                continue
            for other in self.messages():
                is_same = other.groups == message.groups != () or (
                    not other.barrier and message.truncates and _takes(message, Item(other))
                )
                if is_same and other.position > message.position and self.noted.get(other.id, 10**9) <= len(self.log):
                    self.broken(f"{message.id} is delivered after {other.id} of its key, which was acknowledged")


if __name__ == "__main__":
    sys.exit(main(LatestWorld, sys.argv[1:]))
