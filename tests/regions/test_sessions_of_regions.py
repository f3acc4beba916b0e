"""A write that is repeated in another region: a duplicate once that region has the first one's log."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.app.homes import wait_for
from tests.regions.two_homes import follow, made
from tests.seeds import examples

import millstream
from millstream.errors import DedupWindowExpired, IdempotencyKeyReused, SessionExpired
from millstream.model.ids import RegionId
from millstream.model.operations import Ack
from millstream.model.positions import Seq, SeqRange
from millstream.model.writes import SessionFacts, WriteId
from millstream.protocol.deduplication.known_writes import AHEAD_MAX, Sessions
from millstream.protocol.deduplication.other_regions import OtherRegions
from millstream.protocol.deduplication.repeats_within_group import GroupLookup

CONFIG = """
[streams.shop]
region = {region}
[streams.shop.log]
disk_used_max = 1.0
[streams.shop.keys]
"public.posts" = ["id"]
[streams.shop.merge."posts"]
likes = "pn_counter(increments)"
"""


def test_every_region_answers_a_repeated_write_as_a_duplicate_once_logs_are_exchanged(tmp_path: Path) -> None:
    one, two = made(tmp_path / "one", 1, CONFIG), made(tmp_path / "two", 2, CONFIG)
    row = {"id": 1, "likes": 3}
    with millstream.open(one) as home:
        home.append("shop", "posts", row, idempotency_key="a")
        home.append("shop", "posts", row, session="s", number=1)
    follow(two, one, 1)
    with millstream.open(two) as home:
        for id_of in ({"idempotency_key": "a"}, {"session": "s", "number": 1}):
            again = home.append("shop", "posts", row, **id_of)  # type: ignore[arg-type]
            assert (again.duplicate, again.row_count, dict(again.offsets)) == (True, 1, {})
            assert list(home.read("shop", upto=again.token)) == []
        with pytest.raises(IdempotencyKeyReused):
            home.append("shop", "posts", {"id": 1, "likes": 4}, idempotency_key="a")
        assert home.session_facts("shop", "s").mark == 1
        assert not home.session("shop", "s").append("posts", row).duplicate
    follow(one, two, 2)
    with millstream.open(one) as home:
        assert home.append("shop", "posts", row, session="s", number=2).duplicate
        assert not home.append("shop", "posts", row, session="s", number=3).duplicate
        assert home.merged("shop", "posts").column("likes").to_pylist() == [12]


def test_a_log_that_arrives_while_a_home_is_open_is_heard(tmp_path: Path) -> None:
    one, two = made(tmp_path / "one", 1, CONFIG), made(tmp_path / "two", 2, CONFIG)
    row = {"id": 1, "likes": 3}
    with millstream.open(two) as other, millstream.open(one) as home:
        other.append("shop", "posts", row)
        home.append("shop", "posts", row, session="s", number=1)
        follow(two, one, 1)
        keys = map(str, itertools.count())

        def is_heard() -> bool:
            other.append("shop", "posts", row, idempotency_key=next(keys))
            return other.session_facts("shop", "s").mark == 1

        wait_for(is_heard)
        assert other.append("shop", "posts", row, session="s", number=1).duplicate


def _given(count: int = 1) -> Ack:
    return Ack({}, SeqRange(Seq(1), count))


def test_a_session_goes_on_in_another_region_from_where_it_was() -> None:
    sessions, others = Sessions(), OtherRegions()
    last = 3 * AHEAD_MAX
    writes = [(WriteId("s", number), 7, _given(), number) for number in range(1, last + 1)]
    others.note(RegionId(2), writes, "here")
    assert others.place(RegionId(2)) == "here"
    asked = GroupLookup(sessions, others)
    assert asked.ask(WriteId("s", last), 7, 0) == Ack({}, SeqRange(Seq(0), 1))
    with pytest.raises(DedupWindowExpired):
        asked.ask(WriteId("s", 1), 7, 0)
    assert asked.ask(WriteId("s", last + 1), 7, 0) is None
    assert asked.ask(WriteId("s", last + 2), 7, 1) is None
    sessions.raise_mark("s", others.mark("s", sessions), last)
    sessions.note(WriteId("s", last + 1), 7, _given(), last + 1)
    assert others.facts("s", sessions) == SessionFacts(last + 1)
    others.forget(RegionId(2))
    assert others.look(WriteId("s", last), 7) is None


_TWO = RegionId(2)


def _noted(others: OtherRegions, numbers: range, *, is_cut: bool = False, region: RegionId = _TWO) -> None:
    others.note(region, [(WriteId("s", number), 7, _given(), number) for number in numbers], "here", is_cut=is_cut)


def _own(last: int) -> Sessions:
    sessions = Sessions()
    for number in range(1, last + 1):
        sessions.note(WriteId("s", number), 7, _given(), number)
    return sessions


def test_a_session_that_went_to_another_region_goes_on_in_the_first() -> None:
    own, others, last = _own(1100), OtherRegions(), 1100
    _noted(others, range(last + 1, last + 2))
    asked = GroupLookup(own, others)
    assert asked.ask(WriteId("s", last), 7, 0) == _given()
    assert asked.ask(WriteId("s", last + 1), 7, 0) == Ack({}, SeqRange(Seq(0), 1))
    assert others.facts("s", own) == SessionFacts(last + 1)
    for number in range(last + 2, last + 2 * AHEAD_MAX):
        assert GroupLookup(own, others).ask(WriteId("s", number), 7, 0) is None
        own.raise_mark("s", others.mark("s", own), number)
        own.note(WriteId("s", number), 7, _given(), number)
    with pytest.raises(DedupWindowExpired):
        GroupLookup(own, others).ask(WriteId("s", last), 7, 0)


def test_a_log_that_has_only_a_sessions_later_writes_keeps_it_over_restarts() -> None:
    own, others = Sessions(), OtherRegions()
    own.note(WriteId("s", 1101), 7, _given(), 1)  # a replay of the own log
    _noted(others, range(1, 1101))
    asked = GroupLookup(own, others)
    assert asked.ask(WriteId("s", 1101), 7, 0) == _given()
    assert asked.ask(WriteId("s", 1100), 7, 0) is not None
    assert asked.ask(WriteId("s", 1102), 7, 0) is None
    assert asked.ask(WriteId("s", 1103), 7, 1) is None


@pytest.mark.parametrize("kept", [range(2000, 2101), range(900, 1001)])
def test_a_write_that_the_lost_beginning_of_a_log_may_have_is_never_taken_for_new(kept: range) -> None:
    own, others = Sessions(), OtherRegions()
    _noted(others, kept, is_cut=True)
    for number in (kept.start - 1, kept.stop, kept.stop + 1024):
        with pytest.raises(SessionExpired):
            GroupLookup(own, others).ask(WriteId("s", number), 7, 0)
    assert others.facts("s", own).expired
    assert GroupLookup(own, others).ask(WriteId("s", kept.start), 7, 0) == Ack({}, SeqRange(Seq(0), 1))
    # Nothing is missing: this region has the beginning.
    own = _own(kept.start - 1)
    assert GroupLookup(own, others).ask(WriteId("s", kept.stop), 7, 0) is None
    # Nothing is missing: so many writes in a row were taken only after all lower ones.
    _noted(others, range(kept.stop, kept.start + AHEAD_MAX + 1))
    assert GroupLookup(Sessions(), others).ask(WriteId("s", kept.start + AHEAD_MAX + 1), 7, 0) is None


def test_writes_of_a_region_whose_log_has_not_come_are_not_taken_for_new() -> None:
    others = OtherRegions()
    _noted(others, range(1101, 1102))
    for number in (500, 1100, 1102):
        with pytest.raises(SessionExpired):
            GroupLookup(Sessions(), others).ask(WriteId("s", number), 7, 0)
    _noted(others, range(1, 1101), region=RegionId(3))
    assert GroupLookup(Sessions(), others).ask(WriteId("s", 1102), 7, 0) is None


def test_a_session_that_this_region_has_forgotten_is_not_begun_again_from_another_ones_mark() -> None:
    own, others = _own(2000), OtherRegions()
    own._forget_session("s")
    _noted(others, range(1, 6))
    with pytest.raises(SessionExpired):
        GroupLookup(own, others).ask(WriteId("s", 6), 7, 0)
    assert GroupLookup(own, others).ask(WriteId("s", 5), 7, 0) is not None


def test_age_makes_no_region_forget_a_session_that_went_on_in_another() -> None:
    own, others = _own(5), OtherRegions()
    week_us = 8 * 86_400_000_000
    _noted(others, range(1, 6))
    others.note(_TWO, [(WriteId(f"t{n}", 1), 7, _given(), week_us) for n in range(300)], "later")
    assert GroupLookup(own, others).ask(WriteId("s", 6), 7, 0) is None


@pytest.mark.parametrize("copied", [False, True])
def test_a_replayed_log_takes_no_write_for_new_that_a_log_may_have_that_lags(copied: bool) -> None:
    own, others = _own(5), OtherRegions()
    own.note(WriteId("s", 2001), 7, _given(), 1)
    if copied:
        own = Sessions.restored(b"".join(own.copied()()))
    _noted(others, range(6, 501))
    for number in (1500, 2000, 2002, 5000):
        with pytest.raises(SessionExpired):
            GroupLookup(own, others).ask(WriteId("s", number), 7, 0)
    assert others.facts("s", own).expired
    assert GroupLookup(own, others).ask(WriteId("s", 2001), 7, 0) == _given()
    _noted(others, range(501, 2001))
    assert others.facts("s", own) == SessionFacts(2001)
    assert GroupLookup(own, others).ask(WriteId("s", 2002), 7, 0) is None
    own.raise_mark("s", 2001, 1)
    own.note(WriteId("s", 2002), 7, _given(), 1)
    assert own.begin("s") == 0


@settings(max_examples=examples(15), deadline=None)
@given(
    runs=st.lists(st.tuples(st.integers(1, 3), st.integers(AHEAD_MAX + 1, 2500)), max_size=5),
    last=st.integers(1, 2000),
    lags=st.tuples(st.integers(0, 6000), st.integers(0, 6000)),
    copy_at=st.integers(0, 4000),
)
def test_any_logs_that_lag_take_no_write_for_new_that_one_has(
    runs: list[tuple[int, int]], last: int, lags: tuple[int, int], copy_at: int
) -> None:
    """A session went from region to region, and ended in this one. Its log is read again, and the others' lag."""
    logs: dict[int, list[int]] = {1: [], 2: [], 3: []}
    total = 0
    for region, count in (*runs, (1, last)):
        logs[region] += range(total + 1, total + count + 1)
        total += count
    own, others = Sessions(), OtherRegions()
    for i, number in enumerate(logs[1]):
        own.note(WriteId("s", number), 7, _given(), number)
        if i == copy_at:
            own = Sessions.restored(b"".join(own.copied()()))

    def hear(region: int, numbers: list[int]) -> None:
        others.note(RegionId(region), [(WriteId("s", n), 7, _given(), n) for n in numbers], "here")

    received = {region: max(0, len(logs[region]) - lag) for region, lag in zip((2, 3), lags, strict=True)}
    for region, count in received.items():
        hear(region, logs[region][:count])
    for number in (*range(1, total + 1, 61), total):
        with contextlib.suppress(SessionExpired, DedupWindowExpired):
            assert GroupLookup(own, others).ask(WriteId("s", number), 7, 0) is not None
    for region, count in received.items():
        hear(region, logs[region][count:])
    assert others.facts("s", own) == SessionFacts(total)
    assert GroupLookup(own, others).ask(WriteId("s", total + 1), 7, 0) is None
