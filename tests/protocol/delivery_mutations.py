"""Defects of a consumer's machine. Each is a world with a machine that does one thing wrongly; a seed finds it.

python -m tests.protocol.delivery_mutations [NAME…]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tests.mutations import Mutation, main
from tests.protocol.delivery_latest import LatestWorld
from tests.protocol.delivery_leaves import LeavesWorld
from tests.protocol.delivery_world import World

from millstream.protocol.delivery import Change, Consumer, DeliveryId, LatestConsumer, Limits, Message, State, Status
from millstream.protocol.delivery import state_changes as kinds
from millstream.protocol.delivery.dead_letter_index import DeadLetters
from millstream.protocol.delivery.delivery_order import Pending
from millstream.protocol.delivery.entries import Answer, Entry, EntryState, Group
from millstream.protocol.delivery.runs import Runs, _Waiting
from millstream.protocol.delivery.unread_after_restart import Unread

SEEDS_MAX = 2000


def _wrong(pending: type[Pending] = Pending, unread: type[Unread] = Unread) -> type[Consumer]:
    """Return a consumer's type whose parts are of other types."""

    class Wrong(Consumer):
        def __init__(self, limits: Limits, state: State, *, run: int, now: int = 0) -> None:
            super().__init__(limits, state, run=run, now=now)
            self._pending.__class__ = pending
            self._unread.__class__ = unread

        def _begin_generation(self, cursor: int, end: int | None = None) -> None:
            super()._begin_generation(cursor, end)
            self._pending.__class__ = pending
            self._unread.__class__ = unread

    return Wrong


def _without(kind: type[Any]) -> type[Consumer]:
    """Return a consumer's type that doesn't store a kind of changes."""

    class Silent(Consumer):
        def take_changes(self) -> list[Change]:
            return [change for change in super().take_changes() if not isinstance(change, kind)]

    return Silent


class CursorAtTheEnd(World):
    """The cursor is where the log was read to."""

    found_by = 1

    class consumer_type(Consumer):  # noqa: N801 - the attribute's name
        @property
        def cursor(self) -> int:
            return self._read_upto


class LonelyPending(Pending):
    def come_back(self, entry: Entry) -> list[Entry]:
        others = [other for group in entry.groups for other in group.flying.values() if other is not entry]
        for other in others:
            for group in other.groups:
                group.flying.pop(other.position)
        came = super().come_back(entry)
        for other in others:
            for group in other.groups:
                group.flying[other.position] = other
        return came


class OnlyItselfReturns(World):
    """A nack doesn't return the later messages of its group."""

    found_by = 3
    consumer_type = _wrong(LonelyPending)


class HastyPending(Pending):
    def _is_free(self, entry: Entry, answer: Answer | None) -> bool:
        owners = [(group, group.owner) for group in entry.groups]
        for group, _ in owners:
            group.owner = answer
        free = super()._is_free(entry, answer)
        for group, owner in owners:
            group.owner = owner
        return free


class TwoAnswersInFlight(World):
    """A group in flight is delivered in another answer."""

    found_by = 2
    consumer_type = _wrong(HastyPending)


class NoBarrierPending(Pending):
    def add(self, message: Message) -> Entry:
        return super().add(message._replace(barrier=False))


class BarriersHoldNothing(World):
    """Later messages pass a truncate."""

    found_by = 5
    consumer_type = _wrong(NoBarrierPending)


class NeighboursDie(World):
    """An expiry counts for each message of a group."""

    found_by = 25

    class consumer_type(Consumer):  # noqa: N801 - the attribute's name
        def expire(self, now: int) -> int:
            first, Group.is_first = Group.is_first, lambda _group, _entry: True  # type: ignore[method-assign]
            try:
                return super().expire(now)
            finally:
                Group.is_first = first  # type: ignore[method-assign]


class CountedTwice(World):
    """A nack after an expiry counts once more."""

    found_by = 7

    class consumer_type(Consumer):  # noqa: N801 - the attribute's name
        def _fail(self, entry: Entry, *arguments: Any) -> int:
            entry.has_failed = False
            return super()._fail(entry, *arguments)


