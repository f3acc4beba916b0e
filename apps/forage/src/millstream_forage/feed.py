"""A feed: a function of the state, the user, the limit, the seed and the moment.

`eligible_items` excludes hidden items first, so nothing hidden is ranked, counted or drawn. `bandit` then gives each
slot to an arm; `order_within_arm` puts an arm's items in the order of their similarity to the user's taste, then of their ids.
That is also the order of the labels: in an arm, a `match` is an item of at least the threshold's similarity, and all
others have one label.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from millstream_forage.answers import FeedItem
from millstream_forage.bandit import TRIALS_TO_EXPLORE, Arms, Slot, exploring_budget, fill
from millstream_forage.eligible_items import EligibleItems
from millstream_forage.folded_state import Items, State
from millstream_forage.learning import Rewards, user_taste
from millstream_forage.order_within_arm import ArmVectors, Ranking
from millstream_forage.taste import MATCH_THRESHOLD, Taste, label

TASTES_MAX: Final = 4096
"""Users whose centroids are remembered: some ten kilobytes each."""
SHOWN: Final = ("id", "title", "url", "creator", "category", "source", "summary", "tags", "reading_time_min")
"""The columns of an item that a feed shows."""


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

    arms: Arms
    budget: int
    liked: Taste
    category_shares: dict[str, float]
    target_shares: dict[str, float]


class Feeder:
    """Computes feeds. It remembers what several feeds have in common; the answers don't depend on that."""

    def __init__(self, state: State, policy: Policy) -> None:
        self._state: Final = state
        self._policy: Final = policy
        self._prepared: tuple[tuple[int, ...], Prepared] | None = None
        self._vectors: Final = ArmVectors(state.items)
        # By user: how many signals the user had, and the time of the newest of them.
        self._tastes: dict[int, tuple[int, int, Taste]] = {}

    def compute(self, request: FeedRequest, *, impressions: int | None = None) -> list[Filled]:
        """Return the slots of a feed; fewer than the limit if fewer items remain.

        Args:
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
        rewards = Rewards(state, request.user, request.now_ns, impressions)
        liked = self._taste(request.user, request.now_ns)
        eligible = EligibleItems(state, request.user)
        # By their least ids: regions whose items came in another order draw for the arms in the same one.
        ordered = np.argsort(state.items.arm_first_ids, kind="stable")
        numbers = ordered[eligible.sizes[ordered] > 0]
        arms = Arms(
            wins=rewards.wins[numbers],
            losses=rewards.losses[numbers],
            shown=rewards.shown[numbers],
            unexplored=rewards.signaled[numbers] < TRIALS_TO_EXPLORE,
            sizes=eligible.sizes[numbers],
            best=Ranking(state.items, eligible, liked, self._vectors, numbers.tolist(), request.limit).best,
        )
        budget = exploring_budget(rewards.exploring_reward, rewards.exploring_trials)
        prepared = Prepared(arms, budget, liked, *rewards.category_shares(state.items))
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
    item = items.rest.row(slot.item, SHOWN)
    category, source = item["category"], item["source"]
    share, target = prepared.category_shares[category], prepared.target_shares[category]
    named = label(similarity, share, target, threshold=policy.match_threshold)
    shown = FeedItem(
        item_id=item.pop("id"),
        **item,
        label=named,
        explore=slot.explore,
        reason=reason(category, source, named, explore=slot.explore),
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
