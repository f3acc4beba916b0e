"""A feed: a function of the state, the user, the limit, the seed and the moment.

`eligible_items` excludes hidden items first, so nothing hidden is ranked, counted or drawn. `bandit` then gives each
slot to an arm; an arm's items stand in the order of their similarity to the user's taste, then of their ids. That is
also the order of the labels: in an arm, a `match` is an item of at least the threshold's similarity, and all others
have one label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, overload

import numpy as np
import numpy.typing as npt

from millstream_forage.answers import FeedItem
from millstream_forage.bandit import TRIALS_TO_EXPLORE, Arm, Slot, exploring_budget, fill
from millstream_forage.columns import Ints
from millstream_forage.eligible_items import EligibleItems
from millstream_forage.embedding import Floats
from millstream_forage.state import NO_ROW, Items, State
from millstream_forage.taste import (
    HALF_LIFE_NS,
    MATCH_THRESHOLD,
    POSITIVE_REWARD,
    REMEMBERED,
    Liked,
    Taste,
    label,
    shares,
    target_shares,
    taste,
)

TASTES_MAX: Final = 4096
"""Users whose centroids are remembered: some ten kilobytes each."""
MULTIPLIED_AT_ONCE: Final = 512
"""Rows of a product of matrices. OpenBLAS multiplies as few on the calling thread; on a busy machine, threads of its own
make it 20 ms instead of 0.05."""
SINGLE_PRECISION: Final = 1e-5
"""More than the error of a similarity that was computed from 32-bit numbers."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings of a feed. Its name stands in each impression."""

    embedder: str
    match_threshold: float = MATCH_THRESHOLD

    @property
    def name(self) -> str:
        """The policy with everything that distinguishes it."""
        return f"thompson-1 match={self.match_threshold!r} embedder={self.embedder}"


@dataclass(frozen=True, slots=True)
class FeedRequest:
    """The arguments of a feed."""

    user: int
    limit: int
    seed: int
    now_ns: int


@dataclass(frozen=True, slots=True)
class Filled:
    """A slot of a feed: the item's row, and the answer without an impression."""

    row: int
    item: FeedItem


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything of a feed that doesn't depend on its seed."""

    arms: list[Arm]
    budget: int
    liked: Taste
    category_shares: dict[str, float]
    target_shares: dict[str, float]


class Feeder:
    """Computes feeds. It remembers what several feeds have in common; the answers don't depend on that."""

    def __init__(self, state: State, policy: Policy) -> None:
        """Make it.

        Args:
            state: the fold of the log, which may grow between calls.
            policy: the settings of the feeds.
        """
        self._state: Final = state
        self._policy: Final = policy
        self._prepared: tuple[tuple[int, ...], Prepared] | None = None
        # By user: how many signals the user had, and the time of the newest of them.
        self._tastes: dict[int, tuple[int, int, Taste]] = {}

    def compute(self, request: FeedRequest, *, impressions: int | None = None) -> list[Filled]:
        """Return the slots of a feed; fewer than the limit if fewer items remain.

        Args:
            request: the feed's arguments.
            impressions: how many of the log's impressions were there; None: all. With it a feed that was shown is
                computed again, as long as items and the user's signals and hides are the same.
        """
        prepared = self._prepare(request, impressions)
        slots = fill(prepared.arms, limit=request.limit, seed=request.seed, budget=prepared.budget)
        if not slots:
            return []
        rows = np.array([slot.item for slot in slots], np.int64)
        similarities = prepared.liked.similarities(self._state.items.embeddings.values[rows].astype(np.float64))
        return [
            answer(self._state.items, slot, number, float(similarity), prepared, self._policy)
            for number, (slot, similarity) in enumerate(zip(slots, similarities, strict=True), 1)
        ]

    def _prepare(self, request: FeedRequest, impressions: int | None) -> Prepared:
        state = self._state
        key = (
            *(state.applied, request.user, request.limit, request.now_ns),
            len(state.impressions) if impressions is None else impressions,
        )
        if self._prepared is not None and self._prepared[0] == key:
            return self._prepared[1]
        history = History(state, request.user, request.now_ns, impressions)
        eligible = EligibleItems(state, request.user)
        liked = self._taste(request.user, request.now_ns)
        unexplored = (history.signaled < TRIALS_TO_EXPLORE).tolist()
        shown, wins, losses = history.shown.tolist(), history.wins.tolist(), history.losses.tolist()
        # By their least ids: regions whose items came in another order draw for the arms in the same one.
        ordered = np.argsort(state.items.arm_first_ids, kind="stable")
        arms = [
            Arm(
                wins=wins[arm],
                losses=losses[arm],
                shown=shown[arm],
                unexplored=unexplored[arm],
                items=Ranked(state.items, eligible, liked, arm, request.limit),
            )
            for arm in ordered[eligible.sizes[ordered] > 0].tolist()
        ]
        budget = exploring_budget(history.exploring_reward, history.exploring_trials)
        prepared = Prepared(arms, budget, liked, *history.category_shares(state.items))
        self._prepared = (key, prepared)
        return prepared

    def _taste(self, user: int, now_ns: int) -> Taste:
        rows = self._state.signals.by_user.rows(user)
        known = self._tastes.get(user)
        if known is not None and known[0] == len(rows) and known[1] <= now_ns:
            return known[2]
        liked = user_taste(self._state, rows, now_ns)
        newest_ns = int(self._state.signals.given_ns.values[rows].max(initial=0))
        if newest_ns <= now_ns:  # else the result depends on the moment
            if len(self._tastes) >= TASTES_MAX:
                self._tastes.clear()
            self._tastes[user] = (len(rows), newest_ns, liked)
        return liked


