"""Learn from a user's signals: the rewards of each arm, from which the bandit draws, and the user's taste.

Both decay by one half-life, since people change.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from millstream_forage.columns import Ints, ages_ns
from millstream_forage.embedding import Floats
from millstream_forage.folded_state import NO_ROW, Items, State
from millstream_forage.taste import (
    HALF_LIFE_NS,
    POSITIVE_REWARD,
    REMEMBERED,
    Liked,
    Taste,
    shares,
    target_shares,
    taste,
)


class Rewards:
    """A user's impressions and trials in each arm, with what has decayed by a moment."""

    def __init__(self, state: State, user: int, now_ns: int, impressions: int | None) -> None:
        """Sum them up.

        Args:
            impressions: as `compute`.
        """
        shown, signals = state.impressions, state.signals
        arms = len(state.items.arm_names)
        rows = shown.by_user.rows(user)
        if impressions is not None:
            rows = rows[: np.searchsorted(rows, impressions)]
        self.shown: Final = np.bincount(shown.arms.values[rows], minlength=arms)
        """Impressions of each arm."""
        rows = rows[shown.kinds.values[rows] != 0]
        self.signaled: Final = np.bincount(shown.arms.values[rows], minlength=arms)
        """Impressions of each arm that have a signal."""
        rewards = shown.rewards.values[rows]
        exploring = shown.explore.values[rows]
        self.exploring_reward: Final = float(rewards[exploring].sum())
        self.exploring_trials: Final = float(exploring.sum())
        given = signals.by_user.rows(user)
        given = given[signals.counts.values[given] & (signals.impressions.values[given] == NO_ROW)]
        trial_arms = np.concatenate([shown.arms.values[rows], state.items.arms.values[signals.items.values[given]]])
        rewards = np.concatenate([rewards, signals.weights.values[given]])
        times = np.concatenate([shown.shown_ns.values[rows], signals.given_ns.values[given]])
        remaining = np.exp2(-ages_ns(times, now_ns) / HALF_LIFE_NS)
        self.wins: Final[Floats] = np.bincount(trial_arms, rewards * remaining, minlength=arms).astype(np.float64)
        """Decayed sum of the rewards of each arm."""
        self.losses: Final[Floats] = np.bincount(trial_arms, (1 - rewards) * remaining, minlength=arms).astype(
            np.float64
        )
        """Decayed sum of 1 - reward of each arm."""

    def category_shares(self, items: Items) -> tuple[dict[str, float], dict[str, float]]:
        """Return the part of the user's impressions that each category had, and that it should have had."""
        names, codes = items.categories.names, items.arm_categories.values
        counts = np.bincount(codes, self.shown, minlength=len(names)).tolist()
        rewards = np.bincount(codes, self.wins, minlength=len(names)).tolist()
        of_counts, of_rewards = dict(zip(names, counts, strict=True)), dict(zip(names, rewards, strict=True))
        return shares(of_counts, names), target_shares(of_rewards, names)


def user_taste(state: State, rows: Ints, now_ns: int) -> Taste:
    """Return the centroids of the positive ones among a user's signals, as of a moment.

    Decay keeps the proportions of weights, so later moments have the same centroids.
    """
    signals, items = state.signals, state.items
    rows = rows[signals.counts.values[rows] & (signals.weights.values[rows] >= POSITIVE_REWARD)]
    liked, entries = np.unique(signals.items.values[rows], return_inverse=True)
    times = np.minimum(signals.given_ns.values[rows], now_ns)
    newest = np.full(len(liked), np.iinfo(np.int64).min)
    np.maximum.at(newest, entries, times)
    remaining = np.exp2(-ages_ns(times, newest[entries]) / HALF_LIFE_NS)
    weights = np.bincount(entries, signals.weights.values[rows] * remaining, minlength=len(liked))
    counts = np.bincount(entries, minlength=len(liked))
    ids = items.ids.values[liked]
    # `taste` remembers no more than the heaviest: of a long history, the others aren't worth an object each.
    heaviest = np.lexsort((ids, -(np.log2(weights) + newest / HALF_LIFE_NS)))[:REMEMBERED]
    vectors = {int(ids[at]): items.embeddings.values[liked[at]].astype(np.float64) for at in heaviest}
    entries_of = [Liked(int(ids[at]), int(counts[at]), float(weights[at]), int(newest[at])) for at in heaviest]
    return taste(entries_of, vectors)