class OlderAcksCount(World):
    """An ack counts though the message was delivered again."""

    found_by = 7

    class consumer_type(Consumer):  # noqa: N801 - the attribute's name
        def ack(self, ids: Iterable[Any]) -> Any:
            return super().ack([one._replace(run=1 << 40) for one in ids])


class AcksOutliveARewind(World):
    """An ack from before a rewind counts."""

    found_by = 5

    class consumer_type(Consumer):  # noqa: N801 - the attribute's name
        def ack(self, ids: Iterable[Any]) -> Any:
            return super().ack([one._replace(generation=self.generation) for one in ids])


class OneRun(World):
    """A restart names its deliveries as the run before did."""

    found_by = 1

    class consumer_type(Consumer):  # noqa: N801 - the attribute's name
        def __init__(self, limits: Limits, state: State, *, run: int, now: int = 0) -> None:
            super().__init__(limits, state, run=run, now=now)
            self._run = 1
            self._true_run = run

        def snapshot(self) -> State:
            state = super().snapshot()
            state.run = self._true_run
            return state


class WaitsForTheOldClock(World):
    """After a restart with a clock that was set back, messages wait until it shows again what it showed before."""

    found_by = 6

    class consumer_type(Consumer):  # noqa: N801 - the attribute's name
        def __init__(self, limits: Limits, state: State, *, run: int, now: int = 0) -> None:
            del now
            super().__init__(limits, state, run=run)


class AcksNotStored(World):
    """Acks aren't durable."""

    found_by = 1
    consumer_type = _without(kinds.Settled)


class DeliveriesNotStored(World):
    """Deliveries aren't durable."""

    found_by = 1
    consumer_type = _without(kinds.Delivered)


class DeathsNotStored(World):
    """Dead letters aren't durable."""

    found_by = 1
    consumer_type = _without(kinds.Died)


class ReturnsNotStored(World):
    """Failures aren't durable."""

    found_by = 1
    consumer_type = _without(kinds.Returned)


class NothingRemembered(Unread):
    def is_settled(self, position: int) -> bool:
        return position < 0


class HolesForgotten(World):
    """A restart delivers everything behind the cursor."""

    found_by = 1
    consumer_type = _wrong(unread=NothingRemembered)


class OldLetters(DeadLetters):
    def at(self, position: int, generation: int) -> str | None:
        return next((id_ for (at, since), id_ in self._ids.items() if at == position and since <= generation), None)


class LettersOfAnyGeneration(World):
    """An ack removes the dead letter of an earlier generation."""

    found_by = 13

    class consumer_type(Consumer):  # noqa: N801 - the attribute's name
        def __init__(self, limits: Limits, state: State, *, run: int, now: int = 0) -> None:
            super().__init__(limits, state, run=run, now=now)
            self._letters.__class__ = OldLetters


class DeliversBeforeItHasRead(World):
    """A restart delivers before it knows what is in flight."""

    found_by = 336

    class consumer_type(Consumer):  # noqa: N801 - the attribute's name
        @property
        def is_restored(self) -> bool:
            return True


class DeathsHoldTheirGroup(World):
    """A dead message's group doesn't go on."""

    found_by = 3

    class consumer_type(Consumer):  # noqa: N801 - the attribute's name
        def _bury(self, entry: Entry, letter: Any) -> None:
            super()._bury(entry, letter)
            for group in entry.groups:
                if group.first is not None:
                    self._pending._dequeue(group.first)


class PromotionKeepsAcks(World):
    """A promotion that lost records doesn't void the ids of their deliveries."""

    found_by = 5

    class consumer_type(Consumer):  # noqa: N801 - the attribute's name
        def cut_back(self, end: int) -> bool:
            before = self._generation
            is_cut = super().cut_back(end)
            self._generation = before
            return is_cut