def answer(items: Items, slot: Slot, number: int, similarity: float, prepared: Prepared, policy: Policy) -> Filled:
    """Return a slot as the feed shows it."""
    item = items.rest.row(slot.item)
    share, target = prepared.category_shares[item["category"]], prepared.target_shares[item["category"]]
    named = label(similarity, share, target, threshold=policy.match_threshold)
    shown = FeedItem(
        item_id=item["id"],
        title=item["title"],
        url=item["url"],
        creator=item["creator"],
        category=item["category"],
        source=item["source"],
        summary=item["summary"],
        tags=item["tags"],
        reading_time_min=item["reading_time_min"],
        label=named,
        explore=slot.explore,
        reason=reason(item["category"], item["source"], named, explore=slot.explore),
        slot=number,
        impression_id=None,
        propensity=slot.propensity,
        similarity=similarity,
        threshold=policy.match_threshold,
        category_share=share,
        target_share=target,
    )
    return Filled(slot.item, shown)


def reason(category: str, source: str, named: str, *, explore: bool) -> str:
    """Return a sentence that explains a slot to its reader."""
    if explore:
        return f"You have reacted to little of {category} from {source} so far."
    match named:
        case "match":
            return "It is like items that you liked."
        case "exploring":
            return f"Your feed had less of {category} than it should have."
        case _:
            return f"Your reactions to {category} from {source} brought it here."


class History:
    """A user's impressions and trials in each arm, with what has decayed by a moment."""

    def __init__(self, state: State, user: int, now_ns: int, impressions: int | None) -> None:
        """Sum them up.

        Args:
            state: the fold of the log.
            user: the user's id.
            now_ns: the moment.
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
        given = given[signals.impressions.values[given] == NO_ROW]
        trial_arms = np.concatenate([shown.arms.values[rows], state.items.arms.values[signals.items.values[given]]])
        rewards = np.concatenate([rewards, signals.weights.values[given]])
        times = np.concatenate([shown.shown_ns.values[rows], signals.given_ns.values[given]])
        remaining = np.exp2(-ages_ns(times, now_ns) / HALF_LIFE_NS)
        self.wins: Final = np.bincount(trial_arms, rewards * remaining, minlength=arms)
        """Decayed sum of the rewards of each arm."""
        self.losses: Final = np.bincount(trial_arms, (1 - rewards) * remaining, minlength=arms)
        """Decayed sum of 1 - reward of each arm."""

    def category_shares(self, items: Items) -> tuple[dict[str, float], dict[str, float]]:
        """Return the part of the user's impressions that each category had, and that it should have had."""
        counts: dict[str, float] = {}
        rewards: dict[str, float] = {}
        for (category, _), shown, wins in zip(items.arm_names, self.shown.tolist(), self.wins.tolist(), strict=True):
            counts[category] = counts.get(category, 0) + shown
            rewards[category] = rewards.get(category, 0) + wins
        return shares(counts, list(counts)), target_shares(rewards, list(counts))


class Ranked(Sequence[int]):
    """An arm's eligible items, best first. They are ranked when the first is asked for, and no more than the limit."""

    __slots__ = ("_arm", "_best", "_eligible", "_items", "_length", "_limit", "_taste")

    def __init__(self, items: Items, eligible: EligibleItems, liked: Taste, arm: int, limit: int) -> None:
        self._items: Final = items
        self._eligible: Final = eligible
        self._taste: Final = liked
        self._arm: Final = arm
        self._limit: Final = limit
        self._length: Final = int(eligible.sizes[arm])
        self._best: list[int] | None = None

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if self._best is None:
            self._best = self._ranked()
        return self._best[index]

    def _ranked(self) -> list[int]:
        rows = self._eligible.rows(self._arm)
        similarities: npt.NDArray[np.float64] = np.zeros(len(rows))
        confirmed = self._taste.confirmed
        if len(confirmed):
            rows = self._near(rows, confirmed)
            similarities = self._taste.similarities(self._items.embeddings.values[rows].astype(np.float64))
        order = np.lexsort((self._items.ids.values[rows], -similarities))[: self._limit]
        return [int(row) for row in rows[order]]

    def _near(self, rows: Ints, confirmed: Floats) -> Ints:
        """Return the rows among which the best are: exact similarities of all would take four times as long."""
        if len(rows) <= 2 * self._limit:
            return rows
        vectors, centroids = self._items.embeddings.values, confirmed.astype(np.float32)
        parts = [rows[begin : begin + MULTIPLIED_AT_ONCE] for begin in range(0, len(rows), MULTIPLIED_AT_ONCE)]
        rough = np.concatenate([(centroids @ vectors.take(part, axis=0).T).max(axis=0) for part in parts])
        least = np.partition(rough, -self._limit)[-self._limit]
        near: Ints = rows[rough >= least - SINGLE_PRECISION]
        return near


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


def ages_ns(times_ns: Ints, now_ns: int | Ints) -> Ints:
    """Return how long before a moment each time was; 0 for a time after it."""
    ages: Ints = np.maximum(now_ns - times_ns, 0)
    return ages
