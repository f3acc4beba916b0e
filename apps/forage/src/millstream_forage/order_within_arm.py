"""The order of an arm's items for a user: by their similarity to the user's taste, then by their ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from millstream_forage.columns import Ints
from millstream_forage.eligible_items import EligibleItems
from millstream_forage.folded_state import Items
from millstream_forage.taste import Taste

MULTIPLIED_AT_ONCE: Final = 512
"""Columns of a product of matrices. OpenBLAS multiplies as few on the calling thread; on a busy machine, threads of its own
make it 20 ms instead of 0.05."""
VECTORS_BYTES_MAX: Final = 64 << 20
"""Size of the arms' vectors that a `Feeder` keeps."""
SINGLE_PRECISION: Final = 1e-5
"""More than the error of a similarity that was computed from 32-bit numbers."""


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