def _with_runs(runs: type[Runs]) -> type[Consumer]:
    """Return a consumer's type whose runs are of another type."""

    class Wrong(Consumer):
        def offer(self, messages: Iterable[Message], upto: int) -> None:
            self._runs.__class__ = runs
            super().offer(messages, upto)

    return Wrong


class GroupsInTwoRuns(World):
    """A message is offered as a part of a run though its group has an unsettled message elsewhere."""

    found_by = 2

    class runs(Runs):  # noqa: N801 - a mutation's part
        def offer(self, messages: list[Message], others: Any) -> bool:
            self.groups.clear()
            return super().offer(messages, others and {})

    consumer_type = _with_runs(runs)


class TruncatesInRuns(World):
    """A truncate is delivered as a part of a run."""

    found_by = 5

    class runs(Runs):  # noqa: N801 - a mutation's part
        def offer(self, messages: list[Message], others: Any) -> bool:
            return super().offer([message._replace(barrier=False) for message in messages], others)

    consumer_type = _with_runs(runs)


class PartedWaiting(_Waiting):
    __slots__ = ()

    def part(self, count: int) -> list[Message] | None:
        self._numbers.clear()
        return super().part(count)


class GroupsArePartedByAnAnswer(World):
    """A run is parted though one of its groups has messages in both parts."""

    found_by = 37

    class runs(Runs):  # noqa: N801 - a mutation's part
        def deliver(self, *arguments: Any) -> Any:
            for waiting in self.waiting:
                waiting.__class__ = PartedWaiting
            return super().deliver(*arguments)

    consumer_type = _with_runs(runs)


class AcksOfARunAreCounted(World):
    """An acknowledgement settles as many messages of its answer, whichever it names."""

    found_by = 40

    class runs(Runs):  # noqa: N801 - a mutation's part
        def settle(self, ids: Any) -> int:
            flight = self.flying.get(ids[0][2:]) if ids else None
            return super().settle(ids if flight is None else flight.ids[flight.done : flight.done + len(ids)])

    consumer_type = _with_runs(runs)


class RunsForgetDeliveries(World):
    """A snapshot has no deliveries of runs."""

    found_by = 8

    class runs(Runs):  # noqa: N801 - a mutation's part
        def note(self, state: State) -> None:
            super().note(state)
            for flight in self.flying.values():
                for message in flight.unsettled:
                    del state.facts[message.position]

    consumer_type = _with_runs(runs)


class RunsDoNotExpire(World):
    """Deliveries by the run have no end."""

    found_by = 24

    class consumer_type(Consumer):  # noqa: N801 - the attribute's name
        def _is_void(self, timer: Any) -> bool:
            return timer.run >= 0 and (timer.run, timer.number) not in self._pending.answers


class NewerWaits(LatestWorld):
    """A newer message doesn't replace one that comes back."""

    found_by = 4

    class consumer_type(LatestConsumer):  # noqa: N801 - the attribute's name
        def _come_back(self, entry: Entry) -> list[int]:
            return Consumer._come_back(self, entry)


class TruncateKeepsRows(LatestWorld):
    """A truncate drops nothing."""

    found_by = 13

    class consumer_type(LatestConsumer):  # noqa: N801 - the attribute's name
        def _offer(self, message: Message) -> None:
            super()._offer(message._replace(truncates=False))


class ReplacedNotSettled(LatestWorld):
    """A restart delivers an older message after a newer one of its key that was acknowledged."""

    found_by = 1

    class consumer_type(LatestConsumer):  # noqa: N801 - the attribute's name
        def _replace(self, entry: Entry, message: Message, fact: Any = None) -> None:
            super()._replace(entry, message, fact)
            entry.replaced = []


class ReplacedHoldsNothing(LatestWorld):
    """The cursor passes a message that a newer one replaced, before that one is settled."""

    found_by = 2

    class consumer_type(LatestConsumer):  # noqa: N801 - the attribute's name
        def _replace(self, entry: Entry, message: Message, fact: Any = None) -> None:
            super()._replace(entry, message, fact)
            entry.before = message.before


