"""Regret of the bandit over simulated readers of the default corpus."""

import numpy as np
import pytest
from bench.simulated_readers import FEEDS, SEEDS, SLOTS, Greedy, PolicyOf, Thompson, Uniform, World, regrets

from millstream_forage.corpus import default_corpus
from millstream_forage.engine import ForageEngine


def regret(make: PolicyOf, *, seeds: int, feeds: int) -> np.ndarray:
    """Return the regret of each feed, summed over readers."""
    world = World.of([(item.category, item.source) for item in default_corpus()])
    return np.sum([regrets(make, world, seed, feeds=feeds) for seed in range(seeds)], axis=0)


def test_forage_regrets_less_than_uniform_and_learns() -> None:
    ours = regret(Thompson, seeds=2, feeds=120)
    assert ours.sum() <= 0.5 * regret(Uniform, seeds=2, feeds=120).sum()
    first, *_, last = np.split(ours, 4)
    assert last.sum() <= first.sum() / 2


@pytest.mark.siege
def test_over_many_readers_forage_regrets_less_than_greedy_too() -> None:
    # Greedy is lucky with some readers: with the least of these, ours is five times its regret.
    ours = regret(Thompson, seeds=SEEDS, feeds=FEEDS)
    assert ours.sum() <= 0.5 * regret(Uniform, seeds=SEEDS, feeds=FEEDS).sum()
    assert ours.sum() <= 0.9 * regret(Greedy, seeds=SEEDS, feeds=FEEDS).sum()
    first, *_, last = np.split(ours, 4)
    assert last.sum() <= first.sum() / 2


def test_the_engine_fills_the_feeds_that_the_bandit_alone_fills() -> None:
    corpus = default_corpus()
    world = World.of([(item.category, item.source) for item in corpus])
    arm_of = {corpus[item].url: arm for arm, items in enumerate(world.items) for item in items}
    draws = np.random.default_rng(5)
    alone = Thompson(world, 7)
    seeds = np.random.default_rng(7)
    with ForageEngine.ephemeral(clock=lambda: 10**18) as engine:
        engine.seed_default_corpus()
        for _ in range(12):
            expected = alone.feed()
            feed = engine.feed(1, SLOTS, seed=int(seeds.integers(1 << 53)))
            assert [(arm_of[item.url], item.explore) for item in feed.items] == [
                (choice.arm, choice.explore) for choice in expected
            ]
            for slot, item in enumerate(feed.items):
                reward = int(draws.random() < 0.4)
                alone.learn(slot, reward)
                engine.signal_dwell(1, item.item_id, 60_000 * reward, impression_id=item.impression_id)
