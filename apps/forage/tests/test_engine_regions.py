"""Several regions serve one feed: what one hides is hidden in each that has heard of it, and a signal counts once."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from apps.forage.tests.memory_home import WORLD, MemoryRegion, SetClock, engine_on
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from millstream.errors import ReplicationError
from millstream_forage.corpus import default_corpus
from millstream_forage.engine import ForageEngine
from millstream_forage.errors import UnknownImpression, UnknownItem
from millstream_forage.export import RecordedLog, Selection
from millstream_forage.tables import REGION_BITS, home_config

USERS = st.integers(1, 2)
REGIONS = st.sampled_from([1, 2, 3])
CORPUS = default_corpus()


class Partitions(RuleBasedStateMachine):
    """Three regions that hear of each other late; each may restart at any time."""

    @initialize()
    def begin(self) -> None:
        times = count(1)
        WORLD.clear()
        WORLD.update({region: MemoryRegion(region, times) for region in (1, 2, 3)})
        self.clock = SetClock()
        self.engines = {region: engine_on(home, self.clock) for region, home in WORLD.items()}
        self.shown: list[tuple[int, int, int]] = []
        self.urls = count(1)
        for region in WORLD:
            for _ in range(3):
                self.add(region)

    @rule(region=REGIONS)
    def add(self, region: int) -> None:
        number = next(self.urls)
        self.engines[region].add_item(replace(CORPUS[number % 100], url=f"https://forage.example/{number}"))

    @rule(region=REGIONS, other=REGIONS, part=st.sampled_from([0.3, 1.0]))
    def hear(self, region: int, other: int, part: float) -> None:
        if region != other:
            WORLD[region].hear(WORLD[other], int(WORLD[other].end * part))

    @rule(region=REGIONS)
    def restart(self, region: int) -> None:
        self.engines[region] = engine_on(WORLD[region], self.clock)

    @rule(region=REGIONS, user=USERS, seed=st.integers(0, 9))
    def feed(self, region: int, user: int, seed: int) -> None:
        feed = self.engines[region].feed(user, 7, seed)
        hidden = self.hidden(region, user)
        for item in feed.items:
            assert ("item", str(item.item_id)) not in hidden
            assert ("creator", item.creator) not in hidden
            assert item.impression_id is not None
            self.shown.append((user, item.item_id, item.impression_id))

    def hidden(self, region: int, user: int) -> set[tuple[str, str]]:
        """Return the targets that are hidden by what a region has heard."""
        rows = WORLD[region].merged("forage", "hides").to_pylist()
        return {(row["target"], row["value"]) for row in rows if row["user"] == user and row["hidden"]}

    @rule(region=REGIONS, at=st.integers(0, 100), kind=st.sampled_from(["view", "save", "skip"]))
    def signal(self, region: int, at: int, kind: str) -> None:
        if not self.shown:
            return
        user, item, impression = self.shown[at % len(self.shown)]
        try:
            self.engines[region].signal(user, item, kind, impression_id=impression)
        except (UnknownItem, UnknownImpression):
            assert impression >> REGION_BITS != region

    @rule(region=REGIONS, user=USERS, kind=st.sampled_from(["view", "save"]))
    def resend(self, region: int, user: int, kind: str) -> None:
        """A client that got no answer sends its signal again, to any region."""
        try:
            self.engines[region].signal(user, (1 << REGION_BITS) + 1, kind, idempotency_key=f"key of the {kind}")
        except UnknownItem:
            assert region != 1

    @rule(region=REGIONS, user=USERS, at=st.integers(0, 100), lift=st.booleans())
    def block(self, region: int, user: int, at: int, *, lift: bool) -> None:
        creator = CORPUS[at % len(CORPUS)].creator
        if lift:
            self.engines[region].unhide(user, creator=creator)
        else:
            self.engines[region].block(user, creator)
        assert lift or ("creator", creator) in self.hidden(region, user)

    @rule()
    def reunite(self) -> None:
        """Once all have heard everything, they list the same items, count the same signals and hide the same."""
        for region in WORLD:
            for other in WORLD:
                self.hear(region, other, 1.0)
        answers = [self.answers(region) for region in WORLD]
        assert answers[0] == answers[1] == answers[2]
        sent = [row for home in WORLD.values() for row in home.rows("signals")]
        counted = {(row["impression"] or (row["user"], row["idempotency_key"]), row["kind"]) for row in sent}
        signals = [item.signals for item in self.engines[1].items(limit=1000).items]
        assert sum(sum(counts.values()) for counts in signals) == len(counted)
        for region, home in WORLD.items():
            others = [other for other in WORLD if other != region]
            log = RecordedLog(home, others)  # type: ignore[arg-type]
            assert len(list(log.signals(Selection()))) == len(counted)

    def answers(self, region: int) -> Any:
        engine = self.engines[region]
        items = sorted(engine.items(limit=1000).items, key=lambda item: item.item_id)
        eligible = [{item.item_id for item in engine.feed(user, 50, 1, preview=True).items} for user in (1, 2)]
        return items, eligible


TestPartitions = Partitions.TestCase
TestPartitions.settings = settings(max_examples=8, stateful_step_count=20)


def test_a_region_takes_what_another_hid_from_its_log(tmp_path: Path):
    """On disk, with the logs as `millstream follow` keeps them: byte for byte."""
    homes = {region: tmp_path / str(region) for region in (1, 2)}
    for region, home in homes.items():
        home.mkdir()
        other = 3 - region
        config = f'\n[replication]\nnode = "n{region}"\nregions = {{ {other} = "grpc://127.0.0.1:9" }}\n'
        (home / "millstream.toml").write_text(home_config(region) + config)
    with ForageEngine.open(homes[1]) as one:
        one.seed_default_corpus()
        feed = one.feed(1)
        one.signal(1, feed.items[0].item_id, "skip", impression_id=feed.items[0].impression_id)
        one.block(1, feed.items[1].creator)
        theirs = one.feed(2)
        assert one.feed(2) == theirs
        assert one.items(limit=1).items[0].item_id == (1 << 40) + 1
    (homes[2] / "data/wal/forage@1").mkdir(parents=True)  # as a follower makes it before the first shipment
    with ForageEngine.open(homes[2]) as two:
        assert two.feed(1).items == []
        (homes[2] / "data/wal/forage@1").rmdir()
        shutil.copytree(homes[1] / "data/wal/forage", homes[2] / "data/wal/forage@1")
        mine = two.feed(2)
        assert mine.feed_id is not None
        assert mine.feed_id >> REGION_BITS == 2  # region 1's feed has a token of region 1's log
        assert two.feed(2) == mine
        shown = two.feed(1, 50, 1).items
        assert len(shown) == 50
        assert feed.items[0].item_id not in {item.item_id for item in shown}
        assert feed.items[1].creator not in {item.creator for item in shown}
        two.signal(1, feed.items[2].item_id, "save", impression_id=feed.items[2].impression_id)
        two.unhide(1, feed.items[0].item_id)
        everything = {item.item_id for seed in range(8) for item in two.feed(1, 50, seed).items}
        assert feed.items[1].creator not in {item.creator for item in two.feed(1, 50, 2).items}
    with ForageEngine.open(homes[2]) as two:
        again = {item.item_id for seed in range(8) for item in two.feed(1, 50, seed).items}
    assert feed.items[0].item_id in everything | again


def test_a_repeated_skip_hides_what_another_region_has_lifted_before() -> None:
    """It was a duplicate that left no record, so the item showed again once the other region's record came."""
    times = count(1)
    WORLD.clear()
    WORLD.update({region: MemoryRegion(region, times) for region in (1, 2)})
    one, two = (engine_on(home, SetClock()) for home in WORLD.values())
    one.add_item(CORPUS[0])
    (shown,) = one.feed(1).items
    first = one.signal(1, shown.item_id, "skip", impression_id=shown.impression_id)
    WORLD[2].hear(WORLD[1], WORLD[1].end)
    two.unhide(1, shown.item_id)
    again = one.signal(1, shown.item_id, "skip", impression_id=shown.impression_id)
    assert (again.duplicate, again.signal_id) == (True, first.signal_id)
    WORLD[1].hear(WORLD[2], WORLD[2].end)
    WORLD[2].hear(WORLD[1], WORLD[1].end)
    assert one.feed(1, seed=1).items == two.feed(1, seed=1).items == []
    assert len(WORLD[1].rows("signals")) == 1


