"""Regret of the bandit over simulated readers of the default corpus."""

import numpy as np
import pytest

from millstream_forage.corpus import default_corpus
from millstream_forage.simulate import FEEDS, SEEDS, Greedy, PolicyOf, Thompson, Uniform, World, regrets


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
