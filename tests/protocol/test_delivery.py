"""The machine of a consumer: each rule by an example, worlds drawn from seeds and by hypothesis, and defects to find."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tests.mutations import Mutation, check_found
from tests.protocol.delivery_adopting import ADOPTED, AdoptingWorld
from tests.protocol.delivery_mutations import MUTATIONS
from tests.protocol.delivery_pushed import PUSHED, PushedWorld
from tests.protocol.delivery_world import World
from tests.seeds import Seeds, search

from millstream.protocol.delivery import (
    Consumer,
    DeadLetter,
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
)

PARTS = 4
SOAK_SEEDS = int(os.environ.get("MILLSTREAM_SOAK_SEEDS", "100000"))
WANTED = {
    "ack acked", "ack already_acked", "ack rewound", "ack superseded", "compact", "delivered by the run", "extend dead", "extend extended", "kill", "letters",
    "nack dead", "nack nacked", "nack superseded", "promote", "retried", "rewind", "steer",
}  # fmt: skip
HOUR = 3_600_000


# --- searches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", range(PARTS))
def test_worlds_in_which_anything_happens(part: int, seeds: Seeds):
    count = seeds.count(5_000, quick=240) // PARTS
    broken, happened = search(World, seeds.kept_or_new(1 + part * count), count)
    assert not broken, f"python -m tests.protocol.delivery_world {next(iter(broken))} 1"
    assert happened.keys() >= WANTED, WANTED - happened.keys()


def test_worlds_of_a_consumer_with_a_push_sink(seeds: Seeds):
    count = seeds.count(1_000, quick=60)
    broken, happened = search(PushedWorld, seeds.kept_or_new(1), count)
    assert not broken, f"python -m tests.protocol.delivery_pushed {next(iter(broken))} 1"
    assert happened.keys() >= {"redelivered True", "redelivered False", "bury", "return all"}


def test_worlds_of_a_consumer_that_takes_dead_letters_from_elsewhere(seeds: Seeds):
    count = seeds.count(1_000, quick=40)
    broken, happened = search(AdoptingWorld, seeds.kept_or_new(1), count)
    assert not broken, f"python -m tests.protocol.delivery_adopting {next(iter(broken))} 1"
    assert happened.keys() >= {"adopt", "adopted again", "adopted while it is retried"}


@pytest.mark.parametrize("mutation", [*MUTATIONS, *PUSHED, *ADOPTED], ids=lambda mutation: mutation.__name__)
def test_a_defect_is_found(mutation: type[Mutation]):
    check_found(mutation)


@pytest.mark.soak
def test_soak_worlds_in_which_anything_happens():
    first = random.SystemRandom().randrange(1 << 40)
    print(f"\npython -m tests.protocol.delivery_world {first} {SOAK_SEEDS}")  # noqa: T201 - repeats what is found
    broken, happened = search(World, first, SOAK_SEEDS)
    assert not broken, f"python -m tests.protocol.delivery_world {next(iter(broken))} 1"
    assert happened["seeds"] == SOAK_SEEDS


class Worlds(RuleBasedStateMachine):
    """The worlds of the seeds, with every choice made by hypothesis."""

    @initialize(data=st.data())
    def begins(self, data: st.DataObject):
        self.world = World(0, pick=_picking(data))

    @rule(data=st.data())
    def anything_happens(self, data: st.DataObject):
        self.world.pick = _picking(data)
        self.world.step()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.pick = random.Random(0).randrange
            self.world.drain()


def _picking(data: st.DataObject) -> Callable[[int], int]:
    return lambda count: data.draw(st.integers(0, count - 1))


Worlds.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestWorlds = Worlds.TestCase


# --- examples ----------------------------------------------------------------------------------------------------------


def message(seq: int, *groups: str, table: int | None = 1, barrier: bool = False, size: int = 1) -> Message:
    return Message(position_of(seq), seq - 1, f"shop-0-1-{seq}", groups, table, barrier, size)


def consumer(*messages: Message, upto: int = 0, limits: Limits | None = None) -> Consumer:
    made = Consumer(Limits(ack_wait_ms=100, max_deliver=2) if limits is None else limits, State.begin(0), run=1)
    made.offer(messages, max(upto, *(one.position // 2 for one in messages)))
    return made


def restarted(old: Consumer, *messages: Message, state: State | None = None) -> Consumer:
    """Return the consumer after a restart with everything that was stored, by way of JSON."""
    made = State.from_json(json.loads(json.dumps((old.snapshot() if state is None else state).to_json())))
    new = Consumer(old.limits, made, run=made.run + 1)
    new.offer(messages, max((one.position // 2 for one in messages), default=0))
    return new


def ids(answer: Iterable[Delivery]) -> list[DeliveryId]:
    return [one.delivery_id for one in answer]


def seqs(answer: Iterable[Delivery]) -> list[int]:
    return [one.message.position // 2 for one in answer]


def test_an_ack_in_time():
    one = consumer(message(1, "a"))
    assert one.ack(ids(one.receive(0, 10))) == [Status.ACKED]
    assert (one.cursor, one.in_flight, one.counters.acked) == (1, 0, 1)


def test_a_late_ack_counts_until_the_message_is_delivered_again():
    one = consumer(message(1, "a"))
    late = ids(one.receive(0, 10))
    assert one.expire(100) == 1
    assert one.ack(late) == [Status.ACKED]
    assert one.receive(100, 10) == []


def test_an_ack_counts_after_a_nack():
    one = consumer(message(1, "a"))
    given = ids(one.receive(0, 10))
    assert one.nack(given, 0) == [Status.NACKED]
    assert one.ack(given) == [Status.ACKED]


def test_an_ack_counts_for_a_message_that_came_back_with_another():
    one = consumer(message(1, "a"), message(2, "a"))
    first, second = ids(one.receive(0, 10))
    one.nack([first], 0)
    assert one.in_flight == 0
    assert one.ack([second]) == [Status.ACKED]
    assert seqs(one.receive(0, 10)) == [1]


@pytest.mark.parametrize("what", ["ack", "nack", "extend"])
def test_a_settled_message_is_already_acked(what: str):
    one = consumer(message(1, "a"))
    earlier = ids(one.receive(0, 10))
    one.expire(100)
    later = ids(one.receive(100, 10))
    assert one.ack(later) == [Status.ACKED]
    arguments = () if what == "ack" else (100,)
    assert getattr(one, what)([*earlier, *later], *arguments) == [Status.ALREADY_ACKED] * 2


@pytest.mark.parametrize("what", ["ack", "nack", "extend"])
def test_a_delivery_is_superseded_by_a_later_one(what: str):
    one = consumer(message(1, "a"))
    earlier = ids(one.receive(0, 10))
    one.expire(100)
    assert [given.deliveries for given in one.receive(100, 10)] == [2]
    arguments = () if what == "ack" else (100,)
    assert getattr(one, what)(earlier, *arguments) == [Status.SUPERSEDED]
    assert one.in_flight == 1


@pytest.mark.parametrize("what", ["ack", "nack", "extend"])
def test_a_delivery_from_before_a_rewind_is_rewound_though_it_was_acked_or_superseded(what: str):
    one = consumer(message(1, "a"), message(2, "b"))
    given = ids(one.receive(0, 10))
    one.ack(given[:1])
    one.rewind(0)
    one.offer([message(1, "a"), message(2, "b")], 2)
    again = one.receive(0, 10)
    assert [delivery.deliveries for delivery in again] == [1, 1]
    arguments = () if what == "ack" else (100,)
    assert getattr(one, what)(given, *arguments) == [Status.REWOUND] * 2


def test_acks_of_a_consumer_that_was_cut_off_are_rewound():
    one = consumer(message(1, "a"))
    given = ids(one.receive(0, 10))
    one.cut_off()
    assert (one.phase, one.ack(given), one.receive(0, 10), one.wants(1)) == (Phase.CUT_OFF, [Status.REWOUND], [], False)
    one.resume()
    assert one.phase is Phase.CUT_OFF
    one.rewind(0)
    assert one.phase is Phase.ACTIVE


def letter_from_elsewhere(id_: str) -> DeadLetter:
    return DeadLetter(Message(0, 0, id_, (id_,), 1, barrier=False, size=10), 1, "no", died=50, generation=0)


def test_a_letter_from_elsewhere_takes_the_place_of_none_that_is_gone():
    """Two rows of a backfill died in one ms: a delivery of the first, which was acknowledged, named the second."""
    one = Consumer(Limits(ack_wait_ms=100), State.begin(0), run=1)
    one.adopt(letter_from_elsewhere("shop-b1-1"))
    one.retry()
    (delivery,) = one.receive(60, 1)
    assert one.ack([delivery.delivery_id]) == [Status.ACKED]
    one.adopt(letter_from_elsewhere("shop-b1-2"))
    assert one.ack([delivery.delivery_id]) == [Status.ALREADY_ACKED]
    assert list(one.dead) == ["shop-b1-2"]


def test_a_letter_from_elsewhere_that_is_being_retried_stays_in_flight():
    """A restart repeats the burials of a backfill. One of a message in flight made its acknowledgement fail."""
    one = Consumer(Limits(ack_wait_ms=100), State.begin(0), run=1)
    one.adopt(letter_from_elsewhere("shop-b1-1"))
    one.retry()
    (delivery,) = one.receive(60, 1)
    one.adopt(letter_from_elsewhere("shop-b1-1"))
    assert one.ack([delivery.delivery_id]) == [Status.ACKED]
    assert (one.dead, one.retried, one.unsettled) == ({}, {}, 0)


def test_an_ack_of_a_dead_message_removes_its_dead_letter():
    one = consumer(message(1, "a"), limits=Limits(ack_wait_ms=100, max_deliver=1))
    given = ids(one.receive(0, 10))
    assert one.nack(given, 7, error="no such customer") == [Status.NACKED]
    letter = one.dead["shop-0-1-1"]
    assert (letter.deliveries, letter.error, letter.died, one.cursor) == (1, "no such customer", 7, 1)
    assert one.nack(given, 7) == one.extend(given, 7) == [Status.DEAD]
    assert one.ack([*given, *given]) == [Status.ACKED, Status.ALREADY_ACKED]
    assert one.dead == {}


def test_an_id_of_another_generation_to_come_is_unknown():
    one = consumer(message(1, "a"))
    given = ids(one.receive(0, 10))
    assert one.ack([given[0]._replace(generation=1)]) == [Status.UNKNOWN]


def test_an_id_that_stands_twice_is_answered_twice():
    one = consumer(message(1, "a"), limits=Limits(ack_wait_ms=100, max_deliver=1))
    given = ids(one.receive(0, 10))
    assert one.nack([*given, *given], 0) == [Status.NACKED, Status.DEAD]


def test_an_answer_holds_a_group_in_order_and_no_other_one_does():
    one = consumer(*[message(seq, "a") for seq in (1, 2, 3)], message(4, "b"))
    assert seqs(one.receive(0, 2)) == [1, 2]
    assert seqs(one.receive(0, 10)) == [4]
    assert one.receive(0, 10) == []


def test_a_key_change_holds_both_groups():
    one = consumer(message(1, "old"), message(2, "new", "old"), message(3, "old"), message(4, "new"), message(5, "c"))
    first = one.receive(0, 1)
    assert seqs(one.receive(0, 10)) == [5]
    one.ack(ids(first))
    assert seqs(one.receive(0, 10)) == [2, 3, 4]


def test_a_nack_returns_the_later_messages_of_its_group_alone():
    one = consumer(message(1, "a"), message(2, "a"), message(3, "a"), message(4, "b"))
    given = ids(one.receive(0, 10))
    one.nack(given[1:2], 0)
    assert one.in_flight == 2
    assert one.receive(0, 10) == []
    one.ack(given[:1])
    assert [(delivery.message.position // 2, delivery.deliveries) for delivery in one.receive(0, 10)] == [
        (2, 2),
        (3, 2),
    ]


def test_a_poison_message_does_not_kill_its_neighbours():
    one = consumer(message(1, "a"), message(2, "a"), message(3, "b"))
    for now in (0, 100, 200):
        one.receive(now, 10)
        one.expire(now + 100)
    assert list(one.dead) == ["shop-0-1-1", "shop-0-1-3"]
    assert [delivery.deliveries for delivery in one.receive(300, 10)] == [4]


def test_a_nack_after_an_expiry_is_one_failed_delivery():
    one = consumer(message(1, "a"))
    given = ids(one.receive(0, 10))
    one.expire(100)
    assert one.nack([*given, *given], 100) == [Status.NACKED] * 2
    assert one.dead == {}


def test_a_message_may_fail_for_ever():
    one = consumer(message(1, "a"), limits=Limits(max_deliver=0))
    for _ in range(50):
        given = one.receive(0, 1)
        one.nack(ids(given), 0)
    assert given[0].deliveries == 50


def test_a_group_waits_after_a_nack():
    one = consumer(message(1, "a"), message(2, "a"))
    given = ids(one.receive(0, 10))
    one.nack(given[:1], 0, delay_ms=50)
    assert (one.receive(49, 10), one.next_wake()) == ([], 50)
    assert seqs(one.receive(50, 10)) == [1, 2]


def test_a_barrier_waits_for_its_table_and_holds_it():
    rows = [
        message(1, "a"),
        message(2, barrier=True),
        message(3, "a"),
        message(4, "z", table=2),
        message(5, table=None),
    ]
    one = consumer(*rows)
    first = one.receive(0, 10)
    assert seqs(first) == [1, 4, 5]
    one.ack(ids(first))
    second = one.receive(0, 10)
    assert seqs(second) == [2]
    assert one.receive(0, 10) == []
    one.ack(ids(second))
    assert seqs(one.receive(0, 10)) == [3]


def test_an_extension_counts_from_the_call_on():
    one = consumer(message(1, "a"))
    given = ids(one.receive(0, 10))
    assert one.extend(given, 90, 500) == [Status.EXTENDED]
    assert (one.expire(589), one.expire(590)) == (0, 1)


def test_an_extension_of_a_message_that_came_back_holds_its_group_again():
    one = consumer(message(1, "a"), message(2, "a"))
    given = ids(one.receive(0, 10))
    one.expire(100)
    assert one.extend(given[1:], 100, 50) == [Status.EXTENDED]
    assert one.receive(149, 10) == []
    assert seqs(one.receive(150, 10)) == [1, 2]


def test_the_limits_of_an_answer():
    one = consumer(
        message(1, size=9), message(2, size=2), message(3, size=1), limits=Limits(max_ack_pending=2, answer_bytes=3)
    )
    assert seqs(one.receive(0, 10)) == [1]
    assert seqs(one.receive(0, 10)) == [2]
    assert one.receive(0, 10) == []
    assert not one.wants(10)


def test_a_pause_lets_acks_and_expiries_go_on():
    one = consumer(message(1, "a"), message(2, "b"))
    given = ids(one.receive(0, 10))
    one.pause()
    assert one.ack(given[:1]) == [Status.ACKED]
    assert one.expire(100) == 1
    assert one.receive(100, 10) == []
    one.resume()
    assert seqs(one.receive(100, 10)) == [2]


def test_the_cursor_stays_before_an_operation_that_is_not_settled():
    operation = [Message(position_of(seq), 0, str(seq), (), 1, barrier=False, size=1) for seq in (1, 2)]
    one = consumer(*operation, message(3), upto=5)
    given = ids(one.receive(0, 10))
    one.ack([given[0], given[2]])
    assert one.cursor == 0
    one.ack([given[1]])
    assert one.cursor == 5
    one.offer([], 9)
    assert one.cursor == 9


def test_a_restart_keeps_deliveries_in_flight_and_returns_expired_ones():
    rows = [message(1, "a"), message(2, "b"), message(3, "b")]
    one = consumer(*rows)
    given = ids(one.receive(0, 10))
    one.extend(given[:1], 0, HOUR)
    new = restarted(one, *rows)
    assert new.in_flight == 3
    again = new.receive(200, 10)
    assert [(delivery.message.position // 2, delivery.deliveries) for delivery in again] == [(2, 2), (3, 2)]
    assert new.ack(given) == [Status.ACKED, Status.SUPERSEDED, Status.SUPERSEDED]


def test_a_clock_that_was_set_back_between_two_runs_prolongs_no_wait():
    """Messages in flight stayed so for as long as the clock had been set back, and held their groups and the cursor."""
    rows = [message(1, "a"), message(2, "b")]
    one = consumer(*rows, limits=Limits(ack_wait_ms=30_000, max_ack_pending=1))
    one.nack(ids(one.receive(9 * HOUR, 1)), 9 * HOUR, delay_ms=60_000)
    assert seqs(one.receive(9 * HOUR, 1)) == [2]
    state, now = applied(one, State.begin(0)), 2 * HOUR
    for run in (2, 3):  # a run that begins with what the one before has noted, not with its snapshot
        known = State.from_json(json.loads(json.dumps(state.to_json())))
        new = Consumer(one.limits, known, run=run, now=now)
        new.offer(rows, 2)
        applied(new, state)
        assert (new.in_flight, new.receive(now + 29_999, 10)) == (1, [])
        assert seqs(new.receive(now + 30_000, 10)) == [2]
        new.ack(ids(new.receive(now + 30_000, 10)))
        assert new.next_wake() == now + 60_000


def test_nothing_is_delivered_after_a_restart_until_what_is_in_flight_is_known():
    rows = [message(1, "b"), message(2, "b")]
    one = consumer(*rows)
    given = ids(one.receive(0, 10))
    one.expire(100)
    one.extend(given[1:], 100, HOUR)
    new = restarted(one, rows[0])
    assert (new.receive(200, 10), new.wants(1)) == ([], True)
    new.offer(rows[1:], 2)
    assert (new.receive(200, 10), new.is_restored) == ([], True)


def test_what_was_in_flight_before_a_restart_is_read_however_many_messages_wait():
    """The first of many messages of a group was unacknowledged: after a restart no answer had a message."""
    rows = [*(message(seq, "a") for seq in range(1, 5)), message(5, "b")]
    one = consumer(*rows, limits=Limits(ack_wait_ms=100, max_ack_pending=2, unsettled_max=4))
    assert seqs(one.receive(0, 1)) == [1]
    assert seqs(one.receive(0, 1)) == [5]
    new = restarted(one, *rows[:4])
    assert (new.receive(200, 10), new.wants(1)) == ([], True)
    new.offer(rows[4:], 5)
    assert seqs(new.receive(200, 10)) == [1, 2]


def test_an_ack_of_a_forgotten_delivery_counts_until_the_message_is_delivered_again():
    rows = [message(1, "a"), message(2, "b")]
    one = consumer(*rows)
    forgotten = ids(one.receive(0, 10))
    state = State.begin(0)
    state.run = 1
    new = restarted(one, state=state)
    assert new.ack(forgotten[:1]) == [Status.ACKED]
    new.offer(rows, 2)
    again = new.receive(0, 10)
    assert [(delivery.message.position // 2, delivery.deliveries) for delivery in again] == [(2, 1)]
    assert ids(again) != forgotten[1:]
    assert new.ack(forgotten) == [Status.ALREADY_ACKED, Status.SUPERSEDED]


def test_a_retried_message_comes_first_in_its_group_and_behind_what_is_in_flight():
    one = consumer(message(1, "a"), message(2, "a"), message(3, "a"), limits=Limits(ack_wait_ms=100, max_deliver=1))
    one.nack(ids(one.receive(0, 1)), 0)
    flying = ids(one.receive(0, 1))
    assert one.retry() == [("shop-0-1-1", True)]
    assert one.retry(["shop-0-1-1"]) == one.drop(["shop-0-1-1"]) == [("shop-0-1-1", False)]
    assert one.receive(0, 10) == []
    one.ack(flying)
    again = one.receive(0, 10)
    assert [(delivery.message.position // 2, delivery.deliveries) for delivery in again] == [(1, 1), (3, 1)]
    one.ack(ids(again))
    assert (one.retried, one.dead, one.cursor) == ({}, {}, 3)


def test_a_rewind_keeps_dead_letters_and_counters():
    one = consumer(message(1, "a"), message(2, "a"), limits=Limits(ack_wait_ms=100, max_deliver=1))
    given = ids(one.receive(0, 10))
    one.nack(given[:1], 0)
    one.rewind(2)
    assert (list(one.dead), one.counters.delivered, one.cursor, one.read_upto) == (["shop-0-1-1"], 2, 2, 2)
    assert one.retry() == [("shop-0-1-1", True)]
    assert seqs(one.receive(0, 10)) == [1]


def test_a_promotion_that_lost_records_voids_the_ids_of_their_deliveries():
    one = consumer(message(1, "a"), message(2, "b"), message(3, "c"), limits=Limits(ack_wait_ms=100, max_deliver=1))
    given = ids(one.receive(0, 10))
    one.nack(given[2:], 0)
    assert not one.cut_back(3)
    assert one.cut_back(1)
    assert (one.cursor, one.ack(given)) == (0, [Status.REWOUND] * 3)
    one.offer([message(1, "a"), message(3, "c")], 3)
    one.retry()
    again = one.receive(0, 10)
    assert len({delivery.delivery_id.position for delivery in again}) == 3
    assert one.ack(ids(again)) == [Status.ACKED] * 3


def test_a_held_table_waits():
    one = consumer(message(1, "a"), message(2, "b", table=2))
    one.hold([1])
    assert seqs(one.receive(0, 10)) == [2]
    one.hold([])
    assert seqs(one.receive(0, 10)) == [1]


def test_every_change_is_json():
    one = consumer(message(1, "a"), message(2, "b"), limits=Limits(ack_wait_ms=100, max_deliver=1))
    given = ids(one.receive(0, 10))
    one.extend(given, 0)
    one.nack(given[:1], 0)
    one.ack(given[1:])
    one.retry()
    one.pause()
    one.rewind(0)
    changes = one.take_changes()
    assert len({type(change) for change in changes}) == 9
    state, read = State.begin(0), State.begin(0)
    for change in changes:
        state.apply(change)
        read.apply(decode(json.loads(json.dumps(encode(change)))))
    assert state == read == one.snapshot()


def test_settled_messages_behind_one_that_is_not_cost_little():
    count = 20_000
    one = Consumer(Limits(max_ack_pending=2, max_deliver=0), State.begin(0), run=1)
    for first in range(1, count, 1000):
        one.offer([message(seq, str(seq)) for seq in range(first, first + 1000)], first + 999)
        while answer := one.receive(0, 1):
            if seqs(answer) != [1]:
                one.ack(ids(answer))
        one.take_changes()
    assert (one.cursor, one.unsettled, one.snapshot().open) == (0, 1, {2})
    assert len(one._order) < 3000
    assert len(one._timers._heap) < 3000


class Hashed(str):
    """A group's name that counts how often groups are looked up."""

    __slots__ = ()
    times = 0

    def __hash__(self) -> int:
        Hashed.times += 1
        return super().__hash__()


