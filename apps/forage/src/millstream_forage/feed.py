"""A feed: a function of the state, the user, the limit, the seed and the moment.

`eligible_items` excludes hidden items first, so nothing hidden is ranked, counted or drawn. `bandit` then gives each
slot to an arm; an arm's items stand in the order of their similarity to the user's taste, then of their ids. That is
also the order of the labels: in an arm, a `match` is an item of at least the threshold's similarity, and all others
have one label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from millstream_forage.answers import FeedItem
from millstream_forage.bandit import TRIALS_TO_EXPLORE, Arms, Slot, exploring_budget, fill
from millstream_forage.columns import Ints
from millstream_forage.eligible_items import EligibleItems
from millstream_forage.learning import Rewards, user_taste
from millstream_forage.state import Items, State
from millstream_forage.taste import MATCH_THRESHOLD, Taste, label

TASTES_MAX: Final = 4096
"""Users whose centroids are remembered: some ten kilobytes each."""
MULTIPLIED_AT_ONCE: Final = 512
"""Columns of a product of matrices. OpenBLAS multiplies as few on the calling thread; on a busy machine, threads of its own
make it 20 ms instead of 0.05."""
SHOWN: Final = ("id", "title", "url", "creator", "category", "source", "summary", "tags", "reading_time_min")
"""The columns of an item that a feed shows."""
VECTORS_BYTES_MAX: Final = 64 << 20
"""Size of the arms' vectors that a `Feeder` keeps."""
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


class ArmVectors:
    """The vectors of each arm's items, as columns of a matrix.

    To gather them for each feed takes longer than to multiply them, and a product with columns takes a quarter of one with rows.
    """

    def __init__(self, items: Items) -> None:
        self._items: Final = items
        self._kept: Final[dict[int, npt.NDArray[np.float32]]] = {}
        self._size_bytes = 0

    def of(self, arm: int) -> npt.NDArray[np.float32]:
        """Return the vectors of all items of an arm, in the order of `Items.by_arm`, to which items are only added."""
        kept = self._kept.get(arm)
        if kept is None or kept.shape[1] != self._items.arm_sizes[arm]:
            self._size_bytes -= 0 if kept is None else kept.nbytes
            rows = self._items.by_arm.rows(arm)
            kept = np.ascontiguousarray(self._items.embeddings.values.take(rows, axis=0).T)
            if self._size_bytes + kept.nbytes > VECTORS_BYTES_MAX:
                self._kept.clear()
                self._size_bytes = 0
            self._kept[arm] = kept
            self._size_bytes += kept.nbytes
        return kept


class Ranking:
    """The order of each arm's eligible items for one user. An arm is ranked when its first item is asked for."""

    def __init__(
        self,
        items: Items,
        eligible: EligibleItems,
        liked: Taste,
        vectors: ArmVectors,
        arms: Sequence[int],
        limit: int,
    ) -> None:
        """Make it.

        Args:
            eligible: those that the user may be shown.
            liked: the user's taste.
            vectors: the items' vectors by arm.
            arms: the arms' numbers, in the order in which they compete.
            limit: number of the items of an arm that are asked for.
        """
        self._eligible: Final = eligible
        self._arms: Final = arms
        self._best: Final[dict[int, list[int]]] = {}
        self._items: Final = items
        self._taste: Final = liked
        self._vectors: Final = vectors
        self._limit: Final = limit
        self._centroids: Final = liked.confirmed.astype(np.float32)

    def best(self, place: int) -> list[int]:
        """Return the best eligible items of the arm at a place, best first: as many as the limit."""
        found = self._best.get(place)
        if found is None:
            found = self._best[place] = self._ranked(self._arms[place])
        return found

    def _ranked(self, arm: int) -> list[int]:
        rows = self._eligible.rows(arm)
        similarities: npt.NDArray[np.float64] = np.zeros(len(rows))
        if len(self._centroids):
            rows = self._near(rows, arm)
            similarities = self._taste.similarities(self._items.embeddings.values[rows].astype(np.float64))
        order = np.lexsort((self._items.ids.values[rows], -similarities))[: self._limit]
        found: list[int] = rows[order].tolist()
        return found

    def _near(self, rows: Ints, arm: int) -> Ints:
        """Return the rows among which the best are: exact similarities of all would take four times as long."""
        if len(rows) <= 2 * self._limit:
            return rows
        vectors = self._vectors.of(arm)
        count = vectors.shape[1]
        products = np.empty((len(self._centroids), count), np.float32)
        for begin in range(0, count, MULTIPLIED_AT_ONCE):
            part = slice(begin, begin + MULTIPLIED_AT_ONCE)
            np.matmul(self._centroids, vectors[:, part], out=products[:, part])
        rough = products.max(axis=0)
        if len(rows) < count:
            rough = rough[np.searchsorted(self._items.by_arm.rows(arm), rows)]
        least = np.partition(rough, -self._limit)[-self._limit]
        near: Ints = rows[rough >= least - SINGLE_PRECISION]
        return near
