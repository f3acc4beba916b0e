"""Any history of events, restarts and lost answers keeps the promises of the feed."""

from __future__ import annotations

from typing import Any

import pytest
from apps.forage.tests.memory_home import MemoryHome, SetClock, engine_on
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from millstream.errors import AppendOutcomeUnknown
from millstream_forage.answers import Feed, FeedItem, as_json
from millstream_forage.errors import KeyReused
from millstream_forage.items import NewItem

USERS = st.integers(1, 2)
CREATORS = ["Ada", "Ben", "Cleo"]
SOURCES = ["north", "south"]
CATEGORIES = ["sea", "sky", "soil"]
SECOND_NS = 1_000_000_000


def new_item(number: int) -> NewItem:
    return NewItem(
        url=f"https://forage.example/{number}",
        title=f"Title {number}",
        creator=CREATORS[number % 3],
        category=CATEGORIES[number * 7 % 3],
        source=SOURCES[number % 2],
        tags=("a", "b"),
        entities=(),
        content_type="news",
        summary=f"Words of {number}. More words.",
        reading_time_min=1,
    )


def targets_of(number: int) -> set[tuple[str, str]]:
    """Return the targets that hide an item."""
    item = new_item(number)
    return {("item", str(number)), ("source", item.source), ("creator", item.creator)}