def test_small_answers_from_many_messages_that_wait_cost_little():
    count, Hashed.times = 1_000, 0
    rows = [message(seq, Hashed(min(seq, count - 1))) for seq in range(1, count + 1)]  # the last key stands twice
    one = consumer(*rows)
    for seq in range(1, count - 1):
        given = one.receive(0, 1)
        assert seqs(given) == [seq]
        one.ack(ids(given))
    assert seqs(one.receive(0, 2)) == [count - 1, count]
    assert Hashed.times < 50 * count


def test_settled_messages_of_an_answer_are_kept_no_longer():
    one = Consumer(Limits(max_ack_pending=1_000), State.begin(0), run=1)
    one.offer([message(seq, str(seq)) for seq in range(1, 10_001)], 10_000)
    for _ in range(100):
        one.ack(ids(one.receive(0, 100))[:-1])
    assert one.in_flight == 100
    assert sum(len(flight.messages) + len(flight.ids) for flight in one._runs.flying.values()) <= 400
    assert len(one._runs.groups) == 100


# --- push sinks ---------------------------------------------------------------------------------------------------------


def applied(one: Consumer, state: State) -> State:
    """Return a state after the consumer's changes, by way of JSON."""
    for change in one.take_changes():
        state.apply(decode(json.loads(json.dumps(encode(change)))))
    return state


