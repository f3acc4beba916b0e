"""A write that is repeated in another region: a duplicate once that region has the first one's log."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from tests.app.homes import wait_for
from tests.regions.two_homes import follow, made

import millstream
from millstream.errors import DedupWindowExpired, IdempotencyKeyReused
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
    sessions.raise_mark("s", others.mark("s"), last)
    sessions.note(WriteId("s", last + 1), 7, _given(), last + 1)
    assert others.facts("s", sessions.facts("s")) == SessionFacts(last + 1)
    others.forget(RegionId(2))
    assert others.look(WriteId("s", last), 7) is None
