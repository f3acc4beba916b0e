"""Fill a feed's slots with items, and compute the chance of each choice.

Arms compete by Thompson sampling: each draws from Beta(1 + wins, 1 + losses), and the greatest draw gives the slot its
best item that is left (`ranking.Ranking` orders the items). In each block of seven slots some explore instead: one of the least shown unexplored arms is
taken uniformly. The budget is fixed before the block's first draw; the slots that use it are drawn uniformly.

Everything is a function of the arms, the limit and the seed. The generator is PCG64, a Beta draw is its inverse
distribution function at a uniform draw, and draws are rounded before they are compared: builds of numpy and scipy that
differ in the last digits fill the same feed.

A slot depends on the slots before it only by the items that they took and by their explore flags. Its propensity is
therefore the sum of two exact terms: the chance to explore times the arm's share among the least shown unexplored
arms, and the chance not to explore times the chance that the arm's draw is the greatest (`quadrature`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Self, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.special import betaincinv

from millstream_forage.quadrature import Floats, GreatestOfBetas

Indices: TypeAlias = npt.NDArray[np.intp]

BLOCK: Final = 7
"""Slots that share one exploring budget."""
DECIMALS: Final = 9
"""Digits of a draw that count, so that the last bits of a build of scipy don't."""
TABLES_KEPT: Final = 16
"""Quadratures that are kept: a user without trials, and a feed of another seed, have known ones. Each is up to a megabyte."""
EVER: Final = 1 << 62
"""More impressions than any arm has."""
TRIALS_TO_EXPLORE: Final = 3
"""An arm is unexplored while fewer of its impressions have a signal."""
LOW_HIT_RATE: Final = 0.2
HIGH_HIT_RATE: Final = 0.5
"""Hit rates of exploring from which on two, and three, of seven slots explore."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm of a user, as it is before the feed."""

    wins: float
    """Decayed sum of rewards."""
    losses: float
    """Decayed sum of 1 - reward."""
    shown: int
    """Impressions so far."""
    unexplored: bool
    items: Sequence[int]
    """Eligible items, best first; of many, the first `limit` of the feed are enough."""


@dataclass(frozen=True, slots=True)
class Arms:
    """Several arms as columns. Objects for a hundred arms take longer to make than a feed takes to fill."""

    wins: Floats
    losses: Floats
    shown: Indices
    unexplored: npt.NDArray[np.bool_]
    sizes: Indices
    """How many eligible items each arm has."""
    best: Callable[[int], Sequence[int]]
    """Returns an arm's items as in `Arm.items`, given its place among the arms."""

    @classmethod
    def of(cls, arms: Sequence[Arm]) -> Self:
        """Return arms as columns."""
        return cls(
            wins=np.array([arm.wins for arm in arms], np.float64),
            losses=np.array([arm.losses for arm in arms], np.float64),
            shown=np.array([arm.shown for arm in arms], np.int64),
            unexplored=np.array([arm.unexplored for arm in arms], np.bool_),
            sizes=np.array([len(arm.items) for arm in arms], np.int64),
            best=lambda place: arms[place].items,
        )


@dataclass(frozen=True, slots=True)
class Slot:
    """One filled slot."""

    arm: int
    """Index of the arm among those of the feed."""
    item: int
    explore: bool
    propensity: float
    """Probability over all seeds that the item stands here, given items and flags of the slots before; 12 digits."""


def exploring_budget(reward: float, trials: float) -> int:
    """Return how many of seven slots explore: 1 to 3, more if exploring has paid.

    Args:
        reward: summed rewards of the user's exploring impressions.
        trials: how many of those impressions have a signal.
    """
    hit_rate = (reward + 1) / (trials + 3)
    return 1 + (hit_rate >= LOW_HIT_RATE) + (hit_rate >= HIGH_HIT_RATE)


def fill(arms: Sequence[Arm] | Arms, *, limit: int, seed: int, budget: int) -> list[Slot]:
    """Fill up to `limit` slots; fewer if the arms have fewer items.

    Args:
        arms: in an order that the caller keeps, since it decides between equal draws.
        limit: at least 1.
        seed: of the generator, at least 0.
        budget: exploring slots of a full block of seven (`exploring_budget`).
    """
    slots: list[Slot] = []
    columns = arms if isinstance(arms, Arms) else Arms.of(arms)
    remaining = min(limit, int(columns.sizes.sum()))
    if not remaining:
        return slots
    draws, table = Draws(seed), Table(columns)
    while remaining:
        block = min(BLOCK, remaining)
        remaining -= block
        exploring = table.exploring_slots(block, budget)
        for left in range(block, 0, -1):
            # Selection sampling: every set of `exploring` slots of the block is as likely.
            explore = draws.uniform() * left < exploring
            if explore:
                least_shown = table.least_shown()
                arm = int(least_shown[int(draws.uniform() * len(least_shown))])
            else:
                contenders = table.contenders(exploring)
                arm = int(contenders[draws.greatest(table.a[contenders], table.b[contenders])])
            propensity = table.propensity(arm, exploring, left)
            slots.append(Slot(arm, table.take(arm), explore, propensity))
            exploring -= explore
    return slots


