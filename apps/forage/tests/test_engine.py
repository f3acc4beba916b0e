"""The engine's answers, on a log in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from apps.forage.tests.memory_home import MemoryHome, SetClock, engine_on

from millstream.errors import AppendOutcomeUnknown
from millstream_forage import feed, order_within_arm
from millstream_forage.clock import DAY_NS, MINUTE_NS
from millstream_forage.corpus import default_corpus
from millstream_forage.embedding import DIMENSIONS
from millstream_forage.engine import ForageEngine
from millstream_forage.errors import EngineFailed, InvalidField, KeyReused, UnknownImpression, UnknownItem
from millstream_forage.feed import FeedRequest
from millstream_forage.tables import ID_MAX, ITEMS

USER = 1


@pytest.fixture
def home() -> MemoryHome:
    return MemoryHome()


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def engine(home: MemoryHome, clock: SetClock) -> ForageEngine:
    engine = engine_on(home, clock)
    engine.seed_default_corpus()
    return engine


def test_the_corpus_is_added_once(engine: ForageEngine, home: MemoryHome):
    assert engine.seed_default_corpus() == 0
    rows = home.rows("items")
    assert len(rows) == 100
    assert len({row["category"] for row in rows}) == 8
    assert all(len(row["embedding"]) == DIMENSIONS for row in rows)
    assert np.allclose([np.linalg.norm(row["embedding"]) for row in rows], 1)
    assert [item.item_id for item in engine.items(limit=1000).items] == list(range(1, 101))


def test_items_are_listed_page_by_page(engine: ForageEngine):
    first = engine.items()
    assert len(first.items) == 100
    assert first.next is None
    page = engine.items(after=10, limit=3)
    assert [item.item_id for item in page.items] == [11, 12, 13]
    assert page.next == 13
    assert engine.items(after=98, limit=2).next is None
    assert engine.items(after=100).items == []


def test_an_item_of_the_same_url_gets_the_first_ones_id(engine: ForageEngine):
    item = default_corpus()[4]
    answer = engine.add_item(replace(item, title="Another title"))
    assert (answer.item_id, answer.duplicate) == (5, True)
    answer = engine.add_item(replace(item, url="https://new.example/"))
    assert (answer.item_id, answer.duplicate) == (101, False)
    assert engine.items(after=100).items[0].title == item.title


@pytest.mark.parametrize("bytes_max", [0, 64 << 20])
def test_a_feeder_that_has_seen_other_feeds_fills_them_as_a_new_one(
    engine: ForageEngine, monkeypatch: pytest.MonkeyPatch, bytes_max: int
):
    monkeypatch.setattr(order_within_arm, "VECTORS_BYTES_MAX", bytes_max)
    first = default_corpus()[0]
    draws = np.random.default_rng(3)
    vectors = iter(draws.normal(size=(60, DIMENSIONS)))
    monkeypatch.setattr(engine._embedder, "embed", lambda texts: np.array([next(vectors) for _ in texts]))
    monkeypatch.setattr("millstream_forage.engine.item_vectors", lambda embedder, items: embedder.embed(items))
    for number in range(60):
        item = engine.add_item(replace(first, url=f"https://new.example/{number}")).item_id
        if number % 9 == 0:
            engine.signal(USER, item, "save")
            engine.signal(USER, item, "share")
        if number % 13 == 0:
            engine.hide(USER, item)
        for limit in (1, 3, 7, 50):
            request = FeedRequest(USER, limit, number, engine._clock())
            fresh = feed.Feeder(engine._state, engine.policy)
            assert engine._feeder.compute(request) == fresh.compute(request)
        kept = [vectors.nbytes for vectors in engine._feeder._vectors._kept.values()]
        assert engine._feeder._vectors._size_bytes == sum(kept)
        assert len(kept) <= 1 or sum(kept) <= bytes_max


ODD = [
    "/",
    "b/",
    "%2F",
    "a%2Fb",
    "..",
    "a b",
    "a&b=c#",
    "<b>",
    "'\"",
    "\\",
    "日本語",
    "🦊",
    "é",
    "e\u0301",
    "a\u200bb",
    "null",
]


def test_names_of_any_characters_are_told_apart_everywhere(home: MemoryHome, clock: SetClock):
    """Category `a/b` of source `c` and category `a` of source `b/c` had one arm in the records."""
    engine = engine_on(home, clock)
    pairs = [("a", "b/c"), ("a/b", "c"), *((name, name) for name in ODD)]
    for number, (category, source) in enumerate(pairs):
        item = replace(default_corpus()[0], url=f"https://odd.example/{number}", category=category, source=source)
        engine.add_item(replace(item, creator=source))
    feed = engine.feed(USER, limit=50)
    assert {(item.category, item.source) for item in feed.items} == set(pairs)
    assert len({row["arm"] for row in home.rows("impressions")}) == len(pairs)
    assert {(topic.name, *topic.sources) for topic in engine.browse_tasks().topics} == set(pairs)
    assert {(item.category, item.source) for item in engine.items().items} == set(pairs)
    for name in ODD:
        engine.change_hidden(USER, {"source": name}, "mute")
    engine.change_hidden(USER, {"creator": "c"}, "block")
    again = engine_on(home, clock).feed(USER, limit=50, preview=True)
    assert [(item.category, item.source) for item in again.items] == [("a", "b/c")]


def test_a_feed_appends_its_impressions_as_one_operation_before_it_is_answered(engine: ForageEngine, home: MemoryHome):
    before, appends = str(engine.feed(USER, seed=3, preview=True).token), home.appends
    feed = engine.feed(USER, seed=3)
    assert home.appends == appends + 1
    rows = home.rows("impressions")
    assert [row["id"] for row in rows] == [item.impression_id for item in feed.items]
    assert {row["feed"] for row in rows} == {feed.feed_id}
    for row, item in zip(rows, feed.items, strict=True):
        assert row == {
            "id": item.impression_id,
            "feed": feed.feed_id,
            "user": USER,
            "item": item.item_id,
            "slot": item.slot,
            "arm": f"{item.category}/{item.source}",
            "label": item.label,
            "explore": item.explore,
            "propensity": item.propensity,
            "policy": feed.policy,
            "seed": 3,
            "limit": 7,
            "token": before,
            "now": feed.now,
            "__seq": row["__seq"],
            "__commit_ts": row["__commit_ts"],
        }


def test_an_impression_can_be_computed_again_from_the_log_up_to_its_token(engine: ForageEngine, home: MemoryHome):
    """Everything that a feed was computed from is in its impressions and the log before them."""
    for number in range(6):
        feed = engine.feed(USER, seed=number)
        engine.signal(USER, feed.items[0].item_id, "save", impression_id=feed.items[0].impression_id)
    row = home.rows("impressions")[-1]
    end = int(row["token"].partition(".s")[2])
    earlier = MemoryHome()
    earlier.log = [part for part in home.log if part[1] <= end]
    earlier.end = end
    again = engine_on(earlier, SetClock(row["now"])).feed(row["user"], row["limit"], row["seed"], preview=True)
    slot = again.items[row["slot"] - 1]
    assert (slot.item_id, slot.propensity, slot.label, slot.explore) == (
        row["item"],
        row["propensity"],
        row["label"],
        row["explore"],
    )


def test_a_preview_has_no_ids_and_appends_nothing(engine: ForageEngine, home: MemoryHome):
    appends = home.appends
    feed = engine.feed(USER, preview=True)
    assert feed.feed_id is None
    assert {item.impression_id for item in feed.items} == {None}
    assert home.appends == appends
    assert engine.feed(USER, seed=feed.seed, preview=True) == feed


def test_without_a_seed_the_last_feed_is_repeated_for_ten_minutes(
    engine: ForageEngine, home: MemoryHome, clock: SetClock
):
    feed = engine.feed(USER)
    appends = home.appends
    clock.now_ns += 10 * MINUTE_NS
    assert engine.feed(USER) == feed
    assert engine.feed(USER, 3).feed_id != feed.feed_id
    assert engine.feed(2).feed_id != feed.feed_id
    assert engine.feed(USER) == feed
    assert home.appends == appends + 2
    clock.now_ns += 1
    assert engine.feed(USER).feed_id != feed.feed_id


CHANGES: dict[str, Callable[[ForageEngine, int], object]] = {
    "a signal": lambda engine, item: engine.signal(USER, item, "view"),
    "a hide": lambda engine, item: engine.hide(USER, item),
    "a mute": lambda engine, _: engine.mute(USER, "nowhere"),
    "a new item": lambda engine, _: engine.add_item(replace(default_corpus()[0], url="https://new.example/")),
}
NO_CHANGES: dict[str, Callable[[ForageEngine, int], object]] = {
    "another user's signal": lambda engine, item: engine.signal(2, item, "view"),
    "another user's hide": lambda engine, item: engine.hide(2, item),
    "a needless unhide": lambda engine, item: engine.unhide(USER, item),
    "a heartbeat": lambda engine, _: engine.heartbeat(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_last_feed_is_not_repeated_after(name: str, engine: ForageEngine):
    feed = engine.feed(USER)
    CHANGES[name](engine, feed.items[0].item_id)
    assert engine.feed(USER).feed_id != feed.feed_id


@pytest.mark.parametrize("name", NO_CHANGES)
def test_the_last_feed_is_repeated_after(name: str, engine: ForageEngine):
    feed = engine.feed(USER)
    NO_CHANGES[name](engine, feed.items[0].item_id)
    assert engine.feed(USER) == feed


def test_a_feed_of_another_policy_is_not_repeated(engine: ForageEngine, home: MemoryHome, clock: SetClock):
    feed = engine.feed(USER)
    other = engine_on(home, clock, match_threshold=0.5)
    assert other.feed(USER).feed_id != feed.feed_id
    assert other.feed(USER).items[0].threshold == 0.5


def test_a_double_click_counts_once(engine: ForageEngine, home: MemoryHome):
    item = engine.feed(USER).items[0]
    first = engine.signal(USER, item.item_id, "save", impression_id=item.impression_id)
    second = engine.signal(USER, item.item_id, "save", impression_id=item.impression_id)
    third = engine.signal(USER, item.item_id, "save", impression_id=item.impression_id, idempotency_key="click 3")
    assert (first.duplicate, second.duplicate, second.signal_id) == (False, True, first.signal_id)
    assert third.signal_id != first.signal_id
    assert len(home.rows("signals")) == 2
    assert engine.items(after=item.item_id - 1).items[0].signals == {
        "view": 0,
        "dwell": 0,
        "save": 1,
        "skip": 0,
        "share": 0,
    }


def test_signals_without_impression_count_each(engine: ForageEngine):
    for _ in range(3):
        engine.signal(USER, 1, "view")
    assert engine.items().items[0].signals["view"] == 3


def test_a_longer_dwell_of_an_impression_takes_the_place_of_a_shorter(engine: ForageEngine, home: MemoryHome):
    item = engine.feed(USER).items[0]
    on = {"impression_id": item.impression_id}
    short = engine.signal_dwell(USER, item.item_id, 6_000, **on)
    long = engine.signal_dwell(USER, item.item_id, 30_000, **on)
    shorter = engine.signal_dwell(USER, item.item_id, 29_000, **on)
    assert not short.duplicate
    assert not long.duplicate
    assert (shorter.duplicate, shorter.signal_id) == (True, long.signal_id)
    assert [row["weight"] for row in home.rows("signals")] == [0.1, 0.5]
    assert engine.items(after=item.item_id - 1).items[0].signals["dwell"] == 1


def test_a_signal_and_what_it_hides_are_one_operation(engine: ForageEngine, home: MemoryHome):
    item = engine.feed(USER).items[0]
    appends = home.appends
    engine.signal(USER, item.item_id, "skip", impression_id=item.impression_id)
    assert home.appends == appends + 1
    hidden = home.rows("hides")[-1]
    assert (hidden["target"], hidden["value"], hidden["kind"], hidden["hidden"]) == (
        "item",
        str(item.item_id),
        "skip",
        True,
    )


def test_a_skip_excludes_again_after_an_unhide_even_if_it_does_not_count(engine: ForageEngine):
    item = engine.feed(USER).items[0]
    skip = {"impression_id": item.impression_id}
    engine.signal(USER, item.item_id, "skip", **skip)
    engine.unhide(USER, item.item_id)
    assert shows(engine, item.item_id)
    engine.signal(USER, item.item_id, "skip", **skip)
    assert not shows(engine, item.item_id)
    assert engine.items(after=item.item_id - 1).items[0].signals["skip"] == 1


def test_an_unhide_lifts_its_own_target_alone(engine: ForageEngine):
    item = engine.items().items[0]
    engine.hide(USER, item.item_id)
    engine.block(USER, item.creator)
    engine.unhide(USER, item.item_id)
    assert not shows(engine, item.item_id)
    engine.unhide(USER, creator=item.creator)
    assert shows(engine, item.item_id)
    engine.mute(USER, item.source)
    assert not shows(engine, item.item_id)


def test_a_creator_who_is_blocked_in_advance_never_shows(engine: ForageEngine):
    engine.block(USER, "Newcomer")
    new = engine.add_item(replace(default_corpus()[0], url="https://new.example/", creator="Newcomer"))
    assert not shows(engine, new.item_id)


def shows(engine: ForageEngine, item_id: int) -> bool:
    """Return whether a user who sees everything that is left sees an item."""
    seen: set[int] = set()
    for _ in range(3):
        feed = engine.feed(USER, 50, 1, preview=True)
        seen |= {item.item_id for item in feed.items}
        for item in feed.items:
            if item.item_id != item_id:
                engine.hide(USER, item.item_id)
    for hidden in seen - {item_id}:
        engine.unhide(USER, hidden)
    return item_id in seen


def test_a_key_is_remembered_with_its_signal_by_a_later_engine(engine: ForageEngine, home: MemoryHome, clock: SetClock):
    item = engine.feed(USER).items[0]
    asked: dict[str, Any] = {"impression_id": item.impression_id, "idempotency_key": "k"}
    first = engine.signal(USER, item.item_id, "view", **asked)
    clock.now_ns += 400 * DAY_NS
    later = engine_on(home, clock)
    again = later.signal(USER, item.item_id, "view", **asked)
    assert (again.signal_id, again.duplicate) == (first.signal_id, True)
    with pytest.raises(KeyReused):
        later.signal(USER, item.item_id, "save", **asked)
    with pytest.raises(KeyReused):
        later.signal(USER, item.item_id, "view", idempotency_key="k")
    assert not later.signal(2, item.item_id, "view", idempotency_key="k").duplicate


def test_an_impression_of_another_user_or_item_is_refused(engine: ForageEngine):
    item = engine.feed(USER).items[0]
    with pytest.raises(InvalidField, match="impression_id"):
        engine.signal(2, item.item_id, "view", impression_id=item.impression_id)
    with pytest.raises(InvalidField, match="impression_id"):
        engine.signal(USER, item.item_id % 100 + 1, "view", impression_id=item.impression_id)


BAD_CALLS: list[tuple[type[Exception], str, Callable[[ForageEngine], object]]] = [
    (UnknownItem, "999", lambda engine: engine.signal(USER, 999, "view")),
    (UnknownItem, "999", lambda engine: engine.hide(USER, 999)),
    (UnknownItem, "item 0", lambda engine: engine.unhide(USER, 0)),
    (UnknownImpression, "999", lambda engine: engine.signal(USER, 1, "view", impression_id=999)),
    (InvalidField, "signal_type", lambda engine: engine.signal(USER, 1, "like")),
    (InvalidField, "user_id", lambda engine: engine.signal(-1, 1, "view")),
    (InvalidField, "user_id", lambda engine: engine.signal(True, 1, "view")),
    (InvalidField, "item_id", lambda engine: engine.signal(USER, "1", "view")),
    (InvalidField, "duration_ms", lambda engine: engine.signal(USER, 1, "view", duration_ms=1)),
    (InvalidField, "duration_ms", lambda engine: engine.signal(USER, 1, "dwell")),
    (InvalidField, "duration_ms", lambda engine: engine.signal_dwell(USER, 1, -1)),
    (InvalidField, "duration_ms", lambda engine: engine.signal_dwell(USER, 1, 1.5)),
    (InvalidField, "idempotency_key", lambda engine: engine.signal(USER, 1, "view", idempotency_key="")),
    (InvalidField, "idempotency_key", lambda engine: engine.signal(USER, 1, "view", idempotency_key="\ud800")),
    (InvalidField, "user", lambda engine: engine.feed(ID_MAX + 1)),
    (InvalidField, "limit", lambda engine: engine.feed(USER, 51)),
    (InvalidField, "limit", lambda engine: engine.feed(USER, 0)),
    (InvalidField, "seed", lambda engine: engine.feed(USER, seed=-1)),
    (InvalidField, "limit", lambda engine: engine.items(limit=1001)),
    (InvalidField, "kind", lambda engine: engine.change_hidden(USER, {"item": 1}, "skip")),
    (InvalidField, "target", lambda engine: engine.change_hidden(USER, {"item": 1}, "block")),
    (InvalidField, "target", lambda engine: engine.change_hidden(USER, {"item": 1, "source": "a"}, "unhide")),
    (InvalidField, "target", lambda engine: engine.change_hidden(USER, {}, "hide")),
    (InvalidField, "target", lambda engine: engine.change_hidden(USER, {"user": 1}, "unhide")),
    (InvalidField, "target", lambda engine: engine.mute(USER, "")),
]


@pytest.mark.parametrize(("kind", "field", "call"), BAD_CALLS)
def test_a_bad_call_is_refused_with_the_fields_name_and_appends_nothing(
    kind: type[Exception], field: str, call: Callable[[ForageEngine], object], engine: ForageEngine, home: MemoryHome
):
    appends = home.appends
    with pytest.raises(kind, match=field):
        call(engine)
    assert home.appends == appends


def test_a_user_learns_that_the_same_things_match(engine: ForageEngine):
    liked = [item for item in engine.items().items if item.category == "sea"][:3]
    for item in liked:
        engine.signal(USER, item.item_id, "save")
    feed = engine.feed(USER, 50, 1, preview=True)
    assert {item.label for item in feed.items if item.item_id in {item.item_id for item in liked}} == {"match"}
    assert all(item.label == "match" for item in feed.items if item.similarity >= 0.35)
    assert all(item.similarity < item.threshold for item in feed.items if item.label != "match")


def test_records_of_other_processes_are_folded_before_the_next_answer(engine: ForageEngine, home: MemoryHome):
    row = home.rows("items")[0]
    foreign = {name: row[name] for name in ITEMS.names} | {"id": 500, "url": "https://other.example/"}
    home.append("items", pa.RecordBatch.from_pylist([foreign], schema=ITEMS))
    assert engine.items(after=499).items[0].url == "https://other.example/"
    assert engine.add_item(replace(default_corpus()[0], url="https://new.example/")).item_id == 501


def test_an_agent_should_run_half_an_hour_after_the_last_heartbeat(engine: ForageEngine, clock: SetClock):
    assert engine.browse_tasks().should_run
    beat = engine.heartbeat()
    assert beat.next_run == clock.now_ns + 30 * MINUTE_NS
    assert not engine.browse_tasks().should_run
    clock.now_ns = beat.next_run - 1
    assert not engine.browse_tasks().should_run
    clock.now_ns = beat.next_run
    assert engine.browse_tasks().should_run


def test_topics_follow_the_reactions(engine: ForageEngine):
    for item in engine.items().items:
        if item.category == "sea":
            engine.signal(USER, item.item_id, "share")
        elif item.category == "food":
            engine.signal(USER, item.item_id, "skip")
    tasks = engine.browse_tasks()
    assert len(tasks.topics) == 8
    assert tasks.topics == sorted(tasks.topics, key=lambda topic: -topic.priority)
    assert all(0 <= topic.priority <= 1 for topic in tasks.topics)
    names = [topic.name for topic in tasks.topics]
    assert names.index("sea") < names.index("food")
    sea = next(topic for topic in tasks.topics if topic.name == "sea")
    assert set(sea.sources) == {item.source for item in engine.items().items if item.category == "sea"}
    hints = {tag for item in engine.items().items if item.category == "sea" for tag in item.tags}
    assert set(tasks.tag_hints) <= hints
    assert engine.browse_tasks(2).tag_hints == []


def test_an_empty_log_gives_empty_answers(home: MemoryHome, clock: SetClock):
    engine = engine_on(home, clock)
    assert engine.feed(USER).items == []
    assert engine.items().items == []
    assert engine.browse_tasks().topics == []
    assert home.appends == 0


def test_a_forgotten_session_is_replaced(engine: ForageEngine, home: MemoryHome):
    home.expire_sessions = True
    engine.hide(USER, 1)
    assert not home.expire_sessions
    assert not shows(engine, 1)


@pytest.mark.parametrize("is_durable", [False, True])
def test_an_engine_goes_on_once_the_outcome_of_an_append_is_known(
    engine: ForageEngine, home: MemoryHome, is_durable: bool
):
    """It used to answer nothing more until it was opened again."""
    home.lose_next, home.silence_next = not is_durable, is_durable
    with pytest.raises(AppendOutcomeUnknown):
        engine.signal(USER, 1, "save", idempotency_key="k")
    home.lose_next = not is_durable
    if home.lose_next:
        with pytest.raises(AppendOutcomeUnknown):
            engine.items()
    again = engine.signal(USER, 1, "save", idempotency_key="k")
    assert (again.signal_id, again.duplicate) == (1, True)
    assert engine.signal(USER, 2, "save").signal_id == 2
    assert [row["id"] for row in home.rows("signals")] == [1, 2]


def test_a_closed_engine_answers_nothing(engine: ForageEngine):
    engine.close()
    with pytest.raises(EngineFailed):
        engine.feed(USER)