class RetriedThoughOvertaken(LatestWorld):
    """A dead letter is delivered though its key has a newer message."""

    found_by = 150

    class consumer_type(LatestConsumer):  # noqa: N801 - the attribute's name
        def _overtake(self, group: str, position: int) -> None:
            super()._overtake(group, min(position, 0))


class OldAckCounts(LatestWorld):
    """An ack of a replaced message is taken for one of a settled message."""

    found_by = 5

    class consumer_type(LatestConsumer):  # noqa: N801 - the attribute's name
        def _find(self, delivery: DeliveryId) -> tuple[Status, Entry | None]:
            return Consumer._find(self, delivery)


class DroppedHoldsNothing(LatestWorld):
    """The cursor passes messages that were dropped before the newer ones are settled."""

    found_by = 5

    class consumer_type(LatestConsumer):  # noqa: N801 - the attribute's name
        @property
        def cursor(self) -> int:
            return Consumer.cursor.fget(self)  # type: ignore[attr-defined, no-any-return]


class DropsDelivered(LatestWorld):
    """A message that was delivered is dropped, and its deliveries with it."""

    found_by = 5

    class consumer_type(LatestConsumer):  # noqa: N801 - the attribute's name
        def _was_never_seen(self, entry: Entry) -> bool:
            return entry.state is EntryState.WAITING and not entry.message.barrier and not entry.is_retried


class NewestPartitionAlone(LeavesWorld):
    """An `x` drops a message by its newest record's partition, though the receiver has its row as another one's."""

    found_by = 7

    class consumer_type(LatestConsumer):  # noqa: N801 - the attribute's name
        def _joined(self, older: Message, newer: Message) -> Message:
            return self._merge(older, newer)


class DroppedForAnotherPartition(LeavesWorld):
    """A look drops a message since its key has a newer one, which is of another partition and is dropped by an `x`."""

    found_by = 47

    class consumer_type(LatestConsumer):  # noqa: N801 - the attribute's name
        def drop_older(self, groups: Any, tables: Any, upto: int) -> None:
            leaves = {entry.message.leaf for entry in self._pending.entries.values()}
            super().drop_older({(group, leaf) for group, _ in groups for leaf in leaves}, tables, upto)


class PartitionTakesAll(LeavesWorld):
    """An `x` drops what waits of other partitions."""

    found_by = 1

    class consumer_type(LatestConsumer):  # noqa: N801 - the attribute's name
        def _truncate(self, truncate: Message, **told: bool) -> None:
            super()._truncate(truncate._replace(leaf=None), **told)


class PartitionComesAgain(LeavesWorld):
    """An `x` that a kill revived is delivered after a later row of its partition was acknowledged."""

    found_by = 14

    class consumer_type(LatestConsumer):  # noqa: N801 - the attribute's name
        def _void_truncates(self, message: Message) -> None:
            if message.leaf is None:
                super()._void_truncates(message)


MUTATIONS: tuple[type[Mutation], ...] = (
    CursorAtTheEnd, OnlyItselfReturns, TwoAnswersInFlight, BarriersHoldNothing, NeighboursDie, CountedTwice, OlderAcksCount,
    AcksOutliveARewind, OneRun, WaitsForTheOldClock, AcksNotStored, DeliveriesNotStored, DeathsNotStored, ReturnsNotStored, HolesForgotten,
    LettersOfAnyGeneration, DeliversBeforeItHasRead, DeathsHoldTheirGroup, PromotionKeepsAcks, NewerWaits, TruncateKeepsRows, ReplacedNotSettled, ReplacedHoldsNothing, RetriedThoughOvertaken,
    OldAckCounts, DroppedHoldsNothing, DropsDelivered,
    NewestPartitionAlone, DroppedForAnotherPartition, PartitionTakesAll, PartitionComesAgain,
    GroupsInTwoRuns, TruncatesInRuns, GroupsArePartedByAnAnswer, AcksOfARunAreCounted, RunsForgetDeliveries, RunsDoNotExpire,
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(MUTATIONS, SEEDS_MAX, sys.argv[1:]))
