"""The machine of a consumer of kind `latest`: each rule by an example, and worlds drawn from seeds."""

from __future__ import annotations

import json

import pytest
from tests.protocol.delivery_latest import LatestWorld
from tests.protocol.delivery_leaves import LeavesWorld
from tests.seeds import Seeds, search

from millstream.protocol.delivery import Delivery, LatestConsumer, Limits, Message, State, Status, position_of
from millstream.protocol.delivery.state import Fact

PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_worlds_in_which_anything_happens(part: int, seeds: Seeds):
    count = seeds.count(5_000, quick=240) // PARTS
    broken, _ = search(LatestWorld, seeds.kept_or_new(1 + part * count), count)
    assert not broken, f"python -m tests.protocol.delivery_latest {next(iter(broken))} 1"


@pytest.mark.parametrize("part", range(PARTS))
def test_a_receiver_has_the_rows_of_a_source_whose_partitions_come_and_go(part: int, seeds: Seeds):
    count = seeds.count(2_000, quick=100) // PARTS
    broken, _ = search(LeavesWorld, seeds.kept_or_new(1 + part * count), count)
    assert not broken, f"python -m tests.protocol.delivery_leaves {next(iter(broken))} 1"


def message(seq: int, key: str, columns: str = "", leaf: int | None = None) -> Message:
    id_ = f"shop-0-1-{seq}"
    return Message(position_of(seq), seq - 1, id_, (key,), 1, barrier=False, size=1, origin=columns, leaf=leaf)


def truncate(seq: int, leaf: int | None = None) -> Message:
    """Return a `t`, or the `x` of a partition."""
    return Message(position_of(seq), seq - 1, f"shop-0-1-{seq}", (), 1, barrier=True, size=1, truncates=True, leaf=leaf)


def merged(older: Message, message: Message) -> Message:
    """Return the newer message with the older one's columns."""
    return message._replace(origin=older.origin + message.origin)


