"""The open alerts: begun once, repeated at an interval, ended once, whatever the receiver and the process do."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from millstream.app.alerts.open_alerts import Book
from millstream.app.trouble_rules import Condition, Kind

DEAD = Condition(Kind.CONSUMER_DEAD_LETTERS, "shop", "search", "it has 1 dead letter", "Look.")
LAG = Condition(Kind.SLOT_LAG, "shop", "millstream_shop", "it holds much", "Drop it.")


def sent(book: Book, now_s: float) -> list[tuple[str, bool]]:
    """Take everything that is due, as an able receiver does; return each notice's subject and whether it is an end."""
    found = []
    while (notice := book.due(now_s)) is not None:
        found.append((notice.alert.condition.subject, notice.is_resolved))
        book.acknowledge(notice, now_s)
    return found


def ended(book: Book, now_s: float) -> None:
    for _ in range(3):
        book.update([], now_s)


def test_an_alert_is_sent_once_when_it_begins_and_once_when_it_ends() -> None:
    book = Book(repeat_s=100)
    book.update([DEAD], 0)
    assert sent(book, 0) == [("search", False)]
    book.update([DEAD], 50)
    assert sent(book, 50) == []
    ended(book, 60)
    assert sent(book, 60) == [("search", True)]
    ended(book, 500)
    assert sent(book, 500) == []
    assert not book.alerts


def test_a_lasting_alert_is_repeated_with_its_newest_message_under_a_new_id() -> None:
    book = Book(repeat_s=100)
    ids, messages = [], []
    for now_s in (0, 99, 100, 150, 200):
        book.update([replace(DEAD, message=f"at {now_s}")], now_s)
        while (notice := book.due(now_s)) is not None:
            ids.append(notice.id)
            messages.append(notice.alert.condition.message)
            book.acknowledge(notice, now_s)
    assert messages == ["at 0", "at 100", "at 200"]
    assert len(set(ids)) == 3
    assert len({id_.partition("-")[0] for id_ in ids}) == 1


def test_a_value_next_to_its_bound_makes_one_alert() -> None:
    book = Book(repeat_s=1000)
    for look in range(20):
        book.update([LAG] if look % 3 == 0 else [], look)
        assert sent(book, look) == ([("millstream_shop", False)] if look == 0 else [])


def test_a_look_that_did_not_see_everything_ends_nothing() -> None:
    book = Book(repeat_s=1000)
    book.update([LAG], 0)
    sent(book, 0)
    for now_s in range(1, 20):
        book.update([], now_s, may_end=False)
    assert sent(book, 20) == []
    assert book.alerts[LAG.key].ended_s is None


def test_an_alert_that_ends_while_the_receiver_is_away_is_sent_nevertheless() -> None:
    book = Book(repeat_s=100)
    book.update([DEAD], 0)
    ended(book, 10)
    assert sent(book, 1000) == [("search", False), ("search", True)]


def test_an_alert_that_begins_again_before_its_end_was_acknowledged_goes_on() -> None:
    book = Book(repeat_s=1000)
    book.update([DEAD], 0)
    sent(book, 0)
    ended(book, 10)
    book.update([DEAD], 20)
    assert sent(book, 20) == []
    ended(book, 30)
    assert sent(book, 30) == [("search", True)]


def test_a_new_alert_of_the_same_condition_has_another_id() -> None:
    book, ids = Book(repeat_s=100), []
    for now_s in (0, 500):
        book.update([DEAD], now_s)
        ids.append(book.alerts[DEAD.key].id)
        ended(book, now_s + 1)
        sent(book, now_s + 2)
    assert ids[0] != ids[1]


@given(st.lists(st.tuples(st.sampled_from(["dead", "lag", "both", "none", "restart"]), st.booleans()), max_size=60))
def test_each_alert_is_firing_then_resolved_however_receiver_and_process_fail(looks: list[tuple[str, bool]]) -> None:
    """The receiver sees each alert begin before it ends, and nothing of it afterwards."""
    book, now_s = Book(repeat_s=5), 0.0
    state: dict[str, str] = {}

    def take(*, is_able: bool) -> None:
        while is_able and (notice := book.due(now_s)) is not None:
            before = state.get(notice.alert.id)
            assert before != "resolved"
            assert not (notice.is_resolved and before is None)
            state[notice.alert.id] = "resolved" if notice.is_resolved else "firing"
            book.acknowledge(notice, now_s)

    for what, is_able in looks:
        now_s += 1
        if what == "restart":
            book = Book.from_list(json.loads(json.dumps(book.as_list())), 5)
        else:
            book.update({"dead": [DEAD], "lag": [LAG], "both": [DEAD, LAG], "none": []}[what], now_s)
        take(is_able=is_able)
    ended(book, now_s)
    take(is_able=True)
    assert not book.alerts
    assert set(state.values()) <= {"resolved"}
