"""Simulated readers, and the regret of a policy that fills their feeds.

A reader likes items of two categories, and those of some sources more. It reacts to each item that it is shown, with a
reward of 1 or 0 by a chance that depends on the item's arm alone. The regret of a feed is the sum of the seven greatest
chances among all items, minus the sum of the chances of the items shown. Time stands still: nothing decays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np

from millstream_forage.bandit import TRIALS_TO_EXPLORE, Arm, exploring_budget, fill
from millstream_forage.embedding import Floats

FEEDS: Final = 400
SLOTS: Final = 7
SEEDS: Final = 20
LIKED_CATEGORIES: Final = 2
LIKED: Final = (0.5, 0.9)
"""Bounds of the chance that an item of a liked category is rewarded, drawn for each arm."""
OTHERS: Final = (0.02, 0.25)


@dataclass(frozen=True, slots=True)
class World:
    """The arms in the order of their first items, and the items of each: their places in the corpus, in rising order."""

    categories: tuple[str, ...]
    """Category of each arm."""
    items: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, arms: Sequence[tuple[str, str]]) -> World:
        """Return the world of items with these categories and sources."""
        names = list(dict.fromkeys(arms))
        return cls(
            tuple(category for category, _ in names),
            tuple(tuple(item for item, arm in enumerate(arms) if arm == name) for name in names),
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """An arm that fills a slot."""

    arm: int
    explore: bool = False


class Policy(Protocol):
    """Fills feeds for one reader, and learns from its rewards."""

    def feed(self) -> Sequence[Choice]:
        """Return the arms of the next feed's slots; an arm as often as it has items, at most."""
        ...

    def learn(self, slot: int, reward: float) -> None:
        """Take the reward, from 0 to 1, of a slot of the last feed."""
        ...


PolicyOf: TypeAlias = Callable[[World, int], Policy]
"""Makes a policy for a world, with a seed of its own."""


class Tallies:
    """The counts that a policy keeps of each arm."""

    def __init__(self, world: World) -> None:
        self.world = world
        arms = len(world.items)
        self.wins, self.losses = [0.0] * arms, [0.0] * arms
        self.shown, self.trials = [0] * arms, [0] * arms
        self.last: Sequence[Choice] = ()

    def showing(self, choices: Sequence[Choice]) -> Sequence[Choice]:
        """Count a feed's impressions; return its choices."""
        self.last = choices
        for choice in choices:
            self.shown[choice.arm] += 1
        return choices

    def learn(self, slot: int, reward: float) -> None:
        """Count a reward."""
        arm = self.last[slot].arm
        self.wins[arm] += reward
        self.losses[arm] += 1 - reward
        self.trials[arm] += 1


class Thompson(Tallies):
    """The policy of Forage."""

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world)
        self._seeds = np.random.default_rng(seed)
        self._explored_reward, self._explored = 0.0, 0

    def feed(self) -> Sequence[Choice]:
        """Fill a feed as Forage does."""
        arms = [
            Arm(self.wins[arm], self.losses[arm], self.shown[arm], self.trials[arm] < TRIALS_TO_EXPLORE, items)
            for arm, items in enumerate(self.world.items)
        ]
        budget = exploring_budget(self._explored_reward, self._explored)
        slots = fill(arms, limit=SLOTS, seed=int(self._seeds.integers(1 << 53)), budget=budget)
        return self.showing([Choice(slot.arm, slot.explore) for slot in slots])

    def learn(self, slot: int, reward: float) -> None:
        """Count a reward, also for the exploring budget."""
        super().learn(slot, reward)
        if self.last[slot].explore:
            self._explored_reward += reward
            self._explored += 1


class Greedy(Tallies):
    """The arms with the highest posterior mean, ties by id: it never explores on purpose."""

    def __init__(self, world: World, seed: int) -> None:
        del seed
        super().__init__(world)

    def feed(self) -> Sequence[Choice]:
        """Take the items of the best arms."""
        ranked = sorted(
            (-(1 + self.wins[arm]) / (2 + self.wins[arm] + self.losses[arm]), item, arm)
            for arm, items in enumerate(self.world.items)
            for item in items
        )
        return self.showing([Choice(arm) for _, _, arm in ranked[:SLOTS]])


class Uniform(Tallies):
    """Distinct items, drawn uniformly."""

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world)
        self._draws = np.random.default_rng(seed)
        self._arms = [arm for arm, items in enumerate(world.items) for _ in items]

    def feed(self) -> Sequence[Choice]:
        """Draw items."""
        drawn = self._draws.choice(len(self._arms), size=SLOTS, replace=False)
        return self.showing([Choice(self._arms[item]) for item in drawn])


def chances(world: World, seed: int) -> Floats:
    """Return the chance of a reward for each arm, for the reader of a seed."""
    draws = np.random.default_rng(seed)
    liked = draws.choice(sorted(set(world.categories)), size=LIKED_CATEGORIES, replace=False).tolist()
    return np.array([draws.uniform(*(LIKED if category in liked else OTHERS)) for category in world.categories])


def regrets(make: PolicyOf, world: World, seed: int, *, feeds: int = FEEDS) -> Floats:
    """Return the regret of each feed of a policy, for the reader of a seed. The policy and the reader draw apart."""
    chance = chances(world, seed)
    sizes = [len(items) for items in world.items]
    best = np.sort(np.repeat(chance, sizes))[-SLOTS:].sum()
    reactions = np.random.default_rng((seed, 1))
    policy = make(world, seed)
    lost = np.empty(feeds)
    for feed in range(feeds):
        choices = policy.feed()
        lost[feed] = best - sum(chance[choice.arm] for choice in choices)
        for slot, choice in enumerate(choices):
            policy.learn(slot, float(reactions.random() < chance[choice.arm]))
    return lost