def consumer(*messages: Message, state: State | None = None) -> LatestConsumer:
    state = State.begin(0) if state is None else State.from_json(json.loads(json.dumps(state.to_json())))
    made = LatestConsumer(Limits(ack_wait_ms=100, max_deliver=2), state, run=state.run + 1, merge=merged)
    made.offer(messages, max((one.position // 2 for one in messages), default=0))
    return made


def facts(answer: list[Delivery]) -> list[tuple[int, int, str | None]]:
    return [(one.message.position // 2, one.deliveries, one.message.origin) for one in answer]


def test_the_newest_undelivered_change_of_a_key_is_delivered_with_the_columns_of_those_it_replaces():
    one = consumer(message(1, "a", "x"), message(2, "b"), message(3, "a", "y"), message(4, "a", "z"))
    answer = one.receive(0, 10)
    assert facts(answer) == [(2, 1, ""), (4, 1, "xyz")]
    assert one.ack([delivery.delivery_id for delivery in answer]) == [Status.ACKED] * 2
    assert (one.cursor, one.counters.acked) == (4, 2)


def test_rows_that_a_truncate_took_are_read_again_if_a_promotion_loses_it():
    one = consumer(message(1, "a"), message(2, "b"), truncate(3), message(4, "a"))
    assert (one.cursor, State.from_json(one.snapshot().to_json()).relied) == (0, 3)
    assert one.cut_back(2)
    one.offer([message(1, "a"), message(2, "b")], 2)
    assert facts(one.receive(0, 10)) == [(1, 1, ""), (2, 1, "")]


def test_a_row_that_came_back_and_that_a_truncate_took_is_read_again_if_a_promotion_loses_it():
    one = consumer(message(1, "a"))
    (row,) = one.receive(0, 10)
    one.offer([truncate(2)], 2)
    assert one.nack([row.delivery_id], 0) == [Status.NACKED]
    assert one.cursor == 0
    assert one.cut_back(1)
    one.offer([message(1, "a")], 1)
    assert facts(one.receive(0, 10)) == [(1, 1, "")]


def test_a_truncate_that_is_settled_holds_the_cursor_no_longer():
    one = consumer(message(1, "a"), truncate(2), message(3, "a"))
    (delivery,) = one.receive(0, 10)
    assert one.cursor == 0
    assert one.ack([delivery.delivery_id]) == [Status.ACKED]
    assert one.cursor == 2


def test_a_restart_reads_the_replaced_change_again():
    rows = [message(1, "a", "x"), message(2, "a", "y")]
    one = consumer(*rows)
    assert one.cursor == 0
    assert facts(consumer(*rows, state=one.snapshot()).receive(0, 10)) == [(2, 1, "xy")]


def test_a_change_while_its_key_is_in_flight_is_a_new_message():
    one = consumer(message(1, "a"))
    older = [delivery.delivery_id for delivery in one.receive(0, 10)]
    one.offer([message(2, "a")], 2)
    assert one.receive(0, 10) == []
    assert one.ack(older) == [Status.ACKED]
    assert facts(one.receive(0, 10)) == [(2, 1, "")]


def test_a_newer_change_replaces_one_that_comes_back():
    one = consumer(message(1, "a", "x"))
    older = [delivery.delivery_id for delivery in one.receive(0, 10)]
    one.offer([message(2, "a", "y")], 2)
    assert one.nack(older, 0) == [Status.NACKED]
    assert one.ack(older) == one.nack(older, 0) == [Status.SUPERSEDED]
    again = one.receive(0, 10)
    assert facts(again) == [(2, 1, "xy")]
    one.ack([again[0].delivery_id])
    assert one.ack(older) == [Status.ALREADY_ACKED]
    assert one.cursor == 2


def test_a_newer_change_replaces_one_that_is_given_back_unseen():
    one = consumer(message(1, "a", "x"))
    older = [delivery.delivery_id for delivery in one.receive(0, 10)]
    one.offer([message(2, "a", "y")], 2)
    assert one.give_back(older) == [Status.NACKED]
    assert one.ack(older) == [Status.SUPERSEDED]
    assert facts(one.receive(0, 10)) == [(2, 1, "xy")]


def test_a_group_waits_after_a_nack_though_a_newer_change_replaced_the_message():
    one = consumer(message(1, "a"))
    older = [delivery.delivery_id for delivery in one.receive(0, 10)]
    one.offer([message(2, "a")], 2)
    one.nack(older, 0, delay_ms=50)
    assert one.receive(49, 10) == []
    assert facts(one.receive(50, 10)) == [(2, 1, "")]


def test_a_nack_without_delay_ends_the_older_delay_of_what_replaced_the_message_also_behind_a_restart():
    rows = [message(1, "a"), message(2, "a")]
    one = consumer(rows[0])
    older = [delivery.delivery_id for delivery in one.receive(0, 10)]
    stored = one.snapshot()
    stored.facts[position_of(2)] = Fact(deliveries=1, not_before=50)
    one = consumer(*rows, state=stored)
    one.take_changes()
    one.nack(older, 0)
    for change in one.take_changes():
        stored.apply(change)
    for restarted in (one, consumer(*rows, state=stored)):
        assert [delivery.message.position for delivery in restarted.receive(0, 10)] == [position_of(2)]


def test_a_truncate_drops_what_waits_of_its_table_and_waits_for_what_is_in_flight():
    one = consumer(message(1, "a"), message(2, "b"))
    flying = [delivery.delivery_id for delivery in one.receive(0, 1)]
    one.offer([truncate(3), message(4, "b")], 4)
    assert one.receive(0, 10) == []
    one.expire(100)
    answer = one.receive(100, 10)
    assert facts(answer) == [(3, 1, None)]
    assert one.ack(flying) == [Status.ALREADY_ACKED]
    one.ack([answer[0].delivery_id])
    assert facts(one.receive(100, 10)) == [(4, 1, "")]


def test_a_dead_letter_whose_key_has_a_newer_change_is_dropped_by_a_retry():
    one = consumer(message(1, "a"), message(2, "b"))
    for _ in range(2):
        one.nack([delivery.delivery_id for delivery in one.receive(0, 10)], 0)
    one.offer([message(3, "a")], 3)
    assert one.retry() == [("shop-0-1-1", True), ("shop-0-1-2", True)]
    assert facts(one.receive(0, 10)) == [(2, 1, ""), (3, 1, "")]
    assert one.dead == {}


def test_a_truncate_that_a_kill_revived_is_void_once_a_dead_row_behind_it_is_acknowledged():
    rows = [truncate(1), message(2, "a")]
    one = consumer(*rows)
    for _ in range(2):
        one.nack([delivery.delivery_id for delivery in one.receive(0, 10)], 0)
    late = [delivery.delivery_id for delivery in one.receive(0, 10)]
    one = consumer(*rows, state=State(run=1))
    for _ in range(2):
        one.nack(late, 0)
    assert one.ack(late) == [Status.ACKED]
    assert one.receive(0, 10) == []
    assert one.cursor == 2


def test_changes_of_a_key_are_joined_once_the_barrier_between_them_is_settled():
    barrier = truncate(2)._replace(truncates=False)
    rows = [message(1, "a", "x"), barrier, message(3, "a", "y")]
    one = consumer(*rows)
    one.ack([delivery.delivery_id for delivery in one.receive(0, 10)])
    late = [delivery.delivery_id for delivery in one.receive(0, 10)]
    one = consumer(*rows, state=State(run=1))  # a kill: all of them wait again
    assert one.ack(late) == [Status.ACKED]
    assert facts(one.receive(0, 10)) == [(3, 1, "xy")]


def test_a_retry_delivers_the_newest_dead_letter_of_a_key_also_if_the_log_has_lost_its_record():
    one = consumer()
    for seq in (1, 2):
        one.offer([message(seq, "a")], seq)
        for _ in range(2):
            one.nack([delivery.delivery_id for delivery in one.receive(0, 10)], 0)
    assert list(one.dead) == ["shop-0-1-1", "shop-0-1-2"]
    assert one.cut_back(1)
    assert one.retry() == [("shop-0-1-1", True), ("shop-0-1-2", True)]
    assert [delivery.message.id for delivery in one.receive(0, 10)] == ["shop-0-1-2"]


def test_a_restart_never_delivers_an_older_change_after_one_that_was_acknowledged():
    rows = [message(1, "a"), message(2, "a")]
    one = consumer(*rows)
    delivered = [delivery.delivery_id for delivery in one.receive(0, 10)]
    forgot = consumer(state=State(run=1))
    assert forgot.ack(delivered) == [Status.ACKED]
    forgot.offer(rows[:1], 1)
    assert forgot.receive(0, 10) == []
    forgot.offer(rows[1:], 2)
    assert forgot.receive(0, 10) == []
    assert forgot.cursor == 2


def test_a_key_that_changes_often_costs_the_same_each_time():
    one = consumer(message(1, "a"))
    for seq in range(2, 20_000):
        one.offer([message(seq, "a")], seq)
    assert one.unsettled == 1
    answer = one.receive(0, 10)
    one.ack([answer[0].delivery_id])
    assert one.cursor == 19_999


def crowded(state: State | None = None) -> LatestConsumer:
    """Return a consumer with room for two keys, which has read the first three messages of a log of six."""
    state = State.begin(0) if state is None else State.from_json(json.loads(json.dumps(state.to_json())))
    made = LatestConsumer(Limits(unsettled_max=2), state, run=state.run + 1)
    made.read_to(6)
    while made.wants(10):
        seq = made.read_upto + 1
        made.offer([message(seq, "abcabc"[seq - 1])], seq)
    return made


def test_a_message_whose_key_has_a_newer_one_in_the_log_is_dropped_before_it_is_delivered():
    one = crowded()
    assert (one.read_upto, one.looks_upto, one.waiting_keys) == (2, 6, {("a", None), ("b", None)})
    assert one.receive(0, 10) == []
    one.drop_older({("a", None)}, (), 6)
    assert facts(one.receive(0, 10)) == [(2, 1, "")]
    assert one.cursor == 0


def test_the_log_behind_a_dropped_message_is_kept_until_the_newer_one_is_settled():
    one = crowded()
    one.drop_older({("a", None), ("b", None)}, (), 6)
    one.take_changes()
    again = crowded(one.snapshot())
    assert again.unsettled == 2
    again.drop_older({("c", None)}, (), 6)
    for seq in range(again.read_upto + 1, 7):
        again.offer([message(seq, "abcabc"[seq - 1])], seq)
    answer = again.receive(0, 10)
    assert [seq for seq, _, _ in facts(answer)] == [4, 5, 6]
    again.ack([delivery.delivery_id for delivery in answer[:2]])
    again.take_changes()
    assert again.cursor == again.snapshot().cursor == 0
    again.ack([answer[2].delivery_id])
    again.take_changes()
    assert again.cursor == again.snapshot().cursor == 6
    assert again.snapshot().relied == 0


def test_a_dropped_message_comes_back_if_a_promotion_loses_the_newer_one():
    one = crowded()
    one.drop_older({("a", None), ("b", None)}, (), 6)
    assert not one.cut_back(6)
    assert one.cut_back(4)
    assert (one.read_upto, one.take_changes()[-1].cursor) == (0, 0)
    one.offer([message(1, "a")], 1)
    assert facts(one.receive(0, 10)) == [(1, 1, "")]


@pytest.mark.parametrize("is_read", [True, False])
def test_a_truncate_is_not_repeated_once_a_row_behind_it_is_acknowledged(*, is_read: bool):
    rows = [truncate(1), message(2, "a")]
    one = consumer(*rows)
    forgotten = one.snapshot()
    one.ack([delivery.delivery_id for delivery in one.receive(0, 10)])
    (late,) = [delivery.delivery_id for delivery in one.receive(0, 10)]
    again = consumer(*(rows if is_read else []), state=forgotten)
    assert again.ack([late]) == [Status.ACKED]
    again.offer(rows, 2)
    assert again.receive(0, 10) == []
    assert again.cursor == 2


def test_a_truncate_whose_death_a_kill_forgot_comes_again_though_a_row_behind_it_dies():
    """It was settled: neither delivered to its end nor a dead letter."""
    rows = [truncate(1), message(2, "a")]
    limits = Limits(ack_wait_ms=100, max_deliver=1)
    one = LatestConsumer(limits, State.begin(0), run=1)
    one.offer(rows, 2)
    forgotten = one.snapshot()
    one.nack([delivery.delivery_id for delivery in one.receive(0, 10)], 0)
    assert list(one.dead) == ["shop-0-1-1"]
    late = [delivery.delivery_id for delivery in one.receive(0, 10)]
    again = LatestConsumer(limits, forgotten, run=2)
    again.offer(rows, 2)
    again.nack(late, 0)
    assert list(again.dead) == ["shop-0-1-2"]
    assert facts(again.receive(0, 10)) == [(1, 1, None)]


def test_a_truncate_leaves_the_key_of_what_is_in_flight_known():
    one = consumer(message(1, "a"))
    one.receive(0, 1)
    one.offer([message(2, "a"), truncate(3)], 3)
    assert one.waiting_keys == {("a", None)}
    one.offer([message(4, "a")], 4)
    one.drop_older({("a", None)}, (), 6)
    assert sorted(one.snapshot().facts) == [position_of(1)]
    assert one.cursor == 0
    assert [one.ack([delivery.delivery_id]) for delivery in one.receive(1000, 10)] == [[Status.ACKED]]
    assert facts(one.receive(1000, 10)) == [(4, 1, "")]


def test_a_table_that_is_truncated_later_drops_what_waits():
    one = crowded()
    one.drop_older((), {(1, None)}, 6)
    assert one.unsettled == one.waiting_bytes == 0


def test_a_partition_that_leaves_drops_what_waits_of_its_rows_alone_and_holds_what_follows():
    one = consumer(
        message(1, "a", leaf=11), message(2, "b", leaf=12), message(3, "c"), truncate(4, 11), truncate(5, 12)
    )
    one.offer([message(6, "a", leaf=12)], 6)
    for expected in ([(3, 1, "")], [(4, 1, None)], [(5, 1, None)], [(6, 1, "")]):
        answer = one.receive(0, 10)
        assert facts(answer) == expected
        assert one.receive(0, 10) == []
        one.ack([delivery.delivery_id for delivery in answer])


def test_a_row_that_moved_between_partitions_is_delivered_before_the_newer_one_leaves():
    """The receiver may have it with the older partition, whose rows an `x` of the newer one doesn't remove."""
    one = consumer(message(1, "a", leaf=11), message(2, "a", leaf=12), truncate(3, 12))
    answer = one.receive(0, 10)
    assert facts(answer) == [(2, 1, "")]
    one.ack([delivery.delivery_id for delivery in answer])
    assert facts(one.receive(0, 10)) == [(3, 1, None)]


def test_a_row_of_a_partition_that_left_is_void_when_it_comes_back():
    one = consumer(message(1, "a", leaf=11), message(2, "b", leaf=12))
    flying = [delivery.delivery_id for delivery in one.receive(0, 10)]
    one.offer([truncate(3, 11)], 3)
    one.nack(flying, 0)
    assert one.ack(flying) == [Status.ALREADY_ACKED, Status.ACKED]
    assert facts(one.receive(0, 10)) == [(3, 1, None)]


@pytest.mark.parametrize(("leaf", "expected"), [(11, []), (12, [(1, 1, None)]), (None, [])])
def test_a_partition_does_not_leave_again_once_a_later_row_of_it_is_acknowledged(
    leaf: int | None, expected: list[tuple[int, int, None]]
):
    rows = [truncate(1, 11), message(2, "a", leaf=leaf)]
    one = consumer(*rows)
    forgotten = one.snapshot()
    one.ack([delivery.delivery_id for delivery in one.receive(0, 10)])
    (late,) = [delivery.delivery_id for delivery in one.receive(0, 10)]
    again = consumer(*rows, state=forgotten)
    assert again.ack([late]) == [Status.ACKED]
    assert facts(again.receive(0, 10)) == expected


def test_changes_are_joined_once_a_partition_leaves_again_though_other_barriers_wait():
    one = consumer(message(1, "a", leaf=11))
    flying = [delivery.delivery_id for delivery in one.receive(0, 10)]
    one.offer([truncate(2), message(3, "a", "x", 12), truncate(4, 13), message(5, "a", "y", 12), truncate(6, 14)], 6)
    one.offer([truncate(7, 13)], 7)
    one.ack(flying)
    one.ack([delivery.delivery_id for delivery in one.receive(0, 10)])
    assert facts(one.receive(0, 10)) == [(5, 1, "xy")]


def test_a_look_drops_messages_of_a_partition_that_leaves_and_those_with_newer_ones_of_their_partition():
    one = LatestConsumer(Limits(unsettled_max=4), State.begin(0), run=1)
    one.read_to(9)
    one.offer(
        [message(1, "a", leaf=11), message(2, "b", leaf=12), message(3, "c", leaf=12), message(4, "d", leaf=13)], 4
    )
    assert one.looks_upto == 9
    one.drop_older({("b", 12), ("c", 13)}, {(1, 11)}, 9)
    assert facts(one.receive(0, 10)) == [(3, 1, ""), (4, 1, "")]


def test_a_dead_letter_keeps_its_partition_over_a_restart():
    one = consumer(message(1, "a", leaf=11), message(2, "b"))
    for _ in range(2):
        one.nack([delivery.delivery_id for delivery in one.receive(0, 10)], 0)
    restarted = consumer(state=one.snapshot())
    assert [letter.message.leaf for letter in restarted.dead.values()] == [11, None]
