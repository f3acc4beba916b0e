"""A user's taste: centroids of positive signals, and the label that each item gets from them.

Everything is recomputed from the signals, not updated by each: the same signals give the same centroids, whatever the
order in which they reached this region. All weights decay by one half-life, so that directions don't change with time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, TypeAlias

import numpy as np

from millstream_forage.clock import DAY_NS
from millstream_forage.embedding import DECIMALS, DIMENSIONS, Floats, cosines, length_of, row_lengths

Label: TypeAlias = Literal["match", "exploring", "none"]

CENTROIDS_MAX: Final = 8
POSITIVE_REWARD: Final = 0.3
"""Least reward of a positive signal: a view's."""
CONFIRMING_SIGNALS: Final = 2
MATCH_THRESHOLD: Final = 0.35
MERGE_COSINE: Final = MATCH_THRESHOLD
"""Clusters this near are one taste: each would match the other."""
REMEMBERED: Final = 64
"""Items that make a user's centroids: those with the greatest decayed weight. It bounds the work of one feed."""
HALF_LIFE_NS: Final = 30 * DAY_NS


@dataclass(frozen=True, slots=True)
class Liked:
    """An item that a user gave positive signals."""

    item: int
    signals: int
    """How many positive signals it got."""
    weight: float
    """Sum of their rewards, decayed to the moment `at_ns`; above 0."""
    at_ns: int
    """Nanoseconds since 1970."""


@dataclass(frozen=True)
class Taste:
    """A user's centroids."""

    centroids: Floats
    """Unit vectors, as rows: at most `CENTROIDS_MAX`, the heaviest first."""
    signals: tuple[int, ...]
    """Positive signals of each centroid."""

    @cached_property
    def confirmed(self) -> Floats:
        """The centroids that at least two positive signals confirm."""
        return self.centroids[[count >= CONFIRMING_SIGNALS for count in self.signals]]

    def similarities(self, vectors: Floats) -> Floats:
        """Return each unit vector's greatest cosine with a confirmed centroid, to nine digits; 0 if there is none."""
        confirmed = self.confirmed
        if not len(confirmed):
            return np.zeros(len(vectors))
        greatest: Floats = cosines(vectors, confirmed).max(axis=1)
        return greatest


def taste(liked: Iterable[Liked], vectors: Mapping[int, Floats]) -> Taste:
    """Return the centroids of what a user liked.

    The nearest two clusters merge while they are near, or too many. A cluster whose items have drifted apart falls
    into two, because the next call starts from the items again.

    Args:
        liked: one entry an item, in any order.
        vectors: the unit vector of each of those items.
    """
    heaviest = sorted(liked, key=lambda entry: (-logarithmic_weight(entry), entry.item))[:REMEMBERED]
    if not heaviest:
        return Taste(np.empty((0, DIMENSIONS)), ())
    newest = max(logarithmic_weight(entry) for entry in heaviest)
    weights = [2.0 ** (logarithmic_weight(entry) - newest) for entry in heaviest]
    sums = np.array([vectors[entry.item] * weight for entry, weight in zip(heaviest, weights, strict=True)])
    signals = [entry.signals for entry in heaviest]
    clusters = len(sums)
    units = directions(sums)
    near = cosines(units, units)
    others = np.ones(len(sums), np.bool_)  # the clusters that are left, except the one that grows
    np.fill_diagonal(near, -np.inf)
    while clusters > 1:
        kept, gone = sorted(divmod(int(near.argmax()), len(near)))
        if near[kept, gone] < MERGE_COSINE and clusters <= CENTROIDS_MAX:
            break
        grown = sums[kept]
        grown += sums[gone]
        signals[kept] += signals[gone]
        weights[kept] += weights[gone]
        weights[gone] = 0
        clusters -= 1
        units[kept] = grown / (length_of(grown) or 1)
        near[gone, :] = near[:, gone] = -np.inf
        others[gone] = others[kept] = False
        alive = np.flatnonzero(others)
        others[kept] = True
        near[kept, alive] = near[alive, kept] = cosines(units[kept : kept + 1], units[alive])[0]
    order = sorted(
        (index for index, weight in enumerate(weights) if weight), key=lambda index: (-weights[index], index)
    )
    return Taste(units[order], tuple(signals[index] for index in order))


def logarithmic_weight(entry: Liked) -> float:
    """Return the binary logarithm of a weight, decayed to 1970: comparable over all times without underflow."""
    return math.log2(entry.weight) + entry.at_ns / HALF_LIFE_NS


def directions(sums: Floats) -> Floats:
    """Return each row at length 1; a row of zeros, of items that cancel out, stays zero and is near nothing."""
    lengths = row_lengths(sums)
    units: Floats = sums / np.where(lengths > 0, lengths, 1)[:, None]
    return units


def shares(counts: Mapping[str, float], categories: Sequence[str], *, prior: float = 0.0) -> dict[str, float]:
    """Return each category's part of the counts, to nine digits, after `prior` is added to each; 0 of nothing."""
    total = sum(counts.get(category, 0) for category in categories) + prior * len(categories)
    return {
        category: round((counts.get(category, 0) + prior) / total, DECIMALS) if total else 0.0
        for category in categories
    }


def target_shares(rewards: Mapping[str, float], categories: Sequence[str]) -> dict[str, float]:
    """Return the part of a user's impressions that each category should have: equal at first, then after rewards.

    Args:
        rewards: the user's decayed sum of rewards in each category.
        categories: those that have items.
    """
    return shares(rewards, categories, prior=1.0)


def label(
    similarity: float, category_share: float, target_share: float, *, threshold: float = MATCH_THRESHOLD
) -> Label:
    """Return an item's label: near to a confirmed centroid, of a category shown too little, or neither."""
    if similarity >= threshold:
        return "match"
    return "exploring" if category_share < target_share else "none"
