"""Regret of the bandit over simulated readers of the default corpus."""

import numpy as np
import pytest

from millstream_forage.corpus import default_corpus
from millstream_forage.simulate import FEEDS, SEEDS, Greedy, PolicyOf, Thompson, Uniform, World, regrets


def regret(make: PolicyOf, *, seeds: int, feeds: int) -> np.ndarray:
    """Return the regret of each feed, summed over readers."""
    world = World.of([(item.category, item.source) for item in default_corpus()])
    return np.sum([regrets(make, world, seed, feeds=feeds) for seed in range(seeds)], axis=0)


@pytest.mark.parametrize(
    ("seeds", "feeds"), [(2, 120), pytest.param(SEEDS, FEEDS, marks=pytest.mark.siege)], ids=["few", "all"]
)
def test_forage_regrets_less_than_uniform_and_greedy_and_learns(seeds: int, feeds: int) -> None:
    ours = regret(Thompson, seeds=seeds, feeds=feeds)
    assert ours.sum() <= 0.5 * regret(Uniform, seeds=seeds, feeds=feeds).sum()
    assert ours.sum() <= 0.9 * regret(Greedy, seeds=seeds, feeds=feeds).sum()
    first, *_, last = np.split(ours, 4)
    assert last.sum() <= first.sum() / 2