class Draws:
    """Numbers of one seed, one after the other.

    The raw numbers of PCG64 are used, because numpy keeps them the same for ever and its `Generator` methods not.
    """

    __slots__ = ("_raw",)

    def __init__(self, seed: int) -> None:
        self._raw: Final = np.random.PCG64(seed)

    def uniform(self) -> float:
        """Return a number from (0, 1)."""
        return (int(self._raw.random_raw()) >> 11) * 2.0**-53 + 2.0**-54

    def greatest(self, a: Floats, b: Floats) -> int:
        """Return which of the Beta draws is the greatest; the first of equal ones."""
        uniform = (self._raw.random_raw(len(a)) >> 11) * 2.0**-53 + 2.0**-54
        return int(np.argmax(np.round(betaincinv(a, b, uniform), DECIMALS)))


@lru_cache(maxsize=TABLES_KEPT)
def odds_of(a: bytes, b: bytes) -> GreatestOfBetas:
    """Return the chances of arms, given their parameters as the bytes of arrays."""
    return GreatestOfBetas(np.frombuffer(a), np.frombuffer(b))


class Table:
    """The arms while a feed is filled: items that are left, slots that each arm has taken."""

    __slots__ = ("_arms", "_contenders", "_least_shown", "_odds", "_shown", "_sizes", "_taken", "_unexplored", "a", "b")

    def __init__(self, arms: Arms) -> None:
        self._arms: Final = arms
        self._sizes: Final = self._arms.sizes
        self._shown: Final = self._arms.shown
        self._unexplored: Final = self._arms.unexplored
        self._taken: Final = np.zeros_like(self._sizes)
        self.a: Final[Floats] = 1 + self._arms.wins
        """First parameter of each arm's Beta distribution."""
        self.b: Final[Floats] = 1 + self._arms.losses
        """Second parameter."""
        self._odds: Final = odds_of(self.a.tobytes(), self.b.tobytes())
        # Both are asked for twice a slot: for its choice, and for the chance of that.
        self._contenders: tuple[int, Indices] | None = None
        self._least_shown: Indices | None = None

    def exploring_slots(self, block: int, budget: int) -> int:
        """Return how many of a block's next slots explore: none or all of them if only one kind of arm is left."""
        unexplored = self._left_to_explore()
        if unexplored == (self._sizes - self._taken).sum():
            return block
        return min(budget if block == BLOCK else (budget * block + BLOCK // 2) // BLOCK, unexplored)

    def contenders(self, exploring: int) -> Indices:
        """Return the arms that a Thompson slot draws for, with `exploring` slots of the block yet to explore.

        They are the arms that have items. The last unexplored items are kept for the slots that explore.
        """
        if self._contenders is None or self._contenders[0] != exploring:
            eligible = self._taken < self._sizes
            if self._left_to_explore() <= exploring:
                eligible &= ~self._unexplored
            self._contenders = exploring, np.flatnonzero(eligible)
        return self._contenders[1]

    def least_shown(self) -> Indices:
        """Return the unexplored arms with items that were shown least: before this feed, then in it."""
        if self._least_shown is None:
            arms = np.flatnonzero(self._unexplored & (self._taken < self._sizes))
            arms = arms[self._shown[arms] == self._shown[arms].min(initial=EVER)]
            self._least_shown = arms[self._taken[arms] == self._taken[arms].min(initial=EVER)]
        return self._least_shown

    def propensity(self, arm: int, exploring: int, left: int) -> float:
        """Return the chance that `arm` gets the next slot, if `exploring` of the block's last `left` slots explore."""
        chance = 0.0
        if exploring and self._unexplored[arm]:
            least_shown = self.least_shown()
            chance += exploring / left * (arm in least_shown) / max(1, len(least_shown))
        if exploring < left:
            contenders = self.contenders(exploring)
            if arm in contenders:
                chance += (1 - exploring / left) * self._odds.chance(arm, contenders)
        # Twelve digits: a build's rounding of sums stays out of the answer.
        return min(1.0, float(f"{chance:.12g}"))

    def take(self, arm: int) -> int:
        """Take the arm's best item that is left."""
        item = self._arms.best(arm)[int(self._taken[arm])]
        self._taken[arm] += 1
        self._contenders = self._least_shown = None
        return item

    def _left_to_explore(self) -> int:
        """Return how many items the unexplored arms have left."""
        return int((self._sizes - self._taken)[self._unexplored].sum())
