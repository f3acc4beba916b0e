"""How many records the machine of a consumer refers to."""

from __future__ import annotations

from tests.protocol.test_delivery import ids, message, seqs

from millstream.protocol.delivery import Consumer, Limits, Message, State


def sized(seq: int, group: str) -> Message:
    return message(seq, group)._replace(size=20, origin=seq)


def test_messages_behind_others_lose_their_records_above_a_bound():
    one = Consumer(Limits(records_bytes_max=50), State.begin(0), run=1)
    one.offer([sized(1, "a")], 1)
    first = one.receive(0, 1)
    for seq in range(2, 10):
        assert one.wants(1)
        one.offer([sized(seq, "a")], seq)
    one.offer([sized(10, "b")], 10)
    assert not one.wants(5)  # one can be delivered
    given = one.receive(0, 5)
    assert (seqs(given), [each.message.origin for each in given]) == ([10], [10])
    assert one.wants(5)
    one.ack(ids(given) + ids(first))
    given = one.receive(0, 10)
    assert seqs(given) == list(range(2, 10))
    assert [each.message.origin for each in given] == [2, *[None] * 7]
    one.ack(ids(given))
    assert (one.unsettled, one._pending.records_bytes) == (0, 0)


def test_a_run_of_few_groups_counts_with_its_records():
    one = Consumer(Limits(records_bytes_max=50), State.begin(0), run=1)
    one.offer([sized(seq, "a") for seq in range(1, 5)], 4)
    assert not one.wants(5)
    one.offer([sized(seq, "b") for seq in range(5, 9)], 8)
    given = one.receive(0, 10)
    assert seqs(given) == list(range(1, 9))
    assert [each.message.origin for each in given] == [1, 2, 3, 4, 5, None, None, None]