def test_a_home_with_the_number_of_this_region_is_refused(tmp_path: Path) -> None:
    """Both hand out the same ids, so a signal of the one would count for an item of the other."""
    homes = [tmp_path / name for name in ("a", "b")]
    for home in homes:
        home.mkdir()
        config = f'\n[replication]\nnode = "{home.name}"\nregions = {{ 2 = "grpc://127.0.0.1:9" }}\n'
        (home / "millstream.toml").write_text(home_config(1) + config)
        with ForageEngine.open(home) as engine:
            engine.add_item(CORPUS[0])
    with ForageEngine.open(homes[0]) as engine:
        shutil.copytree(homes[1] / "data/wal/forage", homes[0] / "data/wal/forage@2")
        with pytest.raises(ReplicationError, check=lambda error: error.code == "other_region"):
            engine.feed(1)
    with pytest.raises(ReplicationError, check=lambda error: error.code == "other_region"):
        ForageEngine.open(homes[0])


def test_an_export_has_the_signals_of_all_regions_once() -> None:
    """A region's own log alone lacks the impressions that others showed, and with them its own signals of those."""
    times = count(1)
    WORLD.clear()
    WORLD.update({region: MemoryRegion(region, times) for region in (1, 2)})
    one, two = (engine_on(home, SetClock()) for home in WORLD.values())
    for item in CORPUS[:9]:
        one.add_item(item)
    shown = one.feed(1, seed=1).items
    WORLD[2].hear(WORLD[1], WORLD[1].end)
    two.signal(1, shown[0].item_id, "save", impression_id=shown[0].impression_id)
    two.hide(1, shown[1].item_id)
    two.hide(1, shown[0].item_id)
    one.signal(1, shown[0].item_id, "save", impression_id=shown[0].impression_id)
    one.signal(1, shown[2].item_id, "view", impression_id=shown[2].impression_id)
    WORLD[1].hear(WORLD[2], WORLD[2].end)
    WORLD[2].hear(WORLD[1], WORLD[1].end)
    ignored = [item.item_id for item in shown[3:]]
    for region in (1, 2):
        log = RecordedLog(WORLD[region], [3 - region])  # type: ignore[arg-type]
        found = log.signals(Selection(), with_impressions=True)
        assert {(row["entity_id"], row["signal_type"], row["slot"]) for row in found} == {
            (shown[0].item_id, "save", 1),
            (shown[2].item_id, "view", 3),
        }
        pairs = [(pair["rejected"], pair["reason"]) for pair in log.pairs(Selection())]
        assert pairs == [(shown[1].item_id, "hide"), *((item_id, "ignored") for item_id in ignored)]


