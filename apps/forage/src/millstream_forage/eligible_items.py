"""The items that a user may be shown: no hidden item, no item of a blocked creator, and none of a muted source."""

from __future__ import annotations

from typing import Final

import numpy as np

from millstream_forage.columns import Ints
from millstream_forage.folded_state import NO_ROW, State


class EligibleItems:
    """The items that a user may be shown."""

    def __init__(self, state: State, user: int) -> None:
        """Leave out hidden items, muted sources and blocked creators."""
        items, hidden = state.items, state.hides.of(user).by_target
        self._items: Final = items
        creators = [items.creator_names.code(name) for name in hidden["creator"]]
        rows = [items.by_creator.rows(code) for code in creators if code is not None]
        if hidden["item"]:
            found = items.by_id.first_rows(np.array([int(item) for item in hidden["item"]], np.int64))
            rows.append(found[found != NO_ROW])
        self._hidden: Final = np.unique(np.concatenate(rows)) if rows else np.zeros(0, np.int64)
        self._hidden_arms: Final = items.arms.values[self._hidden]
        self.sizes: Final = items.arm_sizes - np.bincount(self._hidden_arms, minlength=len(items.arm_sizes))
        """How many items of each arm are left."""
        muted = [source in hidden["source"] for _, source in items.arm_names]
        self.sizes[np.array(muted, np.bool_)] = 0

    def rows(self, arm: int) -> Ints:
        """Return an arm's items without the hidden ones. The arm's source isn't muted: `sizes` is 0 for one that is."""
        rows = self._items.by_arm.rows(arm)
        hidden = self._hidden[self._hidden_arms == arm]
        left: Ints = np.setdiff1d(rows, hidden, assume_unique=True) if len(hidden) else rows
        return left