def test_a_redelivery_counts_and_keeps_the_messages_in_flight():
    limits, state = Limits(ack_wait_ms=100, max_deliver=0), State.begin(0)
    one = consumer(message(1, "a"), message(2, "a"), message(3, "b"), limits=limits)
    given = ids(one.receive(0, 10))
    assert one.redeliver([*given, given[0]], 90, 100)  # a message that stands twice is repeated once
    assert (one.expire(150), one.in_flight) == (0, 3)
    assert (one.counters.delivered, one.counters.redelivered) == (3, 3)
    fact = applied(one, state).facts[given[0].position]
    assert (fact.deliveries, fact.failures, fact.deadline) == (2, 1, 190)
    again = restarted(one, message(1, "a"), message(2, "a"), message(3, "b"), state=state)
    assert again.ack(given) == [Status.ACKED] * 3
    one.expire(190)
    assert [(delivery.deliveries, delivery.failures) for delivery in one.receive(190, 10)] == [(3, 2), (3, 1), (3, 2)]
    assert not one.redeliver(given[:1], 190, 100)


def test_a_message_that_is_buried_is_dead_at_once():
    one, state = consumer(message(1, "a"), message(2, "a"), message(3, "b")), State.begin(0)
    given = ids(one.receive(0, 10))
    one.bury([given[0], given[0]], 5, error="400")
    assert [(letter.deliveries, letter.error, letter.died) for letter in one.dead.values()] == [(1, "400", 5)]
    assert [delivery.message.position // 2 for delivery in one.receive(5, 10)] == [2]
    assert applied(one, state).dead.keys() == one.dead.keys()
    assert one.ack(given[2:]) == [Status.ACKED]


def test_messages_of_a_receiver_that_is_gone_come_back_without_a_failure():
    one = consumer(message(1, "a"), message(2, "b"), limits=Limits(ack_wait_ms=100, max_deliver=1))
    given = ids(one.receive(0, 10))
    one = restarted(one, message(1, "a"), message(2, "b"))
    one.return_all()
    assert [delivery.deliveries for delivery in one.receive(1, 10)] == [2, 2]
    assert one.ack(given) == [Status.SUPERSEDED] * 2
    assert one.dead == {}