class Life(RuleBasedStateMachine):
    """One log, and the engines that serve it one after the other."""

    shown = Bundle("shown")

    @initialize(count=st.integers(0, 14))
    def begin(self, count: int) -> None:
        self.home = MemoryHome()
        self.clock = SetClock()
        self.engine = engine_on(self.home, self.clock)
        self.added = 0
        self.hidden: dict[tuple[int, str, str], bool] = {}
        for _ in range(count):
            self.add()

    @rule()
    def add(self) -> None:
        self.added += 1
        answer = self.engine.add_item(new_item(self.added))
        assert not answer.duplicate
        assert self.engine.add_item(new_item(self.added)).item_id == answer.item_id

    @rule(target=shown, user=USERS, limit=st.sampled_from([1, 3, 7, 16]), seed=st.none() | st.integers(0, 5))
    def feed(self, user: int, limit: int, seed: int | None) -> tuple[int, FeedItem] | None:
        preview = None if seed is None else self.engine.feed(user, limit, seed, preview=True)
        feed = self.engine.feed(user, limit, seed)
        self.check(user, feed, limit)
        if preview is not None:
            assert [vars_of(item) for item in preview.items] == [vars_of(item) for item in feed.items]
            assert preview.token == feed.token
        if not feed.items:
            return None
        again = self.engine.feed(user, limit)
        assert again == feed
        return user, feed.items[-1]

    def check(self, user: int, feed: Feed, limit: int) -> None:
        """Check the promises of any feed."""
        ids = [item.item_id for item in feed.items]
        assert len(set(ids)) == len(ids)
        assert [item.slot for item in feed.items] == list(range(1, len(ids) + 1))
        for item in feed.items:
            assert 0 < item.propensity <= 1
            for target, value in targets_of(item.item_id):
                assert not self.hidden.get((user, target, value))
        certain = {(target, value) for (owner, target, value), state in self.hidden.items() if state and owner == user}
        left = [number for number in range(1, self.added + 1) if not targets_of(number) & certain]
        assert len(ids) == min(limit, len(left))
        self.check_exploring(user, feed)

    def check_exploring(self, user: int, feed: Feed) -> None:
        """Check the number of exploring slots of each block of seven."""
        arms_of_signals: dict[tuple[str, str], set[int]] = {}
        shown = {row["id"]: row for row in self.home.rows("impressions")}
        for row in self.home.rows("signals"):
            if row["impression"] is not None and row["user"] == user:
                item = new_item(row["item"])
                arms_of_signals.setdefault((item.category, item.source), set()).add(row["impression"])
        assert set().union(*arms_of_signals.values(), set()) <= shown.keys()
        for begin in range(0, len(feed.items), 7):
            block = feed.items[begin : begin + 7]
            exploring = [item for item in block if item.explore]
            for item in exploring:
                assert len(arms_of_signals.get((item.category, item.source), ())) < 3
            explored = [item for item in block if len(arms_of_signals.get((item.category, item.source), ())) >= 3]
            if len(block) == 7 and explored and len(explored) < 7:
                assert len(exploring) <= 3

    @rule(
        event=shown,
        kind=st.sampled_from(["view", "save", "share", "skip", "dwell"]),
        duration_ms=st.integers(0, 3).map(lambda part: part * 20_000),
        key=st.none() | st.sampled_from(["k1", "k2"]),
        on_impression=st.booleans(),
    )
    def signal(
        self, event: tuple[int, FeedItem] | None, kind: str, duration_ms: int, key: str | None, *, on_impression: bool
    ) -> None:
        if event is None:
            return
        user, item = event
        arguments: dict[str, Any] = {
            "duration_ms": duration_ms if kind == "dwell" else None,
            "impression_id": item.impression_id if on_impression else None,
            "idempotency_key": key,
        }
        before = self.home.appends
        try:
            answer = self.engine.signal(user, item.item_id, kind, **arguments)
        except KeyReused:
            assert self.home.appends == before
            return
        # A skip that doesn't count hides all the same.
        assert answer.duplicate == (self.home.appends == before) or (answer.duplicate and kind == "skip" and not key)
        if kind == "skip" and not (answer.duplicate and key):
            self.hidden[user, "item", str(item.item_id)] = True
        if on_impression or key:
            again = self.engine.signal(user, item.item_id, kind, **arguments)
            assert again.duplicate
            assert (on_impression and not key) or again.signal_id == answer.signal_id

    @rule(user=USERS, number=st.integers(1, 14), unhide=st.booleans())
    def hide_item(self, user: int, number: int, *, unhide: bool) -> None:
        if number > self.added:
            return
        (self.engine.unhide if unhide else self.engine.hide)(user, number)
        self.hidden[user, "item", str(number)] = not unhide

    @rule(user=USERS, creator=st.sampled_from(CREATORS), unhide=st.booleans())
    def block(self, user: int, creator: str, *, unhide: bool) -> None:
        if unhide:
            self.engine.unhide(user, creator=creator)
        else:
            self.engine.block(user, creator)
        self.hidden[user, "creator", creator] = not unhide

    @rule(user=USERS, source=st.sampled_from(SOURCES), unhide=st.booleans())
    def mute(self, user: int, source: str, *, unhide: bool) -> None:
        if unhide:
            self.engine.unhide(user, source=source)
        else:
            self.engine.mute(user, source)
        self.hidden[user, "source", source] = not unhide

    @rule(seconds=st.sampled_from([1, 300, 900, 40 * 86_400, -30]))
    def wait(self, seconds: int) -> None:
        self.clock.now_ns += seconds * SECOND_NS

    @rule(user=USERS, creator=st.sampled_from(CREATORS), is_durable=st.booleans())
    def block_without_an_answer(self, user: int, creator: str, *, is_durable: bool) -> None:
        """The outcome of an append is unknown: before the next answer it is in the log, once."""
        if self.hidden.get((user, "creator", creator)):
            return
        self.home.lose_next, self.home.silence_next = not is_durable, is_durable
        before = len(self.home.rows("hides"))
        with pytest.raises(AppendOutcomeUnknown):
            self.engine.block(user, creator)
        assert creator not in {item.creator for item in self.engine.feed(user, 50, preview=True).items}
        assert len(self.home.rows("hides")) == before + 1
        self.hidden[user, "creator", creator] = True

    @rule(user=USERS, limit=st.sampled_from([3, 7]), seed=st.integers(0, 99))
    def restart(self, user: int, limit: int, seed: int) -> None:
        """A killed engine's successor gives the same feeds, byte for byte, and the same repeated feed."""
        last = as_json(self.engine.feed(user, limit))
        preview = as_json(self.engine.feed(user, limit, seed, preview=True))
        self.engine = engine_on(self.home, self.clock)
        if last["items"]:
            assert as_json(self.engine.feed(user, limit)) == last
        assert as_json(self.engine.feed(user, limit, seed, preview=True)) == preview

    @invariant()
    def items_count_signals_that_count(self) -> None:
        if not hasattr(self, "engine"):
            return
        counted: set[Any] = set()
        for row in self.home.rows("signals"):
            counted.add((row["item"], row["kind"], row["impression"] or ("alone", row["id"])))
        listed = {item.item_id: item.signals for item in self.engine.items(limit=1000).items}
        for item_id, signals in listed.items():
            for kind, count in signals.items():
                assert count == len([1 for item, found, _ in counted if (item, found) == (item_id, kind)])


def vars_of(item: FeedItem) -> dict[str, Any]:
    """Return a slot without its impression."""
    return {name: getattr(item, name) for name in FeedItem.__slots__ if name != "impression_id"}


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=8, stateful_step_count=25)


class Longer(Life):
    """The same, as many and as long as the profile asks."""


TestLonger = pytest.mark.siege(Longer.TestCase)
TestLonger.settings = settings(stateful_step_count=50)