def test_a_signal_that_two_regions_got_under_one_key_counts_once() -> None:
    """A client whose region answered too late sent it to another one: without an impression, both counted."""
    one, two = two_regions()
    item = one.items(limit=1).items[0].item_id
    for engine in (one, two):
        assert not engine.signal(1, item, "save", idempotency_key="k").duplicate
        engine.signal_dwell(1, item, 9_000 if engine is one else 6_000, idempotency_key="other lengths")
    exchange()
    for engine in (one, two, engine_on(WORLD[1], SetClock()), engine_on(WORLD[2], SetClock())):
        (listed,) = engine.items(limit=1).items
        assert (listed.signals["save"], listed.signals["dwell"]) == (1, 2)
        assert engine.signal(1, item, "save", idempotency_key="k").duplicate
    for region in (1, 2):
        log = RecordedLog(WORLD[region], [3 - region])  # type: ignore[arg-type]
        assert sorted(row["signal_type"] for row in log.signals(Selection())) == ["dwell", "dwell", "save"]
    feeds = [[item.propensity for item in engine.feed(1, seed=5, preview=True).items] for engine in (one, two)]
    assert feeds[0] == feeds[1]


def two_regions() -> tuple[ForageEngine, ForageEngine]:
    """Return the engines of two regions: the second one has an item older than those of the first, and a newer one."""
    times = count(1)
    WORLD.clear()
    WORLD.update({region: MemoryRegion(region, times) for region in (1, 2)})
    one, two = (engine_on(home, SetClock()) for home in WORLD.values())
    two.add_item(CORPUS[60])
    for item in CORPUS[:40:2]:
        one.add_item(item)
    exchange()
    two.feed(1, seed=1)  # it has heard of all items
    two.add_item(replace(CORPUS[62], source="Elsewhere"))
    return one, two


def exchange() -> None:
    """Let each region hear all of the other one."""
    for region, other in ((1, 2), (2, 1)):
        WORLD[region].hear(WORLD[other], WORLD[other].end)


def test_a_restart_repeats_the_last_feed_whatever_other_regions_have_shown() -> None:
    one, two = two_regions()
    for seed in range(3):
        shown = one.feed(1, seed=seed).items
        one.signal(1, shown[0].item_id, "save", impression_id=shown[0].impression_id)
        exchange()
        shown = two.feed(1, seed=seed).items
        two.signal(1, shown[1].item_id, "view", impression_id=shown[1].impression_id)
        two.block(2, shown[2].creator)
    last = two.feed(1)
    one.feed(1, seed=9)  # impressions are no change
    exchange()
    assert two.feed(1) == last
    again = engine_on(WORLD[2], SetClock())
    assert again.feed(1) == last
    assert again.feed(1, seed=7, preview=True) == two.feed(1, seed=7, preview=True)


@pytest.mark.parametrize(
    ("change", "is_repeated"),
    [
        (lambda one, item: one.signal(1, item, "view"), False),
        (lambda one, _: one.block(1, "Nobody"), False),
        (lambda one, _: one.add_item(CORPUS[80]), False),
        (lambda one, item: one.signal(2, item, "view"), True),
        (lambda one, item: one.hide(2, item), True),
    ],
)
def test_another_regions_change_for_the_user_ends_the_repetition(change: Any, *, is_repeated: bool) -> None:
    one, two = two_regions()
    one.block(1, "Nobody else")
    exchange()
    last = two.feed(1)
    change(one, last.items[0].item_id)
    exchange()
    assert (two.feed(1) == last) == is_repeated


def test_a_preview_at_the_same_moment_lacks_what_another_region_has_hidden_since() -> None:
    """The arms of the preview before were taken again: another region's hides were no change of the state."""
    one, two = two_regions()
    shown = two.feed(1, 50, seed=3, preview=True).items
    one.hide(1, shown[0].item_id)
    exchange()
    left = {item.item_id for item in two.feed(1, 50, seed=3, preview=True).items}
    assert left == {item.item_id for item in shown[1:]}


@pytest.mark.parametrize("lift", [False, True])
def test_what_a_failed_call_did_not_merge_is_merged_by_the_next(*, lift: bool) -> None:
    """The engine took the other log as read, so what was hidden there showed until its next record of `hides`."""
    one, two = two_regions()
    item = two.feed(1, seed=3).items[0].item_id
    if lift:
        one.hide(1, item)
        exchange()
        two.feed(1)
        one.unhide(1, item)
    else:
        one.hide(1, item)
    exchange()
    WORLD[2].fail_next_merge = True
    with pytest.raises(ReplicationError):
        two.feed(1, seed=4)
    assert (item in {shown.item_id for shown in two.feed(1, 50, seed=4).items}) == lift


def test_only_what_may_not_win_over_other_regions_is_merged() -> None:
    """Each skip cost the next feed a merge of everything that users of any region hide: 0.1 s and more for 50,000 targets."""
    one, two = two_regions()
    shown = one.feed(1, 50, seed=3).items
    before = WORLD[1].merges
    one.hide(1, shown[0].item_id)
    one.signal(1, shown[1].item_id, "skip", impression_id=shown[1].impression_id)
    left = {item.item_id for item in one.feed(1, 50, seed=4).items}
    assert left == {item.item_id for item in shown[2:]}
    assert WORLD[1].merges == before
    one.unhide(1, shown[0].item_id)
    two.hide(1, shown[2].item_id)
    assert one.feed(1, 50, seed=5).items
    assert WORLD[1].merges == before + 1
    exchange()
    left = {item.item_id for item in one.feed(1, 50, seed=6).items}
    assert [item.item_id in left for item in shown[:3]] == [True, False, False]
    assert WORLD[1].merges == before + 2


def test_what_is_hidden_again_stays_hidden_if_another_region_had_lifted_it_before() -> None:
    one, two = two_regions()
    item = two.feed(1, seed=3).items[0].item_id
    one.hide(1, item)
    exchange()
    two.unhide(1, item)
    one.hide(1, item)  # it doesn't know of that
    exchange()
    for engine in (one, two):
        assert item not in {shown.item_id for shown in engine.feed(1, 50, seed=4).items}
